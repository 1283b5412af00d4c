"""Scores of the lightning indexer: I[t, s] = scale[s] * sum_h w[t, h] * relu(q[t, h] . k[s]) (spec/model.md 2.4).

``index_scores`` is the jnp form over keys at hand; ``paged_index_scores`` reads them from a KV pool, on a Hopper GPU by
its own kernel (``index_scores_hopper``).
"""

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.errors import ConfigError
from glmjax.kernels import few_rows
from glmjax.kernels.check import FLOAT32, FLOATS, INT32, check_arrays, check_place, check_scale
from glmjax.kernels.check import FP8 as FP8_TYPES
from glmjax.kernels.choose import Implementation, choose, target_device
from glmjax.kernels.index_limits import FP8, KEY_BLOCK, key_obstacle

FEW_HEADS = 8  # up to here one query on a CPU reads its keys where they are, see few_rows; more heads compute too much
CHUNK = 4096  # keys scored at once by the jnp form, over all requests: no [context, heads] array is made


def index_scores(
    query: jax.Array,
    head_weights: jax.Array,
    keys: jax.Array,
    key_scale: jax.Array | None,
    query_position: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Scores of one chunk of the context; positions after the query are -inf.

    Args:
      query: [R, Q, H, d], of R requests with Q tokens each.
      head_weights: [R, Q, H] float32; every constant factor and the query's own scale are folded in.
      keys: [R, C, d] of each request.
      key_scale: [R, C] float32, or None for unscaled keys.
      query_position: [R, Q] int32.
      positions: [C] int32 of the keys.

    Returns:
      [R, Q, C] float32.

    Raises:
      ConfigError: arrays do not fit one another.
    """
    check_arrays(
        "index_scores",
        {
            "query": (query, "R Q H d", FLOATS),
            "head_weights": (head_weights, "R Q H", FLOAT32),
            "keys": (keys, "R C d", (*FLOATS, "float8_e4m3fn")),
            "key_scale": (key_scale, "R C", FLOAT32),
            "query_position": (query_position, "R Q", INT32),
            "positions": (positions, "C", INT32),
        },
        optional=("key_scale",),
    )
    keys = keys.astype(query.dtype)
    scores = _all_heads(query, head_weights, keys) if query.shape[1] == 1 else _by_head(query, head_weights, keys)
    if key_scale is not None:
        scores = scores * key_scale[:, None]
    return jnp.where(positions <= query_position[..., None], scores, -jnp.inf)


def _all_heads(query: jax.Array, head_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """One query per request: a product of the keys with its heads, then one with the heads' weights."""
    heads = query.shape[2]
    if 2 <= heads <= FEW_HEADS and target_device()[0] == "cpu":
        rows = jax.lax.optimization_barrier(query[:, 0]).astype(jnp.float32)  # [R, H, d]
        products = few_rows.sums([keys.astype(jnp.float32) * rows[:, h, None] for h in range(heads)], axis=2)
        scores = sum(jax.nn.relu(product) * head_weights[:, 0, h, None] for h, product in enumerate(products))
        return jax.lax.optimization_barrier(scores)[:, None]  # to write them into a larger array is for one core
    product = jnp.einsum("rcd,rhd->rch", keys, query[:, 0], preferred_element_type=jnp.float32)
    # The barrier keeps the two products apart: fused, they run at half the speed on a CPU.
    product = jax.lax.optimization_barrier(jax.nn.relu(product))
    return jnp.einsum("rch,rh->rc", product, head_weights[:, 0], precision="highest")[:, None]


def _by_head(query: jax.Array, head_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Many queries: one head after the other, so that no [Q, heads, C] array is made."""
    R, Q, H, _ = query.shape

    def add(h: jax.Array, scores: jax.Array) -> jax.Array:
        product = jnp.einsum("rqd,rcd->rqc", query[:, :, h], keys, preferred_element_type=jnp.float32)
        return scores + jax.nn.relu(product) * head_weights[:, :, h, None]

    return jax.lax.fori_loop(0, H, add, jnp.zeros((R, Q, keys.shape[1]), jnp.float32))


def paged_index_scores(
    query: jax.Array,
    head_weights: jax.Array,
    index_key: jax.Array,
    index_scale: jax.Array | None,
    indexer: jax.Array | int,
    tables: jax.Array,
    visible: jax.Array,
    *,
    block_size: int = KEY_BLOCK,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Scores of queries with the keys of their requests' blocks.

    Keys [R, C, d] that stand one request after the other are a pool too: ``keys.reshape(1, R * C, d)`` with the tables
    ``contiguous_tables(R, C)``.

    Args:
      query: [R, Q, H, d] of R requests with Q tokens each, of the keys' type or float8_e4m3fn for keys stored as bytes.
      head_weights: [R, Q, H] float32; every constant factor and the query's own scale are folded in.
      index_key: [N, S, d] keys of N indexers in S slots: numbers, or the bytes of float8_e4m3fn as uint8.
      index_scale: [N, S] float32, or None for unscaled keys.
      indexer: which of the N.
      tables: [R, n] int32 blocks of each request; entries of blocks that no query sees may be any of the pool's.
      visible: [R, Q] int32: a query sees the first so many keys of its request's blocks.
      block_size: slots of a block.
      implementation: "auto", "jnp" or "hopper".

    Returns:
      [R, Q, n * block_size] float32, -inf where a query does not see the key.

    Raises:
      ConfigError: arrays do not fit one another, bytes have no scale, or the implementation is unknown, or asked for
        and not for these arguments.
    """
    check_pool("index_scores", query, head_weights, index_key, index_scale, indexer, tables, visible, block_size)
    if not (visible.size and tables.size):
        return jnp.full((*visible.shape, tables.shape[1] * block_size), -jnp.inf)
    blocks, keys, scale = flat_pool(index_key, index_scale, indexer, tables, block_size)
    obstacle = key_obstacle(query, keys, scale, block_size)
    if choose("index_scores", implementation, kernel="hopper", obstacle=obstacle) == "hopper":
        from glmjax.kernels.index_scores_hopper import index_scores_hopper

        assert scale is not None  # else there is an obstacle
        return index_scores_hopper(query, head_weights, keys, scale, blocks, visible)
    if query.dtype == FP8:
        query = query.astype(jnp.float32)
    R, n = blocks.shape
    at_once = max(1, min(n, CHUNK // (R * block_size)))
    chunks, size = -(-n // at_once), at_once * block_size
    blocks = jnp.pad(blocks, ((0, 0), (0, chunks * at_once - n)))

    def add(i: jax.Array, scores: jax.Array) -> jax.Array:
        here = jax.lax.dynamic_slice_in_dim(blocks, i * at_once, at_once, axis=1)
        positions = i * size + jnp.arange(size, dtype=jnp.int32)
        part = index_scores(query, head_weights, *read_blocks(keys, scale, here, block_size), visible - 1, positions)
        return jax.lax.dynamic_update_slice_in_dim(scores, part, i * size, axis=2)

    scores = jax.lax.empty((R, query.shape[1], chunks * size), jnp.float32)
    return jax.lax.fori_loop(0, chunks, add, scores)[..., : n * block_size]


def contiguous_tables(requests: int, keys: int, block_size: int = KEY_BLOCK) -> jax.Array:
    """[requests, keys // block_size] int32 blocks of requests with so many keys each, one request after the other."""
    blocks = keys // block_size
    return jnp.arange(requests * blocks, dtype=jnp.int32).reshape(requests, blocks)


def check_pool(
    operation: str,
    query: jax.Array,
    head_weights: jax.Array,
    index_key: jax.Array,
    index_scale: jax.Array | None,
    indexer: jax.Array | int,
    tables: jax.Array,
    visible: jax.Array,
    block_size: int,
) -> None:
    """Whether the arguments of ``paged_index_scores`` fit one another.

    Raises:
      ConfigError: they do not, or there are bytes without a scale.
    """
    check_arrays(
        operation,
        {
            "query": (query, "R Q H d", (*FLOATS, "float8_e4m3fn")),
            "head_weights": (head_weights, "R Q H", FLOAT32),
            "index_key": (index_key, "N S d", FLOATS + FP8_TYPES),
            "index_scale": (index_scale, "N S", FLOAT32),
            "tables": (tables, "R n", INT32),
            "visible": (visible, "R Q", INT32),
        },
        optional=("index_scale",),
    )
    if index_scale is None:  # float8_e4m3fn may be meant as numbers, bytes may not
        check_scale(operation, "index_key", index_key, "index_scale", index_scale, ("uint8",))
    N, S, _ = index_key.shape
    check_place(operation, "indexer", indexer, N)
    if block_size < 1 or S % block_size:
        raise ConfigError(f"{operation}: index_key of {S} slots with block_size={block_size}, give whole blocks")


def flat_pool(
    index_key: jax.Array, index_scale: jax.Array | None, indexer: jax.Array | int, tables: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Blocks of one indexer in a pool of all [R, n], keys [N * S, d] as numbers and their scales [N * S]."""
    N, S, dim = index_key.shape
    keys = jax.lax.bitcast_convert_type(index_key, FP8) if index_key.dtype == jnp.uint8 else index_key
    scale = None if index_scale is None else index_scale.reshape(N * S)
    return tables + indexer * (S // block_size), keys.reshape(N * S, dim), scale


def read_blocks(
    keys: jax.Array, scale: jax.Array | None, blocks: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array | None]:
    """Keys [R, n * block_size, d] and scales [R, n * block_size] of blocks [R, n], entries out of range clamped.

    Keys that are fp8, or its bytes as uint8, are read as bytes: XLA's CPU backend would turn the whole pool into f16 to
    read a block of it. Bytes are best given as such, or a branch of a program may copy the pool from one to the other.
    """

    def read(pool: jax.Array) -> jax.Array:
        by_block = pool.reshape(-1, block_size, *pool.shape[1:])
        return by_block.at[blocks].get(mode="clip").reshape(blocks.shape[0], -1, *pool.shape[1:])

    found = read(jax.lax.bitcast_convert_type(keys, jnp.uint8) if keys.dtype == FP8 else keys)
    if found.dtype == jnp.uint8:
        found = jax.lax.bitcast_convert_type(found, FP8)
    return found, None if scale is None else read(scale)


def index_scores_numpy(
    query: np.ndarray, head_weights: np.ndarray, keys: np.ndarray, query_position: np.ndarray
) -> np.ndarray:
    """Float64 twin for one request: [Q, H, d], [Q, H], [S, d], [Q] -> [Q, S]."""
    product = np.maximum(np.einsum("qhd,sd->qhs", query.astype(np.float64), keys.astype(np.float64)), 0)
    scores = np.einsum("qhs,qh->qs", product, head_weights.astype(np.float64))
    return np.where(np.arange(keys.shape[0]) <= query_position[:, None], scores, -np.inf)
