"""Record what six requests compute in each step: figures/09-schedule.json.

    python tools/record_schedule.py        some seconds

Chapter 9 draws it. Nothing is timed in it, so a test plays it again.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from records import ROOT

from simplellm.api.load import build_engine, load_model
from simplellm.base.config import EngineConfig
from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.engine.runner import Flight
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.model.model import Model

RECORD = ROOT / "figures/09-schedule.json"
REQUESTS = [  # steps before it comes, tokens of its prompt, tokens to generate
    (0, 24, 46),
    (0, 20, 10),
    (0, 30, 16),
    (5, 150, 8),
    (14, 20, 22),
    (20, 24, 8),
]
COMMON = EngineConfig(page_size=4, max_num_batched_tokens=40, prefill_chunk=32)
ENGINES = {
    "static": replace(COMMON, max_num_seqs=3, num_pages=400, continuous=False),
    "continuous": replace(COMMON, max_num_seqs=5, num_pages=128),
}


def play(model: Model, config: EngineConfig) -> list[dict[str, Any]]:
    """Of each request when it came and its works: step, kind, number of tokens."""
    engine = build_engine(model, config.resolved("cpu"))
    launch, step, submitted = engine.runner.launch, 0, 0
    rows: list[dict[str, Any]] = [
        {"arrival": each[0], "works": []} for each in REQUESTS
    ]
    reached = [0] * len(REQUESTS)  # positions that were computed at some time

    def noted(scheduled: Sequence[ScheduledChunk]) -> Flight:
        for request, start, length, _ in scheduled:
            kind = "decode" if length == 1 else "prompt"
            if start < reached[request.request_id]:
                kind = "again"
            reached[request.request_id] = max(
                reached[request.request_id], start + length
            )
            rows[request.request_id]["works"].append([step, kind, length])
        return launch(scheduled)

    with patch.object(engine.runner, "launch", noted):
        while submitted < len(REQUESTS) or engine.scheduler.requests:
            while submitted < len(REQUESTS) and REQUESTS[submitted][0] <= step:
                _, length, most = REQUESTS[submitted]
                prompt = [(7 * submitted + n) % 900 for n in range(length)]
                params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
                engine.submit([Request(prompt, most, params, request_id=submitted)])
                submitted += 1
            engine.step()
            step += 1
    return rows


def schedule() -> dict[str, list[dict[str, Any]]]:
    """The rows of each engine."""
    model = load_model(device="cpu")
    return {name: play(model, config) for name, config in ENGINES.items()}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(schedule()) + "\n", encoding="utf-8")
