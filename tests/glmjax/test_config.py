"""GLMConfig: what it reads from Hugging Face, what it refuses, and the presets."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from reference import REFERENCE

from glmjax.config import GLMConfig, index_share
from glmjax.errors import CheckpointError, ConfigError

TINY = REFERENCE / "tiny_glm"
FULL_LAYERS = [0, 1, 2, *range(6, 75, 4)]


@pytest.fixture
def raw() -> dict[str, Any]:
    return json.loads((TINY / "config.json").read_text())


def full_layers(config: GLMConfig) -> list[int]:
    return [i for i, kind in enumerate(config.indexer_types) if kind == "full"]


def test_tiny_glm_is_read_key_by_key():
    assert GLMConfig.from_hf(TINY) == GLMConfig.tiny()
    assert GLMConfig.from_hf(TINY / "config.json") == GLMConfig.tiny()


def test_tiny_glm_values():
    config = GLMConfig.from_hf(TINY)
    assert config.indexer_types == ("full", "full", "full", "shared", "shared", "shared", "full")
    assert (config.num_moe_layers, config.num_full_indexers, config.first_k_dense_replace) == (4, 4, 3)
    assert (config.rope_theta, config.rms_norm_eps, config.routed_scaling_factor) == (8e6, 1e-5, 2.5)
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == ((1, 2, 3), 1, None)
    assert config.num_nextn_predict_layers == 1
    assert config.index_share_for_mtp_iteration


def test_fp8_config_describes_the_same_model():
    assert GLMConfig.from_hf(TINY / "fp8") == GLMConfig.tiny()


def test_glm_5_3_preset():
    config = GLMConfig.glm_5_3()
    assert full_layers(config) == FULL_LAYERS
    assert config.num_full_indexers == 21
    assert config.num_moe_layers == 75
    assert config.qk_head_dim == 256
    assert config.softmax_scale == 1 / 16
    assert GLMConfig.from_dict(config.to_hf()) == config


def test_cache_row_of_glm_5_3_is_54728_bytes():
    config = GLMConfig.glm_5_3()
    mla = config.kv_lora_rank + 4 * (config.kv_lora_rank // 128) + 2 * config.qk_rope_head_dim
    index = config.index_head_dim + 4
    layers, indexers = config.num_hidden_layers + 1, config.num_full_indexers + 1
    assert (mla, index) == (656, 132)
    assert layers * mla + indexers * index == 54728


def test_presets_take_changes():
    config = GLMConfig.tiny(num_hidden_layers=5, index_topk=4)
    assert (config.num_hidden_layers, config.index_topk, len(config.indexer_types)) == (5, 4, 5)


# Which layers run the indexer.


def test_indexer_types_come_before_pattern_and_frequency(raw):
    raw |= {"indexer_types": ["full", "shared"] * 3 + ["full"], "index_topk_pattern": "FFFFFFF", "index_topk_freq": 4}
    assert full_layers(GLMConfig.from_dict(raw)) == [0, 2, 4, 6]


@pytest.mark.parametrize("pattern", ["FSSFSSF", ["full", "shared", "shared", "full", "shared", "shared", "full"]])
def test_pattern_comes_before_frequency(raw, pattern):
    raw |= {"indexer_types": None, "index_topk_pattern": pattern, "index_topk_freq": 4}
    assert full_layers(GLMConfig.from_dict(raw)) == [0, 3, 6]


def test_frequency_and_offset(raw):
    raw |= {"indexer_types": None, "index_topk_pattern": None}
    assert full_layers(GLMConfig.from_dict(raw)) == [0, 1, 2, 6]


def test_absent_keys_mean_glm_5(raw):
    for key in ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"):
        raw.pop(key)
    raw.pop("index_share_for_mtp_iteration")
    config = GLMConfig.from_dict(raw)
    assert config.indexer_types == ("full",) * 7
    assert not config.index_share_for_mtp_iteration


def test_frequency_without_offset_takes_hugging_faces_default(raw):
    raw |= {"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": None}
    assert GLMConfig.from_dict(raw).indexer_types == index_share(7, freq=4, offset=2)


def test_index_share_rule():
    expected = tuple("full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78))
    assert index_share(78, freq=4, offset=3) == expected


def test_dense_layers_from_either_key(raw):
    raw["mlp_layer_types"] = None
    assert GLMConfig.from_dict(raw).first_k_dense_replace == 3
    raw |= {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5, "first_k_dense_replace": None}
    assert GLMConfig.from_dict(raw).first_k_dense_replace == 2


def test_rope_theta_from_either_key(raw):
    raw |= {"rope_parameters": None, "rope_theta": 5e5}
    assert GLMConfig.from_dict(raw).rope_theta == 5e5


# What is refused.

UNSUPPORTED = {
    "model_type": "glm5_next",
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "moe_layer_freq": 2,
    "n_group": 8,
    "topk_group": 4,
    "tie_word_embeddings": True,
    "rope_interleave": False,
    "moe_router_dtype": "bfloat16",
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_unsupported_options_are_named_with_their_value(raw, key):
    raw[key] = UNSUPPORTED[key]
    with pytest.raises(ConfigError) as error:
        GLMConfig.from_dict(raw)
    assert key in str(error.value)
    assert repr(UNSUPPORTED[key]) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_type", "'yarn'"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quant_method", "'awq'"]),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            ["weight_block_size", "[64, 64]"],
        ),
        ({"mlp_layer_types": ["sparse"] * 7 + ["dense"]}, ["mlp_layer_types"]),
        ({"indexer_types": None, "index_topk_pattern": "FXSSSSS"}, ["index_topk_pattern", "'X'"]),
        ({"indexer_types": ["full"] * 6}, ["indexer_types", "6", "7"]),
        ({"indexer_types": ["shared"] + ["full"] * 6}, ["indexer_types[0]"]),
        ({"indexer_types": ["full"] * 6 + ["half"]}, ["indexer_types", "'half'"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"hidden_size": "wide"}, ["hidden_size", "'wide'"]),
        ({"qk_rope_head_dim": 15}, ["qk_rope_head_dim", "15"]),
        ({"num_experts_per_tok": 17}, ["num_experts_per_tok=17", "n_routed_experts=16"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers", "2"]),
    ],
)
def test_values_that_cannot_work_are_named(raw, changes, words):
    with pytest.raises(ConfigError) as error:
        GLMConfig.from_dict(raw | changes)
    assert all(word in str(error.value) for word in words), error.value


def test_missing_and_broken_files(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"config\.json not found"):
        GLMConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        GLMConfig.from_hf(tmp_path)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GLMConfig.tiny().hidden_size = 1  # type: ignore[misc]
