"""KV rows as bytes: the golden bytes, exact round trips, and values that a format of eight bits finds hard."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import REFERENCE

from glmjax import codec
from glmjax.config import GLMConfig
from glmjax.kernels import kv_rows

LATENT, TILES = 256, 2
QUANTIZERS = {"latent": kv_rows.quantize_latent, "index key": kv_rows.quantize_index_key}
compiled = {name: jax.jit(quantize) for name, quantize in QUANTIZERS.items()}
WIDTH = {"latent": LATENT, "index key": 128}


@functools.cache
def golden():
    with np.load(REFERENCE / "cache_golden.npz") as file:
        return dict(file)


def as_bf16(name):
    """An input of the golden file as the engines quantise it."""
    return jnp.asarray(golden()[name], jnp.bfloat16)


def pack_golden_index_block():
    """48 keys in a block of 64, the rest zero bytes."""
    values, scale = kv_rows.quantize_index_key(as_bf16("index_k"))
    unused = codec.INDEX_BLOCK - values.shape[1]
    values = jnp.pad(values, ((0, 0), (0, unused), (0, 0)))
    return codec.pack_index_block(values, jnp.pad(scale, ((0, 0), (0, unused))))


# Golden bytes.


def test_mla_rows_equal_the_golden_bytes():
    packed = codec.pack_mla(*kv_rows.quantize_latent(as_bf16("kv_c")), as_bf16("k_pe"))
    assert packed.shape == (2, 48, 656)
    assert (np.asarray(packed) == golden()["ds_mla_bytes_pow2"]).all()


def test_index_block_equals_the_golden_bytes():
    packed = pack_golden_index_block()
    assert packed.shape == (2, 8448)
    assert (np.asarray(packed) == golden()["index_block_bytes_pow2"]).all()


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_reader_takes_mla_rows_with_any_scale(rule):
    values, scale, rope = codec.unpack_mla(jnp.asarray(golden()[f"ds_mla_bytes_{rule}"]), 512)
    assert (np.asarray(scale) == golden()[f"ds_mla_scale_{rule}"]).all()
    assert (np.asarray(rope) == np.asarray(as_bf16("k_pe"))).all()
    assert_within_half_a_step(codec.dequantize_latent(values, scale), as_bf16("kv_c"), scale, 128)


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_reader_takes_index_blocks_with_any_scale(rule):
    values, scale = codec.unpack_index_block(jnp.asarray(golden()[f"index_block_bytes_{rule}"]), 128)
    assert values.shape == (2, 64, 128)
    values, scale = values[:, :48], scale[:, :48]
    assert (np.asarray(scale) == golden()[f"index_scale_{rule}"]).all()
    assert_within_half_a_step(np.asarray(values, np.float32) * scale[..., None], as_bf16("index_k"), scale, 128)


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_unpacked_bytes_pack_to_the_same(rule):
    rows, blocks = (jnp.asarray(golden()[f"{name}_bytes_{rule}"]) for name in ("ds_mla", "index_block"))
    assert (codec.pack_mla(*codec.unpack_mla(rows, 512)) == rows).all()
    assert (codec.pack_index_block(*codec.unpack_index_block(blocks, 128)) == blocks).all()


# Sizes.


def test_glm_5_3_sizes():
    config = GLMConfig.glm_5_3()
    assert codec.mla_row_bytes(config) == 656
    assert codec.index_row_bytes(config) == 132
    assert codec.bytes_per_token(config) == 54_728
    assert codec.bytes_per_token(config, mtp=False) == 54_728 - 656 - 132


def test_packed_rows_have_the_stated_size():
    config = GLMConfig.tiny()  # a latent of 64 is half a tile
    values, scale = kv_rows.quantize_latent(jnp.ones((3, config.kv_lora_rank)))
    row = codec.pack_mla(values, scale, jnp.ones((3, config.qk_rope_head_dim)))
    block = codec.pack_index_block(*kv_rows.quantize_index_key(jnp.ones((3, config.index_head_dim))))
    assert row.shape == (3, codec.mla_row_bytes(config))
    assert block.shape == (3 * codec.index_row_bytes(config),)


# Quantising.


def assert_within_half_a_step(restored, x, scale, tile):
    """e4m3 keeps four significant bits, and steps of 2^-9 scales below 2^-6 of them."""
    x, scale = np.asarray(x, np.float64), np.repeat(np.asarray(scale, np.float64), tile).reshape(*x.shape[:-1], -1)
    bound = np.maximum(np.abs(x) * 2**-4, scale[..., : x.shape[-1]] * 2**-10)
    assert (np.abs(np.asarray(restored, np.float64) - x) <= bound).all()


def rows(width):
    """Three rows of any finite floats, with some rows of like size, which use all of the format."""
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return hnp.arrays(np.float32, (3, width), elements=st.floats(-4, 4, width=32) | anything, fill=st.just(0.5))


@pytest.mark.parametrize("kind", QUANTIZERS)
@given(data=st.data())
def test_quantised_values_are_within_half_a_step(kind, data):
    x = data.draw(rows(WIDTH[kind]))
    values, scale = compiled[kind](x)
    restored = np.asarray(values, np.float64) * np.repeat(np.asarray(scale, np.float64), 128).reshape(x.shape)
    assert_within_half_a_step(restored, x, scale, 128)


@pytest.mark.parametrize("kind", QUANTIZERS)
@given(data=st.data())
def test_scale_is_the_least_power_of_two_that_fits(kind, data):
    x = data.draw(rows(WIDTH[kind]))
    scale = np.asarray(compiled[kind](x)[1], np.float64).reshape(-1)
    peak = np.abs(x.reshape(-1, 128)).max(axis=1)
    floor = np.float32(1e-4) if kind == "latent" else np.float32(1e-4) / np.float32(448)
    least = np.maximum(peak / np.float32(448), floor)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (scale >= least).all() and (scale / 2 < least).all()


@pytest.mark.parametrize("kind", QUANTIZERS)
@given(data=st.data())
def test_compiled_and_eager_forms_agree_to_the_bit(kind, data):
    x = data.draw(rows(WIDTH[kind]))
    for fast, plain in zip(compiled[kind](x), QUANTIZERS[kind](x), strict=True):
        assert np.asarray(fast).tobytes() == np.asarray(plain).tobytes()


@pytest.mark.parametrize("kind", QUANTIZERS)
@given(data=st.data())
def test_quantising_again_changes_nothing(kind, data):
    """What was read back may be written again, as when a block moves between pools."""
    x = np.clip(data.draw(rows(WIDTH[kind])), -1e30, 1e30)  # rounding up may not overflow float32
    values, scale = compiled[kind](x)
    restored = np.asarray(values, np.float32) * np.repeat(np.asarray(scale), 128).reshape(values.shape)
    again, scale_again = compiled[kind](restored)
    twice = np.asarray(again, np.float32) * np.repeat(np.asarray(scale_again), 128).reshape(values.shape)
    assert (twice == restored).all()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_zeros_stay_zero(kind):
    values, scale = compiled[kind](np.zeros((3, WIDTH[kind]), np.float32))
    assert (np.asarray(values, np.float32) == 0).all()
    assert np.isfinite(np.asarray(scale)).all() and (np.asarray(scale) > 0).all()


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("huge", [448.0, 1e30, 3.4e38, np.inf])
def test_huge_values_saturate(kind, huge):
    x = np.full((3, WIDTH[kind]), huge, np.float32)
    x[:, 1::2] *= -1
    values, scale = (np.asarray(y, np.float32) for y in compiled[kind](x))
    assert np.isfinite(values).all() and np.isfinite(scale).all()
    assert (np.sign(values) == np.sign(x)).all()


def test_tiles_of_a_latent_have_scales_of_their_own():
    x = np.ones((1, LATENT), np.float32)
    x[:, 128:] = 2**10
    values, scale = compiled["latent"](x)
    assert scale.shape == (1, TILES) and float(scale[0, 1] / scale[0, 0]) == 2**10
    assert (np.asarray(codec.dequantize_latent(values, scale)) == x).all()


def test_dequantize_is_the_product_tile_by_tile():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 200)).astype(kv_rows.FP8)
    scale = rng.random((5, 2)).astype(np.float32)
    expected = values.astype(np.float32) * scale[:, np.arange(200) // 128]
    assert (np.asarray(codec.dequantize_latent(values, scale)) == expected).all()


# Packing.


@given(st.integers(0, 2**16))
def test_mla_row_unpacks_to_what_was_packed(seed):
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((4, 64)).astype(kv_rows.FP8), rng.random((4, 1)), rng.standard_normal((4, 16))
    values, scale, rope = parts[0], parts[1].astype(np.float32), jnp.asarray(parts[2], jnp.bfloat16)
    for got, put in zip(codec.unpack_mla(codec.pack_mla(values, scale, rope), 64), (values, scale, rope), strict=True):
        assert got.dtype == put.dtype and np.asarray(got).tobytes() == np.asarray(put).tobytes()


def test_index_block_keeps_all_values_before_all_scales():
    values = np.arange(6, dtype=np.float32).reshape(3, 2).astype(kv_rows.FP8)
    scale = np.array([1.0, 2.0, 0.5], np.float32)
    packed = np.asarray(codec.pack_index_block(values, scale)).tobytes()
    assert packed == values.tobytes() + scale.astype("<f4").tobytes()


def test_mla_row_keeps_latent_scales_and_rope_in_this_order():
    values, scale = np.ones((1, 4), kv_rows.FP8), np.array([[2.0]], np.float32)
    rope = np.array([[1.0, -2.0]], np.float32)
    packed = np.asarray(codec.pack_mla(values, scale, jnp.asarray(rope))).tobytes()
    assert packed == values.tobytes() + scale.astype("<f4").tobytes() + np.array([0x3F80, 0xC000], "<u2").tobytes()
