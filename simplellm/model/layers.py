"""A model's weights as records: what a layer is made of.

A family of models is data: parts that it does not have are None. V vocabulary, H query
heads, K kv heads, D head_dim, E experts, I intermediate size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.mxfp4 import StoredWeight, Weight


@dataclass(frozen=True, eq=False)
class Attention:
    """The weights of one attention, and the heads that they make."""

    qkv: Weight  # [(H + 2K) * D, hidden], the heads of q, k and v in this order
    qkv_bias: Tensor | None  # [(H + 2K) * D]
    o: Weight  # [hidden, H * D]
    o_bias: Tensor | None  # [hidden]
    sinks: Tensor | None  # [H], a logit for each query head that no key belongs to
    q_norm: Tensor | None  # [D], of an RMSNorm of each head before it is rotated
    k_norm: Tensor | None
    cos: Tensor  # float32 [positions, D/2]
    sin: Tensor
    head_dim: int
    eps: float  # of q_norm and k_norm
    dtype: torch.dtype | None = None  # of q; None: that of the cache
    # What keys and values are divided by before they are rounded to the cache's dtype.
    # Queries are multiplied by the first; ``o`` has been by the second.
    kv_scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts with its router.

    Rows of ``gate_up`` alternate the two for a "clamped_swiglu"; else one follows the
    other. A rank of several may have the experts from ``first`` on alone, L of them in
    place of E: then what its tokens choose of the others adds nothing here.
    """

    router: Tensor  # [E, hidden]
    router_bias: Tensor | None  # [E]
    gate_up: StoredWeight | PackedExperts  # [L, 2I, hidden]
    gate_up_bias: Tensor | None  # [L, 2I]
    down: StoredWeight | PackedExperts  # [L, hidden, I]
    down_bias: Tensor | None  # [L, hidden]
    top_k: int  # experts a token
    limit: float  # of the SwiGLU's inputs
    alpha: float  # slope of the SwiGLU's sigmoid
    activation: str = "clamped_swiglu"  # or a key of ACTIVATIONS, see below
    normalized: bool = True  # the weights of a token's experts add up to 1
    first: int = 0

    @property
    def held(self) -> range:
        """The experts that are here."""
        return range(self.first, self.first + self.gate_up.shape[0])

    def forward(self, ops: Any, x: Tensor, num_tokens: Tensor) -> Tensor:
        """What this part of a layer adds to each token."""
        return ops.experts(x, self, num_tokens)


@dataclass(frozen=True, eq=False)
class Dense:
    """A feed-forward network that every token goes through. Gate and up follow."""

    gate_up: Weight  # [2I, hidden], all of gate, then all of up; "gelu": [I, hidden]
    gate_up_bias: Tensor | None  # [2I] or [I]
    down: Weight  # [hidden, I]
    down_bias: Tensor | None  # [hidden]
    activation: str = "swiglu"  # a key of `simplellm.model.other_families.ACTIVATIONS`

    def forward(self, ops: Any, x: Tensor, num_tokens: Tensor) -> Tensor:
        """What this part of a layer adds to each token."""
        return ops.dense(x, self)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """A norm that takes off the mean, too."""

    weight: Tensor  # [hidden]
    bias: Tensor  # [hidden]


@dataclass(frozen=True, eq=False)
class SandwichNorm:
    """Two norms: of an update before it is added, and of the sum."""

    update: Tensor  # [hidden], of its RMSNorm
    weight: Tensor  # [hidden], of the sum's


Norm = Tensor | LayerNorm | SandwichNorm  # a Tensor is an RMSNorm's weight


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: attention and a feed-forward part, each behind its norm."""

    attn_norm: Norm
    attn: Attention
    mlp_norm: Norm
    mlp: Experts | Dense
