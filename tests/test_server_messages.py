"""/v1/messages: blocks in and out, streams as whole, and Anthropic's own client."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from babble import MOST, babble, expected
from cut_turns import CutTurn, cut_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from models import HELLO, TOKENIZER, until
from pydantic import TypeAdapter
from serving import (
    NAME,
    Served,
    babbling,
    events_of,
    idle,
    noted,
    run,
    said,
    serving,
    slow,
)
from starlette.requests import Request as HTTPRequest

from simplellm import LLM, EngineConfig
from simplellm.api.checks import ContextLengthError
from simplellm.api.outputs import Usage, merge
from simplellm.base.config import ParameterError
from simplellm.server.anthropic import messages
from simplellm.server.anthropic.messages import (
    MOST_LEVELS,
    Blocks,
    input_json,
    message_usage,
)
from simplellm.server.app import make_app
from simplellm.server.http.endpoint import Call, Service
from simplellm.server.http.errors import APIError
from simplellm.server.start import Options
from simplellm.text.harmony import Delta, is_call, parse

PATH = "/v1/messages"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>132<|return|>"
CALLING = (
    f"{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
)
CALL = CALLING + '{"a": 1}<|call|>'
TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Add numbers.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
]
HELLO_BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 50}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def client(served: Served) -> anthropic.Anthropic:
    url = f"http://127.0.0.1:{served.port}"
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def rebuilt(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of their events, each of which finds its block."""
    blocks: list[dict[str, Any]] = []
    inputs: list[str] | None = None
    now_open = False
    for event in events:
        if event["type"] == "ping":
            continue
        EVENT.validate_python(event)
        match event["type"]:
            case "content_block_start":
                assert not now_open and event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                now_open, inputs = True, None
                continue
            case "content_block_stop":
                assert now_open and event["index"] == len(blocks) - 1
                now_open = False
                if blocks[-1]["type"] == "tool_use":
                    assert inputs is not None
                    blocks[-1]["written"] = "".join(inputs)
                    blocks[-1]["input"] = json.loads(blocks[-1]["written"])
                continue
        assert now_open and event["index"] == len(blocks) - 1
        assert event["type"] == "content_block_delta"
        kind = event["delta"]["type"].removesuffix("_delta")
        if kind == "input_json":
            inputs = [*(inputs or ()), event["delta"]["partial_json"]]
        else:
            blocks[-1][kind] += event["delta"][kind]
    assert not now_open
    return blocks


def split(
    events: Sequence[dict[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The message that a stream begins with, its blocks, and how it ends."""
    start, *between, delta, stop = events
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    assert delta["type"] == "message_delta"
    for event in (start, delta, stop):
        EVENT.validate_python(event)
    return start["message"], rebuilt(between), delta


def plain(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks as a client reads them, without what differs from answer to answer."""
    found = json.loads(orjson.dumps(list(blocks)))
    return [{n: b[n] for n in b if n not in ("id", "written")} for b in found]


def told(blocks: Sequence[dict[str, Any]]) -> str:
    """All that the blocks of a stream tell of the turn."""
    return "".join(b.get("written") or b[b["type"]] for b in blocks)


def wanted(ids: Sequence[int]) -> str:
    """What they should tell of these tokens."""
    return "".join(
        input_json(message.content) if is_call(message) else message.content
        for message in parse(ids, TOKENIZER)
    )


# ---- parts to events, without a server


@settings(max_examples=300)
@given(cut_turns())
def test_events_add_up_however_parts_are_cut(cut_turn: CutTurn) -> None:
    params, reply, parts, parts_read = cut_turn
    blocks = Blocks("k")
    events = [event for part in parts_read for event in blocks.push(part)]
    events += blocks.close()
    read = rebuilt(events)
    assert plain(read) == plain(blocks.done)
    whole = Blocks("k")
    for part in merge(parts):
        whole.push(part)
    whole.close()
    assert orjson.dumps(blocks.done) == orjson.dumps(whole.done)
    if not params.stop:
        assert told(read) == wanted(reply.token_ids)


def test_blocks_are_apart_where_their_kinds_are() -> None:
    blocks = Blocks("k")
    parts = [
        Delta("analysis", None, "a"),
        Delta("final", None, "b"),
        Delta("nowhere", None, "c"),
        Delta("commentary", None, "d"),
        Delta("commentary", "functions.x", "", 0),
        Delta("commentary", "functions.y z", "{", 1),
        Delta("final", None, ""),
        Delta("analysis", None, "e"),
    ]
    events = [event for part in parts for event in blocks.push(part)] + blocks.close()
    found = plain(rebuilt(events))
    assert found == [
        {"type": "thinking", "thinking": "a", "signature": "unsigned"},
        {"type": "text", "text": "bc"},
        {"type": "text", "text": "d"},
        {"type": "tool_use", "name": "x", "input": {}},
        {"type": "tool_use", "name": "y_z", "input": {"_raw": "{"}},
        {"type": "thinking", "thinking": "e", "signature": "unsigned"},
    ]
    assert {"type": "ping"} in events
    assert len({block.get("id") for block in blocks.done}) == 3  # None is one


DEEP = '{"a": ' + "[" * (MOST_LEVELS - 1) + "]" * (MOST_LEVELS - 1) + "}"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        ' {"a":1.50, "a":2}\n',
        '{"n": 123456789012345678901234567890}',
        '{"s": "\\u00e9 é \\u2028 \u2028"}',
        '{"_raw": 5}',
        DEEP,
    ],
)
def test_an_object_goes_out_as_it_is(text: str) -> None:
    assert input_json(text) == text


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "5",
        "[1]",
        "null",
        '{"a": ',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 1} more',
        "{'a': 1}",
        '{"a": "\\ud800"}',
        "\ufeff{}",
        DEEP.replace("[", "[[").replace("]", "]]"),
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        "[" * 100_000,
    ],
)
def test_what_is_no_object_is_in_one(text: str) -> None:
    assert json.loads(input_json(text)) == {"_raw": text}


