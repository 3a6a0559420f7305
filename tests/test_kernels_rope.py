"""Bias, rotation and cache write in one: the kernel against its twin."""

import math
from dataclasses import replace

import pytest
import torch

from simplellm.config import GPT_OSS_20B
from simplellm.kernels.rope import rope_and_cache, rope_and_cache_torch
from simplellm.rope import Rope, apply_rope

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FUNCTIONS = [rope_and_cache, rope_and_cache_torch]
# At both sides of 4096, from where on YaRN stretches, and at the last.
POSITIONS = [0, 1, 127, 4095, 4096, 70_001, 131_071]


def make_inputs(device, heads=(8, 2), dim=64, page_size=16, dtype=None, parts=None):
    """Arguments for one token at each of POSITIONS, the caches full of NaN."""
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    generator = torch.Generator().manual_seed(0)
    count, width = len(POSITIONS), (heads[0] + 2 * heads[1]) * dim
    shape = (count, width) if parts is None else (count, parts, width)
    qkv = torch.randn(shape, generator=generator)
    bias = torch.randn(width, generator=generator)
    rope = Rope(replace(GPT_OSS_20B, head_dim=dim))
    cos, sin = rope.cos_sin(torch.arange(POSITIONS[-1] + 1))
    pages = torch.full((9, page_size, heads[1], dim), math.nan, dtype=dtype)
    slots = torch.randperm(9 * page_size, generator=generator)[:count].int()
    return {
        "qkv": qkv.to(device, dtype),
        "bias": bias.to(device, dtype),
        "positions": torch.tensor(POSITIONS, dtype=torch.int32, device=device),
        "cos": cos.to(device),
        "sin": sin.to(device),
        "keys": pages.to(device),
        "values": pages.clone().to(device),
        "slots": slots.to(device),
    }


def expected(inputs, dim=64, kv_heads=2):
    """q, k and v [T, heads, D], float32, from the parts of chapter 5."""
    x = inputs["qkv"].float()
    x = x if x.ndim == 2 else x.sum(1)
    if inputs["bias"] is not None:
        x = x + inputs["bias"].float()
    x = x.view(len(POSITIONS), -1, dim)
    q, k, v = x[:, : -2 * kv_heads], x[:, -2 * kv_heads : -kv_heads], x[:, -kv_heads:]
    positions = inputs["positions"].long()
    cos, sin = inputs["cos"][positions], inputs["sin"][positions]
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def assert_near(got, expected):
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("parts", [None, 1, 3])
def test_rotates_and_stores(kernel_device, function, parts):
    inputs = make_inputs(kernel_device, parts=parts)
    q, k, v = expected(inputs)
    got = function(**inputs)
    assert got.dtype == inputs["keys"].dtype
    assert_near(got, q)
    slots = inputs["slots"].long()
    for pages, new in ((inputs["keys"], k), (inputs["values"], v)):
        rows = pages.flatten(0, 1)
        assert_near(rows[slots], new)
        others = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        others[slots] = False
        assert rows[others].isnan().all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding_is_stored_nowhere(kernel_device, function):
    inputs = make_inputs(kernel_device)
    inputs["slots"][2:] = -1
    q, k, _ = expected(inputs)
    assert_near(function(**inputs), q)
    rows = inputs["keys"].flatten(0, 1)
    assert_near(rows[inputs["slots"][:2].long()], k[:2])
    for pages in (inputs["keys"], inputs["values"]):
        assert (~pages.isnan()).sum() == 2 * 2 * 64


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_not_rotated(kernel_device, function):
    inputs = make_inputs(kernel_device, dtype=torch.float32)
    inputs["bias"] = None
    inputs["cos"][:] = math.nan
    function(**inputs)
    stored = inputs["values"].flatten(0, 1)[inputs["slots"].long()]
    assert torch.equal(stored.flatten(1), inputs["qkv"][:, -2 * 64 :])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "heads, dim, page_size", [((8, 2), 32, 1), ((6, 3), 24, 7), ((64, 8), 64, 64)]
)
def test_sizes(kernel_device, function, heads, dim, page_size):
    inputs = make_inputs(kernel_device, heads, dim, page_size)
    q, k, v = expected(inputs, dim, heads[1])
    assert_near(function(**inputs), q)
    slots = inputs["slots"].long()
    assert_near(inputs["keys"].flatten(0, 1)[slots], k)
    assert_near(inputs["values"].flatten(0, 1)[slots], v)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_strided_pages(kernel_device, function):
    """Layers may share pages: only the inside of a page must be contiguous."""
    inputs = make_inputs(kernel_device)
    both = torch.stack([inputs["keys"], inputs["values"]], dim=1)
    inputs["keys"], inputs["values"] = both[:, 0], both[:, 1]
    _, k, v = expected(inputs)
    function(**inputs)
    page, row = inputs["slots"].long() // 16, inputs["slots"].long() % 16
    assert_near(both[page, 0, row], k)
    assert_near(both[page, 1, row], v)


def test_half_precision(kernel_device):
    inputs = make_inputs(kernel_device, dtype=torch.float16)
    assert_near(rope_and_cache(**inputs), expected(inputs)[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_sums_go_to_a_narrower_cache(kernel_device, function):
    inputs = make_inputs(kernel_device, dtype=torch.float32)
    for name in ("keys", "values"):
        inputs[name] = inputs[name].half()
    got = function(**inputs)
    assert got.dtype == torch.float16
    assert_near(got, expected(inputs)[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens(kernel_device, function):
    inputs = make_inputs(kernel_device)
    for name in ("qkv", "positions", "slots"):
        inputs[name] = inputs[name][:0]
    assert function(**inputs).shape == (0, 8, 64)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qkv", lambda x: x[:, :-1], r"qkv is \[7, 767\]; expected"),
        ("qkv", lambda x: x[:, : 4 * 64], r"qkv is \[7, 256\]; expected"),
        ("bias", lambda x: x[:-1], r"bias is \[767\]; expected contiguous \[768\]"),
        ("positions", lambda x: x[1:], r"positions is \[6\]; expected contiguous \[7"),
        ("slots", lambda x: x[1:], r"slots is \[6\]; expected contiguous \[7\]"),
        ("cos", lambda x: x[:, 1:], "cos is"),
        ("sin", lambda x: x[1:], "sin is"),
        ("values", lambda x: x[1:], "keys is .* and values"),
        ("keys", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "strided"),
    ],
)
def test_bad_input(name, change, message):
    inputs = make_inputs("cpu")
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        rope_and_cache(**inputs)
