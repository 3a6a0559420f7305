"""Refuses JSON schemas that llguidance can't compile, or not in time, and says where.

Unknown keywords are annotations, as the standard has it. Some things llguidance accepts
and then does wrong; they are refused, or rewritten.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from math import lcm
from reprlib import repr as short
from typing import Any
from urllib.parse import unquote

from simplellm.base.config import nesting

# Keywords that say what an instance must be, and that llguidance can't do, or not at
# all places. The last one is its own, and would loosen what others say.
UNSUPPORTED = frozenset(
    "not if then else contains minContains maxContains uniqueItems propertyNames "
    "dependentRequired dependentSchemas dependencies unevaluatedItems additionalItems "
    "unevaluatedProperties $dynamicRef $recursiveRef x-guidance".split()
)
STRING_FORMATS = (
    "date date-time duration email hostname ipv4 ipv6 time uri uuid".split()
)
# llguidance lets these have a 29th of February each year, a 61st second each minute,
# and names that are too long or that no international name is written as.
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # of 100 years, but the first
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
)
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
LETTER, INNER = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
LABEL = (  # up to 63 characters, the third and fourth of which aren't both hyphens
    f"{LETTER}(?:{INNER}{{0,2}}{LETTER}"
    f"|{INNER}(?:{LETTER}{INNER}|-{LETTER}){INNER}{{0,58}}{LETTER})?"
)
FORMAT_PATTERNS = {
    "date": {"pattern": f"^{DATE}$"},
    "time": {"pattern": f"^{TIME}{ZONE}$"},
    "date-time": {"pattern": f"^{DATE}[tT]{TIME}{ZONE}$"},
    "hostname": {"pattern": rf"^{LABEL}(?:\.{LABEL})*$", "maxLength": 253},
}

# What JSON has no short escape for: llguidance would leave it out. The long ones it may
# not write, for then a property's name could hide behind them.
JSON_ESCAPES = r"nrbtf\""
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# The parts of a regular expression that mean the same to llguidance as to ECMA-262.
ESCAPED = (
    r"\\(?:[dDwWsSnrtf]|[^a-zA-Z0-9]|[pP]\{\w+\}"
    r"|x(?!0|1|7[fF])[0-9a-fA-F]{2}"
    r"|u(?!00[01]|007[fF]|[dD][89a-fA-F])[0-9a-fA-F]{4})"
)
PART = re.compile(
    rf"{ESCAPED}|\[\^?(?:{ESCAPED}|(?!&&|--|~~)[^\[\]\\])+\]|\(\?:|\((?!\?)|[^\\\[(]",
    re.DOTALL,
)
PATTERN = re.compile(f"(?:{PART.pattern})*", re.DOTALL)
# A hyphen before a class of characters, which ends no range in ECMA-262. Once the class
# is spelled out, llguidance would see one there, up to the bracket.
HYPHEN = r"-(?=\\[dDwWsSpP])"
# What ECMA-262 takes for white space; to stand between brackets.
WHITE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"

# A model at a loss writes digits for as long as it may. So integers have as many digits
# as ids of 64 bits, but end below llguidance's own last one, and numbers that a schema
# bounds have as many decimals as it can count. Of the others it knows one expression
# only: with an exponent, and without an end.
LAST_INTEGER, LAST_DECIMAL = 9 * 10**18, 1e-10
SIDES = (
    ("minimum", "exclusiveMinimum", -LAST_INTEGER),
    ("maximum", "exclusiveMaximum", LAST_INTEGER),
)

IDS = ("$id", "id", "$schema")  # the second one in old drafts

# What a $ref may not lead to: there a schema would be a value too.
VALUE_WITHIN = re.compile(r"(?<!properties)(?<!\$defs)(?<!definitions)/(const|enum)\b")

# Keywords that hold a schema, a list of them (items may too), or some by their names.
SINGLE = ("additionalProperties", "items")
BESIDE = ("allOf", "anyOf", "oneOf")  # of the same value
SEVERAL = (*BESIDE, "prefixItems", "items")
NAMED = ("properties", "patternProperties")

# What a schema inside another one may need of it, to be asked for alone.
AROUND = ("$schema", "$defs", "definitions", "x-guidance")

# llguidance recurses: 1,000 levels, $refs followed, crash a process with a stack of
# 8 MB. JSON itself it reads down to level 128.
MAX_LEVELS = 400
MAX_NESTING = 100
# What takes it time or memory by the square and more, in a whole schema.
MAX_PATTERNS = 16  # patternProperties
MAX_MULTIPLE = 10_000  # the least common multiple of what multipleOf says
MAX_OPTIONAL = 400  # properties of an object that may be left out
MAX_OPTIONAL_EVER = 4000  # the same of all objects: they may meet in allOf
MAX_COUNTED = 40  # the same where minProperties counts them
MAX_STRING = 8192  # characters of a const or a value of enum
MAX_NUMBER = 2**53  # llguidance reads numbers as floats, which have gaps above it
MOST_IN_SCHEMA = {
    "levels of JSON": MAX_NESTING,
    "levels of schemas": MAX_LEVELS,
    "patternProperties": MAX_PATTERNS,
    "for the least common multiple of multipleOf": MAX_MULTIPLE,
    "optional properties": MAX_OPTIONAL_EVER,
    "optional properties that minProperties counts": MAX_COUNTED,
}

Place = tuple[str, Any]  # a schema with its path


def list_under(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list under ``key``; empty if there is none."""
    values = schema.get(key)
    return values if isinstance(values, list) else []