def test_usage_adds_up() -> None:
    assert message_usage(Usage(10, 7, 4, 2)) == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }


# ---- over HTTP


def input_tokens(usage: dict[str, Any]) -> int:
    """How long the prompt was, wherever it came from."""
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def test_a_message(served: Served) -> None:
    with said(served, ANSWER):
        answer = served.post(PATH, HELLO_BODY | {"model": NAME})
        again = served.post(PATH, HELLO_BODY).json()
    found = answer.json()
    assert answer.status_code == 200, answer.text
    Message.model_validate(found)
    assert found["id"].startswith("msg_") and found["id"] != again["id"]
    thinking, text = found.pop("content")
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert text == {"type": "text", "text": "132"}
    count = len(TOKENIZER.encode("Hm."))
    usage = found["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": count}
    assert input_tokens(usage) == input_tokens(again["usage"])
    assert (found["type"], found["role"], found["model"]) == (
        "message",
        "assistant",
        NAME,
    )
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)


def test_a_stream(served: Served) -> None:
    with said(served, CALL):
        events = served.events(PATH, HELLO_BODY | {"tools": TOOLS}, done=False)
    start, blocks, end = split(events)
    Message.model_validate(start)
    assert start["content"] == [] and start["stop_reason"] is None
    assert events[1] == {"type": "ping"}
    assert plain(blocks) == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "tool_use", "name": "add", "input": {"a": 1}},
    ]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] > 10
    assert start["usage"]["input_tokens"] > 0


@pytest.mark.parametrize(
    ("script", "options", "reason", "sequence"),
    [
        (ANSWER, {}, "end_turn", None),
        (CALL, {}, "tool_use", None),
        (ANSWER, {"max_tokens": 3}, "max_tokens", None),
        (ANSWER, {"stop_sequences": ["x", "32"]}, "stop_sequence", "32"),
        (ANSWER, {"stop_token_ids": [TOKENIZER.encode("H")[0]]}, "end_turn", None),
        (
            "<|channel|>final<|message|>" + "x" * 1000,
            {"max_tokens": 10**6},
            "model_context_window_exceeded",
            None,
        ),
    ],
)
def test_why_a_turn_ends(
    served: Served, script: str, options: dict[str, Any], reason: str, sequence: Any
) -> None:
    body = HELLO_BODY | options
    with said(served, script):
        whole = served.post(PATH, body).json()
        _, blocks, end = split(served.events(PATH, body, done=False))
    Message.model_validate(whole)
    wanted = {"stop_reason": reason, "stop_sequence": sequence}
    assert end["delta"] == wanted
    assert {name: whole[name] for name in wanted} == wanted
    assert plain(blocks) == plain(whole["content"])
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    if sequence is not None:
        assert blocks[-1]["text"] == "1"


