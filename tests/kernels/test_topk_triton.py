"""Top-k in Triton's interpreter against its NumPy twin, on unpleasant scores of every kind; its code for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from h200_code import check_code, compile_case, needs_plugin
from interpreted_candidates import Entries, Lists, SideBySide, run_interpreted

from glmjax.errors import ConfigError
from glmjax.kernels import candidates_triton, merge_triton, topk_triton
from glmjax.kernels.candidates_triton import Parts
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.topk import top_k_numpy
from glmjax.kernels.topk_triton import Config, cases, default_config, top_k_triton

K = 64
# A list is shortened several times in 3,000 scores.
SMALL = Config(capacity=512, block=64, stages=2, num_warps=4, early=128, refresh=128)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if request.function not in (test_code_for_an_h200, test_reads_every_score_once_and_writes_few):
        run_interpreted(monkeypatch, topk_triton)
        if request.function not in (test_as_configured_for_the_model, test_a_row_of_a_million):
            monkeypatch.setattr(merge_triton, "MERGE_CAPACITY", 512)


def assert_is_top_k(scores, k, visible=None, config=SMALL):
    found, positions = (np.asarray(x) for x in top_k_triton(jnp.asarray(scores), k, visible, config=config))
    seen = np.ones(scores.shape, bool) if visible is None else np.arange(scores.shape[1]) < np.asarray(visible)[:, None]
    eligible = np.where(seen & ~np.isnan(scores), scores, -np.inf)
    expected = top_k_numpy(eligible, k)
    assert (positions == expected).all()
    there = np.take_along_axis(eligible, np.maximum(expected, 0), axis=1)
    assert (found == np.where(expected >= 0, there, -np.inf)).all()


def kinds(size, seed=0):
    """One row of each kind."""
    rng = np.random.default_rng(seed)
    rows = {
        "normal": rng.standard_normal(size),
        "all equal": np.full(size, 1.5),
        "plateau at zero": np.maximum(rng.standard_normal(size) - 2, 0),
        "zeros of both signs": rng.choice([0.0, -0.0], size),
        "few values": np.round(rng.standard_normal(size)),
        "ascending": np.arange(size),
        "descending": -np.arange(size),
        "negative": -np.exp(rng.standard_normal(size)),
        "denormal": rng.standard_normal(size) * 1e-41,
        "largest": rng.choice([3.4028235e38, -3.4028235e38, np.inf], size),
        "mostly missing": np.where(rng.random(size) < 0.97, -np.inf, rng.standard_normal(size)),
        "all missing": np.full(size, -np.inf),
        "NaN among them": np.where(rng.random(size) < 0.5, np.nan, rng.standard_normal(size)),
        "negative NaN": np.where(rng.random(size) < 0.5, -np.nan, 1.0),
    }
    return np.stack(list(rows.values())).astype(np.float32)


@pytest.mark.parametrize("size", [1, K - 1, K, K + 1, 2 * K, 3000])
def test_equals_the_twin_in_one_part(size, monkeypatch):
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", 1)
    assert_is_top_k(kinds(size), K)


@pytest.mark.parametrize(("size", "parts"), [(64, 1), (127, 2), (129, 3), (700, 11)])
def test_equals_the_twin_in_parts(size, parts, monkeypatch):
    lists = Lists(monkeypatch, topk_triton)
    assert_is_top_k(kinds(size), K)
    assert lists.parts.parts == parts
    lists.publish_all()
    assert_is_top_k(kinds(size), K)


def test_a_part_knows_what_the_others_have(monkeypatch):
    scores = np.random.default_rng(0).standard_normal((1, 4096)).astype(np.float32)
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", 4)
    lists = Lists(monkeypatch, topk_triton)
    assert_is_top_k(scores, K)
    alone = lists.counts.sum()
    lists.publish_all()
    assert_is_top_k(scores, K)
    assert lists.parts.parts == 8 and lists.counts.sum() < alone / 4


def assumed_entries(parts, size, apart=0):
    """Candidates that ``Parts.bytes`` assumes: each is written and read, 8 bytes, and then there is the result."""
    counted = parts.bytes(size, early=SMALL.early, refresh=SMALL.refresh, apart=apart)
    return (counted - 8 * parts.rows * parts.k) / 16


def test_as_many_candidates_enter_one_part_as_its_bytes_assume(monkeypatch):
    scores = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", 1)
    entries, lists = Entries(monkeypatch, topk_triton), Lists(monkeypatch, topk_triton)
    assert_is_top_k(scores, K)
    assert lists.parts.parts == 1 and int(lists.counts.sum()) < entries.count / 2  # lists were shortened
    assert abs(assumed_entries(lists.parts, 4096) / entries.take() - 1) < 0.1


@pytest.mark.parametrize("apart", [256, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1024, 8192))])
def test_as_many_candidates_enter_parts_side_by_side_as_their_bytes_assume(apart, monkeypatch):
    scores = np.random.default_rng(0).standard_normal((1, 8192)).astype(np.float32)
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", 4)
    lists = Lists(monkeypatch, topk_triton)
    entries = SideBySide(monkeypatch, topk_triton, topk_triton.top_k_of_parts, apart=apart, block=SMALL.block)
    assert_is_top_k(scores, K)
    assert lists.parts.parts == 8
    assert abs(assumed_entries(lists.parts, 8192, apart) / entries.take() - 1) < 0.1


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_every_row_has_its_own_length(multiprocessors, monkeypatch):
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", multiprocessors)
    lengths = [0, 1, 63, 64, 65, 127, 128, 511, 512, 513, 1000]
    scores = np.random.default_rng(1).standard_normal((len(lengths), 1000)).astype(np.float32)
    scores[:, 5] = np.inf
    assert_is_top_k(scores, K, jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize("k", [1, 50, 100])
def test_any_k(k):
    assert_is_top_k(kinds(300), k)


def test_the_same_whichever_way_a_row_is_cut(monkeypatch):
    scores = jnp.asarray(kinds(1000)[[0, 2, 4, 5]])
    found = []
    for multiprocessors in (1, 4, 132):
        monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", multiprocessors)
        found.append(np.asarray(top_k_triton(scores, K, config=SMALL)[1]))
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


@pytest.mark.parametrize("size", [2047, 2048, 2049, 9000])
def test_as_configured_for_the_model(size):
    assert_is_top_k(kinds(size)[[0, 2, 4, 5]], 2048, config=None)


@pytest.mark.slow
def test_a_row_of_a_million():
    scores = np.round(np.random.default_rng(2).standard_normal((1, 1 << 20)) * 1000).astype(np.float32)
    assert_is_top_k(scores, 2048, config=None)


def test_a_row_more_than_2_to_the_31_scores_away(monkeypatch):
    rows, size = 2049, 1 << 20  # 8 GiB, of which only what is written is there
    scores, visible = np.zeros((rows, size), np.float32), np.zeros(rows, np.int32)
    scores[rows - 1, :100] = np.random.default_rng(3).standard_normal(100)
    visible[rows - 1] = 100
    assert (rows - 1) * size >= 1 << 31
    monkeypatch.setattr(topk_triton, "merge_lists", lambda parts, published, *lists: lists)
    lists, counts, *_ = map(np.asarray, top_k_triton(scores, K, jnp.asarray(visible), config=SMALL))
    assert counts[-1] == 100 and not counts[:-1].any()
    positions, bits = lists[-1, 0, :100, 0], lists[-1, 0, :100, 1]
    assert (bits.view(np.float32) == scores[-1, :100]).all() and (positions == np.arange(100)).all()


def test_refuses_what_it_is_not_for():
    with pytest.raises(ConfigError, match="k=2049, the kernel is for 1 to 2048"):
        top_k_triton(jnp.zeros((1, 10)), 2049)
    with pytest.raises(ConfigError, match="bfloat16 scores"):
        top_k_triton(jnp.zeros((1, 10), jnp.bfloat16), 1)
    with pytest.raises(ConfigError, match=r"capacity=1024, .* capacity >= k"):
        top_k_triton(jnp.zeros((1, 10)), 1000, config=Config(capacity=1024))


@needs_plugin
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.shape)
def test_code_for_an_h200(case):
    codes = [code for code in compile_case(case) if code.blocks]
    assert len(codes) == (2 if "prefill" in case.shape else 4)  # rows in parts are gathered before they are merged
    for code in codes:
        check_code(code, "LDGSTS")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.shape)
def test_reads_every_score_once_and_writes_few(case):
    """Scores and results, and candidates: of short rows in many parts nearly all, four times the scores' bytes."""
    rows, size = case.arguments[0].shape
    assert jax.eval_shape(case.function, *case.arguments)[1].shape == (rows, 2048)
    least = rows * (4 * size + 8 * 2048)
    most = {(8, 32768): 4.52, (8, 131072): 4.66, (8, 1 << 20): 1.77, (32, 131072): 2.62, (2048, 131072): 1.56}[
        rows, size
    ]
    assert least < case.bytes < most * least


@pytest.mark.parametrize("size", [2049, 2175, 4096, 8192, 16384, 32768, 50000, 65536, 131072, 1 << 20])
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 200])
def test_short_rows_fill_an_h200_too(rows, size):
    config = default_config(rows, size)
    config.check(2048)
    parts = Parts.cut(rows, size, groups=rows, block=config.block, k=2048, capacity=config.capacity)
    assert parts.parts <= -(-size // config.block)
    assert rows * parts.parts >= min(MULTIPROCESSORS, rows * -(-size // 128))
