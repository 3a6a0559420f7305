"""What drafts bring: two texts written with and without, and what was to be expected.

One request at a time, greedily. A new answer has little that its prompt says; the same
question, after its own answer, has it all. What to expect follows from how many drafts
the steps checked, how many were right, and what a step of so many tokens costs.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from simplellm.apps.report import Headings, circumstances
from simplellm.base.config import EngineConfig
from simplellm.engine.draft_budget import StepCosts
from simplellm.engine.stats import Stats
from simplellm.engine.step_times import time_steps
from simplellm.model.machine import find_device

QUESTION = "Add 4817 and 3629 digit by digit.\nones:"
MAX_TOKENS = 128
RUNS = 4  # of each text, of which the fastest counts
MOST_ROWS = 64  # tokens of a step whose cost is measured

ROWS: Headings = {
    "text": ("text", "s"),
    "tokens": ("tokens", "d"),
    "steps": ("steps", "d"),
    "acceptance_length": ("accepted\nlength", ".2f"),  # the verified token included
    "plain_step_ms": ("step ms\nwithout", ".2f"),
    "step_ms": ("step ms\nwith", ".2f"),
    "plain": ("tok/s\nwithout", ",.0f"),
    "predicted": ("tok/s\npredicted", ",.0f"),
    "measured": ("tok/s\nmeasured", ",.0f"),
}

NOTE = """
Accepted length: how many tokens a step gives that checks drafts.
Predicted: the speed by what steps of so many tokens cost, each timed by itself.
"""


def count_draft_steps(before: Stats, after: Stats) -> list[int]:
    """How many steps between the two checked at least 1, 2, ... drafts of a request."""
    counts = [
        count - before.draft_tokens.get(position, 0)
        for position, count in after.draft_tokens.items()
    ]
    return [count for count in counts if count]


def expected_seconds(steps: int, drafts: list[int], costs: StepCosts) -> float:
    """The time of one request's ``steps``; ``drafts``: how many checked 1, 2, ..."""
    exactly = [n - more for n, more in pairwise([steps, *drafts, 0])]
    return sum(n * costs(1 + checked) for checked, n in enumerate(exactly))


def time_prompt(llm: Any, prompt: str) -> dict[str, Any]:
    """Generate from a prompt: its text, its decodes, and how long each took."""
    before = llm.stats()
    (output,) = llm.generate([prompt], temperature=0, max_tokens=MAX_TOKENS).result()
    after, times = llm.stats(), output.metrics
    # The first token comes of the prompt's own step.
    steps, tokens = after.steps - before.steps - 1, len(output.token_ids) - 1
    seconds = times.finished_time - times.first_token_time
    return {
        "answer": output.text,
        "tokens": tokens,
        "steps": steps,
        "drafted": count_draft_steps(before, after),
        "right": sum(times.accepted_tokens),
        "step_ms": 1e3 * seconds / max(1, steps),
        "measured": tokens / seconds,
    }


def fastest(llm: Any, prompt: str) -> dict[str, Any]:
    """The fastest of some runs: nothing else that the machine does speeds one up."""
    return max(
        (time_prompt(llm, prompt) for _ in range(RUNS)), key=lambda r: r["measured"]
    )


def compare_row(
    name: str, plain: Mapping[str, Any], run: Mapping[str, Any], costs: StepCosts
) -> dict[str, Any]:
    """A row: a text without drafts, with them, and what was to be expected."""
    checks = run["drafted"][0] if run["drafted"] else 0
    seconds = expected_seconds(run["steps"], run["drafted"], costs)
    return {
        **{key: value for key, value in run.items() if key != "answer"},
        "text": name,
        "same": run["answer"] == plain["answer"],
        "acceptance_length": 1 + run["right"] / checks if checks else 1.0,
        "plain_step_ms": plain["step_ms"],
        "plain": plain["measured"],
        # By the step that is measured without drafts, whatever else it has to do.
        "predicted": run["tokens"] * costs(1) / seconds * 1e3 / plain["step_ms"],
    }


def measure_speculation(
    start: Any,
    model: str | None,
    speculative: Any,
    num_speculative_tokens: int | None,
    *,
    random_weights: bool = False,
    device: str | None = None,
    command: str = "",
) -> dict[str, Any]:
    """The record of a model with drafts and without. ``start`` is the class `LLM`."""
    target = find_device(device)
    plain = EngineConfig(max_num_seqs=MOST_ROWS)
    drafting = replace(
        plain, speculative=speculative, num_speculative_tokens=num_speculative_tokens
    )
    options: dict[str, Any] = {"random_weights": random_weights, "device": target}
    with start(model, plain, **options) as llm:
        costs = time_steps(llm.engine.runner)  # before there is anything in the cache
        answer = fastest(llm, QUESTION)
        texts = {"new": QUESTION}
        texts["copied"] = f"{QUESTION}{answer['answer']}\n\n{QUESTION}"
        without = {"new": answer, "copied": fastest(llm, texts["copied"])}
        backend = llm.backend_reason
    with start(model, drafting, **options) as llm:
        runs = {name: fastest(llm, text) for name, text in texts.items()}
    rows = [
        compare_row(name, without[name], run, StepCosts(costs))
        for name, run in runs.items()
    ]
    return circumstances(model, target, command) | {
        "weights": "random" if random_weights else "checkpoint",
        "backend": backend,
        "config": asdict(drafting),
        "step_ms": {str(size): 1e3 * seconds for size, seconds in costs.items()},
        "rows": rows,
    }
