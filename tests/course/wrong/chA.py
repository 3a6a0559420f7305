"""Wrong answers to appendix A."""

import asyncio
import json
import queue
from dataclasses import replace
from typing import Any

from simplellm.api.output_processor import END, Reader
from simplellm.api.outputs import is_reasoning
from simplellm.server.http.sse import DONE, HEADERS, event
from simplellm.server.openai.deltas import Turn, new_call_id
from simplellm.text.harmony import HarmonyParser
from simplellm.text.harmony.message import ENDS
from simplellm.text.harmony.openai import function_name
from simplellm.text.harmony.parse import message_of, split_header
from wrong import wrong


def events(chunks, *, ends=b"\n", strips=None, keeps=True, comments=False, joint="\n"):
    """The kept version, with what students change as switches."""
    rest, name, data = b"", "message", []
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(ends)
        if not keeps:
            lines, rest = [*lines, rest], b""
        for line in lines:
            text = line.removesuffix(b"\r").decode()
            field, _, value = text.partition(":")
            value = value.removeprefix(" ") if strips is None else strips(value)
            if field == "data" or (comments and not field and value):
                data.append(value)
            elif field == "event":
                name = value
            elif not text:
                if data:
                    yield name, joint.join(data)
                name, data = "message", []


@wrong("read_events", "cut")
def chunk_by_chunk(chunks):
    return events(chunks, keeps=False)


@wrong("read_events", "cut inside a character")
def decodes_chunks(chunks):
    return events(chunk.decode(errors="replace").encode() for chunk in chunks)


@wrong("read_events", "decode whole lines")
def decodes_strictly(chunks):
    return events(chunk.decode().encode() for chunk in chunks)


@wrong("read_events", "as soon as")
def at_the_end(chunks):
    return events([b"".join(chunks)])


@wrong("read_events", "only one")
def strips_all(chunks):
    return events(chunks, strips=str.strip)


@wrong("read_events", "before a line's end")
def strips_lines(chunks):
    return events(chunks, strips=lambda value: value.removeprefix(" ").rstrip())


@wrong("read_events", "no comment is one")
def comments_too(chunks):
    return events(chunks, comments=True)


@wrong("read_events", "between them")
def without_line_ends(chunks):
    return events(chunks, joint="")


@wrong("read_events", "as soon as")
def splits_at_two_newlines(chunks):
    rest = b""
    for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            yield from events([block + b"\n\n"])


@wrong("read_events", "U+2028")
def splits_as_python_does(chunks):
    rows = b"".join(chunks).decode().splitlines()
    return events(f"{row}\n".encode() for row in rows)


class Pushes(Turn):
    """The kept version, with what students change as switches."""

    indexed = reasons = begins_empty = renames = True
    repeats = cumulative = says_nothing = one_more = False
    text = ""

    def push(self, part):
        text = part.text
        if part.call is None:
            if not text:
                return {}
            if self.cumulative:
                self.text = text = self.text + text
            thought = self.reasons and is_reasoning(part)
            return {"reasoning" if thought else "content": text}
        call: dict[str, Any] = {
            "index": part.call if self.indexed else 0,
            "function": {"arguments": text},
        }
        if part.call >= self.calls or self.repeats:
            if not text and not self.begins_empty:
                return {}
            self.calls = self.calls + 1 if self.one_more else part.call + 1
            name = function_name(part.recipient) if self.renames else part.recipient
            call |= {"id": new_call_id(), "type": "function"}
            call["function"] = {"name": name, "arguments": text}
        elif not text and not self.says_nothing:
            return {}
        return {"tool_calls": [call]}


@wrong("Turn.push", "the call's number")
class AlwaysTheFirst(Pushes):
    indexed = False


@wrong("Turn.push", "come once")
class NewIdsAllTheTime(Pushes):
    repeats = True


@wrong("Turn.push", "has begun")
class EmptyArguments(Pushes):
    says_nothing = True


