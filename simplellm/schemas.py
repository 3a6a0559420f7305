"""What of a JSON schema llguidance can do, and in time; all else has a path.

Keywords that nobody knows are annotations, as the standard has it.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import chain
from math import lcm
from reprlib import repr as short
from typing import Any
from urllib.parse import unquote

# Keywords that say what an instance must be, and that llguidance can't do. The last one
# is its own, and would loosen what others say.
UNSUPPORTED = frozenset(
    "not if then else contains minContains maxContains uniqueItems propertyNames "
    "dependentRequired dependentSchemas dependencies unevaluatedItems "
    "unevaluatedProperties $dynamicRef $recursiveRef x-guidance".split()
)
STRING_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()
)
# Keywords that hold a schema, a list of them (items may too), or some by their names.
SINGLE = ("additionalProperties", "items", "additionalItems")
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties")

# llguidance recurses: 1,000 levels, $refs followed, crash a process with a stack of
# 8 MB. JSON itself it reads down to level 128.
MAX_LEVELS = 400
MAX_NESTING = 100
# What takes it time or memory by the square and more, in a whole schema.
MAX_PATTERNS = 16  # patternProperties
MAX_MULTIPLE = 10_000  # the least common multiple of what multipleOf says
MAX_OPTIONAL = 400  # properties of an object that may be left out
MOST_IN_SCHEMA = {
    "levels of JSON": MAX_NESTING,
    "levels of schemas": MAX_LEVELS,
    "patternProperties": MAX_PATTERNS,
    "for the least common multiple of multipleOf": MAX_MULTIPLE,
}

Place = tuple[str, Any]  # a schema with its path


def nesting(value: Any) -> int:
    """How deep lists and objects are nested. Raises RecursionError."""
    if not isinstance(value, dict | list):
        return 0
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(map(nesting, inside), default=0)


def inner_schemas(schema: Mapping[str, Any], path: str) -> Iterator[Place]:
    """The schemas right inside one."""
    for key in SINGLE:
        yield f"{path}.{key}", schema.get(key)
    for key in SEVERAL:
        for number, one in enumerate(listed(schema, key)):
            yield f"{path}.{key}[{number}]", one
    for key in NAMED:
        some = schema.get(key)
        for name, one in some.items() if isinstance(some, dict) else ():
            yield f"{path}.{key}.{short(name)[1:-1]}", one


def levels_of(schema: Any, path: str) -> list[list[Place]]:
    """A schema and those inside it, level by level; what is no object is none."""
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
    """The schema inside ``root`` that a $ref leads to; None if there is none."""
    first, *words = pointer.split("/") if isinstance(pointer, str) else [""]
    found = root if first == "#" else None
    for word in map(unquote, words):
        name = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal():
            found = dict(enumerate(found)).get(int(name[:9]))
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def common_multiple(schemas: list[Mapping[str, Any]]) -> int:
    """The least common multiple of all multipleOf, in units of their last digit.

    Once it is more than there may be, the rest doesn't count.
    """
    given = [schema.get("multipleOf") for schema in schemas]
    some = {repr(number) for number in given if isinstance(number, int | float)}
    numbers = [Decimal(number).normalize() for number in some]
    exponents = [number.as_tuple().exponent for number in numbers]
    least = min((e for e in exponents if isinstance(e, int)), default=0)
    found = 1
    for number, exponent in zip(numbers, exponents, strict=True):
        if not isinstance(exponent, int) or exponent - min(least, 0) > 9:
            return MAX_MULTIPLE + 1
        found = lcm(found, abs(int(number.scaleb(-min(least, 0)))) or 1)
        if found > MAX_MULTIPLE:
            break
    return found


def keyword_problem(schema: Mapping[str, Any], path: str, root: Any) -> str | None:
    """What one schema says itself that can't be done."""
    for key in schema:
        if key in UNSUPPORTED:
            return f"{path}.{key}: this keyword is not supported"
    reference, form = schema.get("$ref"), schema.get("format")
    if reference is not None and target_of(root, reference) is None:
        wanted = "'#' or a pointer '#/...' to a schema inside this one"
        return f"{path}.$ref is {short(reference)}; expected {wanted}"
    if form is not None and form not in STRING_FORMATS:
        known = ", ".join(sorted(STRING_FORMATS))
        return f"{path}.format is {short(form)}; expected one of {known}"
    if "$id" in schema and schema is not root:  # it would lead every $ref elsewhere
        return f"{path}.$id: expected none but that of the whole schema"
    properties = schema.get("properties")
    if isinstance(properties, dict):
        some = listed(schema, "required")
        left = sum(name not in some for name in properties)
        if left > MAX_OPTIONAL:
            wanted = f"at most {MAX_OPTIONAL} that are not required"
            return f"{path}.properties has {left} of them; expected {wanted}"
    return None


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list under ``key``; empty if there is none."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def ends(root: Any, every: list[Mapping[str, Any]], targets: Mapping[str, Any]) -> bool:
    """Whether a text that fits ``root`` can end, as far as its $refs go.

    ``every`` schema that they lead to is asked again until no more of them can.
    """
    ending: set[int] = set()

    def can(schema: Any) -> bool:
        return id(schema) in ending or not isinstance(schema, dict)

    def parts(schema: Mapping[str, Any]) -> Iterator[Any]:
        """What has to end before it can."""
        if "$ref" in schema:
            yield targets[schema["$ref"]]
        yield from listed(schema, "allOf")
        if schema.get("type") == "object" and "properties" in schema:
            names = listed(schema, "required")
            properties = schema["properties"]
            yield from (properties[name] for name in properties if name in names)
        if schema.get("type") == "array" and schema.get("minItems"):
            yield schema.get("items")

    count = -1
    while len(ending) > count:
        count = len(ending)
        for schema in reversed(every):  # what lies inside comes later
            ways = [listed(schema, "anyOf"), listed(schema, "oneOf")]
            open_ways = all(any(map(can, way)) for way in ways if way)
            if open_ways and all(map(can, parts(schema))):
                ending.add(id(schema))
    return can(root)


