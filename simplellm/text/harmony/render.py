"""Render conversations to token ids.

Messages are rendered as openai-harmony 0.0.8 does; which reasoning is left out follows
https://github.com/openai/harmony, docs/format.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.text.harmony.message import Message, check_message, markers
from simplellm.text.harmony.schema import Tool, as_tools
from simplellm.text.harmony.system import with_system
from simplellm.text.tokenizer import Tokenizer


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
    where a final answer follows it. Without ``add_generation_prompt`` the ids are a
    finished conversation, as for training: a last final answer keeps its analysis and
    ends with `<|return|>`.

    Raises ValueError for unknown roles or channels and for names with spaces or "<",
    TypeError and TokenizerError as `Tokenizer.encode`.
    """
    marker, functions = markers(tokenizer), as_tools(tools)
    messages = with_system(messages, functions, reasoning_effort, current_date)
    finished = messages[-1].channel == "final" and not add_generation_prompt
    visible = history(messages, finished=finished)
    ids = [id for message in visible for id in render_message(message, tokenizer)]
    if add_generation_prompt:
        ids += [marker["<|start|>"], *tokenizer.encode("assistant")]
    if finished:
        ids[-1] = marker["<|return|>"]
    return ids
