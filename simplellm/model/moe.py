"""A mixture of experts in plain PyTorch: each one that was chosen runs once.

T tokens, k experts a token, I intermediate size.
"""

import torch
from torch import Tensor

from simplellm.model.family_rules import apply_activation, select_experts
from simplellm.model.feed_forward import linear
from simplellm.model.layers import Experts


def experts(x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
    """The weighted sum of what each token's experts say: x [T, hidden] -> the same.

    Every expert that some token chose runs once, on all its tokens together; only
    these experts are dequantized, one at a time. A token's sum runs over its experts
    in ascending order, whichever other tokens there are. Only the first ``num_tokens``,
    int32 [1], are no padding; other tables skip the rest, and may return [T, k,
    hidden].
    """
    ids, weights = select_experts(x, mlp)
    out = torch.zeros_like(x)
    # The T*k (token, choice) pairs, sorted by expert; a pair's token is pair // k.
    pairs = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount().tolist()
    for expert, pair_ids in enumerate(pairs.split(counts)):
        if len(pair_ids) == 0 or expert not in mlp.held:
            continue
        tokens = pair_ids // mlp.top_k  # [n], each at most once
        local = expert - mlp.first
        first_bias, second_bias = (
            None if bias is None else bias[local]
            for bias in (mlp.gate_up_bias, mlp.down_bias)
        )
        gate_up = linear(x[tokens], mlp.gate_up[local], first_bias)
        hidden = apply_activation(gate_up, mlp)  # [n, I]
        y = linear(hidden, mlp.down[local], second_bias)
        out.index_add_(0, tokens, y * weights.flatten()[pair_ids, None])
    return out
