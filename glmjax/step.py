"""The pure step of one shape: computes a rectangle, writes its KV, chooses tokens, and drafts the next ones.

A decode step goes on from what the device itself knows of its requests (``RequestState``), so the host can send the
next one before it has seen what came of the last. With drafts, a row is the request's last token and its drafts; the
target chooses a token after each, drafts count as far as they agree (``glmjax.verify``), the MTP layer runs over the
rows that count and drafts anew. Rows of rejected drafts are in the cache until the next step writes over them, at
positions that nothing sees before.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from glmjax.batch import TokenBatch
from glmjax.cache import KVCache, packed_row_bytes
from glmjax.config import GLMConfig
from glmjax.hisparse import start_counting
from glmjax.kernels.row_format import HostRows
from glmjax.model import logits, run_layers
from glmjax.mtp import draft
from glmjax.params import Params
from glmjax.sample import SampleOutput, SamplingBatch, sample
from glmjax.sharding.collectives import Collectives
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.sharding.partition import batch_spec, cache_spec, param_specs
from glmjax.sharding.traffic import Prefill
from glmjax.share import Combine, Dispatch, KVSource, share_of
from glmjax.speculation import NO_SPECULATION, Speculation
from glmjax.step_io import StepRows, StepShape, unpack
from glmjax.tiers import Offload, Tiers
from glmjax.verify import leading, num_accepted, synthetic_accepted


@struct.dataclass
class RequestState:
    """What the device knows of the requests that decode, by slot; the last slot is for rows that leave nothing.

    Attributes:
      length: [S] int32, tokens known, of which all but the last have their KV in the cache.
      token: [S] int32, the last of them.
      drafts: [S, max(1, n)] int32 guesses at the following ones; -1: none, and none after it.
    """

    length: jax.Array
    token: jax.Array
    drafts: jax.Array


def abstract_state(slots: int, num_drafts: int) -> RequestState:
    """Shapes for ``slots`` requests and the spare one."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((slots + 1, *shape), jnp.int32)

    # One draft at least: JAX forgets how an empty array is sharded.
    return RequestState(array(), array(), array(max(1, num_drafts)))  # type: ignore[arg-type]


# With rows on the host also the host's pool and the blocks' pages, see ``Tiers``.
Step = Callable[..., tuple[KVCache, RequestState, jax.Array]]


def make_step(
    config: GLMConfig,
    shape: StepShape,
    table_width: int,
    block_size: int,
    layout: Layout = ONE_DEVICE,
    *,
    prefill: Prefill = "auto",
    combine: Combine = "ag_rs",
    dispatch: Dispatch = "gather",
    speculation: Speculation = NO_SPECULATION,
    offload: Offload | None = None,
) -> Step:
    """The step (params, cache, state, packed inputs) -> (cache, state, packed outputs).

    It is what one device does; with more than one it runs inside ``shard_map``, on the batch of its data-parallel rank,
    and every device of the group gives the same outputs.

    Args:
      prefill: see ``Share.kv``; "auto" is whichever moves fewer bytes for this shape.
      combine, dispatch: see ``Share``.
      speculation: a decode step drafts ``shape.tokens - 1`` tokens, a chunk ``speculation.num_drafts``. A decode step
        that verifies none drafts one all the same, so that the MTP layer has the KV of every token.
      offload: rows are in two tiers; the step then takes ``Tiers.host`` and ``Tiers.page_of`` too.
    """
    num_drafts = speculation.num_drafts
    if shape.decode and num_drafts:
        num_drafts = max(1, shape.tokens - 1)
    if shape.staged:
        num_drafts = min(num_drafts, 1)  # the following ones would copy a whole context for one token
    region_pages = 0 if offload is None else offload.region_pages

    def kv_source(params: Params, cache: KVCache) -> KVSource:
        return layout.traffic(
            config,
            tokens=shape.tokens,
            requests=shape.requests,
            context_rows=(shape.blocks or table_width) * block_size * layout.dcp,
            block_size=block_size,
            kv_dtype=cache.dtype,
            activation_bytes=params.embed.dtype.itemsize,
            combine=combine,
        ).kv

    def step(
        params: Params,
        cache: KVCache,
        state: RequestState,
        packed: jax.Array,
        host: jax.Array | None = None,
        page_of: jax.Array | None = None,
    ) -> tuple[KVCache, RequestState, jax.Array]:
        rows = unpack(packed, shape, table_width, region_pages)
        if shape.decode:
            rows = go_on(rows, state)
        tiers = None
        if host is not None and page_of is not None:
            assert offload is not None
            regions = rows.regions if shape.decode and region_pages else None
            slots = cache.index_key.shape[1] - block_size
            pool: jax.Array | HostRows = host
            if offload.reads == "address":
                pool = HostRows(host.reshape(2), packed_row_bytes(cache))
            tiers = Tiers(pool, page_of, regions, shape.staged, slots)
        cache = start_counting(cache)
        batch = TokenBatch(rows.tokens, rows.start, rows.length, rows.block_tables, block_size)
        source = kv_source(params, cache) if prefill == "auto" else prefill
        share = share_of(batch, layout, prefill=source, combine=combine, dispatch=dispatch, tiers=tiers)
        cache, hidden, _ = run_layers(params, config, cache, share)

        wanted = share.all_rows(hidden) if shape.decode else share.last_rows(hidden)[:, None]
        out = choose(logits(params, wanted.reshape(-1, wanted.shape[-1]), layout), rows, wanted.shape[1])
        new = count_new(out.token, rows, speculation.rates) if shape.decode else one_new(out.token, rows)

        drafts = jnp.full((shape.requests, state.drafts.shape[1]), -1, jnp.int32)
        if num_drafts:
            following = dataclasses.replace(batch, tokens=new.following, length=new.computed)
            cache, guesses, _ = draft(
                params, config, cache, hidden, following, num_drafts, layout,
                limit=rows.limit, prefill=source, combine=combine, dispatch=dispatch, tiers=tiers,
            )  # fmt: skip
            drafts = drafts.at[:, :num_drafts].set(guesses)
        state = remember(state, rows, new, drafts)
        packed = pack_outputs(out, new)
        if region_pages:
            assert cache.hot is not None
            counts = Collectives(layout).all_reduce(cache.hot.counts[0, rows.regions.slot], layout.group_axes)
            packed = jnp.concatenate([packed, counts], axis=1)
        return cache, state, packed

    return step


