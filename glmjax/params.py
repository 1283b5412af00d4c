"""The parameter tree: one stacked array per kind of weight, whatever the depth of the model.

Every weight of a kind is stacked over the layers that have it, so that a compiled step takes a few dozen arguments
and a ``lax.scan`` over layers indexes the stacks. The MTP layer, if loaded, is the last entry of the attention,
indexer and mixture-of-experts stacks.

Letters: L layers, N indexers, M mixture-of-experts layers, D model width, H heads, E experts, F expert width.
A linear weight is stored [..., out, in], as in the checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from glmjax.config import GLMConfig

QUANT_BLOCK = 128  # rows and columns that share a scale (spec/model.md 3.2)


@struct.dataclass
class QuantizedWeight:
    """A block-FP8 weight: ``values * scale``, one scale per 128 x 128 block of the last two axes.

    Attributes:
      values: [..., out, in] float8_e4m3fn, or their bytes as uint8 (see ``fp8_as_bytes``).
      scale: [..., ceil(out / 128), ceil(in / 128)] float32; it multiplies, despite its name in the checkpoint.
      layer: if given, the weight is this entry of the stacks that values and scale then are: kernels read it there,
        where indexing would copy it.
    """

    values: jax.Array
    scale: jax.Array
    layer: jax.Array | int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape if self.layer is None else self.values.shape[1:]


Weight = jax.Array | QuantizedWeight


@struct.dataclass
class AttentionParams:
    """Absorbed MLA, stacked over all L layers.

    ``kv_b_proj`` is split by head into ``key_up`` (the query is multiplied by it) and ``value_up`` (the output is).
    """

    input_norm: jax.Array  # [L, D]
    query_down: Weight  # [L, q_lora, D]
    query_norm: jax.Array  # [L, q_lora]
    query_up: Weight  # [L, H * (nope + rope), q_lora]
    kv_down: Weight  # [L, kv_lora + rope, D]
    kv_norm: jax.Array  # [L, kv_lora]
    key_up: jax.Array  # [L, H, nope, kv_lora]
    value_up: jax.Array  # [L, H, v, kv_lora]
    output: Weight  # [L, D, H * v]
    output_norm: jax.Array  # [L, D], post_attention_layernorm


@struct.dataclass
class IndexerParams:
    """The lightning indexer, stacked over the N layers that run it."""

    query: Weight  # [N, index_heads * index_dim, q_lora]
    key: Weight  # [N, index_dim, D]
    key_norm_weight: jax.Array  # [N, index_dim]
    key_norm_bias: jax.Array  # [N, index_dim]
    head_weights: jax.Array  # [N, index_heads, D] float32


@struct.dataclass
class DenseParams:
    """SwiGLU of the first layers, stacked over them."""

    gate_up: Weight  # [dense layers, 2, intermediate, D]
    down: Weight  # [dense layers, D, intermediate]


@struct.dataclass
class MoEParams:
    """Routed and shared experts, stacked over the M layers that have them."""

    router: jax.Array  # [M, E, D] float32
    router_bias: jax.Array  # [M, E] float32 (bf16 would change the choice, spec/model.md 2.6)
    gate_up: Weight  # [M, E, 2, F, D]
    down: Weight  # [M, E, D, F]
    shared_gate_up: Weight  # [M, 2, F * shared, D]
    shared_down: Weight  # [M, D, F * shared]


@struct.dataclass
class MTPParams:
    """What the multi-token-prediction layer has besides a decoder layer."""

    embed_norm: jax.Array  # [D], enorm
    hidden_norm: jax.Array  # [D], hnorm
    projection: jax.Array  # [D, 2 D], eh_proj: the embedding comes first
    final_norm: jax.Array  # [D], shared_head.norm


@struct.dataclass
class Params:
    """The whole model."""

    embed: jax.Array  # [V, D]
    attention: AttentionParams
    indexer: IndexerParams
    dense: DenseParams | None
    moe: MoEParams | None
    mtp: MTPParams | None
    final_norm: jax.Array  # [D]
    head: jax.Array  # [V, D]


FLOAT32_WEIGHTS = frozenset({"head_weights", "router", "router_bias"})


def abstract_params(config: GLMConfig, dtype: DTypeLike, *, mtp: bool = True, quantized: bool = False) -> Params:
    """Shapes and dtypes of the tree, as ``jax.ShapeDtypeStruct`` leaves.

    Args:
      dtype: of the weights; router and index head weights are float32 always.
      mtp: include the MTP layer (if the config has one).
      quantized: ``Weight`` leaves are ``QuantizedWeight``.
    """
    mtp = mtp and config.num_nextn_predict_layers > 0
    extra = int(mtp)
    layers, indexers = config.num_hidden_layers + extra, config.num_full_indexers + extra
    moe_layers, dense_layers = config.num_moe_layers + extra, config.first_k_dense_replace
    D, H, E = config.hidden_size, config.num_attention_heads, config.n_routed_experts
    F, shared = config.moe_intermediate_size, config.moe_intermediate_size * config.n_shared_experts
    kv, rope = config.kv_lora_rank, config.qk_rope_head_dim

    def array(*shape: int, dtype: DTypeLike = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def weight(*shape: int) -> Weight:
        if not quantized:
            return array(*shape)
        *lead, rows, columns = shape
        blocks = (-(-rows // QUANT_BLOCK), -(-columns // QUANT_BLOCK))
        return QuantizedWeight(
            array(*shape, dtype=jnp.float8_e4m3fn),
            array(*lead, *blocks, dtype=jnp.float32),
        )

    f32 = jnp.float32
    return Params(
        embed=array(config.vocab_size, D),
        attention=AttentionParams(
            input_norm=array(layers, D),
            query_down=weight(layers, config.q_lora_rank, D),
            query_norm=array(layers, config.q_lora_rank),
            query_up=weight(layers, H * config.qk_head_dim, config.q_lora_rank),
            kv_down=weight(layers, kv + rope, D),
            kv_norm=array(layers, kv),
            key_up=array(layers, H, config.qk_nope_head_dim, kv),
            value_up=array(layers, H, config.v_head_dim, kv),
            output=weight(layers, D, H * config.v_head_dim),
            output_norm=array(layers, D),
        ),
        indexer=IndexerParams(
            query=weight(indexers, config.index_n_heads * config.index_head_dim, config.q_lora_rank),
            key=weight(indexers, config.index_head_dim, D),
            key_norm_weight=array(indexers, config.index_head_dim),
            key_norm_bias=array(indexers, config.index_head_dim),
            head_weights=array(indexers, config.index_n_heads, D, dtype=f32),
        ),
        dense=DenseParams(
            gate_up=weight(dense_layers, 2, config.intermediate_size, D),
            down=weight(dense_layers, D, config.intermediate_size),
        )
        if dense_layers
        else None,
        moe=MoEParams(
            router=array(moe_layers, E, D, dtype=f32),
            router_bias=array(moe_layers, E, dtype=f32),
            gate_up=weight(moe_layers, E, 2, F, D),
            down=weight(moe_layers, E, D, F),
            shared_gate_up=weight(moe_layers, 2, shared, D),
            shared_down=weight(moe_layers, D, shared),
        )
        if moe_layers
        else None,
        mtp=MTPParams(array(D), array(D), array(D, 2 * D), array(D)) if mtp else None,
        final_norm=array(D),
        head=array(config.vocab_size, D),
    )


def random_params(config: GLMConfig, dtype: DTypeLike = jnp.float32, *, seed: int = 0, mtp: bool = True) -> Params:
    """A random model in which no part is degenerate, the same for the same seed on every platform.

    Matrices are normal with deviation 1/sqrt(in), norms 1 + 0.05 normal, biases 0.05 normal, embeddings normal.
    """
    tree = abstract_params(config, dtype, mtp=mtp)
    rng = np.random.default_rng(seed)

    def fill(path: tuple[jax.tree_util.GetAttrKey, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].name
        noise = rng.standard_normal(leaf.shape, dtype=np.float32)
        if name.endswith("norm") or name == "key_norm_weight":
            noise = 1 + 0.05 * noise
        elif name.endswith("bias"):
            noise = 0.05 * noise
        elif name != "embed":
            noise *= max(leaf.shape[-1], 1) ** -0.5
        return jnp.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, tree)


def fp8_as_bytes(params: Params) -> Params:
    """The same model with FP8 values as uint8.

    For XLA's CPU backend, which turns a whole FP8 stack into f16 to index it.  The host's view of a CPU array goes back
    to its device by reference, so nothing is held twice.
    """

    def as_bytes(x: jax.Array) -> jax.Array:
        parts = [jax.device_put(np.asarray(s.data).view(np.uint8), s.device) for s in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts, dtype=jnp.uint8)

    return jax.tree.map(lambda x: as_bytes(x) if x.dtype == jnp.float8_e4m3fn else x, params)


def num_bytes(tree: object) -> int:
    """Bytes of all leaves, abstract ones included."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
