"""What endpoints answer with, as JSON schemas: the OpenAPI document holds them."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
LOGPROB: Schema = {"type": "number", "maximum": 0}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one(*values: str | None) -> Schema:
    return {"enum": [*values]}


def object_of(optional: dict[str, Schema] | None = None, **needed: Schema) -> Schema:
    """An object that has the ``needed`` properties, perhaps those in ``optional``."""
    return {
        "type": "object",
        "required": [*needed],
        "properties": needed | (optional or {}),
        "additionalProperties": False,
    }


IDS = list_of(COUNT)
USAGE = object_of(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=object_of(cached_tokens=COUNT),
    completion_tokens_details=object_of(reasoning_tokens=COUNT),
)
STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
COMPLETION = object_of(
    id=TEXT,
    object=one("text_completion"),
    created=COUNT,
    model=TEXT,
    choices=list_of(
        object_of(
            {"token_ids": IDS, "prompt_token_ids": IDS},
            index=COUNT,
            text=TEXT,
            logprobs=or_null(
                object_of(
                    tokens=list_of(TEXT),
                    token_logprobs=list_of(or_null(LOGPROB)),
                    top_logprobs=list_of(
                        or_null({"type": "object", "additionalProperties": LOGPROB})
                    ),
                    text_offset=IDS,
                )
            ),
            finish_reason=one("stop", "length"),
            stop_reason=STOP_REASON,
        )
    ),
    usage=USAGE,
)
CALL = object_of(
    id=TEXT,
    type=one("function"),
    function=object_of(name=TEXT, arguments=TEXT),
)
SPELLED = {"token": TEXT, "logprob": LOGPROB, "bytes": list_of(COUNT)}
CHAT = object_of(
    {"prompt_token_ids": IDS},
    id=TEXT,
    object=one("chat.completion"),
    created=COUNT,
    model=TEXT,
    choices=list_of(
        object_of(
            {"token_ids": IDS},
            index=COUNT,
            message=object_of(
                {"reasoning": TEXT, "tool_calls": list_of(CALL)},
                role=one("assistant"),
                content=TEXT_OR_NULL,
                refusal={"type": "null"},
            ),
            logprobs=or_null(
                object_of(
                    content=list_of(
                        object_of(**SPELLED, top_logprobs=list_of(object_of(**SPELLED)))
                    ),
                    refusal={"type": "null"},
                )
            ),
            finish_reason=one("stop", "length", "tool_calls"),
            stop_reason=STOP_REASON,
        )
    ),
    usage=USAGE,
)
MODEL = object_of(
    id=TEXT,
    object=one("model"),
    created=COUNT,
    owned_by=TEXT,
    root=TEXT,
    max_model_len=COUNT,
)
MODEL_LIST = object_of(object=one("list"), data=list_of(MODEL))
TOKEN_LIST = object_of(
    {"token_strs": list_of(TEXT)}, tokens=IDS, count=COUNT, max_model_len=COUNT
)
PROMPT = object_of(prompt=TEXT)
HEALTH = object_of(status=one("ok"))
