"""The temporary copy of one layer's rows, against the pools that it was gathered from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax.batch import TokenBatch
from glmjax.cache import make_cache, write_rows
from glmjax.config import GLMConfig
from glmjax.gathered import first_kv, read_gathered_keys
from glmjax.sharding.layout import Layout
from glmjax.share import share_of

CONFIG = GLMConfig.tiny(num_nextn_predict_layers=0)
REQUESTS, BLOCK, WIDTH = 2, 4, 6
INDEXER = 1


@functools.partial(jax.jit, static_argnums=0)
def _read(layout, positions, tables):
    """Every device writes key (request + 1) * 1000 + position at each position of a full table, and reads some."""
    context = WIDTH * BLOCK * layout.dcp

    def on_device(positions, tables):
        zeros = jnp.zeros(REQUESTS, jnp.int32)
        batch = TokenBatch(jnp.zeros((REQUESTS, context), jnp.int32), zeros, zeros + context, tables, BLOCK)
        share = share_of(batch, layout, prefill="kv_gather")
        cache = make_cache(CONFIG, REQUESTS * WIDTH, BLOCK, "float32")
        key = 1000 * (1 + jnp.arange(REQUESTS)[:, None]) + share.group_positions
        rows = jnp.broadcast_to(key.reshape(-1, 1), (key.size, CONFIG.index_head_dim)).astype(jnp.float32)
        cache = write_rows(cache, {"index_key": rows}, share.write_slots, indexer=INDEXER)
        kv = first_kv(cache, 0, INDEXER, share)
        assert kv.view is not None
        keys, scale = read_gathered_keys(kv.view, positions, share)
        assert scale is None
        return keys[..., 0]

    replicated = jax.sharding.PartitionSpec()
    return jax.shard_map(
        on_device, mesh=layout.mesh(), in_specs=(replicated, replicated), out_specs=replicated, check_vma=False
    )(positions, tables)


@pytest.mark.parametrize("text", ["tp=2,dcp=2", "pcp=2,dcp=2,interleave=4", "pcp=2,tp=2,dcp=4,interleave=2"])
@pytest.mark.parametrize("chunk", [3, 4, 5])  # blocks of each rank; the last chunk may go on beyond the table
def test_every_position_has_its_key_whatever_the_chunk(text, chunk):
    layout = Layout.parse(text)
    context, size = WIDTH * BLOCK * layout.dcp, chunk * BLOCK * layout.dcp
    tables = np.random.default_rng(0).permutation(REQUESTS * WIDTH).reshape(REQUESTS, WIDTH).astype(np.int32)
    read = np.concatenate(
        [_read(layout, np.arange(first, first + size, dtype=np.int32), tables) for first in range(0, context, size)],
        axis=1,
    )
    expected = 1000 * (1 + np.arange(REQUESTS)[:, None]) + np.arange(context)
    assert (read[:, :context] == expected).all()
