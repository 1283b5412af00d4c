"""The command line: what it prints, and one line on standard error with exit code 2 for what the user can mend."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
import small_model
import typer
from child_environment import without_devices

import glmjax
from glmjax import cli
from glmjax.checkpoint import load_checkpoint
from glmjax.config import GLMConfig
from glmjax.demo import demo_config
from glmjax.orbax_io import is_orbax

FEW = ["--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING) "  # how lines of the log begin
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model.write_checkpoint(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def glm(monkeypatch, capsys):
    """Runs a command in this process; gives exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["glmjax", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return (code or 0, *capsys.readouterr())

    return run


def process(*arguments, **options):
    """The same in a process of its own."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, **options)


def expected_tokens(text, max_tokens):
    engine = small_model.make_engine(small_model.ProgramRunner(small_model.programs()))
    how = glmjax.SamplingParams(temperature=0, max_tokens=max_tokens)
    handle = engine.submit(small_model.TOKENIZER.encode(text), how)
    small_model.finish(engine)
    return handle.result().outputs[0]


# Generate.


def test_generate_prints_prompt_and_text(glm, folder):
    code, out, _ = glm("generate", folder, "-p", "ab", "--prompt", "cd", "--max-tokens", "6", *FEW)
    assert code == 0
    assert out == "".join(f"{text}{expected_tokens(text, 6).text}\n" for text in ("ab", "cd"))


def test_generate_prints_json_and_nothing_else(folder):
    run = process("-m", "glmjax", "generate", folder, "-p", "ab", "--max-tokens", "6", "--json", *FEW)
    expected = expected_tokens("ab", 6)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [
        {
            "prompt": "ab",
            "text": expected.text,
            "token_ids": expected.token_ids,
            "finish_reason": expected.finish_reason,
            "num_cached_tokens": 0,
        }
    ]


def test_generate_under_a_layout_simulates_the_devices_it_needs(folder):
    """And says the same as one device."""
    degrees = ["--pcp", "2", "--tp", "2", "--dcp", "4", "--ep", "4", "--block-size", "4"]
    run = process("-m", "glmjax", "generate", folder, "-p", "ab", "--json", *FEW, *degrees, env=without_devices())
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)[0]["token_ids"] == expected_tokens("ab", 32).token_ids


def test_generate_treats_prompts_as_messages(glm, folder):
    code, out, _ = glm("generate", folder, "-p", "Hi", "--chat", "--json", "--max-tokens", "3", *FEW)
    (row,) = json.loads(out)
    prompt = "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>"
    assert code == 0 and row["token_ids"] == expected_tokens(prompt, 3).token_ids


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs must be a whole number of at least 1, got 0"),
        (
            ["--block-size", "1073741824"],
            "--block-size must be below 2^30, for a device counts with 32 bits, got 1073741824",
        ),
        (["--temperature", "3"], "temperature must be in [0, 2], got 3.0"),
        (["--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
        (["--top-k", "-2"], "--top-k must be 0 or -1 for all, or a positive number of tokens, got -2"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (
            ["--layout", "tp8", "--pcp", "2"],
            "--layout tp8 and degrees such as --pcp exclude one another: give one of them",
        ),
        (
            ["--pcp", "2", "--dcp", "3"],
            "dcp=3 must divide pcp=2 x tp=1, the devices that share a KV cache: use dcp=1 or 2",
        ),
        (["--tp", "4"], "tp=4 cannot split num_attention_heads=2 evenly: for this model use tp=1 or 2"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_a_bad_value_is_one_line_and_exit_code_2(glm, folder, options, message):
    assert glm("generate", folder, "-p", "ab", *options) == (2, "", f"glmjax: {message}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-model-len", "513"], "--max-model-len=513 is more than the model's 512 positions"),
        (
            [*FEW, "--max-tokens", "64"],
            "the context is 64 tokens, but 66 were asked for: 2 in the prompt and --max-tokens=64",
        ),
    ],
    ids=["pool", "prompt"],
)
def test_a_value_that_turns_out_bad_later_is_one_line_after_those_of_the_start(glm, folder, options, message):
    code, out, err = glm("generate", folder, "-p", "ab", *options)
    *start, last = err.splitlines()
    assert (code, out, last) == (2, "", f"glmjax: {message}")
    assert all(re.match(LINE, line) for line in start)


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("lease_seconds must be positive", "--lease-seconds must be positive"),
        ("kv_offload='host' and hisparse_host_gib=1", "--kv-offload='host' and --hisparse-host-gib=1"),
        ("give more with max_num_seqs.", "give more with --max-num-seqs."),
        ("the model's positions, so lower max_model_len", "the model's positions, so lower --max-model-len"),
        *(
            (same, same)
            for same in (
                "num_attention_heads=2",
                "/tmp/max_tokens/x not found",
                "max_tokens.npz not found",
                "no model 'max_tokens' here",
            )
        ),
        *((same, same) for same in ("the prefill engine", "/x/generation_config.json: top_p must be in (0, 1]")),
    ],
)
def test_messages_name_options_as_they_are_typed(message, typed):
    assert cli.as_typed(message) == typed


def test_a_message_names_only_options_of_its_own_command():
    assert cli.as_typed("top_k and kv_insert", "kernels") == "top_k and kv_insert"
    assert cli.as_typed("top_k is too large", "generate") == "--top-k is too large"
    assert cli.as_typed("top_k is too large", "no command") == "--top-k is too large"


def test_a_missing_checkpoint_is_one_line_and_exit_code_2(tmp_path):
    run = process("-m", "glmjax", "generate", tmp_path / "nowhere", "-p", "ab")
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"glmjax: {tmp_path / 'nowhere'} not found\n")


def test_an_unsupported_model_is_one_line_and_exit_code_2(glm, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    message = "glmjax: model_type 'llama' is not supported; glmjax runs 'glm_moe_dsa'\n"
    assert glm("generate", tmp_path, "-p", "ab") == (2, "", message)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["generate", "x"], ["--prompt"]),
        (["generate", "x", "-p", "ab", "--max-token", "1"], ["--max-token"]),
        (["dance"], ["dance"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_usage_is_named_with_exit_code_2(glm, arguments, names):
    code, out, err = glm(*arguments)
    assert (code, out) == (2, "")
    assert all(name in err for name in names), err


# Convert and demo.


def test_convert_to_orbax_and_back_keeps_everything(glm, folder, tmp_path):
    assert glm("convert", folder, tmp_path / "orbax")[:2] == (0, f"Wrote {tmp_path / 'orbax'}\n")
    assert is_orbax(tmp_path / "orbax")
    assert glm("convert", tmp_path / "orbax", tmp_path / "hf", "--to", "hf")[0] == 0
    config, params = load_checkpoint(folder)
    for copy in ("orbax", "hf"):
        copied = load_checkpoint(tmp_path / copy)
        assert copied[0] == config
        jax.tree.map(np.testing.assert_array_equal, copied[1], params)
        for name in ("tokenizer.json", "generation_config.json"):
            assert (tmp_path / copy / name).read_bytes() == (folder / name).read_bytes()


def test_convert_changes_the_dtype_if_told(glm, folder, tmp_path):
    assert glm("convert", folder, tmp_path / "half", "--to", "hf", "--dtype", "bfloat16")[0] == 0
    _, params = load_checkpoint(folder)
    _, half = load_checkpoint(tmp_path / "half")
    np.testing.assert_array_equal(half.embed, params.embed.astype("bfloat16").astype("float32"))


def test_convert_replaces_a_folder_only_if_told(glm, folder, tmp_path):
    (tmp_path / "file").write_text("precious")
    code, out, err = glm("convert", folder, tmp_path)
    assert (code, out) == (2, "") and "overwrite" in err and err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "precious"
    assert glm("convert", folder, tmp_path, "--overwrite")[0] == 0
    assert is_orbax(tmp_path) and not (tmp_path / "file").exists()


def test_convert_knows_the_demo_by_name_and_a_folder_of_that_name_by_its_path(glm, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GLMJAX_CACHE", str(tmp_path / "cache"))
    assert glm("convert", "demo", tmp_path / "orbax")[:2] == (0, f"Wrote {tmp_path / 'orbax'}\n")
    assert GLMConfig.from_hf(tmp_path / "orbax") == demo_config()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(folder)
    assert glm("convert", "./demo", "other", "--to", "hf")[0] == 0
    assert GLMConfig.from_hf("other") == GLMConfig.from_hf(folder)


def test_demo_writes_a_checkpoint(glm, tmp_path):
    assert glm("demo", tmp_path / "demo", "--seed", "3") == (0, f"Wrote {tmp_path / 'demo'}\n", "")
    assert GLMConfig.from_hf(tmp_path / "demo") == demo_config()
    code, _, err = glm("demo", tmp_path / "demo")
    assert code == 2 and "overwrite" in err
    assert glm("demo", tmp_path / "demo", "--overwrite")[0] == 0


# Help.


def test_version(glm):
    assert glm("--version") == (0, f"{glmjax.__version__}\n", "")


def commands():
    return typer.main.get_command(cli.app).commands


def test_a_command_leaves_the_log_as_it_was(glm):
    logger = logging.getLogger("glmjax")
    before = logger.level, list(logger.handlers)
    glm("--version")
    assert (logger.level, list(logger.handlers)) == before


@pytest.mark.parametrize("name", [*commands(), "bench hisparse"])
def test_every_option_has_a_line_of_help_and_its_name_whole_on_80_columns(glm, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    group, *of_group = name.split()
    command = commands()[group].commands[of_group[0]] if of_group else commands()[group]
    assert command.help
    code, out, _ = glm(*name.split(), "--help")
    assert code == 0
    words = set(re.split(r"[\s,.\[\]]+", out))
    for option in command.params:
        assert option.help, f"{name} {option.name}"
        is_option = option.param_type_name == "option"
        assert words.issuperset([*option.opts, *option.secondary_opts] if is_option else [option.name])


def test_help_lists_the_commands(glm):
    code, out, _ = glm("--help")
    assert code == 0 and all(name in out for name in ("serve", "generate", "convert"))


@pytest.mark.parametrize("arguments", [[], ["bench"]], ids=["glmjax", "glmjax bench"])
def test_nothing_asked_for_is_answered_with_help(glm, arguments):
    code, out, err = glm(*arguments)
    shown = glm(*arguments, "--help")[1]
    assert (code, out, err.split()) == (2, "", shown.split())
    assert err.count("\n") > 5 and err.startswith("Usage: ")


# Serve.


def test_serve_says_where_it_is_and_ends_on_interrupt(folder):
    settings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "glmjax", "serve", str(folder), "--port", "0", *FEW]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)
    try:
        first = server.stdout.readline()
        found = re.fullmatch(rf"Serving {re.escape(str(folder))} on (http://127\.0\.0\.1:\d+)\n", first)
        assert found, first + server.stderr.read()
        server.stdout.readline()
        assert server.stdout.readline().startswith(f"  curl {found[1]}/v1/chat/completions")
        assert httpx.get(f"{found[1]}/health").status_code == 200
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
        assert (out, server.returncode) == ("", 0)
        said = [re.sub(LINE, "", line).split(":")[0] for line in err.splitlines()]
        assert list(dict.fromkeys(said)) == ["Loading small", "Compiling", "KV cache"], err
    finally:
        server.kill()
        server.wait()


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(glm, folder):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, out, err = glm("serve", folder, "--port", port, *FEW)
    assert (code, out, err) == (2, "", f"glmjax: port {port} on 127.0.0.1 is in use; choose another one\n")


def test_proxy_names_engines_that_are_not_there_and_serves(folder):
    command = [sys.executable, "-m", "glmjax", "proxy", "http://127.0.0.1:1", "http://127.0.0.1:2/v1", "--port", "0"]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://127\.0\.0\.1:1 and http://127\.0\.0\.1:2 on (\S+)", front.stdout.readline())
        for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
            assert re.match(rf"{LINE}the \w+ engine at {url} cannot be reached", front.stderr.readline())
        assert httpx.get(f"{found[1]}/health").status_code == 503
        front.send_signal(signal.SIGINT)
        assert (*front.communicate(timeout=60), front.returncode) == ("", "", 0)
    finally:
        front.kill()
        front.wait()


def test_a_malformed_url_is_one_line_and_exit_code_2(glm):
    message = "glmjax: DECODE must be a URL such as http://127.0.0.1:8001, got 'http://host:port'\n"
    assert glm("proxy", "http://127.0.0.1:1", "http://host:port") == (2, "", message)


# Examples, on the demo.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "shown"),
    [
        ("batch.py", r"The sun -> .*\n.*\n(.*\n)+cached"),
        ("serve.py", r"http://.*\n.+"),
        # Every layout says the same.
        ("compare_layouts.py", r"dp=1 +(\[\[.*\]\])\ntp=4 +\1\npcp=2,tp=2,dcp=4,ep=4 +\1\n"),
    ],
)
def test_example_runs(example, shown, tmp_path):
    run = process(EXAMPLES / example, env=without_devices(), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.search(shown, run.stdout), run.stdout
