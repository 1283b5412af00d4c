"""row_fetch for Hopper, in Triton: 16 bytes to a thread, twice, and as many rows to a program as that makes.

The words of a row are numbered through all its fields. A program loads its rows in two halves, each word from the field
that it belongs to, and stores them likewise. The loads are asynchronous copies to shared memory, of which both halves'
are under way before the first store: that is what counts where the source is host memory, a microsecond or two away.
That memory is read in place, by address (zero copy).

It is Triton and not Mosaic GPU because rows are small and stand anywhere: bulk copies of a row at a time would go
through shared memory, and take rows of multiples of 16 bytes only.
"""

# mypy: allow-untyped-defs
# (Triton's language has types of its own.)

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from glmjax.kernels.report_case import Case
from glmjax.kernels.row_format import MAX_FIELDS, WORD, HostRows, row_bytes
from glmjax.kernels.triton_call import triton_call

NUM_WARPS = 4
PROGRAM_WORDS = 2 * 4 * 32 * NUM_WARPS  # two loads of 16 bytes a thread
HALVES = 2


def row_fetch(
    targets: tuple[jax.Array, ...],
    sources: tuple[jax.Array, ...] | HostRows,
    target_rows: jax.Array,
    source_rows: jax.Array,
) -> tuple[jax.Array, ...]:
    """``glmjax.kernels.row_fetch.row_fetch`` on a GPU."""
    if isinstance(sources, HostRows):
        fields: tuple[jax.Array, ...] = (jnp.asarray(sources.address),)
        source_words = [sources.row_bytes // WORD]
    else:
        fields, source_words = sources, _words(sources)
    num_rows, width = source_rows.shape[0], sum(source_words)
    words = min(triton.next_power_of_2(width), PROGRAM_WORDS)
    rows = PROGRAM_WORDS // words
    none = (None,) * MAX_FIELDS
    operands = (source_rows, target_rows, *(*fields, *none)[:MAX_FIELDS], *(*targets, *none)[:MAX_FIELDS])
    first = len(operands) - MAX_FIELDS
    written = triton_call(
        *operands,
        num_rows,
        kernel=copy_kernel,
        results=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in targets],
        grid=(triton.cdiv(num_rows, rows), triton.cdiv(width, words)),
        in_place={first + i: i for i in range(len(targets))},
        num_warps=NUM_WARPS,
        num_bytes=num_bytes(num_rows, WORD * width),
        ROWS=rows,
        WORDS=words,
        HALF=max(1, words // HALVES),
        STAGES=HALVES + 1,  # both halves, and none in use
        **_numbered("SOURCE", source_words),
        **_numbered("TARGET", _words(targets)),
        HOST=isinstance(sources, HostRows),
    )
    return tuple(written)


@triton.jit
def copy_kernel(
    source_rows,  # [N]
    target_rows,
    source0,  # fields; with HOST the address of the one, in two halves
    source1,
    source2,
    target0,
    target1,
    target2,
    num_rows,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # of a row, or of the part of a large one that a program copies
    HALF: tl.constexpr,  # of them at once
    STAGES: tl.constexpr,
    SOURCE0: tl.constexpr,  # words of the fields, 0 for those that are not there
    SOURCE1: tl.constexpr,
    SOURCE2: tl.constexpr,
    TARGET0: tl.constexpr,
    TARGET1: tl.constexpr,
    TARGET2: tl.constexpr,
    HOST: tl.constexpr,
):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(source_rows + at, mask=at < num_rows, other=-1).to(tl.int64)[:, None]
    target = tl.load(target_rows + at, mask=at < num_rows, other=-1).to(tl.int64)[:, None]
    keep = (source >= 0) & (target >= 0)
    if HOST:
        address = tl.load(source0).to(tl.uint64) | (tl.load(source0 + 1).to(tl.uint64) << 32)
        source0 = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    first = tl.program_id(1) * WORDS
    for start in tl.range(first, first + WORDS, HALF, num_stages=STAGES):
        word = start + tl.arange(0, HALF)[None, :]
        data = _load(source0, source, word, keep, 0, SOURCE0)
        if SOURCE1 > 0:  # words outside a field load as 0
            data |= _load(source1, source, word, keep, SOURCE0, SOURCE1)
        if SOURCE2 > 0:
            data |= _load(source2, source, word, keep, SOURCE0 + SOURCE1, SOURCE2)
        _store(target0, target, word, keep, data, 0, TARGET0)
        if TARGET1 > 0:
            _store(target1, target, word, keep, data, TARGET0, TARGET1)
        if TARGET2 > 0:
            _store(target2, target, word, keep, data, TARGET0 + TARGET1, TARGET2)


@triton.jit
def _load(field, row, word, keep, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    inside = keep & (word >= FIRST) & (word < FIRST + WIDTH)
    return tl.load(field.to(tl.pointer_type(tl.uint32), bitcast=True) + row * WIDTH + (word - FIRST), inside, other=0)


@triton.jit
def _store(field, row, word, keep, data, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    inside = keep & (word >= FIRST) & (word < FIRST + WIDTH)
    tl.store(field.to(tl.pointer_type(tl.uint32), bitcast=True) + row * WIDTH + (word - FIRST), data, inside)


def _words(fields: tuple[jax.Array, ...]) -> list[int]:
    return [row_bytes(field) // WORD for field in fields]


def _numbered(name: str, values: list[int]) -> dict[str, int]:
    return {f"{name}{i}": value for i, value in enumerate((values + [0] * MAX_FIELDS)[:MAX_FIELDS])}


def num_bytes(num_rows: int, size: int) -> int:
    """Bytes moved for rows of this size: the two lists and the rows read, the rows written."""
    return num_rows * (2 * size + 8)


@dataclass(frozen=True)
class _Format:
    """A row of GLM-5.3 as the device pools hold it: field widths and dtypes."""

    name: str
    fields: tuple[tuple[int, DTypeLike], ...]

    @property
    def size(self) -> int:
        return sum(width * jnp.dtype(dtype).itemsize for width, dtype in self.fields)


FP8 = _Format("fp8", ((512, jnp.uint8), (4, jnp.float32), (64, jnp.bfloat16)))
BF16 = _Format("bf16", ((512, jnp.bfloat16), (64, jnp.bfloat16)))
LAYERS, SELECTED = 79, 2048  # with the MTP layer; rows that a token attends to
TOKENS, FOLLOWERS = 4, 3  # of a request that is verified, of the leader of an index group


def cases() -> tuple[Case, ...]:
    """The rows of GLM-5.3 that are copied.

    HiSparse, in a decode step of one and of eight requests, of which the model verifies four tokens each and the MTP
    layer drafts from one: as many rows as can be missing come from the host, for one layer or for three that follow the
    leader of their index group, and go into the fields of each layer's pool. Connectors put the rows of all layers of
    some tokens from one packed array into another, which no step does.
    """
    found = []
    for form, requests in ((FP8, 1), (FP8, 8), (BF16, 8)):
        drafting, verifying = requests * SELECTED, requests * TOKENS * SELECTED
        found += [_case(form, "host to packed", rows) for rows in (drafting, verifying, FOLLOWERS * verifying)]
        found += [_case(form, "packed to fields", rows) for rows in (drafting, verifying)]
    return (*found, _case(FP8, "packed to packed", LAYERS * 1024))


def _case(form: _Format, way: str, rows: int, slots: int = 1 << 18) -> Case:
    size, from_host = form.size, way == "host to packed"
    packed, stage = (jax.ShapeDtypeStruct((n, size), jnp.uint8) for n in (rows, 4 * slots))
    fields = tuple(jax.ShapeDtypeStruct((LAYERS, slots, width), dtype) for width, dtype in form.fields)
    lists = (jax.ShapeDtypeStruct((rows,), jnp.int32),) * 2

    def fetch(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *targets, source, to, of = arrays
        flat = tuple(x.reshape(-1, x.shape[-1]) for x in targets)
        written = row_fetch(flat, HostRows(source, size) if from_host else (source,), to, of)
        return tuple(new.reshape(old.shape) for new, old in zip(written, targets, strict=True))

    targets, source, limits = {
        "host to packed": ((packed,), jax.ShapeDtypeStruct((2,), jnp.uint32), (rows, slots)),
        "packed to fields": (fields, packed, (slots, rows)),
        "packed to packed": ((stage,), packed, (4 * slots, rows)),
    }[way]
    return Case(
        kernel="row_fetch",
        implementation="triton",
        shape=f"N={rows} rows of {size} B {way}",
        function=fetch,
        arguments=(*targets, source, *lists),
        bytes=num_bytes(rows, size) - (rows * size if from_host else 0),
        flops=0,
        arithmetic="float32",
        stages=HALVES,
        host_bytes=rows * size if from_host else 0,
        donate=tuple(range(len(targets))),
        limits={len(targets) + 1 + i: limit for i, limit in enumerate(limits)},
        host_pools={1: slots * size} if from_host else {},
    )
