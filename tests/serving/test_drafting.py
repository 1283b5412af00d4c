"""The engine with drafts: the tokens are those without, in fewer steps, whatever happens to the requests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_glm_engine
from drafting_model import CONFIG, ROWS, answers, engine, make_engine, params, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from glmjax.api import LLM
from glmjax.blockfp8 import quantize_fp8
from glmjax.checkpoint import save_pretrained
from glmjax.errors import ConfigError
from glmjax.params import random_params
from glmjax.programs import Programs, drafts_by_rows, step_shapes
from glmjax.serving.draft_counts import ACCEPTED_AT
from glmjax.serving.runner import ProgramRunner
from glmjax.sharding.cp import local_slots
from glmjax.sharding.layout import Layout
from glmjax.speculation import Speculation
from glmjax.step_io import StepShape
from glmjax.types import SamplingParams

LAYOUTS = ("dp=1", "dp=2,ep=2", "pcp=2,dcp=2")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = prompts(500, 30)


@pytest.fixture(scope="module")
def plain():
    return engine(0)


@pytest.fixture(scope="module")
def drafting():
    return engine(3)


@pytest.fixture(scope="module")
def expected(plain):
    return answers(plain, PROMPTS, GREEDY)


def accepted(engine):
    return engine.stats()["num_accepted_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
def test_greedy_tokens_are_those_without_drafts(num_drafts, layout, plain, drafting, expected):
    there = {0: plain, 3: drafting} if layout == "dp=1" else {}
    one = there.get(num_drafts) or engine(num_drafts, layout)
    assert answers(one, PROMPTS, GREEDY) == expected
    if num_drafts:
        assert accepted(one) > 100 * num_drafts**0.5  # else nothing is shown
    jax.clear_caches()


def test_as_many_drafts_as_there_can_be(expected):
    one = engine(7)
    assert answers(one, PROMPTS[:60], GREEDY) == expected[:60]
    assert accepted(one) > 20


def test_sampled_tokens_are_those_without_drafts(plain, drafting):
    how = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=8, ignore_eos=True) for i in range(100)]
    before = accepted(drafting)
    assert answers(drafting, PROMPTS[:100], *how) == answers(plain, PROMPTS[:100], *how)
    assert accepted(drafting) > before + 20


def test_logprobs_are_those_without_drafts(plain, drafting):
    how = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)

    def logprobs(engine):
        handles = [engine.submit(prompt, how) for prompt in PROMPTS[:40]]
        while engine.has_work:
            engine.step()
        return [handle.result(timeout=0).outputs[0].logprobs for handle in handles]

    for mine, theirs in zip(logprobs(drafting), logprobs(plain), strict=True):
        assert len(mine) == len(theirs) == 8
        for one, other in zip(mine, theirs, strict=True):
            assert list(one) == list(other)
            for token, entry in one.items():
                assert entry.rank == other[token].rank
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_fewer_steps_are_taken(plain, drafting):
    steps = []
    for one in (plain, drafting):
        before = one.stats()["program_runs"]
        answers(one, PROMPTS[:1] * 4, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        steps.append(one.stats()["program_runs"] - before)
    assert steps[1] < 0.8 * steps[0]


# Whatever ends or interrupts a request.


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_every_length_is_kept_to(plain, drafting, max_tokens):
    how = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    assert answers(drafting, PROMPTS[:30], how) == answers(plain, PROMPTS[:30], how)


def test_end_and_stop_tokens_end_where_they_would_without_drafts(plain, drafting):
    tokens = [token for out in answers(plain, PROMPTS[:30], GREEDY) for token in out]
    stops = sorted(set(tokens), key=tokens.count)[-3:]
    how = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=stops, min_tokens=3)
    ends = answers(plain, PROMPTS[:30], how)
    assert answers(drafting, PROMPTS[:30], how) == ends
    assert len({len(out) for out in ends}) > 5 and min(map(len, ends)) > 3


def test_preempted_requests_go_on_with_the_same_tokens(plain, drafting):
    how = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    one = make_engine(drafting.runner, drafting.runner._programs, num_blocks=40)
    assert answers(one, PROMPTS[:40], how) == answers(plain, PROMPTS[:40], how)
    assert one.stats()["num_preemptions"] > 5 and one.stats()["free_blocks"] == 40


def test_prompts_found_in_the_prefix_cache_give_the_same_tokens(plain, drafting):
    again = [[*prompt, 5] for prompt in prompts(40, 30, seed=4)]
    first = answers(plain, again, GREEDY)
    assert answers(drafting, again, GREEDY) == first
    hits = drafting.stats()["prefix_cache_hits"]
    assert answers(drafting, again, GREEDY) == first
    assert drafting.stats()["prefix_cache_hits"] > hits


asks = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, 40),
        "max_tokens": st.integers(1, 20),
        "arrives": st.integers(0, 8),
        "aborted": st.none() | st.none() | st.integers(1, 20),
        "seed": st.none() | st.integers(0, 3),
    }
)


@settings(max_examples=40)
@given(st.lists(asks, min_size=2, max_size=8), st.integers(24, 40), st.sampled_from([6, 9, 40]))
def test_any_schedule_gives_the_tokens_without_drafts(plain, drafting, asks, num_blocks, budget):
    one = make_engine(drafting.runner, drafting.runner._programs, num_blocks=num_blocks, max_num_batched_tokens=budget)
    handles = {}
    for step in range(2000):
        for name, ask in enumerate(asks):
            if ask["arrives"] == step:
                handles[name] = one.submit(PROMPTS[ask["prompt"]], how_of(ask), str(name))
            if ask["aborted"] is not None and ask["arrives"] + ask["aborted"] == step:
                one.abort(str(name))
        if step > 8 and not one.has_work:
            break
        one.step()
        one.scheduler.check()
    assert not one.has_work and one.stats()["free_blocks"] == num_blocks
    for name, ask in enumerate(asks):
        (whole,) = answers(plain, [PROMPTS[ask["prompt"]]], how_of(ask))
        completion = handles[name].result(timeout=0).outputs[0]
        got = tuple(completion.token_ids)
        assert got == (whole[: len(got)] if completion.finish_reason == "abort" else whole)


def how_of(ask):
    how = {"temperature": 0} if ask["seed"] is None else {"temperature": 0.9, "seed": ask["seed"]}
    return SamplingParams(max_tokens=ask["max_tokens"], **how)


# What the device keeps.


class PoisoningRunner(ProgramRunner):
    """Spoils every row that no token known so far has, in all layers, as soon as a step is done."""

    def start(self, plan):
        started = super().start(plan)
        programs = self._programs
        size = programs.block_size
        for chunk in plan.chunks:
            if chunk.samples:
                first = int(self._state.length[chunk.slot]) - 1  # the last token's row is still to be computed
                positions = np.arange(first, len(chunk.blocks) * size)[None]
                slots = jnp.asarray(local_slots(np.array([chunk.blocks]), positions, size, 1, 0, 1)[0])
                self._cache = jax.tree.map(lambda pool, at=slots: pool.at[:, at].set(jnp.nan), self._cache)
                self.poisoned += slots.size
        return started

    poisoned = 0


def test_rejected_drafts_never_matter_again(drafting, expected):
    programs = drafting.runner._programs
    runner = PoisoningRunner(programs)
    runner._cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), runner._cache)
    one = make_engine(runner, programs)
    assert answers(one, PROMPTS[:40], GREEDY) == expected[:40]
    stats = one.stats()
    assert runner.poisoned > 0 and 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]


def test_first_drafts_of_a_prompt_are_the_recorded():
    drafts, recorded = tiny_glm_engine.first_drafts(3)
    assert (drafts == recorded).all()


def test_mean_tokens_of_a_step_are_what_synthetic_acceptance_was_told():
    rates = (1.0, 0.99, 0.0)
    one = engine(3, rates=rates, rows=64, max_len=540)
    how = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    answers(one, prompts(64, 8), how)
    stats = one.stats()
    assert stats["num_drafts"] > 10_000
    # The last steps of a request have fewer drafts than three, but never accept a third one anyway.
    assert 1 + stats["num_accepted_tokens"] / stats["num_drafts"] == pytest.approx(2.99, abs=0.01)
    assert stats[f"{ACCEPTED_AT}2"] == 0


# Programs.


def test_fewer_drafts_in_larger_programs():
    shapes = step_shapes(64, 16, lambda rows: 3 if rows < 16 else 0)
    assert {(s.requests, s.tokens) for s in shapes if s.decode} == {(1, 4), (4, 4), (16, 1), (64, 1)}


def test_few_requests_take_the_program_for_few_though_it_has_more_rows():
    some = object.__new__(Programs)
    few, many = StepShape(4, 4, decode=True), StepShape(8, 1, decode=True)
    some.shapes, some.table_width = (few, many, StepShape(1, 16)), 1
    assert [some.smallest(requests, 1, decode=True) for requests in (1, 4, 5)] == [few, few, many]


def mixed_programs(few):
    """Few rows with drafts, many without, as "auto" may choose; all else as in programs with drafts for all rows."""
    return Programs(
        CONFIG,
        few.params,
        num_blocks=few.num_blocks,
        block_size=few.block_size,
        table_width=few.table_width,
        cache_dtype="float32",
        shapes=(StepShape(2, 4, decode=True), StepShape(ROWS, 1, decode=True), StepShape(1, 32)),
        speculation=Speculation(num_drafts=3, mode="auto"),
    )


def test_programs_with_and_without_drafts_take_turns(drafting, expected):
    programs = mixed_programs(drafting.runner._programs)
    one = make_engine(ProgramRunner(programs), programs)
    handles = []
    for few, many in zip(range(0, 10, 2), range(10, 60, 10), strict=True):
        handles += [one.submit(prompt, GREEDY) for prompt in PROMPTS[few : few + 2]]
        for _ in range(4):
            one.step()
        handles += [one.submit(prompt, GREEDY) for prompt in PROMPTS[many : many + 10]]
        while one.has_work:
            one.step()
    by_prompt = dict(zip(map(tuple, PROMPTS), expected, strict=True))
    for handle in handles:
        out = handle.result(timeout=0)
        assert tuple(out.outputs[0].token_ids) == by_prompt[tuple(out.prompt_token_ids)]
    assert one.stats()["num_accepted_tokens"] > 0


def test_what_pays_is_asked_of_the_devices_that_hold_the_parameters():
    params = random_params(CONFIG)
    assert drafts_by_rows(CONFIG, params, Speculation(num_drafts=2))(10_000) == 2
    auto = Speculation(num_drafts=2, mode="auto")
    assert drafts_by_rows(CONFIG, params, auto)(10_000) == 0


def test_weights_in_fp8_count_as_such():
    params, asked = quantize_fp8(random_params(CONFIG)), []

    class Asked(Speculation):
        def drafts_for(self, config, rows, weight_bytes, flop_per_byte):
            asked.append((rows, weight_bytes, flop_per_byte))
            return 0

    assert drafts_by_rows(CONFIG, params, Asked(num_drafts=1), Layout(dp=2))(8) == 0
    assert asked == [(16, 1, 16.0)]


def test_a_model_without_the_layer_is_refused():
    with pytest.raises(
        ConfigError, match="num_speculative_tokens=2 needs parameters with the MTP layer, and they were"
    ):
        Programs(
            CONFIG,
            random_params(CONFIG, mtp=False),
            num_blocks=1,
            block_size=4,
            table_width=1,
            cache_dtype="float32",
            shapes=(),
            speculation=Speculation(num_drafts=2),
        )


# The front door.


def test_llm_drafts_and_says_how_often_it_was_right(tmp_path):
    save_pretrained(CONFIG, params(), tmp_path)
    options = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "block_size": 8,
    }
    prompt = {"prompt_token_ids": list(range(5, 25))}
    how = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    synthetic = {"synthetic_acceptance_length": 2.0}
    with LLM(tmp_path, num_speculative_tokens=2, **synthetic, **options) as llm:
        (out,) = llm.generate([prompt], how, use_tqdm=False)
        stats = llm.stats()
    assert len(out.outputs[0].token_ids) == 9
    # One from the prompt, then two at a time.
    assert (stats["num_drafts"], stats["num_accepted_tokens"]) == (4, 4)
    assert [stats[f"{ACCEPTED_AT}{i}"] for i in range(2)] == [4, 0]
