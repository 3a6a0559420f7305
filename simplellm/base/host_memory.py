"""The host's memory, and copies between it and the device that nobody waits for."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, as PyTorch's own memory has
PIECE = 2**30  # bytes of `host_pages` that are had at once


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros, but a CPU's memory is taken when it's first written to.

    So the engine is there at once, and what it doesn't need stays the system's.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    numbers = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -numbers.ctypes.data % ALIGNMENT
    return torch.from_numpy(numbers[start : start + nbytes]).view(dtype).view(*shape)


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, from which or into which ``device`` copies by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(
    values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Numbers as a tensor on ``device``, without waiting for what the device does."""
    tensor = torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def fetch(x: Tensor) -> Tensor:
    """``x`` on the host, where it is once the device has come to this copy."""
    return pinned(x.shape, x.dtype, x.device).copy_(x, non_blocking=True)


def host_pages(page: Tensor, count: int) -> list[Tensor]:
    """So many like ``page`` of a device, which copies from and to them by itself."""
    # Pinned memory is rounded up to a power of two: large pieces leave little unused.
    each = max(1, PIECE // page.nbytes)
    sizes = [min(each, count - begin) for begin in range(0, count, each)]
    pieces = [pinned([n, *page.shape], page.dtype, page.device) for n in sizes]
    return [one for piece in pieces for one in piece]
