"""Choosing the next token: greedy or by Gumbel noise that depends on the request's seed and the position only.

A row's token is therefore the same whatever else is in the batch, however the prompt was chunked, and after preemption.
"""

import jax
import jax.numpy as jnp
from flax import struct

from glmjax.types import MAX_LOGPROBS


@struct.dataclass
class SamplingBatch:
    """How to choose, one row per request.

    Attributes:
      temperature: [R] float32; 0 is greedy.
      top_p, min_p: [R] float32; 1 and 0 are off.
      top_k: [R] int32; 0 or less is off.
      seed: [R, 2] uint32, the two halves of the request's 64-bit seed.
      banned: [R, B] int32 tokens that may not be chosen, -1 for none.
      wants_logprobs: [R] bool.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    banned: jax.Array
    wants_logprobs: jax.Array


@struct.dataclass
class SampleOutput:
    """Chosen tokens and log-probabilities under the model's own distribution.

    Attributes:
      token: [R] int32.
      logprob: [R] float32; rank: [R] int32, 1 for the likeliest; zero unless some row wants log-probabilities.
      top_ids: [R, 20] int32 and top_logprobs: [R, 20] float32, likeliest first; likewise.
    """

    token: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits: jax.Array, how: SamplingBatch, position: jax.Array) -> SampleOutput:
    """Chooses one token per row.

    Args:
      logits: [R, V] float32.
      position: [R] int32, position the new token will take.
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    where = jnp.where(how.banned >= 0, how.banned, logits.shape[1])
    allowed = logits.at[rows, where].set(-jnp.inf, mode="drop")
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    token = jax.lax.cond(
        jnp.any(how.temperature > 0),
        lambda: jnp.where(how.temperature > 0, _random(allowed, how, position), greedy),
        lambda: greedy,
    )
    return _with_logprobs(logits, token, jnp.any(how.wants_logprobs))


def _random(logits: jax.Array, how: SamplingBatch, position: jax.Array) -> jax.Array:
    scaled = logits / jnp.maximum(how.temperature, 1e-6)[:, None]
    vocab = scaled.shape[-1]
    filters = jnp.any((how.top_p < 1) | ((how.top_k > 0) & (how.top_k < vocab)))
    scaled = jax.lax.cond(filters, lambda: _keep_likely(scaled, how), lambda: scaled)
    floor = jnp.max(scaled, axis=-1) + jnp.log(how.min_p)  # -inf where min_p is 0
    scaled = jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab,))

    return jnp.argmax(scaled + jax.vmap(noise)(how.seed, position), axis=-1).astype(jnp.int32)


def _keep_likely(scaled: jax.Array, how: SamplingBatch) -> jax.Array:
    """Top-k, then top-p of what is left; ties with the last token kept stay in."""
    vocab = scaled.shape[-1]
    k = jnp.where(how.top_k > 0, how.top_k, vocab)[:, None]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    ordered = jnp.where(jnp.arange(vocab) < k, ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = jnp.where(
        ((before < how.top_p[:, None]) | (how.top_p[:, None] >= 1)) & (ordered > -jnp.inf), ordered, jnp.inf
    )
    return jnp.where(scaled >= jnp.min(kept, axis=-1, keepdims=True), scaled, -jnp.inf)


def _with_logprobs(logits: jax.Array, token: jax.Array, wanted: jax.Array) -> SampleOutput:
    rows, most = logits.shape[0], min(MAX_LOGPROBS, logits.shape[1])

    def compute() -> tuple[jax.Array, ...]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)
        top, ids = jax.lax.top_k(logprobs, most)
        return chosen[:, 0], 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32), ids, top

    def skip() -> tuple[jax.Array, ...]:
        f32, i32 = jnp.float32, jnp.int32
        return jnp.zeros(rows, f32), jnp.zeros(rows, i32), jnp.zeros((rows, most), i32), jnp.zeros((rows, most), f32)

    return SampleOutput(token, *jax.lax.cond(wanted, compute, skip))
