"""What endpoints answer with, as JSON schemas: the OpenAPI document holds them.

They are written by hand, and tests hold every answer to them. As types that pydantic
makes the same schemas of they took half as many lines again.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
LOGPROB: Schema = {"type": "number", "maximum": 0}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one(*values: str | bool | None) -> Schema:
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
PROMPT_LOGPROBS = list_of(
    or_null(
        {
            "type": "object",
            "additionalProperties": object_of(
                logprob=LOGPROB, rank=COUNT, decoded_token=TEXT
            ),
        }
    )
)
STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
COMPLETION = object_of(
    id=TEXT,
    object=one("text_completion"),
    created=COUNT,
    model=TEXT,
    choices=list_of(
        object_of(
            {
                "token_ids": IDS,
                "prompt_token_ids": IDS,
                "prompt_logprobs": or_null(PROMPT_LOGPROBS),
            },
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
CALLED = object_of(name=TEXT, arguments=TEXT)
CALL: Schema = {
    "anyOf": [
        object_of(id=TEXT, type=one("function"), function=CALLED),
        object_of(id=TEXT, type=one("custom"), custom=object_of(name=TEXT, input=TEXT)),
    ]
}
SPELLED = {"token": TEXT, "logprob": LOGPROB, "bytes": list_of(COUNT)}
TOKEN_LOGPROBS = object_of(**SPELLED, top_logprobs=list_of(object_of(**SPELLED)))
CHAT = object_of(
    {"prompt_token_ids": IDS, "prompt_logprobs": PROMPT_LOGPROBS},
    id=TEXT,
    object=one("chat.completion"),
    created=COUNT,
    model=TEXT,
    choices=list_of(
        object_of(
            {"token_ids": IDS},
            index=COUNT,
            message=object_of(
                {
                    "reasoning": TEXT,
                    "tool_calls": list_of(CALL),
                    "function_call": CALLED,
                },
                role=one("assistant"),
                content=TEXT_OR_NULL,
                refusal={"type": "null"},
            ),
            logprobs=or_null(
                object_of(content=list_of(TOKEN_LOGPROBS), refusal={"type": "null"})
            ),
            finish_reason=one("stop", "length", "tool_calls", "function_call"),
            stop_reason=STOP_REASON,
        )
    ),
    usage=USAGE,
)
MODEL = object_of(
    id=TEXT,
    object=one("model"),
    type=one("model"),
    display_name=TEXT,
    lifecycle=one("active"),
    created=COUNT,
    created_at=TEXT,
    owned_by=TEXT,
    root=TEXT,
    max_model_len=COUNT,
)
MODEL_LIST = object_of(object=one("list"), data=list_of(MODEL), has_more=one(False))
TOKEN_LIST = object_of(
    {"token_strs": list_of(TEXT)}, tokens=IDS, count=COUNT, max_model_len=COUNT
)
PROMPT = object_of(prompt=TEXT)
REPLICAS = object_of(alive=COUNT, wanted=COUNT)
HEALTH = object_of({"replicas": REPLICAS}, status=one("ok"))

# /v1/responses

EMPTY = {"type": "array", "maxItems": 0}
PHASE = one("commentary", "final_answer")
STATUS = one("in_progress", "completed", "incomplete", "failed", "cancelled")


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def item_of(
    kind: str, optional: dict[str, Schema] | None = None, **needed: Schema
) -> Schema:
    """An item of a response's input or output."""
    status = one("in_progress", "completed", "incomplete")
    return object_of(optional, id=TEXT, type=one(kind), status=status, **needed)


