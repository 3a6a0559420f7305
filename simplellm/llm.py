"""The LLM: text or messages in; futures, streams and turns of a chat out."""

import asyncio
import math
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from simplellm.config import EngineConfig, check_number
from simplellm.harmony import Delta, Message, Tool, from_openai, render
from simplellm.load import load
from simplellm.reader import Delivery, Reader, Stream, gather, stream_async
from simplellm.reply import (
    ChatOutput,
    ChatReply,
    Reply,
    RequestOutput,
    TextReply,
    chat_output,
)
from simplellm.request import Request, SamplingParams
from simplellm.stats import Stats
from simplellm.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any] | Message]

CHAT_MAX_TOKENS = 1024  # reasoning included
MAX_SAMPLES = 1024
MAX_PRIORITY = 1000
MAX_SECONDS = 10.0**9
OVERRIDES = (*(field.name for field in fields(SamplingParams)), "priority", "timeout")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Raises TypeError or ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise TypeError(
            f"prompts is {type(prompts).__name__}; expected text, a list of token ids, "
            "or a list of these"
        )
    if not prompts:
        raise ValueError("the list of prompts is empty; expected at least one prompt")
    one = all(isinstance(item, int) for item in prompts)
    return [list(prompts)] if one else list(prompts)


def outputs(readers: Sequence[Reader]) -> list[Any]:
    """What `LLM.generate` gives."""
    return [reader.reply.output() for reader in readers]


def turn(readers: Sequence[Reader]) -> ChatOutput:
    """What `LLM.chat` gives."""
    replies: list[Any] = [reader.reply for reader in readers]
    return chat_output(replies, readers[0].cached_tokens)


@dataclass(frozen=True)
class Asked:
    """A checked call: what its samples have in common."""

    ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    priority: int
    deadline: float

    def request(self, number: int = 0) -> Request:
        """The request of sample ``number``: the same, drawn with another seed."""
        assert self.params.seed is not None
        return Request(
            tokens=list(self.ids),
            max_tokens=self.max_tokens,
            params=replace(self.params, seed=(self.params.seed + number) % 2**64),
            stop_ids=self.stop_ids,
            priority=self.priority,
            deadline=self.deadline,
        )


