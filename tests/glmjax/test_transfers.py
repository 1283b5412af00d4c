"""Whole pages between the device's row pool and the host's, byte for byte in every format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting_model import BLOCK, CONFIG
from jax.sharding import Mesh

from glmjax.cache import abstract_cache, make_cache, mla_fields, packed_row_bytes, store_packed
from glmjax.config import GLMConfig
from glmjax.handoff import read_blocks
from glmjax.host_pool import abstract_host_pool, make_host_pool
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.tiers import Offload
from glmjax.transfers import Transfers

BLOCKS, PAGES = 12, 5
FORMATS = ["fp8_ds_mla", "bfloat16", "float32"]
TIERS = Offload(PAGES)


def pools(dtype, seed=0):
    """A cache of noise, an empty pool on the host, and the copies between them."""
    rng = np.random.default_rng(seed)

    def noise(x):
        return jnp.asarray(rng.integers(0, 256, (*x.shape, x.dtype.itemsize)), jnp.uint8).view(x.dtype)[..., 0]

    cache = jax.tree.map(noise, abstract_cache(CONFIG, BLOCKS, BLOCK, dtype, mtp=True, offload=TIERS))
    axes = tuple(ONE_DEVICE.axis_sizes)
    mesh = Mesh(np.reshape(jax.devices()[:1], (1,) * len(axes)), axes)
    host = abstract_host_pool(cache, BLOCK, ONE_DEVICE, mesh)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cache)
    return cache, make_host_pool(host), Transfers(abstract, host, BLOCK, 2, ONE_DEVICE, None)


def rows_of_pages(cache, pages):
    """Packed rows [L, pages, BLOCK, bytes]."""
    parts = [np.asarray(x).reshape(x.shape[0], -1, BLOCK, x.shape[-1])[:, pages] for x in mla_fields(cache).values()]
    return np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in parts], axis=-1)


@pytest.mark.parametrize("dtype", FORMATS)
def test_pages_go_to_their_blocks_and_come_back(dtype):
    cache, host, copies = pools(dtype)
    sent = rows_of_pages(cache, [3, 0])
    pointer = host.addressable_shards[0].data.unsafe_buffer_pointer()
    host, done = copies.write_back(cache, host, [[(7, 3), (2, 0)]])
    done.block_until_ready()
    assert host.addressable_shards[0].data.unsafe_buffer_pointer() == pointer
    there = np.asarray(host).reshape(host.shape[0], BLOCKS, BLOCK, -1)
    assert np.array_equal(there[:, [7, 2]], sent) and not np.delete(there, [7, 2], axis=1).any()

    other, _, _ = pools(dtype, seed=1)
    before = rows_of_pages(other, [0, 1, 2, 3, 4])
    index = np.asarray(other.index_key).tobytes()
    other = copies.load(other, host, [[(2, 4), (7, 1)]])
    after = rows_of_pages(other, [0, 1, 2, 3, 4])
    assert np.array_equal(after[:, [1, 4]], sent) and np.array_equal(after[:, [0, 2, 3]], before[:, [0, 2, 3]])
    assert np.asarray(other.index_key).tobytes() == index


@pytest.mark.parametrize("dtype", FORMATS)
def test_single_rows_are_stored_as_a_page_has_them(dtype):
    cache, _, _ = pools(dtype)
    rows = rows_of_pages(cache, [2])[1].reshape(BLOCK, -1)
    target, _, _ = pools(dtype, seed=1)
    before = rows_of_pages(target, list(range(PAGES)))
    slots = jnp.asarray([4 * BLOCK + 1, -1, 5])
    stored = jax.jit(lambda c, r: store_packed(c, 1, slots, r, first=1))(target, jnp.asarray(rows))
    expected = before.copy()
    expected[1, 4, 1], expected[1, 1, 1] = rows[1], rows[3]
    assert np.array_equal(rows_of_pages(stored, list(range(PAGES))), expected)


@pytest.mark.parametrize(("dtype", "size"), [("fp8_ds_mla", 656), ("bfloat16", 1152), ("float32", 2304)])
def test_rows_of_glm_5_3_have_the_bytes_of_their_format(dtype, size):
    cache = jax.eval_shape(lambda: make_cache(GLMConfig.glm_5_3(), 1, 64, dtype))
    assert packed_row_bytes(cache) == size
    assert jax.eval_shape(lambda c: read_blocks(c, jnp.zeros(1, jnp.int32), 64)[0], cache).shape[3] == size
