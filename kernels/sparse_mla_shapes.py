"""Shapes and types of sparse MLA's arguments: those that fit one another, and those its Hopper kernel is for."""

import jax

from glmjax.kernels.check import FLOAT32, FLOATS, INT32, check_arrays, check_scale
from glmjax.kernels.kv_rows import LATENT_TILE

LATENT, ROPE = 512, 64  # values of a row
TILE, HEADS = 64, 64  # rows and heads that a block takes at once


def check_arguments(
    query_latent: jax.Array,
    query_rope: jax.Array,
    latent: jax.Array,
    latent_scale: jax.Array | None,
    rope: jax.Array,
    rows: jax.Array,
) -> None:
    """Whether the arguments of ``sparse_mla_from_pool`` fit one another.

    Raises:
      ConfigError: they do not.
    """
    check_arrays(
        "sparse_mla",
        {
            "query_latent": (query_latent, "T H kv_lora", FLOATS),
            "query_rope": (query_rope, "T H rope", FLOATS),
            "latent": (latent, "L S kv_lora", (*FLOATS, "uint8")),
            "latent_scale": (latent_scale, f"L S kv_lora/{LATENT_TILE}", FLOAT32),
            "rope": (rope, "L S rope", FLOATS),
            "rows": (rows, "T K", INT32),
        },
        optional=("latent_scale",),
    )
    check_scale("sparse_mla", "latent", latent, "latent_scale", latent_scale, ("uint8",))


def attention_obstacle(
    query_latent: jax.Array,
    query_rope: jax.Array,
    latent: jax.Array,
    latent_scale: jax.Array | None,
    rope: jax.Array,
    rows: jax.Array,
) -> str | None:
    """Why the kernel cannot take these arguments; None if it can.

    Raises:
      ConfigError: rows have the width that the kernel is for, and the arguments do not fit one another.
    """
    if (widths := (latent.shape[-1], rope.shape[-1])) != (LATENT, ROPE):
        return f"rows of {widths[0]} + {widths[1]} values, the kernel is for {LATENT} + {ROPE}"
    check_arguments(query_latent, query_rope, latent, latent_scale, rope, rows)
    types = [x.dtype.name for x in (query_latent, query_rope, rope, latent)]
    if types != ["bfloat16"] * 3 + ["bfloat16" if latent_scale is None else "uint8"]:
        return f"{types[0]} queries and {types[3]} rows, the kernel is for bfloat16 queries and fp8 or bfloat16 rows"
    heads = query_latent.shape[1]
    if heads % 8 or (heads > HEADS and heads % HEADS):
        return f"{heads} heads, the kernel is for multiples of 8 up to {HEADS} and of {HEADS} beyond"
    if rows.shape[1] % TILE or not rows.shape[1]:
        return f"{rows.shape[1]} rows for a query, the kernel is for multiples of {TILE}"
    return None
