"""load_checkpoint, save_pretrained and convert on whole checkpoints; damaged ones are in test_checkpoint_damage.py."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import REFERENCE
from tensors import Tensors, dequantized, read_folder, write_file

import glmjax
from glmjax import checkpoint
from glmjax.blockfp8 import dequantize, quantize, quantize_fp8
from glmjax.checkpoint import convert, load_checkpoint, save_pretrained, stored_dtype, time_loads
from glmjax.config import GLMConfig
from glmjax.errors import CheckpointError, ConfigError
from glmjax.hf_names import FP8_LEAVES, HALVES, pieces
from glmjax.params import Params, QuantizedWeight, abstract_params, num_bytes, random_params

TINY = REFERENCE / "tiny_glm"
FP8 = TINY / "fp8"
FULL = (0, 1, 2, 6, 7)  # layers with an indexer; 7 is the MTP layer


@pytest.fixture(scope="module")
def plain() -> tuple[Params, Tensors]:
    return load_checkpoint(TINY)[1], read_folder(TINY)


@pytest.fixture(scope="module")
def fp8() -> tuple[Params, Tensors]:
    return load_checkpoint(FP8)[1], read_folder(FP8)


def assert_same(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def plain_weight(weight: jax.Array | QuantizedWeight, *index: int) -> np.ndarray:
    if not isinstance(weight, QuantizedWeight):
        return np.asarray(weight[index], np.float32)
    return dequantize(np.asarray(weight.values[index]), np.asarray(weight.scale[index]))


# Loading, against direct reads of the tensors.


def test_config_and_tree():
    config, params = glmjax.load_checkpoint(TINY)
    assert config == GLMConfig.tiny()
    assert params.attention.query_down.shape == (8, 64, 128)
    assert not any(isinstance(leaf, QuantizedWeight) for leaf in vars(params.attention).values())


@pytest.mark.parametrize("source", ["plain", "fp8"])
def test_every_weight_is_where_it_belongs(source, request):
    params, tensors = request.getfixturevalue(source)

    def stored(layer: int, name: str) -> np.ndarray:
        return dequantized(tensors, f"model.layers.{layer}.{name}")

    equal = np.testing.assert_array_equal
    for layer in range(8):
        attention = params.attention
        equal(attention.input_norm[layer], stored(layer, "input_layernorm.weight"))
        equal(plain_weight(attention.query_down, layer), stored(layer, "self_attn.q_a_proj.weight"))
        equal(attention.query_norm[layer], stored(layer, "self_attn.q_a_layernorm.weight"))
        equal(plain_weight(attention.query_up, layer), stored(layer, "self_attn.q_b_proj.weight"))
        equal(plain_weight(attention.kv_down, layer), stored(layer, "self_attn.kv_a_proj_with_mqa.weight"))
        equal(attention.kv_norm[layer], stored(layer, "self_attn.kv_a_layernorm.weight"))
        by_head = stored(layer, "self_attn.kv_b_proj.weight").reshape(4, 24 + 32, 64)
        equal(attention.key_up[layer], by_head[:, :24])
        equal(attention.value_up[layer], by_head[:, 24:])
        equal(plain_weight(attention.output, layer), stored(layer, "self_attn.o_proj.weight"))
        equal(attention.output_norm[layer], stored(layer, "post_attention_layernorm.weight"))
    for entry, layer in enumerate(FULL):
        indexer = params.indexer
        equal(plain_weight(indexer.query, entry), stored(layer, "self_attn.indexer.wq_b.weight"))
        equal(plain_weight(indexer.key, entry), stored(layer, "self_attn.indexer.wk.weight"))
        equal(indexer.key_norm_weight[entry], stored(layer, "self_attn.indexer.k_norm.weight"))
        equal(indexer.key_norm_bias[entry], stored(layer, "self_attn.indexer.k_norm.bias"))
        equal(indexer.head_weights[entry], stored(layer, "self_attn.indexer.weights_proj.weight"))
    for layer in range(3):
        for half, name in enumerate(("gate", "up")):
            equal(plain_weight(params.dense.gate_up, layer, half), stored(layer, f"mlp.{name}_proj.weight"))
        equal(plain_weight(params.dense.down, layer), stored(layer, "mlp.down_proj.weight"))
    for entry, layer in enumerate(range(3, 8)):
        moe = params.moe
        equal(moe.router[entry], stored(layer, "mlp.gate.weight"))
        equal(moe.router_bias[entry], stored(layer, "mlp.gate.e_score_correction_bias"))
        for half, name in enumerate(("gate", "up")):
            shared = stored(layer, f"mlp.shared_experts.{name}_proj.weight")
            equal(plain_weight(moe.shared_gate_up, entry, half), shared)
            for expert in range(16):
                routed = stored(layer, f"mlp.experts.{expert}.{name}_proj.weight")
                equal(plain_weight(moe.gate_up, entry, expert, half), routed)
        equal(plain_weight(moe.shared_down, entry), stored(layer, "mlp.shared_experts.down_proj.weight"))
        for expert in range(16):
            equal(plain_weight(moe.down, entry, expert), stored(layer, f"mlp.experts.{expert}.down_proj.weight"))
    equal(params.embed, tensors["model.embed_tokens.weight"].astype(np.float32))
    equal(params.final_norm, tensors["model.norm.weight"].astype(np.float32))
    equal(params.head, tensors["lm_head.weight"].astype(np.float32))
    equal(params.mtp.embed_norm, stored(7, "enorm.weight"))
    equal(params.mtp.hidden_norm, stored(7, "hnorm.weight"))
    equal(params.mtp.projection, stored(7, "eh_proj.weight"))
    equal(params.mtp.final_norm, stored(7, "shared_head.norm.weight"))


def test_fp8_weights_stay_fp8(fp8):
    params, tensors = fp8
    weight = params.dense.gate_up
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(np.asarray(weight.values[1, 1]).view(np.uint8), tensors[name].view(np.uint8))
    np.testing.assert_array_equal(weight.scale[1, 1], tensors[f"{name}_scale_inv"])
    for leaf in FP8_LEAVES:
        part, name = leaf.split(".")
        assert isinstance(getattr(getattr(params, part), name), QuantizedWeight), leaf
    assert params.attention.key_up.dtype == params.indexer.head_weights.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_that_of_all_but_router_and_index_heads(dtype):
    _, params = load_checkpoint(FP8, dtype)
    assert params.embed.dtype == params.attention.key_up.dtype == params.attention.kv_norm.dtype == dtype
    assert params.moe.router.dtype == params.moe.router_bias.dtype == params.indexer.head_weights.dtype == "float32"
    assert params.attention.output.values.dtype == "float8_e4m3fn"


def test_without_the_mtp_layer(plain):
    whole, _ = plain
    config, params = load_checkpoint(TINY, mtp=False)
    assert config.num_nextn_predict_layers == 1
    assert params.mtp is None
    assert params.attention.kv_norm.shape[0] == 7
    np.testing.assert_array_equal(params.moe.gate_up, whole.moe.gate_up[:4])
    np.testing.assert_array_equal(params.indexer.query, whole.indexer.query[:4])


def rewritten(folder: Path, source: Path, tensors: Tensors) -> Path:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    write_file(folder / "model.safetensors", tensors)
    return folder


def test_a_checkpoint_that_transformers_saved_has_no_mtp_layer(tmp_path):
    trunk = {k: v for k, v in read_folder(TINY).items() if not k.startswith("model.layers.7.")}
    _, params = load_checkpoint(rewritten(tmp_path / "x", TINY, trunk))
    assert params.mtp is None
    assert_same(params, load_checkpoint(TINY, mtp=False)[1])


def test_extra_tensors_are_ignored(tmp_path, plain):
    params, tensors = plain
    extra = {f"model.layers.4.self_attn.indexer.{name}.weight": np.ones((3, 3), np.float32) for name in ("wk", "wq_b")}
    extra["model.vision.patch.weight"] = np.ones(5, np.float32)
    assert_same(load_checkpoint(rewritten(tmp_path / "x", TINY, tensors | extra))[1], params)


def test_weight_and_scale_in_different_shards(tmp_path, fp8):
    params, tensors = fp8
    shutil.copy(FP8 / "config.json", tmp_path)
    shards = {
        "weights.safetensors": {k: v for k, v in tensors.items() if not k.endswith("_scale_inv")},
        "scales.safetensors": {k: v for k, v in tensors.items() if k.endswith("_scale_inv")},
    }
    for file, part in shards.items():
        write_file(tmp_path / file, part)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load_checkpoint(tmp_path)[1], params)


def test_a_kind_that_is_only_partly_fp8_is_dequantised(tmp_path, fp8):
    params, tensors = fp8
    name = "model.layers.3.self_attn.o_proj.weight"
    mixed = {k: v for k, v in tensors.items() if k != f"{name}_scale_inv"} | {name: dequantized(tensors, name)}
    _, loaded = load_checkpoint(rewritten(tmp_path / "x", FP8, mixed))
    assert not isinstance(loaded.attention.output, QuantizedWeight)
    assert isinstance(loaded.attention.query_up, QuantizedWeight)
    for layer in range(8):
        np.testing.assert_array_equal(loaded.attention.output[layer], plain_weight(params.attention.output, layer))


@pytest.mark.parametrize("source", [TINY, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_shardings_place_the_same_weights(tmp_path, source, form):
    folder = source
    if form == "orbax":
        folder = tmp_path / "orbax"
        convert(source, folder, dtype="float32")
    mesh = jax.make_mesh((2, 4), ("a", "b"))

    def sharding(leaf: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
        # The last axes that divide: parts of tensors, and of stacks, on different devices.
        spec: list[str | None] = [None] * len(leaf.shape)
        for axis, size in (("a", 2), ("b", 4)):
            fits = [i for i, n in enumerate(leaf.shape) if n % size == 0 and spec[i] is None]
            if fits:
                spec[fits[-1]] = axis
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    _, params = load_checkpoint(folder, shardings=lambda tree: jax.tree.map(sharding, tree))
    assert params.head.sharding == sharding(params.head)
    assert not params.head.is_fully_replicated
    assert_same(params, load_checkpoint(folder)[1])


def test_progress_bar_goes_to_stderr_when_wanted(capsys):
    load_checkpoint(TINY, progress=True)
    assert "Loading tiny_glm" in capsys.readouterr().err
    load_checkpoint(TINY)
    out = capsys.readouterr()
    assert out.out == out.err == ""


@pytest.mark.parametrize("dtype", ["int8", "float64", "fp8", "BF16", ""])
def test_unknown_dtype_names_what_is_allowed(dtype):
    with pytest.raises(ConfigError, match="float32, bfloat16, float16") as error:
        load_checkpoint(TINY, dtype)
    assert repr(dtype) in str(error.value)


def test_layout_is_refused():
    with pytest.raises(ConfigError, match="layout"):
        load_checkpoint(TINY, layout=object())


# Names.


def test_names_of_glm_5_2_fp8():
    names = {piece.name for piece in pieces(GLMConfig.glm_5_3(), mtp=True)}
    quantized = {p.name for p in pieces(GLMConfig.glm_5_3(), mtp=True) if p.leaf in FP8_LEAVES or p.leaf in HALVES}
    assert len(names) + len(quantized) == 118_629
    last = [name for name in names if name.startswith("model.layers.78.")]
    assert len(last) == 791


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


# Memory and speed, in a process of their own.

MEASURE = """
import sys, time
import jax
from glmjax.checkpoint import load_checkpoint
from glmjax.params import num_bytes

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

