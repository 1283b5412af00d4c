"""One point of ours, measured in this process: ``python -m support.ours '{"model": ..., "kind": "decode", ...}'``.

The engine's own runner carries out plans as the scheduler would write them: a prompt in chunks, then one token a step
of every sequence, each fed back.  Prints one JSON object.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import glmjax.model
from glmjax.cache import KVCache
from glmjax.checkpoint import load_checkpoint
from glmjax.config import GLMConfig
from glmjax.params import Params
from glmjax.programs import Programs
from glmjax.serving.plan import Chunk, Plan, Sampled
from glmjax.serving.runner import ProgramRunner
from glmjax.step import RequestState
from glmjax.step_io import StepInputs, StepShape
from glmjax.types import SamplingParams
from support.machine import QUIET, Load, memory_mb

SEED = 1234
WARM_UP_STEPS = 3
MISS_EVENT = "/jax/compilation_cache/cache_misses"
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure.

    Attributes:
      kind: "prefill", "decode", or "compile" to leave the point's programs in the compilation cache.
      length: prompt, or context that each sequence holds before the first timed step.
      steps: decode steps of a run.
      chunk: prompt tokens of a step at most.
      fill: contexts are computed ("prefill") or drawn from a normal distribution ("random").
      attempts: runs at most while others disturb; the least disturbed counts.
      without_scan: time decode steps without the indexer's scan too.
    """

    model: str
    kind: str
    length: int
    batch: int = 1
    steps: int = 32
    chunk: int = 512
    block_size: int = 64
    fill: str = "prefill"
    attempts: int = 3
    without_scan: bool = True

    @property
    def blocks(self) -> int:
        """Blocks of one sequence; sequence i has blocks i * blocks and on."""
        return -(-(self.length + self.steps + 1) // self.block_size)


class Bench:
    """Programs whose pool stays in reach: the runner's own is the same one, until rows are copied here.

    What is not said here is as ``Programs`` of the whole step have it.
    """

    def __init__(self, job: Job, config: GLMConfig, params: Params):
        self.shapes = (StepShape(job.batch, 1, decode=True), StepShape(1, min(job.chunk, job.length)))
        self.table_width = job.blocks
        self.normal = self._programs(job, config, params, self.shapes)
        self.active = self.normal
        self.cache: KVCache | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.normal, name)

    def run(
        self, shape: StepShape, cache: KVCache, state: RequestState, inputs: Sequence[StepInputs], *offload: Any
    ) -> tuple[KVCache, RequestState, jax.Array]:
        """As ``Programs.run``, with the pool kept here."""
        self.cache, state, out = self.active.run(shape, cache if self.cache is None else self.cache, state, inputs)
        return self.cache, state, out

    @staticmethod
    def _programs(job: Job, config: GLMConfig, params: Params, shapes: tuple[StepShape, ...]) -> Programs:
        return Programs(
            config,
            params,
            num_blocks=job.batch * job.blocks,
            block_size=job.block_size,
            table_width=job.blocks,
            cache_dtype="float32",
            shapes=shapes,
        )

    @classmethod
    def without_scan(cls, job: Job, config: GLMConfig, params: Params) -> Programs:
        """The decode step whose indexer looks at no key: its positions lie evenly over a context of more than K.

        The indexer itself still runs, told that the context is one token, which takes its path without scores.
        """
        select: Callable[..., jax.Array] = glmjax.model.select

        def spread(*args: Any) -> jax.Array:
            *others, share = args
            chosen = select(*others, dataclasses.replace(share, positions=jnp.minimum(share.positions, 0)))
            count = jnp.arange(chosen.shape[-1], dtype=jnp.int32)
            seen = share.positions.reshape(-1, 1) + 1
            even = count * seen // chosen.shape[-1]
            # Never negative there; looking keeps the indexer's result, and so its work, alive.
            return jnp.where(chosen[:, :1] < 0, chosen, even)

        with mock.patch.object(glmjax.model, "select", spread):
            return cls._programs(job, config, params, (StepShape(job.batch, 1, decode=True),))


