"""Record which experts the embedded model's routers choose: figures/04-routing.json.

Two texts go through the whole model: the answer it gives to a question, token by token
for the picture, and the glossary, for how many distinct experts a batch touches.

    python tools/record_routing.py
"""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simplellm import LLM
from simplellm.model import TORCH, load_model
from simplellm.moe import route

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is 47 + 85?"
SHOWN = 40  # tokens of question and answer in the picture
BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRAWS = 100  # batches drawn of each size
PIECE = 500  # tokens of the glossary that see each other


class Routes:
    """Runs texts and keeps what the routers said."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.model = load_model(backend=replace(TORCH, route=self.route))

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        self.seen.append(route(x, weight, bias, top_k))
        return self.seen[-1]

    def of(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Expert ids and weights, [layers, T, k] each."""
        self.seen.clear()
        self.model.logits(token_ids)
        ids, weights = zip(*self.seen, strict=True)
        return torch.stack(ids).cpu(), torch.stack(weights).cpu()


def mean_distinct(expert_ids: Tensor, batch: int, generator: torch.Generator) -> float:
    """Distinct experts a layer in batches drawn from expert_ids [layers, T, k]."""
    total = 0
    for _ in range(DRAWS):
        tokens = torch.randperm(expert_ids.shape[1], generator=generator)[:batch]
        total += sum(len(layer[tokens].unique()) for layer in expert_ids)
    return total / (DRAWS * len(expert_ids))


def record() -> dict[str, Any]:
    routes = Routes()
    with LLM() as llm:
        tokenizer = llm.tokenizer
        output = llm.generate(QUESTION, max_tokens=SHOWN, temperature=0).result()[0]
    shown = [*tokenizer.encode(QUESTION), *output.token_ids][:SHOWN]
    expert_ids, weights = routes.of(shown)

    glossary = (ROOT / "chapters/glossary.md").read_text(encoding="utf-8")
    tokens = tokenizer.encode(glossary)
    pieces = [tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE)]
    read = torch.cat([routes.of(piece)[0] for piece in pieces], dim=1)  # [layers, T, k]
    experts = routes.model.config.num_local_experts
    generator = torch.Generator().manual_seed(0)
    return {
        "date": str(date.today()),
        "command": "python tools/record_routing.py",
        "tokens": [tokenizer.decode([token]) for token in shown],
        "expert_ids": expert_ids.tolist(),
        "weights": [
            [[round(weight, 3) for weight in token] for token in layer]
            for layer in weights.tolist()
        ],
        "glossary_counts": [
            layer.flatten().bincount(minlength=experts).tolist() for layer in read
        ],
        "distinct": {n: mean_distinct(read, n, generator) for n in BATCHES},
    }


if __name__ == "__main__":
    path = ROOT / "figures/04-routing.json"
    path.write_text(json.dumps(record()) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")
