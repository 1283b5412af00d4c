"""Malformed files and arguments end in one clear error that names the value."""

import json
from pathlib import Path
from typing import Any

import pytest

from glmjax import api, cli
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.options import engine_options
from glmjax.pool_sizes import pool_sizes

GOOD = GLMConfig.tiny().to_hf()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", "abc"),
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", -1),
        ("routed_scaling_factor", "a"),
        ("norm_topk_prob", "no"),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, "2"]),
        ("rope_parameters", "x"),
    ],
)
def test_config_key_of_the_wrong_type_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        GLMConfig.from_dict(GOOD | {key: value})


@pytest.mark.parametrize("theta", ["q", -5, 0])
def test_rope_theta_must_be_a_positive_number(theta: Any) -> None:
    with pytest.raises(ConfigError, match="rope_theta must be a positive number"):
        GLMConfig.from_dict(GOOD | {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}})


def test_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold an object, got list"):
        GLMConfig.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [([], "must hold an object"), ({"temperature": 3}, "temperature must be"), ({"eos_token_id": "x"}, "eos_token_id")],
)
def test_generation_config_is_checked_at_load(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        api._generation_config(tmp_path, GLMConfig.tiny())


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7, "top_p": 0.9}')
    assert api._generation_config(tmp_path, GLMConfig.tiny())[0] == {"temperature": 0.0}


def test_pool_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise kv_cache_gib"):
        pool_sizes(GLMConfig.tiny(), engine_options(kv_cache_gib=1e-9))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"api_key": ""}, "api_key is empty"), ({"max_num_queued_requests": 0}, "at least 1, got 0")],
)
def test_serve_checks_its_arguments_before_it_loads(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        api.serve("no such model", **options)


@pytest.mark.parametrize(
    "words", [["plan"], ["serve"], ["serve", "demo", "--dtype", "float16"], ["generate", "demo", "-x"]]
)
def test_usage_error_is_one_line_and_exit_code_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["glmjax", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n"), err[:8]) == (2, 1, "glmjax: ")
