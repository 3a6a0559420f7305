"""Cosines and sines of every position, whatever a family makes of RoPE."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.model.rope import yarn_frequencies


def stretched_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """`yarn_frequencies`, or what the model has in their place."""
    scaling, dim = config.rope_scaling, config.head_dim
    if config.learned_positions:
        return torch.zeros(dim // 2), 1.0
    if scaling is None or scaling.rope_type == "yarn":
        frequencies, factor = yarn_frequencies(config)
        attention_factor = scaling and scaling.attention_factor
        return frequencies, attention_factor or factor
    plain_config = replace(config, rope_scaling=None)
    if scaling.rope_type == "dynamic":
        length = scaling.original_max_position_embeddings
        growth = max(config.max_position_embeddings / length, 1) - 1
        theta = config.rope_theta * (1 + scaling.factor * growth) ** (dim / (dim - 2))
        return yarn_frequencies(replace(plain_config, rope_theta=theta))
    plain, _ = yarn_frequencies(plain_config)
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


def score_scale(config: ModelConfig) -> float:
    """What scores are multiplied by, beside being divided by the root of head_dim."""
    return (config.head_dim / (config.query_pre_attn_scalar or config.head_dim)) ** 0.5


def rotations(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32 [positions, D/2] each.

    Where no norm of q can have the scale of the scores, these do, of q and k alike.
    """
    frequencies, concentration = stretched_frequencies(config)
    if not any(name.ours.endswith("q_norm.weight") for name in config.names):
        concentration *= score_scale(config) ** 0.5
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = positions.to(device)[:, None] * frequencies.to(device)
    return angles.cos() * concentration, angles.sin() * concentration
