"""The engine on the reference checkpoint: the tokens that transformers chose, however the work is cut and mixed."""

import jax
import numpy as np
import pytest
from reference import REFERENCE

from glmjax.api import LLM
from glmjax.serving.clock import Clock
from glmjax.serving.engine import Engine
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.types import SamplingParams

FOLDER = REFERENCE / "tiny_glm"
BLOCK, NUM_BLOCKS, MAX_LEN = 16, 12, 96
NUM_PROMPT, NUM_NEW = 48, 16
HOW = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def reference():
    """Prompts, what transformers continued them with, and its logits with the checkpoint's epsilon throughout."""
    with np.load(FOLDER / "ref.npz") as file:
        ids, logits = file["greedy_ids"], file["logits_eps_cfg"]
    return ids[:, :NUM_PROMPT].tolist(), ids[:, NUM_PROMPT:].tolist(), logits


@pytest.fixture(scope="module")
def llm():
    with LLM(
        FOLDER,
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=2,
        max_num_batched_tokens=NUM_PROMPT,
        block_size=BLOCK,
        num_device_blocks=NUM_BLOCKS,
    ) as llm:
        yield llm


class Watching:
    """Passes plans on and notes how long their chunks are."""

    def __init__(self, runner):
        self._runner = runner
        self.sizes = set()

    def start(self, plan):
        self.sizes |= {chunk.num_tokens for chunk in plan.chunks}
        return self._runner.start(plan)

    def finish(self, started):
        return self._runner.finish(started)

    def stats(self):
        return self._runner.stats()


def make_engine(llm, **limits):
    """Another engine around the same programs and pool, of which the first one remembers nothing any more."""
    llm.reset_prefix_cache()
    config = {"max_num_seqs": 2, "max_num_batched_tokens": NUM_PROMPT, "num_blocks": NUM_BLOCKS, **limits}
    scheduler = Scheduler(SchedulerConfig(max_model_len=MAX_LEN, block_size=BLOCK, **config))
    return Engine(scheduler, llm.engine.runner, None, Clock(), vocab_size=llm.config.vocab_size)


def finish(engine):
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


def tokens_of(handle):
    return handle.result(timeout=0).outputs[0].token_ids


def test_greedy_tokens_equal_transformers(llm, reference):
    prompts, expected, _ = reference
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], HOW)
    assert [out.outputs[0].token_ids for out in outputs] == expected


def test_logprobs_equal_transformers(llm, reference):
    prompts, _, logits = reference
    how = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    for prompt, row in zip(prompts, logits, strict=True):
        (out,) = llm.generate(prompt, how)
        (entry,) = out.outputs[0].logprobs
        expected = np.asarray(jax.nn.log_softmax(row[-1]))
        assert list(entry) == np.argsort(-expected)[:20].tolist()
        assert [e.rank for e in entry.values()] == list(range(1, 21))
        np.testing.assert_allclose([e.logprob for e in entry.values()], -np.sort(-expected)[:20], atol=1e-4)


@pytest.mark.parametrize("field", ["max_prefill_chunk", "max_num_batched_tokens"])
@pytest.mark.parametrize("size", [1, 7, 16, NUM_PROMPT])
def test_prompts_cut_into_chunks_give_the_same(llm, reference, field, size):
    prompts, expected, _ = reference
    engine = make_engine(llm, enable_prefix_caching=False, **{field: size})
    engine.runner = watching = Watching(engine.runner)
    handles = [engine.submit(ids, HOW) for ids in prompts]
    finish(engine)
    assert max(watching.sizes) == size
    assert [tokens_of(h) for h in handles] == expected


@pytest.mark.parametrize("chunk", [1, 7, 16, None])
@pytest.mark.parametrize("first", [0, 1])
def test_a_prompt_read_while_another_request_decodes(llm, reference, chunk, first):
    prompts, expected, _ = reference
    engine = make_engine(llm, enable_prefix_caching=False, max_prefill_chunk=chunk)
    early = engine.submit(prompts[first], HOW)
    while len(early.output.outputs[0].token_ids) < 3:
        engine.step()
    late = engine.submit(prompts[1 - first], HOW)
    finish(engine)
    assert [tokens_of(early), tokens_of(late)] == [expected[first], expected[1 - first]]


def test_preemption_and_the_prefix_cache_change_nothing(llm, reference):
    prompts, expected, _ = reference
    engine = make_engine(llm, num_blocks=7)
    for _ in range(2):
        handles = [engine.submit(ids, HOW) for ids in prompts]
        finish(engine)
        assert [tokens_of(h) for h in handles] == expected
    stats = engine.stats()
    assert stats["num_preemptions"] > 0 and stats["cached_tokens"] > 0


def test_any_cut_of_prompt_and_output_continues_alike(llm, reference):
    """The first tokens of the output, given as prompt, lead to the rest."""
    prompts, expected, _ = reference
    engine = make_engine(llm)
    handles = {
        (row, given): engine.submit(prompts[row] + expected[row][:given], HOW)
        for row in (0, 1)
        for given in (1, 7, NUM_NEW - 1)
    }
    finish(engine)
    for (row, given), handle in handles.items():
        assert tokens_of(handle)[: NUM_NEW - given] == expected[row][given:]
