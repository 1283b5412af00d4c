"""The engine from its front: what comes out, how it ends, and that nothing is left behind."""

import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmjax.errors import RequestError
from glmjax.serving.clock import ManualClock
from glmjax.serving.engine import Engine, EngineError
from glmjax.serving.fake import FakeRunner, default_next_token
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.tokenizer import Tokenizer
from glmjax.types import Logprob, SamplingParams

TOKENIZER = Tokenizer.of_bytes(special=["<end>"])
END = TOKENIZER.special_tokens["<end>"]
VOCAB = TOKENIZER.vocab_size


def spell(prefix, vocab_size):
    """Letters of the alphabet, one after the other; the end token after z."""
    return END if prefix[-1] == ord("z") else max(prefix[-1] + 1, ord("a"))


def make(tokenizer=TOKENIZER.raw, *, next_token=spell, fail_at=None, seed=0, num_drafts=0, **changes):
    config = SchedulerConfig(
        **{
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 48,
            "block_size": 4,
            "num_blocks": 40,
            "num_speculative_tokens": num_drafts,
            **changes,
        }
    )
    runner = FakeRunner(config.block_size, VOCAB, num_drafts=num_drafts, next_token=next_token, fail_at=fail_at)
    return Engine(Scheduler(config, [END]), runner, tokenizer, ManualClock(), vocab_size=VOCAB, seed=seed)


def greedy(**params):
    return SamplingParams(**{"temperature": 0, "max_tokens": 5, **params})


def ids(text):
    return list(text.encode())


def finish(engine, each_step=lambda: None):
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        each_step()


def assert_empty(engine):
    stats = engine.stats()
    assert (stats["free_blocks"], stats["num_running"], stats["num_waiting"]) == (stats["total_blocks"], 0, 0)
    assert not engine.has_work and not engine._handles and not engine._live
    engine.scheduler.check()


def test_a_request_from_submit_to_result():
    engine = make()
    deltas = []
    handle = engine.submit(ids("a"), greedy(), "one", prompt="a", on_output=deltas.append)
    assert not handle.finished
    finish(engine)
    output = handle.result()
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.finished) == ("one", "a", ids("a"), True)
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("bcdef", ids("bcdef"))
    assert (completion.finish_reason, completion.stop_reason, completion.logprobs) == ("length", None, None)
    assert [d.text for d in deltas] == list("bcdef")
    assert [d.finish_reason for d in deltas] == [None] * 4 + ["length"]
    assert [d.finished for d in deltas] == [False] * 4 + [True]
    assert_empty(engine)


def test_end_of_sequence_and_stop_tokens():
    engine = make()
    cases = [
        (greedy(max_tokens=9), [*ids("yz"), END], "yz", "stop", None),
        (greedy(max_tokens=9, skip_special_tokens=False), [*ids("yz"), END], "yz", "stop", None),
        (greedy(max_tokens=9, stop_token_ids=ids("z")), ids("yz"), "y", "stop", ord("z")),
        (greedy(max_tokens=2, stop_token_ids=ids("z")), ids("yz"), "y", "stop", ord("z")),
    ]
    for params, tokens, text, reason, stop_reason in cases:
        handle = engine.submit(ids("x"), params)
        finish(engine)
        (got,) = handle.result().outputs
        assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == (tokens, text, reason, stop_reason)
    assert engine.stats()["finished_stop"] == 4


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_text_tokens_and_logprobs(num_drafts, include):
    engine = make(num_drafts=num_drafts)
    params = greedy(max_tokens=20, stop=["efgh", "fg"], logprobs=1, include_stop_str_in_output=include)
    deltas = []
    handle = engine.submit(ids("a"), params, on_output=deltas.append)
    finish(engine)
    (got,) = handle.result().outputs
    assert (got.text, got.token_ids) == ("bcdefg" if include else "bcde", ids("bcdefg"))
    assert (got.finish_reason, got.stop_reason) == ("stop", "fg")
    assert got.logprobs is not None and len(got.logprobs) == 6 and got.cumulative_logprob == -3.0
    assert "".join(d.text for d in deltas) == got.text
    assert [t for d in deltas for t in d.token_ids] == got.token_ids
    assert [p for d in deltas for p in d.logprobs] == got.logprobs
    assert engine.stats()["generation_tokens"] == 6
    assert_empty(engine)


