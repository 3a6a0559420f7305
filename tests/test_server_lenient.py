"""What clients really send, a row for each: what is ignored, mapped, done and refused.

Collected from the packages and the traffic of agents, frameworks and chat programs.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import HELLO
from openai.types.responses import Response
from serving import NAME, Served, said
from starlette.requests import Request as HTTPRequest

from simplellm.api.checks import ContextLengthError
from simplellm.base.config import ParameterError
from simplellm.server.app import ENDPOINTS
from simplellm.server.http.endpoint import Call
from simplellm.server.http.errors import APIError
from simplellm.server.openai.chat import CHATS

DATA = Path(__file__).parent / "data"
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
RESPOND = "/v1/responses"
MESSAGE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
Fields = dict[str, Any]
FUNCTION: Fields = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
THINKING = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>Yo<|return|>"
ADD = {"type": "function", "function": {"name": "add"}}  # as a choice
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
USER = {"role": "user", "content": "Hi"}
HOSTED = (
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "computer_use_preview",
    "image_generation",
    "mcp",
    "tool_search",
)
BASH = {"type": "bash_20250124", "name": "bash"}
CLEARING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# A response's body, as Cursor sends it to chats, and what it says in a chat's words.
CURSOR: Fields = {
    "input": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "6"},
    ],
    "instructions": "Help.",
    "tools": [{"type": "function", "strict": False, **FUNCTION}],
    "tool_choice": "auto",
    "max_tokens": None,
    "max_output_tokens": 3,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"verbosity": "low", "format": {"type": "json_object"}},
    "include": ["reasoning.encrypted_content"],
    "store": False,
}
CURSOR_SAID: Fields = {
    "messages": [
        {"role": "developer", "content": "Help."},
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "5"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "d", "type": "custom", "custom": {"name": "p", "input": "a"}}
            ],
        },
        {"role": "tool", "tool_call_id": "d", "content": "6"},
    ],
    "tools": [TOOL],
    "max_tokens": 3,
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    COMPLETE: {"prompt": "x", "max_tokens": 1},
    RESPOND: {"input": "x", "max_output_tokens": 1},
    MESSAGE: {"messages": HELLO, "max_tokens": 1},
    COUNT: {"messages": HELLO},
}


def made(served: Served, path: str, body: dict[str, Any]) -> Any:
    """What the server would run for a body: tokens, parameters, whether a grammar."""
    endpoint = next(e for e in ENDPOINTS if e.path == path and e.method == "POST")
    call = Call(served.service, HTTPRequest({"type": "http"}), "id")
    call.body = endpoint.read_parsed(call, {"seed": 1, **body})
    request = endpoint.handler(call).specs[0]
    return request.tokens, request.params, request.max_tokens, request.grammar


def ignored(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-ignored-parameters", "")


def shown(served: Served, path: str, body: dict[str, Any]) -> str:
    """The prompt that comes of a body, as text."""
    return served.service.llm.tokenizer.decode(made(served, path, body)[0])


# Of messages, asked or counted.
IGNORED_BY_BOTH: list[tuple[Fields, str]] = [
    ({"thinking": {"type": "adaptive"}}, ""),
    ({"thinking": {"type": "between_tools"}}, ""),
    (
        {"thinking": {"type": "enabled", "display": "omitted"}},
        "thinking.display",
    ),
    ({"output_config": {"effort": "xhigh"}}, ""),
    ({"output_config": {"effort": "max"}}, ""),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
    ({"context_management": CLEARING}, "context_management"),
    ({"speed": "fast"}, "speed"),
    ({"diagnostics": {}}, "diagnostics"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"user_profile_id": "x"}, "user_profile_id"),
    ({"fallbacks": []}, "fallbacks"),
    ({"betas": ["x"]}, "betas"),
    ({"anthropic_version": "x"}, "anthropic_version"),
    ({"user": "x"}, "user"),
    ({"thread": {"type": "create"}}, ""),
    ({"container": "x"}, "container"),
    ({"model": "claude-opus-5"}, "model"),
    ({"model": NAME}, ""),
    (
        {"tools": [BASH, {"type": "web_search_20250305", "name": "w"}]},
        "tools.web_search_20250305",
    ),
    (
        {"tools": [BASH, {"type": "tool_search_tool_regex_20251119"}]},
        "tools.tool_search_tool_regex_20251119",
    ),
    ({"tools": [BASH], "mcp_servers": [{}]}, "mcp_servers"),
]
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
    (CHAT, {"extra_body": {"a_b": 1}}, "a_b"),
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
    (RESPOND, {"client_metadata": {"a": "b"}}, "client_metadata"),
    (RESPOND, {"access_programs": ["a"]}, "access_programs"),
    (
        RESPOND,
        {"include": ["file_search_call.results"]},
        "include.file_search_call.results",
    ),
    (
        RESPOND,
        {"include": ["web_search_call.action.sources", "reasoning.encrypted_content"]},
        "include.web_search_call.action.sources",
    ),
    (RESPOND, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    (RESPOND, {"prompt_cache_options": {"a": 1}}, "prompt_cache_options"),
    (RESPOND, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPOND, {"text": {"verbosity": "high"}}, "text.verbosity"),
    (RESPOND, {"service_tier": "flex"}, "service_tier"),
    (RESPOND, {"service_tier": "priority"}, "service_tier"),
    (RESPOND, {"truncation": "auto"}, "truncation"),
    (RESPOND, {"stream_options": {"include_usage": True}}, "stream_options"),
    (RESPOND, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPOND, {"top_logprobs": 5}, "top_logprobs"),
    (RESPOND, {"request_id": "x"}, "request_id"),
    (RESPOND, {"enable_response_messages": True}, "enable_response_messages"),
    (RESPOND, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (RESPOND, {"moderation": {}}, "moderation"),
    (RESPOND, {"reasoning": {"summary": "none"}}, ""),
    (RESPOND, {"reasoning": {"summary": "auto"}}, ""),
    (RESPOND, {"reasoning": {"context": "all"}}, "reasoning.context"),
    (
        RESPOND,
        {"tools": [TOOL, *({"type": kind} for kind in HOSTED)]},
        ", ".join(f"tools.{kind}" for kind in HOSTED),
    ),
    (
        RESPOND,
        {
            "input": [
                USER,
                {"type": "reasoning", "encrypted_content": "x", "a": 1},
                USER,
            ]
        },
        "",
    ),
    *((path, *row) for path in (MESSAGE, COUNT) for row in IGNORED_BY_BOTH),
    (COUNT, {"max_tokens": 5}, "max_tokens"),
    (COUNT, {"metadata": {}, "stream": True}, "metadata, stream"),
    (COUNT, {"temperature": 0}, "temperature"),
    (  # alone, too: there is nothing in it to count
        COUNT,
        {"tools": [{"type": "web_search_20250305", "name": "w"}]},
        "tools.web_search_20250305",
    ),
    (CHAT, {"user": 5, "metadata": "x"}, "user, metadata"),
    (MESSAGE, {"service_tier": "priority"}, "service_tier"),
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
        {"reasoning_effort": "default"},
        {"reasoning_effort": ""},
    ],
    "high": [
        {"reasoning_effort": "xhigh"},
        {"reasoning_effort": "max"},
        {"reasoning_effort": "High"},
        {"reasoning": {"effort": "xhigh", "exclude": True}},
        {"think": "high"},
    ],
}
# What clients call a format, and what it is.
GIVEN_FORMATS: list[tuple[Any, Fields]] = [
    ({}, {}),
    ("auto", {}),
    ({"type": "json"}, {"response_format": {"type": "json_object"}}),
    (
        {"type": "json", "value": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ),
    (
        {"type": "regex", "pattern": "a+"},
        {"structured_outputs": {"regex": "a+"}},
    ),
    (
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": json.dumps(SCHEMA)}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ),
]
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
    (CHAT, {"max_tokens": "5"}, {"max_tokens": 5}),  # as forms and automations do
    (
        CHAT,
        {"temperature": "1e-3", "top_p": ".5"},
        {"temperature": 0.001, "top_p": 0.5},
    ),
    (CHAT, {"temperature": "", "top_p": ""}, {}),
    (CHAT, {"max_tokens": -2}, {"max_tokens": None}),
    (CHAT, {"logprobs": "True", "top_logprobs": 2}, {"logprobs": 2}),
    (CHAT, {"logprobs": "false", "top_logprobs": 2}, {}),
    (COMPLETE, {"ignore_eos": "true"}, {"ignore_eos": True}),
    (COMPLETE, {"ignore_eos": 1, "echo": 0}, {"ignore_eos": True}),
    (COMPLETE, {"parse_special": "TRUE"}, {"parse_special": True}),
    (CHAT, {"stop": [None, "a"]}, {"stop": ["a"]}),
    (CHAT, {"model": ""}, {}),
    (CHAT, {"extra_body": {"top_k": 5, "seed": 2}, "seed": 3}, {"top_k": 5, "seed": 3}),
    (CHAT, {"reasoning": "high"}, {"reasoning_effort": "high"}),
    (CHAT, {"reasoning": False}, {"reasoning_effort": "low"}),
    (CHAT, {"tools": [TOOL], "functions": []}, {"tools": [TOOL]}),
    (CHAT, {"tools": {}}, {}),
    (CHAT, {"structured_outputs": {"json": None, "disable_fallback": False}}, {}),
    (
        COMPLETE,
        {"structured_outputs": {"regex": "a+", "_backend": "x", "json_object": False}},
        {"structured_outputs": {"regex": "a+"}},
    ),
    (
        CHAT,
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"json": {"type": "object"}}},
    ),
    *(
        (path, {"response_format": given}, same)
        for path in (CHAT, COMPLETE)
        for given, same in GIVEN_FORMATS
    ),
    *(
        (
            path,
            {"tools": [TOOL], "tool_choice": choice},
            {"tools": [TOOL], "tool_choice": ADD},
        )
        for path in (CHAT, RESPOND)
        for choice in [
            "add",
            {"name": "add"},
            {"function": {"name": "add"}},
            {"type": "tool", "name": "add"},
        ]
    ),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "required"}},
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    (CHAT, {"tools": [TOOL], "tool_choice": ""}, {"tools": [TOOL]}),
    (
        MESSAGE,
        {"tools": [{"name": "f"}], "tool_choice": "required"},
        {
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
        },
    ),
    (RESPOND, {"input": None, "messages": [USER]}, {"input": [USER]}),
    (RESPOND, {"input": USER}, {"input": [USER]}),
    (RESPOND, {"input": ["Hi"]}, {"input": [USER]}),
    (RESPOND, {"input": [{"type": "input_text", "text": "Hi"}]}, {"input": [USER]}),
    (CHAT, {"messages": "Hi"}, {"messages": [USER]}),
    (CHAT, {"messages": USER}, {"messages": [USER]}),
    (CHAT, {"messages": ["Hi"]}, {"messages": [USER]}),
    (CHAT, {"messages": None, "input": "Hi"}, {"messages": [USER]}),
    (CHAT, {"messages": [], **CURSOR}, CURSOR_SAID),
    (COMPLETE, {"temperature": "0.5", "seed": "7"}, {"temperature": 0.5, "seed": 7}),
    (MESSAGE, {"max_tokens": "5"}, {"max_tokens": 5}),
    (RESPOND, {"max_output_tokens": "5"}, {"max_output_tokens": 5}),
    (MESSAGE, {"top_p": -1}, {}),
    (CHAT, {"logit_bias": []}, {"logit_bias": {}}),  # an empty object of PHP's
    (CHAT, {"logit_bias": {"5": "-9"}}, {"logit_bias": {"5": -9}}),
    (  # as in vLLM
        COMPLETE,
        {"logit_bias": {"5": 1e9, "6": -101}},
        {"logit_bias": {"5": 100, "6": -100}},
    ),
    (  # llama.cpp's
        COMPLETE,
        {"logit_bias": [[5, 1.5], [6, False]]},
        {"logit_bias": {"5": 1.5, "6": -100}},
    ),
    (CHAT, {"logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"logprobs": 0}, {}),
    (
        CHAT,
        {"response_format": "json_object"},
        {"response_format": {"type": "json_object"}},
    ),
    (CHAT, {"tools": [TOOL, TOOL]}, {"tools": [TOOL]}),
    (COMPLETE, {"grammar": "", "json_schema": {}}, {}),
    (
        MESSAGE,
        {"tools": [TOOL]},
        {"tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}]},
    ),
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
    (COMPLETE, {"best_of": 2, "n": 2}, {"n": 2}),
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
    (CHAT, {"functions": [FUNCTION | {"type": "custom"}]}, {"functions": [FUNCTION]}),
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
    *(
        (RESPOND, {"reasoning": {"effort": given}}, {"reasoning": {"effort": effort}})
        for given, effort in [
            ("none", "low"),
            ("minimal", "low"),
            ("xhigh", "high"),
            ("max", "high"),
            (None, "medium"),
        ]
    ),
    (RESPOND, {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}),
    (RESPOND, {"max_output_tokens": None, "max_tokens": 5}, {"max_output_tokens": 5}),
    (
        RESPOND,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {
            "text": {
                "format": {"type": "json_schema", "name": "output", "schema": SCHEMA}
            }
        },
    ),
    *(
        (MESSAGE, given, {"output_config": {"effort": effort}})
        for given, effort in [
            ({"output_config": {"effort": "xhigh"}}, "high"),
            ({"output_config": {"effort": "max"}}, "high"),
            ({"output_config": {"effort": "minimal"}}, "low"),
            ({"thinking": {"type": "disabled"}}, "low"),
            ({"thinking": {"type": "between_tools"}}, "medium"),
        ]
    ),
    (
        MESSAGE,
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    (MESSAGE, {"stop": ["a"]}, {"stop_sequences": ["a"]}),
    (MESSAGE, {"stop_sequences": ["", "a"]}, {"stop_sequences": ["a"]}),
    (RESPOND, {"metadata": {"a": 5}}, {"metadata": {"a": "5"}}),
    (RESPOND, {"tools": [TOOL]}, {"tools": [FUNCTION | {"type": "function"}]}),
    (
        RESPOND,
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [ADD],
            },
        },
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    (
        RESPOND,
        {"tools": [TOOL], "tool_choice": ADD},
        {"tools": [TOOL], "tool_choice": "required"},
    ),
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


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def text(words: str) -> dict[str, Any]:
    return block("text", text=words)


def asked(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


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
# Blocks of Anthropic's.
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
GAVE = {"type": "tool_result", "tool_use_id": "c", "content": "R"}
PICTURE = USER | {"content": "[image_url: this model reads text only]"}
# Messages, and those that say the same.
MESSAGES: list[tuple[list[Any], list[Any]]] = [
    ([USER, called("f"), result({"a": 1})], [USER, called("f"), result('{"a": 1}')]),
    ([USER, called("f"), result([1, "b"])], [USER, called("f"), result('[1, "b"]')]),
    (
        [USER, called("f"), result([{"type": "text", "text": "x"}, IMAGE])],
        [USER, called("f"), result("x[image_url: this model reads text only]")],
    ),
    (  # of a tool, as Goose sends them
        [USER, called("f"), result("x"), asked(IMAGE), asked(IMAGE)],
        [USER, called("f"), result("x"), PICTURE, PICTURE],
    ),
    ([USER, result("x", "gone")], [USER, result("x") | {"name": "unknown"}]),
    ([asked({"type": None, "text": "x"})], [asked({"type": "text", "text": "x"})]),
    ([USER, called("f", None)], [USER, called("f", "{}")]),
    ([USER, called("f", "")], [USER, called("f", "{}")]),
    (
        [USER, turn(tool_calls=[{"id": "c", "function": {"name": "f"}}])],
        [USER, called("f")],
    ),
    ([USER, turn(function_call={"name": "f"}), RESULT], [USER, called("f"), RESULT]),
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
    (  # Jan's, whose texts are those of OpenAI's assistants
        [asked({"type": "text", "text": {"value": "Hi", "annotations": []}})],
        [USER],
    ),
    ([asked({"type": "text", "text": None}, text("Hi"))], [USER]),
    (
        [
            USER,
            {"role": "bot", "content": "x"},
            {"role": "tool-response", "content": "R"},
        ],
        [USER, turn(content="x"), result("R") | {"name": "unknown"}],
    ),
    ([USER, called("f"), result(True)], [USER, called("f"), result("true")]),
    (  # Anthropic's blocks, as Cursor sends them
        [
            USER,
            turn(content=[{"type": "text", "text": "So:"}, USED]),
            USER
            | {
                "content": [
                    {"type": "text", "text": "Go on."},
                    GAVE,
                ]
            },
        ],
        [
            USER,
            called("f", '{"a": 1}') | {"content": "So:"},
            result("R"),
            USER | {"content": "Go on."},
        ],
    ),
    (
        [
            USER,
            turn(content=[USED]),
            USER | {"content": [GAVE | {"content": ["R"]}]},
        ],
        [USER, called("f", '{"a": 1}'), result("R")],
    ),
    (
        [{"role": "user", "content": [IMAGE]}, turn(content="x"), USER],
        [
            USER | {"content": "[image_url: this model reads text only]"},
            turn(content="x"),
            USER,
        ],
    ),
]


@pytest.mark.parametrize(("sent", "same"), MESSAGES)
def test_messages(served: Served, sent: list[Any], same: list[Any]) -> None:
    text = shown(served, CHAT, {"messages": sent})
    assert text == shown(served, CHAT, {"messages": same})
    assert served.post(CHAT, {"messages": sent, "max_tokens": 1}).status_code == 200


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "c", **fields}


def function(name: str, arguments: str) -> dict[str, Any]:
    return item("function_call", name=name, arguments=arguments)


OUTPUT = item("function_call_output", output="x")
LISTED = '[web_search_call: {"action": {"query": "q"}}]'
# Items of an input, and those that say the same.
ITEMS: list[tuple[list[Any], list[Any]]] = [
    ([USER | {"type": None}], [USER]),
    ([asked({"type": None, "text": "x"})], [asked({"type": "text", "text": "x"})]),
    (
        [USER, item("custom_tool_call", name="f", input="a")],
        [USER, function("f", '{"input": "a"}')],
    ),
    (
        [
            USER,
            item(
                "local_shell_call",
                action={"type": "exec", "command": ["bash", "-lc", "ls"]},
            ),
        ],
        [USER, function("local_shell", '{"command": "ls"}')],
    ),
    (
        [USER, item("shell_call", action={"commands": ["ls", "pwd"]})],
        [USER, function("shell", '{"command": "ls\\npwd"}')],
    ),
    (
        [
            USER,
            item("apply_patch_call", operation={"type": "delete_file", "path": "a"}),
        ],
        [USER, function("apply_patch", '{"type": "delete_file", "path": "a"}')],
    ),
    (
        [
            USER,
            item("custom_tool_call", name="f", input="a"),
            item("custom_tool_call_output", output="x"),
        ],
        [USER, function("f", '{"input": "a"}'), OUTPUT],
    ),
    (
        [
            USER,
            function("f", "{}"),
            item("function_call_output", output=[{"type": "input_image"}, "x"]),
        ],
        [
            USER,
            function("f", "{}"),
            OUTPUT | {"output": "[input_image: this model reads text only]x"},
        ],
    ),
    (
        [USER, function("f", "{}"), OUTPUT, asked({"type": "input_image"})],
        [
            *(USER, function("f", "{}"), OUTPUT),
            USER | {"content": "[input_image: this model reads text only]"},
        ],
    ),
    (
        [USER, item("shell_call_output", output=[{"stdout": "x", "stderr": "y"}])],
        [USER, OUTPUT | {"output": "xy", "name": "unknown"}],
    ),
    ([USER, OUTPUT], [USER, OUTPUT | {"name": "unknown"}]),
    ([USER, item("function_call", name="f")], [USER, function("f", "{}")]),
    ([USER, function("my tool", "{}")], [USER, function("my_tool", "{}")]),
    (
        [USER, item("function_call", name="f", namespace="n", arguments="{}")],
        [USER, function("n__f", "{}")],
    ),
    ([USER, called("f"), result("x")], [USER, function("f", "{}"), OUTPUT]),
    (
        [USER, {"type": "web_search_call", "id": "ws", "action": {"query": "q"}}, USER],
        [USER, turn(content=LISTED, phase="commentary"), USER],
    ),
    (
        [{"type": "compaction", "encrypted_content": "x"}, USER],
        [turn(content="[compaction]", phase="commentary"), USER],
    ),
    ([USER, {"type": "compaction_trigger"}], [USER]),
    ([{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], [USER]),
    ([{"role": "user", "content": ["Hi"]}], [USER]),
    ([{"role": "human", "content": "Hi"}], [USER]),
    (
        [
            {"role": "user", "content": [{"type": "input_image"}]},
            turn(content="x"),
            USER,
        ],
        [
            USER | {"content": "[input_image: this model reads text only]"},
            turn(content="x"),
            USER,
        ],
    ),
]


@pytest.mark.parametrize(("sent", "same"), ITEMS)
def test_items(served: Served, sent: list[Any], same: list[Any]) -> None:
    text = shown(served, RESPOND, {"input": sent})
    assert text == shown(served, RESPOND, {"input": same})
    answer = served.post(RESPOND, {"input": sent, "max_output_tokens": 1})
    assert answer.status_code == 200
    listed = served.client.get(f"{RESPOND}/{answer.json()['id']}/input_items")
    assert listed.status_code == 200


USE = asked(block("tool_use", id="c", name="f", input={}), role="assistant")
PHOTO = block("image", source={"type": "base64", "data": "AA=="})
SEARCH = block("server_tool_use", name="w", input={})
SEARCHED = text('[server_tool_use: {"name": "w", "input": {}}]')
BLIND = text("[image: this model reads text only]")


def of_call(content: Any, id: str = "c") -> dict[str, Any]:
    return block("tool_result", tool_use_id=id, content=content)


# Blocks of messages, and those that say the same.
BLOCKS: list[tuple[list[Any], list[Any]]] = [
    ([asked(PHOTO, text("x"))], [asked(BLIND, text("x"))]),
    ([asked(PHOTO), asked(text("x"))], [asked(BLIND), asked(text("x"))]),
    (
        [USER, USE, asked(of_call([text("x"), PHOTO]))],
        [USER, USE, asked(of_call([text("x"), BLIND]))],
    ),
    (
        [USER, USE, asked(of_call([block("tool_reference", tool_name="t")]))],
        [USER, USE, asked(of_call("[tool: t]"))],
    ),
    ([USER, USE, asked(of_call({"a": 1}))], [USER, USE, asked(of_call('{"a": 1}'))]),
    (
        [asked(block("document", title="T", source={"type": "text", "data": "D"}))],
        [asked(text("T\n\nD"))],
    ),
    (
        [asked(block("document", source={"type": "url", "url": "x"}), text("x"))],
        [asked(text("[document: this model reads text only]"), text("x"))],
    ),
    (
        [asked(block("search_result", title="T", source="s", content=[text("R")]))],
        [asked(text("T\n\nR"))],
    ),
    (
        [USER, asked(block("compaction", content="So far."), role="assistant"), USER],
        [USER, asked(text("So far."), role="assistant"), USER],
    ),
    (
        [
            USER,
            asked(block("server_tool_use", name="w", input={}), role="assistant"),
            USER,
        ],
        [
            USER,
            asked(
                text('[server_tool_use: {"name": "w", "input": {}}]'), role="assistant"
            ),
            USER,
        ],
    ),
    (
        [USER, asked(block("tool_use", id="c", name="f"), role="assistant"), USER],
        [USER, USE, USER],
    ),
    ([USER | {"content": None}, USER], [USER | {"content": ""}, USER]),
    (
        [USER, asked(USED | {"input": "{}"}, role="assistant"), USER],
        [USER, USE, USER],
    ),
    (
        [USER, asked(USED | {"input": "x"}, role="assistant"), USER],
        [
            USER,
            asked(USED | {"input": {"_raw": "x"}}, role="assistant"),
            USER,
        ],
    ),
    ([asked("Hi")], [USER]),
    ([USER | {"role": "Human"}], [USER]),
    ([USER | {"role": "developer"}, USER], [USER | {"role": "system"}, USER]),
]


@pytest.mark.parametrize("path", [MESSAGE, COUNT])
@pytest.mark.parametrize(("sent", "same"), BLOCKS)
def test_blocks(served: Served, path: str, sent: list[Any], same: list[Any]) -> None:
    one = served.post(path, BODIES[path] | {"messages": sent})
    two = served.post(path, BODIES[path] | {"messages": same})
    assert one.status_code == two.status_code == 200, one.text + two.text
    body = {"max_tokens": 1}
    wanted = shown(served, MESSAGE, body | {"messages": same})
    assert shown(served, MESSAGE, body | {"messages": sent}) == wanted


def test_a_result_whose_call_is_gone(served: Served) -> None:
    body = BODIES[MESSAGE] | {"messages": [asked(of_call("R", "gone"), text("x"))]}
    assert served.post(MESSAGE, body).status_code == 200
    assert "functions.unknown to=assistant" in shown(served, MESSAGE, body)


@pytest.mark.parametrize(
    ("tool", "name", "arguments"),
    [
        (BASH, "bash", {"command": "ls"}),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            "str_replace_based_edit_tool",
            {"command": "view", "path": "a"},
        ),
        ({"type": "memory_20250818", "name": "memory"}, "memory", {"command": "view"}),
        ({"name": "my tool", "input_schema": SCHEMA}, "my_tool", {"a": 1}),
    ],
)
def test_tools_of_messages(
    served: Served, tool: dict[str, Any], name: str, arguments: dict[str, Any]
) -> None:
    """A client runs them, by the names that it has for them."""
    body = {"messages": HELLO, "max_tokens": 50, "tools": [tool]}
    assert f"type {name} = (" in shown(served, MESSAGE, body)
    with said(served, CALL.format(name, json.dumps(arguments))):
        found = served.post(MESSAGE, body).json()
        named = body | {"tool_choice": {"type": "tool", "name": tool["name"]}}
        assert made(served, MESSAGE, named)[3] is not None
    (use,) = found["content"]
    assert (use["name"], use["input"]) == (tool["name"], arguments)
    again = [
        *HELLO,
        {"role": "assistant", "content": [use]},
        asked(of_call("R", use["id"])),
    ]
    assert f"functions.{name}" in shown(served, MESSAGE, body | {"messages": again})


# What would give another answer than was asked for, and a word of what is said of it.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "reads text only"),
    (CHAT, {"modalities": ["audio"]}, "it writes text only"),
    (CHAT, {"documents": [{"a": 1}]}, "put them into a message"),
    (CHAT, {"chat_template": "x"}, "one format"),
    (CHAT, {"use_beam_search": True}, "does not support"),
    (CHAT, {"logits_processors": ["x"]}, "does not support"),
    (CHAT, {"max_tokens": 0}, "1 or more"),
    (CHAT, {"messages": None, "prompt": "x"}, "it is for /v1/completions"),
    (COMPLETE, {"prompt": None, "messages": HELLO}, "for /v1/chat/completions"),
    (
        CHAT,
        {"messages": None, "input": "x", "previous_response_id": "r"},
        "none in a chat, but at /v1/responses",
    ),
    (CHAT, {"tools": [TOOL], "tool_choice": "sub"}, "the name of one of the tools"),
    (CHAT, {"response_format": {"a": 1}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "grammar", "grammar": "x"}}, "json_schema"),
    (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "offer what it does as a function"),
    (
        CHAT,
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "offer what it does as a function",
    ),
    (CHAT, {"tool_choice": "required"}, "none without tools"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "json_schema"),
    (CHAT, {"guided_json": SCHEMA, "guided_regex": "a"}, "exactly one"),
    (
        RESPOND,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "reads text only",
    ),
    (RESPOND, {"conversation": "c"}, "use previous_response_id"),
    (RESPOND, {"prompt": {"id": "p"}}, "no stored prompts"),
    (RESPOND, {"n": 2}, "one turn"),
    *((RESPOND, {"tools": [{"type": kind}]}, "as a function") for kind in HOSTED),
    (
        RESPOND,
        {"tools": [TOOL], "tool_choice": {"type": "web_search"}},
        "tool_choice.type",
    ),
    (MESSAGE, {"messages": [asked(PHOTO)]}, "reads text only"),
    (MESSAGE, {"mcp_servers": [{}]}, "offer what they can do as tools"),
    (MESSAGE, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "as a tool"),
    (MESSAGE, {"tools": [{"type": "code_execution_20260120"}]}, "as a tool"),
    (MESSAGE, {"n": 2}, "one turn"),
    (COMPLETE, {"best_of": 2}, "use n"),
    (COMPLETE, {"suffix": "x"}, "with parse_special"),
]


@pytest.mark.parametrize(("path", "fields", "word"), REFUSED)
def test_what_is_refused(
    served: Served, path: str, fields: dict[str, Any], word: str
) -> None:
    answer = served.post(path, BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    assert word in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        (CHAT, {"messages": HELLO * 5000}, "messages"),
        (COMPLETE, {"prompt": "x" * 5000}, "prompt"),
        (MESSAGE, {"messages": [{"role": "user", "content": "x" * 5000}]}, None),
    ],
)
def test_a_prompt_that_is_too_long(
    served: Served, path: str, fields: dict[str, Any], param: str | None, stream: bool
) -> None:
    """It is said in the words that clients look for before they shorten it.

    LiteLLM's are OpenAI's and vLLM's, Claude Code looks for Anthropic's.
    """
    answer = served.post(path, BODIES[path] | fields | {"stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error.get("param") == param
    assert error.get("code") == ("context_length_exceeded" if param else None)
    assert re.search(
        r"This model's maximum context length is \d+ tokens. However, ",
        error["message"],
    )
    found = re.search(
        r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", error["message"]
    )
    assert found and int(found[1]) > int(found[2])


CLIENTS = json.loads((DATA / "client-bodies.json").read_text("utf-8"))


@pytest.mark.parametrize("sent", CLIENTS, ids=lambda sent: sent["client"])
def test_whole_bodies_of_programs(served: Served, sent: Fields) -> None:
    """In the form that chat programs, editors, agents and benchmarks send."""
    path, body = sent["path"], sent["body"]
    _, params, _, _ = made(served, path, body)
    if (wanted := body.get("temperature")) is not None:
        assert params.temperature == wanted
    limit = {RESPOND: "max_output_tokens"}.get(path, "max_tokens")
    body = {k: v for k, v in body.items() if k != "max_completion_tokens"}
    assert served.post(path, body | {limit: 2}).status_code == 200


def test_a_strict_server_ignores_nothing(strict: Served) -> None:
    """It refuses by name; what has a meaning here is taken as ever."""
    rows = [row for row in IGNORED if row[2]]
    for path, fields, _ in rows:
        answer = strict.post(path, BODIES[path] | fields)
        assert answer.status_code == (404 if "model" in fields else 400), fields
        assert "x-ignored-parameters" not in answer.headers
    assert strict.post(CHAT, BODIES[CHAT] | {"store": False}).status_code == 200


def call_of(**fields: Any) -> Fields:
    return {"id": "c", "type": "function", "function": {"name": "f", **fields}}


def item_of(**fields: Any) -> Fields:
    return {"type": "message", "role": "user", "content": "Hi", **fields}


ASKED = turn(content=None, tool_calls=[call_of(arguments="{}")])
# What the openai client's own helpers make of an answer.
READ = call_of(arguments="{}", parsed_arguments={})
PARSED = turn(content="{}", parsed={}, tool_calls=[READ])
ECHOED: Fields = {
    "role": "assistant",
    "content": "Yo",
    "refusal": None,
    "annotations": [],
}
SAID = {"type": "output_text", "text": "Yo", "annotations": [], "logprobs": []}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
TEXT = {"type": "text", "text": "Hi"}
CACHED = TEXT | {"cache_control": {"type": "ephemeral"}}
SIGNED = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
# A body's fields, and if it has an unknown name, the name's path.
NAMED: list[tuple[str, Fields, str]] = [
    (CHAT, {"messages": [USER | {"name": "x"}, ECHOED, USER]}, ""),
    (CHAT, {"messages": [USER, ASKED, result("R")]}, ""),
    (CHAT, {"messages": [USER, PARSED, result("R")]}, ""),
    (CHAT, {"messages": [USER | {"x": None, "content": [TEXT | {"x": None}]}]}, ""),
    (CHAT, {"messages": [USER | {"x": 1}]}, "messages[0].x"),
    (CHAT, {"messages": [USER | {"X": 1}]}, "messages[0].X"),
    (CHAT, {"messages": [USER | {"content": [CACHED]}]}, "[0].cache_control"),
    (
        CHAT,
        {"messages": [USER | {"content": [TEXT, IMAGE | {"text": ""}]}]},
        "[1].type",
    ),
    (
        CHAT,
        {"messages": [USER, turn(tool_calls=[call_of(arguments="{}", x=1)])]},
        "messages[1].tool_calls[0].function.x",
    ),
    (
        CHAT,
        {
            "messages": [
                USER,
                turn(tool_calls=[call_of(arguments="{}") | {"x": 1}]),
            ]
        },
        "messages[1].tool_calls[0].x",
    ),
    (CHAT, {"tools": [TOOL, {"type": "custom", "custom": {"name": "a", "x": 1}}]}, ""),
    (CHAT, {"tools": [TOOL | {"x": 1}]}, "tools[0].x"),
    (CHAT, {"tools": [call_of(x=1)]}, "tools[0].id"),
    (CHAT, {"response_format": {"type": "text", "x": None}}, ""),
    (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (RESPOND, {"input": [item_of(id="i", status="completed"), THOUGHT]}, ""),
    (RESPOND, {"input": [item_of(role="assistant", content=[SAID]), item_of()]}, ""),
    (
        RESPOND,
        {"input": [item_of(role="assistant", content=[SAID | {"parsed": 1}])]},
        "",
    ),
    (RESPOND, {"input": [function("f", "{}") | {"parsed_arguments": {}}, OUTPUT]}, ""),
    (RESPOND, {"input": [item_of(x=None, content=[SAID | {"x": None}])]}, ""),
    (RESPOND, {"input": [item_of(x=1)]}, "input[0].x"),
    (RESPOND, {"input": [item_of(content=[SAID | {"x": 1}])]}, "content[0].x"),
    (RESPOND, {"tools": [{"type": "function", **FUNCTION, "x": 1}]}, "tools[0].x"),
    (RESPOND, {"text": {"format": {"type": "text", "x": 1}}}, "format.x"),
    (MESSAGE, {"messages": [USER | {"content": [CACHED]}]}, ""),
    (MESSAGE, {"messages": [USER, turn(content=[SIGNED]), USER]}, ""),
    (MESSAGE, {"messages": [USER | {"x": 1}]}, "messages[0].x"),
    (MESSAGE, {"messages": [USER | {"content": [GAVE | {"x": 1}]}]}, "content[0].x"),
    (MESSAGE, {"tools": [BASH, {"name": "a", "input_schema": {}, "x": 1}]}, "[1].x"),
]


@pytest.mark.parametrize(("path", "fields", "name"), NAMED)
def test_strictly_no_name_is_unknown(
    served: Served, strict: Served, path: str, fields: Fields, name: str
) -> None:
    """Within messages, tools and formats too, but for labels that come with answers."""
    body = BODIES[path] | fields
    assert made(served, path, body)
    answer = strict.post(path, body)
    assert answer.status_code == (400 if name else 200), answer.text
    assert name in answer.text


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


@pytest.mark.parametrize(
    "label", [{"prefix": True}, {"partial": True}, {"continue_final_message": True}]
)
def test_an_answer_that_is_begun(
    served: Served, prompts: list[list[int]], label: Fields
) -> None:
    """The model goes on with it, if it's asked to; what comes back is the rest."""
    begun = turn(content="The sum is")
    body: Fields = {"messages": [USER, begun], "max_tokens": 9}
    if "continue_final_message" in label:
        body |= label | {"add_generation_prompt": False}
    else:
        begun |= label
    with said(served, " 132<|return|>"):
        found = served.post(CHAT, body).json()["choices"][0]
        events = served.events(CHAT, body | {"stream": True})
    assert found["message"]["content"] == " 132" and found["finish_reason"] == "stop"
    deltas = [one["delta"] for event in events for one in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == " 132"
    text = served.service.llm.tokenizer.decode(prompts[0])
    assert text.endswith("<|channel|>final<|message|>The sum is")
    for more in (
        {"messages": [USER], "continue_final_message": True},
        {"messages": [USER, called("f")], "continue_final_message": True},
        {"response_format": {"type": "json_object"}},
    ):
        answer = served.post(CHAT, body | more)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "continue_final_message"


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


SPACE = {"type": "namespace", "name": "n", "description": "Of n."}
# Tools of responses: what is offered, what the model writes, and what comes back.
ANSWERED: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {
            "type": "namespace",
            "name": "n",
            "description": "",
            "tools": [FUNCTION | {"type": "function"}],
        },
        "n__add",
        "{}",
        {"type": "function_call", "namespace": "n", "name": "add", "arguments": "{}"},
    ),
    (
        SPACE | {"tools": [{"type": "custom", "name": "f"}]},
        "n__f",
        '{"input": "a"}',
        {"type": "custom_tool_call", "namespace": "n", "name": "f", "input": "a"},
    ),
    (
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
        },
        "apply_patch",
        '{"input": "*** Begin Patch"}',
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch"},
    ),
    (
        {"type": "custom", "name": "f"},
        "f",
        "no JSON",
        {"type": "custom_tool_call", "name": "f", "input": "no JSON"},
    ),
    (
        {"type": "local_shell"},
        "local_shell",
        '{"command": "ls"}',
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["bash", "-lc", "ls"], "env": {}},
        },
    ),
    (
        {"type": "shell"},
        "shell",
        '{"command": "ls"}',
        {"type": "shell_call", "action": {"commands": ["ls"]}},
    ),
    (
        {"type": "apply_patch"},
        "apply_patch",
        '{"type": "create_file", "path": "a", "diff": "+x"}',
        {
            "type": "apply_patch_call",
            "operation": {"type": "create_file", "path": "a", "diff": "+x"},
        },
    ),
]