def required_of(schema: Mapping[str, Any]) -> set[str]:
    """The names of the properties that an object must have."""
    return {name for name in list_under(schema, "required") if isinstance(name, str)}


def kinds_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema allows; None for all of them."""
    kinds = schema.get("type")
    some = [kinds] if isinstance(kinds, str) else list_under(schema, "type")
    return {kind for kind in some if isinstance(kind, str)} or None


def inner_schemas(schema: Mapping[str, Any], path: str) -> Iterator[Place]:
    """The direct subschemas of a schema, with their paths."""
    for key in SINGLE:
        yield f"{path}.{key}", schema.get(key)
    for key in SEVERAL:
        for number, one in enumerate(list_under(schema, key)):
            yield f"{path}.{key}[{number}]", one
    for key in NAMED:
        some = schema.get(key)
        for name, one in some.items() if isinstance(some, dict) else ():
            yield f"{path}.{key}.{short(name)[1:-1]}", one


def innermost_refused(
    root: Mapping[str, Any], refused: Callable[[Mapping[str, Any]], bool], until: float
) -> str:
    """The path of the innermost subschema of ``root`` that is ``refused``, or "".

    Each subschema is tested together with the definitions of ``root``. At ``until``, a
    time.monotonic(), the search ends with the path that it has found by then.
    """
    around = {key: root[key] for key in AROUND if key in root}
    path, schema, seen = "", root, {id(root)}
    while True:
        target = target_of(root, schema.get("$ref"))
        inner = chain(inner_schemas(schema, path), [(f"{path}.$ref", target)])
        for inside, one in inner:
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            if time.monotonic() < until and refused(around | one):
                path, schema = inside, one
                break
        else:
            return path


def levels_of(schema: Any, path: str) -> list[list[Place]]:
    """A schema and its subschemas, level by level; what is no object is left out."""
    floors = [[(path, schema)]]
    while floors[-1]:
        floors.append(
            [
                (path, one)
                for outer, schema in floors[-1]
                for path, one in inner_schemas(schema, outer)
                if isinstance(one, dict)
            ]
        )
    return floors[:-1]


def target_of(root: Any, pointer: Any) -> Any:
    """The schema inside ``root`` that a $ref names; None if there is none."""
    first, *words = pointer.split("/") if isinstance(pointer, str) else [""]
    target = root if first == "#" else None
    for word in map(unquote, words):
        name = word.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal():
            target = dict(enumerate(target)).get(int(name[:9]))
        else:
            target = target.get(name) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else None


def circle_of(
    schemas: Sequence[Mapping[str, Any]], root: Any
) -> Mapping[str, Any] | None:
    """A schema whose $ref leads back to it without descending into the value.

    None if there is none. Such a schema would have no end.
    """
    beside = {}
    for schema in schemas:
        some = [one for key in BESIDE for one in schema.get(key, ())]
        some.append(target_of(root, schema.get("$ref")))
        beside[id(schema)] = {id(one) for one in some}
    while ends := [own for own, some in beside.items() if not some & beside.keys()]:
        for own in ends:
            del beside[own]
    if not beside:
        return None
    own, way = next(iter(beside)), dict[int, int]()
    while own not in way:  # it may lead to a circle only
        way[own] = len(way)
        own = next(iter(beside[own] & beside.keys()))
    inside = {one for one, number in way.items() if number >= way[own]}
    return next(s for s in schemas if id(s) in inside and "$ref" in s)


def common_multiple(schemas: Sequence[Mapping[str, Any]]) -> int:
    """The least common multiple of all multipleOf, in units of their last digit.

    Beyond MAX_MULTIPLE, any larger number may be returned.
    """
    multiples = [schema.get("multipleOf") for schema in schemas]
    some = {repr(number) for number in multiples if isinstance(number, int | float)}
    numbers = [Decimal(number).normalize() for number in some]
    exponents = [number.as_tuple().exponent for number in numbers]
    least = min((e for e in exponents if isinstance(e, int)), default=0)
    multiple = 1
    for number, exponent in zip(numbers, exponents, strict=True):
        if not isinstance(exponent, int) or exponent - min(least, 0) > 9:
            return MAX_MULTIPLE + 1
        multiple = lcm(multiple, abs(int(number.scaleb(-min(least, 0)))) or 1)
        if multiple > MAX_MULTIPLE:
            break
    return multiple


def scalars(value: Any) -> Iterator[Any]:
    """The keys and scalars of nested lists and objects. Raises RecursionError."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from scalars(one)
    else:
        yield value


