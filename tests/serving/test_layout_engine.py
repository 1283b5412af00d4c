"""The engine under every kind of layout, on eight devices: one device's tokens, alone or mixed, hit or miss."""

import itertools

import jax
import numpy as np
import pytest
from reference import REFERENCE

from glmjax.api import LLM
from glmjax.errors import ConfigError
from glmjax.sharding.layout import Layout
from glmjax.types import SamplingParams

pytestmark = pytest.mark.slow  # real programs

FOLDER = REFERENCE / "tiny_glm"
BLOCK, MAX_LEN, BUDGET, TOP_K = 4, 192, 16, 8
OPTIONS = {
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": BUDGET,
    "block_size": BLOCK,
}
HOW = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
LAYOUTS = (
    ("tp=4", {}),
    ("tp=4,dp=2,ep=8", {}),
    ("dp=8,ep=8", {}),
    ("pcp=8,ep=8", {}),
    ("dp=2,pcp=4,ep=8", {}),
    ("pcp=8,dcp=8,ep=8", {"dcp_prefill": "kv_gather"}),
    ("pcp=8,dcp=8,ep=8,interleave=4", {"dcp_prefill": "query_gather"}),
    ("pcp=8,dcp=2,ep=8,interleave=2", {"dcp_prefill": "kv_gather"}),
    ("pcp=4,tp=2,dcp=8,ep=8", {"dcp_comm_backend": "a2a"}),
    ("pcp=2,tp=4,dcp=4", {"dcp_prefill": "query_gather"}),
    ("tp=4,dcp=4,interleave=4", {"dcp_prefill": "kv_gather"}),
)
TEXTS = np.random.default_rng(5).integers(3, 300, (2, MAX_LEN)).tolist()


def edges():
    """Lengths around one, the ranks, the zig-zag's parts, blocks of one and of all ranks, the budget and the top-k."""
    middles = (TOP_K, BUDGET, BLOCK, BLOCK * 8, 6 * BUDGET)  # 8 ranks
    return sorted({1, 2, *(middle + d for middle in middles for d in (-1, 0, 1))})


PROMPTS = [TEXTS[i % 2][:length] for i, length in enumerate(edges())]
# Half of one text and then the other: blocks of the first half may be found in the cache.
PROMPTS += [TEXTS[0][:half] + TEXTS[1][half : half + 20] for half in (BLOCK, 31, 32, 64, 100)]


def answers(llm, prompts):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], HOW, use_tqdm=False)
    return [tuple(out.outputs[0].token_ids) for out in outputs], [out.num_cached_tokens for out in outputs]


def samples(llm):
    """Two samples of one prompt, cold or from the prefix cache."""
    how = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True, n=2)
    (out,) = llm.generate([{"prompt_token_ids": PROMPTS[9]}], how, use_tqdm=False)
    return [tuple(completion.token_ids) for completion in out.outputs]


@pytest.fixture(scope="module")
def one_device():
    with LLM(FOLDER, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(one_device):
    return answers(one_device, PROMPTS)[0]


@pytest.fixture(scope="module")
def expected_samples(one_device):
    return samples(one_device)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda p: "-".join([p[0], *p[1].values()]))
def llm(request):
    text, more = request.param
    with LLM(FOLDER, layout=text, **OPTIONS, **more) as llm:
        yield llm
    jax.clear_caches()


def test_tokens_equal_one_device_cold_then_from_the_prefix_cache(llm, expected):
    llm.reset_prefix_cache()
    assert answers(llm, PROMPTS)[0] == expected
    tokens, hits = answers(llm, PROMPTS)
    unit = BLOCK * Layout.parse(str(llm.layout)).dcp
    assert tokens == expected
    # With data parallelism a prompt may come back to another rank, whose cache has not seen it.
    assert llm.layout.dp > 1 or hits == [(len(ids) - 1) // unit * unit for ids in PROMPTS]
    stats = llm.stats()
    assert stats["free_blocks"] == stats["total_blocks"] and not stats["num_running"] and not stats["num_waiting"]
    llm.engine.scheduler.check()


def test_one_request_alone_equals_one_device(llm, expected):
    for i in (0, 3, len(PROMPTS) // 2, -1):
        llm.reset_prefix_cache()
        assert answers(llm, [PROMPTS[i]])[0] == [expected[i]]


def test_prompt_of_all_but_one_position(llm, expected):
    del expected
    ids = (TEXTS[0] + TEXTS[1])[: MAX_LEN - 1]
    (out,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    with pytest.raises(Exception, match=str(MAX_LEN)):
        llm.generate([{"prompt_token_ids": [*ids, 5]}], SamplingParams(temperature=0, max_tokens=1))
    assert out.outputs[0].finish_reason == "length"


def test_nothing_compiles_while_serving(llm, expected):
    """One program a bucket, whatever the layout."""
    del expected
    before = llm.stats()["compilations"]
    answers(llm, PROMPTS[:4])
    assert llm.stats()["compilations"] == before == 3


def test_sampled_tokens_equal_one_device(llm, expected_samples):
    """Noise depends on seed and position, not on where a request runs."""
    assert [samples(llm), samples(llm)] == [expected_samples] * 2
    assert len(set(expected_samples)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "pcp=8,dcp=3"}, "dcp=3 must divide"),
        ({"layout": "tp=8"}, "tp=8 cannot split num_attention_heads=4"),
        ({"layout": "pcp=8,dcp=8,interleave=3"}, "block_size=4 must be a multiple of interleave=3"),
        ({"layout": "pcp=16"}, "needs 16 devices, this process sees 8"),
        ({"layout": 8}, "layout must be a glmjax.Layout"),
        ({"dcp_prefill": "both"}, "dcp_prefill must be one of"),
    ],
)
def test_impossible_layouts_are_refused_with_what_would_do(options, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        LLM(FOLDER, **(OPTIONS | options))


def test_edges_cover_the_matrix():
    assert len(edges()) == len(set(edges())) and max(edges()) + HOW.max_tokens < MAX_LEN
    assert all(a < b for a, b in itertools.pairwise(edges()))
