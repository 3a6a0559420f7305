"""Harmony, the message format of gpt-oss: render conversations, parse replies."""

from simplellm.harmony.message import CHANNELS, Message
from simplellm.harmony.openai import from_openai, result_message, to_openai
from simplellm.harmony.parse import (
    Delta,
    HarmonyParser,
    ToolCall,
    is_call,
    parse,
    tool_calls,
)
from simplellm.harmony.render import EFFORTS, render, render_message, system_text
from simplellm.harmony.schema import Tool, developer_text
