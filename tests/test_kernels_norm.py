"""Residual addition and norm: the kernels against their twins."""

import pytest
import torch

from simplellm.kernels.norm import add_norm, add_norm_torch

EPS = 1e-5


def inputs(device, tokens, size, parts, dtype):
    """A residual, an update of so many parts (0 for none, None for no such axis)."""
    generator = torch.Generator().manual_seed(tokens * size)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    shape = (tokens, size) if parts is None else (tokens, parts, size)
    update = None if parts == 0 else normal(*shape)
    return normal(tokens, size), update, normal(size).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [0, None, 1, 4])
@pytest.mark.parametrize(("tokens", "size"), [(1, 224), (3, 96), (2, 2880)])
def test_add_norm_is_its_twin(kernel_device, tokens, size, parts, dtype):
    residual, update, weight = inputs(kernel_device, tokens, size, parts, dtype)
    expected = add_norm_torch(residual.clone(), update, weight, EPS)
    got = add_norm(residual, update, weight, EPS)
    assert got[0].data_ptr() == residual.data_ptr()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_parts_may_lie_anywhere(kernel_device):
    """Parts [S, T, N] of a split matmul, seen as [T, S, N]."""
    residual, update, weight = inputs(kernel_device, 5, 96, 3, torch.float32)
    moved = update.transpose(0, 1).contiguous().transpose(0, 1)
    expected = add_norm_torch(residual.clone(), update, weight, EPS)
    torch.testing.assert_close(add_norm(residual, moved, weight, EPS), expected)


def test_the_sum_is_rounded_before_it_is_normed(kernel_device):
    """As if the two were separate operations in the residual's dtype."""
    residual = torch.full((1, 32), 2048.0, dtype=torch.float16, device=kernel_device)
    update = torch.full_like(residual, 0.75)  # half of float16's step there: lost
    weight = torch.ones(32, device=kernel_device)
    total, normed = add_norm(residual, update, weight, EPS)
    assert (total == 2048).all()
    assert (normed == 1).all()


@pytest.mark.parametrize("where", ["residual", "update"])
def test_nan_spoils_its_row_and_no_other(kernel_device, where):
    residual, update, weight = inputs(kernel_device, 3, 96, None, torch.float32)
    {"residual": residual, "update": update}[where][1, 7] = torch.nan
    _, normed = add_norm(residual, update, weight, EPS)
    assert normed.isnan().all(1).tolist() == [False, True, False]
    assert not normed[[0, 2]].isnan().any()


def test_no_tokens_are_no_error(kernel_device):
    empty, weight = torch.empty(0, 96, device=kernel_device), torch.ones(96)
    assert add_norm(empty, None, weight, EPS)[1].shape == (0, 96)


@pytest.mark.parametrize(
    ("residual", "update", "weight", "message"),
    [
        ((3, 96), (2, 96), 96, r"update is \[2, 96\].*expected \[3, 96\] or"),
        ((3, 96), (3, 95), 96, r"update is \[3, 95\]"),
        ((3, 96), (96,), 96, r"update is \[96\]"),
        ((96,), None, 96, r"residual is \[96\]"),
        ((3, 96), None, 95, r"weight is \[95\]; expected \[96\]"),
    ],
)
def test_shapes_that_do_not_fit_raise(residual, update, weight, message):
    update = None if update is None else torch.ones(update)
    with pytest.raises(ValueError, match=message):
        add_norm(torch.ones(residual), update, torch.ones(weight), EPS)
