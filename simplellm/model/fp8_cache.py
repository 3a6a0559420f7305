"""Keys and values as FP8 numbers: what a pool of them looks like, and their scales.

The sliding layers of a model keep a bounded number of positions, and stay as they are.
K kv heads, D head_dim.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from simplellm.base.config import EngineConfig, ModelConfig, expect
from simplellm.base.host_memory import zeros
from simplellm.model.kv_pool import KVPool
from simplellm.model.memory import page_bytes, sliding_groups

FP8 = torch.float8_e4m3fn
# Of keys or values, as different tools have called it, in the layer it names.
SCALE = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")


class MixedPool(KVPool):
    """A `KVPool` with FP8 numbers in the full layers, beside sliding ones in ``dtype``.

    The sliding layers form as many groups as bring one's share of a page near to that
    of the full layers. A page lies in one piece, whoever has it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        count = sliding_groups(config, dtype.itemsize, "fp8")
        self.windows = (None, *[config.sliding_window] * count)
        self.page_size = page_size
        nbytes = page_bytes(config, page_size, dtype.itemsize, "fp8")
        self.memory = zeros((num_pages, nbytes), torch.uint8, device)
        rows = page_size, config.num_key_value_heads, config.head_dim
        self.groups, self.keys, self.values = [], [], []
        sliding = 0
        for layer in range(config.num_hidden_layers):
            group, kind = 0, FP8
            if config.window(layer) is not None:
                group, kind = 1 + sliding % count, dtype
                sliding += 1
            size = 2 * page_size * rows[1] * rows[2] * kind.itemsize
            begin = self.groups.count(group) * size
            both = self.memory[:, begin : begin + size].view(kind)
            both = both.unflatten(1, (2, *rows))
            self.groups.append(group)
            self.keys.append(both[:, 0])
            self.values.append(both[:, 1])

    def page(self, number: int) -> Tensor:
        beyond = number - len(self.memory)
        return self.memory[number] if beyond < 0 else self.host_pages[beyond]


def make_pool(
    model: ModelConfig,
    config: EngineConfig,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPool:
    """The pool of an engine whose model computes in ``dtype``."""
    sizes = model, num_pages, config.page_size
    if config.kv_cache_dtype == "auto":
        return KVPool(*sizes, dtype, device)
    mixed = len(model.windows) > 1
    return MixedPool(*sizes, dtype, device) if mixed else KVPool(*sizes, FP8, device)


def kv_scales(files: Sequence[Path], layers: int) -> list[tuple[float, float]]:
    """What keys and values are divided by, as a checkpoint's files say.

    A pair for each layer, 1 where they say nothing. Raises ValueError for what is no
    scale.
    """
    scales: list[list[float]] = [[1.0, 1.0] for _ in range(layers)]
    for file in files:
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as opened:
            for name in list(opened.keys()):
                named = SCALE.search(name)
                if named is None or int(named[1]) >= layers:
                    continue
                scale = opened.get_tensor(name).float()
                ok = scale.numel() == 1 and 0 < scale.max() < torch.inf
                expect(ok, name, scale.flatten()[:3].tolist(), "one number above 0")
                scales[int(named[1])][named[2] == "v"] = scale.item()
    return [(k, v) for k, v in scales]
