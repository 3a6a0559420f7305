"""The tensors of safetensors files: found by headers, read through the memory map."""

import json
import math
import mmap
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplellm.checkpoint.formats import NumberFormat
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.names import Name, TensorInfo
from simplellm.checkpoint.stored import decode_weights, join_weights


def read_header(data: bytes | mmap.mmap) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each tensor, and where its data begins.

    By name "dtype", "shape" and "data_offsets", which count from where the data begins.
    ``data`` is the whole file, of which only the header is read.
    """
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length].decode())
    header.pop("__metadata__", None)  # free text that writers may add
    return header, 8 + length


DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    # What follows is for other models than gpt-oss.
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def tensor_view(data: bytearray | mmap.mmap, info: TensorInfo) -> Tensor:
    """The tensor that ``info`` describes, in the file's own bytes: nothing is read.

    ``data`` is the whole file that ``info`` speaks of.
    """
    dtype, count = DTYPES[info.dtype], math.prod(info.shape)
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=info.offset)
    return flat.view(info.shape)


def assembled(
    parts: Sequence[Tensor],
    name: Name,
    shape: Sequence[int],
    form: NumberFormat | None = None,
) -> Weight:
    """The weight [..., out, in] of this ``shape`` from its parts on disk.

    The parts are in the order of `stored_names`; of a ``form``, each is several
    tensors. What is stored [in, out] is turned by a view; what has parts is copied
    once.
    """
    if form is not None:
        return join_weights(decode_weights(form, parts), shape)
    parts = [part.mT for part in parts] if name.turned else parts
    return (torch.cat([*parts]) if len(parts) > 1 else parts[0]).view(*shape)
