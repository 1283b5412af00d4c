"""What a GLM-5 model is: the frozen ``GLMConfig``, read from a Hugging Face ``config.json`` and checked once.

Keys and formulas: spec/model.md section 1.  Nothing here imports jax.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from glmjax.errors import CheckpointError, ConfigError

IndexerType = Literal["full", "shared"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMConfig:
    """Architecture of a ``glm_moe_dsa`` model, under Hugging Face's key names.

    Attributes:
      indexer_types: per layer, "full" (runs the indexer) or "shared" (reuses the top-k of the nearest full layer).
      mla_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``.  Serving engines use ``rms_norm_eps``,
        transformers 1e-6 (spec/model.md 2.2).
      num_nextn_predict_layers: 1 if the checkpoint carries the multi-token-prediction layer, else 0.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[IndexerType, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rope_theta: float = 8e6
    rms_norm_eps: float = 1e-5
    mla_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 1
    index_share_for_mtp_iteration: bool = True
    indexer_rope_interleave: bool = True
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            optional = field.name in ("pad_token_id", "bos_token_id", "num_nextn_predict_layers")
            may_be_zero = field.name in ("first_k_dense_replace", "n_shared_experts")
            if field.type is int and not optional and value < (0 if may_be_zero else 1):
                raise ConfigError(f"{field.name} must be positive, got {value}")
        check = _Checks(self)
        check.even("qk_rope_head_dim")
        check.at_most("first_k_dense_replace", "num_hidden_layers")
        check.at_most("num_experts_per_tok", "n_routed_experts")
        check.at_most("qk_rope_head_dim", "index_head_dim")
        if self.num_nextn_predict_layers not in (0, 1):
            raise ConfigError(f"num_nextn_predict_layers must be 0 or 1, got {self.num_nextn_predict_layers}")
        if len(self.indexer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"indexer_types has {len(self.indexer_types)} entries for {self.num_hidden_layers} layers"
            )
        wrong = set(self.indexer_types) - {"full", "shared"}
        if wrong:
            raise ConfigError(f"indexer_types must be 'full' or 'shared', got {sorted(wrong)[0]!r}")
        if self.indexer_types[0] != "full":
            raise ConfigError("indexer_types[0] must be 'full': there is no earlier top-k to share")

    # Derived sizes.

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    @property
    def num_moe_layers(self) -> int:
        """Mixture-of-experts layers of the trunk (the MTP layer is one more)."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_full_indexers(self) -> int:
        """Layers of the trunk that run the indexer (the MTP layer is one more)."""
        return self.indexer_types.count("full")

    @classmethod
    def from_hf(cls, path: str | Path) -> "GLMConfig":
        """Reads ``config.json`` from a checkpoint folder (or the file itself).

        Raises:
          CheckpointError: the file is missing or not JSON.
          ConfigError: a key has a value that this model cannot honour; the message names key and value.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            raw = json.loads(file.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{file} not found: is this a Hugging Face checkpoint?") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{file} is not valid JSON: {e}") from None
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "GLMConfig":
        """Builds the config from the keys of a Hugging Face ``config.json``; see ``from_hf``."""
        if not isinstance(raw, dict):
            raise ConfigError(f"config.json must hold an object, got {type(raw).__name__}")
        _refuse_unsupported(raw)
        missing = [k for k in _REQUIRED if raw.get(k) is None]
        if missing:
            raise ConfigError(f"config.json lacks {missing[0]!r}")
        for key in _REQUIRED:
            if not isinstance(raw[key], int) or isinstance(raw[key], bool):
                raise ConfigError(f"config.json: {key} must be a whole number, got {raw[key]!r}")
        layers = raw["num_hidden_layers"]
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        eos = raw.get("eos_token_id")
        optional = {k: _typed(k, raw[k]) for k in _OPTIONAL if raw.get(k) is not None}
        return cls(
            **{k: raw[k] for k in _REQUIRED},
            **optional,
            indexer_types=_indexer_types(raw, layers),
            first_k_dense_replace=_num_dense(raw, layers),
            rope_theta=_typed("rope_theta", rope.get("rope_theta", raw.get("rope_theta", 1e6))),
            eos_token_ids=token_ids("config.json: eos_token_id", eos),
            # Absent keys mean GLM-5's defaults, not GLM-5.3's (spec/model.md 1.2).
            index_share_for_mtp_iteration=bool(raw.get("index_share_for_mtp_iteration", False)),
            num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or 0,
        )

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The ``config.json`` from which transformers and ``from_hf`` read this same model."""
        own = {k: getattr(self, k) for k in (*_REQUIRED, *_OPTIONAL)}
        dense = self.first_k_dense_replace
        return own | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "dtype": dtype,
            "first_k_dense_replace": dense,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * self.num_moe_layers,
            "indexer_types": list(self.indexer_types),
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_head_dim,
            "head_dim": self.qk_rope_head_dim,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_interleave": True,
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_router_dtype": "float32",
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "eos_token_id": list(self.eos_token_ids),
            "index_share_for_mtp_iteration": self.index_share_for_mtp_iteration,
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
        }

    # Presets.

    @classmethod
    def glm_5_3(cls, **changes: Any) -> "GLMConfig":
        """GLM-5.3 (and 5.2): 78 layers, 744B parameters (spec/model.md 1.1)."""
        layers = 78
        base: dict[str, Any] = {
            "vocab_size": 154880,
            "hidden_size": 6144,
            "num_hidden_layers": layers,
            "num_attention_heads": 64,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
            "indexer_types": index_share(layers, freq=4, offset=3),
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "eos_token_ids": (154820, 154827, 154829),
            "pad_token_id": 154820,
        }
        return cls(**(base | changes))

    @classmethod
    def tiny(cls, **changes: Any) -> "GLMConfig":
        """A model for tests: 7 layers of width 128, index groups {0} {1} {2..5} {6}, top-k 8."""
        layers = changes.get("num_hidden_layers", 7)
        base: dict[str, Any] = {
            "vocab_size": 320,
            "hidden_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "index_n_heads": 32,
            "index_head_dim": 32,
            "index_topk": 8,
            "indexer_types": index_share(layers, freq=4, offset=3),
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 3,
            "intermediate_size": 256,
            "moe_intermediate_size": 32,
            "max_position_embeddings": 4096,
            "eos_token_ids": (1, 2, 3),
            "pad_token_id": 1,
        }
        return cls(**(base | changes))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """None, an id or a list of ids as a tuple; ``name`` is for the error."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _typed(key: str, value: Any) -> Any:
    """A value of ``config.json`` after a check of its type, by the name of its field."""
    if key in ("norm_topk_prob", "indexer_rope_interleave"):
        right, kind = isinstance(value, bool), "true or false"
    elif key in ("routed_scaling_factor", "rms_norm_eps", "rope_theta"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right, kind = number and 0 < value < float("inf"), "a positive number"
        value = float(value) if right else value
    else:
        right, kind = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a whole number"
    if not right:
        raise ConfigError(f"config.json: {key} must be {kind}, got {value!r}")
    return value


class _Checks:
    """Relations between fields, each with an error that names both."""

    def __init__(self, config: GLMConfig):
        self.config = config

    def even(self, field: str) -> None:
        value = getattr(self.config, field)
        if value % 2:
            raise ConfigError(f"{field} must be even, got {value}")

    def at_most(self, field: str, limit: str) -> None:
        value, most = getattr(self.config, field), getattr(self.config, limit)
        if value > most:
            raise ConfigError(f"{field}={value} is larger than {limit}={most}")


def index_share(num_layers: int, *, freq: int, offset: int) -> tuple[IndexerType, ...]:
    """IndexShare: layer i runs the indexer iff max(i - offset + 1, 0) is a multiple of freq (arXiv 2603.12201)."""
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "intermediate_size",
    "moe_intermediate_size",
)
_OPTIONAL = (
    "norm_topk_prob",
    "routed_scaling_factor",
    "rms_norm_eps",
    "max_position_embeddings",
    "indexer_rope_interleave",
    "pad_token_id",
    "bos_token_id",
)

# key: (value when absent, what we support)
_FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "attention_bias": (False, (False,)),
    "mlp_bias": (False, (False,)),
    "hidden_act": ("silu", ("silu",)),
    "scoring_func": ("sigmoid", ("sigmoid",)),
    "topk_method": ("noaux_tc", ("noaux_tc",)),
    "moe_layer_freq": (1, (1,)),
    "n_group": (1, (1,)),
    "topk_group": (1, (1,)),
    "tie_word_embeddings": (False, (False,)),
    "rope_interleave": (True, (True,)),
    "moe_router_dtype": ("float32", ("float32",)),
}


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind != "glm_moe_dsa":
        raise ConfigError(f"model_type {kind!r} is not supported; glmjax runs 'glm_moe_dsa'")
    for key, (default, supported) in _FIXED.items():
        value = raw.get(key)
        value = default if value is None else value
        if value not in supported:
            raise ConfigError(f"{key}={value!r} is not supported; expected {supported[0]!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: rope_parameters must be an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope_type={kind!r} is not supported; expected 'default'")
    quantization = raw.get("quantization_config") or {}
    if quantization:
        method = quantization.get("quant_method")
        if method != "fp8":
            raise ConfigError(f"quant_method={method!r} is not supported; expected 'fp8'")
        block = quantization.get("weight_block_size")
        if list(block or []) != [128, 128]:
            raise ConfigError(f"weight_block_size={block!r} is not supported; expected [128, 128]")


