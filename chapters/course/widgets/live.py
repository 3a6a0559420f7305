"""A real engine at work, a step at a time, told in plain data."""

import json
from pathlib import Path
from typing import Any

from simplellm.api.llm import LLM
from simplellm.api.load import build_engine
from simplellm.base.config import EngineConfig
from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.text.harmony import Message, render

QUESTIONS = (
    "What is 47 + 85?",
    "What is a KV cache?",
    "What is 123 + 456?",
    "What is continuous batching?",
    "What is 8 + 9?",
    "What is 31 + 64?",
)
MAX_TOKENS = 100
EVERY = 3  # steps between two requests
# What the widget's sliders offer, where an engine works and where there is a record.
CHOICES = {"requests": [*range(1, len(QUESTIONS) + 1)], "pages": [*range(24, 73, 4)]}
RECORDED = {"requests": [len(QUESTIONS)], "pages": [28, 40, 64]}


def changes(old: Any, new: Any) -> Any:
    """What of ``new`` is not as in ``old``, by key or by place in lists of one length.

    None stands for a key that is gone.
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return {str(n): changes(was, now) for n, (was, now) in pairs if was != now}
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    gone = {key: None for key in old if key not in new}
    return gone | {
        key: changes(old.get(key), value)
        for key, value in new.items()
        if key not in old or old[key] != value
    }


class LiveEngine:
    """The engine of an LLM's model, and requests that come one after the other.

    It has no thread: it works when it is asked to, as chapter 9 steps it by hand.
    """

    def __init__(self, llm: LLM) -> None:
        self.model, self.tokenizer = llm.model, llm.tokenizer
        self.stop_ids = llm.eos_token_ids

    def start(self, requests: int, pages: int) -> dict[str, Any]:
        """A new engine with so many pages; what it tells before any step."""
        config = EngineConfig(
            num_pages=pages,
            page_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            prefill_chunk=32,
        )
        self.engine = build_engine(self.model, config.resolved(self.model.device.type))
        self.steps = 0
        self.arriving = [
            self._request(number, text)
            for number, text in enumerate(QUESTIONS[:requests])
        ]
        asked = [
            {
                "request_id": request.request_id,
                "text": text,
                "prompt_tokens": request.num_prompt,
                "max_tokens": request.max_tokens,
            }
            for request, text in zip(self.arriving, QUESTIONS, strict=False)
        ]
        self.snapshot: Any = {}
        self.heard: set[int] = set()
        return {
            "num_pages": pages,
            "page_size": config.page_size,
            "requests": asked,
            "first": self._told(),
        }

    def step(self) -> dict[str, Any] | None:
        """What a step of the engine has changed; None when all requests have ended."""
        while self.arriving and self.arriving[0].request_id * EVERY <= self.steps:
            self.engine.submit([self.arriving.pop(0)])
        if not self.engine.scheduler.requests and not self.arriving:
            return None
        if self.engine.scheduler.requests:
            self.engine.step()
        self.steps += 1
        return self._told()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The widget's questions: a new run, or one more step."""
        if "start" in question:
            return self.start(**question["start"])
        return {"step": self.step()}

    def _request(self, number: int, text: str) -> Request:
        messages = [Message("user", text)]
        prompt = render(messages, self.tokenizer, reasoning_effort="high")
        most = min(MAX_TOKENS, self.engine.max_model_len - len(prompt))
        params = SamplingParams(temperature=0, max_tokens=most)
        return Request(prompt, most, params, self.stop_ids, request_id=number)

    def _told(self) -> dict[str, Any]:
        """What the engine tells since the last time, and how its books differ."""
        events = []
        while not self.engine.events.empty():
            event = self.engine.events.get()
            assert event is not None
            told: dict[str, Any] = {"request_id": event.request_id}
            told["text"] = self.tokenizer.decode(event.tokens)
            if event.finish_reason is not None:
                told["finish_reason"] = event.finish_reason
            if event.request_id not in self.heard:  # it stays the same from then on
                told["cached_tokens"] = event.cached_tokens
                self.heard.add(event.request_id)
            events.append(told)
        snapshot = json.loads(json.dumps(self.engine.snapshot()))  # its keys as text
        different, self.snapshot = changes(self.snapshot, snapshot), snapshot
        return {
            "snapshot": different,
            "preemptions": self.engine.scheduler.preemptions,
            "events": events,
        }


def record(llm: LLM, path: Path) -> None:
    """Write whole runs, for pages where there is no engine, one in a line."""
    live, runs = LiveEngine(llm), []
    for pages in RECORDED["pages"]:
        run = live.start(len(QUESTIONS), pages)
        run["steps"] = list(iter(live.step, None))
        runs.append(json.dumps(run, separators=(",", ":")))
    choices, lines = json.dumps(RECORDED), ",\n".join(runs)
    text = f'{{"choices": {choices}, "runs": [\n{lines}\n]}}\n'
    path.write_text(text, encoding="utf-8")
