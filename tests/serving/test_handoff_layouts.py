"""Conversations through a prefill and a decode engine of different layouts, beside one engine on one device.

Everything is float32, and what a request gets does not depend on who else is in a step, on chunks and blocks, or on who
computed a row: noise depends on seed and position. So tokens and counts of accepted drafts are compared exactly. For
drafts it takes one thing more. The MTP layer's row of a position depends on the token after it, and a row in a prefix
cache may have been computed before another token. Here none is: each prompt goes on from the whole turn before.
"""

import dataclasses
import functools
from collections import Counter

import drafting_model
import numpy as np
import pytest
from layouts import on_devices
from small_model import TOKENIZER

from glmjax.engines import Peers, build_engine
from glmjax.options import engine_options
from glmjax.serving.disaggregated import DisaggregatedEngine
from glmjax.sharding.layout import Layout
from glmjax.types import SamplingParams

pytestmark = pytest.mark.slow

BLOCK = 4
# As many heads and experts as there are devices. The drafts are often right. Sizes and options are those of
# test_handoff_processes: whichever comes second finds most of its programs in the cache.
CONFIG = dataclasses.replace(
    drafting_model.CONFIG, vocab_size=TOKENIZER.vocab_size, num_attention_heads=8, n_routed_experts=8
)
# Prefill, decode, drafts of a step, and requests at a time on each rank that decodes.
CASES = (
    ("pcp=8,dcp=8,ep=8", "dp=8,ep=8", 3, 1),
    ("pcp=8,dcp=8,ep=8", "pcp=8,dcp=2,ep=8", 3, 1),
    # Blocks stay whole, and change places.
    (f"tp=8,dcp=8,ep=8,interleave={BLOCK}", f"tp=2,dcp=2,interleave={BLOCK}", 0, 4),
)
# Of the first prompts: more requests than ranks, around a block of one rank and of eight.
LENGTHS = (1, 2, 5, 31, 32, 33, 34, 46, 64, 50)
OUTPUT, NEW, TURNS = 9, 5, 4  # tokens of an answer, tokens that are said to it, turns
# Turns before which a prefix cache is emptied: in the second turn both sides know the first, in the third only the
# decode engine knows what was before, in the last only the prefill engine does.
PREFILL_FORGETS, DECODE_FORGETS = (0, 2), (0, 3)
HUB: dict = {}


@functools.cache
def params():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting_model, "CONFIG", CONFIG)
        return drafting_model.params.__wrapped__()


@functools.cache
def make_engine(layout, num_drafts, name=None, rows=1):
    options = engine_options(
        dtype="float32",
        layout=layout,
        num_speculative_tokens=num_drafts,
        max_model_len=128,
        max_num_seqs=rows,
        max_num_batched_tokens=16,
        block_size=BLOCK,
        num_device_blocks=200,  # enough for all conversations
    )
    peers = name and Peers(engine_id=f"{name} {num_drafts} {layout}", connector="local", checkpoint="", hub=HUB)
    return build_engine(CONFIG, on_devices(options.layout, params()), None, options, (), peers=peers)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of every conversation.

    Attributes:
      prompts, outputs, cached: of each; tokens, tokens, and how many the engine that answers had in its cache.
      counts: what the engine's counters grew by.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    cached: list[int]
    counts: Counter


