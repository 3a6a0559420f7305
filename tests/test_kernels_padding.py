"""What is in a padding row does not matter."""

import math

import pytest
from test_kernels_attention import assert_near, make_case

from simplellm.model import ops


@pytest.mark.parametrize(
    "batch, window", [(2, None), (2, 300), (6, 16), (20, None)]
)  # three different tilings, and a window's
def test_a_padding_row_of_nan_becomes_zeros(
    kernel_device: str, batch: int, window: int | None
) -> None:
    case = make_case(kernel_device, [0] + [40] * (batch - 1), window=window)
    case.q[0] = math.nan
    plain = ops.attend(case.q, case.keys, case.values, case.group, case.sinks)
    for out in (case.attend(), plain):
        assert not out[0].any()
        assert_near(out, case.expected())
