"""The HTTP API from the outside: OpenAI's own client against a server with a runner without a model.

The runner says what the prompt tells it to: ``say:TEXT;;`` is answered with TEXT and an end token.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time

import httpx
import openai
import pytest

from glmjax.errors import GlmjaxError
from glmjax.serving.clock import Clock
from glmjax.serving.engine import Engine
from glmjax.serving.fake import FakeRunner
from glmjax.serving.http import HttpOptions, build_app
from glmjax.serving.parsers import TAGS
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.server import Server
from glmjax.serving.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
TOKENIZER = Tokenizer.of_bytes(added=TAGS, special=SPECIAL)
END = TOKENIZER.special_tokens["<|user|>"]
TURN = "<|assistant|><think>"
MAX_LEN = 1024
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
)


def obey(prefix, vocab_size):
    text = TOKENIZER.decode(prefix)
    start, end = text.find("say:"), text.find(";;")
    if not 0 <= start < end:
        return 97 + len(prefix) % 26
    turn = text.find(TURN, end)
    prompt_end = end + 2 if turn < 0 else turn + len(TURN)
    reply = TOKENIZER.encode(text[start + 4 : end])
    said = len(prefix) - len(TOKENIZER.encode(text[:prompt_end]))
    return reply[said] if said < len(reply) else END


class SlowRunner(FakeRunner):
    delay = 0.0

    def start(self, plan):
        time.sleep(self.delay)
        return super().start(plan)


@contextlib.contextmanager
def serving(options=None, *, delay=0.0, fail_at=None, tokenizer=TOKENIZER, max_num_seqs=64, next_token=obey):
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=MAX_LEN,
        block_size=16,
        num_blocks=1024,
    )
    runner = SlowRunner(16, tokenizer.vocab_size, next_token=next_token, fail_at=fail_at)
    runner.delay = delay
    engine = Engine(Scheduler(config, eos_ids=[END]), runner, tokenizer.raw, Clock(), vocab_size=tokenizer.vocab_size)
    engine.start()
    options = options or HttpOptions(model_names=("glm", "alias"), version="1.2.3")
    with Server(build_app(engine, tokenizer, options), port=0, on_close=engine.close, grace_s=1) as server:
        yield server, engine


@pytest.fixture(scope="module")
def shared():
    with serving() as (server, engine):
        yield server, engine


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=shared[0].url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def web(shared):
    with httpx.Client(base_url=shared[0].url, timeout=10) as web:
        yield web


def complete(client, prompt, **given):
    return client.completions.create(**{"model": "glm", "prompt": prompt, "temperature": 0, **given})


def chat(client, text, **given):
    messages = [{"role": "user", "content": f"say:{text};;"}]
    return client.chat.completions.create(**{"model": "glm", "messages": messages, "temperature": 0, **given})


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# -- completions ------------------------------------------------------------------------------


def test_completion(client):
    out = complete(client, "say:héllo;;", max_tokens=50)
    assert out.object == "text_completion" and out.id.startswith("cmpl-") and out.model == "glm"
    (choice,) = out.choices
    assert (choice.text, choice.finish_reason) == ("héllo", "stop")
    assert out.usage.prompt_tokens == len("say:héllo;;".encode())
    assert out.usage.completion_tokens == len("héllo".encode()) + 1
    assert out.usage.total_tokens == out.usage.prompt_tokens + out.usage.completion_tokens


def test_completion_defaults_to_16_tokens(client):
    (choice,) = complete(client, "abc").choices
    assert (len(choice.text), choice.finish_reason) == (16, "length")
    (choice,) = complete(client, "abc", extra_body={"max_tokens": None, "stop": ["z"]}).choices
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "prompt, texts",
    [
        (["say:a;;", "say:b;;"], ["a", "b"]),
        (TOKENIZER.encode("say:ids;;"), ["ids"]),
        ([TOKENIZER.encode("say:x;;"), TOKENIZER.encode("say:yy;;")], ["x", "yy"]),
    ],
)
def test_forms_of_prompts(client, prompt, texts):
    out = complete(client, prompt)
    assert [c.text for c in out.choices] == texts
    assert [c.index for c in out.choices] == list(range(len(texts)))


def test_stop_strings_and_ids(client):
    (choice,) = complete(client, "say:one two three;;", stop=["two", "zzz"]).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one ", "stop", "two")
    body = {"stop_token_ids": [ord("w")], "include_stop_str_in_output": True}
    (choice,) = complete(client, "say:one two three;;", extra_body=body).choices
    assert (choice.text, choice.stop_reason) == ("one tw", ord("w"))


def test_echo_ids_and_several_completions(client):
    out = complete(
        client,
        ["q", "r"],
        n=2,
        temperature=1,
        seed=7,
        max_tokens=3,
        echo=True,
        extra_body={"return_token_ids": True},
    )
    assert [c.text[0] for c in out.choices] == ["q", "q", "r", "r"]
    assert [c.index for c in out.choices] == [0, 1, 2, 3]
    assert [c.prompt_token_ids for c in out.choices] == [[113], [113], [114], [114]]
    assert all(len(c.token_ids) == 3 for c in out.choices)
    again = complete(client, "q", n=2, temperature=1, seed=7, max_tokens=3)
    assert [c.text for c in again.choices] == [c.text[1:] for c in out.choices[:2]]
    assert out.usage.prompt_tokens == 2 and out.usage.completion_tokens == 12


def test_completion_logprobs(client):
    (choice,) = complete(client, "say:abc;;", logprobs=2, max_tokens=3).choices
    logprobs = choice.logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert logprobs.text_offset == [0, 1, 2]


def test_completion_stream_equals_the_whole(client):
    given = {"prompt": ["say:grüße;;", "say:b;;"], "logprobs": 1, "echo": False}
    whole = complete(client, **given)
    texts, tokens, reasons, usage = ["", ""], [[], []], [None, None], []
    stream = complete(client, stream=True, stream_options={"include_usage": True}, **given)
    for part in stream:
        assert part.id == stream.response.headers.get("x", part.id)
        if part.usage is not None:
            usage.append((part.usage, part.choices))
        for choice in part.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            reasons[choice.index] = choice.finish_reason
    assert texts == [c.text for c in whole.choices] == ["grüße", "b"]
    assert tokens == [c.logprobs.tokens for c in whole.choices]
    assert reasons == ["stop", "stop"]
    ((total, choices),) = usage
    assert choices == [] and total.total_tokens == whole.usage.total_tokens


def test_stream_on_the_wire(web):
    body = {"model": "glm", "prompt": "say:ab;;", "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with web.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = answer.read().decode()
    events = text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 3]
    assert len({part["id"] for part in parts}) == 1


def test_cached_tokens_are_told(client):
    prompt = "say:x;;" + "long " * 40
    complete(client, prompt, max_tokens=1)
    again = complete(client, prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 160


# -- chat -------------------------------------------------------------------------------------


def test_chat_splits_reasoning_from_content(client):
    out = chat(client, "hm</think>hello")
    (choice,) = out.choices
    assert out.object == "chat.completion" and out.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content == "hello"
    assert choice.message.reasoning_content == "hm"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    (choice,) = chat(client, "hm</think>hello", extra_body={"include_reasoning": False}).choices
    assert not hasattr(choice.message, "reasoning_content")


def test_chat_tool_call(client):
    (choice,) = chat(client, f"hm{CALL}{CALL}", tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    first, second = choice.message.tool_calls
    assert first.function.name == "get_weather" and first.type == "function" and first.id != second.id
    assert json.loads(first.function.arguments) == {"city": "Paris", "n": 2}
    (choice,) = chat(client, CALL, tools=[TOOL], parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    (choice,) = chat(client, f"</think>{CALL}", tools=[TOOL], tool_choice="none").choices
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_chat_stream_equals_the_whole(client):
    text = f"hm</think>I look{CALL}"
    stream = chat(client, text, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    reasoning = content = words = ""
    roles, names, reasons, usage = [], [], [], None
    for part in stream:
        usage = part.usage or usage
        for choice in part.choices:
            roles.append(choice.delta.role)
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                names += [call.function.name] if call.function.name else []
                words += call.function.arguments or ""
    assert (reasoning, content, names) == ("hm", "I look", ["get_weather"])
    assert json.loads(words) == {"city": "Paris", "n": 2}
    assert roles[0] == "assistant" and not any(roles[1:])
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert usage.completion_tokens == len(TOKENIZER.encode(text)) + 1


def test_chat_stream_of_several_choices(client):
    given = {"n": 3, "temperature": 1, "seed": 3, "max_tokens": 6}
    whole = chat(client, "x", **given)
    texts = ["", "", ""]
    for part in chat(client, "x", stream=True, **given):
        (choice,) = part.choices
        texts[choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
    assert texts == [c.message.reasoning_content or "" for c in whole.choices]
    assert len(set(texts)) > 1


def test_chat_with_the_clients_own_accumulator(client):
    messages = [{"role": "user", "content": f"say:a</think>b{CALL};;"}]
    with client.chat.completions.stream(model="glm", messages=messages, tools=[TOOL], temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "b"
    assert final.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_chat_logprobs(client):
    (choice,) = chat(client, "</think>é", logprobs=True, top_logprobs=2).choices
    think, first, second, _ = choice.logprobs.content
    assert think.token == "</think>" and len(think.top_logprobs) == 2
    assert first.bytes + second.bytes == list("é".encode())
    assert think.top_logprobs[0].logprob == think.logprob == -0.5
    (choice,) = chat(client, "</think>a", logprobs=True).choices
    assert choice.logprobs.content[0].top_logprobs == []


def test_chat_runs_up_to_the_context_and_obeys_max_completion_tokens(client):
    messages = [{"role": "user", "content": "go"}]
    out = client.chat.completions.create(model="glm", messages=messages, temperature=0, extra_body={"ignore_eos": True})
    assert out.usage.total_tokens == MAX_LEN
    assert out.choices[0].finish_reason == "length"
    out = client.chat.completions.create(
        model="glm", messages=messages, temperature=0, max_completion_tokens=5, max_tokens=9
    )
    assert out.usage.completion_tokens == 5


def test_chat_where_tags_are_special_tokens():
    special = Tokenizer.of_bytes(special=(*TAGS, *SPECIAL))

    def answer(prefix, vocab_size):
        reply = special.encode(f"why<sop></think>so{CALL}")
        place = len(prefix) - max(i for i, t in enumerate(prefix) if t == special.token_id("<|assistant|>")) - 2
        return reply[place] if place < len(reply) else END

    with serving(tokenizer=special, next_token=answer) as (server, _):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        (choice,) = chat(client, "", tools=[TOOL], max_tokens=len(special.encode(CALL)) + 8).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("why", "so")
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_chat_history_with_calls_is_rendered(web):
    function = {"name": "f", "arguments": '{"x": 1}'}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "R"},
    ]
    tokens = web.post("/tokenize", json={"messages": messages, "reasoning_effort": "low"}).json()
    text = web.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == (
        "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>q<|assistant|><think></think>"
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
        "<|observation|><tool_response>R</tool_response><|assistant|><think>"
    )


def test_template_arguments(web):
    def rendered(**given):
        given["messages"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>r</think>a"}]
        tokens = web.post("/tokenize", json=given).json()["tokens"]
        return TOKENIZER.decode(tokens)

    assert rendered(add_generation_prompt=False).endswith("<think>r</think>a")
    assert rendered(continue_final_message=True).endswith("<think>r</think>a")
    kwargs = {"reasoning_effort": "high", "add_generation_prompt": False}
    assert rendered(chat_template_kwargs=kwargs).startswith("[gMASK]<sop><|system|>Reasoning Effort: High")
    assert rendered(chat_template_kwargs=kwargs).endswith("a")


# -- the other routes -------------------------------------------------------------------------


def test_models(client, web):
    assert [m.id for m in client.models.list()] == ["glm", "alias"]
    card = client.models.retrieve("alias")
    assert (card.id, card.max_model_len, card.root) == ("alias", MAX_LEN, "glm")
    assert complete(client, "say:a;;", model="alias").model == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


def test_small_routes(web):
    assert web.get("/health").status_code == 200
    assert web.get("/ping").status_code == web.post("/ping").status_code == 200
    assert web.get("/version").json() == {"version": "1.2.3"}
    assert web.get("/load").json() == {"server_load": 0}
    info = web.get("/tokenizer_info").json()
    assert info["vocab_size"] == TOKENIZER.vocab_size and "Reasoning Effort" in info["chat_template"]


def test_tokenize_and_detokenize(web):
    out = web.post("/tokenize", json={"model": "glm", "prompt": "aé", "return_token_strs": True}).json()
    assert out == {"count": 3, "max_model_len": MAX_LEN, "tokens": [97, 195, 169], "token_strs": ["a", "Ã", "©"]}
    assert web.post("/detokenize", json={"tokens": [97, 195, 169]}).json() == {"prompt": "aé"}
    assert web.post("/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "tokens"
    for bad in ({}, {"prompt": "a", "messages": []}):
        assert web.post("/tokenize", json=bad).status_code == 400


def test_metrics(client, web):
    complete(client, "say:metrics;;")
    text = web.get("/metrics").text
    labels = '{engine="0",model_name="glm"}'
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "request_time_per_output_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "request_inference_time_seconds_count",
        "request_prompt_tokens_sum",
        "request_generation_tokens_sum",
        "request_params_n_count",
        "request_params_max_tokens_count",
    ):
        assert f"vllm:{name}{labels} " in text, name
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="glm"}' in text
    assert "vllm:cache_config_info{" in text and "glmjax:compilations{" in text


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, param",
    [
        *(({field: value}, field) for field, value in {
            "temperature": -1,
            "top_p": 0,
            "top_k": -2,
            "min_p": 2,
            "n": 0,
            "max_tokens": 0,
            "logprobs": 21,
            "seed": 2**64,
            "stop": "",
            "presence_penalty": 0.5,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
            "logit_bias": {"1": 5},
            "best_of": 3,
            "suffix": "x",
            "prompt_logprobs": 1,
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
            "priority": "high",
            "stream": 1,
            "stream_options": {"include_usage": True},
            "min_tokens": 17,
            "stop_token_ids": [10**6],
        }.items()),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x" * MAX_LEN}, "prompt"),
        ({"prompt": "x" * (MAX_LEN - 5)}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
    ],
)  # fmt: skip
def test_bad_completions_name_the_field(web, given, param):
    answer = web.post("/v1/completions", json={"model": "glm", "prompt": "a", **given})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]


@pytest.mark.parametrize(
    "given, param",
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "x"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [{"role": "user", "content": "x" * MAX_LEN}]}, "messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
)
def test_bad_chats_name_the_field(web, given, param):
    body = {"model": "glm", "messages": [{"role": "user", "content": "x"}], **given}
    answer = web.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_neutral_values_and_unknown_fields_pass(client):
    body = {"repetition_penalty": 1.0, "logit_bias": {}, "best_of": 1, "suffix": None, "nonsense": {"a": 1}}
    out = complete(client, "say:a;;", presence_penalty=0, frequency_penalty=0, extra_body=body)
    assert out.choices[0].text == "a"
    out = chat(client, "</think>a", response_format={"type": "text"}, tool_choice="auto", user="u", store=False)
    assert out.choices[0].message.content == "a"


def test_errors_about_the_request_itself(web, client):
    def error(answer):
        return answer.status_code, answer.json()["error"]["code"]

    assert web.post("/v1/completions", content=b"{nope").status_code == 400
    assert web.post("/v1/completions", content=b"[1]").status_code == 400
    assert web.post("/v1/completions", content=b"[" * 100_000).status_code == 400
    assert web.post("/v1/completions", json={"model": "glm"}).json()["error"]["param"] == "prompt"
    assert error(web.get("/nowhere")) == (404, "not_found")
    assert error(web.get("/v1/completions")) == (405, "method_not_allowed")
    assert error(web.post("/v1/completions", json={"model": "gpt", "prompt": "a"})) == (404, "model_not_found")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        complete(client, "a", model="gpt")


def test_a_request_id_in_use_is_refused_and_then_free_again(shared, web):
    body = {"prompt": "say:a;;", "temperature": 0, "request_id": "mine"}
    for _ in range(2):
        assert web.post("/v1/completions", json=body).json()["id"] == "cmpl-mine"
    answer = web.post("/v1/completions", json={"prompt": "say:a;;"}, headers={"x-request-id": "head"})
    assert answer.json()["id"] == "cmpl-head"


def test_keys_and_body_limit():
    options = HttpOptions(model_names=["glm"], api_keys=["one", "two"], max_body_bytes=1000)
    with serving(options) as (server, _), httpx.Client(base_url=server.url) as web:
        assert web.get("/health").status_code == web.get("/metrics").status_code == 200
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            answer = web.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        key = {"authorization": "Bearer two"}
        assert web.get("/v1/models", headers=key).status_code == 200
        large = {"prompt": "x" * 1000}
        answer = web.post("/v1/completions", json=large, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

        def chunks():
            yield b'{"prompt": "'
            yield b"x" * 2000

        assert web.post("/v1/completions", content=chunks(), headers=key).status_code == 413


def test_a_full_queue_is_refused():
    options = HttpOptions(model_names=["glm"], max_num_queued_requests=1)
    with serving(options, delay=0.02, max_num_seqs=1) as (server, engine):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(complete, client, "abc", max_tokens=40)
            until(lambda: engine.stats()["num_running"] == 1)
            second = pool.submit(complete, client, "abc", max_tokens=1)
            until(lambda: engine.stats()["num_waiting"] == 1)
            with pytest.raises(openai.InternalServerError) as caught:
                complete(client, "abc")
            assert caught.value.status_code == 503
            assert caught.value.code == "queue_full"
            assert first.result().choices and second.result().choices
        assert "vllm:admission_rejections_total" in httpx.get(server.url + "/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_failure_of_the_engine(stream):
    with serving(fail_at=3) as (server, engine):
        body = {"model": "glm", "prompt": "abc", "temperature": 0, "stream": stream}
        answer = httpx.post(server.url + "/v1/completions", json=body)
        if stream:
            *_, last, done, _ = answer.text.split("\n\n")
            assert done == "data: [DONE]"
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert error["type"] == "internal_server_error" and "told to fail" in error["message"]
        assert httpx.get(server.url + "/health").status_code == 503
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 500
        assert not engine.healthy


# -- life of connections ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_hanging_up_aborts(path, stream):
    body = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}]}
    body |= {"model": "glm", "temperature": 0, "max_tokens": 800, "ignore_eos": True, "stream": stream}
    with serving(delay=0.005) as (server, engine):
        if stream:
            with httpx.stream("POST", server.url + path, json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert httpx.get(server.url + "/load").json() == {"server_load": 1}
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + path, json=body, timeout=0.2)
        until(lambda: engine.stats()["finished_abort"] == 1)
        stats = engine.stats()
        assert stats["num_running"] == stats["num_waiting"] == 0
        assert stats["free_blocks"] == stats["total_blocks"]
        until(lambda: httpx.get(server.url + "/load").json() == {"server_load": 0})


def test_many_streams_at_once(shared):
    async def one(client, number):
        text = f"{number} " * 5
        stream = await client.completions.create(
            model="glm", prompt=f"say:{text};;", temperature=0, max_tokens=64, stream=True
        )
        return "".join([part.choices[0].text async for part in stream]) == text

    async def all_of_them():
        limits = httpx.Limits(max_connections=200)
        async with (
            httpx.AsyncClient(limits=limits, timeout=30) as web,
            openai.AsyncOpenAI(base_url=shared[0].url + "/v1", api_key="none", http_client=web) as client,
        ):
            return await asyncio.gather(*(one(client, number) for number in range(100)))

    assert all(asyncio.run(all_of_them()))


def test_closing_the_server_ends_what_is_in_flight():
    with serving(delay=0.005) as (server, engine):
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 800, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.close()
        assert engine.stats()["finished_abort"] == 1
        assert not engine.healthy
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        server.close()


def test_waiting_ends_with_a_signal():
    with serving() as (server, engine):
        killer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        killer.start()
        before = signal.getsignal(signal.SIGTERM)
        server.wait()
        assert signal.getsignal(signal.SIGTERM) == before
        assert not engine.healthy


def test_a_port_in_use_is_one_clear_error(shared):
    server, engine = shared
    with pytest.raises(GlmjaxError, match=f"port {server.port} .* in use"):
        Server(build_app(engine, TOKENIZER, HttpOptions(model_names=["glm"])), port=server.port)
    with pytest.raises(GlmjaxError, match="port must be"):
        Server(build_app(engine, TOKENIZER, HttpOptions(model_names=["glm"])), port=70000)
    with pytest.raises(GlmjaxError, match="cannot listen"):
        Server(build_app(engine, TOKENIZER, HttpOptions(model_names=["glm"])), "256.1.1.1", 0)
