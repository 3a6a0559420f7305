"""Appendix A: serving."""

import asyncio
import json
import logging
import random
import selectors
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

from course.checks.ch01 import JSON, embedded
from simplellm.api.llm import LLM
from simplellm.base.request import Event, Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.server.openai.deltas import Turn, message_of_choice
from simplellm.text.harmony import Delta
from simplellm.text.harmony.message import is_call

PATIENCE = 20.0  # seconds


def run(coroutine):
    """Run it in an event loop of its own: a notebook has one in this thread."""
    found: list[Any] = []

    async def limited():
        return await asyncio.wait_for(coroutine, PATIENCE)

    def call():
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # not on the page
        try:
            found.append(("value", loop.run_until_complete(limited())))
        except BaseException as error:
            found.append(("error", error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    assert found, "your coroutine blocks its loop: nobody else in the loop can run"
    kind, value = found[0]
    if kind == "error":
        if isinstance(value, TimeoutError):
            raise AssertionError(f"it isn't done after {PATIENCE:.0f} seconds")
        raise value
    return value


class Echo:
    """A reply whose parts are an event's tokens; at token 0 it ends by itself."""

    def __init__(self):
        self.finish_reason = None

    def push(self, event):
        if 0 in event.tokens:
            self.finish_reason = "stop"
        else:
            self.finish_reason = event.finish_reason
        return list(event.tokens)


class Line:
    """In place of an `OutputProcessor`: its thread brings events to the reader."""

    def __init__(self, events):
        self.events = list(events)
        self.readers: list[Any] = []
        self.dropped: list[Any] = []
        self.read = threading.Event()  # the first event's parts have come out
        self.early = False  # and did so before the second event

    def submit(self, families):
        nested = isinstance(families, list | tuple) and len(families) == 1
        nested = nested and isinstance(families[0], list | tuple)
        assert nested and len(families[0]) == 1, (
            "`submit` takes a list of prompts, each a list of its samples' readers: "
            "[[reader]]"
        )
        assert not self.readers, "the request was submitted twice"
        self.readers += families[0]
        threading.Thread(target=self._bring, daemon=True).start()

    def _bring(self):
        for number, event in enumerate(self.events):
            if number == 1:
                self.early = self.read.wait(1)
            time.sleep(0.02)
            if self.readers[0].push(event):
                break

    def drop(self, readers):
        self.dropped += readers


class Wakeups(selectors.SelectSelector):
    """What an event loop sleeps in, and how often it did."""

    count = 0

    def select(self, timeout=None):
        self.count += 1
        return super().select(timeout)


def check_read_async(read_async):
    """An event loop, and a thread beside it that brings the events."""
    found: list[BaseException] = []

    def run():
        wakeups = Wakeups()
        loop = asyncio.SelectorEventLoop(wakeups)
        loop.set_debug(True)  # so it minds what is called from another thread
        loop.set_exception_handler(lambda *_: None)  # not on the page, either
        try:
            loop.run_until_complete(ways_out(read_async, wakeups))
        except BaseException as error:
            found.append(error)
        loop.close()

    try:
        logging.disable()  # what cannot be delivered may be logged, but not on the page
        thread = threading.Thread(target=run, daemon=True)
        thread.start()  # a notebook has an event loop in this one
        thread.join(30)
    finally:
        logging.disable(logging.NOTSET)
    assert not thread.is_alive(), (
        "your generator blocks its event loop for good; nobody else in it can run"
    )
    if found:
        raise found[0]


async def ways_out(read_async, wakeups):
    helpers = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(helpers)
    parts, line, beats = await read_all(read_async, "all")
    assert line.readers, "`output_processor.submit` was never called"
    assert parts, (
        "events came, and your generator never woke up: an asyncio.Queue belongs to "
        "its loop's thread, and from another one only `loop.call_soon_threadsafe` is "
        "heard"
    )
    assert parts == [4, 5, 6], (
        "the parts are 4, 5 and 6; END is none of them, and ends your generator; you "
        f"yield {parts}"
    )
    assert line.early, "parts are yielded as they come, not all at the end"
    assert beats > 2, (
        "while your coroutine waited, nobody else in the loop could run: `await` the "
        "parts; `get` of a queue.SimpleQueue blocks the thread"
    )
    error = RuntimeError("the step failed")
    try:
        parts, *_ = await read_all(read_async, "error", error)
    except RuntimeError as raised:
        assert raised is error, f"the part's own exception, not {raised!r}"
    else:
        raise AssertionError(
            f"a part that is an exception is to be raised; you went on: {parts}"
        )
    parts, *_ = await read_all(read_async, "many")
    assert parts == [*range(1, 52)], (
        "51 parts came faster than they were read, and you yield "
        f"{len(parts)}: a queue with a bound drops what `call_soon_threadsafe` can't "
        "put into it, since nobody can wait there; leave out maxsize"
    )
    await sleeps_while_nothing_comes(read_async, wakeups)
    for way in ("closed", "cancelled"):
        _, line, _ = await read_all(read_async, way)
        free = helpers.submit(bool)
        try:
            free.result(1)
        except TimeoutError:
            # Let go of the thread that waits, or this process never ends.
            line.readers[0].push(Event(3, [9], finish_reason="length"))
            raise AssertionError(
                f"the reader left ({way}), and a thread still waits for its parts, for "
                "good: `asyncio.to_thread` can't be cancelled. An asyncio.Queue waits "
                "without a thread; fill it through `loop.call_soon_threadsafe`"
            ) from None
        assert line.dropped and line.dropped[0] is line.readers[0], (
            f"the reader left after the first part ({way}), and the request goes on "
            "with nobody to read it: `drop` it, whichever way your generator is left"
        )


async def sleeps_while_nothing_comes(read_async, wakeups):
    """Whoever polls keeps its loop busy."""
    line = Line([Event(3, [4])])
    source = read_async(line, Request([1], 9, request_id=3), Echo())
    await anext(source)
    waiting = asyncio.ensure_future(anext(source))
    await asyncio.sleep(0.1)
    before = wakeups.count
    await asyncio.sleep(0.5)  # which itself wakes the loop
    count = wakeups.count - before
    line.readers[0].push(Event(3, (), finish_reason="length"))
    with suppress(StopAsyncIteration):
        await waiting
    assert count < 9, (
        f"nothing came for half a second, and the loop woke up {count} times: your "
        "generator looks again and again whether a part is there. `await` the `get` of "
        "an asyncio.Queue: it sleeps until something is put in"
    )


async def read_all(read_async, way, error=None):
    """The parts that one reader sees, what it called, and beats of the loop."""
    last = Event(3, [6], finish_reason="length")
    if error is not None:
        last = Event(3, (), finish_reason="error", error=error)
    leaves = way in ("closed", "cancelled")
    many = [Event(3, [*range(1, 51)]), Event(3, [51], finish_reason="length")]
    events = [Event(3, [4])] if leaves else [Event(3, [4, 5]), last]
    line = Line(many if way == "many" else events)
    source = read_async(line, Request([1], 9, request_id=3), Echo())
    if asyncio.iscoroutine(source):
        await source  # a stub raises here
        raise AssertionError("an asynchronous generator has `yield`; yours returns")
    parts: list[Any] = []
    beats = 0

    async def read():
        async for part in source:
            parts.append(part)
            if len(parts) == 2:
                line.read.set()
            if way == "closed":
                await source.aclose()
                return

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.002)
            beats += 1

    beating = asyncio.create_task(beat())
    reading = asyncio.create_task(read())
    done, _ = await asyncio.wait([reading], timeout=0.3 if way == "cancelled" else 4)
    beating.cancel()
    reading.cancel()
    # A task that nobody woke from the other thread does not even end now.
    await asyncio.wait([beating, reading], timeout=1)
    if done and not reading.cancelled() and (raised := reading.exception()):
        raise raised
    return parts, line, beats


STREAM = (
    'data: {"é": "😀\u2028"}\n\n'
    ": a comment\n\n"
    "event: ping\r\ndata:  three spaces \r\n\r\n"
    "data: one\ndata: two\n\n"
    "data\nid: 7\nretry: 10\n:\ndata:three: four\n\n"
    "event: without data\n\n"
    "data: after it\n\n"
)
EVENTS = [
    ("message", '{"é": "😀\u2028"}'),
    ("ping", " three spaces "),
    ("message", "one\ntwo"),
    ("message", "\nthree: four"),
    ("message", "after it"),
]
WHY = [
    "an event without a name is a message; its text is what follows 'data: ', and only "
    "\\n and \\r\\n end a line, U+2028 doesn't",
    "lines may end with \\r\\n, and one space after the colon doesn't count, only "
    "one; those before a line's end do",
    "several data lines are one text, with \\n between them",
    "other fields and comments are passed over; a line 'data' is an empty one",
    "an event without data isn't one, and its name is not the next one's",
]


def check_read_events(read_events):
    """A stream with everything in it, cut at every place and byte by byte."""
    raw = STREAM.encode()

    def read(*pieces):
        found = []
        for pair in read_events(iter(pieces)):
            found.append(tuple(pair))
            assert len(found) <= len(EVENTS), (
                f"there are {len(EVENTS)} events, and no comment is one; you also find "
                f"{found[-1]!r}"
            )
        return found

    found = read(raw)
    for expected, given, why in zip(EVENTS, found, WHY, strict=False):
        assert given == expected, f"{given!r} should be {expected!r}: {why}"
    assert len(found) == len(EVENTS), f"{len(found)} of {len(EVENTS)} events are found"
    for cut in range(len(raw)):
        try:
            found = read(raw[:cut], raw[cut:])
        except UnicodeDecodeError as error:
            raise AssertionError(
                f"cut inside a character, you raise {error}: decode whole lines"
            ) from None
        near = raw[max(0, cut - 4) : cut], raw[cut : cut + 4]
        assert not any("\ufffd" in text for _, text in found), (
            f"cut inside a character, between {near[0]!r} and {near[1]!r}, it's lost: "
            "decode whole lines"
        )
        assert found == EVENTS, (
            f"cut between {near[0]!r} and {near[1]!r}, you find {found}"
        )
    found = read(*(raw[i : i + 1] for i in range(len(raw))))
    assert found == EVENTS, f"a byte at a time, cut everywhere, you find {found}"
    assert read(raw, b"data: half of") == EVENTS, "an event that breaks off is none"
    assert read(raw, b"data: half\n") == EVENTS, "an event that breaks off is none"

    taken = 0

    def line():
        nonlocal taken
        for piece in (b"data: 1\r\n", b"\r\n", b"data: 2\n\ndata: 3\n", b"\n"):
            taken += 1
            yield piece

    seen = [(text, taken) for _, text in read_events(line())]
    assert seen == [("1", 2), ("2", 3), ("3", 4)], (
        "each event comes as soon as its last byte is there; (event, chunks taken): "
        f"{seen}"
    )


def part(text, channel="final", recipient=None, call=None, **more):
    return Delta(channel, recipient, text, call, **more)


ADD, LIST = "functions.add", "functions.list all"
PARTS = [
    part("7+", "analysis"),
    part("5", "analysis"),
    part("", "analysis"),
    part("Let me see.", "commentary"),
    part("", "commentary", ADD, 0),
    part('{"a"', "commentary", ADD, 0),
    part(": 7}", "commentary", ADD, 0),
    part("", "commentary", ADD, 0),
    part("", "commentary", LIST, 1),
    part("{}", "commentary", ADD, 2),
    part("for a tool", "commentary", "browser"),
    part("13"),
    part("2"),
]


def check_Turn_push(candidate):
    """Adds the deltas up as OpenAI's clients do."""
    kind = candidate
    if not issubclass(candidate, Turn) and "__init__" not in vars(candidate):
        kind = type(candidate.__name__, (candidate, Turn), {})
    turn, said = kind(), {"reasoning": "", "content": ""}
    calls: list[dict[str, Any]] = []
    for given in PARTS:
        delta = turn.push(given)
        assert isinstance(delta, dict), f"a delta is a dict, not {delta!r}"
        if not given.text and given.call is None:
            assert delta == {}, f"a part without text adds nothing: {{}}, not {delta}"
        if not given.text and given.call is not None and given.call < len(calls):
            assert delta == {}, (
                f"call {given.call} has begun, and a part of it without text adds "
                f"nothing: {{}}, not {delta}"
            )
        for name in said:
            said[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            assert call["index"] == given.call, (
                f"the index is the call's number, {given.call}, so that clients know "
                f"whose arguments these are; yours is {call['index']}"
            )
            if "id" in call:
                assert call["index"] <= len(calls), (
                    f"call {len(calls)}, which has no arguments at all, never begins; "
                    f"call {call['index']} does"
                )
                assert call["index"] == len(calls), (
                    f"id and name come once, where call {call['index']} begins: {call}"
                )
                assert call["type"] == "function", f"its type is function: {call}"
                calls.append({"id": call["id"], "name": call["function"]["name"]})
                calls[-1]["arguments"] = ""
            assert call["index"] < len(calls), f"no id where the call begins: {call}"
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert len(calls) == 3, f"there are 3 calls; you begin {len(calls)}"
    assert len({call["id"] for call in calls}) == 3, "each call has an id of its own"
    assert [call["name"] for call in calls] == ["add", "list_all", "add"], (
        f"the names are add, list_all and add, without functions. in front: {calls}"
    )
    found = [call["arguments"] for call in calls]
    assert found == ['{"a": 7}', "", "{}"], f"arguments add up to {found}"
    assert said["reasoning"] == "7+5for a tool", (
        "what is in the analysis channel or for a recipient is reasoning; yours adds "
        f"up to {said['reasoning']!r}"
    )
    assert said["content"] == "Let me see.132", (
        f"the content's deltas add up to 'Let me see.132', not {said['content']!r}"
    )
    late = kind()
    first, more = (
        late.push(part(text, "commentary", ADD, 2)) for text in ('{"a"', ": 7}")
    )
    begins = ["id" in delta["tool_calls"][0] for delta in (first, more)]
    assert begins == [True, False], (
        "the first part that comes is one of call 2, which begins it, and a second "
        "part of call 2 doesn't begin it again: expected an id in the first alone, got "
        f"{first} and {more}. Calls up to 2 have begun then, not one more than before"
    )
    assert kind().push(part("x", "commentary", ADD, 0)) != turn.push(
        part("x", "commentary", ADD, 0)
    ), "a new turn has begun no calls; keep the state in self"


def check_Mailbox_put(candidate):
    """Everything comes, in order, in as few parts as can be; the reader wakes."""

    async def through(parts):
        box = candidate()
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.put(parts[0])
        done, _ = await asyncio.wait([reader], timeout=2)
        assert done, "a reader was waiting, and nobody woke it: set `arrived`"
        first = reader.result()
        for one in parts[1:]:
            box.put(one)
        return first, await box.take() if parts[1:] else []

    async def judge():
        scored = [
            part(text, token_ids=(n,), logprobs=(f"logprob {n}",))
            for n, text in enumerate("abc")
        ]
        first, rest = await through([scored[0], *scored[1:]])
        assert first == scored[:1], f"one part comes as it is: {first}"
        assert len(rest) == 1, f"two parts of one message become one: {rest}"
        merged = rest[0]
        assert merged.text == "bc", f"texts b and c become 'bc', not {merged.text!r}"
        assert tuple(merged.token_ids) == (1, 2), (
            f"the token_ids are those of both, 1 and 2: {merged.token_ids}"
        )
        assert merged.logprobs == ("logprob 1", "logprob 2"), (
            f"the logprobs are those of both: {merged.logprobs}"
        )
        assert scored[1].text == "b", "a part that was put is not changed"
        _, rest = await through([part("x"), part("a"), part("b")])
        assert rest[0].logprobs is None, "no logprobs stay None"

        mixed = [
            part("."),
            part("a", "analysis"),
            part("b", "analysis"),
            part("c", "analysis", "browser"),
            part("{", "commentary", ADD, 0),
            part("}", "commentary", ADD, 0),
            part("[", "commentary", ADD, 1),
            part("]", "commentary", ADD, 1),
            part("d", "analysis"),
            part("e"),
        ]
        _, rest = await through(mixed)
        texts = [one.text for one in rest]
        assert "".join(texts) == "abc{}[]de", (
            f"text was lost, or the order: {texts}, expected ab, c, {{}}, [], d, e"
        )
        assert texts == ["ab", "c", "{}", "[]", "d", "e"], (
            "only neighbors with the same channel, recipient and call become one; "
            f"{texts}"
        )
        assert [one.call for one in rest] == [None, None, 0, 1, None, None], (
            "each part keeps the number of its call"
        )

        box = candidate()
        for number in range(5000):
            box.put(part(f"{number},"))
        rest = await box.take()
        text = "".join(one.text for one in rest)
        assert text == "".join(f"{number}," for number in range(5000)), (
            "5,000 parts waited, and some of their text was lost"
        )
        assert len(rest) < 50, f"5,000 parts that wait are still {len(rest)}: it grows"

    run(judge())


@cache
def engine():
    return LLM(device="cpu")


BODY = {
    "messages": [{"role": "user", "content": "What is 47 + 85?"}],
    "temperature": 0,
}
ENDLESS = BODY | {"max_tokens": 3000, "ignore_eos": True}


class Client:
    """Asks an app, and leaves after some pieces, or stops reading before it leaves."""

    def __init__(self, body, leaves_after=None, stops_reading=False, llm=None):
        self.llm = llm or engine()
        self.messages: list[dict[str, Any]] = []
        self.leaves_after, self.stops_reading = leaves_after, stops_reading
        self.running = 0  # requests while the first piece with text came
        raw = json.dumps(body).encode()
        self.incoming = [  # in two messages, as a server may bring it
            {"type": "http.request", "body": raw[:20], "more_body": True},
            {"type": "http.request", "body": raw[20:], "more_body": False},
        ]
        self.left = asyncio.Event()

    @property
    def pieces(self):
        return [m for m in self.messages if m["type"] == "http.response.body"]

    async def receive(self):
        if self.incoming:
            return self.incoming.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.messages.append(message)
        pieces = self.pieces
        if len(pieces) == 1 and message is pieces[0]:
            self.running = engine().stats().running
        if self.leaves_after is not None and len(pieces) >= self.leaves_after:
            asyncio.get_running_loop().call_later(0.05, self.left.set)
            if self.stops_reading:
                await asyncio.Event().wait()  # its buffers are full for good

    async def ask(self, serve_chat):
        scope = {"type": "http", "path": "/v1/chat/completions", "method": "POST"}
        await serve_chat(self.llm, scope, self.receive, self.send)


async def gone(serve_chat, **leaving):
    """Whether the app ends soon after its client has left, and the request with it."""
    client, before = Client(ENDLESS, leaves_after=3, **leaving), engine().stats()
    asking = asyncio.create_task(client.ask(serve_chat))
    waiting = asyncio.create_task(client.left.wait())
    first = asyncio.FIRST_COMPLETED
    await asyncio.wait([asking, waiting], timeout=PATIENCE / 2, return_when=first)
    await asyncio.wait([asking], timeout=2)
    waiting.cancel()
    ended = asking.done()
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    limit = time.monotonic() + 3
    while engine().stats().running and time.monotonic() < limit:
        await asyncio.sleep(0.01)
    after = engine().stats()
    aborted = after.finished.get("abort", 0) - before.finished.get("abort", 0)
    return ended and aborted == 1 and not after.running and after.cache_usage == 0


async def answered(serve_chat):
    """One client that stays: its messages, and beats of the loop meanwhile."""
    client, beats = Client(BODY, llm=ChangedLLM()), 0
    before = asyncio.all_tasks()

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    beating = asyncio.create_task(beat())
    try:
        await client.ask(serve_chat)
    finally:
        beating.cancel()
    await asyncio.sleep(0.05)
    return client, beats, asyncio.all_tasks() - before - {beating}


class Broken(Exception):
    """The engine has failed in the middle of an answer."""


class Changed:
    """Replies with a part without text after each, that may end with an error."""

    def __init__(self, replies, breaks_after=None):
        self.replies, self.left = replies, breaks_after
        self.empty: list[Any] = []

    def __getattr__(self, name):
        return getattr(self.replies, name)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.empty:
            return self.empty.pop()
        if self.left == 0:
            raise Broken
        self.left = self.left and self.left - 1
        number, part = await anext(self.replies)
        self.empty.append((number, Delta(part.channel, part.recipient, "", part.call)))
        return number, part

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.replies.aclose()


class ChangedLLM:
    """The engine, whose replies are `Changed`."""

    def __init__(self, breaks_after=None):
        self.breaks_after = breaks_after

    def __getattr__(self, name):
        return getattr(engine(), name)

    def replies(self, *args, **options):
        return Changed(engine().replies(*args, **options), self.breaks_after)


async def raises(serve_chat):
    """Whether the server hears of an engine that fails in the middle of an answer."""
    client = Client(BODY, llm=ChangedLLM(breaks_after=2))
    try:
        await client.ask(serve_chat)
    except Broken:
        return True
    except BaseExceptionGroup as group:
        return group.subgroup(Broken) is not None
    return False


def said(pieces):
    """Content and finish reasons of a stream's events."""
    stream = b"".join(piece.get("body", b"") for piece in pieces).decode()
    assert stream.endswith("data: [DONE]\n\n"), (
        f"the stream ends with DONE; yours with {stream[-40:]!r}"
    )
    events = stream.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    choices = [json.loads(text.removeprefix("data: "))["choices"][0] for text in events]
    deltas = [choice["delta"] for choice in choices]
    content = "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(delta.get("reasoning", "") for delta in deltas)
    assert all(deltas[:-1]), (
        "an event has an empty delta and isn't the last one: a part that adds nothing "
        "makes no event"
    )
    return content, thought, [choice["finish_reason"] for choice in choices]


def check_serve_chat(serve_chat):
    """A real engine, and clients that stay, that leave, and that stop reading."""
    try:
        client, beats, tasks = run(answered(serve_chat))
    finally:
        cancel_all()
    assert client.messages, "nothing was sent"
    start, *rest = client.messages
    assert start["type"] == "http.response.start" and start["status"] == 200, (
        f"the first message is the start, with status 200; yours is {start}"
    )
    headers = {bytes(k).lower(): bytes(v) for k, v in start["headers"]}
    assert headers.get(b"content-type", b"").startswith(b"text/event-stream"), (
        f"a stream's content-type is text/event-stream: {headers}"
    )
    assert all(message["type"] == "http.response.body" for message in rest), (
        "after the start come pieces of the body, and nothing else"
    )
    more = [bool(message.get("more_body")) for message in rest]
    assert more and not more[-1] and all(more[:-1]), (
        "more_body is false in the last message and in no other"
    )
    content, thought, reasons = said(rest)
    assert not tasks, (
        "the client has its whole answer, and a task of yours still waits, for a "
        "disconnect: whichever is done, end the other one"
    )
    choice = engine().chat(**BODY).choices[0]
    whole = message_of_choice(choice)
    assert (content, thought) == (whole["content"], whole["reasoning"]), (
        f"the deltas add up to {(content, thought)}, and the whole answer is "
        f"{(whole['content'], whole['reasoning'])}"
    )
    assert reasons[-1] == choice.finish_reason and not any(reasons[:-1]), (
        "the last event has the finish reason, and only that one"
    )
    assert len(rest) > 10 and client.running, (
        f"the answer went out in {len(rest)} pieces, the first one when the request "
        f"{'still ran' if client.running else 'was over'}; send each part as it comes"
    )
    assert beats > 20, (
        "while you answered, nobody else in the loop could run: await the parts of "
        "`llm.replies`"
    )
    try:
        assert run(gone(serve_chat)), (
            "a client left after three pieces, and its request went on with nobody to "
            "read it: wait for http.disconnect, too, and close the replies"
        )
        assert run(gone(serve_chat, stops_reading=True)), (
            "a client stopped reading, so that send waits, and then left: nobody "
            "noticed. One task writes, and another one waits for the disconnect"
        )
        assert run(raises(serve_chat)), (
            "the replies raised an error in the middle of an answer, and serve_chat "
            "ended as if all were well: raise what went wrong in the task that writes"
        )
    finally:
        cancel_all()


def cancel_all():
    """End what a wrong answer has left running: the next check wants the engine."""
    output_processor = engine()._output_processor
    output_processor.drop(list(output_processor.readers.values()))


def check_A_1(first_done):
    """One answer is short and two are long; the engine has to hear of the end."""
    question = "What is 47 + 85?"

    def params(most):
        return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)

    async def run(llm):
        asked = [params(300), params(5), params(300)]
        found = await asyncio.wait_for(first_done(llm, [question] * 3, asked), 40)
        # Counted while the loop lives on, as a notebook's does: its end would cancel
        # whatever is left.
        for _ in range(100):
            if not llm.stats().running:
                break
            await asyncio.sleep(0.02)
        return *found, llm.stats()

    with LLM(device="cpu") as llm:
        # In a thread of its own: a notebook has an event loop in this one.
        with ThreadPoolExecutor(1) as pool:
            index, text, stats = pool.submit(asyncio.run, run(llm)).result()
        expected = llm.generate(question, params(5)).result()[0].text
    assert index == 1, (
        "prompt 1 asks for 5 tokens and the others for 300, so prompt 1 is done first; "
        f"you say prompt {index}"
    )
    assert text == expected, f"the text is {expected!r}, all of its parts; {text!r}"
    aborted = stats.finished.get("abort", 0)
    assert aborted == 2, (
        "two requests were nobody's anymore and have to be aborted: cancel their "
        f"tasks; the engine aborted {aborted}"
    )
    assert stats.generated_tokens < 300, "the others went on with nobody to read them"


def check_A_2(with_pings):
    """A source with a long silence, and one that is busy."""

    async def source(*delays):
        for number, delay in enumerate(delays):
            await asyncio.sleep(delay)
            yield f"data: {number}\n\n".encode()

    async def read(seconds, *delays):
        found, start = [], time.monotonic()
        async for piece in with_pings(source(*delays), seconds):
            found.append((time.monotonic() - start, bytes(piece)))
            assert len(found) < 200, "it never ends"
        return found

    async def judge():
        found = await read(0.1, 0.01, 0.55, 0.01)
        pieces = [piece for _, piece in found if piece.startswith(b"data")]
        assert pieces == [f"data: {n}\n\n".encode() for n in range(3)], (
            f"three pieces were sent, and these arrived: {pieces}; some are lost"
        )
        others = [piece for _, piece in found if not piece.startswith(b"data")]
        assert all(piece.startswith(b":") for piece in others), (
            f"a sign of life is a comment, which begins with a colon: {others}"
        )
        assert set(others) <= {b": ping\n\n"}, f"it is b': ping\\n\\n': {others}"
        assert 3 <= len(others) <= 6, (
            f"0.55 seconds of silence, a ping every 0.1: 5, and you sent {len(others)}"
        )
        late = next(when for when, piece in found if piece == b"data: 1\n\n")
        assert late < 0.75, f"piece 1 came at 0.56 s and went out at {late:.2f}, late"
        found = await read(0.25, *[0.02] * 30)
        pings = sum(piece.startswith(b":") for _, piece in found)
        assert pings == 0, (
            f"pieces came all the time, and still {pings} pings went out: count from "
            "the last piece; only silence needs them"
        )

    run(judge())


def check_A_3(kind):
    """Text and order are kept, in few parts, at a steady price."""

    async def judge():
        def seconds(waiting):
            best = float("inf")
            for _ in range(3):
                box, one = kind(), part("word")
                for _ in range(waiting // 4000):
                    box.put(part("word" * 1000))
                start = time.thread_time()
                for _ in range(200):
                    box.put(one)
                best = min(best, time.thread_time() - start)
            return best

        box = kind()
        parts = [
            part(f"{n:9},", "final" if n % 4000 else "analysis") for n in range(9000)
        ]
        for one in parts:
            box.put(one)
        rest = await box.take()
        assert "".join(one.text for one in rest) == "".join(
            one.text for one in parts
        ), "9,000 parts waited, and some of their text was lost, or the order"
        assert len(rest) <= 90 + 20, (
            f"90,000 characters may wait in 90 parts and a few more, not in {len(rest)}"
        )
        channels = [one.channel for one in rest]
        assert channels.count("analysis") == 3, "parts of other messages stay apart"
        few, many = seconds(0), seconds(2_000_000)
        assert many < 8 * few, (
            f"while two million characters wait, a part takes {many / few:.0f} times "
            "as long as at the beginning: each join copies all that waits"
        )

    run(judge())


def check_A_4(HarmonyParser):
    """Replies with what they hold, then the stream, then random ids."""
    tokenizer = embedded()
    first, last = "<|channel|>analysis<|message|>7 + 5", "<|channel|>final<|message|>12"
    call = f"<|channel|>commentary to=functions.f {JSON}<|message|>"
    reasoned, answered = ("analysis", None, "7 + 5"), ("final", None, "12")
    called = ("commentary", "functions.f", "{}")
    cases = [
        (f"{last}<|return|>", [answered], "a header, a content, an end"),
        (last, [answered], "the model stopped without an end, and finish() is called"),
        (
            f"{call}{{}}<|call|>assistant{last}<|return|>",
            [called, answered],
            "<|call|> ends a message",
        ),
        (
            f"{last}<|endoftext|>assistant{last}<|end|>",
            [answered, answered],
            "<|endoftext|> ends a message",
        ),
        (
            f"{first}<|end|><|start|>assistant{last}<|return|>",
            [reasoned, answered],
            "two messages, each with an end",
        ),
        (
            f"{first}{last}<|return|>",
            [reasoned, answered],
            "without an <|end|>, <|channel|> in a content begins the next message",
        ),
        (
            f"{first}<|start|>assistant{last}<|return|>",
            [reasoned, answered],
            "without an <|end|>, <|start|> in a content begins the next message",
        ),
        ("<|channel|>final 12<|return|>", [answered], "the header has no <|message|>"),
        (
            f"{first}<|channel|>final 12<|return|>",
            [reasoned, answered],
            "a marker's part comes after the header's first one, empty or not; alone "
            "it would pass for a header without markers",
        ),
        (
            "<|channel|>final of course yes<|message|>12<|return|>",
            [answered],
            "words of a header that mean nothing are passed over, and are no content",
        ),
        ("12<|return|>", [(None, None, "12")], "there is no header at all"),
        (
            f"12<|start|>assistant{last}<|return|>",
            [(None, None, "12"), answered],
            "<|start|> ends a header too, and what it held as text is not lost",
        ),
        (
            f"{last}<|message|>3<|return|>",
            [("final", None, "123")],
            "<|message|> in a content is out of place and passed over",
        ),
        (
            f"{last}<|constrain|>3<|return|>",
            [("final", None, "123")],
            "<|constrain|> in a content is out of place and passed over",
        ),
        (
            f"{call}{{<|message|>}}<|call|>",
            [called],
            "<|message|> in a call's content is passed over, too",
        ),
        ("<|end|><|end|>", [], "an end in an empty header ends nothing"),
    ]

    def numbered(ids, parser, deltas):
        """Every delta of a call has its number, and calls are counted once."""
        calls = [m.content for m in parser.messages if is_call(m)]
        assert parser.num_calls == len(calls), (
            f"{tokenizer.decode(ids)!r} has {len(calls)} calls and you count "
            f"{parser.num_calls}: begin each message once"
        )
        told = [""] * len(calls)
        for delta in deltas:
            assert delta.call is None or delta.call < len(calls), (
                f"{tokenizer.decode(ids)!r} has no call {delta.call}"
            )
            if delta.call is not None:
                told[delta.call] += delta.text
        assert told == calls, (
            f"{tokenizer.decode(ids)!r}: the deltas' texts by the number of their call "
            f"are {told}, not {calls}; a client would see other calls"
        )

    def run(ids):
        parser = HarmonyParser(tokenizer)
        deltas = []
        try:
            pushed = [parser.push(token_id) for token_id in ids]
            last = parser.finish()
        except NotImplementedError:
            raise
        except Exception as error:
            raise AssertionError(
                f"nothing may raise, whatever the ids are; {tokenizer.decode(ids)!r} "
                f"raised {type(error).__name__}: {error}"
            ) from None
        for token_id, found in zip(ids, pushed, strict=True):
            told = f"push({tokenizer.decode([token_id])!r}) returned {found!r}"
            assert isinstance(found, list), f"push returns a list of deltas; {told}"
            assert len(found) <= 1, f"a token adds at most one delta; {told}"
            deltas += found
        return parser, deltas + last

    for text, expected, reason in cases:
        parser, deltas = run(tokenizer.encode(text, special=True))
        found = [(m.channel, m.recipient, m.content) for m in parser.messages]
        assert found == expected, f"{reason}: {text!r} gave {found}"
        shown = "".join(delta.text for delta in deltas)
        contents = "".join(content for _, _, content in expected)
        assert shown == contents, (
            f"{reason}: the deltas of {text!r} add up to {shown!r}"
        )
        numbered(tokenizer.encode(text, special=True), parser, deltas)
    text = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>12<|end|>"
    found = run(tokenizer.encode(f"{last}<|end|>{text}", special=True))[0].messages[1:]
    found = [(m.role, m.name, m.recipient) for m in found]
    assert found == [("tool", "functions.f", "assistant")], (
        f"the author comes between <|start|> and the channel: {text!r} gave {found}"
    )
    found = run(tokenizer.encode(f"{call}{{}}<|call|>", special=True))[0].messages
    assert [m.content_type for m in found] == [JSON], (
        f"a header's content type is {JSON!r}; yours is {found}"
    )
    reserved = [1087, *tokenizer.encode(f"{last}<|reserved_2|>3", special=True), 1080]
    found = [message.content for message in run(reserved)[0].messages]
    assert found == ["123"], f"reserved ids are passed over, no text; {found}"

    parser = HarmonyParser(tokenizer)
    ids = tokenizer.encode(f"{last}🙂", special=True)
    texts = ["".join(delta.text for delta in parser.push(id)) for id in ids]
    assert texts[-6:] == ["1", "2", "", "", "", "🙂"], (
        f"text is shown with the token that completes it, not later; yours {texts}"
    )
    for marker in ("<|message|>", "<|constrain|>", "<|reserved_2|>"):
        between = tokenizer.special.get(marker, 1087)
        split = [*ids[:-1], between, ids[-1]]
        found = [message.content for message in run(split)[0].messages]
        assert found == ["12🙂"], (
            f"a control token that's passed over changes nothing, not even within a "
            f"character: an emoji with {marker} before its last byte gave {found}"
        )
    _, deltas = run(
        tokenizer.encode(f"{call}<|end|><|start|>assistant{call}", special=True)
    )
    assert [delta.call for delta in deltas] == [0, 1], (
        "a call is announced as soon as its header ends, even if no argument follows; "
        f"two empty calls gave {deltas}"
    )
    rng, marked = random.Random(0), list(tokenizer.special.values())
    for _ in range(200):
        ids = [
            rng.choice(marked) if rng.random() < 0.4 else rng.randrange(1088)
            for _ in range(20)
        ]
        parser, deltas = run(ids)
        shown = "".join(delta.text for delta in deltas)
        contents = "".join(message.content for message in parser.messages)
        assert shown == contents, (
            f"{ids}: the deltas add up to {shown!r}, not {contents!r}"
        )
        numbered(ids, parser, deltas)
