"""``serve`` on a real model, end to end, with the official client."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
import small_model
from small_model import MAX_LEN, NUM_BLOCKS, OPTIONS, TOKENIZER

import glmjax
from glmjax import api
from glmjax.serving.chat import ChatTemplate
from glmjax.serving.runner import ProgramRunner
from glmjax.types import SamplingParams

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = small_model.write_checkpoint(tmp_path_factory.mktemp("model") / "small")
    with glmjax.serve(folder, port=0, block=False, served_model_name=["small", "alias"], **OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def alone():
    """What a request gives by itself, without a server: its one completion."""
    runner = ProgramRunner(small_model.programs())

    def run(prompt, **how):
        engine = small_model.make_engine(runner)
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
        handle = engine.submit(ids, SamplingParams(**{"temperature": 0, **how}))
        small_model.finish(engine)
        return handle.result().outputs[0]

    yield run
    runner.close()


def metric(server, name):
    """The sum of a metric over its labels."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and not line.startswith("#")]
    assert values, f"no {name}"
    return sum(values)


def wait_until_idle(server, seconds=30.0):
    """Nothing runs or waits, and no block is held."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + seconds
    while any(metric(server, name) for name in names):
        assert time.monotonic() < deadline, "the server did not become idle"
        time.sleep(0.02)


def complete(client, prompt, **how):
    return client.completions.create(**{"model": "small", "prompt": prompt, "temperature": 0, **how})


def chat(client, **how):
    return client.chat.completions.create(**{"model": "small", "messages": MESSAGES, "temperature": 0, **how})


def test_completion_is_what_the_engine_gives(client, alone):
    expected = alone("once upon", max_tokens=20)
    out = complete(client, "once upon", max_tokens=20)
    assert (out.choices[0].text, out.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (9, len(expected.token_ids))


def test_completion_takes_token_ids(client, alone):
    out = complete(client, [1, 2, 3], max_tokens=9)
    assert out.choices[0].text == alone([1, 2, 3], max_tokens=9).text


def test_streamed_completion_is_the_same(client, alone):
    expected = alone("once upon", max_tokens=20)
    stream = list(complete(client, "once upon", max_tokens=20, stream=True, stream_options={"include_usage": True}))
    *parts, last = stream
    assert len(parts) > 5
    assert "".join(p.choices[0].text for p in parts) == expected.text
    assert [p.choices[0].finish_reason for p in parts if p.choices[0].finish_reason] == [expected.finish_reason]
    assert last.choices == [] and last.usage.completion_tokens == len(expected.token_ids)


def test_the_checkpoints_sampling_defaults_hold(client, alone):
    out = client.completions.create(model="small", prompt="once upon", max_tokens=20)
    assert out.choices[0].text == alone("once upon", max_tokens=20).text  # generation_config says temperature 0


def test_seeded_samples_are_the_same_each_time(client, alone):
    how = {"temperature": 1.0, "seed": 4, "max_tokens": 8}
    out = complete(client, "abc", n=3, **how)
    assert [c.text for c in out.choices] == [alone("abc", **{**how, "seed": 4 + i}).text for i in range(3)]


def test_completion_logprobs(client, alone):
    expected = alone("abc", max_tokens=5, logprobs=3)
    logprobs = complete(client, "abc", max_tokens=5, logprobs=3).choices[0].logprobs
    assert logprobs.tokens == [TOKENIZER.decode([t]) for t in expected.token_ids]
    chosen = [entry[t].logprob for t, entry in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert logprobs.token_logprobs == pytest.approx(chosen, abs=1e-4)
    for top, entry in zip(logprobs.top_logprobs, expected.logprobs, strict=True):
        assert top == {e.decoded_token: pytest.approx(e.logprob, abs=1e-4) for e in entry.values()}


def test_chat_is_what_the_engine_gives(client, alone):
    prompt = ChatTemplate().render(MESSAGES)
    expected = alone(prompt, max_tokens=12, skip_special_tokens=False, stop_token_ids=[])
    out = chat(client, max_tokens=12)
    assert out.usage.prompt_tokens == len(TOKENIZER.encode(prompt))
    message = out.choices[0].message
    assert message.role == "assistant"
    assert (message.reasoning_content or "") + (message.content or "") == expected.text


def test_streamed_chat_is_the_same(client):
    message = chat(client, max_tokens=12).choices[0].message
    deltas = [p.choices[0].delta for p in chat(client, max_tokens=12, stream=True)]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == (message.reasoning_content or "")
    assert "".join(d.content or "" for d in deltas) == (message.content or "")


def test_chat_logprobs(client, alone):
    expected = alone(ChatTemplate().render(MESSAGES), max_tokens=4, logprobs=2)
    entries = chat(client, max_tokens=4, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [e.token for e in entries] == [TOKENIZER.decode([t]) for t in expected.token_ids]
    for entry, token, known in zip(entries, expected.token_ids, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(known[token].logprob, abs=1e-4)
        assert len(entry.top_logprobs) == 2


def test_concurrent_requests_do_not_disturb_each_other(server, client, alone):
    prompts = [f"request number {i} " + "x" * (3 * i) for i in range(12)]
    hows = [{"max_tokens": 40, "temperature": i % 2, "seed": i} for i in range(12)]
    preempted = metric(server, "vllm:num_preemptions_total")

    def ask(prompt, how):
        if how["seed"] % 3:
            return complete(client, prompt, **how).choices[0].text
        return "".join(part.choices[0].text for part in complete(client, prompt, stream=True, **how))

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, prompts, hows))
    assert texts == [alone(p, **h).text for p, h in zip(prompts, hows, strict=True)]
    assert metric(server, "vllm:num_preemptions_total") > preempted
    wait_until_idle(server)


# Hanging up.


def test_hanging_up_on_a_stream_frees_its_blocks(server, client):
    wait_until_idle(server)
    before = metric(server, "vllm:generation_tokens_total")
    how = {"max_tokens": 100, "n": 16, "temperature": 1, "seed": 0, "extra_body": {"ignore_eos": True}}
    stream = complete(client, "a long story", stream=True, **how)
    for _ in range(3):
        next(stream)
    assert metric(server, "vllm:kv_cache_usage_perc") > 0
    stream.close()
    wait_until_idle(server)
    assert metric(server, "vllm:generation_tokens_total") - before < 1600


def test_hanging_up_on_a_whole_answer_frees_its_blocks(server, client):
    wait_until_idle(server)
    before = metric(server, "vllm:generation_tokens_total")
    how = {"max_tokens": 100, "n": 16, "temperature": 1, "seed": 0, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        complete(client.with_options(timeout=0.2), "a long story", **how)
    wait_until_idle(server)
    assert metric(server, "vllm:generation_tokens_total") - before < 1600


# Refusals.


@pytest.mark.parametrize(
    ("how", "param", "match"),
    [
        ({"prompt": "x" * MAX_LEN}, "prompt", f"the prompt has {MAX_LEN} tokens, but the context is {MAX_LEN}"),
        ({"prompt": "x" * (MAX_LEN - 9)}, "max_tokens", f"context is {MAX_LEN} tokens, but {MAX_LEN + 7} were"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [TOKENIZER.vocab_size]}, "prompt", "outside the vocabulary"),
        ({"temperature": 3}, "temperature", "in \\[0, 2\\], got 3"),
        ({"top_p": 0}, "top_p", "top_p must be in"),
        ({"n": 2}, "n", "n must be 1 with greedy"),
        ({"logprobs": 21}, "logprobs", "logprobs must be in"),
        ({"stop": ""}, "stop", "stop must be"),
    ],
    ids=str,
)
def test_a_bad_completion_gets_a_400_that_names_the_field(client, how, param, match):
    with pytest.raises(openai.BadRequestError, match=match) as caught:
        complete(client, **{"prompt": "x", "max_tokens": 16, **how})
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_a_conversation_over_the_limit_is_refused(client):
    with pytest.raises(openai.BadRequestError, match=f"but the context is {MAX_LEN} tokens") as caught:
        chat(client, messages=[{"role": "user", "content": "x" * MAX_LEN}])
    assert caught.value.param == "messages"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="other"):
        complete(client, "x", model="other")
    assert complete(client, "x", model="alias", max_tokens=1).model == "alias"


# The server as a whole.


def test_models_and_health(server, client):
    assert [m.id for m in client.models.list()] == ["small", "alias"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/version").json() == {"version": glmjax.__version__}
    tokenized = httpx.post(f"{server.url}/tokenize", json={"prompt": "abc"}).json()
    assert (tokenized["tokens"], tokenized["max_model_len"]) == (list(b"abc"), MAX_LEN)


def test_nothing_is_compiled_while_serving(client):
    with small_model.counting_compilations() as compiled:
        for length in (1, 2, 16, 17, 40, 100):
            complete(client, "y" * length, max_tokens=3, logprobs=2)
        chat(client, max_tokens=3, temperature=1, top_p=0.5, n=2)
    assert compiled == []


def test_announcement_holds_a_command_that_works(server, client, capsys):
    api.announce(server, "small")
    first, _, curl = capsys.readouterr().out.splitlines()
    assert first == f"Serving small on {server.url}"
    url, body = curl.split()[1], curl[curl.index("-d '") + 4 : -1]
    answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


@pytest.fixture
def fake_llm(monkeypatch):
    """``serve`` around programs that are there already; gives what it was asked to load, and the engine."""
    engine = small_model.make_engine(ProgramRunner(small_model.programs()))
    made = SimpleNamespace(engine=engine, closed=0)

    def make(model, **options):
        made.model, made.options = model, options
        return made

    def close():
        made.closed += 1
        engine.close()

    made.tokenizer, made.sampling_defaults, made.close = TOKENIZER, {}, close
    monkeypatch.setattr(api, "LLM", make)
    yield made
    engine.close()


def test_serve_hands_options_on_and_close_closes_the_engine(fake_llm):
    server = glmjax.serve("some/model", port=0, block=False, max_num_seqs=3, api_key="secret")
    assert (fake_llm.model, fake_llm.options) == ("some/model", {"max_num_seqs": 3})
    with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert [m.id for m in client.with_options(api_key="secret").models.list()] == ["some/model"]
    for _ in range(2):
        server.close()
    assert fake_llm.closed == 1 and not fake_llm.engine.healthy
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_closing_aborts_what_is_in_flight(fake_llm):
    server = glmjax.serve("small", port=0, block=False)
    body = {"prompt": "a", "max_tokens": 100, "n": 64, "temperature": 1, "seed": 0, "ignore_eos": True, "stream": True}
    seen = []

    def read():
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                seen.extend(answer.iter_lines())
        except httpx.HTTPError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    while not fake_llm.engine.stats()["num_running"]:
        time.sleep(0.01)
    server._uvicorn.config.timeout_graceful_shutdown = 0.1
    server.close()
    reader.join(timeout=10)
    assert not reader.is_alive()
    stats = fake_llm.engine.stats()
    assert (stats["free_blocks"], stats["num_running"], stats["num_waiting"]) == (NUM_BLOCKS, 0, 0)
    assert stats["finished_abort"] > 0


def test_a_port_that_is_taken_is_found_before_a_model_is_loaded(fake_llm):
    with glmjax.serve("small", port=0, block=False) as server:
        del fake_llm.model
        with pytest.raises(glmjax.errors.GlmjaxError, match=f"port {server.port} on 127.0.0.1 is in use"):
            glmjax.serve("small", port=server.port, block=False)
        assert not hasattr(fake_llm, "model")


def test_an_engine_is_closed_if_its_server_cannot_start(fake_llm, monkeypatch):
    with glmjax.serve("small", port=0, block=False) as server:
        running, fake_llm.closed = server.port, 0
        monkeypatch.setattr(api, "check_port", lambda host, port: None)  # it is taken while the model is loaded
        with pytest.raises(glmjax.errors.GlmjaxError, match=f"port {running} on 127.0.0.1 is in use"):
            glmjax.serve("small", port=running, block=False)
        assert fake_llm.closed == 1
