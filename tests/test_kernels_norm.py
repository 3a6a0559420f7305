"""The residual stream: the kernels against the plain operations."""

import pytest
import torch

from simplellm.model import ops
from simplellm.model.kernels.norm import add_norm, embed
from simplellm.model.kernels.reduce import add_parts

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
@pytest.mark.parametrize(("tokens", "size"), [(3, 96), (2, 2880)])
def test_add_norm_is_the_operation(kernel_device, tokens, size, parts, dtype):
    residual, update, weight = inputs(kernel_device, tokens, size, parts, dtype)
    expected = ops.add_norm(residual.clone(), update, weight, EPS)
    got = add_norm(residual, update, weight, EPS)
    assert got[0].data_ptr() == residual.data_ptr()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_sum_is_rounded_before_it_is_normed(kernel_device):
    """As if the two were separate operations in the residual's dtype."""
    residual = torch.full((1, 32), 2048.0, dtype=torch.float16, device=kernel_device)
    update = torch.full_like(residual, 0.75)  # half of float16's step there: lost
    weight = torch.ones(32, device=kernel_device)
    total, normed = add_norm(residual, update, weight, EPS)
    assert (total == 2048).all()
    assert (normed == 1).all()


@pytest.mark.parametrize("size", [96, 2880])
def test_parts_are_joined_in_float32_and_in_order(kernel_device, size):
    """What a rank adds to the sum of all."""
    parts = inputs(kernel_device, 3, size, 4, torch.float32)[1]
    parts[:, 0], parts[:, 1] = 3e7, -3e7  # in another order they'd swallow the rest
    found = add_parts(parts, torch.float16)
    assert found.equal((parts[:, 2] + parts[:, 3]).to(torch.float16))
    assert add_parts(found, torch.float16) is found


@pytest.mark.parametrize("where", ["residual", "update"])
def test_nan_spoils_its_row_and_no_other(kernel_device, where):
    residual, update, weight = inputs(kernel_device, 3, 96, None, torch.float32)
    {"residual": residual, "update": update}[where][1, 7] = torch.nan
    _, normed = add_norm(residual, update, weight, EPS)
    assert normed.isnan().all(1).tolist() == [False, True, False]
    assert not normed[[0, 2]].isnan().any()


@pytest.mark.parametrize("function", [embed, ops.embed])
def test_a_token_may_be_one_that_the_step_before_has_sampled(function, kernel_device):
    tokens = torch.tensor([4, -1, -3, -2, 0], dtype=torch.int32, device=kernel_device)
    previous = torch.tensor([7, 8, 9], dtype=torch.int32, device=kernel_device)
    table = torch.randn(12, 24, device=kernel_device)
    assert torch.equal(function(tokens, previous, table), table[[4, 7, 9, 8, 0]])