def test_logprobs_hold_the_chosen_token_and_the_likeliest():
    engine = make()
    handle = engine.submit(ids("a"), greedy(max_tokens=1, logprobs=2))
    finish(engine)
    (got,) = handle.result().outputs
    assert got.logprobs == [{ord("b"): Logprob(-0.5, 1, "b"), ord("c"): Logprob(-1.5, 2, "c")}]


def test_without_a_tokenizer_there_are_tokens_only():
    engine = make(None)
    handle = engine.submit(ids("a"), greedy())
    finish(engine)
    assert (handle.result().outputs[0].text, handle.result().outputs[0].token_ids) == ("", ids("bcdef"))
    with pytest.raises(RequestError, match="tokenizer"):
        engine.submit(ids("a"), greedy(stop=["x"]))


def test_n_completions_share_the_prompt_and_differ_by_seed():
    engine = make(next_token=default_next_token)
    deltas = []
    prompt = ids("a prompt of more than a block")
    params = SamplingParams(n=3, seed=5, max_tokens=4, ignore_eos=True)
    handle = engine.submit(prompt, params, on_output=deltas.append)
    finish(engine)
    output = handle.result()
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert {d.index for d in deltas} == {0, 1, 2}
    assert [d.finished for d in deltas].count(True) == 1 and deltas[-1].finished
    assert output.num_cached_tokens == len(prompt) // 4 * 4
    assert engine.stats()["prompt_tokens"] == len(prompt)
    assert engine.stats()["cached_tokens"] == 0
    single = engine.submit(prompt, SamplingParams(seed=6, max_tokens=4, ignore_eos=True))
    finish(engine)
    assert single.result().outputs[0].token_ids == output.outputs[1].token_ids


