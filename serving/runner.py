"""Carries out plans with compiled programs.  Owns the KV pool on the device; knows no layer and no kernel.

A plan's one-token chunks run together as a column of rows, each longer chunk as a rectangle of its own.
"""

from collections.abc import Sequence

import numpy as np

from glmjax.programs import MAX_BANNED, Programs, StepInputs, StepOutputs
from glmjax.serving.plan import Chunk, Plan, Sampled, TokenLogprobs


class ProgramRunner:
    """Implements ``plan.Runner``."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._cache = programs.make_cache()
        self._rows = max(s.requests for s in programs.shapes if s.tokens == 1)
        self._steps = 0

    def run(self, plan: Plan) -> dict[str, Sampled]:
        singles = [c for c in plan.chunks if len(c.token_ids) == 1]
        batches: list[Sequence[Chunk]] = [singles[i : i + self._rows] for i in range(0, len(singles), self._rows)]
        batches += [[c] for c in plan.chunks if len(c.token_ids) > 1]
        # Dispatch all, then read: the host never waits for one rectangle before sending the next.
        pending = []
        for chunks in batches:
            shape = self._programs.smallest(len(chunks), max(len(c.token_ids) for c in chunks))
            inputs = StepInputs.empty(shape, self._programs.table_width)
            for row, chunk in enumerate(chunks):
                fill_row(inputs, row, chunk)
            self._cache, out = self._programs.run(shape, self._cache, [inputs])
            out.copy_to_host_async()
            pending.append((chunks, out))
            self._steps += 1
        sampled: dict[str, Sampled] = {}
        for chunks, out in pending:
            host = StepOutputs.unpack(np.asarray(out))
            sampled |= {c.request_id: read_row(host, row, c) for row, c in enumerate(chunks) if c.samples}
        return sampled

    def stats(self) -> dict[str, int]:
        """``compilations``: programs compiled, all before serving; ``program_runs``: rectangles run."""
        return {"compilations": self._programs.compilations, "program_runs": self._steps}

    def close(self) -> None:
        """Frees the pool."""
        del self._cache


def fill_row(inputs: StepInputs, row: int, chunk: Chunk) -> None:
    """Writes one chunk into row ``row`` of a step's inputs."""
    how = chunk.sampling
    inputs.tokens[row, : len(chunk.token_ids)] = chunk.token_ids
    inputs.block_tables[row, : len(chunk.blocks)] = chunk.blocks
    if len(chunk.banned_ids) > MAX_BANNED:
        raise ValueError(f"{chunk.request_id} bans {len(chunk.banned_ids)} tokens, at most {MAX_BANNED} are possible")
    inputs.banned[row, : len(chunk.banned_ids)] = chunk.banned_ids
    inputs.start[row], inputs.length[row] = chunk.start, len(chunk.token_ids)
    inputs.top_k[row] = max(how.top_k, 0)
    inputs.wants_logprobs[row] = how.logprobs is not None
    seed = chunk.seed % (1 << 64)
    inputs.seed[row] = seed & 0xFFFFFFFF, seed >> 32
    inputs.temperature[row] = 0 if how.greedy else max(how.temperature, 0.01)
    inputs.top_p[row], inputs.min_p[row] = how.top_p, how.min_p


def read_row(out: StepOutputs, row: int, chunk: Chunk) -> Sampled:
    """What row ``row`` of a step's outputs says about its chunk."""
    token = (int(out.token[row]),)
    wanted = chunk.sampling.logprobs
    if wanted is None:
        return Sampled(token)
    ids, values = out.top_ids[row, :wanted].tolist(), out.top_logprobs[row, :wanted].tolist()
    top = tuple(zip(ids, values, strict=True))
    return Sampled(token, (TokenLogprobs(float(out.logprob[row]), int(out.rank[row]), top),))