@pytest.mark.parametrize(("tool", "name", "arguments", "wanted"), ANSWERED)
def test_calls_come_back_in_the_clients_words(
    served: Served,
    tool: dict[str, Any],
    name: str,
    arguments: str,
    wanted: dict[str, Any],
) -> None:
    body = {"input": "?", "tools": [tool]}
    assert f"type {name} = (" in shown(served, RESPOND, body)
    with said(served, CALL.format(name, arguments)):
        found = served.post(RESPOND, body).json()
        events = served.events(RESPOND, body)
    Response.model_validate(found)
    assert found["tools"][0]["type"] == tool["type"]
    (call,) = found["output"]
    assert {key: call[key] for key in wanted} == wanted
    (done,) = [e for e in events if e["type"] == "response.output_item.done"]
    assert {key: done["item"][key] for key in wanted} == wanted
    deltas = [e for e in events if e["type"].endswith(".delta")]
    if wanted["type"] in ("function_call", "custom_tool_call"):
        text = wanted.get("arguments", wanted.get("input"))
        assert "".join(event["delta"] for event in deltas) == text
    # What came back goes in again, with its result.
    output = {
        "type": f"{call['type']}_output",
        "call_id": call["call_id"],
        "output": "x",
    }
    given = [USER, {k: v for k, v in call.items() if k != "id"}, output]
    text = shown(served, RESPOND, {"input": given, "tools": [tool]})
    assert f"functions.{name}" in text and "unknown" not in text


