"""The openai client, as it is, against `simplellm serve` with the embedded model.

The client is told to check every answer against OpenAI's own types.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import PATIENCE, SMALL
from serving import NAME, Process, serving

from simplellm import LLM, QueueFullError

openai = pytest.importorskip("openai", minversion="2")

MODEL = "simplellm"
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 47 + 85?"}],
    "temperature": 0,
}
CONTINUE: dict[str, Any] = {
    "model": MODEL,
    "prompt": "What is 47 + 85?",
    "temperature": 0,
    "max_tokens": 100,
}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MULTIPLY = [{"role": "user", "content": "What is 47 * 85?"}]
ENDLESS = {"model": MODEL, "prompt": "x", "max_tokens": 50_000}
ENDLESS |= {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    found = Process("--api-key", "k", "--allowed-origins", "https://example.org")
    yield found
    found.process.terminate()
    assert found.finish() == 0


def options(process: Process, **more: Any) -> dict[str, Any]:
    return {
        "base_url": f"http://127.0.0.1:{process.port}/v1",
        "api_key": "k",
        "timeout": PATIENCE,
        "max_retries": 0,
        "_strict_response_validation": True,
        **more,
    }


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[Any]:
    with openai.OpenAI(**options(process)) as found:
        yield found


@pytest.fixture(scope="module")
def lenient(client: Any) -> Any:
    """A client for what OpenAI's own completions don't keep to.

    Their types know no null in the log-probabilities of a prompt, nor in the finish
    reason of a stream's event.
    """
    return client.copy(_extra_kwargs={"_strict_response_validation": False})


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_a_chat(client: Any) -> None:
    found = client.chat.completions.create(**ASK, n=2, seed=1)
    assert found.model == MODEL and found._request_id
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice in found.choices:
        assert choice.message.content == "47 + 85 = 132"
        assert "132" in choice.message.reasoning
        assert choice.finish_reason == "stop"
    usage = found.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens > 0


def test_a_streamed_chat(client: Any) -> None:
    """The client itself adds the parts up."""
    whole = client.chat.completions.create(**ASK)
    with client.chat.completions.stream(
        **ASK, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_completion()
    assert kinds.count("content.delta") > 3 and "content.done" in kinds
    (mine,), (other,) = found.choices, whole.choices
    assert mine.message.content == other.message.content
    assert mine.message.reasoning == other.message.reasoning
    assert mine.finish_reason == other.finish_reason
    assert found.usage.completion_tokens == whole.usage.completion_tokens


def test_a_round_with_a_tool(client: Any) -> None:
    """A call, its result, an answer; streamed, the client puts the same call together.

    The messages that go back are the client's own objects.
    """
    asked = {"model": MODEL, "tools": [CALCULATOR], "temperature": 0}
    found = client.chat.completions.create(**asked, messages=MULTIPLY)
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "calculator"
    assert json.loads(call.function.arguments) == {"expression": "47 * 85"}
    with client.chat.completions.stream(**asked, messages=MULTIPLY) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    (same,) = streamed.message.tool_calls
    assert streamed.finish_reason == "tool_calls"
    assert same.function.arguments == call.function.arguments
    assert same.function.name == "calculator" and same.id
    result = {"role": "tool", "tool_call_id": call.id, "content": "3995"}
    messages = [*MULTIPLY, choice.message, result]
    found = client.chat.completions.create(**asked, messages=messages)
    assert "3995" in found.choices[0].message.content
    none = client.chat.completions.create(
        **asked, messages=MULTIPLY, tool_choice="none"
    )
    assert not none.choices[0].message.tool_calls


def test_logprobs_of_a_chat(client: Any) -> None:
    whole = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
    with client.chat.completions.stream(**ASK, logprobs=True, top_logprobs=3) as events:
        for _ in events:
            pass
        streamed = events.get_final_completion().choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_a_completion(client: Any, lenient: Any) -> None:
    (alone,) = client.completions.create(**CONTINUE, logprobs=2).choices
    found = lenient.completions.create(**CONTINUE, n=2, logprobs=2, echo=True)
    prompt = CONTINUE["prompt"]
    for choice in found.choices:
        assert choice.text == prompt + alone.text and "132" in alone.text
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.text_offset)
        assert "".join(logprobs.tokens).startswith(choice.text)
    parts = ["", ""]
    for event in lenient.completions.create(**CONTINUE, n=2, echo=True, stream=True):
        for choice in event.choices:
            parts[choice.index] += choice.text
    assert parts == [choice.text for choice in found.choices]


def test_prompts_of_token_ids(client: Any) -> None:
    path = str(client.base_url.copy_with(path="/tokenize"))
    body = {"prompt": CONTINUE["prompt"]}
    ids = client.post(path, body=body, cast_to=object)["tokens"]
    asked = CONTINUE | {"prompt": [ids, ids]}
    texts = [choice.text for choice in client.completions.create(**asked).choices]
    assert texts == 2 * [client.completions.create(**CONTINUE).choices[0].text]


def test_parameters(client: Any) -> None:
    """What the client has names for, and what it sends beside them."""
    found = client.chat.completions.create(
        **ASK | {"temperature": 0.7},
        frequency_penalty=0.1,
        logit_bias={"5": -1},
        max_completion_tokens=20,
        parallel_tool_calls=True,
        presence_penalty=0.1,
        reasoning_effort="low",
        seed=3,
        stop=["\n\n"],
        top_p=0.9,
        user="me",
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    )
    assert found.usage.completion_tokens <= 20


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "gpt-4"}, "NotFoundError", "model"),
    ({"temperature": -1}, "BadRequestError", "temperature"),
    ({"messages": []}, "BadRequestError", "messages"),
    ({"messages": [{"role": "user", "content": True}]}, "BadRequestError", "messages"),
    ({"extra_body": {"echo": True}}, "BadRequestError", "echo"),
    ({"tools": [{"type": "function"}]}, "BadRequestError", "tools"),
    ({"logit_bias": {"x": 1}}, "BadRequestError", "logit_bias"),
]


@pytest.mark.parametrize(("change", "kind", "param"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    client: Any, change: dict[str, Any], kind: str, param: str, stream: bool
) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        client.chat.completions.create(**ASK | change, stream=stream)
    error = caught.value
    assert error.param.startswith(param) and error.request_id
    assert error.type == "invalid_request_error"
    assert param in str(error)


def test_pages_may_ask(process: Process) -> None:
    url = f"http://127.0.0.1:{process.port}/v1/models"
    headers = {"origin": "https://example.org", "authorization": "Bearer k"}
    answer = httpx.get(url, headers=headers, timeout=PATIENCE)
    assert answer.headers["access-control-allow-origin"] == headers["origin"]


def test_keys(process: Process) -> None:
    with (
        openai.OpenAI(**options(process, api_key="wrong")) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_client_that_waits_no_longer(client: Any) -> None:
    hasty = client.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        hasty.completions.create(**ENDLESS)
    assert client.completions.create(**CONTINUE).choices


def test_a_stream_that_is_left(lenient: Any) -> None:
    with lenient.completions.create(**ENDLESS, stream=True) as stream:
        assert next(stream).choices
    assert lenient.completions.create(**CONTINUE).choices


def test_a_full_queue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries again by itself, as Retry-After says, and then gives up."""
    calls = []

    def full(requests: object) -> None:
        calls.append(time.monotonic())
        raise QueueFullError("7 requests wait already")

    with LLM(folder, SMALL) as llm, serving(llm) as served:
        monkeypatch.setattr(llm.engine, "submit", full)
        url = f"{served.client.base_url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="k", max_retries=1) as client,
            pytest.raises(openai.RateLimitError) as caught,
        ):
            client.completions.create(model=NAME, prompt="x")
    assert caught.value.code == "queue_full"
    first, second = calls
    assert second - first >= 1


def test_coroutines(process: Process) -> None:
    """Many at once, whole and streamed, give what one alone gives."""

    async def whole(client: Any) -> str:
        found = await client.chat.completions.create(**ASK)
        return found.choices[0].message.content

    async def streamed(client: Any) -> str:
        parts = []
        async for event in await client.chat.completions.create(**ASK, stream=True):
            parts += [choice.delta.content or "" for choice in event.choices]
        return "".join(parts)

    async def every() -> list[str]:
        async with openai.AsyncOpenAI(**options(process)) as client:
            kinds = [whole, streamed] * 8
            return await asyncio.gather(*(kind(client) for kind in kinds))

    assert asyncio.run(every()) == ["47 + 85 = 132"] * 16


def test_a_task_that_is_cancelled(process: Process) -> None:
    async def cancelled() -> str:
        async with openai.AsyncOpenAI(**options(process)) as client:
            task = asyncio.create_task(client.completions.create(**ENDLESS))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            found = await client.completions.create(**CONTINUE)
            return found.choices[0].text

    assert "132" in asyncio.run(cancelled())
