"""Merging of candidate lists in Triton's interpreter: whole and in pieces, short, long and tied lists, stale pivots."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from interpreted_candidates import interpreted_call
from test_topk_triton import kinds

from glmjax.kernels import candidates_triton, merge_triton
from glmjax.kernels.candidates_triton import Parts
from glmjax.kernels.merge_triton import merge_lists
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.topk import top_k_numpy

K = 64
FEW = 512  # keys that are held in registers
LOWEST = -(1 << 31)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(merge_triton, "triton_call", interpreted_call)
    monkeypatch.setattr(merge_triton, "MERGE_CAPACITY", FEW)


@pytest.fixture
def sizes(monkeypatch):
    """Lengths of the rows' lists of every merge in parts."""
    found = []

    def call(*operands, kernel, **options):
        results = interpreted_call(*operands, kernel=kernel, **options)
        if kernel is merge_triton.gather_candidates:
            found.append(np.asarray(results[1]))
        return results

    monkeypatch.setattr(merge_triton, "triton_call", call)
    return found


def ordered(scores):
    bits = (scores + np.float32(0)).view(np.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def lists_of(scores, parts, k, capacity):
    """How rows are cut, and what the kernels leave that fill lists, if they drop nothing: published, lists, counts."""
    rows, size = scores.shape
    published = np.zeros((rows, parts), np.int32)
    lists = np.full((rows, parts, capacity, 2), 0x5A5A5A5A, np.int32)
    counts = np.zeros((rows, parts), np.int32)
    part_size = -(-size // parts)
    for row in range(rows):
        for part in range(parts):
            positions = np.arange(part * part_size, min((part + 1) * part_size, size))
            positions = positions[scores[row, positions] > -np.inf]
            found = np.ascontiguousarray(scores[row, positions])
            n = counts[row, part] = len(found)
            lists[row, part, :n, 0], lists[row, part, :n, 1] = positions, found.view(np.int32)
            share = max(1, -(-k * part_size // size))
            if n >= share:
                published[row, part] = np.sort(ordered(found))[-share] ^ LOWEST
    return Parts(rows, parts, 1, k, capacity), *map(jnp.asarray, (published, lists, counts))


def assert_merges(monkeypatch, scores, parts, pieces, k=K, capacity=512, stale=False):
    cut, published, lists, counts = lists_of(scores, parts, k, capacity)
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", -(-pieces * len(scores) // 2))
    assert cut.pieces == pieces
    found, positions = map(np.asarray, merge_lists(cut, published * (not stale), lists, counts))
    eligible = np.where(np.isnan(scores), -np.inf, scores)
    expected = top_k_numpy(eligible, k)
    assert (positions == expected).all()
    there = np.take_along_axis(eligible, np.maximum(expected, 0), axis=1)
    assert (found == np.where(expected >= 0, there, -np.inf)).all()


@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("parts", [1, 3])
def test_scores_of_every_kind(parts, pieces, monkeypatch):
    assert_merges(monkeypatch, kinds(500), parts, pieces)


@pytest.mark.parametrize("parts", [1, 2])
def test_pieces_beyond_the_candidates_have_nothing_to_do(parts, monkeypatch):
    for size in (1, 63, 64, 65):
        assert_merges(monkeypatch, kinds(size)[[0, 1, 5, 10, 11]], parts, pieces=7)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("size", [2047, 2048, 2049])
def test_as_many_as_the_model_selects(size, pieces, monkeypatch):
    monkeypatch.setattr(merge_triton, "MERGE_CAPACITY", 4096)
    assert_merges(monkeypatch, kinds(size)[[0, 4, 5]], 2, pieces, k=2048, capacity=4096)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_list_longer_than_registers_hold(pieces, monkeypatch, sizes):
    """Ties by the hundred at the threshold; and where nothing was published, all that the parts have kept."""
    scores = kinds(4000)
    assert_merges(monkeypatch, scores[[1, 2, 4]], 10, pieces)
    assert_merges(monkeypatch, scores[[0, 5]], 10, pieces, stale=True)
    tied, stale = sizes
    assert tied[0] == 10 * K > FEW and (stale == 10 * K).all()


@pytest.mark.parametrize("slope", [0, 1, 4, 1000, -1000])
def test_parts_that_differ_leave_a_short_list(slope, monkeypatch, sizes):
    """By the worst of what the parts published alone, the steeper rows would keep up to all of 2,048."""
    rng = np.random.default_rng(1)
    scores = (rng.standard_normal((2, 8000)) + slope * np.arange(8000) / 8000).astype(np.float32)
    assert_merges(monkeypatch, scores, 32, 1)
    assert (sizes[0] >= K).all() and (sizes[0] < 2 * K).all()


@pytest.mark.parametrize("most", [8, 64])
def test_one_pivot_is_below_every_score(most, monkeypatch):
    monkeypatch.setattr(merge_triton, "MOST_PIVOTS", most)
    for parts in range(2, 2 * MULTIPROCESSORS + 1):
        pivots, stride = merge_triton.sample(parts)
        assert pivots <= most and (pivots - 1) * stride >= parts


@pytest.mark.parametrize("parts", [21, 22])
def test_more_parts_than_pivots(parts, monkeypatch, sizes):
    monkeypatch.setattr(merge_triton, "MOST_PIVOTS", 8)
    scores = kinds(2000)[[0, 1, 4, 5, 11]]
    assert_merges(monkeypatch, scores, parts, 2)
    assert (sizes[0][[0, 3]] < 4 * K).all()


def test_parts_between_the_pivots_may_hold_the_best(monkeypatch):
    """Fewer than k reach what the others published, each by itself the best."""
    monkeypatch.setattr(merge_triton, "MOST_PIVOTS", 8)
    parts, part_size = 22, 10
    _, stride = merge_triton.sample(parts)
    scores = np.random.default_rng(3).standard_normal((2, parts * part_size)).astype(np.float32)
    of_pivot = np.arange(parts * part_size) // part_size % stride == 0
    assert_merges(monkeypatch, np.where(of_pivot, scores + 100, scores), parts, 2, k=128)
    assert_merges(monkeypatch, np.where(of_pivot, scores, scores + 100), parts, 2, k=128)


@pytest.mark.parametrize("rows", [1, 8, 32, 100, 131, 132, 133, 512, 4096])
def test_pieces_fill_the_machine_and_no_more(rows):
    pieces = Parts(rows, 1, 64, 2048, 4096).pieces
    assert rows * pieces >= MULTIPROCESSORS
    assert pieces == 1 or rows * pieces <= 2 * MULTIPROCESSORS
