"""Bodies as clients send them, rewritten into what `read_body` takes.

What others have and this server hasn't is of three kinds. Hints and names that nobody
here knows are left out, since no answer is wrong without them. Values that mean nearly
the same as one of ours become that one. What would give another answer than was asked
for stays, and `read_body` refuses it. A strict server does without all of this.

Data in, data out: whatever isn't as expected goes through for `read_body` to judge.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args

from simplellm.server.http.bodies import (
    MAX_NAME,
    SampledBody,
    own_fields,
    record_of,
    sampling_fields,
    unsupported_of,
)

MOST_IGNORED = 32  # names that an answer repeats
EFFORTS = {"none": "low", "minimal": "low", "auto": "medium"}
EFFORTS |= {"xhigh": "high", "max": "high"}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# What vLLM, SGLang and llama.cpp called the parts of structured_outputs.
STRUCTURED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
RENAMED = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
TEXT_ONLY = "this model reads text only"


@dataclass
class Lenience:
    """What a rewriting needs to know, and what it has left out."""

    models: Sequence[str] = ()  # what the model goes by
    template: bool = False  # whether the model's chats are written by a template
    ignored: dict[str, None] = field(default_factory=dict)  # names, in their order

    def ignore(self, name: str) -> None:
        """Note that nothing is done with ``name``, a path in the body."""
        if len(self.ignored) < MOST_IGNORED:
            self.ignored[re.sub(r"\[\d+\]", "", name)[:MAX_NAME]] = None

    @property
    def header(self) -> str:
        """The names as a header's value."""
        names = (re.sub(r"[^\x21-\x2b\x2d-\x7e]", "_", name) for name in self.ignored)
        return ", ".join(names)


Rewriting = Callable[[dict[str, Any], Lenience], dict[str, Any]]


def lenient(
    kind: type, rewriting: Rewriting | None, data: Any, lenience: Lenience
) -> Any:
    """``data`` as `read_body` takes it for a ``kind``, as far as that can be done.

    ``rewriting`` is that of its endpoint.
    """
    if not isinstance(data, dict):
        return data
    data = {name: value for name, value in data.items() if value is not None}
    if issubclass(kind, SampledBody):
        data = lenient_sampling(data)
    if rewriting is not None:
        data = rewriting(data, lenience)
    return known_only(kind, data, lenience)


def known_only(
    kind: type, data: Mapping[str, Any], lenience: Lenience, prefix: str = ""
) -> dict[str, Any]:
    """``data`` without unknown names and hints; whole numbers are integers."""
    known = {**sampling_fields(kind), **own_fields(kind)}
    unsupported = unsupported_of(kind)
    found: dict[str, Any] = {}
    for key, value in data.items():
        name, entry = f"{prefix}{key}", unsupported.get(key)
        if key in known:
            spec = known[key]
            options = (
                get_args(spec.type) if isinstance(spec.type, UnionType) else [spec.type]
            )
            record = record_of(spec)
            if record is not None and isinstance(value, dict):
                value = known_only(record, value, lenience, f"{name}.")
            elif int in options and isinstance(value, float) and value.is_integer():
                value = int(value)
            found[key] = value
        elif entry is not None and not entry.hint:
            found[key] = value
        elif value is not None and (entry is None or value not in entry.ignored_values):
            lenience.ignore(name)
    return found


def lenient_sampling(data: dict[str, Any]) -> dict[str, Any]:
    """A body whose sampling parameters go by our names."""
    for old, new in RENAMED.items():
        if old in data:
            data.setdefault(new, data.pop(old))
    for name in LIMITS:
        if data.get(name) == -1:  # as many as there is room for
            del data[name]
    if data.get("top_p") == 0 and not isinstance(data["top_p"], bool):
        del data["top_p"]  # the best token only
        data["temperature"] = 0
    if data.get("stop") == "":
        del data["stop"]
    elif isinstance(stops := data.get("stop"), list):
        data["stop"] = [stop for stop in stops if stop != ""]
    outputs = data.get("structured_outputs", {})
    given = {new: data.pop(old) for old, new in STRUCTURED.items() if old in data}
    if given and isinstance(outputs, dict):
        data["structured_outputs"] = {**outputs, **given}
    return data


def nearest_effort(value: Any) -> Any:
    """An effort as the model knows it."""
    effort = value.lower() if isinstance(value, str) else value
    return EFFORTS.get(effort, effort) if isinstance(effort, str) else effort


def text_instead(what: str) -> str:
    """What the model is told in the place of something that is no text."""
    return f"[{what}: {TEXT_ONLY}]"
