"""Mixture of experts: a router picks a few feed-forward networks for each token.

T tokens, E experts, k experts a token, I intermediate size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from simplellm.weights import Weight, linear


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and how much each one counts.

    x [T, hidden], weight [E, hidden], bias [E] -> ids int64 [T, k] and weights [T, k]
    in x's dtype. The weights are a softmax over the chosen logits alone: they add up
    to 1, and what the other experts scored does not matter.
    """
    logits = functional.linear(x, weight, bias)  # [T, E]
    chosen, expert_ids = logits.topk(top_k, dim=-1)  # [T, k]
    return expert_ids, chosen.softmax(dim=-1)


def swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """gate_up [..., 2I] -> [..., I]: gate * sigmoid(alpha * gate) * (up + 1).

    Gate and up alternate, gate first. Both are clamped to ``limit``, but only up from
    below as well: a very negative gate gives about 0 by itself.
    """
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]  # [..., I] each
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


@dataclass(frozen=True, eq=False)
class Experts:
    """All experts of one layer. Rows of ``gate_up`` alternate gate and up."""

    gate_up: Weight  # [E, 2I, hidden]
    gate_up_bias: Tensor  # [E, 2I]
    down: Weight  # [E, hidden, I]
    down_bias: Tensor  # [E, hidden]
    limit: float  # of the SwiGLU's inputs
    alpha: float  # slope of the SwiGLU's sigmoid


def experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: Experts
) -> Tensor:
    """The weighted sum of what each token's experts say.

    x [T, hidden], expert_ids and expert_weights [T, k] from `route` -> [T, hidden].
    Every expert that some token chose runs once, on all its tokens together; only
    these experts are dequantized, one at a time. A token's sum runs over its experts
    in ascending order, whichever other tokens there are.
    """
    out = torch.zeros_like(x)
    top_k = expert_ids.shape[1]
    # The T*k (token, choice) pairs, sorted by expert; a pair's token is pair // k.
    pairs = expert_ids.flatten().argsort(stable=True)
    counts = expert_ids.flatten().bincount().tolist()
    for expert, group in enumerate(pairs.split(counts)):
        if len(group) == 0:
            continue
        tokens = group // top_k  # [n], each at most once
        gate_up = linear(
            x[tokens], weights.gate_up[expert], weights.gate_up_bias[expert]
        )
        hidden = swiglu(gate_up, weights.limit, weights.alpha)  # [n, I]
        y = linear(hidden, weights.down[expert], weights.down_bias[expert])
        out.index_add_(0, tokens, y * expert_weights.flatten()[group, None])
    return out
