"""What goes into a compiled step and comes out of it: one int32 array each way.

A step's host inputs travel as ONE array and its outputs come back as one, since a copy's fixed cost is what matters at
decode.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from glmjax.config import GLMConfig
from glmjax.sample import SamplingBatch
from glmjax.tiers import Regions
from glmjax.types import MAX_LOGPROBS

MAX_BANNED = 64  # tokens that one request may ban in a step


@dataclasses.dataclass(frozen=True, order=True)
class StepShape:
    """A compiled rectangle: ``requests`` rows of up to ``tokens`` new tokens each.

    Attributes:
      blocks: entries of a row's block table, which bound its context; 0: those of the longest request.
      decode: rows go on from the device's ``RequestState``, whose drafts they verify: one token and ``tokens - 1``
        drafts. Else they are chunks of prompts, of which only the last token is sampled after.
      staged: some of the KV rows of a chunk's context are only on the host (``Tiers.staged``).
    """

    requests: int
    tokens: int
    blocks: int = 0
    decode: bool = False
    staged: bool = False


@dataclasses.dataclass
class StepInputs:
    """Host arrays of one step.

    Attributes:
      tokens: of rows that bring their own.
      next_token: the one after a chunk's last, which the MTP layer wants to know; -1: the one sampled.
      limit: positions from here on are not computed.
      slot: place in ``RequestState`` that a row goes on from and leaves its new state in; a row of -1 leaves none.
      continues: 0 or 1: tokens, start and length come from the state.
      banned: not to be chosen for positions before ``ban_end``.
      region_table, region_lease, region_slot: as in ``Regions``; without hot regions the table has no columns.

    The others are as in ``TokenBatch`` and ``SamplingBatch``.
    """

    tokens: np.ndarray  # [R, Q] int32
    block_tables: np.ndarray  # [R, B] int32
    banned: np.ndarray  # [R, MAX_BANNED] int32, -1 for none
    region_table: np.ndarray  # [R, H] int32
    region_lease: np.ndarray  # [R] int32
    region_slot: np.ndarray  # [R] int32
    start: np.ndarray  # [R] int32
    length: np.ndarray  # [R] int32
    next_token: np.ndarray  # [R] int32
    limit: np.ndarray  # [R] int32
    slot: np.ndarray  # [R] int32
    continues: np.ndarray  # [R] int32
    ban_end: np.ndarray  # [R] int32
    top_k: np.ndarray  # [R] int32
    wants_logprobs: np.ndarray  # [R] int32, 0 or 1
    seed: np.ndarray  # [R, 2] uint32
    temperature: np.ndarray  # [R] float32
    top_p: np.ndarray  # [R] float32
    min_p: np.ndarray  # [R] float32

    @classmethod
    def empty(cls, shape: StepShape, table_width: int, region_pages: int = 0) -> "StepInputs":
        """Padding rows only: no token, greedy, nothing banned."""
        R, table_width = shape.requests, shape.blocks or table_width
        i32, f32 = np.int32, np.float32
        return cls(
            tokens=np.zeros((R, shape.tokens), i32),
            block_tables=np.zeros((R, table_width), i32),
            banned=np.full((R, MAX_BANNED), -1, i32),
            region_table=np.zeros((R, region_pages if shape.decode else 0), i32),
            region_lease=np.zeros(R, i32),
            region_slot=np.full(R, -1, i32),
            start=np.zeros(R, i32),
            length=np.zeros(R, i32),
            next_token=np.full(R, -1, i32),
            limit=np.zeros(R, i32),
            slot=np.full(R, -1, i32),
            continues=np.zeros(R, i32),
            ban_end=np.zeros(R, i32),
            top_k=np.zeros(R, i32),
            wants_logprobs=np.zeros(R, i32),
            seed=np.zeros((R, 2), np.uint32),
            temperature=np.zeros(R, f32),
            top_p=np.ones(R, f32),
            min_p=np.zeros(R, f32),
        )

    def pack(self) -> np.ndarray:
        """All fields side by side: [R, width] int32, floats and seeds by their bits."""
        columns = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return np.concatenate([c.reshape(c.shape[0], -1).view(np.int32) for c in columns], axis=1)


def packed_width(shape: StepShape, table_width: int, region_pages: int = 0) -> int:
    regions = region_pages if shape.decode else 0
    return shape.tokens + (shape.blocks or table_width) + MAX_BANNED + regions + 16


@struct.dataclass
class StepRows:
    """``StepInputs`` on the device."""

    tokens: jax.Array
    block_tables: jax.Array
    start: jax.Array
    length: jax.Array
    next_token: jax.Array
    limit: jax.Array
    slot: jax.Array
    continues: jax.Array  # bool
    ban_end: jax.Array
    regions: Regions
    how: SamplingBatch


def unpack(packed: jax.Array, shape: StepShape, table_width: int, region_pages: int = 0) -> StepRows:
    """What ``StepInputs.pack`` made one array of."""
    ends = np.cumsum([shape.tokens, shape.blocks or table_width, MAX_BANNED, region_pages if shape.decode else 0])
    tokens, tables, banned, region_table, columns = jnp.split(packed, ends, axis=1)
    lease, region_slot, *rest = columns.T
    start, length, next_token, limit, slot, continues, ban_end, *how = rest
    top_k, wants, seed_low, seed_high, temperature, top_p, min_p = how

    def bits(x: jax.Array, dtype: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, dtype)

    f32 = jnp.float32
    seed = bits(jnp.stack([seed_low, seed_high], axis=-1), jnp.uint32)
    sampling = SamplingBatch(
        bits(temperature, f32), bits(top_p, f32), bits(min_p, f32), top_k, seed, banned, wants_logprobs=wants > 0
    )
    regions = Regions(region_table, lease, region_slot)
    return StepRows(tokens, tables, start, length, next_token, limit, slot, continues > 0, ban_end, regions, sampling)


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """Host view of a step's packed output; see ``SampleOutput``.  E is ``StepShape.tokens``, or 1 for chunks.

    Attributes:
      count: [R] new tokens of the row: one, and the drafts that were accepted.
      drafted: [R] drafts that were verified.
      brought: [R, 3] selected rows that were found in the row's hot region, that were not, and rows that were copied
        from the host for it over all layers; [R, 0] without hot regions.
    """

    count: np.ndarray  # [R] int32
    drafted: np.ndarray  # [R] int32
    token: np.ndarray  # [R, E] int32
    rank: np.ndarray  # [R, E] int32
    logprob: np.ndarray  # [R, E] float32
    top_ids: np.ndarray  # [R, E, 20] int32
    top_logprobs: np.ndarray  # [R, E, 20] float32
    brought: np.ndarray  # [R, 3] int32

    @classmethod
    def unpack(cls, packed: np.ndarray, most: int) -> "StepOutputs":
        """Of [R, width] int32; ``most`` is ``num_logprobs`` of the model."""
        each = 3 + 2 * most
        end = packed.shape[1] - (packed.shape[1] - 2) % each
        rows = packed[:, 2:end].reshape(packed.shape[0], -1, each)
        return cls(
            count=packed[:, 0],
            drafted=packed[:, 1],
            token=rows[..., 0],
            rank=rows[..., 1],
            logprob=rows[..., 2].view(np.float32),
            top_ids=rows[..., 3 : 3 + most],
            top_logprobs=rows[..., 3 + most :].view(np.float32),
            brought=packed[:, end:],
        )


def num_logprobs(config: GLMConfig) -> int:
    """Likeliest tokens that a step reports of each new one."""
    return min(MAX_LOGPROBS, config.vocab_size)


def output_width(config: GLMConfig, shape: StepShape) -> int:
    """Columns of a step's packed output."""
    return 2 + (shape.tokens if shape.decode else 1) * (3 + 2 * num_logprobs(config))
