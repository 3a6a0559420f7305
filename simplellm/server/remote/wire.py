"""What crosses between the server's process and the engine's: frames of JSON.

A frame is the length of its data in four bytes, and the data: nothing in it is code, so
reading it can do no harm. The server sends lists, the name of what is to be done with
its arguments; the engine sends dicts, of all that is new. JSON writes numbers so that
they come back as they were, but for infinity, for which it has null. Times are those of
time.monotonic(), which all processes of a machine share.
"""

import math
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import orjson

from simplellm.base.grammar import Grammar, GrammarError
from simplellm.base.request import (
    EngineError,
    Event,
    QueueFullError,
    Request,
    TokenLogprobs,
)
from simplellm.base.request_spec import RequestSpec
from simplellm.base.sampling_params import SamplingParams
from simplellm.engine.engine_client import RequestGrammarError

LENGTH = struct.Struct("!I")
READ_BYTES = 2**18  # bytes that are read at a time
# Fields of a request as they cross, and parameters that only the server reads.
SENT = "tokens max_tokens bad_sequences priority deadline arrival_time".split()
UNSENT = ("stop", "structured_outputs")
# Errors that stay what they are, by their names and their bases' names; PyTorch's own
# becomes Python's, since the server lacks it.
KEPT = (
    *(RequestGrammarError, EngineError, QueueFullError, GrammarError),
    *(TypeError, ValueError, MemoryError),
)
ERROR_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in KEPT}
ERROR_KINDS["OutOfMemoryError"] = MemoryError


def as_frame(content: Any) -> bytes:
    """``content`` as it crosses: plain data, dataclasses, events and errors."""
    data = orjson.dumps(content, default=as_plain, option=orjson.OPT_NON_STR_KEYS)
    return LENGTH.pack(len(data)) + data


def as_plain(value: Any) -> Any:
    """What JSON has no form for, as plain data."""
    if isinstance(value, Event | frozenset):
        return list(value)
    assert isinstance(value, Exception), value
    kinds = [kind.__name__ for kind in type(value).__mro__]
    names = [name for name in kinds if name in ERROR_KINDS]
    return (names[0], str(value)) if names else ("EngineError", repr(value))


def frames(link: socket.socket) -> Iterator[Any]:
    """What the other process sends, until it closes its end or is gone."""
    with suppress(OSError), link.makefile("rb", buffering=READ_BYTES) as file:
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            if len(data := file.read(length)) == length:
                yield orjson.loads(data)


def as_error(data: Sequence[str]) -> Exception:
    """An error as `as_plain` wrote it."""
    name, message = data
    return ERROR_KINDS[name](message)


# Requests


def request_as_plain(first: Request) -> dict[str, Any]:
    """A prompt's samples: what they share, once, and the index and id of each."""
    params = vars(first.params).items()
    return {
        **{name: getattr(first, name) for name in SENT},
        "params": {name: value for name, value in params if name not in UNSENT},
        "stop_ids": first.stop_ids,
        "grammar": None if first.grammar is None else first.grammar.text,
        "samples": [(one.index, one.request_id) for one in (first, *first.siblings)],
    }


def request_of(data: dict[str, Any], compile: Callable[[str], Grammar]) -> Request:
    """The request that `request_as_plain` wrote, with its siblings."""
    params, samples = data.pop("params"), data.pop("samples")
    grammar, deadline = data.pop("grammar"), data.pop("deadline")
    if (bias := params["logit_bias"]) is not None:
        biases = ((int(token), logprob_of(added)) for token, added in bias.items())
        params["logit_bias"] = dict(biases)
    spec = RequestSpec(
        **data | {"stop_ids": frozenset(data["stop_ids"])},
        params=SamplingParams(**params),
        grammar=None if grammar is None else compile(grammar),
        deadline=math.inf if deadline is None else deadline,
    )
    first, *others = (spec.sample(index) for index, _ in samples)
    for request, (_, request_id) in zip([first, *others], samples, strict=True):
        request.request_id = request_id
    first.siblings = others
    return first


# Events


def join_events(first: Event, second: Event) -> Event:
    """Two consecutive events of one request, joined."""
    logprobs = second.logprobs
    if first.logprobs is not None:
        logprobs = [*first.logprobs, *(logprobs or ())]
    scores = first.prompt_logprobs
    return second._replace(
        tokens=[*first.tokens, *second.tokens],
        logprobs=logprobs,
        prompt_logprobs=second.prompt_logprobs if scores is None else scores,
    )


def event_of(data: Sequence[Any]) -> Event:
    """An event as `as_plain` wrote it."""
    event = Event(*data)
    if event.error is not None:
        event = event._replace(error=as_error(data[Event._fields.index("error")]))
    if event.logprobs is None and event.prompt_logprobs is None:
        return event
    scores, ours = event.prompt_logprobs, event.logprobs
    return event._replace(
        logprobs=None if ours is None else [*map(entry_of, ours)],
        prompt_logprobs=None if scores is None else [*map(entry_of, scores)],
    )


def entry_of(data: Any) -> Any:
    """Log-probabilities at one step; None at a prompt's first token."""
    if data is None:
        return None
    top = tuple((token, logprob_of(value)) for token, value in data["top"])
    return TokenLogprobs(
        data["token_id"], logprob_of(data["logprob"]), top, data["rank"]
    )


def logprob_of(number: float | None) -> float:
    """A number that may be minus infinity, which JSON has no word for."""
    return -math.inf if number is None else number
