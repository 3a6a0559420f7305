"""The OpenAPI document, made from what the bodies declare; /docs shows it as a page.

So neither can promise what `read_body` refuses.
"""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from simplellm import __version__
from simplellm.server.http.bodies import Body, SampledBody, Sampling
from simplellm.server.http.endpoint import Endpoint, Service
from simplellm.server.http.errors import anthropic_form, openai_form
from simplellm.server.http.response_schemas import TEXT, TEXT_OR_NULL, object_of, one

REFERENCE = "#/components/schemas/{model}"
SHARED = {
    "Error": object_of(
        error=object_of(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL)
    ),
    "AnthropicError": object_of(
        type=one("error"),
        error=object_of({"details": {"type": "object"}}, type=TEXT, message=TEXT),
    ),
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


# Of these the endpoint or generation_config.json has the default.
CHANGED = frozenset(
    "max_tokens temperature top_p top_k min_p repetition_penalty".split()
)


class Untitled(GenerateJsonSchema):
    """JSON schemas without titles, which would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def schemas_of_body(kind: type[Body], strict: bool) -> dict[str, Any]:
    """The JSON schemas of a body and its parts: what `read_body` takes.

    A ``strict`` server takes nothing else.
    """
    schema = schema_of(kind)
    schemas = {**schema.pop("$defs", {}), kind.__name__: schema}
    schemas.pop("Sampling", None)
    known = {one.__name__: one for one in (kind, *parts_of(kind))}
    complete = {
        name: complete_schema(known[name], one, strict) if name in known else one
        for name, one in schemas.items()
    }
    return closed(complete) if strict else complete


def closed(schema: Any) -> Any:
    """A schema whose objects have no other names than those of their properties."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(one) for name, one in schema.items()}
    named = schema.get("type") == "object" and "properties" in schema
    return {"additionalProperties": False, **inner} if named else inner


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model, as pydantic makes it."""
    schema = kind.model_json_schema(ref_template=REFERENCE, schema_generator=Untitled)
    schema.pop("title", None)
    return schema


def parts_of(kind: type[BaseModel]) -> list[type[Body]]:
    """The parts of a body that are read as bodies are."""
    kinds = [one for f in kind.model_fields.values() for one in get_args(f.annotation)]
    return [one for one in kinds if isinstance(one, type) and issubclass(one, Body)]


def complete_schema(kind: type[Body], schema: Any, strict: bool) -> dict[str, Any]:
    """The schema of a body with what its fields don't say."""
    properties = {
        name: one for name, one in schema["properties"].items() if name in kind.known()
    }
    if issubclass(kind, SampledBody):
        every = schema_of(Sampling)["properties"]
        properties |= {
            name: without_default(one) if name in CHANGED else one
            for name, one in every.items()
            if name in kind.sampling_names()
        }
    required = schema.get("required", [])
    for name, entry in kind.unsupported.items():
        if entry.hint and not strict:
            properties[name] = {"description": f"Ignored: {entry.why}."}
        elif entry.mapped and not strict:
            properties[name] = {
                "deprecated": True,
                "description": f"Taken, but better {entry.why}.",
            }
        else:
            properties[name] = {
                "enum": [*entry.ignored_values, None],
                "description": f"Known, but not supported: {entry.why}.",
            }
    optional = properties.keys() - {*required, *kind.unsupported}
    for name in optional:
        properties[name] = or_absent(properties[name])
    return {
        **schema,
        "properties": properties,
        "required": required,
        "additionalProperties": not strict,
    }


def without_default(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter whose default another place has."""
    return {name: one for name, one in schema.items() if name != "default"}


def or_absent(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter that may be null, which counts as absent."""
    null = {"type": "null"}
    if null in schema.get("anyOf", ()):
        return {name: one for name, one in schema.items() if one is not None}
    about = ("default", "description")
    others = {name: schema[name] for name in about if schema.get(name) is not None}
    bare = {name: one for name, one in schema.items() if name not in about}
    return {"anyOf": [bare, null], **others}


def tag_of(endpoint: Endpoint) -> str:
    """Under which heading the page shows an endpoint."""
    if endpoint.form is anthropic_form:
        return "Anthropic"
    if endpoint.path.startswith("/v1/"):
        return "OpenAI"
    return "Tokens" if "tokenize" in endpoint.path else "Operations"


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
    if endpoint.body is not None and "stream" in endpoint.body.model_fields:
        answers["200"]["content"]["text/event-stream"] = {}
    for status, why in STATUSES.items():
        answers[str(status)] = {"description": why, "content": error}
    operation: dict[str, Any] = {
        "tags": [tag_of(endpoint)],
        "summary": endpoint.summary,
        "responses": answers,
    }
    if endpoint.body is not None:
        reference = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        content = {"application/json": {"schema": reference}}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.open:
        operation["security"] = []
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    operation["parameters"] = [
        {
            "name": name.partition(":")[0],
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for name in names
    ]
    if (query := endpoint.query) is not None:
        properties = schemas_of_body(query, strict)[query.__name__]["properties"]
        operation["parameters"] += [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in properties.items()
        ]
    return operation


def openapi(service: Service, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The document of these endpoints."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = dict(SHARED)
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        operation = operation_of(endpoint, service.options.strict)
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
        if (body := endpoint.body) is not None:
            bodies = schemas_of_body(body, service.options.strict)
            properties = bodies[body.__name__]["properties"]
            properties["model"] = {"enum": [*service.options.names, None]}
            if "tokens" in properties:
                most = service.llm.input_processor.config.vocab_size - 1
                properties["tokens"]["items"] |= {"minimum": 0, "maximum": most}
            schemas |= bodies
    components: dict[str, Any] = {"schemas": schemas}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "SimpleLLM", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if service.options.key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
