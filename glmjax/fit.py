"""Whether a model fits: its prefill step compiled for H200s that are not there.

The figures are those of XLA's buffer assignment for one device, not an estimate. Nothing is allocated: 744B parameters
compile in about a minute and a GiB.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from glmjax.cache import CacheDtype, abstract_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.params import abstract_params
from glmjax.sharding.aot import H200Program, compile_for_h200, h200_devices
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import batch_spec, cache_spec, param_specs
from glmjax.sharding.traffic import KVSource, Prefill
from glmjax.step import abstract_state, make_step, over_mesh
from glmjax.step_io import StepShape, packed_width

# The 141 GB of the label are 143,771 MiB on the board, of which CUDA reports 139.8 GiB to a process.  NCCL and the
# libraries take a GiB or two out of what is left.  sharding/h200.txtpb tells XLA's scheduler of as much.
H200_BYTES = 139 * 2**30
GIB = 2**30


class CompiledStep:
    """A step that was compiled for H200s, and what it takes on each, in bytes."""

    program: H200Program

    @property
    def temporaries(self) -> int:
        """What lives during the step only."""
        return self.program.memory.temporaries

    @property
    def total(self) -> int:
        return self.program.memory.total

    @property
    def left(self) -> int:
        """Of ``H200_BYTES``; negative if the step does not fit."""
        return H200_BYTES - self.total

    @property
    def fits(self) -> bool:
        return self.left >= 0


@dataclasses.dataclass(frozen=True)
class Fit(CompiledStep):
    """A compiled prefill step and what it takes on each device, in bytes.

    Attributes:
      layout: over as many H200s.
      kv_source: where attention finds its keys, see ``glmjax.share.Share``.
      chunk: new tokens of the one request of a data-parallel rank.
      cached: its tokens before them; the KV pool holds both.
      weights: as the checkpoint stores them.
      kv: the pool, updated in place.
      token_kv: what a token takes in a pool that keeps it.
      program: for its HLO.
    """

    layout: Layout
    kv_source: KVSource
    chunk: int
    cached: int
    weights: int
    kv: int
    token_kv: int
    program: H200Program = dataclasses.field(repr=False)

    @property
    def inputs_and_outputs(self) -> int:
        """Tokens, block table and sampled tokens."""
        return self.total - self.weights - self.kv - self.temporaries

    @property
    def kv_tokens(self) -> int:
        """Tokens that a data-parallel rank can keep, of all requests, if the pool gets what is left too."""
        return max(0, (self.left + self.kv) // self.token_kv * self.layout.dcp)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the program, for JSON."""
        names = ("kv_source", "chunk", "cached", "weights", "kv", "temporaries", "inputs_and_outputs", "total", "left")
        return {"layout": str(self.layout)} | {n: getattr(self, n) for n in (*names, "fits", "kv_tokens")}


def compile_prefill(
    config: GLMConfig,
    layout: Layout,
    *,
    chunk: int = 2048,
    cached: int = 0,
    block_size: int = 64,
    kv_cache_dtype: CacheDtype = "fp8_ds_mla",
    quantized: bool = True,
    mtp: bool = False,
    prefill: Prefill = "auto",
) -> Fit:
    """Compiles the step that adds a chunk to a request, one on each data-parallel rank, with pools just large enough.

    Args:
      layout: of 1 to 8 devices or a multiple of 8.
      chunk: new tokens.
      cached: tokens before them.
      block_size: tokens of a KV block on one device.
      quantized: weights are block-FP8, else bf16.
      mtp: weights and pool have the MTP layer too, which this step does not use.
      prefill: see ``make_step``.

    Raises:
      ConfigError: JAX has no CUDA plugin (see ``h200_devices``), or a size or the layout does not do for the model.
      jax.errors.JaxRuntimeError: there is no ptxas.
    """
    if chunk < 1 or cached < 0:
        raise ConfigError(f"chunk must be at least 1 and cached at least 0, got chunk={chunk}, cached={cached}")
    layout.check_model(config, block_size, quantized=quantized)
    mesh = layout.mesh(h200_devices(layout.num_devices))

    def place(x: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = abstract_params(config, jnp.bfloat16, mtp=mtp, quantized=quantized)
    params = jax.tree.map(place, params, param_specs(layout, params))

    table_width = -(-(cached + chunk) // (block_size * layout.dcp))
    pool = abstract_cache(config, table_width, block_size, kv_cache_dtype, mtp=mtp)
    pools = layout.dp * layout.dcp

    def all_pools(x: Any) -> Any:
        return place(jax.ShapeDtypeStruct((x.shape[0], pools * x.shape[1], *x.shape[2:]), x.dtype), cache_spec(layout))

    cache = jax.tree.map(all_pools, pool)
    shape = StepShape(1, chunk)
    packed = place(jax.ShapeDtypeStruct((layout.dp, packed_width(shape, table_width)), jnp.int32), batch_spec(layout))
    state = jax.tree.map(
        lambda x: place(jax.ShapeDtypeStruct((layout.dp * x.shape[0], *x.shape[1:]), x.dtype), batch_spec(layout)),
        abstract_state(1, 0),
    )
    source = layout.traffic(
        config,
        tokens=chunk,
        context_rows=table_width * block_size * layout.dcp,
        block_size=block_size,
        kv_dtype=kv_cache_dtype,
        prefill=prefill,
    ).kv
    step = make_step(config, shape, table_width, block_size, layout, prefill=prefill)
    with jax.default_matmul_precision("default"):  # as a server runs
        program = compile_for_h200(
            over_mesh(step, layout, mesh, params), params, cache, state, packed, mesh=mesh, donate=(1, 2)
        )
    kv = device_bytes(cache)
    return Fit(layout, source, chunk, cached, device_bytes(params), kv, kv // pool.latent.shape[1], program)


def device_bytes(tree: Any) -> int:
    """Bytes of all leaves on one device; leaves are abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def table(fits: Sequence[Fit]) -> str:
    """A line for each, sizes in GiB on one device."""
    rows = [["layout", "KV by", "cached", "weights", "KV", "temporaries", "total", "left", "KV tokens"]]
    for fit in fits:
        sizes = (fit.weights, fit.kv, fit.temporaries, fit.total, fit.left)
        gib = [f"{size / GIB:.2f}" for size in sizes]
        rows.append([str(fit.layout), fit.kv_source, f"{fit.cached:,}", *gib, f"{fit.kv_tokens:,}"])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first two of them flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{c:{'<' if i < 2 else '>'}{widths[i]}}" for i, c in enumerate(row)) for row in rows]
    return "\n".join(lines)
