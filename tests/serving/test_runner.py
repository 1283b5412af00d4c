"""The runner with compiled programs: any schedule gives what each request gives alone, and the pool stays in place."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import BLOCK, CONFIG, NUM_BLOCKS, finish, make_engine

from glmjax.cache import abstract_cache
from glmjax.params import num_bytes
from glmjax.programs import Programs
from glmjax.serving.plan import Chunk, Plan, Sampled
from glmjax.serving.runner import ProgramRunner, Started, fill_row, read_row
from glmjax.step_io import MAX_BANNED, StepInputs, StepOutputs, StepShape
from glmjax.types import SamplingParams

MOST = 24  # tokens that a request of a random schedule brings forth at most
LENGTHS = sorted({1, 2, *(k * BLOCK + d for k in (1, 2, 3) for d in (-1, 0, 1))})
RNG = np.random.default_rng(0)
TEXTS = RNG.integers(0, CONFIG.vocab_size, (3, LENGTHS[-1])).tolist()


@pytest.fixture(scope="module")
def runner():
    return ProgramRunner(small_model.programs())


def test_blocks_of_the_stage_are_waited_for_before_they_may_be_written_to_again(runner):
    waited = []

    class Read:
        def block_until_ready(self):
            waited.append(self)

    runner.finish(Started((), read=[Read()]))
    assert len(waited) == 1


def litter(runner, value=100.0):
    """Fills the pool with what nobody may read."""
    runner._cache = jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), runner._cache)


def tokens_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


def greedy(max_tokens=8, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


# Random schedules.


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request: the first ``fork`` tokens of one text, then those of another up to ``length``."""

    length: int
    fork: int
    texts: tuple[int, int]
    max_tokens: int
    seed: int | None  # None: greedy
    n: int
    priority: int
    arrives: int
    aborted: int | None  # steps after its arrival

    @property
    def prompt(self):
        first, second = (TEXTS[t] for t in self.texts)
        return (*first[: self.fork], *second[self.fork : self.length])

    @property
    def sampling(self):
        if self.seed is None:
            return SamplingParams(temperature=0, max_tokens=self.max_tokens)
        return SamplingParams(n=self.n, temperature=0.9, top_p=0.95, seed=self.seed, max_tokens=self.max_tokens)


asks = st.builds(
    Ask,
    length=st.sampled_from(LENGTHS),
    fork=st.sampled_from(LENGTHS),
    texts=st.sampled_from([(0, 0), (0, 1), (0, 2)]),
    max_tokens=st.integers(1, MOST) | st.just(MOST),
    seed=st.sampled_from([None, None, 0, 1]),
    n=st.integers(1, 3),
    priority=st.integers(0, 1),
    arrives=st.integers(0, 6),
    aborted=st.none() | st.none() | st.none() | st.integers(0, 25),
)
limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([1, 2, 4, 4, 4, 4]),
        "max_num_batched_tokens": st.sampled_from([4, 9, 32, 32, 1]),
        "max_prefill_chunk": st.sampled_from([None, 5, 8]),
        "num_blocks": st.integers(6, 7),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "policy": st.sampled_from(["fcfs", "priority"]),
    }
)


@pytest.fixture(scope="module")
def alone(runner):
    """Output of a prompt by itself, in one chunk, as far as it goes."""

    @functools.cache
    def run(prompt, seed):
        how = {"temperature": 0} if seed is None else {"temperature": 0.9, "top_p": 0.95, "seed": seed}
        engine = make_engine(runner)
        handle = engine.submit(prompt, SamplingParams(max_tokens=MOST, **how))
        finish(engine)
        return tuple(handle.result().outputs[0].token_ids)

    return run


@pytest.mark.slow
def test_any_schedule_gives_what_each_request_gives_alone(runner, alone):
    seen = collections.Counter()

    @settings(max_examples=200, report_multiple_bugs=False)
    @given(limits, st.lists(asks, min_size=5, max_size=8))
    def check(limits, asks):
        litter(runner)
        engine = make_engine(runner, **limits)
        waiting, handles = dict(enumerate(asks)), {}
        for step in range(2000):
            for name in [n for n, ask in waiting.items() if ask.arrives <= step]:
                ask = waiting.pop(name)
                handles[name] = engine.submit(ask.prompt, ask.sampling, str(name), priority=ask.priority)
            for name, ask in enumerate(asks):
                if ask.aborted is not None and ask.arrives + ask.aborted == step:
                    seen["aborts"] += engine.abort(str(name))
            if not waiting and not engine.has_work:
                break
            engine.step()
            engine.scheduler.check()
        assert not engine.has_work
        for name, ask in enumerate(asks):
            for index, completion in enumerate(handles[name].result(timeout=0).outputs):
                expected = alone(ask.prompt, None if ask.seed is None else ask.seed + index)[: ask.max_tokens]
                got = tuple(completion.token_ids)
                if completion.finish_reason == "abort":
                    assert ask.aborted is not None and got == expected[: len(got)]
                else:
                    assert got == expected
        stats = engine.stats()
        assert stats["free_blocks"] == limits["num_blocks"]
        seen.update({key: stats[key] for key in ("num_preemptions", "cached_tokens")})

    check()
    # Else the examples are too tame to show anything.
    assert min(seen[key] for key in ("aborts", "num_preemptions", "cached_tokens")) > 50, seen


