"""Limits of the scheduler, checked once."""

import dataclasses
from typing import Literal

from glmjax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
      max_num_seqs: running sequences at most.
      max_num_batched_tokens: budget of a step.
      max_model_len: prompt and output of a sequence at most.
      block_size, num_blocks: shape of the KV pool.
      policy: "fcfs", or "priority": lower values first, then arrival.
      max_prefill_chunk: tokens of one request in a step at most; None: the budget.
      num_speculative_tokens: drafts that a decoding request may have in a step; they count against the budget.
      num_pages: with KV offload, pages of the device's row pool, and ``num_blocks`` are those of the host's; None: rows
        stay on the device.
      region_pages: pages of a hot region; 0 for plain offload.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_prefill_chunk: int | None = None
    num_speculative_tokens: int = 0
    num_pages: int | None = None
    region_pages: int = 0

    def __post_init__(self) -> None:
        sizes = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks")
        least = {**dict.fromkeys(sizes, 1), "max_model_len": 2, "num_speculative_tokens": 0}
        if self.max_prefill_chunk is not None:
            least["max_prefill_chunk"] = 1
        for field, low in least.items():
            if getattr(self, field) < low:
                raise ConfigError(f"{field} must be at least {low}, got {getattr(self, field)}")
        if self.max_num_batched_tokens <= self.num_speculative_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} does not hold one token and its "
                f"num_speculative_tokens={self.num_speculative_tokens} drafts: give at least "
                f"{self.num_speculative_tokens + 1}"
            )
        if self.num_pages is not None and self.num_pages < (need := self.least_pages):
            raise ConfigError(
                f"{self.num_pages} pages of {self.block_size} tokens on the device are too few: a hot region takes "
                f"{self.region_pages}, and a step's new tokens and the last ones {need - self.region_pages}. "
                f"Raise num_device_blocks or kv_cache_gib to {need} blocks, or lower max_num_batched_tokens"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")

    @property
    def max_blocks(self) -> int:
        """Blocks that one request can hold."""
        keeps_pages = self.num_pages is not None and not self.region_pages
        return min(self.num_blocks, self.num_pages or 1) if keeps_pages else self.num_blocks

    @property
    def least_pages(self) -> int:
        """Pages without which one request alone could not go on."""
        if not self.region_pages:
            return 1
        drafts = self.num_speculative_tokens
        longest = max((self.max_prefill_chunk or self.max_num_batched_tokens) + drafts, 2 * drafts + 1)
        return self.region_pages + -(-min(longest, self.max_model_len) // self.block_size) + 3
