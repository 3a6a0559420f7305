"""A long prefix that comes back from the host's memory, against computing it.

    python tools/gpu/host_pages.py
    python tools/gpu/host_pages.py --models gpt-oss-120b --tokens 32000 --json OUT

Random weights. The cache has room for one prompt, or for two where there are sliding
layers, and three take turns, so that each was evicted when it comes again. The time is
that of a request for one token, of prompts that are new and that were computed before.
A prompt has one token after those: the last one is computed in any case.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from compare import generate
from records import argument_parser, header, save
from speeds import MODELS

from simplellm import LLM, EngineConfig
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.model.machine import find_device, find_dtype
from simplellm.model.memory import page_bytes

PROMPTS = 3  # which take turns
PAGE_SIZE = 64


def measure(model: str | Mapping[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    """A row of the table; a ``model`` is a name, or what its config.json says."""
    with ExitStack() as stack:
        if not isinstance(model, str):
            place = stack.enter_context(tempfile.TemporaryDirectory())
            (Path(place) / "config.json").write_text(json.dumps(model))
            model = place
        pages, each = sizes(model, tokens)
        config = EngineConfig(
            max_num_seqs=8,
            max_model_len=tokens + 2,
            page_size=PAGE_SIZE,
            num_pages=pages,
            cpu_cache_bytes=2 * PROMPTS * pages * each,
        )
        llm = stack.enter_context(LLM(model, config, random_weights=True))
        # Kernels are compiled, and memory is had.
        generate(llm, 1, tokens + 1, 1, seed=PROMPTS)
        found: list[float] = []  # ms, of all prompts and then of all again
        for _ in range(1 + rounds):
            before = llm.stats().loaded_tokens
            for seed in range(PROMPTS):
                again = len(found) >= PROMPTS
                outputs, seconds = generate(llm, 1, tokens + 1, 1, seed=seed)
                cached = outputs[0].num_cached_tokens
                whole = tokens // PAGE_SIZE * PAGE_SIZE
                if cached != (whole if again else 0):
                    raise RuntimeError(f"{cached} of {whole} tokens were cached")
                found.append(1e3 * seconds)
            loaded = llm.stats().loaded_tokens - before
        new, back = median(found[:PROMPTS]), median(found[PROMPTS:])
    return {
        "tokens": tokens,
        "loaded_tokens": loaded // PROMPTS,  # of a prompt, in the last round
        "computed_ms": new,
        "back_ms": back,
        "share": back / new,
    }


def sizes(model: str, tokens: int) -> tuple[int, int]:
    """Pages that any prompt finds room in, and the bytes of each."""
    device = find_device(None)
    dtype = find_dtype(None, device)
    shape = open_weights(model, dtype, device, True, None).config
    pages = len(shape.windows) * (-(-tokens // PAGE_SIZE) + 2)
    return pages, page_bytes(shape, PAGE_SIZE, dtype.itemsize)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default="gpt-oss-120b,Qwen3-8B")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    print(f"{'model':16}{'computed':>12}{'back':>12}{'share':>8}")
    for name in options.models.split(","):
        model = MODELS[name][1] if name in MODELS else name
        row = measure(model, options.tokens, options.rounds)
        rows.append({"model": name, **row})
        new, back, share = row["computed_ms"], row["back_ms"], row["share"]
        print(f"{name:16}{new:9.1f} ms{back:9.1f} ms{share:8.1%}", flush=True)
    record = {"label": "a prefix that comes back from the host's memory", **header()}
    save(record | {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
