"""Conversations through two engines in processes of their own, over NIXL, beside one engine on one device.

First by the command line, with the layouts that it is documented with. Then with the decode engine in this process, so
that either side can be made to forget what it knows; the offers travel as a proxy would hand them on. Tokens and counts
of accepted drafts are compared exactly, for the reasons that ``test_handoff_layouts`` gives.
"""

import contextlib
import dataclasses
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import drafting_model
import httpx
import numpy as np
import pytest
from child_environment import without_devices
from small_model import TOKENIZER

import glmjax
from glmjax.checkpoint import save_pretrained
from glmjax.processes import EngineProcess
from glmjax.serving.transfer.params import from_params
from glmjax.sharding.layout import Layout
from glmjax.types import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl is not installed"),
]

BLOCK = 4
CONFIG = dataclasses.replace(
    drafting_model.CONFIG, vocab_size=TOKENIZER.vocab_size, num_attention_heads=8, n_routed_experts=8
)
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 1,  # on each rank: few programs
    "max_num_batched_tokens": 16,
    "block_size": BLOCK,
    "num_device_blocks": 200,  # enough for all conversations
}
LENGTHS = (1, 5, 33, 46, 64)  # of the first prompts
OUTPUT, NEW, TURNS = 9, 5, 4  # tokens of an answer, tokens that are said to it, turns
# Turns before which a side forgets: in the second both know the first, in the third only the decode engine knows what
# was before, in the last only the prefill engine does.
PREFILL_FORGETS, DECODE_FORGETS = (0, 2), (0, 3)
STAGE_FREE = "glmjax:kv_transfer_stage_free"
DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of every conversation.

    Attributes:
      prompts, outputs, cached: of each: tokens, tokens, and how many the engine that answers had in its cache.
      counts: what its counters grew by.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    cached: list[int]
    counts: Counter


def converse(turn_of, counts, turns=TURNS):
    """All conversations, greedy and sampled ones.

    Args:
      turn_of: from the turn's number, prompts and sampling parameters to outputs and cached tokens.
      counts: counters of the engine that answers.
    """
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    how = [
        {"temperature": 0.7 * (i % 2), "seed": i, "max_tokens": OUTPUT, "ignore_eos": True} for i in range(len(prompts))
    ]
    found, before = [], Counter(counts())
    for turn in range(turns):
        outputs, cached = zip(*turn_of(turn, prompts, how), strict=True)
        after = Counter(counts())
        grown = Counter(after)
        grown.subtract(before)
        before = after
        found.append(Turn(prompts, list(outputs), list(cached), grown))
        said = rng.integers(1, CONFIG.vocab_size, (len(prompts), NEW)).tolist()
        prompts = [[*prompt, *output, *new] for prompt, output, new in zip(prompts, outputs, said, strict=True)]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting_model, "CONFIG", CONFIG)
        save_pretrained(CONFIG, drafting_model.params.__wrapped__(), folder)
    TOKENIZER.raw.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def expected(model):
    """The turns with one engine. Drafts change none of its tokens."""
    with glmjax.LLM(model, **OPTIONS, num_speculative_tokens=3) as llm:

        def turn_of(turn, prompts, how):
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            results = llm.generate(asked, [SamplingParams(**one) for one in how], use_tqdm=False)
            return [(list(result.outputs[0].token_ids), result.num_cached_tokens) for result in results]

        return converse(turn_of, llm.stats)


