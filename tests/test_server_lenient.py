"""What clients really send, a row for each: what is ignored, mapped, done and refused.

Collected from the packages and the traffic of agents, frameworks and chat programs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import HELLO, SMALL
from serving import Served, said, serving
from starlette.requests import Request as HTTPRequest

from simplellm import LLM
from simplellm.server.app import ENDPOINTS
from simplellm.server.http.endpoint import Call

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
Fields = dict[str, Any]
FUNCTION: Fields = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
ADD = {"type": "function", "function": {"name": "add"}}  # as a choice
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    COMPLETE: {"prompt": "x", "max_tokens": 1},
}


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with LLM(folder, SMALL) as llm, serving(llm) as found:
        yield found


@pytest.fixture(scope="module")
def strict(served: Served) -> Iterator[Served]:
    with serving(served.service.llm, strict=True) as found:
        yield found


def made(served: Served, path: str, body: dict[str, Any]) -> Any:
    """What the server would run for a body: tokens, parameters, whether a grammar."""
    endpoint = next(e for e in ENDPOINTS if e.path == path and e.method == "POST")
    call = Call(served.service, HTTPRequest({"type": "http"}), "id")
    call.body = endpoint.read_parsed(call, {"seed": 1, **body})
    request = endpoint.answer(call).requests[0]
    return request.tokens, request.params, request.max_tokens, request.grammar


def ignored(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-ignored-parameters", "")


def shown(served: Served, path: str, body: dict[str, Any]) -> str:
    """The prompt that comes of a body, as text."""
    return served.service.llm.tokenizer.decode(made(served, path, body)[0])


# What is ignored: the fields, and the names that the answer's header has.
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"store": True}, "store"),
    (CHAT, {"store": False}, ""),
    (CHAT, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    (CHAT, {"prompt_cache_options": {"ttl": 5}}, "prompt_cache_options"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"service_tier": "priority"}, "service_tier"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"verbosity": "high"}, "verbosity"),
    (CHAT, {"moderation": {"model": "omni"}}, "moderation"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (CHAT, {"include_reasoning": False}, "include_reasoning"),
    (CHAT, {"separate_reasoning": True}, "separate_reasoning"),
    (CHAT, {"stream_reasoning": True}, "stream_reasoning"),
    (CHAT, {"cache_prompt": True}, "cache_prompt"),
    (CHAT, {"keep_alive": "5m"}, "keep_alive"),
    (CHAT, {"options": {"num_ctx": 8192}}, "options"),
    (CHAT, {"num_ctx": 8192}, "num_ctx"),
    (CHAT, {"mirostat": 2}, "mirostat"),
    (CHAT, {"typical_p": 0.9}, "typical_p"),
    (CHAT, {"cache_salt": "x"}, "cache_salt"),
    (CHAT, {"request_id": "x"}, "request_id"),
    (CHAT, {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    (CHAT, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    (CHAT, {"mm_processor_kwargs": None}, ""),
    (CHAT, {"usage": {"include": True}}, "usage"),
    (CHAT, {"provider": {"order": ["a"]}}, "provider"),
    (CHAT, {"transforms": ["middle-out"]}, "transforms"),
    (CHAT, {"plugins": []}, "plugins"),
    (CHAT, {"litellm_metadata": {}}, "litellm_metadata"),
    (CHAT, {"session_id": "x"}, "session_id"),
    (CHAT, {"chat_id": "x"}, "chat_id"),
    (CHAT, {"drop_params": True}, "drop_params"),
    (CHAT, {"extra_body": {}}, "extra_body"),
    (CHAT, {"tool_stream": True}, "tool_stream"),
    (CHAT, {"detokenize": True}, "detokenize"),
    (CHAT, {"documents": []}, ""),
    (CHAT, {"a_b": 1, "c d": 2, "store": True}, "a_b, c_d, store"),
    (CHAT, {"tool_choice": "auto"}, ""),
    (CHAT, {"tool_choice": "auto", "tools": None}, ""),
    (CHAT, {"tool_choice": "none"}, ""),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"top_logprobs": 5}, "top_logprobs"),
    (CHAT, {"functions": [], "function_call": "none"}, ""),
    (CHAT, {"length_penalty": 2.0}, "length_penalty"),
    (CHAT, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    (
        CHAT,
        {"chat_template_kwargs": {"reasoning_effort": "low", "x": 1}},
        "chat_template_kwargs.x",
    ),
    (CHAT, {"tools": [TOOL, {"type": "web_search"}]}, "tools.web_search"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [IMAGE, "What is it?"]}]},
        "messages.content.image_url",
    ),
    (COMPLETE, {"cache_prompt": True, "n_keep": 3}, "cache_prompt, n_keep"),
    (COMPLETE, {"store": None, "mm_processor_kwargs": None}, ""),
]


@pytest.mark.parametrize(("path", "fields", "names"), IGNORED)
def test_what_is_ignored(
    served: Served, path: str, fields: dict[str, Any], names: str
) -> None:
    assert ignored(served.post(path, BODIES[path] | fields)) == names


def test_options_of_a_stream(served: Served) -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    body = BODIES[CHAT] | {"stream": True, "stream_options": options}
    answer = served.post(CHAT, body)
    assert ignored(answer) == "stream_options.include_obfuscation"
    assert '"prompt_tokens"' in answer.text


# What is mapped: the fields, and those that say the same.
EFFORTS: dict[str, list[Fields]] = {
    "low": [
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
        {"reasoning": {"effort": "low"}},
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"think": False},
        {"think": "low"},
        {"thinking_token_budget": 0},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
    ],
    "medium": [
        {"reasoning": {}},
        {"reasoning": {"enabled": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"enable_thinking": True},
        {"think": True},
        {"thinking_token_budget": 500},
        {"reasoning_effort": None},
    ],
    "high": [
        {"reasoning_effort": "xhigh"},
        {"reasoning_effort": "max"},
        {"reasoning_effort": "High"},
        {"reasoning": {"effort": "xhigh", "exclude": True}},
        {"think": "high"},
    ],
}
MAPPED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        (CHAT, fields, {"reasoning_effort": effort})
        for effort, several in EFFORTS.items()
        for fields in several
    ),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": "any"},
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    (CHAT, {"max_tokens": 9, "max_completion_tokens": 9}, {"max_tokens": 9}),
    (CHAT, {"max_tokens": 9, "max_completion_tokens": 4}, {"max_tokens": 4}),
    (CHAT, {"max_tokens": -1}, {"max_tokens": None}),
    (CHAT, {"max_tokens": None, "max_completion_tokens": -1}, {"max_tokens": None}),
    (CHAT, {"max_tokens": None, "n_predict": 7}, {"max_tokens": 7}),
    (CHAT, {"max_tokens": 5.0}, {"max_tokens": 5}),
    (CHAT, {"seed": 42.0}, {"seed": 42}),
    (CHAT, {"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    (CHAT, {"top_p": 0}, {"temperature": 0}),
    (CHAT, {"stop": [""]}, {"stop": []}),
    (CHAT, {"stop": ["", "a"]}, {"stop": ["a"]}),
    (CHAT, {"stop": ""}, {}),
    *(
        (path, {old: value}, {"structured_outputs": {new: value}})
        for path in (CHAT, COMPLETE)
        for old, new, value in [
            ("guided_json", "json", SCHEMA),
            ("guided_choice", "choice", ["a", "b"]),
            ("guided_regex", "regex", "a+"),
            ("guided_grammar", "grammar", 'start: "a"'),
            ("json_schema", "json", SCHEMA),
            ("regex", "regex", "a+"),
            ("ebnf", "grammar", 'start: "a"'),
        ]
    ),
    *(
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": given}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": name, "schema": SCHEMA},
                }
            },
        )
        for given, name in [
            ({"schema": SCHEMA}, "output"),
            ({"name": "a b.c", "schema": SCHEMA}, "a_b_c"),
            ({"name": "", "schema": SCHEMA}, "output"),
        ]
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": SCHEMA},
            }
        },
    ),
    (CHAT, {"functions": [FUNCTION]}, {"tools": [TOOL], "parallel_tool_calls": False}),
    (
        CHAT,
        {"functions": [FUNCTION], "function_call": {"name": "add"}},
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
        },
    ),
    (
        CHAT,
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [TOOL]},
            },
        },
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    (CHAT, {"tools": [TOOL, {"type": "mcp"}]}, {"tools": [TOOL]}),
    (
        CHAT,
        {
            "tools": [
                {
                    "type": "function",
                    "name": "add",
                    "parameters": FUNCTION["parameters"],
                }
            ]
        },
        {"tools": [TOOL]},
    ),
]


@pytest.mark.parametrize(("path", "fields", "same"), MAPPED)
def test_what_is_mapped(
    served: Served, path: str, fields: dict[str, Any], same: dict[str, Any]
) -> None:
    body = BODIES[path]
    assert made(served, path, body | fields) == made(served, path, body | same)


USER = {"role": "user", "content": "Hi"}


def turn(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def called(name: str, arguments: Any = "{}", id: str = "c") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return turn(tool_calls=[{"id": id, "type": "function", "function": function}])


def made_up(text: str) -> dict[str, Any]:
    custom = {"name": "f", "input": text}
    return turn(tool_calls=[{"id": "c", "type": "custom", "custom": custom}])


def result(content: Any, id: str = "c") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


RESULT = {"role": "function", "name": "f", "content": "x"}
PICTURE = USER | {"content": "[image_url: this model reads text only]"}
# Messages, and those that say the same.
MESSAGES: list[tuple[list[Any], list[Any]]] = [
    ([USER, called("f"), result({"a": 1})], [USER, called("f"), result('{"a": 1}')]),
    ([USER, called("f"), result([1, "b"])], [USER, called("f"), result('[1, "b"]')]),
    (
        [USER, called("f"), result([{"type": "text", "text": "x"}, IMAGE])],
        [USER, called("f"), result("x[image_url: this model reads text only]")],
    ),
    ([USER, result("x", "gone")], [USER, result("x") | {"name": "unknown"}]),
    ([USER, called("f", None)], [USER, called("f", "{}")]),
    ([USER, called("f", "")], [USER, called("f", "{}")]),
    (
        [USER, turn(tool_calls=[{"id": "c", "function": {"name": "f"}}])],
        [USER, called("f")],
    ),
    ([USER, called("my tool.x")], [USER, called("my_tool.x")]),
    (
        [USER, made_up("a")],
        [USER, called("f", '{"input": "a"}')],
    ),
    (
        [
            USER,
            turn(function_call={"name": "f", "arguments": "{}"}),
            {"role": "function", "name": "f", "content": "x"},
        ],
        [USER, called("f"), result("x")],
    ),
    ([USER, turn(content="x", reasoning={})], [USER, turn(content="x")]),
    (
        [USER, turn(content=[{"type": "thinking", "thinking": "Hm."}]), USER],
        [USER, turn(content="", reasoning="Hm."), USER],
    ),
    (
        [USER, turn(content=[{"type": "refusal", "refusal": "No."}]), USER],
        [USER, turn(content="No."), USER],
    ),
    (
        [USER, turn(content=None, refusal="No."), USER],
        [USER, turn(content="No."), USER],
    ),
    (
        [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": "ab"}],
    ),
    ([USER | {"name": "my name"}], [USER | {"name": "my_name"}]),
    ([USER | {"role": "User"}], [USER]),
    (
        [USER | {"role": "human"}, USER | {"role": "model"}],
        [USER, USER | {"role": "assistant"}],
    ),
    ([USER | {"content": 5}], [USER | {"content": "5"}]),
    (
        [{"role": "user", "content": [IMAGE]}, turn(content="x"), USER],
        [
            USER | {"content": "[image_url: this model reads text only]"},
            turn(content="x"),
            USER,
        ],
    ),
]


@pytest.mark.parametrize(("given", "same"), MESSAGES)
def test_messages(served: Served, given: list[Any], same: list[Any]) -> None:
    text = shown(served, CHAT, {"messages": given})
    assert text == shown(served, CHAT, {"messages": same})
    assert served.post(CHAT, {"messages": given, "max_tokens": 1}).status_code == 200


# What would give another answer than was asked for, and a word of what is said of it.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "reads text only"),
    (CHAT, {"modalities": ["audio"]}, "it writes text only"),
    (CHAT, {"documents": [{"a": 1}]}, "put them into a message"),
    (CHAT, {"chat_template": "x"}, "one format"),
    (CHAT, {"use_beam_search": True}, "does not support"),
    (CHAT, {"logits_processors": ["x"]}, "does not support"),
    (CHAT, {"max_tokens": 0}, "1 or more"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "offer what it does as a function"),
    (
        CHAT,
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "offer what it does as a function",
    ),
    (CHAT, {"tool_choice": "required"}, "none without tools"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "json_schema"),
    (CHAT, {"guided_json": SCHEMA, "guided_regex": "a"}, "exactly one"),
    (COMPLETE, {"best_of": 2}, "use n"),
    (COMPLETE, {"suffix": "x"}, "fill in the middle"),
]


@pytest.mark.parametrize(("path", "fields", "word"), REFUSED)
def test_what_is_refused(
    served: Served, path: str, fields: dict[str, Any], word: str
) -> None:
    answer = served.post(path, BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    assert word in answer.text


def test_a_strict_server_ignores_nothing(strict: Served) -> None:
    """It refuses by name; what has a meaning here is taken as ever."""
    rows = [row for row in IGNORED if row[2]]
    for path, fields, _ in rows:
        answer = strict.post(path, BODIES[path] | fields)
        assert answer.status_code == 400, fields
        assert "x-ignored-parameters" not in answer.headers
    assert strict.post(CHAT, BODIES[CHAT] | {"store": False}).status_code == 200


def test_names_are_logged_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        served.post(COMPLETE, BODIES[COMPLETE] | {"never_heard_of": 1})
    lines = [line for line in caplog.messages if "never_heard_of" in line]
    assert len(lines) == 1 and "--strict" in lines[0]


def test_a_header_holds_what_a_header_can(served: Served) -> None:
    """Whatever the names are, and however many."""
    odd = {"a\r\nx-evil: 1": 1, "ä, ö": 2, **{f"n{k}": k for k in range(500)}}
    answer = served.post(COMPLETE, BODIES[COMPLETE] | odd)
    names = ignored(answer).split(", ")
    assert names[:3] == ["a__x-evil:_1", "____", "n0"] and len(names) == 32
    assert "x-evil" not in answer.headers


def test_custom_tools(served: Served) -> None:
    """They are functions of one text, and their calls come back with that text."""
    tools = [{"type": "custom", "custom": {"name": "run it", "description": "Runs."}}]
    body = {"messages": HELLO, "tools": [*tools, TOOL]}
    script = CALL.format("run_it", json.dumps({"input": 'print("a")\n'}))
    with said(served, script):
        (choice,) = served.post(CHAT, body).json()["choices"]
        events = served.events(CHAT, body)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["type"] == "custom"
    assert call["custom"] == {"name": "run it", "input": 'print("a")\n'}
    deltas = [
        call
        for event in events
        for call in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert deltas[0]["custom"]["name"] == "run it" and deltas[0]["id"]
    assert "".join(d["custom"]["input"] for d in deltas) == 'print("a")\n'
    again = {"messages": [*HELLO, choice["message"], result("x", call["id"])]}
    assert "run_it" in shown(served, CHAT, again)
    with said(served, CALL.format("run_it", "no JSON")):
        (choice,) = served.post(CHAT, body).json()["choices"]
    assert choice["message"]["tool_calls"][0]["custom"]["input"] == "no JSON"


def test_the_older_way_to_call_functions(served: Served) -> None:
    body = {"messages": HELLO, "functions": [FUNCTION]}
    with said(served, CALL.format("add", '{"a": 1}')):
        (choice,) = served.post(CHAT, body).json()["choices"]
        events = served.events(CHAT, body)
    assert choice["finish_reason"] == "function_call"
    wanted = {"name": "add", "arguments": '{"a": 1}'}
    assert choice["message"]["function_call"] == wanted
    assert "tool_calls" not in choice["message"]
    deltas = [event["choices"][0]["delta"].get("function_call") for event in events]
    deltas = [delta for delta in deltas if delta]
    assert deltas[0]["name"] == "add"
    assert "".join(delta["arguments"] for delta in deltas) == '{"a": 1}'
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"


def test_only_allowed_tools_are_called(served: Served) -> None:
    """The others are described, and no call of them fits."""
    other = {"type": "function", "function": FUNCTION | {"name": "sub"}}
    allowed = {"mode": "auto", "tools": [TOOL]}
    body = BODIES[CHAT] | {
        "tools": [TOOL, other],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }
    tokens, _, _, grammar = made(served, CHAT, body)
    text = served.service.llm.tokenizer.decode(tokens)
    assert "type add" in text and "type sub" in text and grammar is not None
    assert '"sub"' not in grammar.text and "functions.add" in grammar.text


def test_a_tool_with_a_space_in_its_name(served: Served) -> None:
    tool = {"type": "function", "function": FUNCTION | {"name": "my tool"}}
    with said(served, CALL.format("my_tool", "{}")):
        (choice,) = served.post(CHAT, {"messages": HELLO, "tools": [tool]}).json()[
            "choices"
        ]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "my tool"
