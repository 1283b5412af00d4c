"""Requests handed over to an engine with HiSparse, on real programs: the tokens are those of one engine."""

import functools

import drafting_model
import hisparse_engine
import jax.numpy as jnp
import pytest
from drafting_model import CONFIG
from hisparse_engine import PAGE, PAGES, K, LitteredRunner, check_returned, greedy, least_pages, prompt, region_pages

from glmjax.serving.clock import Clock
from glmjax.serving.disaggregated import DisaggregatedEngine
from glmjax.serving.exchange import DeviceExchange, HostExchange
from glmjax.serving.handoff import Collector, Handoff
from glmjax.serving.runner import ProgramRunner
from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.memory import describe
from glmjax.sharding.relayout import KVSharding

NEW, STAGE = 10, 48


@pytest.fixture(scope="module")
def expected():
    return hisparse_engine.Expected()


@functools.cache
def exchange(programs, kind):
    return kind(programs, STAGE)


def fresh_memory(programs, kind):
    """The exchange's, for two more engines: those that are closed have freed theirs."""
    found = exchange(programs, kind)
    if kind is DeviceExchange:
        stage = programs.abstract_stage(STAGE)
        found.memory = DeviceMemory(tuple(jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in stage))
    return found.memory


class Receiver(LitteredRunner):
    def __init__(self, programs, kind):
        super().__init__(programs)
        self._exchange = exchange(programs, kind)


def hand_over(engine, programs, name, hub, kind, *, inline):
    """Makes an engine known to others."""
    where, num_drafts, rows = programs.layout, programs.speculation.num_drafts, fresh_memory(programs, kind)
    info = describe(
        CONFIG,
        rows,
        KVSharding(where.dcp, where.interleave, PAGE),
        engine_id=name,
        connector="local",
        kv_cache_dtype="float32",
        speculation=num_drafts > 0,
        dp=where.dp,
    )
    collector = Collector(make_connector(info, rows, Clock(), Settings(inline=inline), hub), where.dp)
    for group, scheduler in enumerate(engine.scheduler.ranks):
        scheduler.handoff = Handoff(collector, STAGE, PAGE * where.dcp, group)
    return engine


def pair(num_drafts, prefill="dp=1", decode="dp=1", *, inline=True, kind=DeviceExchange, **limits):
    """A plain engine and one with HiSparse; ``limits`` of the second's scheduler."""
    hub = {}
    if prefill == "dp=1":
        plain = hisparse_engine.plain_programs(num_drafts)
    else:
        plain = drafting_model.make_programs(num_drafts, prefill, rows=4)
    first = drafting_model.make_engine(ProgramRunner(plain, exchange(plain, kind)), plain)
    tiered = hisparse_engine.programs(num_drafts, decode)
    second = drafting_model.make_engine(Receiver(tiered, kind), tiered, **limits)
    return DisaggregatedEngine(
        hand_over(first, plain, "prefill", hub, kind, inline=inline),
        hand_over(second, tiered, "decode", hub, kind, inline=inline),
    )


def answers(both, prompts, max_tokens=NEW):
    handles = [both.submit(each, greedy(max_tokens)) for each in prompts]
    while both.has_work:
        both.step()
        both.prefill.scheduler.check()
        both.decode.scheduler.check()
    return [tuple(h.result(timeout=0).outputs[0].token_ids) for h in handles]


def token_bytes(num_drafts):
    layers, indexers = CONFIG.num_hidden_layers + (num_drafts > 0), CONFIG.num_full_indexers + (num_drafts > 0)
    return 4 * (layers * (CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim) + indexers * CONFIG.index_head_dim)


def all_returned(both):
    check_returned(both.decode)
    for engine in (both.prefill, both.decode):
        engine.step()  # collects leases
        for one in engine.scheduler.ranks:
            assert len(one.handoff._free) == STAGE and one.pool.free_blocks == one.config.num_blocks
    both.close()


def edges(num_drafts):
    """Lengths around a page, a selection, the buffer, and the longest."""
    buffer = region_pages(num_drafts) * PAGE
    return sorted({n + d for n in (PAGE, buffer) for d in (0, 1, 2)} | {1, K + 1, 80})


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(("room", "kind"), [("roomy", DeviceExchange), ("tight", HostExchange)])
def test_tokens_are_those_of_one_engine(num_drafts, room, kind, expected):
    prompts = [prompt(n, seed=20) for n in edges(num_drafts)]
    pages = PAGES if room == "roomy" else least_pages(num_drafts)
    both = pair(num_drafts, kind=kind, num_pages=pages)
    assert answers(both, prompts) == expected(prompts, [NEW] * len(prompts))
    stats = both.stats()
    assert stats["kv_transfer_recomputed"] == 0 and stats["hisparse_cache_misses"] > 0
    missing = sum(len(each) - 1 for each in prompts)
    assert stats["kv_transfer_bytes_fetched"] == missing * token_bytes(num_drafts)
    if num_drafts:
        assert stats["num_accepted_tokens"] > 0
    all_returned(both)


@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_what_the_prefix_cache_has_is_not_fetched(room, expected):
    first, other = prompt(50, seed=21), prompt(30, seed=22)
    second = [*first[:41], *other]
    both = pair(0, num_pages=PAGES if room == "roomy" else least_pages(0), inline=False)
    assert answers(both, [first]) == expected([first], [NEW])
    before = both.stats()["kv_transfer_bytes_fetched"]
    assert answers(both, [second, other]) == expected([second, other], [NEW] * 2)
    moved = both.stats()["kv_transfer_bytes_fetched"] - before
    assert moved == (len(second) - 1 - 40 + len(other) - 1) * token_bytes(0)
    all_returned(both)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [("pcp=2,dcp=2", "dp=2,ep=2"), ("dp=1", "pcp=2,dcp=2")])
def test_tokens_are_the_same_under_layouts(prefill, decode, expected):
    prompts = [prompt(n, seed=9) for n in (5, 33, 58, 80)]
    both = pair(3, prefill, decode, num_pages=least_pages(3, decode))
    assert answers(both, prompts) == expected(prompts, [NEW] * len(prompts))
    stats = both.stats()
    assert stats["kv_transfer_bytes_fetched"] == sum(len(each) - 1 for each in prompts) * token_bytes(3)
    assert stats["hisparse_cache_misses"] > 0 and stats["num_accepted_tokens"] > 0
    all_returned(both)
