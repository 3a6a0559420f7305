"""Schemas for hypothesis to draw, of all that we let pass, and walks under their masks.

Values are judged as numbers are written: a double would round 0.99999999999999999 up.
"""

import json
import random
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import numpy as np
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from simplellm.text.tokenizer import Tokenizer

NAMES = st.sampled_from(["a", "b", "ab", "é", "a b", '"', "\n", "\\", "$ref"])
FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()
PATTERNS = [
    "^[a-c]{1,3}$",
    "^(foo|bar)",
    "a$",
    "^\\d{2}-\\w$",
    "^[^a-z]{2}$",
    "^.{0,2}$",
    '^["\\\\]+$',
    "^\\S{1,4}$",
    "x\\.y",
    "^é?😀?$",
    "",
]
KEY_PATTERNS = ["^a", "^b", "^\\d$", "é$"]
BOUNDS = st.one_of(
    st.integers(-30, 300),
    st.sampled_from([0.5, -0.25, 1.75, 0.1, 12.34, -7.001, 1e-3]),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.sampled_from([0.5, -1.25, 3.0, 1e-7, 1e20]),
    st.sampled_from(["", "a", "é😀", 'a"\\/\n\t', "\u2028", "<|end|>"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(NAMES, st.integers(0, 3), max_size=3),
)


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    keys = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    some = draw(st.sets(st.sampled_from(keys), max_size=2))
    found: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    found |= {key: draw(BOUNDS) for key in sorted(some)}
    if draw(st.integers(0, 3)) == 0:
        found["multipleOf"] = draw(st.sampled_from([1, 2, 3, 7, 60, 0.5, 0.25, 0.01]))
    return found


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    kind = draw(st.sampled_from(["plain", "length", "pattern", "both", "format"]))
    if kind in ("length", "both"):
        found["maxLength"] = draw(st.integers(0, 6))
        found["minLength"] = draw(st.integers(0, found["maxLength"]))
    if kind in ("pattern", "both"):
        found["pattern"] = draw(st.sampled_from(PATTERNS))
    if kind == "format":
        found["format"] = draw(st.sampled_from(FORMATS))
    return found


@st.composite
def arrays(draw: st.DrawFn, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "array"}
    inside = schemas(depth - 1)
    if draw(st.booleans()):
        found["prefixItems"] = draw(st.lists(inside, min_size=1, max_size=3))
    if draw(st.booleans()):
        found["items"] = draw(st.one_of(inside, st.booleans()))
    if draw(st.booleans()):
        found["maxItems"] = draw(st.integers(0, 4))
    if draw(st.booleans()):
        found["minItems"] = draw(st.integers(0, 2))
    return found


@st.composite
def objects(draw: st.DrawFn, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object"}
    inside = schemas(depth - 1)
    if draw(st.booleans()):
        found["properties"] = draw(
            st.dictionaries(NAMES, st.one_of(inside, st.booleans()), max_size=4)
        )
    if draw(st.booleans()):
        some = st.one_of(NAMES, st.sampled_from([*found.get("properties", ["a"]), "b"]))
        found["required"] = draw(st.lists(some, max_size=3, unique=True))
    if draw(st.booleans()):
        found["additionalProperties"] = draw(st.one_of(st.booleans(), inside))
    if draw(st.integers(0, 3)) == 0:
        keys = st.sampled_from(KEY_PATTERNS)
        found["patternProperties"] = draw(st.dictionaries(keys, inside, max_size=2))
    if draw(st.integers(0, 3)) == 0:
        found["minProperties"] = draw(st.integers(0, 3))
    if draw(st.integers(0, 3)) == 0:
        found["maxProperties"] = draw(st.integers(0, 4))
    return found


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    """A schema, the keys of which stand in any order."""
    simple = [
        numbers(),
        strings(),
        st.builds(lambda value: {"const": value}, VALUES),
        st.builds(
            lambda some: {"enum": some}, st.lists(VALUES, min_size=1, max_size=4)
        ),
        st.sampled_from([{}, {"type": "null"}, {"type": ["boolean", "integer"]}]),
        st.just({"$ref": "#/$defs/d"}),
    ]
    if depth == 0:
        return draw(st.one_of(simple))
    inside = schemas(depth - 1)
    several = st.lists(inside, min_size=1, max_size=3)
    key = st.sampled_from(["anyOf", "allOf", "oneOf"])
    mixed = st.builds(lambda key, some: {key: some}, key, several)
    kinds = [*simple, arrays(depth), objects(depth), objects(depth), mixed]
    found: dict[str, Any] = draw(st.one_of(kinds))
    if draw(st.integers(0, 5)) == 0:  # what it says with what another one says
        found = found | draw(mixed)
    items = draw(st.permutations([*found.items()]))
    return dict(items)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A whole schema, with a definition that may lead to itself."""
    return draw(schemas()) | {"$defs": {"d": draw(schemas(1))}}


class TooMuchAtOnce(Exception):
    """Text that has to come is longer than a step may take: a limit of llguidance."""


class Walker:
    """Draws texts under masks: tokens that close something are more likely."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.special["<|return|>"]
        self.closing = np.zeros(size, dtype=bool)
        every = tokenizer.tokens.items()
        some = [id for id, token in every if token[:1] in (b'"', b"]", b"}")]
        self.closing[some] = True

    def walk(self, matcher: Any, chance: random.Random, most: int) -> str | None:
        """A text that the masks of ``matcher`` let end, or None after ``most`` tokens.

        Raises AssertionError where a mask allows nothing, or a token that is refused.
        """
        matcher.reset()
        ids: list[int] = []
        while len(ids) < most:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").astype(bool)
            assert not matcher.is_error(), matcher.get_error()
            assert allowed.any(), f"nothing may follow {self.tokenizer.decode(ids)!r}"
            ends = allowed[self.end]
            allowed[self.end] = False
            if ends and (chance.random() < 0.5 or not allowed.any()):
                assert matcher.is_accepting()
                return b"".join(map(self.tokenizer.token_bytes, ids)).decode()
            closing = np.flatnonzero(allowed[: len(self.closing)] & self.closing)
            hurry = 0.3 if len(ids) < most // 2 else 0.9
            likely = len(closing) and chance.random() < hurry
            token = int(chance.choice(closing if likely else np.flatnonzero(allowed)))
            assert not self.tokenizer.is_special(token)
            taken = matcher.consume_token(token)
            if not taken and "Too many items" in matcher.get_error():
                raise TooMuchAtOnce(matcher.get_error())
            assert taken, matcher.get_error()
            ids.append(token)
        return None


def large_tokenizer(size: int) -> Tokenizer:
    """``size`` tokens, all but 1,000 of them made of pieces that JSON is made of."""
    chance = random.Random(0)
    pieces = [
        "true",
        "null",
        "id",
        " ",
        "\n",
        "0",
        "17",
        ".",
        "é",
        "😀",
        "\\",
        "a",
        "b",
    ]
    pieces += [*'{}[]":,-+eE/', '":', '",', "},", "foo", "bar", "T", "Z", "\\n", "\\u"]
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(tokens) < size - 1000:
        tokens["".join(chance.choices(pieces, k=chance.randint(2, 5))).encode()] = None
    known = dict(enumerate(tokens))
    byte_ids = {token: id for id, token in known.items() if len(token) == 1}

    def encode(text: str, special: bool) -> list[int]:
        return [byte_ids[bytes([byte])] for byte in text.encode()]

    return Tokenizer(known, {"<|return|>": size - 1}, encode)


def number(text: str) -> Decimal:
    """A number as it is written, or what is beside it where an exponent is too long."""
    try:
        return Decimal(text)
    except InvalidOperation:
        mantissa, _, exponent = text.lower().partition("e")
        least = exponent.startswith("-") or not Decimal(mantissa)
        return Decimal(0 if least else "Infinity").copy_sign(Decimal(mantissa))


def errors(schema: Any, text: str) -> list[str]:
    """What jsonschema finds wrong with a text, its numbers read as they are written."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    value = json.loads(text, parse_float=number)
    checker = Draft202012Validator.FORMAT_CHECKER
    with localcontext() as context:
        context.prec = 5000
        context.Emax, context.Emin = 10**17, -(10**17)
        found = Draft202012Validator(exact, format_checker=checker).iter_errors(value)
        return [error.message for error in found]
