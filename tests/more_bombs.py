"""More texts that explode: each is a schema, an expression, choices, or a grammar.

Kinds that tests/json_bombs.py has none of: what has to come without an end, what can be
read in many ways, checks of our own that take a schema's square, numbers, formats,
names, Lark.
"""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

TEXT = 2**17  # characters that a schema may have


def string(pattern: str, **more: Any) -> Schema:
    return {"type": "string", "pattern": pattern, **more}


def every(*schemas: Schema) -> Schema:
    return {"allOf": [*schemas]}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def array(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def closed(properties: Schema, **more: Any) -> Schema:
    """An object of these properties, all of them required."""
    names = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties} | names | more


def definitions(count: int, link: Callable[[Schema], Schema], last: Schema) -> Schema:
    """Definitions each of which leads to the next; the last one stands in front."""
    found = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
    return {"$defs": {f"d{count}": last} | found, "$ref": "#/$defs/d0"}


def nested(depth: int, wrap: Callable[[Schema], Schema]) -> Schema:
    found: Schema = {"type": "null"}
    for _ in range(depth):
        found = wrap(found)
    return found


def twice(end: Schema) -> Schema:
    return closed({"a": end, "b": end})


def waiting(count: int) -> Schema:
    """Many schemas that wait for the end of a chain of definitions."""
    chain = definitions(count, lambda end: {"allOf": [end]}, {"type": "null"})
    many = [{"$ref": "#/$defs/d0"} for _ in range(4000)]
    return {"anyOf": many, "$defs": chain["$defs"]}


def lark(*rules: str) -> Schema:
    return {"grammar": "\n".join(rules)}


