"""Render conversations to token ids.

Messages are rendered as openai-harmony 0.0.8 does; which reasoning is left out follows
https://github.com/openai/harmony, docs/format.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.base.config import expect
from simplellm.text.harmony.message import (
    CHANNELS,
    HEADER_WORD,
    ROLES,
    Message,
    markers,
)
from simplellm.text.harmony.schema import NAMESPACE, Tool, as_tools, developer_text
from simplellm.text.tokenizer import Tokenizer

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
    valid = reasoning_effort in EFFORTS
    expect(valid, "reasoning_effort", reasoning_effort, f"one of {EFFORTS}")
    date = "" if current_date is None else f"\nCurrent date: {current_date}"
    calls = f"\n{WHERE_CALLS_GO}" if tools else ""
    return (
        f"{IDENTITY}\nKnowledge cutoff: 2024-06{date}\n\n"
        f"Reasoning: {reasoning_effort}\n\n"
        f"# Valid channels: {', '.join(CHANNELS)}. "
        f"Channel must be included for every message.{calls}"
    )


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


def render_message(message: Message, tokenizer: Tokenizer) -> list[int]:
    """The token ids of one message, from `<|start|>` to `<|end|>` or `<|call|>`.

    Raises as `check_message` and `Tokenizer.encode`.
    """
    check_message(message)
    text, marker = tokenizer.encode, markers(tokenizer)
    names = [message.role, message.name] if message.name else [message.role]
    author = ":".join(names[1:] if message.role == "tool" else names)
    ids = [marker["<|start|>"], *text(author)]
    if message.recipient:
        ids += text(f" to={message.recipient}")
    if message.channel:
        ids += [marker["<|channel|>"], *text(message.channel)]
    if message.content_type:
        _, constrain, word = message.content_type.rpartition("<|constrain|>")
        if constrain:
            ids += [*text(" "), marker[constrain], *text(word)]
        else:
            ids += text(f" {word}")
    ids += [marker["<|message|>"], *text(message.content)]
    call = message.role == "assistant" and message.recipient
    return [*ids, marker["<|call|>" if call else "<|end|>"]]


def history(messages: Sequence[Message], *, finished: bool = False) -> list[Message]:
    """``messages`` without the analysis that a final answer follows.

    In a ``finished`` conversation the last answer keeps its analysis.
    """
    past = messages[:-1] if finished else messages
    finals = [number for number, m in enumerate(past) if m.channel == "final"]
    last = finals[-1] if finals else 0
    return [
        message
        for number, message in enumerate(messages)
        if number >= last or message.channel != "analysis"
    ]


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
    marker, functions = markers(tokenizer), as_tools(tools)
    messages = introduced(messages, functions, reasoning_effort, current_date)
    finished = messages[-1].channel == "final" and not add_generation_prompt
    visible = history(messages, finished=finished)
    ids = [id for message in visible for id in render_message(message, tokenizer)]
    if add_generation_prompt:
        ids += [marker["<|start|>"], *tokenizer.encode("assistant")]
    if finished:
        ids[-1] = marker["<|return|>"]
    return ids


def introduced(
    messages: Sequence[Message],
    functions: Sequence[Tool],
    reasoning_effort: str,
    current_date: str | None,
) -> list[Message]:
    """``messages`` with a system message and, for ``functions``, a developer message.

    Those that are there stay; ValueError if none of them describes the functions.
    """
    system = [message for message in messages[:1] if message.role == "system"]
    rest = list(messages[len(system) :])
    developers = [message for message in rest if message.role == "developer"]
    if functions and not developers:
        developers = [Message("developer", developer_text(None, functions))]
        rest = developers + rest
    offered = any(NAMESPACE in message.content for message in developers)
    if functions and not offered:
        raise ValueError(
            "the developer message does not describe the tools; expected its content "
            "from developer_text(instructions, tools)"
        )
    if not system:
        text = system_text(reasoning_effort, tools=offered, current_date=current_date)
        system = [Message("system", text)]
    return system + rest
