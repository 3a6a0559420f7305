"""Responses as clients ask for them, rewritten into what /v1/responses takes."""

from collections.abc import Mapping
from typing import Any

from simplellm.server.http.lenient import Lenience, nearest_effort
from simplellm.server.openai.chat_lenient import (
    named_schema,
    offered_tools,
    with_choice,
)
from simplellm.server.openai.responses_body import INCLUDABLE, LOGPROBS


def lenient_response(data: dict[str, Any], lenience: Lenience) -> dict[str, Any]:
    """The whole body."""
    data = with_included(with_text(with_choice(data)), lenience)
    effort, reasoning = data.pop("reasoning_effort", None), data.get("reasoning", {})
    if isinstance(reasoning, Mapping):
        effort = nearest_effort(reasoning.get("effort", effort))
        data["reasoning"] = {**reasoning, "effort": effort}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in data:
            data.setdefault("max_output_tokens", data.pop(name))
    if isinstance(labels := data.get("metadata"), Mapping):
        data["metadata"] = {
            name: str(value) if isinstance(value, int | float) else value
            for name, value in labels.items()
        }
    if isinstance(tools := data.get("tools"), list):
        data["tools"] = offered_tools(tools, lenience)
    return data


def with_included(data: dict[str, Any], lenience: Lenience) -> dict[str, Any]:
    """A body that asks for what there can be beside a response."""
    if isinstance(include := data.get("include"), list):
        data["include"] = [one for one in include if one in INCLUDABLE]
        for one in include:
            if isinstance(one, str) and one not in INCLUDABLE:
                lenience.ignore(f"include.{one}")
    if "top_logprobs" in data and LOGPROBS not in (data.get("include") or ()):
        del data["top_logprobs"]
        lenience.ignore("top_logprobs")
    return data


def with_text(data: dict[str, Any]) -> dict[str, Any]:
    """The format of the answer where responses have it, its schema with a name."""
    given, text = data.pop("response_format", None), data.get("text", {})
    if not isinstance(text, Mapping):
        return data
    given = text.get("format", given)
    if isinstance(given, Mapping):
        inner = given.get("json_schema")
        given = {**given, **inner} if isinstance(inner, Mapping) else given
        named = given.get("type") == "json_schema" and "schema" in given
        data["text"] = {**text, "format": named_schema(given) if named else given}
    return data
