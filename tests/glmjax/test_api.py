"""``LLM``: every form of prompt and parameter, what comes out, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from small_model import BLOCK, CONFIG, ENDS, MAX_LEN, NUM_BLOCKS, OPTIONS, TOKENIZER

import glmjax
from glmjax import SamplingParams
from glmjax.api import LLM, find_model
from glmjax.cache import abstract_cache
from glmjax.errors import CheckpointError, ConfigError, RequestError
from glmjax.params import num_bytes
from glmjax.serving.chat import ChatTemplate
from glmjax.serving.engine import EngineError
from glmjax.step import abstract_state

# Of the programs that OPTIONS compiles, the two that one short request needs.
FEW = {**OPTIONS, "max_num_seqs": 1, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model.write_checkpoint(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def shared(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """With an empty prefix cache before, and no trace of a request after."""
    shared.reset_prefix_cache()
    yield shared
    shared.engine.scheduler.check()
    stats = shared.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["free_blocks"]) == (0, 0, NUM_BLOCKS)


def greedy(max_tokens=8, **more):
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def sampled(seed, max_tokens=8, **more):
    return SamplingParams(**{"seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **more})


def random_ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def only(outputs):
    """The one completion of one prompt."""
    ((completion,),) = (output.outputs for output in outputs)
    return completion


# Prompts.


@pytest.mark.parametrize(
    "prompts",
    [
        "What",
        {"prompt": "What"},
        {"prompt_token_ids": list(b"What")},
        {"prompt_token_ids": list(b"What"), "prompt": "What"},
        list(b"What"),
        tuple(b"What"),
        np.frombuffer(b"What", np.uint8),
        ["What"],
        [{"prompt": "What"}],
        [list(b"What")],
        np.frombuffer(b"What", np.uint8)[None],
    ],
    ids=str,
)
def test_one_prompt_in_any_form(llm, prompts):
    (expected,) = llm.generate([{"prompt_token_ids": list(b"What")}], greedy())
    (output,) = llm.generate(prompts, greedy())
    assert output.prompt_token_ids == list(b"What")
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.finished and output.outputs[0].finish_reason == "length"


def test_many_prompts_of_mixed_forms_come_back_in_order(llm):
    texts = [f"number {i}" for i in range(9)]
    prompts = [[t, {"prompt": t}, TOKENIZER.encode(t)][i % 3] for i, t in enumerate(texts)]
    outputs = llm.generate(prompts, greedy())
    assert [bytes(o.prompt_token_ids).decode() for o in outputs] == texts
    assert [o.prompt for o in outputs] == [t if i % 3 < 2 else None for i, t in enumerate(texts)]
    alone = [only(llm.generate(t, greedy())).token_ids for t in texts]
    assert [o.outputs[0].token_ids for o in outputs] == alone


def test_no_prompt_gives_no_output(llm):
    assert llm.generate([], greedy()) == []


def test_text_is_what_the_tokens_say(llm):
    completion = only(llm.generate("abc", greedy(30)))
    assert len(completion.token_ids) == 30
    assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("prompts", "param", "match"),
    [
        ("", "prompt", "the prompt is empty"),
        ([[]], "prompt", "the prompt is empty"),
        (["fine", ""], "prompt", "the prompt is empty"),
        ({"text": "x"}, "prompt", '"prompt" or "prompt_token_ids"'),
        ({"prompt": "x", "multi_modal_data": {"image": np.zeros(3)}}, "multi_modal_data", "text and token ids only"),
        ({"prompt_embeds": np.zeros((2, 3))}, "prompt_embeds", "text and token ids only"),
        (5, "prompt", "text, token ids or a mapping, got 5"),
        ([1.5], "prompt", "a list of token ids"),
        ([CONFIG.vocab_size], "prompt", f"{CONFIG.vocab_size} is outside the vocabulary"),
        ([-1], "prompt", "-1 is outside the vocabulary"),
        ("\ud800", None, "lone surrogate"),
        ([1] * MAX_LEN, "prompt", f"{MAX_LEN} tokens, but the context is {MAX_LEN}"),
        ([1] * (MAX_LEN - 7), "max_tokens", f"{MAX_LEN + 1} were asked for: {MAX_LEN - 7} in the prompt"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(llm, prompts, param, match):
    before = llm.stats()["prompt_tokens"]
    with pytest.raises(RequestError, match=match) as caught:
        llm.generate(prompts, greedy())
    assert caught.value.param == param
    assert llm.stats()["prompt_tokens"] == before


def test_refusal_of_one_prompt_serves_none_and_harms_no_later_call(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["one", "two", [], "three"], greedy())
    assert llm.stats()["num_running"] == llm.stats()["num_waiting"] == 0
    assert len(only(llm.generate("one", greedy())).token_ids) == 8


def test_an_interrupt_leaves_no_request_behind(llm, monkeypatch):
    step, steps = llm.engine.step, []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], greedy())
    assert llm.stats()["num_running"] == 0 and not llm.engine.has_work
    assert llm.stats()["free_blocks"] == NUM_BLOCKS


# Conversations.


def test_chat_renders_the_template_and_generates(llm):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = ChatTemplate().render(messages, add_generation_prompt=True)
    (output,) = llm.chat(messages, greedy())
    assert output.prompt == prompt
    assert output.outputs[0].token_ids == only(llm.generate(prompt, greedy())).token_ids


def test_chat_answers_a_list_of_conversations(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
    together = [o.outputs[0].token_ids for o in llm.chat(conversations, greedy())]
    assert together == [only(llm.chat(c, greedy())).token_ids for c in conversations]


def test_chat_passes_tools_and_template_arguments(llm, monkeypatch):
    monkeypatch.setattr(llm, "generate", lambda prompts, *how, **other: prompts)
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    (prompt,) = llm.chat(messages, tools=tools, chat_template_kwargs={"reasoning_effort": "low"})
    assert "look_up" in prompt and "Reasoning Effort: Low" in prompt and prompt.endswith("<|assistant|><think>")
    (prompt,) = llm.chat(messages, add_generation_prompt=False)
    assert prompt.endswith("Hi")


def test_chat_without_messages_is_refused(llm):
    with pytest.raises(RequestError, match="messages is empty") as caught:
        llm.chat([], greedy())
    assert caught.value.param == "messages"


# Sampling parameters.


def test_without_parameters_the_checkpoints_own_hold(llm):
    assert llm.sampling_defaults == {"temperature": 0.0}
    completion = only(llm.generate("abc"))
    assert completion.token_ids == only(llm.generate("abc", SamplingParams(temperature=0))).token_ids


def test_parameters_one_for_all_or_one_per_prompt(llm):
    hows = [greedy(2), sampled(1, 5)]
    outputs = llm.generate(["a", "b"], hows)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    for text, how, output in zip("ab", hows, outputs, strict=True):
        assert only(llm.generate(text, how)).token_ids == output.outputs[0].token_ids
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts") as caught:
        llm.generate(["a", "b", "c"], hows)
    assert caught.value.param == "sampling_params"


@pytest.mark.parametrize("how", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 1.7}], ids=str)
def test_a_seed_gives_the_same_in_any_company(llm, how):
    mine = sampled(11, 12, **how)
    alone = only(llm.generate("mine", mine)).token_ids
    others = [random_ids(n, n) for n in (1, 17, 30)]
    for place in (0, 3):
        prompts, hows = [*others], [greedy(20), sampled(11, 9), sampled(12, 15, top_k=3)]
        prompts.insert(place, "mine")
        hows.insert(place, mine)
        assert llm.generate(prompts, hows)[place].outputs[0].token_ids == alone
    assert only(llm.generate("mine", sampled(12, 12, **how))).token_ids != alone


def test_n_completions_are_those_of_following_seeds(llm):
    (output,) = llm.generate("abc", sampled(5, n=3))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert [c.token_ids for c in output.outputs] == [
        only(llm.generate("abc", sampled(5 + i))).token_ids for i in range(3)
    ]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3


def test_stop_string_cuts_the_text(llm):
    whole = only(llm.generate("abc", greedy(30)))
    stop = whole.text[9:12]
    cut = whole.text.index(stop)
    completion = only(llm.generate("abc", greedy(30, stop=["never seen", stop])))
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (whole.text[:cut], "stop", stop)
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    kept = only(llm.generate("abc", greedy(30, stop=stop, include_stop_str_in_output=True)))
    assert kept.text == whole.text[: cut + 3]


def test_stop_token_ends_the_output(llm):
    whole = only(llm.generate("abc", greedy(30))).token_ids
    stop = whole[9]
    completion = only(llm.generate("abc", greedy(30, stop_token_ids=[stop])))
    assert completion.token_ids == whole[: whole.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


@pytest.fixture(scope="module")
def ending(shared):
    """A seed with which an end token comes early, and its tokens when that is ignored."""
    for seed in range(200):
        ids = only(shared.generate("abc", sampled(seed, 20))).token_ids
        if any(t in ENDS for t in ids[2:10]) and not any(t in ENDS for t in ids[:2]):
            return seed, ids
    raise AssertionError("no seed leads to an end token")


def test_an_end_token_ends_the_output_unless_ignored(llm, ending):
    seed, ids = ending
    first = min(i for i, t in enumerate(ids) if t in ENDS)
    completion = only(llm.generate("abc", sampled(seed, 20, ignore_eos=False)))
    assert completion.token_ids == ids[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == TOKENIZER.decode(ids[:first])


def test_min_tokens_bans_the_end_tokens(llm, ending):
    seed, ids = ending
    first = min(i for i, t in enumerate(ids) if t in ENDS)
    completion = only(llm.generate("abc", sampled(seed, 20, ignore_eos=False, min_tokens=first + 5)))
    assert len(completion.token_ids) >= first + 5
    assert not set(completion.token_ids[: first + 5]) & set(ENDS)
    assert completion.token_ids[:first] == ids[:first]


@pytest.mark.parametrize("num_prompt", [1, 100, MAX_LEN - 1])
def test_without_max_tokens_the_context_is_the_limit(llm, num_prompt):
    completion = only(llm.generate(random_ids(num_prompt), greedy(None)))
    assert (len(completion.token_ids), completion.finish_reason) == (MAX_LEN - num_prompt, "length")


def test_without_detokenization_there_is_no_text(llm):
    completion = only(llm.generate("abc", greedy(detokenize=False)))
    assert completion.text == "" and len(completion.token_ids) == 8


def test_logprobs_are_those_of_the_models_own_distribution(llm):
    prompt = random_ids(20)
    for how in (greedy(12), sampled(3, 12, temperature=1.5, top_k=2), greedy(12, min_tokens=12, ignore_eos=False)):
        how = SamplingParams(**{**vars(how), "logprobs": 20})
        completion = only(llm.generate(prompt, how))
        tokens = jnp.asarray([prompt + completion.token_ids])
        rows = jax.nn.log_softmax(_forward(small_model.params(), tokens, CONFIG)[0, 19:-1])
        assert len(completion.logprobs) == len(completion.token_ids) == 12
        for token, entry, row in zip(completion.token_ids, completion.logprobs, np.asarray(rows), strict=True):
            assert next(iter(entry)) == token
            assert entry[token].rank == 1 + np.sum(row > row[token])
            assert set(np.argsort(-row)[:20].tolist()) | {token} == set(entry)
            for other, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[other], abs=1e-4)
                assert logprob.decoded_token == TOKENIZER.decode([other])
        assert completion.cumulative_logprob == pytest.approx(
            sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
        )


_forward = jax.jit(glmjax.forward, static_argnums=2)


@pytest.mark.parametrize("wanted", [None, 0, 1, 5])
def test_as_many_logprobs_as_were_asked_for(llm, wanted):
    completion = only(llm.generate("abc", greedy(4, logprobs=wanted)))
    if wanted is None:
        assert completion.logprobs is None and completion.cumulative_logprob is None
    else:
        assert [len(entry) for entry in completion.logprobs] == [max(1, wanted)] * 4


# The engine behind.


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_repeated_prompt_comes_from_the_prefix_cache(llm, length):
    prompt = random_ids(length, seed=length)
    first, second = (llm.generate(prompt, greedy())[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    llm.reset_prefix_cache()
    assert llm.generate(prompt, greedy())[0].num_cached_tokens == 0


def test_preempted_requests_give_the_same(llm):
    prompts = [random_ids(25, seed) for seed in range(5)]
    hows = [greedy(30), sampled(1, 30), greedy(28), sampled(2, 29), greedy(30)]
    alone = [only(llm.generate(p, h)).token_ids for p, h in zip(prompts, hows, strict=True)]
    llm.reset_prefix_cache()
    before = llm.stats()["num_preemptions"]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, hows)]
    assert llm.stats()["num_preemptions"] > before
    assert together == alone


def test_nothing_is_compiled_after_the_start(llm):
    shapes = len(llm.engine.runner._programs.shapes)
    with small_model.counting_compilations() as compiled:
        llm.generate([random_ids(n, n) for n in (1, 2, 3, 15, 16, 17, 32, 33, 100)], greedy(9, logprobs=3))
        llm.generate(["a"] * 4, sampled(1, n=3, top_p=0.5, min_tokens=2, ignore_eos=False))
        llm.chat([{"role": "user", "content": "Hi"}], greedy(stop=["zz"]))
    assert compiled == []
    assert llm.stats()["compilations"] == shapes


def test_stats_count_tokens(llm):
    before = llm.stats()
    llm.generate(["abcd", "abcdefghijkl"], greedy(5))
    after = llm.stats()
    gained = {key: after[key] - before[key] for key in ("prompt_tokens", "generation_tokens", "finished_length")}
    assert gained == {"prompt_tokens": 16, "generation_tokens": 10, "finished_length": 2}
    assert after["total_blocks"] == NUM_BLOCKS


def test_close_frees_the_pool_and_ends_the_use(folder):
    before = sum(x.nbytes for x in jax.live_arrays())
    with LLM(folder, **FEW) as llm:
        weights = num_bytes(small_model.params())
        pool = num_bytes(abstract_cache(CONFIG, NUM_BLOCKS, BLOCK, "float32"))
        state = num_bytes(abstract_state(FEW["max_num_seqs"], 0))
        assert sum(x.nbytes for x in jax.live_arrays()) - before == weights + pool + state
    assert sum(x.nbytes for x in jax.live_arrays()) - before == weights
    with pytest.raises(EngineError, match="the engine is closed"):
        llm.generate("abc", greedy())
    llm.close()


# Making one.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_seqs": 3}, "unknown option 'max_seqs'.*max_num_seqs"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens=3 needs an MTP layer, and .* has none.*leave it at 0"),
        ({"hisparse_host_gib": 1e-6}, "a host pool of 1e-06 GiB has 0 blocks of 64 tokens.*raise hisparse_host_gib"),
        ({"dtype": "float16"}, "dtype must be one of 'bfloat16', 'float32', got 'float16'"),
        ({"max_model_len": 513}, "max_model_len=513 is more than the model's 512 positions"),
        (
            {**OPTIONS, "num_device_blocks": 15},
            r"holds 120 tokens \(15 blocks of 8\), less than max_model_len=128: raise num_device_blocks",
        ),
    ],
)
def test_options_that_cannot_work(folder, options, match):
    with pytest.raises(ConfigError, match=match):
        LLM(folder, **options)


def test_without_max_model_len_the_pool_is_the_limit(folder):
    with LLM(folder, **{**FEW, "max_model_len": None}) as llm:
        assert llm.engine.scheduler.config.max_model_len == MAX_LEN


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere not found"):
        LLM(tmp_path / "nowhere")


def test_an_unsupported_model_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type 'llama' is not supported; glmjax runs 'glm_moe_dsa'"):
        LLM(tmp_path)


def test_generation_config_adds_end_tokens_and_defaults(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 65, "top_k": 4, "do_sample": True}))
    with LLM(copy, **FEW) as llm:
        assert llm.engine.scheduler.eos_ids == {*ENDS, 65}
        assert llm.sampling_defaults == {"top_k": 4}
    (copy / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        LLM(copy, **FEW)


def test_a_checkpoint_without_tokenizer_takes_ids_only(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    with LLM(copy, **FEW) as llm:
        completion = only(llm.generate(list(b"abc"), greedy()))
        assert completion.text == "" and len(completion.token_ids) == 8
        for call in (lambda: llm.generate("abc"), lambda: llm.chat([{"role": "user", "content": "Hi"}])):
            with pytest.raises(RequestError, match=r"has no tokenizer\.json: give prompt_token_ids"):
                call()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, which the server needs"):
        glmjax.serve(copy, port=0, block=False, **FEW)


# Sizes and names.


def test_the_demo_is_built_once_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GLMJAX_CACHE", str(tmp_path / "cache"))
    folder = find_model("demo")
    assert folder == tmp_path / "cache" / "demo"
    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {f.name for f in written}
    assert find_model("demo") == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == written


def test_the_demo_goes_elsewhere_where_the_cache_folder_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLMJAX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = find_model("demo")
    assert (folder / "config.json").exists() and folder.parent.parent == tmp_path


@pytest.fixture
def unbuilt(folder, monkeypatch):
    """Makes an LLM without its engine; what jax is told of its cache is taken back in the end."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(glmjax.LLM, "_build", lambda *_: (CONFIG, None))
    yield lambda: glmjax.LLM(folder, **FEW)
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_are_kept_in_the_cache_folder(unbuilt, tmp_path, monkeypatch):
    monkeypatch.setenv("GLMJAX_CACHE", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    unbuilt()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "jax")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1


