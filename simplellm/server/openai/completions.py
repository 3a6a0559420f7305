"""/v1/completions: continues a prompt as it stands."""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, WithJsonSchema

from simplellm.api.chat_options import as_format, text_constraint
from simplellm.api.input_processor import MAX_SAMPLES, as_prompts
from simplellm.api.outputs import RequestOutput, Usage
from simplellm.base.config import expect
from simplellm.base.request_spec import RequestSpec
from simplellm.base.sampling_params import MAX_LOGPROBS
from simplellm.server.http.bodies import (
    SHARED_UNSUPPORTED,
    ResponseFormat,
    SampledBody,
    Unsupported,
    ValidationContext,
    refuse,
)
from simplellm.server.http.endpoint import Call, Endpoint, Generation, usage_fields
from simplellm.server.http.response_schemas import COMPLETION
from simplellm.server.openai.chat_body import with_format
from simplellm.server.openai.logprobs import LegacyLogprobs, prompt_logprobs

SOME_PROMPT = TypeAdapter(str | list[str] | list[int] | list[list[int]]).json_schema()
# Tokens of prompts that the samples of one call may hold: they are copied in the loop.
MAX_COPIES = 2**22
MAX_TOKENS = 16  # OpenAI's default, which clients of this endpoint rely on


class CompletionBody(SampledBody):
    """What /v1/completions takes."""

    unsupported: ClassVar = SHARED_UNSUPPORTED | {
        "best_of": Unsupported("use n, and choose among the answers yourself", (1,)),
        "suffix": Unsupported(
            "write the model's own tokens for it into the prompt, with parse_special",
            ("",),
        ),
    }

    prompt: Annotated[Any, WithJsonSchema(SOME_PROMPT)]
    response_format: ResponseFormat | None = None
    """As vLLM has it."""
    echo: bool = False
    """The prompt in front of the text."""
    add_special_tokens: bool = True
    """In front of a text, as vLLM has it."""
    parse_special: bool | None = None
    """Whether names of control tokens in a text are these, as llama.cpp has it."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_tokens_as_token_ids: bool = False
    """As vLLM has it: log-probabilities name tokens by their ids."""

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        if "prompt" not in data and "messages" in data:
            refuse("messages", Unsupported("they are for /v1/chat/completions"))
        if data.get("best_of") == data.get("n", 1):  # all of them are asked for
            data.pop("best_of", None)
        return super().apply_aliases(with_format(data), context)

    @property
    def compiles(self) -> bool:
        return super().compiles or bool(self.response_format)


class Choices(Generation):
    """An answer that is a list of choices, as completions and chats have it."""

    kinds: ClassVar[tuple[str, str]]  # of the answer, and of an event of a stream

    def __init__(
        self, call: Call, specs: list[RequestSpec], id: str, *, chat: bool
    ) -> None:
        """Raises ValueError if the samples of these ``specs`` are too many.

        Each sample has a copy of its prompt, so that long prompts allow fewer.
        """
        body, count = call.body, len(specs)
        tokens = sum(len(spec.tokens) for spec in specs)
        most = min(MAX_SAMPLES // count, MAX_COPIES // tokens)
        expected = f"at most {most} for {count} prompts of {tokens} tokens"
        expect(body.n <= most, "n", body.n, expected)
        super().__init__(specs, n=body.n, chat=chat, stream=body.stream)
        self.continuous_usage = body.continuous_usage
        self.body, self.model = body, call.model
        self.id, self.created = f"{id}-{uuid.uuid4().hex}", int(time.time())

    def object(
        self, choices: list[dict[str, Any]], *, event: bool = False
    ) -> dict[str, Any]:
        """The answer, or an event of a stream, with these choices."""
        return {
            "id": self.id,
            "object": self.kinds[event],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An event of a stream. The last one has the usage, if the body asks for it."""
        chunk = self.object(choices, event=True)
        return chunk | {"usage": None} if self.body.include_usage else chunk

    def last(self, outputs: Sequence[Any], usage: Usage) -> list[dict[str, Any]]:
        if not self.body.include_usage:
            return []
        return [self.object([], event=True) | {"usage": usage_fields(usage)}]