def test_tools_that_a_conversation_brings(served: Served) -> None:
    tools = [FUNCTION | {"type": "function"}, {"type": "web_search"}]
    for kind in ("additional_tools", "tool_search_output"):
        body = {"input": [{"type": kind, "tools": tools}, USER]}
        assert "type add = (" in shown(served, RESPOND, body)
        with said(served, CALL.format("add", "{}")):
            found = served.post(RESPOND, body).json()
            following = {"input": "x", "previous_response_id": found["id"]}
            assert "type add = (" in shown(served, RESPOND, following)


WORDS = "text image_url thinking refusal function custom web_search user assistant tool"
WORDS += " role content type name arguments id tool_calls function_call tool_call_id"
NESTED = st.recursive(
    st.sampled_from([None, True, 0, -1, 2.0, -1.5, "", "a b", "low", *WORDS.split()]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS.split()), inner, max_size=5)
    ),
    max_leaves=12,
)
NAMES = """
tools tool_choice functions function_call reasoning thinking chat_template_kwargs
response_format stop top_p max_tokens n_predict structured_outputs guided_json
stream_options stream logprobs top_logprobs reasoning_effort seed metadata
""".split()
SOME_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "Human", "function"])},
    optional={name: NESTED for name in WORDS.split()[11:]},
)