@wrong("Turn.push", "is reasoning")
class AllIsContent(Pushes):
    reasons = False


@wrong("Turn.push", "no arguments at all")
class NoEmptyCalls(Pushes):
    begins_empty = False


@wrong("Turn.push", "without functions.")
class NamesAsWritten(Pushes):
    renames = False


@wrong("Turn.push", "doesn't begin it again")
class CountsOneMore(Pushes):
    one_more = True


@wrong("Turn.push", "adds up")
class SoFar(Pushes):
    cumulative = True


class Box:
    """The kept mailbox, with what students change as switches."""

    wakes = merges = tokens = scores = True
    anywhere = False
    most = 10**9

    def __init__(self):
        self.waiting = []
        self.arrived = asyncio.Event()

    async def take(self):
        await self.arrived.wait()
        self.arrived.clear()
        taken, self.waiting = self.waiting, []
        return taken

    def kind(self, part):
        return part.channel, part.recipient, part.call

    def put(self, part):
        if self.wakes:
            self.arrived.set()
        places = range(len(self.waiting) - 1, -1, -1)
        for place in places if self.anywhere else places[:1]:
            last = self.waiting[place]
            if self.merges and self.kind(last) == self.kind(part):
                logprobs = last.logprobs
                if part.logprobs is not None and self.scores:
                    logprobs = (last.logprobs or ()) + part.logprobs
                ids = last.token_ids + (part.token_ids if self.tokens else ())
                text = last.text + part.text
                self.waiting[place] = replace(
                    last, text=text, token_ids=ids, logprobs=logprobs
                )
                return
        self.waiting.append(part)
        del self.waiting[: -self.most]


@wrong("Mailbox.put", "nobody woke it")
class Silent(Box):
    wakes = False


@wrong("Mailbox.put", "become one")
class Pile(Box):
    merges = False


@wrong("Mailbox.put", "order")
class Sorted(Box):
    anywhere = True


@wrong("Mailbox.put", "token_ids")
class TextAlone(Box):
    tokens = False


@wrong("Mailbox.put", "logprobs")
class FirstLogprobs(Box):
    scores = False


@wrong("Mailbox.put", "and call become one")
class ByChannel(Box):
    def kind(self, part):
        return part.channel


@wrong("Mailbox.put", "lost")
class DropsTheOldest(Box):
    most = 3


