"""Server-sent events: lines of text that a browser or a client reads as they come."""

from typing import Any

import orjson

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy must not wait for more
}
# Characters that end a line for some clients' libraries, if not for the standard.
ODD_ENDS = ["\x85", "\u2028", "\u2029"]
ESCAPES = [(end.encode(), f"\\u{ord(end):04x}".encode()) for end in ODD_ENDS]
DONE = b"data: [DONE]\n\n"  # how OpenAI's completions and chats end


def event(data: dict[str, Any]) -> bytes:
    """One event: a line of JSON, in which line breaks are escaped.

    An event that has a "type" is named by it, as clients of such streams expect.
    """
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    text = orjson.dumps(data)
    for end, escape in ESCAPES:
        text = text.replace(end, escape)
    return b"%bdata: %b\n\n" % (name, text)