def test_what_the_model_is_shown(served: Served, prompts: list[list[int]]) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "U"},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "", "signature": "z"},
                {"type": "text", "text": "A"},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "V"}, {"type": "text", "text": "W"}],
        },
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T"},
                {"type": "text", "text": "C"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {"_raw": "{"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": "no",
                    "is_error": True,
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "R"}],
                },
                {"type": "tool_result", "tool_use_id": "1"},
                {"type": "text", "text": "X", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    base = {"messages": turns, "max_tokens": 1}
    blocks = [{"type": "text", "text": "I"}, {"type": "text", "text": "J"}]
    bodies: list[dict[str, Any]] = [
        base | {"system": "I", "output_config": {"effort": "high"}},
        base | {"system": blocks, "tools": TOOLS, "thinking": {"type": "disabled"}},
        base | {"tools": TOOLS, "tool_choice": {"type": "none"}},
    ]
    for body in bodies:
        answer = served.post(PATH, body)
        assert answer.status_code == 200, answer.text
    high, tools, none = (
        [(m.role, m.channel, m.content) for m in parse(ids[1:], TOKENIZER)]
        for ids in prompts
    )
    assert "Reasoning: high" in TOKENIZER.decode(prompts[0])
    assert "Reasoning: low" in TOKENIZER.decode(prompts[1])
    assert "Reasoning: medium" in TOKENIZER.decode(prompts[2])
    rest = [
        ("user", None, "U"),
        ("assistant", "final", "A"),
        ("user", None, "V\n\nW"),
        ("developer", None, "# Instructions\n\nS"),
        ("assistant", "analysis", "T"),
        ("assistant", "commentary", "C"),
        ("assistant", "commentary", '{"a": 1}'),
        ("assistant", "commentary", "{"),
        ("tool", "commentary", "Error: no"),
        ("tool", "commentary", "R"),
        ("tool", "commentary", ""),
        ("user", None, "X"),
    ]
    assert high[1:] == [("developer", None, "# Instructions\n\nI"), *rest]
    assert none[1:] == rest and tools[2:] == rest
    assert tools[1][2].startswith("# Instructions\n\nI\n\nJ\n\n# Tools")
    assert "type add = " in tools[1][2]


def test_counted_tokens(served: Served, prompts: list[list[int]]) -> None:
    body = {"messages": HELLO, "system": "Be brief.", "tools": TOOLS}
    served.post(PATH, body | {"max_tokens": 1})
    found = served.post(f"{PATH}/count_tokens", body).json()
    assert found == {"input_tokens": len(prompts[0])}
    long = {"messages": [{"role": "user", "content": "x " * 5000}]}
    count = served.post(f"{PATH}/count_tokens", long).json()["input_tokens"]
    assert count > 5000
    assert served.post(PATH, long | {"max_tokens": 1}).status_code == 400


# ---- the client


def test_the_client(client: anthropic.Anthropic, served: Served) -> None:
    asked: dict[str, Any] = {"model": NAME, **HELLO_BODY}
    with said(served, ANSWER):
        found = client.messages.create(**asked, extra_headers={"x-request-id": "me"})
        with client.messages.stream(**asked) as stream:
            seen = [event.type for event in stream]
            streamed = stream.get_final_message()
        with client.messages.stream(**asked) as stream:
            text = stream.get_final_text()
        raw = [event.type for event in client.messages.create(**asked, stream=True)]
        beta = client.beta.messages.create(**asked)
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found._request_id == "me"
    names = {"type", "text", "thinking", "signature"}
    for blocks in (streamed.content, beta.content):
        for block, whole in zip(blocks, found.content, strict=True):
            assert block.model_dump(include=names) == whole.model_dump(include=names)
    assert streamed.usage.output_tokens == found.usage.output_tokens
    assert streamed.stop_reason == "end_turn" and text == "132"
    assert {"thinking", "text", "signature", "message_stop"} <= {*seen}
    assert raw[0] == "message_start" and raw[-1] == "message_stop"
    (card, _) = client.models.list()
    assert card == client.models.retrieve(NAME)
    assert (
        card.lifecycle == "active"
        and card.display_name == NAME
        and card.created_at.timestamp() > 0
    )
    count = client.messages.count_tokens(model=NAME, messages=HELLO_BODY["messages"])
    for usage in (found.usage, streamed.usage, beta.usage):
        assert input_tokens(usage.to_dict()) == count.input_tokens


def test_the_asynchronous_client(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}"
    asked: dict[str, Any] = {"model": NAME, **HELLO_BODY}

    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            found = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                texts = [text async for text in stream.text_stream]
        assert found.content[-1].type == "text"
        return [found.content[-1].text, "".join(texts)]

    with said(served, ANSWER):
        assert run(main()) == ["132", "132"]


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": ', ""])
def test_tools_of_the_client(
    client: anthropic.Anthropic,
    served: Served,
    prompts: list[list[int]],
    arguments: str,
) -> None:
    """What the model wrote is shown to it again, even if it was no JSON."""
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 60, "tools": TOOLS}
    with said(served, f"{CALLING}{arguments}<|call|>"):
        found = client.messages.create(**asked, messages=HELLO_BODY["messages"])
        with client.messages.stream(**asked, messages=HELLO_BODY["messages"]) as stream:
            streamed = stream.get_final_message()
    call = found.content[1]
    assert call.type == "tool_use" and call.name == "add"
    assert found.stop_reason == streamed.stop_reason == "tool_use"
    assert streamed.content[1].input == call.input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "132"}
    turns: Any = [
        *HELLO_BODY["messages"],
        found.to_param(),
        {"role": "user", "content": [result]},
    ]
    with said(served, ANSWER):
        answer = client.messages.create(**asked, messages=turns)
    assert answer.content[-1].type == "text" and answer.content[-1].text == "132"
    text = TOKENIZER.decode(prompts[2])
    shown = arguments or "{}"
    assert text.startswith(TOKENIZER.decode(prompts[0][:-2]))
    assert "Hm.<|end|>" in text and f"<|message|>{shown}<|call|>" in text
    assert "<|start|>functions.add to=assistant" in text


