"""/v1/responses: items in and out, streams as whole, and what is kept of them."""

import asyncio
import copy
import itertools
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from babble import MOST, babble, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIG, TOKENIZER, until
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseItemList,
    ResponseStreamEvent,
)
from serving import (
    NAME,
    Served,
    babbling,
    events_of,
    idle,
    run,
    said,
    serving,
    slow,
)
from starlette.requests import Request as HTTPRequest

from simplellm import LLM, EngineConfig
from simplellm.api.checks import ContextLengthError
from simplellm.api.outputs import merge
from simplellm.api.reply import ChatReply
from simplellm.base.config import ParameterError
from simplellm.base.request import Event, Request, TokenLogprobs
from simplellm.base.sampling_params import SamplingParams
from simplellm.server.app import make_app
from simplellm.server.http.endpoint import Call, Service
from simplellm.server.http.errors import APIError
from simplellm.server.openai import responses
from simplellm.server.openai.responses_items import PREFIXES
from simplellm.server.openai.responses_output import Output
from simplellm.server.openai.responses_store import FinishedResponse, ResponseStore
from simplellm.server.start import Options
from simplellm.text.harmony import Delta, parse

PATH = "/v1/responses"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>132<|return|>"
CALL = f"{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
CALL += '{"a": 1}<|call|>'
# What openresponses' schema requires of a response.
FIELDS = """
id object created_at completed_at status incomplete_details model output error
previous_response_id instructions tools tool_choice truncation parallel_tool_calls
text top_p presence_penalty frequency_penalty top_logprobs temperature reasoning user
usage max_output_tokens max_tool_calls store background service_tier metadata
safety_identifier prompt_cache_key
""".split()
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        "strict": True,
    }
]
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
def client(served: Served) -> openai.OpenAI:
    url = f"http://127.0.0.1:{served.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def kinds_of_events() -> dict[str, Any]:
    """The class that the client has for each type of event."""
    (union, _) = get_args(ResponseStreamEvent)
    return {
        get_args(kind.model_fields["type"].annotation)[0]: kind
        for kind in get_args(union)
    }


EVENTS = kinds_of_events()


