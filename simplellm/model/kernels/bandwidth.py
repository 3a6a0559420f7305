"""Read much memory as fast as it goes, to know what a GPU can deliver."""

import triton
import triton.language as tl
from torch import Tensor

READ_BLOCK = 8192  # numbers of a program: 16 bytes a load, 8 loads a thread


@triton.jit
def read_kernel(x_ptr, sums_ptr, BLOCK: tl.constexpr):
    """One program a block: its sum, which keeps the loads from being left out."""
    block = tl.program_id(0)
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums_ptr + block, tl.sum(tl.load(x_ptr + offsets), 0))


def read_memory(x: Tensor) -> Tensor:
    """int32 ``x`` [N], with N a multiple of 8,192 -> int32 [N / 8192], sums of it."""
    sums = x.new_empty(len(x) // READ_BLOCK)
    read_kernel[(len(sums),)](x, sums, BLOCK=READ_BLOCK, num_warps=8)
    return sums
