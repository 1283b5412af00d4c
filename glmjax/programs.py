"""Compiled step programs, one per shape, built once before serving.

The cache and the requests' state are donated: they are updated in place, never copied.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from glmjax.cache import CacheDtype, KVCache, abstract_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.handoff import BlockCopies
from glmjax.host_pool import abstract_host_pool, address_sharding, addresses, make_host_pool
from glmjax.kernels import few_rows
from glmjax.model import group_runs
from glmjax.params import Params, QuantizedWeight, fp8_as_bytes
from glmjax.sharding import aot, cp
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.sharding.partition import batch_spec, cache_spec
from glmjax.sharding.traffic import Prefill
from glmjax.share import Combine, Dispatch
from glmjax.speculation import FLOP_PER_BYTE, NO_SPECULATION, Speculation
from glmjax.stage import StageCopies, abstract_stage
from glmjax.step import RequestState, abstract_state, make_step, over_mesh
from glmjax.step_io import StepInputs, StepOutputs, StepShape, num_logprobs, packed_width
from glmjax.tiers import Offload
from glmjax.transfers import Transfers

COPIED_BLOCKS = 16  # of each data-parallel rank, by one program, when requests are handed over
MIN_CONTEXT_BLOCKS = 16  # a shorter context needs no program of its own


def step_shapes(
    max_num_seqs: int, max_chunk: int, drafts_for: Callable[[int], int] = lambda rows: 0
) -> tuple[StepShape, ...]:
    """Shapes to compile: rows that decode and one-row chunks from 16 tokens up, each in steps of four.

    Powers of two would pad less and double the time to start.

    Args:
      drafts_for: drafts of a decode program for so many rows.
    """
    decode = [StepShape(rows, 1 + drafts_for(rows), decode=True) for rows in _sizes(1, max_num_seqs)]
    return (*decode, *(StepShape(1, tokens) for tokens in _sizes(16, max_chunk) if tokens > 1))


def drafts_by_rows(
    config: GLMConfig, params: Params, speculation: Speculation, layout: Layout = ONE_DEVICE
) -> Callable[[int], int]:
    """``drafts_for`` of ``step_shapes``: what pays on the devices that hold the parameters.

    Rows and weights are taken to be spread evenly over the devices, so that their ratio is that of one.
    """
    platform = next(iter(params.embed.devices())).platform
    weight = params.moe.gate_up if params.moe is not None else params.head
    size = (weight.values if isinstance(weight, QuantizedWeight) else weight).dtype.itemsize
    flop_per_byte = FLOP_PER_BYTE.get(platform, FLOP_PER_BYTE["gpu"])[size]
    return lambda rows: speculation.drafts_for(config, rows * layout.dp, size, flop_per_byte)


def with_contexts(
    shapes: Sequence[StepShape], table_width: int, layout: Layout, prefill: Prefill
) -> tuple[StepShape, ...]:
    """The shapes, those that gather a context's keys also for a quarter and a sixteenth of the longest context.

    Gathering costs what the block table could hold, not what it does hold.
    """
    widths = context_widths(table_width)
    if layout.dcp == 1 or prefill == "query_gather":
        return tuple(shapes)
    gathering = [s for s in shapes if not s.decode and cp.may_gather_keys(s.tokens, layout.pcp)]
    others = [s for s in shapes if s not in gathering]
    return (*others, *(dataclasses.replace(s, blocks=width) for s in gathering for width in widths))


def staged_shapes(shapes: Sequence[StepShape], table_width: int, layout: Layout) -> list[StepShape]:
    """The same for chunks whose context is copied together: what is copied is what the block table could hold."""
    chunks = sorted({s.tokens for s in shapes if not s.decode})
    can = [n for n in chunks if layout.pcp == 1 or cp.may_gather_keys(n, layout.pcp)]
    return [StepShape(1, n, width, staged=True) for n in can for width in context_widths(table_width)]


def context_widths(table_width: int) -> list[int]:
    """Entries of block tables for contexts of a sixteenth, a quarter and all of the longest."""
    widths = {width for part in (16, 4, 1) if (width := -(-table_width // part)) >= MIN_CONTEXT_BLOCKS}
    return sorted(widths) or [table_width]


def _sizes(first: int, last: int) -> list[int]:
    """first, 4 first, 16 first, ... and last, which is the largest."""
    sizes = [last]
    while first < last:
        sizes.append(first)
        first *= 4
    return sorted(sizes)


class Programs:
    """All programs of an engine, compiled when constructed.

    Args:
      params: single-device arrays or, for a layout of more, arrays on its mesh as ``param_specs`` says.
      num_blocks: blocks of every device's pool. A block holds ``block_size`` tokens on each DCP rank.
      block_size: tokens of a block on one device.
      table_width: blocks of the longest request.
      shapes: rectangles to compile.
      num_slots: requests that can run at a time, on each data-parallel rank; by default as many as one program holds.
      speculation: with drafts, parameters and pools have the MTP layer.
      offload: KV rows are in two tiers; ``num_blocks`` are those of the host's pool, and every chunk shape is compiled
        for staged contexts too.
      layout: how the devices of ``mesh`` share the work.
      prefill, combine, dispatch: see ``make_step``.
      progress: called with (done, total) as programs become ready.
    """

    def __init__(
        self,
        config: GLMConfig,
        params: Params,
        *,
        num_blocks: int,
        block_size: int,
        table_width: int,
        cache_dtype: CacheDtype,
        shapes: Sequence[StepShape],
        num_slots: int | None = None,
        speculation: Speculation = NO_SPECULATION,
        offload: Offload | None = None,
        layout: Layout = ONE_DEVICE,
        mesh: jax.sharding.Mesh | None = None,
        prefill: Prefill = "auto",
        combine: Combine = "ag_rs",
        dispatch: Dispatch = "gather",
        progress: Callable[[int, int], None] | None = None,
    ):
        on_cpu = all(d.platform == "cpu" for d in params.embed.devices())
        if on_cpu and dispatch == "ragged" and layout.ep > 1:
            raise ConfigError("ep_dispatch='ragged' needs GPUs, XLA cannot do it on a CPU: use ep_dispatch='gather'")
        self.config, self.params = config, fp8_as_bytes(params) if on_cpu else params
        self.num_blocks, self.block_size, self.table_width = num_blocks, block_size, table_width
        self.cache_dtype: CacheDtype = cache_dtype
        self.layout, self.mesh = layout, layout.mesh() if mesh is None and layout.num_devices > 1 else mesh
        if offload is not None and offload.reads == "auto":
            offload = dataclasses.replace(offload, reads="xla" if on_cpu else "address")
        if offload is not None and on_cpu and offload.reads == "address":
            raise ConfigError("reads='address' needs GPUs, which read pinned memory themselves: use 'xla' on a CPU")
        self._how: dict[str, Any] = {
            "prefill": prefill,
            "combine": combine,
            "dispatch": dispatch,
            "speculation": speculation,
            "offload": offload,
        }
        self.offload = offload
        self._compiler_options: dict[str, Any] = dict(few_rows.COMPILER_OPTIONS if on_cpu else aot.OPTIONS)
        self.speculation = speculation
        if speculation.num_drafts and params.mtp is None:
            why = "they were loaded without it" if config.num_nextn_predict_layers else "this model has none"
            raise ConfigError(
                f"num_speculative_tokens={speculation.num_drafts} needs parameters with the MTP layer, and {why}"
            )
        if offload is not None and offload.region_pages:
            shapes = [*shapes, *staged_shapes(shapes, table_width, layout)]
        self.shapes = tuple(sorted(set(shapes)))
        self.num_slots = num_slots or max((s.requests for s in self.shapes if s.decode), default=1)
        self.compilations = 0
        self._lock = threading.Lock()
        self._steps: dict[StepShape, Any] = {}
        # XLA compiles without the interpreter lock; two at once keep both cores of a small machine busy.
        with ThreadPoolExecutor(max_workers=2) as pool:
            for done, (shape, compiled) in enumerate(pool.map(self._compile, self.shapes), 1):
                self._steps[shape] = compiled
                if progress:
                    progress(done, len(self.shapes))
        self.transfers = None if offload is None else self._compile_transfers(offload)

    def abstract_cache(self) -> KVCache:
        """The pools of all devices as one tree of shapes, with where they are if that is several devices."""
        pools = self.layout.dp * self.layout.dcp
        mtp = self.speculation.num_drafts > 0
        one = abstract_cache(
            self.config,
            self.num_blocks,
            self.block_size,
            self.cache_dtype,
            mtp=mtp,
            offload=self.offload,
            num_slots=self.num_slots,
        )
        sharding = self._sharding(cache_spec(self.layout))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * pools, *x.shape[2:]), x.dtype, sharding=sharding),
            one,
        )

    def make_cache(self) -> KVCache:
        """Empty pools."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.abstract_cache())

    def abstract_host(self) -> jax.ShapeDtypeStruct:
        """The host's pool behind the caches of all devices."""
        mtp = self.speculation.num_drafts > 0
        one = abstract_cache(
            self.config, self.num_blocks, self.block_size, self.cache_dtype, mtp=mtp, offload=self.offload
        )
        return abstract_host_pool(one, self.block_size, self.layout, self._host_mesh)

    def make_host(self) -> jax.Array:
        """An empty pool on the host."""
        return make_host_pool(self.abstract_host())

    @property
    def staged_layers(self) -> int:
        """Layers that a staged chunk brings together. A scan looks ahead by one layer also in its last turn."""
        looks_beyond = group_runs(self.config)[-1].count > 1
        mtp = self.speculation.num_drafts > 0
        return self.config.num_hidden_layers + int(looks_beyond) + int(mtp)

    @property
    def _host_mesh(self) -> jax.sharding.Mesh:
        """A mesh also for one device: only with one does an abstract array say that it is on the host."""
        if self.mesh is not None:
            return self.mesh
        axes = tuple(self.layout.axis_sizes)
        return jax.sharding.Mesh(np.reshape([*self.params.embed.devices()], (1,) * len(axes)), axes)

    def abstract_state(self) -> RequestState:
        """The requests' states of all data-parallel ranks, one after another."""
        one, sharding = abstract_state(self.num_slots, self.speculation.num_drafts), self._sharding(self._by_rank)
        ranks = self.layout.dp
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((ranks * x.shape[0], *x.shape[1:]), x.dtype, sharding=sharding), one
        )

    def make_state(self) -> RequestState:
        """The state without any request."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.abstract_state())

    def smallest(
        self, requests: int, tokens: int, blocks: int = 0, *, decode: bool = False, staged: bool = False
    ) -> StepShape:
        """The smallest compiled rectangle for ``requests`` rows of ``tokens`` tokens, each in at most ``blocks``."""
        fits = [
            s
            for s in self.shapes
            if s.decode == decode
            and s.staged == staged
            and s.requests >= requests
            and s.tokens >= tokens
            and self.width(s) >= blocks
        ]
        if not fits:
            kind = "decode program" if decode else "program"
            raise ConfigError(f"no compiled {kind} holds {requests} requests of {tokens} tokens in {blocks} blocks")
        # Of programs that decode, the one for the fewest requests: others may have fewer drafts.
        return min(fits, key=lambda s: (s.requests if decode else s.requests * s.tokens, self.width(s), s))

    def width(self, shape: StepShape) -> int:
        """Entries of a row's block table."""
        return shape.blocks or self.table_width

    def run(
        self,
        shape: StepShape,
        cache: KVCache,
        state: RequestState,
        inputs: Sequence[StepInputs],
        host: jax.Array | None = None,
        page_of: Sequence[np.ndarray] = (),
    ) -> tuple[KVCache, RequestState, jax.Array]:
        """Runs one rectangle for each data-parallel rank.  Cache and state passed in are consumed.

        Args:
          host, page_of: with rows in two tiers, the host's pool and each rank's pages of blocks, see ``Tiers``.

        Returns:
          the cache, the state and the packed outputs, the ranks' rows one after another: see ``outputs``.
        """
        packed = np.concatenate([x.pack() for x in inputs]) if len(inputs) > 1 else inputs[0].pack()
        if self.mesh is not None:
            packed = jax.device_put(packed, self._sharding(self._by_rank))
        tiers: tuple[Any, ...] = ()
        if host is not None:
            pages = np.concatenate(page_of)
            if self.mesh is not None:
                pages = jax.device_put(pages, self._sharding(self._by_rank))
            tiers = (addresses(host, self._host_mesh) if self._by_address else host), pages
        return self._steps[shape](self.params, cache, state, packed, *tiers)

    def empty_inputs(self, shape: StepShape) -> StepInputs:
        """Padding rows for a program."""
        return StepInputs.empty(shape, self.table_width, self._region_pages)

    def outputs(self, packed: jax.Array) -> StepOutputs:
        """What ``run`` returned, on the host; waits for it."""
        return StepOutputs.unpack(np.asarray(packed), num_logprobs(self.config))

    @property
    def _by_address(self) -> bool:
        return self.offload is not None and self.offload.reads == "address"

    @property
    def _region_pages(self) -> int:
        return 0 if self.offload is None else self.offload.region_pages

    @property
    def _by_rank(self) -> PartitionSpec:
        return batch_spec(self.layout)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def _compile(self, shape: StepShape) -> tuple[StepShape, Any]:
        step = make_step(self.config, shape, self.table_width, self.block_size, self.layout, **self._how)
        if self.mesh is not None:
            step = over_mesh(step, self.layout, self.mesh, self.params, offload=self.offload)
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if self.mesh is None else x.sharding),
            self.params,
        )
        packed = jax.ShapeDtypeStruct(
            (self.layout.dp * shape.requests, packed_width(shape, self.table_width, self._region_pages)),
            jnp.int32,
            sharding=self._sharding(self._by_rank),
        )
        arguments: tuple[Any, ...] = (params, self.abstract_cache(), self.abstract_state(), packed)
        if self.offload is not None:
            pages = (self.layout.dp * (self.num_blocks + 1),)
            by_rank = self._sharding(self._by_rank)
            host = self.abstract_host()
            if self._by_address:
                host = jax.ShapeDtypeStruct(
                    (self.layout.num_devices, 2), jnp.uint32, sharding=address_sharding(self._host_mesh)
                )
            arguments += (host, jax.ShapeDtypeStruct(pages, jnp.int32, sharding=by_rank))
        compiled = jax.jit(step, donate_argnums=(1, 2)).lower(*arguments).compile(self._compiler_options)
        with self._lock:
            self.compilations += 1
        return shape, compiled

    def block_copies(self) -> BlockCopies:
        """Compiles the copies of whole blocks for handing requests over, see ``glmjax.handoff``."""
        return BlockCopies(self.abstract_cache(), *self._to_copy_blocks())

    def abstract_stage(self, num_blocks: int) -> Any:
        """A stage on the devices with so many blocks of each rank, see ``glmjax.stage``."""
        mtp = self.speculation.num_drafts > 0
        one = abstract_cache(self.config, 1, self.block_size, self.cache_dtype, mtp=mtp)
        return abstract_stage(one, num_blocks, self.block_size, self.layout, self.mesh)

    def stage_copies(self, stage: Any) -> StageCopies:
        """Compiles the copies of whole blocks between the pools and such a stage."""
        return StageCopies(self.abstract_cache(), stage, *self._to_copy_blocks())

    def _to_copy_blocks(self) -> tuple[Any, ...]:
        """What both kinds of copies are told alike: one way is compiled where rows are in two tiers, else both."""
        self.compilations += 2 if self.offload is None else 1
        host = None if self.offload is None else self.abstract_host()
        return self.block_size, COPIED_BLOCKS, self.layout, self.mesh, self._compiler_options, host

    def _compile_transfers(self, offload: Offload) -> Transfers:
        self.compilations += 2
        return Transfers(
            self.abstract_cache(),
            self.abstract_host(),
            self.block_size,
            offload.transfer_pages,
            self.layout,
            self.mesh,
            self._compiler_options,
        )
