"""The page at /: a chat with the model, and the engine at work beside it; and /docs.

The files of the page lie in this folder and are served as they are. What the model
writes is text on the page, never HTML, and the policy lets no script run but these
files. `swagger/` holds /docs: Swagger UI, whose large files are stored compressed.
"""

import gzip
import hashlib
from collections.abc import Sequence
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
# Swagger UI writes styles into its elements, and has pictures in its own.
SWAGGER_POLICY = (
    *(rule for rule in POLICY if not rule.startswith("style-src")),
    "style-src 'self' 'unsafe-inline'",
    "img-src data:",
)
FILE_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again by its tag
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def file_endpoint(url: str, path: Path, policy: Sequence[str]) -> Endpoint:
    """The endpoint of the file at ``path``; a file `NAME.js.gz` is compressed."""
    data = path.read_bytes()
    packed = path.suffix == ".gz"
    headers = {
        **FILE_HEADERS,
        "content-security-policy": "; ".join(policy),
        "content-type": MEDIA[Path(path.stem).suffix if packed else path.suffix],
        "etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"',
    }

    def answer(call: Call) -> Response:
        """The file, or that the browser has it already."""
        known = call.request.headers.get("if-none-match", "").split(",")
        if headers["etag"] in (tag.strip().removeprefix("W/") for tag in known):
            return Response(status_code=304, headers=headers)
        if not packed:
            return Response(data, headers=headers)
        varied = headers | {"vary": "accept-encoding"}
        if "gzip" not in call.request.headers.get("accept-encoding", ""):
            return Response(gzip.decompress(data), headers=varied)
        return Response(data, headers=varied | {"content-encoding": "gzip"})

    return Endpoint("GET", url, answer, open=True)


def files_of(
    folder: Path, root: str, below: str, policy: Sequence[str]
) -> list[Endpoint]:
    """Endpoints for the files of a folder: its page at ``root``, others ``below``."""
    urls = {
        path: root if path.stem == "index" else below + path.name.removesuffix(".gz")
        for path in sorted(folder.iterdir())
        if path.suffix in {*MEDIA, ".gz"}
    }
    return [file_endpoint(url, path, policy) for path, url in urls.items()]


FILES = [
    *files_of(FOLDER, "/", "/page/", POLICY),
    *files_of(FOLDER / "swagger", "/docs", "/docs/", SWAGGER_POLICY),
]
