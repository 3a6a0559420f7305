"""The blocks of a message's content, and the tools that clients run."""

from typing import Any

from simplellm.server.http.answers import list_of

# The blocks that there are, by who writes them, with the strings that they must have.
BLOCKS: dict[str, dict[str, tuple[str, ...]]] = {
    "system": {"text": ("text",)},
    "user": {"text": ("text",), "tool_result": ("tool_use_id",)},
    "assistant": {
        "text": ("text",),
        "thinking": ("thinking",),  # whatever its signature
        "redacted_thinking": (),
        "tool_use": ("id", "name"),
    },
}
BLOCK_TYPES = sorted({kind for kinds in BLOCKS.values() for kind in kinds})
SOME_BLOCK: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": BLOCK_TYPES}},
}
SOME_CONTENT = {"anyOf": [{"type": "string"}, list_of(SOME_BLOCK)]}
SOME_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": [*BLOCKS]}, "content": SOME_CONTENT},
}
CUSTOM_TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "input_schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
}


def of_texts(*needed: str, **others: str) -> dict[str, Any]:
    """The input_schema of a tool, whose properties are texts but for ``others``."""
    types = dict.fromkeys(needed, "string") | others
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": [*needed]}


# Tools of Anthropic's that a client runs, by how their types begin.
BUILT_IN_TOOLS: dict[str, dict[str, Any]] = {
    "bash_": {
        "description": "Runs a command in a shell that stays open.",
        "input_schema": of_texts("command", restart="boolean"),
    },
    "text_editor_": {
        "description": "Views and edits files. The commands are view, create "
        "(file_text), str_replace (old_str, new_str) and insert (insert_line, "
        "insert_text).",
        "input_schema": of_texts(
            "command",
            "path",
            file_text="string",
            old_str="string",
            new_str="string",
            insert_line="integer",
            insert_text="string",
            view_range="array",
        ),
    },
    "memory_": {
        "description": "Keeps notes as files under /memories. The commands are view, "
        "create, str_replace, insert, delete and rename.",
        "input_schema": of_texts(
            "command",
            path="string",
            file_text="string",
            old_str="string",
            new_str="string",
            insert_line="integer",
            insert_text="string",
            old_path="string",
            new_path="string",
        ),
    },
}


def built_in(kind: str) -> dict[str, Any] | None:
    """What the model is told of a tool of Anthropic's, if a client runs it."""
    return next(
        (t for name, t in BUILT_IN_TOOLS.items() if kind.startswith(name)), None
    )
