"""The indexer against its formula in float64, whatever the chunks, tiles and block tables."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_glm

from glmjax import indexer
from glmjax.attention import query_latent
from glmjax.batch import TokenBatch, contiguous_batch
from glmjax.cache import make_cache
from glmjax.config import GLMConfig
from glmjax.gathered import KV
from glmjax.kernels import index_topk, kv_rows
from glmjax.kernels.index_scores import index_scores_numpy
from glmjax.kernels.topk import top_k_numpy
from glmjax.layers import at_layer, rms_norm, rope_angles
from glmjax.params import random_params
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of

CONFIG = GLMConfig.tiny(num_nextn_predict_layers=0)
INDEXER, BLOCK, LENGTH = 1, 4, 60


@functools.cache
def weights():
    return at_layer(random_params(CONFIG).indexer, INDEXER)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _select(config, sizes, weights, cache, x, latent, batch):
    before = {name: getattr(index_topk, name) for name in dict(sizes)}
    try:
        for name, value in sizes:
            setattr(index_topk, name, value)
        angles = rope_angles(batch.positions.reshape(-1), config.qk_rope_head_dim, config.rope_theta)
        share = share_of(batch, ONE_DEVICE)
        kv = KV(cache, None).write(indexer.new_keys(weights, config, x, angles), share, None, INDEXER)
        return kv.cache, indexer.select(weights, config, kv, INDEXER, x, latent, angles, share)
    finally:
        for name, value in before.items():
            setattr(index_topk, name, value)


def select(cache, x, latent, batch, config=CONFIG, **sizes):
    """The indexer with other chunk and tile sizes; x [R, Q, D], latent [R, Q, q_lora] -> cache and [R, Q, K]."""
    R, Q = batch.tokens.shape
    flat = (jnp.asarray(y.reshape(R * Q, -1)) for y in (x, latent))
    cache, chosen = _select(config, tuple(sizes.items()), weights(), cache, *flat, batch)
    return cache, np.asarray(chosen).reshape(R, Q, -1)


def inputs(requests=2, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    widths = CONFIG.hidden_size, CONFIG.q_lora_rank
    return [rng.standard_normal((requests, length, width)).astype(np.float32) for width in widths]


def paged(requests, q, start, length, tables):
    arrays = (np.zeros((requests, q)), start, length, tables)
    return TokenBatch(*(jnp.asarray(x, jnp.int32) for x in arrays), BLOCK)


def shuffled_tables(requests=2, seed=3):
    """Blocks for LENGTH tokens each, spread over the pool, and two unused entries."""
    width = LENGTH // BLOCK
    order = np.random.default_rng(seed).permutation(requests * width).reshape(requests, width)
    return np.pad(order, ((0, 0), (0, 2)))


def empty_pool(dtype="float32", requests=2):
    return make_cache(CONFIG, requests * LENGTH // BLOCK, BLOCK, dtype)


def rotated(y, interleaved=True):
    """[S, ..., d] with its first part turned by position, float64 (spec/model.md 2.4)."""
    rope = CONFIG.qk_rope_head_dim
    frequency = CONFIG.rope_theta ** (-np.arange(0, rope, 2) / rope)
    turn = np.exp(1j * np.arange(len(y))[:, None] * frequency).reshape(len(y), *[1] * (y.ndim - 2), -1)
    first, second = (
        (slice(0, rope, 2), slice(1, rope, 2)) if interleaved else (slice(rope // 2), slice(rope // 2, rope))
    )
    turned = (y[..., first] + 1j * y[..., second]) * turn
    out = y.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def scores_numpy(x, latent, fp8=False, interleaved=True):
    """Scores [S, S] of one request by the formula, in float64."""
    w = jax.tree.map(lambda y: np.asarray(y, np.float64), weights())
    heads, dim = CONFIG.index_n_heads, CONFIG.index_head_dim
    key = x @ w.key.T
    key = key - key.mean(axis=-1, keepdims=True)
    key = key / np.sqrt((key**2).mean(axis=-1, keepdims=True) + 1e-6) * w.key_norm_weight + w.key_norm_bias
    query = rotated((latent @ w.query.T).reshape(-1, heads, dim), interleaved)
    key = rotated(key, interleaved)
    if fp8:
        query, key = through_fp8(query), through_fp8(jnp.asarray(key, jnp.bfloat16))
    head_weights = x @ w.head_weights.T / np.sqrt(heads * dim)
    return index_scores_numpy(query, head_weights, key, np.arange(len(x)))


def through_fp8(y):
    values, scale = kv_rows.quantize_index_key(jnp.asarray(y, jnp.float32 if y.dtype == np.float64 else y.dtype))
    return np.asarray(values, np.float64) * np.asarray(scale, np.float64)[..., None]


def as_sets(chosen):
    return [{int(p) for p in row if p >= 0} for row in chosen.reshape(-1, chosen.shape[-1])]


@pytest.mark.parametrize("interleaved", [True, False])
def test_selects_the_best_by_the_formula(interleaved):
    x, latent = inputs()
    batch = paged(2, LENGTH, [0, 0], [LENGTH] * 2, shuffled_tables())
    config = dataclasses.replace(CONFIG, indexer_rope_interleave=interleaved)
    _, chosen = select(empty_pool(), x, latent, batch, config)
    for r in range(2):
        scores = scores_numpy(x[r].astype(np.float64), latent[r], interleaved=interleaved)
        expected = top_k_numpy(scores, CONFIG.index_topk)
        assert as_sets(chosen[r]) == as_sets(expected)


@pytest.mark.parametrize("layer", [0, 1, 2, 6])
def test_scores_equal_transformers(layer):
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    hidden = jnp.asarray(recorded[f"layer_out.{layer - 1}"] if layer else recorded["embed"])
    place = tiny_glm.full_layers(config).index(layer)
    batch = contiguous_batch(jnp.asarray(recorded["input_ids"]))
    attention = at_layer(params.attention, layer)
    x = rms_norm(hidden.reshape(-1, config.hidden_size), attention.input_norm, config.rms_norm_eps)
    angles = rope_angles(batch.positions.reshape(-1), config.qk_rope_head_dim, config.rope_theta)
    seen = {}

    def record(*args):
        seen["scores"] = scored(*args)
        return seen["scores"]

    scored = index_topk.index_scores
    cache = make_cache(config, *hidden.shape[:2], "float32")
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(index_topk, "index_scores", record)
        w = at_layer(params.indexer, place)
        latent = query_latent(attention, config, x)
        share = share_of(batch, ONE_DEVICE)
        kv = KV(cache, None).write(indexer.new_keys(w, config, x, angles), share, None, place)
        indexer.select(w, config, kv, place, x, latent, angles, share)
    actual, expected = np.asarray(seen["scores"]), recorded[f"index_scores.{layer}"]
    masked = np.isneginf(actual)
    assert (masked == (expected < -1e37)).all()
    assert np.abs(actual - expected)[~masked].max() < 1e-4


@pytest.mark.parametrize(
    "sizes",
    [
        {"CONTEXT_CHUNK": BLOCK},
        {"CONTEXT_CHUNK": BLOCK, "RUN": 3},
        {"CONTEXT_CHUNK": 6 * BLOCK},  # the last chunk ends beyond the block table
        {"CHUNK_KEYS": 2 * 3 * BLOCK},
        {"TILE_SCORES": 1},
        {"CONTEXT_CHUNK": 4 * BLOCK, "TILE_SCORES": 7 * 2 * 4 * BLOCK},
    ],
    ids=str,
)
def test_chunks_and_tiles_do_not_change_the_choice(sizes):
    x, latent = inputs()
    batch = paged(2, LENGTH, [0, 0], [LENGTH, LENGTH - 7], shuffled_tables())
    _, expected = select(empty_pool(), x, latent, batch)
    _, chosen = select(empty_pool(), x, latent, batch, **sizes)
    assert as_sets(chosen) == as_sets(expected)


def test_prompt_in_pieces_selects_as_in_one_go():
    x, latent = inputs()
    tables = shuffled_tables()
    _, expected = select(empty_pool(), x, latent, paged(2, LENGTH, [0, 0], [LENGTH] * 2, tables))
    cache, pieces = empty_pool(), []
    for start in range(0, LENGTH, 20):
        part = slice(start, start + 20)
        batch = paged(2, 20, [start] * 2, [20] * 2, tables)
        cache, chosen = select(cache, x[:, part], latent[:, part], batch)
        pieces.append(chosen)
    assert as_sets(np.concatenate(pieces, axis=1)) == as_sets(expected)


def test_one_query_per_request_selects_as_in_one_go():
    x, latent = inputs()
    tables, last = shuffled_tables(), LENGTH - 1
    cache, expected = select(empty_pool(), x, latent, paged(2, LENGTH, [0, 0], [LENGTH] * 2, tables))
    _, chosen = select(cache, x[:, last:], latent[:, last:], paged(2, 1, [last] * 2, [1] * 2, tables))
    assert as_sets(chosen) == as_sets(expected[:, last:])


def test_requests_of_unequal_length_select_as_alone():
    x, latent = inputs()
    tables, start = shuffled_tables(), [50, 3]
    whole = paged(2, LENGTH, [0, 0], [LENGTH] * 2, tables)
    cache, expected = select(empty_pool(), x, latent, whole)
    now = [np.stack([y[r, s : s + 1] for r, s in enumerate(start)]) for y in (x, latent)]
    _, chosen = select(cache, *now, paged(2, 1, start, [1, 1], tables))
    assert as_sets(chosen) == as_sets(np.stack([expected[r, s : s + 1] for r, s in enumerate(start)]))


def test_few_positions_are_all_selected():
    k = CONFIG.index_topk
    x, latent = inputs(length=k)
    _, chosen = select(empty_pool(), x, latent, paged(2, k, [0, 0], [k, k], shuffled_tables()))
    assert as_sets(chosen) == [set(range(t + 1)) for _ in range(2) for t in range(k)]


def test_valid_positions_come_first():
    x, latent = inputs()
    for length in (CONFIG.index_topk, LENGTH):  # without scores, and with
        part = [y[:, :length] for y in (x, latent)]
        _, chosen = select(empty_pool(), *part, paged(2, length, [0, 0], [length] * 2, shuffled_tables()))
        missing = chosen < 0
        assert missing.any() and (np.sort(missing, axis=-1) == missing).all()


def test_padding_selects_nothing():
    x, latent = inputs()
    _, chosen = select(empty_pool(), x, latent, paged(2, LENGTH, [0, 0], [LENGTH, 30], shuffled_tables()))
    assert (chosen[1, 30:] == -1).all() and (chosen[1, 29] >= 0).all()


def test_blocks_of_others_leave_no_trace():
    x, latent = inputs()
    tables = shuffled_tables()
    batch = paged(2, 30, [0, 0], [30, 30], tables)
    part = [y[:, :30] for y in (x, latent)]
    _, expected = select(empty_pool(), *part, batch)
    rubbish = jax.tree.map(lambda y: jnp.full_like(y, jnp.nan), empty_pool())
    _, chosen = select(rubbish, *part, batch)
    assert as_sets(chosen) == as_sets(expected)


def test_fp8_cache_selects_by_the_quantised_query_and_keys():
    x, latent = inputs()
    batch = paged(2, LENGTH, [0, 0], [LENGTH] * 2, shuffled_tables())
    _, chosen = select(empty_pool("fp8_ds_mla"), x, latent, batch)
    for r in range(2):
        scores = scores_numpy(x[r].astype(np.float64), latent[r], fp8=True)
        assert as_sets(chosen[r]) == as_sets(top_k_numpy(scores, CONFIG.index_topk))
