"""Sparse MLA on Hopper: what is around the kernel (``sparse_mla_kernel``), above all how the work is cut.

Prefill has a block for every query and 64 heads. Decode has too few queries for 132 multiprocessors and cuts each one's
rows into parts, for the blocks of one cluster, which merge them by log-sum-exp on the chip (``sparse_mla_merge``).

Why Mosaic GPU and not Triton, both of which compile without spills: beside the queries, Triton's pipeline has room for
two stages of rows only if tiles are 32 rows. The products for the scores are then 16 columns to a warpgroup and read
the queries from shared memory four times as often as here. With tiles of 64 rows there is one stage, and no load has
any work beside it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from glmjax.errors import ConfigError
from glmjax.kernels.clusters import MOST_BLOCKS, clusters_at_once
from glmjax.kernels.kv_rows import LATENT_TILE
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.sparse_mla_kernel import Config, make_kernel
from glmjax.kernels.sparse_mla_shapes import HEADS, LATENT, ROPE, TILE, attention_obstacle


def sparse_mla_hopper(
    query_latent: jax.Array,
    query_rope: jax.Array,
    latent: jax.Array,
    latent_scale: jax.Array | None,
    rope: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array,
    *,
    scale: float,
    config: Config | None = None,
    simulate: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query over its own selected rows of a pool (spec/model.md 2.2, 2.5, 4).

    Args:
      query_latent: [T, H, 512] bf16; H a multiple of 8 up to 64, or of 64.
      query_rope: [T, H, 64] bf16.
      latent: [L, S, 512], uint8 that are float8_e4m3fn values, or bf16.
      latent_scale: [L, S, 4] float32, of each 128 values; None for bf16.
      rope: [L, S, 64] bf16.
      layer: of the pools.
      rows: [T, K] int32 slots, K a multiple of 64; -1 is skipped. Work follows the last that is not.
      scale: softmax scale.
      config: how the work is cut; by default so that the multiprocessors are busy.
      simulate: replace what interpret mode cannot run (``scattered_rows``, and sums that start at other than zero).
      interpret: what ``plgpu.kernel`` takes.

    Returns:
      output [T, H, 512] bf16, zero where no row is selected, and the log-sum-exp [T, H] float32 (base e), -inf there.

    Raises:
      ConfigError: shapes or types that the kernel is not for.
    """
    if obstacle := attention_obstacle(query_latent, query_rope, latent, latent_scale, rope, rows):
        raise ConfigError(f"sparse_mla on Hopper: {obstacle}")
    T, H, _ = query_latent.shape
    K = rows.shape[1]
    quantized = latent_scale is not None
    config = config or default_config(T, H, K, quantized)
    config.check(K, quantized)
    tiles = jnp.arange(K, dtype=jnp.int32) // TILE + 1
    used = jnp.max(jnp.where(rows >= 0, tiles, 0), axis=1)
    kernel = make_kernel(T, H, scale, quantized, config, simulate, interpret)
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    out, lse, *_ = kernel(query_latent, query_rope, latent, latent_scale, rope, rows, used, layers)
    return out, lse


