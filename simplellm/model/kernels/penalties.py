"""Penalties on tokens that were there before, in one pass over the logits.

B rows, P of them with penalties, V vocabulary.
"""

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import launcher, pdl_wait
from simplellm.sampling.penalties import TokenCounts

PENALTY_BLOCK = 2048  # logits a program looks at


@triton.jit
def penalize_kernel(
    logits_ptr,
    rows_ptr,
    in_prompt_ptr,
    in_output_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocabulary,
    stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program changes BLOCK logits of a row in place; a row's counts lie apart by
    ``stride``."""
    pdl_wait(PDL)
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = logits_ptr + tl.load(rows_ptr + row) * vocabulary + tokens
    counts = row * stride + tokens
    times = tl.load(in_output_ptr + counts, inside, 0)
    seen = tl.load(in_prompt_ptr + counts, inside, 0).to(tl.int1) | (times > 0)
    x = tl.load(logits, seen & inside, 0.0)
    repetition = tl.load(repetition_ptr + row) + tl.zeros([BLOCK], tl.float32)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x -= tl.load(frequency_ptr + row) * times.to(tl.float32)
    x -= tl.where(times > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(logits, x, seen & inside)


def penalize(counts: TokenCounts, logits: Tensor) -> Tensor:
    """`TokenCounts.penalize`: penalized ``logits`` float32 [B, V], contiguous.

    Rows of both kinds of counts lie apart by as many.
    """
    vocabulary, scores = logits.shape[1], logits.clone()
    columns = counts.repetition, counts.presence, counts.frequency
    start = launcher(penalize_kernel, BLOCK=PENALTY_BLOCK, num_warps=8)
    start(
        (-(-vocabulary // PENALTY_BLOCK), len(counts.rows), 1),
        scores,
        counts.rows,
        counts.in_prompt,
        counts.in_output,
        *columns,
        vocabulary,
        counts.in_prompt.stride(0),
    )
    return scores
