"""The JSON-Schema-Test-Suite before our grammars, for figures/b-schemas.json.

`python tests/json_schemas.py` writes the record anew, with xgrammar where it is
installed. Of an instance every spelling counts that JSON allows: keys in another order
or twice, characters escaped, numbers with a point or an exponent, spaces.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from models import CONFIG, TOKENIZER

from simplellm.structured.compiler import Grammars
from simplellm.structured.rules import rules_text, schema_rules
from simplellm.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "figures/b-schemas.json"
SUITE = ROOT / "tests/data/json-schema-test-suite.json"
END = TOKENIZER.special["<|return|>"]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
MOST_ORDERS = 120  # of the keys of one instance
PLACE = "schema"  # what paths begin with


def matcher_of(
    schema: Any, tokenizer: Tokenizer = TOKENIZER, size: int = CONFIG.vocab_size
) -> Any:
    """llguidance's matcher for JSON that fits ``schema``, over ``size`` tokens.

    Raises ValueError for what we or llguidance can't do.
    """
    text = rules_text(schema_rules(schema, PLACE))
    return grammars_of(tokenizer, size).compile(text).matcher


@cache
def grammars_of(tokenizer: Tokenizer, size: int) -> Grammars:
    """Grammars over the first ``size`` tokens."""
    return Grammars(tokenizer, size, frozenset([tokenizer.special["<|return|>"]]))


def takes(matcher: Any, text: str) -> bool:
    """Whether ``text`` is all that may be written."""
    matcher.reset()
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@dataclass(frozen=True)
class Style:
    """How JSON is written."""

    string: str = "plain"  # or "ascii", or "escaped": each character as \\uXXXX
    number: str = "plain"  # or "point", "exponent", "shifted"
    comma: str = ","
    colon: str = ":"
    repeat: int = 1  # how often each key stands there, with its value


STYLES = (
    Style(),
    Style(comma=", ", colon=": "),
    Style(comma=" ,\n  ", colon="\t:\r\n"),
    Style(string="ascii"),
    Style(string="escaped"),
    Style(number="point"),
    Style(number="exponent"),
    Style(number="shifted"),
    Style(repeat=2),
    Style(repeat=2, string="escaped"),
)


def number_text(number: float, style: str) -> str:
    """A number: 15 may be 15.0, 15e0 or 150e-1 too."""
    text = json.dumps(number)
    if style == "plain" or "e" in text:
        return text
    whole, _, part = text.partition(".")
    if style == "point":
        return text if part else f"{whole}.0"
    if style == "exponent":
        return f"{text}e0"
    if part in ("", "0"):
        return whole if part else f"{whole}0e-1" if number else "0E+0"
    digits = (whole + part).lstrip("-0")
    return f"{'-' * (number < 0)}{digits}e-{len(part)}"


def string_text(text: str, style: str) -> str:
    if style != "escaped":
        return json.dumps(text, ensure_ascii=style == "ascii")
    units = text.encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return '"' + "".join(f"\\u{high:02x}{low:02X}" for high, low in pairs) + '"'


def written(value: Any, style: Style) -> str:
    """``value`` as JSON in a style."""
    if isinstance(value, str):
        return string_text(value, style.string)
    if isinstance(value, dict):
        items = [
            string_text(key, style.string) + style.colon + written(one, style)
            for key, one in value.items()
        ]
        return "{" + style.comma.join(items * style.repeat) + "}"
    if isinstance(value, list):
        return "[" + style.comma.join(written(one, style) for one in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return number_text(value, style.number)


def orders(value: Any) -> Iterator[Any]:
    """``value`` with the keys of its objects in every order."""
    if isinstance(value, dict):
        for items in permutations(value.items()):
            for some in product(*(orders(one) for _, one in items)):
                yield {key: one for (key, _), one in zip(items, some, strict=True)}
    elif isinstance(value, list):
        yield from map(list, product(*map(orders, value)))
    else:
        yield value


def spellings(value: Any) -> list[str]:
    """Texts that say the same in JSON."""
    some = islice(orders(value), MOST_ORDERS)
    found = {written(one, style): None for one in some for style in STYLES}
    return [*found]


@dataclass(frozen=True)
class Case:
    """A schema of the suite with its instances: description, value, whether it fits."""

    file: str
    description: str
    schema: Any
    tests: list[tuple[str, Any, bool]]

    @property
    def draft(self) -> str:
        return self.file.partition("/")[0]


@cache
def cases() -> list[Case]:
    files = json.loads(SUITE.read_text("utf-8"))["files"]
    found = []
    for file, groups in files.items():
        for group in groups:
            schema = group["schema"]
            if file.startswith("draft7/") and isinstance(schema, dict):
                schema = {"$schema": DRAFT_7} | schema
            found.append(Case(file, group["description"], schema, group["tests"]))
    return found


@dataclass
class Verdict:
    """What became of a case."""

    reason: str = ""  # why the schema was refused
    fitting: int = 0  # instances that fit and are taken
    lost: list[str] = field(default_factory=list)  # they fit and are refused
    kept_out: int = 0  # they don't fit and are refused
    wrong: list[tuple[str, str]] = field(default_factory=list)  # taken; as what text


def judge(case: Case) -> Verdict:
    """What our grammar says to each instance of a case."""
    verdict = Verdict()
    try:
        matcher = matcher_of(case.schema)
    except ValueError as error:
        return Verdict(reason=str(error))
    for name, value, fits in case.tests:
        text = next((s for s in spellings(value) if takes(matcher, s)), None)
        if fits and text is None:
            verdict.lost.append(name)
        elif not fits and text is not None:
            verdict.wrong.append((name, text))
        verdict.fitting += fits and text is not None
        verdict.kept_out += not fits and text is None
    return verdict


@cache
def verdicts() -> list[tuple[Case, Verdict]]:
    return [(case, judge(case)) for case in cases()]


def other_matcher() -> Any:
    """xgrammar's maker of matchers over the same tokens."""
    import xgrammar

    tokens = [TOKENIZER.token_bytes(id) for id in range(CONFIG.vocab_size)]
    kind = xgrammar.VocabType.RAW
    known = xgrammar.TokenizerInfo(tokens, kind, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False)

    def make(schema: Any) -> Any:
        compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        return xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)

    return make


