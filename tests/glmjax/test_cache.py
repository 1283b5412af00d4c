"""The KV pool: what is written is read back, and nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax import codec
from glmjax.cache import abstract_cache, make_cache, packed, read_index_keys, read_mla, write_rows
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.kernels import kv_rows
from glmjax.params import num_bytes

CONFIG = GLMConfig.tiny()
BLOCKS, BLOCK = 3, 8
SLOTS = BLOCKS * BLOCK
LAYER, INDEXER = 4, 2
DTYPES = ["fp8_ds_mla", "bfloat16", "float32"]

jitted_write = jax.jit(write_rows)
read_rows = jax.jit(read_mla)
read_keys = jax.jit(read_index_keys, static_argnums=3)


@functools.cache
def full_pool(dtype):
    """A pool with a row in every slot, so that a stray write shows."""
    rng = np.random.default_rng(7)
    empty = make_cache(CONFIG, BLOCKS, BLOCK, dtype, mtp=True)

    def fill(x):
        if x.dtype == jnp.uint8:  # the bits of fp8 numbers, no NaN among them
            return jnp.asarray(rng.integers(1, 0x7F, x.shape), x.dtype)
        return jnp.asarray(1 + rng.random(x.shape), x.dtype)

    return jax.tree.map(fill, empty)


def random_rows(count=6, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (count, CONFIG.kv_lora_rank), (count, CONFIG.qk_rope_head_dim), (count, CONFIG.index_head_dim)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def write(dtype, slots, rows):
    new = dict(zip(("latent", "rope", "index_key"), rows, strict=True))
    return jitted_write(full_pool(dtype), new, slots, layer=LAYER, indexer=INDEXER)


# Some slots of a step, padding among them, none twice.
written_slots = st.permutations(range(SLOTS)).flatmap(
    lambda order: st.lists(st.booleans(), min_size=6, max_size=6).map(
        lambda real: np.array([s if yes else -1 for s, yes in zip(order, real, strict=False)], np.int32)
    )
)


@pytest.mark.parametrize("dtype", DTYPES)
@given(slots=written_slots)
def test_write_changes_its_own_slots_only(dtype, slots):
    before, after = full_pool(dtype), write(dtype, slots, random_rows())
    named = np.isin(np.arange(SLOTS), slots)
    for name in ("latent", "latent_scale", "rope", "index_key", "index_scale"):
        old, new = getattr(before, name), getattr(after, name)
        if old is None:
            assert new is None
            continue
        written = INDEXER if name.startswith("index") else LAYER
        old, new = (np.asarray(x[:, :SLOTS], np.float32) for x in (old, new))  # the block beyond is for padding
        assert (new[:, ~named] == old[:, ~named]).all()
        others = np.arange(len(old)) != written
        assert (new[others] == old[others]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(slots=written_slots)
def test_rows_are_read_back_as_stored(dtype, slots):
    latent, rope, key = rows = random_rows()
    cache = write(dtype, slots, rows)
    real = slots >= 0
    got_latent, got_rope = read_rows(cache, jnp.int32(LAYER), jnp.asarray(np.maximum(slots, 0)))
    keys, scale = read_keys(cache, jnp.int32(INDEXER), jnp.arange(BLOCKS)[None], BLOCK)
    got_key = np.asarray(keys, np.float32)[0, np.maximum(slots, 0)]
    if dtype == "fp8_ds_mla":
        bf16 = [jnp.asarray(x, jnp.bfloat16) for x in (latent, rope, key)]
        latent, rope = codec.dequantize_latent(*kv_rows.quantize_latent(bf16[0])), bf16[1]
        stored, key_scale = kv_rows.quantize_index_key(bf16[2])
        key = np.asarray(stored, np.float32)
        assert (np.asarray(scale)[0, np.maximum(slots, 0)][real] == np.asarray(key_scale)[real]).all()
    elif dtype == "bfloat16":
        latent, rope, key = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in rows)
    assert (np.asarray(got_latent, np.float32)[real] == np.asarray(latent, np.float32)[real]).all()
    assert (np.asarray(got_rope, np.float32)[real] == np.asarray(rope, np.float32)[real]).all()
    assert (got_key[real] == key[real]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_is_written_like_many(dtype):
    one = [x[:1] for x in random_rows()]
    cache = write(dtype, np.array([5], np.int32), one)
    many = write(dtype, np.array([5, -1, -1, -1, -1, -1], np.int32), random_rows())
    for single, padded in zip(jax.tree.leaves(cache), jax.tree.leaves(many), strict=True):
        assert (np.asarray(single[:, :SLOTS]) == np.asarray(padded[:, :SLOTS])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_keys_come_in_the_order_of_the_blocks(dtype):
    cache = full_pool(dtype)
    blocks = np.array([[2, 0], [1, 1]], np.int32)
    keys, scale = read_keys(cache, jnp.int32(INDEXER), blocks, BLOCK)
    slots = (blocks[..., None] * BLOCK + np.arange(BLOCK)).reshape(2, -1)
    assert np.asarray(keys).tobytes() == np.asarray(cache.index_key)[INDEXER, slots].tobytes()
    if cache.quantized:
        assert (np.asarray(scale) == np.asarray(cache.index_scale)[INDEXER, slots]).all()
    else:
        assert scale is None


def test_format_errors_are_those_of_the_number_formats():
    latent, _, _ = rows = random_rows()
    slots = np.arange(6, dtype=np.int32)
    error = {}
    for dtype in DTYPES:
        got, _ = read_rows(write(dtype, slots, rows), jnp.int32(LAYER), slots)
        error[dtype] = np.abs(np.asarray(got, np.float32) - latent)
    assert error["float32"].max() == 0
    assert (error["bfloat16"] <= np.abs(latent) * 2**-8).all()
    # Four significant bits after bf16's rounding, or half a step of 2^-9 scales; the scale is below 2 amax / 448.
    step = np.abs(latent).max(axis=1, keepdims=True) / 224 * 2**-10
    assert (error["fp8_ds_mla"] <= np.maximum(np.abs(latent) * (2**-4 + 2**-7), step)).all()
    assert error["fp8_ds_mla"].max() > 0


def test_pool_takes_the_bytes_of_the_format_and_one_spare_block():
    config = GLMConfig.glm_5_3()
    pool = num_bytes(abstract_cache(config, 99, 64, "fp8_ds_mla", mtp=True))
    assert pool == 100 * 64 * codec.bytes_per_token(config)


def test_pool_without_mtp_has_no_rows_for_it():
    config = GLMConfig.glm_5_3()
    pool = abstract_cache(config, 1, 64, "bfloat16")
    assert (pool.latent.shape[0], pool.index_key.shape[0]) == (78, 21)
    assert pool.latent_scale is None and not pool.quantized


def test_unknown_format_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be .*'int8'"):
        abstract_cache(CONFIG, 1, 8, "int8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_packed_before_they_travel(dtype):
    rows, slots = random_rows(), np.array([3, -1, 0, 17, 5, 9], np.int32)
    new = dict(zip(("latent", "rope", "index_key"), rows, strict=True))
    written = jitted_write(full_pool(dtype), packed(full_pool(dtype), new), slots, layer=LAYER, indexer=INDEXER)
    jax.tree.map(np.testing.assert_array_equal, written, write(dtype, slots, rows))


def test_index_keys_may_have_slots_of_their_own():
    rows, slots, others = (
        random_rows(),
        np.array([3, -1, 0, 17, 5, 9], np.int32),
        np.array([1, 2, -1, 4, 0, 8], np.int32),
    )
    new = dict(zip(("latent", "rope", "index_key"), rows, strict=True))
    both = jitted_write(full_pool("fp8_ds_mla"), new, slots, layer=LAYER, indexer=INDEXER, index_slots=others)
    layer, indexer = (write("fp8_ds_mla", at, rows) for at in (slots, others))
    for name, pool in vars(both).items():
        np.testing.assert_array_equal(pool, getattr(indexer if name.startswith("index") else layer, name), err_msg=name)
