"""What each operation computes with in a model: random inputs of its true widths.

A `Case` is one operation at one size, with several sets of arguments, each in memory of
its own, so that launches which take turns find nothing in the L2 cache. The tuner times
them, the sanitizer watches them; `random_model` is what the other scripts start from.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import speeds
import torch
from speeds import config_of
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from simplellm.checkpoint.checkpoint import RandomCheckpoint
from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.model.batch import KVGroup
from simplellm.model.build import build
from simplellm.model.feed_forward import route
from simplellm.model.kernels.fragments import Fragments, unpack
from simplellm.model.kernels.other_families import plainly
from simplellm.model.kernels.triton_ops import triton_ops
from simplellm.model.layers import Attention, Experts, Layer
from simplellm.model.memory import weight_bytes
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN

PAGE = 64
MAX_NUM_SEQS = 256
MOST = 200  # sets of arguments
L2 = 2.4e8  # bytes of inputs after which nothing of the first is cached any more
CUDA = torch.device("cuda")
# Arguments that operations write to.
WRITTEN = {"add_norm": (0,), "rope_and_cache": (3, 4), "head": (2,)}
OTHERS = {name: config_of(name) for name in speeds.MODELS}


def random_model(
    name: str,
    layers: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kernels: bool = True,
    batch_invariant: bool = False,
) -> Model:
    """A known model with ``layers`` layers, always the same random bfloat16 weights.

    The Triton kernels compute with it, or without ``kernels`` PyTorch.
    """
    config = (MODELS | OTHERS)[name]
    types = config.layer_types[:layers]
    config = replace(config, num_hidden_layers=layers, layer_types=types)
    checkpoint = RandomCheckpoint(config, dtype=torch.bfloat16, device=CUDA, seed=0)
    ops = PLAIN
    if kernels:
        ops = triton_ops(
            config,
            max_num_seqs=MAX_NUM_SEQS,
            device=CUDA,
            batch_invariant=batch_invariant,
        )

    def take(name: str) -> Any:
        weight = checkpoint[name]
        kind = torch.float32 if name.endswith("norm.weight") else dtype
        return weight.to(kind) if isinstance(weight, Tensor) else weight

    return build(config, take, ops)


@dataclass(frozen=True)
class Case:
    """An operation at one size, and what one call of it moves and computes at least."""

    kernel: str
    shape: str
    operation: Callable[..., Any]  # of the table under test
    twin: Callable[..., Any]  # in PyTorch
    arguments: Sequence[tuple[Any, ...]]
    nbytes: float
    flops: float = 0.0
    written: tuple[int, ...] = ()  # arguments that it writes to

    def calls(self) -> list[Callable[[], Any]]:
        """One call for each set of arguments."""
        return [partial(self.operation, *inputs) for inputs in self.arguments]

    def outcome(self) -> list[Tensor]:
        """All that the operation returns for, or writes into, the first arguments."""
        return self._outcome(self.operation, list(self.arguments[0]))

    def expected(self) -> list[Tensor]:
        """What the twin makes of the same arguments in float32."""
        return self._outcome(self.twin, [exact(x) for x in self.arguments[0]])

    def _outcome(self, function: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
        for place in self.written:
            inputs[place] = inputs[place].clone()
        result = function(*inputs)
        if self.kernel == "head":  # of near ties either token will do
            result = inputs[2].gather(1, result[:, None].long())
        results = result if isinstance(result, tuple) else (result,)
        return [x.float() for x in (*results, *(inputs[i] for i in self.written))]


def exact(value: Any) -> Any:
    """An argument with all its numbers in float32, experts as before `prepare`.

    In bfloat16 the twin's router would round its logits to ties, and choose other
    experts than the kernels, whose logits are float32.
    """
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, Experts) and isinstance(value.gate_up, Fragments):
        weights: Any = {n: unpack(getattr(value, n)) for n in ("gate_up", "down")}
        value = replace(value, **weights)
    if isinstance(value, Experts | Attention):
        parts = {f.name: exact(getattr(value, f.name)) for f in fields(value)}
        return replace(value, **parts)
    return value


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def integers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def groups(
    lengths: Sequence[int], chunks: Sequence[int], window: int | None, sets: int
) -> tuple[list[KVGroup], int]:
    """Sequences of these lengths, the last ``chunks`` of them new, ``sets`` times.

    Each has pages of its own in random order; also how many pages these are in all.
    """
    firsts = [
        0 if window is None else max(0, n - c + 1 - window) // PAGE
        for n, c in zip(lengths, chunks, strict=True)
    ]
    counts = [-(-n // PAGE) - f for n, f in zip(lengths, firsts, strict=True)]
    order = torch.randperm(sum(counts) * sets, device=CUDA).int()
    ends = [sum(chunks[:row]) for row in range(len(chunks) + 1)]
    owners = torch.repeat_interleave(torch.tensor(chunks))
    rows = zip(lengths, chunks, firsts, strict=True)
    places = torch.cat([torch.arange(n - c, n) - f * PAGE for n, c, f in rows])
    result = []
    for mine in order.cpu().split([sum(counts)] * sets):
        tables = pad(pad_sequence(mine.split(counts), batch_first=True), (0, 1))
        slots = tables[owners, places // PAGE] * PAGE + places % PAGE
        group = KVGroup(
            slots=slots.int().to(CUDA),
            tables=tables.to(CUDA),
            offsets=integers(firsts) * PAGE,
            lengths=integers(lengths),
            query_start_loc=integers(ends),
            decodes=len(chunks) if max(chunks) == 1 else 0,
            window=window,
            page_size=PAGE,
        )
        result.append(group)
    return result, sum(counts) * sets


class Cases:
    """Makes cases of a model's layers, whose weights take turns."""

    def __init__(self, model: Model) -> None:
        self.model, self.ops, self.config = model, model.ops, model.config

    def make(
        self,
        kernel: str,
        shape: str,
        operation: str,
        arguments: Sequence[tuple[Any, ...]],
        nbytes: float,
        flops: float = 0.0,
    ) -> Case:
        table, twin = getattr(self.ops, operation), getattr(PLAIN, operation)
        written = WRITTEN.get(operation, ())
        return Case(kernel, shape, table, twin, arguments, nbytes, flops, written)

    def layers(self, nbytes: float) -> list[Layer]:
        """Layers in turns, until their parts of ``nbytes`` are more than the cache."""
        count = max(2, min(MOST, math.ceil(L2 / nbytes)))
        return list(islice(cycle(self.model.layers), count))

    def embed(self, tokens: int) -> Case:
        ids = torch.randint(self.config.vocab_size, (tokens,), device=CUDA).int()
        ids[::3] = -1
        arguments = ids, integers([7]), self.model.embed_tokens
        nbytes = 4.0 * tokens * self.config.hidden_size
        return self.make("embed", str(tokens), "embed", [arguments] * 2, nbytes)

    def norm(self, tokens: int, parts: int) -> Case:
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        layers = self.layers(2.0 * tokens * (2 + parts) * width)
        norms = [plainly(layer.attn_norm) for layer in layers]  # one that rounds not
        arguments = [
            (normal(tokens, width), normal(tokens, parts, width), norm, eps)
            for norm in norms
        ]
        nbytes = 2.0 * tokens * width * (3 + parts)
        return self.make("norm", f"{tokens} / {parts}", "add_norm", arguments, nbytes)

    def project(self, name: str, tokens: int) -> Case:
        """``name`` is qkv or o, or gate_up or down of a dense model."""
        layers = self.model.layers
        parts = [x.attn if name in ("qkv", "o") else x.mlp for x in layers]
        weights = [getattr(part, name) for part in parts]
        rows, columns = weights[0].shape
        biases = [None if name == "qkv" else getattr(x, f"{name}_bias") for x in parts]
        arguments = [
            (normal(tokens, columns), weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        flops = 2.0 * tokens * rows * columns
        nbytes = weights[0].nbytes + 2.0 * tokens * (rows + columns)
        return self.make(name, str(tokens), "project", arguments, nbytes, flops)

    def rope(self, tokens: int) -> Case:
        attn = self.model.layers[0].attn
        width, heads = attn.qkv.shape[0], self.config.num_key_value_heads
        (group,), pages = groups([tokens], [tokens], None, 1)
        arguments = []
        for layer in self.layers(4.0 * tokens * width):
            shape = pages, PAGE, heads, self.config.head_dim
            keys, values = (torch.zeros(shape, device=CUDA).bfloat16() for _ in "kv")
            positions = torch.randint(len(attn.cos), (tokens,), device=CUDA).int()
            qkv = normal(tokens, width)
            arguments += [(qkv, layer.attn, positions, keys, values, group.slots)]
        nbytes = 4.0 * tokens * width
        return self.make("rope", str(tokens), "rope_and_cache", arguments, nbytes)

    def attend(
        self, lengths: Sequence[int], chunks: Sequence[int], window: int | None = None
    ) -> Case:
        """``window`` is that of the layer; None sees all."""
        config = self.config
        heads, dim = config.num_attention_heads, config.head_dim
        token = 4 * config.num_key_value_heads * dim  # bytes of a key and a value
        seen = [
            min(length, (window or length) + chunk - 1)
            for length, chunk in zip(lengths, chunks, strict=True)
        ]
        tokens, nbytes = sum(chunks), float(token * sum(seen))
        nbytes += 4.0 * tokens * heads * dim
        sets = max(2, min(MOST, round(L2 / nbytes)))
        found, pages = groups(lengths, chunks, window, sets)
        shape = pages, PAGE, config.num_key_value_heads, dim
        keys, values = normal(*shape), normal(*shape)
        sinks = self.model.layers[0].attn.sinks
        queries = [normal(tokens, heads, dim) for _ in found]
        arguments = [
            (q, keys, values, group, sinks)
            for q, group in zip(queries, found, strict=True)
        ]
        pairs = sum(
            min(position + 1, window or position + 1)
            for length, chunk in zip(lengths, chunks, strict=True)
            for position in range(length - chunk, length)
        )
        kernel = "decode" if max(chunks) == 1 else "prefill"
        kernel += f" {window}" if window else ""
        shape_name = f"{len(lengths)} x {lengths[0]}"
        flops = 4.0 * heads * dim * pairs
        return self.make(kernel, shape_name, "attend", arguments, nbytes, flops)

    def experts(self, tokens: int) -> Case:
        num_tokens, config = integers([tokens]), self.config
        arguments, distinct = [], 0
        for layer in self.model.layers:
            x, mlp = normal(tokens, config.hidden_size), layer.mlp
            assert isinstance(mlp, Experts)
            ids, _ = route(x, mlp.router, mlp.router_bias, mlp.top_k)
            distinct += len(ids.unique())
            arguments.append((x, mlp, num_tokens))
        layers = config.num_hidden_layers
        stored = weight_bytes(config)["experts"]
        one = stored / layers / config.num_local_experts
        sizes = 3 * config.hidden_size * config.intermediate_size
        flops = 2.0 * tokens * config.num_experts_per_tok * sizes
        nbytes = one * distinct / layers
        return self.make("experts", str(tokens), "experts", arguments, nbytes, flops)

    def head(self, rows: int) -> Case:
        weight = self.model.lm_head
        logits = torch.empty(rows, len(weight), device=CUDA)  # type: ignore[arg-type]
        hidden = [normal(rows, self.config.hidden_size) for _ in range(2)]
        arguments = [(x, weight, logits) for x in hidden]
        flops = 2.0 * rows * self.config.vocab_size * self.config.hidden_size
        nbytes = weight.nbytes + logits.nbytes
        return self.make("head", str(rows), "head", arguments, nbytes, flops)

    def draw(self, rows: int) -> Case:
        logits = [torch.randn(rows, self.config.vocab_size, device=CUDA) for _ in "12"]
        numbers = torch.arange(rows, device=CUDA)
        temperature = torch.ones(rows, device=CUDA)
        arguments = [
            (x, x.argmax(-1).int(), temperature, numbers, numbers) for x in logits
        ]
        return self.make("draw", str(rows), "draw", arguments, logits[0].nbytes)


def small_cases(model: Model) -> dict[str, list[Case]]:
    """Every kernel in all its forms, on little."""
    cases = Cases(model)
    small: dict[str, list[Case]] = {
        "embed": [cases.embed(4)],
        "norm": [cases.norm(*size) for size in ((1, 3), (5, 6), (33, 1))],
        "rope": [cases.rope(tokens) for tokens in (1, 40)],
        "linear": [
            cases.project(name, tokens)
            for name in ("qkv", "o")
            for tokens in (1, 3, 17, 60)
        ],
        "experts": [cases.experts(n) for n in (2, 5, 60, 200, 500)],
        "experts_one": [cases.experts(1)],
        "head": [cases.head(rows) for rows in (1, 3, 17, 100)],
        "draw": [cases.draw(rows) for rows in (1, 9)],
    }
    for window in model.config.windows:
        # Split and joined by heads, by kv heads, of no length, of one page and a bit.
        lengths: list[list[int]] = [[700], [600] * 9, [300, 1, 129], [65] * 17]
        small.setdefault("decode", []).extend(
            cases.attend(some, [1] * len(some), window) for some in lengths
        )
        small.setdefault("prefill", []).append(
            cases.attend([300, 129, 17], [140, 129, 1], window)
        )
    return small
