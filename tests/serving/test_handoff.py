"""Requests that go from one engine to another, with runners that read the KV back."""

import pytest
from handoff_engines import StillClock, check_any_schedule, greedy, lives, make_engine, prefilled, returned, run
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import alone, request

from glmjax.serving.handle import EngineError
from glmjax.types import SamplingParams


@pytest.fixture
def pair():
    hub, clock = {}, StillClock()
    return make_engine(hub, clock), make_engine(hub, clock, block_size=3, num_blocks=30, stage_blocks=20)


def test_only_the_last_token_of_a_prompt_is_computed_where_it_is_decoded(pair):
    prefill, decode = pair
    prompt = list(range(23))
    offer = prefilled(prefill, prompt)
    assert offer.num_tokens == 23
    before = decode.runner.steps
    plans = []
    schedule = decode.scheduler.schedule
    decode.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    handle = decode.submit(prompt, greedy(6), offer=offer)
    run(decode)
    first = next(c for plan in plans for c in plan.chunks)
    assert (first.start, first.token_ids) == (22, (22,))
    assert handle.result(timeout=0).outputs[0].token_ids == alone(request("r", prompt, 6))
    assert decode.runner.steps - before >= 6
    assert decode.scheduler.handoff.connector.stats()["bytes_fetched"] == 22 * (24 + 4)
    returned(prefill, decode)


def test_what_the_prefix_cache_has_is_not_fetched(pair):
    prefill, decode = pair
    prompt = list(range(20))
    decode.submit(prompt[:13], greedy(1))
    run(decode)
    handle = decode.submit(prompt, greedy(4), offer=prefilled(prefill, prompt))
    run(decode)
    assert decode.scheduler.handoff.connector.stats()["bytes_fetched"] == (19 - 12) * (24 + 4)
    assert handle.result(timeout=0).outputs[0].token_ids == alone(request("r", prompt, 4))
    returned(prefill, decode)


def test_a_prefix_that_is_here_whole_ends_the_lease_at_once(pair):
    prefill, decode = pair
    prompt = list(range(13))
    decode.submit(prompt, greedy(1))
    run(decode)
    handle = decode.submit(prompt, greedy(4), offer=prefilled(prefill, prompt))
    run(decode)
    assert decode.scheduler.handoff.connector.stats()["bytes_fetched"] == 0
    assert handle.result(timeout=0).outputs[0].token_ids == alone(request("r", prompt, 4))
    returned(prefill, decode)


def test_fetched_blocks_are_found_by_later_requests(pair):
    prefill, decode = pair
    prompt = list(range(20))
    decode.submit(prompt, greedy(2), offer=prefilled(prefill, prompt))
    run(decode)
    again = decode.submit(prompt, greedy(2))
    run(decode)
    assert again.result(timeout=0).num_cached_tokens == 18


def test_the_offer_of_a_request_that_stops_early_is_made_all_the_same(pair):
    prefill, _ = pair
    prompt = [3, 4, 5]
    end = alone(request("r", prompt, 1))[0]
    handle = prefill.submit(prompt, SamplingParams(temperature=0, max_tokens=1, stop_token_ids=[end]), send=True)
    run(prefill)
    out = handle.result(timeout=0)
    assert out.outputs[0].finish_reason == "stop" and out.kv_transfer_params["remote_num_tokens"] == 3


def test_a_lost_producer_costs_a_recompute(pair):
    prefill, decode = pair
    prompt = list(range(20))
    offer = prefilled(prefill, prompt)
    prefill.scheduler.handoff.connector.close()
    handle = decode.submit(prompt, greedy(5), offer=offer)
    run(decode)
    assert handle.result(timeout=0).outputs[0].token_ids == alone(request("r", prompt, 5))
    assert decode.stats()["kv_transfer_recomputed"] == 1
    returned(decode)


def test_a_lost_producer_is_an_error_if_that_is_wanted():
    hub, clock = {}, StillClock()
    prefill, decode = make_engine(hub, clock), make_engine(hub, clock, on_failure="fail")
    offer = prefilled(prefill, list(range(20)))
    prefill.scheduler.handoff.connector.close()
    doomed, fine = decode.submit(list(range(20)), greedy(5), offer=offer), decode.submit([1, 2], greedy(5))
    run(decode)
    with pytest.raises(EngineError, match="no engine"):
        doomed.result(timeout=0)
    assert fine.result(timeout=0).outputs[0].token_ids == alone(request("r", [1, 2], 5))
    returned(decode)


def test_a_lease_that_nobody_takes_gives_its_blocks_back():
    hub, clock = {}, StillClock()
    prefill = make_engine(hub, clock)
    prefilled(prefill, list(range(20)))
    prefill.step()
    assert len(prefill.scheduler.handoff._free) == 12 - 5
    clock.now = 31.0
    returned(prefill)
    assert prefill.stats()["kv_transfer_leases_expired"] == 1


def test_a_request_that_waits_keeps_its_lease_alive():
    hub, clock = {}, StillClock()
    prefill = make_engine(hub, clock)
    decode = make_engine(hub, clock, max_num_seqs=1)
    prompt = list(range(20))
    offer = prefilled(prefill, prompt)
    busy = decode.submit([1], greedy(40))
    waits = decode.submit(prompt, greedy(3), offer=offer)
    while not busy.finished:
        clock.now += 4.0
        decode.step()
        prefill.step()
    assert clock.now > 100
    run(decode)
    assert waits.result(timeout=0).outputs[0].token_ids == alone(request("r", prompt, 3))
    assert decode.stats()["kv_transfer_recomputed"] == 0
    returned(prefill, decode)


def test_a_held_request_goes_on_or_is_aborted(pair):
    _, decode = pair
    first, second = (decode.submit([1, 2, 3], greedy(4), held=True) for _ in range(2))
    run(decode)
    assert not first.finished and not decode.has_work
    assert decode.abort(second.request_id) and decode.go_on(first.request_id)
    run(decode)
    assert first.result(timeout=0).outputs[0].token_ids == alone(request("r", [1, 2, 3], 4))
    assert second.result(timeout=0).outputs[0].finish_reason == "abort"
    assert not decode.go_on(second.request_id)
    returned(decode)


@pytest.mark.parametrize("steps", range(8))
def test_aborts_at_any_stage_leave_nothing_behind(steps):
    hub, clock = {}, StillClock()
    prefill, decode = make_engine(hub, clock), make_engine(hub, clock)
    prompt = list(range(30))
    sent = prefill.submit(prompt, greedy(1), send=True)
    for _ in range(steps):
        prefill.step()
    if not sent.finished:
        prefill.abort(sent.request_id)
        run(prefill)
    clock.now += 31
    returned(prefill)
    offer = prefilled(prefill, prompt)
    got = decode.submit(prompt, greedy(9), offer=offer)
    for _ in range(steps):
        decode.step()
        decode.scheduler.check()
    decode.abort(got.request_id)
    run(decode)
    clock.now += 31
    returned(prefill, decode)


SIDE = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 5),
        "num_blocks": st.integers(45, 60),
        "stage_blocks": st.integers(42, 60),
        "enable_prefix_caching": st.booleans(),
        "max_num_batched_tokens": st.integers(4, 12),
        "num_speculative_tokens": st.sampled_from([0, 3]),
        "inline": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(SIDE, SIDE, lives(40, 8), st.sampled_from([None, 3, 9]))
def test_any_schedule_over_two_engines_gives_what_each_request_gives_alone(one, other, of, dies):
    check_any_schedule(one, other, of, dies)