OUTPUT_TEXT = object_of(
    type=one("output_text"),
    text=TEXT,
    annotations=EMPTY,
    logprobs=list_of(TOKEN_LOGPROBS),
)
ASSISTANT = {"role": one("assistant"), "content": list_of(OUTPUT_TEXT)}
REASONING = item_of(
    "reasoning",
    summary=EMPTY,
    content=list_of(object_of(type=one("reasoning_text"), text=TEXT)),
)
NAMESPACE = {"namespace": TEXT}
STRINGS = list_of(TEXT)
EXECUTION = object_of(type=one("exec"), command=STRINGS, env={"type": "object"})
CALL_FIELDS: dict[str, Schema] = {
    "function_call": {"name": TEXT, "arguments": TEXT},
    "custom_tool_call": {"name": TEXT, "input": TEXT},
    "local_shell_call": {"action": EXECUTION},
    "shell_call": {"action": object_of(commands=STRINGS)},
    "apply_patch_call": {"operation": {"type": "object", "additionalProperties": TEXT}},
}
CALL_ITEMS = [
    item_of(kind, NAMESPACE if "name" in own else None, call_id=TEXT, **own)
    for kind, own in CALL_FIELDS.items()
]
OUTPUT_ITEM = any_of(
    item_of("message", **ASSISTANT, phase=PHASE), REASONING, *CALL_ITEMS
)
KEPT_ITEM = any_of(
    item_of(
        "message",
        role=one("user", "system", "developer"),
        content=list_of(object_of(type=one("input_text"), text=TEXT)),
    ),
    item_of("message", {"phase": PHASE}, **ASSISTANT),
    REASONING,
    *CALL_ITEMS,
    *(
        item_of(
            f"{kind}_output", {"name": TEXT, **NAMESPACE}, call_id=TEXT, output=TEXT
        )
        for kind in CALL_FIELDS
    ),
    *(
        item_of(kind, tools={"type": "array"})
        for kind in ("additional_tools", "tool_search_output")
    ),
)
INPUT_ITEMS = object_of(
    object=one("list"),
    data=list_of(KEPT_ITEM),
    first_id=TEXT,
    last_id=TEXT,
    has_more=FLAG,
)
FUNCTION = object_of(
    type=one("function"), name=TEXT, description={}, parameters={}, strict=FLAG
)
FORMAT = any_of(
    object_of(type=one("text", "json_object")),
    object_of(
        type=one("json_schema"),
        name=TEXT_OR_NULL,
        description=TEXT_OR_NULL,
        schema={"type": "object"},
        strict=FLAG,
    ),
)
TYPED: Schema = {"type": "object", "required": ["type"], "properties": {"type": TEXT}}
RESPONSE = object_of(
    id=TEXT,
    object=one("response"),
    created_at=COUNT,
    completed_at=or_null(COUNT),
    status=STATUS,
    error=or_null(
        object_of(code=one("server_error", "context_length_exceeded"), message=TEXT)
    ),
    incomplete_details=or_null(object_of(reason=one("max_output_tokens"))),
    model=TEXT,
    output=list_of(OUTPUT_ITEM),
    usage=or_null(
        object_of(
            input_tokens=COUNT,
            input_tokens_details=object_of(
                cached_tokens=COUNT, cache_write_tokens=COUNT
            ),
            output_tokens=COUNT,
            output_tokens_details=object_of(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        )
    ),
    instructions=TEXT_OR_NULL,
    previous_response_id=TEXT_OR_NULL,
    store=FLAG,
    background=FLAG,
    tools=list_of(any_of(FUNCTION, TYPED)),
    tool_choice=any_of(one("auto", "none", "required"), TYPED),
    parallel_tool_calls=FLAG,
    max_tool_calls=or_null(COUNT),
    reasoning=object_of(effort=one("low", "medium", "high"), summary={"type": "null"}),
    text=object_of(format=FORMAT, verbosity=one("medium")),
    max_output_tokens=or_null(COUNT),
    temperature=NUMBER,
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=COUNT,
    truncation=one("disabled"),
    service_tier=one("default"),
    metadata={"type": "object", "additionalProperties": TEXT},
    user=TEXT_OR_NULL,
    safety_identifier=TEXT_OR_NULL,
    prompt_cache_key=TEXT_OR_NULL,
)
RESPONSE_INPUT = object_of(object=one("response.input_tokens"), input_tokens=COUNT)
DELETED = object_of(id=TEXT, object=one("response"), deleted=one(True))

# /v1/messages

ANTHROPIC_BLOCK = any_of(
    object_of(type=one("text"), text=TEXT),
    object_of(type=one("thinking"), thinking=TEXT, signature=TEXT),
    object_of(type=one("tool_use"), id=TEXT, name=TEXT, input={"type": "object"}),
)
ANTHROPIC_MESSAGE = object_of(
    id=TEXT,
    type=one("message"),
    role=one("assistant"),
    model=TEXT,
    content=list_of(ANTHROPIC_BLOCK),
    stop_reason=one(
        "end_turn",
        "tool_use",
        "max_tokens",
        "stop_sequence",
        "model_context_window_exceeded",
    ),
    stop_sequence=TEXT_OR_NULL,
    usage=object_of(
        input_tokens=COUNT,
        cache_creation_input_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        output_tokens=COUNT,
        output_tokens_details=object_of(thinking_tokens=COUNT),
    ),
)
INPUT_TOKENS = object_of(input_tokens=COUNT)
