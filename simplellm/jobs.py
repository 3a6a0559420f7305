"""Answer a file of requests: JSON lines in, JSON lines out, resumable.

The output is the record of what is done. Each answer is one write at its end, so that
whatever stops the run leaves finished lines and at most one torn line, which the next
run removes. The next run then does what is missing, and nothing twice.
"""

import json
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:  # importing torch takes seconds; files are checked before
    from simplellm.engine import LLM
    from simplellm.generate import ChatOutput, NewToken, RequestOutput
    from simplellm.sampler import SamplingParams

IN_FLIGHT = 256  # requests that the engine has at a time

Id = str | int


@dataclass(frozen=True)
class Line:
    """One request of the input, or what is wrong with it."""

    number: int  # the first line is 1
    id: Id
    request: dict[str, Any]
    error: str | None = None


def read_line(number: int, raw: bytes) -> Line:
    """One line of the input. Without an "id", its id is "line-" and its number.

    Any other field that is null counts as absent.
    """
    unnamed = f"line-{number}"
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return Line(number, unnamed, {}, f"not JSON: {error}")
    if not isinstance(request, dict):
        kind = type(request).__name__
        return Line(number, unnamed, {}, f"the line is a {kind}; expected an object")
    name = request.pop("id", unnamed)
    if type(name) not in (str, int):
        wrong = f"id is {name!r}; expected a text or an integer"
        return Line(number, unnamed, {}, wrong)
    given = {field: value for field, value in request.items() if value is not None}
    return Line(number, name, given)


def read_requests(path: Path) -> Iterator[Line]:
    """The lines of the input that are not blank."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield read_line(number, raw)


def read_ids(path: Path) -> set[Id]:
    """The ids of the input. Raises ValueError if two lines have the same."""
    seen: dict[Id, int] = {}
    for line in read_requests(path):
        if line.id in seen:
            raise ValueError(
                f"{path}: lines {seen[line.id]} and {line.number} both have the id "
                f"{line.id!r}; expected each id once"
            )
        seen[line.id] = line.number
    return set(seen)


HEAD = b'{"id": '  # how every line of the output begins


def read_results(path: Path, ids: Set[Id]) -> tuple[dict[Id, bool], int]:
    """The ids that have a result and whether it is an error; where whole lines end.

    A torn last line does not count. Raises ValueError for a file that is not the
    output of an earlier run on requests with these ``ids``.
    """
    done: dict[Id, bool] = {}
    end = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n") and raw[: len(HEAD)] == HEAD[: len(raw)]:
                break
            try:
                result = json.loads(raw)
                name = result["id"]
                known = name in ids and name not in done
            except (ValueError, RecursionError, TypeError, KeyError):
                known = False
            if not known:
                raise ValueError(
                    f"{path}: line {number} is not the only result of a request of the "
                    "input; expected a new file or what an earlier run on the same "
                    "input wrote"
                )
            done[name] = "error" in result
            end += len(raw)
    return done, end


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
    path: Path, ids: Set[Id]
) -> Iterator[tuple[IO[bytes], dict[Id, bool]]]:
    """The output, open for more lines, and what `read_results` found in it."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file; expected one, since it is read again")
    with path.open("ab") as file:
        lock(file, path)
        done, end = read_results(path, ids)
        file.truncate(end)
        yield file, done


CHAT_FIELDS = ("messages", "tools", "reasoning_effort")


def prepare(llm: "LLM", line: Line) -> "tuple[Any, SamplingParams]":
    """The prompt of a request, and how it is to be continued. Raises ValueError."""
    if line.error:
        raise ValueError(line.error)
    request = line.request
    if ("messages" in request) == ("prompt" in request):
        raise ValueError(
            f"the fields are {', '.join(request) or 'none'}; expected either prompt or "
            "messages"
        )
    try:
        if "messages" in request:
            return prepare_chat(llm, request)
        if isinstance(request["prompt"], int):  # in a list it would be a token id
            raise TypeError("prompt is an integer; expected text or token ids")
        options = sampling_options(request, ["prompt"])
        return request["prompt"], replace(llm.default_params, **options)
    except Exception as error:  # JSON can go wrong in more ways than one can list
        raise ValueError(str(error) or repr(error)) from error


