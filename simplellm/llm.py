"""The LLM: text or messages in; futures, streams and turns of a chat out."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import torch

from simplellm.config import EngineConfig, check_number
from simplellm.door import Messages, Prompt, sample_of
from simplellm.harmony import Delta, Tool
from simplellm.load import load
from simplellm.outputs import ChatOutput, RequestOutput
from simplellm.reader import Delivery, Reader, Stream, future_of, stream_async
from simplellm.reply import ChatReply, Reply, TextReply, chat_output
from simplellm.request import Request, SamplingParams
from simplellm.stats import Stats
from simplellm.tokenizer import Tokenizer

MAX_SAMPLES = 1024


def outputs(readers: Sequence[Reader]) -> list[Any]:
    """What `LLM.generate` gives."""
    return [reader.reply.output() for reader in readers]


def turn(readers: Sequence[Reader]) -> ChatOutput:
    """What `LLM.chat` gives."""
    replies: list[Any] = [reader.reply for reader in readers]
    return chat_output(replies, readers[0].cached_tokens)


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
        loaded = load(path, config, dtype, device, random_weights, seed)
        self.model, self.engine = loaded.model, loaded.engine
        self.config = loaded.model.config
        self.how = loaded.how
        self.weights_seconds = loaded.weights_seconds
        self._door = loaded.door
        self._delivery = Delivery(loaded.engine)
        # Also runs at the interpreter's exit, before it stops threads by force.
        self._finalizer = weakref.finalize(self, self._delivery.close, True, 60.0)
        self._delivery.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ValueError if it has none."""
        return self._door.need_tokenizer()

    @property
    def default_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return self._door.default_params

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a turn."""
        return self._door.eos_token_ids

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
        asked = self._door.ask_all(prompts, sampling_params, overrides)
        return self._future(asked, n, self._text_reply, outputs)

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
        asked = self._door.ask(prompt, sampling_params, overrides)
        reply = self._text_reply(asked)
        return Stream(self, self._delivery, sample_of(asked), reply)

    def stream_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Like `stream`, for ``async for``.

        The request starts with the iteration, its ``timeout`` with this call.
        """
        asked = self._door.ask(prompt, sampling_params, overrides)
        reply = self._text_reply(asked)
        return stream_async(self, self._delivery, sample_of(asked), reply)

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
        asked = self._door.ask_chat(
            messages,
            tools=tools,
            reasoning_effort=reasoning_effort,
            sampling_params=sampling_params,
            **overrides,
        )
        return self._future([asked], n, self._chat_reply, turn).result()

    async def chat_async(
        self, messages: Messages, *, n: int = 1, **options: Any
    ) -> ChatOutput:
        """`chat`, for ``await``. Cancelling the task ends the requests."""
        asked = self._door.ask_chat(messages, **options)
        future = self._future([asked], n, self._chat_reply, turn)
        return await asyncio.wrap_future(future)

    def stream_chat(self, messages: Messages, **options: Any) -> Stream[Delta]:
        """Like `chat`, but the text as it comes, with its channel and recipient.

        ``options`` are those of `chat`, without ``n``. The stream's ``output()`` is the
        `ChatChoice` that it has come to.
        """
        asked = self._door.ask_chat(messages, **options)
        reply = self._chat_reply(asked)
        return Stream(self, self._delivery, sample_of(asked), reply)

    def stream_chat_async(
        self, messages: Messages, **options: Any
    ) -> AsyncIterator[Delta]:
        """Like `stream_chat`, for ``async for``."""
        asked = self._door.ask_chat(messages, **options)
        reply = self._chat_reply(asked)
        return stream_async(self, self._delivery, sample_of(asked), reply)

    def stats(self) -> Stats:
        """Queue, speed, cache and latencies of the engine."""
        return self.engine.stats()

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was asked for, or end it with ``cancel``, and accept no more."""
        self._delivery.close(cancel)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(cancel=exception[0] is not None)

    # Requests

    def _text_reply(self, asked: Request) -> Reply:
        return TextReply(asked, self._door.tokenizer)

    def _chat_reply(self, asked: Request) -> Reply:
        return ChatReply(asked, self.tokenizer)

    def _future(
        self,
        asked: Sequence[Request],
        n: int,
        reply_to: Callable[[Request], Reply],
        result: Callable[[list[Reader]], Any],
    ) -> Future[Any]:
        """What ``n`` samples of each request come to, once all of them are done."""
        check_number("n", n, int, 1, MAX_SAMPLES)
        families = [
            [(sample_of(one, number), reply_to(one)) for number in range(n)]
            for one in asked
        ]
        return future_of(self, self._delivery, families, result)
