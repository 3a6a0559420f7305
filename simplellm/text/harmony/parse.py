"""Parse what the model writes, whatever it is: nothing here raises."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from simplellm.text.detokenizer import StreamDecoder
from simplellm.text.harmony.message import (
    ENDS,
    ROLES,
    Delta,
    Message,
    is_call,
    markers,
)
from simplellm.text.tokenizer import Tokenizer

# Bytes of text in a header that can still be one. That of a call has a function's name
# in it, which may be of any length.
MOST_HEADER = 256


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


class HarmonyParser:
    """Parses what the model writes after `<|start|>assistant`, token by token.

    `push` returns the text that a token adds, complete characters only, and says where
    a call begins; ``messages`` holds the messages that have ended and ``message`` the
    header of the one whose content is being written, None within a header. There were
    ``num_calls`` so far. Whatever the ids are, nothing is raised:

    - a header is read word by word, and words that mean nothing are passed over;
    - a header that never reaches `<|message|>` gives its remaining text as content,
      once it is too long to be a header, or at its end;
    - `<|start|>` or `<|channel|>` within the content begins the next message;
    - other control tokens out of place, and reserved ids, are passed over.

    The deltas' texts add up to the messages' contents.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.messages: list[Message] = []
        self.message: Message | None = None
        self._tokens = tokenizer.tokens
        self._markers = {id: name for name, id in markers(tokenizer).items()}
        self._decoder = StreamDecoder(tokenizer)
        self.num_calls = 0
        self._text: list[str] = []
        # What a header holds: each marker with the bytes that follow it.
        self._header: list[tuple[str, bytearray]] = [("", bytearray())]

    def finish(self) -> list[Delta]:
        """End the message that is under way, if any: it is over, or the model is."""
        deltas = []
        if self.message is not None:
            deltas = self._add(self._decoder.flush())
        else:
            header, content = split_header(self._header_text())
            if content.strip():
                deltas = self._begin(message_of(header), content)
        if self.message is not None:
            self.messages.append(replace(self.message, content="".join(self._text)))
        self.message = None
        self._text = []
        self._header = [("", bytearray())]
        return deltas

    def _header_text(self) -> list[tuple[str, str]]:
        return [(name, text.decode(errors="replace")) for name, text in self._header]

    def _end_header(self) -> list[Delta]:
        """Go on to the content though no `<|message|>` has come."""
        *parts, (marker, _) = self._header_text()
        text = self._decoder.push_bytes(bytes(self._header[-1][1]))
        header, content = split_header([*parts, (marker, text)])
        return self._begin(message_of(header), content)

    def _begin(self, message: Message, text: str = "") -> list[Delta]:
        """Go from the header to the content; a call is announced even without text."""
        self.message = message
        self.num_calls += is_call(message)
        return self._add(text, announce=is_call(message))

    def _add(self, text: str, *, announce: bool = False) -> list[Delta]:
        message = self.message
        if message is None or not (text or announce):
            return []
        self._text.append(text)
        call = self.num_calls - 1 if is_call(message) else None
        return [Delta(message.channel, message.recipient, text, call)]

    def push(self, token_id: int) -> list[Delta]:
        """Take one token; returns what it adds, at most one delta."""
        inside = self.message is not None
        if token_id in self._tokens:
            if inside:
                return self._add(self._decoder.push(token_id))
            self._header[-1][1].extend(self._tokens[token_id])
            texts = [text for _, text in self._header]
            too_long = sum(map(len, texts)) > MOST_HEADER
            calls = too_long and any(b"functions." in text for text in texts)
            return self._end_header() if too_long and not calls else []
        marker = self._markers.get(token_id)
        if marker in ENDS:
            return self.finish()
        if marker == "<|start|>" or (marker == "<|channel|>" and inside):
            deltas = self.finish()
            self._header.append((marker, bytearray()))
            return deltas
        if marker is None or inside:  # out of place
            return []
        if marker == "<|message|>":
            return self._begin(message_of(self._header_text()))
        self._header.append((marker, bytearray()))
        return []


def parse(token_ids: Iterable[int], tokenizer: Tokenizer) -> list[Message]:
    """The messages in ``token_ids``: a reply of the model, or a whole conversation."""
    parser = HarmonyParser(tokenizer)
    for token_id in token_ids:
        parser.push(token_id)
    parser.finish()
    return parser.messages
