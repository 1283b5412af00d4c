"""What every device receives from the others in one step of a layout, exchange by exchange, in bytes.

It follows the programs: glmjax/{share,gathered,attention,indexer,moe,model,programs}.py. A test compiles them and holds
their collectives against this table, so a collective that is not listed here is not there
(tests/glmjax/test_collective_audit.py). Bytes are counted as in ``glmjax.sharding.hlo``, for static shapes: padding
travels too, and gathered KV is as long as the block table, not as the request.

Letters: T rows of this device, T' rows of the devices among which the KV is split, K selected keys.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.sharding import cp
from glmjax.types import MAX_LOGPROBS

if TYPE_CHECKING:
    from glmjax.sharding.layout import Layout

KVSource = Literal["pool", "query_gather", "kv_gather"]  # see glmjax.share.Share
Prefill = Literal["auto", "query_gather", "kv_gather"]
Combine = Literal["ag_rs", "a2a"]
KVDtype = Literal["fp8_ds_mla", "bfloat16", "float32"]
Kind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]
Each = Literal["layer", "indexer", "expert layer", "step"]

LATENT_TILE = 128  # latent values that share an FP8 scale
FLOAT = 4  # bytes of a float32 or an int32


@dataclass(frozen=True)
class Transfer:
    """One exchange, the same on every device that takes part.

    Attributes:
      what: what travels, such as "new KV rows".
      kind: how.
      axes: mesh axes along which devices exchange, those of one device left out.
      devices: that exchange together.
      operands: bytes that a device puts in. Each array is a collective of its own: an FP8 row is values, scales and
        rotary key.
      each: what it happens once for.
      runs: times it happens in a step.
    """

    what: str
    kind: Kind
    axes: tuple[str, ...]
    devices: int
    operands: tuple[int, ...]
    each: Each
    runs: int

    @property
    def result_bytes(self) -> int:
        """What a device holds after one run."""
        put_in = sum(self.operands)
        match self.kind:
            case "all-gather":
                return put_in * self.devices
            case "reduce-scatter":
                return put_in // self.devices
            case _:
                return put_in

    @property
    def received_bytes(self) -> int:
        """What reaches a device from others in one run; an all-reduce is a reduce-scatter and an all-gather."""
        put_in, others = sum(self.operands), self.devices - 1
        match self.kind:
            case "all-gather":
                return put_in * others
            case "all-reduce":
                return 2 * put_in * others // self.devices
            case _:
                return put_in * others // self.devices


@dataclass(frozen=True)
class Traffic:
    """All exchanges of a step.

    Attributes:
      kv: where attention finds its keys.
      layers: of the model.
      transfers: in the order of the model.
    """

    kv: KVSource
    layers: int
    transfers: tuple[Transfer, ...]

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self.transfers)

    def __len__(self) -> int:
        return len(self.transfers)

    @property
    def received_bytes(self) -> int:
        """What reaches a device in a step."""
        return sum(t.received_bytes * t.runs for t in self)

    @property
    def layer_bytes(self) -> float:
        """What reaches a device in a layer, the mean over the layers; what happens once a step is not in it."""
        return sum(t.received_bytes * t.runs for t in self if t.each != "step") / self.layers

    def __str__(self) -> str:
        rows = [("what", "collective", "devices", "once for each", "runs", "bytes received a run")]
        rows += [(t.what, t.kind, f"{t.devices}", t.each, f"{t.runs}", f"{t.received_bytes:,}") for t in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:{'<' if i in (0, 1, 3) else '>'}{widths[i]}}" for i, cell in enumerate(row))
            for row in rows
        ]
        return "\n".join([*lines, f"{self.received_bytes:,} bytes received by each device in a step (KV: {self.kv})"])


def row_bytes(config: GLMConfig, kv_dtype: KVDtype = "fp8_ds_mla") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a token takes in a layer and in an indexer, array by array: 512 + 16 + 128 and 128 + 4 for FP8 GLM-5."""
    latent, rope, index = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
    if kv_dtype == "fp8_ds_mla":
        return (latent, FLOAT * -(-latent // LATENT_TILE), 2 * rope), (index, FLOAT)
    size = FLOAT if kv_dtype == "float32" else 2
    return (size * latent, size * rope), (size * index,)


def traffic(
    layout: "Layout",
    config: GLMConfig,
    *,
    tokens: int,
    context_rows: int,
    block_size: int,
    requests: int,
    kv_dtype: KVDtype,
    activation_bytes: int,
    prefill: Prefill,
    combine: Combine,
) -> Traffic:
    """The exchanges of a step of ``glmjax.step`` for one shape, without drafts: see ``Layout.traffic``."""
    sizes = {"tokens": tokens, "context_rows": context_rows, "block_size": block_size, "requests": requests}
    for name, size in {**sizes, "activation_bytes": activation_bytes}.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
    for name, value, known in (
        ("kv_dtype", kv_dtype, KVDtype),
        ("prefill", prefill, Prefill),
        ("combine", combine, Combine),
    ):
        if value not in get_args(known):
            raise ConfigError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
    layout.check_model(config, block_size)
    step = _Step(layout, config, tokens, context_rows, block_size, requests, kv_dtype, activation_bytes, combine)
    ways: tuple[KVSource, ...] = ("query_gather", "kv_gather") if prefill == "auto" else (prefill,)
    if layout.dcp == 1:
        ways = ("pool",)
    elif not cp.may_gather_keys(tokens, layout.pcp):
        ways = ("query_gather",)
    return min((step.traffic(kv) for kv in ways), key=lambda found: found.received_bytes)


class _Step:
    """Sizes of a step's arrays on one device, and the exchanges part by part."""

    def __init__(
        self,
        layout: "Layout",
        config: GLMConfig,
        tokens: int,
        context_rows: int,
        block_size: int,
        requests: int,
        kv_dtype: KVDtype,
        activation_bytes: int,
        combine: Combine,
    ):
        self.layout, self.config, self.combine = layout, config, combine
        self.requests, self.activation = requests, activation_bytes
        self.by_row = cp.splits_by_row(tokens, layout.pcp)
        self.own_requests = -(-requests // layout.pcp) if self.by_row else requests
        self.rows = self.own_requests * (tokens if self.by_row else cp.local_width(tokens, layout.pcp))  # T
        self.query_rows = self.rows * layout.num_shards(layout.shard_context_axes)  # T'
        self.heads = config.num_attention_heads // layout.tp
        table_width = -(-context_rows // (block_size * layout.dcp))
        self.copied_rows = requests * (table_width + 1) * block_size  # of each rank, by "kv_gather"
        self.fp8 = kv_dtype == "fp8_ds_mla"
        self.kv_row, self.index_key = row_bytes(config, kv_dtype)

    def traffic(self, kv: KVSource) -> Traffic:
        found = list(self.new_rows())
        if kv == "query_gather":
            found += [*self.index_queries(), *self.attention_queries(), *self.partial_results()]
        if kv == "kv_gather":
            found += self.cached_rows()
        found += [*self.feed_forward(), *self.outputs()]
        return Traffic(kv, self.config.num_hidden_layers, tuple(t for t in found if t.devices > 1 and t.runs))

    def new_rows(self) -> Iterator[Transfer]:
        """What a step adds to the KV: every device of a group writes what it keeps of it."""
        axes = self.layout.context_axes
        yield self._transfer("new KV rows", "all-gather", axes, _times(self.rows, self.kv_row), "layer")
        yield self._transfer("new index keys", "all-gather", axes, _times(self.rows, self.index_key), "indexer")

    def index_queries(self) -> Iterator[Transfer]:
        """The indexer's queries to the keys, each rank's best back, and what was chosen to everyone."""
        by_token, by_head = self.layout.shard_context_axes, self.layout.shard_tensor_axes
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        query = (heads * dim * (1 if self.fp8 else self.activation), heads * FLOAT)  # and the heads' weights
        best = (self.config.index_topk * FLOAT, self.config.index_topk * FLOAT)  # scores and positions
        yield self._transfer("index queries", "all-gather", by_token, _times(self.rows, query), "indexer")
        candidates = _times(self.query_rows, best)
        yield self._transfer("top-k candidates", "all-to-all", by_token, candidates, "indexer")
        yield self._transfer("top-k candidates", "all-gather", by_head, candidates, "indexer")
        yield self._transfer("selected positions", "all-gather", by_token, _times(self.rows, best[:1]), "indexer")

    def attention_queries(self) -> Iterator[Transfer]:
        """Absorbed and rotary queries, of all tokens first and then of all heads."""
        parts = (self.config.kv_lora_rank * self.activation, self.config.qk_rope_head_dim * self.activation)
        query = _times(self.heads, parts)
        by_token, by_head = self.layout.shard_context_axes, self.layout.shard_tensor_axes
        yield self._transfer("queries", "all-gather", by_token, _times(self.rows, query), "layer")
        yield self._transfer("queries", "all-gather", by_head, _times(self.query_rows, query), "layer")

    def partial_results(self) -> Iterator[Transfer]:
        """What each rank found on its keys, back to where the queries came from."""
        by_token, by_head = self.layout.shard_context_axes, self.layout.shard_tensor_axes
        heads = self.heads * self.layout.num_shards(by_head)
        lse = self.query_rows * heads * FLOAT
        out = self.query_rows * heads * self.config.kv_lora_rank * self.activation
        if self.combine == "ag_rs":
            mine = out // self.layout.num_shards(by_token)
            yield self._transfer("log-sum-exps", "all-gather", self.layout.shard_axes, (lse,), "layer")
            yield self._transfer("partial outputs", "reduce-scatter", by_token, (out,), "layer")
            yield self._transfer("partial outputs", "reduce-scatter", by_head, (mine,), "layer")
        else:
            for axes in (by_token, by_head):
                yield self._transfer("log-sum-exps", "all-to-all", axes, (lse,), "layer")
                yield self._transfer("partial outputs", "all-to-all", axes, (out,), "layer")

    def cached_rows(self) -> Iterator[Transfer]:
        """Everything that the requests' block tables name, one block more each, as stored.

        A loop over index groups gathers for one more than it has.
        """
        axes, more = self.layout.shard_axes, _ends_in_loop(self.config)
        kv_rows, index_keys = _times(self.copied_rows, self.kv_row), _times(self.copied_rows, self.index_key)
        yield self._transfer("cached KV rows", "all-gather", axes, kv_rows, "layer", extra=more)
        yield self._transfer("cached index keys", "all-gather", axes, index_keys, "indexer", extra=more)

    def feed_forward(self) -> Iterator[Transfer]:
        """Sums over tp, and the tokens to the experts and back."""
        layout, width = self.layout, self.config.hidden_size
        hidden = self.rows * width * self.activation
        yield self._transfer("attention output", "all-reduce", layout.tensor_axes, (hidden,), "layer")
        if layout.expert_axes:
            choice = self.rows * self.config.num_experts_per_tok * FLOAT  # expert ids; their weights are as many bytes
            axes = layout.token_axes
            everyone = hidden * layout.num_shards(axes)
            yield self._transfer("expert tokens", "all-gather", axes, (hidden, choice, choice), "expert layer")
            yield self._transfer("expert results", "reduce-scatter", axes, (everyone,), "expert layer")
        yield self._transfer("feed-forward output", "all-reduce", layout.tensor_axes, (hidden,), "layer")

    def outputs(self) -> Iterator[Transfer]:
        """Each request's last hidden state, its logits, and what was sampled."""
        layout, vocab = self.layout, self.config.vocab_size
        kind: Kind = "all-gather" if self.by_row else "all-reduce"
        last = self.own_requests * self.config.hidden_size * self.activation
        yield self._transfer("last hidden states", kind, layout.context_axes, (last,), "step")
        if vocab % layout.group_size == 0:  # else the head is whole on every device
            logits = self.requests * vocab // layout.group_size * FLOAT
            yield self._transfer("logits", "all-gather", layout.group_axes, (logits,), "step")
        sampled = self.requests * (2 + 3 + 2 * min(MAX_LOGPROBS, vocab)) * FLOAT  # counts; token, rank, logprobs
        yield self._transfer("sampled tokens", "all-gather", layout.data_axes, (sampled,), "step")

    def _transfer(
        self, what: str, kind: Kind, axes: tuple[str, ...], operands: tuple[int, ...], each: Each, extra: bool = False
    ) -> Transfer:
        config, sizes = self.config, self.layout.axis_sizes
        runs = {
            "layer": config.num_hidden_layers,
            "indexer": config.num_full_indexers,
            "expert layer": config.num_moe_layers,
            "step": 1,
        }[each]
        several = tuple(axis for axis in axes if sizes[axis] > 1)
        return Transfer(what, kind, several, self.layout.num_shards(axes), operands, each, runs + extra)


def _times(count: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count * part for part in parts)


def _ends_in_loop(config: GLMConfig) -> bool:
    """Whether ``glmjax.model`` loops over the last index groups: the last two have the same make-up."""
    leaders = [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    bounds = [*leaders, config.num_hidden_layers]
    kinds = [i < config.first_k_dense_replace for i in range(config.num_hidden_layers)]
    groups = [kinds[first:end] for first, end in itertools.pairwise(bounds)]
    return groups[-2:-1] == groups[-1:]
