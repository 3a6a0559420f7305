"""How far a position turns the heads of q and k: rotary embeddings with YaRN.

D head_dim.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig


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


def stretched_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """`yarn_frequencies`, or what the model has in their place."""
    scaling, dim = config.rope_scaling, config.head_dim
    if config.learned_positions:
        return torch.zeros(dim // 2), 1.0
    if scaling is None or scaling.rope_type == "yarn":
        frequencies, factor = yarn_frequencies(config)
        attention_factor = scaling and scaling.attention_factor
        return frequencies, attention_factor or factor
    plain, _ = yarn_frequencies(replace(config, rope_scaling=None))
    if scaling.rope_type == "longrope":
        length = scaling.original_max_position_embeddings
        longer = config.max_position_embeddings > length
        factors = scaling.long_factor if longer else scaling.short_factor
        return plain / torch.tensor(factors), scaling.attention_factor or 1.0
    keep = torch.zeros_like(plain)  # as in `yarn_frequencies`
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * (1 - keep) + plain * keep, 1.0


def rotations(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32 [positions, D/2] each."""
    frequencies, concentration = stretched_frequencies(config)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = positions.to(device)[:, None] * frequencies.to(device)
    return angles.cos() * concentration, angles.sin() * concentration
