"""Offload on the scheduler's side, with a runner that refuses to read rows where a device could not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import SPECS, VOCAB, alone, check_any_schedule, make, request, sized

from glmjax.errors import ConfigError, RequestError
from glmjax.serving.clock import Clock
from glmjax.serving.engine import Engine
from glmjax.serving.fake_offload import FakeOffloadRunner
from glmjax.serving.handle import EngineError
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.types import SamplingParams

CONFIGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(2, 5),
        "max_num_batched_tokens": st.integers(1, 10),
        "block_size": st.integers(1, 3),
        "num_blocks": st.integers(30, 60),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_prefill_chunk": st.none() | st.integers(1, 5),
        "num_speculative_tokens": st.sampled_from([0, 0, 1, 3]),
        "max_model_len": st.integers(30, 60),
        "region_pages": st.integers(0, 3),
        "num_pages": st.integers(0, 8),
    }
).map(sized)
LONG = SPECS.flatmap(lambda spec: st.integers(0, 16).map(lambda blocks: spec | {"blocks": blocks}))


@settings(max_examples=400, deadline=None)
@given(CONFIGS, st.lists(LONG, min_size=1, max_size=9), st.integers(0, 2))
def test_any_schedule_gives_what_each_request_gives_alone(config, specs, ahead):
    check_any_schedule(config, specs, ahead)


SIZES = {"block_size": 4, "num_blocks": 64, "max_model_len": 200, "max_num_seqs": 16, "max_num_batched_tokens": 16}
TIERS = {**SIZES, "region_pages": 2, "num_pages": 12}


def run(scheduler, runner, steps=600):
    """Steps until nothing is left; most requests that ran at once, and what each got."""
    most, got = 0, {}
    for _ in range(steps):
        plan = scheduler.schedule()
        scheduler.check()
        most = max(most, len(scheduler.running))
        for update in scheduler.commit(plan, runner.finish(runner.start(plan))):
            got.setdefault(update.request.request_id, []).extend(update.token_ids)
        if not scheduler.has_work:
            return most, got
    raise AssertionError("it does not end")


def test_a_request_stays_on_the_device_while_there_is_room():
    scheduler, runner = make(**{**TIERS, "num_pages": 64})
    scheduler.add(request("a", range(100), 20))
    run(scheduler, runner)
    assert runner.host_reads == 0
    assert scheduler.gauges()["hisparse_pages_unpinned"] == 29  # full blocks of 119 tokens, to be found again


def test_full_blocks_are_copied_before_pages_are_scarce():
    scheduler, runner = make(**{**TIERS, "num_pages": 64})
    scheduler.add(request("a", range(17), 8))
    moves = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        moves += plan.write_backs
        scheduler.commit(plan, runner.finish(runner.start(plan)))
    assert [m.block for m in moves] == sorted({m.block for m in moves}) and len(moves) == 24 // 4


def test_the_last_pages_of_a_request_are_never_given_away():
    scheduler, runner = make(**TIERS)
    one = request("a", range(120), 30)
    scheduler.add(one)
    while scheduler.has_work:
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            written = range(chunk.start // 4, -(-(chunk.end or chunk.start + 1) // 4))
            assert all(plan.page_of[0][one.blocks[i]] >= 0 for i in written)
        scheduler.commit(plan, runner.finish(runner.start(plan)))
    assert runner.host_reads > 0


def test_only_what_the_host_has_is_found_by_another_request():
    scheduler, runner = make(**TIERS)
    scheduler.add(request("a", range(40), 1))
    while scheduler.has_work:
        plan = scheduler.schedule()
        known = scheduler.pool.cached_blocks
        durable = sum(scheduler.offload.residency.is_durable(b) for b in range(64))
        assert known <= durable
        scheduler.commit(plan, runner.finish(runner.start(plan)))
    assert scheduler.pool.cached_blocks == 10


def test_host_memory_bounds_what_runs_at_once():
    """Long requests on a device pool that holds one of them: eight run, which is what the host holds."""
    device, blocks, fit = 44, 40, 8
    prompts = {f"r{i}": [(7 * i + j) % VOCAB for j in range(4 * blocks - 8)] for i in range(14)}
    sizes = {**SIZES, "max_num_seqs": 64, "max_num_batched_tokens": 64, "max_prefill_chunk": 8}
    plain, plain_runner = make(**{**sizes, "num_blocks": device})
    host_blocks = fit * blocks + fit  # admission leaves one spare block for each that runs
    tiered, tiered_runner = make(**{**sizes, "num_blocks": host_blocks, "num_pages": device, "region_pages": 1})
    most = {}
    for name, scheduler, runner in (("plain", plain, plain_runner), ("tiered", tiered, tiered_runner)):
        for request_id, ids in prompts.items():
            scheduler.add(request(request_id, ids, 8))
        most[name], got = run(scheduler, runner, 4000)
        assert all(got[i] == alone(request(i, ids, 8)) for i, ids in prompts.items())
    assert most == {"plain": 1, "tiered": fit}


def test_a_request_larger_than_the_device_but_not_the_host_is_served():
    scheduler, runner = make(**TIERS)
    one = request("a", range(190), 10)
    scheduler.add(one)
    assert len(one.prompt_ids) > 3 * TIERS["num_pages"] * TIERS["block_size"]
    assert run(scheduler, runner)[1]["a"] == alone(one)


def test_a_request_larger_than_the_host_is_refused():
    scheduler, _ = make(**{**TIERS, "num_blocks": 20})
    with pytest.raises(RequestError, match=r"needs 25 KV blocks of 4 tokens, and the pool has 20.*hisparse_host_gib"):
        scheduler.add(request("a", range(90), 11))


def test_plain_offload_refuses_what_the_device_cannot_hold():
    scheduler, _ = make(**{**TIERS, "region_pages": 0})
    with pytest.raises(RequestError, match=r"needs 25 KV blocks of 4 tokens, and the pool has 12.*num_device_blocks"):
        scheduler.add(request("a", range(90), 11))


def test_too_few_pages_for_one_request_are_refused_at_once():
    with pytest.raises(ConfigError, match=r"8 pages of 4 tokens on the device are too few.*to 9 blocks"):
        SchedulerConfig(**{**TIERS, "num_pages": 8})


def test_resetting_the_prefix_cache_leaves_running_requests_alone():
    scheduler, runner = make(**TIERS)
    one, two = request("a", range(80), 30), request("b", range(80), 4)
    scheduler.add(one)
    for _ in range(12):
        plan = scheduler.schedule()
        scheduler.commit(plan, runner.finish(runner.start(plan)))
    scheduler.reset_prefix_cache()
    scheduler.check()
    scheduler.add(two)
    got = run(scheduler, runner)[1]
    assert one.output_ids == alone(one) and got["b"] == alone(two)


# Copies that fail.


def engine_with(fails, **changes):
    config = SchedulerConfig(**{**TIERS, **changes})
    from glmjax.serving.scheduler import Scheduler

    runner = FakeOffloadRunner(config.block_size, VOCAB, fails=fails)
    return Engine(Scheduler(config), runner, None, Clock(), vocab_size=VOCAB)


def finish(engine):
    for _ in range(1000):
        if not engine.has_work:
            return
        engine.step()
        engine.scheduler.check()
    raise AssertionError("it does not end")


def returned(engine):
    scheduler = engine.scheduler
    pages = scheduler.offload.residency
    return (scheduler.pool.free_blocks, pages.free_pages) == (scheduler.config.num_blocks, pages.num_pages)


@pytest.mark.parametrize("at", [0, 3, 11])
def test_a_copy_that_fails_ends_its_request_alone(at):
    victim, other = [1] * 70, [2] * 60
    copies = []

    def fails(move):
        copies.append(move.block)
        return move.block == doomed.requests[0].blocks[at] if doomed.requests[0].blocks else False

    engine = engine_with(fails, num_pages=20)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    doomed, fine = engine.submit(victim, greedy), engine.submit(other, greedy)
    finish(engine)
    with pytest.raises(EngineError, match="a copy of its KV rows to the host failed"):
        doomed.result(timeout=0)
    expected = alone(request("fine", other, 8))
    assert list(fine.result(timeout=0).outputs[0].token_ids) == expected
    assert copies and returned(engine) and engine.healthy


def test_blocks_of_an_ended_request_whose_copy_fails_are_given_up():
    engine = engine_with(lambda move: handle.finished)
    handle = engine.submit([3] * 41, SamplingParams(temperature=0, max_tokens=1))
    finish(engine)
    assert returned(engine) and handle.result(timeout=0).outputs[0].finish_reason == "length"


def test_a_load_that_fails_ends_its_request_alone():
    broken = []
    engine = engine_with(lambda move: bool(broken) and move.block in broken, region_pages=0)
    greedy = SamplingParams(temperature=0, max_tokens=2)
    first = list(range(20)) * 2
    for each in (first, [5] * 44):  # the second takes the pages of the first
        engine.submit(each, greedy)
        finish(engine)
    broken += [b for b in range(64) if engine.scheduler.offload.residency.is_durable(b)]
    broken[:] = [b for b in broken if not engine.scheduler.offload.residency.is_resident(b)]
    assert broken
    doomed, fine = engine.submit(first, greedy), engine.submit([6] * 9, greedy)
    finish(engine)
    with pytest.raises(EngineError, match="a copy of its KV rows from the host failed"):
        doomed.result(timeout=0)
    assert list(fine.result(timeout=0).outputs[0].token_ids) == alone(request("fine", [6] * 9, 2))
    assert returned(engine)
