"""How the numbers of a GGUF file become ours.

Q8_0 becomes a `Scaled` and MXFP4 an `MXFP4`: the same numbers in as many bits. Other
types become ordinary numbers, by `blocks.py` or by the package `gguf`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simplellm.base.config import BLOCK
from simplellm.checkpoint.gguf.blocks import MIDDLES, float16_at, nibbles, read_blocks
from simplellm.checkpoint.gguf.container import TYPES
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.checkpoint.names import TensorInfo
from simplellm.checkpoint.scaled import Scaled
from simplellm.checkpoint.stored import tensors

ORDINARY = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = 2**22  # numbers that one thread makes at a time


def as_array(data: Any, tensor: TensorInfo) -> np.ndarray[Any, Any]:
    """A tensor's bytes [..., bytes of a row], in the mapped file: nothing is read."""
    _, elements, nbytes = next(t for t in TYPES.values() if t[0] == tensor.dtype)
    flat = np.frombuffer(data, np.uint8, tensor.nbytes, tensor.offset)
    *rows, columns = tensor.shape
    return flat.reshape(*rows, columns // elements * nbytes)


def mxfp4_of(rows: Tensor) -> MXFP4:
    """MXFP4 as it is kept here, from uint8 ``rows`` [..., G * 17] of ggml's.

    A block of 32 is its scale and 16 bytes there, of which byte j holds the elements j
    and j + 16, in its low and its high half. Here neighbors share a byte.
    """
    blocks = rows.unflatten(-1, (-1, 1 + BLOCK // 2))  # [..., G, 17]
    codes = nibbles(blocks[..., 1:])  # [..., G, 32]
    return MXFP4(
        codes[..., 0::2] | (codes[..., 1::2] << 4), blocks[..., 0].contiguous()
    )


def scaled_of(rows: Tensor) -> Scaled:
    """A weight of 8 bits from uint8 ``rows`` [..., out, C * 34] of Q8_0.

    A block of 32 is its float16 scale and 32 signed numbers.
    """
    blocks = rows.unflatten(-1, (-1, 2 + BLOCK))
    values = blocks[..., 2:].contiguous().view(torch.int8).flatten(-2)
    return Scaled(values, float16_at(blocks, 0), (1, BLOCK), False)


def number_reader(kind: str) -> Callable[[np.ndarray[Any, Any]], Tensor]:
    """What makes the numbers of rows of bytes that are of a type."""
    if kind in MIDDLES:
        return lambda rows: read_blocks(torch.from_numpy(rows), kind).numbers()
    from gguf import GGMLQuantizationType, dequantize

    known = GGMLQuantizationType[kind]
    return lambda rows: torch.from_numpy(dequantize(rows, known))


def dequantize_rows(
    rows: np.ndarray[Any, Any], tensor: TensorInfo, dtype: Any
) -> Tensor:
    """The tensor as ordinary numbers.

    Those that are such in the file are a view of it, in their own dtype; others are
    made in ``dtype``, by several threads.
    """
    if stored := ORDINARY.get(tensor.dtype):
        return torch.from_numpy(rows).view(stored).view(tensor.shape)
    numbers_of = number_reader(tensor.dtype)
    out = torch.empty(tensor.shape, dtype=dtype)
    flat, source = out.view(-1, tensor.shape[-1]), rows.reshape(-1, rows.shape[-1])
    step = max(1, CHUNK // tensor.shape[-1])

    def make(start: int) -> None:
        flat[start : start + step] = numbers_of(source[start : start + step])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(make, range(0, len(source), step)))
    return out


def reverse_permute(weight: Any, heads: int) -> Any:
    """``weight`` [heads * D, ...] with the rows of each head in the hub's order.

    llama.cpp has the two rows of a rotation side by side, for models of Llama's kind;
    the hub has them half a head apart.
    """
    rows = weight.shape[0]
    order = torch.arange(rows).view(heads, -1, 2).mT.flatten()
    return weight[order]


def join_parts(parts: Sequence[Any], axis: int, interleaved: bool) -> Any:
    """``parts`` of one weight along ``axis``: one behind the other, or in turns.

    Either all are ordinary numbers, or all are `Scaled`, or all `MXFP4`.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, MXFP4 | Scaled):
        pairs = zip(*map(tensors, parts), strict=True)
        numbers, scales = (join_parts(some, axis, interleaved) for some in pairs)
        if isinstance(first, MXFP4):
            return MXFP4(numbers, scales)
        return replace(first, values=numbers, scales=scales)
    if interleaved:
        return torch.stack([*parts], axis + 1).flatten(axis, axis + 1)
    return torch.cat([*parts], axis)
