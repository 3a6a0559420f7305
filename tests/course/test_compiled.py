"""What the compiler makes of a kernel, without a GPU."""

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from course.checks import compiled  # noqa: E402
from course.checks.compiled import assert_compiles, made_of  # noqa: E402


@triton.jit
def product(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    n = tl.arange(0, SIZE)
    cell = n[:, None] * SIZE + n[None, :]
    a, b = tl.load(a_ptr + cell), tl.load(b_ptr + cell)
    tl.store(c_ptr + cell, tl.dot(a, b, input_precision="ieee"))


@triton.jit
def total(x_ptr, out_ptr, SIZE: tl.constexpr):
    sum = 0
    for first in range(4):
        sum += tl.load(x_ptr + first * SIZE + tl.arange(0, SIZE))
    tl.store(out_ptr + tl.arange(0, SIZE), sum)


def test_tensor_cores_multiply_16_bits_and_not_exact_float32() -> None:
    *_, loads, products = made_of(product, "*bf16 *bf16 *fp32", SIZE=64)
    assert loads and products
    registers, stack, shared, _, products = made_of(
        product, "*fp32 *fp32 *fp32", SIZE=32
    )
    assert registers and shared and (stack, products) == (0, 0)


def test_what_is_refused_is_told() -> None:
    with pytest.raises(RuntimeError, match="oop-carried"):
        made_of(total, "*fp32 *fp32", SIZE=16)


def test_a_compile_that_takes_too_long_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "SECONDS", 0.01)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TimeoutError, match="wasn't done with product"):
        made_of(product, "*bf16 *bf16 *fp32", SIZE=16)
    with pytest.raises(AssertionError, match=r"unrolled.* busy, check again"):
        assert_compiles(product, "*bf16 *bf16 *fp32", SIZE=16)
