"""Schemas that explode: `python tests/json_bombs.py` compiles each and walks 50 steps.

It prints a line of JSON for each: why it was refused, or how long a step took. All of
them run in one process, whose memory and time are bounded.
"""

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from more_bombs import SCHEMAS, TEXTS

import simplellm
from simplellm.base.grammar import GrammarError, GrammarState
from simplellm.base.sampling_params import StructuredOutputs
from simplellm.structured.compiler import Grammars
from simplellm.structured.rules import output_rules, rules_text, schema_rules
from simplellm.text.tokenizer import Tokenizer

MEMORY = 4 << 30  # bytes of addresses the process may have
STEPS = 50
CHANCE = random.Random(0)


def word(length: int) -> str:
    return "".join(CHANCE.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def nested(depth: int, before: str, after: str) -> str:
    return before * depth + "{}" + after * depth


def chain(length: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Definitions each of which leads to the next."""
    names = [f"d{number}" for number in range(length + 1)]
    links = {
        name: link({"$ref": f"#/$defs/{after}"}) for name, after in pairwise(names)
    }
    return {"$defs": links | {names[-1]: {"type": "object"}}, "$ref": "#/$defs/d0"}


def inside(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


def optional(count: int, **more: Any) -> dict[str, Any]:
    names = [f"p{number}" for number in range(count)]
    return {"type": "object", "properties": {name: {} for name in names}, **more}


def required(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    named = {f"p{number}": schema for number, schema in enumerate(schemas)}
    return {"type": "object", "properties": named, "required": [*named]}


def choices(count: int) -> list[dict[str, Any]]:
    """One of two for each of ``count`` properties."""
    pairs = [[inside({"const": i}), inside({"const": -i})] for i in range(count)]
    return [{"anyOf": pair} for pair in pairs]


def pattern(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": text, **more}


ARRAY = {"type": "array", "items": {"type": "integer"}}
BOMBS: dict[str, Callable[[], Any]] = {
    "objects 10,000 deep": lambda: nested(10_000, '{"properties":{"a":', "}}"),
    "objects 40 deep": lambda: nested(40, '{"properties":{"a":', "}}"),
    "anyOf 10,000 deep": lambda: nested(10_000, '{"anyOf":[', "]}"),
    "brackets 100,000 deep": lambda: '{"const":' + "[" * 100_000 + "]" * 100_000 + "}",
    "a chain of 1,000 refs": lambda: chain(1000, inside),
    "a chain of 150 refs": lambda: chain(150, inside),
    "a chain of fat refs": lambda: chain(
        100,
        lambda end: json.loads(
            nested(20, '{"anyOf":[', "]}").replace("{}", json.dumps(end))
        ),
    ),
    "refs that double 30 times": lambda: chain(
        30, lambda end: {"type": "object", "properties": {"a": end, "b": end}}
    ),
    "allOf of refs, 3 to the 20th": lambda: chain(20, lambda end: {"allOf": [end] * 3}),
    "a circle": lambda: {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "objects without an end": lambda: {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    },
    "lists that could be either": lambda: {
        "anyOf": [
            {"type": "array", "items": {"$ref": "#"}},
            {
                "type": "array",
                "items": {"anyOf": [{"$ref": "#/anyOf/0"}, {"const": 0}]},
            },
            {"type": "null"},
        ]
    },
    "20,000 words": lambda: {"enum": [word(4) for _ in range(20_000)]},
    "20,000 numbers": lambda: {"enum": [*range(0, 40_000, 2)]},
    "8,000 objects": lambda: {"enum": [{"a": number} for number in range(8000)]},
    "a word of 100,000": lambda: {"const": "x" * 100_000},
    "a list of 40,000": lambda: {"const": [1] * 40_000},
    "a million items": lambda: ARRAY | {"minItems": 10**6},
    "up to 10**12 items": lambda: ARRAY | {"maxItems": 10**12},
    "lists of lists of lists": lambda: {
        "type": "array",
        "minItems": 10**6,
        "items": {"minItems": 10**6, "items": ARRAY | {"minItems": 10**6}},
    },
    "a million names": lambda: {"type": "object", "minProperties": 10**6},
    "a million letters": lambda: {"type": "string", "minLength": 10**6},
    "a million letters in order": lambda: pattern("^(ab|c)*$", minLength=10**6),
    "a* a* a* b": lambda: pattern("^(a*)*(a*)*(a*)*(a|aa)*b$"),
    "the 30th before the last": lambda: pattern("^[ab]*a[ab]{30}$"),
    "repeats of repeats": lambda: pattern("^((((a{1,99}){1,99}){1,99}){1,99})$"),
    "(a|aa|aaa){1000}": lambda: pattern("^(a|aa|aaa){1000}$"),
    "10,000 words in a pattern": lambda: pattern(
        "|".join(word(9) for _ in range(10_000))
    ),
    "patterns at once": lambda: {
        "allOf": [
            pattern(f"^(.{{{count}}})*$") for count in (7, 11, 13, 17, 19, 23, 29)
        ]
    },
    "20 words anywhere": lambda: {"allOf": [pattern(word(5)) for _ in range(20)]},
    "brackets in a pattern": lambda: pattern("(" * 10_000 + "a" + ")" * 10_000),
    "a bracket that never closes": lambda: pattern("[" + "a" * 100_000),
    "1,000 patterns of names": lambda: {
        "patternProperties": {f"^{word(6)}_": {} for _ in range(1000)}
    },
    "2,000 schemas in one": lambda: {"allOf": [inside({}) for _ in range(2000)]},
    "2 to the 30th": lambda: {"allOf": choices(30)},
    "500 lists to choose from": lambda: {
        "anyOf": [ARRAY | {"items": {"minimum": number}} for number in range(500)]
    },
    "1,500 objects to choose from": lambda: {
        "anyOf": [inside({"const": word(6)}) for _ in range(1500)]
    },
    "1,000 objects, one of which fits": lambda: {
        "oneOf": [inside({"const": word(6)}) | {"required": ["a"]} for _ in range(1000)]
    },
    "10,000 names": lambda: optional(10_000),
    "400 names": lambda: optional(400),
    "5,000 names that are required": lambda: required([{}] * 5000),
    "at least one of 500": lambda: optional(
        500, minProperties=1, additionalProperties=False
    ),
    "at most one of 400": lambda: optional(
        400, maxProperties=1, additionalProperties=False
    ),
    "multiples of 1,000,003": lambda: {"type": "integer", "multipleOf": 1_000_003},
    "multiples of 9,973, 300 times": lambda: required(
        [{"type": "integer", "multipleOf": 9973, "minimum": i} for i in range(300)]
    ),
    "multiples of 300 numbers": lambda: required(
        [{"type": "integer", "multipleOf": 9973 - i} for i in range(300)]
    ),
    "5 MB of words about it": lambda: {"description": "x" * 5_000_000},
    "5 MB of names": lambda: {"properties": {word(30): {} for _ in range(130_000)}},
    **SCHEMAS,
}
NAMES = (*BOMBS, *TEXTS)


def rules_of(name: str) -> dict[str, Any]:
    if name in BOMBS:
        return schema_rules(BOMBS[name](), "schema")
    outputs = StructuredOutputs.of(TEXTS[name]())
    assert outputs is not None
    return output_rules(outputs)


def measured(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """What became of a bomb: seconds to compile it, and of the slowest step.

    They are the processor's, so that others who keep it busy don't count.
    """
    start = time.process_time()
    found: dict[str, Any] = {"name": name, "refused": None, "error": None, "step": 0.0}
    end = tokenizer.special["<|return|>"]
    try:
        text = rules_text(rules_of(name))
        grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset([end]))
        state = grammars.compile(text).start()
    except ValueError as error:
        found["refused"] = str(error)[:200]
    found["compile"] = time.process_time() - start
    new: list[int] = []
    for _ in range(0 if found["refused"] else STEPS):
        start = time.process_time()
        try:
            state.advance(new)
            new = state.forced() or [chosen(state, end)]
        except GrammarError as error:
            found["error"] = str(error)
        found["step"] = max(found["step"], time.process_time() - start)
        if found["error"] or new[-1] == end:
            break
    found["memory"] = most_memory()
    return found


def chosen(state: GrammarState, end: int) -> int:
    """A token that may come next; ``end`` where there is no other."""
    bits = np.frombuffer(state.matcher.compute_bitmask(), np.uint8)
    state.check()
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    some = allowed[allowed != end]
    return int(CHANCE.choice(some)) if len(some) else end


def most_memory() -> float:
    """MiB that this process had at most; getrusage would count its parent's too."""
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) / 1024


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = Path(simplellm.__file__).parent / "embedded"
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    for name in sys.argv[1:] or NAMES:
        print(json.dumps(measured(name, tokenizer)), flush=True)


if __name__ == "__main__":
    main()
