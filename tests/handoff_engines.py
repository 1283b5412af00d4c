"""Engines without a model that hand requests over in one process."""

import itertools

from random_schedules import VOCAB

from glmjax.serving.clock import Clock
from glmjax.serving.engine import Engine
from glmjax.serving.fake_handoff import FakeHandoffRunner
from glmjax.serving.handoff import Collector, Handoff
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.transfer.interface import PeerInfo
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.local import LocalConnector
from glmjax.serving.transfer.params import from_params
from glmjax.types import SamplingParams

NAMES = itertools.count()


class StillClock(Clock):
    """Time goes on when a test says so."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def make_engine(
    hub, clock, block_size=4, num_blocks=24, stage_blocks=12, on_failure="recompute", inline=True, **limits
):
    config = SchedulerConfig(
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
            "max_model_len": 64,
            "block_size": block_size,
            "num_blocks": num_blocks,
            **limits,
        }
    )
    runner = FakeHandoffRunner(block_size, VOCAB, stage_blocks=stage_blocks, num_drafts=config.num_speculative_tokens)
    info = PeerInfo(
        engine_id=f"engine-{next(NAMES)}",
        connector="local",
        glmjax_version="test",
        model="fake",
        kv_cache_dtype="float32",
        speculation=False,
        layers=1,
        indexers=1,
        mla_row_bytes=24,
        index_row_bytes=4,
        block_size=block_size,
    )
    connector = LocalConnector(info, runner.memory, clock, Settings(inline=inline, lease_seconds=30), hub)
    handoff = Handoff(Collector(connector), stage_blocks, block_size, on_failure=on_failure)
    return Engine(Scheduler(config, (), handoff), runner, None, clock, vocab_size=VOCAB)


def run(*engines, until=lambda: False):
    for _ in range(3000):
        if until() or not any(engine.has_work for engine in engines):
            return
        for engine in engines:
            engine.step()
            engine.scheduler.check()
    raise AssertionError("it does not end")


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def prefilled(engine, prompt):
    """The offer of a prompt that has been computed."""
    handle = engine.submit(prompt, greedy(1), send=True)
    run(engine)
    return from_params(handle.result(timeout=0).kv_transfer_params)


def returned(*engines):
    for engine in engines:
        engine.step()  # collects leases
        scheduler = engine.scheduler
        assert scheduler.pool.free_blocks == scheduler.config.num_blocks
        assert len(scheduler.handoff._free) == scheduler.handoff.stage_blocks
        scheduler.check()
