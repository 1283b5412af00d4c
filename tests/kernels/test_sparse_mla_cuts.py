"""How sparse MLA's Hopper kernel cuts its work into blocks and clusters, and what other cuts would come to."""

from pathlib import Path

import pytest

from glmjax.kernels import clusters as hardware
from glmjax.kernels.clusters import clusters_at_once
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.sparse_mla_hopper import count_cut, default_config, least_bytes


@pytest.mark.parametrize("queries", [1, 2, 3, 7, 8, 16, 20, 32, 48, 64, 100, 131, 132, 133, 1000])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_few_queries_are_cut_until_the_gpu_is_full(queries, heads):
    config = default_config(queries, heads, 2048, True)
    config.check(2048, True)
    clusters = queries * max(1, heads // 64)
    assert config.splits == 1 or clusters <= clusters_at_once(config.splits)
    assert config.splits == 16 or clusters * config.splits * 2 > MULTIPROCESSORS
    tiles = -(-32 // config.splits) * -(-clusters // MULTIPROCESSORS)
    assert tiles <= 2 * 32 * clusters / MULTIPROCESSORS + 2


def test_powers_of_two_take_128_multiprocessors():
    for heads, most in ((16, 16), (64, 16), (128, 8)):
        for queries in (8, 16, 32, 64):
            splits = default_config(queries, heads, 2048, True).splits
            assert splits == most * 8 // queries and splits * queries * max(1, heads // 64) == 128


@pytest.mark.parametrize(("queries", "heads"), [(8, 16), (8, 64), (16, 64)])
def test_more_blocks_than_multiprocessors_take_turns_and_have_no_fewer_tiles_in_a_row(queries, heads):
    """8 queries: 16 blocks for each are 128. Whole blocks for each beyond that are 136 or more, and some wait.

    16 queries of 64 heads are cut as 8 of 128.
    """
    chosen = count_cut(queries, heads, queries, default_config(queries, heads, 2048, True).splits)
    assert (chosen.blocks, chosen.busy, chosen.turns, chosen.tiles) == (128, 128, 1, queries // 4)
    assert chosen.bytes < 1.006 * least_bytes(queries, heads, 2048, True)
    cuts = [count_cut(queries, heads, queries * n, blocks) for n in range(1, 33) for blocks in range(1, 17)]
    assert any(cut.blocks >= MULTIPROCESSORS for cut in cuts)
    for cut in cuts:
        assert cut.tiles >= chosen.tiles and (cut.blocks < MULTIPROCESSORS or cut.turns >= 2)


@pytest.mark.parametrize("heads", [16, 64])
def test_to_keep_all_multiprocessors_busy_costs_bytes_and_saves_no_tile(heads):
    cuts = [count_cut(8, heads, MULTIPROCESSORS // blocks, blocks) for blocks in range(1, 17) if 132 % blocks == 0]
    whole = [cut for cut in cuts if cut.busy == MULTIPROCESSORS and cut.turns == 1]
    assert len(whole) == 2  # clusters of one block and of two
    for cut in whole:
        assert cut.tiles == 2 and cut.bytes > 1.15 * least_bytes(8, heads, 2048, True)
    of_32 = count_cut(32, heads, 66, 2)  # few bytes more here, and as many tiles
    chosen = count_cut(32, heads, 32, default_config(32, heads, 2048, True).splits)
    assert of_32.busy == MULTIPROCESSORS and of_32.tiles == chosen.tiles == 8
    for rows in (8, 16, 32, 64):  # of a smaller tile
        assert rows * -(-8 * 2048 // rows // MULTIPROCESSORS) == 2 * 64


def test_the_cuts_are_counted_as_documented():
    least = [least_bytes(8, heads, 2048, True) for heads in (16, 64)]
    text = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    for clusters, blocks in ((8, 16), (16, 16), (16, 9), (66, 2), (132, 1)):
        small, large = (count_cut(8, heads, clusters, blocks) for heads in (16, 64))
        ratios = [f"{cut.bytes / bytes_:.2f}" for cut, bytes_ in zip((small, large), least, strict=True)]
        numbers = [clusters, blocks, large.blocks, large.busy, large.turns, large.tiles, *ratios]
        assert f"| {' | '.join(map(str, numbers))} |" in text


def test_with_a_group_below_16_clusters_of_11_have_least_in_a_row(monkeypatch):
    monkeypatch.setattr(hardware, "GROUPS", (18, 18, 18, 16, 16, 16, 16, 14))
    assert [clusters_at_once(n) for n in (16, 8)] == [7, 15]  # as reported of two H100
    assert [count_cut(8, 64, 8, blocks).tiles for blocks in (16, 11, 8)] == [4, 3, 4]
    assert default_config(8, 64, 2048, True).splits == 11
