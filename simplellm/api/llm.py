"""The LLM: text or messages in; futures, streams and turns of a chat out."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from simplellm.api.build_outputs import outputs, turn, turns
from simplellm.api.checks import Messages, Prompt, is_several
from simplellm.api.futures import RequestFuture, future_of
from simplellm.api.input_processor import MAX_SAMPLES, LoadedModel
from simplellm.api.output_processor import OutputProcessor, Samples
from simplellm.api.outputs import ChatOutput, RequestOutput
from simplellm.api.reply import ChatReply, Reply, TextReply
from simplellm.api.streams import AsyncStream, Replies, Stream
from simplellm.base.config import EngineConfig, check_number, expect
from simplellm.base.request import EngineError, Request
from simplellm.base.request_spec import RequestSpec
from simplellm.base.sampling_params import SamplingParams
from simplellm.engine.engine_client import EngineClient
from simplellm.engine.stats import Stats
from simplellm.text.harmony import Delta
from simplellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # an engine may be in another process, and PyTorch there alone
    import torch

    from simplellm.engine.engine import Engine
    from simplellm.model.model import Model


class LLM:
    """A model that answers any number of threads, all their requests at once.

    ``model`` is a checkpoint folder, a GGUF file or "smollm2", if that is installed;
    without it, the model that comes with the package. ``config`` has the engine's sizes
    and switches, and other keywords (``max_model_len=4096``) replace fields of it.
    ``dtype``, ``device``, ``random_weights`` and ``seed`` are those of `load_model`. On
    an NVIDIA GPU with bfloat16 the Triton kernels compute, in CUDA graphs, elsewhere
    PyTorch; ``backend_reason`` and one line of the log "simplellm" say which, and why.
    Without a tokenizer.json prompts are token ids. Raises ConfigError, CheckpointError,
    TokenizerError, TypeError or ValueError, and MemoryError or torch.OutOfMemoryError
    before anything is loaded that cannot fit.

    Sampling parameters are a `SamplingParams`, by default what the checkpoint's
    generation_config.json recommends, and keywords that replace fields of it. Two more
    keywords are ``priority`` (an integer; the lower, the sooner) and ``timeout``
    (seconds, after which a request ends with what it has and the finish_reason
    "timeout"). What cannot run raises TypeError or ValueError at once; QueueFullError
    if too many requests wait. If the step of a request fails, its call raises
    EngineError, with the failure as its cause; what other calls have asked for goes on.
    So do the other prompts of a call of many: it raises once all are done, and its
    error has their ``outputs``, and the ``index`` of the one that failed.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        dtype: "torch.dtype | str | None" = None,
        device: "str | torch.device | None" = None,
        random_weights: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        from simplellm.api.load import load

        self._begin(load(model, config, dtype, device, random_weights, seed, options))

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        """An LLM of what is loaded, wherever its engine is."""
        llm = cls.__new__(cls)
        llm._begin(loaded)
        return llm

    def _begin(self, loaded: LoadedModel) -> None:
        self.engine: EngineClient = loaded.engine
        self.config = loaded.input_processor.config
        self.backend_reason = loaded.backend_reason
        self.weights_seconds = loaded.weights_seconds
        self.input_processor = loaded.input_processor
        # What generation_config.json recommends, and the tokens that end a turn.
        self.default_params = loaded.input_processor.default_params
        self.eos_token_ids = loaded.input_processor.eos_token_ids
        self._output_processor = processor = OutputProcessor(loaded.engine)
        # Also runs at the interpreter's exit, before it stops threads by force.
        self._finalizer = weakref.finalize(self, processor.close, True, 60.0)
        processor.start()

    @property
    def engine_core(self) -> "Engine":
        """The engine itself. Raises EngineError if it isn't in this process."""
        from simplellm.engine.engine import Engine

        if not isinstance(self.engine, Engine):
            raise EngineError(f"the engine is a {type(self.engine).__name__}")
        return self.engine

    @property
    def model(self) -> "Model":
        """What computes. Raises EngineError if it's elsewhere, shared or let go of."""
        (engine := self.engine_core).check_open()
        if (size := engine.runner.ranks.size) > 1:
            raise EngineError(f"the model is shared by {size} ranks")
        return engine.runner.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ValueError if it has none."""
        return self.input_processor.need_tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **overrides: Any,
    ) -> RequestFuture:
        """Continue each prompt; the result has ``n`` outputs per prompt, in order.

        It is a future of a list of `RequestOutput`, which can be awaited, and which
        waits by itself where it is used like that list. A prompt is text, taken as it
        stands, or a list of token ids. Names of control tokens in a text are text; with
        ``parse_special=True`` they are these tokens, as in a chat that its template has
        written, and ``add_special_tokens=False`` puts none in front.

        ``sampling_params`` are one for all or one each. The samples of a prompt share
        its computation and its pages; with a seed s they draw with s, s + 1, ...
        Cancelling or dropping the future ends its requests. ``use_tqdm`` shows a bar.
        """
        specs = self.input_processor.process_all(prompts, sampling_params, overrides)
        samples = self._samples(specs)
        return future_of(self, self._output_processor, samples, outputs, show=use_tqdm)

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
        spec = self.input_processor.process(prompt, sampling_params, overrides)
        return Stream(self, self._output_processor, self._one_sample(spec))

    def stream_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> AsyncStream[RequestOutput]:
        """Like `stream`, for ``async for``; outputs that waited come as one.

        The request starts with the iteration, its ``timeout`` with this call.
        """
        spec = self.input_processor.process(prompt, sampling_params, overrides)
        return AsyncStream(self, self._output_processor, self._one_sample(spec))

    @overload
    def chat(self, messages: Messages, **options: Any) -> ChatOutput: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], **options: Any
    ) -> list[ChatOutput]: ...
    def chat(self, messages: Any, **options: Any) -> Any:
        """The assistant's next turn in a conversation, in ``n`` choices.

        ``messages`` are dicts as in OpenAI's chat completions, or harmony messages; of
        a list of conversations, the result is a list. ``options`` are ``tools``,
        ``tool_choice``, ``parallel_tool_calls`` and ``response_format`` (all as in
        OpenAI's), ``reasoning_effort`` ("medium" for gpt-oss), ``current_date`` (a line
        of the system message), ``chat_template_kwargs`` (what a template looks at, if
        the model has one: `{"enable_thinking": False}`), ``sampling_params``, keywords.
        Stop strings count in the final answer only, each message of it by itself;
        ``structured_outputs`` are for that too. The default max_tokens is 1024.
        """
        return self.chat_future(messages, **options).result()

    def chat_future(
        self, messages: Any, *, use_tqdm: bool = False, **options: Any
    ) -> RequestFuture:
        """The future of what `chat` returns, as that of `generate`."""
        specs = self.input_processor.process_chats(messages, options)
        result = turns if is_several(messages) else turn
        samples = self._samples(specs, chat=True)
        return future_of(self, self._output_processor, samples, result, show=use_tqdm)

    async def chat_async(self, messages: Any, **options: Any) -> Any:
        """`chat`, for ``await``. Cancelling the task ends the requests."""
        return await self.chat_future(messages, **options)

    def stream_chat(self, messages: Messages, **options: Any) -> Stream[Delta]:
        """Like `chat`, but the text as it comes, with its channel and recipient.

        ``options`` are those of `chat`, without ``n``. The stream's ``output()`` is the
        `ChatChoice` that it has come to.
        """
        spec = self.input_processor.process_chat(messages, **options)
        return Stream(self, self._output_processor, self._one_sample(spec, chat=True))

    def stream_chat_async(
        self, messages: Messages, **options: Any
    ) -> AsyncStream[Delta]:
        """Like `stream_chat`, for ``async for``; deltas that waited come as one."""
        spec = self.input_processor.process_chat(messages, **options)
        samples = self._one_sample(spec, chat=True)
        return AsyncStream(self, self._output_processor, samples)

    def replies(
        self,
        specs: RequestSpec | Sequence[RequestSpec],
        n: int | None = None,
        chat: bool = False,
    ) -> Replies:
        """All samples of what `input_processor` has checked, for a coroutine.

        They start at once, ``n`` of each or what its parameters say. ``async for``
        gives pairs of an index (prompt by prompt) and a part: a RequestOutput or, in a
        ``chat``, a Delta.
        """
        specs = [specs] if isinstance(specs, RequestSpec) else specs
        replies = Replies(self, self._output_processor, self._samples(specs, n, chat))
        replies.submit()
        return replies

    def stats(self) -> Stats:
        """Queue, speed, cache and latencies of the engine."""
        return self.engine.stats()

    def close(self, *, cancel: bool = False) -> None:
        """Finish or ``cancel`` what was asked for, take no more and free its memory."""
        self._output_processor.close(cancel)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(cancel=exception[0] is not None)

    # Requests

    def _samples(
        self, specs: Sequence[RequestSpec], n: int | None = None, chat: bool = False
    ) -> Samples:
        """The requests of each spec, and the replies that they will fill."""
        if n is not None:
            check_number("n", n, int, 1, MAX_SAMPLES)

        def sample(spec: RequestSpec, index: int) -> tuple[Request, Reply]:
            request = spec.sample(index)
            if chat:
                parser = self.input_processor.parser(spec)
                return request, ChatReply(request, self.tokenizer, parser)
            return request, TextReply(request, self.input_processor.tokenizer)

        return [[sample(spec, i) for i in range(n or spec.params.n)] for spec in specs]

    def _one_sample(self, spec: RequestSpec, chat: bool = False) -> Samples:
        """`_samples` for a stream: the only one."""
        expect((n := spec.params.n) == 1, "n", n, "1 for a stream; `replies` reads all")
        return self._samples([spec], chat=chat)
