"""What sparse MLA's Hopper kernel is for."""

import jax

LATENT, ROPE = 512, 64  # values of a row
TILE, HEADS = 64, 64  # rows and heads that a block takes at once


def find_obstacle(
    query_latent: jax.Array,
    query_rope: jax.Array,
    latent: jax.Array,
    latent_scale: jax.Array | None,
    rope: jax.Array,
    rows: jax.Array,
) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    heads = query_latent.shape[1]
    if (widths := (latent.shape[-1], rope.shape[-1])) != (LATENT, ROPE):
        return f"rows of {widths[0]} + {widths[1]} values, the kernel is for {LATENT} + {ROPE}"
    types = [x.dtype.name for x in (query_latent, query_rope, rope, latent)]
    if types != ["bfloat16"] * 3 + ["bfloat16" if latent_scale is None else "uint8"]:
        return f"{types[0]} queries and {types[3]} rows, the kernel is for bfloat16 queries and fp8 or bfloat16 rows"
    if heads % 8 or (heads > HEADS and heads % HEADS):
        return f"{heads} heads, the kernel is for multiples of 8 up to {HEADS} and of {HEADS} beyond"
    if rows.shape[1] % TILE or not rows.shape[1]:
        return f"{rows.shape[1]} rows for a query, the kernel is for multiples of {TILE}"
    return None
