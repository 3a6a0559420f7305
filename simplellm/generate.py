"""Text in, text out: the LLM class, its text side, and the engine that feeds it tokens.

The text side checks requests, encodes prompts, turns tokens back into text and looks
for stop strings. The engine only knows tokens: `step()` advances every request by one.
"""

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Self

import torch
from torch import Tensor

from simplellm.attention import NoCache
from simplellm.config import ConfigError, check_tokenizer, end_token_ids, read_json
from simplellm.harmony import (
    Delta,
    HarmonyParser,
    Message,
    Tool,
    ToolCall,
    from_openai,
    render,
    tool_calls,
)
from simplellm.model import (
    EMBEDDED,
    TORCH,
    Backend,
    Choice,
    Transformer,
    config_of,
    load_model,
)
from simplellm.sampler import (
    Columns,
    Sampled,
    SamplingParams,
    count_tokens,
    sample,
)
from simplellm.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one step, from the model's logits as they came."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest (token id, logprob), best first


@dataclass(eq=False)
class Request:
    """One sequence: what it started from, what it has so far, why it stopped."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]  # tokens that end it
    max_tokens: int  # what params ask for, or what is left of the context
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # see RequestOutput; "error" if a step failed

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass(frozen=True)
class NewToken:
    """What one step gave one request."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None


class RecomputeEngine:
    """Advances requests by one token a step, from nothing but their tokens.

    It remembers nothing between steps, so every step runs every token of every
    unfinished sequence again, packed into one batch.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @torch.inference_mode()
    def step(self, requests: Sequence[Request]) -> list[NewToken]:
        """One more token for each request that is not finished."""
        running = [request for request in requests if request.finish_reason is None]
        if not running:
            return []
        logits = self.run(running)
        sampled = self.sample(running, logits)
        return self.commit(running, sampled)

    def run(self, running: Sequence[Request]) -> Tensor:
        """float32 logits [B, V] that follow each request's last token."""
        device = self.model.device
        lengths = [len(request.tokens) for request in running]
        tokens = [token for request in running for token in request.tokens]
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = self.model(
            torch.tensor(tokens, device=device), positions.to(device), NoCache(lengths)
        )  # [T, hidden]
        last = torch.tensor(lengths).cumsum(0) - 1
        return self.model.lm_head(hidden[last.to(device)]).float()

    def sample(self, running: Sequence[Request], logits: Tensor) -> Sampled:
        """The next token of each request."""
        device, vocab_size = logits.device, logits.shape[1]
        columns = Columns.of([r.params for r in running], vocab_size, device)
        steps = torch.tensor([len(r.output) for r in running], device=device)
        counts: list[Tensor] = []
        if columns.penalties:
            for seen in ([r.prompt for r in running], [r.output for r in running]):
                counts.append(count_tokens(seen, vocab_size, device))
        return sample(logits, columns, steps, *counts)

    def commit(self, running: Sequence[Request], sampled: Sampled) -> list[NewToken]:
        """Append the tokens and finish the requests that they end."""
        events = []
        logprobs = token_logprobs(running, sampled)
        tokens = sampled.tokens.tolist()
        for request, token, logprob in zip(running, tokens, logprobs, strict=True):
            request.output.append(token)
            if token in request.stop_ids:
                request.finish_reason = "stop"
            elif len(request.output) >= request.max_tokens:
                request.finish_reason = "length"
            events.append(NewToken(request, token, logprob))
        return events


def token_logprobs(
    running: Sequence[Request], sampled: Sampled
) -> list[TokenLogprobs | None]:
    """Each row's log-probabilities, as many as its request asked for."""
    if sampled.logprobs is None or sampled.top is None:
        return [None] * len(running)
    chosen = zip(sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True)
    top = zip(*(part.tolist() for part in sampled.top), strict=True)
    found: list[TokenLogprobs | None] = []
    for request, (token, logprob), (ids, values) in zip(
        running, chosen, top, strict=True
    ):
        wanted = request.params.logprobs
        best = tuple(zip(ids, values, strict=True))[:wanted]
        found.append(None if wanted is None else TokenLogprobs(token, logprob, best))
    return found


