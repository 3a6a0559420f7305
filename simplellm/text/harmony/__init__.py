"""Harmony, the message format of gpt-oss: render conversations, parse replies.

`message.py` has its words and records, `render.py` makes token ids of a conversation,
with the system message of `system.py`. `parse.py` reads what the model writes, whatever
it is. `openai.py` brings OpenAI's messages to harmony's and back, `schema.py` declares
functions in a developer message, `turn.py` is the grammar of a turn.
"""

from simplellm.text.harmony.message import (
    CHANNELS,
    Delta,
    Message,
    ToolCall,
    is_call,
    tool_calls,
)
from simplellm.text.harmony.openai import from_openai, result_message, to_openai
from simplellm.text.harmony.parse import HarmonyParser, parse
from simplellm.text.harmony.render import render, render_message
from simplellm.text.harmony.schema import Tool, developer_text
from simplellm.text.harmony.system import EFFORTS, system_text
