"""How far a position turns the heads of q and k: rotary embeddings with YaRN.

T tokens, N heads, D head_dim.
"""

import math

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of ``x`` [T, N, D] by its token's angles; same dtype as ``x``.

    cos and sin are float32 [T, D/2]. Dimension i is paired with i + D/2 (half-split,
    not interleaved). The products are float32 whatever the dtype of ``x``.
    """
    first, second = x.float().chunk(2, dim=-1)  # [T, N, D/2] each
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def yarn_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, and the factor on cos and sin.

    Returns float32 [D/2] and the concentration. Without ``config.rope_scaling`` these
    are the frequencies theta^(-2i/D) of RoFormer (Su et al., 2021) and 1. With it the
    slow ones are divided by the factor, the fast ones stay, and a ramp joins the two
    (YaRN, Peng et al., 2023).
    """
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    period = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [D/2]
    if scaling is None:
        return 1.0 / period, 1.0

    def pair_turning(turns: float) -> float:
        """The pair, as a real number, that turns so often over the original length."""
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp  # 1 for the fast pairs, 0 for the slow ones
    frequencies = 1.0 / (scaling.factor * period) * (1 - keep) + 1.0 / period * keep
    concentration = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    return frequencies, concentration