class StopStrings:
    """Passes text on until one of ``stops`` appears in it, whatever the pieces.

    Text that may be the beginning of a stop string is held back until that is decided.
    Of several stop strings the one that ends first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What of the text so far is safe to show."""
        self.held += text
        ends = [
            (start + len(stop), start)
            for stop in self.stops
            if (start := self.held.find(stop)) >= 0
        ]
        if ends:
            self.found = True
            return self._take(min(ends)[1], forget=True)
        beginnings = (
            length
            for stop in self.stops
            for length in range(1, len(stop))
            if self.held.endswith(stop[:length])
        )
        return self._take(len(self.held) - max(beginnings, default=0))

    def flush(self) -> str:
        """What is held back, once no more text comes."""
        return self._take(len(self.held))

    def _take(self, end: int, forget: bool = False) -> str:
        text, rest = self.held[:end], self.held[end:]
        self.held = "" if forget else rest
        return text


@dataclass(frozen=True)
class RequestOutput:
    """What a request gave; from a stream, what one token added.

    ``text`` leaves special tokens out, ``token_ids`` hold them, the last one included.
    ``finish_reason`` is "stop" (an end-of-turn token, a stop token or a stop string),
    "length" or, from chapter 9 on, "timeout" or "abort" (cancelled, or the LLM closed);
    None while a stream goes on.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None
    prompt_token_ids: list[int]


class TextSide:
    """Turns one request's tokens into text, and finishes it at a stop string."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.decoder = tokenizer and StreamDecoder(tokenizer, skip_special=True)
        self.stops = StopStrings(request.params.stop)

    def push(self, new: NewToken) -> RequestOutput:
        """What ``new`` adds, in complete characters."""
        request, text = self.request, ""
        if self.decoder:
            text = self.stops.push(self.decoder.push(new.token_id))
            if request.finish_reason and not self.stops.found:
                text += self.stops.push(self.decoder.flush())
            if self.stops.found:
                request.finish_reason = "stop"
            elif request.finish_reason:
                text += self.stops.flush()
        return RequestOutput(
            text=text,
            token_ids=[new.token_id],
            finish_reason=request.finish_reason,
            logprobs=None if new.logprobs is None else [new.logprobs],
            prompt_token_ids=request.prompt,
        )


class Whole:
    """The parts of a stream, put together as they come.

    Keeps what they hold, and of the parts only the last. Each part is two objects for
    Python's garbage collector: with 100,000 of them it looks through all objects that
    there are, and all threads wait.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    def add(self, part: RequestOutput) -> None:
        self.texts.append(part.text)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs or ()
        self.last = part

    def output(self) -> RequestOutput:
        """All that has been added, of one part at least."""
        return replace(
            self.last,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=None if self.last.logprobs is None else self.logprobs,
        )


Prompt = str | Sequence[int]


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


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """What generation_config.json recommends: five numbers, null as good as absent.

    If ``do_sample`` is false, it recommends to be greedy. Nothing else in it counts.
    Raises TypeError or ValueError.
    """
    do_sample = generation.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise TypeError(f"do_sample is {short(do_sample)}; expected true or false")
    if do_sample is False:
        return SamplingParams(temperature=0.0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation.get(name) for name in names}
    return SamplingParams(**{k: v for k, v in given.items() if v is not None})


def find_file(folder: Path, name: str) -> Path | None:
    """``name`` in a checkpoint folder, or beside it if it is a hub's `original/`."""
    places = [folder]
    if folder.is_dir():
        names = (folder.absolute(), folder.resolve())  # it may be "." or a link
        places += [path.parent for path in names if path.name == "original"]
    files = [place / name for place in places if (place / name).is_file()]
    return files[0] if files else None


