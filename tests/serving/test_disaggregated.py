"""Two engines as one: the face of an engine, and failures of either side at any moment."""

import random
import threading

import pytest
from handoff_engines import StillClock, greedy, make_engine, returned, run
from random_schedules import VOCAB, alone, request

from glmjax.errors import RequestError
from glmjax.serving.clock import Clock
from glmjax.serving.disaggregated import DisaggregatedEngine
from glmjax.serving.handle import EngineError
from glmjax.serving.transfer.interface import TransferError
from glmjax.types import SamplingParams


def make_pair(clock=None, on_failure="recompute", min_remote_tokens=1, prefill=None, decode=None):
    hub, clock = {}, clock or StillClock()
    one = make_engine(hub, clock, **(prefill or {}))
    two = make_engine(
        hub, clock, on_failure=on_failure, **(decode or {"block_size": 3, "num_blocks": 40, "stage_blocks": 24})
    )
    return DisaggregatedEngine(one, two, min_remote_tokens, on_failure)


def finish(pair):
    for _ in range(3000):
        if not pair.has_work:
            return
        pair.step()
        pair.prefill.scheduler.check()
        pair.decode.scheduler.check()
    raise AssertionError("it does not end")


def all_returned(pair):
    pair.clock.now += 31
    returned(pair.prefill, pair.decode)
    assert not pair._prompts and not pair.decode._held


def tokens(handle):
    return list(handle.result(timeout=0).outputs[0].token_ids)


def test_tokens_are_those_of_one_engine():
    pair = make_pair()
    prompts = [[(7 * n + i) % VOCAB for i in range(n)] for n in (1, 2, 3, 4, 5, 11, 12, 13, 30, 40)]
    handles = [pair.submit(prompt, greedy(6)) for prompt in prompts]
    finish(pair)
    assert [tokens(h) for h in handles] == [alone(request("r", p, 6)) for p in prompts]
    assert pair.stats()["prefill_generation_tokens"] == len(prompts) - 1  # there is nothing to fetch for one token
    all_returned(pair)


def test_a_short_rest_of_a_prompt_is_computed_where_it_is_decoded():
    pair = make_pair(min_remote_tokens=8)
    first = list(range(24))
    handle = pair.submit(first, greedy(3))
    finish(pair)
    assert pair.stats()["prefill_prompt_tokens"] == 24
    turn = [*first, *tokens(handle), 5, 6]
    second = pair.submit(turn, greedy(3))
    finish(pair)
    assert pair.stats()["prefill_prompt_tokens"] == 24
    assert tokens(second) == alone(request("r", turn, 3))
    all_returned(pair)


def test_a_prompt_that_was_cached_before_a_reset_is_fetched_after_it():
    pair = make_pair(min_remote_tokens=8)
    prompt = list(range(30))
    for _ in range(2):
        handle = pair.submit(prompt, greedy(3))
        finish(pair)
        assert tokens(handle) == alone(request("r", prompt, 3))
        pair.reset_prefix_cache()
    assert pair.stats()["prefill_kv_transfer_leases_done"] == 2 and pair.stats()["kv_transfer_recomputed"] == 0
    finish(pair)
    all_returned(pair)


def test_a_rank_is_the_decode_engines_and_is_checked():
    pair = make_pair()
    handle = pair.submit(list(range(20)), greedy(3), data_parallel_rank=0)
    finish(pair)
    assert tokens(handle) == alone(request("r", range(20), 3))
    with pytest.raises(RequestError, match="data_parallel_rank must be in"):
        pair.submit([1, 2], greedy(3), data_parallel_rank=1)
    all_returned(pair)


def test_several_completions_share_the_prompt_that_was_fetched():
    pair = make_pair()
    prompt = list(range(20))
    handle = pair.submit(prompt, SamplingParams(temperature=1, seed=5, n=3, max_tokens=4))
    finish(pair)
    expected = [alone(request("r", prompt, 4, seed=5 + i, temperature=1)) for i in range(3)]
    assert [list(c.token_ids) for c in handle.result(timeout=0).outputs] == expected
    all_returned(pair)


def test_a_request_that_is_refused_reaches_neither_engine():
    pair = make_pair()
    with pytest.raises(RequestError, match="the prompt is empty"):
        pair.submit([], greedy(1))
    assert not pair.has_work
    all_returned(pair)


