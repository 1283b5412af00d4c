"""Every layout computes what one device does: tokens, log-probabilities and what it leaves in its pools.

``tests/layouts.py`` says on what; here are the layouts. Drafting is in ``test_mtp_layouts.py``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import layouts
import numpy as np
import pytest
from child_environment import without_devices
from layouts import BLOCK, CONFIG, LENGTHS, NEW_TOKENS, REQUESTS, Case

from glmjax import codec
from glmjax.params import random_params
from glmjax.programs import Programs
from glmjax.sharding.layout import Layout

pytestmark = pytest.mark.slow  # each case compiles one program or two

ONE_DEVICE = Case("dp=1", singles=True)
CASES = [
    Case("tp=8,ep=8"),
    Case("tp=4"),
    Case("dp=8,ep=8"),
    Case("dp=2,pcp=4,ep=8"),
    Case("pcp=8,ep=8", singles=True),
    Case("tp=8,dcp=8"),
    Case("tp=4,dcp=4,interleave=4", prefill="kv_gather"),
    Case("pcp=8,dcp=8,ep=8", singles=True),
    Case("pcp=8,dcp=8,ep=8,interleave=4", prefill="kv_gather"),
    Case("pcp=4,dcp=2", prefill="kv_gather"),
    # Both divisions of a group: two DCP ranks are neighbours in tp, four are two in pcp by two in tp, eight are all.
    Case("pcp=4,tp=2,dcp=2,interleave=8"),
    Case("pcp=4,tp=2,dcp=4,interleave=4", singles=True),
    Case("pcp=4,tp=2,dcp=8"),
    Case("pcp=4,tp=2,dcp=8", combine="a2a", singles=True),
]
FP8_CASES = [
    Case("pcp=8,dcp=8,ep=8", "fp8_ds_mla"),
    Case("pcp=8,dcp=8,ep=8", "fp8_ds_mla", prefill="kv_gather"),
]


def test_one_device_is_far_from_a_tie():
    """Else a token of another layout might differ and be right."""
    best = np.sort(layouts.generate(ONE_DEVICE).logprobs, axis=-1)
    assert (best[..., -1] - best[..., -2]).min() > 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_logprobs_equal_one_device(case):
    layouts.assert_equals_one_device(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pools_hold_the_rows_of_one_device(case):
    for request in range(REQUESTS):
        expected = layouts.cached_rows(ONE_DEVICE, 0, request)
        for rank in range(layouts.programs(case).layout.dp):
            for name, rows in layouts.cached_rows(case, rank, request).items():
                assert np.abs(rows - expected[name]).max() < 1e-4, (request, rank, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_is_kept_once_in_each_set_of_ranks(case):
    """No rank writes a slot that is not its own, and devices with the same shard hold the same rows."""
    layout, pools = layouts.programs(case).layout, layouts.generate(case).cache.latent
    kept = []
    for index, shards in by_index(pools).items():
        first, *others = (np.asarray(shard.data)[:, :-BLOCK] for shard in shards)  # the spare block is anyone's
        assert len(shards) == layout.group_size // layout.dcp, index
        assert all(np.array_equal(first, other, equal_nan=True) for other in others), index
        written = ~np.isnan(first).any(axis=-1)
        assert (written == written[0]).all(), index
        kept.append(written[0].sum())
    assert sum(kept) == layout.dp * sum(length + NEW_TOKENS - 1 for length in LENGTHS)


def by_index(array):
    """The shards of an array by the part of it that they are."""
    found = {}
    for shard in array.addressable_shards:
        found.setdefault(str(shard.index), []).append(shard)
    return found


# The FP8 pool.


@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_fp8_logprobs_of_first_tokens_equal_one_device(case):
    """But for roundings: a number that lies on the edge between two of FP8, 2^-3 apart, may go to either side.

    Few do, so most prompts agree as in float32, and one of a row's 32 numbers does not move the result by much.
    """
    expected, found = (layouts.generate(c).logprobs[0, :, 0] for c in (Case("dp=1", "fp8_ds_mla"), case))
    error = np.abs(found - expected).max(axis=-1)
    assert np.median(error) < 1e-5
    assert error.max() < 2**-7
    exact = layouts.generate(ONE_DEVICE).logprobs[0, :, 0]
    assert np.median(np.abs(found - exact).max(axis=-1)) > 2**-7  # what FP8 itself changes


@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_fp8_bytes_of_the_first_layer_equal_one_device(case):
    """Its input is the same everywhere, to the bit: the tokens' embeddings."""
    for request, length in enumerate(LENGTHS):
        expected = layouts.cached_rows(Case("dp=1", "fp8_ds_mla"), 0, request)
        for name, rows in layouts.cached_rows(case, 0, request).items():
            assert rows[0, :length].tobytes() == expected[name][0, :length].tobytes(), (request, name)


