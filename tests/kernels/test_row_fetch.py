"""Copies of rows between pools, in packed form and in fields: the jnp form against NumPy, in place; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax.errors import ConfigError
from glmjax.kernels.row_fetch import row_fetch
from glmjax.kernels.row_format import HostRows

FP8 = ((512, jnp.uint8), (4, jnp.float32), (64, jnp.bfloat16))
BF16 = ((512, jnp.bfloat16), (64, jnp.bfloat16))
FORMS = {"fp8": FP8, "bf16": BF16, "float32": ((576, jnp.float32),), "index": ((128, jnp.uint8), (1, jnp.float32))}
TARGETS, SOURCES = 40, 50


def size_of(form):
    return sum(width * jnp.dtype(dtype).itemsize for width, dtype in form)


def noise(rows, size, seed):
    return np.random.default_rng(seed).integers(0, 256, (rows, size), np.uint8)


def to_fields(packed, form):
    """The same bytes as arrays of the fields."""
    ends = np.cumsum([width * jnp.dtype(dtype).itemsize for width, dtype in form])
    parts = np.split(packed, ends[:-1], axis=1)
    return [jnp.asarray(np.ascontiguousarray(x).view(dtype)) for x, (_, dtype) in zip(parts, form, strict=True)]


def to_packed(fields):
    return np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in map(np.asarray, fields)], axis=1)


def make_lists(n, seed=0):
    """Target rows all different, source rows not; -1 in either and in both, at the ends and between."""
    rng = np.random.default_rng(seed)
    target, source = rng.permutation(TARGETS)[:n].astype(np.int32), rng.integers(0, SOURCES, n).astype(np.int32)
    target[[0, n // 2]] = -1
    source[[n // 2, n - 1]] = -1
    return target, source


def expected(target, source, target_rows, source_rows):
    result = target.copy()
    for to, of in zip(target_rows, source_rows, strict=True):
        if to >= 0 and of >= 0:
            result[to] = source[of]
    return result


def check(form, way, n, **options):
    target, source = noise(TARGETS, size_of(form), 1), noise(SOURCES, size_of(form), 2)
    lists = make_lists(n)
    wanted = expected(target, source, *lists)
    targets = to_fields(target, form) if way == "unpack" else jnp.asarray(target)
    sources = to_fields(source, form) if way == "pack" else jnp.asarray(source)
    found = row_fetch(targets, sources, *map(jnp.asarray, lists), **options)
    assert isinstance(found, jax.Array) == (way != "unpack")
    assert (to_packed(found if way == "unpack" else [found]) == wanted).all()


WAYS = ["packed", "pack", "unpack"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_copied_and_others_left(form, way):
    check(FORMS[form], way, 20)


def test_nothing_to_copy():
    target, none = jnp.ones((4, 8), jnp.uint8), jnp.full(3, -1, jnp.int32)
    assert (row_fetch(target, jnp.zeros((4, 8), jnp.uint8), none, jnp.arange(3)) == 1).all()
    assert (row_fetch(target, jnp.zeros((4, 8), jnp.uint8), jnp.arange(3), none) == 1).all()
    assert row_fetch(target, jnp.zeros((4, 8), jnp.uint8), none[:0], none[:0]) is target


@pytest.mark.parametrize("way", WAYS)
def test_targets_are_updated_in_place(way):
    rows = 1 << 14
    packed, fields = (rows, size_of(FP8)), [(rows, width) for width, _ in FP8]
    lists = [jax.ShapeDtypeStruct((8,), jnp.int32)] * 2
    in_fields = [jax.ShapeDtypeStruct(s, dtype) for s, (_, dtype) in zip(fields, FP8, strict=True)]
    in_one = jax.ShapeDtypeStruct(packed, jnp.uint8)
    step = jax.jit(row_fetch, donate_argnums=0)
    targets, sources = (in_fields if way == "unpack" else in_one), (in_fields if way == "pack" else in_one)
    memory = step.lower(targets, sources, *lists).compile().memory_analysis()
    assert memory.alias_size_in_bytes == rows * size_of(FP8)
    assert memory.temp_size_in_bytes < 1 << 20


ROWS = jnp.arange(2, dtype=jnp.int32)


def array(width, dtype=jnp.uint8):
    return jnp.zeros((4, width), dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((array(656), array(132), ROWS, ROWS), "target rows of 656 bytes, source rows of 132"),
        (([array(4), array(4)], [array(4), array(4)], ROWS, ROWS), "2 target and 2 source arrays; one side must be"),
        (([array(4)] * 4, array(16), ROWS, ROWS), "4 target and 1 source arrays.*at most 3 fields"),
        ((array(16), array(16), ROWS, ROWS[:1]), r"source_rows of shape \(1,\), give \[N\] with N = 2"),
        ((array(16), HostRows.at(1 << 40, 16), ROWS, ROWS), "rows in host memory need a GPU"),
        ((array(16), HostRows.at(1 << 40, 20), ROWS, ROWS), "target rows of 16 bytes, source rows of 20"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        row_fetch(*arguments)


def test_odd_bytes_are_refused_by_the_kernel_alone():
    source = jnp.arange(24, dtype=jnp.uint8).reshape(4, 6)
    assert (row_fetch(array(6), source, ROWS, ROWS)[:2] == source[:2]).all()
    with pytest.raises(ConfigError, match="cannot run its triton kernel: a field of 6 bytes is no multiple of 4"):
        row_fetch(array(6), source, ROWS, ROWS, implementation="triton")


@pytest.mark.parametrize("address", [0, 8, 1 << 64])
def test_address_of_a_host_pool_is_checked(address):
    with pytest.raises(ConfigError, match="must be aligned to 16 bytes"):
        HostRows.at(address, 656)


def test_address_is_an_argument_of_a_program():
    leaves = jax.tree.leaves(HostRows.at(0x123456789ABCDEF0, 656))
    assert [leaf.tolist() for leaf in leaves] == [[0x9ABCDEF0, 0x12345678]]
