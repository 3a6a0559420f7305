"""What is in a padding row does not matter."""

import math
from collections.abc import Callable

import pytest
from test_kernels_attention import assert_near, make_case
from torch import Tensor

from simplellm.kernels.attention import paged_decode, paged_decode_torch


@pytest.mark.parametrize("function", [paged_decode, paged_decode_torch])
@pytest.mark.parametrize("window", [None, 16, 300])
@pytest.mark.parametrize("batch", [2, 6, 20])  # three different tilings
def test_a_padding_row_of_nan_becomes_zeros(
    kernel_device: str, batch: int, window: int | None, function: Callable[..., Tensor]
) -> None:
    case = make_case(kernel_device, [0] + [40] * (batch - 1), window=window)
    case.q[0] = math.nan
    out = case.decode(function)
    assert not out[0].any()
    assert_near(out, case.expected())
