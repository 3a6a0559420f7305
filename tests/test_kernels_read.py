"""Reading memory: the kernel against its twin."""

import pytest
import torch

from simplellm.kernels.read import BLOCK, read, read_torch


def test_it_reads_every_number(kernel_device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-1000, 1000, (5 * BLOCK,), generator=generator)
    x = x.to(kernel_device, torch.int32)
    assert torch.equal(read(x), read_torch(x))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(BLOCK),
        torch.zeros(BLOCK + 1, dtype=torch.int32),
        torch.zeros(1, BLOCK, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
    ],
    ids=["dtype", "length", "shape", "empty"],
)
def test_what_it_cannot_read(x):
    with pytest.raises(ValueError, match="expected torch"):
        read(x)
