"""The developer message: functions, declared in TypeScript from their JSON schemas.

Declarations are spaced exactly as gpt-oss learned them, and as openai-harmony 0.0.8
writes them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

from simplellm.base.config import ParameterError, expect
from simplellm.text.harmony.message import HEADER_WORD, Message

NAMESPACE = "namespace functions {"  # what the tools are declared in


@dataclass(frozen=True)
class Tool:
    """A function the model may call; ``parameters`` is a JSON schema of an object.

    The arguments of a ``strict`` one fit it, whatever the model would write.
    """

    name: str
    description: str
    parameters: dict[str, Any] | None = None
    strict: bool = False


# Makes the developer message's content of instructions and tools.
Lead = Callable[[str | None, Sequence[Tool]], str]


def as_tools(tools: Sequence[Tool | Mapping[str, Any]]) -> list[Tool]:
    """``tools`` with OpenAI's dicts, `{"function": {...}}`, turned into Tool.

    Raises TypeError or ValueError for what cannot be declared.
    """
    expect(isinstance(tools, list | tuple), "tools", tools, "a list", TypeError)
    by_name: dict[Any, Tool] = {}
    for number, tool in enumerate(tools):
        where, value = f"tools[{number}]", tool
        try:
            if not isinstance(tool, Tool):
                function = tool["function"]
                text = function.get("description") or ""
                tool = Tool(function["name"], text, function.get("parameters"))
                tool = replace(tool, strict=function.get("strict") or False)
            function_type(tool)
            named = HEADER_WORD.fullmatch(tool.name)
        except (AttributeError, KeyError, TypeError):
            expected = "a dict with function: name, description, parameters"
            wrong = f"{where} is {short(value)}; expected {expected}"
            raise ParameterError(wrong, where) from None
        alone = named and tool.name not in by_name
        expected = "a name of its own, without spaces and '<'"
        expect(alone, f"{where}.name", tool.name, expected)
        ok = isinstance(tool.strict, bool)
        expect(ok, f"{where}.strict", tool.strict, "true or false", TypeError)
        by_name[tool.name] = tool
    return list(by_name.values())


def developer_text(instructions: str | None, tools: Sequence[Tool] = ()) -> str:
    """The developer message: what others call the system prompt, and the functions."""
    sections = ["# Instructions", instructions] if instructions else []
    if tools:
        functions = "\n".join(map(function_type, tools))
        end = "} // namespace functions"
        sections += ["# Tools", "## functions", NAMESPACE, f"{functions}\n{end}"]
    return "\n\n".join(sections)


def format_text(name: str, description: str, schema: Mapping[str, Any]) -> str:
    """The description of an answer's format, for the end of the developer message."""
    written = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    title = f"# Response Formats\n\n## {name}"
    return f"{title}\n\n{comments_of(description)}{written}"


def with_format(
    messages: Sequence[Message], tools: Sequence[Tool], text: str
) -> list[Message]:
    """``messages`` with a format's ``text`` at the end of the first developer message.

    If there is none in front, it is one of its own, which describes ``tools`` as
    `render` would in its place.
    """
    first = int(messages[0].role == "system") if messages else 0
    system, rest = [*messages[:first]], [*messages[first:]]
    if rest and rest[0].role == "developer":
        content = rest.pop(0).content
    else:
        described = any(message.role == "developer" for message in rest)
        content = developer_text(None, () if described else tools)
    lead = "\n\n".join(filter(None, [content, text]))
    return [*system, Message("developer", lead), *rest]


def comments_of(description: str) -> str:
    """The lines of a description as comments."""
    lines = description.removesuffix("\n").split("\n") if description else []
    return "".join(f"// {line.removesuffix(chr(13))}\n" for line in lines)


def function_type(tool: Tool) -> str:
    """The TypeScript declaration of a function under its description's lines."""
    comments = comments_of(tool.description)
    try:
        arguments = "" if tool.parameters is None else f"_: {type_of(tool.parameters)}"
    except RecursionError:
        wrong = f"the schema of {tool.name!r} is nested too deep; expected fewer levels"
        raise ParameterError(wrong, "tools") from None
    return f"{comments}type {tool.name} = ({arguments}) => any;\n"