# Memory.


def test_dcp_divides_the_bytes_of_the_kv_on_every_device():
    """Pools for as many tokens, without and with DCP: an eighth, but for the spare block that each device has."""
    held = {}
    for text, blocks in (("pcp=8,ep=8", 80), ("pcp=8,dcp=8,ep=8", 10)):
        layout = Layout.parse(text)
        program = Programs(
            CONFIG,
            layouts.on_devices(layout, random_params(CONFIG)),
            num_blocks=blocks,
            block_size=BLOCK,
            table_width=1,
            cache_dtype="fp8_ds_mla",
            shapes=(),
            layout=layout,
        )
        held[layout.dcp] = dict.fromkeys(jax.devices(), 0)
        for pool in jax.tree.leaves(program.make_cache()):
            for shard in pool.addressable_shards:
                held[layout.dcp][shard.device] += shard.data.nbytes
    spare = BLOCK * codec.bytes_per_token(CONFIG)
    assert set(held[1].values()) == {81 * spare}
    assert set(held[8].values()) == {10 * spare + spare}


@pytest.mark.parametrize("case", CASES + FP8_CASES, ids=str)
def test_steps_leave_the_pools_where_they_were(case):
    """The same bytes on the same devices, nothing gathered that stays."""
    empty, used = layouts.programs(case).abstract_cache(), layouts.generate(case).cache
    for before, after in zip(jax.tree.leaves(empty), jax.tree.leaves(used), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
        assert after.shape == before.shape and after.dtype == before.dtype


@pytest.mark.parametrize("case", CASES + FP8_CASES, ids=str)
def test_no_program_copies_a_pool(case):
    program = layouts.programs(case)
    for shape, step in program._steps.items():
        text = step.as_text()
        for x in jax.tree.leaves(program.abstract_cache()):
            stack, slots, *width = x.sharding.shard_shape(x.shape)
            kind = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8"}[x.dtype.name]
            pool, *parts = (
                f"{kind}[{','.join(map(str, dims))}]"
                for dims in (
                    (stack, slots, *width),
                    (stack * slots, *width),
                    (1, slots, *width),
                    (slots, *width),
                )
            )
            assert pool in text
            for name in (pool, *parts):  # flat, or one layer of it
                assert not re.search(rf"= \(?{re.escape(name)}\S* copy(-start)?\(", text), (shape, name)


# More devices than this process has.


def test_sixteen_devices_equal_one():
    code = "import layouts, sys; [layouts.assert_equals_one_device(layouts.Case(text)) for text in sys.argv[1:]]"
    command = [sys.executable, "-c", code, "pcp=8,tp=2,dcp=8,ep=16", "dp=2,pcp=8,dcp=8,ep=16"]
    settings = without_devices()
    settings |= {
        "XLA_FLAGS": f"{settings['XLA_FLAGS']} --xla_force_host_platform_device_count=16",
        "PYTHONPATH": os.pathsep.join([str(Path(layouts.__file__).parent), *sys.path]),
    }
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
