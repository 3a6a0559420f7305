"""Reading memory: the kernel against PyTorch."""

import torch

from simplellm.model.kernels.bandwidth import READ_BLOCK, read_memory


def test_it_reads_every_number(kernel_device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-1000, 1000, (5 * READ_BLOCK,), generator=generator)
    x = x.to(kernel_device, torch.int32)
    assert torch.equal(read_memory(x), x.view(-1, READ_BLOCK).sum(1, dtype=torch.int32))