@settings(max_examples=300)
@example(messages=[{"role": "user", "content": [None]}], options={})
@example(messages=[{"role": "user"}], options={"guided_json": "a b"})
@example(messages=[{"role": "user"}], options={"guided_json": {"type": None}})
@given(
    messages=NESTED | st.lists(SOME_MESSAGE | NESTED, max_size=4),
    options=st.dictionaries(st.sampled_from(NAMES), NESTED, max_size=4),
)
def test_chats_are_refused_on_purpose(
    served: Served, strict: Served, messages: Any, options: dict[str, Any]
) -> None:
    """What isn't right meets a check, which names the parameter."""
    for service in (served.service, strict.service):
        call = Call(service, HTTPRequest({"type": "http"}), "id")
        try:
            body = {"messages": messages, **options}
            call.body = CHATS[0].read_parsed(call, body)
            made = CHATS[0].handler(call)
        except APIError as error:
            assert error.param
        except (ParameterError, ContextLengthError) as error:
            assert error.param
        else:
            assert len(made.specs[0].tokens) > 10


@pytest.mark.parametrize("label", ["prefix", "partial"])
def test_strictly_no_label_of_a_begun_answer_is_dropped(
    strict: Served, label: str
) -> None:
    begun = {"role": "assistant", "content": "The sum is", label: True}
    answer = strict.post(CHAT, {"messages": [USER, begun], "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages.{label}"


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [
        (COMPLETE, "CompletionBody", {"guided_json": {"type": "object"}}),
        (CHAT, "ChatBody", {"guided_regex": "ab"}),
        (RESPOND, "ResponsesBody", {"max_tokens": 2, "guided_choice": ["a", "b"]}),
        (RESPOND, "ResponsesBody", {"response_format": {"type": "json_object"}}),
        (MESSAGE, "MessageBody", {"stop": "x"}),
    ],
)
def test_the_document_says_what_is_mapped(
    served: Served, strict: Served, path: str, kind: str, fields: Fields
) -> None:
    """So that nobody reads of it as refused where it's taken."""
    assert served.post(path, BODIES[path] | fields).status_code == 200
    for server, taken in ((served, True), (strict, False)):
        document = server.client.get("/openapi.json").json()
        properties = document["components"]["schemas"][kind]["properties"]
        for name in fields:
            said = properties[name]["description"]
            assert properties[name].get("deprecated", False) == taken
            assert ("enum" in properties[name]) == ("not supported" in said) != taken


@pytest.mark.parametrize("wrote", [ANSWER, CALL.format("f", "{}")])
@pytest.mark.parametrize("path", [CHAT, RESPOND, MESSAGE])
def test_a_strict_server_takes_back_what_it_said(
    strict: Served, path: str, wrote: str
) -> None:
    limit = {RESPOND: "max_output_tokens"}.get(path, "max_tokens")
    key, body = {RESPOND: "input"}.get(path, "messages"), {limit: 90}
    with said(strict, f"{THINKING}{wrote}"):
        answer = strict.post(path, {key: [USER], **body}).json()
    match path:
        case "/v1/responses":
            back = answer["output"]
        case "/v1/messages":
            back = [{"role": "assistant", "content": answer["content"]}]
        case _:
            back = [answer["choices"][0]["message"]]
    assert "Hm." in json.dumps(back) and ("Yo" in json.dumps(back)) == (wrote == ANSWER)
    again = strict.post(path, {key: [USER, *back, USER], **body})
    assert again.status_code == 200, again.text