class LLM:
    """A model that answers any number of threads, all their requests at once.

    ``path`` is a checkpoint folder in either layout; without it, the model that comes
    with the package. ``config`` has the engine's sizes and switches. ``dtype``,
    ``device``, ``random_weights`` and ``seed`` are those of `load_model`. On an NVIDIA
    GPU with bfloat16 the Triton kernels compute, in CUDA graphs, elsewhere PyTorch;
    ``how`` and one line of the log "simplellm" say which, and why. Without a
    tokenizer.json prompts are token ids. Raises ConfigError, CheckpointError,
    TokenizerError, TypeError or ValueError, and MemoryError or torch.OutOfMemoryError
    before anything is loaded that cannot fit.

    Sampling parameters are a `SamplingParams`, by default what the checkpoint's
    generation_config.json recommends, and keywords that replace fields of it. Two more
    keywords are ``priority`` (an integer; the lower, the sooner) and ``timeout``
    (seconds, after which a request ends with what it has and the finish_reason
    "timeout"). What cannot run raises TypeError or ValueError at once; QueueFullError
    if too many requests wait. If the step of a request fails, its call raises
    EngineError, with the failure as its cause; what other calls have asked for goes on.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        random_weights: bool = False,
        seed: int | None = None,
    ) -> None:
        loaded = load(
            path,
            config,
            dtype=dtype,
            device=device,
            random_weights=random_weights,
            seed=seed,
        )
        self.model = loaded.model
        self.config = loaded.model.config
        self.engine = loaded.engine
        self.weights_seconds = loaded.weights_seconds
        self.how = loaded.how
        self.default_params = loaded.default_params
        self.eos_token_ids = loaded.eos_token_ids
        self._tokenizer = loaded.tokenizer
        self._delivery = Delivery(loaded.engine)
        # Also runs at the interpreter's exit, before it stops threads by force.
        self._finalizer = weakref.finalize(self, self._delivery.close, True, 60.0)
        self._delivery.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ValueError if it has none."""
        if self._tokenizer is None:
            raise ValueError(
                "this model has no tokenizer.json; expected prompts of token ids and "
                "no stop strings"
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **overrides: Any,
    ) -> Future[list[RequestOutput]]:
        """Continue each prompt; the result has ``n`` outputs per prompt, in order.

        A prompt is text, taken as it stands, or a list of token ids.
        ``sampling_params`` are one for all or one each. The samples of a prompt share
        its computation and its pages; with a seed s they draw with s, s + 1, ...
        Cancelling or dropping the future ends its requests. In a coroutine:
        ``await asyncio.wrap_future(llm.generate(...))``.
        """
        check_number("n", n, int, 1, MAX_SAMPLES)
        every = as_prompts(prompts)
        if isinstance(sampling_params, SamplingParams | None):
            sampling_params = [sampling_params or self.default_params] * len(every)
        elif not isinstance(sampling_params, list | tuple):
            raise TypeError(
                f"sampling_params is {type(sampling_params).__name__}; expected "
                "SamplingParams or a list of them"
            )
        if len(sampling_params) != len(every):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(every)} prompts; "
                "expected one for all or one each"
            )
        asked = [
            self._ask(prompt, params, overrides)
            for prompt, params in zip(every, sampling_params, strict=True)
        ]
        families = [
            [(one.request(number), self._text_reply(one)) for number in range(n)]
            for one in asked
        ]
        return gather(self, self._delivery, families, outputs)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Stream[RequestOutput]:
        """Continue one prompt; each output holds what one more token added.

        Texts are whole characters and never part of a stop string; the last output
        has the finish_reason. Closing or dropping the iterator ends the request.
        """
        asked = self._ask(prompt, sampling_params, overrides)
        reply = self._text_reply(asked)
        return Stream(self, self._delivery, asked.request(), reply)

    def stream_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Like `stream`, for ``async for``.

        The request starts with the iteration, its ``timeout`` with this call.
        """
        asked = self._ask(prompt, sampling_params, overrides)
        reply = self._text_reply(asked)
        return stream_async(self, self._delivery, asked.request(), reply)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        reasoning_effort: str = "medium",
        sampling_params: SamplingParams | None = None,
        n: int = 1,
        **overrides: Any,
    ) -> ChatOutput:
        """The assistant's next turn in a conversation, in ``n`` choices.

        ``messages`` are dicts as in OpenAI's chat completions, or harmony messages.
        Stop strings count in the final answer only, each message of it by itself. The
        default max_tokens is 1024.
        """
        asked = self._ask_chat(
            messages,
            tools=tools,
            reasoning_effort=reasoning_effort,
            sampling_params=sampling_params,
            **overrides,
        )
        return self._chat(asked, n).result()

    async def chat_async(
        self, messages: Messages, *, n: int = 1, **options: Any
    ) -> ChatOutput:
        """`chat`, for ``await``. Cancelling the task ends the requests."""
        asked = self._ask_chat(messages, **options)
        return await asyncio.wrap_future(self._chat(asked, n))

    def stream_chat(self, messages: Messages, **options: Any) -> Stream[Delta]:
        """Like `chat`, but the text as it comes, with its channel and recipient.

        ``options`` are those of `chat`, without ``n``. The stream's ``output()`` is the
        `ChatChoice` that it has come to.
        """
        asked = self._ask_chat(messages, **options)
        reply = self._chat_reply(asked)
        return Stream(self, self._delivery, asked.request(), reply)

    def stream_chat_async(
        self, messages: Messages, **options: Any
    ) -> AsyncIterator[Delta]:
        """Like `stream_chat`, for ``async for``."""
        asked = self._ask_chat(messages, **options)
        reply = self._chat_reply(asked)
        return stream_async(self, self._delivery, asked.request(), reply)

    def stats(self) -> Stats:
        """Queue, speed, cache and latencies of the engine."""
        return self.engine.stats()

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was asked for, or end it with ``cancel``, and accept no more."""
        self._delivery.close(stop=cancel)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(cancel=exception[0] is not None)

    # Requests

    def _text_reply(self, asked: Asked) -> Reply:
        wants_logprobs = asked.params.logprobs is not None
        return TextReply(asked.ids, asked.params.stop, self._tokenizer, wants_logprobs)

    def _chat_reply(self, asked: Asked) -> Reply:
        wants_logprobs = asked.params.logprobs is not None
        return ChatReply(asked.ids, asked.params.stop, self.tokenizer, wants_logprobs)

    def _chat(self, asked: Asked, n: int) -> Future[ChatOutput]:
        check_number("n", n, int, 1, MAX_SAMPLES)
        family = [(asked.request(i), self._chat_reply(asked)) for i in range(n)]
        return gather(self, self._delivery, [family], turn)

    def _ask_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        reasoning_effort: str = "medium",
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Asked:
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(
                f"messages is {messages!r}; expected a list of at least one message"
            )
        tools = tools or ()
        harmony = [message for message in messages if isinstance(message, Message)]
        if len(harmony) < len(messages):
            harmony = from_openai(messages, tools)
        ids = render(
            harmony, self.tokenizer, reasoning_effort=reasoning_effort, tools=tools
        )
        default = replace(self.default_params, max_tokens=CHAT_MAX_TOKENS)
        return self._ask(ids, sampling_params or default, overrides)

    def _ask(
        self,
        prompt: object,
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
    ) -> Asked:
        """A checked request. Raises TypeError or ValueError."""
        options = dict(overrides)
        priority, timeout = options.pop("priority", 0), options.pop("timeout", None)
        check_number("priority", priority, int, -MAX_PRIORITY, MAX_PRIORITY)
        deadline = math.inf
        if timeout is not None:
            check_number("timeout", timeout, float, 0, MAX_SECONDS)
            deadline = time.monotonic() + timeout
        params = self._params(params, options)
        ids = self._prompt_ids(prompt)
        limit = self.engine.max_model_len
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; expected fewer than {limit}, which "
                "is all that the model's context and this engine's cache and limits "
                "have room for"
            )
        named = {
            "the prompt": ids,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias or (),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < self.config.vocab_size:
                    raise ValueError(
                        f"{name} has token id {token}; expected 0 to "
                        f"{self.config.vocab_size - 1}"
                    )
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        return Asked(
            ids=ids,
            params=params,
            stop_ids=ends.union(params.stop_token_ids),
            max_tokens=min(params.max_tokens, limit - len(ids)),
            priority=priority,
            deadline=deadline,
        )

    def _params(
        self, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> SamplingParams:
        """Checked sampling parameters, with a seed."""
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"sampling_params is {type(params).__name__}; expected SamplingParams"
            )
        unknown = sorted(options.keys() - set(OVERRIDES))
        if unknown:
            raise TypeError(
                f"{unknown[0]!r} is no sampling parameter; expected one of "
                f"{', '.join(OVERRIDES)}"
            )
        params = replace(params, **options)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        if params.stop:
            self.tokenizer  # noqa: B018  (raises if there is none)
        return params

    def _prompt_ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list | tuple):
            ids = list(prompt)
        else:
            raise TypeError(
                f"a prompt is {type(prompt).__name__}; expected text or token ids"
            )
        if not ids:
            raise ValueError("a prompt is empty; expected at least one token")
        for token in ids:
            if type(token) is not int:
                raise TypeError(f"a prompt holds {token!r}; expected token ids")
        return ids
