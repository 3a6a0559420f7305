"""Answer a file of requests: JSON lines in, JSON lines out, resumable.

The output is the record of what is done. Each answer is one write at its end, so that
whatever stops the run leaves finished lines and at most one torn line, which the next
run removes. The next run then does what is missing, and nothing twice.

Each result carries a digest of its request. A request that was rejected is tried again
once it is changed; one that was answered must stay as it is, so that no answer stands
beside a question that it does not answer.
"""

import asyncio
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import IO, Any

from tqdm import tqdm

from simplellm.api.checks import with_integer_keys
from simplellm.api.outputs import ChatChoice, RequestOutput
from simplellm.apps import jobs_openai
from simplellm.base.request import QueueFullError
from simplellm.base.sampling_params import SamplingParams

IN_FLIGHT = 256  # requests that the engine has at a time
RETRY_SECONDS = 0.2  # between two looks at a queue that was full
HEAD = b'{"id": '  # how every line of the output begins
FIELDS = [field.name for field in fields(SamplingParams)]  # of every request
CHAT_FIELDS = "messages tools tool_choice parallel_tool_calls response_format".split()
CHAT_FIELDS += ["reasoning_effort", *FIELDS]
# What a result leaves out of an output.
ASIDE = ("prompt_token_ids", "prompt", "index", "num_cached_tokens", "metrics")
# What a request that an LLM does not take raises: JSON can go wrong in many ways.
REJECTIONS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)

Id = str | int


# The requests


@dataclass(frozen=True)
class Line:
    """One request of the input, or what is wrong with it."""

    number: int  # the first line is 1
    id: Id
    digest: str  # of all but its id, however the JSON is spelled
    request: dict[str, Any]
    error: str | None = None
    openai: bool = False  # in OpenAI's form: its id is its custom_id


def read_line(number: int, raw: bytes) -> Line:
    """One line of the input. Without an "id", its id is "line-" and its number.

    Any other field that is null counts as absent.
    """
    name, spelled, fields, error = f"line-{number}", raw.strip(), {}, None
    openai = False
    try:
        request = json.loads(raw)
        if not isinstance(request, dict):
            error = f"the line is a {type(request).__name__}; expected an object"
        elif type(request.get(key := id_key(request), name)) not in (str, int):
            error = f"{key} is {request[key]!r}; expected a text or an integer"
        else:
            openai, name = key == "custom_id", request.pop(key, name)
            fields = {field: x for field, x in request.items() if x is not None}
            spelled = json.dumps(fields, sort_keys=True).encode()
    except (ValueError, RecursionError) as problem:
        error = f"not JSON: {problem}"
    # 64 bits of it, which other requests hardly have.
    digest = sha256(spelled).hexdigest()[:16]
    return Line(number, name, digest, fields, error, openai)


def id_key(line: Mapping[str, Any]) -> str:
    """The field that holds the id of a request or a result."""
    return "custom_id" if "custom_id" in line else "id"


