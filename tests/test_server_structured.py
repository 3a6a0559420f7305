"""Structured output over HTTP: what reaches the engine, and what compiling holds up."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import HELLO, TOKENIZER, saying
from serving import Served, serving

from simplellm import LLM
from simplellm.base.grammar import Grammar

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "sum", "schema": SCHEMA}
CHAT_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True},
}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT = [{"type": "function", "function": FUNCTION | {"strict": True}}]
FLAT = [{"type": "function", **FUNCTION}]
ANTHROPIC = [{"name": "add", "input_schema": SCHEMA}]
SAID = '<|channel|>final<|message|>{"a": 1}<|return|>'

PATHS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 20},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 20},
    "/v1/messages": {"messages": HELLO, "max_tokens": 20},
}


@pytest.fixture
def asked(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Grammar | None]:
    """The grammars that are asked for; the engine gets its requests without them."""
    found: list[Grammar | None] = []
    llm = served.service.llm
    replies = llm.replies

    def remembering(specs: Any, **options: Any) -> Any:
        found.extend(spec.grammar for spec in specs)
        return replies([replace(spec, grammar=None) for spec in specs], **options)

    monkeypatch.setattr(llm, "replies", remembering)
    return found


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v1/completions", {"structured_outputs": {"json": SCHEMA}}),
        ("/v1/completions", {"structured_outputs": {"choice": ["a", "b"]}}),
        ("/v1/completions", {"response_format": CHAT_FORMAT}),
        ("/v1/chat/completions", {"response_format": CHAT_FORMAT}),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {"structured_outputs": {"regex": "[a-z]+"}}),
        ("/v1/chat/completions", {"tools": STRICT}),
        ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": "required"}),
        ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": TOOLS[0]}),
        ("/v1/responses", {"text": {"format": FORMAT}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        ("/v1/responses", {"tools": [FLAT[0] | {"strict": True}]}),
        ("/v1/responses", {"tools": FLAT, "tool_choice": "required"}),
        (
            "/v1/responses",
            {"tools": FLAT, "tool_choice": {"type": "function", "name": "add"}},
        ),
        ("/v1/messages", {"tools": ANTHROPIC, "tool_choice": {"type": "any"}}),
        (
            "/v1/messages",
            {"tools": ANTHROPIC, "tool_choice": {"type": "tool", "name": "add"}},
        ),
        ("/v1/messages", {"tools": [ANTHROPIC[0] | {"strict": True}]}),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
    ],
)
def test_a_grammar_reaches_the_engine(
    served: Served, asked: list[Any], path: str, options: dict[str, Any]
) -> None:
    with saying(served.service.llm, SAID):
        answer = served.post(path, PATHS[path] | options)
    assert answer.status_code == 200, answer.text
    assert len(asked) == 1 and asked[0] is not None


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v1/completions", {"response_format": {"type": "text"}}),
        ("/v1/chat/completions", {"tools": TOOLS}),
        ("/v1/chat/completions", {"tools": TOOLS, "parallel_tool_calls": False}),
        ("/v1/chat/completions", {"tools": STRICT, "tool_choice": "none"}),
        ("/v1/chat/completions", {"response_format": {"type": "text"}}),
        ("/v1/responses", {"tools": FLAT, "text": {"format": {"type": "text"}}}),
        ("/v1/messages", {"tools": ANTHROPIC, "tool_choice": {"type": "auto"}}),
    ],
)
def test_no_grammar_is_asked_for(
    served: Served, asked: list[Any], path: str, options: dict[str, Any]
) -> None:
    with saying(served.service.llm, SAID):
        answer = served.post(path, PATHS[path] | options)
    assert answer.status_code == 200, answer.text
    assert asked == [None]


def test_a_response_tells_its_format(served: Served, asked: list[Any]) -> None:
    told = {"description": None, "strict": True}
    for given, shown in (
        (FORMAT, FORMAT | told),
        (CHAT_FORMAT, FORMAT | told),
        ({"type": "json_object"}, {"type": "json_object"}),
    ):
        body = PATHS["/v1/responses"] | {"text": {"format": given}}
        with saying(served.service.llm, SAID):
            answer = served.post("/v1/responses", body).json()
        assert answer["text"]["format"] == shown
        assert answer["output"][-1]["content"][0]["text"] == '{"a": 1}'


@pytest.mark.parametrize("function", [{"name": "add"}, "add"])
def test_a_response_tells_its_choice(
    served: Served, asked: list[Any], function: Any
) -> None:
    """As its own clients read it, also where it was spelled as in chats."""
    for choice in ({"type": "function", "function": function}, "auto"):
        body = PATHS["/v1/responses"] | {"tools": FLAT, "tool_choice": choice}
        with saying(served.service.llm, SAID):
            answer = served.post("/v1/responses", body).json()
        named = {"type": "function", "name": "add"}
        assert answer["tool_choice"] == ("auto" if choice == "auto" else named)


# The model that comes along, which reasons before it answers, and knows no JSON.
SUM = "What is 47 + 85?"
CLOSED = {"required": ["a"], "additionalProperties": False}
RESULT = SCHEMA | CLOSED
ADD = {"name": "add", "description": "Add.", "parameters": RESULT, "strict": True}
NAMED = {"type": "function", "name": "add"}
PLAIN, CHAT, ITEMS, BLOCKS = PATHS
SAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"prompt": SUM, "max_tokens": 300},
    CHAT: {"messages": [{"role": "user", "content": SUM}], "max_tokens": 300},
    ITEMS: {"input": SUM, "max_output_tokens": 300},
    BLOCKS: {"messages": [{"role": "user", "content": SUM}], "max_tokens": 300},
}
ANSWERS = re.compile("is [0-9]{1,3}|no")
GRAMMAR = 'start: "is " /[0-9]{1,3}/ | "no"'
SCHEMED = FORMAT | {"schema": RESULT}
CHAT_ADD = {"type": "function", "function": ADD}
ITEM_ADD = {"type": "function", **ADD}
BLOCK_ADD = {"name": "add", "input_schema": RESULT, "strict": True}
HELD: list[tuple[str, dict[str, Any]]] = [
    (PLAIN, {"structured_outputs": {"json": RESULT}}),
    (PLAIN, {"response_format": {"type": "json_schema", "json_schema": SCHEMED}}),
    (PLAIN, {"structured_outputs": {"regex": ANSWERS.pattern}}),
    (PLAIN, {"structured_outputs": {"choice": ["is 132", "no"]}}),
    (PLAIN, {"structured_outputs": {"grammar": GRAMMAR}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMED}}),
    (CHAT, {"structured_outputs": {"json": RESULT}}),
    (CHAT, {"structured_outputs": {"regex": ANSWERS.pattern}}),
    (CHAT, {"structured_outputs": {"choice": ["is 132", "no"]}}),
    (CHAT, {"structured_outputs": {"grammar": GRAMMAR}}),
    (ITEMS, {"text": {"format": SCHEMED}}),
    (BLOCKS, {"output_config": {"format": {"type": "json_schema", "schema": RESULT}}}),
    (CHAT, {"tools": [CHAT_ADD], "tool_choice": "required"}),
    (CHAT, {"tools": [CHAT_ADD], "tool_choice": NAMED}),
    (CHAT, {"tools": [CHAT_ADD]}),
    (ITEMS, {"tools": [ITEM_ADD], "tool_choice": "required"}),
    (ITEMS, {"tools": [ITEM_ADD], "tool_choice": NAMED}),
    (BLOCKS, {"tools": [BLOCK_ADD], "tool_choice": {"type": "any"}}),
    (BLOCKS, {"tools": [BLOCK_ADD], "tool_choice": {"type": "tool", "name": "add"}}),
]


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Served]:
    with LLM(device="cpu") as llm, serving(llm) as found:
        yield found


@contextmanager
def calling(llm: LLM) -> Iterator[None]:
    """The model likes nothing more than to call something."""
    runner, (token, *_) = llm.engine_core.runner, llm.tokenizer.encode(" to=functions")
    start = runner.start_forward

    def started(*step: Any) -> None:
        start(*step)
        with torch.inference_mode():
            runner.logits[:, token] += 100

    runner.start_forward = started  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.start_forward = start  # type: ignore[method-assign]


def said_of(path: str, answer: Any) -> tuple[str, str, list[Any]]:
    """The reasoning of an answer, its text, and the arguments of its calls."""
    if path == PLAIN:
        return "", answer["choices"][0]["text"], []
    if path == CHAT:
        said = answer["choices"][0]["message"]
        calls = [one["function"]["arguments"] for one in said.get("tool_calls") or ()]
        thought = said.get("reasoning") or ""
        return thought, said["content"] or "", [*map(json.loads, calls)]
    parts = answer["output" if path == ITEMS else "content"]
    thoughts = [p for p in parts if p["type"] in ("reasoning", "thinking")]
    if path == ITEMS:
        texts = [p["content"][0]["text"] for p in parts if p["type"] == "message"]
        given = [p["arguments"] for p in parts if p["type"] == "function_call"]
        return json.dumps(thoughts), "".join(texts), [*map(json.loads, given)]
    texts = [p["text"] for p in parts if p["type"] == "text"]
    calls = [p["input"] for p in parts if p["type"] == "tool_use"]
    return json.dumps(thoughts), "".join(texts), calls


@pytest.mark.parametrize(("path", "options"), HELD)
def test_what_is_asked_for_is_served(
    reasoning: Served, path: str, options: dict[str, Any]
) -> None:
    """Behind thoughts that are as free as ever, by a model that never saw JSON."""
    body = SAYS[path] | {"temperature": 0} | options
    free = reasoning.post(path, SAYS[path] | {"temperature": 0}).json()
    with calling(reasoning.service.llm) if "tools" in options else nullcontext():
        answer = reasoning.post(path, body)
    assert answer.status_code == 200, answer.text
    thoughts, text, calls = said_of(path, answer.json())
    if "tools" in options:
        (found,) = calls
        assert not text
    elif text.startswith("{"):
        found = json.loads(text)
    else:
        found = None
        assert ANSWERS.fullmatch(text)
        assert "structured_outputs" in options
    if found is not None:
        jsonschema.validate(found, RESULT)
    if "tools" not in options and path != PLAIN:
        said = said_of(path, free)[0]
        assert "So 132." in said and thoughts.count("So 132.") == said.count("So 132.")


@pytest.mark.parametrize(("path", "options"), HELD[:10])
def test_what_is_asked_for_is_streamed(
    reasoning: Served, path: str, options: dict[str, Any]
) -> None:
    body = SAYS[path] | {"temperature": 0} | options
    whole = said_of(path, reasoning.post(path, body).json())[1]
    events = reasoning.events(path, body)
    some = [event["choices"][0] for event in events if event["choices"]]
    parts = [one["text"] if path == PLAIN else one["delta"] for one in some]
    texts = [p if path == PLAIN else p.get("content") or "" for p in parts]
    assert "".join(texts) == whole != ""
    assert some[-1]["finish_reason"] == "stop"
    (cut,) = reasoning.post(path, body | {"max_tokens": 3}).json()["choices"]
    assert cut["finish_reason"] == "length"


ENDLESS_RULE = {"structured_outputs": {"grammar": "start: start"}}
BAD_SCHEMA: dict[str, Any] = {"anyOf": []}
BAD: list[tuple[str, dict[str, Any], str]] = [
    *((path, ENDLESS_RULE, "structured_outputs") for path in PATHS),
    (
        "/v1/responses",
        {"text": {"format": FORMAT | {"schema": BAD_SCHEMA}}},
        "text.format",
    ),
    (
        "/v1/messages",
        {"output_config": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}}},
        "output_config.format",
    ),
    ("/v1/responses", {"input": "x" * 9000}, "input"),
    (
        "/v1/chat/completions",
        {"messages": [HELLO[0] | {"content": "x" * 9000}]},
        "messages",
    ),
]


@pytest.mark.parametrize(("path", "options", "param"), BAD)
def test_a_refusal_names_what_the_endpoint_knows(
    served: Served, path: str, options: dict[str, Any], param: str
) -> None:
    answer = served.post(path, PATHS[path] | options)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    known = param if path != "/v1/messages" else None  # Anthropic's have none
    assert error.get("param") == known
    assert param in error["message"] or param in ("input", "messages")


def test_what_goes_wrong_by_its_grammar_is_not_worth_a_retry(served: Served) -> None:
    """It shows on the way only, and would on each server."""
    path = "/v1/completions"
    body = {"prompt": "x", "max_tokens": 100, "temperature": 0}
    outputs = {"regex": "(a|aa|aaa){1000}"}
    answer = served.post(path, body | {"structured_outputs": outputs})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "grammar_error"
    assert "too many expressions" in answer.text
    assert "simpler or looser structured_outputs" in answer.text


def test_every_way_tells_the_model_the_format(served: Served, asked: list[Any]) -> None:
    wanted = '# Response Formats\n\n## sum\n\n{"type":"object"'
    count = "/v1/messages/count_tokens"
    config = {"format": {"type": "json_schema", "schema": SCHEMA, "name": "sum"}}
    free = served.post(count, {"messages": HELLO}).json()["input_tokens"]
    more = served.post(count, {"messages": HELLO, "output_config": config}).json()
    assert more["input_tokens"] > free + len(TOKENIZER.encode(wanted))
    body = PATHS["/v1/chat/completions"] | {"response_format": CHAT_FORMAT}
    with saying(served.service.llm, SAID):
        found = served.post("/v1/chat/completions", body | {"return_token_ids": True})
    assert wanted in TOKENIZER.decode(found.json()["prompt_token_ids"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"structured_outputs": {"regex": "[a-c]{7}"}}),
        ("/v1/chat/completions", {"tools": STRICT, "tool_choice": "required"}),
        ("/v1/responses", {"text": {"format": FORMAT}}),
        ("/v1/messages", {"tools": [ANTHROPIC[0] | {"strict": True}]}),
        ("/tokenize", {"messages": HELLO, "tools": STRICT}),
    ],
)
def test_compiling_holds_up_nobody(
    served: Served,
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    """One grammar takes as long as it likes; another request is answered meanwhile."""
    begun, go_on = threading.Event(), threading.Event()
    input_processor = served.service.llm.input_processor
    compile = input_processor.grammars.compile

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return compile(*arguments)

    monkeypatch.setitem(input_processor.grammars.__dict__, "compile", slowly)
    answers = []
    body = PATHS.get(path, {}) | body
    ask = threading.Thread(target=lambda: answers.append(served.post(path, body)))
    ask.start()
    assert begun.wait(60)
    try:
        other = served.post("/v1/completions", PATHS["/v1/completions"])
        assert other.status_code == 200 and not answers, other.text
    finally:
        go_on.set()
        ask.join()
    assert answers[0].status_code == 200
