"""The memory of keys and values, in pages: tensors, which know no owner of a page.

Who holds which page is for `PageManager` to say. K kv heads, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.base.host_memory import zeros


class KVPool:
    """The keys and values of all layers, in pages.

    A page holds ``page_size`` positions of all full or of all sliding layers, whichever
    a sequence needs next. ``keys[layer]`` and ``values[layer]`` are [num_pages,
    page_size, K, D]; layers of one kind lie one after another in the same pages, and
    layers of different kinds share their memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.windows = config.windows
        self.page_size = page_size
        layers = range(config.num_hidden_layers)
        self.groups = [self.windows.index(config.window(layer)) for layer in layers]
        # Of each layer, how many layers of its group come before it.
        indices = [self.groups[:n].count(group) for n, group in enumerate(self.groups)]
        heads, dim = config.num_key_value_heads, config.head_dim
        shape = (2, 1 + max(indices), num_pages, page_size, heads, dim)
        self.memory = zeros(shape, dtype, device)
        self.keys = [self.memory[0, index] for index in indices]
        self.values = [self.memory[1, index] for index in indices]

    host_pages: Sequence[Tensor] = ()  # numbered after those of the device

    def page(self, number: int) -> Tensor:
        """The keys and values of a page, wherever it lies."""
        beyond = number - self.memory.shape[2]
        return self.memory[:, :, number] if beyond < 0 else self.host_pages[beyond]

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy pages, (from, to) in this order."""
        for source, target in pages:
            self.page(target).copy_(self.page(source), non_blocking=True)
