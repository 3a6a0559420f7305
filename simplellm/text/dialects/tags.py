"""Parse what other models than gpt-oss write: thoughts and calls between tags.

A tag is a control token. Its name in plain text, as a model quotes it, is text.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from simplellm.base.grammar import Grammar
from simplellm.text.detokenizer import StreamDecoder
from simplellm.text.dialects.call_forms import (
    ANSWER,
    ARGUMENTS,
    BREAKS,
    CALL_START,
    CALLS,
    GAP_ANSWER,
    ID_START,
    PYTHON,
    TAGS,
    THINK_END,
    THINK_START,
    is_thinking,
    turn_rule,
)
from simplellm.text.dialects.whole_calls import (
    ARGUMENTS_FIRST,
    XML,
    Call,
    json_call,
    xml_call,
)
from simplellm.text.harmony import Delta, Message, Tool
from simplellm.text.tokenizer import Tokenizer

MOST_HELD = 256  # characters of what may be the beginning of a call
SPACES = r"\s*"
NAME = r"""((?:[^"\\]|\\(?:["\\]|\Z))+)"""  # in JSON
ID = '"id"~:~"@"~}'  # may follow a call's arguments


def in_pieces(text: str) -> list[str]:
    """Patterns of how a call's JSON is written, which are matched one by one."""
    kinds = {"~": SPACES, "@": NAME, "[": r"\[?"}
    return [kinds.get(char, re.escape(char)) for char in text]


OPENINGS = [
    in_pieces(f'[~{{~{type}"name"~:~"@"~,~"{key}"~:~')
    for type in ("", '"type"~:~"function"~,~')
    for key in ("arguments", "parameters")
]