class Completion(Choices):
    """Text that continues prompts, which are texts or token ids."""

    kinds = ("text_completion", "text_completion")

    def __init__(self, call: Call) -> None:
        body: CompletionBody = call.body
        input_processor = call.service.llm.input_processor
        params = {
            "max_tokens": MAX_TOKENS,
            "priority": body.priority,
            "add_special_tokens": body.add_special_tokens,
            "parse_special": body.parse_special,
            "logprobs": body.logprobs,
            "prompt_logprobs": body.prompt_logprobs,
            **body.sampling,
        }
        # The first sample of a prompt has its log-probabilities.
        self.scored = body.echo and body.logprobs is not None
        if self.scored:
            if body.prompt_logprobs is None:
                params["prompt_logprobs"] = body.logprobs
            alone = body.n == 1 or not body.stream
            expect(alone, "n", body.n, "1 for a stream with echo and logprobs")
        prompts = as_prompts(body.prompt)
        expect(prompts, "prompt", prompts, "at least one prompt")
        count, expected = len(prompts), f"at most {MAX_SAMPLES}"
        ok = count <= MAX_SAMPLES
        expect(ok, "the number of prompts", count, expected, param="prompt")
        answer = as_format(body.response_format)
        constrain = partial(text_constraint, answer=answer)
        specs = input_processor.process_all(prompts, None, params, constrain)
        super().__init__(call, specs, "cmpl", chat=False)
        self.echoes = [""] * len(specs)  # what stands in front of the texts
        if body.echo:
            decode = input_processor.need_tokenizer().decode
            self.echoes = [decode(spec.tokens) for spec in specs]
        self.logprobs: list[LegacyLogprobs] = []
        if body.logprobs is not None:
            tokenizer, skip = input_processor.need_tokenizer(), specs[0].params
            self.logprobs = [
                LegacyLogprobs(
                    tokenizer,
                    skip_special=skip.skip_special_tokens,
                    as_ids=body.return_tokens_as_token_ids,
                )
                for _ in range(len(specs) * body.n)
            ]

    def choice(
        self, index: int, part: RequestOutput, *, echo: bool = False
    ) -> dict[str, Any]:
        """A choice made of a part of a sample or of all, perhaps behind its prompt."""
        shown = self.echoes[index // self.n] if echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": shown + part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,  # as vLLM has it
        }
        if part.logprobs is not None:
            choice["logprobs"] = self.logprobs[index].push(
                part.token_ids, part.logprobs
            )
        if self.body.prompt_logprobs is not None:
            first = index % self.n == 0  # of a prompt's samples
            scores = prompt_logprobs(part.prompt_logprobs) if first else None
            choice["prompt_logprobs"] = scores
        if self.body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if echo or not self.stream:
                choice["prompt_token_ids"] = part.prompt_token_ids
        return choice

    def scored_choice(
        self, index: int, part: RequestOutput, scores: RequestOutput
    ) -> dict[str, Any]:
        """A choice that begins with its prompt and the log-probabilities of the prompt.

        ``scores`` is the prompt's first sample, which has these.
        """
        prompt = self.logprobs[index].push(
            part.prompt_token_ids, scores.prompt_logprobs or [], prompt=True
        )
        choice = self.choice(index, part, echo=True)
        rest = choice["logprobs"]
        choice["logprobs"] = {name: prompt[name] + rest[name] for name in prompt}
        return choice

    def first(self) -> list[dict[str, Any]]:
        if not self.body.echo or self.scored:
            return []
        empty = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        texts = [text for text in self.echoes for _ in range(self.n)]
        return [
            self.event([{"index": index, "text": text, **empty}])
            for index, text in enumerate(texts)
        ]

    def part(self, index: int, part: RequestOutput) -> list[dict[str, Any]]:
        if self.scored and part.prompt_logprobs is not None:
            return [self.event([self.scored_choice(index, part, part)])]
        choice = self.choice(index, part)
        visible = part.text or part.finish_reason or part.logprobs
        if not (visible or self.body.return_token_ids):
            return []
        return [self.event([choice])]

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        if self.scored:
            choices = [
                self.scored_choice(index, output, outputs[index - index % self.n])
                for index, output in enumerate(outputs)
            ]
        else:
            choices = [
                self.choice(index, output, echo=True)
                for index, output in enumerate(outputs)
            ]
        return self.object(choices) | {"usage": usage_fields(usage)}


COMPLETIONS = [
    Endpoint(
        "POST", "/v1/completions", Completion, body=CompletionBody, result=COMPLETION
    ),
]