def value_problem(schema: Mapping[str, Any], path: str) -> str | None:
    """The first name, value or bound of one schema that llguidance can't take."""
    keys = "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf const enum"
    given = {key: schema[key] for key in keys.split() if key in schema}
    if isinstance(named := schema.get("properties"), dict):
        given["properties"] = [*named]
    for key, values in (given | {"required": schema.get("required")}).items():
        for value in scalars(values):
            if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
                return f"{path}.{key} has {short(value)}; expected at most 2^53"
            if isinstance(value, str) and CONTROL.search(value):
                return f"{path}.{key} has {short(value)}; no control characters fit"
            if isinstance(value, str) and len(value) > MAX_STRING:
                count = f"{len(value)} characters"
                return f"{path}.{key} has {count}; expected at most {MAX_STRING}"
    return None


def pattern_problem(schema: Mapping[str, Any], path: str) -> str | None:
    """The first pattern of one schema that llguidance would understand otherwise."""
    patterns = {"pattern": schema.get("pattern")}
    if isinstance(named := schema.get("patternProperties"), dict):
        patterns |= {f"patternProperties.{short(name)[1:-1]}": name for name in named}
    for key, pattern in patterns.items():
        if not isinstance(pattern, str):
            continue
        if not PATTERN.fullmatch(pattern) or CONTROL.search(pattern):
            expected = "no lookarounds, flags, sets of sets or control characters"
            return f"{path}.{key} is {short(pattern)}; expected {expected}"
    return None


