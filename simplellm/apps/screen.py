"""Answers on a terminal: streamed as they come, with the calls in them answered.

A conversation is one answer for each line that is typed.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from simplellm.apps.calculator import call_tool
from simplellm.checkpoint.packages import packaged
from simplellm.text.harmony import Delta

if TYPE_CHECKING:  # importing torch takes seconds
    from simplellm.api.streams import Stream

MAX_TOOL_CALLS = 8  # per question; a model that never stops calling is cut off here

# What a model writes may hold escape sequences: on a terminal they are made visible.
CONTROLS = {
    code: 0xFFFD for code in [*range(32), *range(127, 160)] if chr(code) not in "\t\n"
}


def console(**options: Any) -> Console:
    """A console that, where NO_COLOR is set, writes no escape sequences at all."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(color_system=None if plain else "auto", **options)


@dataclass
class Screen:
    """A terminal: the answer goes to `out`, all else dim to `err`."""

    out: Console = field(default_factory=console)
    err: Console = field(default_factory=lambda: console(stderr=True))
    unfinished: bool | None = None  # whether the line that is begun is aside

    def write(self, text: str, *, aside: bool = False) -> None:
        """Show ``text`` at once; ``aside`` marks what is not part of the answer."""
        console = self.err if aside else self.out
        if console.is_terminal:
            text = text.translate(CONTROLS)
        if text:
            style = "dim" if aside else None
            console.out(text, style=style, end="", highlight=False)
            console.file.flush()
            self.unfinished = None if text.endswith("\n") else aside

    def end_line(self) -> None:
        """End the line that is begun, in the stream in which it began."""
        if self.unfinished is not None:
            self.write("\n", aside=self.unfinished)

    def remark(self, text: str) -> None:
        """A line of our own beside the answer."""
        self.end_line()
        self.write(f"({text})\n", aside=True)

    def error(self, error: object) -> None:
        """One line that says what went wrong."""
        self.end_line()
        line = " ".join(str(error).split())
        self.err.out(f"error: {line}", style="red", highlight=False)

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """A spinner, on a terminal with colors only."""
        return self.err.status(text) if self.err.color_system else nullcontext()

    def show(self, deltas: Iterable[Delta]) -> None:
        """Write a turn of the model while it arrives."""
        before = None
        for delta in deltas:
            aside = delta.recipient is not None or delta.channel == "analysis"
            now = aside, delta.recipient, delta.call
            if now != before:
                self.end_line()
                if delta.call is not None:
                    name = (delta.recipient or "").removeprefix("functions.")
                    self.write(f"{name} ", aside=True)
            self.write(delta.text, aside=aside)
            before = now
        self.end_line()


def respond(
    stream_chat: Callable[..., "Stream[Delta]"],
    messages: list[dict[str, Any]],
    screen: Screen,
    **options: Any,
) -> None:
    """Stream the answer to ``messages`` and append it, tool calls included.

    ``stream_chat`` is that of an `LLM`.
    """
    for _ in range(MAX_TOOL_CALLS):
        stream = stream_chat(messages, **options)
        try:
            screen.show(stream)
        except KeyboardInterrupt:  # what has been said remains said
            stream.close()
            said = stream.output().content
            messages.append({"role": "assistant", "content": said})
            raise
        turn = stream.output()
        message = turn.message()
        messages.append(message)
        calls = message.get("tool_calls", [])
        for call in calls:
            result = call_tool(**call["function"])
            screen.write(f"= {result}\n", aside=True)
            answer = {"role": "tool", "tool_call_id": call["id"], "content": result}
            messages.append(answer)
        if not calls:
            break
    if turn.finish_reason == "length":
        count = len(turn.token_ids)
        screen.remark(f"cut short after {count} tokens; --max-tokens allows more")
    elif not turn.content:
        screen.remark("the model stopped without an answer")


def read_lines(screen: Screen) -> Iterator[str]:
    """The lines that are typed, until Ctrl-D."""
    with suppress(ImportError):  # gives input() line editing and history, on Unix
        import readline  # noqa: F401
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            yield input("> " if typed else "").strip()
        except EOFError:
            if typed:
                screen.write("\n", aside=True)
            return


GREETING = """\
{model}: type a question, and go on asking.{about}
/help says this again, /reset begins anew, /exit ends. Ctrl-C stops an answer
or, where none is being written, ends the chat.
"""
EMBEDDED_ABOUT = """
It has learned little: sums and differences of numbers up to 999, counting and
reversing letters, sorting, comparing, and terms of the course. Try:
  What is 47 + 85?
  How many r are in strawberry?
  What is a KV cache?
  What can you do?"""
ENDS = {"/exit", "/quit", "/q", "/bye"}  # the first, and what other programs call it


def greeting(model: str | None) -> str:
    """What a conversation with a ``model`` begins with; None is the embedded one."""
    if model is None:
        return GREETING.format(model="The embedded model", about=EMBEDDED_ABOUT)
    if package := packaged(model):
        model = f"{package.title},\nlicense {package.license}"
    return GREETING.format(model=model, about="")


def converse(
    answer: Callable[[list[dict[str, Any]]], None],
    first: list[dict[str, Any]],
    lines: Iterable[str],
    screen: Screen,
    help: str,
) -> None:
    """Answer each of the lines, with what was said since ``first`` before it."""
    messages = first
    for line in lines:
        if line in ENDS:
            return
        if line == "/help":
            screen.write(help, aside=True)
        elif line == "/reset":
            messages = first
            screen.remark("forgotten")
        elif line.startswith("/") and " " not in line:
            screen.remark(f"there is no {line}; there are /help, /reset and /exit")
        elif line:
            turns = [*messages, {"role": "user", "content": line}]
            try:
                answer(turns)
                messages = turns
            except ValueError as error:
                screen.error(error)
            except KeyboardInterrupt:
                screen.remark("stopped")
                messages = turns
