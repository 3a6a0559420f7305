"""Harmony, the message format of gpt-oss: render conversations, parse replies."""

from simplellm.harmony.message import CHANNELS, ROLES, Message, Tool
from simplellm.harmony.openai import (
    call_message,
    from_openai,
    function_name,
    result_message,
    to_openai,
)
from simplellm.harmony.parse import (
    Delta,
    HarmonyParser,
    ToolCall,
    parse,
    tool_calls,
)
from simplellm.harmony.render import (
    EFFORTS,
    developer_text,
    render,
    render_message,
    system_text,
)

__all__ = [
    "CHANNELS",
    "EFFORTS",
    "ROLES",
    "Delta",
    "HarmonyParser",
    "Message",
    "Tool",
    "ToolCall",
    "call_message",
    "developer_text",
    "from_openai",
    "function_name",
    "parse",
    "render",
    "render_message",
    "result_message",
    "system_text",
    "to_openai",
    "tool_calls",
]
