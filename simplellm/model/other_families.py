"""What families compute in other ways than gpt-oss does, in plain PyTorch.

T tokens, E experts, k experts a token, I intermediate size.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional


def gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up: gate_up [..., 2I], gate in its first half -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


gelu = partial(functional.gelu, approximate="tanh")
# What is between the two products of a feed-forward network, by its record's word.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": partial(gated, activation=functional.silu),
    "geglu": partial(gated, activation=gelu),
    "gelu": gelu,
}


def route_among_all(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """`feed_forward.route`, but each weight is a share among all of the experts."""
    probs = functional.linear(x, weight, bias).softmax(dim=-1)  # [T, E]
    top_probs, expert_ids = probs.topk(top_k, dim=-1)  # [T, k]
    return expert_ids, top_probs


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., N] less its mean, over the root of its variance, in x's dtype.

    Times weight [N], plus bias [N]; computed in float32.
    """
    weight, bias = weight.float(), bias.float()
    return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
