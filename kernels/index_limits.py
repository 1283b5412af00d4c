"""What the GPU kernels of the indexer are for: sizes and types, and what to say of others."""

import jax
import jax.numpy as jnp

FP8 = jnp.float8_e4m3fn
KEY_BLOCK = 64  # tokens of a block of the pool: the rows of one wgmma
HEAD_DIM = 128  # bytes of a key: a line of the 128-byte swizzle
MAX_K, MAX_ROW = 2048, 1 << 20


def key_obstacle(query: jax.Array, keys: jax.Array, scale: jax.Array | None, block_size: int) -> str | None:
    """Why the kernels cannot score these keys; None if they can."""
    heads, dim = query.shape[2:]
    if query.dtype != FP8 or keys.dtype != FP8 or scale is None:
        scaled = "unscaled " if scale is None else ""
        return f"{query.dtype} queries and {scaled}{keys.dtype} keys, the kernel is for scaled float8_e4m3fn"
    if dim != HEAD_DIM:
        return f"head width {dim}, the kernel is for {HEAD_DIM}"
    if heads & (heads - 1) or not 16 <= heads <= 256:
        return f"{heads} heads, the kernel is for powers of two from 16 to 256"
    if block_size != KEY_BLOCK:
        return f"blocks of {block_size} tokens, the kernel is for {KEY_BLOCK}"
    return None


def row_obstacle(scores: jax.Array, k: int) -> str | None:
    """Why the kernel cannot choose k of these rows; None if it can."""
    if scores.dtype != jnp.float32:
        return f"{scores.dtype} scores, the kernel is for float32"
    if not 1 <= scores.shape[1] <= MAX_ROW:
        return f"rows of {scores.shape[1]} scores, the kernel is for 1 to {MAX_ROW}"
    return k_obstacle(k)


def k_obstacle(k: int) -> str | None:
    return None if 1 <= k <= MAX_K else f"k={k}, the kernel is for 1 to {MAX_K}"
