"""Checks of what an operation is given, while a program is traced: shapes, dtypes, and places that are known by then.

Without them a forgotten scale or a list of the wrong length is no error: XLA broadcasts, clamps and reads bytes as
numbers, and a kernel reads beyond its arrays.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from glmjax.errors import ConfigError

INT32, FLOAT32 = ("int32",), ("float32",)
FLOATS = ("bfloat16", "float32")
FP8 = ("float8_e4m3fn", "uint8")  # numbers, or their bytes

Argument = tuple[Any, str, Collection[str]]  # an array, its sizes, its dtypes


def check_arrays(operation: str, arguments: Mapping[str, Argument], *, optional: Collection[str] = ()) -> None:
    """Whether arrays fit an operation and one another.

    Args:
      operation: its name, for errors.
      arguments: by name, in order: the array; its sizes, such as "T K 128"; its dtypes, () for any. A word is the same
        size wherever it stands, "K/128" one for each 128 of a K before, begun or whole, and "..." at the head any axes.
        A NumPy array counts as what JAX makes of it: int64 as int32.
      optional: those that may be None.

    Raises:
      ConfigError: one does not fit; the message has its shape or dtype, and the right one.
    """
    known: dict[str, tuple[int, str]] = {}  # sizes, and the array that each was seen in first
    for name, (array, words, dtypes) in arguments.items():
        if array is None and name in optional:
            continue
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ConfigError(f"{operation}: {name} is of type {type(array).__name__}, give an array")
        if dtypes and (dtype := dtype_of(array)) not in dtypes:
            raise ConfigError(f"{operation}: {name} of {dtype}, give {' or '.join(dtypes)}")
        sizes = words.removeprefix("...").split()
        shape = tuple(array.shape)
        own = shape[max(0, len(shape) - len(sizes)) :] if words.startswith("...") else shape
        wanted = {word: _size(word, known) for word in sizes}
        wrong = [word for word, size in zip(sizes, own, strict=False) if wanted[word] not in (None, size)]
        if wrong or len(own) != len(sizes):
            right = [f"{word} = {wanted[word]} as in {_origin(word, known)}" for word in wrong if not word.isdecimal()]
            where = f" with {', '.join(right)}" if right else ""
            raise ConfigError(f"{operation}: {name} of shape {shape}, give [{', '.join(words.split())}]{where}")
        known |= {word: (size, name) for word, size in zip(sizes, own, strict=True) if wanted[word] is None}


def _size(word: str, known: Mapping[str, tuple[int, str]]) -> int | None:
    """What a word stands for, None if that was not seen yet."""
    name, _, group = word.partition("/")
    if word.isdecimal():
        return int(word)
    return -(-known[name][0] // int(group or 1)) if name in known else None


def _origin(word: str, known: Mapping[str, tuple[int, str]]) -> str:
    return known[word.partition("/")[0]][1]


def check_scale(
    operation: str, name: str, values: jax.Array, scale_name: str, scale: jax.Array | None, scaled: Sequence[str]
) -> None:
    """Whether values of the dtypes ``scaled`` have a scale, and others none.

    Raises:
      ConfigError: not so.
    """
    dtype = dtype_of(values)
    if dtype in scaled and scale is None:
        raise ConfigError(f"{operation}: {name} of {dtype} without {scale_name}, give it too")
    if dtype not in scaled and scale is not None:
        raise ConfigError(f"{operation}: {name} of {dtype} with {scale_name}, which is for {' or '.join(scaled)}")


def check_place(operation: str, name: str, place: jax.Array | int, size: int) -> None:
    """Whether a place is one of ``size``; of one that only the program knows, whether it is an int32.

    Raises:
      ConfigError: it is not.
    """
    if not isinstance(place, int | np.integer):
        check_arrays(operation, {name: (place, "", INT32)})
    elif not 0 <= place < size:
        raise ConfigError(f"{operation}: {name}={place}, give one of 0 to {size - 1}")


def check_count(operation: str, name: str, count: int) -> None:
    """Whether a count is a whole number that is known while the program is traced.

    Raises:
      ConfigError: it is not.
    """
    if not isinstance(count, int | np.integer) or count < 0:
        raise ConfigError(f"{operation}: {name}={count}, give a whole number from 0 on")


def dtype_of(array: jax.Array) -> str:
    """Its dtype in JAX."""
    return str(jax.dtypes.canonicalize_dtype(array.dtype))
