"""What the widgets are given: real tensors, tokens and routes, in plain data."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from simplellm.config import ModelConfig
from simplellm.rope import yarn_frequencies
from simplellm.tokenizer import Tokenizer


def merges(tokenizer: Tokenizer, pattern: str, text: str) -> dict[str, Any]:
    """For merge.js: all ordinary tokens by id, and the first text to show.

    ``pattern`` cuts a text into pieces. A token's bytes are a character each.
    """
    ids = range(len(tokenizer.tokens))
    tokens = [tokenizer.tokens[id].decode("latin-1") for id in ids]
    return {"tokens": tokens, "pattern": pattern, "text": text}


def block(weights: Tensor) -> dict[str, Any]:
    """For scale.js: 32 weights, and the magnitudes of e2m1 by their codes."""
    assert weights.shape == (32,)
    return {
        "weights": weights.float().tolist(),
        "magnitudes": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    }


def routers(
    expert_ids: Sequence[Sequence[Sequence[int]]],
    experts: int,
    expert_bytes: int,
    large: tuple[int, int, int],
    tokens: int = 256,
) -> dict[str, Any]:
    """For experts.js: recorded routes, and a router that chooses by chance.

    ``expert_ids`` [layers, T, k] are those of a model with so many ``experts`` of
    ``expert_bytes`` each. ``large`` are another model's experts, how many a token
    has, and their bytes; nobody has routed for it, so ``tokens`` draw at random.
    Both ends of the real one are shown, its first layer and its last.
    """
    rng = random.Random(0)
    number, top_k, size = large
    drawn = [rng.sample(range(number), top_k) for _ in range(tokens)]
    found = [
        {
            "name": f"{number} experts, by chance",
            "experts": number,
            "bytes": size,
            "routes": drawn,
        }
    ]
    for layer in (0, len(expert_ids) - 1):
        routes = [list(chosen) for chosen in expert_ids[layer]]
        rng.shuffle(routes)  # a batch is not the beginning of one text
        found.append(
            {
                "name": f"{experts} experts, the embedded model's layer {layer}",
                "experts": experts,
                "bytes": expert_bytes,
                "routes": routes,
            }
        )
    return {"routers": found}


def dial(config: ModelConfig, query: Tensor, key: Tensor) -> dict[str, Any]:
    """For rope.js: a query and a key [D] before their rotation, and all frequencies."""

    def turns(scaling: Any) -> Mapping[str, Any]:
        frequencies, concentration = yarn_frequencies(
            replace(config, rope_scaling=scaling)
        )
        return {"frequencies": frequencies.tolist(), "concentration": concentration}

    half = config.head_dim // 2
    return {
        "query": query.float().tolist(),
        "key": key.float().tolist(),
        "plain": turns(None),
        "yarn": turns(config.rope_scaling),
        "pairs": [0, 2, 4, 8, 12, 16, 20, half - 1],
    }
