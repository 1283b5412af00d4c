"""Several schedulers seen as one: requests are spread, stay where they are, and nothing is shared or lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.errors import RequestError
from glmjax.serving.clock import ManualClock
from glmjax.serving.data_parallel import DataParallelScheduler, find_rank
from glmjax.serving.engine import Engine
from glmjax.serving.fake import FakeRunner
from glmjax.serving.plan import Chunk
from glmjax.serving.runner import rectangles
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.types import SamplingParams

VOCAB = 97


def limits(**changes):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48, "block_size": 4, "num_blocks": 14}
    return SchedulerConfig(**(sizes | changes))


def make(ranks, **changes):
    config = limits(**changes)
    scheduler = DataParallelScheduler(config, ranks) if ranks > 1 else Scheduler(config)
    runner = FakeRunner(config.block_size, VOCAB)
    return Engine(scheduler, runner, None, ManualClock(), vocab_size=VOCAB)


def finish(engine):
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


def greedy(max_tokens=6, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def prompt(length, seed=0):
    return [(7 * seed + 3 * i) % VOCAB for i in range(length)]


@given(
    ranks=st.integers(2, 4),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    aborted=st.sets(st.integers(0, 11), max_size=3),
    steps=st.integers(0, 8),
)
def test_any_mix_gives_what_one_scheduler_gives_and_leaves_nothing(ranks, lengths, aborted, steps):
    engine, single = make(ranks), make(1)
    handles = [engine.submit(prompt(n, i), greedy(), f"r{i}") for i, n in enumerate(lengths)]
    for _ in range(steps):
        engine.step()
        engine.scheduler.check()
    for i in aborted & set(range(len(lengths))):
        engine.abort(f"r{i}")
    finish(engine)
    for i, (n, handle) in enumerate(zip(lengths, handles, strict=True)):
        other = single.submit(prompt(n, i), greedy())
        finish(single)
        mine, whole = (h.result(timeout=0).outputs[0].token_ids for h in (handle, other))
        assert mine == whole[: len(mine)] and (len(mine) == len(whole) or i in aborted)
    stats = engine.stats()
    assert stats["free_blocks"] == stats["total_blocks"] == ranks * engine.scheduler.config.num_blocks
    assert stats["num_running"] == stats["num_waiting"] == 0 and not engine.scheduler._rank_of


def test_a_next_turn_goes_to_the_rank_that_knows_the_conversation():
    engine = make(3, max_num_seqs=4)
    ranks = engine.scheduler.ranks
    turns = [engine.submit(prompt(20, i), greedy()) for i in range(3)]
    finish(engine)
    for i in (2, 0, 1):
        text = [*prompt(20, i), *turns[i].result(timeout=0).outputs[0].token_ids, 5]
        rank, known = find_rank(ranks, text)
        handle = engine.submit(text, greedy())
        engine.step()
        assert len(ranks[rank].running) == 1
        finish(engine)
        assert handle.result(timeout=0).num_cached_tokens == known >= 20


def test_a_request_may_be_for_a_rank():
    engine = make(3)
    handle = engine.submit(prompt(20), greedy(), data_parallel_rank=2)
    engine.step()
    assert [len(s.running) for s in engine.scheduler.ranks] == [0, 0, 1]
    finish(engine)
    assert handle.finished
    with pytest.raises(RequestError, match=r"data_parallel_rank must be in \[0, 3\), got 3"):
        engine.submit(prompt(20), greedy(), data_parallel_rank=3)


def test_a_rank_with_much_more_to_do_is_passed_over():
    engine = make(2)
    engine.submit(prompt(20), greedy())
    finish(engine)
    for _ in range(4):
        engine.submit([*prompt(20), 5], greedy(16))
    engine.step()
    assert [len(s.running) + len(s.waiting) for s in engine.scheduler.ranks] == [2, 2]


def test_requests_are_spread_over_the_ranks():
    engine = make(3)
    for i in range(6):
        engine.submit(prompt(20, i), greedy())
    engine.step()
    assert [len(s.running) + len(s.waiting) for s in engine.scheduler.ranks] == [2, 2, 2]
    plan = engine.scheduler.schedule()
    tokens = [sum(len(c.token_ids) for c in plan.chunks if c.rank == rank) for rank in range(3)]
    assert tokens == [16, 16, 16]  # the budget, for each
    finish(engine)


def test_a_rank_that_is_free_is_chosen():
    engine = make(2)
    engine.submit(prompt(30), greedy(max_tokens=10))
    engine.step()
    engine.submit(prompt(5), greedy(max_tokens=1))
    engine.step()
    engine.step()  # its result is in
    assert [s.load for s in engine.scheduler.ranks] == [1, 0]
    engine.submit(prompt(5, 1), greedy(max_tokens=9))
    engine.step()
    assert [s.load for s in engine.scheduler.ranks] == [1, 1]
    finish(engine)


def test_limits_hold_for_each_rank():
    engine = make(2)
    with pytest.raises(RequestError, match="the context is 48 tokens"):
        engine.submit(prompt(40), greedy(max_tokens=20))
    for i in range(9):
        engine.submit(prompt(30, i), greedy())
    engine.step()
    assert engine.stats()["num_running"] <= 4
    finish(engine)


def test_prefixes_are_cached_by_rank():
    engine = make(2)
    for _ in range(3):
        (handle,) = [engine.submit(prompt(17), greedy())]
        finish(engine)
    assert handle.result(timeout=0).num_cached_tokens == 16
    engine.reset_prefix_cache()
    engine.step()
    handle = engine.submit(prompt(17), greedy())
    finish(engine)
    assert handle.result(timeout=0).num_cached_tokens == 0


def chunk(name, tokens, rank=0):
    return Chunk(name, tuple(range(tokens)), 0, (), samples=True, sampling=greedy(), rank=rank)


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=8), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_rectangles_hold_every_chunk_once_in_shapes_that_exist(sizes, rows):
    own = [[chunk(f"{r}-{i}", n, r) for i, n in enumerate(ns)] for r, ns in enumerate(sizes)]
    seen = []
    for batches in rectangles(own, rows):
        assert len(batches) == len(own) and any(batches)
        widths = {len(c.token_ids) for batch in batches for c in batch}
        assert widths == {1} or 1 not in widths
        assert max(map(len, batches)) <= (rows if widths == {1} else 1)
        for rank, batch in enumerate(batches):
            assert all(c.rank == rank for c in batch)
            seen += [c.request_id for c in batch]
    assert sorted(seen) == sorted(c.request_id for cs in own for c in cs)
