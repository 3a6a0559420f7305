"""What the options of a chat ask of its turn: the answer's format, and which calls."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

from simplellm.base.config import expect, expect_type, one_of
from simplellm.base.sampling_params import StructuredOutputs
from simplellm.structured.rules import (
    MAX_TEXT,
    WHERE,
    any_spelling,
    output_rules,
    rules_text,
    schema_rules,
)
from simplellm.text.harmony import Tool
from simplellm.text.harmony.schema import format_text
from simplellm.text.harmony.turn import FREE, Rules, turn_grammar

OBJECT = {"type": "object"}
MAX_CALLS = 128  # tools that one grammar tells apart; as with OpenAI
# Keywords that may name arguments beside those of "properties".
MORE_PROPERTIES = {"allOf", "anyOf", "oneOf", "if", "$ref", "patternProperties"}
MORE_PROPERTIES |= {"dependentSchemas", "dependencies", "propertyNames"}
FORMAT_NAME = re.compile(r"[\w-]{1,64}")  # as with OpenAI


@dataclass(frozen=True)
class Format:
    """The format of an answer: its ``rules``, or None, and its text for the model.

    ``where`` is the parameter that asks for it.
    """

    rules: Rules | None = None
    text: str = ""
    where: str = "response_format"


def as_format(value: Any, where: str = "response_format") -> Format:
    """OpenAI's ``response_format``, which stands at ``where``; None is any text.

    The fields of a json_schema may also stand in it as they are, as /v1/responses has
    it. Raises TypeError or ValueError.
    """
    if isinstance(value, Format | None):
        return value or Format()
    asks = where
    expect_type(where, value, Mapping, "an object")
    kind = value.get("type")
    one_of(f"{where}.type", kind, ("text", "json_object", "json_schema"))
    if kind == "json_object" and value.get("schema") is not None:  # as llama.cpp has it
        value = {"name": "output", "schema": value["schema"]}
    elif kind != "json_schema":
        rules = schema_rules(OBJECT, where) if kind == "json_object" else None
        return Format(rules, "", asks)
    nothing = where == "response_format" and not value.keys() & {"name", "schema"}
    if "json_schema" in value or nothing:
        where, value = f"{where}.json_schema", value.get("json_schema")
        expect_type(where, value, Mapping, "an object")
    name, about = value.get("name"), value.get("description") or ""
    schema, strict = value.get("schema"), value.get("strict")
    expect_type(f"{where}.name", name, str, "a string")
    expect_type(f"{where}.description", about, str, "a string")
    expect_type(f"{where}.schema", schema, Mapping, "an object")
    expect_type(f"{where}.strict", strict, bool | None, "true or false")
    expected = "up to 64 letters, digits, '_' and '-'"
    expect(FORMAT_NAME.fullmatch(str(name)), f"{where}.name", name, expected)
    rules = schema_rules(schema, f"{where}.schema")
    return Format(rules, format_text(str(name), about, schema or {}), asks)


def callable_tools(choice: Any, tools: Sequence[Tool]) -> tuple[Sequence[Tool], bool]:
    """The tools that ``tool_choice`` lets the model call, and whether it has to.

    None is "auto"; a tool is named as in OpenAI's chats or, shorter, its responses, and
    so are those of "allowed_tools". Raises TypeError or ValueError.
    """
    if not isinstance(choice, Mapping):
        one_of("tool_choice", choice, (None, "auto", "none", "required"))
        must = choice == "required"
        ok = tools or not must
        expect(ok, "tool_choice", choice, "tools to choose from")
        return () if choice == "none" else tools, must
    one_of("tool_choice.type", choice.get("type"), ("function", "allowed_tools"))
    if choice["type"] == "function":
        return named_tools([choice], tools), True
    choice = choice.get("allowed_tools", choice)
    expect_type("tool_choice.allowed_tools", choice, Mapping, "an object")
    mode, some = choice.get("mode"), choice.get("tools")
    one_of("tool_choice.mode", mode, ("auto", "required"))
    expect_type("tool_choice.tools", some, list | tuple, "a list of tools")
    expect(some, "tool_choice.tools", some, "at least one tool")
    return named_tools(some, tools), mode == "required"


def named_tools(choices: Sequence[Any], tools: Sequence[Tool]) -> list[Tool]:
    """The ``tools`` that some choices name. Raises ValueError."""
    names = []
    for choice in choices:
        name = choice.get("function", choice) if isinstance(choice, Mapping) else None
        names.append(name.get("name") if isinstance(name, Mapping) else name)
        ok = any(tool.name == names[-1] for tool in tools)
        offered = short([tool.name for tool in tools])
        expected = f"the name of one of the tools ({offered})"
        expect(ok, "tool_choice", names[-1], expected)
    return [tool for tool in tools if tool.name in names]


def arguments_rules(tool: Tool, where: str, held: bool = False) -> Rules:
    """The rules of a tool's arguments: its schema if it is ``strict``, else any object.

    With ``held`` it's its schema where that can be. Raises ValueError as
    `schema_rules`, or if they would be no object.
    """
    if not tool.strict:
        if held and tool.parameters:
            with suppress(TypeError, ValueError):
                named = with_named_only(tool.parameters)
                strict = replace(tool, parameters=named, strict=True)
                return arguments_rules(strict, where)
        return schema_rules(OBJECT, where)
    schema = tool.parameters or OBJECT | {"additionalProperties": False}
    kind = schema.get("type") if isinstance(schema, dict) else schema
    expect(kind == "object", f"{where}.type", kind, "'object' of a strict tool")
    return schema_rules(schema, where)


def with_named_only(schema: Any) -> Any:
    """The ``schema`` of arguments without any that it doesn't name, if it names all.

    Functions have no others, though most schemas don't say so.
    """
    if not isinstance(schema, Mapping) or not schema.get("properties"):
        return schema
    whole = not schema.keys() & MORE_PROPERTIES
    return {"additionalProperties": False, **schema} if whole else schema


@dataclass(frozen=True)
class Constraint:
    """The text of a grammar; ``parts`` are its rules by what asks for them.

    ``looser`` is what to fit where that one can't be compiled, if that will do.
    """

    text: str
    parts: Mapping[str, Rules]
    looser: "Constraint | None" = None

    def any_spelling(self) -> "Constraint":
        """The same for texts that are cut into tokens in any way."""
        looser = None if self.looser is None else self.looser.any_spelling()
        return replace(self, text=any_spelling(self.text), looser=looser)


def text_constraint(
    outputs: StructuredOutputs | None, answer: Format | None = None
) -> Constraint | None:
    """What a text that is no chat has to fit, if anything.

    ``answer`` is a response_format. Raises ValueError if both are given.
    """
    parts = answer_parts(outputs, answer)
    return Constraint(rules_text(*parts.values()), parts) if parts else None


def answer_parts(
    outputs: StructuredOutputs | None, answer: Format | None
) -> dict[str, Rules]:
    """The rules of a text, or of a final answer, by what asks for them."""
    rules = {} if not answer or answer.rules is None else {answer.where: answer.rules}
    if outputs is None:
        return rules
    expect(not rules, WHERE, "given", f"none beside {', '.join(rules)}")
    return {WHERE: output_rules(outputs)}


def turn_constraint(
    answer: Format | None,
    tools: Sequence[Tool],
    choice: Any,
    outputs: StructuredOutputs | None,
    grammar: Callable[[Rules | None, Mapping[str, Rules]], str] = turn_grammar,
    alone: bool = False,
) -> Constraint | None:
    """What a turn has to fit; None where nothing is asked: the model writes freely.

    ``answer`` is a response_format; ``grammar`` makes one of the rules of an answer and
    of calls. With ``alone`` one is needed where there are tools, even if nothing else
    is asked of their calls. A call fits its tool's schema if the tool is strict, and
    one that has to come wherever that can be held. Raises TypeError or ValueError.
    """
    some, must = callable_tools(choice, tools)
    parts = answer_parts(outputs, answer)
    limited = isinstance(choice, Mapping) and len(some) < len(tools)
    strict = any(alone or tool.strict for tool in some)
    if not (parts or must or limited or strict):
        return None
    final = None if must else next(iter(parts.values()), FREE)
    names = {tool.name for tool in some}
    count = len(names)
    expected = f"at most {MAX_CALLS}, where a grammar tells them apart"
    expect(count <= MAX_CALLS, "the number of tools", count, expected, param="tools")

    def constraint(held: bool) -> Constraint:
        rules, calls = dict(parts), dict[str, Rules]()
        length, most = len(rules_text(*parts.values())), 2 * MAX_TEXT
        name, expected = "the length of schemas in tools", f"at most {most} characters"
        for number, tool in enumerate(tools):
            if tool.name in names:
                where = f"tools[{number}].parameters"
                rules[where] = calls[tool.name] = arguments_rules(tool, where, held)
                # At each of them: to check those that are too many takes time, too.
                length += len(rules_text(rules[where]))
                expect(length <= most, name, length, expected, param="tools")
        return Constraint(grammar(final, calls), rules)

    looser = constraint(held=False)
    if must:
        with suppress(TypeError, ValueError):
            stricter = constraint(held=True)
            if stricter.text != looser.text:
                return replace(stricter, looser=looser)
    return looser
