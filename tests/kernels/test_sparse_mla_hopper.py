"""Sparse MLA's Hopper kernel: interpreted with race detection against float64; its machine code; what is around it.

What the simulator runs in another form is held against the compiled code in ``test_sparse_mla_device.py``.
"""

import functools
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from child_environment import without_devices
from h200_code import check_code, compile_case, compile_program, needs_plugin
from jax.experimental.pallas import mosaic_gpu as plgpu
from many_warpgroups import DEVICES, simulate_many_warpgroups

from glmjax.cache import KVCache, read_mla
from glmjax.errors import ConfigError
from glmjax.kernels.kv_rows import LATENT_TILE, quantize_latent
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.sparse_mla import sparse_mla, sparse_mla_from_pool
from glmjax.kernels.sparse_mla_hopper import cases, default_config, least_bytes, sparse_mla_hopper
from glmjax.kernels.sparse_mla_kernel import COMPUTE_REGISTERS, LOAD_REGISTERS, Config

LATENT, ROPE, LAYERS, SLOTS, LAYER, SCALE = 512, 64, 2, 300, 1, 1 / 16
BF16 = ml_dtypes.bfloat16
SLOW_BF16 = [pytest.param(True, id="fp8"), pytest.param(False, id="bf16", marks=pytest.mark.slow)]
ROUNDING = 2.0**-8  # of bf16, relative
LSE_TOLERANCE = 2e-5


def random_pools(quantized=True, seed=0):
    """Latents of about 1 (fp8: with scales that differ), as a pool stores them: latent, latent_scale, rope."""
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((LAYERS, SLOTS, LATENT))
    rope = rng.standard_normal((LAYERS, SLOTS, ROPE)).astype(BF16)
    if not quantized:
        return [latent.astype(BF16), None, rope]
    latent *= 2.0 ** rng.integers(-3, 2, (LAYERS, SLOTS, LATENT // LATENT_TILE)).repeat(LATENT_TILE, axis=-1)
    values, scale = quantize_latent(jnp.asarray(latent, jnp.float32))
    return [np.array(values).view(np.uint8), np.array(scale), rope]


def random_queries(tokens, heads, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((tokens, heads, width)).astype(BF16) for width in (LATENT, ROPE)]


def random_rows(lengths, k, seed=2):
    """[T, K]: the first ``lengths[t]`` entries name different slots."""
    rng = np.random.default_rng(seed)
    rows = np.full((len(lengths), k), -1, np.int32)
    for t, length in enumerate(lengths):
        rows[t, :length] = rng.permutation(SLOTS)[:length]
    return rows


def dequantized(latent, scale):
    if scale is None:
        return latent.astype(np.float64)
    return latent.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale.repeat(LATENT_TILE, axis=-1)


def attend_numpy(queries, latent, rope, rows):
    """Float64: a softmax over the rows that are selected, of one layer's latent [S, 512] and rope [S, 64].

    Returns the output, the log-sum-exp and the same sum of the latents' magnitudes, to which roundings relate.
    """
    query_latent, query_rope = (x.astype(np.float64) for x in queries)
    out, magnitude = np.zeros(query_latent.shape), np.zeros(query_latent.shape)
    lse = np.full(query_latent.shape[:2], -np.inf)
    for t, row in enumerate(rows):
        row = row[row >= 0]
        if len(row):
            scores = query_latent[t] @ latent[row].T + query_rope[t] @ rope[row].astype(np.float64).T
            scores *= SCALE
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            lse[t] = np.log(weights.sum(axis=1)) + top[:, 0]
            weights /= weights.sum(axis=1, keepdims=True)
            out[t], magnitude[t] = weights @ latent[row], weights @ np.abs(latent[row])
    return out, lse, magnitude


def expected(queries, pools, rows):
    latent, scale, rope = (None if x is None else x[LAYER] for x in pools)
    return attend_numpy(queries, dequantized(latent, scale), rope, rows)


def run(queries, pools, rows, splits=1):
    """The kernel, interpreted; a race raises."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    config = Config(splits, 2 if pools[1] is None else 3)
    attend = functools.partial(sparse_mla_hopper, scale=SCALE, config=config, simulate=True, interpret=params)
    out, lse = attend(*queries, *pools, LAYER, rows)
    return np.asarray(out, np.float64), np.asarray(lse)


@functools.cache
def many_devices():
    """A process of its own: what lets the warpgroups of a cluster wait for each other is set before jax starts."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=simulate_many_warpgroups)


def run_cluster(*arguments, splits):
    """As ``run``, in a process for clusters of as many blocks as there may be."""
    with pytest.MonkeyPatch.context() as patch:
        flags = without_devices()["XLA_FLAGS"]
        patch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count={DEVICES}")
        return many_devices().submit(run, *arguments, splits=splits).result()


def assert_close(actual, wanted, roundings=2):
    """Equal but for rounding to bf16: of the weights, of the output and, with parts, of theirs."""
    (out, lse), (wanted_out, wanted_lse, magnitude) = actual, wanted
    assert (np.abs(out - wanted_out) <= roundings * ROUNDING * magnitude + 1e-6).all()
    assert (np.isneginf(lse) == np.isneginf(wanted_lse)).all()
    seen = np.isfinite(wanted_lse)
    assert np.abs(lse[seen] - wanted_lse[seen]).max(initial=0) < LSE_TOLERANCE
    assert (out[~seen] == 0).all()


@pytest.mark.parametrize("attend", [run, functools.partial(run_cluster, splits=3)], ids=["block", "cluster"])
@pytest.mark.parametrize("quantized", SLOW_BF16)
def test_missing_rows_anywhere(quantized, attend):
    """None at all; a first tile without; one row, the last; many holes. Unselected rows hold NaN and infinity."""
    rows = random_rows([0, 192, 192, 192], 192)
    rows[1, :64] = -1
    rows[2, :-1] = -1
    rows[3, np.random.default_rng(3).random(192) < 0.5] = -1
    rows[rows == 0] = SLOTS - 1  # slot 0 is where a missing row would be read
    pools, queries = random_pools(quantized), random_queries(4, 16)
    wanted = expected(queries, pools, rows)
    unused = np.setdiff1d(np.arange(SLOTS), rows)
    assert 0 in unused
    pools[2][:, unused[::2]] = np.nan
    pools[2][:, unused[1::2]] = np.inf
    if quantized:
        pools[0][:, unused] = 0x7F  # NaN
        pools[1][:, unused[::2]] = np.nan
    else:
        pools[0][:, unused] = np.nan
    pools[0][1 - LAYER] = 0x7F if quantized else np.nan
    assert_close(attend(queries, pools, rows), wanted, roundings=2 if attend is run else 3)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "bf16"])
