"""What the indexers of one decoding request select, step by step: drawn with a stated overlap, or recorded of a model.

A trace is all that the bench of HiSparse's hot regions (``glmjax.hisparse_bench``) needs to know of a model. It is kept
as an .npz file.
"""

import dataclasses
import functools
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.batch import TokenBatch
from glmjax.cache import CacheDtype, KVCache, make_cache, packed_row_bytes
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.model import group_runs, logits, run_layers
from glmjax.mtp import draft, mtp_layer
from glmjax.params import Params
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of

BLOCK_SIZE = 64
Advance = Callable[[], object]  # called after every step, for a progress bar


def _quietly() -> None: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Selections of one request. A step computes ``queries`` tokens: the next one and the drafts after it.

    Attributes:
      selections: [steps, groups, queries, K] int32, the positions that each row of each index group attends to; -1
        none. Row q of a step is of position ``lengths[step] + q``.
      lengths: [steps] int32, tokens before the step.
      layers: of each group.
      row_bytes: of a packed KV row of one layer.
      source: where it comes from, in words.

    Raises:
      ConfigError: the arrays do not fit together.
    """

    selections: np.ndarray
    lengths: np.ndarray
    layers: tuple[int, ...]
    row_bytes: int
    source: str

    def __post_init__(self) -> None:
        shape = self.selections.shape
        if len(shape) != 4 or 0 in shape or self.selections.dtype != np.int32:
            raise ConfigError(
                f"a trace's selections must be int32 [steps, groups, queries, K], got {self.selections.dtype} {shape}"
            )
        steps, groups, queries, _ = shape
        if self.lengths.shape != (steps,) or self.lengths.dtype != np.int32 or self.lengths.min() < 0:
            raise ConfigError(
                f"a trace's lengths must be {steps} int32 numbers of at least 0, one a step, got {self.lengths.dtype} "
                f"{self.lengths.shape}"
            )
        if len(self.layers) != groups or min(self.layers) < 1:
            raise ConfigError(
                f"a trace's layers must be {groups} numbers of at least 1, one a group, got {self.layers}"
            )
        if self.row_bytes < 1:
            raise ConfigError(f"a trace's row_bytes must be at least 1, got {self.row_bytes}")
        last = self.lengths[:, None, None, None] + np.arange(queries)[:, None]
        if (wrong := (self.selections < -1) | (self.selections > last)).any():
            step, group, query, _ = np.argwhere(wrong)[0]
            raise ConfigError(
                f"a trace's positions must be -1 or those of tokens up to the query's own: step {step}, group {group}, "
                f"query {query} has {self.selections[wrong][0]} and is at {self.lengths[step] + query}"
            )

    @property
    def steps(self) -> int:
        return self.selections.shape[0]

    @property
    def queries(self) -> int:
        return self.selections.shape[2]

    @property
    def k(self) -> int:
        return self.selections.shape[3]

    @property
    def context(self) -> int:
        """Tokens at the end, drafts included: all positions are below."""
        return int(self.lengths.max()) + self.queries

    @property
    def least_rows(self) -> int:
        """Rows that one step may want of a group: the smallest hot region."""
        return min(self.queries * self.k, self.context)

    def overlap(self) -> float:
        """Which part of a step's positions the step before selected too: mean over groups and steps; 0 if only one."""
        parts = []
        for group in range(len(self.layers)):
            before: np.ndarray | None = None
            for step in range(self.steps):
                now = _set(self.selections[step, group])
                if before is not None and len(now):
                    parts.append(np.isin(now, before, assume_unique=True).mean())
                before = now
        return float(np.mean(parts)) if parts else 0.0

    def shared(self) -> float:
        """Which part of its positions a draft's row has in common with its step's first row: mean; 1 without drafts."""
        parts = [
            np.isin(found, first, assume_unique=True).mean()
            for step in self.selections
            for first, *others in step
            for other in others
            if len(found := _set(other))
        ]
        return float(np.mean(parts)) if parts else 1.0


def _set(positions: np.ndarray) -> np.ndarray:
    """The distinct positions >= 0, ascending."""
    return np.unique(positions[positions >= 0])


def group_layers(config: GLMConfig, *, mtp: bool) -> tuple[int, ...]:
    """Layers of each index group, with that of the MTP layer at the end if it drafts."""
    trunk = [len(run.mlps) for run in group_runs(config) for _ in range(run.count)]
    return (*trunk, *[1] * (config.num_nextn_predict_layers if mtp else 0))


