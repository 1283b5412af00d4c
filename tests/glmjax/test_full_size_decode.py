"""The decode step with Hybrid HiSparse, compiled for eight H200s on a machine without one: what it holds and overlaps.

pytest -m slow -s tests/glmjax/test_full_size_decode.py

The full-size model is compiled once, with 64 requests on each GPU; the other forms with fewer layers of the same sizes.
"""

import dataclasses
import functools
import importlib.util
import math

import pytest

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.fit import H200_BYTES
from glmjax.fit_decode import TAIL_PAGES, compile_decode, decode_table, hybrid
from glmjax.sharding import hlo
from glmjax.sharding.layout import Layout
from glmjax.tiers import Offload

MIB = 2**20
BLOCK, CONTEXT, DRAFTS = 64, 1 << 20, 3
CONFIG = GLMConfig.glm_5_3()
HEADS, LATENT, TOPK = CONFIG.num_attention_heads, CONFIG.kv_lora_rank, CONFIG.index_topk
ROW_BYTES = LATENT + 4 * LATENT // 128 + 2 * CONFIG.qk_rope_head_dim
FOLLOWERS = 3
DP8 = Layout(dp=8, ep=8)

pytestmark = pytest.mark.usefixtures("unoptimized_h200_code")
needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs JAX's CUDA plugin, no GPU: make test has it"
)


def of_groups(*sizes):
    """GLM-5.3 with index groups of these sizes."""
    kinds = tuple(kind for size in sizes for kind in ["full", *["shared"] * (size - 1)])
    return dataclasses.replace(CONFIG, num_hidden_layers=len(kinds), indexer_types=kinds)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it reads rows, requests, rows of a hot region, and index groups that have followers."""

    config: GLMConfig
    reads: str
    batch: int
    rows: int
    groups: int

    @property
    def pages(self):
        return self.batch * (self.rows // BLOCK + TAIL_PAGES)

    @property
    def moved(self):
        """Rows that the requests of a rank may miss in one layer."""
        return self.batch * (1 + DRAFTS) * TOPK


# A group of dense layers and an expert, and others that are a loop, as in the whole model.
FEW = of_groups(1, 1, 4, 4, 4)
CASES = {
    "full": Case(CONFIG, "address", batch=64, rows=4 * TOPK, groups=19),
    "address": Case(FEW, "address", batch=8, rows=5 * TOPK, groups=3),
    "xla": Case(FEW, "xla", batch=8, rows=5 * TOPK, groups=3),
}
every_case = pytest.mark.parametrize("name", CASES)


@functools.cache
def compiled(name):
    case = CASES[name]
    offload = hybrid(case.config, case.batch, num_drafts=DRAFTS, rows=case.rows, reads=case.reads)
    fit = compile_decode(case.config, DP8, batch=case.batch, context=CONTEXT, num_drafts=DRAFTS, offload=offload)
    return case, fit, hlo.parse(fit.program.hlo)


@pytest.mark.slow
@needs_plugin
@every_case
def test_it_fits_with_its_rows_on_the_host(name):
    case, fit, _ = compiled(name)
    print(f"\n{decode_table([fit])}")
    layers, indexers = case.config.num_hidden_layers + 1, case.config.num_full_indexers + 1
    assert fit.fits and fit.total <= H200_BYTES
    assert (fit.pages, fit.tokens) == (case.pages, CONTEXT)
    # One block more than there is room for in each pool.
    assert fit.rows == layers * (fit.pages + 1) * BLOCK * ROW_BYTES
    assert fit.index_keys == indexers * (CONTEXT + BLOCK) * (CONFIG.index_head_dim + 4)
    # The host's pool is there, and not on the device.
    assert fit.host == layers * CONTEXT * ROW_BYTES
    assert fit.program.host_memory.arguments == (fit.host if case.reads == "xla" else 0)
    memory = fit.program.memory
    assert 0 < memory.arguments - fit.weights - fit.index_keys - fit.rows - fit.hot < 8 * MIB  # the packed batch
    # Pools and what the resolver knows are updated in place, and so is the little of the requests' state.
    assert 0 <= memory.aliased - fit.index_keys - fit.rows - fit.hot < MIB
    assert memory.outputs - memory.aliased < MIB
    # Rows on their way are most of the temporaries.
    moved = (1 + FOLLOWERS) * case.moved * ROW_BYTES
    assert memory.temporaries < moved + 256 * MIB


def pools(case):
    """(dtype, dimensions) of what lives from step to step, as a stack of layers and as one list of rows."""
    layers, indexers = case.config.num_hidden_layers + 1, case.config.num_full_indexers + 1
    rows, keys, slots = (case.pages + 1) * BLOCK, CONTEXT + BLOCK, case.batch + 1
    found = set()
    for dtype, stack, *dims in (
        ("u8", layers, rows, LATENT),
        ("f32", layers, rows, LATENT // 128),
        ("bf16", layers, rows, CONFIG.qk_rope_head_dim),
        ("u8", indexers, keys, CONFIG.index_head_dim),
        ("f32", indexers, keys),
        ("s32", indexers, slots, case.rows),
    ):
        found |= {(dtype, (stack, *dims)), (dtype, (stack * dims[0], *dims[1:]))}
    return found


def is_in_place(module, instruction):
    """A kernel whose results are arguments, or an update of a part."""
    if instruction.opcode.endswith("-done"):
        (instruction,) = (x for x in module.computations[instruction.computation] if x.name in instruction.operands)
    aliased = "output_to_operand_aliasing" in instruction.attributes
    return aliased or "dynamic-update-slice" in module.opcodes(instruction)


@pytest.mark.slow
@needs_plugin
@every_case
def test_no_pool_is_copied(name):
    case, _, module = compiled(name)
    known = pools(case)
    seen = set()
    for buffer in hlo.largest_temporaries(module, MIB):
        instruction, shape = buffer.instruction, (buffer.shape.dtype, buffer.shape.dims)
        if shape in known:
            assert is_in_place(module, instruction), instruction
            seen.add(shape)
        large = buffer.shape.bytes > 16 * MIB and CONFIG.vocab_size not in buffer.shape.dims  # logits are copied
        assert not (instruction.opcode.startswith("copy") and large), instruction
        assert buffer.shape.bytes <= FOLLOWERS * case.moved * ROW_BYTES or shape in known, instruction
    assert {math.prod(dims) for _, dims in seen} == {math.prod(dims) for _, dims in known}


def fetches(case, module):
    """Starts of the calls that bring the followers' rows."""
    rows = (FOLLOWERS * case.moved, ROW_BYTES) if case.reads == "address" else (FOLLOWERS, case.moved, ROW_BYTES)
    mark = '_xla_stream_annotation="1"' if case.reads == "address" else 'custom_call_target="HostExecute"'
    return [
        instruction
        for instructions in module.computations.values()
        for instruction in instructions
        if instruction.opcode in ("call-start", "custom-call-start")
        and mark in instruction.attributes
        and any(shape.dims == rows for shape in instruction.shapes)
    ]


