"""Replies: tokens of a request in, text up to a stop string or a chat's turn out.

A reply is a state machine without threads. Events of one request go in, what each of
them adds comes out, and `output` is all of it. Nothing is raised, whatever the tokens:
an event's error is for the reader of the events to raise.
"""

from dataclasses import replace

from simplellm.api.outputs import (
    BaseReply,
    ChatChoice,
    RequestOutput,
    is_reasoning,
    with_token,
)
from simplellm.api.stops import StopStrings
from simplellm.base.request import Event, Request
from simplellm.text.detokenizer import StreamDecoder
from simplellm.text.harmony import Delta, HarmonyParser, tool_calls
from simplellm.text.parser import TurnParser
from simplellm.text.tokenizer import Tokenizer


class TextReply(BaseReply):
    """The text of one sample, which ends at a stop string.

    Without a tokenizer there is no text, and no stop string may be asked for.

    Of the parts only what they hold is kept: each part is an object or two for Python's
    garbage collector, and with 100,000 of them it would look through all objects that
    there are while every thread waits. Of tokens that came by `take`, text is made when
    somebody asks for it.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        super().__init__(request, tokenizer)
        self._texts: list[str] = []
        self._unread: list[int] = []  # tokens that are text soon
        self._stops = StopStrings.of(request.params)
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None:
            skip = request.params.skip_special_tokens
            self._decoder = StreamDecoder(tokenizer, skip_special=skip)

    def add(self, text: str, event: Event, count: int) -> RequestOutput:
        """Note that an event adds ``text`` and ``count`` of its tokens; as one part."""
        self._texts.append(text)
        scores = self.scores(event)
        self.note(event, count, scores, self._stops.match)
        return RequestOutput(
            text=text,
            token_ids=list(event.tokens[:count]),
            finish_reason=self.finish_reason,
            logprobs=None if scores is None else scores[:count],
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs if event.prompt_logprobs else None,
            prompt=self.prompt,
            **self.origin() if self.finish_reason else {},
        )

    def take(self, event: Event) -> None:
        if self._stops.stops or self._decoder is None:  # which look at each token
            self.push(event)
        elif self.finish_reason is None:
            self._unread += event.tokens
            if event.finish_reason == "stop" and not self._stops.include:
                del self._unread[-1:]  # it ends the text, and is no part of it
            self.note(event, len(event.tokens), self.scores(event), None)
            if event.finish_reason is not None:
                self._read()
                self._texts.append(self._decoder.flush())

    def _read(self) -> None:
        """Make text of all tokens that wait for it."""
        if self._decoder is not None and self._unread:
            unread, self._unread = self._unread, []
            self._texts.append(self._decoder.push_all(unread))

    def push(self, event: Event) -> list[RequestOutput]:
        """What ``event`` adds, in complete characters: one part."""
        if self.finish_reason is not None:
            return []
        self._read()
        stops, text, count = self._stops, "", len(event.tokens)
        if self._decoder is not None:
            hidden = event.finish_reason == "stop" and not stops.include
            for number, token in enumerate(event.tokens, start=1):
                if hidden and number == count:
                    break  # it ends the text, and is no part of it
                piece = self._decoder.push(token)
                too_short = len(self.token_ids) + number <= self.params.min_tokens
                text += piece if too_short else stops.push(piece)
                if stops.match:
                    count = number
                    break
            if event.finish_reason is not None and not stops.match:
                text += stops.push(self._decoder.flush()) + stops.flush()
        return [self.add(text, event, count)]

    def output(self) -> RequestOutput:
        """All that the events so far have given."""
        self._read()
        return RequestOutput(
            text="".join(self._texts),
            prompt_token_ids=self.prompt_token_ids,
            prompt=self.prompt,
            **self.sample(),
        )


class ChatReply(BaseReply):
    """A turn of the assistant, which ends at a stop string in its final answer.

    Stop strings count in the final channel only, each message of it by itself. Where
    log-probabilities are asked for, each token is in one delta: of its message, or in
    one without text and channel if it is part of a header or ends a message. Without a
    ``parser`` it is harmony's. The rest is as in `TextReply`.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, parser: TurnParser | None = None
    ) -> None:
        super().__init__(request, tokenizer)
        self._parser = parser or HarmonyParser(tokenizer)
        self._num_messages = 0  # that are complete
        self._stops = StopStrings.of(request.params)
        self._reasoning, self._content = list[str](), list[str]()

    def push(self, event: Event) -> list[Delta]:
        """What ``event`` adds to the turn's messages, and where calls begin."""
        if self.finish_reason is not None:
            return []
        deltas: list[Delta] = []
        scores, count = self.scores(event), len(event.tokens)
        for number, token in enumerate(event.tokens, start=1):
            message = self._parser.message
            too_short = len(self.token_ids) + number <= self.params.min_tokens
            new = self._show(self._parser.push(token), too_short)
            if message is not self._parser.message:
                message = None  # the token is no part of its content
            self.reasoning_tokens += message is not None and is_reasoning(message)
            if scores:
                new = with_token(new, message, self._parser.num_calls - 1)
                entries = (scores[number - 1],)
                new[-1] = replace(new[-1], token_ids=(token,), logprobs=entries)
            deltas += new
            if self._stops.match:
                count = number
                break
        if event.finish_reason is not None and not self._stops.match:
            deltas += self._show(self._parser.finish())
        self.note(event, count, scores, self._stops.match)
        if self.finish_reason == "stop" and not self._stops.match:
            calls = tool_calls(self._parser.messages)
            self.finish_reason = "tool_calls" if calls else "stop"
        for delta in deltas:
            if is_reasoning(delta):
                self._reasoning.append(delta.text)
            elif delta.call is None:
                self._content.append(delta.text)
        return deltas

    def output(self) -> ChatChoice:
        """All that the events so far have given."""
        return ChatChoice(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tool_calls(self._parser.messages),
            **self.sample(),
        )

    def _show(self, deltas: list[Delta], too_short: bool = False) -> list[Delta]:
        """What of the parser's ``deltas`` can be shown by now; ``too_short``: all."""
        visible = []
        for delta in deltas:
            if delta.channel == "final" and delta.recipient is None and not too_short:
                text = self._stops.push(delta.text)
                delta = delta if text == delta.text else replace(delta, text=text)
            if delta.text or delta.call is not None:
                visible.append(delta)
        if len(self._parser.messages) > self._num_messages and not self._stops.match:
            self._num_messages = len(self._parser.messages)
            if rest := self._stops.flush():  # no stop string goes on in the next one
                visible.append(Delta("final", None, rest))
        return visible


Reply = TextReply | ChatReply
