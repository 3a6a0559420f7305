"""What a layer computes for each token by itself, in plain PyTorch.

Arithmetic within an operation is float32 where it decides the result, whatever the
dtype of x. PyTorch's library chooses the order in which a product adds up, by the
number of rows and the processor: with other tokens around it, a token's numbers may
differ by rounding.

T tokens, E experts, k experts a token, I intermediate size.
"""

import torch
from torch import Tensor
from torch.nn import functional

from simplellm.checkpoint.int4 import Int4
from simplellm.checkpoint.mxfp4 import MXFP4, Weight
from simplellm.checkpoint.scaled import Scaled
from simplellm.model.layers import Dense, Experts
from simplellm.model.other_families import ACTIVATIONS, route_among_all


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times ``weight`` [out, in], transposed, plus ``bias`` [out].

    A packed weight is dequantized to x's dtype for this call only. One of 8 bits may
    round x first, as its format says, and an `Int4` is multiplied as it is.
    """
    if isinstance(weight, Scaled | Int4):
        return weight.product(x, bias)
    if isinstance(weight, MXFP4):
        weight = weight.dequantize(x.dtype)
    return functional.linear(x, weight, bias)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and how much each one counts.

    x [T, hidden], weight [E, hidden], bias [E] -> ids int64 [T, k] and shares [T, k]
    in x's dtype. The shares are a softmax over the chosen logits alone: they add up
    to 1, and what the other experts scored does not matter.
    """
    logits = functional.linear(x, weight, bias)  # [T, E]
    top_logits, expert_ids = logits.topk(top_k, dim=-1)  # [T, k]
    return expert_ids, top_logits.softmax(dim=-1)


def swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """gate_up [..., 2I] -> [..., I]: gate * sigmoid(alpha * gate) * (up + 1).

    Gate and up alternate, gate first. Both are clamped to ``limit``, but only up from
    below as well: a very negative gate gives about 0 by itself.
    """
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]  # [..., I] each
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def activated(first: Tensor, mlp: Experts | Dense) -> Tensor:
    """What the second product of a feed-forward network gets of the first one's."""
    if isinstance(mlp, Experts) and mlp.activation == "clamped_swiglu":
        return swiglu(first, mlp.limit, mlp.alpha)
    return ACTIVATIONS[mlp.activation](first)


def dense(x: Tensor, mlp: Dense) -> Tensor:
    """A feed-forward network for all tokens: x [T, hidden] -> the same shape."""
    first = linear(x, mlp.gate_up, mlp.gate_up_bias)
    return linear(activated(first, mlp), mlp.down, mlp.down_bias)


def experts(x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
    """The weighted sum of what each token's experts say: x [T, hidden] -> the same.

    Every expert that some token chose runs once, on all its tokens together; only
    these experts are dequantized, one at a time. A token's sum runs over its experts
    in ascending order, whichever other tokens there are. Only the first ``num_tokens``,
    int32 [1], are no padding; other tables skip the rest, and may return [T, k,
    hidden].
    """
    rule = route if mlp.normalized else route_among_all
    ids, scores = rule(x, mlp.router, mlp.router_bias, mlp.top_k)
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
        hidden = activated(gate_up, mlp)  # [n, I]
        y = linear(hidden, mlp.down[local], second_bias)
        out.index_add_(0, tokens, y * scores.flatten()[pair_ids, None])
    return out
