"""Tools of Anthropic's, those among them that a client runs, and a client's own."""

from typing import Any

from simplellm.server.http.bodies import an_object

CUSTOM_TOOL = an_object(
    "name",
    name={"type": "string"},
    input_schema={"type": "object"},
    strict={"type": ["boolean", "null"]},
)


def of_texts(*needed: str, **others: str) -> dict[str, Any]:
    """The input_schema of a tool, whose properties are texts but for ``others``."""
    types = dict.fromkeys(needed, "string") | others
    return an_object(*needed, **{name: {"type": kind} for name, kind in types.items()})


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
    """The function for a tool of Anthropic's that clients run; None for other tools."""
    return next(
        (t for name, t in BUILT_IN_TOOLS.items() if kind.startswith(name)), None
    )