LONG = {"const": "x" * 8000}
DEEP = 300  # levels of definitions
SCHEMAS: dict[str, Callable[[], Schema]] = {
    # What has to come
    "100,000 letters that have to come": lambda: string("^b{100000}$"),
    "as many behind a choice": lambda: string("^[ab]b{100000}$"),
    "a million of them": lambda: string("^(?:b{1000}){1000}$"),
    "a million by their length": lambda: string("^b*$", minLength=10**6),
    "ten million in a few counts": lambda: string("^" + "b{1000}" * 10_000 + "$"),
    "100,000 long constants": lambda: array(LONG, minItems=100_000),
    "3,000 long constants in their places": lambda: {
        "type": "array",
        "$defs": {"a": LONG},
        "prefixItems": [{"$ref": "#/$defs/a"}] * 3000,
        "minItems": 3000,
    },
    "names of 8,000 letters": lambda: closed({"n" * 8000 + str(n): {} for n in "0123"}),
    "100,000 identifiers": lambda: array({"format": "uuid"}, minItems=100_000),
    "objects that have to come": lambda: definitions(
        16, twice, closed({"a": {"const": 1}})
    ),
    # What can be read in many ways
    "letters or not, 5,000 times": lambda: string("^(?:a?){5000}a{5000}$"),
    "counts of counts of two": lambda: string(
        "^(?:a{1,1000}|b{1,1000}|(?:ab){1,1000}){1,1000}$"
    ),
    "letters of all scripts": lambda: string("^(?:\\p{L}|\\p{N}|\\w\\W){500}$"),
    "the 200th before the last": lambda: string("^(?:[^a]*a){200}[^a]{200}$"),
    "two lengths at once": lambda: string(
        "^(?:ab|ba|a{7}|b{11})*$", minLength=4000, maxLength=4001
    ),
    "20 lengths at once": lambda: every(
        *(string(f"^(?:[ab]{{{n}}}a|b)*$") for n in range(2, 22))
    ),
    "ends like its beginning": lambda: either(
        *(string(f"^{a}.*{a}.*{a}$") for a in "abcdefghijklmnopqrstuvwxyz")
    ),
    "words with a common beginning": lambda: {
        "enum": ["a" * (n // 100) + str(n) for n in range(4000)]
    },
    "words of which others are beginnings": lambda: {
        "enum": ["ab" * n for n in range(300)]
    },
    "lists that begin alike": lambda: either(
        *(array({"type": "integer"}, minItems=n, maxItems=n) for n in range(300))
    ),
    "objects that begin alike": lambda: either(
        *(
            closed({"a": {"type": "string"}, "b": {"const": n}, "c": {}})
            for n in range(500)
        )
    ),
    "lists of lists of up to 10**9": lambda: nested(
        60, lambda inside: array(inside, maxItems=10**9)
    ),
    "all kinds at every level": lambda: definitions(
        60, lambda end: either(end, array(end), closed({"a": end})), {"type": "null"}
    ),
    "10 to the 10th": lambda: every(
        *(
            either(*(closed({f"p{n}": {"const": m}}) for m in range(10)))
            for n in range(10)
        )
    ),
    # Our own checks
    "schemas that wait for the last": lambda: waiting(190),
    "a chain that comes last": lambda: definitions(
        190, lambda end: closed({"a": end}), {"type": "null"}
    ),
    "pointers spelled in 300 ways": lambda: {
        "$defs": {str(n): {"type": "null"} for n in range(150)},
        "anyOf": [
            {"$ref": f"#/{name}/{n}"}
            for n in range(150)
            for name in ("$defs", "%24defs")
        ],
    },
    "a pointer of 100,000 letters": lambda: {"$ref": "#/" + "a/" * 50_000},
    "a pointer into its own list": lambda: {
        "allOf": [{"$ref": "#" + "/allOf/0" * 8000}]
    },
    "8,000 empty schemas": lambda: either(*({} for _ in range(8000))),
    "4,000 names in a row": lambda: closed({f"p{n}": {} for n in range(4000)}),
    "names required that aren't there": lambda: {
        "type": "object",
        "required": [f"p{n}" for n in range(9000)],
    },
    "a list of 400 kinds": lambda: {"type": ["string", "null"] * 200},
    # Numbers
    "tiny numbers": lambda: {"type": "number", "minimum": 1e-300, "maximum": 2e-300},
    "close numbers": lambda: {
        "type": "number",
        "minimum": 0.12345678901234,
        "maximum": 0.12345678901235,
    },
    "all whole numbers": lambda: {
        "type": "integer",
        "exclusiveMinimum": -(2**53),
        "exclusiveMaximum": 2**53,
        "multipleOf": 9973,
    },
    "300 ranges": lambda: either(
        *(
            {"type": "number", "minimum": n / 7, "maximum": n * 7.1 + 1}
            for n in range(300)
        )
    ),
    "300 ranges at once": lambda: every(
        *({"type": "integer", "minimum": n, "maximum": 10**6 - n} for n in range(300))
    ),
    "multiples of 1/10000 in a range": lambda: {
        "type": "number",
        "multipleOf": 0.0001,
        "minimum": 0.00015,
        "maximum": 99999.00015,
    },
    "huge counts": lambda: array({}, minItems=2**62, maxItems=2**63 - 1),
    "counts beyond all": lambda: array({}, minItems=10**400),
    # Formats and texts
    "all formats at once": lambda: every(
        *({"type": "string", "format": f} for f in ("date-time", "hostname", "email"))
    ),
    "all formats, 40 times": lambda: either(
        *(
            {"type": "string", "format": f, "maxLength": 100 + n}
            for n in range(8)
            for f in ("date-time", "hostname", "email", "uri", "ipv6")
        )
    ),
    "half a character": lambda: {"enum": ["\ud800", "a\udfff"]},
    "all characters": lambda: {"const": "".join(map(chr, range(0xA0, 0x2000)))},
    "names in all scripts": lambda: {
        "patternProperties": {"^\\p{L}{1,300}$": {}, "^\\p{N}{1,300}$": {}},
        "additionalProperties": False,
    },
    "ten million properties": lambda: {"type": "object", "maxProperties": 10**7},
}
TEXTS: dict[str, Callable[[], Schema]] = {
    "an expression of 100,000 letters": lambda: {"regex": "b{100000}"},
    "a million more of them": lambda: {"regex": "[ab](b{1000}){1000}"},
    "a choice of one long text": lambda: {"choice": ["x" * TEXT]},
    "choices that begin alike": lambda: {
        "choice": ["ab" * n + "c" for n in range(1, 300)]
    },
    "a sum of sums": lambda: lark("start: s", 's: s s | s "+" s | "x"'),
    "nothing in many ways": lambda: lark("start: s", 's: s? s? s? s? | "x"?'),
    "rules that lead to each other": lambda: lark(
        "start: r0",
        *(f'r{n}: r{(n + 1) % 200} | r{(n * 7) % 200} "x" | "y"' for n in range(200)),
    ),
    "200 words that overlap": lambda: lark(
        "start: (" + " | ".join(f"W{n}" for n in range(200)) + ")*",
        *(f"W{n}: /[a-z]{{1,{n + 1}}}/" for n in range(200)),
    ),
    "two lengths that share": lambda: lark("start: /a{1,30000}/ /a{1,30000}/"),
    "words that fit both of two": lambda: lark("start: W", "W: /[ab]*/ & /[bc]*/"),
    "white space to ignore": lambda: lark(
        'start: ("a" | "b")*', "%ignore /[ \\t]{0,5000}/"
    ),
    "text to 2 to the 30th": lambda: lark(
        "start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(30)), 'r30: "x"'
    ),
}
