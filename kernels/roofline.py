"""The H200's limits, of NVIDIA's datasheet for the SXM module without sparsity, and the time that no kernel beats."""

from collections.abc import Mapping
from types import MappingProxyType

from glmjax.errors import ConfigError
from glmjax.kernels.report_case import Arithmetic

MEMORY_BYTES_PER_SECOND = 4.8e12
FLOPS_PER_SECOND: Mapping[Arithmetic, float] = MappingProxyType(
    {
        "float32": 67e12,  # outside the tensor cores
        "bfloat16": 989e12,
        "float8_e4m3fn": 1979e12,
    }
)
HOST_BYTES_PER_SECOND = 63e9  # PCIe 5.0 x16, one way
MULTIPROCESSORS = 132
SHARED_BYTES_PER_BLOCK = 227 << 10  # at most; a multiprocessor has 228 KiB and keeps one for each block


def roofline_us(num_bytes: int, flops: int, arithmetic: Arithmetic, host_bytes: int = 0) -> float:
    """Least time on an H200 in microseconds: that of device memory, arithmetic or the link to the host, the longest.

    Raises:
      ConfigError: an arithmetic that is not in ``FLOPS_PER_SECOND``, or negative counts.
    """
    if arithmetic not in FLOPS_PER_SECOND:
        raise ConfigError(f"arithmetic={arithmetic!r}: give one of {', '.join(FLOPS_PER_SECOND)}")
    if min(num_bytes, flops, host_bytes) < 0:
        raise ConfigError(f"num_bytes={num_bytes}, flops={flops} and host_bytes={host_bytes} must not be negative")
    seconds = (
        num_bytes / MEMORY_BYTES_PER_SECOND,
        flops / FLOPS_PER_SECOND[arithmetic],
        host_bytes / HOST_BYTES_PER_SECOND,
    )
    return 1e6 * max(seconds)
