"""kv_insert for Hopper, in Triton: one kernel quantises a layer's new rows and scatters them to the pools.

A program takes a few tokens and one part of their rows: a tile of 128 latents, the rotary key, or the index key. A
tile has one scale, so programs share nothing; threads load 16 bytes, and a row's maximum is found by shuffles.

             part 0    part 1    part 2    part 3    part 4   part 5
    token  | latent tiles of 128, each with its scale | rope | index key |
                |                                        |        |
           fp8 to latent[layer, slot], scale beside      bf16     fp8 to index_key[indexer, slot], scale beside

The tokens of a prefill come in two steps, by asynchronous copies: those of the second are under way while the first are
quantised. For a decode step's few tokens a part is cut into pieces, so that there is work for every multiprocessor.
Each piece's program looks at the whole tile for the scale, which is read from memory once, and writes its own columns.

It is Triton and not Mosaic GPU because every row goes to an address of its own, by a few bytes: there is nothing for
bulk copies to do.
"""

# mypy: allow-untyped-defs
# (Triton's language has types of its own.)

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from glmjax.kernels.kv_rows import FLOOR, FP8_MAX, INDEX_FIELDS, LATENT_TILE, MLA_FIELDS, Arrays
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.triton_call import triton_call

Shapes = Mapping[str, jax.Array | jax.ShapeDtypeStruct]

MOST_PIECES = 4  # of a tile: 32 bytes of fp8, the least that memory writes

_FLOOR = tl.constexpr(FLOOR)
_FP8_MAX = tl.constexpr(FP8_MAX)


@dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Attributes:
      tokens, num_warps: of a program.
      steps: in which a program takes its tokens.
      pieces: programs that share a part of a token's row.
    """

    tokens: int
    num_warps: int
    steps: int = 1
    pieces: int = 1

    @classmethod
    def for_tokens(cls, num_tokens: int, parts: int) -> "Tuning":
        if num_tokens > 512:
            return cls(16, 4, steps=2)
        # A warp to a tile while that does not make more programs than an H200 holds at once.
        wanted = triton.cdiv(MULTIPROCESSORS, num_tokens * parts)
        return cls(1, 1, pieces=min(triton.next_power_of_2(wanted), MOST_PIECES))


def kv_insert(
    pools: Arrays,
    rows: Arrays,
    slots: jax.Array,
    layer: jax.Array | int | None,
    indexer: jax.Array | int | None,
    index_slots: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """``glmjax.kernels.kv_insert.kv_insert`` on a GPU; -1 slots are not written at all."""
    names = MLA_FIELDS + INDEX_FIELDS
    places = (None if place is None else jnp.asarray(place, jnp.int32) for place in (layer, indexer))
    index_slots = slots if index_slots is None else index_slots
    operands = (slots, index_slots, *places, *(rows.get(name) for name in names), *(pools.get(name) for name in names))
    first = len(operands) - len(names)
    in_place = {first + names.index(name): i for i, name in enumerate(pools)}
    num_tokens = slots.shape[0]
    latent, rope, index = (pools[name].shape[2] if name in pools else 0 for name in ("latent", "rope", "index_key"))
    parts = latent // LATENT_TILE + (rope > 0) + (index > 0)
    tuning = Tuning.for_tokens(num_tokens, parts)
    written = triton_call(
        *operands,
        num_tokens,
        *(pools[name].shape[1] if name in pools else 0 for name in ("latent", "index_key")),
        kernel=insert_kernel,
        results=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools.values()],
        grid=(triton.cdiv(num_tokens, tuning.tokens), parts, tuning.pieces),
        in_place=in_place,
        num_warps=tuning.num_warps,
        num_bytes=num_bytes(rows, pools, num_tokens),
        TOKENS=tuning.tokens,
        STEPS=tuning.steps,
        PIECES=tuning.pieces,
        TILES=latent // LATENT_TILE,
        TILE=LATENT_TILE,
        ROPE=rope,
        INDEX=index,
    )
    return dict(zip(pools, written, strict=True))


@triton.jit
def insert_kernel(
    slots,  # [T]
    index_slots,
    layer,  # []
    indexer,
    latent,  # rows, [T, width]
    latent_scale,
    rope,
    index_key,
    index_scale,
    latent_pool,  # pools, [L or N, S, width]
    latent_scale_pool,
    rope_pool,
    index_key_pool,
    index_scale_pool,
    num_tokens,
    num_slots,  # of the layer's pools
    num_index_slots,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
    PIECES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROPE: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Grid (tokens / TOKENS, parts of a row, PIECES)."""
    part = tl.program_id(1)
    if TILES > 0:
        first_row = tl.load(layer).to(tl.int64) * num_slots
        if part < TILES:
            _write(
                slots, num_tokens, first_row, part, latent, latent_scale, latent_pool, latent_scale_pool,
                TOKENS, STEPS, PIECES, TILES, TILE, True,
            )  # fmt: skip
        if part == TILES:
            _write(
                slots, num_tokens, first_row, 0, rope, None, rope_pool, None,
                TOKENS, STEPS, PIECES, 1, ROPE, True,
            )  # fmt: skip
    if INDEX > 0:
        first_row = tl.load(indexer).to(tl.int64) * num_index_slots
        if part == tl.num_programs(1) - 1:
            _write(
                index_slots, num_tokens, first_row, 0, index_key, index_scale, index_key_pool, index_scale_pool,
                TOKENS, STEPS, PIECES, 1, INDEX, False,
            )  # fmt: skip