def post(url, **body):
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached_tokens(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def metrics(url):
    """Of one engine, by name."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return {name: float(value) for name, value in re.findall(r"^([\w:]+)\{.*\} (\S+)$", "\n".join(lines), re.MULTILINE)}


def counters(url):
    """The metrics that are compared, under the names that ``stats`` has for them."""
    found = metrics(url)
    names = {f"vllm:spec_decode_{name}_total": name for name in DRAFTS}
    names |= {name: name.removeprefix("glmjax:") for name in found if name.startswith("glmjax:kv_transfer")}
    return {name: int(found.get(metric, 0)) for metric, name in names.items()}


def all_returned(url, stage):
    """The engine has all blocks of its stage back, once it has been told of the last fetch."""
    deadline = time.monotonic() + 10
    while (found := metrics(url))[STAGE_FREE] < stage:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found["glmjax:kv_transfer_leases_done"] == found["glmjax:kv_transfer_leases_offered"] > 0


def of_a_token(drafts):
    """Bytes of a token's rows."""
    layers, indexers = CONFIG.num_hidden_layers + (drafts > 0), CONFIG.num_full_indexers + (drafts > 0)
    return 4 * (layers * (CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim) + indexers * CONFIG.index_head_dim)


def assert_moved_is_what_was_missing(turn, drafts):
    """The last token of a prompt is computed where it is decoded."""
    missing = [len(prompt) - 1 - cached for prompt, cached in zip(turn.prompts, turn.cached, strict=True)]
    assert turn.counts["kv_transfer_bytes_fetched"] == sum(missing) * of_a_token(drafts)
    assert turn.counts["kv_transfer_fetches_done"] == sum(one > 0 for one in missing)
    assert turn.counts["kv_transfer_recomputed"] == turn.counts["kv_transfer_fetches_failed"] == 0


def drafts_of(turns):
    return [{name: turn.counts[name] for name in DRAFTS} for turn in turns]


@contextlib.contextmanager
def command_line(model, *arguments):
    """``glmjax serve``, whose engines have as many devices as their layouts want: URLs of the front and the engines."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "glmjax", "serve", str(model), "--port=0", *options, *arguments]
    process = subprocess.Popen(command, env=without_devices(), stdout=subprocess.PIPE, text=True)
    try:
        said = ""
        while "Serving" not in said:
            line = process.stdout.readline()
            assert line, "it did not start"
            said += line
        engines = re.search(r"Prefill engine on (\S+), decode engine on (\S+)", said).groups()
        yield re.search(r"Serving .* on (\S+)", said)[1], *engines
    finally:
        process.terminate()
        process.wait(60)


def test_the_command_lines_layouts_give_the_tokens_of_one_engine(model, expected):
    layouts = ("--prefill=pcp=8,dcp=8,ep=8", "--decode=dp=8,ep=8")
    more = ("--num-speculative-tokens=3", "--min-prefill-tokens=1")
    with command_line(model, *layouts, *more) as (front, prefill, _), ThreadPoolExecutor() as pool:
        stage = metrics(prefill)[STAGE_FREE]

        def ask(prompt, how):
            answer = post(front, prompt=prompt, return_token_ids=True, **how)
            return answer["choices"][0]["token_ids"], cached_tokens(answer)

        turns = converse(lambda turn, prompts, how: list(pool.map(ask, prompts, how)), lambda: counters(front), 2)
        assert [turn.outputs for turn in turns] == [turn.outputs for turn in expected[:2]]
        assert drafts_of(turns) == drafts_of(expected[:2])
        for turn in turns:
            assert_moved_is_what_was_missing(turn, drafts=3)
        all_returned(prefill, stage)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Layouts, drafts of a step, and further options of the decode engine."""

    prefill: str
    decode: str
    drafts: int
    options: dict = dataclasses.field(default_factory=dict)


PAIRS = {
    "dcp 8 to 2, drafts": Pair("pcp=8,dcp=8,ep=8", "tp=2,dcp=2", 3),
    "dcp 8 to 2, blocks stay whole": Pair(f"tp=8,dcp=8,ep=8,interleave={BLOCK}", f"tp=2,dcp=2,interleave={BLOCK}", 0),
    # Fewer pages than most of the requests have.
    "1 to 1, HiSparse, drafts": Pair("dp=1", "dp=1", 3, {"hisparse_host_gib": 0.002, "num_device_blocks": 24}),
}


@pytest.fixture(scope="module", params=PAIRS.values(), ids=PAIRS)
def case(request, model):
    """A pair, its turns, and of each turn the tokens that the prefill engine had in its cache."""
    pair = request.param
    options = OPTIONS | {"num_speculative_tokens": pair.drafts, "connector": "nixl"}
    job = {"model": str(model), "options": options | {"layout": pair.prefill, "role": "prefill"}}
    engine, known = EngineProcess(job | {"http": {}}, {}), []
    try:
        with glmjax.LLM(model, **options | {"layout": pair.decode, "role": "decode"} | pair.options) as llm:
            llm.engine.start()
            engine.ready()
            stage, salt = metrics(engine.url)[STAGE_FREE], ""

            def turn_of(turn, prompts, how):
                nonlocal salt
                if turn in PREFILL_FORGETS:
                    salt = f"from turn {turn} on"  # so it takes nothing that it has for the conversation's own
                if turn in DECODE_FORGETS:
                    llm.engine.reset_prefix_cache()
                handles = []
                known.append([])
                for prompt, one in zip(prompts, how, strict=True):
                    wanted = {"do_remote_decode": True, "cached_tokens": llm.engine.find_rank(prompt)[1]}
                    answer = post(engine.url, prompt=prompt, max_tokens=1, cache_salt=salt, kv_transfer_params=wanted)
                    known[-1].append(cached_tokens(answer))
                    offer = from_params(answer["kv_transfer_params"])
                    handles.append(llm.engine.submit(prompt, SamplingParams(**one), offer=offer))
                results = [handle.result(timeout=120) for handle in handles]
                return [(list(result.outputs[0].token_ids), result.num_cached_tokens) for result in results]

            turns = converse(turn_of, llm.stats)
            all_returned(engine.url, stage)
            yield pair, turns, known
    finally:
        engine.close()


def test_tokens_are_those_of_one_engine(case, expected):
    _, turns, _ = case
    assert [turn.outputs for turn in turns] == [turn.outputs for turn in expected]


def test_as_many_drafts_are_accepted_as_by_one_engine(case, expected):
    pair, turns, _ = case
    if pair.drafts:
        assert drafts_of(turns) == drafts_of(expected)
        assert all(0 < turn.counts["num_accepted_tokens"] < turn.counts["num_draft_tokens"] for turn in turns)
    else:
        assert not any(turn.counts["num_drafts"] for turn in turns)


def test_bytes_fetched_are_missing_tokens_times_bytes_of_a_token(case):
    pair, turns, _ = case
    for turn in turns:
        assert_moved_is_what_was_missing(turn, pair.drafts)


def test_each_side_finds_what_its_own_prefix_cache_knows(case):
    pair, turns, known = case

    def found(turn, news, layout):
        """Of each prompt: whole blocks of all but the news."""
        block = BLOCK * Layout.parse(layout).dcp
        return [max(0, len(prompt) - news) // block * block for prompt in turn.prompts]

    for index, (turn, by_prefill) in enumerate(zip(turns, known, strict=True)):
        # The prefill engine computed the prompt before, the decode engine its answer too, but for the last token.
        nothing = [0] * len(turn.prompts)
        assert by_prefill == (nothing if index in PREFILL_FORGETS else found(turn, OUTPUT + NEW, pair.prefill))
        assert turn.cached == (nothing if index in DECODE_FORGETS else found(turn, 1 + NEW, pair.decode))


def test_hisparse_brings_rows_from_the_host(case):
    pair, turns, _ = case
    assert any(turn.counts["hisparse_cache_misses"] for turn in turns) == ("hisparse_host_gib" in pair.options)
