"""Which kernels the step programs of GLM-5.3 launch on H200s, and at which shapes.

The programs are those of ``glmjax.fit`` and ``glmjax.fit_decode``. They are traced and not compiled, and where a kernel
would be traced its shape is taken down instead. The cases of ``glmjax kernels`` are traced in the same way, so that the
two can be compared: a shape is a line such as ``sparse_mla T=8 H=64 K=2048 fp8``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from glmjax import fit, fit_decode
from glmjax.config import GLMConfig
from glmjax.kernels import (
    grouped_matmul_hopper,
    index_topk_triton,
    kv_insert_triton,
    row_fetch_triton,
    sparse_mla_hopper,
)
from glmjax.kernels.report_case import Case
from glmjax.kernels.row_format import HostRows, row_bytes
from glmjax.sharding.layout import Layout

Shape = str
CONTEXT, CHUNK = 128 << 10, 2048


def of_groups(*sizes: int) -> GLMConfig:
    """GLM-5.3 with index groups of these sizes: layers of the same shapes, and fewer of them."""
    kinds = tuple(kind for size in sizes for kind in ["full", *["shared"] * (size - 1)])
    return dataclasses.replace(GLMConfig.glm_5_3(), num_hidden_layers=len(kinds), indexer_types=kinds)


CONFIG = of_groups(1, 4)  # dense layers and experts, leaders and followers
DP8, TP4, TP8 = Layout(dp=8, ep=8), Layout(dp=2, tp=4, ep=8), Layout(tp=8, ep=8)
TP8_DCP8, PCP8, PCP8_DCP8 = Layout(tp=8, dcp=8, ep=8), Layout(pcp=8, ep=8), Layout(pcp=8, dcp=8, ep=8)


def decode(layout: Layout, batch: int, *, hisparse: bool = False, **options: Any) -> Callable[[], object]:
    """The step that verifies three drafts of each request and drafts three more."""
    offload = fit_decode.hybrid(CONFIG, batch) if hisparse else None
    compiled = fit_decode.compile_decode
    return functools.partial(compiled, CONFIG, layout, batch=batch, context=CONTEXT, offload=offload, **options)


def prefill(layout: Layout, **options: Any) -> Callable[[], object]:
    """The step that takes in a chunk of a prompt."""
    return functools.partial(fit.compile_prefill, CONFIG, layout, chunk=CHUNK, cached=CONTEXT - CHUNK, **options)


PROGRAMS = {
    "decode dp8, batch 8": decode(DP8, 8),
    "decode dp8, batch 8, HiSparse": decode(DP8, 8, hisparse=True),
    "decode dp8, batch 1, HiSparse": decode(DP8, 1, hisparse=True),
    "decode dp8, batch 8, HiSparse, bf16 KV": decode(DP8, 8, hisparse=True, kv_cache_dtype="bfloat16"),
    "decode dp2 tp4, batch 8": decode(TP4, 8),
    "decode tp8, batch 8": decode(TP8, 8),
    "decode tp8 dcp8, batch 8": decode(TP8_DCP8, 8),
    "prefill pcp8": prefill(PCP8),
    "prefill pcp8, bf16 KV": prefill(PCP8, kv_cache_dtype="bfloat16"),
    "prefill pcp8 dcp8, kv_gather": prefill(PCP8_DCP8, prefill="kv_gather"),
    "prefill pcp8 dcp8, query_gather": prefill(PCP8_DCP8, prefill="query_gather"),
    "prefill dp8": prefill(DP8),
    "prefill dp8, bf16 KV": prefill(DP8, kv_cache_dtype="bfloat16"),
    "prefill dp2 tp4": prefill(TP4),
    "prefill tp8": prefill(TP8),
}


# What is taken down of a kernel's arguments, and zeros in the shape of its results.


def _sparse_mla(query: Any, rope: Any, latent: Any, latent_scale: Any, *rest: Any, **_: Any) -> tuple[Shape, Any]:
    (T, H, _), rows = query.shape, rest[-1]
    kv = "bf16" if latent_scale is None else "fp8"
    return f"T={T} H={H} K={rows.shape[1]} {kv}", (jnp.zeros_like(query), jnp.zeros((T, H), jnp.float32))


def _index_top_k(query: Any, weights: Any, pool: Any, scale: Any, tables: Any, visible: Any, k: int) -> Any:
    """Contexts are as long as users make them, and cut into parts by a rule that is tested for many lengths."""
    R, Q, H, _ = query.shape
    return f"R={R} Q={Q} H={H} k={k}", (jnp.zeros((R, Q, k), jnp.float32), jnp.zeros((R, Q, k), jnp.int32))


def _row_fetch(targets: Any, sources: Any, target_rows: Any, source_rows: Any) -> tuple[Shape, Any]:
    def words(fields: Any) -> str:
        return "+".join(str(row_bytes(x)) for x in fields)

    of = f"{sources.row_bytes} in host memory" if isinstance(sources, HostRows) else words(sources)
    return f"N={target_rows.shape[0]} {of} -> {words(targets)}", tuple(map(jnp.zeros_like, targets))


def _experts(x: Any, ids: Any, gate_up: Any, down: Any, **options: Any) -> tuple[Shape, Any]:
    (T, D), (_, E, _, F, _) = x.shape, gate_up.shape
    pairs, dtype = options.get("expected_pairs") or ids.size, "bf16" if options.get("gate_up_scale") is None else "fp8"
    out = jnp.zeros_like(x) if options.get("pair_weights") is not None else jnp.zeros((*ids.shape, D), x.dtype)
    return f"T={T} k={ids.shape[1]} pairs={pairs} E={E} F={F} D={D} {dtype}", out


def _linear(x: Any, weight: Any, scale: Any, **_: Any) -> tuple[Shape, Any]:
    """The kernel's smallest tile is of 8 tokens: fewer are padded."""
    (T, K), R = x.shape, weight.shape[-2]
    return f"T={max(8, T)} R={R} K={K}", jnp.zeros((T, R), x.dtype)


