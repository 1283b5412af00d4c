"""Requests handed over to an engine whose KV rows are in two tiers, without a model: runners read the KV back."""

import collections

import pytest
from handoff_engines import StillClock, check_any_schedule, greedy, lives, make_engine, prefilled, returned, run
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import VOCAB, alone, request

from glmjax.serving.handle import EngineError
from glmjax.serving.scheduler_config import SchedulerConfig

ROW = 24 + 4  # bytes of a token

LENGTH, OUTPUT = 36, 24  # tokens at most

PREFILL = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 5),
        "num_blocks": st.just(60),
        "stage_blocks": st.integers(42, 60),
        "max_num_batched_tokens": st.integers(4, 12),
        "num_speculative_tokens": st.sampled_from([0, 3]),
    }
)


def sized(config):
    """Pools of which the numbers drawn are what they have beyond the least."""
    config = dict(config)
    blocks = -(-(LENGTH + OUTPUT) // config["block_size"]) + 1
    config["num_blocks"] += blocks
    config["stage_blocks"] += blocks
    names = {"max_num_batched_tokens", "num_speculative_tokens", "block_size", "region_pages", "num_blocks"}
    least = SchedulerConfig(max_num_seqs=1, max_model_len=64, **{n: config[n] for n in names}).least_pages
    config["num_pages"] += least
    if (broken := config.pop("broken")) is not None:
        seen = collections.Counter()

        def fails(move):
            seen["copies"] += 1
            return seen["copies"] % 40 == broken

        config["fails"] = fails
    return config


DECODE = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 5),
        "num_blocks": st.integers(0, 16),
        "stage_blocks": st.integers(0, 20),
        "num_pages": st.integers(0, 8),
        "region_pages": st.integers(1, 3),
        "max_num_seqs": st.integers(1, 6),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "max_num_batched_tokens": st.integers(4, 12),
        "max_prefill_chunk": st.none() | st.integers(1, 5),
        "num_speculative_tokens": st.sampled_from([0, 3]),
        "inline": st.booleans(),
        "on_failure": st.sampled_from(["recompute", "fail"]),
        "broken": st.none() | st.integers(0, 39),
    }
).map(sized)


@settings(max_examples=100, deadline=None)
@given(PREFILL, DECODE, lives(LENGTH, OUTPUT, most=8), st.sampled_from([None, None, 3, 9]))
def test_any_schedule_gives_what_each_request_gives_alone(one, other, of, dies):
    check_any_schedule(one, other, of, dies)


# One thing at a time. A block has 4 tokens, a hot region 2 pages.

TIERS = {"num_pages": 12, "region_pages": 2, "num_blocks": 64, "stage_blocks": 64, "max_model_len": 100}


def pair(prefill=None, **decode):
    hub, clock = {}, StillClock()
    first = make_engine(hub, clock, **{"num_blocks": 200, "stage_blocks": 200, **(prefill or {})})
    return first, make_engine(hub, clock, **{**TIERS, **decode})


def ids(length, seed=0):
    return [(seed + 3 * i + i * i) % VOCAB for i in range(length)]


def output(handle):
    return handle.result(timeout=0).outputs[0].token_ids


def expected(prompt, max_tokens):
    return alone(request("r", prompt, max_tokens))


def plans_of(engine):
    """The plans that it makes from now on."""
    plans, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    return plans


def crowd(engine):
    """Two requests that decode, and leave pages for no other if there are eleven."""
    busy = [engine.submit(ids(50, seed), greedy(24)) for seed in (1, 2)]
    run(engine, until=lambda: all(handle.output.outputs[0].token_ids for handle in busy))
    assert not any(handle.finished for handle in busy)
    return busy


def fetched(engine):
    return engine.scheduler.handoff.connector.stats()["bytes_fetched"]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 29, 41, 42, 43, 44, 45])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_only_the_last_token_of_a_prompt_is_computed_here(length, num_drafts):
    prefill, decode = pair(num_speculative_tokens=num_drafts, num_pages=20)
    prompt = ids(length)
    offer, plans = prefilled(prefill, prompt), plans_of(decode)
    handle = decode.submit(prompt, greedy(9), offer=offer)
    run(decode)
    first = next(chunk for plan in plans for chunk in plan.chunks)
    assert (first.start, first.token_ids) == (length - 1, tuple(prompt[-1:]))
    assert output(handle) == expected(prompt, 9)
    assert fetched(decode) == (length - 1) * ROW
    returned(prefill, decode)


