"""Requests handed over between engines with real programs: the tokens are those of one engine."""

import functools
import importlib.util
import math

import drafting_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting_model import BLOCK, CONFIG, answers, make_programs
from hisparse_engine import greedy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glmjax.cache import abstract_cache, make_cache, packed_row_bytes
from glmjax.config import GLMConfig
from glmjax.handoff import BlockCopies, read_blocks, write_blocks, write_tiers
from glmjax.host_pool import abstract_host_pool, make_host_pool
from glmjax.kernel_report import h200_mesh
from glmjax.serving.clock import Clock
from glmjax.serving.data_parallel import DataParallelScheduler
from glmjax.serving.disaggregated import DisaggregatedEngine
from glmjax.serving.engine import Engine
from glmjax.serving.exchange import DeviceExchange, HostExchange
from glmjax.serving.handoff import Collector, Handoff
from glmjax.serving.runner import ProgramRunner
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.memory import describe
from glmjax.sharding.aot import compile_for_h200
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.sharding.relayout import KVSharding
from glmjax.tiers import Offload

STAGE = 48


PROMPTS = drafting_model.prompts(8, 60, seed=2)
PROMPTS += [[*PROMPTS[0][:30], 5, 6, 7]]  # a prefix that both sides know by then


@functools.cache
def programs_of(num_drafts, layout):
    return make_programs(num_drafts, layout, rows=4)


@pytest.fixture(scope="module")
def expected():
    """What one engine answers. Drafts change none of its tokens."""
    programs = programs_of(0, "dp=1")
    return answers(drafting_model.make_engine(ProgramRunner(programs), programs), PROMPTS, greedy(14))


def make_engine(num_drafts, layout, name, hub, make_exchange):
    programs = programs_of(num_drafts, layout)
    where = programs.layout
    exchange = make_exchange(programs, STAGE)
    info = describe(
        CONFIG,
        exchange.memory,
        KVSharding(where.dcp, where.interleave, BLOCK),
        engine_id=name,
        connector="local",
        kv_cache_dtype="float32",
        speculation=num_drafts > 0,
        dp=where.dp,
    )
    collector = Collector(make_connector(info, exchange.memory, Clock(), Settings(), hub), where.dp)
    handoffs = [Handoff(collector, STAGE, BLOCK * where.dcp, group) for group in range(where.dp)]
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=drafting_model.BUDGET,
        max_prefill_chunk=drafting_model.CHUNK,
        max_model_len=drafting_model.MAX_LEN,
        block_size=BLOCK * where.dcp,
        num_blocks=programs.num_blocks,
        num_speculative_tokens=num_drafts,
    )
    ranks = where.dp
    one = Scheduler(config, (0,), handoffs[0]) if ranks == 1 else DataParallelScheduler(config, ranks, (0,), handoffs)
    return Engine(one, ProgramRunner(programs, exchange), None, Clock(), vocab_size=CONFIG.vocab_size)


@pytest.mark.parametrize(
    ("num_drafts", "prefill", "decode", "exchange"),
    [
        (0, "dp=1", "dp=1", DeviceExchange),
        (3, "pcp=2,dcp=2", "dp=2,ep=2", DeviceExchange),
        (3, "dp=1", "tp=2", DeviceExchange),  # two devices have the same rows
        (0, "tp=2,dcp=2,interleave=4", "pcp=2,dcp=2", HostExchange),
    ],
)
def test_tokens_are_those_of_one_engine(num_drafts, prefill, decode, exchange, expected):
    hub = {}
    pair = DisaggregatedEngine(
        make_engine(num_drafts, prefill, "prefill", hub, exchange),
        make_engine(num_drafts, decode, "decode", hub, exchange),
    )
    handles = [pair.submit(prompt, greedy(14)) for prompt in PROMPTS[:-1]]
    while not all(handle.finished for handle in handles):
        pair.step()
    handles.append(pair.submit(PROMPTS[-1], greedy(14)))
    while pair.has_work:
        pair.step()
        pair.prefill.scheduler.check()
        pair.decode.scheduler.check()
    assert [tuple(h.result(timeout=0).outputs[0].token_ids) for h in handles] == expected
    stats = pair.stats()
    assert stats["kv_transfer_recomputed"] == 0 and stats["prefill_generation_tokens"] == len(PROMPTS)
    layers, indexers = CONFIG.num_hidden_layers + (num_drafts > 0), CONFIG.num_full_indexers + (num_drafts > 0)
    per_token = 4 * (layers * (CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim) + indexers * CONFIG.index_head_dim)
    cached = stats["cached_tokens"]
    missing = sum(len(prompt) - 1 for prompt in PROMPTS) - cached
    assert stats["kv_transfer_bytes_fetched"] == missing * per_token
    if num_drafts:
        assert stats["num_accepted_tokens"] > 0
    pair.close()


