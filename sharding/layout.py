"""``Layout``: how many devices there are, what each of them owns, and the mesh that says so to JAX.

The only place where degrees are checked.  A data-parallel rank is a *group* of ``pcp * tp`` devices with requests of
its own.  Inside a group two divisions share the devices: queries are divided by token over pcp and by head over tp,
the KV cache by token over dcp (DESIGN section 4; spec/system.md 2.1 and 3.1).  The mesh is the common refinement of
the two: pcp and tp are each cut into an outer and an inner axis, and the inner ones together are dcp.

Serving reads layouts too, so jax is imported only where a mesh is made.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError

if TYPE_CHECKING:
    import jax

    from glmjax.sharding.draw import LayoutFigure
    from glmjax.sharding.traffic import Combine, KVDtype, Prefill, Traffic


MESH_AXES = ("data", "context_outer", "context_inner", "tensor_outer", "tensor_inner")
QUANT_BLOCK = 128  # rows and columns of a block-FP8 weight that share a scale (spec/model.md 3.2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, checked once.

    ``str(layout)`` is the short form that ``parse`` reads, such as "pcp=8,dcp=8,ep=8".

    Attributes:
      dp: data-parallel groups; each has its own requests and its own KV pool.
      tp: tensor parallelism: attention heads and the widths of feed-forward layers are split this many ways.
      pcp: prefill context parallelism: a prompt's queries are split by token this many ways.
      dcp: decode context parallelism: the KV cache is split by token this many ways, over the devices of the group (any
        divisor of ``pcp * tp``), and replicated over the rest of them.
      ep: expert parallelism: 1 (each expert's width is split over tp) or the number of all devices (experts are spread
        over every one of them).
      interleave: consecutive tokens that one dcp rank owns before the next one's turn: 1 is round robin, the block size
        keeps blocks whole.  With dcp=1, where one rank owns every token, it changes nothing and any value is accepted.

    Raises:
      ConfigError: a degree is not a whole number of at least 1, dcp does not divide the group, or ep is neither 1 nor
        the number of devices.
    """

    dp: int = 1
    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    ep: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{field.name} must be a whole number of at least 1, got {value!r}")
        if self.group_size % self.dcp:
            raise ConfigError(
                f"dcp={self.dcp} must divide pcp={self.pcp} x tp={self.tp}, the devices that share a KV cache: "
                f"use dcp={_choice(_divisors(self.group_size))}"
            )
        if self.ep not in (1, self.num_devices):
            raise ConfigError(
                f"ep={self.ep} must be 1 or the number of devices, dp={self.dp} x pcp={self.pcp} x tp={self.tp}: "
                f"use ep={_choice(sorted({1, self.num_devices}))}"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Reads "pcp=8,dcp=8,ep=8" (what is left out is 1) or the name of one of ``PRESETS``, such as "pcp8_dcp8".

        Raises:
          ConfigError: neither of the two, a degree that is unknown or given twice, or degrees that do not fit together.
        """
        text = text.strip()
        if text in PRESETS:
            return PRESETS[text]
        known = [field.name for field in dataclasses.fields(cls)]
        degrees: dict[str, int] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise ConfigError(f"layout {text!r} is neither degrees such as 'tp=8,ep=8' nor {_choice(PRESETS)}")
            if name not in known:
                raise ConfigError(f"layout {text!r}: {name!r} is not a degree; use {_choice(known)}")
            if name in degrees:
                raise ConfigError(f"layout {text!r}: {name} is given twice")
            if not re.fullmatch("[0-9]{1,9}", value):
                raise ConfigError(f"layout {text!r}: {name} must be a whole number such as 8, got {value!r}")
            degrees[name] = int(value)
        return cls(**degrees)

    def __str__(self) -> str:
        degrees = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ",".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1) or "dp=1"

    # Sizes.

    @property
    def group_size(self) -> int:
        """Devices of one data-parallel rank."""
        return self.pcp * self.tp

    @property
    def num_devices(self) -> int:
        return self.dp * self.group_size

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis, in the mesh's order."""
        tensor_inner = math.gcd(self.dcp, self.tp)
        # Divides pcp, since dcp / gcd divides pcp * (tp / gcd) and shares no factor with tp / gcd.
        context_inner = self.dcp // tensor_inner
        sizes = (self.dp, self.pcp // context_inner, context_inner, self.tp // tensor_inner, tensor_inner)
        return dict(zip(MESH_AXES, sizes, strict=True))

    def num_shards(self, axes: Iterable[str]) -> int:
        """Into how many parts these mesh axes split an array's axis."""
        sizes = self.axis_sizes
        return math.prod(sizes[axis] for axis in axes)

    # Mesh axes by purpose, outermost first.  Where there are several, the first counts slowest.

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Over dp: requests."""
        return ("data",)

    @property
    def context_axes(self) -> tuple[str, ...]:
        """Over pcp: a prompt's queries."""
        return ("context_outer", "context_inner")

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """Over tp: heads and widths."""
        return ("tensor_outer", "tensor_inner")

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Over dp and pcp: the devices that compute different tokens."""
        return (*self.data_axes, *self.context_axes)

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Over all devices of a group."""
        return (*self.context_axes, *self.tensor_axes)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Over dcp: the shards of the KV cache."""
        return (*self.shard_context_axes, *self.shard_tensor_axes)

    @property
    def shard_context_axes(self) -> tuple[str, ...]:
        """The part of dcp over whose devices queries are split by token."""
        return ("context_inner",)

    @property
    def shard_tensor_axes(self) -> tuple[str, ...]:
        """The part of dcp over whose devices queries are split by head."""
        return ("tensor_inner",)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Over the devices of a group that hold the same shard of the KV cache."""
        return (*self.replica_context_axes, "tensor_outer")

    @property
    def replica_context_axes(self) -> tuple[str, ...]:
        """The part of those over whose devices queries are split by token."""
        return ("context_outer",)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Over ep: experts.  Empty without expert parallelism."""
        return MESH_AXES if self.ep > 1 else ()

    def mesh(self, devices: "Sequence[jax.Device] | None" = None) -> "jax.sharding.Mesh":
        """The mesh, with axes ``MESH_AXES`` of type Auto; its ``abstract_mesh`` is the same without devices.

        Devices keep their order, the last axis counting fastest: a group is a run of neighbours, and inside it the
        devices of one context-parallel rank are.

        Args:
          devices: real or compile-only ones, of which the first ``num_devices`` are used; None: ``jax.devices()``.

        Raises:
          ConfigError: there are too few devices.
        """
        import jax
        import numpy as np

        found = jax.devices() if devices is None else list(devices)
        if len(found) < self.num_devices:
            needs = f"layout {self} needs {_devices(self.num_devices)}"
            if devices is not None:
                raise ConfigError(f"{needs}, was given {len(found)}")
            on_cpu = ": on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={n} or jax_num_cpu_devices={n}"
            hint = on_cpu.format(n=self.num_devices) if found[0].platform == "cpu" else ""
            raise ConfigError(f"{needs}, this process sees {len(found)}{hint}")
        # Not jax.make_mesh, which makes Explicit axes and may reorder the devices.
        grid = np.array(found[: self.num_devices], dtype=object).reshape(*self.axis_sizes.values())
        return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES))

    def check_model(self, config: GLMConfig, block_size: int, *, quantized: bool = False) -> None:
        """Checks that a model and its KV blocks divide evenly.

        Args:
          block_size: tokens of a KV block on one device.
          quantized: weights are block-FP8, whose blocks of 128 a split must not cut.

        Raises:
          ConfigError: they do not; the message lists the degrees that would do.
        """
        splits = self._tensor_splits(config, quantized)

        def misfits(tp: int) -> list[str]:
            return [name for name, (size, unit) in splits.items() if tp > 1 and size % (tp * unit)]

        for name in misfits(self.tp):
            size, unit = splits[name]
            how = "evenly" if unit == 1 else f"into whole blocks of {unit}, as its FP8 scales need"
            right = _choice(tp for tp in _divisors(config.num_attention_heads) if not misfits(tp))
            raise ConfigError(f"tp={self.tp} cannot split {name}={size} {how}: for this model use tp={right}")
        if _has_experts(config) and config.n_routed_experts % self.ep:
            right = _choice(_divisors(config.n_routed_experts))
            raise ConfigError(
                f"ep={self.ep} cannot split n_routed_experts={config.n_routed_experts} evenly: "
                f"use ep={right}, with as many devices"
            )
        if self.dcp > 1 and block_size % self.interleave:
            raise ConfigError(
                f"block_size={block_size} must be a multiple of interleave={self.interleave}: "
                f"use interleave={_choice(_divisors(block_size))}"
            )

    def traffic(
        self,
        config: GLMConfig,
        *,
        tokens: int,
        context_rows: int,
        block_size: int = 64,
        requests: int = 1,
        kv_dtype: "KVDtype" = "fp8_ds_mla",
        activation_bytes: int = 2,
        prefill: "Prefill" = "auto",
        combine: "Combine" = "ag_rs",
    ) -> "Traffic":
        """What a device receives from others in a step without drafts, exchange by exchange; ``print`` it for a table.

        Args:
          tokens: new tokens of a request, as the compiled shape has them; 1 is decode.
          context_rows: tokens that a request's block table can hold, those of this step included.
          block_size: tokens of a KV block on one device.
          requests: rows of the compiled shape, per data-parallel rank.
          activation_bytes: of one value of the hidden states.
          prefill, combine: as in ``glmjax.programs.Programs``.

        Raises:
          ConfigError: a size is less than 1, or ``check_model`` refuses the model.
        """
        from glmjax.sharding.traffic import traffic

        return traffic(
            self,
            config,
            tokens=tokens,
            context_rows=context_rows,
            block_size=block_size,
            requests=requests,
            kv_dtype=kv_dtype,
            activation_bytes=activation_bytes,
            prefill=prefill,
            combine=combine,
        )

    def draw(
        self,
        prompt_len: int,
        cached: int = 0,
        *,
        config: GLMConfig | None = None,
        block_size: int = 64,
        prefill: "Prefill" = "auto",
    ) -> "LayoutFigure":
        """A picture: who stores which KV, who computes which queries, and what crosses the wire in one layer.

        A notebook shows it as the value of a cell; ``savefig`` writes it to a file.

        Args:
          prompt_len: new tokens of a prompt, computed in one step.
          cached: tokens before them whose KV is there already.
          config: None for GLM-5.3.
          block_size, prefill: as in ``traffic``.

        Raises:
          ConfigError: ``prompt_len`` is less than 1 or ``cached`` than 0, or ``check_model`` refuses the model.
        """
        from glmjax.sharding.draw import draw

        return draw(self, prompt_len, cached, config or GLMConfig.glm_5_3(), block_size, prefill)

    def _tensor_splits(self, config: GLMConfig, quantized: bool) -> dict[str, tuple[int, int]]:
        """What tp splits: name -> (size, the unit of which each part must be a multiple)."""
        heads, width = config.num_attention_heads, config.moe_intermediate_size
        unit = QUANT_BLOCK if quantized else 1
        splits = {
            "num_attention_heads": (heads, 1),
            "num_attention_heads * qk_head_dim": (heads * config.qk_head_dim, unit),
            "num_attention_heads * v_head_dim": (heads * config.v_head_dim, unit),
        }
        if config.first_k_dense_replace:
            splits["intermediate_size"] = (config.intermediate_size, unit)
        if _has_experts(config):
            splits["moe_intermediate_size * n_shared_experts"] = (width * config.n_shared_experts, unit)
            if self.ep == 1:
                splits["moe_intermediate_size"] = (width, unit)
        return splits


ONE_DEVICE = Layout()

# The layouts that the seeds compare, on eight devices, experts over all of them.  Their DP8 has EP8 both as the prefill
# baseline and as the decode engine, hence one layout under two names; of TP8 they do not say.  "dcp8" is DCP without
# PCP: it runs on the devices of tensor parallelism (spec/system.md 3.1).
PRESETS: Mapping[str, Layout] = MappingProxyType(
    {
        "dp8": Layout(dp=8, ep=8),
        "tp8": Layout(tp=8, ep=8),
        "pcp8": Layout(pcp=8, ep=8),
        "pcp8_dcp8": Layout(pcp=8, dcp=8, ep=8),
        "dp8_ep8": Layout(dp=8, ep=8),
        "dcp8": Layout(tp=8, dcp=8, ep=8),
    }
)


def _has_experts(config: GLMConfig) -> bool:
    return config.num_moe_layers > 0 or config.num_nextn_predict_layers > 0


def _divisors(number: int, limit: int = 4096) -> list[int]:
    """The divisors that are no larger than any sensible degree."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def _choice(values: Iterable[object]) -> str:
    """1, 2 or 4."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
