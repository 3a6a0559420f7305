"""Read the header of a message as a model writes it, whatever it is.

Nothing here raises: words that mean nothing are passed over.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from simplellm.text.harmony.message import ROLES, Message


def read_word(marker: str, number: int, word: str) -> dict[str, Any]:
    """The fields of Message that a word of a header sets; none if it means nothing.

    ``number`` counts the words behind ``marker`` from 0.
    """
    if word.startswith("to="):
        return {"recipient": word.removeprefix("to=")}
    if number == 0 and marker == "<|start|>":
        role, _, name = word.partition(":")
        if role not in ROLES:  # a tool goes by its name
            return {"role": "tool", "name": word}
        return {"role": role, "name": name or None}
    if number == 0 and marker == "<|channel|>":
        return {"channel": word}
    if number == 0 and marker == "<|constrain|>":
        return {"content_type": marker + word}
    if word.startswith("functions."):
        return {"recipient": word}
    return {}


def message_of(header: Iterable[tuple[str, str]]) -> Message:
    """The message that a header announces: each marker with the text behind it.

    The first marker is "" where the assistant was announced by the prompt.
    """
    fields: dict[str, Any] = {"role": "assistant", "content": ""}
    for marker, text in header:
        for number, word in enumerate(text.split()):
            field = read_word(marker, number, word)
            fields |= field
            if not field and marker == "<|channel|>":
                fields.setdefault("content_type", word)
    return Message(**fields)


def split_header(
    header: Sequence[tuple[str, str]],
) -> tuple[list[tuple[str, str]], str]:
    """The header, and the text in it that is content, if it has no `<|message|>`."""
    if len(header) == 1:  # no marker at all
        return [], header[0][1]
    parts, content = [], ""
    for marker, text in header:
        end = len(text)
        for number, match in enumerate(re.finditer(r"\S+", text)):
            expected = not marker and match[0] == "assistant"
            if not expected and not read_word(marker, number, match[0]):
                end = match.start()
                break
        parts.append((marker, text[:end]))
        content += text[end:]
    return parts, content
