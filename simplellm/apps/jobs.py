"""Answer a file of requests: JSON lines in, JSON lines out, resumable.

The output is the record of what is done. Each answer is one write at its end, so that
whatever stops the run leaves finished lines and at most one torn line, which the next
run removes. The next run then does what is missing, and nothing twice.

Each result carries a digest of its request. A request that was rejected is tried again
once it is changed; one that was answered must stay as it is, so that no answer stands
beside a question that it does not answer.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from simplellm.request import QueueFullError, SamplingParams

if TYPE_CHECKING:  # importing torch takes seconds; files are checked before
    from simplellm.llm import LLM
    from simplellm.reply import ChatChoice, RequestOutput

IN_FLIGHT = 256  # requests that the engine has at a time
RETRY_SECONDS = 0.05  # between two looks at a queue that was full
HEAD = b'{"id": '  # how every line of the output begins
# What a request that an LLM does not take raises: JSON can go wrong in many ways.
REJECTIONS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)

Id = str | int


@dataclass(frozen=True)
class Line:
    """One request of the input, or what is wrong with it."""

    number: int  # the first line is 1
    id: Id
    digest: str  # of all but its id, however the JSON is spelled
    request: dict[str, Any]
    error: str | None = None


def digest(data: bytes) -> str:
    """A short name of ``data`` that other data hardly has: 64 bits."""
    return sha256(data).hexdigest()[:16]


def read_line(number: int, raw: bytes) -> Line:
    """One line of the input. Without an "id", its id is "line-" and its number.

    Any other field that is null counts as absent.
    """
    unnamed = f"line-{number}"
    wrong = Line(number, unnamed, digest(raw.strip()), {})
    try:
        request = json.loads(raw)
        if not isinstance(request, dict):
            kind = type(request).__name__
            return replace(wrong, error=f"the line is a {kind}; expected an object")
        name = request.pop("id", unnamed)
        given = {field: value for field, value in request.items() if value is not None}
        spelled = json.dumps(given, sort_keys=True).encode()
    except (ValueError, RecursionError) as error:
        return replace(wrong, error=f"not JSON: {error}")
    if type(name) not in (str, int):
        return replace(wrong, error=f"id is {name!r}; expected a text or an integer")
    return Line(number, name, digest(spelled), given)


def read_requests(path: Path) -> Iterator[Line]:
    """The lines of the input that are not blank."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield read_line(number, raw)


def read_digests(path: Path) -> dict[Id, str]:
    """The input's ids, each with the digest of its request, in order.

    Raises ValueError if two lines have the same id.
    """
    found: dict[Id, str] = {}
    numbers: dict[Id, int] = {}
    for line in read_requests(path):
        if line.id in found:
            raise ValueError(
                f"{path}: lines {numbers[line.id]} and {line.number} both have the id "
                f"{line.id!r}; expected each id once (a line without an id is called "
                '"line-" and its number)'
            )
        found[line.id], numbers[line.id] = line.digest, line.number
    return found


@dataclass
class Results:
    """What the output of earlier runs holds."""

    done: dict[Id, bool]  # the ids that have a result, and whether it is an error
    end: int  # bytes of whole lines
    outdated: set[int]  # lines that hold the error of a request that has changed since


def read_results(path: Path, digests: Mapping[Id, str]) -> Results:
    """What is done of the requests with these ``digests``. A torn last line is not.

    Raises ValueError for a file that is not the output of an earlier run on requests
    with these ids, and for an answer to a request that has changed since.
    """
    found = Results({}, 0, set())
    seen: set[Id] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n") and raw[: len(HEAD)] == HEAD[: len(raw)]:
                break
            try:
                result = json.loads(raw)
                name = result["id"]
                known = name in digests and name not in seen
            except (ValueError, RecursionError, TypeError, KeyError):
                known = False
            if not known:
                raise ValueError(
                    f"{path}: line {number} is not the only result of a request of the "
                    "input; expected a new file or what an earlier run on the same "
                    "input wrote"
                )
            seen.add(name)
            found.end += len(raw)
            rejected = "error" in result
            # A result of the days before there were digests: its answer is trusted.
            was = result.get("digest", None if rejected else digests[name])
            if was == digests[name]:
                found.done[name] = rejected
            elif rejected:
                found.outdated.add(number)
            else:
                raise ValueError(
                    f"{path}: line {number} answers what {name!r} asked before it was "
                    "changed; expected the same request, or a new id for the new one "
                    "(or remove that answer)"
                )
    return found


def lock(file: IO[bytes], path: Path) -> None:
    """Raise ValueError if another process writes to this file."""
    with suppress(ImportError):  # there is no fcntl on Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another run is writing to it") from None


