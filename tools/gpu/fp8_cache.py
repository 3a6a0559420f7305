"""Decodes of long contexts with keys and values in the model's dtype and in FP8.

    python tools/gpu/fp8_cache.py
    python tools/gpu/fp8_cache.py --layers 6 --batch 64 --context 16384 --json OUT

Some layers of Qwen3-8B's shape with random weights; the time is that of a step that
gives each request a token, with all of their contexts in the cache.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.append(str(Path(__file__).parents[1]))

from compare import full_steps, generate
from records import argument_parser, header, save
from speeds import MODELS

from simplellm import LLM, EngineConfig

KINDS: tuple[Literal["auto", "fp8"], ...] = ("auto", "fp8")
NEW = 600  # tokens of an answer: all decode once the last prompt is computed
VOCABULARY = 32_000


def measure(
    shape: Mapping[str, Any], kind: Literal["auto", "fp8"], batch: int, context: int
) -> dict[str, Any]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=max(8192, batch),
            max_model_len=context + NEW + 1,
            enable_prefix_caching=False,
            num_pages=batch * (-(-(context + NEW) // 64) + 1),
            page_size=64,
            kv_cache_dtype=kind,
        )
        with LLM(folder, config, random_weights=True) as llm:
            generate(llm, batch, context, NEW)
            steps = full_steps(llm, batch)
    return {"kv_cache_dtype": kind, "step_ms": 1e3 * median(steps), "steps": len(steps)}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=16_384)
    options = parser.parse_args()
    shape = MODELS["Qwen3-8B"][1] | {"num_hidden_layers": options.layers}
    shape |= {"vocab_size": VOCABULARY}
    rows = []
    for kind in KINDS:
        rows.append(measure(shape, kind, options.batch, options.context))
        print(f"{kind:>6}{rows[-1]['step_ms']:9.2f} ms", flush=True)
    record = {"label": "decodes of long contexts, by kv_cache_dtype", **header()}
    save(record | {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
