"""Weights in float16 that a CPU multiplies with float32 inputs."""

import pytest
import torch
from torch import Tensor

from simplellm.checkpoint import float16
from simplellm.checkpoint.float16 import FEW, Float16, has_float16_product

pytestmark = pytest.mark.skipif(
    not has_float16_product(),
    reason="PyTorch has no product with float16 weights for this processor",
)


def numbers(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("count", [1, 2, 9, FEW, 200])
def test_products_are_those_of_the_rounded_numbers(count: int) -> None:
    weight, bias, x = numbers(65, 96) / 10, numbers(1, 65)[0], numbers(count, 96)
    packed = Float16.of(weight)
    assert packed.shape == (65, 96) and packed.nbytes == 2 * 65 * 96
    assert torch.equal(packed.dequantize(), weight.half().float())
    found = packed.product(x)
    exact = x.double() @ weight.half().double().T
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.product(x, bias), found + bias)
    assert packed.product(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.bits
def test_rows_have_the_same_bits_in_any_company() -> None:
    packed, x = Float16.of(numbers(80, 96)), numbers(FEW, 96)
    every = packed.product(x)
    for count in range(1, FEW + 1):
        assert torch.equal(packed.product(x[:count]), every[:count])


def test_rows_of_zeros_behind_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where FBGEMM sums the last rows of some counts otherwise."""
    packed, x = Float16.of(numbers(80, 96)), numbers(FEW, 96)
    whole = packed.product(x)
    fours = tuple(-(-count // 4) * 4 for count in range(FEW + 1))
    monkeypatch.setattr(float16, "even_counts", lambda: fours)
    for count in range(1, FEW + 1):
        found = packed.product(x[:count])
        assert found.shape == (count, 80)
        torch.testing.assert_close(found, whole[:count])


@pytest.mark.parametrize("part", [1, 96, 1000])
def test_a_large_weight_is_packed_in_parts(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias, x = numbers(65, 96), numbers(1, 65)[0], numbers(5, 96)
    whole = Float16.of(weight)
    monkeypatch.setattr(float16, "PART", part)
    parts = Float16.of(weight)
    assert len(parts.packed) > len(whole.packed) == 1
    assert torch.equal(parts.dequantize(), whole.dequantize())
    assert torch.equal(parts.product(x, bias), whole.product(x, bias))