def go_on(rows: StepRows, state: RequestState) -> StepRows:
    """Rows that continue get their tokens, start and length from the state; padding becomes a row of no tokens."""
    drafts = state.drafts[rows.slot][:, : rows.tokens.shape[1] - 1]
    start = state.length[rows.slot] - 1
    length = jnp.clip(rows.limit - start, 0, 1 + leading(drafts >= 0))
    tokens = jnp.concatenate([state.token[rows.slot][:, None], jnp.maximum(drafts, 0)], axis=1)
    on = rows.continues
    return dataclasses.replace(
        rows,
        tokens=jnp.where(on[:, None], tokens, rows.tokens),
        start=jnp.where(on, start, rows.start),
        length=jnp.where(on, length, rows.length),
    )


@struct.dataclass
class NewTokens:
    """What a step adds to its requests.

    Attributes:
      first: [R] int32, the row's token after which the first new one stands.
      count: [R] int32, new tokens: the accepted drafts and one more; 0 for padding.
      drafted: [R] int32, drafts verified.
      tokens: [R, E] int32, of which ``count`` are new.
      following: [R, Q] int32, the token after each of the row's.
      computed: [R] int32, tokens of the row that count: the rest were rejected drafts.
    """

    first: jax.Array
    count: jax.Array
    drafted: jax.Array
    tokens: jax.Array
    following: jax.Array
    computed: jax.Array


def count_new(choices: jax.Array, rows: StepRows, rates: tuple[float, ...] | None) -> NewTokens:
    """Verifies the drafts of a decode step.

    Args:
      choices: [R * Q] int32, the target's token after each token of the rows.
      rates: accept by chance (``Speculation.rates``).
    """
    R, Q = rows.tokens.shape
    choices, drafts = choices.reshape(R, Q), rows.tokens[:, 1:]
    # A row that brings its own tokens is the end of a prompt: what follows its last one is new.
    first = jnp.where(rows.continues, 0, jnp.maximum(rows.length - 1, 0))
    drafted = jnp.where(rows.continues, jnp.maximum(rows.length - 1, 0), 0)
    if rates is None or Q == 1:
        accepted = num_accepted(choices, drafts, drafted)
    else:
        accepted = synthetic_accepted(rates[: Q - 1], rows.how.seed, rows.start, drafted)
    last = first + accepted
    final = jnp.take_along_axis(choices, last[:, None], axis=1)
    shifted = jnp.pad(drafts, ((0, 0), (0, 1)))
    place = jnp.arange(Q)
    after = jnp.where(rows.next_token >= 0, rows.next_token, final[:, 0])
    following = jnp.where(place < last[:, None], shifted, after[:, None])
    real = rows.length > 0
    return NewTokens(
        first=first,
        count=jnp.where(real, accepted + 1, 0),
        drafted=drafted,
        tokens=jnp.where(place < accepted[:, None], shifted, final),
        following=following,
        computed=jnp.where(real, last + 1, 0),
    )


