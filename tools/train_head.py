"""Trains an EAGLE-3 head for a model, on what the model itself writes.

    python tools/train_head.py HEAD --minutes 20 --json figures/d-head.json
    python tools/train_head.py HEAD --model Qwen3-0.6B --prompts prompts.txt
    python tools/train_head.py HEAD --minutes 0 --speeds --device cpu --json OUT

HEAD is the folder to make, in the layout of SpecForge's. The model answers questions
greedily: those of the embedded model's training side, or the lines of a file. Then the
head learns, from the states of three layers, to say the model's next tokens, several in
a row as in use: what it made of one draft is what it reads for the next (EAGLE-3's
training-time test, Li et al. 2025). At last the engine drafts with it on questions that
are held out, and the record says what was accepted; with --speeds also how fast each
of them is answered by itself, with and without drafts in turns. With --minutes 0
nothing is learned: HEAD is there.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "embedded")]

import torch
from problems import EVALUATED, draw, evaluation_set
from records import argument_parser, header, save
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from simplellm import LLM, __version__
from simplellm.api.load import load_model
from simplellm.base.config import ModelConfig
from simplellm.checkpoint.eagle import (
    HeadConfig,
    head_shapes,
    may_lack,
    read_head,
    read_head_config,
)
from simplellm.model.attention import masked_attention, visible
from simplellm.model.batch import Batch, KVGroup
from simplellm.model.eagle import as_model, tapped
from simplellm.model.kv_pool import KVPool
from simplellm.model.machine import find_device, name_of
from simplellm.model.model import Model
from simplellm.model.offline_batch import PAGE
from simplellm.model.ops import rms_norm
from simplellm.model.rotations import rotations

STEPS = 3  # drafts in a row that are learned
DECAY = 0.8  # of the weight of each further one
READ = 64  # texts whose states are computed at once
CACHE = 2**31  # bytes
EFFORTS = ("low", "medium", "high")
EVALUATION = 100  # questions
WARM = 5  # of them, that are answered once before
NEWS = 5.0  # seconds from one line about how it goes to the next
Answer = tuple[list[int], int]  # a prompt with the model's answer; where that begins


@dataclass(frozen=True)
class Lesson:
    """B answers side by side, padded to T tokens, and what the model made of them."""

    tokens: Tensor  # int64 [B, T + STEPS + 1]
    wanted: Tensor  # bool, of this shape: the tokens that a head can draft
    states: Tensor  # bfloat16 [B, T, 3 * hidden]
    last: Tensor  # bfloat16 [B, T + STEPS + 1, hidden], what the model's head gets


def questions(args: argparse.Namespace, held_out: bool) -> list[Any]:
    """What the model is asked: a prompt, and how long to think, of each."""
    if args.prompts is not None:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.strip()]
        part = kept[-EVALUATION:] if held_out else kept[:-EVALUATION]
        return [(line, "medium") for line in part]
    if held_out:
        return [(p.question, "medium") for p in evaluation_set(EVALUATION)]
    rng, drawn = random.Random(args.seed), list[Any]()
    for make in cycle(EVALUATED.values()):
        if len(drawn) == args.texts:
            return drawn
        effort = rng.choices(EFFORTS, (1, 2, 1))[0]
        drawn.append((draw(make, rng, evaluation=False).question, effort))
    raise AssertionError


def prompts(llm: LLM, pairs: Sequence[Any]) -> list[list[int]]:
    """The token ids of chats that ask so."""
    chats = [([{"role": "user", "content": text}], effort) for text, effort in pairs]
    process = llm.input_processor.process_chat
    return [process(chat, reasoning_effort=effort).tokens for chat, effort in chats]


def opened(args: argparse.Namespace, **options: Any) -> LLM:
    """The model, exact on a CPU: there a file of few bits would stay packed."""
    device = find_device(args.device)
    dtype = "float32" if device.type == "cpu" else None
    return LLM(args.model, device=device, dtype=dtype, **options)


def answers(llm: LLM, args: argparse.Namespace) -> list[Answer]:
    """What the model says to questions that aren't held out."""
    chats = prompts(llm, questions(args, held_out=False))
    options: Any = {"temperature": 0, "max_tokens": args.max_tokens}
    began = time.monotonic()
    outputs = llm.generate(chats, **options).result()
    spent = time.monotonic() - began
    written = sum(len(output.token_ids) for output in outputs)
    print(f"{written} tokens written, {written / spent:.0f} a second", flush=True)
    pairs = zip(chats, outputs, strict=True)
    return [([*prompt, *output.token_ids], len(prompt)) for prompt, output in pairs]


