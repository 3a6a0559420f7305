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

from simplellm.checkpoint.cpu_weights import CPUMatrix
from simplellm.checkpoint.mxfp4 import MXFP4, Weight
from simplellm.checkpoint.scaled import Scaled


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times ``weight`` [out, in], transposed, plus ``bias`` [out].

    A packed weight is dequantized to x's dtype for this call only. One of 8 bits may
    round x first, as its format says, and a `CPUMatrix` is multiplied as it is.
    """
    if isinstance(weight, Scaled | CPUMatrix):
        return weight.product(x, bias)
    if isinstance(weight, MXFP4):
        weight = weight.dequantize(x.dtype)
    return functional.linear(x, weight, bias)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and how much each one counts.

    x [T, hidden], weight [E, hidden], bias [E] -> ids int64 [T, k] and weights [T, k]
    in x's dtype. The weights are a softmax over the chosen logits alone: they add up
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
