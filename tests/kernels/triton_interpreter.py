"""Runs ``@triton.jit`` kernels on NumPy arrays with Triton's interpreter: no GPU, no PyTorch, no environment variable.

Triton decides when a module is imported whether its functions are compiled or interpreted. Here the compiled ones,
those of the kernel's module and of Triton's own library, give way to interpreted ones while a kernel runs, so that the
same process can also compile it.
"""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")  # else Triton imports it while functions are exchanged

from triton.runtime import interpreter  # noqa: E402

TYPES = {
    np.dtype(np.uint8): "u8",
    np.dtype(np.int32): "i32",
    np.dtype(np.uint32): "u32",
    np.dtype(np.int64): "i64",
    np.dtype(np.float32): "fp32",
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8e4nv",
}


class Tensor:
    """What Triton's interpreter asks of a PyTorch tensor, over an array's own memory: nothing is copied."""

    def __init__(self, array):
        assert array.flags.c_contiguous
        self.array, self.dtype, self.shape = array, TYPES[array.dtype], array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = untyped_storage

    def new_empty(self, *_, **__):
        return Tensor(self.array)

    def set_(self, *_):
        pass

    copy_ = set_

    def storage_offset(self):
        return 0

    def size(self):
        return self.shape

    stride = element_size = numel = storage_offset


def interpret(kernel, grid, *arguments, **constants):
    """Runs a kernel program by program; the arrays among the arguments change in place."""
    arguments = [Tensor(x) if isinstance(x, np.ndarray) else x for x in arguments]
    with interpreted(sys.modules[kernel.fn.__module__]):
        interpreter.InterpretedFunction(kernel.fn)[grid](*arguments, **constants)


LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_flops", "num_bytes")


def interpreted_call(*operands, kernel, results, grid, in_place=None, **options):
    """Stands in for ``glmjax.kernels.triton_call.triton_call``, outside of ``jax.jit``.

    NumPy arrays are operands as they are, and those in place change: for arrays larger than this machine's memory.
    """
    constants = {name: value for name, value in options.items() if name not in LAUNCH_OPTIONS}
    arrays = [np.array(x) if isinstance(x, jax.Array) else x for x in operands]
    flat, tree = jax.tree.flatten(results)
    found = {i: arrays[at] for at, i in (in_place or {}).items()}
    new = []
    for i, x in enumerate(flat):
        if i not in found:
            new.append(np.full(x.size * x.dtype.itemsize, 0x5A, np.uint8).view(x.dtype).reshape(x.shape))
            found[i] = new[-1]
        assert (found[i].shape, found[i].dtype) == (x.shape, x.dtype)
    interpret(kernel, grid, *arrays, *new, **constants)
    given = [id(x) for x in operands]
    return jax.tree.unflatten(tree, [x if id(x) in given else jnp.asarray(x) for _, x in sorted(found.items())])


class Function(interpreter.InterpretedFunction):
    """One that leaves Triton's library as it finds it, also where a kernel calls it as a function."""

    def __call__(self, *arguments, **keywords):
        return self.rewrite()(*arguments, **keywords)


@contextmanager
def interpreted(module):
    library = [loaded for name, loaded in sys.modules.items() if name.startswith("triton.language")]
    replaced = [
        (place, name, value)
        for place in (module, *library)
        for name, value in vars(place).items()
        if isinstance(value, triton.JITFunction)
    ]
    twins = {id(value): Function(value.fn) for _, _, value in replaced}
    language = {"tl": triton.language, "core": triton.language.core}
    patched = interpreter._patch_lang(SimpleNamespace(__globals__=language))
    convert = interpreter._convert_float
    try:
        for place, name, value in replaced:
            setattr(place, name, twins[id(value)])
        interpreter._convert_float = convert_float
        yield
    finally:
        interpreter._convert_float = convert
        for place, name, value in replaced:
            setattr(place, name, value)
        patched.restore()


def convert_float(bits, source, target, rounding):
    """Between floating types, to nearest even as a GPU does it: the interpreter's own loses carries and denormals."""
    assert rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
    by_name = {name: dtype for dtype, name in TYPES.items()}
    numbers = np.ascontiguousarray(bits).view(by_name[source.name])
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(by_name[target.name]).view(f"u{target.primitive_bitwidth // 8}")