def problem_of(root: Any, where: str) -> str | None:
    """What a schema says that can't be done, or None. Raises RecursionError.

    It is looked for where llguidance looks, through each $ref once. The levels of all
    that they lead to may stand upon each other there.
    """
    if not isinstance(root, dict):
        return f"{where} is {short(root)}; expected an object"
    sizes = dict.fromkeys(MOST_IN_SCHEMA, 0) | {"levels of JSON": nesting(root)}
    pointers = {"#": root}  # as they are spelled
    seen: dict[int, int] = {}  # the levels of what they lead to
    every: list[Mapping[str, Any]] = []
    waiting = ["#"] if sizes["levels of JSON"] <= MAX_NESTING else []
    while waiting and sizes["levels of schemas"] <= MAX_LEVELS:
        pointer = waiting.pop()
        target = pointers[pointer]
        if id(target) not in seen:
            floors = levels_of(target, where + unquote(pointer[1:]).replace("/", "."))
            seen[id(target)] = len(floors)
            for path, schema in chain(*floors):
                if (problem := keyword_problem(schema, path, root)) is not None:
                    return problem
                every.append(schema)
                reference = schema.get("$ref", "#")
                if reference not in pointers:
                    pointers[reference] = target_of(root, reference)
                    waiting.append(reference)
        sizes["levels of schemas"] += seen[id(target)]
    patterns = (schema.get("patternProperties") for schema in every)
    sizes["patternProperties"] = sum(len(some) for some in patterns if some)
    sizes["for the least common multiple of multipleOf"] = common_multiple(every)
    for name, most in MOST_IN_SCHEMA.items():
        if sizes[name] > most:
            return f"{where} has {short(sizes[name])} {name}; expected at most {most}"
    if not ends(root, every, pointers):
        return f"{where}: nothing that fits it ends; expected a way out of its $refs"
    return None
