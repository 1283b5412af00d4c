"""A device's share of a batch: together the shares are the batch, and what is exchanged comes in the order it says.

One program a case runs on every device of a layout. Its rows hold every length from none to the longest, so a case
covers all of them; what a device gets is known by the token that it comes from.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import each_device

from glmjax.batch import TokenBatch, contiguous_batch
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.share import share_of

BLOCK, CANDIDATES, LATEST_START = 4, 3, 20


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout and a batch of requests with up to ``width`` new tokens."""

    degrees: str
    requests: int
    width: int

    def __str__(self) -> str:
        return f"{self.degrees}-{self.requests}x{self.width}"

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.degrees)


BY_TOKEN = [
    Case("pcp=8", 35, 34),
    Case("pcp=2", 10, 9),  # more than a request that decodes can have
    Case("pcp=8,dcp=8", 18, 17),
    Case("pcp=4,tp=2,dcp=2", 10, 9),
    Case("pcp=4,tp=2,dcp=4,interleave=2", 10, 9),
    Case("dp=2,pcp=4,dcp=2,interleave=4", 10, 9),
]
BY_ROW = [
    Case("tp=2,dcp=2", 4, 3),
    Case("pcp=8", 3, 1),  # fewer rows than ranks
    Case("pcp=8,dcp=8", 13, 1),  # more, but not the same for each
    Case("pcp=8,dcp=8,interleave=4", 16, 15),  # one token less than is split by token
    Case("pcp=4,tp=2,dcp=4,interleave=2", 9, 1),
    Case("dp=2,pcp=4,dcp=2", 6, 5),
    Case("pcp=2", 9, 8),  # a token and seven drafts
]
every_case = pytest.mark.parametrize("case", BY_TOKEN + BY_ROW, ids=str)


