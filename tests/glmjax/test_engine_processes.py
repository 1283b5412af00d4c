"""A prefill and a decode engine in processes of their own, with a model: tokens are those of one engine."""

import concurrent.futures
import dataclasses
import io
import json
import logging
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import httpx
import pytest
import small_model

import glmjax
from glmjax.checkpoint import save_pretrained
from glmjax.errors import ConfigError, GlmjaxError
from glmjax.options import engine_options
from glmjax.params import random_params
from glmjax.processes import EngineProcess, for_role, serve_pair, start_pair
from glmjax.sharding.layout import Layout

OPTIONS = {**small_model.OPTIONS, "max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_dtype": "float32"}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """The small model with an MTP layer."""
    folder = small_model.write_checkpoint(tmp_path_factory.mktemp("processes") / "small")
    config = dataclasses.replace(small_model.CONFIG, num_nextn_predict_layers=1)
    other = folder.parent / "drafting"
    save_pretrained(config, random_params(config), other)
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return other


def ask(url, prompt, max_tokens=8):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connector", "prefill", "decode", "drafts"),
    [
        pytest.param(
            *("nixl", "tp=2,dcp=2", "dp=1", 3),
            marks=pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl is not installed"),
        ),
        ("jax", "dp=1", "dp=1", 0),
    ],
)
def test_tokens_are_those_of_one_engine(connector, prefill, decode, drafts, drafting):
    prompts = [[(5 * n + 3 * i) % 90 + 32 for i in range(n)] for n in (3, 17, 40, 65)]
    how = glmjax.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with glmjax.LLM(drafting, **OPTIONS) as llm:
        ours = llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
    options = OPTIONS | {"num_speculative_tokens": drafts, "connector": connector, "min_prefill_tokens": 8}
    with (
        glmjax.serve(drafting, port=0, block=False, prefill=prefill, decode=decode, **options) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        theirs = list(pool.map(lambda prompt: ask(server.url, prompt), prompts))
        metrics = httpx.get(f"{server.url}/metrics").text
    assert theirs == [list(out.outputs[0].token_ids) for out in ours]
    assert 'glmjax:front_calls_total{prompt="prefill"} 3.0' in metrics
    (fetched,) = [line for line in metrics.splitlines() if line.startswith("glmjax:kv_transfer_bytes_fetched{")]
    config = small_model.CONFIG
    layers, indexers = config.num_hidden_layers + (drafts > 0), config.num_full_indexers + (drafts > 0)
    per_token = 4 * (layers * (config.kv_lora_rank + config.qk_rope_head_dim) + indexers * config.index_head_dim)
    assert float(fetched.split()[-1]) == (16 + 39 + 64) * per_token


def options_of_a_pair(**more):
    return engine_options(**OPTIONS, prefill="dp=1", decode="dp=1", **more)


def test_what_keeps_an_engine_from_starting_is_said_and_both_are_ended(tmp_path, monkeypatch):
    made = []
    init = EngineProcess.__init__
    monkeypatch.setattr(EngineProcess, "__init__", lambda self, *a: (made.append(self), init(self, *a))[1])
    with pytest.raises(GlmjaxError, match=r"(prefill|decode) engine: .*nothing not found"):
        start_pair(str(tmp_path / "nothing"), options_of_a_pair(), {})
    assert [engine.process.poll() is not None for engine in made] == [True, True]


def test_a_decode_engine_that_ends_ends_the_server(monkeypatch):
    class Engine:
        url, ended = "http://127.0.0.1:1", None

        def close(self):
            pass

    engines = Engine(), Engine()
    monkeypatch.setattr("glmjax.processes.start_pair", lambda *_: engines)
    server, _ = serve_pair("demo", "127.0.0.1", 0, options_of_a_pair(), {}, ())
    engines[0].ended = "the prefill engine has ended"  # its prompts can be computed elsewhere
    assert server.fault() is None
    engines[1].ended = "the decode engine has ended"
    with pytest.raises(GlmjaxError, match="the decode engine has ended"):
        server.wait()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_engines_end_with_who_started_them(tmp_path):
    """However that ends: even without a moment to say so, and while they load."""
    code = """
import sys, time
from glmjax.options import engine_options
from glmjax.processes import EngineProcess, for_role
options = engine_options(prefill="dp=1", decode="dp=1")
engine = EngineProcess({"model": "demo", "options": for_role(options, "prefill"), "http": {}}, {})
print(engine.process.pid, flush=True)
time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    engine = int(starter.stdout.readline())
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    deadline = time.monotonic() + 60
    while is_running(engine):
        assert time.monotonic() < deadline, "it did not end"
        time.sleep(0.1)


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as status:
            return status.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_port_that_is_taken_ends_the_engines(monkeypatch):
    class Engine:
        url, closed = "http://127.0.0.1:1", 0

        def close(self):
            self.closed += 1

    engines = Engine(), Engine()
    monkeypatch.setattr("glmjax.processes.start_pair", lambda *_: engines)
    server, _ = serve_pair("demo", "127.0.0.1", 0, options_of_a_pair(), {}, ())
    with server, pytest.raises(GlmjaxError, match="in use"):
        serve_pair("demo", "127.0.0.1", server.port, options_of_a_pair(), {}, ())
    assert [engine.closed for engine in engines] == [2, 2]


def test_each_engine_has_its_layout_and_role():
    options = engine_options(**OPTIONS, prefill="pcp=2,dcp=2", decode="dp=2,ep=2", num_speculative_tokens=3, seed=4)
    first, second = for_role(options, "prefill"), for_role(options, "decode")
    for given, layout, role in ((first, "pcp=2,dcp=2", "prefill"), (second, "dp=2,ep=2", "decode")):
        rebuilt = engine_options(**given)
        assert (rebuilt.layout, rebuilt.role, rebuilt.prefill) == (Layout.parse(layout), role, None)
        assert (rebuilt.num_speculative_tokens, rebuilt.seed) == (3, 4)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_an_engine_logs_what_who_started_it_does(level, monkeypatch, caplog):
    class Process:
        def __init__(self, *_, **__):
            self.stdin = io.StringIO()

    monkeypatch.setattr(subprocess, "Popen", Process)
    caplog.set_level(level, logger="glmjax")
    engine = EngineProcess({"options": {"role": "prefill"}}, {})
    assert json.loads(engine.process.stdin.getvalue())["log_level"] == level


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_lines_of_an_engine_say_whose_they_are(level):
    code = """
import logging
from glmjax import engine_process
from glmjax.errors import GlmjaxError

def fail(job):
    for level in (logging.INFO, logging.WARNING):
        logging.getLogger("glmjax.progress").log(level, "about the model")
    raise GlmjaxError("enough")

engine_process._serve = fail
engine_process.main()
"""
    job = json.dumps({"options": {"role": "prefill"}, "log_level": level}) + "\n"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as engine:
        engine.stdin.write(job)
        engine.stdin.flush()  # and left open, for it would end with that
        answer, log = engine.stdout.read(), engine.stderr.read()
    assert (engine.returncode, json.loads(answer)) == (2, {"error": "enough"})
    names = ["INFO", "WARNING"] if level == logging.INFO else ["WARNING"]
    said = [line.split(" ", 2)[2] for line in log.splitlines()]
    assert said == [f"{name} prefill engine: about the model" for name in names]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0,1", "2,3"]),
        ("4,5,6,7", ["4,5", "6,7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_each_engine_sees_gpus_of_its_own(visible, seen, monkeypatch):
    started = []

    class Engine:
        url = ""

        def __init__(self, job, environment):
            started.append(environment.get("CUDA_VISIBLE_DEVICES"))

        def ready(self):
            pass

    monkeypatch.setattr("glmjax.processes.EngineProcess", Engine)
    monkeypatch.setattr("glob.glob", lambda pattern: [f"/dev/nvidia{n}" for n in range(4)])
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    start_pair("demo", engine_options(prefill="dp=2", decode="dp=2,ep=2"), {})
    assert started == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match=r"need 4 GPUs, and this process sees 3 \(0, 1, 2\)"):
        start_pair("demo", engine_options(prefill="dp=2", decode="dp=2,ep=2"), {})
    for name, value in (("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.setenv(name, value)
        start_pair("demo", engine_options(prefill="dp=2", decode="dp=2,ep=2"), {})
        assert started[-2:] == [None, None]