def rebuilt(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client makes of the events, which are as the client's are.

    Each event finds what it is about: no text comes before its item, and nothing is
    open where another item begins.
    """
    items: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        EVENTS[event["type"]].model_validate(event)
        if "response" in event:
            assert item is None
            continue
        assert event["output_index"] == len(items)
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert item is None and event["item"]["status"] == "in_progress"
                item = copy.deepcopy(event["item"])
                continue
            case "output_item.done":
                assert item is not None
                assert event["item"] == item | {"status": event["item"]["status"]}
                items.append(event["item"])
                item = None
                continue
        assert item is not None and event["item_id"] == item["id"]
        match event["type"].removeprefix("response."):
            case "content_part.added":
                assert event["content_index"] == len(item["content"]) == 0
                item["content"].append(copy.deepcopy(event["part"]))
            case "content_part.done":
                assert item["content"] == [event["part"]]
            case "reasoning_text.delta":
                item["content"][0]["text"] += event["delta"]
            case "output_text.delta":
                item["content"][0]["text"] += event["delta"]
                item["content"][0]["logprobs"] += event["logprobs"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "reasoning_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "output_text.done":
                assert item["content"][0]["text"] == event["text"]
                assert item["content"][0]["logprobs"] == event["logprobs"]
            case "function_call_arguments.done":
                assert item["arguments"] == event["arguments"]
            case other:
                raise AssertionError(other)
    assert item is None
    return items


def texts_of(items: Sequence[dict[str, Any]]) -> list[str]:
    """The text of each item."""
    return [
        item["arguments"]
        if item["type"] == "function_call"
        else "".join(part["text"] for part in item["content"])
        for item in items
    ]


def kinds(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["type"] for item in items]


# ---- parts to events, without a server


POOL = [
    *TOKENIZER.special.values(),
    *TOKENIZER.encode("analysis commentary final to=functions.add assistant é😀"),
    *range(190, 256),
    TOKENIZER.vocab_size,
    CONFIG.vocab_size - 1,
]


def parts_of(
    reply: ChatReply, tokens: Sequence[int], reason: str | None, chance: random.Random
) -> list[Delta]:
    """The parts of a turn, cut and merged somewhere."""
    parts: list[Delta] = []
    found: list[Event] = []
    place = 0
    while place < len(tokens) or not found:
        count = chance.randint(0, 4)
        cut = list(tokens[place : place + count])
        place += count
        over = place >= len(tokens)
        logprobs = [TokenLogprobs(token, -1.0, ((token, -1.0),), 1) for token in cut]
        end = reason if over else None
        found.append(Event(0, cut, logprobs, end))
    for event in found:
        parts += reply.push(event)
        if chance.random() < 0.5:
            parts = merge(parts)
    return parts


@settings(max_examples=300)
@given(
    tokens=st.lists(st.sampled_from(POOL), max_size=40),
    reason=st.sampled_from(["stop", "length", None]),
    logprobs=st.sampled_from([None, 1]),
    stop=st.sampled_from(["", "al", "é"]),
    seed=st.integers(0, 2**32),
)
def test_events_add_up_however_parts_are_cut(
    tokens: list[int], reason: str | None, logprobs: int | None, stop: str, seed: int
) -> None:
    params = SamplingParams(logprobs=logprobs, stop=[stop] if stop else [])
    request = Request([5], max_tokens=100, params=params)
    reply, output = ChatReply(request, TOKENIZER), Output("k", TOKENIZER)
    parts = parts_of(reply, tokens, reason, random.Random(seed))
    events = [event for part in parts for event in output.push(part)]
    choice, whole = reply.output(), Output("k", TOKENIZER)
    events += output.close("completed" if reason == "stop" else "incomplete")
    items = rebuilt(events)
    assert items == output.items()
    for part in merge(parts):
        whole.push(part)
    whole.close("completed" if reason == "stop" else "incomplete")
    assert whole.items() == items
    if not stop and reason is not None:
        # All that the model wrote into messages is in some item, and in its order.
        written = "".join(m.content for m in parse(choice.token_ids, TOKENIZER))
        assert "".join(texts_of(items)) == written
    assert all(item["status"] == "completed" for item in items[:-1])


def test_items_are_apart_where_their_kinds_are() -> None:
    output = Output("k", TOKENIZER)
    parts = [
        Delta("analysis", None, "a"),
        Delta("final", None, "b"),
        Delta("nowhere", None, "c"),
        Delta("commentary", None, "d"),
        Delta("commentary", "functions.x", "", 0),
        Delta("commentary", "functions.y z", "{", 1),
        Delta("analysis", None, "e"),
    ]
    before = output.items()
    events = [event for part in parts for event in output.push(part)]
    items = rebuilt(events + output.close())
    assert before == []  # and it stays so
    calls, texts = ["function_call"] * 2, ["", "{"]
    assert kinds(items) == ["reasoning", "message", "message", *calls, "reasoning"]
    assert texts_of(items) == ["a", "bc", "d", *texts, "e"]
    assert [item.get("phase") for item in items[1:3]] == ["final_answer", "commentary"]
    assert [item["name"] for item in items[3:5]] == ["x", "y_z"]
    assert len({item["id"] for item in items}) == len(items)
    assert items[3]["call_id"] != items[4]["call_id"]


# ---- over HTTP


def test_a_response(served: Served) -> None:
    with said(served, ANSWER):
        answer = served.post(
            PATH, {"input": "?", "model": NAME, "metadata": {"a": "b"}}
        )
    found = answer.json()
    assert answer.status_code == 200, answer.text
    Response.model_validate(found)
    assert found.keys() >= {*FIELDS}
    assert found["status"] == "completed" and found["id"].startswith("resp_")
    assert kinds(found["output"]) == ["reasoning", "message"]
    assert texts_of(found["output"]) == ["Hm.", "132"]
    assert found["output"][0]["content"][0]["type"] == "reasoning_text"
    assert found["metadata"] == {"a": "b"} and found["model"] == NAME
    assert found["incomplete_details"] is None and found["error"] is None
    usage = found["usage"]
    count = len(TOKENIZER.encode("Hm."))
    assert usage["output_tokens_details"] == {"reasoning_tokens": count}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again = served.client.get(f"{PATH}/{found['id']}")
    assert again.json() == found


def test_a_stream(served: Served) -> None:
    with said(served, f"{THOUGHT}{CALL}"):
        events = served.events(PATH, {"input": "?", "tools": TOOLS})
    items = rebuilt(events)
    types = [event["type"].removeprefix("response.") for event in events]
    once = [kind for kind, _ in itertools.groupby(types)]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    first, last = events[0]["response"], events[-1]["response"]
    assert first["status"] == "in_progress" and first["output"] == []
    assert last["status"] == "completed" and last["output"] == items
    assert first["id"] == last["id"] and last["usage"]["output_tokens"] > 10
    assert served.client.get(f"{PATH}/{last['id']}").json() == last


def test_what_does_not_fit_is_incomplete(served: Served) -> None:
    body = {"input": "?", "max_output_tokens": 6}
    with said(served, "<|channel|>final<|message|>1234567890"):
        found = served.post(PATH, body).json()
        *_, last = events = served.events(PATH, body)
    Response.model_validate(found)
    (item,) = rebuilt(events)
    assert last["type"] == "response.incomplete"
    for response in (found, last["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        assert texts_of(response["output"]) == texts_of([item])


@pytest.mark.parametrize("script", SCRIPTS)
def test_odd_turns_are_responses(served: Served, script: str) -> None:
    ids = TOKENIZER.encode(script, special=True)
    with said(served, [*ids, TOKENIZER.special["<|return|>"]]):
        found = served.post(PATH, {"input": "?"}).json()
        events = served.events(PATH, {"input": "?"})
    Response.model_validate(found)
    written = [message.content for message in parse(ids, TOKENIZER)]
    assert "".join(texts_of(found["output"])) == "".join(written)
    items = rebuilt(events)
    assert events[-1]["response"]["output"] == items
    assert [kinds(items), texts_of(items)] == [
        kinds(found["output"]),
        texts_of(found["output"]),
    ]


def test_the_client(client: openai.OpenAI, served: Served) -> None:
    with said(served, ANSWER):
        found = client.responses.create(model=NAME, input="?")
        with client.responses.stream(model=NAME, input="?") as stream:
            seen = [event.type for event in stream]
            streamed = stream.get_final_response()
        parts = client.responses.create(model=NAME, input="?", stream=True)
        texts = [e.delta for e in parts if e.type == "response.output_text.delta"]
    assert found.output_text == streamed.output_text == "".join(texts) == "132"
    assert seen[-1] == "response.completed"
    assert client.responses.retrieve(found.id) == found
    assert client.responses.cancel(found.id) == found
    items = client.responses.input_items.list(found.id).data
    assert [item.type for item in items] == ["message"]
    client.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(found.id)


def test_the_asynchronous_client(served: Served) -> None:
    async def main() -> str:
        url = f"http://127.0.0.1:{served.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            stream = client.responses.stream(model=NAME, input="?")
            async with stream as events:
                return (await events.get_final_response()).output_text

    with said(served, ANSWER):
        assert run(main()) == "132"


def test_tools_of_the_client(
    client: openai.OpenAI, served: Served, prompts: list[list[int]]
) -> None:
    """The call's result goes back by the response's id, or with all that came before.

    The model is shown the same either way, reasoning included.
    """
    with said(served, CALL):
        found = client.responses.create(model=NAME, input="1?", tools=TOOLS)
    _, call = found.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "132",
    }
    with said(served, ANSWER):
        client.responses.create(
            model=NAME, input=[result], previous_response_id=found.id, tools=TOOLS
        )
        every: list[Any] = [{"role": "user", "content": "1?"}]
        every += [item.to_dict() for item in found.output]
        answer = client.responses.create(
            model=NAME, input=[*every, result], tools=TOOLS
        )
    assert answer.output_text == "132"
    first, by_id, by_hand = prompts
    assert by_id == by_hand and by_id[: len(first) - 2] == first[:-2]
    text = TOKENIZER.decode(by_id)
    assert "Hm.<|end|>" in text and '<|message|>{"a": 1}<|call|>' in text
    assert "<|start|>functions.add to=assistant" in text and "type add = " in text


def test_what_the_model_is_shown(served: Served, prompts: list[list[int]]) -> None:
    """Instructions and tools first, then the items, in their order."""
    items = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "message", "role": "developer", "content": "D"},
        {"role": "assistant", "content": "C", "phase": "commentary"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"role": "user", "content": "V"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "R"}]},
    ]
    bodies: list[dict[str, Any]] = [
        {"input": items, "instructions": "I", "reasoning": {"effort": "high"}},
        {"input": items, "tools": TOOLS},
        {"input": items, "tools": TOOLS, "tool_choice": "none"},
    ]
    for body in bodies:
        answer = served.post(PATH, body | {"max_output_tokens": 1})
        assert answer.status_code == 200, answer.text
    high, tools, none = (
        [(m.role, m.channel, m.content) for m in parse(ids[1:], TOKENIZER)]
        for ids in prompts
    )
    assert "Reasoning: high" in TOKENIZER.decode(prompts[0])
    for body, shown in zip(bodies, [*prompts], strict=True):
        count = served.post(f"{PATH}/input_tokens", body).json()
        assert count == {"object": "response.input_tokens", "input_tokens": len(shown)}
    rest = [
        ("user", None, "U"),
        ("developer", None, "# Instructions\n\nD"),
        ("assistant", "commentary", "C"),
        ("assistant", "final", "A"),
        ("user", None, "V"),
        ("assistant", "analysis", "R"),
    ]
    system = ("developer", None, "# Instructions\n\nS")
    instructions = ("developer", None, "# Instructions\n\nI")
    assert high[1:] == [instructions, system, *rest]
    assert none[1:] == [system, *rest]
    assert tools[2:] == rest
    assert tools[1][2].startswith(system[2]) and "type add = " in tools[1][2]


def test_responses_that_follow_each_other(
    served: Served, prompts: list[list[int]]
) -> None:
    """Each can be followed by several, and goes on when what came before is gone."""

    def follow(text: str, id: str | None, **options: Any) -> str:
        body = {"input": text, "previous_response_id": id, **options}
        found: str = served.post(PATH, body).json()["id"]
        return found

    with said(served, ANSWER):
        first = follow("one", None, instructions="Once")
        second = follow("two", first)
        served.client.delete(f"{PATH}/{first}")
        follow("three", second)
    texts = [TOKENIZER.decode(ids) for ids in prompts]
    assert "Once" in texts[0] and "Once" not in texts[1]
    for text in ("one", "132", "two", "three"):
        assert text in texts[2]
    assert "Hm." not in texts[2]  # an answer follows it
    items = served.client.get(f"{PATH}/{second}/input_items").json()
    ResponseItemList.model_validate(items)
    assert texts_of(items["data"]) == ["two", "132", "Hm.", "one"]


def test_what_is_not_stored(served: Served) -> None:
    with said(served, ANSWER):
        found = served.post(PATH, {"input": "?", "store": False}).json()
    assert found["store"] is False
    for answer in (
        served.client.get(f"{PATH}/{found['id']}"),
        served.client.post(f"{PATH}/{found['id']}/cancel"),
        served.client.get(f"{PATH}/{found['id']}/input_items"),
        served.client.delete(f"{PATH}/{found['id']}"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "response_not_found"
    body = {"input": "?", "previous_response_id": found["id"]}
    error = served.post(PATH, body).json()["error"]
    assert error["param"] == "previous_response_id"
    assert error["code"] == "previous_response_not_found"


def test_pages_of_items(served: Served, strict: Served) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    body = {"input": items, "max_output_tokens": 1}
    id = served.post(PATH, body).json()["id"]

    def page(query: str) -> Any:
        answer = served.client.get(f"{PATH}/{id}/input_items?{query}")
        return answer.json()

    found = page("order=asc&limit=2")
    assert texts_of(found["data"]) == ["0", "1"] and found["has_more"]
    assert found["last_id"] == found["data"][1]["id"]
    found = page(f"order=asc&limit=3&after={found['last_id']}&include[]=x&other=1")
    assert texts_of(found["data"]) == ["2", "3", "4"] and not found["has_more"]
    assert texts_of(page("")["data"]) == ["4", "3", "2", "1", "0"]
    for query, name in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=nothing", "after"),
    ):
        assert page(query)["error"]["param"] == name
    answer = strict.client.get(f"{PATH}/{id}/input_items?other=1")
    assert answer.json()["error"]["param"] == "other"


def test_logprobs_of_messages(served: Served) -> None:
    """They are those of the text, as chats tell them, streamed as whole."""
    text = "1é😀"
    body = {
        "input": "?",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "seed": 1,
    }
    script = f"{THOUGHT}<|channel|>final<|message|>{text}<|return|>"
    with said(served, script):
        found = served.post(PATH, body).json()
        events = served.events(PATH, body)
    Response.model_validate(found)
    (_, message), (_, streamed) = found["output"], rebuilt(events)
    logprobs = message["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs).decode() == text
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert streamed["content"][0]["logprobs"] == logprobs


ENDLESS = "<|channel|>final<|message|>" + "x" * 390


@contextmanager
def writing(served: Served, **body: Any) -> Iterator[Any]:
    """The events of a stream that goes on for some seconds, once text has come."""
    llm = served.service.llm
    options = {"input": "?", "stream": True, **body}
    with (
        said(served, ENDLESS),
        slow(llm),
        served.client.stream("POST", PATH, json=options) as answer,
    ):
        lines = answer.iter_lines()
        events = (
            json.loads(line.removeprefix("data: "))
            for line in lines
            if line.startswith("data: {")
        )
        yield events


def until_text(events: Iterator[Any]) -> list[Any]:
    """The events up to the first text."""
    seen = []
    for event in events:
        seen.append(event)
        if event["type"] == "response.output_text.delta":
            break
    return seen


def test_a_running_response_is_cancelled(served: Served) -> None:
    with writing(served) as events:
        seen = until_text(events)
        path = f"{PATH}/{seen[0]['response']['id']}"
        now = served.client.get(path).json()
        follow = {"input": "?", "previous_response_id": now["id"]}
        early = served.post(PATH, follow).json()
        cancelled = served.client.post(f"{path}/cancel").json()
        seen += events
    Response.model_validate(now)
    assert (
        now["status"] == "in_progress" and now["output"][0]["status"] == now["status"]
    )
    assert "being written" in early["error"]["message"]
    assert cancelled["status"] == "cancelled"
    rebuilt(seen)
    last = seen[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["usage"]["output_tokens"] < 390
    assert served.client.get(path).json() == last["response"]
    until(lambda: idle(served.service.llm))


def test_a_running_response_is_deleted(served: Served) -> None:
    with writing(served) as events:
        path = f"{PATH}/{until_text(events)[0]['response']['id']}"
        assert served.client.delete(path).json()["deleted"]
        assert [*events][-1]["response"]["status"] == "cancelled"
    assert served.client.get(path).status_code == 404
    until(lambda: idle(served.service.llm))


@pytest.mark.parametrize("store", [True, False])
def test_a_client_that_leaves_cancels(served: Served, store: bool) -> None:
    llm = served.service.llm
    with writing(served, store=store) as events:
        id = until_text(events)[0]["response"]["id"]
    until(lambda: idle(llm))
    answer = served.client.get(f"{PATH}/{id}")
    if not store:
        assert answer.status_code == 404
        return
    found = answer.json()
    assert found["status"] == "cancelled"
    assert texts_of(found["output"])[0].startswith("x")


def polled(client: openai.OpenAI, id: str) -> Response:
    """A response once it is over, as programs wait for it."""
    until(lambda: client.responses.retrieve(id).status != "in_progress")
    return client.responses.retrieve(id)


def test_a_response_in_the_background(served: Served, client: openai.OpenAI) -> None:
    """It is there at once, goes on while nobody waits, and can be followed."""
    with said(served, ANSWER), slow(served.service.llm):
        begun = client.responses.create(model=NAME, input="?", background=True)
        assert begun.status == "in_progress" and begun.background and not begun.output
        found = polled(client, begun.id)
        more: Any = {"input": "More", "previous_response_id": found.id}
        again = polled(client, client.responses.create(**more, background=True).id)
    assert found.status == again.status == "completed"
    assert found.output_text == again.output_text == "132"
    assert found.usage.output_tokens > 5 and found.background
    with said(served, ENDLESS), slow(served.service.llm):
        begun = client.responses.create(input="?", background=True)
        assert client.responses.cancel(begun.id).status == "cancelled"
        until(lambda: idle(served.service.llm))
    assert client.responses.retrieve(begun.id).usage.output_tokens < 390


def test_a_stream_in_the_background_outlives_its_client(
    served: Served, client: openai.OpenAI
) -> None:
    with writing(served, background=True, max_output_tokens=60) as events:
        id = until_text(events)[0]["response"]["id"]
        assert client.responses.retrieve(id).status == "in_progress"
    found = polled(client, id)
    assert found.status == "incomplete" and found.usage.output_tokens == 60
    assert found.incomplete_details.reason == "max_output_tokens"


def test_a_response_in_the_background_that_fails(served: Served) -> None:
    """Too late for a status: whoever asks for it is told."""
    llm = served.service.llm
    with (
        serving(llm, timeout=0.3) as impatient,
        said(impatient, ENDLESS),
        slow(llm),
    ):
        body = {"input": "?", "background": True}
        path = f"{PATH}/{impatient.post(PATH, body).json()['id']}"

        def now() -> Any:
            return impatient.client.get(path).json()

        until(lambda: now()["status"] != "in_progress")
        found = now()
    Response.model_validate(found)
    assert found["status"] == "failed" and "time limit" in found["error"]["message"]
    until(lambda: idle(llm))


def test_a_prompt_that_is_too_long(served: Served) -> None:
    """Agents know the code, and compact: in a stream as the event of its failure."""
    limit = served.service.llm.input_processor.max_model_len
    body = {"input": "x" * 5000, "metadata": {"a": "b"}, "instructions": "I"}
    answer = served.post(PATH, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "input"
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {limit} tokens. However, " in error["message"]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "required"}):
        created, failed = served.events(PATH, body | fields)
        # The client's list of codes lacks this one, which Codex reads.
        EVENTS[created["type"]].model_validate(created)
        for event in (created, failed):
            assert event["response"]["metadata"] == {"a": "b"}
        assert failed["type"] == "response.failed"
        told = failed["response"]["error"]
        assert told == {"code": error["code"], "message": told["message"]}
        assert "prompt is too long: " in told["message"]
    long = {"input": "x", "instructions": "x" * 5000}
    assert served.events(PATH, long)[-1]["type"] == "response.failed"
    assert idle(served.service.llm)


def test_a_stream_that_fails(served: Served) -> None:
    # A busy machine begins late, too; the stream lasts longer than this.
    with serving(served.service.llm, timeout=2) as hasty:
        with writing(hasty) as events:
            seen = [*events]
        last = seen[-1]
        EVENTS["response.failed"].model_validate(last)
        assert last["sequence_number"] == len(seen) - 1
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        found = hasty.client.get(f"{PATH}/{last['response']['id']}").json()
        assert found == last["response"]
        with said(hasty, ENDLESS), slow(hasty.service.llm):
            assert hasty.post(PATH, {"input": "?"}).status_code == 504


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    ({"input": [{"role": "user", "content": "x", "id": 5}]}, "input[0].id"),
    ({"input": [{"role": "assistant", "content": "", "phase": 1}]}, "input[0].phase"),
    ({"input": [{"type": "function_call"}]}, "input[0].call_id"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
        "input[0].call_id",
    ),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ({"input": "x", "tools": [5]}, "tools[0]"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tools": TOOLS * 2}, "tools[1].name"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    (
        {
            "input": "x",
            "tools": TOOLS,
            "tool_choice": {"type": "function", "name": "sub"},
        },
        "tool_choice",
    ),
    ({"input": "x", "tool_choice": "some"}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"input": "x", "reasoning": {"effort": "max"}}, "reasoning.effort"),
    ({"input": "x", "reasoning": 5}, "reasoning"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    (
        {
            "input": "x",
            "text": {
                "format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}
            },
        },
        "text.format.schema",
    ),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_tokens": 5}, "max_tokens"),
    ({"input": "x", "logprobs": 5}, "logprobs"),
    ({"input": "x", "top_logprobs": 5}, "top_logprobs"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "include": ["file_search_call.results"]}, "include"),
    ({"input": "x", "include": "x"}, "include"),
    ({"input": "x", "background": True, "store": False}, "store"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "conversation": "c"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "metadata": {"a": 5}}, "metadata.a"),
    ({"input": "x", "metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"input": "x", "previous_response_id": "x"}, "previous_response_id"),
    ({"input": "x", "temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_bodies(strict: Served, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = strict.post(PATH, body | {"stream": stream})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
    assert idle(strict.service.llm)


WORDS = [*PREFIXES, "item_reference", "web_search_call"]
TYPES = len(WORDS)
WORDS += [
    "user",
    "developer",
    "assistant",
    "input_text",
    "refusal",
    "function",
    "x",
    "a b",
    "",
]
KEYS = """
type role content text call_id name arguments output id phase refusal tools action
operation input namespace command commands tool_calls function custom
""".split()
LEAVES = st.sampled_from([None, True, 5, -1.5, *WORDS])
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=12,
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS[:TYPES])},
    optional={key: NESTED for key in KEYS[1:]}
    | {"role": st.sampled_from(WORDS[TYPES:])},
)


@settings(max_examples=300)
@given(
    given=NESTED | st.lists(ITEM | NESTED, max_size=4),
    tools=st.none() | st.lists(NESTED | ITEM, max_size=2),
    options=st.dictionaries(
        st.sampled_from(["instructions", "reasoning", "text", "metadata", "include"]),
        NESTED,
        max_size=2,
    ),
)
def test_bodies_are_refused_on_purpose(
    served: Served, strict: Served, given: Any, tools: Any, options: dict[str, Any]
) -> None:
    """What isn't right meets a check, which names the parameter."""
    body = {"input": given, "tools": tools, **options}
    for service in (served.service, strict.service):
        call = Call(service, HTTPRequest({"type": "http"}), "id")
        try:
            call.body = responses.RESPONSES[0].read_parsed(call, body)
            made = responses.Response(call)
        except APIError as error:
            assert error.param
        except (ParameterError, ContextLengthError) as error:
            assert error.param
        else:
            assert len(made.specs[0].tokens) > 10


def test_the_document_is_true_of_responses(strict: Served) -> None:
    document = strict.client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ResponsesBody"]
    assert schema["required"] == ["input"]
    for name in schema["properties"]:
        body = {"input": "x", "max_output_tokens": 1, name: None}
        if name != "input":
            assert strict.post(PATH, body).status_code == 200, name
    for name in ("n", "stream_options"):
        for value in schema["properties"][name]["enum"]:
            body = {"input": "x", "max_output_tokens": 1, name: value}
            assert strict.post(PATH, body).status_code == 200, name
    items = document["paths"][f"{PATH}/{{response}}/input_items"]["get"]
    assert [p["name"] for p in items["parameters"]] == [
        "response",
        "limit",
        "order",
        "after",
        "include",
    ]


# ---- random tokens


@pytest.fixture(scope="module")
def babbler(folder: Path) -> Iterator[LLM]:
    config = EngineConfig(num_pages=1200, max_num_batched_tokens=1024)
    with LLM(folder, config) as found:
        yield found


async def respond(client: httpx.AsyncClient, llm: LLM, seed: int) -> None:
    """One response, whole and streamed, checked in all its parts."""
    body: dict[str, Any] = {"input": "?", "seed": seed, "max_output_tokens": MOST}
    if seed % 3 == 0:
        body["include"] = ["message.output_text.logprobs"]
    whole = await client.post(PATH, json=body)
    stream = await client.post(PATH, json=body | {"stream": True})
    assert whole.status_code == stream.status_code == 200, whole.text
    found, events = whole.json(), events_of(stream.text)
    Response.model_validate(found)
    items, last = rebuilt(events), events[-1]["response"]
    assert last["output"] == items and events[0]["response"]["output"] == []
    assert last["status"] == found["status"]
    ids = expected(seed, llm)
    written = "".join(message.content for message in parse(ids, TOKENIZER))
    for output in (items, found["output"]):
        assert "".join(texts_of(output)) == written
    for one, other in zip(items, found["output"], strict=True):
        for name in one.keys() - {"id", "call_id"}:
            assert one[name] == other[name]
    for response in (found, last):
        assert response["usage"]["output_tokens"] == len(ids)
    # Whatever the model wrote can be shown to it again.
    body = {"input": "?", "previous_response_id": found["id"], "seed": seed}
    again = await client.post(PATH, json=body | {"max_output_tokens": 1})
    assert again.status_code == 200, again.text


def respond_to_all(llm: LLM, first: int, count: int) -> None:
    """Responses of ``count`` seeds, all at once; then nothing is left in the engine."""

    async def main() -> None:
        app: Any = make_app(Service(llm, Options([NAME])))
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://x")
        seeds = range(first, first + 25 * count, 25)
        with babbling(llm, babble):
            await asyncio.gather(*[respond(client, llm, seed) for seed in seeds])

    run(main())
    assert idle(llm)


def test_random_tokens_never_fail_responses(babbler: LLM) -> None:
    respond_to_all(babbler, 0, 100)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(1, 4))