def start():
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def piece(data, more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


def chunk(delta, reason=None):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


async def asked(llm, receive):
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    return llm.replies(llm.input_processor.process_chat(**json.loads(body)), chat=True)


async def write(
    replies, send, *, at_once=False, closes=True, ends=True, turns=True, all_parts=False
):
    """The kept writer, with what students change as switches."""
    turn, waiting = Turn(), []
    await send(start())
    async for _, part in replies:
        if not turns:
            turn = Turn()
        if (delta := turn.push(part)) or all_parts:
            waiting.append(chunk(delta))
            if not at_once:
                await send(piece(waiting.pop()))
    waiting.append(chunk({}, replies.outputs()[0].finish_reason))
    last = b"".join(waiting) + (DONE if ends else b"")
    await send(piece(last, more=not closes))


async def both(replies, receive, writing, *, cancels=True, tells=True):
    async def leave():
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(writing), asyncio.create_task(leave())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tells and tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks if cancels else tasks[:1]:
            task.cancel()
        await asyncio.gather(*tasks[: 1 + cancels], return_exceptions=True)
        await replies.aclose()


@wrong("serve_chat", "send each part as it comes")
async def in_one_piece(llm, scope, receive, send):
    replies = await asked(llm, receive)
    await both(replies, receive, write(replies, send, at_once=True))


@wrong("serve_chat", "more_body")
async def left_open(llm, scope, receive, send):
    replies = await asked(llm, receive)
    await both(replies, receive, write(replies, send, closes=False))


@wrong("serve_chat", "makes no event")
async def events_for_nothing(llm, scope, receive, send):
    replies = await asked(llm, receive)
    await both(replies, receive, write(replies, send, all_parts=True))


@wrong("serve_chat", "end the other one")
async def listens_for_ever(llm, scope, receive, send):
    replies = await asked(llm, receive)
    await both(replies, receive, write(replies, send), cancels=False)


@wrong("serve_chat", "raise what went wrong")
async def swallows_errors(llm, scope, receive, send):
    replies = await asked(llm, receive)
    await both(replies, receive, write(replies, send), tells=False)


@wrong("serve_chat", "DONE")
async def not_done(llm, scope, receive, send):
    replies = await asked(llm, receive)
    await both(replies, receive, write(replies, send, ends=False))


@wrong("serve_chat", "with nobody to read it")
async def never_looks(llm, scope, receive, send):
    await write(await asked(llm, receive), send)


@wrong("serve_chat", "stopped reading")
async def looks_between_parts(llm, scope, receive, send):
    replies, turn = await asked(llm, receive), Turn()
    leaving = asyncio.create_task(receive())
    await send(start())
    async with replies:
        async for _, part in replies:
            if leaving.done():
                return
            if delta := turn.push(part):
                await send(piece(chunk(delta)))
        leaving.cancel()
        reason = replies.outputs()[0].finish_reason
        await send(piece(chunk({}, reason) + DONE, more=False))


@wrong("serve_chat", "nobody else in the loop")
async def waits_in_the_loop(llm, scope, receive, send):
    body = (await receive())["body"] + (await receive())["body"]
    turn = Turn()
    stream = llm.stream_chat(**json.loads(body))
    await send(start())
    for part in stream:
        if delta := turn.push(part):
            await send(piece(chunk(delta)))
    await send(piece(chunk({}, stream.output().finish_reason) + DONE, more=False))


@wrong("A.2", "lost")
async def cancels_its_source(pieces, seconds):
    while True:
        try:
            yield await asyncio.wait_for(anext(pieces), seconds)
        except TimeoutError:
            yield b": ping\n\n"
        except StopAsyncIteration:
            return


def pinging(ping=b": ping\n\n", steady=False):
    async def with_pings(pieces, seconds):
        loop = asyncio.get_running_loop()
        waiting, next_ping = asyncio.ensure_future(anext(pieces)), loop.time() + seconds
        while True:
            left = max(next_ping - loop.time(), 0)
            done, _ = await asyncio.wait([waiting], timeout=left)
            if not done or (steady and loop.time() >= next_ping):
                next_ping = loop.time() + seconds
                yield ping
            if done:
                try:
                    yield waiting.result()
                except StopAsyncIteration:
                    return
                waiting = asyncio.ensure_future(anext(pieces))
                if not steady:
                    next_ping = loop.time() + seconds

    return with_pings


wrong("A.2", "comment")(pinging(b"event: ping\n\n"))
wrong("A.2", "only silence")(pinging(steady=True))


@wrong("A.3", "copies all that waits")
class StillJoins(Box):
    pass


@wrong("A.3", "a few more")
class NeverJoins(Box):
    merges = False


def streams(*, door=True, drops=True, raises=True, at_once=False, ends=True, most=0):
    """The kept version, with what students change as switches."""

    async def stream(output_processor, request, reply):
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Any] = asyncio.Queue(most)

        def deliver(part):
            if door:
                loop.call_soon_threadsafe(parts.put_nowait, part)
            else:
                parts.put_nowait(part)

        reader = Reader(request, reply, deliver)
        output_processor.submit([[reader]])
        kept = []
        try:
            while (part := await parts.get()) is not END:
                if raises and isinstance(part, Exception):
                    raise part
                if at_once:
                    kept.append(part)
                else:
                    yield part
                if isinstance(part, Exception):
                    return
            for part in kept if ends else (*kept, END):
                yield part
        finally:
            if drops:
                output_processor.drop([reader])

    return stream


