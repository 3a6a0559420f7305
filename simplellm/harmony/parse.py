"""Parse what the model writes, whatever it is: nothing here raises."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from simplellm.harmony.message import ENDS, ROLES, Message, markers
from simplellm.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class ToolCall:
    """A call the model wrote; ``arguments`` is its text, which need not be JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """New text of the message being written.

    ``call`` is None outside calls. A call begins with the first delta of its number,
    whose text may be empty.
    """

    channel: str | None
    recipient: str | None
    text: str
    call: int | None = None  # the reply's first call is 0


class HarmonyParser:
    """Parses what the model writes behind `<|start|>assistant`, token by token.

    `push` returns the text that a token adds, complete characters only, and says where
    a call begins; ``messages`` holds the messages that have ended and ``message`` the
    header of the one whose content is being written, None within a header. Whatever
    the ids are, nothing is raised:

    - a header is read word by word, and words that mean nothing are passed over;
    - a header that never reaches `<|message|>` gives its remaining text as content;
    - `<|start|>` or `<|channel|>` within a content begins the next message;
    - other control tokens out of place, and reserved ids, are passed over.

    The deltas' texts add up to the messages' contents.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.messages: list[Message] = []
        self.message: Message | None = None
        self._tokens = tokenizer.tokens
        self._markers = {id: name for name, id in markers(tokenizer).items()}
        self._decoder = StreamDecoder(tokenizer)
        self._num_calls = 0
        self._text: list[str] = []
        # What a header holds: each marker with the bytes that follow it.
        self._header: list[tuple[str, bytearray]] = [("", bytearray())]

    def push(self, token_id: int) -> list[Delta]:
        """Take one token; what it adds, at most one delta."""
        if token_id in self._tokens:
            if self.message is not None:
                return self._add(self._decoder.push(token_id))
            self._header[-1][1].extend(self._tokens[token_id])
            return []
        marker = self._markers.get(token_id)
        if marker in ENDS:
            return self.finish()
        inside = self.message is not None
        if marker == "<|start|>" or (marker == "<|channel|>" and inside):
            deltas = self.finish()
            self._header.append((marker, bytearray()))
            return deltas
        if marker == "<|message|>" and not inside:
            self.message, _ = read_header(self._header, complete=True)
            return self._add("", begins=True)
        if marker is not None and not inside:
            self._header.append((marker, bytearray()))
        return []

    def finish(self) -> list[Delta]:
        """End the message that is under way, if any: it is over, or the model is."""
        if self.message is not None:
            deltas = self._add(self._decoder.flush())
        else:
            message, rest = read_header(self._header, complete=False)
            self.message = message if rest.strip() else None
            deltas = self._add(rest, begins=True)
        if self.message is not None:
            self.messages.append(replace(self.message, content="".join(self._text)))
        self.message = None
        self._text = []
        self._header = [("", bytearray())]
        return deltas

    def _add(self, text: str, *, begins: bool = False) -> list[Delta]:
        message = self.message
        if message is None:
            return []
        call = None
        if is_call(message):
            self._num_calls += begins
            call = self._num_calls - 1
        if not text and (call is None or not begins):
            return []
        self._text.append(text)
        return [Delta(message.channel, message.recipient, text, call)]


def read_header(
    header: Sequence[tuple[str, bytes | bytearray]], *, complete: bool
) -> tuple[Message, str]:
    """The message that a header announces, and the text in it that is content.

    ``header`` holds each marker with the bytes behind it; the first marker is "" where
    the assistant was announced by the prompt. Only a header that never reached
    `<|message|>` (not ``complete``) can hold content.
    """
    message = Message("assistant", "")
    if not complete and len(header) == 1 and not header[0][0]:
        return message, header[0][1].decode(errors="replace")
    rest = ""
    for marker, data in header:
        text = data.decode(errors="replace")
        for number, match in enumerate(re.finditer(r"\S+", text)):
            word = match[0]
            if word.startswith("to="):
                message = replace(message, recipient=word.removeprefix("to="))
            elif number == 0 and marker == "<|start|>":
                role, _, name = word.partition(":")
                if role not in ROLES:  # a tool goes by its name
                    role, name = "tool", word
                message = replace(message, role=role, name=name or None)
            elif number == 0 and marker == "<|channel|>":
                message = replace(message, channel=word)
            elif number == 0 and marker == "<|constrain|>":
                message = replace(message, content_type=marker + word)
            elif word.startswith("functions."):
                message = replace(message, recipient=word)
            elif not complete and (marker or word != "assistant"):
                rest += text[match.start() :]
                break
            elif marker == "<|channel|>" and message.content_type is None:
                message = replace(message, content_type=word)
    return message, rest


def parse(token_ids: Iterable[int], tokenizer: Tokenizer) -> list[Message]:
    """The messages in ``token_ids``: a reply of the model, or a whole conversation."""
    parser = HarmonyParser(tokenizer)
    for token_id in token_ids:
        parser.push(token_id)
    parser.finish()
    return parser.messages


def tool_calls(messages: Iterable[Message]) -> list[ToolCall]:
    """The function calls among the assistant's messages."""
    return [
        ToolCall((message.recipient or "").removeprefix("functions."), message.content)
        for message in messages
        if is_call(message)
    ]


def is_call(message: Message) -> bool:
    """Whether the assistant calls a function with ``message``."""
    return message.role == "assistant" and bool(message.recipient)