@triton.jit
def _write(
    slots,
    num_tokens,
    first_row,  # of the layer's slots
    part,
    source,
    source_scale,
    pool,
    pool_scale,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Columns part * WIDTH ... of the tokens' rows to those of the pool, with their scale where the pool has one."""
    i = tl.arange(0, WIDTH)
    column = part * WIDTH + i
    piece = tl.program_id(2)
    SPAN: tl.constexpr = WIDTH // PIECES if WIDTH > PIECES else 1
    mine = i // SPAN == piece
    first = tl.program_id(0) * TOKENS
    STEP: tl.constexpr = TOKENS // STEPS
    for start in tl.range(first, first + TOKENS, STEP, num_stages=STEPS + 1):
        token = start + tl.arange(0, STEP)
        real = token < num_tokens
        slot = tl.load(slots + token, mask=real, other=-1)
        row, keep = first_row + slot, slot >= 0
        # Rows to drop are loaded too: else the load would wait for that of the slots.
        values = tl.load(source + token.to(tl.int64)[:, None] * (PARTS * WIDTH) + column[None, :], mask=real[:, None])
        if pool_scale is not None:
            if source_scale is None:
                values, scale = _quantize(values, LATENT)
            else:
                scale = tl.load(source_scale + token * PARTS + part, mask=real)
            if piece == 0:
                tl.store(pool_scale + row * PARTS + part, scale, mask=keep)
        at = row[:, None] * (PARTS * WIDTH) + column[None, :]
        tl.store(pool + at, values.to(pool.dtype.element_ty), mask=keep[:, None] & mine[None, :])


@triton.jit
def _quantize(values, LATENT: tl.constexpr):
    """FP8 bytes [tokens, width] and scales [tokens], bit for bit those of ``glmjax.kernels.kv_rows``.

    The bits of floats from 0 to inf and NaN are in order as integers, so one maximum of integers serves all of them.
    """
    x = values.to(tl.bfloat16).to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    floor = tl.full(largest.shape, _FLOOR, tl.float32).to(tl.int32, bitcast=True)
    if LATENT:  # at least 1e-4 as a scale
        least = tl.math.div_rn(largest.to(tl.float32, bitcast=True), _FP8_MAX).to(tl.int32, bitcast=True)
        bits = tl.maximum(least & 0x7FFFFFFF, floor)
    else:  # at least 1e-4 as a value
        bits = tl.math.div_rn(tl.maximum(largest, floor).to(tl.float32, bitcast=True), _FP8_MAX)
        bits = bits.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # biased, of the power of two at or above
    exponent = tl.where(bits == 0x7F800000, 127, tl.where(bits > 0x7F800000, 126, exponent))  # as frexp has inf and NaN
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # of a power of two: exact
    y = tl.clamp(x * inverse[:, None], -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale


def num_bytes(rows: Shapes, pools: Shapes, num_tokens: int) -> int:
    """Bytes moved: slots and rows read, those of index keys too, rows of the pools written."""
    read = sum(x.size * x.dtype.itemsize for x in rows.values())
    written = sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in pools.values())
    return read + num_tokens * (written + 4 * (("latent" in pools) + ("index_key" in pools)))


def cases() -> tuple[Case, ...]:
    """GLM-5.3's rows, of a layer with its indexer or without: a step of 8 requests, one with drafts, a prefill chunk.

    Rows of a prompt that is spread over devices (PCP) were quantised before they travelled.
    """
    found = []
    for indexer in (True, False):
        found += [_case(tokens, dtype, indexer) for tokens in (8, 32, 2048) for dtype in ("fp8", "bf16")]
        found.append(_case(2048, "fp8", indexer, stored=True))
    return tuple(found)


def _case(tokens: int, dtype: str, indexer: bool, *, stored: bool = False) -> Case:
    """Rows of a layer, and the keys of its indexer, which have slots of their own; ``stored``: quantised before."""
    slots, layers, indexers = 1 << 18, 79, 22
    widths = {"latent": (512,), "rope": (64,), "index_key": (128,), "latent_scale": (4,), "index_scale": ()}

    def array(*dims: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    def held(name: str) -> DTypeLike:
        return (
            jnp.float32 if name.endswith("_scale") else jnp.uint8 if dtype == "fp8" and name != "rope" else jnp.bfloat16
        )

    names = [name for name in MLA_FIELDS + (INDEX_FIELDS if indexer else ()) if dtype == "fp8" or "_scale" not in name]
    pools = {n: array(layers if n in MLA_FIELDS else indexers, slots, *widths[n], dtype=held(n)) for n in names}
    rows = {
        name: array(tokens, *widths[name], dtype=held(name) if stored else jnp.bfloat16)
        for name in names
        if stored or "_scale" not in name
    }

    def insert(*arrays: jax.Array) -> list[jax.Array]:
        at, layer, *keys = arrays[len(pools) + len(rows) :]
        new = dict(zip(rows, arrays[len(pools) :], strict=False))
        index_slots, place = keys or (None, None)
        written = kv_insert(dict(zip(pools, arrays, strict=False)), new, at, layer, place, index_slots)
        return [written[name] for name in pools]

    places = [array(tokens), array()] * (1 + indexer)
    first = len(pools) + len(rows)
    return Case(
        kernel="kv_insert",
        implementation="triton",
        shape=f"T={tokens} latent, rope{', index key' * indexer} {dtype}{' as stored' * stored}",
        function=insert,
        arguments=(*pools.values(), *rows.values(), *places),
        bytes=num_bytes(rows, pools, tokens),
        flops=0,
        arithmetic="float32",
        stages=Tuning.for_tokens(tokens, parts=5 + indexer).steps,
        donate=tuple(range(len(pools))),
        limits=dict(zip(range(first, first + len(places)), (slots, layers, slots, indexers), strict=False)),
    )
