"""Numbers on their way to the device and back, while the host does something else."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


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
