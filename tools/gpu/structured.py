"""What schemas cost on a GPU: figures/b-structured-h200.json.

    python tools/gpu/structured.py --json OUT
    python tools/gpu/structured.py --model gpt-oss-20b --strings usual

Requests with a schema beside free ones, with random weights and a made-up vocabulary of
the model's size. Masked ones choose every token (min_tokens keeps forced ones away);
forced ones are appended. Random weights close no string before its limit, near which
masks are the dearest. So there are two kinds of strings: "endless" ones, greedily, and
"usual" ones, which a logit_bias of all requests ends after some twelve tokens.
"""

import math
import random
import re
import string
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))

from records import argument_parser, header, save

from simplellm import LLM, EngineConfig, SamplingParams
from simplellm.base.sampling_params import StructuredOutputs
from simplellm.sampling.masks import Masks
from simplellm.text.tokenizer import Tokenizer

BATCHES = (1, 64, 256)
LENGTH, TOKENS = 128, 256  # of a prompt, and of an answer
NAME = re.compile(r'"name": ?"([^"]*)"')
CONTROL = 1090  # the last ids, which are no text
STRINGS = {"usual": 400, "endless": 120}  # the longest a name may be, in characters
QUOTE, CLOSES = ord('"'), 12  # one token in so many is a quote where strings are usual


def schema(longest: int) -> dict[str, Any]:
    """Texts, numbers, names and lists, for longer than an answer lasts."""
    tag = {"type": "string", "maxLength": longest // 2}
    item: dict[str, Any] = {
        "name": {"type": "string", "maxLength": longest},
        "count": {"type": "integer", "minimum": 0, "maximum": 999_999},
        "kind": {"enum": ["fruit", "animal", "tool", "city"]},
        "ready": {"type": "boolean"},
        "tags": {"type": "array", "items": tag, "maxItems": 3},
    }
    closed = {"required": [*item], "additionalProperties": False}
    entry = {"type": "object", "properties": item, **closed}
    return {"type": "array", "minItems": 100, "items": entry}


def ways(strings: str, vocab_size: int) -> tuple[SamplingParams, ...]:
    """The parameters of free, masked and forced requests."""
    free = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    if strings == "usual":  # logits are alike, so that this is about the quote's share
        bias = {QUOTE: math.log(vocab_size / (CLOSES - 1))}
        free = replace(free, temperature=1, logit_bias=bias)
    outputs = StructuredOutputs(json=schema(STRINGS[strings]))
    forced = replace(free, ignore_eos=False, structured_outputs=outputs)
    return free, replace(forced, min_tokens=1), forced


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
    prepare = Masks.prepare

    def timed(masks: Masks, requests: Any) -> Any:
        start = time.perf_counter()
        result = prepare(masks, requests)
        times.append(time.perf_counter() - start)
        return result

    with mock.patch.object(Masks, "prepare", timed):
        yield times


def turn(llm: LLM, params: Sequence[SamplingParams]) -> dict[str, float]:
    """Run a request for each of ``params`` at once, with seeds of their own."""
    before, words = llm.stats().steps, llm.config.vocab_size * 9 // 10
    rng = random.Random(before)  # prompts that aren't cached
    prompts = [[rng.randrange(words) for _ in range(LENGTH)] for _ in params]
    seeded = [replace(one, seed=seed) for seed, one in enumerate(params)]
    with watched() as masks:
        start = time.perf_counter()
        outputs = llm.generate(prompts, seeded).result()
        seconds = time.perf_counter() - start
    assert all(len(output.token_ids) == TOKENS for output in outputs)
    gaps = [
        1e3 * (times.finished_time - times.first_token_time) / (TOKENS - 1)
        for output, one in zip(outputs, params, strict=True)
        if (times := output.metrics) and one.structured_outputs is None
    ]
    names = [len(name) for output in outputs for name in NAME.findall(output.text)]
    return {
        "tokens_per_second": len(params) * TOKENS / seconds,
        "steps": llm.stats().steps - before,
        "itl_free_ms": mean(gaps) if gaps else 0.0,
        "name_letters": mean(names) if names else 0.0,
        "masks_ms": 1e3 * median(masks),
        "masks_mean_ms": 1e3 * mean(masks),
        "masks_worst_ms": 1e3 * max(masks),
    }


def measure(llm: LLM, strings: str) -> Iterator[dict[str, Any]]:
    """All mixtures, in turns; the free ones run before and after the others."""
    free, masked, forced = ways(strings, llm.config.vocab_size)
    for params in (free, masked, forced):
        turn(llm, [params])
    for batch in BATCHES:
        counts = {"": batch, "1 ": 1, "half ": batch // 2} if batch > 1 else {"": 1}
        kinds = {"free": [free] * batch} | {
            name + kind: [free] * (batch - count) + [params] * count
            for name, count in counts.items()
            for kind, params in (("masked", masked), ("forced", forced))
        }
        for kind in (*kinds, "free"):
            figures = turn(llm, kinds[kind])
            print(f"{strings:8}{batch:4} {kind:12}", end="")
            print(*(f"{value:9.2f}" for value in figures.values()), sep="", flush=True)
            yield {"strings": strings, "batch": batch, "kind": kind, **figures}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--strings", choices=STRINGS, nargs="+", default=[*STRINGS])
    options = parser.parse_args()
    config = EngineConfig(max_num_seqs=max(BATCHES), max_model_len=1024)
    titles = "tok/s", "steps", "ITL", "name", "masks", "mean", "worst"
    with LLM(options.model, config, random_weights=True) as llm:
        tokenizer = made_up(llm.config.vocab_size)
        llm.input_processor = replace(
            llm.input_processor, tokenizer=tokenizer, compiler=None
        )
        print(f"{'':25}", *(f"{title:>9}" for title in titles), sep="")
        rows = [row for strings in options.strings for row in measure(llm, strings)]
    record = {"model": options.model, "tokens": [LENGTH, TOKENS], "rows": rows}
    save(header("llguidance") | record, options.json)


if __name__ == "__main__":
    main()