# Single properties of schedules.


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 2])
def test_a_repeated_prompt_gives_the_same_from_the_prefix_cache(runner, length):
    litter(runner)
    engine = make_engine(runner)
    results = []
    for _ in range(3):
        handle = engine.submit(tokens_of(length), greedy(logprobs=3))
        finish(engine)
        results.append(handle.result())
    assert [r.num_cached_tokens for r in results] == [0] + 2 * [(length - 1) // BLOCK * BLOCK]
    first, *others = [r.outputs[0] for r in results]
    for other in others:
        assert other.token_ids == first.token_ids
        assert other.cumulative_logprob == pytest.approx(first.cumulative_logprob, abs=1e-4)


def test_a_preempted_request_gives_the_same(runner):
    prompts = [tokens_of(20, seed) for seed in (1, 2, 3)]
    results = []
    for num_blocks in (NUM_BLOCKS, 8):
        litter(runner)
        engine = make_engine(runner, num_blocks=num_blocks)
        handles = [engine.submit(prompt, greedy(16)) for prompt in prompts]
        finish(engine)
        results.append(([h.result().outputs[0].token_ids for h in handles], engine.stats()["num_preemptions"]))
    (free, never), (tight, often) = results
    assert never == 0 and often > 0
    assert free == tight


def test_more_sequences_than_a_program_has_rows(runner):
    prompts = [tokens_of(5, seed) for seed in range(9)]
    results = []
    for max_num_seqs in (1, 9):
        litter(runner)
        engine = make_engine(runner, max_num_seqs=max_num_seqs)
        handles = [engine.submit(prompt, greedy(4)) for prompt in prompts]
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, engine.stats()["num_running"])
        assert (most > small_model.MAX_SEQS) == (max_num_seqs > 1)
        results.append([h.result().outputs[0].token_ids for h in handles])
    assert results[0] == results[1]


# The pool and the programs.


def test_nothing_is_compiled_while_serving(runner):
    litter(runner)
    engine = make_engine(runner)
    before = engine.stats()["compilations"]
    assert before == len(small_model.programs().shapes)
    with small_model.counting_compilations() as compiled:
        jax.jit(lambda x: x + 1)(np.ones(3))
        assert compiled  # the count counts
        compiled.clear()
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 70):
            for how in ({"temperature": 0}, {"seed": 1, "top_k": 5}, {"seed": 2, "logprobs": 20, "n": 3}):
                engine.submit(tokens_of(length), SamplingParams(max_tokens=5, min_tokens=3, **how))
        finish(engine)
    assert compiled == []
    assert engine.stats()["compilations"] == before
    assert engine.stats()["program_runs"] > 30


def test_the_pool_stays_where_it_is(runner):
    def addresses():
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner._cache)]

    engine = make_engine(runner)
    for length in (1, 2, 3, 16, 30, 60):
        engine.submit(tokens_of(length), greedy())
    at_start = addresses()
    while engine.has_work:
        passed_in = runner._cache.latent
        steps = engine.stats()["program_runs"]
        engine.step()
        assert passed_in.is_deleted() == (engine.stats()["program_runs"] > steps) and addresses() == at_start


def test_live_bytes_stay_the_same_over_steps(runner):
    engine = make_engine(runner)
    for length in (1, 2, 16, 30, 60):
        engine.submit(tokens_of(length), greedy(max_tokens=20, logprobs=5))
    sizes = set()
    while engine.has_work:
        engine.step()
        rectangles = engine._in_flight[1].rectangles if engine._in_flight else ()
        outputs = sum(out.nbytes for *_, out in rectangles)
        sizes.add(sum(x.nbytes for x in jax.live_arrays()) - outputs)
    assert len(sizes) == 1


@pytest.mark.slow
def test_a_larger_pool_adds_nothing_to_a_step_but_itself():
    small, shape = small_model.programs(), StepShape(1, 16)
    num_blocks = 100 * NUM_BLOCKS
    large = Programs(
        CONFIG,
        small_model.params(),
        num_blocks=num_blocks,
        block_size=BLOCK,
        table_width=small.table_width,
        cache_dtype="float32",
        shapes=[shape],
        num_slots=small_model.MAX_SLOTS,
    )
    before, after = (p._steps[shape].memory_analysis() for p in (small, large))
    sizes = [num_bytes(abstract_cache(CONFIG, n, BLOCK, "float32")) for n in (NUM_BLOCKS, num_blocks)]
    grown = sizes[1] - sizes[0]
    assert after.temp_size_in_bytes - before.temp_size_in_bytes < 0.01 * grown
    assert after.alias_size_in_bytes - before.alias_size_in_bytes == grown