@contextmanager
def open_results(
    path: Path, digests: Mapping[Id, str]
) -> Iterator[tuple[IO[bytes], dict[Id, bool]]]:
    """The output, open for more lines, and the ids it has: True if with an error."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file; expected one, since it is read again")
    with path.open("ab") as file:
        lock(file, path)
        found = read_results(path, digests)
        file.truncate(found.end)
        if not found.outdated:
            yield file, found.done
            return
        with open_copy(path, found.outdated) as copy:
            yield copy, found.done


@contextmanager
def open_copy(path: Path, outdated: Set[int]) -> Iterator[IO[bytes]]:
    """A copy of the output without some lines, which has taken its place.

    It takes it whole and locked: whatever interrupts this leaves the one or the other,
    and a second writer is refused by both.
    """
    path = path.resolve()  # a link remains one
    copy = path.with_name(f".{path.name}.rewritten")
    try:
        with path.open("rb") as old, copy.open("wb") as file:
            lock(file, copy)
            for number, raw in enumerate(old, start=1):
                if number not in outdated:
                    file.write(raw)
            file.flush()
            shutil.copymode(path, copy)
            copy.replace(path)
            yield file
    finally:
        copy.unlink(missing_ok=True)


def arguments(line: Line) -> dict[str, Any]:
    """What `LLM.generate` or `LLM.chat_async` is called with. Raises ValueError."""
    if line.error:
        raise ValueError(line.error)
    request = dict(line.request)
    if ("messages" in request) == ("prompt" in request):
        raise ValueError(
            f"the fields are {', '.join(request) or 'none'}; expected either prompt or "
            "messages"
        )
    of_chat = ["messages", "tools", "reasoning_effort"]
    own = of_chat if "messages" in request else ["prompt"]
    known = [*own, "n", *(field.name for field in fields(SamplingParams))]
    for name in request:
        if name not in known:
            raise ValueError(
                f"unknown field {name!r}; expected {', '.join(['id', *known])}"
            )
    bias = request.get("logit_bias")
    if isinstance(bias, dict):  # in JSON its keys can only be text
        request["logit_bias"] = {token_id(key): value for key, value in bias.items()}
    if "prompt" in request:
        prompt = request.pop("prompt")
        if isinstance(prompt, int):  # in a list it would be a token id
            raise ValueError("prompt is an integer; expected text or token ids")
        request["prompts"] = [prompt]
    return request


def token_id(key: str) -> int:
    """The token that a key of logit_bias names."""
    try:
        return int(key)
    except ValueError:
        raise ValueError(
            f"logit_bias has token id {key!r}; expected an integer"
        ) from None


async def answer(llm: "LLM", line: Line) -> dict[str, Any]:
    """What the output file says of a request, its id and digest aside."""
    call = arguments(line)
    if "messages" in call:
        output = await llm.chat_async(**call)
        prompt_tokens = output.usage.prompt_tokens
        choices = [describe(choice, prompt_tokens) for choice in output.choices]
    else:
        outputs = await asyncio.wrap_future(llm.generate(**call))
        choices = [describe(sample, len(sample.prompt_token_ids)) for sample in outputs]
    return {"choices": choices} if "n" in call else choices[0]


def describe(
    output: "RequestOutput | ChatChoice", prompt_tokens: int
) -> dict[str, Any]:
    """What one of a request's samples gave."""
    choice = asdict(output)
    choice.pop("prompt_token_ids", None)
    choice["prompt_tokens"] = prompt_tokens
    choice["completion_tokens"] = len(choice.pop("token_ids"))
    logprobs = choice.pop("logprobs")
    return choice if logprobs is None else choice | {"logprobs": logprobs}


@dataclass
class Totals:
    """How a run went; the lines of earlier runs count, too."""

    answered: int
    rejected: int  # requests whose result is an error object
    failed: int = 0  # requests without a result; the next run tries them again
    cause: BaseException | None = None  # of the last failure


def count(done: Mapping[Id, bool]) -> Totals:
    """The totals of what is done already."""
    rejected = sum(done.values())
    return Totals(answered=len(done) - rejected, rejected=rejected)


class Run:
    """Answers requests and appends what comes of them to the output."""

    def __init__(self, llm: "LLM", file: IO[bytes], totals: Totals, bar: tqdm) -> None:
        self.llm, self.file, self.totals, self.bar = llm, file, totals, bar
        self.full = asyncio.Lock()  # held by the one who waits for room in the queue
        self.tokens, self.start = 0, perf_counter()

    async def work(self, lines: Iterator[Line]) -> None:
        """Answer one line after the other; several share the iterator.

        A request that the LLM refuses gets an error object. One that fails gets
        nothing.
        """
        for line in lines:
            try:
                result = await self.answer(line)
            except REJECTIONS as error:
                text = f"line {line.number}: {str(error) or repr(error)}"
                result = {"error": text}
            except Exception as error:
                self.totals.failed += 1
                self.totals.cause = error
                self.bar.update()
                continue
            self.write(line, result)

    async def answer(self, line: Line) -> dict[str, Any]:
        """`answer`, as soon as the engine's queue has room."""
        with suppress(QueueFullError):  # with many samples each, fewer requests fit
            return await answer(self.llm, line)
        async with self.full:
            while True:
                with suppress(QueueFullError):
                    return await answer(self.llm, line)
                await asyncio.sleep(RETRY_SECONDS)

    def write(self, line: Line, result: dict[str, Any]) -> None:
        """Append a result in one write."""
        whole = {"id": line.id, "digest": line.digest, **result}
        self.file.write(json.dumps(whole).encode() + b"\n")
        self.file.flush()
        self.totals.rejected += "error" in result
        self.totals.answered += "error" not in result
        for choice in result.get("choices", [result]):
            self.tokens += choice.get("completion_tokens", 0)
        speed = self.tokens / (perf_counter() - self.start)
        self.bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self.bar.update()


def run(llm: "LLM", source: Path, file: IO[bytes], done: Mapping[Id, bool]) -> Totals:
    """Append a line to ``file`` for every request of ``source`` not in ``done``."""
    lines = [line for line in read_requests(source) if line.id not in done]
    totals, shared = count(done), iter(lines)

    async def work(bar: tqdm) -> None:
        job = Run(llm, file, totals, bar)
        await asyncio.gather(*(job.work(shared) for _ in range(IN_FLIGHT)))

    total = len(done) + len(lines)
    with tqdm(total=total, initial=len(done), unit="req", disable=None) as bar:
        asyncio.run(work(bar))
    return totals
