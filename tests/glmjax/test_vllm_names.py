"""Names of vLLM's: taken where they ask for nothing, else refused in the same words in Python and over HTTP."""

import dataclasses
import inspect
import json
import sys

import pytest

from glmjax import SamplingParams, cli
from glmjax.api import LLM
from glmjax.errors import ConfigError, RequestError
from glmjax.options import EngineOptions, engine_options
from glmjax.serving import protocol
from glmjax.vllm_names import DEGREES, ENGINE, SAMPLING, SAMPLING_IN_PYTHON

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def refusal(call):
    with pytest.raises(RequestError) as caught:
        call()
    return str(caught.value), caught.value.param


def over_http(**fields):
    body = json.dumps({"prompt": "a", **fields}).encode()
    return protocol.decode(body, protocol.CompletionRequest, check=protocol.refuse_unsupported)


# Sampling parameters.


def test_values_that_ask_for_nothing_change_nothing():
    neutral = {name: value for name, (values, _) in SAMPLING_IN_PYTHON.items() for value in values[:1]}
    assert len(neutral) > 10
    assert SamplingParams(**neutral, max_tokens=3) == SamplingParams(max_tokens=3)
    assert SamplingParams(**dict.fromkeys(SAMPLING_IN_PYTHON)) == SamplingParams()
    assert SamplingParams(repetition_penalty=1.0, frequency_penalty=0.0) == SamplingParams()


@pytest.mark.parametrize("name", SAMPLING)
def test_other_values_are_refused_in_the_words_of_http(name):
    said, param = refusal(lambda: SamplingParams(**{name: 7}))
    assert (said, param) == refusal(lambda: over_http(**{name: 7}))
    assert said.startswith(f"{name} is not supported: ") and param == name


@pytest.mark.parametrize("name", SAMPLING_IN_PYTHON)
def test_a_refusal_does_not_say_the_same_thing_twice(name):
    said, _ = refusal(lambda: SamplingParams(**{name: 7}))
    assert said.count("not supported") == 1


def test_best_of_may_equal_n():
    assert SamplingParams(best_of=3, n=3) == SamplingParams(n=3)
    assert refusal(lambda: SamplingParams(best_of=3, n=2))[1] == "best_of"


@pytest.mark.parametrize(
    ("typed", "meant"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("topP", "top_p")]
)
def test_a_misspelt_parameter_is_named_with_the_nearest_one(typed, meant):
    told = f"unknown sampling parameter {typed!r}: did you mean {meant}?"
    assert refusal(lambda: SamplingParams(**{typed: 1})) == (told, typed)


def test_a_parameter_like_no_other_is_named_with_those_there_are():
    said, _ = refusal(lambda: SamplingParams(zzz=1))
    assert said == f"unknown sampling parameter 'zzz': there are {', '.join(FIELDS)}"


def test_the_signature_is_that_of_the_fields():
    assert [*inspect.signature(SamplingParams).parameters] == FIELDS
    assert dataclasses.replace(SamplingParams(top_k=3), top_p=0.5) == SamplingParams(top_k=3, top_p=0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 3, "n": 1}, "write SamplingParams(max_tokens=3, n=1) instead of a mapping"),
        (3, "sampling_params must be SamplingParams or a list of them, got 3"),
        ([{"n": 1}], "sampling_params must be SamplingParams or a list of them, got [{'n': 1}]"),
    ],
)
def test_what_is_no_sampling_params_is_told_so(given, message):
    assert refusal(lambda: LLM._sampling(None, given, 1)) == (message, "sampling_params")


@pytest.mark.parametrize("logprobs", [None, False])
def test_no_top_logprobs_ask_for_nothing(logprobs):
    request = protocol.ChatRequest(messages=[], logprobs=logprobs, top_logprobs=0)
    assert protocol.chat_sampling(request, {}).logprobs is None
    for count in (1, 21, -1):
        request = protocol.ChatRequest(messages=[], logprobs=logprobs, top_logprobs=count)
        assert refusal(lambda request=request: protocol.chat_sampling(request, {}))[1] == "top_logprobs"


# Options of engines.


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"tensor_parallel_size": 2}, "layout='tp=2'"),
        ({"tp": 4}, "layout='tp=4'"),
        ({"decode_context_parallel_size": 8}, "layout='dcp=8'"),
        ({"gpu_memory_utilization": 0.9}, "kv_cache_gib"),
        ({"max_modellen": 3}, "max_model_len"),
        ({"max_seqs": 3}, "max_num_seqs"),
    ],
    ids=str,
)
def test_an_unknown_option_is_named_with_the_nearest_one(given, meant):
    with pytest.raises(ConfigError) as caught:
        engine_options(**given)
    assert str(caught.value) == f"unknown option {next(iter(given))!r}: did you mean {meant}?"


def test_an_option_like_no_other_is_named_with_where_they_are():
    with pytest.raises(ConfigError, match=r"unknown option 'zzz': help.glmjax.options.EngineOptions. says which"):
        engine_options(zzz=1)


def test_names_that_stand_for_vllms_are_options():
    assert {*ENGINE.values()} <= {field.name for field in dataclasses.fields(EngineOptions)}
    for degree in DEGREES.values():
        engine_options(layout=f"{degree}=1")


@pytest.mark.parametrize("name", [*DEGREES, *ENGINE, "enable_prefix_caching"])
def test_the_command_line_names_its_own_option(name, monkeypatch, capsys):
    typed, here = f"--{name.replace('_', '-')}", {**DEGREES, **ENGINE}.get(name, "prefix_caching").replace("_", "-")
    monkeypatch.setattr(sys, "argv", ["glmjax", "serve", "x", typed, "2"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == f"glmjax: No such option: {typed} (did you mean --{here}?)\n"
