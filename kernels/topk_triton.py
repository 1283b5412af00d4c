"""Exact top-k of rows of scores, in Triton: a row streams past once, and the best so far are kept.

What is kept is in ``candidates_triton``, how the parts of a row are merged in ``merge_triton``. Radix selection would
read a row two to five times, and XLA's own top-k sorts it with 2 GiB of temporaries for 256 rows of a million scores.
"""

# mypy: allow-untyped-defs
# (Triton's language has types of its own.)

import dataclasses
import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from glmjax.errors import ConfigError
from glmjax.kernels.candidates_triton import (
    APART_BYTES,
    LOWEST,
    Parts,
    append,
    floor_of,
    make_room,
    nothing_published,
    part_size_of,
    publish,
)
from glmjax.kernels.index_limits import MAX_K, row_obstacle
from glmjax.kernels.merge_triton import merge_lists
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.triton_call import triton_call


@triton.jit
def top_k_of_parts(
    scores_ptr, visible_ptr, published_ptr, size, parts, early,
    lists_ptr, counts_ptr,
    K: tl.constexpr, PARTS_PADDED: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, REFRESH: tl.constexpr,
):  # fmt: skip
    """Fills the list of one part of one row. Grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores_ptr += row * size
    list_ptr = lists_ptr.to(tl.pointer_type(tl.int64)) + (row * parts + part) * CAPACITY
    published_ptr += row * parts
    visible = tl.load(visible_ptr + row)
    part_size = part_size_of(visible, parts, BLOCK)
    first = part * part_size
    end = tl.minimum(first + part_size, visible)
    i = tl.arange(0, BLOCK)

    count, least, at = tl.full((), 0, tl.int32), tl.full((), LOWEST, tl.float32), first
    due = first + early
    while at < end:
        count, least = make_room(list_ptr, count, least, (CAPACITY - K) // 4, K, CAPACITY, STEP)
        # So far there is room whatever the scores are: the loop below does not ask, and its loads run ahead.
        stop = tl.minimum(end, at + (CAPACITY - count) // BLOCK * BLOCK)
        if PARTS_PADDED > 1:
            stop = tl.minimum(stop, due)
        for start in tl.range(at, stop, BLOCK, num_stages=STAGES):
            positions = tl.multiple_of(start, BLOCK) + i
            if (PARTS_PADDED > 1) & (start % REFRESH == 0):
                least = tl.maximum(least, floor_of(published_ptr, visible, parts, part_size, PARTS_PADDED))
            scores = tl.load(scores_ptr + positions, mask=positions < size, other=float("-inf"))
            count = append(list_ptr, count, scores, positions, (scores >= least) & (positions < end))
        at = stop
        if (PARTS_PADDED > 1) & ((at == due) | (at == end)):
            publish(published_ptr + part, list_ptr, count, end - first, visible, K, CAPACITY)
            due += due - first
    tl.store(counts_ptr + row * parts + part, count)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a row is streamed.

    Attributes:
      capacity: of a list; the larger, the rarer it is shortened.
      block: scores read at once.
      stages: blocks in flight.
      num_warps: of a program; each thread holds capacity / (32 num_warps) scores when the list is shortened.
      early: scores after which a part first publishes.
      refresh: scores after which a part looks again at what the others have published.
    """

    capacity: int = 8192
    block: int = 1024
    stages: int = 4
    num_warps: int = 16
    early: int = 1024
    refresh: int = 2048

    def check(self, k: int) -> None:
        powers = all(size > 0 and size & (size - 1) == 0 for size in (self.capacity, self.block, self.num_warps))
        enough = self.block >= 4 and self.capacity >= k + 4 * self.block
        steps = all(n > 0 and n % self.block == 0 for n in (self.early, self.refresh))
        if not powers or not enough or not steps or self.stages < 1:
            raise ConfigError(
                f"{self} for k={k}: capacity, block and num_warps must be powers of two, capacity >= k + 4 block, "
                "block >= 4, early and refresh multiples of block"
            )


def default_config(rows: int, size: int) -> Config:
    """Blocks of 1,024 scores, or shorter ones, of 128 at least, where a part would not have two of them."""
    part = size // max(1, 2 * MULTIPROCESSORS // rows)
    block = Config.block
    while block > 128 and part < 2 * block:
        block //= 2
    return Config(block=block, early=block, refresh=2 * block)


def top_k_triton(
    scores: jax.Array, k: int, visible: jax.Array | None = None, *, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, in ascending order of position, ties to the lowest.

    Args:
      scores: [N, S] float32, S up to 1,048,576; -inf and NaN are never chosen.
      k: up to 2048.
      visible: [N] int32, only the first so many scores of a row are looked at; None for all.
      config: how the rows are streamed.

    Returns:
      scores [N, k] float32 and positions [N, k] int32, missing ones -inf and -1, last.

    Raises:
      ConfigError: sizes or types that the kernel is not for.
    """
    if obstacle := row_obstacle(scores, k):
        raise ConfigError(f"top_k in Triton: {obstacle}")
    N, S = scores.shape
    config = config or default_config(N, S)
    config.check(k)
    visible = jnp.full((N,), S, jnp.int32) if visible is None else jnp.clip(visible, 0, S)
    parts = Parts.cut(N, S, groups=N, block=config.block, k=k, capacity=config.capacity)
    published, lists, counts = triton_call(
        scores, visible, nothing_published(parts), S, parts.parts, config.early,
        kernel=top_k_of_parts,
        results=parts.results,
        in_place={2: 0},
        grid=(N, parts.parts),
        num_warps=config.num_warps,
        num_bytes=4 * N * S,
        STAGES=config.stages, REFRESH=config.refresh,
        **parts.constants,
    )  # fmt: skip
    return merge_lists(parts, published, lists, counts)


def cases() -> tuple[Case, ...]:
    """For who has scores already: those of a decode batch and of a prefill chunk."""
    decode = ((8, 32768), (8, 131072), (8, 1048576), (32, 131072))
    return (*(_case("decode", rows, size) for rows, size in decode), _case("prefill", 2048, 131072))


def _case(name: str, rows: int, size: int, k: int = MAX_K) -> Case:
    config = default_config(rows, size)
    parts = Parts.cut(rows, size, groups=rows, block=config.block, k=k, capacity=config.capacity)
    return Case(
        kernel="top_k",
        implementation="triton",
        shape=f"{name} N={rows} S={size} k={k}",
        function=functools.partial(top_k_triton, k=k),
        arguments=(jax.ShapeDtypeStruct((rows, size), jnp.float32),),
        bytes=4 * rows * size + parts.bytes(size, early=config.early, refresh=config.refresh, apart=APART_BYTES // 4),
        flops=0,
        arithmetic="float32",
        stages=config.stages,
    )
