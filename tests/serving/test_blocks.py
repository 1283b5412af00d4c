"""The block pool against its own law, and the order in which cached content is given up."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmjax.serving.blocks import BlockPool, extend_digests


def chain(tokens, block_size=2, salt=None):
    digests = []
    extend_digests(digests, tokens, block_size, salt)
    return digests


def cached(pool, tokens, salt=None):
    """Lease, publish and release the blocks of ``tokens``."""
    digests = chain(tokens, pool.block_size, salt)
    blocks = pool.allocate(len(digests))
    pool.publish(blocks, digests)
    pool.release(blocks)
    return blocks


def test_digests_name_the_whole_prefix():
    assert chain([1, 2, 3, 4])[1] != chain([9, 2, 3, 4])[1]
    assert chain([1, 2, 3, 4, 5])[:2] == chain([1, 2, 3, 4])
    assert chain([1, 2], salt="a") != chain([1, 2], salt="b") != chain([1, 2])
    assert chain([1, 2], salt="") == chain([1, 2])
    grown = chain([1, 2])
    extend_digests(grown, [1, 2, 3, 4], 2)
    assert grown == chain([1, 2, 3, 4])


def test_match_finds_the_longest_cached_prefix():
    pool = BlockPool(8, 2)
    blocks = cached(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match(chain([1, 2, 3, 4, 9, 9])) == blocks[:2]
    assert pool.match(chain([9, 2, 3, 4])) == []
    assert pool.match(chain([1, 2], salt="s")) == []
    assert pool.free_blocks == 8
    pool.check([])


def test_shared_blocks_live_until_the_last_holder_leaves():
    pool = BlockPool(3, 2)
    blocks = cached(pool, [1, 2, 3, 4])
    pool.share(blocks)
    pool.share(blocks[:1])
    pool.check([blocks, blocks[:1]])
    assert (pool.free_blocks, pool.num_idle(blocks)) == (1, 0)
    pool.release(blocks)
    assert (pool.free_blocks, pool.num_idle(blocks)) == (2, 1)
    pool.release(blocks[:1])
    pool.check([])


def test_worthless_blocks_go_first_then_a_chain_from_its_tail():
    pool = BlockPool(4, 2)
    old = cached(pool, [1, 2, 3, 4])
    new = cached(pool, [5, 6])
    order = [pool.allocate(1)[0] for _ in range(4)]
    assert order[0] not in (*old, *new)
    assert order[1:] == [old[1], old[0], new[0]]
    assert pool.cached_blocks == 0


def test_sharing_makes_content_recently_used():
    pool = BlockPool(2, 2)
    first, second = cached(pool, [1, 2]), cached(pool, [3, 4])
    pool.share(first)
    pool.release(first)
    assert pool.allocate(1) == second


def test_same_content_is_cached_once():
    pool = BlockPool(4, 2)
    blocks, again = pool.allocate(1), pool.allocate(1)
    pool.publish(blocks, chain([1, 2]))
    pool.publish(again, chain([1, 2]))
    assert pool.match(chain([1, 2])) == blocks
    pool.check([blocks, again])


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    cached(pool, [1, 2, 3, 4])
    assert pool.match(chain([1, 2, 3, 4])) == []


def test_reset_forgets_content_and_keeps_leases():
    pool = BlockPool(4, 2)
    cached(pool, [1, 2])
    held = pool.allocate(1)
    pool.publish(held, chain([7, 8]))
    pool.reset()
    assert pool.match(chain([1, 2])) == pool.match(chain([7, 8])) == []
    pool.check([held])


def test_misuse_raises():
    pool = BlockPool(2, 2)
    with pytest.raises(RuntimeError, match="3 blocks with 2 free"):
        pool.allocate(3)
    with pytest.raises(RuntimeError, match="without a holder"):
        pool.release([0])
    held = pool.allocate(1)
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check([])
    pool.check([held])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_law_holds_under_any_use(data):
    pool = BlockPool(data.draw(st.integers(1, 9)), 1)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["lease", "lease", "release", "reset"])):
            case "lease":
                digests = chain(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5)), 1)
                hit = pool.match(digests)
                need = len(digests) - len(hit)
                if need <= pool.free_blocks - pool.num_idle(hit):
                    pool.share(hit)
                    blocks = [*hit, *pool.allocate(need)]
                    pool.publish(blocks, digests)
                    held.append(blocks)
                    assert pool.match(digests)[: len(hit)] == hit
            case "release" if held:
                pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            case "reset":
                pool.reset()
        pool.check(held)
        assert pool.free_blocks == pool.num_blocks - len(set(itertools.chain(*held)))
