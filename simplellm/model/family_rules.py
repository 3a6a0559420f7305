"""What a layer's record asks for: gpt-oss's own functions or another family's."""

from torch import Tensor

from simplellm.model.feed_forward import linear, route, swiglu
from simplellm.model.layers import Dense, Experts
from simplellm.model.other_families import ACTIVATIONS, route_among_all


def select_experts(x: Tensor, mlp: Experts) -> tuple[Tensor, Tensor]:
    """The experts of each token, x [T, hidden], as `route` returns them."""
    rule = route if mlp.normalized else route_among_all
    return rule(x, mlp.router, mlp.router_bias, mlp.top_k)


def apply_activation(first: Tensor, mlp: Experts | Dense) -> Tensor:
    """What the second product of a feed-forward network gets of the first one's."""
    if isinstance(mlp, Experts) and mlp.activation == "clamped_swiglu":
        return swiglu(first, mlp.limit, mlp.alpha)
    return ACTIVATIONS[mlp.activation](first)


def dense(x: Tensor, mlp: Dense) -> Tensor:
    """A feed-forward network for all tokens: x [T, hidden] -> the same shape."""
    first = linear(x, mlp.gate_up, mlp.gate_up_bias)
    return linear(apply_activation(first, mlp), mlp.down, mlp.down_bias)