def test_random_tokens_never_fail_responses_at_length(babbler: LLM, part: int) -> None:
    respond_to_all(babbler, 10**6 * part, 100)


# ---- what is kept


def keep(store: ResponseStore, id: str, text: str) -> None:
    """A response is written, and over."""
    item = {"id": f"msg_{id}_0", "text": text}
    found = FinishedResponse({"output": [item]}, [])
    store.begin(id, found)
    store.end(id, found)


def test_the_oldest_make_room() -> None:
    store = ResponseStore(most=3)
    for number in range(5):
        keep(store, str(number), "x")
    assert len(store) == 3
    assert [bool(store.find(str(number))) for number in range(5)] == [0, 0, 1, 1, 1]
    store.forget("3")
    store.end("3", FinishedResponse({"output": []}, []))  # too late
    assert store.find("3") is None and len(store) == 2


def test_bytes_are_bounded() -> None:
    store = ResponseStore(most_bytes=1000)
    for number in range(10):
        keep(store, str(number), "x" * 280)
        assert store.bytes <= 1000
    assert len(store) == 3
    keep(store, "9", "")  # in place of what was there
    assert len(store) == 3 and store.bytes < 700
    keep(store, "long", "x" * 1000)  # too long to be kept at all
    assert len(store) == 0 and store.bytes == 0