def sampling_options(request: dict[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """The fields of `SamplingParams` among a request's; ``others`` may be there."""
    from simplellm.sampler import SamplingParams

    sampling = [field.name for field in fields(SamplingParams)]
    for name in request:
        if name not in (*others, "n", *sampling):
            known = ", ".join(["id", *others, "n", *sampling])
            raise ValueError(f"unknown field {name!r}; expected {known}")
    options = {name: request[name] for name in sampling if name in request}
    bias = options.get("logit_bias")
    if isinstance(bias, dict):  # in JSON its keys can only be text
        options["logit_bias"] = {token_id(key): value for key, value in bias.items()}
    return options


def token_id(key: str) -> int:
    """The token that a key of logit_bias names."""
    try:
        return int(key)
    except ValueError:
        raise ValueError(
            f"logit_bias has token id {key!r}; expected an integer"
        ) from None


def prepare_chat(
    llm: "LLM", request: dict[str, Any]
) -> "tuple[list[int], SamplingParams]":
    checked = llm._chat_request(
        request["messages"],
        request.get("tools"),
        request.get("reasoning_effort", "medium"),
        None,
        sampling_options(request, CHAT_FIELDS),
    )
    # The engine looks for stop strings in all text; here they count in the final answer
    # only. So the turn goes on to its end, and `chat_output` cuts it.
    return checked.prompt, replace(checked.params, stop=())


def result_of(
    llm: "LLM", request: dict[str, Any], outputs: "Sequence[RequestOutput]"
) -> dict[str, Any]:
    """What the output file says of a finished request, its id aside."""
    choices = [choice_of(llm, request, output) for output in outputs]
    return {"choices": choices} if "n" in request else choices[0]


def choice_of(
    llm: "LLM", request: dict[str, Any], output: "RequestOutput"
) -> dict[str, Any]:
    """What one of a request's samples gave."""
    choice: dict[str, Any]
    if "messages" in request:
        turn = chat_output(llm, request, output)
        token_ids = turn.token_ids
        choice = {
            "content": turn.content,
            "reasoning": turn.reasoning,
            "tool_calls": [asdict(call) for call in turn.tool_calls],
            "finish_reason": turn.finish_reason,
        }
    else:
        token_ids = output.token_ids
        choice = {"text": output.text, "finish_reason": output.finish_reason}
    choice["prompt_tokens"] = len(output.prompt_token_ids)
    choice["completion_tokens"] = len(token_ids)
    if output.logprobs is not None:
        logprobs = output.logprobs[: len(token_ids)]
        choice["logprobs"] = [asdict(entry) for entry in logprobs]
    return choice


def chat_output(
    llm: "LLM", request: dict[str, Any], output: "RequestOutput"
) -> "ChatOutput":
    """The assistant's turn up to a stop string, as `LLM.chat` gives it."""
    from simplellm.generate import NewToken, Request
    from simplellm.sampler import SamplingParams

    replayed = Request(
        prompt=output.prompt_token_ids,
        params=SamplingParams(stop=request.get("stop", ())),
        stop_ids=frozenset(),
        max_tokens=len(output.token_ids),
    )

    def tokens() -> "Iterator[NewToken]":
        for token_id in output.token_ids:
            replayed.output.append(token_id)
            yield NewToken(replayed, token_id, None)
        replayed.finish_reason = output.finish_reason

    return llm._turn(replayed, tokens())


@dataclass
class Totals:
    """How a run went; the lines of earlier runs count, too."""

    answered: int
    rejected: int  # requests whose result is an error object
    failed: int = 0  # requests without a result; the next run tries them again
    cause: BaseException | None = None  # of the last failure


def count(done: dict[Id, bool]) -> Totals:
    """The totals of what is done already."""
    rejected = sum(done.values())
    return Totals(answered=len(done) - rejected, rejected=rejected)


def run(llm: "LLM", source: Path, file: IO[bytes], done: dict[Id, bool]) -> Totals:
    """Append a line to ``file`` for every request of ``source`` not in ``done``.

    A request that the engine refuses gets an error object. One that fails gets
    nothing. If the engine itself is lost while requests are left to submit, its
    exception ends the run.
    """
    from simplellm.scheduler import QueueFullError

    totals = count(done)
    pending: dict[Future[list[RequestOutput]], Line] = {}
    lines = [line for line in read_requests(source) if line.id not in done]
    tokens, start = 0, perf_counter()

    def write(line: Line, result: dict[str, Any]) -> None:
        file.write(json.dumps({"id": line.id, **result}).encode() + b"\n")
        file.flush()
        totals.rejected += "error" in result
        totals.answered += "error" not in result
        bar.update()

    def collect() -> None:
        nonlocal tokens
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            line = pending.pop(future)
            try:
                outputs = future.result()
            except Exception as error:
                totals.failed += 1
                totals.cause = error
                bar.update()
                continue
            write(line, result_of(llm, line.request, outputs))
            tokens += sum(len(output.token_ids) for output in outputs)
            bar.set_postfix_str(f"{tokens / (perf_counter() - start):,.0f} tokens/s")

    def submit(
        prompt: Any, params: "SamplingParams", n: int
    ) -> "Future[list[RequestOutput]]":
        while True:
            try:
                return llm.generate([prompt], params, n=n)
            except QueueFullError:  # with many samples each, fewer requests fit
                if not pending:
                    raise
                collect()

    with tqdm(
        total=len(done) + len(lines), initial=len(done), unit="req", disable=None
    ) as bar:
        try:
            for line in lines:
                while len(pending) >= IN_FLIGHT:
                    collect()
                try:
                    prompt, params = prepare(llm, line)
                    pending[submit(prompt, params, line.request.get("n", 1))] = line
                except (TypeError, ValueError) as error:
                    write(line, {"error": f"line {line.number}: {error}"})
            while pending:
                collect()
        finally:
            for future in pending:
                future.cancel()
    return totals
