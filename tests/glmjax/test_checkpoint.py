"""load_checkpoint on whole checkpoints, against direct reads of their tensors."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import REFERENCE
from tensors import Tensors, assert_same, dequantized, read_folder, write_file

import glmjax
from glmjax import hf_read
from glmjax.blockfp8 import dequantize
from glmjax.checkpoint import convert, load_checkpoint, save_pretrained, weights_name
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.hf_names import FP8_LEAVES, HALVES, pieces
from glmjax.params import Params, QuantizedWeight, random_params
from glmjax.sharding.layout import Layout

TINY = REFERENCE / "tiny_glm"
FP8 = TINY / "fp8"
FULL = (0, 1, 2, 6, 7)  # layers with an indexer; 7 is the MTP layer


@pytest.fixture(scope="module")
def plain() -> tuple[Params, Tensors]:
    return load_checkpoint(TINY)[1], read_folder(TINY)


@pytest.fixture(scope="module")
def fp8() -> tuple[Params, Tensors]:
    return load_checkpoint(FP8)[1], read_folder(FP8)


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


def test_large_tensors_are_read_block_by_block(tmp_path, fp8, monkeypatch):
    """In blocks of 128 rows, on devices whose rows begin inside one: 40 of the 160 rows of q_b_proj each."""
    _, tensors = fp8
    name = "model.layers.3.self_attn.q_b_proj.weight"
    mixed = {k: v for k, v in tensors.items() if k != f"{name}_scale_inv"} | {name: dequantized(tensors, name)}
    folder = rewritten(tmp_path / "x", FP8, mixed)
    monkeypatch.setattr(hf_read, "_BLOCK_BYTES", 1)
    mesh = jax.make_mesh((4,), ("rows",))

    def sharding(leaf: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
        by_rows = leaf.shape[1:] == (160, 64)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*((None, "rows") if by_rows else ())))

    for shardings in (None, lambda tree: jax.tree.map(sharding, tree)):
        _, params = load_checkpoint(folder, shardings=shardings)
        for layer in range(8):
            expected = dequantized(tensors, f"model.layers.{layer}.self_attn.q_b_proj.weight")
            np.testing.assert_array_equal(params.attention.query_up[layer], expected)
        expected = tensors["model.layers.0.self_attn.indexer.wq_b.weight"].view(np.uint8)
        np.testing.assert_array_equal(np.asarray(params.indexer.query.values[0]).view(np.uint8), expected)


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


@pytest.mark.parametrize("degrees", ["tp=4,dp=2,ep=8", "pcp=8,ep=8", "dp=1"])
def test_a_layout_spreads_the_same_weights_over_its_devices(degrees):
    layout = Layout.parse(degrees)
    _, expected = load_checkpoint(TINY)
    _, params = load_checkpoint(TINY, layout=layout)
    assert params.moe.gate_up.addressable_shards[0].data.shape[1] * layout.ep == params.moe.gate_up.shape[1]
    assert len(params.embed.devices()) == layout.num_devices
    for mine, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert (np.asarray(mine) == np.asarray(other)).all()


def test_a_layout_that_cannot_split_the_weights_is_refused():
    with pytest.raises(ConfigError, match="tp=8 cannot split"):
        load_checkpoint(TINY, layout=Layout(tp=8))


def test_layout_and_shardings_exclude_one_another():
    with pytest.raises(ConfigError, match="pass one of them"):
        load_checkpoint(TINY, layout=Layout(pcp=2), shardings=lambda tree: tree)


@pytest.mark.parametrize("layout", ["pcp=8", object()])
def test_what_is_no_layout_is_refused(layout):
    with pytest.raises(ConfigError, match=r"layout must be a glmjax\.Layout"):
        load_checkpoint(TINY, layout=layout)


# Names.


def test_names_of_glm_5_2_fp8():
    names = {piece.name for piece in pieces(GLMConfig.glm_5_3(), mtp=True)}
    quantized = {p.name for p in pieces(GLMConfig.glm_5_3(), mtp=True) if p.leaf in FP8_LEAVES or p.leaf in HALVES}
    assert len(names) + len(quantized) == 118_629
    last = [name for name in names if name.startswith("model.layers.78.")]
    assert len(last) == 791


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_weights_have_a_name_that_copies_share_and_changed_ones_do_not(to, tmp_path):
    config = GLMConfig.tiny()
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "hf")
    save_pretrained(config, params, tmp_path / "again", max_shard_bytes=20_000)
    other = params.replace(head=params.head.at[-1].add(1.0))
    save_pretrained(config, other, tmp_path / "other")
    names = []
    for folder in ("hf", "again", "other"):
        path = tmp_path / folder
        if to == "orbax":
            convert(path, tmp_path / f"{folder}-orbax", to="orbax")
            path = tmp_path / f"{folder}-orbax"
        names.append(weights_name(path))
    assert names[0] == names[1] != names[2]
