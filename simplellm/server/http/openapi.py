"""The OpenAPI document, made from what the bodies declare; /docs shows it as a page.

So neither can promise what `read_body` refuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from simplellm import __version__
from simplellm.server.http.answers import TEXT, object_of, one
from simplellm.server.http.bodies import (
    is_optional,
    own_fields,
    record_of,
    sampling_fields,
    unsupported_of,
)
from simplellm.server.http.endpoint import Call, Endpoint, Service
from simplellm.server.http.errors import anthropic_form, openai_form

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
FORMAT_FIELDS = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "description": {"type": ["string", "null"]},
    "schema": {"type": "object"},
    "strict": {"type": ["boolean", "null"]},
}
# What a parameter may hold where Python's annotation says less than the door checks.
SPECIAL: dict[str, dict[str, Any]] = {
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {"$ref": "#/components/schemas/Message"},
    },
    "tools": {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Tool"},
    },
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "required": ["name", "schema"],
                "properties": FORMAT_FIELDS,
            },
        },
    },
}
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


SHARED = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": object_of(
        type=one("error"),
        error=object_of({"details": {"type": "object"}}, type=TEXT, message=TEXT),
    ),
    "Message": {
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
    },
    "Tool": {
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
    },
}
ERRORS: dict[Any, str] = {openai_form: "Error", anthropic_form: "AnthropicError"}
STATUSES = {
    400: "A parameter is wrong or not supported; the error names it.",
    401: "The key is missing or wrong.",
    404: "There is no such model or object.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not application/json, or compressed in another way than gzip.",
    429: "The queue is full; Retry-After says when to try again.",
    503: "The server shuts down, or its engine died.",
    504: "The time limit is over.",
}


def schema_of_type(kind: Any, bounds: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON schema of an annotation; ``bounds`` are those of `declared`."""
    if isinstance(kind, UnionType):
        every = [schema_of_type(one, bounds) for one in get_args(kind)]
        return {"anyOf": every}
    if kind is NoneType:
        return {"type": "null"}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) in (list, Sequence):
        (inner,) = get_args(kind)
        return {"type": "array", "items": schema_of_type(inner, None)}
    if kind not in JSON_TYPES:
        return {"type": "object"}
    found: dict[str, Any] = {"type": JSON_TYPES[kind]}
    if kind in (int, float) and bounds:
        low = "minimum" if bounds["above"] is None else "exclusiveMinimum"
        least = bounds["low"] if bounds["above"] is None else bounds["above"]
        found |= {low: least, "maximum": bounds["high"]}
    return found


def schema_of_field(spec: Field[Any], strict: bool) -> dict[str, Any]:
    """The JSON schema of one parameter."""
    if (found := spec.metadata.get("schema") or SPECIAL.get(spec.name)) is not None:
        return {"anyOf": [found, {"type": "null"}]} if is_optional(spec) else found
    if (record := record_of(spec)) is not None:
        return {"anyOf": [schema_of_body(record, strict), {"type": "null"}]}
    found = schema_of_type(spec.type, spec.metadata.get("bounds"))
    default = spec.default
    if is_optional(spec) and {"type": "null"} not in found.get("anyOf", ()):
        found = {"anyOf": [found, {"type": "null"}]}  # null counts as absent
    if default is not MISSING and default not in (None, ()):
        found = {**found, "default": default}
    return found


def schema_of_body(kind: Any, strict: bool) -> dict[str, Any]:
    """The JSON schema of a body: what `read_body` takes.

    A ``strict`` server takes nothing else.
    """
    own, sampling = own_fields(kind), sampling_fields(kind)
    properties = {
        name: schema_of_field(spec, strict)
        for name, spec in {**own, **sampling}.items()
    }
    for name, entry in unsupported_of(kind).items():
        if entry.hint and not strict:
            properties[name] = {"description": f"Ignored: {entry.why}."}
        else:
            properties[name] = {
                "enum": [*entry.ignored_values, None],
                "description": f"Known, but not supported: {entry.why}.",
            }
    required = [name for name, spec in own.items() if not is_optional(spec)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": not strict,
    }


def operation_of(endpoint: Endpoint, strict: bool) -> dict[str, Any]:
    """What the document says of one endpoint."""
    name = ERRORS[endpoint.form]
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    answers: dict[str, Any] = {
        "200": {
            "description": "The answer.",
            "content": {endpoint.media: {"schema": endpoint.result}},
        }
    }
    if endpoint.body is not None and "stream" in own_fields(endpoint.body):
        answers["200"]["content"]["text/event-stream"] = {}
    for status, why in STATUSES.items():
        answers[str(status)] = {"description": why, "content": error}
    found: dict[str, Any] = {"summary": endpoint.summary, "responses": answers}
    if endpoint.body is not None:
        reference = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        content = {"application/json": {"schema": reference}}
        found["requestBody"] = {"required": True, "content": content}
    if endpoint.open:
        found["security"] = []
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    found["parameters"] = [
        {
            "name": name.partition(":")[0],
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for name in names
    ]
    if endpoint.query is not None:
        found["parameters"] += [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in schema_of_body(endpoint.query, strict)[
                "properties"
            ].items()
        ]
    return found


def openapi(service: Service, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The document of these endpoints."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = dict(SHARED)
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = operation_of(
            endpoint, service.strict
        )
        if (body := endpoint.body) is not None:
            schema = schema_of_body(body, service.strict)
            properties = schema["properties"]
            if "model" in properties:
                properties["model"] = {"enum": [*service.names, None]}
            if "tokens" in properties:
                most = service.llm.input_processor.config.vocab_size - 1
                properties["tokens"]["items"] |= {"minimum": 0, "maximum": most}
            schemas[body.__name__] = schema
    components: dict[str, Any] = {"schemas": schemas}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "SimpleLLM", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if service.key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def document_endpoints(
    service: Service, endpoints: Sequence[Endpoint]
) -> list[Endpoint]:
    """The endpoints that tell of all ``endpoints``, themselves left out."""
    document = openapi(service, endpoints)

    def get_document(call: Call) -> dict[str, Any]:
        return document

    return [
        Endpoint(
            method="GET",
            path="/openapi.json",
            answer=get_document,
            open=True,
            summary="This document.",
        ),
    ]
