"""The system message, in the words that gpt-oss was trained on."""

from collections.abc import Sequence

from simplellm.base.config import expect
from simplellm.text.harmony.message import CHANNELS, Message
from simplellm.text.harmony.schema import NAMESPACE, Tool, developer_text

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


def with_system(
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