def test_a_cache_that_jax_was_given_stays(unbuilt, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    unbuilt()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7.0


def test_nothing_is_kept_where_the_cache_folder_cannot_be(unbuilt, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLMJAX_CACHE", str(tmp_path / "file" / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    unbuilt()
    assert jax.config.jax_compilation_cache_dir is None


def test_any_other_name_is_a_path():
    assert str(find_model("some/where/else")) == "some/where/else"


def test_a_name_of_the_hub_is_told_to_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"zai-org/GLM-5\.3 not found: .* hf download zai-org/GLM-5\.3 "):
        LLM("zai-org/GLM-5.3")
    (tmp_path / "zai-org" / "GLM-5.3").mkdir(parents=True)
    assert str(find_model("zai-org/GLM-5.3")) == "zai-org/GLM-5.3"


def test_serving_from_several_processes_is_refused(monkeypatch, folder):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="serve works in one process, and this is one of 2"):
        glmjax.serve(folder, port=0, block=False, **OPTIONS)


# KV in host memory, and two engines.

LONG = ["the quick brown fox " * 4, "jumps over the lazy dog " * 3, "again " * 12, "short"]


def texts(folder, **options):
    with LLM(folder, **{**FEW, **options}) as llm:
        outs = llm.generate(LONG, greedy(10))
        return [out.outputs[0].token_ids for out in outs], llm.stats()


def test_hisparse_changes_no_token(folder):
    expected, _ = texts(folder)
    got, stats = texts(folder, hisparse_host_gib=0.001, num_device_blocks=22, hisparse_buffer=CONFIG.index_topk)
    assert got == expected
    assert stats["total_blocks"] > 22 == stats["hisparse_total_pages"]


def test_two_engines_give_the_tokens_of_one(folder):
    expected, _ = texts(folder)
    got, stats = texts(folder, prefill="dp=1", decode="dp=1", min_prefill_tokens=16)
    assert got == expected
    assert stats["kv_transfer_fetches_done"] == 3 and stats["prefill_prompt_tokens"] > 0


def test_two_engines_need_devices_of_their_own(folder):
    with pytest.raises(ConfigError, match="need 1024 devices, this process sees"):
        LLM(folder, **FEW, prefill="dp=512", decode="dp=512")