path, dtype = sys.argv[1:]
jax.block_until_ready(jax.device_put(1.0))
before, start = peak(), time.perf_counter()
_, params = load_checkpoint(path, dtype)
print(num_bytes(params), peak() - before, time.perf_counter() - start)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 310 MB in four shards, and the same for Orbax."""
    folder = tmp_path_factory.mktemp("large")
    config = GLMConfig.tiny(
        hidden_size=512, moe_intermediate_size=256, n_routed_experts=64, vocab_size=8192, num_hidden_layers=7
    )
    params = random_params(config, jnp.bfloat16)
    assert 250e6 < num_bytes(params) < 350e6
    save_pretrained(config, params, folder / "hf", dtype="bfloat16", max_shard_bytes=100e6)
    convert(folder / "hf", folder / "orbax")
    return folder


def measure(folder: Path, dtype: str) -> tuple[float, float, float]:
    command = [sys.executable, "-c", MEASURE, str(folder), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    size, rise, seconds = (float(word) for word in output.split())
    return size, rise, seconds


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory of a process")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_peak_memory_is_one_model(large, form, dtype):
    size, rise, _ = measure(large / form, dtype)
    # Besides the model: the tensors that the threads have in hand, and what Python imports on the way.
    assert rise < size + 130e6
    assert rise < 1.5 * size


@pytest.mark.slow
def test_orbax_loads_faster(large):
    assert measure(large / "orbax", "bfloat16")[2] < measure(large / "hf", "bfloat16")[2]
