"""Render conversations to token ids.

Messages are rendered as openai-harmony 0.0.8 does; which reasoning is left out follows
https://github.com/openai/harmony, docs/format.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.config import expect
from simplellm.harmony.message import (
    CHANNELS,
    HEADER_WORD,
    ROLES,
    Message,
    Tool,
    markers,
)
from simplellm.harmony.schema import NAMESPACE, as_tools, developer_text
from simplellm.tokenizer import Tokenizer

EFFORTS = ("low", "medium", "high")
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
WHERE_CALLS_GO = "Calls to these tools must go to the commentary channel: 'functions'."


def system_text(
    reasoning_effort: str = "medium",
    *,
    tools: bool = False,
    current_date: str | None = None,
) -> str:
    """The system message; ``tools`` says whether functions are offered.

    ``current_date`` is written as given (openai-harmony: "2025-06-28"); None leaves
    its line out. Raises ValueError for an unknown effort.
    """
    known = reasoning_effort in EFFORTS
    expect(known, "reasoning_effort", reasoning_effort, f"one of {EFFORTS}")
    date = "" if current_date is None else f"\nCurrent date: {current_date}"
    calls = f"\n{WHERE_CALLS_GO}" if tools else ""
    return (
        f"{IDENTITY}\nKnowledge cutoff: 2024-06{date}\n\n"
        f"Reasoning: {reasoning_effort}\n\n"
        f"# Valid channels: {', '.join(CHANNELS)}. "
        f"Channel must be included for every message.{calls}"
    )


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    reasoning_effort: str = "medium",
    tools: Sequence[Tool | Mapping[str, Any]] = (),
    current_date: str | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The token ids of a conversation, for the model to continue.

    A system message goes in front if there is none. ``tools`` are the functions
    offered; a developer message that is there must already describe them (as
    `from_openai` and `developer_text` do), else one is added. Analysis is left out
    where a final answer follows it. All messages end with `<|end|>`, calls with
    `<|call|>`.

    Without ``add_generation_prompt`` the ids are a finished conversation, as for
    training: a last final answer keeps its analysis and ends with `<|return|>`.

    Raises ValueError for unknown roles or channels and for names with spaces or "<",
    TypeError and TokenizerError as `Tokenizer.encode`.
    """
    marker = markers(tokenizer)
    messages = list(messages)
    functions = as_tools(tools)
    developers = [message for message in messages if message.role == "developer"]
    if functions and not developers:
        developers = [Message("developer", developer_text(None, functions))]
        front = 1 if messages and messages[0].role == "system" else 0
        messages[front:front] = developers
    offered = any(NAMESPACE in message.content for message in developers)
    if functions and not offered:
        raise ValueError(
            "the developer message does not describe the tools; expected its content "
            "from developer_text(instructions, tools)"
        )
    if not messages or messages[0].role != "system":
        text = system_text(reasoning_effort, tools=offered, current_date=current_date)
        messages.insert(0, Message("system", text))
    finals = [i for i, message in enumerate(messages) if message.channel == "final"]
    finished = bool(finals) and finals[-1] == len(messages) - 1
    if finished and not add_generation_prompt:
        finals.pop()
    ids: list[int] = []
    for number, message in enumerate(messages):
        if message.channel == "analysis" and finals and number < finals[-1]:
            continue
        ids += render_message(message, tokenizer)
    if add_generation_prompt:
        return [*ids, marker["<|start|>"], *tokenizer.encode("assistant")]
    if finished:
        ids[-1] = marker["<|return|>"]
    return ids


def render_message(message: Message, tokenizer: Tokenizer) -> list[int]:
    """The token ids of one message, from `<|start|>` to `<|end|>` or `<|call|>`."""
    check_message(message)
    marker = markers(tokenizer)
    names = [message.role, message.name] if message.name else [message.role]
    author = ":".join(names[1:] if message.role == "tool" else names)
    ids = [marker["<|start|>"], *tokenizer.encode(author)]
    if message.recipient:
        ids += tokenizer.encode(f" to={message.recipient}")
    if message.channel:
        ids += [marker["<|channel|>"], *tokenizer.encode(message.channel)]
    if message.content_type:
        name = message.content_type.removeprefix("<|constrain|>")
        if name == message.content_type:
            ids += tokenizer.encode(f" {name}")
        else:
            ids += [*tokenizer.encode(" "), marker["<|constrain|>"]]
            ids += tokenizer.encode(name)
    ids += [marker["<|message|>"], *tokenizer.encode(message.content)]
    call = message.role == "assistant" and message.recipient
    return [*ids, marker["<|call|>" if call else "<|end|>"]]


def check_message(message: Message) -> None:
    """Raise ValueError if a header cannot be written for ``message``."""
    role, channel, name = message.role, message.channel, message.name
    expect(role in ROLES, "role", role, f"one of {ROLES}")
    expect(channel in (None, *CHANNELS), "channel", channel, f"one of {CHANNELS}")
    expect(name or role != "tool", "a tool message's name", name, "'functions.NAME'")
    content_type = (message.content_type or "").removeprefix("<|constrain|>")
    for word in (name, message.recipient, content_type):
        ok = not word or HEADER_WORD.fullmatch(word)
        expect(ok, "a word of a header", word, "no spaces and no '<'")
