"""The stage on the devices: blocks go there and come back, and no program copies it or a pool."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting_model import BLOCK, CONFIG
from jax.sharding import NamedSharding, PartitionSpec

from glmjax.cache import abstract_cache, make_cache
from glmjax.config import GLMConfig
from glmjax.handoff import read_blocks
from glmjax.kernel_report import h200_mesh
from glmjax.sharding.aot import compile_for_h200
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.stage import StageCopies, abstract_stage, load_blocks, pack_rows, save_blocks, spread_rows

DTYPES = ["fp8_ds_mla", "bfloat16", "float32"]
POOL, STAGE, MOST = 6, 5, 3


def noise(tree, seed):
    """Random bytes. They come from a program: an array made of NumPy's may share its memory, which is not donated."""
    leaves, form = jax.tree.flatten(tree)

    def of(x, key):
        return jax.random.bits(key, (*x.shape, x.dtype.itemsize), jnp.uint8).view(x.dtype)[..., 0]

    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(form, jax.jit(lambda keys: list(map(of, leaves, keys)))(keys))


def blocks_of(cache):
    """Packed rows of every block, of both kinds."""
    return [np.asarray(x) for x in read_blocks(cache, jnp.arange(POOL), BLOCK)]


def by_block(stage):
    """Copies: a view would keep the stage's memory from being donated."""
    return [np.array(x).reshape(x.shape[0], -1, BLOCK, x.shape[2]) for x in stage]


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_saved_and_loaded_byte_for_byte_and_in_place(dtype):
    cache, other = (noise(make_cache(CONFIG, POOL, BLOCK, dtype, mtp=True), seed) for seed in (0, 1))
    shapes = abstract_stage(cache, STAGE, BLOCK, ONE_DEVICE, None)
    stage = tuple(noise(x, 2) for x in shapes)
    copies = StageCopies(*jax.eval_shape(lambda *x: x, cache, stage), BLOCK, MOST, ONE_DEVICE, None)
    wanted, before, there = blocks_of(cache), by_block(stage), blocks_of(other)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((stage, other))]

    stage, _ = copies.save(cache, stage, [[(2, 4), (0, 1)]])
    for new, old, rows in zip(by_block(stage), before, wanted, strict=True):
        assert np.array_equal(new[:, [4, 1]], rows[:, [2, 0]])
        assert np.array_equal(np.delete(new, [4, 1], axis=1), np.delete(old, [4, 1], axis=1))

    other, *_ = copies.load(other, None, stage, [[(3, 1), (5, 4)]])
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((stage, other))] == places
    for new, old, rows in zip(blocks_of(other), there, wanted, strict=True):
        assert np.array_equal(new[:, [3, 5]], rows[:, [0, 2]])
        assert np.array_equal(np.delete(new, [3, 5], axis=1), np.delete(old, [3, 5], axis=1))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs JAX's CUDA plugin, no GPU")
@pytest.mark.parametrize("way", ["save", "load", "pack", "spread"])
def test_neither_stage_nor_pool_is_copied_on_an_h200(way):
    config, size, blocks, most, rows, ranks = GLMConfig.glm_5_3(), 64, 256, 16, 128, 2
    cache = abstract_cache(config, blocks, size, "fp8_ds_mla", mtp=True)
    stage = abstract_stage(cache, blocks, size, ONE_DEVICE, None)
    moves, slots = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((most, 2), (1, ranks, rows)))
    packed = [tuple(jax.ShapeDtypeStruct((x.shape[0], rows, x.shape[2]), x.dtype) for x in stage)] * ranks
    block, row = size * config_bytes(stage), config_bytes(stage)
    program, arguments, donated, moved = {
        "save": (lambda c, s, m: save_blocks(c, s, m, size), (cache, stage, moves), 1, most * block),
        "load": (lambda c, s, m: load_blocks(c, None, s, m, size)[0], (cache, stage, moves), 0, most * block),
        "pack": (pack_rows, (stage, slots), None, rows * ranks * row),
        "spread": (spread_rows, (stage, packed, slots), 0, rows * ranks * row),
    }[way]
    place = NamedSharding(h200_mesh(), PartitionSpec())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    donate = () if donated is None else (donated,)
    compiled = compile_for_h200(program, *arguments, mesh=h200_mesh(), donate=donate)
    in_place = [] if donated is None else jax.tree.leaves(arguments[donated])
    assert compiled.memory.aliased == sum(math.prod(x.shape) * x.dtype.itemsize for x in in_place)
    assert compiled.memory.temporaries <= 3 * moved


def config_bytes(stage):
    """Of all rows of a token."""
    return sum(x.shape[0] * x.shape[2] for x in stage)
