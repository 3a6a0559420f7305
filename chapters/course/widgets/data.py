"""What the widgets are given: real tensors, tokens and routes, in plain data."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.mxfp4 import BLOCK, VALUES
from simplellm.model.rope import yarn_frequencies


def merge_table(
    name: str, ranks: Mapping[bytes, int], pattern: str, text: str
) -> dict[str, Any]:
    """For merge.js, which takes a list of these: a vocabulary and the text to begin.

    ``ranks`` are the ids of the tokens, from 0 on; ``pattern`` cuts a text into pieces.
    """
    tokens = sorted(ranks, key=lambda token: ranks[token])
    assert [ranks[token] for token in tokens] == [*range(len(tokens))]
    in_json = [token.decode("latin-1") for token in tokens]  # a character for each byte
    return {"name": name, "tokens": in_json, "pattern": pattern, "text": text}


def weight_block(weights: Tensor) -> dict[str, Any]:
    """For scale.js: 32 weights, and the magnitudes of e2m1 by their codes."""
    assert weights.shape == (BLOCK,)
    return {
        "weights": weights.float().tolist(),
        "magnitudes": list(VALUES[:8]),
    }


def batch_routers(
    expert_ids: Sequence[Sequence[Sequence[int]]],
    config: ModelConfig,
    large: ModelConfig,
    expert_bytes: Callable[[ModelConfig], int],
    tokens: int = 256,
) -> dict[str, Any]:
    """For experts.js: recorded routes, and a router that chooses by chance.

    ``expert_ids`` [layers, T, k] are those of a model of this ``config``; its first
    layer and its last are shown. Nobody has routed for the ``large`` one, so that
    ``tokens`` tokens draw their experts.
    """
    rng = random.Random(1)
    number, top_k = large.num_local_experts, large.num_experts_per_tok
    drawn = [rng.sample(range(number), top_k) for _ in range(tokens)]
    found = [router(f"{number} experts, by chance", large, expert_bytes, drawn)]
    for layer in (0, len(expert_ids) - 1):
        routes = [list(chosen) for chosen in expert_ids[layer]]
        rng.shuffle(routes)  # a batch is not the beginning of one text
        name = f"{config.num_local_experts} experts, real, layer {layer}"
        found.append(router(name, config, expert_bytes, routes))
    return {"routers": found}


def router(
    name: str,
    config: ModelConfig,
    expert_bytes: Callable[[ModelConfig], int],
    routes: list[list[int]],
) -> dict[str, Any]:
    """What experts.js knows of one router."""
    experts, size = config.num_local_experts, expert_bytes(config)
    return {"name": name, "experts": experts, "bytes": size, "routes": routes}


def rope_dial(config: ModelConfig) -> dict[str, Any]:
    """For rope.js: a query and a key of ones, which show position alone.

    And the frequencies of all pairs, without and with the config's YaRN.
    """

    def turns(scaling: Any) -> dict[str, Any]:
        frequencies, concentration = yarn_frequencies(
            replace(config, rope_scaling=scaling)
        )
        return {"frequencies": frequencies.tolist(), "concentration": concentration}

    ones = [1.0] * config.head_dim
    last = config.head_dim // 2 - 1
    return {
        "query": ones,
        "key": ones,
        "plain": turns(None),
        "yarn": turns(config.rope_scaling),
        "pairs": [0, 2, 4, 8, 12, 16, 20, last],
    }
