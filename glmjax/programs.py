"""Compiled step programs: (params, cache, inputs) -> (cache, outputs), one per shape, built once before serving.

A step's host inputs travel as ONE int32 array and its outputs come back as one, since a copy's fixed cost is what
matters at decode. The cache is donated: the pool is updated in place, never copied.
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

from glmjax.batch import TokenBatch
from glmjax.cache import CacheDtype, KVCache, abstract_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.model import logits, run_layers
from glmjax.params import Params, fp8_as_bytes
from glmjax.sample import SamplingBatch, sample
from glmjax.sharding import cp
from glmjax.sharding.collectives import Collectives
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.sharding.partition import batch_spec, cache_spec, param_specs
from glmjax.sharding.traffic import Prefill
from glmjax.share import Combine, Dispatch, KVSource, share_of
from glmjax.types import MAX_LOGPROBS

MAX_BANNED = 64  # tokens that one request may ban in a step
MIN_CONTEXT_BLOCKS = 16  # a shorter context needs no program of its own


@dataclasses.dataclass(frozen=True, order=True)
class StepShape:
    """A compiled rectangle: ``requests`` rows of up to ``tokens`` new tokens each.

    Attributes:
      blocks: entries of a row's block table, which bound its context; 0: those of the longest request.
    """

    requests: int
    tokens: int
    blocks: int = 0


@dataclasses.dataclass
class StepInputs:
    """Host arrays of one step; field for field what ``TokenBatch`` and ``SamplingBatch`` hold on the device."""

    tokens: np.ndarray  # [R, Q] int32
    block_tables: np.ndarray  # [R, B] int32
    banned: np.ndarray  # [R, MAX_BANNED] int32, -1 for none
    start: np.ndarray  # [R] int32
    length: np.ndarray  # [R] int32
    top_k: np.ndarray  # [R] int32
    wants_logprobs: np.ndarray  # [R] int32, 0 or 1
    seed: np.ndarray  # [R, 2] uint32
    temperature: np.ndarray  # [R] float32
    top_p: np.ndarray  # [R] float32
    min_p: np.ndarray  # [R] float32

    @classmethod
    def empty(cls, shape: StepShape, table_width: int) -> "StepInputs":
        """Padding rows only: no token, greedy, nothing banned."""
        R, table_width = shape.requests, shape.blocks or table_width
        i32, f32 = np.int32, np.float32
        return cls(
            tokens=np.zeros((R, shape.tokens), i32),
            block_tables=np.zeros((R, table_width), i32),
            banned=np.full((R, MAX_BANNED), -1, i32),
            start=np.zeros(R, i32),
            length=np.zeros(R, i32),
            top_k=np.zeros(R, i32),
            wants_logprobs=np.zeros(R, i32),
            seed=np.zeros((R, 2), np.uint32),
            temperature=np.zeros(R, f32),
            top_p=np.ones(R, f32),
            min_p=np.zeros(R, f32),
        )

    def pack(self) -> np.ndarray:
        """All fields side by side: [R, width] int32, floats and seeds by their bits."""
        columns = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return np.concatenate([c.reshape(c.shape[0], -1).view(np.int32) for c in columns], axis=1)


def packed_width(shape: StepShape, table_width: int) -> int:
    return shape.tokens + (shape.blocks or table_width) + MAX_BANNED + 9


def _unpack(packed: jax.Array, shape: StepShape, table_width: int, block_size: int) -> tuple[TokenBatch, SamplingBatch]:
    ends = np.cumsum([shape.tokens, shape.blocks or table_width, MAX_BANNED])
    tokens, tables, banned, rest = jnp.split(packed, ends, axis=1)
    start, length, top_k, wants, seed_low, seed_high, temperature, top_p, min_p = rest.T

    def bits(x: jax.Array, dtype: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, dtype)

    f32 = jnp.float32
    batch = TokenBatch(tokens, start, length, tables, block_size)
    seed = bits(jnp.stack([seed_low, seed_high], axis=-1), jnp.uint32)
    how = SamplingBatch(
        bits(temperature, f32), bits(top_p, f32), bits(min_p, f32), top_k, seed, banned, wants_logprobs=wants > 0
    )
    return batch, how


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """Host view of a step's packed output; see ``SampleOutput``."""

    token: np.ndarray  # [R] int32
    rank: np.ndarray  # [R] int32
    logprob: np.ndarray  # [R] float32
    top_ids: np.ndarray  # [R, 20] int32
    top_logprobs: np.ndarray  # [R, 20] float32

    @classmethod
    def unpack(cls, packed: np.ndarray) -> "StepOutputs":
        most = (packed.shape[1] - 3) // 2
        token, rank, logprob = packed[:, 0], packed[:, 1], packed[:, 2].view(np.float32)
        return cls(token, rank, logprob, packed[:, 3 : 3 + most], packed[:, 3 + most :].view(np.float32))


