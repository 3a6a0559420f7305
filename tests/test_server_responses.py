"""/v1/responses: items in and out, streams as whole, and what is kept of them."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from babble import MOST, babble, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIG, SMALL, TOKENIZER, saying, until
from openai.types.responses import (
    Response,
    ResponseItemList,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter
from serving import NAME, Served, babbling, events_of, idle, run, serving

from simplellm import LLM, EngineConfig
from simplellm.harmony import Delta, parse
from simplellm.outputs import merge
from simplellm.reply import ChatReply
from simplellm.request import Event, Request, SamplingParams, TokenLogprobs
from simplellm.server.app import make_app
from simplellm.server.endpoint import Service
from simplellm.server.responses_output import Output, output_of
from simplellm.server.responses_store import Kept, ResponseStore

PATH = "/v1/responses"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>132<|return|>"
CALL = f"{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
CALL += '{"a": 1}<|call|>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        "strict": True,
    }
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCRIPTS = [
    "",
    "<|channel|>analysis",
    "<|channel|>analysis<|message|>endless",
    "<|channel|>nowhere<|message|>text<|end|>",
    "<|channel|>commentary to=functions.add<|message|>",
    "<|channel|>commentary to=browser.open<|message|>not json<|call|>",
    "<|start|>tool to=x<|message|>text<|end|>",
    "<|message|><|message|>text<|message|>more",
    "plain text without any marker",
    "<|channel|>commentary<|message|>First.<|end|><|start|>assistant"
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>final<|message|>A<|end|><|start|>assistant"
    "<|channel|>final<|message|>B<|return|>",
]


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with LLM(folder, SMALL) as llm, serving(llm) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    url = f"http://127.0.0.1:{served.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def said(served: Served, *scripts: Any) -> Any:
    return saying(served.service.llm, *scripts)


def asked(served: Served, **body: Any) -> str:
    """What the model is shown for a body."""
    answer = served.post(PATH, {"max_output_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    count = answer.json()["usage"]["input_tokens"]
    (text,) = [TOKENIZER.decode(t) for t in SHOWN if len(t) == count][-1:]
    return text


SHOWN: list[list[int]] = []  # prompts, as the engine gets them


@pytest.fixture
def shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts of this test's requests."""
    found: list[list[int]] = []
    engine = served.service.llm.engine
    submit = engine.submit

    def noting(requests: Sequence[Request]) -> None:
        found.extend(list(request.tokens) for request in requests)
        submit(requests)

    monkeypatch.setattr(engine, "submit", noting)
    return found
