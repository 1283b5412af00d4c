"""What the scheduler asks of the device side in one step, and what comes back.

A plan is plain host data: it can be logged, replayed, simulated, or carried out by a fake runner.  There is no prefill
or decode phase: a chunk is the next tokens of a request whose KV is not computed yet.
"""

import dataclasses
from typing import Protocol

from glmjax.types import SamplingParams


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one request to compute in this step.

    Attributes:
      request_id: unique per running sequence (``n`` completions are ``n`` sequences).
      token_ids: the tokens at positions ``start .. start + len(token_ids) - 1``.
      start: position of the first token; the KV of everything before it is in the pool.
      blocks: physical block ids that hold positions 0 .. end, in order; position p lies in
        ``blocks[p // block_size]`` at offset ``p % block_size``.
      samples: the last token is the last known one, so this chunk yields the next token(s).
      sampling: how to choose.
      seed: 64-bit seed of the sequence; noise depends on it and on the position only.
      banned_ids: tokens that may not be chosen in this step (end and stop tokens before ``min_tokens``).
      rank: data-parallel rank, whose pool the blocks are in.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    seed: int = 0
    banned_ids: tuple[int, ...] = ()
    rank: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step: chunks of distinct requests, at most ``max_num_batched_tokens`` tokens for each rank."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """New tokens of one request, in order; several when drafts were accepted.

    Attributes:
      token_ids: at least one token.
      logprobs: per token, the chosen token's log-probability, its rank (1 is best) and the likeliest
        (id, logprob) pairs, as many as were asked for; empty unless the request asked for logprobs.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple["TokenLogprobs", ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Runner(Protocol):
    """Carries out plans.  `serving/runner.py` does it with compiled programs, tests with a fake."""

    def run(self, plan: Plan) -> dict[str, Sampled]:
        """Compute every chunk, write its KV to its blocks, and sample where a chunk says so."""
        ...

    def stats(self) -> dict[str, int]: ...

    def close(self) -> None: ...