def type_of(schema: Any, indent: str = "") -> str:
    """The TypeScript type for a JSON schema; what it does not know is `any`."""
    match schema:
        case {"oneOf": [*variants]}:
            shown = (variant_of(v, indent, text_of(v), bare=False) for v in variants)
            return "".join(f"\n{indent} | {one}" for one in shown)
        case {"type": [str(), *_] as names}:
            return " | ".join("number" if n == "integer" else str(n) for n in names)
        case {"type": "object"}:
            text = text_of(schema)
            about = "" if text is None else f"{indent}// {text}\n"
            required = schema.get("required") or ()
            properties = "".join(
                property_of(name if name in required else f"{name}?", value, indent)
                for name, value in (schema.get("properties") or {}).items()
            )
            return f"{about}{{\n{properties}{indent}}}"
        case {"type": "string", "enum": [*values]} if values:
            names = [f'"{value}"' for value in values if isinstance(value, str)]
            return " | ".join(names) or "string"
        case {"type": "array", "items": items}:
            return f"{type_of(items, indent)}[]"
        case {"type": "array"}:
            return "Array<any>"
        case {"type": "integer" | "number"}:
            return "number"
        case {"type": "string" | "boolean" as name}:
            return name
    return "any"


def property_of(name: str, schema: Any, indent: str) -> str:
    """The lines of one property: comments, name, type and default."""
    schema = schema if isinstance(schema, dict) else {}
    title, text = text_of(schema, "title"), text_of(schema)
    variants = schema.get("oneOf")
    lines = [] if title is None else [f"// {title}", "//"]
    about = [] if text is None else [f"// {text}"]
    given = schema.get("examples")
    given = given if isinstance(given, list) else []
    examples = ["// Examples:"] if given else []
    examples += [f'// - "{example}"' for example in given if isinstance(example, str)]
    default = [f"// default: {default_of(schema)}"] if "default" in schema else []
    if not isinstance(variants, list):
        lines += about + examples
        value = nullable_of(schema, indent + "    ")
        lines.append(" ".join([f"{name}: {value},", *default]))
        return "".join(f"{indent}{line}\n" for line in lines)
    # A description that the first variant repeats is written there, and only there.
    if variants and text_of(variants[0]) == text:
        about = []
    lines += examples + about + default + [f"{name}:"]
    for number, variant in enumerate(variants):
        said = text_of(variant)
        note = None if said == text or (number == 0 and about) else said
        lines.append(f" | {variant_of(variant, indent, note)}")
    return "".join(f"{indent}{line}\n" for line in [*lines, ","])


def variant_of(variant: Any, indent: str, note: str | None, bare: bool = True) -> str:
    """One variant of a oneOf, with a ``note`` and its default behind it."""
    variant = variant if isinstance(variant, dict) else {}
    notes = [] if note is None else [note]
    if "default" in variant:
        notes.append(f"default: {default_of(variant, bare=bare)}")
    comment = f" // {' '.join(notes)}" if notes else ""
    return nullable_of(variant, indent + "   ") + comment


def nullable_of(schema: Mapping[str, Any], indent: str) -> str:
    """The type for a schema that may say `"nullable": true`."""
    value = type_of(schema, indent)
    nullable = schema.get("nullable") is True and "null" not in value
    return f"{value} | null" if nullable else value


def default_of(schema: Mapping[str, Any], *, bare: bool = True) -> str:
    """A schema's default as JSON; a string is not escaped, an enum's is ``bare``."""
    value = schema["default"]
    enum = bool(schema.get("enum"))
    if isinstance(value, str) and not enum:
        return f'"{value}"'
    if isinstance(value, str) and bare:
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def text_of(schema: Any, key: str = "description") -> str | None:
    """The text that a schema has under ``key``, if any."""
    text = schema.get(key) if isinstance(schema, dict) else None
    return text if isinstance(text, str) else None