def read_generation_config(folder: Path) -> tuple[SamplingParams, tuple[int, ...]]:
    """How to sample and what ends a turn, by generation_config.json if there is one.

    Raises ConfigError, which names the file.
    """
    file = find_file(folder, "generation_config.json")
    try:
        generation = read_json(file) if file else {}
        return default_params(generation), end_token_ids(generation)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None


@dataclass(frozen=True)
class ChatOutput:
    """One turn of the assistant, its parts apart."""

    reasoning: str  # the analysis channel
    content: str  # what is meant for the user
    tool_calls: list[ToolCall]
    finish_reason: str | None
    token_ids: list[int]


CHAT_MAX_TOKENS = 1024  # reasoning included
TURN_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")


class LLM:
    """A model and all that is needed to give it text and get text back.

    ``path`` is a checkpoint folder in either layout; without it, the model that comes
    with the package. ``dtype``, ``device``, ``random_weights``, ``seed`` and
    ``backend`` are those of `load_model`. Without a tokenizer.json prompts are token
    ids. Any number of threads may share one LLM. Raises ConfigError, CheckpointError or
    TokenizerError.
    """

    _known: tuple[str, ...] = tuple(SamplingParams.__dataclass_fields__)  # overrides

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        random_weights: bool = False,
        seed: int | None = None,
        backend: Backend | Choice = TORCH,
    ) -> None:
        folder = EMBEDDED if path is None else Path(path)
        file = find_file(folder, "tokenizer.json")
        self._tokenizer = Tokenizer.from_file(file) if file else None
        self.default_params, ends = read_generation_config(folder)
        if self._tokenizer:  # before the weights are read, which may take minutes
            shapes = config_of(path, random_weights)
            check_tokenizer(shapes, self._tokenizer.vocab_size)
        self.model = load_model(
            path,
            dtype,
            device,
            random_weights=random_weights,
            seed=seed,
            backend=backend,
        )
        self.config = self.model.config
        self.eos_token_ids = self._eos_token_ids(ends)
        self.engine = RecomputeEngine(self.model)
        self._lock = threading.Lock()  # held for one step
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="simplellm")

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
        **overrides: Any,
    ) -> Future[list[RequestOutput]]:
        """Continue each prompt; the future's result is one output per prompt.

        A prompt is text, taken as it stands, or a list of token ids.
        ``sampling_params`` are one for all or one each, by default what the
        checkpoint's generation_config.json recommends; ``overrides`` replace fields of
        it. Raises TypeError or ValueError at once for what cannot run.
        """
        requests = self._requests(prompts, sampling_params, overrides)
        return self._worker.submit(self._complete, requests)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; each output holds what one more token added.

        Texts are whole characters and never part of a stop string; the last output
        has the finish_reason. Closing the iterator ends the request.
        """
        request = self._request(prompt, sampling_params, overrides)
        return self._outputs(request, self._tokens([request]))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        reasoning_effort: str = "medium",
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> ChatOutput:
        """The assistant's next turn in a conversation.

        ``messages`` are dicts as in OpenAI's chat completions, or harmony messages.
        Stop strings count in the final answer only, each message of it by itself. The
        default max_tokens is 1024.
        Raises TypeError or ValueError at once for what cannot run.
        """
        request = self._chat_request(
            messages, tools, reasoning_effort, sampling_params, overrides
        )
        return self._turn(request, self._tokens([request]))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        reasoning_effort: str = "medium",
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Iterator[Delta]:
        """Like `chat`, but the text as it comes, with its channel and recipient."""
        request = self._chat_request(
            messages, tools, reasoning_effort, sampling_params, overrides
        )
        parser = HarmonyParser(self.tokenizer)
        return self._deltas(request, parser, self._tokens([request]))

    def close(self) -> None:
        """Finish what was asked for and accept no more."""
        self._worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tokens(self, requests: Sequence[Request]) -> Iterator[NewToken]:
        """Every new token of ``requests`` until all are finished."""
        while any(request.finish_reason is None for request in requests):
            with self._lock:
                new = self.engine.step(requests)
            yield from new

    def _complete(self, requests: Sequence[Request]) -> list[RequestOutput]:
        sides = {request: TextSide(request, self._tokenizer) for request in requests}
        wholes = {request: Whole() for request in requests}
        for new in self._tokens(requests):
            wholes[new.request].add(sides[new.request].push(new))
        return [whole.output() for whole in wholes.values()]

    def _outputs(
        self, request: Request, tokens: Iterator[NewToken]
    ) -> Iterator[RequestOutput]:
        side = TextSide(request, self._tokenizer)
        for new in tokens:
            yield side.push(new)

    def _deltas(
        self, request: Request, parser: HarmonyParser, tokens: Iterator[NewToken]
    ) -> Iterator[Delta]:
        def parsed() -> Iterator[list[Delta]]:
            for new in tokens:
                yield parser.push(new.token_id)
            yield parser.finish()  # it may have ended without another token

        stops, ended = StopStrings(request.params.stop), 0
        for deltas in parsed():
            for delta in deltas:
                if delta.channel == "final" and delta.recipient is None:
                    delta = replace(delta, text=stops.push(delta.text))
                if delta.text or delta.call is not None:
                    yield delta
            if stops.found:
                request.finish_reason = "stop"
                return
            if len(parser.messages) > ended:  # no stop string goes on in the next
                ended = len(parser.messages)
                if rest := stops.flush():
                    yield Delta("final", None, rest)

    def _turn(self, request: Request, tokens: Iterator[NewToken]) -> ChatOutput:
        """The parts of the turn that ``tokens`` are."""
        parser = HarmonyParser(self.tokenizer)
        reasoning, content = "", ""
        for delta in self._deltas(request, parser, tokens):
            if delta.recipient is None and delta.channel == "analysis":
                reasoning += delta.text
            elif delta.recipient is None:
                content += delta.text
        return ChatOutput(
            reasoning=reasoning,
            content=content,
            tool_calls=tool_calls(parser.messages),
            finish_reason=request.finish_reason,
            token_ids=request.output,
        )

    def _chat_request(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        tools: Sequence[Tool | Mapping[str, Any]] | None,
        reasoning_effort: str,
        sampling_params: SamplingParams | None,
        overrides: Mapping[str, Any],
    ) -> Request:
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
        params = default if sampling_params is None else sampling_params
        return self._request(ids, params, overrides)

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        overrides: Mapping[str, Any],
    ) -> list[Request]:
        """A checked request for each prompt. Raises TypeError or ValueError."""
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
        return [
            self._request(prompt, params, overrides)
            for prompt, params in zip(every, sampling_params, strict=True)
        ]

    def _request(
        self,
        prompt: object,
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
    ) -> Request:
        """A checked request. Raises TypeError or ValueError."""
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"sampling_params is {type(params).__name__}; expected SamplingParams"
            )
        unknown = sorted(overrides.keys() - SamplingParams.__dataclass_fields__.keys())
        if unknown:
            raise TypeError(
                f"{unknown[0]!r} is no sampling parameter; expected one of "
                f"{', '.join(self._known)}"
            )
        params = replace(params, **overrides)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        if params.stop:
            self.tokenizer  # noqa: B018  (raises if there is none)
        ids = self._prompt_ids(prompt)
        context = self.config.max_position_embeddings
        if len(ids) >= context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; expected fewer than {context}, the "
                "model's context"
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
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        return Request(
            prompt=ids,
            params=params,
            stop_ids=eos.union(params.stop_token_ids),
            max_tokens=min(params.max_tokens, context - len(ids)),
        )

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

    def _eos_token_ids(self, recommended: Sequence[int]) -> frozenset[int]:
        """What ends a turn, by the config, generation_config.json and harmony."""
        special = self._tokenizer.special if self._tokenizer else {}
        ends = (special[name] for name in TURN_ENDS if name in special)
        return frozenset([*self.config.eos_token_ids, *recommended, *ends])
