"""Carries out plans with compiled programs.  Owns the KV pools on the devices; knows no layer and no kernel.

Requests that decode run together as a column of rows, and with them chunks of one token; each longer chunk is a
rectangle of its own.  Data-parallel ranks run their rectangles side by side, in the shape that the largest of them
needs.
"""

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from glmjax.programs import Programs
from glmjax.serving.exchange import Exchange
from glmjax.serving.plan import Chunk, Move, Plan, Results, Sampled, TokenLogprobs
from glmjax.step_io import MAX_BANNED, StepInputs, StepOutputs

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Started:
    """A plan on its way.

    Attributes:
      rectangles: for each, the ranks' chunks, rows of a rank, packed outputs.
      copied: write-backs, and an array that is there once they are.
      leaving: blocks on their way to the stage, as the exchange knows them.
      read: arrays that are there once blocks of the stage have been read, which may then be written to again.
    """

    rectangles: Sequence[tuple[tuple[Sequence[Chunk], ...], int, Any]]
    copied: Sequence[tuple[Sequence[Move], Any]] = ()
    leaving: Sequence[Any] = ()
    read: Sequence[Any] = ()


class ProgramRunner:
    """Implements ``plan.Runner``."""

    def __init__(self, programs: Programs, exchange: Exchange | None = None):
        self._programs, self._exchange = programs, exchange
        self._cache = programs.make_cache()
        self._state = programs.make_state()
        self._host = programs.make_host() if programs.offload is not None else None
        self._host_row_bytes = None if self._host is None else self._host.shape[2]
        self._rows = max(s.requests for s in programs.shapes if s.decode)
        self._steps = 0
        self._brought = np.zeros(3, np.int64)  # hits, misses, rows copied to the device for them
        self._loaded = 0  # rows copied to the device in whole pages

    def start(self, plan: Plan) -> Started:
        """Dispatches every rectangle; the device has an order for them, and the host waits for none."""
        ranks = range(self._programs.layout.dp)
        started = []
        leaving: Sequence[Any] = ()
        read: Sequence[Any] = ()
        if plan.sends or plan.receives:
            assert self._exchange is not None
            leaving = self._exchange.send(self._cache, plan.sends)
            self._cache, self._host, read = self._exchange.receive(self._cache, self._host, plan.receives)
        self._load(plan.loads)
        for batches in rectangles([[c for c in plan.chunks if c.rank == rank] for rank in ranks], self._rows):
            chunks = [c for batch in batches for c in batch]
            longest, most_blocks = max(len(c.token_ids) for c in chunks), max(len(c.blocks) for c in chunks)
            staged = any(c.staged for c in chunks)
            shape = self._programs.smallest(
                max(map(len, batches)), longest, most_blocks, decode=longest <= 1, staged=staged
            )
            inputs = [self._programs.empty_inputs(shape) for _ in ranks]
            for rank, batch in enumerate(batches):
                for row, chunk in enumerate(batch):
                    fill_row(inputs[rank], row, chunk)
            self._cache, self._state, out = self._programs.run(
                shape, self._cache, self._state, inputs, self._host, plan.page_of
            )
            out.copy_to_host_async()
            started.append((batches, shape.requests, out))
            self._steps += 1
            if staged:
                self._loaded += sum(self._rows_away(c, plan.page_of[c.rank]) for c in chunks)
        return Started(started, self._write_back(plan.write_backs), leaving, read)

    def finish(self, started: Started) -> Results:
        sampled: dict[str, Sampled] = {}
        for batches, rows, out in started.rectangles:
            host = self._programs.outputs(out)
            if host.brought.size:
                self._brought += host.brought.sum(axis=0)
            for rank, batch in enumerate(batches):
                places = enumerate(batch, rank * rows)
                sampled |= {c.request_id: read_row(host, row, c) for row, c in places if c.samples}
        failed: list[Move] = []
        for moves, copied in started.copied:
            try:
                copied.block_until_ready()
            except jax.errors.JaxRuntimeError:
                log.exception("a copy of %d KV pages to the host failed", len(moves))
                failed += moves
        if started.leaving:
            assert self._exchange is not None
            self._exchange.arrive(started.leaving)
        jax.block_until_ready(started.read)
        return Results(sampled, tuple(failed))

    def stats(self) -> dict[str, int]:
        """``compilations``: programs compiled, all before serving; ``program_runs``: rectangles run.

        With KV offload the ``hisparse_`` counters too, over all devices.
        """
        counts = {"compilations": self._programs.compilations, "program_runs": self._steps}
        if self._host_row_bytes is None:
            return counts
        hits, misses, rows = self._brought.tolist()
        return counts | {
            "hisparse_cache_hits": hits,
            "hisparse_cache_misses": misses,
            "hisparse_host_to_device_bytes": (rows + self._loaded) * self._host_row_bytes,
        }

    def close(self) -> None:
        """Frees the pools."""
        del self._cache, self._state, self._host

    def _by_rank(self, moves: Sequence[Move]) -> list[list[tuple[int, int]]]:
        return [[(m.block, m.page) for m in moves if m.rank == rank] for rank in range(self._programs.layout.dp)]

    def _load(self, moves: Sequence[Move]) -> None:
        if moves:
            assert self._programs.transfers is not None and self._host is not None
            self._cache = self._programs.transfers.load(self._cache, self._host, self._by_rank(moves))
            self._loaded += len(moves) * self._rows_of_block * self._host.shape[0]

    def _write_back(self, moves: Sequence[Move]) -> list[tuple[Sequence[Move], Any]]:
        if not moves:
            return []
        assert self._programs.transfers is not None and self._host is not None
        most, batches = self._programs.transfers.most, []
        for first in range(0, len(moves), most):
            batch = moves[first : first + most]
            self._host, copied = self._programs.transfers.write_back(self._cache, self._host, self._by_rank(batch))
            batches.append((batch, copied))
        return batches

    def _rows_away(self, chunk: Chunk, page_of: np.ndarray) -> int:
        """Rows over all layers that a staged chunk takes from the host."""
        known = -(-chunk.start // (self._programs.block_size * self._programs.layout.dcp))
        away = int((page_of[list(chunk.blocks[:known])] < 0).sum())
        return away * self._rows_of_block * self._programs.staged_layers

    @property
    def _rows_of_block(self) -> int:
        """Of a layer, on all devices of a data-parallel rank: those with the same KV bring rows in for themselves."""
        layout = self._programs.layout
        return self._programs.block_size * layout.num_devices // layout.dp


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
    if chunk.lease and inputs.region_table.shape[1]:
        inputs.region_table[row], inputs.region_lease[row] = chunk.region, chunk.lease
        inputs.region_slot[row] = chunk.slot
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
