"""Agents with long histories: what each of them gets, and all together.

    python tools/gpu/agents.py --json figures/12-agents.json
    python tools/gpu/agents.py --model gpt-oss-120b --users 32 --kv-cache-dtype auto
    python tools/gpu/agents.py --length 2.72       with drafts of an EAGLE-3 head

The load is that of `simplellm bench --load agent-long`, in token ids: each user begins
with a long prompt, and each later one is the one before, its answer and a tool's
result. Users send the next prompt as soon as they have an answer. The weights are
random. What counts begins when everybody has the first answer, and ends with the first
who has all. Drafts are right as in speculation.py: synthetic acceptance, such that a
step that checks three gives --length tokens in the mean.
"""

import json
import random
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from records import argument_parser, header, save
from speculation import Coin, chance_of, write_head

from simplellm import LLM, EngineConfig, RequestOutput, SamplingParams
from simplellm.apps.workloads import WORKLOADS
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.model.machine import find_device, find_dtype

LOAD = WORKLOADS["agent-long"]


def converse(
    llm: LLM, user: int, lengths: tuple[int, int, int], turns: int
) -> list[RequestOutput]:
    """The answers of one user; ``lengths`` of the first prompt, a result, an answer."""
    first, result, answer = lengths
    chance = random.Random(user)
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    ids = range(llm.config.vocab_size)
    history = chance.choices(ids, k=first)
    outputs = []
    for _ in range(turns):
        (output,) = llm.generate([history], params).result()
        outputs.append(output)
        history = [*history, *output.token_ids, *chance.choices(ids, k=result)]
    return outputs


def moments(output: RequestOutput) -> tuple[float, float, float]:
    """When a request came, and when its first and its last token did, in seconds."""
    times = output.metrics
    assert times and times.first_token_time and times.finished_time
    return times.arrival_time, times.first_token_time, times.finished_time


def within(output: RequestOutput, start: float, end: float) -> float:
    """How many of an answer's tokens came between two moments, if evenly."""
    _, first, last = moments(output)
    part = max(0.0, min(end, last) - max(start, first)) / (last - first)
    return part * len(output.token_ids)


def summarize(users: list[list[RequestOutput]]) -> dict[str, Any]:
    """The row of all answers, by user and turn."""
    start = max(moments(outputs[0])[2] for outputs in users)
    end = min(moments(outputs[-1])[2] for outputs in users)
    count = sum(within(output, start, end) for outputs in users for output in outputs)
    later = [output for outputs in users for output in outputs[1:]]
    waits, rates = [], []
    for output in later:
        came, first, last = moments(output)
        waits.append(first - came)
        rates.append((len(output.token_ids) - 1) / (last - first))
    prompts = [len(output.prompt_token_ids) for output in later]
    return {
        "users": len(users),
        "prompt_tokens": mean(prompts),
        "cached": sum(output.num_cached_tokens for output in later) / sum(prompts),
        "seconds": end - start,
        "tokens_per_second": count / (end - start),
        "tokens_per_second_of_a_user": median(rates),
        "first_token_s": median(waits),
    }


def measure(
    model: str | Mapping[str, Any],
    users: int,
    lengths: tuple[int, int, int],
    turns: int,
    accepted: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The row of a ``model``, a name or what its config.json says.

    ``accepted``: how many tokens a step with three drafts gives; None: nobody drafts.
    """
    first, result, answer = lengths
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not isinstance(model, str):
            (place / "config.json").write_text(json.dumps(model))
            model = str(place)
        if accepted is not None:
            device = find_device(None)
            weights = model, find_dtype(None, device), device, True, None, False
            write_head(place / "head", open_weights(*weights).config)
            options["speculative"] = str(place / "head")
            coin = Coin(device)
            coin.set_chance(chance_of(accepted))
            stack.enter_context(coin.install())
        config = EngineConfig(
            max_num_seqs=users,
            max_model_len=first + turns * (result + answer),
            **options,
        )
        llm = stack.enter_context(LLM(model, config, random_weights=True))
        threads = stack.enter_context(ThreadPoolExecutor(users))
        asked = [
            threads.submit(converse, llm, user, lengths, turns) for user in range(users)
        ]
        row = summarize([one.result() for one in asked])
        stats = llm.stats()
        if accepted is not None:
            row["drafts"] = sum(stats.draft_tokens.values())
            row["accepted_drafts"] = sum(stats.accepted_tokens.values())
        return row | {"preemptions": stats.preemptions}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=LOAD.turns)
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--moe-activation-dtype", default="auto")
    parser.add_argument("--length", type=float, help="tokens of a step with drafts")
    options = parser.parse_args()
    assert LOAD.first is not None
    lengths = LOAD.first, LOAD.prompt[0], LOAD.output[0]
    dtypes = {
        "kv_cache_dtype": options.kv_cache_dtype,
        "moe_activation_dtype": options.moe_activation_dtype,
    }
    how = options.users, lengths, options.turns, options.length
    row = measure(options.model, *how, **dtypes)
    for name, value in row.items():
        print(f"{name:30}{value:12,.2f}")
    about = {"label": "agents with long histories", "model": options.model}
    save(about | header() | dtypes | {"rows": [row]}, options.json)


if __name__ == "__main__":
    main()
