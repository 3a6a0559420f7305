"""Prompts whose experts multiply in FP8 beside bfloat16: how fast, and how far apart.

    python tools/gpu/fp8_experts.py --json figures/12-fp8-experts.json
    python tools/gpu/fp8_experts.py --model gpt-oss-20b --json OUT

Speed is that of random weights in the model's shape, with steps of 8,192 tokens and
more. How far apart the two are is what the embedded model says, whose weights are real:
along answers that it gives in bfloat16, and of held-out problems.
"""

import gc
import sys
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "embedded"))

import torch
from compare import generate
from evaluate import ask, evaluate
from problems import Problem, evaluation_set
from records import argument_parser, header, save
from torch import Tensor

from simplellm import LLM, EngineConfig
from simplellm.model.kernels.experts import decodes_ahead

Kind = Literal["auto", "fp8"]
KINDS: tuple[Kind, ...] = ("auto", "fp8")
PREFILL = 32, 2048
FIRST = 2048  # tokens of a prompt that comes alone
PROBLEMS, TEXTS, GROUPS, EFFORT = 1000, 60, 6, "high"
CACHE = 8 * 10**9  # bytes


def speed(model: str, kind: Kind, budget: int) -> dict[str, Any]:
    """Tokens a second of many prompts, and the milliseconds that one takes."""
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        max_model_len=2 * FIRST,
        cache_bytes=CACHE,
        enable_prefix_caching=False,
        moe_activation_dtype=kind,
    )
    count, length = PREFILL
    with LLM(model, config, dtype="bfloat16", random_weights=True) as llm:
        generate(llm, count, length, 1)
        many = [generate(llm, count, length, 1, seed)[1] for seed in (1, 2, 3)]
        first = [generate(llm, 1, FIRST, 1, seed)[1] for seed in range(10)]
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    row = {"moe_activation_dtype": kind, "max_num_batched_tokens": budget}
    row["tokens_per_second"] = count * length / min(many)
    return row | {"first_token_ms": 1e3 * median(first)}


def embedded(
    kind: Kind, problems: list[Problem], texts: list[list[int]]
) -> tuple[dict[str, Any], list[Tensor]]:
    """What the embedded model solves, and its logits along ``texts``.

    If there are none, they become its answers to the first problems.
    """
    config = EngineConfig(cache_bytes=2**28, moe_activation_dtype=kind)
    with LLM(None, config, dtype="bfloat16") as llm:
        table, _ = evaluate(llm, problems, EFFORT)
        if not texts:
            prompts = [ask(one, EFFORT, llm.tokenizer, []) for one in problems[:TEXTS]]
            outputs = llm.generate(prompts, temperature=0, max_tokens=300).result()
            said = zip(prompts, (one.token_ids for one in outputs), strict=True)
            each = [[*prompt, *answer] for prompt, answer in said]
            # Several together, or an expert has too few tokens to be rounded.
            texts += [[*chain(*each[n::GROUPS])] for n in range(GROUPS)]
        logits = [llm.model.logits(text).float().cpu() for text in texts]
    right, of = (sum(row[key] for row in table.values()) for key in ("right", "of"))
    return {"moe_activation_dtype": kind, "right": right, "of": of}, logits


def distance(exact: list[Tensor], found: list[Tensor]) -> dict[str, float]:
    """KL in nats of the tokens that follow, and how often the likeliest is the same."""
    one, other = (torch.cat(rows).log_softmax(-1) for rows in (exact, found))
    apart = (one.exp() * (one - other)).sum(-1)
    same = (one.argmax(-1) == other.argmax(-1)).double().mean()
    mean_kl, worst_kl = apart.mean().item(), apart.max().item()
    found_same = {"same_argmax": same.item(), "tokens": len(apart)}
    return {"mean_kl": mean_kl, "worst_kl": worst_kl, **found_same}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--budgets", default="8192,16384", help="tokens of a step")
    options = parser.parse_args()
    record = {"label": "experts of prompts in bfloat16 and in FP8", **header()}
    record |= {"model": options.model, "decodes_ahead": decodes_ahead()}
    problems, texts = evaluation_set(PROBLEMS), list[list[int]]()
    both = [embedded(kind, problems, texts) for kind in KINDS]
    (before, exact), (after, found) = both
    record["embedded"] = [before, after | distance(exact, found)]
    for row in record["embedded"]:
        print(row, flush=True)
    rows = record["rows"] = []
    for budget in map(int, options.budgets.split(",")):
        for kind in KINDS:
            row = speed(options.model, kind, budget)
            rows.append(row)
            print(
                f"{kind:>6}, steps of {budget:6,}: {row['tokens_per_second']:9,.0f}"
                f" tokens/s, first token {row['first_token_ms']:6.1f} ms",
                flush=True,
            )
            save(record, options.json)


if __name__ == "__main__":
    main()