@pytest.mark.slow
@needs_plugin
@every_case
def test_followers_rows_come_while_their_leader_computes(name):
    case, _, module = compiled(name)
    starts = fetches(case, module)
    assert sum(module.runs(start.computation)[0] for start in starts) == case.groups
    assert len(starts) == 2  # of the first such group, whose layers are dense and not, and of those in a loop
    for start in starts:
        beside = hlo.meanwhile(module, start)
        print(f"\n{start.name}, {module.runs(start.computation)[0]} times: {len(beside)} instructions meanwhile")
        kernels = [x for x in beside if x.opcode == "custom-call"]
        # XLA starts a call on the host late: it takes it to be short. Its rows come beside the leader's MLP only.
        assert any(CONFIG.hidden_size in s.dims for x in kernels for s in x.shapes)
        if case.reads == "address":
            assert any(s.dims[-2:] == (HEADS, LATENT) for x in kernels for s in x.shapes)
        # The leader's rows are not among what comes meanwhile: they came first.
        assert not any(s.dims[-2:] == (case.moved, ROW_BYTES) for x in beside for s in x.shapes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 0, "context": 1}, "batch=0"),
        ({"batch": 1, "context": 0}, "context=0"),
        ({"batch": 1, "context": 1, "num_drafts": 0}, "num_drafts=0"),
        ({"batch": 1, "context": 1, "offload": Offload(1)}, "reads='auto'"),
    ],
)
def test_sizes_that_make_no_step_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        compile_decode(CONFIG, DP8, **sizes)


def test_regions_are_as_large_as_the_resolver_wants_them():
    assert hybrid(CONFIG, 8) == Offload(8 * 162, 160, reads="address")
    assert hybrid(CONFIG, 1, num_drafts=1, rows=4097, reads="xla") == Offload(67, 65, reads="xla")