def test_the_clients_own_loop(client: anthropic.Anthropic, served: Served) -> None:
    """Its runner of tools creates a thread, and sends the whole conversation."""

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds.

        Args:
            a: A number.
        """
        return str(a + 131)

    runner = client.beta.messages.tool_runner(
        model=NAME, max_tokens=60, tools=[add], messages=[*HELLO_BODY["messages"]]
    )
    with said(served, f'{CALLING}{{"a": 1}}<|call|>'), noted(served.service.llm):
        assert next(runner).stop_reason == "tool_use"
    with said(served, ANSWER), noted(served.service.llm) as prompts:
        last = next(runner).content[-1]
    assert last.type == "text" and last.text == "132"
    result = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>132"
    assert result in TOKENIZER.decode(prompts[0])


def test_errors_of_the_client(client: anthropic.Anthropic, served: Served) -> None:
    asked: dict[str, Any] = {"model": NAME, **HELLO_BODY}

    def refused(kind: type[anthropic.APIStatusError], **options: Any) -> str:
        with pytest.raises(kind) as found:
            client.messages.create(**(asked | options))
        body: Any = found.value.body
        assert body["type"] == "error" and body["error"]["message"]
        assert body["error"].keys() == {"type", "message"}
        assert found.value.request_id
        return str(body["error"]["type"])

    bad = anthropic.BadRequestError
    assert refused(bad, extra_body={"temperature": -1}) == "invalid_request_error"
    llm = served.service.llm
    with serving(llm, strict=True) as other:
        client = anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{other.port}", api_key="none", max_retries=0
        )
        assert refused(anthropic.NotFoundError, model="other") == "not_found_error"
    with serving(llm, key="s3cret", timeout=0.5) as other:
        url = f"http://127.0.0.1:{other.port}"
        wrong = anthropic.Anthropic(base_url=url, api_key="no", max_retries=0)
        right = wrong.with_options(api_key="s3cret")
        with pytest.raises(anthropic.AuthenticationError) as found:
            wrong.messages.create(**asked)
        assert found.value.type == "authentication_error"
        with said(other, "<|channel|>final<|message|>" + "x" * 390), slow(llm):
            long = asked | {"max_tokens": 390}
            with pytest.raises(anthropic.GatewayTimeoutError):
                right.messages.create(**long)
            texts = []
            with (
                pytest.raises(anthropic.APIStatusError) as failed,
                right.messages.stream(**long) as stream,
            ):
                for text in stream.text_stream:
                    texts.append(text)
        assert texts and failed.value.type == "timeout_error"
    # An idle server that drains is gone at once: this one still answers somebody.
    with serving(llm) as other:
        url = f"http://127.0.0.1:{other.port}"
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with (
            said(other, "<|channel|>final<|message|>" + "x" * 390),
            slow(llm),
            client.messages.stream(**long) as stream,
        ):
            next(iter(stream.text_stream))
            other.service.draining = True
            with pytest.raises(anthropic.ServiceUnavailableError) as drained:
                client.messages.create(**asked)
            other.service.draining = False
        assert drained.value.type == "overloaded_error"
    until(lambda: idle(llm))


USER = {"role": "user", "content": "x"}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (turn(5), "messages[0].content[0]"),
    (turn({"type": "image"}), "messages[0].content[0].type"),
    (turn({"type": "thinking"}), "messages[0].content[0].type"),
    (turn({"type": "text"}), "messages[0].content[0].text"),
    (turn({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (
        turn({"type": "tool_result", "tool_use_id": "c"}),
        "messages[0].content[0].tool_use_id",
    ),
    (
        turn({"type": "tool_use", "id": "c", "name": "a"}, role="assistant"),
        "messages[0].content[0].input",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": 101}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 0}, "top_p"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop": ["x"]}, "stop"),
    ({"metadata": 5}, "metadata"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": TOOLS * 2}, "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "tools to choose from"),
    ({"tool_choice": {"type": "tool", "name": "add"}}, "the tools ([])"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any", "name": "add"}}, "tool_choice.name"),
    (
        {"tools": [TOOLS[0] | {"strict": True, "input_schema": {"not": {}}}]},
        "tools[0].parameters",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema.not",
    ),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "max"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"n": 2}, "n"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("options", "word"), BAD)
def test_bad_bodies(strict: Served, options: dict[str, Any], word: str) -> None:
    for stream in (False, True):
        answer = strict.post(PATH, HELLO_BODY | options | {"stream": stream})
        found = answer.json()
        assert answer.status_code == 400, found
        assert found["type"] == "error"
        assert found["error"]["type"] == "invalid_request_error"
        assert word in found["error"]["message"], found
    assert idle(strict.service.llm)


@pytest.mark.parametrize(
    "options",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"metadata": {"user_id": "me"}},
        {"service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"top_k": 5, "top_p": 0.9, "temperature": 0.5, "stop_sequences": ["x"]},
        {"tools": [TOOLS[0] | {"type": "custom", "strict": True}]},
    ],
)
def test_parameters_of_clients(served: Served, options: dict[str, Any]) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    body = HELLO_BODY | options | {"max_tokens": 1}
    answer = served.post(f"{PATH}?beta=true", body, headers=headers)
    assert answer.status_code == 200, answer.text


WORDS = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]
WORDS += ["user", "assistant", "system", "custom", "x", "a b", ""]
KEYS = "type role content text thinking id name input tool_use_id is_error".split()
NESTED = st.recursive(
    st.sampled_from([None, True, 5, -1.5, *WORDS]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=12,
)
SOME_BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS[:5])}, optional={key: NESTED for key in KEYS[2:]}
)
SOME_MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": NESTED | st.lists(SOME_BLOCK, max_size=3),
    }
)


@settings(max_examples=300)
@given(
    turns=NESTED | st.lists(SOME_MESSAGE | NESTED, max_size=4),
    system=st.none() | NESTED | st.lists(SOME_BLOCK, max_size=2),
    tools=st.none() | st.lists(NESTED, max_size=2),
    options=st.dictionaries(
        st.sampled_from(["tool_choice", "thinking", "output_config", "metadata"]),
        NESTED,
        max_size=2,
    ),
)
def test_bodies_are_refused_on_purpose(
    served: Served,
    strict: Served,
    turns: Any,
    system: Any,
    tools: Any,
    options: dict[str, Any],
) -> None:
    """What isn't right meets a check, which names the parameter."""
    body = {"messages": turns, "system": system, "tools": tools, "max_tokens": 9}
    for service in (served.service, strict.service):
        call = Call(service, HTTPRequest({"type": "http"}), "id")
        try:
            call.body = messages.MESSAGES[0].read_parsed(call, body | options)
            made = messages.AnthropicMessage(call)
        except APIError as error:
            assert error.message
        except (ParameterError, ContextLengthError) as error:
            assert error.param
        else:
            assert len(made.specs[0].tokens) > 10


