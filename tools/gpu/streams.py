"""Many answers of a small model at once, as text: is Python the limit?

    python tools/gpu/streams.py
    python tools/gpu/streams.py --streams 256 --tokens 400 --json OUT

The shape is Qwen3-0.6B's, with random weights and the vocabulary of the embedded model,
whose tokenizer makes text of each token.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from records import argument_parser, header, save
from speeds import MODELS

from simplellm import LLM, EngineConfig, SamplingParams
from simplellm.checkpoint.folder import EMBEDDED

PROMPT = 32  # tokens


def measure(shape: dict[str, Any], streams: int, tokens: int, times: int) -> list[Any]:
    """Tokens a second, from the call to the last answer's text; each time."""
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    chance = random.Random(0)
    prompts = [chance.choices(range(256), k=PROMPT) for _ in range(streams)]
    config = EngineConfig(max_num_seqs=streams, max_model_len=PROMPT + tokens)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        shutil.copy(EMBEDDED / "tokenizer.json", folder)
        with LLM(folder, config, random_weights=True) as llm:
            llm.generate(prompts, SamplingParams(max_tokens=8, **greedy)).result()
            rates = []
            for _ in range(times):
                params = SamplingParams(max_tokens=tokens, **greedy)
                start = time.perf_counter()
                outputs = llm.generate(prompts, params).result()
                seconds = time.perf_counter() - start
                assert all(output.text for output in outputs)
                rates.append(streams * tokens / seconds)
    return rates


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--times", type=int, default=2)
    options = parser.parse_args()
    vocabulary = json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    shape = MODELS["Qwen3-0.6B"][1] | {"vocab_size": vocabulary}
    rates = measure(shape, options.streams, options.tokens, options.times)
    print(*(f"{rate:,.0f} tokens/s" for rate in rates), sep=", ")
    record = {"label": "many streams of a small model, as text", **header()}
    save(record | {"rows": [{"rates": rates}]}, options.json)


if __name__ == "__main__":
    main()