def test_close_frees_the_pool():
    runner = ProgramRunner(small_model.programs())
    size = num_bytes((runner._cache, runner._state))
    before = sum(x.nbytes for x in jax.live_arrays())
    runner.close()
    assert before - sum(x.nbytes for x in jax.live_arrays()) == size


# Rows of inputs and outputs.


def chunk(token_ids=(5, 6), start=8, seed=0, banned_ids=(), **sampling):
    return Chunk(
        "a", tuple(token_ids), start, (7, 2), True, SamplingParams(**sampling), slot=3, limit=16, seed=seed,
        banned_ids=banned_ids, ban_end=12,
    )  # fmt: skip


def test_a_chunk_fills_its_row_and_no_other():
    inputs = StepInputs.empty(StepShape(2, 4), table_width=3)
    untouched = StepInputs.empty(StepShape(2, 4), table_width=3)
    how = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_k": 9, "logprobs": 0}
    fill_row(inputs, 1, chunk(seed=3 + (5 << 32), banned_ids=(11, 12), **how))
    row = {f.name: getattr(inputs, f.name)[1].tolist() for f in dataclasses.fields(inputs)}
    assert row == {
        "region_table": [],
        "region_lease": 0,
        "region_slot": -1,
        "tokens": [5, 6, 0, 0],
        "block_tables": [7, 2, 0],
        "banned": [11, 12] + [-1] * (MAX_BANNED - 2),
        "start": 8,
        "length": 2,
        "next_token": -1,
        "limit": 16,
        "slot": 3,
        "continues": 0,
        "ban_end": 12,
        "seed": [3, 5],
        "wants_logprobs": 1,
        **{name: value for name, value in how.items() if name != "logprobs"},
    }
    for field in dataclasses.fields(inputs):
        np.testing.assert_array_equal(getattr(inputs, field.name)[0], getattr(untouched, field.name)[0])


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"temperature": 1e-6}, "temperature", 0.0),
        ({"temperature": 1e-3}, "temperature", np.float32(0.01)),
        ({"top_k": -1}, "top_k", 0),
        ({"logprobs": None}, "wants_logprobs", 0),
        ({"seed": -1}, "seed", [0xFFFFFFFF, 0xFFFFFFFF]),
        ({"seed": -(2**63)}, "seed", [0, 0x80000000]),
    ],
)
def test_values_at_the_edge_of_a_row(given, field, expected):
    inputs = StepInputs.empty(StepShape(1, 4), table_width=2)
    seed = given.pop("seed", 0)
    fill_row(inputs, 0, chunk(seed=seed, **given))
    np.testing.assert_array_equal(getattr(inputs, field)[0], expected)


def test_more_bans_than_fit_are_an_error():
    inputs = StepInputs.empty(StepShape(1, 4), table_width=2)
    fill_row(inputs, 0, chunk(banned_ids=tuple(range(MAX_BANNED))))
    with pytest.raises(ValueError, match=f"a bans {MAX_BANNED + 1} tokens, at most {MAX_BANNED}"):
        fill_row(inputs, 0, chunk(banned_ids=tuple(range(MAX_BANNED + 1))))


def test_a_row_is_read_with_as_many_logprobs_as_were_wanted():
    top = np.arange(16, dtype=np.int32).reshape(2, 2, 4)
    out = StepOutputs(
        count=np.array([2, 1]), drafted=np.array([1, 0]), token=np.array([[3, 4], [5, 6]]), brought=np.zeros((2, 0)),
        rank=np.array([[1, 2], [3, 4]]), logprob=np.float32([[-0.5, -1.5], [-2.5, -3.5]]),
        top_ids=top, top_logprobs=-top.astype(np.float32),
    )  # fmt: skip
    assert [read_row(out, row, chunk()) for row in (0, 1)] == [Sampled((3, 4), (), 1), Sampled((5,), (), 0)]
    for wanted in (0, 2):
        first, second = read_row(out, 0, chunk(logprobs=wanted)).logprobs
        assert (first.logprob, first.rank, first.top) == (-0.5, 1, ((0, -0.0), (1, -1.0))[:wanted])
        assert (second.logprob, second.rank, second.top) == (-1.5, 2, ((4, -4.0), (5, -5.0))[:wanted])
        (entry,) = read_row(out, 1, chunk(logprobs=wanted)).logprobs
        assert (entry.logprob, entry.rank, entry.top) == (-2.5, 3, ((8, -8.0), (9, -9.0))[:wanted])


def test_only_chunks_that_sample_give_tokens(runner):
    litter(runner)
    ids = tuple(tokens_of(20))
    chunks = [
        Chunk("part", ids[:16], 0, (0, 1), False, greedy(), next_token=ids[16]),
        Chunk("whole", ids, 0, (2, 3, 4), True, greedy(), slot=1),
    ]
    first = runner.finish(runner.start(Plan(tuple(chunks)))).sampled
    rest = runner.finish(runner.start(Plan((Chunk("part", ids[16:], 16, (0, 1, 5), True, greedy()),)))).sampled
    assert set(first) == {"whole"} and first["whole"] == rest["part"]