def optional_properties(schema: Mapping[str, Any]) -> int:
    """How many properties of an object are optional."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return 0
    return len(properties.keys() - required_of(schema))


def counted_properties(schemas: Sequence[Mapping[str, Any]]) -> int:
    """The number of optional properties where llguidance may count properties.

    It counts them for minProperties, only in closed objects, with a rule for each pair.
    Schemas may meet in allOf, so one minProperties anywhere is enough.
    """
    if not any("minProperties" in schema for schema in schemas):
        return 0
    closed = (s for s in schemas if s.get("additionalProperties") is False)
    return sum(map(optional_properties, closed))


def rewrite_patterns(schema: dict[str, Any]) -> None:
    """Rewrite patterns and formats that llguidance would understand otherwise."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = exact_pattern(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        items = ((exact_pattern(name), one) for name, one in named.items())
        schema["patternProperties"] = dict(items)
    form = schema.get("format")
    if isinstance(form, str) and form in FORMAT_PATTERNS:
        del schema["format"]
        schema["allOf"] = [*list_under(schema, "allOf"), FORMAT_PATTERNS[form]]


def bound_numbers(schema: dict[str, Any], decimals: bool) -> None:
    """Bound the numbers of a schema, so that they have finitely many digits.

    With ``decimals``, fractions too: then no schema has a multipleOf, with which
    llguidance's least common multiple might overflow. Numbers without any bound stay.
    """
    kinds = kinds_of(schema) or {"number"}
    given = [[schema[key] for key in keys if key in schema] for *keys, _ in SIDES]
    bounded = any(given) or "multipleOf" in schema
    if "integer" not in kinds and not ("number" in kinds and bounded):
        return
    for (key, _, most), some in zip(SIDES, given, strict=True):
        if not some:
            schema[key] = most
    wide = given[0] != given[1] and schema.keys().isdisjoint(("enum", "const"))
    if decimals and wide and "number" in kinds:
        schema.setdefault("multipleOf", LAST_DECIMAL)


def exact_pattern(pattern: str) -> str:
    """A pattern whose white space and dot are those of ECMA-262."""

    def exact(part: re.Match[str]) -> str:
        text = part[0]
        if text == ".":
            return r"[^\n\r\u2028\u2029]"
        if text == r"\s":
            return f"[{WHITE}]"
        inside = {r"\s": WHITE, r"\S": f"[^{WHITE}]", "-": r"\-"}
        return re.sub(
            rf"{HYPHEN}|\\.", lambda m: inside.get(m[0], m[0]), text, flags=re.DOTALL
        )

    return PART.sub(exact, pattern)


# Keywords of UNSUPPORTED with the values that say nothing of an instance.
EMPTY_VALUES: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),  # as all names are
    "additionalItems": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
NOTES = ("title", "description", "$comment", "$schema", "default", "examples")
# Others of them say nothing without any of these.
MEANT_BESIDE = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}


def drop_empty_keywords(schema: dict[str, Any], root: Any) -> None:
    """Delete the keywords of one schema that mean nothing where they stand.

    Generators write such keywords everywhere. An id in a subschema only names it, and
    nothing here uses the name, unless there is a $ref below it that is relative to it.
    """
    for key in [key for key in schema if key in UNSUPPORTED]:
        value = schema[key]
        if isinstance(value, dict):
            value = {name: one for name, one in value.items() if name not in NOTES}
        empty = value in EMPTY_VALUES.get(key, ())
        alone = key in MEANT_BESIDE and schema.keys().isdisjoint(MEANT_BESIDE[key])
        no_list = key == "additionalItems" and not isinstance(schema.get("items"), list)
        if empty or alone or no_list:
            del schema[key]
    if schema is root:
        return
    names = [key for key in IDS if isinstance(schema.get(key), str)]
    if names == ["$schema"] or (names and not has_ref(schema)):
        for key in names:
            del schema[key]


def has_ref(schema: dict[str, Any]) -> bool:
    """Whether there is a $ref in a schema or its subschemas."""
    return any("$ref" in one for _, one in chain(*levels_of(schema, "")))


