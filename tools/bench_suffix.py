"""How fast one request is with drafts from its own text, times without, on a CPU.

    python tools/bench_suffix.py --json figures/d-suffix.json

Two kinds of text: "copied", an answer of the embedded model that stands in its prompt
already, word for word; and "random", tokens that are drawn at temperature 1 after a
prompt of random ones, in which nothing repeats but by chance. Both engines answer each
prompt, one after the other. How many drafts are checked is the engine's choice.
"""

import json
import random
from typing import Any

import torch
from records import argument_parser, header, save
from train_head import in_turns

from simplellm import LLM, __version__

SUM = "Add {} and {} digit by digit.\nones:"
OPTIONS: dict[str, Any] = {"device": "cpu", "cache_bytes": 2**30}


def copied(llm: LLM, rng: random.Random, count: int, tokens: int) -> list[list[int]]:
    """Questions, each with its answer and asked a second time."""
    numbers = [rng.sample(range(100_000, 10_000_000), 2) for _ in range(count)]
    questions = [SUM.format(*pair) for pair in numbers]
    outputs = llm.generate(questions, temperature=0, max_tokens=tokens).result()
    pairs = zip(questions, outputs, strict=True)
    encode = llm.tokenizer.encode
    return [encode(f"{text}{output.text}\n\n{text}") for text, output in pairs]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--texts", type=int, default=30, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    args = parser.parse_args()
    rng, rows = random.Random(0), dict[str, Any]()
    with LLM(**OPTIONS) as plain, LLM(**OPTIONS, speculative="suffix") as drafting:
        engines = {"without": plain, "with": drafting}
        vocab, count = plain.config.vocab_size, args.texts
        texts = {
            "copied": copied(plain, rng, count, args.tokens),
            "random": [rng.choices(range(vocab), k=100) for _ in range(count)],
        }
        ways: dict[str, dict[str, Any]] = {
            "copied": {"temperature": 0},
            "random": {"temperature": 1, "seed": 0, "ignore_eos": True},
        }
        for kind, prompts in texts.items():
            before = drafting.stats()
            rates = in_turns(engines, prompts, max_tokens=args.tokens, **ways[kind])
            after = drafting.stats()
            right = sum(after.accepted_tokens.values())
            right -= sum(before.accepted_tokens.values())
            checks = after.drafts - before.drafts
            rows[kind] = {
                "tokens_per_second": rates,
                "times": rates["with"] / rates["without"],
                "checks": checks,
                "acceptance_length": 1 + right / max(1, checks),
            }
        backend = plain.backend_reason
    record = header() | {"simplellm": __version__, "backend": backend}
    record |= {"threads": torch.get_num_threads(), "texts": count, **rows}
    print(json.dumps(record, indent=1))
    save(record, args.json)


if __name__ == "__main__":
    main()