@pytest.mark.parametrize(("length", "loaded"), [(41, 0), (42, 1), (44, 1), (45, 0)])
def test_of_what_arrived_only_the_block_that_is_written_to_gets_a_page(length, loaded):
    prefill, decode = pair(num_pages=64)
    prompt = ids(length)
    offer, plans = prefilled(prefill, prompt), plans_of(decode)
    handle = decode.submit(prompt, greedy(1), offer=offer)
    run(decode)
    (plan,) = [plan for plan in plans if plan.chunks]
    blocks = plan.receives[0].blocks
    full = len(blocks) - loaded
    assert [move.block for move in plan.loads] == list(blocks[full:]) and 4 * full <= length - 1 < 4 * full + 4
    assert (plan.page_of[0][list(blocks[:full])] < 0).all() and output(handle) == expected(prompt, 1)


def test_a_prompt_within_a_block_needs_no_region():
    prefill, decode = pair()
    offer, plans = prefilled(prefill, [5, 6, 7]), plans_of(decode)
    decode.submit([5, 6, 7], greedy(5), offer=offer)
    run(decode)
    assert not any(chunk.region for plan in plans for chunk in plan.chunks) and decode.runner.host_reads == 0


def test_a_prefix_that_is_here_is_not_fetched():
    prefill, decode = pair()
    first, second = ids(40), [*ids(30), *ids(20, seed=5)]
    decode.submit(first, greedy(2))
    run(decode)
    handle = decode.submit(second, greedy(6), offer=prefilled(prefill, second))
    run(decode)
    assert output(handle) == expected(second, 6) and handle.output.num_cached_tokens == 28
    assert fetched(decode) == (49 - 28) * ROW
    returned(prefill, decode)


def test_what_arrived_is_found_by_the_next_request_before_the_first_has_pages():
    prefill, decode = pair(num_pages=11)
    busy = crowd(decode)
    prompt = ids(42)
    first = decode.submit(prompt, greedy(4), offer=prefilled(prefill, prompt))
    decode.step()
    decode.step()
    waits = decode.scheduler.requests[first.requests[0].request_id]
    assert waits.num_published == 10 and not any(handle.finished for handle in busy)
    assert decode.scheduler.offload._held[waits.request_id].phase == "ready"
    second = decode.submit(prompt, greedy(4))
    run(decode)
    assert output(first) == output(second) == expected(prompt, 4) and second.output.num_cached_tokens == 40
    returned(prefill, decode)


def test_host_memory_bounds_how_many_that_arrived_run():
    """Requests of 40 blocks, a device with 44 pages: without tiers one runs at a time, and with them all eight."""
    prompts = [ids(150, seed) for seed in range(8)]
    sizes = {"max_model_len": 200, "max_num_seqs": 16, "stage_blocks": 400}
    most = {}
    for name, how in (
        ("plain", {"num_pages": None, "region_pages": 0, "num_blocks": 44}),
        ("tiered", {"num_pages": 44, "region_pages": 1, "num_blocks": 8 * 40 + 8}),
    ):
        prefill, decode = pair(prefill={"max_model_len": 200, "stage_blocks": 400}, **sizes, **how)
        handles = [decode.submit(each, greedy(8), offer=prefilled(prefill, each)) for each in prompts]
        plans = plans_of(decode)
        run(decode)
        most[name] = max(len(plan.chunks) for plan in plans)
        assert [output(handle) for handle in handles] == [expected(each, 8) for each in prompts]
        assert fetched(decode) == 8 * 149 * ROW and decode.stats()["num_preemptions"] == 0
        returned(prefill, decode)
    assert most == {"plain": 1, "tiered": 8}


def test_requests_come_while_there_are_no_pages_for_them():
    prefill, decode = pair(num_pages=10, max_num_seqs=16, num_blocks=80, stage_blocks=80)
    prompts = [ids(42, seed) for seed in range(6)]
    handles = [decode.submit(each, greedy(12), offer=prefilled(prefill, each)) for each in prompts]
    decode.step()
    assert len(decode.scheduler.running) == 6 and decode.scheduler.offload.residency.free_pages == 10
    plans = plans_of(decode)
    run(decode)
    assert max(len(plan.chunks) for plan in plans) == 2  # each takes a region and two pages
    assert [output(handle) for handle in handles] == [expected(each, 12) for each in prompts]
    assert decode.stats()["num_preemptions"] == 0 and fetched(decode) == 6 * 41 * ROW
    returned(prefill, decode)


def test_a_request_that_waits_for_pages_goes_before_those_behind_it():
    prefill, decode = pair(num_pages=11)
    busy = crowd(decode)
    first = decode.submit(ids(42), greedy(4), offer=prefilled(prefill, ids(42)))
    decode.step()
    decode.step()
    short, plans = decode.submit([3], greedy(1)), plans_of(decode)
    run(decode)
    assert all(handle.finished for handle in (*busy, first, short))
    names = [[chunk.request_id for chunk in plan.chunks] for plan in plans]
    starts = [next(i for i, of in enumerate(names) if h.requests[0].request_id in of) for h in (first, short)]
    assert 0 < starts[0] <= starts[1]
    returned(prefill, decode)


