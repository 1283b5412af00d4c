"""Engines without a model that hand requests over in one process."""

import itertools

from hypothesis import strategies as st
from random_schedules import VOCAB, alone, request

from glmjax.serving.clock import Clock
from glmjax.serving.engine import Engine
from glmjax.serving.fake_handoff import FakeHandoffRunner, FakeTieredHandoffRunner
from glmjax.serving.handle import EngineError
from glmjax.serving.handoff import Collector, Handoff
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
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


class ImpatientEngine(Engine):
    """While the clock stands still, there is nothing to wait for but fetches in threads of their own."""

    def _wait_for_transfers(self):
        if isinstance(self.clock, StillClock):
            with self._wake:
                self._wake.wait(0 if self.scheduler.handoff.connector.settings.inline else 0.001)
        else:
            super()._wait_for_transfers()


def make_engine(
    hub,
    clock,
    block_size=4,
    num_blocks=24,
    stage_blocks=12,
    on_failure="recompute",
    inline=True,
    fails=None,
    **limits,
):
    """``fails``: which copies between the tiers do, of an engine that has two."""
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
    fake = FakeHandoffRunner if config.num_pages is None else FakeTieredHandoffRunner
    how = {} if fails is None else {"fails": fails}
    runner = fake(block_size, VOCAB, stage_blocks=stage_blocks, num_drafts=config.num_speculative_tokens, **how)
    info = runner.describe(f"engine-{next(NAMES)}")
    connector = LocalConnector(info, runner.memory, clock, Settings(inline=inline, lease_seconds=30), hub)
    handoff = Handoff(Collector(connector), stage_blocks, block_size, on_failure=on_failure)
    return ImpatientEngine(Scheduler(config, (), handoff), runner, None, clock, vocab_size=VOCAB)


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
        if scheduler.offload is not None:
            assert scheduler.offload.residency.free_pages == scheduler.config.num_pages
        scheduler.check()


def lives(length, max_tokens, most=6):
    """Up to so many requests with prompts and outputs up to so many tokens."""
    one = {
        "length": st.integers(1, length),
        "shared": st.integers(0, length),
        "max_tokens": st.integers(1, max_tokens),
        "arrives": st.integers(0, 10),
        "aborted": st.none() | st.none() | st.integers(0, 25),
    }
    return st.lists(st.fixed_dictionaries(one), min_size=1, max_size=most)


def check_any_schedule(one, other, lives, dies=None):
    """Lets requests go from one engine, made with the options ``one``, to another, and compares.

    Args:
      dies: the step at which the first engine can be found no more.

    Returns:
      the second engine.
    """
    hub, clock = {}, StillClock()
    prefill, decode = make_engine(hub, clock, **one), make_engine(hub, clock, **other)
    prompts = [
        [(i + (i >= life["shared"]) * 5 * n) % VOCAB for i in range(life["length"])] for n, life in enumerate(lives)
    ]
    sent, got = {}, {}

    def over():
        return len(got) == len(lives) and all(handle.finished for handle in got.values())

    for step in range(3000):
        for n, life in enumerate(lives):
            if life["arrives"] == step:
                sent[n] = prefill.submit(prompts[n], greedy(1), send=True)
            if n in sent and n not in got and sent[n].finished:
                offer = from_params(sent[n].output.kv_transfer_params)
                got[n] = decode.submit(prompts[n], greedy(life["max_tokens"]), offer=offer)
            if life["aborted"] == step and n in got:
                decode.abort(got[n].request_id)
        if step == dies:
            hub.pop(prefill.scheduler.handoff.connector.info.engine_id)
        if dies is not None and step > dies:
            clock.now += 0.5  # nobody is told that a request is given up: leases have to run out
        for engine in (prefill, decode):
            engine.step()
            engine.scheduler.check()
        if over() and not prefill.has_work and not decode.has_work:
            break
    assert over() and prefill.healthy and decode.healthy
    for n, handle in got.items():
        expected = alone(request("r", prompts[n], lives[n]["max_tokens"]))
        completion = handle.output.outputs[0]
        whole = completion.finish_reason != "abort"
        assert completion.token_ids == (expected if whole else expected[: len(completion.token_ids)])
        may_end = lives[n]["aborted"] is not None or other.get("fails") or other.get("on_failure") == "fail"
        assert whole or may_end
        assert handle.error is None or isinstance(handle.error, EngineError)
    clock.now += 31
    returned(prefill, decode)
    return decode
