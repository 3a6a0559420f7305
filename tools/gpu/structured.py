"""What schemas cost on a GPU: figures/b-structured-h200.json.

    python tools/gpu/structured.py --json OUT
    python tools/gpu/structured.py --model gpt-oss-20b

Requests with a schema beside free ones, with random weights, greedily, and a made-up
vocabulary of the model's size. Masked ones choose every token (min_tokens keeps forced
ones away); forced ones are appended. The free ones run before and after the others.
"""

import argparse
import json
import random
import shlex
import string
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import llguidance
import torch
import triton

from simplellm import LLM, EngineConfig, SamplingParams
from simplellm.masks import Masks
from simplellm.sampling_params import StructuredOutputs
from simplellm.tokenizer import Tokenizer

BATCHES = (1, 64, 256)
LENGTH, TOKENS = 128, 256  # of a prompt, and of an answer
CONTROL = 1090  # the last ids, which are no text
# Texts, numbers, names and lists, for longer than an answer lasts. Random weights close
# no string before its limit, and within ten characters of it masks are the dearest.
ITEM: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 120},
    "count": {"type": "integer", "minimum": 0, "maximum": 999_999},
    "kind": {"enum": ["fruit", "animal", "tool", "city"]},
    "ready": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 60}},
}
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": ITEM | {"tags": ITEM["tags"] | {"maxItems": 3}},
        "required": [*ITEM],
        "additionalProperties": False,
    },
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
FREE = SamplingParams(**GREEDY, ignore_eos=True)
FORCED = SamplingParams(**GREEDY, structured_outputs=StructuredOutputs(json=SCHEMA))
MASKED = replace(FORCED, min_tokens=1)


def made_up(size: int) -> Tokenizer:
    """All bytes, numbers of up to three digits, and words, some with JSON's marks."""
    rng = random.Random(0)
    ranks = {bytes([byte]): byte for byte in range(256)}
    numbers = (f"{n:0{wide}}".encode() for wide in (2, 3) for n in range(10**wide))
    for number in numbers:
        ranks[number] = len(ranks)
    for mark in (b'":', b'",', b', "', b'": "', b'": ', b'{"', b'"}', b'["', b'"]'):
        ranks[mark] = len(ranks)
    while len(ranks) < size - CONTROL:
        letters = rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))
        word = rng.choice(["", " "]) + "".join(letters)
        ranks.setdefault(word.encode(), len(ranks))
    special = {f"<|reserved_{id}|>": id for id in range(size - CONTROL, size)}
    return Tokenizer.from_ranks(ranks, r" ?[a-z]+|\d{1,3}|[^a-z\d ]+| ", special)


@contextmanager
def watched() -> Iterator[list[float]]:
    """Seconds that the engine's thread spends on masks, a step each."""
    times: list[float] = []
    arrange = Masks.arrange

    def timed(masks: Masks, requests: Any) -> Any:
        start = time.perf_counter()
        found = arrange(masks, requests)
        times.append(time.perf_counter() - start)
        return found

    with mock.patch.object(Masks, "arrange", timed):
        yield times


def turn(llm: LLM, params: Sequence[SamplingParams]) -> dict[str, float]:
    """Run a request for each of ``params`` at once."""
    rng = random.Random(len(params))
    words = llm.config.vocab_size * 9 // 10
    prompts = [[rng.randrange(words) for _ in range(LENGTH)] for _ in params]
    before = llm.stats().steps
    with watched() as masks:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params).result()
        seconds = time.perf_counter() - start
    assert all(len(output.token_ids) == TOKENS for output in outputs)
    gaps = [
        1e3 * (times.finished_time - times.first_token_time) / (TOKENS - 1)
        for output, one in zip(outputs, params, strict=True)
        if (times := output.metrics) and one is FREE
    ]
    return {
        "tokens_per_second": len(params) * TOKENS / seconds,
        "steps": llm.stats().steps - before,
        "itl_free_ms": mean(gaps) if gaps else 0.0,
        "masks_ms": 1e3 * median(masks),
        "masks_worst_ms": 1e3 * max(masks),
    }


def measure(llm: LLM, rows: list[dict[str, Any]]) -> None:
    """All mixtures, in turns."""
    for batch in BATCHES:
        half = batch // 2
        kinds = {
            "free": [FREE] * batch,
            "masked": [MASKED] * batch,
            "forced": [FORCED] * batch,
            "1 masked": [FREE] * (batch - 1) + [MASKED],
            "1 forced": [FREE] * (batch - 1) + [FORCED],
            "half masked": [FREE] * half + [MASKED] * half,
            "half forced": [FREE] * half + [FORCED] * half,
        }
        if batch == 1:
            kinds = {name: kinds[name] for name in ("free", "masked", "forced")}
        for kind, params in [*kinds.items()] * (1 + (batch == 64)):
            found = turn(llm, params)
            rows.append({"batch": batch, "kind": kind, **found})
            print(f"{batch:4} {kind:12}", end="")
            print(*(f"{value:10.2f}" for value in found.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = EngineConfig(max_num_seqs=max(BATCHES), max_model_len=1024)
    rows: list[dict[str, Any]] = []
    with LLM(options.model, config, random_weights=True) as llm:
        tokenizer = made_up(llm.config.vocab_size)
        llm.door = replace(llm.door, tokenizer=tokenizer)
        for params in (FREE, FORCED, MASKED):
            turn(llm, [params])
        print(f"{'':16}", *(f"{n:>10}" for n in ("tok/s", "steps", "ITL", "masks", "")))
        measure(llm, rows)
    record = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "llguidance": llguidance.__version__,
        },
        "command": shlex.join(["python", "tools/gpu/structured.py", *sys.argv[1:]]),
        "model": options.model,
        "tokens": [LENGTH, TOKENS],
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
