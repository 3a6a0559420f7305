"""Choose the next token of each row of a batch of logits.

B rows (one sequence each), V vocabulary. Everything is vectorised over the batch and
stays on the logits' device. What a row gets depends on its own logits, its own
parameters, its seed and its step, never on the other rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOGPROBS = 20  # alternatives a request may ask for, as in OpenAI's interface


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise unless ``value`` is a real number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; expected a number")
    if not low <= value <= high:  # false for NaN as well
        raise ValueError(f"{name} is {value}; expected {low:g} to {high:g}")


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise unless ``value`` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected {low} to {high}")


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when they stop. Names as in vLLM.

    Penalties and biases change the logits first; then temperature divides them; then
    min_p, top_k and top_p, in this order, drop tokens; then one token is drawn.
    Raises TypeError or ValueError for a parameter of the wrong type or out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # the k most likely tokens; 0 or -1 keeps all
    top_p: float = 1.0  # the fewest tokens that hold this much probability
    min_p: float = 0.0  # tokens at least this fraction as likely as the likeliest
    repetition_penalty: float = 1.0  # of tokens seen so far (Keskar et al. 2019)
    presence_penalty: float = 0.0  # subtracted once from tokens in the output
    frequency_penalty: float = 0.0  # subtracted for each time in the output
    stop: str | Sequence[str] = ()  # text that ends the output, left out of it
    stop_token_ids: Sequence[int] = ()  # None is (), here and for stop
    ignore_eos: bool = False
    seed: int | None = None  # None: a new one for each request
    logprobs: int | None = None  # this many alternatives beside the chosen token
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these ids

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            entries = getattr(self, name)
            entries = () if entries is None else entries
            listed = isinstance(entries, list | tuple)
            if not listed or not all(isinstance(entry, kind) for entry in entries):
                raise TypeError(
                    f"{name} is {entries!r}; expected a list of {kind.__name__}"
                )
            object.__setattr__(self, name, tuple(entries))
        check_integer("max_tokens", self.max_tokens, 1, 2**31)
        check_number("temperature", self.temperature, 0, 100)
        check_integer("top_k", self.top_k, -1, 2**31)
        check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p is 0; expected more than 0 and at most 1")
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if "" in self.stop:
            raise ValueError(
                f"stop is {self.stop!r}; expected texts that are not empty"
            )
        for token in self.stop_token_ids:
            check_integer("a stop_token_ids entry", token, 0, 2**31)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.logit_bias, Mapping | None):
            raise TypeError(f"logit_bias is {self.logit_bias!r}; expected a dict")
        if self.logit_bias is not None:  # a copy: nobody changes what was checked
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in (self.logit_bias or {}).items():
            check_integer("a logit_bias token id", token, 0, 2**31)
            check_number(f"logit_bias of token {token}", bias, -100, 100)

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens there were."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(penalties)


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit values held in int64.

    A bijection in which each input bit flips each output bit about half the time: the
    shift-multiply hash of Ettinger's hash-prospector with 15 bits as its second shift.
    Its constants are below 2^31, so no product overflows int64: the same bits on every
    device.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def gumbel_noise(seeds: Tensor, steps: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise that is a function of (seed, step, token), not a stream.

    seeds int64 [B] (all 64 bits count) and steps int64 [B] -> float32 [B, V]. Counter
    based as in Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    low, high = seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF
    first = mix(mix(mix(low) ^ high) ^ steps)  # [B]
    second = mix(first ^ 0x5BD1E995)  # two keys a row: rows never share a sequence
    tokens = torch.arange(vocab_size, device=seeds.device)
    bits = mix(mix(tokens ^ first[:, None]) ^ second[:, None])  # [B, V]
    # Midpoints of 2^32 intervals; float32 would round the last 128 of them up to 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    # -log(1 - u) is exponential; log1p keeps its small values (the winners) sharp.
    return -torch.log(-torch.log1p(-uniform))


def count_tokens(
    sequences: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> Tensor:
    """How often each token occurs in each sequence: int64 [B, V]."""
    flat = [
        row * vocab_size + token
        for row, sequence in enumerate(sequences)
        for token in sequence
    ]
    cells = torch.tensor(flat, dtype=torch.int64, device=device)
    size = len(sequences) * vocab_size
    return torch.bincount(cells, minlength=size).view(-1, vocab_size)


def penalize(
    logits: Tensor,
    in_prompt: Tensor,
    in_output: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalised logits [B, V]; counts [B, V], penalties [B, 1].

    The repetition penalty divides a positive logit and multiplies a negative one, so
    that it always makes a token less likely.
    """
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((in_prompt + in_output) > 0, scaled, logits)
    return logits - frequency * in_output - presence * (in_output > 0)