@functools.cache
def batch_of(case):
    """Lengths 0, 1, .. over the rows, anywhere in the context; blocks all over the pool; every token another."""
    rng = np.random.default_rng(case.requests)
    R, Q = case.requests, case.width
    length, start = rng.permutation(np.arange(R) % (Q + 1)), rng.integers(0, LATEST_START, R)
    blocks = -(-(LATEST_START + Q) // (BLOCK * case.layout.dcp))
    tables, tokens = rng.permutation(R * blocks).reshape(R, blocks), 1 + np.arange(R * Q).reshape(R, Q)
    return TokenBatch(*(jnp.asarray(x, jnp.int32) for x in (tokens, start, length, tables)), BLOCK)


def host_batch(case):
    return jax.tree.map(np.asarray, batch_of(case))


@functools.cache
def seen(case):
    """What each device has and what it gets: name -> [devices, ...]."""
    layout = case.layout

    def compute(batch):
        share = share_of(batch, layout)
        tokens, positions = share.tokens.reshape(-1), share.positions.reshape(-1)
        rows = jnp.stack([tokens, -tokens], axis=-1)
        queries = share.gather_queries(tokens)
        r, q = share.query_positions.shape
        candidates = share.shard_rank * CANDIDATES + jnp.arange(CANDIDATES)  # of all ranks 0, 1, .. W x CANDIDATES - 1
        scores = queries.reshape(r, q, 1) * 1000.0 + candidates
        found = {
            "tokens": share.tokens,
            "positions": share.positions,
            "tables": share.block_tables,
            "group_positions": share.group_positions,
            "group_tables": share.group_tables,
            "gathered": share.gather_rows(rows),
            "gathered_positions": share.gather_rows(positions),
            "last": share.last_rows(rows),
            "slots": share.slots(share.positions),
            "write_slots": share.write_slots,
            "queries": queries,
            "query_positions": share.query_positions,
            "query_tables": share.query_tables,
            "query_slots": share.query_slots(share.query_positions.reshape(-1, 1)),
            "candidates": share.gather_candidates((scores, jnp.broadcast_to(candidates, scores.shape))),
        }
        if share.by_row:
            found["own"] = share.own_rows(batch.tokens[:, 0])
        if case.width == 1:
            found["returned"] = share.last_rows(share.own_rows(batch.tokens))
        return found

    return jax.tree.map(np.asarray, each_device(layout, compute)(batch_of(case)))


def real_tokens(case):
    """Token -> its request and position."""
    batch = host_batch(case)
    return {
        int(batch.tokens[r, i]): (r, int(batch.start[r]) + i)
        for r in range(case.requests)
        for i in range(batch.length[r])
    }


def last_tokens(batch):
    """[R], 0 for requests without any."""
    last = np.maximum(batch.length - 1, 0)[:, None]
    return np.where(batch.length > 0, np.take_along_axis(batch.tokens, last, axis=1)[:, 0], 0)


def ranks(case, axes):
    """[devices]: each device's place along mesh axes."""
    sizes = case.layout.axis_sizes
    places = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    return functools.reduce(lambda place, axis: place * sizes[axis] + places[axis], axes, 0 * places["data"])


def slots_by_hand(layout, tables, positions, rank, block_size=BLOCK):
    """Slots of positions [R, ...] in a rank's pool: an entry of a table is one block on every rank."""
    slots = np.full(positions.shape, -1)
    for at in map(tuple, np.argwhere(positions >= 0)):
        turn, place = divmod(int(positions[at]), layout.interleave)
        if turn % layout.dcp == rank:
            block, offset = divmod(turn // layout.dcp * layout.interleave + place, block_size)
            slots[at] = tables[at[0], block] * block_size + offset
    return slots


def assert_rows_are_of(case, tokens, positions, tables):
    """Tokens [r, q] stand at these positions and their requests have these tables [r, B], padding aside."""
    expected, request_tables = real_tokens(case), host_batch(case).block_tables
    for r, i in np.argwhere(positions >= 0):
        request, position = expected[int(tokens[r, i])]
        assert positions[r, i] == position
        assert (tables[r] == request_tables[request]).all()


# Who computes what.


@every_case
def test_shares_of_a_group_cover_every_token_once(case):
    layout, found = case.layout, seen(case)
    peers = ranks(case, (*layout.data_axes, *layout.tensor_axes))
    for peer in np.unique(peers):
        tokens, positions = found["tokens"][peers == peer], found["positions"][peers == peer]
        assert sorted(tokens[positions >= 0].tolist()) == sorted(real_tokens(case))


@every_case
def test_each_token_has_its_own_position_and_table(case):
    found = seen(case)
    for device in range(case.layout.num_devices):
        assert_rows_are_of(case, *(found[name][device] for name in ("tokens", "positions", "tables")))


@every_case
def test_devices_of_one_context_rank_have_the_same_share(case):
    rank, found = ranks(case, case.layout.context_axes), seen(case)
    first = [rank.tolist().index(place) for place in rank]
    assert all((found[name] == found[name][first]).all() for name in ("tokens", "positions", "tables"))


def as_rank(rank, compute):
    """What ``compute`` gives on the device with this place along whatever axes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "axis_index", lambda axes: jnp.int32(rank))
        return compute()


def abstract_share(case, **how):
    """Its shapes and what is not an array, the same on all devices."""
    return as_rank(0, lambda: jax.eval_shape(lambda batch: share_of(batch, case.layout, **how), batch_of(case)))


@pytest.mark.parametrize("case", BY_TOKEN, ids=str)
def test_more_than_two_tokens_a_rank_are_split_by_token(case):
    share = abstract_share(case)
    assert not share.by_row
    assert share.rows[0] == case.requests and share.rows[1] < case.width


@pytest.mark.parametrize("case", BY_ROW, ids=str)
def test_fewer_tokens_are_split_by_row(case):
    share = abstract_share(case)
    assert share.by_row
    assert share.rows == (-(-case.requests // case.layout.pcp), case.width)


@pytest.mark.parametrize(
    ("degrees", "width", "prefill", "kv"),
    [
        ("pcp=8", 32, "kv_gather", "pool"),
        ("pcp=8", 1, "query_gather", "pool"),
        ("pcp=8,dcp=8", 32, "kv_gather", "kv_gather"),
        ("pcp=8,dcp=8", 32, "query_gather", "query_gather"),
        ("pcp=8,dcp=8", 15, "kv_gather", "query_gather"),  # split by row: other requests need other keys
        ("tp=4,dcp=4", 9, "kv_gather", "kv_gather"),
        ("tp=4,dcp=4", 8, "kv_gather", "query_gather"),  # too few queries to bring them all keys
    ],
)
def test_keys_are_sought_where_layout_and_caller_say(degrees, width, prefill, kv):
    assert abstract_share(Case(degrees, 3, width), prefill=prefill).kv == kv


# What devices tell one another.


@every_case
def test_gathered_rows_come_in_the_order_of_the_groups_positions(case):
    found = seen(case)
    for device in range(case.layout.num_devices):
        positions, rows = found["group_positions"][device], found["gathered"][device]
        assert (found["gathered_positions"][device] == positions.reshape(-1)).all()
        assert (rows[:, 0] == -rows[:, 1]).all()
        tokens = rows[:, 0].reshape(positions.shape)
        assert_rows_are_of(case, tokens, positions, found["group_tables"][device])
        assert sorted(tokens[positions >= 0].tolist()) == sorted(real_tokens(case))


@every_case
def test_last_rows_are_those_of_the_last_tokens_on_every_device(case):
    batch = host_batch(case)
    assert set(batch.length) >= {0, 1}
    expected = last_tokens(batch)[:, None] * [1, -1]
    assert all((last == expected).all() for last in seen(case)["last"])


def test_last_rows_do_not_depend_on_padding():
    batch = batch_of(BY_TOKEN[0])
    share = share_of(batch, ONE_DEVICE)
    rows = jnp.where(share.valid, share.tokens, jnp.nan).reshape(-1)
    assert (np.asarray(share.last_rows(rows)) == last_tokens(host_batch(BY_TOKEN[0]))).all()


@pytest.mark.parametrize("case", BY_ROW, ids=str)
def test_own_rows_are_those_of_the_shares_requests(case):
    assert (seen(case)["own"] == seen(case)["tokens"][:, :, 0]).all()


@pytest.mark.parametrize("case", [case for case in BY_ROW if case.width == 1], ids=str)
def test_last_rows_undo_own_rows(case):
    assert all((returned[:, 0] == last_tokens(host_batch(case))).all() for returned in seen(case)["returned"])


@every_case
def test_gathered_queries_are_those_of_the_ranks_that_share_the_kv(case):
    layout, found = case.layout, seen(case)
    group = ranks(case, (*layout.data_axes, *layout.replica_axes))
    for device in range(layout.num_devices):
        positions = found["query_positions"][device]
        tokens = found["queries"][device].reshape(positions.shape)
        assert_rows_are_of(case, tokens, positions, found["query_tables"][device])
        peers = group == group[device]
        shares, places = found["tokens"][peers], found["positions"][peers]
        assert set(tokens[positions >= 0].tolist()) == set(shares[places >= 0].tolist())
        assert (found["query_positions"][peers] == positions).all()


@every_case
def test_candidates_of_all_ranks_return_to_their_query(case):
    scores, candidates = seen(case)["candidates"]
    assert (scores == seen(case)["tokens"][..., None] * 1000 + candidates).all()
    assert (np.sort(candidates) == np.arange(case.layout.dcp * CANDIDATES)).all()


# Slots.


@every_case
def test_each_rank_writes_the_tokens_that_it_keeps(case):
    found = seen(case)
    for device, rank in enumerate(ranks(case, case.layout.shard_axes)):
        positions, tables = found["group_positions"][device], found["group_tables"][device]
        assert (found["write_slots"][device] == slots_by_hand(case.layout, tables, positions, rank).reshape(-1)).all()
        positions, tables = found["positions"][device], found["tables"][device]
        assert (found["slots"][device] == slots_by_hand(case.layout, tables, positions, rank)).all()


@every_case
def test_all_ranks_together_write_every_token_once(case):
    layout, found = case.layout, seen(case)
    replica = ranks(case, (*layout.data_axes, *layout.replica_axes))
    for one in np.unique(replica):
        slots, positions = found["write_slots"][replica == one], found["group_positions"][replica == one]
        assert len(slots) == layout.dcp
        assert ((slots >= 0).sum(axis=0) == (positions[0].reshape(-1) >= 0)).all()
        for own in slots:
            assert len(set(own[own >= 0])) == np.count_nonzero(own >= 0)


@every_case
def test_query_slots_are_the_ranks_own(case):
    found = seen(case)
    for device, rank in enumerate(ranks(case, case.layout.shard_axes)):
        expected = slots_by_hand(case.layout, found["query_tables"][device], found["query_positions"][device], rank)
        assert (found["query_slots"][device] == expected.reshape(-1, 1)).all()


@st.composite
def batches(draw):
    """Two requests with blocks of their own, anywhere in the pools of some ranks."""
    layout = draw(st.sampled_from([Layout(), Layout(tp=2, dcp=2, interleave=3), Layout(pcp=4, dcp=4)]))
    block = draw(st.sampled_from([1, 3, 16] if layout.interleave == 1 else [3, 12]))
    width, longest = 4, 5
    tables = np.array(draw(st.permutations(range(12))))[: 2 * width].reshape(2, width)
    room = width * block * layout.dcp
    length = np.array([draw(st.integers(0, min(longest, room))) for _ in range(2)])
    start = np.array([draw(st.integers(0, room - n)) for n in length])
    arrays = (jnp.asarray(x, jnp.int32) for x in (np.zeros((2, longest)), start, length, tables))
    return layout, TokenBatch(*arrays, block)


@settings(max_examples=30)
@given(batches())
def test_no_two_tokens_share_a_slot_and_padding_has_none(case):
    layout, batch = case
    written = 0
    for rank in range(layout.dcp):
        slots = np.asarray(as_rank(rank, lambda: share_of(batch, layout).write_slots))
        used = slots[slots >= 0].tolist()
        assert len(set(used)) == len(used)
        written += len(used)
    assert written == int(batch.length.sum())


@settings(max_examples=30)
@given(batches())
def test_written_slots_are_those_of_the_tokens_positions(case):
    layout, batch = case
    for rank in range(layout.dcp):
        share = as_rank(rank, lambda: share_of(batch, layout))
        written = as_rank(rank, lambda share=share: share.write_slots)
        tables, positions = np.asarray(share.group_tables), np.asarray(share.group_positions)
        expected = slots_by_hand(layout, tables, positions, rank, batch.block_size)
        assert np.asarray(written).tolist() == expected.reshape(-1).tolist()


@settings(max_examples=30)
@given(batches())
def test_positions_fill_the_requests_own_blocks_in_order(case):
    """On every rank, and each position on one."""
    layout, batch = case
    tables = np.asarray(batch.block_tables)
    positions = np.arange(tables.shape[1] * batch.block_size * layout.dcp)
    found = np.zeros((2, len(positions)), int)
    for rank in range(layout.dcp):
        share = dataclasses.replace(share_of(batch, ONE_DEVICE), layout=layout)
        slots = np.asarray(as_rank(rank, lambda share=share: share.slots(jnp.asarray([positions, positions]))))
        for own, table in zip(slots, tables, strict=True):
            blocks = table[:, None] * batch.block_size + np.arange(batch.block_size)
            assert own[own >= 0].tolist() == blocks.reshape(-1).tolist()
        found += slots >= 0
    assert (found == 1).all()


def test_one_device_computes_the_whole_batch():
    batch = batch_of(BY_TOKEN[0])
    share = share_of(batch, ONE_DEVICE)
    assert (np.asarray(share.tokens) == np.asarray(batch.tokens)).all()
    assert (np.asarray(share.positions) == np.where(batch.valid, batch.positions, -1)).all()
    assert (np.asarray(share.block_tables) == np.asarray(batch.block_tables)).all()


def test_contiguous_batch_fills_the_pool_request_by_request():
    share = share_of(contiguous_batch(jnp.ones((3, 4), jnp.int32)), ONE_DEVICE)
    assert np.asarray(share.write_slots).tolist() == list(range(12))
