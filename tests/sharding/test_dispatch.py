"""Ragged dispatch: its index maths over all ranks in NumPy, then the exchange on eight devices, against plain loops."""

import functools

import emulated_exchange
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from glmjax.sharding.collectives import Collectives
from glmjax.sharding.dispatch import (
    gather_dispatch,
    ragged_dispatch,
    ragged_slices,
    row_places,
    true_places,
    wanted_devices,
)
from glmjax.sharding.layout import Layout

W, PER_DEVICE, CHOICES, WIDTH = 8, 2, 3, 4


@st.composite
def routings(draw):
    """Experts of each device and ids [W, T, k], distinct for a token or -1."""
    devices, per_device, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    choices = draw(st.integers(1, min(4, devices * per_device)))
    some = draw(st.integers(choices, devices * per_device))  # few experts in use: skew
    one = st.permutations(range(some)).map(lambda order: order[:choices])
    token = st.one_of(one, one, st.just([-1] * choices))
    ids = draw(st.lists(token, min_size=devices * tokens, max_size=devices * tokens))
    return per_device, np.array(ids, np.int32).reshape(devices, tokens, choices)


def devices_of(chosen, per_device):
    """Devices that a token goes to, in order."""
    return sorted({expert // per_device for expert in chosen.tolist() if expert >= 0})


def counts_of(ids, per_device):
    return wanted_devices(ids, per_device, len(ids)).sum(axis=1, dtype=np.int32)


def deliver(rows, room, counts):
    """Every rank's buffer after an exchange of rows [W, N, D]; NaN where nothing arrived."""
    ranks = range(len(rows))
    slices = np.stack([np.stack(ragged_slices(counts, rank)) for rank in ranks])
    return np.stack([emulated_exchange.received(np, rows, np.full((room, 1), np.nan), slices, r) for r in ranks])


@given(routings())
def test_row_goes_once_to_each_device_with_a_chosen_expert(routing):
    per_device, ids = routing
    expected = np.zeros((len(ids), len(ids)), np.int32)
    for sender, tokens in enumerate(ids):
        for chosen in tokens:
            expected[sender, devices_of(chosen, per_device)] += 1
    np.testing.assert_array_equal(counts_of(ids, per_device), expected)


@given(routings())
def test_received_rows_are_the_tokens_that_chose_the_device_in_order(routing):
    per_device, ids = routing
    devices, tokens, choices = ids.shape
    wanted = wanted_devices(ids, per_device, devices)
    outgoing = np.stack([true_places(w.T, tokens * min(choices, devices)) % tokens for w in wanted])
    names = np.arange(devices)[:, None] * tokens + outgoing  # of tokens, over all devices
    buffers = deliver(names[..., None].astype(float), devices * tokens, counts_of(ids, per_device))
    flat = ids.reshape(-1, choices)
    for device in range(devices):
        expected = [name for name, chosen in enumerate(flat) if device in devices_of(chosen, per_device)]
        assert buffers[device, : len(expected), 0].tolist() == expected
        assert np.isnan(buffers[device, len(expected) :]).all()
        incoming = true_places(wanted[:, :, device], devices * tokens)
        assert incoming.tolist() == expected + [-1] * (len(incoming) - len(expected))


@given(routings())
def test_what_devices_return_adds_up_at_the_sender(routing):
    per_device, ids = routing
    devices, tokens, choices = ids.shape
    wanted = wanted_devices(ids, per_device, devices)
    made = np.full((devices, devices * tokens, 1), np.nan)
    for device in range(devices):
        mine = np.flatnonzero(wanted[:, :, device])
        made[device, : len(mine), 0] = 2.0**device * (1 + mine)
    returned = deliver(made, tokens * min(choices, devices), counts_of(ids, per_device).T)
    for sender in range(devices):
        places = row_places(ids[sender], per_device, devices)
        out = np.where(places >= 0, returned[sender][places, 0], 0).sum(axis=1)
        for token, chosen in enumerate(ids[sender]):
            name = 1 + sender * tokens + token
            assert out[token] == sum(2**device * name for device in devices_of(chosen, per_device))


def test_rooms_are_what_the_worst_routing_fills():
    tokens = 3
    apart = np.tile(np.arange(CHOICES, dtype=np.int32) * PER_DEVICE, (W, tokens, 1))  # each choice on another device
    counts = counts_of(apart, PER_DEVICE)
    assert counts.sum(axis=1).tolist() == [tokens * CHOICES] * W
    assert counts.sum(axis=0).tolist() == [W * tokens] * CHOICES + [0] * (W - CHOICES)


def test_device_and_host_agree():
    ids = np.array([[[0, 5, 1], [-1, -1, -1]], [[7, 6, 2], [4, 5, 0]], [[3, 2, 6], [-1, 1, 0]]], np.int32)
    device, tokens = 1, 2

    def maths(ids):
        wanted = wanted_devices(ids, 3, 3)
        counts = wanted.sum(axis=1, dtype=np.int32)
        incoming = true_places(wanted[:, :, device], 3 * tokens)
        nothing = true_places(ids[0] < -1, 4)
        return wanted, row_places(ids[1], 3, 3), incoming, nothing, *ragged_slices(counts, device)

    for there, here in zip(jax.jit(maths)(ids), maths(ids), strict=True):
        np.testing.assert_array_equal(there, here)
        assert isinstance(here, np.ndarray) and there.dtype == here.dtype


def test_emulation_does_what_jax_documents():
    operands = np.array([[1, 2, 2], [3, 4, 0]], float)[..., None]
    slices = np.array([[[0, 1], [1, 2], [0, 0], [1, 1]], [[0, 1], [1, 1], [1, 2], [2, 1]]])
    both = [emulated_exchange.received(np, operands, np.zeros((4, 1)), slices, rank)[:, 0].tolist() for rank in (0, 1)]
    assert both == [[1, 3, 0, 0], [2, 2, 4, 0]]
    slices[1, 3, 0] = 1  # receives fewer than are sent
    assert np.isnan(emulated_exchange.received(np, operands, np.zeros((4, 1)), slices, 1)).all()


def own_choices(layout, ids):
    return (ids >= 0) & (ids // PER_DEVICE == Collectives(layout).rank(layout.expert_axes))


def multiply(layout, tokens, ids, weights):
    """Expert e multiplies by e + 1.  Rows without a choice come to nothing."""
    return tokens * jnp.sum(jnp.where(own_choices(layout, ids), (ids + 1) * weights, 0), axis=1, keepdims=True)


def multiply_or_nan(layout, tokens, ids, weights):
    """The same, but nobody may read what becomes of rows without a choice."""
    chosen = jnp.any(own_choices(layout, ids), axis=1, keepdims=True)
    return jnp.where(chosen, multiply(layout, tokens, ids, weights), jnp.nan)


def count_rows(layout, tokens, ids, weights):
    """Everyone gets the number of rows that have a choice, be it of this device or another."""
    return jnp.full_like(tokens, jnp.sum(jnp.any(ids >= 0, axis=1)))


@functools.cache
def dispatched(layout, experts, ragged=True):
    """A jitted dispatch of tokens [all, D]."""
    collectives = Collectives(layout)

    def local(x, ids, weights):
        apply = functools.partial(experts, layout)
        if ragged:
            exchange = emulated_exchange.ragged_all_to_all
            out = ragged_dispatch(apply, collectives, x, ids, weights, PER_DEVICE, exchange)
        else:
            out = gather_dispatch(apply, collectives, x, ids, weights)
        return collectives.all_reduce(out, layout.tensor_axes)

    spec = P(layout.token_axes)
    return jax.jit(jax.shard_map(local, mesh=layout.mesh(), in_specs=spec, out_specs=spec, check_vma=False))


def distinct(rng, rows, experts):
    return np.stack([rng.permutation(experts)[:CHOICES] for _ in range(rows)]).astype(np.int32)


def some_padding(rng, rows):
    return np.where(rng.random((rows, 1)) < 0.4, -1, distinct(rng, rows, W * PER_DEVICE))


def half_without_tokens(rng, rows):
    ids = distinct(rng, rows, W * PER_DEVICE)
    ids[: rows // 2] = -1
    return ids


ROUTINGS = {
    "even": lambda rng, rows: distinct(rng, rows, W * PER_DEVICE),
    "all choose the same experts": lambda rng, rows: np.tile(np.int32([3, 2, 15]), (rows, 1)),
    "all choose one expert": lambda rng, rows: np.tile(np.int32([-1, 9, -1]), (rows, 1)),
    "last device idle": lambda rng, rows: distinct(rng, rows, (W - 1) * PER_DEVICE),
    "each choice on another device": lambda rng, rows: distinct(rng, rows, W) * PER_DEVICE,
    "some padding": some_padding,
    "half without tokens": half_without_tokens,
    "nothing but padding": lambda rng, rows: np.full((rows, CHOICES), -1, np.int32),
}
LAYOUTS = [Layout.parse(text) for text in ("dp=8,ep=8", "tp=8,ep=8", "dp=2,pcp=2,tp=2,ep=8", "pcp=2,tp=4,dcp=4,ep=8")]


def problem(layout, routing, tokens):
    """Tokens, ids and weights of all devices, and what should come of them."""
    rng = np.random.default_rng(0)
    rows = layout.num_shards(layout.token_axes) * tokens
    ids = ROUTINGS[routing](rng, rows)
    x, weights = (rng.standard_normal((rows, n)).astype(np.float32) for n in (WIDTH, CHOICES))
    weights[ids < 0] = np.nan
    return (x, ids, weights), x * np.where(ids >= 0, (ids + 1) * weights, 0).sum(axis=1, keepdims=True)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])  # of a device
def test_ragged_gives_every_token_the_sum_of_its_experts(layout, routing, tokens):
    inputs, expected = problem(layout, routing, tokens)
    out = dispatched(layout, multiply_or_nan)(*inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gather_gives_every_token_the_sum_of_its_experts(layout):
    inputs, expected = problem(layout, "some padding", 5)
    np.testing.assert_allclose(dispatched(layout, multiply, ragged=False)(*inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_see_no_rows_but_those_sent_to_them(routing):
    layout = LAYOUTS[2]  # tp=2, so that one of six rows is there to make the parts equal
    (x, ids, weights), _ = problem(layout, routing, 5)
    wanted = wanted_devices(ids, PER_DEVICE, W)
    out = dispatched(layout, count_rows)(x, ids, weights)
    np.testing.assert_array_equal(out[:, 0], wanted @ wanted.sum(axis=0))
