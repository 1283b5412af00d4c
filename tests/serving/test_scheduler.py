"""The scheduler with a runner that reads the KV back: any schedule gives what each request gives alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import EOS, SPECS, VOCAB, alone, check_any_schedule, make, request, sized

from glmjax.errors import ConfigError, RequestError
from glmjax.serving.draft_counts import ACCEPTED_AT
from glmjax.serving.plan import Results, Sampled
from glmjax.serving.request import banned_ids, complete


def step(scheduler, runner, between=lambda: None):
    plan = scheduler.schedule()
    scheduler.check()
    assert bool(plan.chunks) == scheduler.has_work
    assert plan.num_tokens <= scheduler.config.max_num_batched_tokens
    out = runner.finish(runner.start(plan))
    between()
    scheduler.check()
    updates = scheduler.commit(plan, out)
    scheduler.check()
    return plan, updates


def run(scheduler, runner, limit=2000):
    """Step until done; outputs by request id."""
    outputs: dict[str, list[int]] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return outputs
        for update in step(scheduler, runner)[1]:
            outputs.setdefault(update.request.request_id, []).extend(update.token_ids)
    raise AssertionError("no end in sight")


# The rule that ends a sequence.


def test_nothing_past_the_token_that_ends_it_counts():
    assert complete(request("a", [1], 9), [5, 7, 5], EOS, 64) == (
        end := complete(request("a", [1], 9), [5, 7], EOS, 64)
    )
    assert (end.num_kept, end.finish_reason, end.stop_reason) == (2, "stop", None)
    end = complete(request("a", [1], 9, stop_token_ids=[6]), [6, 7], EOS, 64)
    assert (end.num_kept, end.finish_reason, end.stop_reason) == (1, "stop", 6)
    end = complete(request("a", [1], 2), [5, 5, 5], EOS, 64)
    assert (end.num_kept, end.finish_reason) == (2, "length")
    assert complete(request("a", [1] * 60, 50), [5] * 8, EOS, 64).num_kept == 4
    assert complete(request("a", [1], 9), [5, 5], EOS, 64).finish_reason is None


def test_ignore_eos_and_min_tokens():
    assert complete(request("a", [1], 9, ignore_eos=True), [7], EOS, 64).finish_reason is None
    held = request("a", [1], 9, min_tokens=2, stop_token_ids=[6])
    assert banned_ids(held, EOS) == (6, 7)
    assert complete(held, [7, 6, 6, 5], EOS, 64).num_kept == 3
    held.token_ids += [5, 5]
    assert banned_ids(held, EOS) == ()
    assert banned_ids(request("a", [1], 9, min_tokens=2, ignore_eos=True), EOS) == ()


# Schedules.


def test_decodes_and_prefill_share_one_budget():
    scheduler, runner = make(max_num_batched_tokens=6, max_prefill_chunk=5)
    scheduler.add(request("a", [1, 2], 8))
    step(scheduler, runner)
    scheduler.add(request("b", range(12), 8))
    shapes = [[(c.request_id, c.start, c.end, c.samples) for c in step(scheduler, runner)[0].chunks] for _ in range(3)]
    assert shapes[0] == [("a", 2, 2, True), ("b", 0, 5, False)]
    assert shapes[1] == [("a", 3, 3, True), ("b", 5, 10, False)]
    assert shapes[2] == [("a", 4, 4, True), ("b", 10, 12, True)]


def test_the_last_to_arrive_is_preempted_and_resumes_at_the_front():
    scheduler, runner = make(num_blocks=4, block_size=2, enable_prefix_caching=False)
    for name, prompt, length in (("a", [1, 2], 6), ("b", [3, 4], 6)):
        scheduler.add(request(name, prompt, length))
    scheduler.add(request("c", [5, 6], 6))
    outputs = {}
    while not scheduler.num_preemptions:
        for update in step(scheduler, runner)[1]:
            outputs.setdefault(update.request.request_id, []).extend(update.token_ids)
    assert [r.request_id for r in scheduler.running] == ["a"]
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
    for name, tokens in run(scheduler, runner).items():
        outputs.setdefault(name, []).extend(tokens)
    assert outputs == {n: alone(request(n, p, 6)) for n, p in (("a", [1, 2]), ("b", [3, 4]), ("c", [5, 6]))}


def test_priority_preempts_and_admits_by_priority_then_arrival():
    scheduler, runner = make(policy="priority", num_blocks=6, block_size=2, max_num_seqs=2)
    for name, priority in (("low", 5), ("mid", 3), ("high", 0), ("high2", 0)):
        scheduler.add(request(name, [len(scheduler.waiting), 1, 2], 6, priority=priority))
    assert [c.request_id for c in step(scheduler, runner)[0].chunks] == ["high", "high2"]
    while not scheduler.num_preemptions:
        step(scheduler, runner)
    assert [r.request_id for r in scheduler.running] == ["high"]
    assert [r.request_id for r in scheduler.waiting] == ["high2", "mid", "low"]


@pytest.mark.parametrize("length", [n * 4 + d for n in (1, 2, 5) for d in (-1, 0, 1)])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_repeated_prompt_hits_all_but_what_must_be_computed(length, lookahead):
    scheduler, runner = make(num_speculative_tokens=lookahead)
    prompt = [(i * i) % VOCAB for i in range(length)]
    results = []
    for name in ("cold", "warm", "hot"):
        scheduler.add(again := request(name, prompt, 9))
        results.append(run(scheduler, runner)[name])
        assert again.num_cached_tokens == (0 if name == "cold" else (length - 1) // 4 * 4)
    assert results == [alone(again)] * 3
    assert scheduler.pool.free_blocks == 32
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (3 * length, 2 * ((length - 1) // 4 * 4))


def test_a_conversation_hits_its_own_output():
    scheduler, runner = make()
    scheduler.add(first := request("first", [1, 2, 3], 10))
    run(scheduler, runner)
    scheduler.add(second := request("second", [*first.token_ids, 5, 6], 4))
    assert run(scheduler, runner)["second"] == alone(second)
    assert second.num_cached_tokens == 12  # 13 tokens, of which the last was never computed


def test_salts_do_not_share():
    scheduler, runner = make()
    for name, salt, hit in (("a", "x", 0), ("b", "y", 0), ("c", None, 0), ("d", "x", 8)):
        scheduler.add(one := request(name, range(9), 2, cache_salt=salt))
        run(scheduler, runner)
        assert one.num_cached_tokens == hit


def test_equal_prompts_at_once_are_computed_once():
    scheduler, runner = make(max_num_batched_tokens=40)
    prompt = range(17)
    twins = [request(f"r{i}", prompt, 3, temperature=1, seed=i) for i in range(3)]
    for twin in twins:
        scheduler.add(twin)
    computed = 0
    outputs = {}
    while scheduler.has_work:
        plan, updates = step(scheduler, runner)
        computed += plan.num_tokens
        for update in updates:
            outputs.setdefault(update.request.request_id, []).extend(update.token_ids)
    assert computed == 17 + 1 + 1 + 3 * 2
    assert [t.num_cached_tokens for t in twins] == [0, 16, 16]
    assert outputs == {t.request_id: alone(t) for t in twins}


def test_preempted_request_keeps_its_first_hit():
    scheduler, runner = make(num_blocks=6, block_size=2)
    scheduler.add(request("warm", [1, 2, 3], 1))
    run(scheduler, runner)
    scheduler.add(request("a", [9, 9, 9], 7))
    scheduler.add(b := request("b", [1, 2, 3], 7))
    outputs = run(scheduler, runner)
    assert scheduler.num_preemptions > 0
    assert b.num_cached_tokens == 2
    assert outputs["b"] == alone(b)


def test_drafts_past_the_limit_find_no_slot_and_harm_nobody():
    scheduler, runner = make(num_speculative_tokens=3, num_blocks=3, block_size=4)
    scheduler.add(one := request("a", [1, 2, 3, 4, 5], 8))  # horizon: 12 positions, the whole pool
    assert run(scheduler, runner)["a"] == alone(one)


def test_accepted_drafts_are_computed_and_have_slots_across_a_block_edge():
    scheduler, runner = make(num_speculative_tokens=3, block_size=4)
    scheduler.add(request("a", [1, 2, 3], 20))
    first, updates = step(scheduler, runner)
    assert (len(first.chunks[0].blocks), len(updates[0].token_ids)) == (2, 1)  # 3 tokens, 2 drafts of the MTP layer
    (chunk,) = step(scheduler, runner)[0].chunks
    assert (chunk.start, chunk.token_ids, chunk.num_tokens) == (3, (), 4)
    assert len(chunk.blocks) == 3  # 3 + 4 tokens, 2 drafts


def test_min_tokens_is_the_same_with_drafts():
    plain, runner = make(EOS)
    drafted, drafting = make(EOS, num_speculative_tokens=3)
    for prompt in range(VOCAB):
        for scheduler in (plain, drafted):
            scheduler.add(request(f"r{prompt}", [prompt, 2], 12, min_tokens=5))
    assert run(plain, runner) == run(drafted, drafting)


def test_what_can_never_fit_is_refused_with_its_sizes():
    scheduler, runner = make(num_blocks=3, block_size=4)
    with pytest.raises(RequestError, match=r"10 tokens with max_tokens=4 needs 4 KV blocks of 4 tokens.* has 3"):
        scheduler.add(request("a", range(10), 4))
    assert not scheduler.has_work
    scheduler.add(fits := request("a", range(10), 3))
    assert run(scheduler, runner)["a"] == alone(fits)
    scheduler.add(request("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(request("a", [1]))


def test_a_runner_may_not_return_more_than_its_drafts():
    scheduler, runner = make(num_speculative_tokens=2)
    scheduler.add(request("a", [1]))
    with pytest.raises(RuntimeError, match="2 tokens came back for a, and there may be 1 to 1"):
        scheduler.commit(scheduler.schedule(), Results({"a": Sampled((1, 2))}))
    scheduler, runner = make(num_speculative_tokens=2)
    scheduler.add(request("a", [1]))
    step(scheduler, runner)
    with pytest.raises(RuntimeError, match="4 tokens came back for a, and there may be 1 to 3"):
        scheduler.commit(scheduler.schedule(), Results({"a": Sampled((1, 2, 3, 4))}))


# A plan is made before the results of the one before are in.


def test_a_request_goes_on_before_its_token_is_known():
    scheduler, runner = make(num_speculative_tokens=2)
    scheduler.add(request("a", [1, 2], 9))
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.check()
    (chunk,) = second.chunks
    assert (chunk.token_ids, chunk.start, chunk.most) == ((), 2, 3)
    tokens = []
    for plan, started in [(plan, runner.start(plan)) for plan in (first, second)]:
        for update in scheduler.commit(plan, runner.finish(started)):
            tokens += update.token_ids
        scheduler.check()
    assert [*tokens, *run(scheduler, runner)["a"]] == alone(request("a", [1, 2], 9))


def test_no_step_is_planned_for_a_request_whose_last_token_is_on_its_way():
    scheduler, runner = make()
    scheduler.add(request("a", [1, 2], 2))
    plans = [scheduler.schedule() for _ in range(3)]
    assert [len(plan.chunks) for plan in plans] == [1, 1, 0]
    for plan in plans:
        scheduler.commit(plan, runner.finish(runner.start(plan)))
    assert not scheduler.has_work


def test_what_a_step_in_flight_brings_for_a_request_that_lost_its_blocks_is_passed_over():
    scheduler, runner = make(num_blocks=4, block_size=2, enable_prefix_caching=False)
    for name, prompt in (("a", [1, 2]), ("b", [3, 4])):
        scheduler.add(request(name, prompt, 6))
    outputs: dict[str, list[int]] = {}
    before = None
    while scheduler.has_work:
        plan = scheduler.schedule()
        started = runner.start(plan)
        lost = {r.request_id for r in scheduler.waiting}
        if before is not None:
            for update in scheduler.commit(before[0], runner.finish(before[1])):
                assert update.request.request_id not in lost
                outputs.setdefault(update.request.request_id, []).extend(update.token_ids)
        before = plan, started
    assert scheduler.num_preemptions > 0
    assert outputs == {n: alone(request(n, p, 6)) for n, p in (("a", [1, 2]), ("b", [3, 4]))}


def test_drafts_are_counted_by_position():
    scheduler, runner = make(num_speculative_tokens=3)
    scheduler.add(request("a", [1, 2, 3], 20))
    run(scheduler, runner)
    gauges = scheduler.gauges()
    by_position = [gauges[f"{ACCEPTED_AT}{i}"] for i in range(3)]
    assert by_position == sorted(by_position, reverse=True) and by_position[2] > 0
    assert gauges["num_accepted_tokens"] == sum(by_position)
    # The first token came from the prompt, and each step brought one besides the accepted drafts.
    assert 1 + gauges["num_drafts"] + gauges["num_accepted_tokens"] >= 20
    assert gauges["num_drafts"] <= gauges["num_draft_tokens"] <= 3 * gauges["num_drafts"]
    assert not any("draft" in name or "accepted" in name for name in make()[0].gauges())


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_seqs": 0},
        {"num_blocks": 0},
        {"max_model_len": 1},
        {"max_prefill_chunk": 0},
        {"num_speculative_tokens": -1},
        {"num_speculative_tokens": 16},
        {"policy": "lifo"},
    ],
)
def test_config_names_the_wrong_key(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        make(**change)


def test_abort_frees_at_every_stage():
    scheduler, runner = make(num_blocks=8, block_size=2, max_num_batched_tokens=4, max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, range(6), 8))
    assert scheduler.abort("c")  # waiting
    step(scheduler, runner)
    assert scheduler.abort("a")  # in the middle of its prompt
    scheduler.check()
    step(scheduler, runner)
    step(scheduler, runner, between=lambda: scheduler.abort("b"))  # while the device works
    assert not scheduler.has_work
    assert not scheduler.abort("b")
    assert scheduler.pool.free_blocks == 8


def test_results_for_an_aborted_request_do_not_reach_its_namesake():
    scheduler, runner = make()
    scheduler.add(request("a", range(5)))

    def replace():
        scheduler.abort("a")
        scheduler.add(request("a", [9]))

    _, updates = step(scheduler, runner, between=replace)
    assert updates == []
    assert scheduler.waiting[0].token_ids == [9]


def test_clear_leaves_nothing():
    scheduler, runner = make()
    for name in "abcdef":
        scheduler.add(request(name, range(9), 8))
    step(scheduler, runner)
    scheduler.clear()
    scheduler.check()
    assert (scheduler.has_work, scheduler.pool.free_blocks, scheduler.pool.cached_blocks) == (False, 32, 0)


# Any schedule.

CONFIGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 14),
        "block_size": st.integers(1, 5),
        "num_blocks": st.integers(4, 14),
        "enable_prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_prefill_chunk": st.none() | st.integers(1, 5),
        "num_speculative_tokens": st.sampled_from([0, 0, 1, 3, 7]),
        "max_model_len": st.integers(12, 40),
        "region_pages": st.integers(0, 3),
        "num_pages": st.none() | st.integers(0, 6),
    }
).map(sized)


@settings(max_examples=250, deadline=None)
@given(CONFIGS, st.lists(SPECS, min_size=1, max_size=9), st.integers(0, 2))
def test_any_schedule_gives_what_each_request_gives_alone(config, specs, ahead):
    check_any_schedule(config, specs, ahead)