def test_responses_are_forgotten_in_time() -> None:
    now = 0.0
    store = ResponseStore(seconds=10, clock=lambda: now)
    keep(store, "a", "x")
    now = 5.0
    keep(store, "b", "x")
    now = 10.0
    assert store.find("a") is None and store.find("b") is not None
    assert store.find_item("msg_a_0") is None and store.find_item("msg_b_0") is not None
    now = 15.0
    assert store.find("b") is None and store.bytes == 0
    assert store.find_item("msg_b_0") is None


def test_items_are_found_by_ids_of_ours() -> None:
    """A client may call an item as it likes: that name is its own affair."""
    store = ResponseStore()
    items = [{"id": "msg_1", "text": "secret"}, {"id": "msg_a_in0", "text": "x"}]
    found = FinishedResponse({"output": []}, items)
    store.begin("resp_a", found)
    store.end("resp_a", found)
    assert store.find_item("msg_1") is None
    assert store.find_item("msg_a_in0") == items[1]
    store.forget("resp_a")
    assert store.find_item("msg_a_in0") is None


def test_items_are_referred_to(served: Served, prompts: list[list[int]]) -> None:
    """As the AI SDK does it: what was said before is named by its id."""
    with said(served, ANSWER):
        first = served.post(PATH, {"input": "one"}).json()
        items = [{"type": "item_reference", "id": i["id"]} for i in first["output"]]
        asked = served.client.get(f"{PATH}/{first['id']}/input_items").json()["data"]
        items.insert(0, {"type": "item_reference", "id": asked[0]["id"]})
        items.append({"role": "user", "content": "two"})
        assert served.post(PATH, {"input": items}).status_code == 200
        following = {"input": "two", "previous_response_id": first["id"]}
        served.post(PATH, following)
    assert prompts[1] == prompts[2]
    gone = [{"type": "item_reference", "id": "msg_nowhere"}]
    answer = served.post(PATH, {"input": gone})
    assert answer.status_code == 404
    assert "'msg_nowhere'" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "input[0].id"


def test_what_is_recalled_keeps_nobody_waiting(served: Served) -> None:
    """A short body may mean a long conversation, which a worker thread renders."""
    threads = []
    process = served.service.llm.input_processor.__class__.process_chat

    def noting(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return process(*given, **options)

    with said(served, ANSWER):
        first = served.post(PATH, {"input": "one"}).json()["id"]
        with pytest.MonkeyPatch.context() as patch:
            kind = type(served.service.llm.input_processor)
            patch.setattr(kind, "process_chat", noting)
            served.post(PATH, {"input": "two", "previous_response_id": first})
            reference = {"type": "item_reference", "id": f"msg_{first[5:]}_1"}
            assert served.post(PATH, {"input": [reference]}).status_code == 200
    assert len(threads) == 2
    assert all(name.startswith("AnyIO worker") for name in threads)
