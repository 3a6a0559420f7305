"""Answer a batch file: OpenAI's JSON lines in, its JSON lines out, resumable.

The output is the record of what is done. Each answer is one write at its end, so that
whatever stops the run leaves finished lines and at most one torn line, which the next
run removes. The next run then does what is missing, and nothing twice.

Each result carries a digest of its request, in its "id". A request that was rejected is
tried again once it is changed; one that was answered must stay as it is, so that no
answer stands beside a question that it does not answer.
"""

import asyncio
import fcntl
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import IO, Any

from tqdm import tqdm

from simplellm.base.request import QueueFullError
from simplellm.server.http.bodies import mend_surrogates

IN_FLIGHT = 256  # requests that the engine has at a time
RETRY_SECONDS = 0.2  # between two looks at a queue that was full
RESULT_PREFIX = "batch_req_"  # of a result's id, before the digest of its request
HEAD = b'{"id": "' + RESULT_PREFIX.encode()  # how every line of the output begins

Id = str | int


# The requests


@dataclass(frozen=True)
class Line:
    """One request of the input, or what is wrong with it."""

    number: int  # the first line is 1
    custom_id: Id
    digest: str  # of all but its custom_id, however the JSON is spelled
    request: dict[str, Any]  # method, url and body
    error: str | None = None


# Status and body of the response to a line.
Answer = Callable[[Line], Awaitable[tuple[int, Any]]]


def read_line(number: int, raw: bytes) -> Line:
    """One line of the input. Without a custom_id, that is "line-" and its number."""
    name, spelled, error = f"line-{number}", raw.strip(), None
    request: Any = {}
    try:
        request = json.loads(mend_surrogates(raw))
        if not isinstance(request, dict):
            error = f"the line is a {type(request).__name__}; expected an object"
        elif type(custom_id := request.pop("custom_id", name)) not in (str, int):
            error = f"custom_id is {custom_id!r}; expected a text or an integer"
        else:
            name = custom_id
            spelled = json.dumps(request, sort_keys=True).encode()
    except (ValueError, RecursionError) as problem:
        error = f"not JSON: {problem}"
    # 64 bits of it, which other requests hardly have.
    digest = sha256(spelled).hexdigest()[:16]
    return Line(number, name, digest, request, error)


def read_requests(path: Path) -> dict[Id, Line]:
    """The lines of the input that are not blank, by their custom_id, in order.

    Raises ValueError if two lines have the same.
    """
    lines: dict[Id, Line] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                line = read_line(number, raw)
                first = lines.setdefault(line.custom_id, line)
                if first is not line:
                    raise ValueError(
                        f"{path}: lines {first.number} and {number} both have the "
                        f"custom_id {line.custom_id!r}; expected each one once (a line "
                        'without one is called "line-" and its number)'
                    )
    return lines


# The results


def keep_results(
    path: Path, requests: Mapping[Id, Line], file: IO[bytes]
) -> dict[Id, bool]:
    """Copy what is done of these requests; True for a result that is an error.

    A torn last line is left out, and the error of a request that has changed since.
    Raises ValueError for a file that is not the output of an earlier run on requests
    with these ids, and for an answer to a request that has changed since.
    """
    done: dict[Id, bool] = {}
    missing = dict(requests)
    with path.open("rb") as old:
        for number, raw in enumerate(old, start=1):
            if not raw.endswith(b"\n") and raw[: len(HEAD)] == HEAD[: len(raw)]:
                break
            try:
                result = json.loads(raw)
                request = missing.pop(result["custom_id"])
                rejected = is_error(result)
            except (ValueError, RecursionError, TypeError, KeyError):
                raise ValueError(
                    f"{path}: line {number} is not the only result of a request of the "
                    "input; expected a new file or what an earlier run on the same "
                    "input wrote"
                ) from None
            if result.get("id") == f"{RESULT_PREFIX}{request.digest}":
                done[request.custom_id] = rejected
                file.write(raw)
            elif not rejected:
                raise ValueError(
                    f"{path}: line {number} answers what {request.custom_id!r} asked "
                    "before it was changed; expected the same request, or a new "
                    "custom_id for the new one (or remove that answer)"
                )
    file.flush()
    return done


def lock(file: IO[bytes], path: Path) -> None:
    """Raise ValueError if another process writes to this file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another run is writing to it") from None


@contextmanager
def open_results(
    path: Path, requests: Mapping[Id, Line]
) -> Iterator[tuple[IO[bytes], dict[Id, bool]]]:
    """The output, open for more lines, and the ids it has: True for an error.

    What is kept of it is copied, and the copy takes its place whole and locked:
    whatever interrupts this leaves the one or the other, and a second writer is
    refused by both.
    """
    path = path.resolve()  # a link remains one
    copy = path.with_name(f".{path.name}.rewritten")
    with path.open("ab") as old:
        lock(old, path)
        try:
            with copy.open("wb") as file:
                lock(file, copy)
                done = keep_results(path, requests, file)
                shutil.copymode(path, copy)
                copy.replace(path)
                yield file, done
        finally:
            copy.unlink(missing_ok=True)


def is_error(result: Mapping[str, Any]) -> bool:
    """Whether a result says why its request was not answered."""
    return bool(result["response"]["status_code"] != 200)


# The answers


def result_of(line: Line, status: int, body: Any) -> dict[str, Any]:
    """The line of the output for the response to ``line``."""
    name = f"{RESULT_PREFIX}{line.digest}"
    response = {"status_code": status, "request_id": name, "body": body}
    return {
        "id": name,
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }


def generated_tokens(body: Mapping[str, Any]) -> int:
    """How many tokens were generated for the body of a response."""
    usage = body.get("usage") or {}
    return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))


def answer_all(
    answer: Answer, requests: Mapping[Id, Line], file: IO[bytes], done: dict[Id, bool]
) -> list[Exception]:
    """Append a result to ``file`` for each of the requests that is not ``done``.

    A request for which ``answer`` raises gets none, and its failure is returned; the
    next run tries it again. ``done`` gets the rest.
    """
    missing = iter([line for name, line in requests.items() if name not in done])
    failures: list[Exception] = []
    tokens, start = 0, perf_counter()

    async def work(bar: tqdm) -> None:
        """Answer one line after the other; several share the iterator."""
        nonlocal tokens
        for line in missing:
            response = None
            while response is None:
                try:
                    response = await answer(line)
                except QueueFullError:  # with many samples each, fewer requests fit
                    await asyncio.sleep(RETRY_SECONDS)
                except Exception as error:
                    failures.append(error)
                    break
            if response is not None:
                result = result_of(line, *response)
                file.write(json.dumps(result).encode() + b"\n")  # in one write
                file.flush()
                done[line.custom_id] = is_error(result)
                tokens += generated_tokens(response[1])
                speed = tokens / (perf_counter() - start)
                bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
            bar.update()

    async def work_together(bar: tqdm) -> None:
        await asyncio.gather(*(work(bar) for _ in range(IN_FLIGHT)))

    total, initial = len(requests), len(done)
    with tqdm(total=total, initial=initial, unit="req", disable=None) as bar:
        asyncio.run(work_together(bar))
    return failures