def _indexer_types(raw: dict[str, Any], layers: int) -> tuple[IndexerType, ...]:
    """Hugging Face's order of precedence: indexer_types, index_topk_pattern, frequency and offset (spec 1.3)."""
    if raw.get("indexer_types"):
        return tuple(raw["indexer_types"])
    pattern = raw.get("index_topk_pattern")
    if pattern:
        names = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        wrong = [p for p in pattern if p not in names]
        if wrong:
            raise ConfigError(f"index_topk_pattern has {wrong[0]!r}; expected 'F' or 'S'")
        return tuple(names[p] for p in pattern)  # type: ignore[misc]
    freq = raw.get("index_topk_freq") or 1
    offset = raw.get("index_skip_topk_offset")
    return index_share(layers, freq=freq, offset=2 if offset is None else offset)


def _num_dense(raw: dict[str, Any], layers: int) -> int:
    types = raw.get("mlp_layer_types")
    if not types:
        dense = raw.get("first_k_dense_replace")
        if dense is None:
            raise ConfigError("config.json lacks 'first_k_dense_replace'")
        return int(dense)
    dense = types.count("dense")
    if list(types) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ConfigError(
            f"mlp_layer_types={types!r} is not supported; expected {layers} entries, 'dense' layers first"
        )
    return int(dense)
