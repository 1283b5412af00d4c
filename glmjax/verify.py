"""Verification of drafts: the target chooses a token at every drafted position, and drafts count as far as they agree.

Drafts are certain guesses (one-hot), so "accept a draft d with probability p(d), else sample from p without d" is the
same as sampling from p and seeing whether it is d (spec/system.md 5, after Leviathan et al. 2023). We do the latter,
with noise that depends on seed and position only: the tokens are then those that the request gets without speculation,
one by one, and not just distributed like them.
"""

import jax
import jax.numpy as jnp
import numpy as np

_ACCEPTANCE = 1  # folded into a position's key, so that acceptance is not decided by the noise that chose the token


def num_accepted(choices: jax.Array, drafts: jax.Array, proposed: jax.Array) -> jax.Array:
    """How many leading drafts the target agrees with.

    Args:
      choices: [R, n + 1] int32, the target's token after each of the rows (last token, draft 1 .. draft n).
      drafts: [R, n] int32.
      proposed: [R] int32, leading drafts that were computed at all.

    Returns:
      [R] int32 in [0, n].
    """
    agrees = (choices[:, :-1] == drafts) & (jnp.arange(drafts.shape[1]) < proposed[:, None])
    return leading(agrees)


def synthetic_accepted(rates: tuple[float, ...], seed: jax.Array, start: jax.Array, proposed: jax.Array) -> jax.Array:
    """Accepts drafts by chance instead, for benchmarks with random weights.

    Args:
      rates: for each position, the probability that it and all before it are accepted (spec/system.md 5).
      seed: [R, 2] uint32; start: [R] int32, position of the last token.
      proposed: as in ``num_accepted``; at most ``len(rates)``.

    Returns:
      [R] int32.
    """
    n = len(rates)
    # Given that the draft before was accepted.
    chance = jnp.asarray([rate / before if before else 0.0 for before, rate in zip((1.0, *rates), rates, strict=False)])

    def draw(seed: jax.Array, start: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), start)
        return jax.random.uniform(jax.random.fold_in(key, _ACCEPTANCE), (n,))

    accepted = jax.vmap(draw)(seed, start) < chance
    return leading(accepted & (jnp.arange(n) < proposed[:, None]))


def leading(mask: jax.Array) -> jax.Array:
    """[R, n] bool -> [R] int32, entries before the first False."""
    return jnp.sum(jnp.cumprod(mask.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def num_accepted_numpy(choices: np.ndarray, drafts: np.ndarray, proposed: np.ndarray) -> np.ndarray:
    """NumPy twin, row by row."""
    accepted = np.zeros(len(choices), np.int32)
    for row, (chosen, drafted, most) in enumerate(zip(choices, drafts, proposed, strict=True)):
        while accepted[row] < most and chosen[accepted[row]] == drafted[accepted[row]]:
            accepted[row] += 1
    return accepted