def synthetic(
    context: int,
    k: int,
    layers: Sequence[int],
    *,
    queries: int,
    steps: int,
    overlap: float,
    shared: float,
    row_bytes: int,
    seed: int = 0,
    advance: Advance = _quietly,
) -> Trace:
    """Draws a trace. Every group has its own positions, by the same rule.

    Every row of a step keeps ``round(overlap * n)`` of the n positions it shares with the step's other rows, and of the
    n it has alone. The others are new: drawn uniformly, no more often from recent tokens than from old ones, of those
    that no row of this step or of the one before selected. The context grows by one token a step, and no row selects
    tokens of its own step.

    Args:
      context: tokens before the first step.
      layers: of each group.
      overlap: part of a step's positions that the step before selected too, 0 to 1.
      shared: part of a row's positions that all rows of its step select, 0 to 1.
      advance: called once for each group and step.

    Raises:
      ConfigError: a value is out of its range, or the context too short to draw from.
    """
    for name, value, least in (("context", context, 1), ("k", k, 1), ("queries", queries, 1), ("steps", steps, 1)):
        _at_least(name, value, least)
    for name, part in (("overlap", overlap), ("shared", shared)):
        if not 0 <= part <= 1:
            raise ConfigError(f"{name} must be in [0, 1], got {part:g}")
    common = round(shared * k)
    own = k - common
    parts = [size for size in (common, *[own] * queries) if size]
    renewed = [size - round(overlap * size) for size in parts]
    if context < sum(parts) + sum(renewed):
        raise ConfigError(
            f"context={context} is too short: {queries} rows of k={k}, {common} of them shared, select {sum(parts)} "
            f"positions, and {sum(renewed)} more in the next step: give at least {sum(parts) + sum(renewed)}"
        )
    rng = np.random.default_rng(seed)
    lengths = context + np.arange(steps, dtype=np.int32)
    selections = np.empty((steps, len(layers), queries, k), np.int32)
    starts = np.cumsum([0, *parts[:-1]])
    for group in range(len(layers)):
        now = rng.choice(context, sum(parts), replace=False)
        for step, length in enumerate(lengths):
            if step:
                pieces = zip(starts, parts, renewed, strict=True)
                places = np.concatenate([start + rng.permutation(size)[:new] for start, size, new in pieces])
                free = np.ones(length, bool)
                free[now] = False
                now[places] = rng.choice(np.flatnonzero(free), len(places), replace=False)
            selections[step, group, :, :common] = now[:common]
            selections[step, group, :, common:] = now[common:].reshape(queries, own)
            advance()
    source = f"drawn with seed {seed}: overlap {overlap:g} from step to step, {shared:g} of a row shared by its step"
    return Trace(selections, lengths, tuple(layers), row_bytes, source)


