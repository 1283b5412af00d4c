"""The model: embeddings, index groups in scans over stacked parameters, final norm and head.

An index group is a leader, which runs the indexer, and the followers that reuse its top-k. Consecutive groups of
the same make-up (their layers' MLPs, dense or experts) form a run, and a run of several groups is one ``lax.scan``;
GLM-5.3 has three runs: {0} {1}, {2..5}, and {6..9} .. {74..77}.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from glmjax.attention import attend, insert_kv, query_latent
from glmjax.batch import TokenBatch, contiguous_batch
from glmjax.cache import CacheDtype, KVCache, make_cache
from glmjax.config import GLMConfig
from glmjax.indexer import select
from glmjax.layers import at_layer, linear, rms_norm, rope_angles, swiglu
from glmjax.moe import moe
from glmjax.params import Params

MLPKind = Literal["dense", "experts"]


class Selection(NamedTuple):
    """What the queries of an index group attend to: positions and their slots, [T, K] int32, -1 for missing."""

    positions: jax.Array
    slots: jax.Array


Choose = Callable[[KVCache, jax.Array, jax.Array], tuple[KVCache, Selection]]  # (cache, x, query latent)


@dataclasses.dataclass(frozen=True)
class GroupRun:
    """``count`` consecutive index groups of the same make-up.

    Attributes:
      layer: first layer of the first group; indexer: its place among the indexers.
      mlps: kind of MLP of each layer of a group.
    """

    layer: int
    indexer: int
    mlps: tuple[MLPKind, ...]
    count: int


def group_runs(config: GLMConfig) -> tuple[GroupRun, ...]:
    """Cuts the trunk into runs of equal index groups."""
    layers = config.num_hidden_layers
    leaders = [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    runs: list[GroupRun] = []
    for indexer, (first, end) in enumerate(zip(leaders, [*leaders[1:], layers], strict=True)):
        mlps: tuple[MLPKind, ...] = tuple(
            "dense" if i < config.first_k_dense_replace else "experts" for i in range(first, end)
        )
        if runs and runs[-1].mlps == mlps:
            runs[-1] = dataclasses.replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(GroupRun(first, indexer, mlps, 1))
    return tuple(runs)


def run_group(
    params: Params,
    config: GLMConfig,
    cache: KVCache,
    hidden: jax.Array,
    batch: TokenBatch,
    mlps: tuple[MLPKind, ...],
    layer: jax.Array | int,
    indexer: jax.Array | int,
    chosen: jax.Array | None = None,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """One index group.

    Args:
      hidden: [T, D], T = R * Q.
      layer, indexer: place of the leader among the layers and among the indexers.
      chosen: [T, K] positions to attend to instead of running the indexer (drafts after the first).

    Returns:
      the cache, hidden [T, D] and the selected positions [T, K].
    """
    R, Q = batch.tokens.shape
    angles = rope_angles(batch.positions.reshape(-1), config.qk_rope_head_dim, config.rope_theta)
    valid = batch.valid.reshape(-1)

    def run_layer(
        cache: KVCache, hidden: jax.Array, layer: jax.Array | int, kind: MLPKind, choose: Choose
    ) -> tuple[KVCache, jax.Array, Selection]:
        weights = at_layer(params.attention, layer)
        x = rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
        latent = query_latent(weights, config, x)
        cache = insert_kv(weights, config, cache, layer, x, angles, batch)
        cache, chosen = choose(cache, x, latent)
        hidden = hidden + attend(weights, config, cache, layer, latent, angles, chosen.slots)
        x = rms_norm(hidden, weights.output_norm, config.rms_norm_eps)
        if kind == "dense":
            assert params.dense is not None
            return cache, hidden + swiglu(x, *at_layer((params.dense.gate_up, params.dense.down), layer)), chosen
        assert params.moe is not None
        return cache, hidden + moe(params.moe, config, layer - config.first_k_dense_replace, x, valid), chosen

    def lead(cache: KVCache, x: jax.Array, latent: jax.Array) -> tuple[KVCache, Selection]:
        positions = chosen
        if positions is None:
            weights = at_layer(params.indexer, indexer)
            cache, positions = select(weights, config, cache, indexer, x, latent, angles, batch)
        slots = batch.slots(jnp.maximum(positions, 0).reshape(R, Q, -1)).reshape(positions.shape)
        return cache, Selection(positions, jnp.where(positions >= 0, slots, -1))

    cache, hidden, selected = run_layer(cache, hidden, layer, mlps[0], lead)
    follower = layer + 1
    for kind, same in itertools.groupby(mlps[1:]):
        count = len(list(same))

        def follow(
            carry: tuple[KVCache, jax.Array],
            i: jax.Array | int,
            kind: MLPKind = kind,
            first: jax.Array | int = follower,
        ) -> tuple[tuple[KVCache, jax.Array], None]:
            cache, hidden, _ = run_layer(*carry, first + i, kind, lambda cache, *_: (cache, selected))
            return (cache, hidden), None

        (cache, hidden), _ = _repeat(follow, (cache, hidden), count)
        follower += count
    return cache, hidden, selected.positions


def _repeat[C, Y](body: Callable[[C, jax.Array | int], tuple[C, Y]], carry: C, count: int) -> tuple[C, Y]:
    """``lax.scan`` of the body over 0 .. count - 1; outputs are stacked."""
    if count == 1:
        carry, y = body(carry, 0)
        return carry, jax.tree.map(lambda x: x[None], y)
    return jax.lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))


def run_layers(
    params: Params, config: GLMConfig, cache: KVCache, batch: TokenBatch
) -> tuple[KVCache, jax.Array, jax.Array]:
    """The trunk up to the final norm.

    Returns:
      the cache with the batch's rows written, hidden states [R * Q, D] after ``model.norm``, and the positions that
      each indexer selected [N, R * Q, K].
    """
    hidden = params.embed[batch.tokens.reshape(-1)]
    chosen = []
    for run in group_runs(config):

        def body(
            carry: tuple[KVCache, jax.Array], group: jax.Array | int, run: GroupRun = run
        ) -> tuple[tuple[KVCache, jax.Array], jax.Array]:
            layer, indexer = run.layer + group * len(run.mlps), run.indexer + group
            cache, hidden, chosen = run_group(params, config, *carry, batch, run.mlps, layer, indexer)
            return (cache, hidden), chosen

        (cache, hidden), selected = _repeat(body, (cache, hidden), run.count)
        chosen.append(selected)
    return cache, rms_norm(hidden, params.final_norm, config.rms_norm_eps), jnp.concatenate(chosen)


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """[T, D] after the final norm -> [T, V] float32."""
    return linear(hidden, params.head, jnp.float32)


def forward(params: Params, tokens: jax.Array, config: GLMConfig) -> jax.Array:
    """Logits of whole sequences, with a throw-away KV cache in the parameters' dtype.

    Args:
      tokens: [B, S] int32.

    Returns:
      [B, S, V] float32.
    """
    B, S = tokens.shape
    dtype: CacheDtype = "float32" if params.embed.dtype == jnp.float32 else "bfloat16"
    _, hidden, _ = run_layers(params, config, make_cache(config, B, S, dtype), contiguous_batch(tokens))
    return logits(params, hidden).reshape(B, S, -1)