Step = Callable[[Params, KVCache, jax.Array], tuple[KVCache, jax.Array]]


def make_step(
    config: GLMConfig,
    shape: StepShape,
    table_width: int,
    block_size: int,
    layout: Layout = ONE_DEVICE,
    *,
    prefill: Prefill = "auto",
    combine: Combine = "ag_rs",
    dispatch: Dispatch = "gather",
) -> Step:
    """The pure step of one shape: computes the rectangle, writes its KV and samples after each row's last token.

    It is what one device does; with more than one it runs inside ``shard_map``, on the batch of its data-parallel rank,
    and every device of the group gives the same outputs.

    Args:
      prefill: see ``Share.kv``; "auto" is whichever moves fewer bytes for this shape.
      combine, dispatch: see ``Share``.
    """

    def kv_source(params: Params, cache: KVCache) -> KVSource:
        return layout.traffic(
            config,
            tokens=shape.tokens,
            requests=shape.requests,
            context_rows=(shape.blocks or table_width) * block_size * layout.dcp,
            block_size=block_size,
            kv_dtype=cache.dtype,
            activation_bytes=params.embed.dtype.itemsize,
            combine=combine,
        ).kv

    def step(params: Params, cache: KVCache, packed: jax.Array) -> tuple[KVCache, jax.Array]:
        batch, how = _unpack(packed, shape, table_width, block_size)
        source = kv_source(params, cache) if prefill == "auto" else prefill
        share = share_of(batch, layout, prefill=source, combine=combine, dispatch=dispatch)
        cache, hidden, _ = run_layers(params, config, cache, share)
        out = sample(logits(params, share.last_rows(hidden), layout), how, batch.start + batch.length)
        columns = [out.token[:, None], out.rank[:, None], out.logprob[:, None], out.top_ids, out.top_logprobs]
        return cache, jnp.concatenate([jax.lax.bitcast_convert_type(c, jnp.int32) for c in columns], axis=1)

    return step


def over_mesh(step: Step, layout: Layout, mesh: jax.sharding.Mesh, params: Params) -> Step:
    """The step on all devices: inputs and outputs are [dp * R, ...], rank by rank, outputs whole on every device."""

    def gathering(params: Params, cache: KVCache, packed: jax.Array) -> tuple[KVCache, jax.Array]:
        cache, out = step(params, cache, packed)
        return cache, Collectives(layout).all_gather(out, layout.data_axes, 0)

    kv = cache_spec(layout)
    return jax.shard_map(
        gathering,
        mesh=mesh,
        in_specs=(param_specs(layout, params), kv, batch_spec(layout)),
        out_specs=(kv, PartitionSpec()),
        check_vma=False,  # outputs are equal everywhere by construction, which the check cannot see
    )


def step_shapes(max_num_seqs: int, max_chunk: int) -> tuple[StepShape, ...]:
    """Shapes to compile: one-token rows and one-row chunks from 16 tokens up, each in steps of four.

    Powers of two would pad less and double the time to start.
    """
    decode = [StepShape(rows, 1) for rows in _sizes(1, max_num_seqs)]
    return (*decode, *(StepShape(1, tokens) for tokens in _sizes(16, max_chunk)))


