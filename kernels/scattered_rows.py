"""Asynchronous copies of scattered rows into shared memory, for kernels in Pallas on Mosaic GPU.

Pallas' own copies suit tiles, not rows: each makes all 128 threads of the warpgroup arrive at a barrier, 8,192 arrivals
for 64 rows, and none gathers on Hopper. Here a warpgroup shares the rows of a step among its threads, 16 bytes each, as
``cp.async``; a row of -1 is not read and becomes zeros. The instructions are inline, which interpret mode does not run:
there (``simulate``) a step's rows are copied all together, without delay, under the same barriers.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP = 128  # threads
UNIT = 16  # bytes of one thread's copy
SWIZZLED = (  # of 16-bit operands of wgmma
    plgpu.TilingTransform((8, 64)),  # type: ignore[abstract]
    plgpu.SwizzleTransform(128),  # type: ignore[abstract]
)


def start_copies(slots: Any, copies: Sequence[tuple[Any, Any]], *, swizzled: bool = False, simulate: bool) -> None:
    """Starts to copy rows, as one group of copies of the calling warpgroup.

    Args:
      slots: [n] int32 in shared memory: the rows; -1 gives zeros.
      copies: pairs of a pool [S, width] in device memory, rows a multiple of 16 bytes apart, and a buffer [n, width] in
        shared memory, width * itemsize a multiple of 16.
      swizzled: the buffers have the transforms ``SWIZZLED``, else none.
      simulate: for interpret mode.
    """
    pools, buffers = [pool for pool, _ in copies], [buffer for _, buffer in copies]
    if simulate:
        at = slots[...]
        for pool, buffer in copies:
            rows = jnp.take(pool[...], jnp.maximum(at, 0), axis=0)
            buffer[...] = jnp.where(at[:, None] >= 0, rows, jnp.zeros_like(rows))
        return
    plain, target = plgpu.RefType(), plgpu.RefType(SWIZZLED if swizzled else ())
    types = (plain, [plain] * len(copies), [target] * len(copies))

    @plgpu.inline_mgpu(arg_types=types)
    def copy(_, slots, pools, buffers):
        from jaxlib.mlir.dialects import nvvm

        for pool, buffer in zip(pools, buffers, strict=True):
            _copy_rows(slots, pool, buffer)
        nvvm.cp_async_commit_group()

    copy(slots, pools, buffers)


def await_copies(pending: int, *, simulate: bool) -> None:
    """Waits until all groups but the last ``pending`` have landed, each thread for its own copies.

    They are then visible to the threads that this warpgroup's arrival at a barrier lets go on.
    """
    if simulate:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        from jaxlib.mlir.dialects import nvvm

        nvvm.cp_async_wait_group(pending)

    wait()


def _copy_rows(slots: Any, pool: Any, buffer: Any) -> None:
    """A thread's share: neighbouring threads copy neighbouring units of a row."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, memref

    i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))

    def number(value):
        return utils.c(value, i32)

    pool_type, buffer_type = ir.MemRefType(pool.type), ir.MemRefType(buffer.type)
    itemsize = utils.bitwidth(pool_type.element_type) // 8
    units = pool_type.shape[1] * itemsize // UNIT  # of a row
    (row_stride, _), _ = pool_type.get_strides_and_offset()
    total = ir.MemRefType(slots.type).shape[0] * units
    source, target = utils.memref_ptr(pool), utils.memref_ptr(buffer)
    thread = arith.remui(utils.thread_idx(), number(WARPGROUP))

    def place(row, unit):
        """Bytes from the buffer's start."""
        if buffer_type.rank == 2:
            return arith.muli(arith.addi(arith.muli(row, number(units)), unit), number(UNIT))
        # Tiles of 8 rows x 128 bytes; in row r of a tile, unit u stands at u ^ r.
        tile_row, in_tile = arith.divui(row, number(8)), arith.remui(row, number(8))
        tile = arith.addi(arith.muli(tile_row, number(units // 8)), arith.divui(unit, number(8)))
        swizzled = arith.xori(arith.remui(unit, number(8)), in_tile)
        within = arith.addi(arith.muli(in_tile, number(8)), swizzled)
        return arith.muli(arith.addi(arith.muli(tile, number(64)), within), number(UNIT))

    def copy(index):
        row, unit = arith.divui(index, number(units)), arith.remui(index, number(units))
        slot = memref.load(slots, [arith.index_cast(ir.IndexType.get(), row)])
        held = arith.cmpi(arith.CmpIPredicate.sge, slot, number(0))
        # 64 bits: a pool of many layers is larger than 2^31 bytes.
        offset = arith.muli(arith.extui(i64, arith.maxsi(slot, number(0))), utils.c(row_stride * itemsize, i64))
        offset = arith.addi(offset, arith.extui(i64, arith.muli(unit, number(UNIT))))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [
                utils.getelementptr(target, [place(row, unit)], i8),
                utils.getelementptr(source, [offset], i8),
                arith.select(held, number(UNIT), number(0)),  # bytes to read; the rest of the unit becomes zero
            ],
            f"cp.async.cg.shared.global [$0], [$1], {UNIT}, $2;",
            "r,l,r",
            has_side_effects=True,
        )

    for start in range(0, total, WARPGROUP):
        index = arith.addi(thread, number(start))
        if start + WARPGROUP <= total:
            copy(index)
        else:
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, index, number(total))):
                copy(index)
