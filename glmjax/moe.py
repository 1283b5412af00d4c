"""Mixture of experts: a sigmoid router in float32 with a selection bias, routed experts and shared ones.

With expert parallelism every device has some experts; ``glmjax.sharding.dispatch`` brings the tokens of all devices to
them and the results back. No token is ever dropped.
"""

import jax
import jax.numpy as jnp

from glmjax.config import GLMConfig
from glmjax.kernels.grouped_matmul import grouped_swiglu
from glmjax.layers import at_layer, swiglu
from glmjax.params import MoEParams, QuantizedWeight, Weight
from glmjax.sharding.dispatch import Exchange, gather_dispatch, ragged_dispatch
from glmjax.share import Share


def route(router: jax.Array, bias: jax.Array, config: GLMConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chooses experts (spec/model.md 2.6): the bias decides who is chosen, not how much they count.

    Args:
      router: [E, D] float32; bias: [E] float32 (rounding it to bf16 would change most choices).
      x: [T, D].

    Returns:
      expert ids [T, k] int32 and their weights [T, k] float32.
    """
    probability = jax.nn.sigmoid(jnp.matmul(x.astype(jnp.float32), router.T, precision="highest"))
    _, ids = jax.lax.top_k(probability + bias, config.num_experts_per_tok)
    weights = jnp.take_along_axis(probability, ids, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * config.routed_scaling_factor


def moe(
    params: MoEParams,
    config: GLMConfig,
    index: jax.Array | int,
    x: jax.Array,
    share: Share,
    exchange: Exchange = jax.lax.ragged_all_to_all,
) -> jax.Array:
    """Routed plus shared experts of one layer.

    Args:
      params: stacks over all such layers; index: which one.
      x: [T, D]; padding is sent to no expert.
      exchange: see ``ragged_dispatch``.

    Returns:
      [T, D].
    """
    layout, collectives = share.layout, share.collectives
    ids, weights = route(params.router[index], params.router_bias[index], config, x)
    ids = jnp.where(share.valid.reshape(-1, 1), ids, -1)
    experts = params.router.shape[1] // collectives.size(layout.expert_axes)  # of this device

    def own_experts(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        own = ids - collectives.rank(layout.expert_axes) * experts
        own = jnp.where((own >= 0) & (own < experts), own, -1)
        (gate_up, gate_up_scale), (down, down_scale) = map(_values_and_scale, (params.gate_up, params.down))
        return grouped_swiglu(
            tokens,
            own,
            gate_up,
            down,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
            layer=index,
            pair_weights=weights,
            expected_pairs=max(1, own.size // collectives.size(layout.expert_axes)),
        )

    if share.dispatch == "ragged" and layout.expert_axes:
        out = ragged_dispatch(own_experts, collectives, x, ids, weights, experts, exchange)
    else:
        out = gather_dispatch(own_experts, collectives, x, ids, weights)
    if config.n_shared_experts:
        out += swiglu(x, at_layer(params.shared_gate_up, index), at_layer(params.shared_down, index))
    return collectives.all_reduce(out, layout.tensor_axes)


def _values_and_scale(stack: Weight) -> tuple[jax.Array, jax.Array | None]:
    return (stack.values, stack.scale) if isinstance(stack, QuantizedWeight) else (stack, None)