def record(
    params: Params,
    config: GLMConfig,
    prompt: Sequence[int],
    *,
    steps: int,
    queries: int = 1,
    cache_dtype: CacheDtype = "float32",
    name: str = "a model",
    advance: Advance = _quietly,
) -> Trace:
    """Decodes greedily on one device and takes down what every indexer selects. No token ends the request.

    With drafts the MTP layer proposes ``queries - 1`` tokens a step and the model accepts what it would have said. The
    MTP layer's rows are those of its pass over the accepted tokens, -1 for the others; its later drafts reuse the last
    of them (in a model whose drafts select anew, that is left out).

    Args:
      prompt: token ids.
      queries: rows of a step, 1 + drafts.
      name: of the model, for the trace's source.

    Raises:
      ConfigError: a value is out of its range, the model's context is too short, or it has no MTP layer to draft with.
    """
    _at_least("steps", steps, 1)
    _at_least("queries", queries, 1)
    _at_least("tokens in the prompt", len(prompt), 1)
    drafts = queries - 1
    if drafts and params.mtp is None:
        raise ConfigError(f"queries={queries} needs {drafts} drafts a step, and {name} has no MTP layer: use queries=1")
    room = len(prompt) + steps * queries + drafts
    if room > config.max_position_embeddings:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens and {steps} steps of up to {queries} may take {room} positions, and "
            f"{name} has {config.max_position_embeddings}: give fewer steps or a shorter prompt"
        )
    blocks = -(-room // BLOCK_SIZE)
    cache = make_cache(config, blocks, BLOCK_SIZE, cache_dtype, mtp=drafts > 0)
    row_bytes = packed_row_bytes(cache)

    def batch(tokens: Sequence[int], start: int, *, width: int = 0) -> TokenBatch:
        row = np.zeros((1, max(width, len(tokens))), np.int32)
        row[0, : len(tokens)] = tokens
        count, place = (jnp.array([x], jnp.int32) for x in (len(tokens), start))
        return TokenBatch(jnp.asarray(row), place, count, jnp.arange(blocks, dtype=jnp.int32)[None], BLOCK_SIZE)

    layers = group_layers(config, mtp=drafts > 0)
    trunk = config.num_full_indexers
    selections = np.full((steps, len(layers), queries, config.index_topk), -1, np.int32)
    lengths = np.empty(steps, np.int32)

    cache, hidden, best, _ = _compute(params, config, cache, batch(prompt, 0))
    token, start, guesses = int(best[-1]), len(prompt), []
    if drafts:
        cache, found, _ = _guess(params, config, cache, hidden, batch([*prompt[1:], token], 0), drafts)
        guesses = np.asarray(found).tolist()
    for step in range(steps):
        cache, hidden, best, chosen = _compute(params, config, cache, batch([token, *guesses], start))
        lengths[step], selections[step, :trunk] = start, chosen
        said = np.asarray(best).tolist()
        accepted = next((i for i, guess in enumerate(guesses) if guess != said[i]), drafts)
        token = said[accepted]
        if drafts:
            new = batch([*guesses[:accepted], token], start, width=queries)
            cache, found, chosen = _guess(params, config, cache, hidden, new, drafts)
            selections[step, trunk:] = chosen
            guesses = np.asarray(found).tolist()
        start += accepted + 1
        advance()
    source = f"recorded of {name} in {cache_dtype}, {len(prompt)} tokens of prompt"
    return Trace(selections, lengths, layers, row_bytes, source)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def _compute(
    params: Params, config: GLMConfig, cache: KVCache, batch: TokenBatch
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """The trunk: the cache, hidden [Q, D], the likeliest next tokens [Q] and the selections [N, Q, K]."""
    cache, hidden, chosen = run_layers(params, config, cache, share_of(batch, ONE_DEVICE))
    return cache, hidden, jnp.argmax(logits(params, hidden), axis=-1), chosen


@functools.partial(jax.jit, static_argnums=(1, 5), donate_argnums=2)
def _guess(
    params: Params, config: GLMConfig, cache: KVCache, hidden: jax.Array, batch: TokenBatch, num_drafts: int
) -> tuple[KVCache, jax.Array, jax.Array]:
    """The MTP layer: the cache, drafts [n] and the selections of its pass over the batch [Q, K]."""
    # ``draft`` makes this same pass first, and keeps to itself what was selected.
    _, _, chosen = mtp_layer(params, config, cache, hidden, share_of(batch, ONE_DEVICE))
    cache, tokens, _ = draft(params, config, cache, hidden, batch, num_drafts)
    return cache, tokens[0], chosen


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


# Files.


def save_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace as .npz, whole or not at all; what was there is replaced.

    Raises:
      ConfigError: the disk refuses.
    """
    with written_beside(path) as new, new.open("wb") as file:
        np.savez_compressed(file, **{field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)})


def load_trace(path: str | Path) -> Trace:
    """Reads what ``save_trace`` wrote.

    Raises:
      ConfigError: there is no such file, or it holds no trace.
    """
    names = [field.name for field in dataclasses.fields(Trace)]
    try:
        with np.load(path) as file:
            found = {name: file[name] for name in names}
        layers, row_bytes = tuple(int(x) for x in found["layers"]), int(found["row_bytes"])
    except FileNotFoundError:
        raise ConfigError(f"{path} not found") from None
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not a trace, an .npz file with {', '.join(names)}: {error}") from None
    try:
        return Trace(found["selections"], found["lengths"], layers, row_bytes, str(found["source"]))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


@contextmanager
def written_beside(path: str | Path) -> Iterator[Path]:
    """Yields a file name beside ``path`` that takes its place when the block ends, and vanishes if it raises.

    Raises:
      ConfigError: the disk refuses.
    """
    target = Path(path).absolute()
    new = target.with_name(f".{target.name}.new-{os.getpid()}")
    try:
        yield new
        new.replace(target)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        new.unlink(missing_ok=True)
