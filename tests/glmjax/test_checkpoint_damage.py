"""Checkpoints that cannot be loaded: each fails with one line that names the file or the tensor, and what is wrong."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reference import REFERENCE
from tensors import Tensors, read_folder, write_file

from glmjax.checkpoint import convert, load_checkpoint
from glmjax.errors import CheckpointError, ConfigError, GlmjaxError

TINY = REFERENCE / "tiny_glm"
FP8 = TINY / "fp8"
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def copy(source: Path, target: Path) -> Path:
    """A checkpoint to damage: the reference files are read-only."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".safetensors"):
            shutil.copyfile(file, target / file.name)
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy(TINY, tmp_path / "broken")


def refusal(folder: Path, kind: type[GlmjaxError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        load_checkpoint(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# Files.


def test_no_such_folder(tmp_path):
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'} not found"
    assert refusal(TINY / "config.json") == f"{TINY / 'config.json'} is not a folder"


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert "config.json not found" in refusal(folder)


def test_no_weights(folder):
    for file in folder.glob("model*"):
        file.unlink()
    assert f"holds neither {INDEX} nor model.safetensors" in refusal(folder)


def test_missing_shard(folder):
    (folder / SHARD).unlink()
    assert refusal(folder) == f"{folder / SHARD} not found, but {INDEX} names it"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": 3}}'])
def test_broken_index(folder, text):
    (folder / INDEX).write_text(text)
    assert refusal(folder) == f"{folder / INDEX} is not a valid safetensors index"


def test_index_that_leads_outside(folder):
    edit_json(folder / INDEX, weight_map={"lm_head.weight": "../other/model.safetensors"})
    assert "outside the folder" in refusal(folder)


def test_index_that_names_a_tensor_its_shard_lacks(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    edit_json(folder / INDEX, **index)
    message = refusal(folder)
    assert "model-00002-of-00002.safetensors lacks model.norm.weight" in message


@pytest.mark.parametrize("keep", [0, 7, 8, 1000, -1])
def test_truncated_file_says_both_sizes(folder, keep):
    full = (folder / SHARD).stat().st_size
    size = keep if keep >= 0 else full + keep
    os.truncate(folder / SHARD, size)
    message = refusal(folder)
    assert f"{folder / SHARD} is truncated" in message
    assert str(size) in message
    if keep == -1:
        assert str(full) in message


def with_header(file: Path, header: bytes, length: int | None = None) -> None:
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(64))


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [2]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": 4, "shape": [2], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
    ],
)
def test_corrupt_header(folder, header):
    with_header(folder / SHARD, header)
    assert f"{folder / SHARD} has a corrupt safetensors header" in refusal(folder)


def test_header_length_out_of_range(folder):
    with_header(folder / SHARD, b"{}", length=2**60)
    assert "header length 1152921504606846976 is out of range" in refusal(folder)


# Tensors.


def rewrite(folder: Path, source: Path, change: Callable[[Tensors], object]) -> None:
    tensors = read_folder(source)
    change(tensors)
    for file in folder.glob("model*"):
        file.unlink()
    write_file(folder / "model.safetensors", tensors)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.6.self_attn.indexer.k_norm.bias",
        "model.layers.4.mlp.experts.11.up_proj.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.7.eh_proj.weight",
    ],
)
def test_missing_tensor_is_named(folder, name):
    rewrite(folder, TINY, lambda tensors: tensors.pop(name))
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.5.self_attn.kv_b_proj.weight"])
def test_wrong_shape_is_named_with_both(folder, name):
    right = list(read_folder(TINY)[name].shape)
    wrong = [*right[:-1], right[-1] + 8]
    rewrite(folder, TINY, lambda tensors: tensors.update({name: np.zeros(wrong, np.float32)}))
    message = refusal(folder)
    assert name in message
    assert str(right) in message
    assert str(wrong) in message


def test_wrong_shape_of_a_scale(tmp_path):
    folder = copy(FP8, tmp_path / "broken")
    name = "model.layers.2.self_attn.o_proj.weight_scale_inv"
    rewrite(folder, FP8, lambda tensors: tensors.update({name: np.ones((2, 1), np.float32)}))
    message = refusal(folder)
    assert all(word in message for word in (name, "[2, 1]", "[1, 1]"))


