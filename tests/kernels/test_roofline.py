"""Times of the roofline, by hand, and what is refused."""

import pytest

from glmjax.errors import ConfigError
from glmjax.kernels.roofline import roofline_us


@pytest.mark.parametrize(
    ("num_bytes", "flops", "arithmetic", "expected"),
    [
        (4_800_000, 0, "float32", 1.0),
        (0, 989_000_000, "bfloat16", 1.0),
        (0, 1_979_000_000, "float8_e4m3fn", 1.0),
        (4_800_000, 3 * 67_000_000, "float32", 3.0),
        (9_600_000, 989_000_000, "bfloat16", 2.0),
        # Sparse MLA of a query with 64 heads: 191 FLOP a byte, and from 206 on arithmetic would be the limit.
        (1_490_944, 285_212_672, "bfloat16", 1_490_944 / 4.8e6),
        (0, 0, "float32", 0.0),
    ],
)
def test_the_slower_of_memory_and_arithmetic_counts(num_bytes, flops, arithmetic, expected):
    assert roofline_us(num_bytes, flops, arithmetic) == pytest.approx(expected, rel=1e-12)


def test_rows_from_the_host_take_as_long_as_its_link():
    assert roofline_us(4_800_000, 0, "float32", host_bytes=63_000_000) == pytest.approx(1000.0, rel=1e-12)


@pytest.mark.parametrize("bad", [(1, 1, "int8"), (-1, 0, "float32"), (0, -1, "float32"), (0, 0, "float32", -1)])
def test_nonsense_is_refused(bad):
    with pytest.raises(ConfigError, match=r"arithmetic='int8'|must not be negative"):
        roofline_us(*bad)