def packed(texts: Sequence[list[int]], model: Model) -> Batch:
    """A step that computes whole texts, each in pages of its own, in order."""
    counts, windows = torch.tensor([*map(len, texts)]), model.config.windows
    rows, pages = len(texts), -(-int(counts.max()) // PAGE)
    total = int(counts.sum())
    shape = total, rows, pages
    flat = torch.zeros(Batch.size(*shape, len(windows)), dtype=torch.int32)
    batch = Batch.of(flat, *shape, 0, windows, PAGE)
    batch.tokens[:] = torch.tensor([token for text in texts for token in text])
    batch.positions[:] = torch.cat([torch.arange(len(text)) for text in texts])
    batch.lengths[:] = counts
    batch.query_start_loc[1:] = counts.cumsum(0)
    owners = torch.arange(rows).repeat_interleave(counts)
    for number, group in enumerate(batch.groups):
        first = number * rows * pages
        group.tables[:] = first + torch.arange(rows * pages).view(rows, pages)
        group.slots[:] = batch.positions + (first + owners * pages) * PAGE
    return Batch.of(flat.to(model.device), *shape, 0, windows, PAGE)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, sinks: Tensor | None
) -> Tensor:
    """`simplellm.model.ops.attend` for a batch of `packed`, without a loop over it."""
    k, v = (x[group.tables].flatten(1, 2).nan_to_num() for x in (keys, values))
    rows, places = k.shape[:2]
    row, place = group.slots.div(places, rounding_mode="floor"), group.slots % places
    row, side = row % rows, q.new_zeros(rows, places, *q.shape[1:])
    side[row, place] = q
    every = torch.arange(places, device=q.device)
    mask = visible(every, every, group.window)
    out = masked_attention(side, k, v, mask, sinks, q.shape[2] ** -0.5)
    return out[row, place]