def either(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


OPENING = either(["".join(pieces) for pieces in OPENINGS])
ENDING = either(["".join(in_pieces(ID))])
# Text that ends before one can say what it is.
LATER = [in_pieces(f'[~{{~"{key}"~:') for key in ("arguments", "parameters")]
BEGINNINGS = [*OPENINGS, in_pieces(ID), *LATER, in_pieces(XML)]
BEGINNING = either(["".join(rf"(?:{p}|\Z)" for p in pieces) for pieces in BEGINNINGS])
BEFORE_TAG = re.compile(r"(\S+)(?:\n\S*)?")  # a function's name, and a call's id


class TagParser:
    """Parses what a model writes behind ``prompt``, token by token.

    It has what `HarmonyParser` has, and its messages: thoughts are in the analysis
    channel, calls in commentary and all else in the final one. Whatever the ids are,
    nothing is raised, and all text is in some message but what stands around tags:
    line breaks, and a call's JSON around its arguments. What is no call in the end is
    part of the answer. ``grammar`` is the one that the turn follows, and ``tools`` are
    those it may call: in XML their schemas tell a number from a text. If the answer has
    ``begun`` in the prompt, all white space belongs to it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        grammar: Grammar | None = None,
        tools: Sequence[Tool] = (),
        begun: bool = False,
    ) -> None:
        self._tools = tools
        self._goes_on = begun
        self.messages: list[Message] = []
        self.message: Message | None = None
        self.num_calls = 0
        special = tokenizer.special
        self._tags = {special[name]: name for name in TAGS if name in special}
        self._tag = ""  # that begins calls, if it was the latest one
        turn = turn_rule(grammar)
        # Whether a call may go without a tag. JSON that was asked for is an answer.
        self._bare = PYTHON in special and ANSWER not in turn
        # White space in front of an answer is part of it, but for that behind thoughts.
        self._exact = ANSWER in turn and GAP_ANSWER not in turn
        self._gap = ""
        self._tokens = tokenizer.tokens
        self._decoder = StreamDecoder(tokenizer)
        # Of a text or a call's arguments, and what isn't in it yet.
        self._texts: list[str] = []
        self._held = ""
        self._depth = 1  # in a call's JSON
        self._quoted = self._escaped = False
        thinks = is_thinking(tokenizer, prompt)
        first = "analysis" if thinks else self._answer
        self._open("final" if begun else first)

    @property
    def _answer(self) -> str | None:
        """The channel of an answer; None if it may turn out to be a call."""
        return None if self._bare else "final"

    def _open(self, channel: str | None, recipient: str | None = None) -> None:
        """Begin a text or a call or, without a channel, what may be a call."""
        type = recipient and "<|constrain|>json"
        message = Message("assistant", "", None, channel, recipient, type)
        self.message = message if channel else None
        self._texts, self._held = [], ""

    def _close(self, cut: bool = False) -> list[Delta]:
        """End what is under way, which was ``cut`` off where no tag ends it."""
        deltas: list[Delta] = []
        held = self._held if self.message is None else ""
        if self._tag == CALL_START and (call := xml_call(held, self._tools, not cut)):
            self._take_whole(call, deltas)
        elif held:
            self._open("final")
            self._text(held, deltas)
        if self.message and (self._texts or self.message.recipient):
            content = "".join(self._texts)
            self.messages.append(replace(self.message, content=content))
        return deltas

    def finish(self) -> list[Delta]:
        """End the message that is under way, if any: the model is over."""
        deltas = self._take(self._decoder.flush())
        if self.message is not None:
            self._say(self._held, deltas)
        deltas += self._close(cut=True)
        self._open(self._answer)
        return deltas

    def push(self, token_id: int) -> list[Delta]:
        """Take one token; returns what it adds. Control tokens but tags add nothing."""
        if token_id in self._tokens:
            return self._take(self._decoder.push(token_id))
        if (tag := self._tags.get(token_id)) is None:
            return []
        deltas = self._take(self._decoder.flush())
        named = self._tag == CALLS and self.message is None
        if named and tag == ID_START:
            self._held += "\n"
            return deltas
        name = BEFORE_TAG.fullmatch(self._held)
        if named and tag == ARGUMENTS and name:
            return [*deltas, self._call(name[1])]
        deltas += self._close()
        self._tag = tag if tag in (CALL_START, PYTHON, CALLS) else ""
        self._gap = BREAKS if tag == THINK_END else ""
        answer = None if self._tag else self._answer
        self._open("analysis" if tag == THINK_START else answer)
        return deltas

    def _call(self, name: str) -> Delta:
        """Begin a call of the function ``name``."""
        self._open("commentary", f"functions.{name}")
        self._depth, self._quoted, self._escaped = 1, False, False
        self.num_calls += 1
        return Delta("commentary", f"functions.{name}", "", self.num_calls - 1)

    def _take(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        while text:
            if self.message is None:
                text = self._beginning(text, deltas)
            elif self.message.recipient is not None:
                text = self._arguments(text, deltas)
            else:
                text = self._text(text, deltas)
        return deltas

    def _say(self, text: str, deltas: list[Delta]) -> None:
        message = self.message
        if text and message is not None:
            call = self.num_calls - 1 if message.recipient else None
            self._texts.append(text)
            deltas.append(Delta(message.channel, message.recipient, text, call))

    def _text(self, text: str, deltas: list[Delta]) -> str:
        """Take ``text``, but hold back line breaks: a tag may follow."""
        text = self._held + text
        if not self._texts:
            text = self._begun(text)
        shown = text.rstrip("\n")
        self._held = text[len(shown) :]
        self._say(shown, deltas)
        return ""

    def _begun(self, text: str) -> str:
        """A message's first ``text`` without what only stands in front of it."""
        if self._goes_on and not self.messages:
            return text
        if not (self._exact and self.message and self.message.channel == "final"):
            return text.lstrip(" \n")
        if self._gap and text.startswith(self._gap):
            text, self._gap = text.removeprefix(self._gap), ""
        return text

    def _beginning(self, text: str, deltas: list[Delta]) -> str:
        """Look whether ``text`` begins a call; returns what is left to be taken."""
        # Between calls, and behind them, JSON and Llama have their signs.
        held = (self._held + text).lstrip(" \n;,]" if self.num_calls else " \n")
        if self.num_calls and (end := ENDING.match(held)):
            self._held = ""
            return held[end.end() :]
        listed = held.startswith("[") and not self._tag
        xml = self._tag == CALL_START and held.startswith(XML)
        if (match := OPENING.match(held)) and not listed:
            name = next(group for group in match.groups() if group)
            deltas.append(self._call(re.sub(r'\\(["\\])', r"\1", name)))
            return held[match.end() :]
        whole = not listed and (xml or ARGUMENTS_FIRST.match(held))
        if whole and (">" if xml else "}") in text:
            call = xml_call(held, self._tools, None) if xml else json_call(held)
            if call is not None:
                return self._take_whole(call, deltas)
        may = not listed and BEGINNING.fullmatch(held)
        named = self._tag == CALLS and BEFORE_TAG.fullmatch(held)
        if not held or whole or ((may or named) and len(held) <= MOST_HELD):
            self._held = held
            return ""
        self._open("final")
        return held

    def _take_whole(self, call: Call, deltas: list[Delta]) -> str:
        """Take a call that was read as a whole; returns what is left behind it."""
        name, arguments, rest = call
        deltas.append(self._call(name))
        self._say(arguments, deltas)
        self._close()
        self._open(None)
        return rest

    def _arguments(self, text: str, deltas: list[Delta]) -> str:
        """Take arguments up to their end; returns what is left behind it."""
        kept = ""
        for index, char in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif self._depth == 1 and char in ",}]":
                self._say(kept, deltas)
                self._close()
                self._open(None)
                return text[index + (char == "}") :]
            elif self._depth == 1 and char.isspace():
                continue
            else:
                self._quoted = char == '"'
                self._depth += (char in "{[") - (char in "}]")
            kept += char
        self._say(kept, deltas)
        return ""
