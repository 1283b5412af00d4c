"""Engines whose KV rows are in two tiers, with pools full of NaN: no row may be read before it is written or copied.

One set of programs serves device pools of any size up to its own, by the scheduler's leave.
"""

import dataclasses
import functools
from typing import Any

import drafting_model
import jax
import jax.numpy as jnp
import numpy as np

from glmjax.programs import Programs
from glmjax.serving.engine import Engine
from glmjax.serving.plan import Plan
from glmjax.serving.runner import ProgramRunner, Started
from glmjax.tiers import Offload
from glmjax.types import SamplingParams

ROWS, PAGES = 4, 112  # more than four of the longest requests can use
K, PAGE = drafting_model.CONFIG.index_topk, drafting_model.BLOCK


def region_pages(num_drafts: int) -> int:
    """Of the default buffer: one selection more than the queries of a step make."""
    return (num_drafts + 2) * K // PAGE


def programs(num_drafts: int, layout: str = "dp=1", *, regions: bool = True) -> Programs:
    return _programs(num_drafts, layout, regions)  # the same ones, however the arguments are given


@functools.cache
def _programs(num_drafts: int, layout: str, regions: bool) -> Programs:
    offload = Offload(PAGES, region_pages(num_drafts) if regions else 0, transfer_pages=4)
    return drafting_model.make_programs(num_drafts, layout, rows=ROWS, offload=offload)


@functools.cache
def plain_programs(num_drafts: int) -> Programs:
    return drafting_model.make_programs(num_drafts, rows=ROWS)


@functools.cache
def littered_host(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Any:
    """Makes a host's pool; compiled once."""
    return jax.jit(lambda: jnp.full(shape, 255, jnp.uint8), out_shardings=sharding)


class LitteredRunner(ProgramRunner):
    """Its pools start full of NaN."""

    def __init__(self, programs: Programs):
        super().__init__(programs)

        def litter(x: jax.Array) -> jax.Array:
            return jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

        self._cache = jax.tree.map(litter, self._cache)
        if self._host is not None:
            self._host = littered_host(self._host.shape, self._host.sharding)()

    def start(self, plan: Plan) -> Started:
        """With pages of the blocks that the scheduler was not given too."""
        size = self._programs.num_blocks + 1
        pages = tuple(np.pad(x, (0, size - len(x)), constant_values=-1) for x in plan.page_of)
        return super().start(dataclasses.replace(plan, page_of=pages))


def engine(num_drafts: int, layout: str = "dp=1", *, regions: bool = True, **limits: Any) -> Engine:
    """``limits`` of the scheduler: ``num_pages`` up to ``PAGES``, ``num_blocks`` up to the programs'."""
    made = programs(num_drafts, layout, regions=regions)
    return drafting_model.make_engine(LitteredRunner(made), made, **limits)


def least_pages(num_drafts: int, layout: str = "dp=1") -> int:
    """Of the device, for one request to go on."""
    return engine(num_drafts, layout).scheduler.config.least_pages


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Expected:
    """What an engine without tiers answers, each prompt computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def __call__(self, prompts: list[list[int]], max_tokens: list[int]) -> list[tuple[int, ...]]:
        keys = [(tuple(p), m) for p, m in zip(prompts, max_tokens, strict=True)]
        new = list(dict.fromkeys(k for k in keys if k not in self._known))
        if new:
            made = plain_programs(0)
            plain = drafting_model.make_engine(ProgramRunner(made), made)
            found = drafting_model.answers(plain, [list(p) for p, _ in new], *(greedy(m) for _, m in new))
            self._known |= dict(zip(new, found, strict=True))
        return [self._known[k] for k in keys]


def check_returned(engine: Engine) -> None:
    """Everything is back where it was."""
    engine.scheduler.check()
    schedulers = getattr(engine.scheduler, "ranks", (engine.scheduler,))
    for one in schedulers:
        assert one.pool.free_blocks == one.config.num_blocks
        assert one.offload.residency.free_pages == one.config.num_pages
        assert not one.offload.has_work


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(1, drafting_model.CONFIG.vocab_size, length).tolist()