def test_seeds_come_from_the_engine_unless_given():
    def sample(engine_seed, **params):
        engine = make(next_token=default_next_token, seed=engine_seed)
        handles = [engine.submit(ids("a"), SamplingParams(ignore_eos=True, **params)) for _ in range(2)]
        finish(engine)
        return [h.result().outputs[0].token_ids for h in handles]

    assert sample(1) == sample(1) != sample(2)
    assert sample(1)[0] != sample(1)[1]
    assert sample(1, seed=2**63 - 1, n=2) == sample(2, seed=2**63 - 1, n=2)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "match"),
    [
        ([], {}, "prompt", "empty"),
        ([1, VOCAB], {}, "prompt", f"{VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], {}, "prompt", "-1 is outside"),
        ([1.5], {}, "prompt", "list of token ids"),
        ([1] * 48, {"max_tokens": 1}, "prompt", "48 tokens, but the context is 48"),
        ([1] * 40, {"max_tokens": 9}, "max_tokens", "context is 48 tokens, but 49 .* 40 in the prompt"),
        ([1] * 40, {"max_tokens": None, "min_tokens": 9}, "min_tokens", "min_tokens=9, .* 8"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids", "outside"),
        ([1], {"stop_token_ids": range(64), "min_tokens": 1}, "stop_token_ids", "at most 64 .* got 65"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(prompt, params, param, match):
    engine = make()
    with pytest.raises(RequestError, match=match) as caught:
        engine.submit(prompt, greedy(**params))
    assert caught.value.param == param
    assert_empty(engine)


def test_limits_of_the_context_are_usable():
    engine = make(max_model_len=12, next_token=default_next_token)
    cases = [([1] * 11, 1, 1), ([1] * 11, None, 1), ([1], None, 11), ([1] * 4, 8, 8)]
    for prompt, max_tokens, expected in cases:
        handle = engine.submit(prompt, greedy(max_tokens=max_tokens, ignore_eos=True))
        finish(engine)
        (got,) = handle.result().outputs
        assert (len(got.token_ids), got.finish_reason) == (expected, "length")


def test_a_pool_smaller_than_the_context_limits_the_output():
    engine = make(num_blocks=3, next_token=default_next_token)
    handle = engine.submit([1] * 5, greedy(max_tokens=None, ignore_eos=True))
    finish(engine)
    assert len(handle.result().outputs[0].token_ids) == 8  # 12 positions, and the last token needs none
    with pytest.raises(RequestError, match="needs 4 KV blocks of 4 tokens"):
        engine.submit([1] * 5, greedy(max_tokens=9))
    with pytest.raises(RequestError, match="needs 4 KV blocks") as caught:
        engine.submit([1] * 13, greedy(max_tokens=None))
    assert caught.value.param == "prompt"


def test_request_ids_are_unique_while_in_use():
    engine = make()
    engine.submit(ids("a"), greedy(), "x")
    with pytest.raises(RequestError, match="'x' is in use"):
        engine.submit(ids("a"), greedy(), "x")
    finish(engine)
    again = engine.submit(ids("b"), greedy(), "x")
    other = engine.submit(ids("b"), greedy())
    assert again.request_id != other.request_id
    finish(engine)
    assert again.result().outputs[0].text == "cdefg"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_abort_at_every_stage_frees_everything(steps):
    """The prompt takes two steps, and a step's results come with the next."""
    engine = make(max_num_batched_tokens=4)
    deltas = []
    handle = engine.submit(ids("abcdef"), greedy(n=1, max_tokens=20, stop=["zzz"]), "x", on_output=deltas.append)
    waiting = engine.submit(ids("q"), greedy())
    for _ in range(steps):
        engine.step()
    assert engine.abort("x")
    finish(engine)
    assert handle.result().outputs[0].finish_reason == "abort"
    assert handle.result().outputs[0].text == "ghijkl"[: max(0, steps - 2)]  # what was held back comes too
    assert [d.finish_reason for d in deltas].count("abort") == 1 and deltas[-1].metrics is handle.metrics
    assert waiting.result().outputs[0].text == "rstuv"
    assert not engine.abort("x") and not engine.abort("never")
    assert engine.stats()["finished_abort"] == 1
    assert_empty(engine)


def test_abort_ends_the_completions_that_are_left():
    engine = make()
    params = SamplingParams(n=2, seed=0, max_tokens=8, stop_token_ids=ids("b"))  # seed 0 spells, seed 1 skips letters
    handle = engine.submit(ids("a"), params, "x")
    while handle.output.outputs[0].finish_reason is None:
        engine.step()
    engine.abort("x")
    finish(engine)
    assert [c.finish_reason for c in handle.result().outputs] == ["stop", "abort"]
    assert_empty(engine)


def test_a_failing_runner_fails_every_request_and_leaves_nothing(caplog):
    engine = make(fail_at=3, max_num_seqs=1)
    deltas = []
    done = engine.submit(ids("a"), greedy(max_tokens=2))
    running = engine.submit(ids("b"), greedy(), on_output=deltas.append)
    waiting = engine.submit(ids("c"), greedy())
    finish(engine)
    assert done.result().outputs[0].text == "bc"
    for handle in (running, waiting):
        assert handle.finished and handle.output.outputs[0].finish_reason == "abort"
        with pytest.raises(EngineError, match="told to fail"):
            handle.result()
    assert isinstance(deltas[-1].error, RuntimeError) and deltas[-1].finished
    assert not engine.healthy
    with pytest.raises(EngineError, match="has failed"):
        engine.submit(ids("a"), greedy())
    assert (engine.stats()["finished_error"], engine.stats()["finished_abort"]) == (2, 0)
    assert engine.scheduler.pool.cached_blocks == 0
    assert_empty(engine)
    engine.close()


def test_a_failing_callback_ends_its_own_request_only(caplog):
    engine = make()

    def fail(delta):
        raise ValueError("not mine")

    bad, good = engine.submit(ids("a"), greedy(), on_output=fail), engine.submit(ids("a"), greedy())
    finish(engine)
    assert bad.result().outputs[0].finish_reason == "abort"
    assert good.result().outputs[0].text == "bcdef"
    assert engine.healthy and "not mine" in caplog.text


def test_moments_and_counters():
    engine = make(max_num_seqs=1)
    first = engine.submit(ids("abcdefghi"), greedy(max_tokens=3))
    second = engine.submit(ids("abcdefghi"), greedy(max_tokens=1))
    engine.clock.advance(1)
    finish(engine, lambda: engine.clock.advance(1))
    moments = first.metrics
    assert (moments.arrival, moments.first_scheduled, moments.first_token) == (0, 1, 2)
    assert (moments.last_token, moments.finished) == (4, 4)
    assert (second.metrics.first_scheduled, second.metrics.finished) == (5, 6)
    assert second.result().num_cached_tokens == 8
    stats = engine.stats()
    expected = {
        "prompt_tokens": 18,
        "cached_tokens": 8,
        "generation_tokens": 4,
        "prefix_cache_queries": 18,
        "prefix_cache_hits": 8,
        "finished_length": 2,
        "num_preemptions": 0,
        "compilations": 0,
    }
    assert {name: stats[name] for name in expected} == expected


def test_reset_prefix_cache():
    engine = make()
    for expected in (0, 4, 0):
        if expected == 0:
            engine.reset_prefix_cache()
        handle = engine.submit(ids("abcdef"), greedy())
        finish(engine)
        assert handle.result().num_cached_tokens == expected


def test_the_loop_serves_many_threads():
    engine = make(num_blocks=24)
    results = {}

    def user(name):
        for turn in range(5):
            handle = engine.submit(ids(chr(97 + name)), greedy(n=1, max_tokens=6), f"{name}-{turn}")
            if turn == 3:
                engine.abort(handle.request_id)
            results[name, turn] = handle.result(timeout=30).outputs[0]

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        engine.start()
        users = [threading.Thread(target=user, args=(n,)) for n in range(8)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
        engine.close()
    for (name, turn), got in results.items():
        expected = "".join(chr(98 + name + i) for i in range(6))
        assert expected.startswith(got.text) and (got.text == expected or turn == 3)
    assert len(results) == 40
    assert_empty(engine)


def test_close_aborts_or_drains():
    for drain, reason in ((False, "abort"), (True, "length")):
        for threaded in (False, True):
            engine = make()
            handle = engine.submit(ids("a"), greedy(max_tokens=20))
            if threaded:
                engine.start()
            engine.close(drain=drain)
            assert handle.result(timeout=0).outputs[0].finish_reason == reason or (threaded and not drain)
            assert_empty(engine)
            engine.close()
            with pytest.raises(EngineError, match="closed"):
                engine.submit(ids("a"), greedy())


def test_result_waits_no_longer_than_told():
    handle = make().submit(ids("a"), greedy())
    with pytest.raises(TimeoutError, match="not finished after 0 s"):
        handle.result(timeout=0)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(
        st.tuples(
            st.integers(0, 8),  # arrives at this step
            st.integers(1, 10),  # prompt length
            st.integers(1, 3),  # completions
            st.sampled_from([(), ("ef",), ("klm", "h"), ("q",)]),
            st.none() | st.integers(0, 20),  # aborted at this step
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_any_traffic_ends_once_and_leaves_nothing(num_drafts, traffic):
    engine = make(num_drafts=num_drafts, num_blocks=9, max_num_batched_tokens=7, max_num_seqs=3)
    deltas = {name: [] for name in range(len(traffic))}
    handles = {}
    for number in range(400):
        for name, (arrives, length, n, stop, aborted) in enumerate(traffic):
            if arrives == number:
                params = SamplingParams(n=n, seed=0, max_tokens=12, stop=stop, ignore_eos=True)
                prompt = ids("abcdefghijklmn"[:length])
                handles[name] = engine.submit(prompt, params, str(name), on_output=deltas[name].append)
            if aborted == number:
                engine.abort(str(name))
        engine.step()
        engine.scheduler.check()
        if number > 8 and not engine.has_work:
            break
    assert_empty(engine)
    for name, handle in handles.items():
        completions = handle.result(timeout=0).outputs
        for completion in completions:
            mine = [d for d in deltas[name] if d.index == completion.index]
            assert [d.finish_reason is not None for d in mine] == [False] * (len(mine) - 1) + [True]
            assert "".join(d.text for d in mine) == completion.text
            assert [t for d in mine for t in d.token_ids] == completion.token_ids
        _, length, _, stop, aborted = traffic[name]
        first = completions[0]
        spelled = "bcdefghijklmnopqrstuvwxyz"[length - 1 :][:12]
        if aborted is None:
            found = [(end, s) for s in stop if (end := spelled.find(s) + len(s)) >= len(s)]
            if found:
                end, string = min(found)
                assert (first.text, first.stop_reason) == (spelled[: end - len(string)], string)
                assert first.token_ids == ids(spelled[:end])
            else:
                assert (first.text, first.finish_reason) == (spelled, "length")
