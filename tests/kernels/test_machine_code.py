"""Machine code of compiled programs: what is read of Pallas, Triton and XLA kernels, and of text by hand."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from h200_code import check_code, compile_case, compile_program, needs_plugin
from jax.experimental import pallas as pl

from glmjax.errors import ConfigError
from glmjax.kernels import machine_code as module
from glmjax.kernels.machine_code import KernelCode, count_instructions, machine_code
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import SHARED_BYTES_PER_BLOCK

SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.64 R8, desc[UR4][R2.64+0x10] ;
        /*0030*/                   LDG.E R8, desc[UR4][R2.64+0x10] ;
        /*0040*/                   LDG.E.U8 R8, desc[UR4][R2.64+0x10] ;
        /*0050*/             @!UP1 UTMALDG.2D [UR8], [UR6] ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*0080*/               @P1 STL [R1+0x4], R7 ;
        /*0090*/                   LDL.LU R7, [R1+0x4] ;
        /*00a0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00b0*/                   FFMA R1, R2, R3, R4 ;  // LDL is not an instruction here
        /*1a0c0*/                  QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR12], RZ, !UPT ;
"""


def test_instructions_are_counted_by_name_and_width():
    assert count_instructions(SASS) == {
        "HGMMA": 2,
        "LDG.E.128": 1,
        "LDG.E.32": 1,
        "LDG.E.64": 1,
        "LDG.E.8": 1,
        "LDL": 1,
        "QGMMA": 1,
        "STG.E.128": 1,
        "STL": 1,
        "UTMALDG": 1,
    }


@pytest.mark.parametrize("spec", [None, importlib.util.find_spec("json")], ids=["no Triton", "Triton without tools"])
def test_missing_tools_say_what_to_install(monkeypatch, spec):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match=r"needs cuobjdump and nvdisasm.*pip install 'glmjax\[aot\]'"):
        machine_code(jax.jit(jnp.sin).lower(1.0).compile())


def test_program_for_a_cpu_is_refused():
    pytest.importorskip("cramjam")
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="no machine code for NVIDIA GPUs"):
        machine_code(jax.jit(jnp.sin).lower(1.0).compile())


def case(function, *arguments):
    return Case("test", "hopper", "", function, arguments, bytes=1, flops=1, arithmetic="float32")


GOOD = KernelCode("k", 168, 0, 0, SHARED_BYTES_PER_BLOCK, 384, 132, {"QGMMA": 4, "LDGSTS": 8})


@pytest.mark.parametrize(
    "change",
    [
        {"stack": 8},
        {"local": 8},
        {"instructions": {**GOOD.instructions, "LDL": 1}},
        {"instructions": {**GOOD.instructions, "STL": 1}},
        {"shared_bytes": SHARED_BYTES_PER_BLOCK + 1},
        {"blocks": 131},
        {"instructions": {"LDGSTS": 8}},
        {"instructions": {"QGMMA": 4}},
    ],
    ids=str,
)
def test_what_every_kernel_owes_is_missed_when_it_is_gone(change):
    check_code(GOOD, "QGMMA|HGMMA", "LDGSTS")
    with pytest.raises(AssertionError):
        check_code(dataclasses.replace(GOOD, **change), "QGMMA|HGMMA", "LDGSTS")


@needs_plugin
def test_kernel_that_xla_generated():
    (code,) = compile_case(case(jnp.sin, jax.ShapeDtypeStruct((1 << 20,), jnp.float32)))
    assert (code.threads, code.blocks, code.shared_bytes) == (None, None, 0)
    assert code.registers > 0 and code.instructions["STG.E.128"] >= 1


@needs_plugin
def test_kernels_that_spill_are_seen():
    from spilling_kernel import spilling

    from glmjax.kernels.triton_call import triton_call

    square = jax.ShapeDtypeStruct((128, 128), jnp.float32)

    def function(x):
        return triton_call(x, kernel=spilling, results=square, grid=(1,), num_warps=1, SIZE=128)

    (code,) = compile_case(case(function, square))
    assert code.stack > 0
    assert code.spills == code.instructions["LDL"] + code.instructions["STL"] > 0
    with pytest.raises(AssertionError):
        check_code(code, blocks=1)


@needs_plugin
def test_pallas_kernels_in_the_order_they_are_launched():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def copy(x, rows):
        """Through shared memory, ``rows`` rows to a block."""

        def body(x_ref, y_ref, buffer, loaded):
            block = pl.ds(jax.lax.axis_index("block") * rows, rows)
            plgpu.copy_gmem_to_smem(x_ref.at[block], buffer, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.copy_smem_to_gmem(buffer, y_ref.at[block])
            plgpu.wait_smem_to_gmem(0)

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // rows,),
            grid_names=("block",),
            scratch_types=[plgpu.SMEM((rows, x.shape[1]), x.dtype), plgpu.Barrier()],
        )(x)

    first, second, generated = compile_case(
        case(lambda x: copy(copy(jnp.sin(x), 64), 32), jax.ShapeDtypeStruct((1024, 128), jnp.float32))
    )
    assert [(code.blocks, code.threads) for code in (first, second, generated)] == [(16, 128), (32, 128), (None, None)]
    barrier_and_alignment = 1024
    assert 0 <= first.shared_bytes - 64 * 128 * 4 < barrier_and_alignment
    assert 0 <= second.shared_bytes - 32 * 128 * 4 < barrier_and_alignment
    for code in (first, second):
        assert code.name.endswith("_mosaic_gpu_kernel")
        assert (code.stack, code.local, code.spills) == (0, 0, 0)
        assert {"UTMALDG"} < set(code.instructions) <= module.COPIES  # in through a tensor map, out in bulk


@needs_plugin
def test_triton_kernels():
    from glmjax.kernels import row_fetch_triton

    example = row_fetch_triton.cases()[0]
    program = compile_program(example)
    (code,) = machine_code(program.executable)
    assert code.name == "copy_kernel"
    assert (code.threads, code.blocks) == (128, 512)
    assert code.instructions["LDGSTS"] > 0 and code.instructions["STG.E.128"] > 0


def test_module_counts_what_it_names():
    names = module.TENSOR_CORES | module.COPIES | module.OTHERS
    text = "".join(f"        /*{i:04x}*/   {name}.X R1, R2 ;\n" for i, name in enumerate(sorted(names)))
    assert count_instructions(text) == dict.fromkeys(sorted(names), 1)