wrong("read_async", "call_soon_threadsafe")(streams(door=False))
wrong("read_async", "with nobody to read it")(streams(drops=False))
wrong("read_async", "is to be raised")(streams(raises=False))
wrong("read_async", "as they come")(streams(at_once=True))
wrong("read_async", "END is none of them")(streams(ends=False))


@wrong("read_async", "nobody else in the loop")
async def blocks_the_loop(output_processor, request, reply):
    parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = Reader(request, reply, parts.put)
    output_processor.submit([[reader]])
    try:
        while (part := parts.get()) is not END:
            yield part
    finally:
        output_processor.drop([reader])


@wrong("read_async", "with nobody to read it")
async def drops_at_the_end_only(output_processor, request, reply):
    loop = asyncio.get_running_loop()
    parts: asyncio.Queue[Any] = asyncio.Queue()
    reader = Reader(
        request, reply, lambda part: loop.call_soon_threadsafe(parts.put_nowait, part)
    )
    output_processor.submit([[reader]])
    while (part := await parts.get()) is not END:
        if isinstance(part, Exception):
            raise part
        yield part
    output_processor.drop([reader])


@wrong("A.1", "nobody's")
async def others_go_on(llm, prompts, params):
    async def ask(index):
        parts = llm.stream_async(prompts[index], params[index])
        return index, "".join([piece.text async for piece in parts])

    tasks = [asyncio.create_task(ask(index)) for index in range(len(prompts))]
    await asyncio.wait(tasks)
    return min((task.result() for task in tasks), key=lambda found: len(found[1]))


@wrong("read_async", "can't be cancelled")
async def waits_in_a_thread(output_processor, request, reply):
    parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = Reader(request, reply, parts.put)
    output_processor.submit([[reader]])
    try:
        while (part := await asyncio.to_thread(parts.get)) is not END:
            if isinstance(part, Exception):
                raise part
            yield part
    finally:
        output_processor.drop([reader])


wrong("read_async", "with a bound")(streams(most=4))


def polling(wait):
    """The kept version, but that it looks again and again whether a part is there."""

    async def stream(output_processor, request, reply):
        parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        reader = Reader(request, reply, parts.put)
        output_processor.submit([[reader]])
        try:
            while True:
                try:
                    part = parts.get_nowait()
                except queue.Empty:
                    await wait()
                    continue
                if part is END:
                    return
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            output_processor.drop([reader])

    return stream


wrong("read_async", "again and again")(polling(lambda: asyncio.sleep(0)))
wrong("read_async", "again and again")(polling(lambda: asyncio.sleep(0.05)))


@wrong("read_async", "again and again")
async def wakes_up_to_look(output_processor, request, reply):
    loop = asyncio.get_running_loop()
    parts: asyncio.Queue[Any] = asyncio.Queue()
    reader = Reader(
        request, reply, lambda part: loop.call_soon_threadsafe(parts.put_nowait, part)
    )
    output_processor.submit([[reader]])
    try:
        while True:
            try:
                part = await asyncio.wait_for(parts.get(), 0.05)
            except TimeoutError:
                continue
            if part is END:
                return
            if isinstance(part, Exception):
                raise part
            yield part
    finally:
        output_processor.drop([reader])


@wrong("A.1", "cancel their tasks")
async def leaves_the_others(llm, prompts, params):
    async def ask(index):
        parts = llm.stream_async(prompts[index], params[index])
        return index, "".join([piece.text async for piece in parts])

    tasks = [asyncio.create_task(ask(index)) for index in range(len(prompts))]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()


@wrong("A.4", "begins the next message")
class NeedsEveryEnd(HarmonyParser):
    def push(self, token_id):
        marker = self._markers.get(token_id)
        if self.message is not None and marker not in (None, *ENDS):
            return []
        return super().push(token_id)


