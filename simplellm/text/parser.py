"""The protocol of parsers of turns, whatever format they read."""

from typing import Protocol

from simplellm.text.harmony.message import Delta, Message


class TurnParser(Protocol):
    """What reads a turn, token by token, as `HarmonyParser` tells."""

    messages: list[Message]
    message: Message | None
    num_calls: int

    def push(self, token_id: int) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...
