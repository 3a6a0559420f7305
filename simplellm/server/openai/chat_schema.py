"""What a chat may hold, for the OpenAPI document. The model's own checks read it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

CALL_ID = {"type": ["string", "integer", "null"]}
PAST_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": CALL_ID,
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            # Arguments that are no text are put into JSON.
            "properties": {"name": {"type": "string"}, "arguments": {}},
        },
    },
}
CONTENT = {
    "anyOf": [
        {"type": ["string", "null"]},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["text"],
                "properties": {"text": {"type": "string"}},
            },
        },
    ]
}


def message_schema(*roles: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a message by one of ``roles``."""
    of_all = {"role": {"enum": [*roles]}, "content": CONTENT}
    return {
        "type": "object",
        "required": ["role"],
        "properties": of_all | properties,
    }


MESSAGE: dict[str, Any] = {
    "anyOf": [
        message_schema("system", "developer", "user"),
        message_schema("tool", tool_call_id=CALL_ID),
        message_schema(
            "assistant",
            reasoning={"type": ["string", "null"]},
            reasoning_content={"type": ["string", "null"]},
            tool_calls={"type": ["array", "null"], "items": PAST_CALL},
        ),
    ]
}
CHAT_TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
Messages = Annotated[
    list[Any], WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE})
]
Tools = Annotated[list[Any], WithJsonSchema({"type": "array", "items": CHAT_TOOL})]
