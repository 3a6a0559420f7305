"""The page at /: a chat with the model, and the engine at work beside it; and /docs.

The files of the page lie in this folder and are served as they are. What the model
writes is text on the page, never HTML, and the policy lets no script run but these
files. `swagger/` holds /docs: Swagger UI, whose large files are stored compressed.
"""

import gzip
import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from starlette.responses import Response

from simplellm.server.http.endpoint import Call, Endpoint

Answer = Callable[[Call], Response]
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
# Swagger UI writes styles into its elements, and has pictures in its own.
SWAGGER_POLICY = (
    *(rule for rule in POLICY if not rule.startswith("style-src")),
    "style-src 'self' 'unsafe-inline'",
    "img-src data:",
)
FILE_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again by its tag
    "content-security-policy": "; ".join(POLICY),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def file_answer(path: Path, more: Mapping[str, str]) -> Answer:
    """An answer that is the file at ``path``, or that the browser has it already.

    A file `NAME.js.gz` is sent as it is to who takes gzip. ``more`` are headers.
    """
    data = path.read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    packed = path.suffix == ".gz"
    suffix = Path(path.stem).suffix if packed else path.suffix
    headers = {**FILE_HEADERS, "content-type": MEDIA[suffix], "etag": tag, **more}
    return partial(send_file, data=data, headers=headers, packed=packed)


def send_file(
    call: Call, data: bytes, headers: dict[str, str], packed: bool
) -> Response:
    known = call.request.headers.get("if-none-match", "").split(",")
    if headers["etag"] in (tag.strip().removeprefix("W/") for tag in known):
        return Response(status_code=304, headers=headers)
    if packed:
        headers = headers | {"vary": "accept-encoding"}
        if "gzip" not in call.request.headers.get("accept-encoding", ""):
            return Response(gzip.decompress(data), headers=headers)
        headers["content-encoding"] = "gzip"
    return Response(data, headers=headers)


def files_of(
    folder: Path, root: str, below: str, summary: str, more: Mapping[str, str]
) -> list[Endpoint]:
    """Endpoints for the files of a folder: its page at ``root``, others ``below``."""
    return [
        Endpoint(
            method="GET",
            path=root
            if path.stem == "index"
            else below + path.name.removesuffix(".gz"),
            handler=file_answer(path, more),
            open=True,
            summary=summary,
        )
        for path in sorted(folder.iterdir())
        if path.suffix in {*MEDIA, ".gz"}
    ]


FILES = [
    *files_of(FOLDER, "/", "/page/", "The page at /, or a part of it.", {}),
    *files_of(
        FOLDER / "swagger",
        "/docs",
        "/docs/",
        "The OpenAPI document as a page, or a part of it.",
        {"content-security-policy": "; ".join(SWAGGER_POLICY)},
    ),
]