def one_new(choices: jax.Array, rows: StepRows) -> NewTokens:
    """The one token after each chunk: choices [R] int32."""
    last = rows.length - 1
    after = jnp.where(rows.next_token >= 0, rows.next_token, choices)
    shifted = jnp.pad(rows.tokens[:, 1:], ((0, 0), (0, 1)))
    following = jnp.where(jnp.arange(rows.tokens.shape[1]) < last[:, None], shifted, after[:, None])
    real = rows.length > 0
    zero = jnp.zeros_like(last)
    return NewTokens(last, real.astype(jnp.int32), zero, choices[:, None], following, rows.length)


def choose(scores: jax.Array, rows: StepRows, per_row: int) -> SampleOutput:
    """The target's tokens: scores [R * E, V] after each row's tokens, or after its last one (E = ``per_row`` = 1)."""
    start = rows.start if per_row > 1 else rows.start + jnp.maximum(rows.length - 1, 0)
    position = (start[:, None] + 1 + jnp.arange(per_row, dtype=jnp.int32)).reshape(-1)

    def each(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, per_row, axis=0)

    how: SamplingBatch = jax.tree.map(each, rows.how)
    banned = jnp.where((position < each(rows.ban_end))[:, None], how.banned, -1)
    return sample(scores, dataclasses.replace(how, banned=banned), position)


def remember(state: RequestState, rows: StepRows, new: NewTokens, drafts: jax.Array) -> RequestState:
    """The state after a step, in the slots of the rows."""
    last = jnp.maximum(new.count - 1, 0)
    token = jnp.take_along_axis(new.tokens, last[:, None], axis=1)[:, 0]
    length = rows.start + new.first + 1 + new.count
    slot = jnp.where(rows.length > 0, rows.slot, -1)  # -1 is the spare one
    return RequestState(
        state.length.at[slot].set(length), state.token.at[slot].set(token), state.drafts.at[slot].set(drafts)
    )


def pack_outputs(out: SampleOutput, new: NewTokens) -> jax.Array:
    """[R, width] int32, read by ``StepOutputs``: what belongs to a new token stands where the token does."""
    R, E = new.tokens.shape

    def column(x: jax.Array) -> jax.Array:
        x = jax.lax.bitcast_convert_type(x, jnp.int32).reshape(R, E, -1)
        if E == 1:
            return x
        places = jnp.minimum(new.first[:, None] + jnp.arange(E), E - 1)
        return jnp.take_along_axis(x, places[..., None], axis=1)

    parts = [new.tokens[..., None], *map(column, (out.rank, out.logprob, out.top_ids, out.top_logprobs))]
    rows = jnp.concatenate(parts, axis=-1).reshape(R, -1)
    return jnp.concatenate([new.count[:, None], new.drafted[:, None], rows], axis=1)


def over_mesh(
    step: Step, layout: Layout, mesh: jax.sharding.Mesh, params: Params, *, offload: Offload | None = None
) -> Step:
    """The step on all devices: inputs and outputs are [dp * R, ...], rank by rank, outputs whole on every device."""

    def gathering(
        params: Params, cache: KVCache, state: RequestState, packed: jax.Array, *tiers: jax.Array
    ) -> tuple[KVCache, RequestState, jax.Array]:
        cache, state, out = step(params, cache, state, packed, *tiers)
        return cache, state, Collectives(layout).all_gather(out, layout.data_axes, 0)

    kv, rows = cache_spec(layout), batch_spec(layout)
    tiers: tuple[PartitionSpec, ...] = ()
    if offload is not None:
        tiers = PartitionSpec(mesh.axis_names) if offload.reads == "address" else kv, rows
    return jax.shard_map(
        gathering,
        mesh=mesh,
        in_specs=(param_specs(layout, params), kv, rows, rows, *tiers),
        out_specs=(kv, rows, PartitionSpec()),
        check_vma=False,  # outputs are equal everywhere by construction, which the check cannot see
    )