def keyword_problem(schema: Mapping[str, Any], path: str, root: Any) -> str | None:
    """The first keyword of one schema that can't be done."""
    for key in schema:
        if key in UNSUPPORTED:
            return f"{path}.{key}: this keyword is not supported"
    reference, form = schema.get("$ref"), schema.get("format")
    if reference is not None and target_of(root, reference) is None:
        expected = "'#' or a pointer '#/...' to a schema inside this one"
        return f"{path}.$ref is {short(reference)}; expected {expected}"
    if reference is not None and VALUE_WITHIN.search(unquote(reference)):
        return f"{path}.$ref is {short(reference)}; expected none into a const or enum"
    kinds = schema.get("type", "string")  # of numbers it says nothing
    text = "string" in (kinds if isinstance(kinds, list) else [kinds])
    if text and form is not None and form not in STRING_FORMATS:
        known = ", ".join(STRING_FORMATS)
        return f"{path}.format is {short(form)}; expected one of {known}"
    for key in IDS:
        if isinstance(schema.get(key), str) and schema is not root:
            # It would lead each $ref inside elsewhere, or unmake keywords.
            return f"{path}.{key}: expected none but that of the whole schema"
    least = schema.get("minProperties")
    if isinstance(least, int) and least > len(required_of(schema)) + 1:
        # A property that isn't named may come twice, and llguidance counts both.
        expected = "at most one more than there are required properties"
        return f"{path}.minProperties is {short(least)}; expected {expected}"
    if (left := optional_properties(schema)) > MAX_OPTIONAL:
        expected = f"at most {MAX_OPTIONAL} that are not required"
        return f"{path}.properties has {left} of them; expected {expected}"
    return value_problem(schema, path) or pattern_problem(schema, path)


def problem_of(root: Any, where: str) -> str | None:
    """The first problem of a schema, or None. Raises RecursionError.

    The search goes where llguidance goes, through each $ref once; the levels of all
    that these lead to add up, since they may nest. A schema without a problem is
    rewritten in place, in words that llguidance does right. A schema that no finite
    text fits is not found here: a model follows it for as many tokens as it may.
    """
    if not isinstance(root, dict):
        return f"{where} is {short(root)}; expected an object"
    sizes = dict.fromkeys(MOST_IN_SCHEMA, 0) | {"levels of JSON": nesting(root)}
    pointers = {"#": root}  # as they are spelled
    seen: dict[int, int] = {}  # the levels of what they lead to
    every: list[dict[str, Any]] = []
    paths = dict[int, str]()
    waiting = ["#"] if sizes["levels of JSON"] <= MAX_NESTING else []
    while waiting and sizes["levels of schemas"] <= MAX_LEVELS:
        pointer = waiting.pop()
        target = pointers[pointer]
        if id(target) not in seen:
            floors = levels_of(target, where + unquote(pointer[1:]).replace("/", "."))
            seen[id(target)] = len(floors)
            for path, schema in chain(*floors):
                drop_empty_keywords(schema, root)
                if (problem := keyword_problem(schema, path, root)) is not None:
                    return problem
                every.append(schema)
                paths.setdefault(id(schema), path)
                reference = schema.get("$ref", "#")
                if reference not in pointers:
                    pointers[reference] = target_of(root, reference)
                    waiting.append(reference)
        sizes["levels of schemas"] += seen[id(target)]
    patterns = (schema.get("patternProperties") for schema in every)
    sizes["patternProperties"] = sum(len(some) for some in patterns if some)
    sizes["for the least common multiple of multipleOf"] = common_multiple(every)
    sizes["optional properties"] = sum(map(optional_properties, every))
    sizes["optional properties that minProperties counts"] = counted_properties(every)
    for name, most in MOST_IN_SCHEMA.items():
        if sizes[name] > most:
            return f"{where} has {short(sizes[name])} {name}; expected at most {most}"
    if (circle := circle_of(every, root)) is not None:
        to = f"$ref {short(circle['$ref'])} leads back to it"
        return f"{paths[id(circle)]}: {to}, never inside"
    decimals = not any("multipleOf" in schema for schema in every)
    for schema in every:
        rewrite_patterns(schema)
        bound_numbers(schema, decimals)
    return None
