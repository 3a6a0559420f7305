"""What a request's tokens say: text up to a stop string, or a turn of a chat.

A reply is a state machine without threads. Events of one request go in, what each of
them adds comes out, and `output` is all of it. Nothing is raised, whatever the tokens:
an event's error is for the reader of the events to raise.
"""

from dataclasses import replace

from simplellm.harmony import Delta, HarmonyParser, tool_calls
from simplellm.outputs import (
    ChatChoice,
    Progress,
    RequestOutput,
    TurnParser,
    is_reasoning,
    with_token,
)
from simplellm.request import Event, Request, TokenLogprobs
from simplellm.stops import StopStrings
from simplellm.tokenizer import StreamDecoder, Tokenizer


class TextReply:
    """The text of one sample, which ends at a stop string.

    Without a tokenizer there is no text, and no stop string may be asked for.
    ``finish_reason`` is None until the end; what comes after it is ignored.

    Of the parts only what they hold is kept: each part is an object or two for Python's
    garbage collector, and with 100,000 of them it would look through all objects that
    there are while every thread waits.
    """

    def __init__(self, asked: Request, tokenizer: Tokenizer | None) -> None:
        self.prompt_token_ids = list(asked.tokens)
        self.finish_reason: str | None = None
        self.token_ids: list[int] = []
        wanted = asked.params.logprobs is not None
        self.logprobs: list[TokenLogprobs] | None = [] if wanted else None
        self.reasoning_tokens = 0
        self.progress = Progress(asked, tokenizer)
        self._params = asked.params
        self._texts: list[str] = []
        self._stops = StopStrings.of(asked.params)
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None:
            skip = asked.params.skip_special_tokens
            self._decoder = StreamDecoder(tokenizer, skip_special=skip)

    def push(self, event: Event) -> list[RequestOutput]:
        """What ``event`` adds, in complete characters: one part."""
        if self.finish_reason is not None:
            return []
        stops, text, count = self._stops, "", len(event.tokens)
        if self._decoder is not None:
            hidden = event.finish_reason == "stop" and not stops.include
            for number, token in enumerate(event.tokens, start=1):
                if hidden and number == count:
                    break  # it ends the text, and is no part of it
                piece = self._decoder.push(token)
                early = len(self.token_ids) + number <= self._params.min_tokens
                text += piece if early else stops.push(piece)
                if stops.found:
                    count = number
                    break
            if event.finish_reason is not None and not stops.found:
                text += stops.push(self._decoder.flush()) + stops.flush()
        self.finish_reason = "stop" if stops.found else event.finish_reason
        self.progress.note(event, stops.found)
        scores = self.progress.prompt_logprobs if event.prompt_logprobs else None
        token_ids, logprobs = list(event.tokens[:count]), None
        if self.logprobs is not None:
            logprobs = self.progress.with_text(event.logprobs or ())[:count]
            self.logprobs += logprobs
        self.token_ids += token_ids
        self._texts.append(text)
        part = RequestOutput(
            text=text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=scores,
            **self.progress.of_text() if self.finish_reason else {},
        )
        return [part]

    def output(self) -> RequestOutput:
        """All that the events so far have given."""
        return RequestOutput(
            text="".join(self._texts),
            token_ids=self.token_ids.copy(),
            finish_reason=self.finish_reason,
            logprobs=None if self.logprobs is None else [*self.logprobs],
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.progress.prompt_logprobs,
            **self.progress.of_text(),
        )


class ChatReply:
    """A turn of the assistant, which ends at a stop string in its final answer.

    Stop strings count in the final channel only, each message of it by itself. Where
    log-probabilities are asked for, each token is in one delta: of its message, or in
    one without text and channel if it is part of a header or ends a message. Without a
    ``parser`` it is harmony's. The rest is as in `TextReply`.
    """

    def __init__(
        self, asked: Request, tokenizer: Tokenizer, parser: TurnParser | None = None
    ) -> None:
        self.prompt_token_ids = list(asked.tokens)
        self.finish_reason: str | None = None
        self.token_ids: list[int] = []
        wanted = asked.params.logprobs is not None
        self.logprobs: list[TokenLogprobs] | None = [] if wanted else None
        self.reasoning_tokens = 0  # of the reasoning's text, without its markers
        self.progress = Progress(asked, tokenizer)
        self._min_tokens = asked.params.min_tokens
        self._parser = parser or HarmonyParser(tokenizer)
        self._ended = 0  # messages
        self._stops = StopStrings.of(asked.params)
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def push(self, event: Event) -> list[Delta]:
        """What ``event`` adds to the turn's messages, and where calls begin."""
        if self.finish_reason is not None:
            return []
        shown: list[Delta] = []
        logprobs: list[TokenLogprobs] = []
        if self.logprobs is not None:
            logprobs = self.progress.with_text(event.logprobs or ())
        count = len(event.tokens)
        for number, token in enumerate(event.tokens, start=1):
            message = self._parser.message
            early = len(self.token_ids) + number <= self._min_tokens
            new = self._show(self._parser.push(token), early)
            if message is not self._parser.message:
                message = None  # the token is no part of its content
            self.reasoning_tokens += message is not None and is_reasoning(message)
            if logprobs:
                new = with_token(new, message, self._parser.num_calls - 1)
                entries = (logprobs[number - 1],)
                new[-1] = replace(new[-1], token_ids=(token,), logprobs=entries)
            shown += new
            if self._stops.found:
                count = number
                break
        if event.finish_reason is not None and not self._stops.found:
            shown += self._show(self._parser.finish())
        self.progress.note(event, self._stops.found)
        self.finish_reason = event.finish_reason
        if self._stops.found:
            self.finish_reason = "stop"
        elif event.finish_reason == "stop" and tool_calls(self._parser.messages):
            self.finish_reason = "tool_calls"
        self.token_ids += event.tokens[:count]
        if self.logprobs is not None:
            self.logprobs += logprobs[:count]
        for delta in shown:
            if is_reasoning(delta):
                self._reasoning.append(delta.text)
            elif delta.call is None:
                self._content.append(delta.text)
        return shown

    def output(self) -> ChatChoice:
        """All that the events so far have given."""
        return ChatChoice(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tool_calls(self._parser.messages),
            finish_reason=self.finish_reason,
            token_ids=self.token_ids.copy(),
            logprobs=None if self.logprobs is None else [*self.logprobs],
            prompt_logprobs=self.progress.prompt_logprobs,
            **self.progress.of_chat(),
        )

    def _show(self, deltas: list[Delta], early: bool = False) -> list[Delta]:
        """What of the parser's ``deltas`` can be shown by now; ``early``: all."""
        shown = []
        for delta in deltas:
            if delta.channel == "final" and delta.recipient is None and not early:
                text = self._stops.push(delta.text)
                delta = delta if text == delta.text else replace(delta, text=text)
            if delta.text or delta.call is not None:
                shown.append(delta)
        if len(self._parser.messages) > self._ended and not self._stops.found:
            self._ended = len(self._parser.messages)
            if rest := self._stops.flush():  # no stop string goes on in the next one
                shown.append(Delta("final", None, rest))
        return shown


Reply = TextReply | ChatReply
