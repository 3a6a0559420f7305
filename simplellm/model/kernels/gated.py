"""What a product of a gated feed-forward network ends with: its activation.

The weight holds all rows of gate, then all of up. A program takes rows of both that
belong together, so that gate and up of a unit meet in its registers: nothing of twice
the intermediate size is written and read again, and a launch is saved.

T tokens, N = 2I rows of the weight, I intermediate size.
"""

import triton
import triton.language as tl


@triton.jit
def gate_and_up_rows(N: tl.constexpr, ROWS: tl.constexpr):
    """This program's units, and the rows of their gates and ups; N where there is none.

    Up to 8 gates, then their ups, and so on: of a tensor core's results a thread has
    those of two rows that are 8 apart.
    """
    HALF: tl.constexpr = ROWS // 2
    WIDTH: tl.constexpr = min(8, HALF)
    row = tl.arange(0, ROWS)
    units = tl.program_id(0) * HALF + row // (2 * WIDTH) * WIDTH + row % WIDTH
    rows = tl.where(units < N // 2, units + row // WIDTH % 2 * (N // 2), N)
    return tl.program_id(0) * HALF + tl.arange(0, HALF), rows


@triton.jit
def gate_activation(gate, ACTIVATION: tl.constexpr):
    """gate * sigmoid(slope), with gate as slope; or GELU.

    Of which sqrt(8 / pi) * (gate + 0.044715 * gate^3) is the slope: its tanh form in
    other words.
    """
    slope = gate
    if ACTIVATION != "swiglu":
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-slope))


@triton.jit
def apply_gate(both, ACTIVATION: tl.constexpr):
    """activation(gate) * up [ROWS / 2, T] of `gate_and_up_rows` [ROWS, T]."""
    HALF: tl.constexpr = both.shape[0] // 2
    WIDTH: tl.constexpr = min(8, HALF)
    T: tl.constexpr = both.shape[1]
    both = tl.reshape(both, (HALF // WIDTH, 2, WIDTH, T))
    gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
    gate, up = tl.reshape(gate, (HALF, T)), tl.reshape(up, (HALF, T))
    return gate_activation(gate, ACTIVATION) * up
