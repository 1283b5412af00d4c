"""How many tokens to draft: what was asked for, acceptance by chance for benchmarks, and fewer where it does not pay.

A decode step reads every weight that some row of it needs. Once the requests need all experts anyway, verifying a few
drafts costs next to nothing, until the step is bound by arithmetic: then every rejected draft is work thrown away. With
very few requests each further token brings other experts to read, so that even there fewer drafts can be faster.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.params import abstract_params

MAX_DRAFTS = 7
# Mean tokens that a step emits with 0 to 5 drafts: GLM-5.2, thinking on (spec/system.md 5).
MEASURED_TOKENS = (1.0, 1.84, 2.50, 2.99, 3.33, 3.61)
# FLOP that a device does in the time in which it reads a byte, by bytes of a parameter: an H200 with 4.8 TB/s and 1,979
# TFLOP/s in fp8, 989 in bf16, 67 in float32; a CPU with AVX-512, about.
FLOP_PER_BYTE = {"gpu": {1: 412.0, 2: 206.0, 4: 14.0}, "cpu": {1: 16.0, 2: 16.0, 4: 16.0}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Drafting by the MTP layer.

    Attributes:
      num_drafts: tokens drafted for a step at most, 0 to 7.
      mode: "fixed" always drafts that many; "auto" as many, up to that, as pay for the rows of a program. It verifies
        none where none pays, and drafts one all the same, since the MTP layer must have the KV of every token.
      rates: accept drafts by chance instead of by the target: for each position, the probability that it and all
        before it are accepted. The output is then no longer the model's.
    """

    num_drafts: int = 0
    mode: Literal["fixed", "auto"] = "fixed"
    rates: tuple[float, ...] | None = None

    def drafts_for(self, config: GLMConfig, rows: int, weight_bytes: int, flop_per_byte: float) -> int:
        """Drafts of a decode program for so many rows."""
        if self.mode == "fixed" or self.num_drafts == 0:
            return self.num_drafts
        return profitable_drafts(config, rows, self.num_drafts, weight_bytes, flop_per_byte)


NO_SPECULATION = Speculation()


def synthetic_rates(
    num_drafts: int, rates: Sequence[float] | None = None, length: float | None = None
) -> tuple[float, ...]:
    """Unconditional acceptance rates, given as such or as the mean number of tokens that a step shall emit.

    Of all rates with that mean, those of the least variance: as many certain drafts as fit, then a fraction
    (spec/system.md 5; vLLM's synthetic rejection sampling).

    Raises:
      ConfigError: neither or both are given, or they are out of range.
    """
    if (rates is None) == (length is None):
        raise ConfigError("synthetic acceptance needs exactly one of synthetic_acceptance_rates and _length")
    if length is not None:
        if not _is_number(length) or not 1 <= length <= num_drafts + 1:
            raise ConfigError(f"synthetic_acceptance_length must be in [1, {num_drafts + 1}], got {length!r}")
        whole = math.floor(length - 1)
        return tuple([*[1.0] * whole, length - 1 - whole, *[0.0] * num_drafts][:num_drafts])
    if isinstance(rates, str) or not isinstance(rates, Sequence) or len(rates) != num_drafts:
        raise ConfigError(f"synthetic_acceptance_rates must be {num_drafts} numbers, one a draft, got {rates!r}")
    if not all(_is_number(rate) and 0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"synthetic_acceptance_rates must be in [0, 1], got {rates!r}")
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ConfigError(
            f"synthetic_acceptance_rates must not increase: a draft counts only after all before it, got {rates!r}"
        )
    return tuple(map(float, rates))


def profitable_drafts(config: GLMConfig, rows: int, most: int, weight_bytes: int, flop_per_byte: float) -> int:
    """The number of drafts, at most ``most``, with the most expected tokens for the time of a step of ``rows`` rows.

    Args:
      weight_bytes: of one parameter.
      flop_per_byte: of the device.
    """

    def tokens_per_time(drafts: int) -> float:
        cost = step_cost(config, rows * (1 + drafts), weight_bytes, flop_per_byte)
        # The MTP layer passes over the verified rows, then over single ones.
        share = 1 / config.num_hidden_layers
        cost += share * step_cost(config, rows * (1 + drafts), weight_bytes, flop_per_byte)
        cost += max(0, drafts - 1) * share * step_cost(config, rows, weight_bytes, flop_per_byte)
        return typical_tokens(drafts) / cost

    return max(range(most + 1), key=tokens_per_time)


def typical_tokens(drafts: int) -> float:
    """Mean tokens of a step; past what was measured, each draft's gain shrinks as the last measured one's did."""
    tokens = list(MEASURED_TOKENS)
    while len(tokens) <= drafts:
        tokens.append(tokens[-1] + (tokens[-1] - tokens[-2]) ** 2 / (tokens[-2] - tokens[-3]))
    return tokens[drafts]


def step_cost(config: GLMConfig, tokens: int, weight_bytes: int, flop_per_byte: float) -> float:
    """Time of the trunk's matrix products for so many tokens, in units of the time to read a byte.

    The larger of reading the weights of all that some token needs, experts chosen evenly, and of the arithmetic.
    """
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    layers = config.num_hidden_layers - config.first_k_dense_replace
    always = _num_parameters(config) - layers * config.n_routed_experts * expert
    missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
    read = always + layers * expert * config.n_routed_experts * (1 - missed)
    used = always + layers * expert * config.num_experts_per_tok
    return max(read * weight_bytes, 2 * used * tokens / flop_per_byte)


def from_speculative_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's ``speculative_config`` as options of ours."""
    known = {"method", "num_speculative_tokens", "rejection_sample_method"}
    synthetic = {"synthetic_acceptance_rates", "synthetic_acceptance_length"}
    for name in given:
        if name not in known | synthetic:
            raise ConfigError(
                f"speculative_config: unknown key {name!r}; known ones are {', '.join(sorted(known | synthetic))}"
            )
    method, sampling = given.get("method", "mtp"), given.get("rejection_sample_method", "standard")
    if method not in ("mtp", "deepseek_mtp", "glm_mtp"):
        raise ConfigError(f"speculative_config: method must be 'mtp', got {method!r}")
    if sampling not in ("standard", "synthetic"):
        raise ConfigError(
            f"speculative_config: rejection_sample_method must be 'standard' or 'synthetic', got {sampling!r}"
        )
    if "num_speculative_tokens" not in given:
        raise ConfigError("speculative_config: num_speculative_tokens is missing: say how many tokens to draft, 1 to 7")
    options = {name: given[name] for name in ("num_speculative_tokens", *synthetic) if name in given}
    if (sampling == "synthetic") != bool(synthetic & set(given)):
        raise ConfigError(
            "speculative_config: rejection_sample_method='synthetic' goes with exactly one of "
            "synthetic_acceptance_rates and synthetic_acceptance_length"
        )
    return options


@functools.cache
def _num_parameters(config: GLMConfig) -> int:
    """Those that a step multiplies by: all but the embedding, of which it looks up rows."""
    params = abstract_params(config, jnp.bfloat16, mtp=False)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params)) - math.prod(params.embed.shape)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