def other_takes(matcher: Any, text: str) -> bool:
    matcher.reset()
    return matcher.accept_string(text) and matcher.is_terminated()


def disagreements() -> dict[str, Any]:
    """Where xgrammar says something else of the schemas that both take."""
    make = other_matcher()
    count: Counter[str] = Counter()
    lists: dict[str, dict[str, list[str]]] = {
        "takes what does not fit": defaultdict(list),
        "refuses what fits and we take": defaultdict(list),
        "takes what fits and we refuse": defaultdict(list),
    }
    takes_wrong, refuses, takes_more = lists.values()
    for case, verdict in verdicts():
        try:
            matcher = make(case.schema)
        except Exception:
            count["schemas that we alone take"] += not verdict.reason
            continue
        if verdict.reason:
            count["schemas that it alone takes"] += 1
            continue
        count["schemas that both take"] += 1
        for name, value, fits in case.tests:
            theirs = any(other_takes(matcher, s) for s in spellings(value))
            where = f"{case.description}: {name}"
            if theirs and not fits:
                takes_wrong[case.file].append(where)
            elif fits and not theirs and name not in verdict.lost:
                refuses[case.file].append(where)
            elif theirs and fits and name in verdict.lost:
                takes_more[case.file].append(where)
    return {"version": version("xgrammar")} | dict(sorted(count.items())) | lists


def summary() -> dict[str, Any]:
    """The record of llguidance, but for xgrammar's part."""
    suite = json.loads(SUITE.read_text("utf-8"))
    found: dict[str, Any] = {
        "what": "the JSON-Schema-Test-Suite before our grammars",
        "suite": suite["commit"],
        "llguidance": version("llguidance"),
    }
    for draft in ("draft2020-12", "draft7"):
        some = [(c, v) for c, v in verdicts() if c.draft == draft]
        refused: dict[str, dict[str, str]] = defaultdict(dict)
        lost: dict[str, list[str]] = defaultdict(list)
        for case, verdict in some:
            if verdict.reason:
                refused[case.file][case.description] = verdict.reason
            for name in verdict.lost:
                lost[case.file].append(f"{case.description}: {name}")
        found[draft] = {
            "schemas": len(some),
            "schemas accepted": sum(not v.reason for _, v in some),
            "schemas refused": sum(bool(v.reason) for _, v in some),
            "fitting instances taken": sum(v.fitting for _, v in some),
            "fitting instances refused": sum(len(v.lost) for _, v in some),
            "other instances refused": sum(v.kept_out for _, v in some),
            "other instances taken": sum(len(v.wrong) for _, v in some),
            "the refused schemas and why": dict(refused),
            "the fitting instances refused": dict(lost),
        }
    return found


def main() -> None:
    known = summary()
    if find_spec("xgrammar"):
        known["xgrammar"] = disagreements()
    elif RECORD.exists():
        known["xgrammar"] = json.loads(RECORD.read_text("utf-8"))["xgrammar"]
    text = json.dumps(known, indent=1, ensure_ascii=False)
    RECORD.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