def test_unsupported_dtype_is_named(folder):
    text = (folder / SHARD).read_bytes()
    length = struct.unpack("<Q", text[:8])[0]
    header = json.loads(text[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "I16"
    changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    (folder / SHARD).write_bytes(text[:8] + changed + text[8 + length :])
    assert refusal(folder) == "model.norm.weight is I16; expected one of F32, BF16, F16"
    header["model.norm.weight"]["dtype"] = "F4"
    changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    (folder / SHARD).write_bytes(text[:8] + changed + text[8 + length :])
    assert "model.norm.weight is F4" in refusal(folder)


def test_fp8_without_its_scale(tmp_path):
    folder = copy(FP8, tmp_path / "broken")
    name = "model.layers.2.self_attn.o_proj.weight"
    rewrite(folder, FP8, lambda tensors: tensors.pop(f"{name}_scale_inv"))
    assert f"{name} is F8_E4M3 without {name}_scale_inv" in refusal(folder)


def test_scale_of_a_weight_that_is_not_fp8(folder):
    name = "model.layers.2.self_attn.o_proj.weight"
    rewrite(folder, TINY, lambda tensors: tensors.update({f"{name}_scale_inv": np.ones((1, 1), np.float32)}))
    assert f"{name} has a {name}_scale_inv but is BF16" in refusal(folder)


# Configs.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 640}, ["model.embed_tokens.weight", "[320, 128]", "[640, 128]"]),
        ({"n_routed_experts": 8}, ["mlp.gate.weight", "[16, 128]", "[8, 128]"]),
        ({"num_attention_heads": 8}, ["q_b_proj", "[160, 64]", "[320, 64]"]),
        (
            {"num_hidden_layers": 9, "indexer_types": ["full"] * 9, "mlp_layer_types": None},
            ["lacks tensor model.layers.8."],
        ),
        ({"num_hidden_layers": 5, "indexer_types": ["full"] * 5, "mlp_layer_types": None}, ["num_hidden_layers=5"]),
        ({"mlp_layer_types": None, "first_k_dense_replace": 1}, ["model.layers.1.mlp.gate"]),
    ],
)
def test_config_of_another_checkpoint(folder, changes, words):
    edit_json(folder / "config.json", **changes)
    message = refusal(folder)
    assert all(word in message for word in words), message


def test_unsupported_option_is_named(folder):
    edit_json(folder / "config.json", hidden_act="gelu")
    assert refusal(folder, ConfigError) == "hidden_act='gelu' is not supported; expected 'silu'"


# Orbax folders.


@pytest.fixture(scope="module")
def whole_orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "orbax"
    convert(TINY, path)
    return path


@pytest.fixture
def orbax(whole_orbax: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole_orbax, tmp_path / "broken")
    return tmp_path / "broken"


def test_orbax_truncated_array(orbax):
    file = orbax / "params" / "moe.down" / "0.0.0.0"
    full = file.stat().st_size
    os.truncate(file, full - 4)
    message = refusal(orbax)
    assert all(word in message for word in (str(file), "damaged", str(full), str(full - 4)))


def test_orbax_missing_array(orbax):
    shutil.rmtree(orbax / "params" / "head")
    assert "lacks head" in refusal(orbax)


def test_orbax_missing_data(orbax):
    (orbax / "params" / "head" / "0.0").unlink()
    assert f"{orbax / 'params' / 'head' / '0.0'} not found" in refusal(orbax)


def test_orbax_broken_header(orbax):
    (orbax / "params" / "head" / ".zarray").write_text("{}")
    assert f"{orbax / 'params' / 'head' / '.zarray'} is not a valid Zarr header" in refusal(orbax)


def test_orbax_without_arrays(orbax):
    shutil.rmtree(orbax / "params")
    (orbax / "params").mkdir()
    assert f"{orbax / 'params'} cannot be read by Orbax" in refusal(orbax)


def test_orbax_with_another_config(orbax):
    edit_json(orbax / "config.json", vocab_size=640)
    message = refusal(orbax)
    assert all(word in message for word in ("embed", "[320, 128]", "[640, 128]"))
    edit_json(orbax / "config.json", vocab_size=320, num_nextn_predict_layers=0)
    assert "MTP layer" in refusal(orbax)
