"""What a step computes: a rectangle of R requests with up to Q new tokens each, as device arrays."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class TokenBatch:
    """New tokens of R requests, padded to Q each.

    Attributes:
      tokens: [R, Q] int32.
      start: [R] int32, position of tokens[:, 0].
      length: [R] int32, tokens that are real; the rest of the row is padding and leaves no trace.
      block_tables: [R, B] int32, physical blocks of the request in order; unused entries may hold any block.
      block_size: tokens of a block.
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    block_tables: jax.Array
    block_size: int = struct.field(pytree_node=False)

    @property
    def positions(self) -> jax.Array:
        """[R, Q] int32; padding goes on counting."""
        return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    @property
    def valid(self) -> jax.Array:
        """[R, Q] bool."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32) < self.length[:, None]


def contiguous_batch(tokens: jax.Array) -> TokenBatch:
    """[R, Q] tokens from position 0, request r in slots r * Q .. (r + 1) * Q - 1."""
    requests, length = tokens.shape
    return TokenBatch(
        tokens=tokens.astype(jnp.int32),
        start=jnp.zeros(requests, jnp.int32),
        length=jnp.full(requests, length, jnp.int32),
        block_tables=jnp.arange(requests, dtype=jnp.int32)[:, None],
        block_size=length,
    )