def noise(tree, seed=0):
    rng = np.random.default_rng(seed)

    def of(x):
        return jnp.asarray(rng.integers(0, 256, (*x.shape, x.dtype.itemsize)), jnp.uint8).view(x.dtype)[..., 0]

    return jax.tree.map(of, tree)


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16", "float32"])
def test_blocks_come_back_byte_for_byte(dtype):
    cache = noise(make_cache(CONFIG, 4, BLOCK, dtype, mtp=True))
    other = make_cache(CONFIG, 4, BLOCK, dtype, mtp=True)
    mla, index = read_blocks(cache, jnp.asarray([2, 0]), BLOCK)
    other = write_blocks(other, jnp.asarray([1, 3]), mla, index, BLOCK)
    again = read_blocks(other, jnp.asarray([1, 3]), BLOCK)
    assert np.array_equal(mla, again[0]) and np.array_equal(index, again[1])
    if dtype == "fp8_ds_mla":
        tiles = -(-CONFIG.kv_lora_rank // 128)
        assert mla.shape[3] == CONFIG.kv_lora_rank + 4 * tiles + 2 * CONFIG.qk_rope_head_dim
        assert index.shape[3] == CONFIG.index_head_dim + 4


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16", "float32"])
def test_rows_of_two_tiers_go_to_the_host_and_index_keys_to_the_device_in_place(dtype):
    blocks, most = 6, 3
    mla, index = read_blocks(noise(make_cache(CONFIG, blocks, BLOCK, dtype, mtp=True)), jnp.asarray([4, 0, 5]), BLOCK)
    cache = noise(abstract_cache(CONFIG, blocks, BLOCK, dtype, mtp=True, offload=Offload(2, 1), num_slots=2), seed=1)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cache)
    axes = tuple(ONE_DEVICE.axis_sizes)
    pool = abstract_host_pool(cache, BLOCK, ONE_DEVICE, Mesh(np.reshape(jax.devices()[:1], (1,) * len(axes)), axes))
    copies, host = BlockCopies(abstract, BLOCK, most, ONE_DEVICE, None, host=pool), make_host_pool(pool)
    keys, latent = np.asarray(read_blocks(cache, jnp.arange(blocks), BLOCK)[1]), np.asarray(cache.latent)
    places = host.unsafe_buffer_pointer(), cache.index_key.unsafe_buffer_pointer()

    cache, host = copies.receive(cache, host, [[3, 1]], np.asarray(mla), np.asarray(index))
    assert (host.unsafe_buffer_pointer(), cache.index_key.unsafe_buffer_pointer()) == places
    there = np.asarray(host).reshape(host.shape[0], blocks, BLOCK, -1)
    assert np.array_equal(there[:, [3, 1]], mla[:, :2]) and not np.delete(there, [3, 1], axis=1).any()
    found = np.asarray(read_blocks(cache, jnp.arange(blocks), BLOCK)[1])
    assert np.array_equal(found[:, [3, 1]], index[:, :2])
    assert np.array_equal(np.delete(found, [3, 1], axis=1), np.delete(keys, [3, 1], axis=1))
    assert np.array_equal(np.asarray(cache.latent).view(np.uint8), latent.view(np.uint8))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs JAX's CUDA plugin, no GPU")
def test_no_pool_of_two_tiers_is_copied_on_an_h200():
    config, blocks, most, size = GLMConfig.glm_5_3(), 256, 16, 64
    cache = abstract_cache(config, blocks, size, "fp8_ds_mla", mtp=True, offload=Offload(64, 8), num_slots=4)
    mla, index = jax.eval_shape(lambda cache: read_blocks(cache, jnp.zeros(most, jnp.int32), size), cache)
    pool = jax.ShapeDtypeStruct((mla.shape[0], blocks * size, packed_row_bytes(cache)), jnp.uint8)
    place = NamedSharding(h200_mesh(), PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (cache, pool, jax.ShapeDtypeStruct((most,), jnp.int32), mla, index),
    )
    write = functools.partial(write_tiers, block_size=size)
    program = compile_for_h200(write, *arguments, mesh=h200_mesh(), donate=(0, 1), on_host=(1,))
    assert program.host_memory.aliased == program.host_memory.arguments == math.prod(pool.shape)
    assert program.host_memory.temporaries == 0
    assert program.memory.aliased == sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert program.memory.temporaries < 2 * math.prod(mla.shape) // most  # a block on its way
    assert "dynamic-update-slice-start" in program.hlo and "HostExecute" not in program.hlo