class Sequences:
    """The sequences of a point and the runner that holds their KV."""

    def __init__(self, job: Job, config: GLMConfig, bench: Bench):
        self.job, self.bench = job, bench
        self.runner = ProgramRunner(bench)  # type: ignore[arg-type]
        rng = np.random.default_rng(SEED)
        self.prompt = tuple(rng.integers(3, config.vocab_size, job.length).tolist())
        self.first = rng.integers(3, config.vocab_size, job.batch).tolist()

    def prefill(self, length: int) -> None:
        """Computes the first ``length`` tokens of the prompt into sequence 0, chunk by chunk."""
        for start in range(0, length, self.job.chunk):
            tokens = self.prompt[start : min(start + self.job.chunk, length)]
            chunk = self._chunk(0, tokens, start, samples=start + len(tokens) == length)
            self._run(chunk)

    def fill(self) -> str:
        """Gives every sequence its context; says how."""
        if self.job.fill == "random":
            self._draw()
        else:
            self.prefill(self.job.length)
        for row in range(1, self.job.batch):
            self._copy(row)
        how = "drawn at random" if self.job.fill == "random" else "prefilled once"
        return how if self.job.batch == 1 else f"{how}, copied to the other sequences"

    def decode(self, steps: int) -> list[float]:
        """``steps`` greedy steps of all sequences from the end of their context; milliseconds of each."""
        tokens, times = self.first, []
        for step in range(steps):
            began = time.perf_counter()
            chunks = [self._chunk(row, (t,), self.job.length + step, samples=True) for row, t in enumerate(tokens)]
            out = self._run(*chunks)
            tokens = [out[c.request_id].token_ids[0] for c in chunks]
            times.append(1e3 * (time.perf_counter() - began))
        return times

    def _run(self, *chunks: Chunk) -> Mapping[str, Sampled]:
        return self.runner.finish(self.runner.start(Plan(chunks))).sampled

    def _chunk(self, row: int, tokens: tuple[int, ...], start: int, *, samples: bool) -> Chunk:
        blocks = range(row * self.job.blocks, (row + 1) * self.job.blocks)
        return Chunk(f"row-{row}", tokens, start, tuple(blocks), samples=samples, sampling=GREEDY)

    def _copy(self, row: int) -> None:
        size = self.job.blocks * self.job.block_size

        def copy(cache: KVCache, to: jax.Array) -> KVCache:
            def one(pool: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(pool, pool[:, :size], to, axis=1)

            return jax.tree.map(one, cache)

        self.bench.cache = jax.jit(copy, donate_argnums=0)(self.bench.cache, jnp.int32(row * size))

    def _draw(self) -> None:
        size = self.job.blocks * self.job.block_size

        def draw(cache: KVCache) -> KVCache:
            def one(pool: jax.Array) -> jax.Array:
                rows = jax.random.normal(jax.random.key(SEED), (pool.shape[0], size, *pool.shape[2:]), pool.dtype)
                return jax.lax.dynamic_update_slice_in_dim(pool, rows, 0, axis=1)

            return jax.tree.map(one, cache)

        self.bench.cache = jax.jit(draw, donate_argnums=0)(self.bench.make_cache())


def least_disturbed(run: Callable[[], Any], attempts: int) -> tuple[Load, Any, int]:
    """Runs until a run is quiet, ``attempts`` times at most: the load, result and number of runs of the quietest."""
    tried: list[tuple[Load, Any]] = []
    while len(tried) < attempts:
        with Load() as load:
            result = run()
        tried.append((load, result))
        if load.other_cores <= QUIET:
            break
    return *min(tried, key=lambda t: t[0].other_cores), len(tried)


def measure(job: Job) -> dict[str, Any]:
    """Everything that the report wants to know of one point."""
    missed: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: missed.append(event) if event == MISS_EVENT else None)
    began = time.perf_counter()
    config, params = load_checkpoint(job.model, "float32", mtp=False, progress=False)
    loaded = time.perf_counter()
    bench = Bench(job, config, params)
    row: dict[str, Any] = {"load_s": loaded - began, "compile_s": time.perf_counter() - loaded}
    row |= {"rss_loaded_mb": memory_mb("VmRSS"), "programs_compiled_anew": len(missed)}
    if job.kind == "compile":
        row["peak_rss_mb"] = memory_mb("VmHWM")
        if job.without_scan and job.length >= config.index_topk:
            bench.without_scan(job, config, params)
        return row
    sequences = Sequences(job, config, bench)
    if job.kind == "prefill":
        # Compiled ahead of time: what is left to warm up are pages and threads.
        sequences.prefill(job.length if job.length <= 2048 else 2 * job.chunk)
        load, _, made = least_disturbed(lambda: sequences.prefill(job.length), job.attempts)
        row["tok_s"] = job.length / load.seconds
    else:
        row["context"] = sequences.fill()
        sequences.decode(WARM_UP_STEPS)
        load, times, made = least_disturbed(lambda: sequences.decode(job.steps), job.attempts)
        row["tok_s"] = job.batch * job.steps / load.seconds
        row["step_ms"] = statistics.median(times)
    row |= {"seconds": load.seconds, "other_cores": load.other_cores, "runs_made": made}
    row["peak_rss_mb"] = memory_mb("VmHWM")
    if job.kind == "decode" and job.without_scan and job.length >= config.index_topk:
        bench.active = bench.without_scan(job, config, params)
        sequences.decode(WARM_UP_STEPS)
        load, times, _ = least_disturbed(lambda: sequences.decode(job.steps), job.attempts)
        row |= {"step_without_scan_ms": statistics.median(times), "other_cores_without_scan": load.other_cores}
    return row


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Job(**json.loads(sys.argv[1])))) + "\n")
