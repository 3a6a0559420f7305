"""Tokens a second of several engine processes behind one front, a GPU each.

    python tools/gpu/replicas.py gpt-oss-20b --counts 1,2 --json OUT

Each engine gets as many requests at once, with distinct prompts of random tokens. The
front is that of `simplellm serve --replicas`, which chooses the engine and makes text
of all tokens. A rate is all generated tokens over the time from the first request to
the last token, the best of some turns.

Without a model it is the embedded one, to try the script itself.
"""

import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from records import argument_parser, header, save

from simplellm import LLM, EngineConfig
from simplellm.server.remote.client import load_remote
from simplellm.server.remote.replicas import Replicas
from simplellm.server.start import spawn_each

TURNS = 3


def opened(model: str | None, count: int, batch: int) -> LLM:
    """``count`` engines as one, each on the next GPU, if there are any."""
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=8192)
    engine = Replicas(spawn_each(count, gpu))
    weights = model is not None
    return LLM.of(
        load_remote(engine, model, config, device=gpu, random_weights=weights)
    )


def turn(llm: LLM, requests: int, prompt: int, answer: int) -> float:
    """Tokens a second."""
    vocabulary = range(llm.config.vocab_size)
    prompts = [random.choices(vocabulary, k=prompt) for _ in range(requests)]
    start = time.perf_counter()
    llm.generate(prompts, max_tokens=answer, temperature=0, ignore_eos=True).result()
    return requests * answer / (time.perf_counter() - start)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--counts", default="1,2", help="engines")
    parser.add_argument("--batch", type=int, default=256, help="requests of each")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--answer", type=int, default=512, help="tokens")
    options = parser.parse_args()
    record = {"label": "several engines behind one front", **header(), "rows": []}
    print(("{:>12}" * 4).format("engines", "requests", "tokens/s", "times one"))
    for count in map(int, options.counts.split(",")):
        requests = count * options.batch
        with opened(options.model, count, options.batch) as llm:
            shape = options.prompt, options.answer
            turn(llm, requests, options.prompt, 16)  # warms up
            rates = [turn(llm, requests, *shape) for _ in range(TURNS)]
            engine = llm.engine
            assert isinstance(engine, Replicas)
            given = [slot.num_submitted for slot in engine.slots]
        row = {"engines": count, "requests": requests, "rates": rates, "given": given}
        record["rows"].append(row)
        ratio = max(rates) / max(record["rows"][0]["rates"])
        print(f"{count:12}{requests:12}{max(rates):12.0f}{ratio:12.2f}", flush=True)
    save(record, options.json)


if __name__ == "__main__":
    main()