def with_contexts(
    shapes: Sequence[StepShape], table_width: int, layout: Layout, prefill: Prefill
) -> tuple[StepShape, ...]:
    """The shapes, those that gather a context's keys also for a quarter and a sixteenth of the longest context.

    Gathering costs what the block table could hold, not what it does hold.
    """
    widths = sorted({width for part in (16, 4, 1) if (width := -(-table_width // part)) >= MIN_CONTEXT_BLOCKS})
    if layout.dcp == 1 or prefill == "query_gather":
        return tuple(shapes)
    gathering = [s for s in shapes if cp.may_gather_keys(s.tokens, layout.pcp)]
    others = [s for s in shapes if s not in gathering]
    return (*others, *(dataclasses.replace(s, blocks=width) for s in gathering for width in widths or [table_width]))


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
        self._how: dict[str, Any] = {"prefill": prefill, "combine": combine, "dispatch": dispatch}
        self.shapes = tuple(sorted(set(shapes)))
        self.compilations = 0
        self._lock = threading.Lock()
        self._steps: dict[StepShape, Any] = {}
        # XLA compiles without the interpreter lock; two at once keep both cores of a small machine busy.
        with ThreadPoolExecutor(max_workers=2) as pool:
            for done, (shape, compiled) in enumerate(pool.map(self._compile, self.shapes), 1):
                self._steps[shape] = compiled
                if progress:
                    progress(done, len(self.shapes))

    def abstract_cache(self) -> KVCache:
        """The pools of all devices as one tree of shapes, with where they are if that is several devices."""
        pools = self.layout.dp * self.layout.dcp
        one = abstract_cache(self.config, self.num_blocks, self.block_size, self.cache_dtype)
        sharding = self._sharding(cache_spec(self.layout))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * pools, *x.shape[2:]), x.dtype, sharding=sharding),
            one,
        )

    def make_cache(self) -> KVCache:
        """Empty pools."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.abstract_cache())

    def smallest(self, requests: int, tokens: int, blocks: int = 0) -> StepShape:
        """The smallest compiled rectangle for ``requests`` rows of ``tokens`` tokens, each in at most ``blocks``."""
        fits = [s for s in self.shapes if s.requests >= requests and s.tokens >= tokens and self.width(s) >= blocks]
        if not fits:
            raise ConfigError(f"no compiled program holds {requests} requests of {tokens} tokens in {blocks} blocks")
        return min(fits, key=lambda s: (s.requests * s.tokens, self.width(s), s))

    def width(self, shape: StepShape) -> int:
        """Entries of a row's block table."""
        return shape.blocks or self.table_width

    def run(self, shape: StepShape, cache: KVCache, inputs: Sequence[StepInputs]) -> tuple[KVCache, jax.Array]:
        """Runs one rectangle for each data-parallel rank.  The cache passed in is consumed.

        Returns:
          the cache and the packed outputs, the ranks' rows one after another: see ``StepOutputs``.
        """
        packed = np.concatenate([x.pack() for x in inputs]) if len(inputs) > 1 else inputs[0].pack()
        if self.mesh is None:
            return self._steps[shape](self.params, cache, packed)
        return self._steps[shape](self.params, cache, jax.device_put(packed, self._sharding(batch_spec(self.layout))))

    def _sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def _compile(self, shape: StepShape) -> tuple[StepShape, Any]:
        step = make_step(self.config, shape, self.table_width, self.block_size, self.layout, **self._how)
        if self.mesh is not None:
            step = over_mesh(step, self.layout, self.mesh, self.params)
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if self.mesh is None else x.sharding),
            self.params,
        )
        packed = jax.ShapeDtypeStruct(
            (self.layout.dp * shape.requests, packed_width(shape, self.table_width)),
            jnp.int32,
            sharding=self._sharding(batch_spec(self.layout)),
        )
        compiled = jax.jit(step, donate_argnums=1).lower(params, self.abstract_cache(), packed).compile()
        with self._lock:
            self.compilations += 1
        return shape, compiled


def output_width(config: GLMConfig) -> int:
    return 3 + 2 * min(MAX_LOGPROBS, config.vocab_size)
