"""save_pretrained and convert: what they write, that it comes back, and that nothing half-written stays."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import REFERENCE
from tensors import assert_same, read_folder

from glmjax import checkpoint
from glmjax.blockfp8 import dequantize, quantize, quantize_fp8
from glmjax.checkpoint import convert, load_checkpoint, save_pretrained, stored_dtype, time_loads
from glmjax.config import GLMConfig
from glmjax.errors import CheckpointError, ConfigError
from glmjax.params import abstract_params, random_params

TINY = REFERENCE / "tiny_glm"
FP8 = TINY / "fp8"


# Saving.


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("source", [TINY, FP8], ids=["plain", "fp8"])
def test_saved_folder_has_the_reference_tensors(tmp_path, source):
    config, params = load_checkpoint(source)
    save_pretrained(config, params, tmp_path / "out", dtype="bfloat16")
    ours, theirs = read_folder(tmp_path / "out"), read_folder(source)
    kv_b = re.compile(r".*kv_b_proj\.weight(_scale_inv)?")
    if source == FP8:  # the tree holds these dequantised
        theirs = {k: v for k, v in theirs.items() if not kv_b.fullmatch(k)}
        assert ours.keys() - theirs.keys() == {f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(8)}
    else:
        assert ours.keys() == index_of(TINY).keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        np.testing.assert_array_equal(ours[name].view(np.uint8), tensor.view(np.uint8), err_msg=name)
    assert index_of(tmp_path / "out").keys() == ours.keys()


def test_saved_configs(tmp_path):
    config, params = load_checkpoint(FP8)
    save_pretrained(config, params, tmp_path / "out", dtype="bfloat16")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["dtype"] == "bfloat16"
    quantization = raw["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    plain = set(quantization["modules_to_not_convert"])
    assert {"lm_head", "model.layers.0.self_attn.kv_b_proj", "model.layers.3.mlp.gate"} <= plain
    assert "model.layers.0.self_attn.q_a_proj" not in plain
    assert GLMConfig.from_dict(raw) == config
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 2, 3]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
def test_round_trip_is_exact(tmp_path, dtype, quantized):
    config = GLMConfig.tiny(hidden_size=136, num_hidden_layers=5, n_shared_experts=2)
    params = random_params(config, dtype, seed=3)
    params = quantize_fp8(params) if quantized else params
    save_pretrained(config, params, tmp_path / "out", max_shard_bytes=1e6)
    assert len(list((tmp_path / "out").glob("model-0000*-of-0000*.safetensors"))) > 2
    again, loaded = load_checkpoint(tmp_path / "out", jnp.dtype(dtype).name)
    assert again == config
    assert_same(loaded, params)


@pytest.mark.parametrize(
    "changes",
    [
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 7, "num_nextn_predict_layers": 0},
        {"num_nextn_predict_layers": 0},
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_round_trip_of_unusual_shapes(tmp_path, changes, quantized):
    config = GLMConfig.tiny(**changes)
    params = random_params(config)
    params = quantize_fp8(params) if quantized else params
    save_pretrained(config, params, tmp_path / "hf")
    assert_same(load_checkpoint(tmp_path / "hf")[1], params)
    convert(tmp_path / "hf", tmp_path / "orbax")
    assert_same(load_checkpoint(tmp_path / "orbax")[1], params)


@pytest.mark.parametrize("quantized", [False, True])
def test_round_trip_without_shared_experts(tmp_path, quantized):
    config = GLMConfig.tiny(n_shared_experts=0)
    tree = abstract_params(config, jnp.dtype(jnp.float32))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, leaf.dtype), tree)
    params = quantize_fp8(params) if quantized else params
    save_pretrained(config, params, tmp_path / "hf")
    assert not any("shared_experts" in name for name in read_folder(tmp_path / "hf"))
    assert_same(load_checkpoint(tmp_path / "hf")[1], params)
    convert(tmp_path / "hf", tmp_path / "orbax")
    assert_same(load_checkpoint(tmp_path / "orbax")[1], params)


def test_params_without_mtp_are_saved_as_a_model_without_it(tmp_path):
    config, params = load_checkpoint(TINY, mtp=False)
    save_pretrained(config, params, tmp_path / "out")
    assert GLMConfig.from_hf(tmp_path / "out") == dataclasses.replace(config, num_nextn_predict_layers=0)
    assert_same(load_checkpoint(tmp_path / "out")[1], params)


def test_shards_keep_to_their_size(tmp_path):
    config, params = load_checkpoint(TINY)
    save_pretrained(config, params, tmp_path / "out", max_shard_bytes=500_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert all(size < 500_000 + 50_000 for size in sizes)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_folder(tmp_path / "out").values())


def test_params_of_another_config_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"params do not fit config: embed is \(320, 128\)"):
        save_pretrained(GLMConfig.tiny(vocab_size=640), random_params(GLMConfig.tiny()), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_quantise_and_back():
    weight = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    weight[:128, :128] = 0
    values, scale = quantize(weight)
    assert (values.shape, scale.shape) == ((300, 200), (3, 2))
    assert scale[0, 0] == 1
    np.testing.assert_allclose(scale[1, 1], np.abs(weight[128:256, 128:]).max() / 448, rtol=1e-6)
    error = np.abs(dequantize(values, scale) - weight)
    assert (error <= np.abs(weight) / 16 + scale.max() / 512).all()


# Converting.


@pytest.mark.parametrize("source", [TINY, FP8], ids=["plain", "fp8"])
def test_to_orbax_and_back(tmp_path, source):
    convert(source, tmp_path / "orbax", to="orbax", dtype="float32")
    config, params = load_checkpoint(source)
    assert load_checkpoint(tmp_path / "orbax")[0] == config
    assert_same(load_checkpoint(tmp_path / "orbax")[1], params)
    assert_same(load_checkpoint(tmp_path / "orbax", mtp=False)[1], load_checkpoint(source, mtp=False)[1])
    assert_same(load_checkpoint(tmp_path / "orbax", "bfloat16")[1], load_checkpoint(source, "bfloat16")[1])
    convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
    assert_same(load_checkpoint(tmp_path / "hf")[1], params)


def test_dtype_stays_unless_said_otherwise(tmp_path):
    convert(TINY, tmp_path / "same")
    convert(TINY, tmp_path / "half", to="hf", dtype="float16")
    convert(tmp_path / "half", tmp_path / "half_orbax")
    folders = (TINY, tmp_path / "same", tmp_path / "half", tmp_path / "half_orbax")
    assert [stored_dtype(folder) for folder in folders] == ["bfloat16", "bfloat16", "float16", "float16"]


def test_what_orbax_stored_its_own_way_is_restored_by_orbax(tmp_path):
    import orbax.checkpoint as ocp

    config, params = load_checkpoint(FP8)
    folder = tmp_path / "orbax"
    checkpoint.convert(FP8, folder, dtype="float32")
    shutil.rmtree(folder / "params")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "params", jax.tree.map(lambda leaf: leaf, to_dicts(params)))
    assert_same(load_checkpoint(folder)[1], params)
    assert_same(load_checkpoint(folder, mtp=False)[1], load_checkpoint(FP8, mtp=False)[1])
    assert stored_dtype(folder) == "float32"
    assert config == GLMConfig.from_hf(folder)


def to_dicts(tree: object) -> object:
    if not dataclasses.is_dataclass(tree):
        return tree
    return {name: to_dicts(leaf) for name, leaf in vars(tree).items() if leaf is not None}


def test_tokenizer_files_come_along(tmp_path):
    shutil.copytree(TINY, tmp_path / "src")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "src" / name).write_text(name)
    convert(tmp_path / "src", tmp_path / "dst")
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "dst" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert not (tmp_path / "dst" / "ref.npz").exists()
    generation = (tmp_path / "dst" / "generation_config.json").read_bytes()
    assert generation == (TINY / "generation_config.json").read_bytes()


@pytest.mark.parametrize("write", ["save_pretrained", "convert"])
def test_a_folder_is_replaced_only_on_request(tmp_path, write):
    config, params = load_checkpoint(TINY)

    def run(overwrite: bool) -> None:
        if write == "convert":
            convert(TINY, tmp_path / "out", overwrite=overwrite)
        else:
            save_pretrained(config, params, tmp_path / "out", overwrite=overwrite)

    (tmp_path / "out").mkdir()
    run(False)  # an empty folder is no loss
    (tmp_path / "out" / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="out exists; pass overwrite=True"):
        run(False)
    assert (tmp_path / "out" / "note").read_text() == "mine"
    run(True)
    assert not (tmp_path / "out" / "note").exists()
    assert_same(load_checkpoint(tmp_path / "out")[1], params)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_failed_write_leaves_everything_as_it_was(tmp_path, monkeypatch, existing):
    target = tmp_path / "out"
    if existing:
        convert(TINY, target)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.shutil, "copyfile", fail)
    with pytest.raises(CheckpointError, match="out cannot be written: No space left on device"):
        convert(TINY, target, overwrite=True)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_failed_read_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere not found"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match="'gguf'"):
        convert(TINY, tmp_path / "out", to="gguf")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'int4'"):
        convert(TINY, tmp_path / "out", dtype="int4")
    assert list(tmp_path.iterdir()) == []


def test_time_loads_reads_the_clock_it_is_given(tmp_path):
    ticks = itertools.count()
    assert time_loads([TINY, FP8], "float32", lambda: float(next(ticks))) == {str(TINY): 1.0, str(FP8): 1.0}