def test_lengths_about_a_tile(quantized):
    rows, pools, queries = random_rows([1, 63, 64, 65, 128], 128), random_pools(quantized), random_queries(5, 8)
    assert_close(run(queries, pools, rows), expected(queries, pools, rows))


@pytest.mark.parametrize("heads", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_many_heads(heads):
    rows, pools, queries = random_rows([64], 64), random_pools(), random_queries(1, heads)
    assert_close(run(queries, pools, rows), expected(queries, pools, rows))


@pytest.mark.parametrize(
    ("splits", "heads", "quantized"),
    [
        pytest.param(4, 16, True),
        pytest.param(4, 8, False, marks=pytest.mark.slow),
        pytest.param(3, 8, True, marks=pytest.mark.slow),  # four pieces of output to a warpgroup, for three blocks
        pytest.param(2, 128, True, marks=pytest.mark.slow),
    ],
)
def test_a_cluster_merges_its_parts(splits, heads, quantized):
    """All parts with rows, none, one alone; the last has a row that outweighs all others."""
    rows, pools = random_rows([256, 0, 30], 256), random_pools(quantized)
    queries = random_queries(3, heads)
    rows[0, 200:] = -1
    rows[2, 255] = rows[0, 0]
    queries[1][2] *= 4
    assert_close(run_cluster(queries, pools, rows, splits=splits), expected(queries, pools, rows), roundings=3)


@pytest.mark.parametrize(
    ("heads", "lengths", "quantized"),
    [
        pytest.param(8, [960], True, id="one-query"),
        pytest.param(64, [2048], True, id="all-heads", marks=pytest.mark.slow),
        pytest.param(8, [2048, 2047, 1025, 1024, 960, 65, 1, 0], True, id="all-queries", marks=pytest.mark.slow),
        pytest.param(8, [2047, 65], False, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_clusters_of_16_blocks(heads, lengths, quantized):
    """As 8 queries have them at decode; of few rows most blocks have none."""
    assert default_config(8, 64, 2048, quantized) == Config(16, 3 if quantized else 2)  # what ``run`` takes
    rows = np.random.default_rng(7).integers(0, SLOTS, (len(lengths), 2048)).astype(np.int32)
    rows = np.where(np.arange(2048) < np.array(lengths)[:, None], rows, -1)
    pools, queries = random_pools(quantized), random_queries(len(lengths), heads)
    assert_close(run_cluster(queries, pools, rows, splits=16), expected(queries, pools, rows), roundings=3)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "bf16"])
def test_every_ring_of_buffers_comes_round(quantized):
    """Seven tiles in one block: more than there are of slots, of half tiles and of tiles."""
    rows = np.random.default_rng(5).integers(0, SLOTS, (1, 448)).astype(np.int32)
    pools, queries = random_pools(quantized), random_queries(1, 8)
    assert_close(run(queries, pools, rows), expected(queries, pools, rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "splits", "quantized"),
    [
        pytest.param([0, 2047, 2048, 2049], 1, True, id="fp8-block"),
        pytest.param([0, 2047, 2048, 2049], 1, False, id="bf16-block"),
        pytest.param([2049], 8, True, id="fp8-cluster"),
    ],
)
def test_about_as_many_rows_as_the_model_selects(lengths, splits, quantized):
    rows = np.random.default_rng(6).integers(0, SLOTS, (len(lengths), 33 * 64)).astype(np.int32)
    rows = np.where(np.arange(33 * 64) < np.array(lengths)[:, None], rows, -1)
    pools, queries = random_pools(quantized), random_queries(len(lengths), 8)
    attend = run if splits == 1 else functools.partial(run_cluster, splits=splits)
    assert_close(attend(queries, pools, rows), expected(queries, pools, rows), roundings=min(splits + 1, 3))


@pytest.mark.slow
def test_equal_and_large_scores():
    rows, pools, queries = random_rows([128, 128], 128), random_pools(), random_queries(2, 8)
    for x in queries:
        x[0] = 0
        x[1] *= 100  # scores of thousands: a softmax that is one row's
    out, lse = run(queries, pools, rows)
    wanted_out, wanted_lse, magnitude = expected(queries, pools, rows)
    # Scores of thousands are float32 to 2^-13 at best, and weights follow them.
    assert (np.abs(out - wanted_out)[0] <= 2 * ROUNDING * magnitude[0] + 1e-6).all()
    assert (np.abs(out - wanted_out)[1] <= 3 * ROUNDING * magnitude[1] + 1e-6).all()
    assert np.abs(lse[0] - np.log(128)).max() < LSE_TOLERANCE
    assert np.abs(lse[1] / wanted_lse[1] - 1).max() < 1e-5


def test_fp8_error_is_that_of_the_format():
    """Against attention over the latents before they were quantised: no more than float64 with the quantised ones."""
    rng, rows = np.random.default_rng(4), random_rows([100], 128)
    exact = rng.standard_normal((LAYERS, SLOTS, LATENT))
    values, scale = quantize_latent(jnp.asarray(exact, jnp.float32))
    pools = [np.array(values).view(np.uint8), np.array(scale), rng.standard_normal((LAYERS, SLOTS, ROPE)).astype(BF16)]
    queries = random_queries(1, 8)
    truth, *_ = attend_numpy(queries, exact[LAYER], pools[2][LAYER], rows)
    of_format = np.abs(expected(queries, pools, rows)[0] - truth)
    error = np.abs(run(queries, pools, rows)[0] - truth)
    assert of_format.mean() > 1e-3
    assert error.mean() < 1.02 * of_format.mean() and error.max() < 1.1 * of_format.max()


# The machine code at GLM-5.3's shapes.

FIRST = "decode T=8 H=64 K=2048 fp8"


def lengths(case):
    (T, H, _), quantized = case.arguments[0].shape, case.shape.endswith("fp8")
    return T, H, quantized


def splits(case):
    T, H, quantized = lengths(case)
    return default_config(T, H, 2048, quantized).splits


# The first of those cases that differ in the number of queries alone: the same kernel with another grid.
UNLIKE = {(*lengths(case)[1:], splits(case)): case for case in reversed(cases())}.values()
MARKED = [pytest.param(c, id=c.shape, marks=[] if c.shape == FIRST else pytest.mark.slow) for c in UNLIKE]


def count_blocks(case):
    T, H, _ = lengths(case)
    return T * -(-H // 64) * splits(case)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.shape)
def test_blocks_fill_an_h200_from_eight_queries_on(case):
    queries = case.arguments[0].shape[0]
    least = 128 if "decode" in case.shape else MULTIPROCESSORS  # equal clusters do not come to 132
    assert count_blocks(case) >= (least if queries >= 8 else 16 * queries)


@needs_plugin
@pytest.mark.parametrize("case", MARKED)
def test_machine_code(case):
    code, *others = compile_case(case)
    # Where parts are merged, registers go straight to device memory.
    stores = ["UTMASTG"] if "prefill" in case.shape else []
    check_code(code, "HGMMA", "LDGSTS", "UTMALDG", *stores, blocks=128)
    assert code.blocks == count_blocks(case)
    # Warpgroups that compute take registers over from the one that loads; beyond the block's they would wait for ever.
    assert code.threads // 128 * code.registers >= LOAD_REGISTERS + 2 * COMPUTE_REGISTERS
    assert code.instructions["HGMMA"] == 44  # 36 for the scores, in one warpgroup, 4 for the output in each
    assert "HMMA" not in code.instructions
    assert all(x.blocks is None for x in others)  # XLA's own: the last slot of a query


@needs_plugin
def test_parts_are_not_in_device_memory():
    (case,) = (case for case in cases() if case.shape == FIRST)
    assert splits(case) == 16
    memory = compile_program(case).memory
    assert memory.outputs < 8 * 64 * (2 * LATENT + 4) + 1024
    assert memory.temporaries < 4096  # a part of one query is 66 kB


def test_bytes_are_nearly_the_least():
    least = least_bytes(1, 64, 2048, True)
    assert least == 2048 * 660 + 64 * (2 * 576 + 2 * 512 + 4)
    flops = 2 * 64 * 2048 * (576 + 512)
    assert math.isclose(flops / least, 191, rel_tol=0.01)
    for case in cases():
        T, H, quantized = lengths(case)
        assert case.bytes < 1.02 * least_bytes(T, H, 2048, quantized)


# Around the kernel.


@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "bf16"])
def test_jnp_form_from_the_pool_is_the_models(quantized):
    queries, rows = random_queries(3, 4), random_rows([100, 0, 5], 128)
    latent, scale, rope = (None if x is None else jnp.asarray(x) for x in random_pools(quantized))
    cache = KVCache(latent, scale, rope, None, None)
    models = functools.partial(sparse_mla, scale=SCALE, latent_dim=LATENT)
    wanted = jax.jit(lambda q, r: models(*q, r, lambda slots: read_mla(cache, LAYER, slots)))(queries, rows)
    form = functools.partial(sparse_mla_from_pool, scale=SCALE)
    actual = jax.jit(lambda q, r: form(*q, latent, scale, rope, LAYER, r))(queries, rows)
    for a, b in zip(actual, wanted, strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "bf16"])