def converse(engine, forgetful=()):
    """Turns of all conversations, greedy and sampled ones; ``forgetful``: engines and what turns they forget before."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    how = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=OUTPUT, ignore_eos=True)
        for i in range(len(prompts))
    ]
    turns = []
    for turn in range(TURNS):
        for part, before in forgetful:
            if turn in before:
                part.reset_prefix_cache()
        counts, handles = Counter(engine.stats()), []
        # The last one runs alone, so that it comes to the same data-parallel rank in every turn.
        for some in (slice(0, -1), slice(-1, None)):
            handles += [engine.submit(prompt, one) for prompt, one in zip(prompts[some], how[some], strict=True)]
            while engine.has_work:
                engine.step()
                for part, _ in forgetful:
                    part.scheduler.check()
        grown = Counter(engine.stats())
        grown.subtract(counts)
        results = [handle.result(timeout=0) for handle in handles]
        outputs = [list(result.outputs[0].token_ids) for result in results]
        turns.append(Turn(prompts, outputs, [result.num_cached_tokens for result in results], grown))
        said = rng.integers(1, CONFIG.vocab_size, (len(prompts), NEW)).tolist()
        prompts = [[*prompt, *output, *new] for prompt, output, new in zip(prompts, outputs, said, strict=True)]
    return turns


@functools.cache
def of_one_engine(num_drafts):
    return converse(make_engine("dp=1", num_drafts))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} to {case[1]}, {case[2]} drafts")
def case(request):
    """Layouts of prefill and decode, drafts, the pair's turns and those of one engine."""
    first, second, num_drafts, rows = request.param
    prefill = make_engine(first, num_drafts, "prefill")
    decode = make_engine(second, num_drafts, "decode", rows)
    forgetful = (prefill, PREFILL_FORGETS), (decode, DECODE_FORGETS)
    turns = converse(DisaggregatedEngine(prefill, decode), forgetful)
    return Layout.parse(first), Layout.parse(second), num_drafts, turns, of_one_engine(num_drafts)


def test_tokens_are_those_of_one_engine(case):
    *_, turns, expected = case
    assert [turn.outputs for turn in turns] == [turn.outputs for turn in expected]


def test_bytes_fetched_are_missing_tokens_times_bytes_of_a_token(case):
    *_, num_drafts, turns, _ = case
    layers, indexers = CONFIG.num_hidden_layers + (num_drafts > 0), CONFIG.num_full_indexers + (num_drafts > 0)
    of_a_token = 4 * (layers * (CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim) + indexers * CONFIG.index_head_dim)
    for turn in turns:
        # The last token of a prompt is computed where it is decoded.
        missing = [len(prompt) - 1 - cached for prompt, cached in zip(turn.prompts, turn.cached, strict=True)]
        assert turn.counts["kv_transfer_bytes_fetched"] == sum(missing) * of_a_token
        assert turn.counts["kv_transfer_fetches_done"] == sum(one > 0 for one in missing)
        assert turn.counts["kv_transfer_recomputed"] == 0


def test_each_side_finds_what_its_own_prefix_cache_knows(case):
    prefill, decode, _, turns, _ = case

    def found(turn, news, layout):
        """Of each prompt: whole blocks of all but the news, and of all but the last token."""
        block = BLOCK * layout.dcp
        return [max(0, len(prompt) - news) // block * block for prompt in turn.prompts]

    for index, turn in enumerate(turns):
        # The prefill engine computed the prompt before, the decode engine its answer too, but for the last token.
        by_prefill, by_decode = found(turn, OUTPUT + NEW, prefill), found(turn, 1 + NEW, decode)
        if index in PREFILL_FORGETS:
            assert turn.counts["prefill_cached_tokens"] == 0
        else:
            assert turn.counts["prefill_cached_tokens"] == sum(by_prefill) > 0
        if index in DECODE_FORGETS:
            assert not any(turn.cached)
        else:
            # With data parallelism a request may come to a rank that does not know it. The last one does not.
            assert turn.cached[-1] == by_decode[-1] > 0
            assert decode.dp > 1 or turn.cached == by_decode


def test_as_many_drafts_are_accepted_as_by_one_engine(case):
    """The same counts, of steps that verified drafts and of accepted ones, so the same mean acceptance length."""
    *_, num_drafts, turns, expected = case

    def drafts(turn):
        return {name: count for name, count in turn.counts.items() if name.startswith(("num_draft", "num_accepted"))}

    assert [drafts(turn) for turn in turns] == [drafts(turn) for turn in expected]
    for turn in turns:
        accepted, verified = turn.counts["num_accepted_tokens"], turn.counts["num_draft_tokens"]
        assert 0 < accepted < verified if num_drafts else not drafts(turn)
