"""The full-size GLM-5.3 prefill step, compiled for eight H200s on a machine that has none: what it holds and overlaps.

pytest -m slow -s tests/glmjax/test_full_size.py
"""

import functools
import importlib.util
import resource
import time

import pytest

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.fit import GIB, H200_BYTES, compile_prefill, table
from glmjax.sharding import hlo
from glmjax.sharding.layout import PRESETS, Layout

MIB = 2**20
CHUNK, BLOCK = 2048, 64
CONFIG = GLMConfig.glm_5_3()
HEADS, LATENT = CONFIG.num_attention_heads, CONFIG.kv_lora_rank
CONTEXTS = (0, 64 << 10, 248 << 10, 1 << 20)
GATHERED = [("pcp8_dcp8", "kv_gather", cached) for cached in CONTEXTS]
CASES = [*GATHERED, ("pcp8_dcp8", "query_gather", 1 << 20), ("pcp8", "auto", 1 << 20)]

pytestmark = pytest.mark.usefixtures("unoptimized_h200_code")
needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs JAX's CUDA plugin, no GPU: make test has it"
)


@functools.cache
def compiled(preset, prefill, cached):
    """The fit, the CPU seconds that it took, of all threads, and the HLO."""
    start = time.process_time()
    fit = compile_prefill(CONFIG, PRESETS[preset], chunk=CHUNK, cached=cached, block_size=BLOCK, prefill=prefill)
    return fit, time.process_time() - start, hlo.parse(fit.program.hlo)


def local_rows(preset, cached):
    """Tokens of KV that a device's pool has room for."""
    per_block = BLOCK * PRESETS[preset].dcp
    return -(-(cached + CHUNK) // per_block) * BLOCK


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2] >> 10}K")
gathered = pytest.mark.parametrize("case", GATHERED, ids=lambda case: f"{case[2] >> 10}K")
# With nothing cached the rows are a few megabytes, and XLA sees no point in doing something else meanwhile.
much_gathered = pytest.mark.parametrize("case", GATHERED[1:], ids=lambda case: f"{case[2] >> 10}K")


@pytest.mark.slow
@needs_plugin
@every_case
def test_it_fits_or_not_and_compiles_on_a_small_machine(case):
    preset, _, cached = case
    fit, seconds, _ = compiled(*case)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of this process so far
    print(f"\n{table([fit])}\n{seconds:.0f} s of CPU time, peak RSS {peak / GIB:.1f} GiB")
    assert seconds < 300
    assert peak < 16 * GIB
    assert fit.fits == (fit.total <= H200_BYTES) == (preset == "pcp8_dcp8" or cached < 1 << 20)
    assert (fit.kv_tokens >= cached + CHUNK) == fit.fits
    # All of it is accounted for; the pool is updated in place.
    memory = fit.program.memory
    assert 0 <= memory.aliased - fit.kv < 100  # besides it the requests' state
    assert 0 < memory.arguments - fit.weights - fit.kv < MIB
    assert 0 < fit.inputs_and_outputs < MIB


@pytest.mark.slow
@needs_plugin
def test_dcp_keeps_an_eighth_of_the_context_on_each_device():
    whole, shared = (compiled(*case)[0] for case in CASES[-1:] + CASES[3:4])
    assert (whole.layout.dcp, shared.layout.dcp) == (1, 8) and whole.cached == shared.cached
    assert whole.weights == shared.weights
    assert whole.kv < 8 * shared.kv < whole.kv + 8 * 2 * BLOCK * whole.token_kv  # a spare block on every device