def test_jnp_form_takes_as_many_rows_as_the_model_selects(quantized):
    lengths = np.array([0, 1, 63, 64, 65, 2047, 2048])  # of 2048; a query of a context of 2049 has 2048
    rows = np.random.default_rng(6).integers(0, SLOTS, (len(lengths), 2048)).astype(np.int32)
    rows = np.where(np.arange(2048) < lengths[:, None], rows, -1)
    pools, queries = random_pools(quantized), random_queries(len(rows), 8)
    attend = functools.partial(sparse_mla_from_pool, scale=SCALE, implementation="jnp")
    wide = [x.astype(np.float32) for x in queries]
    out, lse = jax.jit(attend, static_argnums=5)(*wide, *pools, LAYER, rows)
    wanted_out, wanted_lse, magnitude = expected(queries, pools, rows)
    assert (np.abs(np.asarray(out) - wanted_out) <= 1e-5 * (1 + magnitude)).all()
    seen = np.isfinite(wanted_lse)
    assert (np.isfinite(lse) == seen).all()
    assert np.abs(np.asarray(lse)[seen] - wanted_lse[seen]).max() < LSE_TOLERANCE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 12}, "12 heads"),
        ({"heads": 96}, "96 heads"),
        ({"k": 100}, "100 rows for a query"),
        ({"k": 2049}, "2049 rows for a query"),
        ({"width": 256}, "rows of 256"),
        ({"dtype": np.float32}, "float32 queries"),
    ],
)
def test_what_the_kernel_is_not_for_is_refused(change, words):
    queries = random_queries(1, change.get("heads", 16))
    queries = [x.astype(change.get("dtype", BF16)) for x in queries]
    latent, scale, rope = random_pools()
    width = change.get("width", LATENT)
    pools = latent[..., :width], scale[..., : width // LATENT_TILE], rope
    rows = random_rows([5], change.get("k", 64))
    with pytest.raises(ConfigError, match=words):
        sparse_mla_from_pool(*queries, *pools, LAYER, rows, scale=SCALE, implementation="hopper")
    with pytest.raises(ConfigError, match=words):
        sparse_mla_hopper(*queries, *pools, LAYER, rows, scale=SCALE)


@pytest.mark.parametrize(
    ("config", "k"), [(Config(0), 64), (Config(2), 64), (Config(1, 1), 64), (Config(1, 4), 64), (Config(17), 2048)]
)
def test_impossible_cuts_are_refused(config, k):
    with pytest.raises(ConfigError, match="splits must be"):
        sparse_mla_hopper(
            *random_queries(1, 16), *random_pools(), LAYER, random_rows([5], k), scale=SCALE, config=config
        )
