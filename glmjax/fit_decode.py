"""Whether a decode step fits, with KV rows in two tiers: as ``glmjax.fit``, for the program that runs most of the time.

Each data-parallel rank has a pool in host memory for the rows of all its tokens. On the device are their index keys,
and pages for the hot regions and the newest tokens of the requests that run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from glmjax.cache import CacheDtype, KVCache, abstract_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.fit import GIB, CompiledStep, aligned, device_bytes
from glmjax.host_pool import abstract_host_pool, address_sharding
from glmjax.params import abstract_params
from glmjax.sharding.aot import H200Program, compile_for_h200, h200_devices
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import batch_spec, cache_spec, param_specs
from glmjax.speculation import Speculation
from glmjax.step import abstract_state, make_step, over_mesh
from glmjax.step_io import StepShape, packed_width
from glmjax.tiers import Offload, Reads

TAIL_PAGES = 2  # of a request: those that a step in flight may write to stay on the device


@dataclasses.dataclass(frozen=True)
class DecodeFit(CompiledStep):
    """A compiled decode step and what it takes on each device, in bytes.

    Attributes:
      layout: over as many H200s.
      batch: requests of a data-parallel rank.
      num_drafts: of each request.
      offload: the tiers; None: all rows are on the device.
      tokens: that a data-parallel rank has KV for, of all requests.
      weights: as the checkpoint stores them, with the MTP layer.
      index_keys: of all tokens.
      rows: latents and rotary keys: the pages or, without tiers, of all tokens.
      hot: what the resolver knows of the hot regions.
      host: the pool in host memory, for this device; 0 without tiers.
      token_kv: what a token takes on the device, its index keys and, without tiers, its rows.
      program: for its HLO.
    """

    layout: Layout
    batch: int
    num_drafts: int
    offload: Offload | None
    tokens: int
    weights: int
    index_keys: int
    rows: int
    hot: int
    host: int
    token_kv: int
    program: H200Program = dataclasses.field(repr=False)

    @property
    def reads(self) -> str:
        """How rows come from the host."""
        return "none" if self.offload is None else self.offload.reads

    @property
    def pages(self) -> int:
        """Of the device's row pool, without the spare one."""
        return 0 if self.offload is None else self.offload.num_pages

    @property
    def region_pages(self) -> int:
        return 0 if self.offload is None else self.offload.region_pages

    @property
    def kv_tokens(self) -> int:
        """Tokens that a data-parallel rank can keep if what is left of the device's memory takes their KV, too."""
        return max(0, self.tokens + self.left // self.token_kv * self.layout.dcp)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the program, for JSON."""
        names = (
            "batch", "num_drafts", "reads", "pages", "region_pages", "tokens", "weights", "index_keys", "rows", "hot",
            "temporaries", "total", "left", "fits", "kv_tokens", "host",
        )  # fmt: skip
        return {"layout": str(self.layout)} | {name: getattr(self, name) for name in names}


def hybrid(
    config: GLMConfig, batch: int, *, num_drafts: int = 3, block_size: int = 64, rows: int = 0, reads: Reads = "address"
) -> Offload:
    """Tiers in which every request of a batch has its hot region and its newest pages on the device.

    Args:
      rows: of a region; by default what one step may select and another ``index_topk`` (spec/system.md 1.3).
    """
    rows = rows or (num_drafts + 2) * config.index_topk
    region = -(-rows // block_size)
    return Offload(batch * (region + TAIL_PAGES), region, reads=reads)


def compile_decode(
    config: GLMConfig,
    layout: Layout,
    *,
    batch: int,
    context: int,
    num_drafts: int = 3,
    offload: Offload | None = None,
    num_blocks: int | None = None,
    block_size: int = 64,
    kv_cache_dtype: CacheDtype = "fp8_ds_mla",
    quantized: bool = True,
) -> DecodeFit:
    """Compiles the step that decodes a batch of requests on each data-parallel rank, each with drafts to verify.

    Args:
      layout: of 1 to 8 devices or a multiple of 8.
      batch: requests of a rank.
      context: tokens of the longest request.
      offload: the tiers, see ``hybrid``.
      num_blocks: blocks that a rank has places for, of all requests together: in the host's pool if there is one, else
        on the device. By default those of one request.
      block_size: tokens of a KV block on one device.
      quantized: weights are block-FP8, else bf16.

    Raises:
      ConfigError: JAX has no CUDA plugin (see ``h200_devices``), or a size or the layout does not do for the model.
      jax.errors.JaxRuntimeError: there is no ptxas.
    """
    if batch < 1 or context < 1 or num_drafts < 1:
        raise ConfigError(
            f"batch, context and num_drafts must be at least 1, got batch={batch}, context={context}, "
            f"num_drafts={num_drafts}"
        )
    if offload is not None and offload.reads == "auto":
        raise ConfigError("offload.reads='auto': say 'address' or 'xla', the program is for no GPU of this machine")
    layout.check_model(config, block_size, quantized=quantized)
    mesh = layout.mesh(h200_devices(layout.num_devices))

    def place(x: Any, spec: PartitionSpec, times: int = 1, dim: int = 0) -> Any:
        """An array of all devices out of that of one."""
        shape = (*x.shape[:dim], times * x.shape[dim], *x.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def by_rank(*shape: int) -> Any:
        return place(jax.ShapeDtypeStruct(shape, jnp.int32), batch_spec(layout), layout.dp)

    params = abstract_params(config, jnp.bfloat16, mtp=True, quantized=quantized)
    params = jax.tree.map(lambda x, spec: place(x, spec), params, param_specs(layout, params))
    table_width = -(-context // (block_size * layout.dcp))
    num_blocks = num_blocks or table_width
    pool = abstract_cache(config, num_blocks, block_size, kv_cache_dtype, mtp=True, offload=offload, num_slots=batch)
    cache: KVCache = jax.tree.map(lambda x: place(x, cache_spec(layout), layout.dp * layout.dcp, 1), pool)
    state = jax.tree.map(lambda x: place(x, batch_spec(layout), layout.dp), abstract_state(batch, num_drafts))
    shape = StepShape(batch, 1 + num_drafts, decode=True)
    regions = 0 if offload is None else offload.region_pages
    packed = by_rank(batch, packed_width(shape, table_width, regions))

    host = 0
    tiers: tuple[Any, ...] = ()
    on_host: tuple[int, ...] = ()
    if offload is not None:
        host_pool = abstract_host_pool(pool, block_size, layout, mesh)
        host = device_bytes(host_pool)
        if offload.reads == "address":
            there = jax.ShapeDtypeStruct((layout.num_devices, 2), jnp.uint32, sharding=address_sharding(mesh))
        else:
            there, on_host = host_pool, (4,)
        tiers = (there, by_rank(num_blocks + 1))

    speculation = Speculation(num_drafts=num_drafts)
    step = make_step(config, shape, table_width, block_size, layout, speculation=speculation, offload=offload)
    with jax.default_matmul_precision("default"):  # as a server runs
        program = compile_for_h200(
            over_mesh(step, layout, mesh, params, offload=offload),
            params,
            cache,
            state,
            packed,
            *tiers,
            mesh=mesh,
            donate=(1, 2),
            on_host=on_host,
        )
    index_keys = device_bytes((cache.index_key, cache.index_scale))
    rows = device_bytes((cache.latent, cache.latent_scale, cache.rope))
    token_kv = index_keys // pool.index_key.shape[1] + (rows // pool.latent.shape[1] if offload is None else 0)
    return DecodeFit(
        layout=layout,
        batch=batch,
        num_drafts=num_drafts,
        offload=offload,
        tokens=num_blocks * block_size * layout.dcp,
        weights=device_bytes(params),
        index_keys=index_keys,
        rows=rows,
        hot=device_bytes(cache.hot),
        host=host,
        token_kv=token_kv,
        program=program,
    )


def decode_table(fits: Sequence[DecodeFit]) -> str:
    """A line for each, sizes in GiB on one device and, the last, in its part of the host's memory."""
    heads = ("layout", "rows by", "batch", "drafts", "tokens", "pages", "weights", "index keys", "row pages", "hot")
    rows = [[*heads, "temporaries", "total", "left", "KV tokens", "host pool"]]
    for fit in fits:
        counts = [f"{n:,}" for n in (fit.batch, fit.num_drafts, fit.tokens, fit.pages)]
        sizes = (fit.weights, fit.index_keys, fit.rows, fit.hot, fit.temporaries, fit.total, fit.left)
        gib = [f"{size / GIB:.2f}" for size in sizes]
        rows.append([str(fit.layout), fit.reads, *counts, *gib, f"{fit.kv_tokens:,}", f"{fit.host / GIB:.2f}"])
    return aligned(rows)