def read_requests(path: Path) -> dict[Id, Line]:
    """The lines of the input that are not blank, by their ids, in order.

    Raises ValueError if two lines have the same id.
    """
    lines: dict[Id, Line] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                line = read_line(number, raw)
                first = lines.setdefault(line.id, line)
                if first is not line:
                    raise ValueError(
                        f"{path}: lines {first.number} and {number} both have the id "
                        f"{line.id!r}; expected each id once (a line without an id is "
                        'called "line-" and its number)'
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
                request = missing.pop(result[id_key(result)])
            except (ValueError, RecursionError, TypeError, KeyError):
                raise ValueError(
                    f"{path}: line {number} is not the only result of a request of the "
                    "input; expected a new file or what an earlier run on the same "
                    "input wrote"
                ) from None
            rejected = is_error(result)
            # A result of the days before there were digests: its answer is trusted.
            was = result.get("digest", None if rejected else request.digest)
            if "custom_id" in result:
                was = str(result["id"]).removeprefix(jobs_openai.RESULT_PREFIX)
            if was == request.digest:
                done[request.id] = rejected
                file.write(raw)
            elif not rejected:
                raise ValueError(
                    f"{path}: line {number} answers what {request.id!r} asked before "
                    "it was changed; expected the same request, or a new id for the "
                    "new one (or remove that answer)"
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
    """The output, open for more lines, and the ids it has: True if with an error.

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
    if "custom_id" in result:
        return bool(result["response"]["status_code"] != 200)
    return "error" in result


# The answers


def arguments(line: Line) -> dict[str, Any]:
    """What `LLM.generate` or `LLM.chat_async` is called with. Raises ValueError."""
    request, error = dict(line.request), line.error
    allowed = CHAT_FIELDS if "messages" in request else ["prompt", *FIELDS]
    unknown = [name for name in request if name not in allowed]
    if error is None and ("messages" in request) == ("prompt" in request):
        error = (
            f"the fields are {', '.join(request) or 'none'}; expected either prompt or "
            "messages"
        )
    elif error is None and unknown:
        error = f"unknown field {unknown[0]!r}; expected {', '.join(['id', *allowed])}"
    if error is not None:
        raise ValueError(error)
    bias = request.get("logit_bias")
    if isinstance(bias, dict):  # in JSON its keys can only be text
        request["logit_bias"] = with_integer_keys(bias)
    if "prompt" in request:
        prompt = request.pop("prompt")
        # In a list an integer would be a token id; alone it is refused.
        request["prompts"] = prompt if isinstance(prompt, int) else [prompt]
    return request


async def answer(llm: Any, line: Line, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the output file says of a request."""
    if line.openai:
        response = await jobs_openai.answer_body(llm, line.request, defaults)
        return jobs_openai.result_of(line.digest, line.id, *response)
    head = {"id": line.id, "digest": line.digest}
    try:
        return head | await answer_ours(llm, line, defaults)
    except REJECTIONS as error:
        return head | {"error": f"line {line.number}: {str(error) or repr(error)}"}


async def answer_ours(
    llm: Any, line: Line, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """What it says of a request in our form, its id and digest aside."""
    call = {**defaults, **arguments(line)}
    if "messages" in call:
        output = await llm.chat_async(**call)
        prompt_tokens = output.usage.prompt_tokens
        choices = [choice_fields(choice, prompt_tokens) for choice in output.choices]
    else:
        samples = await asyncio.wrap_future(llm.generate(**call))
        choices = [choice_fields(one, len(one.prompt_token_ids)) for one in samples]
    return {"choices": choices} if "n" in call else choices[0]


def count_tokens(result: Mapping[str, Any]) -> int:
    """The tokens that were generated for a result."""
    if "custom_id" in result:
        usage = result["response"]["body"].get("usage", {})
        return int(usage.get("completion_tokens", 0))
    choices = result.get("choices", [result])
    return sum(choice.get("completion_tokens", 0) for choice in choices)


def choice_fields(
    output: RequestOutput | ChatChoice, prompt_tokens: int
) -> dict[str, Any]:
    """What one of a request's samples gave."""
    choice = asdict(output)
    for name in ASIDE:
        choice.pop(name, None)
    for name in ("stop_reason", "prompt_logprobs"):
        if choice.get(name) is None:
            choice.pop(name, None)
    choice["prompt_tokens"] = prompt_tokens
    choice["completion_tokens"] = len(choice.pop("token_ids"))
    logprobs = choice.pop("logprobs")
    return choice if logprobs is None else choice | {"logprobs": logprobs}


def answer_all(
    llm: Any,
    requests: Mapping[Id, Line],
    file: IO[bytes],
    done: dict[Id, bool],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> list[Exception]:
    """Append a result to ``file`` for each of the requests that is not ``done``.

    ``defaults`` are sampling parameters of requests that leave them open.
    A request that the LLM refuses gets an error object. One that fails gets nothing,
    and its failure is returned; the next run tries it again. ``done`` gets the rest.
    """
    missing = iter([line for name, line in requests.items() if name not in done])
    failures: list[Exception] = []
    tokens, start = 0, perf_counter()

    async def work(bar: tqdm) -> None:
        """Answer one line after the other; several share the iterator."""
        nonlocal tokens
        for line in missing:
            result = None
            while result is None:
                try:
                    result = await answer(llm, line, defaults)
                except QueueFullError:  # with many samples each, fewer requests fit
                    await asyncio.sleep(RETRY_SECONDS)
                except Exception as error:
                    failures.append(error)
                    break
            if result is not None:
                file.write(json.dumps(result).encode() + b"\n")  # in one write
                file.flush()
                done[line.id] = is_error(result)
                tokens += count_tokens(result)
                speed = tokens / (perf_counter() - start)
                bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
            bar.update()

    async def work_together(bar: tqdm) -> None:
        await asyncio.gather(*(work(bar) for _ in range(IN_FLIGHT)))

    total, initial = len(requests), len(done)
    with tqdm(total=total, initial=initial, unit="req", disable=None) as bar:
        asyncio.run(work_together(bar))
    return failures