def filter_tokens(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Logits [B, V] with -inf for every token that min_p, top_k or top_p drops.

    Parameters are [B, 1]; top_k is int64 in 1..V. Each filter sees what the one before
    it left, renormalised. All three keep a head of the sorted row, so the last kept
    logit is a threshold; tokens that tie with it stay.
    """
    ordered = logits.sort(dim=-1, descending=True).values  # [B, V]
    keep = ordered >= ordered[:, :1] + min_p.log()
    keep &= torch.arange(logits.shape[1], device=logits.device) < top_k
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # mass of the tokens ranked higher
    # Rounding may carry the sum to 1 early: a row without top_p must lose nothing.
    keep &= (before < top_p) | (top_p >= 1)
    # In float32 a tiny top_p is 0 and keeps none; the likeliest token stays.
    last = (keep.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return logits.masked_fill(logits < ordered.gather(1, last), -torch.inf)


def upload(
    values: Sequence[float], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """A list as a tensor on ``device``, without waiting for what the device does."""
    tensor = torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Columns:
    """A batch's parameters as columns [B, 1], and what no row needs as booleans.

    The booleans are Python's, so deciding what to skip never waits for the GPU. Built
    once for as long as a batch keeps its requests.
    """

    seeds: Tensor  # int64 [B]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, token ids, values
    random: bool
    filters: bool
    penalties: bool
    logprobs: int | None  # the most that any row asks for

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device
    ) -> "Columns":
        """The columns of ``params``; every seed that a drawing row uses must be set."""

        def column(values: list[float]) -> Tensor:
            return upload(values, torch.float32, device)[:, None]

        for number, p in enumerate(params):
            if p.temperature > 0 and p.seed is None:
                raise ValueError(
                    f"row {number} draws without a seed; expected an integer"
                )
        # Python's seeds run to 2^64 - 1; the same 64 bits as a signed integer.
        seeds = [((p.seed or 0) + 2**63) % 2**64 - 2**63 for p in params]
        top_k = [
            min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params
        ]
        biases = [
            (row, token, value)
            for row, p in enumerate(params)
            for token, value in (p.logit_bias or {}).items()
        ]
        bias = None
        if biases:
            rows, tokens, values = zip(*biases, strict=True)
            bias = (
                upload(rows, torch.int64, device),
                upload(tokens, torch.int64, device),
                upload(values, torch.float32, device),
            )
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            seeds=upload(seeds, torch.int64, device),
            temperature=column([p.temperature for p in params]),
            top_k=upload(top_k, torch.int64, device)[:, None],
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            bias=bias,
            random=any(p.temperature > 0 for p in params),
            filters=any(
                p.temperature > 0
                and (0 < p.top_k < vocab_size or p.top_p < 1 or p.min_p > 0)
                for p in params
            ),
            penalties=any(p.penalizes for p in params),
            logprobs=max(wanted) if wanted else None,
        )


@dataclass(frozen=True)
class Sampled:
    """One token a row; the other fields are None unless some row asked for logprobs."""

    tokens: Tensor  # int64 [B]
    logprobs: Tensor | None = None  # float32 [B], of the chosen tokens
    top: tuple[Tensor, Tensor] | None = None  # ids and logprobs [B, N], best first


def prepare(scores: Tensor, columns: Columns) -> Tensor:
    """Scores [B, V] over the temperatures, without what the filters drop."""
    # The best token sits at 0, so that no temperature, however small, overflows.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    drawing = columns.temperature > 0
    scores = scores / torch.where(drawing, columns.temperature, 1.0)
    if columns.filters:
        scores = filter_tokens(scores, columns.top_k, columns.top_p, columns.min_p)
    return scores


def sample(
    logits: Tensor,
    columns: Columns,
    steps: Tensor,
    in_prompt: Tensor | None = None,
    in_output: Tensor | None = None,
) -> Sampled:
    """Choose one token for each row of ``logits`` float32 [B, V].

    ``steps`` int64 [B] counts each row's tokens so far: with the seed it fixes the
    noise. The counts [B, V] of tokens seen are needed only if ``columns.penalties``.
    Logprobs are those of the logits as given, before penalties, biases and filters.
    The draw is Gumbel-max: argmax(logits / temperature + noise) has exactly the
    distribution softmax(logits / temperature).
    """
    scores = logits
    if columns.bias is not None:
        rows, tokens, values = columns.bias
        scores = scores.index_put((rows, tokens), values, accumulate=True)
    if columns.penalties:
        if in_prompt is None or in_output is None:
            raise ValueError("a row has penalties; expected the counts of its tokens")
        penalties = columns.repetition, columns.presence, columns.frequency
        scores = penalize(scores, in_prompt, in_output, *penalties)
    if columns.random:
        scores = prepare(scores, columns)
        noise = gumbel_noise(columns.seeds, steps, logits.shape[1])
        scores = torch.where(columns.temperature > 0, scores + noise, scores)
    chosen = scores.argmax(dim=-1)
    if columns.logprobs is None:
        return Sampled(chosen)
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(columns.logprobs, logits.shape[1]), dim=-1)
    picked = logprobs.gather(1, chosen[:, None])[:, 0]
    return Sampled(chosen, picked, (top.indices, top.values))