@wrong("A.4", "ends a message")
class EndsOnlyWithEnd(HarmonyParser):
    def push(self, token_id):
        if self._markers.get(token_id) in ("<|call|>", "<|endoftext|>"):
            return []
        return super().push(token_id)


@wrong("A.4", "out of place")
class MessageAgain(HarmonyParser):
    def push(self, token_id):
        if self.message is not None and self._markers.get(token_id) == "<|message|>":
            return self.finish() + self._begin(message_of(self._header_text()))
        return super().push(token_id)


@wrong("A.4", "begin each message once")
class CallBeginsTwice(HarmonyParser):
    """Of messages whose `<|message|>` comes twice: the same message, begun again."""

    def push(self, token_id):
        again = self.message is not None and self.message.recipient
        if again and self._markers.get(token_id) == "<|message|>":
            return self._begin(self.message)
        return super().push(token_id)


@wrong("A.4", "not even within a character")
class FlushesAtAMarker(HarmonyParser):
    def push(self, token_id):
        stray = ("<|message|>", "<|constrain|>")
        if self.message is not None and self._markers.get(token_id) in stray:
            return self._add(self._decoder.flush())
        return super().push(token_id)


@wrong("A.4", "is not lost")
class StartGoesOn(HarmonyParser):
    def push(self, token_id):
        if self.message is None and self._markers.get(token_id) == "<|start|>":
            self._header.append(("<|start|>", bytearray()))
            return []
        return super().push(token_id)


@wrong("A.4", "pass for a header without markers")
class HeaderOfOnePart(HarmonyParser):
    def push(self, token_id):
        inside = self.message is not None
        deltas = super().push(token_id)
        if inside and self._markers.get(token_id) in ("<|start|>", "<|channel|>"):
            self._header = self._header[-1:]
        return deltas


@wrong("A.4", "are no content")
class StrayWordsShown(HarmonyParser):
    def push(self, token_id):
        if self.message is None and self._markers.get(token_id) == "<|message|>":
            header, content = split_header(self._header_text())
            return self._begin(message_of(header), content)
        return super().push(token_id)


@wrong("A.4", "no text")
class ReservedAsText(HarmonyParser):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._all = tokenizer.token_bytes

    def push(self, token_id):
        known = token_id in self._tokens or token_id in self._markers
        if self.message is not None and not known:
            return self._add(self._all(token_id).decode())
        return super().push(token_id)


@wrong("A.4", "not later")
class OnlyAtTheEnd(HarmonyParser):
    def push(self, token_id):
        if self.message is None or token_id not in self._tokens:
            return super().push(token_id)
        self._decoder._pending += self._tokens[token_id]
        return []

    def finish(self):
        held, self._decoder._pending = self._decoder._pending, b""
        return self._add(held.decode(errors="replace")) + super().finish()


@wrong("A.4", "at most one delta")
class ADeltaACharacter(HarmonyParser):
    def push(self, token_id):
        deltas = super().push(token_id)
        return [replace(d, text=c) for d in deltas for c in d.text or [""]]


@wrong("A.4", "returns a list")
class NoneForNothing(HarmonyParser):
    def push(self, token_id):
        return super().push(token_id) or None


@wrong("A.4", "nothing may raise")
class Strict(HarmonyParser):
    def push(self, token_id):
        if self.message is None and self._markers.get(token_id) in ENDS:
            raise ValueError("an end in a header")
        return super().push(token_id)


@wrong("A.4", "announced")
class SilentCalls(HarmonyParser):
    def push(self, token_id):
        return [delta for delta in super().push(token_id) if delta.text]


@wrong("A.4", "the author comes")
class LosesTheAuthor(HarmonyParser):
    def finish(self):
        deltas = super().finish()
        lost = {"role": "assistant", "name": None}
        self.messages[:] = [replace(message, **lost) for message in self.messages]
        return deltas