def test_others_let_go_of_pages_for_a_request_that_came():
    prefill, decode = pair(num_pages=11, block_size=16, max_model_len=200)
    long, short = ids(8 * 16 + 1), ids(42, seed=3)
    busy = decode.submit(long, greedy(14))
    run(decode, until=lambda: busy.output.outputs[0].token_ids)
    assert decode.scheduler.offload.residency.free_pages == 2 and not decode.scheduler.offload.residency.is_tight
    handle = decode.submit(short, greedy(2), offer=prefilled(prefill, short))
    run(decode, until=lambda: handle.finished)
    assert not busy.finished and decode.stats()["num_preemptions"] == 0
    run(decode)
    assert output(busy) == expected(long, 14) and output(handle) == expected(short, 2)
    returned(prefill, decode)


def test_a_request_without_pages_is_not_preempted_for_them():
    chunk = 16
    sizes = {"max_prefill_chunk": chunk, "max_num_batched_tokens": chunk + 8, "num_pages": 2 + chunk // 4 + 3}
    prefill, decode = pair(num_blocks=120, stage_blocks=120, **sizes)
    long, prompts = ids(70, seed=9), [ids(42, seed) for seed in range(3)]
    offers = [prefilled(prefill, each) for each in prompts]
    first = decode.submit(long, greedy(4))
    others = [decode.submit(each, greedy(4), offer=offer) for each, offer in zip(prompts, offers, strict=True)]
    run(decode)
    assert decode.stats()["num_preemptions"] == 1  # of the one that had started
    assert [output(handle) for handle in (first, *others)] == [expected(each, 4) for each in (long, *prompts)]
    returned(prefill, decode)


def test_a_request_that_lost_what_arrived_finds_it_in_the_prefix_cache():
    prefill, decode = pair(num_pages=20, num_blocks=27, max_num_seqs=4)
    one, two = ids(42), ids(40, seed=4)
    first = decode.submit(one, greedy(20))
    second = decode.submit(two, greedy(20), offer=prefilled(prefill, two))
    plans = plans_of(decode)
    run(decode)
    assert decode.stats()["num_preemptions"] > 0 and fetched(decode) == 39 * ROW
    assert output(first) == expected(one, 20) and output(second) == expected(two, 20)
    again = [c for plan in plans for c in plan.chunks if c.request_id == second.requests[0].request_id and c.token_ids]
    assert again[-1].start > 39 - 4  # the rest was found
    returned(prefill, decode)


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_a_lost_producer_costs_a_recompute_or_the_request(on_failure):
    prefill, decode = pair(on_failure=on_failure)
    prompt = ids(42)
    offer = prefilled(prefill, prompt)
    decode.submit(prompt[:17], greedy(1))
    run(decode)
    prefill.scheduler.handoff.connector.close()
    handle = decode.submit(prompt, greedy(5), offer=offer)
    run(decode)
    if on_failure == "fail":
        with pytest.raises(EngineError, match="no engine"):
            handle.result(timeout=0)
    else:
        assert output(handle) == expected(prompt, 5) and decode.stats()["kv_transfer_recomputed"] == 1
    returned(decode)


@pytest.mark.parametrize("steps", range(10))
@pytest.mark.parametrize("crowded", [False, True])
def test_aborts_at_any_stage_leave_nothing_behind(steps, crowded):
    prefill, decode = pair(num_pages=11)
    busy = crowd(decode) if crowded else []
    handle = decode.submit(ids(42), greedy(6), offer=prefilled(prefill, ids(42)))
    for _ in range(steps):
        decode.step()
    decode.abort(handle.request_id)
    run(decode)
    assert all(output(each) == expected(ids(50, seed), 24) for seed, each in enumerate(busy, 1))
    prefill.clock.now += 31
    returned(prefill, decode)


def test_a_last_block_that_cannot_be_loaded_ends_its_request_alone():
    prefill, decode = pair(fails=lambda move: move.block == tail())
    doomed, fine = ids(42), ids(43, seed=3)
    offers = [prefilled(prefill, each) for each in (doomed, fine)]
    handle, other = (decode.submit(p, greedy(3), offer=o) for p, o in zip((doomed, fine), offers, strict=True))

    def tail():
        blocks = handle.requests[0].blocks
        return blocks[10] if blocks else None

    run(decode)
    with pytest.raises(EngineError, match="a copy of its KV rows from the host failed"):
        handle.result(timeout=0)
    assert output(other) == expected(fine, 3)
    returned(prefill, decode)
