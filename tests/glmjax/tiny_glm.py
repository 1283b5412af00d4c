"""The small reference checkpoint and what transformers computed from it, read once for all test files."""

import dataclasses
import functools

import numpy as np
from reference import REFERENCE

from glmjax.checkpoint import load_checkpoint
from glmjax.config import GLMConfig
from glmjax.params import Params

FOLDER = REFERENCE / "tiny_glm"


@functools.cache
def checkpoint() -> tuple[GLMConfig, Params]:
    """In float32, with the epsilon of transformers' MLA norms."""
    config, params = load_checkpoint(FOLDER)
    return dataclasses.replace(config, mla_norm_eps=1e-6), params


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "ref.npz") as file:
        return dict(file)


def full_layers(config: GLMConfig) -> list[int]:
    return [i for i, kind in enumerate(config.indexer_types) if kind == "full"]


def chosen_sets(topk: np.ndarray) -> list[set[int]]:
    """Per query of [B, S, K], the positions it may see: those after the query and -1 are dropped."""
    return [{int(p) for p in row if 0 <= p <= query} for request in topk for query, row in enumerate(request)]


def as_rows(x: np.ndarray) -> np.ndarray:
    """[B, S, ...] -> [B * S, ...]."""
    return x.reshape(-1, *x.shape[2:])
