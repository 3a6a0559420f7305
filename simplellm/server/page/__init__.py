"""The page at /: a chat with the model, and the engine at work beside it.

Its files lie in this folder and are served as they are. What the model writes is text
on the page, never HTML, and the policy lets no script run but these files.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from starlette.responses import Response

from simplellm.server.http.endpoint import Call, Endpoint

FOLDER = Path(__file__).parent
MEDIA = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    # These are allowed unless they are forbidden by name.
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
FILE_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again by its tag
    "content-security-policy": "; ".join(POLICY),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def file_answer(path: Path) -> Callable[[Call], Response]:
    """An answer that is the file at ``path``, or that the browser has it already."""
    data = path.read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = FILE_HEADERS | {"content-type": MEDIA[path.suffix], "etag": tag}
    return partial(send_file, data=data, headers=headers)


def send_file(call: Call, data: bytes, headers: dict[str, str]) -> Response:
    known = call.request.headers.get("if-none-match", "").split(",")
    if headers["etag"] in (tag.strip().removeprefix("W/") for tag in known):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers)


FILES = [
    Endpoint(
        method="GET",
        path="/" if path.name == "index.html" else f"/page/{path.name}",
        answer=file_answer(path),
        open=True,
        summary="The page at /, or a part of it.",
    )
    for path in sorted(FOLDER.iterdir())
    if path.suffix in MEDIA
]
