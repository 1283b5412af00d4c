"""Rows into pools: the jnp form against the codec, in place, -1 dropped; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax import cache as kv_cache
from glmjax.errors import ConfigError
from glmjax.kernels import kv_rows
from glmjax.kernels.kv_insert import kv_insert

LAYERS, INDEXERS, SLOTS = 3, 2, 64
DTYPES = {"fp8": jnp.uint8, "bf16": jnp.bfloat16, "f32": jnp.float32}


def make_pools(kind, seed=0, slots=SLOTS):
    """Pools full of noise, so that a byte written astray shows."""
    rng = np.random.default_rng(seed)
    narrow, wide = DTYPES[kind], jnp.float32 if kind == "f32" else jnp.bfloat16

    def noise(*shape, dtype):
        return jnp.asarray(rng.integers(0, 120, shape).astype(dtype))

    pools = {"latent": noise(LAYERS, slots, 512, dtype=narrow), "rope": noise(LAYERS, slots, 64, dtype=wide)}
    pools["index_key"] = noise(INDEXERS, slots, 128, dtype=narrow)
    if kind == "fp8":
        pools["latent_scale"] = noise(LAYERS, slots, 4, dtype=jnp.float32)
        pools["index_scale"] = noise(INDEXERS, slots, dtype=jnp.float32)
    return pools


def make_rows(tokens, seed=0, dtype=jnp.bfloat16):
    """Rows over many orders of magnitude, with zeros, the largest numbers, powers of two and denormals among them."""
    rng = np.random.default_rng(seed)
    rows = {}
    for name, width in (("latent", 512), ("rope", 64), ("index_key", 128)):
        x = rng.standard_normal((tokens, width)) * 10.0 ** rng.integers(-6, 6, (tokens, 1))
        special = [0.0, 448.0, -448.0, 3.3e38, -3.3e38, 1e-40, 0.0448, 2.0**-9, 449.0]
        for i, value in enumerate(special[: tokens - 1]):
            x[i, : width // 2] = value if i % 2 else rng.permutation(np.r_[value, np.zeros(width // 2 - 1)])
        rows[name] = jnp.asarray(x, jnp.float32).astype(dtype)
    return rows


def shuffled_slots(tokens, seed=0, slots=SLOTS):
    """Different slots in no order, some -1: at the head, at the end and between; the pool's last among them."""
    at = np.random.default_rng(seed).permutation(slots - 1)[:tokens].astype(np.int32)
    at[1] = slots - 1
    at[[0, tokens // 2, tokens - 1]] = -1
    return jnp.asarray(at)


def expected(pools, rows, slots, layer, indexer):
    """What the pools hold afterwards, written row by row, quantised by the codec."""
    result = {name: np.array(pool) for name, pool in pools.items()}
    stored = {name: x for name, x in rows.items() if pools[name].dtype != jnp.uint8}
    if jnp.uint8 in (pool.dtype for pool in pools.values()):
        for name, scale, pack in (
            ("latent", "latent_scale", kv_rows.quantize_latent),
            ("index_key", "index_scale", kv_rows.quantize_index_key),
        ):
            if name in rows:
                values, stored[scale] = pack(rows[name].astype(jnp.bfloat16))
                stored[name] = np.asarray(values).view(np.uint8)
    for name, new in stored.items():
        place = indexer if name.startswith("index") else layer
        for row, slot in zip(np.asarray(new), np.asarray(slots), strict=True):
            if slot >= 0:
                result[name][place, slot] = row.astype(result[name].dtype)
    return result


def assert_same(found, wanted):
    """Bit for bit."""
    for name in found:
        got, want = np.ascontiguousarray(found[name]), np.ascontiguousarray(wanted[name])
        assert (got.view(np.uint8) == want.view(np.uint8)).all(), name


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("tokens", [5, 20])
def test_rows_are_where_the_codec_puts_them(kind, tokens):
    pools, rows, slots = make_pools(kind), make_rows(tokens), shuffled_slots(tokens)
    found = jax.jit(lambda p, r, s: kv_insert(p, r, s, layer=1, indexer=0))(pools, rows, slots)
    assert set(found) == set(pools)
    assert_same(found, expected(pools, rows, slots, 1, 0))


def test_one_token():
    pools, rows = make_pools("fp8"), make_rows(1)
    found = kv_insert(pools, rows, jnp.asarray([7], jnp.int32), layer=2, indexer=1)
    assert_same(found, expected(pools, rows, [7], 2, 1))


@pytest.mark.parametrize("tokens", [1, 4])
def test_rows_that_are_all_dropped_leave_every_slot(tokens):
    pools, slots = make_pools("fp8"), jnp.full(tokens, -1, jnp.int32)
    found = kv_insert(pools, make_rows(tokens), slots, layer=1, indexer=1)
    assert_same(found, {name: np.asarray(pool) for name, pool in pools.items()})


def test_no_token():
    pools = make_pools("fp8")
    rows = {name: x[:0] for name, x in make_rows(1).items()}
    found = kv_insert(pools, rows, jnp.zeros(0, jnp.int32), layer=0, indexer=0)
    assert_same(found, {name: np.asarray(pool) for name, pool in pools.items()})


def test_rows_as_stored_are_copied():
    pools, numbers, slots = make_pools("fp8"), make_rows(20), shuffled_slots(20)
    values, scale = kv_rows.quantize_latent(numbers["latent"])
    rows = {"latent": kv_cache.stored_bits(values), "latent_scale": 3 * scale, "rope": numbers["rope"]}
    found = kv_insert(pools, rows, slots, layer=jnp.int32(1))
    wanted = expected(pools, numbers, slots, 1, 0)
    written = np.asarray(slots)[np.asarray(slots) >= 0]
    wanted["latent_scale"][1, written] *= 3
    assert set(found) == {"latent", "latent_scale", "rope"}
    assert_same(found, wanted)


@pytest.mark.parametrize("kind", DTYPES)
def test_pools_are_updated_in_place(kind):
    pools, rows, slots = make_pools(kind, slots=1 << 12), make_rows(8), shuffled_slots(8)
    step = jax.jit(lambda p, r, s: kv_insert(p, r, s, layer=1, indexer=0), donate_argnums=0)
    memory = step.lower(pools, rows, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in pools.values())
    assert memory.temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, r: kv_insert(p, r, SOME), "give a layer, an indexer, or both"),
        (lambda p, r: kv_insert(p, {"latent": r["latent"]}, SOME, layer=0), "rows lack rope"),
        (lambda p, r: kv_insert(p, r, SOME, layer=0), "rows index_key have no place"),
        (lambda p, r: kv_insert(without(p, "rope"), r, SOME, layer=0, indexer=0), "pools lack rope"),
        (lambda p, r: kv_insert(without(p, "latent_scale"), r, SOME, layer=0, indexer=0), "without 'latent_scale'"),
        (
            lambda p, r: kv_insert(p, {**r, "latent": p["latent"][0, :4]}, SOME, layer=0, indexer=0),
            "rows 'latent' of uint8 without 'latent_scale', give it too",
        ),
        (
            lambda p, r: kv_insert(p, {**r, "latent_scale": p["latent_scale"][0, :4]}, SOME, layer=0, indexer=0),
            "rows 'latent' of bfloat16 with 'latent_scale', which is for uint8",
        ),
        (lambda p, r: kv_insert(p, r, SOME, layer=0, indexer=0, implementation="hopper"), "'auto', 'jnp' or 'triton'"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        change(make_pools("fp8"), make_rows(4))


SOME = jnp.arange(4, dtype=jnp.int32)


def without(pools, name):
    return {key: value for key, value in pools.items() if key != name}


def test_widths_that_the_kernel_cannot_take_are_named():
    pools = {"index_key": jnp.zeros((1, 8, 96), jnp.bfloat16)}
    rows = {"index_key": jnp.zeros((2, 96), jnp.bfloat16)}
    with pytest.raises(ConfigError, match="cannot run its triton kernel: index_key of 96 is no power of two"):
        kv_insert(pools, rows, SOME[:2], indexer=0, implementation="triton")