def default_config(queries: int, heads: int, rows: int, quantized: bool) -> Config:
    """Cuts the rows of few queries so that the multiprocessor with most to do has least."""
    clusters, tiles = queries * -(-heads // HEADS), rows // TILE

    def busiest(splits: int) -> int:
        """Tiles in a row on one multiprocessor: those of a part, for every time that clusters queue for one."""
        return -(-clusters // clusters_at_once(splits)) * -(-tiles // splits)

    most = min(MOST_BLOCKS, tiles, max(1, MULTIPROCESSORS // clusters))
    return Config(min(range(1, most + 1), key=busiest), stages=3 if quantized else 2)


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a cut of a decode step into blocks comes to.

    Attributes:
      blocks: of the grid.
      busy: multiprocessors that have one at a time, at most.
      turns: blocks in a row on a multiprocessor; each loads its queries and fills its buffers anew.
      tiles: of rows in a row on the multiprocessor with most to do, in all its turns.
      bytes: to and from device memory.
    """

    blocks: int
    busy: int
    turns: int
    tiles: int
    bytes: int


def count_cut(queries: int, heads: int, clusters: int, blocks: int) -> Cut:
    """Counts a cut of every query's 2,048 FP8 rows, for up to 64 heads.

    With more clusters than queries, a query's clusters merge through device memory: all but one leave their part there,
    and the last to come reads them.

    Args:
      queries, heads: of the step.
      clusters: in all, at least one for each query; some queries may have one more than others.
      blocks: of a cluster.
    """
    moved = 2 * (clusters - queries) * heads * (2 * LATENT + 4)
    at_once = min(clusters, clusters_at_once(blocks))
    turns = -(-clusters // at_once)
    tiles = turns * -(-(ROWS // TILE) // (clusters // queries * blocks))
    return Cut(clusters * blocks, at_once * blocks, turns, tiles, count_bytes(queries, heads, ROWS, True) + moved)


# What GLM-5.3 runs: 2,048 rows for a query, 79 layers; 64 heads, or 16 of them on each of four GPUs.
ROWS, LAYERS, SLOTS, SCALE = 2048, 79, 4376 * 64, 256**-0.5


def cases() -> tuple[Case, ...]:
    """GLM-5.3's steps: decode of 1 and of 8 requests, with and without three draft tokens, and a chunk of a prompt.

    8 and 16 heads are its 64 under TP; 256 queries are a chunk's under PCP. 128 heads it has not, but the kernel takes.
    """
    decode = [_case("decode", T, H, True) for T in (8, 32) for H in (8, 16, 64, 128)]
    decode += [_case("decode", T, 64, True) for T in (1, 4)] + [_case("decode", T, 64, False) for T in (8, 32)]
    prefill = [_case("prefill", 2048, H, True) for H in (8, 16, 64, 128)]
    prefill += [_case("prefill", 256, 64, True), *(_case("prefill", T, 64, False) for T in (256, 2048))]
    return (*decode, *prefill)


def _case(use: str, T: int, H: int, quantized: bool) -> Case:
    config = default_config(T, H, ROWS, quantized)
    abstract, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    pools = [abstract((LAYERS, SLOTS, LATENT), jnp.uint8 if quantized else bf16), abstract((LAYERS, SLOTS, ROPE), bf16)]
    if quantized:
        pools.insert(1, abstract((LAYERS, SLOTS, LATENT // LATENT_TILE), jnp.float32))
    arguments = (
        abstract((T, H, LATENT), bf16),
        abstract((T, H, ROPE), bf16),
        *pools,
        abstract((), jnp.int32),
        abstract((T, ROWS), jnp.int32),
    )
    call = functools.partial(sparse_mla_hopper, scale=SCALE, config=config)
    return Case(
        kernel="sparse_mla",
        implementation="hopper",
        shape=f"{use} T={T} H={H} K={ROWS} {'fp8' if quantized else 'bf16'}",
        function=call if quantized else lambda q, r, latent, *rest: call(q, r, latent, None, *rest),
        arguments=arguments,
        bytes=count_bytes(T, H, ROWS, quantized),
        flops=2 * T * H * ROWS * (LATENT + ROPE + LATENT),
        arithmetic="bfloat16",
        stages=config.stages,
        limits={len(arguments) - 2: LAYERS, len(arguments) - 1: SLOTS},
    )


def least_bytes(T: int, H: int, K: int, quantized: bool) -> int:
    """Rows and their slots, queries and outputs, each once."""
    row = LATENT + 4 * (LATENT // LATENT_TILE) if quantized else 2 * LATENT
    return T * K * (row + 2 * ROPE + 4) + T * H * (2 * (LATENT + ROPE) + 2 * LATENT + 4)


def count_bytes(T: int, H: int, K: int, quantized: bool) -> int:
    """What moves to and from device memory.

    The slots are read once more to find the last. What several blocks read of a query, or blocks side by side of the
    same rows for other heads, counts once: it is in the L2 cache. Parts of a query's rows stay on the chip.
    """
    return least_bytes(T, H, K, quantized) + 4 * T * K
