"""Carries out plans with compiled programs.  Owns the KV pools on the devices; knows no layer and no kernel.

Requests that decode run together as a column of rows, and with them chunks of one token; each longer chunk is a
rectangle of its own.  Data-parallel ranks run their rectangles side by side, in the shape that the largest of them
needs.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from glmjax.programs import Programs
from glmjax.serving.plan import Chunk, Plan, Sampled, TokenLogprobs
from glmjax.step_io import MAX_BANNED, StepInputs, StepOutputs

Started = list[tuple[tuple[Sequence[Chunk], ...], int, Any]]  # the ranks' chunks, rows of a rank, packed outputs


class ProgramRunner:
    """Implements ``plan.Runner``."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._cache = programs.make_cache()
        self._state = programs.make_state()
        self._rows = max(s.requests for s in programs.shapes if s.decode)
        self._steps = 0

    def start(self, plan: Plan) -> Started:
        """Dispatches every rectangle; the device has an order for them, and the host waits for none."""
        ranks = range(self._programs.layout.dp)
        started: Started = []
        for batches in rectangles([[c for c in plan.chunks if c.rank == rank] for rank in ranks], self._rows):
            longest = max(len(c.token_ids) for batch in batches for c in batch)
            most_blocks = max(len(c.blocks) for batch in batches for c in batch)
            shape = self._programs.smallest(max(map(len, batches)), longest, most_blocks, decode=longest <= 1)
            inputs = [StepInputs.empty(shape, self._programs.table_width) for _ in ranks]
            for rank, batch in enumerate(batches):
                for row, chunk in enumerate(batch):
                    fill_row(inputs[rank], row, chunk)
            self._cache, self._state, out = self._programs.run(shape, self._cache, self._state, inputs)
            out.copy_to_host_async()
            started.append((batches, shape.requests, out))
            self._steps += 1
        return started

    def finish(self, started: Started) -> dict[str, Sampled]:
        sampled: dict[str, Sampled] = {}
        for batches, rows, out in started:
            host = self._programs.outputs(out)
            for rank, batch in enumerate(batches):
                places = enumerate(batch, rank * rows)
                sampled |= {c.request_id: read_row(host, row, c) for row, c in places if c.samples}
        return sampled

    def stats(self) -> dict[str, int]:
        """``compilations``: programs compiled, all before serving; ``program_runs``: rectangles run."""
        return {"compilations": self._programs.compilations, "program_runs": self._steps}

    def close(self) -> None:
        """Frees the pool."""
        del self._cache, self._state


def rectangles(chunks: Sequence[Sequence[Chunk]], rows: int) -> Iterator[tuple[Sequence[Chunk], ...]]:
    """What runs together: for each rank's chunks, a column of up to ``rows`` that decode or have one token, or one
    longer chunk.

    All columns come first.  The longer ones go from the longest, so that those that run side by side are alike.
    """
    columns = (itertools.batched((c for c in own if len(c.token_ids) <= 1), rows) for own in chunks)
    yield from itertools.zip_longest(*columns, fillvalue=())
    longer = (sorted((c for c in own if len(c.token_ids) > 1), key=lambda c: -len(c.token_ids)) for own in chunks)
    yield from itertools.zip_longest(*(((c,) for c in own) for own in longer), fillvalue=())


def fill_row(inputs: StepInputs, row: int, chunk: Chunk) -> None:
    """Writes one chunk into row ``row`` of a step's inputs."""
    how = chunk.sampling
    inputs.tokens[row, : len(chunk.token_ids)] = chunk.token_ids
    inputs.block_tables[row, : len(chunk.blocks)] = chunk.blocks
    if len(chunk.banned_ids) > MAX_BANNED:
        raise ValueError(f"{chunk.request_id} bans {len(chunk.banned_ids)} tokens, at most {MAX_BANNED} are possible")
    inputs.banned[row, : len(chunk.banned_ids)] = chunk.banned_ids
    inputs.ban_end[row] = chunk.ban_end
    inputs.start[row], inputs.length[row] = chunk.start, len(chunk.token_ids)
    inputs.continues[row], inputs.limit[row] = not chunk.token_ids, chunk.limit
    inputs.next_token[row] = -1 if chunk.next_token is None else chunk.next_token
    inputs.slot[row] = chunk.slot if chunk.samples else -1
    inputs.top_k[row] = max(how.top_k, 0)
    inputs.wants_logprobs[row] = how.logprobs is not None
    seed = chunk.seed % (1 << 64)
    inputs.seed[row] = seed & 0xFFFFFFFF, seed >> 32
    inputs.temperature[row] = 0 if how.greedy else max(how.temperature, 0.01)
    inputs.top_p[row], inputs.min_p[row] = how.top_p, how.min_p


def read_row(out: StepOutputs, row: int, chunk: Chunk) -> Sampled:
    """What row ``row`` of a step's outputs says about its chunk."""
    # A row whose request had come to its end already has no token; nobody waits for it.
    count = max(1, int(out.count[row]))
    tokens = tuple(out.token[row, :count].tolist())
    wanted, drafted = chunk.sampling.logprobs, int(out.drafted[row])
    if wanted is None:
        return Sampled(tokens, num_drafts=drafted)
    entries = []
    for place in range(count):
        ids, values = out.top_ids[row, place, :wanted].tolist(), out.top_logprobs[row, place, :wanted].tolist()
        top = tuple(zip(ids, values, strict=True))
        entries.append(TokenLogprobs(float(out.logprob[row, place]), int(out.rank[row, place]), top))
    return Sampled(tokens, tuple(entries), drafted)
