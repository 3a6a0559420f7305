"""Which tokens min_p, top_k and top_p leave to be drawn.

B rows (one sequence each), V vocabulary. Scores are logits over a temperature.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from simplellm.base.host_memory import upload
from simplellm.base.sampling_params import SamplingParams

# Scores are compared by how many of these steps they lie below the best one: those in
# the same step tie. The last step is 64 below: a token there has no chance to be drawn.
STEPS = 2.0**18
LAST = 2**24 - 1
WEIGHT = 2.0**40  # of the best token: what is e^-28 times as likely weighs nothing


def filter_tokens(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Scores [B, V] with -inf for every token that min_p, top_k or top_p drops.

    Parameters are [B, 1]; top_k is int64 in 1..V. Each filter sees what the one before
    it left, renormalized. All three keep a head of the sorted row, so the last kept
    token is a threshold; tokens that tie with it stay.

    Weights are integers, whose sum is the same in any order: so an implementation that
    does not sort keeps exactly these tokens.
    """
    below = scores.amax(dim=-1, keepdim=True) - scores
    depths = (below.clamp(0, LAST / STEPS) * STEPS).int()
    ordered, order = depths.sort(dim=-1)
    keep = (depths <= ordered.gather(1, top_k - 1)) & (-below >= min_p.log())
    weights = ((-below).exp() * WEIGHT).long() * keep
    sums = weights.gather(1, order).cumsum(dim=-1)
    # The first token with which there is enough; without top_p there never is.
    enough = sums.double() >= top_p.double() * sums[:, -1:].double()
    last = ordered.gather(1, enough.int().argmax(dim=-1, keepdim=True))
    keep &= (depths <= last) | (top_p >= 1)
    return scores.masked_fill(~keep, -torch.inf)


class Filters(NamedTuple):
    """The filters of a batch: columns [B, 1], and which of them some row uses."""

    top_k: Tensor  # int64 in 1..V
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    some_top_k: bool
    some_top_p: bool

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device
    ) -> "Filters | None":
        """Filters of ``params``; None if no row that draws has any."""
        drawing = [p for p in params if p.temperature > 0]
        some_top_k = any(0 < p.top_k < vocab_size for p in drawing)
        some_top_p = any(p.top_p < 1 for p in drawing)
        if not (some_top_k or some_top_p or any(p.min_p > 0 for p in drawing)):
            return None
        top_k = [
            min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params
        ]
        top_p, min_p = (
            upload(values, torch.float32, device)[:, None]
            for values in ([p.top_p for p in params], [p.min_p for p in params])
        )
        columns = upload(top_k, torch.int64, device)[:, None], top_p, min_p
        return cls(*columns, some_top_k, some_top_p)