@pytest.mark.parametrize("content", ["The sum is", "```python\n"])
def test_an_answer_that_is_begun(
    served: Served, prompts: list[list[int]], client: anthropic.Anthropic, content: str
) -> None:
    """The model goes on with it; what comes back is the rest."""
    begun = {"role": "assistant", "content": content}
    asked: dict[str, Any] = {"model": NAME, "messages": [*HELLO, begun]}
    with said(served, " 132<|return|>"):
        found = client.messages.create(**asked, max_tokens=9)
        with client.messages.stream(**asked, max_tokens=9) as stream:
            streamed = stream.get_final_message()
    for message in (found, streamed):
        (block,) = message.content
        assert block.type == "text" and block.text == " 132"
        assert message.stop_reason == "end_turn"
    text = TOKENIZER.decode(prompts[0])
    assert text.endswith(f"<|channel|>final<|message|>{content}")
    # A format begins anew.
    body = HELLO_BODY | {"messages": [*HELLO, begun], "max_tokens": 1}
    schema = {"type": "object", "properties": {}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = served.post(PATH, body | {"output_config": config})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-parameters"] == "messages.prefill"
    assert TOKENIZER.decode(prompts[2]).endswith("<|start|>assistant")


def test_a_conversation_that_is_only_read(served: Served) -> None:
    """As Anthropic has it with max_tokens 0: the next request finds it in the cache."""
    text = "A long story. " * 20
    body = HELLO_BODY | {"messages": [{"role": "user", "content": text}]}
    found = served.post(PATH, body | {"max_tokens": 0}).json()
    assert found["content"] == [] and found["stop_reason"] == "max_tokens"
    assert found["usage"]["output_tokens"] == 0
    events = served.events(PATH, body | {"max_tokens": 0}, done=False)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    found = served.post(PATH, body | {"max_tokens": 1}).json()
    assert found["usage"]["cache_read_input_tokens"] > 0


def test_the_document_is_true_of_messages(strict: Served) -> None:
    document = strict.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    operation = document["paths"][PATH]["post"]
    content = operation["responses"]["400"]["content"]["application/json"]
    assert content["schema"]["$ref"].endswith("/AnthropicError")
    for kind, path in (("MessageBody", PATH), ("CountBody", f"{PATH}/count_tokens")):
        needed = {"messages": HELLO, "max_tokens": 1}
        schema = schemas[kind]
        body = {name: needed[name] for name in schema["required"]}
        assert "messages" in body
        for name, about in schema["properties"].items():
            for value in about.get("enum", [None]):
                if name not in body:
                    answer = strict.post(path, body | {name: value})
                    assert answer.status_code == 200, answer.text


# ---- random tokens


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
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_odd_turns_are_messages(
    client: anthropic.Anthropic, served: Served, script: str
) -> None:
    ids = TOKENIZER.encode(script, special=True)
    asked: dict[str, Any] = {"model": NAME, **HELLO_BODY}
    with said(served, [*ids, TOKENIZER.special["<|return|>"]]):
        found = client.messages.create(**asked).model_dump()
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message().model_dump()
        with client.messages.create(**asked, stream=True) as events:
            blocks = rebuilt([e.to_dict() for e in events if "block" in e.type])
    assert told(blocks) == wanted(ids)
    names = ("type", "text", "thinking", "name", "input")
    for one, other in zip(found["content"], streamed["content"], strict=True):
        assert [one.get(n) for n in names] == [other.get(n) for n in names]


async def ask_both(client: httpx.AsyncClient, llm: LLM, seed: int) -> None:
    """One message, whole and streamed, with all that the model wrote in it."""
    body = {"messages": HELLO, "seed": seed, "max_tokens": MOST}
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    stream = await client.post(PATH, json=body | {"stream": True})
    assert stream.status_code == 200, stream.text
    whole = answer.json()
    Message.model_validate(whole)
    _, blocks, end = split(events_of(stream.text, done=False))
    assert plain(blocks) == plain(whole["content"])
    assert end["delta"] == {name: whole[name] for name in end["delta"]}
    ids = expected(seed, llm)
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == len(ids)
    assert told(blocks) == wanted(ids)
    for block in blocks:
        assert block.get("written", "") in answer.text  # byte for byte


def babble_through(llm: LLM, first: int, count: int) -> None:
    """Messages of many seeds at once; then nothing is left in the engine."""

    async def main() -> None:
        app: Any = make_app(Service(llm, Options([NAME])))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x"
        ) as client:
            seeds = range(first, first + 25 * count, 25)
            with babbling(llm, babble):
                await asyncio.gather(*(ask_both(client, llm, seed) for seed in seeds))

    run(main())
    assert idle(llm)


@pytest.fixture(scope="module")
def large(folder: Path) -> Iterator[LLM]:
    config = EngineConfig(num_pages=1200, max_num_batched_tokens=1024)
    with LLM(folder, config) as found:
        yield found


def test_random_tokens_never_fail(large: LLM) -> None:
    babble_through(large, 0, 60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(1, 4))
def test_random_tokens_never_fail_at_length(large: LLM, part: int) -> None:
    babble_through(large, 10**6 * part, 100)
