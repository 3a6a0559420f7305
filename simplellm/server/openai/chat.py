"""/v1/chat/completions: the assistant's next turn in a conversation."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from simplellm.api.outputs import ChatChoice, Usage
from simplellm.base.config import declared, expect
from simplellm.base.sampling_params import MAX_LOGPROBS
from simplellm.server.http import answers
from simplellm.server.http.bodies import (
    NOT_HERE,
    SHARED_NEUTRAL,
    Neutral,
    SampledBody,
    checked_samples,
)
from simplellm.server.http.endpoint import (
    Call,
    Endpoint,
    Generation,
    new_id,
    usage_fields,
)
from simplellm.server.openai.deltas import Turn, message_of_choice
from simplellm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from simplellm.text.harmony import Delta

NO_TEMPLATES = "a model's chats have one format, its own"


@dataclass(frozen=True, kw_only=True)
class ChatBody(SampledBody):
    """What /v1/chat/completions takes."""

    neutral: ClassVar[Mapping[str, Neutral]] = SHARED_NEUTRAL | {
        "functions": Neutral("use tools"),
        "function_call": Neutral("use tool_choice"),
        "modalities": Neutral("it writes text only", (["text"],)),
        "audio": Neutral("it writes text only"),
        "prediction": Neutral(NOT_HERE),
        "verbosity": Neutral(NOT_HERE, ("medium",)),
        "web_search_options": Neutral(NOT_HERE),
        "store": Neutral("nothing is stored", (False,)),
        "service_tier": Neutral(NOT_HERE, ("auto", "default")),
        "chat_template": Neutral(NO_TEMPLATES),
        "add_generation_prompt": Neutral(NO_TEMPLATES, (True,)),
        "continue_final_message": Neutral(NOT_HERE, (False,)),
        "documents": Neutral(NOT_HERE),
        "echo": Neutral(NOT_HERE, (False,)),
        "add_special_tokens": Neutral(NO_TEMPLATES, (False,)),
        "include_reasoning": Neutral("the reasoning is always told", (True,)),
    }

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    # None: "auto" where there are tools.
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    # Or a turn has one call at most; that of gpt-oss ends with its first one anyway.
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["low", "medium", "high"] = "medium"
    chat_template_kwargs: dict[str, Any] | None = None
    # Reasoning included; None: as many as there is room for.
    max_completion_tokens: int | None = declared(None)
    logprobs: bool = False
    top_logprobs: int = declared(0, low=0, high=MAX_LOGPROBS)
    # OpenAI's labels, with which nothing is done.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.logprobs or not self.top_logprobs
        expect(alone, "top_logprobs", self.top_logprobs, "0 without logprobs")
        most = self.max_completion_tokens
        twice = most is not None and "max_tokens" in self.sampling
        expect(not twice, "max_completion_tokens", most, "none beside max_tokens")
        choice = self.tool_choice
        ok = choice in (None, "none") or self.tools is not None
        expect(ok, "tool_choice", choice, "none without tools")

    @property
    def compiles(self) -> bool:
        return super().compiles or bool(self.response_format or self.tools)


class Chat(Generation):
    """Some choices of the assistant's next turn."""

    def __init__(self, call: Call) -> None:
        body: ChatBody = call.body
        input_processor = call.service.llm.input_processor
        self.model = call.service.check_model(body.model)
        params: dict[str, Any] = {"max_tokens": None, **body.sampling}
        if body.max_completion_tokens is not None:
            params["max_tokens"] = body.max_completion_tokens
        if body.logprobs or body.return_token_ids:  # parts have both or neither
            params["logprobs"] = body.top_logprobs
        params["prompt_logprobs"] = body.prompt_logprobs
        asked = input_processor.process_chat(
            body.messages,
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
            response_format=body.response_format,
            reasoning_effort=body.reasoning_effort,
            chat_template_kwargs=body.chat_template_kwargs,
            priority=body.priority,
            **params,
        )
        requests = checked_samples([asked], body.n)
        super().__init__(requests, n=body.n, chat=True, stream=body.stream)
        self.body, self.tokenizer = body, input_processor.need_tokenizer()
        self.id, self.created = new_id("chatcmpl"), int(time.time())
        self.turns = [Turn() for _ in range(body.n)]

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer, or an event, with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def logprobs(self, part: Delta | ChatChoice) -> dict[str, Any] | None:
        """Those of a part, or of all, if they are to be told."""
        entries = part.logprobs if self.body.logprobs else None
        return chat_logprobs(entries, self.tokenizer)

    def event(
        self,
        index: int,
        delta: dict[str, Any],
        part: Delta | None = None,
        end: ChatChoice | None = None,
    ) -> dict[str, Any]:
        """One event of a stream, made of one part of one choice, or of its end."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": end and end.finish_reason,
            "stop_reason": end and end.stop_reason,  # as vLLM has it
        }
        if part is not None:
            choice["logprobs"] = self.logprobs(part)
            if self.body.return_token_ids:
                choice["token_ids"] = list(part.token_ids)
        found = self.object("chat.completion.chunk", [choice])
        return found | {"usage": None} if self.body.include_usage else found

    def first(self) -> list[dict[str, Any]]:
        begin = {"role": "assistant", "content": ""}
        return [self.event(index, begin) for index in range(self.n)]

    def part(self, index: int, part: Delta) -> list[dict[str, Any]]:
        delta = self.turns[index].push(part)
        told = delta or part.token_ids
        return [self.event(index, delta, part)] if told else []

    def ended(self, index: int, output: ChatChoice) -> list[dict[str, Any]]:
        if output.finish_reason == "abort":  # the server ends, and the stream says so
            return []
        return [self.event(index, {}, end=output)]

    def last(self, outputs: Sequence[ChatChoice], usage: Usage) -> list[dict[str, Any]]:
        if not self.body.include_usage:
            return []
        end = self.object("chat.completion.chunk", [])
        return [end | {"usage": usage_fields(usage)}]

    def whole(self, outputs: Sequence[ChatChoice], usage: Usage) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            choice = {
                "index": index,
                "message": message_of_choice(output),
                "logprobs": self.logprobs(output),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        found = self.object("chat.completion", choices)
        if self.body.return_token_ids:
            found["prompt_token_ids"] = self.requests[0].tokens
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs)
        return found | {"usage": usage_fields(usage)}


CHATS = [
    Endpoint(
        path="/v1/chat/completions",
        answer=Chat,
        body=ChatBody,
        result=answers.CHAT,
        summary="The assistant's next turn in a conversation.",
    )
]
