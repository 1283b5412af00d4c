"""One kernel at one shape in use: what ``glmjax kernels`` compiles, counts and, on a GPU, times.

Every ``*_hopper.py`` and ``*_triton.py`` exports ``cases() -> tuple[Case, ...]``; the report and the tests of the
machine code read the same cases.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

Arithmetic = Literal["float32", "bfloat16", "float8_e4m3fn"]


@dataclass(frozen=True)
class Case:
    """A kernel at one shape.

    Attributes:
      kernel: name of the operation, as of its module: ``"sparse_mla"``.
      implementation: ``"hopper"`` or ``"triton"``.
      shape: the shape in words a reader compares by: ``"decode T=8 H=64 K=2048 fp8"``.
      function: calls the GPU implementation, not the dispatch, on the arguments. Under ``jax.jit`` it must compile to
        this kernel alone, or to the few kernels that make up the operation.
      arguments: of the function, abstract and without sharding.
      bytes: that the kernel moves to and from device memory, counted from the algorithm: each operand once for every
        time it is read, each result once.
      flops: floating-point operations of the algorithm.
      host_bytes: that it moves over the link to host memory, besides.
      arithmetic: what its matmuls multiply in, which sets the roofline; ``float32`` for those without any.
      stages: buffers of the load pipeline; 1 if loads do not run ahead.
      donate: positions of the arguments updated in place. The function returns their new values first, in this order.
      limits: position of an integer argument -> exclusive upper bound of the values to time it with; 0 without one.
      host_pools: position of a host address (``row_format.HostRows.address``) -> bytes that must stand there.
    """

    kernel: str
    implementation: Literal["hopper", "triton"]
    shape: str
    function: Callable[..., Any] = field(repr=False)
    arguments: tuple[jax.ShapeDtypeStruct, ...] = field(repr=False)
    bytes: int
    flops: int
    arithmetic: Arithmetic
    stages: int = 1
    host_bytes: int = 0
    donate: tuple[int, ...] = ()
    limits: Mapping[int, int] = field(default_factory=dict, repr=False)
    host_pools: Mapping[int, int] = field(default_factory=dict, repr=False)
