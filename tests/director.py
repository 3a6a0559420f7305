"""A model that plays a script: it calls tools one by one, then tells what they gave.

Nothing is computed, so that the long prompts of agents cost little. All else is real:
the server, how prompts are rendered and answers read, the scheduler and the cache.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import TOKENIZER, favor
from serving import Served, serving

from simplellm import LLM, EngineConfig
from simplellm.base.request import Request
from simplellm.engine.scheduler import ScheduledChunk

ROOMY = EngineConfig(
    page_size=64,
    num_pages=2000,  # 128,000 tokens: an agent's instructions fill a third
    max_num_seqs=8,
    max_num_batched_tokens=4096,
    prefill_chunk=4096,
)
THOUGHT = "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant"
RESULT = re.compile(
    r"<\|start\|>functions\.(.+?)<\|message\|>(.*?)<\|end\|>", re.DOTALL
)
PRODUCTS = "3995", "408"  # of 47 * 85 and of 12 * 34
ANSWER = "The products are {} and {}."


class Step(NamedTuple):
    """A call of a tool."""

    tool: str
    arguments: dict[str, Any]

    @property
    def script(self) -> str:
        return (
            f"{THOUGHT}<|channel|>commentary to=functions.{self.tool} "
            f"<|constrain|>json<|message|>{json.dumps(self.arguments)}<|call|>"
        )


class Director:
    """What the model says: of the prompts, only how many results they hold counts."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.scripts: dict[int, list[int]] = {}  # of requests, by id

    def script(self, prompt: str) -> str:
        """The next call; at the end an answer that only the results can give."""
        results = [found[2] for found in RESULT.finditer(prompt)]
        if f"type {self.steps[0].tool} = " not in prompt:  # asked for a title, perhaps
            text = "Two products"
        elif len(results) < len(self.steps):
            return self.steps[len(results)].script
        else:
            found = [p for p, r in zip(PRODUCTS, results, strict=False) if p in r]
            text = ANSWER.format(*found) if len(found) == 2 else f"Found: {results}"
        return f"{THOUGHT}<|channel|>final<|message|>{text}<|return|>"

    def token(self, request: Request) -> int:
        if request.request_id not in self.scripts:
            prompt = TOKENIZER.decode(request.tokens[: request.num_prompt])
            script = self.script(prompt)
            self.scripts[request.request_id] = TOKENIZER.encode(script, special=True)
        script_ids = self.scripts[request.request_id]
        return script_ids[min(request.num_output, len(script_ids) - 1)]


@contextmanager
def directed(folder: Path, steps: Sequence[Step]) -> Iterator[Served]:
    """A server whose model takes ``steps``."""
    director = Director(steps)
    with LLM(folder, ROOMY, max_model_len=120_000) as llm:
        runner = llm.engine_core.runner

        def start(
            scheduled: Sequence[ScheduledChunk], sampling: Sequence[Request]
        ) -> None:
            runner.manager.take_copies()
            runner.buffer_index ^= 1
            with torch.inference_mode():
                for row, request in enumerate(sampling):
                    token = director.token(request)
                    favor(runner.logits[row], token)
                    runner.sampled_tokens[row] = token

        runner.start_forward = start  # type: ignore[method-assign, assignment]
        with serving(llm) as served:
            yield served
