"""Bias, norms, rotation and cache write in one: the kernel against the operation."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from simplellm.model import ops
from simplellm.model.kernels.rope import rope_and_cache
from simplellm.model.layers import Attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
POSITIONS = [0, 1, 127, 4095, 4096, 70_001, 131_071]
exhaustive = pytest.mark.exhaustive


@dataclass
class Inputs:
    """One token at each of POSITIONS, and pages full of NaN."""

    qkv: Tensor
    attn: Attention
    positions: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor

    def run(self, function: Any) -> Tensor:
        return function(*vars(self).values())

    def copy(self) -> "Inputs":
        """The same with pages of its own."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())


def make_inputs(
    device: str,
    heads: tuple[int, int] = (8, 2),
    dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype | None = None,
    parts: int | None = None,
    bias: bool = True,
    norms: bool = False,
) -> Inputs:
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    generator = torch.Generator().manual_seed(0)
    count, width = len(POSITIONS), (heads[0] + 2 * heads[1]) * dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    shape = (count, width) if parts is None else (count, parts, width)
    angles = torch.rand(POSITIONS[-1] + 1, dim // 2, generator=generator) * 6.3
    attn = Attention(
        qkv=torch.empty(0),
        qkv_bias=normal(width) if bias else None,
        o=torch.empty(0),
        o_bias=None,
        sinks=None,
        q_norm=normal(dim) if norms else None,
        k_norm=normal(dim) if norms else None,
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
        head_dim=dim,
        eps=1e-3,
    )
    pages = torch.full((9, page_size, heads[1], dim), math.nan, dtype=dtype)
    slots = torch.randperm(9 * page_size, generator=generator)[:count].int()
    return Inputs(
        qkv=normal(*shape),
        attn=attn,
        positions=torch.tensor(POSITIONS, dtype=torch.int32, device=device),
        keys=pages.to(device),
        values=pages.clone().to(device),
        slots=slots.to(device),
    )


def assert_same(inputs: Inputs) -> Tensor:
    """The kernel does what the plain operation does, NaN in the pages included."""
    other = inputs.copy()
    expected, got = other.run(ops.rope_and_cache), inputs.run(rope_and_cache)
    tolerance = TOLERANCE[got.dtype]
    for one, twin in (
        (got, expected),
        (inputs.keys, other.keys),
        (inputs.values, other.values),
    ):
        torch.testing.assert_close(
            one, twin, rtol=tolerance, atol=tolerance, equal_nan=True
        )
    return got


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("parts", [None, 1, 3])
def test_rotates_and_stores(kernel_device, parts, norms):
    inputs = make_inputs(kernel_device, parts=parts, norms=norms)
    got = assert_same(inputs)
    assert got.dtype == inputs.keys.dtype
    for pages in (inputs.keys, inputs.values):
        rows = pages.flatten(0, 1)
        written = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        written[inputs.slots.long()] = True
        assert not rows[written].isnan().any()
        assert rows[~written].isnan().all()


def test_padding_is_stored_nowhere(kernel_device):
    inputs = make_inputs(kernel_device)
    inputs.slots[2:] = -1
    assert_same(inputs)
    for pages in (inputs.keys, inputs.values):
        assert (~pages.isnan()).sum() == 2 * 2 * 64


@pytest.mark.parametrize("norms", [False, True])
def test_values_are_as_they_come(kernel_device, norms):
    inputs = make_inputs(kernel_device, dtype=torch.float32, bias=False, norms=norms)
    inputs.attn.cos[:] = math.nan
    inputs.run(rope_and_cache)
    stored = inputs.values.flatten(0, 1)[inputs.slots.long()]
    assert torch.equal(stored.flatten(1), inputs.qkv[:, -2 * 64 :])


@pytest.mark.parametrize(
    "heads, dim, page_size, norms",
    [
        ((8, 2), 32, 1, False),
        ((6, 3), 24, 7, True),
        ((16, 8), 128, 16, True),
        ((4, 1), 256, 64, True),
        pytest.param((64, 8), 64, 64, False, marks=exhaustive),
        pytest.param((64, 8), 128, 64, True, marks=exhaustive),
        pytest.param((8, 4), 256, 16, False, marks=exhaustive),
    ],
)
def test_sizes(kernel_device, heads, dim, page_size, norms):
    assert_same(make_inputs(kernel_device, heads, dim, page_size, norms=norms))


def test_norms_are_of_each_head_alone(kernel_device):
    """Its size does not matter, and neither does another head's."""
    inputs = make_inputs(kernel_device, norms=True, bias=False, dtype=torch.float32)
    inputs.attn = replace(inputs.attn, eps=1e-12)
    once = inputs.run(rope_and_cache)
    inputs.qkv[:, :64] *= 1000
    torch.testing.assert_close(inputs.run(rope_and_cache), once)


def test_strided_pages(kernel_device):
    """Layers may share pages: only the inside of a page must be contiguous."""
    inputs = make_inputs(kernel_device)
    other = inputs.copy()
    both = torch.stack([inputs.keys, inputs.values], dim=1)
    inputs.keys, inputs.values = both[:, 0], both[:, 1]
    inputs.run(rope_and_cache)
    other.run(ops.rope_and_cache)
    tolerance = TOLERANCE[both.dtype]
    expected = torch.stack([other.keys, other.values], dim=1)
    torch.testing.assert_close(
        both, expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("norms", [False, True])
def test_a_cache_of_fp8_gets_scaled_numbers(kernel_device, norms):
    """Too large ones become the largest; q is not rounded to FP8."""
    inputs = make_inputs(kernel_device, norms=norms)
    fp8 = torch.float8_e4m3fn
    inputs.keys, inputs.values = inputs.keys.to(fp8), inputs.values.to(fp8)
    dtype = inputs.qkv.dtype
    inputs.attn = replace(inputs.attn, dtype=dtype, kv_scales=(0.25, 0.001))
    other = inputs.copy()
    expected, got = other.run(ops.rope_and_cache), inputs.run(rope_and_cache)
    tolerance = TOLERANCE[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for pages, twins in ((inputs.keys, other.keys), (inputs.values, other.values)):
        one, twin = (
            x.flatten(0, 1)[inputs.slots.long()].float() for x in (pages, twins)
        )
        torch.testing.assert_close(one, twin, rtol=0.13, atol=0.01)  # a step of FP8
        assert (one == twin).float().mean() > 0.95
    assert one.abs().max() == 448
    assert not one.isnan().any()


def test_half_precision(kernel_device):
    assert_same(make_inputs(kernel_device, dtype=torch.float16))


def test_float32_sums_go_to_a_narrower_cache(kernel_device):
    inputs = make_inputs(kernel_device, dtype=torch.float32, norms=True)
    inputs.keys, inputs.values = inputs.keys.half(), inputs.values.half()
    assert assert_same(inputs).dtype == torch.float16
