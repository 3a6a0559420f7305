"""Whatever tokens a model writes: 200, all of it there, streamed as whole.

What must come of the tokens is computed here from them alone.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from babble import MOST, babble, expected
from models import HELLO, TOKENIZER, saying
from serving import NAME, babbling, events_of, idle, run

from simplellm import LLM, EngineConfig
from simplellm.server.app import make_app
from simplellm.server.http.endpoint import Service
from simplellm.server.start import Options
from simplellm.text.harmony import parse


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    config = EngineConfig(num_pages=1200, max_num_batched_tokens=1024)
    with LLM(folder, config) as found:
        yield found


class Asker:
    """Asks the application in this process, streamed and not."""

    def __init__(self, llm: LLM) -> None:
        app: Any = make_app(Service(llm, Options([NAME])))
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://x")

    async def both(self, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The choices of the whole answer, and the events of the streamed one."""
        whole = await self.client.post(path, json=body)
        assert whole.status_code == 200, whole.text
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await self.client.post(path, json=body | options)
        assert stream.status_code == 200, stream.text
        *events, last = events_of(stream.text)
        found = whole.json()
        usage = dict(found["usage"])
        usage.pop("prompt_tokens_details")  # the second time more is cached
        assert usage == {name: last["usage"][name] for name in usage}
        return found, events


def joined(events: list[Any], index: int, *path: str) -> str:
    """A text of one choice, from all events."""
    texts = []
    for event in events:
        for choice in event["choices"]:
            found = choice
            for name in path:
                found = (found or {}).get(name)
            if choice["index"] == index:
                texts.append(found or "")
    return "".join(texts)


async def complete(asker: Asker, llm: LLM, seed: int) -> None:
    """One completion with two samples, checked in all its parts."""
    body = {
        "prompt": "x",
        "seed": seed,
        "n": 2,
        "max_tokens": MOST,
        "return_token_ids": True,
        "logprobs": 1 if seed % 3 == 0 else None,
    }
    whole, events = await asker.both("/v1/completions", body)
    for choice in whole["choices"]:
        index = choice["index"]
        ids = expected(seed + index, llm)
        assert choice["token_ids"] == ids
        assert choice["text"] == TOKENIZER.decode(ids, skip_special=True)
        assert joined(events, index, "text") == choice["text"]
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        assert [id for part in parts for id in part["token_ids"]] == ids
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if seed % 3 == 0:
            for name, values in choice["logprobs"].items():
                streamed = [v for part in parts for v in part["logprobs"][name]]
                assert streamed == values
                assert len(values) == len(ids)


def calls_of(events: list[Any], index: int) -> list[tuple[str, str]]:
    """The names and arguments of the calls in a stream."""
    found: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                if choice["index"] == index:
                    function = call["function"]
                    entry = found.setdefault(call["index"], [function.get("name"), ""])
                    entry[1] += function["arguments"]
    assert list(found) == list(range(len(found)))
    return [(name, arguments) for name, arguments in found.values()]


async def chat(asker: Asker, llm: LLM, seed: int) -> None:
    """One chat with two choices, checked in all its parts."""
    body = {
        "messages": HELLO,
        "seed": seed,
        "n": 2,
        "max_tokens": MOST,
        "return_token_ids": True,
        "logprobs": seed % 3 == 0,
    }
    whole, events = await asker.both("/v1/chat/completions", body)
    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        ids = expected(seed + index, llm)
        assert choice["token_ids"] == ids
        reasoning, content = message.get("reasoning", ""), message["content"] or ""
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        # All that the model wrote into messages is somewhere, and nothing else is.
        written = [m.content for m in parse(ids, TOKENIZER)]
        shown = [reasoning, content, *(arguments for _, arguments in calls)]
        assert sorted("".join(written)) == sorted("".join(shown))
        assert all(any(text in place for place in shown) for text in written)
        assert joined(events, index, "delta", "reasoning") == reasoning
        assert joined(events, index, "delta", "content") == content
        assert calls_of(events, index) == calls
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        streamed = [id for part in parts for id in part.get("token_ids", ())]
        assert streamed == ids
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if seed % 3 == 0:
            entries = [
                entry
                for part in parts
                for entry in (part["logprobs"] or {"content": []})["content"]
            ]
            assert entries == choice["logprobs"]["content"]
            assert len(entries) == len(ids)


def babble_through(llm: LLM, first: int, count: int) -> None:
    """Completions and chats, all at once; then nothing is left in the engine."""

    async def main() -> None:
        asker = Asker(llm)
        seeds = range(first, first + 25 * count, 25)
        with babbling(llm, babble):
            tasks = [ask(asker, llm, s) for s in seeds for ask in (complete, chat)]
            await asyncio.gather(*tasks)

    run(main())
    assert idle(llm)


def test_random_tokens_never_fail(llm: LLM) -> None:
    babble_through(llm, 0, 60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(1, 4))
def test_random_tokens_never_fail_at_length(llm: LLM, part: int) -> None:
    babble_through(llm, 10**6 * part, 100)


@pytest.mark.parametrize(
    "script",
    [
        "",
        "<|channel|>",
        "<|channel|>analysis",
        "<|channel|>analysis<|message|>endless",
        "<|channel|>nowhere<|message|>text<|end|>",
        "<|channel|>commentary to=functions.add<|message|>",
        '<|channel|>commentary to=functions.add<|message|>{"a": ',
        "<|channel|>commentary to=browser.open<|message|>not json<|call|>",
        "<|start|>tool to=x<|message|>text<|end|>",
        "<|start|>functions.add<|channel|>analysis<|message|>text<|end|>",
        "<|message|><|message|>text<|message|>more",
        "plain text without any marker",
        "<|end|><|end|><|start|><|start|>",
    ],
)
def test_odd_turns(llm: LLM, script: str) -> None:
    ids = TOKENIZER.encode(script, special=True)

    async def main() -> None:
        asker = Asker(llm)
        body = {
            "messages": HELLO,
            "max_tokens": len(ids) + 1,
            "return_token_ids": True,
        }
        with saying(llm, [*ids, TOKENIZER.special["<|return|>"]]):
            whole, events = await asker.both("/v1/chat/completions", body)
        (choice,) = whole["choices"]
        message = choice["message"]
        shown = message.get("reasoning", "") + (message["content"] or "")
        for call in message.get("tool_calls", ()):
            shown += call["function"]["arguments"]
        for entry in parse(ids, TOKENIZER):
            assert entry.content in shown
        assert joined(events, 0, "delta", "content") == (message["content"] or "")
        assert joined(events, 0, "delta", "reasoning") == message.get("reasoning", "")

    run(main())
