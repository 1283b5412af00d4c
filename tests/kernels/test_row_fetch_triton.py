"""The Triton kernel against NumPy, in Triton's interpreter, and its machine code for an H200."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_row_fetch import (
    FORMS,
    SOURCES,
    TARGETS,
    WAYS,
    check,
    expected,
    make_lists,
    noise,
    size_of,
    to_fields,
    to_packed,
)

pytest.importorskip("triton")

from h200_code import check_code, check_in_place, compile_program, needs_plugin
from triton_interpreter import interpreted_call

from glmjax.kernels import row_fetch_triton as kernel
from glmjax.kernels.machine_code import machine_code
from glmjax.kernels.row_fetch import row_fetch
from glmjax.kernels.row_format import HostRows


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if request.function is not test_code_for_an_h200:
        monkeypatch.setattr(kernel, "triton_call", interpreted_call)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [5, 20])
def test_rows_are_copied_and_others_left(form, way, n):
    check(FORMS[form], way, n, implementation="triton")


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 2047, 2048, 2049])
def test_any_number_of_rows(n):
    rng, rows = np.random.default_rng(n), 3000
    target, source = noise(rows, 36, 1), noise(rows, 36, 2)
    to, of = rng.permutation(rows)[:n].astype(np.int32), rng.integers(-1, rows, n).astype(np.int32)
    to[::7] = -1
    found = row_fetch(*map(jnp.asarray, (target, source, to, of)), implementation="triton")
    assert (np.asarray(found) == expected(target, source, to, of)).all()


@pytest.mark.parametrize("width", [1, 2, 33, 164, 500, 1024, 2500])
def test_rows_of_any_number_of_words(width):
    check(((width, jnp.uint32),), "packed", 12, implementation="triton")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["packed", "unpack"])
def test_rows_come_from_host_memory_by_address(form, way):
    form = FORMS[form]
    size = size_of(form)
    target, memory = noise(TARGETS, size, 1), noise(SOURCES + 1, size, 2).reshape(-1)
    start = -memory.ctypes.data % 16  # as a host pool is aligned
    source = memory[start : start + SOURCES * size].reshape(SOURCES, size)
    lists = make_lists(20)
    targets = to_fields(target, form) if way == "unpack" else jnp.asarray(target)
    host = HostRows.at(source.ctypes.data, size)
    found = row_fetch(targets, host, *map(jnp.asarray, lists), implementation="triton")
    assert (to_packed(found if way == "unpack" else [found]) == expected(target, source, *lists)).all()


def test_rows_beyond_2_to_the_31_words(tmp_path):
    rows, size = 14 << 20, 656  # 9 GiB on either side, as files of which only what is written is there
    assert (rows - 2) * size // 4 > 1 << 31
    target = np.memmap(tmp_path / "target", np.uint8, "w+", shape=(rows, size))
    source = np.memmap(tmp_path / "source", np.uint8, "w+", shape=(rows, size))
    source[rows - 1] = noise(1, size, 3)
    source[1] = noise(1, size, 4)
    to, of = jnp.asarray([rows - 2, 0, -1], jnp.int32), jnp.asarray([1, rows - 1, 1], jnp.int32)
    kernel.row_fetch((target,), (source,), to, of)
    assert (target[rows - 2] == source[1]).all() and (target[0] == source[rows - 1]).all()
    assert not target[[1, rows - 3, rows - 1]].any()


# One of the cases that differ in the number of rows alone, which is an argument of the kernel: the one with fewest.
UNLIKE = {case.shape.split(maxsplit=1)[1]: case for case in sorted(kernel.cases(), key=lambda case: -case.bytes)}


@needs_plugin
@pytest.mark.parametrize("case", UNLIKE.values(), ids=lambda case: case.shape)
def test_code_for_an_h200(case):
    program = compile_program(case)
    check_in_place(program, case)
    (code,) = machine_code(program.executable)
    check_code(code, "LDGSTS", "STG.E.128")
    assert "LDG.E.128" not in code.instructions  # rows come by asynchronous copies alone
    assert code.registers <= 32  # as many blocks as a multiprocessor holds