@pytest.mark.parametrize("steps", range(14))
def test_an_abort_at_any_stage_leaves_nothing_behind(steps):
    pair = make_pair()
    doomed, fine = pair.submit(list(range(30)), greedy(9)), pair.submit(list(range(3, 22)), greedy(5))
    for _ in range(steps):
        pair.step()
    pair.abort(doomed.request_id)
    finish(pair)
    assert doomed.finished and tokens(fine) == alone(request("r", range(3, 22), 5))
    all_returned(pair)


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize("steps", range(0, 10, 2))
def test_prefill_that_dies_costs_a_recompute_or_an_error(on_failure, steps):
    pair = make_pair(on_failure=on_failure)
    handle = pair.submit(list(range(30)), greedy(5))
    for _ in range(steps):
        pair.step()
    pair.prefill.runner.fail_at = pair.prefill.runner.steps
    for _ in range(2000):
        for engine in (pair.prefill, pair.decode):
            if engine.has_work:
                engine.step()
        if handle.finished:
            break
    if on_failure == "recompute" or handle.error is None:
        assert tokens(handle) == alone(request("r", range(30), 5))
    else:
        with pytest.raises(EngineError, match="its prompt was not computed"):
            handle.result(timeout=0)
    run(pair.decode)
    pair.clock.now += 31
    returned(pair.decode)


def test_both_engines_step_in_threads_of_their_own():
    hub, clock = {}, Clock()
    pair = DisaggregatedEngine(make_engine(hub, clock, inline=False), make_engine(hub, clock, inline=False))
    pair.start()
    prompts = [[(3 * n + i) % VOCAB for i in range(n + 2)] for n in range(25)]
    handles: dict[int, object] = {}

    def client(first):
        for n in range(first, 25, 5):
            handles[n] = pair.submit(prompts[n], greedy(5))

    clients = [threading.Thread(target=client, args=(i,)) for i in range(5)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    outputs = {n: list(handle.result(timeout=60).outputs[0].token_ids) for n, handle in handles.items()}
    pair.close()
    assert outputs == {n: alone(request("r", prompt, 5)) for n, prompt in enumerate(prompts)}


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_requests_in_chaos(seed, monkeypatch):
    """Lost messages, expired leases, aborts, and copies that break off, at random: no wrong token, nothing lost."""
    chance = random.Random(seed)
    clock = StillClock()
    pair = make_pair(clock, decode={"block_size": 3, "num_blocks": 40, "stage_blocks": 24, "inline": False})
    consumer = pair.decode.scheduler.handoff.connector
    call, read = consumer._call, consumer._read

    def lossy(engine_id, host, port, message):
        fate = chance.random()
        if fate < 0.1:
            raise TransferError("the message was lost")
        answer = call(engine_id, host, port, message)
        if fate < 0.2:
            raise TransferError("the answer was lost")
        return answer

    def breaking(job):
        if chance.random() < 0.1:
            raise TransferError("the copy broke off")
        return read(job)

    monkeypatch.setattr(consumer, "_call", lossy)
    monkeypatch.setattr(consumer, "_read", breaking)
    prompts = [[chance.randrange(4) for _ in range(chance.randrange(1, 40))] for _ in range(200)]
    waiting, handles, aborted = list(enumerate(prompts)), {}, set()
    for _ in range(60_000):
        if waiting and len(handles) - sum(h.finished for h in handles.values()) < 8:
            n, prompt = waiting.pop()
            handles[n] = pair.submit(prompt, greedy(1 + n % 6))
        if chance.random() < 0.01 and handles:
            n = chance.choice(sorted(handles))
            if pair.abort(handles[n].request_id):
                aborted.add(n)
        clock.now += chance.choice([0, 0, 0, 0.1, 5])
        for engine in (pair.prefill, pair.decode):
            engine.step()
            engine.scheduler.check()
        if not waiting and all(h.finished for h in handles.values()):
            break
    assert not waiting and all(h.finished for h in handles.values())
    for n, handle in handles.items():
        expected = alone(request("r", prompts[n], 1 + n % 6))
        got = tokens(handle)
        assert got == (expected[: len(got)] if n in aborted else expected)
    finish(pair)
    stats = pair.stats()
    assert stats["kv_transfer_fetches_done"] > 20 and stats["kv_transfer_fetches_failed"] > 5
    for _ in range(3):
        clock.now += 31
        pair.prefill.step()
    all_returned(pair)
