"""Server-sent events: lines of text that a browser or a client reads as they come."""

from typing import Any

import orjson

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy must not wait for more
}
DONE = b"data: [DONE]\n\n"  # how OpenAI's completions and chats end


def event(data: dict[str, Any]) -> bytes:
    """One event. JSON has no line breaks, so that its text fits one line.

    An event that has a "type" is named by it, as clients of such streams expect.
    """
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return b"%bdata: %b\n\n" % (name, orjson.dumps(data))
