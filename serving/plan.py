"""What the scheduler asks of the device side in one step, and what comes back.

A plan is plain host data: it can be logged, replayed, simulated, or carried out by a fake runner.  There is no prefill
or decode phase: a chunk is the next tokens of a request whose KV is not computed yet.

A plan may be started before the one before it is finished.  Once a request has sampled, the device knows its last token
and drafts of the following ones; its chunks then name no tokens, and the host knows bounds of where they start.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from glmjax.types import SamplingParams


@dataclasses.dataclass(frozen=True)
class Move:
    """A block's rows are copied between its place in the host's pool and a page of the device's."""

    block: int
    page: int
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Handover:
    """Blocks of a request are copied to the stage, for another engine, or from it.

    Attributes:
      blocks: of the pool; stage: of the stage, one for each.
    """

    request_id: str
    blocks: tuple[int, ...]
    stage: tuple[int, ...]
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one request to compute in this step.

    Attributes:
      request_id: unique per running sequence (``n`` completions are ``n`` sequences).
      token_ids: the tokens at positions ``start .. start + len(token_ids) - 1``; none if the request goes on from
        the device's state: then its last token and the drafts that the device has.
      start: position of the first token, or a position that it is not before; the KV of everything before it is in the
        pool, or will be when the steps in flight are done.
      blocks: physical block ids that hold positions 0 .. end, in order; position p lies in
        ``blocks[p // block_size]`` at offset ``p % block_size``.
      samples: the last token is the last known one, so this chunk yields the next token(s).
      sampling: how to choose.
      most: tokens that a chunk without token_ids computes at most.
      limit: nothing is computed from this position on.
      next_token: the token after a chunk that does not sample.
      slot: the request's place in the device's state, free again when another request is given it.
      admission: which of the scheduler's admissions the slot and the blocks come from.
      seed: 64-bit seed of the sequence; noise depends on it and on the position only.
      banned_ids: tokens that may not be chosen for positions before ``ban_end`` (end and stop tokens until
        ``min_tokens`` are out).
      rank: data-parallel rank, whose pool the blocks are in.
      staged: some of its blocks have no page, and it has more than one token: rows are copied together for it.
      region: pages of the hot region through which a chunk that decodes reads rows of blocks without a page.
      lease: number of the region's lease; 0: it has none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    most: int = 0
    limit: int = 1 << 30
    next_token: int | None = None
    slot: int = 0
    admission: int = 0
    seed: int = 0
    banned_ids: tuple[int, ...] = ()
    ban_end: int = 0
    rank: int = 0
    staged: bool = False
    region: tuple[int, ...] = ()
    lease: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, at most."""
        return len(self.token_ids) or self.most

    @property
    def end(self) -> int:
        """After the last of ``token_ids``."""
        return self.start + len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step: chunks of distinct requests, at most ``max_num_batched_tokens`` tokens for each rank.

    Attributes:
      page_of: with KV offload, for each rank the page of every block and of the spare one: [blocks + 1] int32, -1 for
        none.
      loads: blocks that are copied into pages before the chunks run.
      write_backs: pages that are copied to the host after.
      sends: computed blocks that are copied to the stage before the chunks run: they may have other owners by then.
      receives: blocks that are copied from the stage before the chunks run.
    """

    chunks: tuple[Chunk, ...]
    page_of: tuple[np.ndarray, ...] = ()
    loads: tuple[Move, ...] = ()
    write_backs: tuple[Move, ...] = ()
    sends: tuple[Handover, ...] = ()
    receives: tuple[Handover, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.chunks or self.loads or self.write_backs or self.sends or self.receives)

    @property
    def num_tokens(self) -> int:
        return sum(c.num_tokens for c in self.chunks)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """New tokens of one request, in order; several when drafts were accepted.

    Attributes:
      token_ids: at least one token.
      logprobs: per token, the chosen token's log-probability, its rank (1 is best) and the likeliest
        (id, logprob) pairs, as many as were asked for; empty unless the request asked for logprobs.
      num_drafts: drafts that were verified; all tokens but the last are accepted ones.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple["TokenLogprobs", ...] = ()
    num_drafts: int = 0


@dataclasses.dataclass(frozen=True)
class Results:
    """What came of a plan.

    Attributes:
      sampled: new tokens by request id.
      failed: write-backs of the plan whose copy is not there; failed_loads: loads likewise.
      errors: by request id, why a chunk's result cannot be trusted.
    """

    sampled: Mapping[str, Sampled]
    failed: tuple[Move, ...] = ()
    failed_loads: tuple[Move, ...] = ()
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Runner(Protocol):
    """Carries out plans, one after another.  `serving/runner.py` does it with compiled programs, tests with a fake."""

    def start(self, plan: Plan) -> Any:
        """Send a plan to the device: compute every chunk, write its KV to its blocks, sample where a chunk says so.

        Returns what ``finish`` takes, without waiting for it.
        """
        ...

    def finish(self, started: Any) -> Results:
        """Wait for a plan, in the order in which they were started."""
        ...

    def stats(self) -> dict[str, int]: ...

    def close(self) -> None: ...
