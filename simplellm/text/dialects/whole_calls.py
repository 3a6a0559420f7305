"""Calls that can be read as a whole only: Qwen3-Coder's XML, and JSON whose name comes
last. All others are read as they come, by `TagParser`.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from simplellm.text.harmony import Tool

XML = "<function="
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# Of XML: a parameter's value may hold "</function>" itself.
END = re.compile(r"(?:</parameter>|<function=[^>\n]+>)\s*</function>")
ARGUMENTS_FIRST = re.compile(r"\s*\[?\s*(\{\s*\"(arguments|parameters)\"\s*:)")
READER = json.JSONDecoder(strict=False)  # models write line breaks in strings

Call = tuple[str, str, str]  # a function's name, its arguments, and the text behind it


def xml_call(text: str, tools: Sequence[Tool], complete: bool | None) -> Call | None:
    """The call that ``text`` begins with in XML; None if it has no end yet.

    With ``complete`` it has to do without its end. If that is False, it was cut off,
    and its arguments stay open.
    """
    name, end = FUNCTION.match(text), END.search(text)
    if name is None or (end is None and complete is None):
        return None
    schemas = {tool.name: tool.parameters for tool in tools}
    properties = (schemas.get(name[1]) or {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    arguments, start = dict[str, Any](), name.end()
    while match := PARAMETER.match(text, start):
        arguments[match[1]] = value_of(match[2], properties.get(match[1]))
        start = match.end()
    written = json.dumps(arguments, ensure_ascii=False)
    if end is None and complete is False:
        written = written[:-1]
    return name[1], written, text[end.end() :] if end else ""


def value_of(text: str, schema: Any) -> Any:
    """What the text of a parameter means by its ``schema``.

    A text that may be a string is one. Without a schema it is what it is as JSON.
    """
    kinds = all_kinds(schema)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    word = text.strip()
    try:
        return READER.decode(word.lower() if "boolean" in kinds else word)
    except (ValueError, RecursionError):
        return text


def all_kinds(schema: Any) -> set[str]:
    """The types that a property's schema names, here or in its anyOf."""
    if not isinstance(schema, dict):
        return set()
    kinds, inner = schema.get("type", []), schema.get("anyOf")
    kinds_here = {kinds} if isinstance(kinds, str) else {*kinds}
    return kinds_here.union(*map(all_kinds, inner if isinstance(inner, list) else []))


def json_call(text: str) -> Call | None:
    """The call that ``text`` begins with in JSON, its arguments first."""
    if (begin := ARGUMENTS_FIRST.match(text)) is None:
        return None
    try:
        call, end = READER.raw_decode(text, begin.start(1))
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call[begin[2]]
    if not isinstance(name, str):
        return None
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return name, arguments, text[end:]
