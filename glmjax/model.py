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

from glmjax.attention import attend, new_rows, query_latent, selected_slots
from glmjax.batch import contiguous_batch
from glmjax.cache import CacheDtype, KVCache, Rows, make_cache
from glmjax.config import GLMConfig
from glmjax.gathered import KV, Ahead, first_kv
from glmjax.hisparse import Incoming, take_in
from glmjax.indexer import new_keys, select
from glmjax.layers import at_layer, linear, rms_norm, rope_angles, swiglu
from glmjax.moe import moe
from glmjax.params import Params
from glmjax.sharding.collectives import Collectives
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.share import Share, share_of

MLPKind = Literal["dense", "experts"]


class Selection(NamedTuple):
    """What the queries of an index group attend to.

    Attributes:
      positions: [T, K] int32, -1 for missing.
      slots, incoming: where attention reads them, and rows that followers have to take in, from ``selected_slots``.
    """

    positions: jax.Array
    slots: jax.Array
    incoming: Incoming | None


# Writes a layer's new rows and says what it attends to: (kv, new rows, x, query latent).
Choose = Callable[[KV, Rows, jax.Array, jax.Array], tuple[KV, Selection]]


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
    kv: KV,
    hidden: jax.Array,
    share: Share,
    mlps: tuple[MLPKind, ...],
    layer: jax.Array | int,
    indexer: jax.Array | int,
    chosen: jax.Array | None = None,
    *,
    last: bool = False,
) -> tuple[KV, jax.Array, jax.Array]:
    """One index group.

    Args:
      kv: from ``first_kv`` for this layer and indexer, or from the group before.
      hidden: [T, D], T = r * q.
      layer, indexer: place of the leader among the layers and among the indexers.
      chosen: [T, K] positions to attend to instead of running the indexer (drafts after the first).
      last: no group follows, so none's rows need to be gathered.

    Returns:
      the KV, hidden [T, D] and the selected positions [T, K].
    """
    angles = rope_angles(share.positions.reshape(-1), config.qk_rope_head_dim, config.rope_theta)

    def run_layer(
        kv: KV, hidden: jax.Array, layer: jax.Array | int, kind: MLPKind, choose: Choose, ahead: Ahead
    ) -> tuple[KV, jax.Array, Selection]:
        weights = at_layer(params.attention, layer)
        x = rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
        latent = query_latent(weights, config, x)
        kv, chosen = choose(kv, new_rows(weights, config, x, angles), x, latent)
        out, kv = attend(weights, config, kv, layer, latent, angles, chosen.slots, share, ahead)
        hidden = hidden + out
        x = rms_norm(hidden, weights.output_norm, config.rms_norm_eps)
        if kind == "dense":
            assert params.dense is not None
            out = swiglu(x, *at_layer((params.dense.gate_up, params.dense.down), layer))
            out = share.collectives.all_reduce(out, share.layout.tensor_axes)
        else:
            assert params.moe is not None
            out = moe(params.moe, config, layer - config.first_k_dense_replace, x, share)
        return kv, hidden + out, chosen

    def lead(kv: KV, rows: Rows, x: jax.Array, latent: jax.Array) -> tuple[KV, Selection]:
        if chosen is not None:
            kv, positions = kv.write(rows, share, layer), chosen
        else:
            weights = at_layer(params.indexer, indexer)
            kv = kv.write(rows | new_keys(weights, config, x, angles), share, layer, indexer)
            positions = select(weights, config, kv, indexer, x, latent, angles, share)
        kv, slots, incoming = selected_slots(
            kv, share, positions, layer=layer, indexer=indexer, followers=len(mlps) - 1
        )
        return kv, Selection(positions, slots, incoming)

    def next_layer(place: int) -> jax.Array | int | None:
        """The layer after that at a place of the group, unless there is none."""
        return None if last and place == len(mlps) - 1 else layer + place + 1

    ahead = Ahead(next_layer(0), None if last else indexer + 1)
    kv, hidden, selected = run_layer(kv, hidden, layer, mlps[0], lead, ahead)
    place = 1
    for kind, same in itertools.groupby(mlps[1:]):
        count = len(list(same))

        def follow(
            carry: tuple[KV, jax.Array], i: jax.Array | int, kind: MLPKind = kind, first: int = place
        ) -> tuple[tuple[KV, jax.Array], None]:
            # A loop, whose i is an array, is of layers that read the pool.
            ahead = Ahead(next_layer(first + i)) if isinstance(i, int) else Ahead()

            def reuse(kv: KV, rows: Rows, *_: jax.Array) -> tuple[KV, Selection]:
                kv = kv.write(rows, share, layer + first + i)
                if selected.incoming is not None:
                    kv = take_in(kv, layer + first + i, selected.incoming, first - 1 + i)
                return kv, selected

            kv, hidden, _ = run_layer(*carry, layer + first + i, kind, reuse, ahead)
            return (kv, hidden), None

        (kv, hidden), _ = _repeat(follow, (kv, hidden), count, unroll=kv.view is not None)
        place += count
    return kv, hidden, selected.positions