def explained(preset, cached):
    """What may be large: (dtype, dimensions) -> what it is."""
    rows = local_rows(preset, cached) + BLOCK  # and a spare block
    experts = CONFIG.n_routed_experts // PRESETS[preset].ep
    pairs = CHUNK * CONFIG.num_experts_per_tok + experts * 127  # places if every token chose this device's experts only
    lists = 2 * CONFIG.index_topk
    layers = {
        ("bf16", (pairs // 128 * 128, CONFIG.hidden_size)): "experts' outputs",
        ("f8e4m3fn", (pairs // 128 * 128, CONFIG.hidden_size)): "experts' inputs, quantised",
        ("bf16", (CHUNK, HEADS, LATENT)): "queries of all devices, or partial results",
        ("s32", (CHUNK, lists, 2)): "candidates of the top-k, scores and positions",
        ("s32", (CHUNK // 8, 8, lists, 2)): "candidates of this device's queries",
    }
    fields = [
        (CONFIG.num_hidden_layers, "u8", (LATENT,)),
        (CONFIG.num_hidden_layers, "f32", (LATENT // 128,)),
        (CONFIG.num_hidden_layers, "bf16", (CONFIG.qk_rope_head_dim,)),
        (CONFIG.num_full_indexers, "u8", (CONFIG.index_head_dim,)),
        (CONFIG.num_full_indexers, "f32", ()),
    ]
    pool = {(dtype, (stack, rows, *width)): "the pool, updated in place" for stack, dtype, width in fields}
    own = {(dtype, (rows, *width)): "own rows of a layer, to be gathered" for _, dtype, width in fields}
    copy = {(dtype, (8 * rows, *width)): "gathered rows of a layer" for _, dtype, width in fields}
    return layers | pool | own | copy


@pytest.mark.slow
@needs_plugin
@every_case
def test_large_temporaries_are_of_one_layer_and_as_stored(case):
    """Above all no scores [queries, context] or [queries, heads, context], and no dequantised copy of the cache."""
    preset, _, cached = case
    _, _, module = compiled(*case)
    known = explained(preset, cached)
    largest = {}
    for buffer in hlo.largest_temporaries(module, 48 * MIB):
        shape = buffer.shape.dtype, tuple(size for size in buffer.shape.dims if size > 1)
        largest.setdefault(shape, buffer.shape.bytes)
    print()
    for (dtype, dims), size in largest.items():
        print(f"{size / MIB:9,.0f} MiB  {dtype}{list(dims)}  {known.get((dtype, dims), 'UNEXPLAINED')}")
    assert largest.keys() <= known.keys()


def is_attention(instruction):
    """The kernel, whose result is [queries, parts, heads, latent]."""
    return instruction.opcode == "custom-call" and any(s.dims[-2:] == (HEADS, LATENT) for s in instruction.shapes)


@pytest.mark.slow
@needs_plugin
@much_gathered
def test_next_layers_rows_travel_while_a_layer_attends(case):
    _, _, module = compiled(*case)
    rows = 8 * (local_rows(case[0], case[2]) + BLOCK)
    gathers = [c for c in hlo.collectives(module) if any(s.dims == (rows, LATENT) for s in c.instruction.shapes)]
    ahead = [c for c in gathers if c.instruction.computation != module.entry]
    assert [c.runs for c in gathers if c not in ahead] == [1]  # before the first layer
    assert sum(c.runs for c in ahead) == CONFIG.num_hidden_layers  # the last one's is in vain: it is in a loop
    for collective in ahead:
        assert collective.kind == "all-gather"
        assert len(collective.instruction.operands) in (3, 5)  # a row's fields, and an index key's
        assert any(is_attention(i) for i in hlo.overlapped(module, collective))


@pytest.mark.slow
@needs_plugin
@gathered
def test_gathered_rows_are_not_copied_from_layer_to_layer(case):
    """But for the first two groups, a loop of one layer: it cannot put the next rows where the last ones are."""
    _, _, module = compiled(*case)
    rows = 8 * (local_rows(case[0], case[2]) + BLOCK)
    copies = [
        module.runs(name)[0]
        for name, instructions in module.computations.items()
        for i in instructions
        if i.opcode.startswith("copy") and any(s.dims == (1, rows, LATENT) for s in i.shapes)
    ]
    assert sum(copies) <= 2


@pytest.mark.parametrize(("sizes", "named"), [({"chunk": 0}, "chunk=0"), ({"cached": -1}, "cached=-1")])
def test_sizes_that_make_no_step_are_refused(sizes, named):
    with pytest.raises(ConfigError, match=named):
        compile_prefill(CONFIG, Layout(), **sizes)


def test_layout_that_cannot_split_the_model_is_refused():
    with pytest.raises(ConfigError, match="tp=3 cannot split num_attention_heads=64"):
        compile_prefill(CONFIG, Layout(tp=3))