@torch.inference_mode()
def states_of(
    model: Model, layers: Sequence[int], texts: Sequence[list[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Of each text, what ``layers`` and what the last one made of its tokens."""
    batch, seen = packed(texts, model), list[Tensor]()
    pages = batch.groups[0].tables.numel() * len(batch.groups)
    pool = KVPool(model.config, pages, PAGE, model.dtype, model.device)
    taps = {layer + 1: lambda x: seen.append(x.clone()) for layer in layers}
    model = replace(model, ops=replace(tapped(model, taps), attend=attend))
    last = model.forward(batch, pool, batch.tokens[:1]).bfloat16()
    states, counts = torch.cat(seen, dim=-1).bfloat16(), [*map(len, texts)]
    return [*zip(states.split(counts), last.split(counts), strict=True)]


def lesson(model: Model, layers: Sequence[int], answers: Sequence[Answer]) -> Lesson:
    """Of these answers, by a model that computes them again."""
    computed = list[tuple[Tensor, Tensor]]()
    for start in range(0, len(answers), READ):
        texts = [tokens for tokens, _ in answers[start : start + READ]]
        computed += states_of(model, layers, texts)
    longest, width = max(len(tokens) for tokens, _ in answers), model.config.hidden_size
    shape, device = (len(answers), longest + STEPS + 1), model.device
    tokens = torch.zeros(shape, dtype=torch.int64)
    wanted = torch.zeros(shape, dtype=torch.bool)
    states = torch.zeros(shape[0], longest, len(layers) * width, dtype=torch.bfloat16)
    last = torch.zeros(*shape, width, dtype=torch.bfloat16)
    states, last = states.to(device), last.to(device)
    for row, ((ids, first), made) in enumerate(zip(answers, computed, strict=True)):
        size = len(ids)
        tokens[row, :size], wanted[row, first + 1 : size] = torch.tensor(ids), True
        states[row, :size], last[row, :size] = made
    return Lesson(tokens.to(device), wanted.to(device), states, last)


class Student(nn.Module):
    """A head that learns: the layer of `model.eagle`, for batches of whole texts."""

    def __init__(self, config: HeadConfig, model: Model) -> None:
        super().__init__()
        self.config, lacking = config, may_lack(config)
        assert isinstance(model.lm_head, Tensor)  # as float32 always is
        self.embed, self.lm_head = model.embed_tokens, model.lm_head
        self.cos, self.sin = rotations(as_model(config, 8192), model.device)
        weights = {}
        for name, shape in head_shapes(config).items():
            if name not in lacking:
                one = torch.ones(shape) if "norm" in name else torch.empty(shape)
                if len(shape) > 1:
                    nn.init.normal_(one, std=shape[1] ** -0.5)
                weights[name.replace(".", "/")] = nn.Parameter(one.to(model.device))
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # it begins as fc alone
            nn.init.zeros_(weights[f"layer.{name}.weight".replace(".", "/")])
        self.weights = nn.ParameterDict(weights)

    def take(self, name: str) -> Tensor:
        found: Tensor = self.weights[name.replace(".", "/")]
        return found

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.take(f"{name}.weight"), self.config.rms_norm_eps)

    def heads(self, x: Tensor, name: str, shift: int | None) -> Tensor:
        """One projection as heads [B, heads, T, D], rotated if ``shift`` is given."""
        x = x @ self.take(f"layer.self_attn.{name}_proj.weight").T
        x = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        if shift is not None:
            where = slice(shift, shift + x.shape[2])
            cos, sin = self.cos[where], self.sin[where]
            a, b = x.chunk(2, dim=-1)
            x = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        groups = self.config.num_attention_heads // x.shape[1]
        return x.repeat_interleave(groups, dim=1)

    def forward(self, states: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """The logits [B, T, V] after each of STEPS drafts.

        states [B, T, 3 * hidden], tokens [B, T + STEPS]: row t of draft j reads token
        t + 1 + j, and its logits are for the one after that.
        """
        config, count = self.config, states.shape[1]
        if config.norm_before_fc:
            states = self.norm(states, "input_norm")
        x = states @ self.take("fc.weight").T
        later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
        keys, values = list[Tensor](), list[Tensor]()
        for step in range(STEPS):
            ids = tokens[:, 1 + step : 1 + step + count]
            embedded = self.norm(self.embed[ids], "layer.input_layernorm")
            h = self.norm(x, "layer.hidden_norm")
            both = torch.cat([embedded, h], dim=-1)
            q = self.heads(both, "q", step)
            keys.append(self.heads(both, "k", step))
            values.append(self.heads(both, "v", None))
            scores = (q @ keys[0].mT).masked_fill(later, -torch.inf)
            own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
            shares = torch.cat([scores, *own], dim=-1) * config.head_dim**-0.5
            shares = shares.softmax(-1)
            out = shares[..., :count] @ values[0]
            for number, value in enumerate(values[1:]):
                out = out + shares[..., count + number, None] * value
            out = out.transpose(1, 2).flatten(2)
            x = x + out @ self.take("layer.self_attn.o_proj.weight").T
            h = self.norm(x, "layer.post_attention_layernorm")
            gate = h @ self.take("layer.mlp.gate_proj.weight").T
            up = h @ self.take("layer.mlp.up_proj.weight").T
            down = self.take("layer.mlp.down_proj.weight")
            x = x + (functional.silu(gate) * up) @ down.T
            normed = self.norm(x, "norm")
            yield normed @ self.lm_head.T
            x = normed if config.norm_output else x


def loss_of(student: Student, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """The loss, and the share of right drafts at each place. Waits for nothing."""
    targets, count = lesson.last.float() @ student.lm_head.T, lesson.states.shape[1]
    best, targets = targets.argmax(-1), targets.softmax(-1)
    total, rights = targets.new_zeros(()), list[Tensor]()
    for step, logits in enumerate(student(lesson.states.float(), lesson.tokens)):
        wanted = lesson.wanted[:, 2 + step : 2 + step + count]
        weights = wanted / wanted.sum().clamp(min=1)
        said = slice(1 + step, 1 + step + count)  # by the model, in these rows
        losses = -(targets[:, said] * logits.log_softmax(-1)).sum(-1)
        total = total + DECAY**step * (losses * weights).sum()
        rights.append(((logits.argmax(-1) == best[:, said]) * weights).sum())
    return total, torch.stack(rights)


def train(student: Student, lessons: Sequence[Lesson], args: argparse.Namespace) -> int:
    """Learn for as long as ``args`` say; how many steps that were."""
    rng, count, order = random.Random(args.seed), 0, [*lessons]
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    began, news = time.monotonic(), 0.0
    while (spent := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        if count % len(order) == 0:
            rng.shuffle(order)
        warm = min(1.0, (count + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * warm * max(1 - spent, 0.02)
        loss, rights = loss_of(student, order[count % len(order)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        # What is printed is waited for, so that the clock is the device's, too.
        if (now := time.monotonic()) > news:
            places = " ".join(f"{right:.3f}" for right in rights.tolist())
            print(f"{spent:6.1%} {count:6} loss {loss.item():.3f} right {places}")
            sys.stdout.flush()
            news = now + NEWS
        count += 1
    return count


def config_of(args: argparse.Namespace, target: ModelConfig) -> HeadConfig:
    """A head for ``target``. Raises ConfigError if it has too few layers."""
    count = target.num_hidden_layers
    layers = tuple(map(int, args.layers.split(","))) if args.layers else None
    config = HeadConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=args.intermediate_size or 4 * target.hidden_size,
        num_attention_heads=args.heads or target.num_attention_heads,
        num_key_value_heads=(args.heads or 2 * target.num_key_value_heads) // 2,
        head_dim=args.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        layer_ids=layers or (1, count // 2 - 1, count - 4),
        norm_before_fc=True,
        norm_output=True,
    )
    config.check_fits(target)
    return config


def head_files(folder: Path, head: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a head as SpecForge does; ``tensors`` are by our names."""
    folder.mkdir(parents=True, exist_ok=True)
    config = asdict(head)
    layers = config.pop("layer_ids")
    config = {k: v for k, v in config.items() if v is not None and v is not False}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True},
    }
    if layers is not None:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(layers)
    text = json.dumps(dict(sorted(config.items())), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    named = {
        name.replace("layer.", "midlayer.", 1) if name.startswith("layer") else name: t
        for name, t in tensors.items()
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def accepted(args: argparse.Namespace) -> dict[str, Any]:
    """What the engine accepts of the head's drafts on held-out questions."""
    options: Any = {"speculative": str(args.head), "num_speculative_tokens": STEPS}
    options["cache_bytes"] = CACHE
    with opened(args, **options) as llm:
        chats = prompts(llm, questions(args, held_out=True))
        limits: Any = {"temperature": 0, "max_tokens": args.max_tokens}
        llm.generate(chats, **limits).result()
        stats = llm.stats()
    right = sum(stats.accepted_tokens.values())
    rates = [
        stats.accepted_tokens.get(place, 0) / count
        for place, count in stats.draft_tokens.items()
    ]
    tensors = read_head(args.head, read_head_config(args.head))
    return {
        "numbers": sum(tensor.numel() for tensor in tensors.values()),
        "questions": len(chats),
        "checked": stats.drafts,
        "acceptance_length": 1 + right / stats.drafts,
        "right_by_place": rates,
    }


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second at batch 1, of an engine without drafts and of one with them.

    The number of drafts is the engine's choice. Each question is answered by both, one
    after the other, so that what else the machine does slows both.
    """
    device = find_device(args.device)
    limits: Any = {"temperature": 0, "max_tokens": args.max_tokens}
    ways: dict[str, Any] = {"without": {}, "with": {"speculative": str(args.head)}}
    spent, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(args.model, device=device, cache_bytes=CACHE, **way)
            )
            for name, way in ways.items()
        }
        chats = prompts(engines["with"], questions(args, held_out=True))
        for turn, prompt in enumerate([*chats[:WARM], *chats]):
            for name, llm in engines.items():
                (output,) = llm.generate([prompt], **limits).result()
                if turn >= WARM:
                    times, count = output.metrics, len(output.token_ids) - 1
                    spent[name] += times.finished_time - times.first_token_time
                    tokens[name] += count
        threads, why = torch.get_num_threads(), engines["with"].backend_reason
    rates = {name: tokens[name] / spent[name] for name in ways}
    return {
        "backend": why,
        "threads": threads,
        "tokens_per_second": rates,
        "times": rates["with"] / rates["without"],
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("head", type=Path, help="the folder to make")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--prompts", type=Path, help="a question in each line")
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=20, help="of learning")
    parser.add_argument("--speeds", action="store_true", help="at batch 1, too")
    parser.add_argument("--batch", type=int, default=16, help="texts in a step of it")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--layers", default="", help="three, as in 1,3,4")
    parser.add_argument("--heads", type=int, help="of attention, half as many of keys")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--intermediate-size", type=int)
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    device = name_of(find_device(args.device))
    record = header() | {"device": device, "simplellm": __version__, "drafts": STEPS}
    if args.minutes > 0:
        record |= learned(args)
        save(record, args.json)
    record |= accepted(args)
    if args.speeds:
        record |= speeds(args)
    print(json.dumps(record, indent=1))
    save(record, args.json)


def learned(args: argparse.Namespace) -> dict[str, Any]:
    """Make a head; what it took."""
    began = time.monotonic()
    # Little memory for a cache: how much is free when it ends is up to Python.
    with opened(args, max_waiting=args.texts, cache_bytes=CACHE) as llm:
        config = config_of(args, llm.config)
        texts = sorted(answers(llm, args), key=lambda text: len(text[0]))
    # In float32, whatever the engine computes in: the head is for both.
    model, size = load_model(args.model, "float32", args.device), args.batch
    layers = config.layers(model.config.num_hidden_layers)
    lessons = [
        lesson(model, layers, texts[n : n + size]) for n in range(0, len(texts), size)
    ]
    student = Student(config, model)
    numbers = sum(weight.numel() for weight in student.parameters())
    spent = time.monotonic() - began
    print(f"{len(texts)} texts in {spent:.0f} s; a head of {numbers:,} numbers")
    steps = train(student, lessons, args)
    weights = {
        name.replace("/", "."): weight.detach().bfloat16().cpu().contiguous()
        for name, weight in student.weights.items()
    }
    head_files(args.head, config, weights)
    seconds = round(time.monotonic() - began, 1)
    return {"texts": len(texts), "batches": steps, "seconds": seconds}


if __name__ == "__main__":
    main()