def _repeat[C, Y](
    body: Callable[[C, jax.Array | int], tuple[C, Y]], carry: C, count: int, *, unroll: bool = False
) -> tuple[C, Y]:
    """``lax.scan`` of the body over 0 .. count - 1; outputs are stacked.

    Args:
      unroll: no loop.  A loop copies into its carry what a body makes anew, as it does a gathered copy of the KV; of
        two bodies in a row the second puts it where the first one's was.
    """
    if count == 1 or unroll:
        outputs = []
        for i in range(count):
            carry, y = body(carry, i)
            outputs.append(y)
        return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)
    return jax.lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))


def run_layers(params: Params, config: GLMConfig, cache: KVCache, share: Share) -> tuple[KVCache, jax.Array, jax.Array]:
    """The trunk up to the final norm.

    Returns:
      the cache with the batch's rows written, hidden states [T, D] after ``model.norm``, and the positions that each
      indexer selected [N, T, K].
    """
    hidden = params.embed[share.tokens.reshape(-1)]
    kv = first_kv(cache, 0, 0, share)
    chosen = []
    runs = group_runs(config)
    for run in runs:

        def body(
            carry: tuple[KV, jax.Array], group: jax.Array | int, run: GroupRun = run
        ) -> tuple[tuple[KV, jax.Array], jax.Array]:
            layer, indexer = run.layer + group * len(run.mlps), run.indexer + group
            last = run is runs[-1] and run.count == 1
            kv, hidden, chosen = run_group(params, config, *carry, share, run.mlps, layer, indexer, last=last)
            return (kv, hidden), chosen

        (kv, hidden), selected = _repeat(body, (kv, hidden), run.count)
        chosen.append(selected)
    return kv.cache, rms_norm(hidden, params.final_norm, config.rms_norm_eps), jnp.concatenate(chosen)


def logits(params: Params, hidden: jax.Array, layout: Layout = ONE_DEVICE) -> jax.Array:
    """[R, D] after the final norm, the same on all devices of a group -> [R, V] float32, the same on all of them."""
    out = linear(hidden, params.head, jnp.float32)
    if params.head.shape[0] == params.embed.shape[0]:
        return out
    return Collectives(layout).all_gather(out, layout.group_axes, 1)


def forward(params: Params, tokens: jax.Array, config: GLMConfig) -> jax.Array:
    """Logits of whole sequences, with a throw-away KV cache in the parameters' dtype.

    Args:
      tokens: [B, S] int32.

    Returns:
      [B, S, V] float32.
    """
    B, S = tokens.shape
    dtype: CacheDtype = "float32" if params.embed.dtype == jnp.float32 else "bfloat16"
    share = share_of(contiguous_batch(tokens), ONE_DEVICE)
    _, hidden, _ = run_layers(params, config, make_cache(config, B, S, dtype), share)
    return logits(params, hidden).reshape(B, S, -1)
