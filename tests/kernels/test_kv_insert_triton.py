"""The Triton kernel against the codec, in Triton's interpreter, and its machine code for an H200."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kv_insert import DTYPES, assert_same, expected, make_pools, make_rows, shuffled_slots

pytest.importorskip("triton")

from h200_code import check_code, check_in_place, compile_program, needs_plugin
from triton_interpreter import interpreted_call

from glmjax.kernels import kv_insert_triton as kernel
from glmjax.kernels.kv_insert import kv_insert
from glmjax.kernels.machine_code import machine_code


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if request.function is not test_code_for_an_h200:
        monkeypatch.setattr(kernel, "triton_call", interpreted_call)


def tune(monkeypatch, *tuning):
    monkeypatch.setattr(kernel.Tuning, "for_tokens", lambda *_: kernel.Tuning(*tuning))


PIECES, STEPS = (1, 1, 1, 4), (16, 4, 2)  # of a tuning: as for few tokens, and for many


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("tokens", "tuning"), [(1, PIECES), (5, PIECES), (5, (1, 1)), (16, STEPS), (20, STEPS)])
def test_rows_are_where_the_codec_puts_them(kind, tokens, tuning, monkeypatch):
    tune(monkeypatch, *tuning)
    pools, rows = make_pools(kind), make_rows(tokens)
    slots = shuffled_slots(tokens) if tokens > 1 else jnp.asarray([7], jnp.int32)
    found = kv_insert(pools, rows, slots, layer=1, indexer=jnp.int32(0), implementation="triton")
    assert set(found) == set(pools)
    assert_same(found, expected(pools, rows, slots, 1, 0))


@pytest.mark.parametrize("tokens", [63, 64, 65, 2047, 2048, 2049])
def test_any_number_of_tokens(tokens, monkeypatch):
    tune(monkeypatch, 32, 4, 2)
    pools, rows = make_pools("fp8", slots=2100), make_rows(tokens)
    if tokens > 65:  # the index key alone, for time; the slow test below has all
        pools, rows = ({name: x for name, x in both.items() if name.startswith("index")} for both in (pools, rows))
    slots, layer = shuffled_slots(tokens, slots=2100), 1 if "latent" in rows else None
    found = kv_insert(pools, rows, slots, layer=layer, indexer=0, implementation="triton")
    assert_same(found, expected(pools, rows, slots, layer, 0))


@pytest.mark.slow
def test_all_fields_of_more_tokens_than_a_prefill_chunk(monkeypatch):
    tune(monkeypatch, 32, 4, 2)
    pools, rows, slots = make_pools("fp8", slots=2100), make_rows(2049), shuffled_slots(2049, slots=2100)
    found = kv_insert(pools, rows, slots, layer=1, indexer=0, implementation="triton")
    assert_same(found, expected(pools, rows, slots, 1, 0))


def test_rows_of_fewer_columns_than_pieces(monkeypatch):
    tune(monkeypatch, *PIECES)
    pools, rows = {"index_key": jnp.zeros((1, 8, 2), jnp.bfloat16)}, {"index_key": jnp.ones((2, 2), jnp.bfloat16)}
    found = kv_insert(pools, rows, jnp.asarray([5, -1], jnp.int32), indexer=0, implementation="triton")
    assert np.asarray(found["index_key"][0]).sum(axis=1).tolist() == [0, 0, 0, 0, 0, 2, 0, 0]


def test_no_token():
    pools, rows = make_pools("fp8"), {name: x[:0] for name, x in make_rows(1).items()}
    found = kv_insert(pools, rows, jnp.zeros(0, jnp.int32), layer=0, indexer=0, implementation="triton")
    assert_same(found, {name: np.asarray(pool) for name, pool in pools.items()})


@pytest.mark.parametrize("part", ["layer", "indexer"])
def test_a_layer_or_an_indexer_alone(part):
    pools, rows, slots = make_pools("fp8"), make_rows(5), shuffled_slots(5)
    mine = {n: x for n, x in rows.items() if n.startswith("index") == (part == "indexer")}
    found = kv_insert(pools, mine, slots, **{part: 1}, implementation="triton")
    assert set(found) == {n for n in pools if n.startswith("index") == (part == "indexer")}
    assert_same(found, expected(pools, rows, slots, 1, 1))


def test_index_keys_have_slots_of_their_own_in_pools_of_another_size():
    pools, rows = make_pools("fp8"), make_rows(5)
    pools |= {name: x for name, x in make_pools("fp8", slots=40).items() if name.startswith("index")}
    slots, others = shuffled_slots(5), shuffled_slots(5, seed=1, slots=40)
    found = kv_insert(pools, dict(rows), slots, layer=1, indexer=1, index_slots=others, implementation="triton")
    keys = {"index_key": rows.pop("index_key")}
    wanted = expected(expected(pools, rows, slots, 1, 1), keys, others, 1, 1)
    assert_same(found, wanted)


def test_rows_as_stored_are_copied():
    pools, rows, slots = make_pools("fp8"), make_rows(5), shuffled_slots(5)
    stored = {
        "latent": jnp.asarray(np.random.default_rng(0).integers(0, 256, (5, 512)), jnp.uint8),
        "latent_scale": jnp.asarray(np.random.default_rng(1).random((5, 4)), jnp.float32),
        "rope": rows["rope"],
    }
    found = kv_insert(pools, stored, slots, layer=2, implementation="triton")
    wanted = {name: np.array(pool) for name, pool in pools.items()}
    for name, new in stored.items():
        for row, slot in zip(np.asarray(new), np.asarray(slots), strict=True):
            if slot >= 0:
                wanted[name][2, slot] = row
    assert_same(found, wanted)


def test_float32_rows_are_rounded_to_bf16_first():
    pools, slots = make_pools("fp8"), shuffled_slots(16)
    rows = make_rows(16, dtype=jnp.float32)
    found = kv_insert(pools, rows, slots, layer=0, indexer=0, implementation="triton")
    assert_same(found, expected(pools, rows, slots, 0, 0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_tile(value):
    pools, rows, slots = make_pools("fp8"), make_rows(4), jnp.asarray([3, 1, 2, 0], jnp.int32)
    rows["latent"] = rows["latent"].at[1, 130].set(value)  # of the second tile
    rows["index_key"] = rows["index_key"].at[2, 5].set(value)
    found = kv_insert(pools, rows, slots, layer=0, indexer=0, implementation="triton")
    assert_same(found, expected(pools, rows, slots, 0, 0))


def test_slots_beyond_2_to_the_31_bytes():
    slots, layers = 1 << 20, 6  # 3 GiB of latents; memory that is not written is not there
    pools = {
        "latent": np.zeros((layers, slots, 512), np.uint8),
        "latent_scale": np.zeros((layers, slots, 4), np.float32),
        "rope": np.zeros((layers, slots, 64), jnp.bfloat16),
        "index_key": np.zeros((20, slots, 128), np.uint8),
        "index_scale": np.zeros((20, slots), np.float32),
    }
    rows, at = make_rows(3), jnp.asarray([slots - 2, -1, 0], jnp.int32)
    assert (5 * slots + slots - 2) * 512 > 1 << 31 and (19 * slots + slots - 2) * 128 > 1 << 31
    kv_insert(pools, rows, at, layer=5, indexer=19, implementation="triton")
    small = {name: np.zeros((1, 3, *pool.shape[2:]), pool.dtype) for name, pool in pools.items()}
    wanted = expected({n: jnp.asarray(x) for n, x in small.items()}, rows, jnp.asarray([1, -1, 0]), 0, 0)
    for name, pool in pools.items():
        layer = pool[19 if name.startswith("index") else 5]
        assert (layer[[0, slots - 2]] == wanted[name][0, :2]).all(), name
        assert not layer[[1, slots - 3, slots - 1]].any(), name


@needs_plugin
@pytest.mark.parametrize("case", kernel.cases(), ids=lambda case: case.shape)
def test_code_for_an_h200(case):
    program = compile_program(case)
    check_in_place(program, case)
    code, *generated = machine_code(program.executable)
    assert not generated  # nothing is cast or gathered around the kernel
    check_code(code, "LDGSTS", "STG.E.128|STG.E.64|STG.E.32")
    assert not {"LDG.E.128", "LDG.E.64"} & code.instructions.keys()  # rows come by asynchronous copies alone
    assert code.registers <= 64


@needs_plugin
def test_pools_stay_in_place_through_a_loop_over_layers(monkeypatch):
    monkeypatch.undo()  # the interpreter
    (case,) = (case for case in kernel.cases() if case.shape == "T=32 latent, rope, index key fp8")

    def insert(*arrays):
        *pools, index_key, index_scale, latent, rope, _, slots, _, _, _ = arrays

        def layer(pools, place):
            named = dict(zip(("latent", "latent_scale", "rope"), pools, strict=True))
            written = kv_insert(named, {"latent": latent * place, "rope": rope}, slots, layer=place)
            return [written[name] for name in named], None

        return [*jax.lax.scan(layer, pools, jnp.arange(79))[0], index_key, index_scale]

    program = compile_program(dataclasses.replace(case, function=insert))
    assert program.memory.aliased == sum(x.size * x.dtype.itemsize for x in case.arguments[:5])
    assert program.memory.temporaries < 1 << 20
