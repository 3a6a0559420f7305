"""How ranks that have a part of the vocabulary each choose a token together.

S rows, W tokens of this rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST_TOKEN = 2**31 - 1
BIN_BITS = 12  # a depth's 24 bits are found in two rounds of so many


def pack_keys(values: Tensor, tokens: Tensor) -> Tensor:
    """int64 keys that sort as (value, then lower token first); NaN above all numbers.

    ``values`` are float32, ``tokens`` int64. As in `kernels/argmax_keys.py`.
    """
    bits = (values + 0.0).view(torch.int32).long()  # -0 ties with 0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = torch.where(values.isnan(), 0x7FFFFFFF, bits)
    return (bits << 32) | (LARGEST_TOKEN - tokens)


def token_of(keys: Tensor) -> Tensor:
    """The tokens, int32, that went into `pack_keys`."""
    return (LARGEST_TOKEN - (keys & LARGEST_TOKEN)).int()


def tally(bins: Tensor, weights: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """What all ranks' weights up to each bin add up to, int64 [S, 2**BIN_BITS].

    ``bins`` and ``weights`` are int64 [S, W]; ``add_up`` gives all ranks' sum.
    """
    own = weights.new_zeros(len(bins), 2**BIN_BITS)
    return add_up(own.scatter_add_(1, bins, weights)).cumsum(1)


def reach(
    depths: Tensor,
    weights: Tensor,
    needed: Callable[[Tensor], Tensor],
    add_up: Callable[[Tensor], Tensor],
) -> Tensor:
    """The least depth, int64 [S, 1], down to which all ranks' weights are enough.

    ``depths`` are int32 [S, W], of 24 bits, ``weights`` int64 [S, W]; ``needed`` of
    what all weigh together, float64 [S, 1]; ``add_up`` gives all ranks' sum.
    """
    bins = (depths >> BIN_BITS).long()
    sums = tally(bins, weights, add_up)
    enough = needed(sums[:, -1:].double())
    chosen = (sums.double() >= enough).int().argmax(1, keepdim=True)
    before = sums.gather(1, (chosen - 1).clamp(min=0)) * (chosen > 0)
    inside = weights * (bins == chosen)
    lower = (depths & (2**BIN_BITS - 1)).long()
    sums = before + tally(lower, inside, add_up)
    last = (sums.double() >= enough).int().argmax(1, keepdim=True)
    return (chosen << BIN_BITS) | last