def _kv_insert(pools: Any, rows: Any, slots: Any, *_: Any, **__: Any) -> tuple[Shape, Any]:
    """Fewer tokens than 8 are the same kernel with fewer programs."""
    kv = "fp8" if any(pool.dtype == jnp.uint8 for pool in pools.values()) else "bf16"
    return f"T={max(8, slots.shape[0])} {', '.join(sorted(rows))} {kv}", dict(pools)


# Kernel, as its cases name it -> the wrapper that the model calls.
WRAPPERS: dict[str, tuple[Any, str, Callable[..., tuple[Shape, Any]]]] = {
    "sparse_mla": (sparse_mla_hopper, "sparse_mla_hopper", _sparse_mla),
    "index_top_k": (index_topk_triton, "index_top_k_triton", _index_top_k),
    "kv_insert": (kv_insert_triton, "kv_insert", _kv_insert),
    "row_fetch": (row_fetch_triton, "row_fetch", _row_fetch),
    "grouped_matmul": (grouped_matmul_hopper, "experts_swiglu", _experts),
    "block_fp8_matmul": (grouped_matmul_hopper, "linear", _linear),
}


@contextmanager
def recording() -> Iterator[set[Shape]]:
    """Takes down what the wrappers are called with, instead of calling them."""
    found: set[Shape] = set()

    def stand_in(kernel: str, describe: Callable[..., tuple[Shape, Any]]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            shape, zeros = describe(*arguments, **options)
            found.add(f"{kernel} {shape}")
            return zeros

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kernel, (module, name, describe) in WRAPPERS.items():
            patch.setattr(module, name, stand_in(kernel, describe))
        yield found


def shapes_of_program(program: Callable[[], object]) -> set[Shape]:
    """Shapes of the kernels that a program launches, for H200s."""

    def trace(
        function: Any, *arguments: Any, mesh: Any, donate: Any = (), on_host: Any = (), options: Any = None
    ) -> None:
        assert not on_host  # rows are read by address, as kernels do
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.eval_shape(function, *arguments)

    with recording() as found, pytest.MonkeyPatch.context() as patch:
        for module in (fit, fit_decode):
            patch.setattr(module, "compile_for_h200", trace)
        program()
    return found


def shapes_of_cases(all_cases: Callable[[], Iterable[Case]]) -> set[Shape]:
    """Shapes of the cases of recorded kernels, made here because some hold the wrapper that they call."""
    with recording() as found:
        for case in all_cases():
            if case.kernel in WRAPPERS:
                jax.eval_shape(case.function, *case.arguments)
    return found
