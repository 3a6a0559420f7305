"""Trains an EAGLE-3 head for a model, on what the model itself writes.

    python tools/train_head.py HEAD --minutes 20 --json figures/d-head.json
    python tools/train_head.py HEAD --model Qwen3-0.6B --prompts prompts.txt
    python tools/train_head.py HEAD --minutes 0 --speeds --device cpu --json OUT

    python tools/chat_prompts.py > prompts.txt
    python tools/train_head.py HEAD --model smollm2 --prompts prompts.txt \
        --dtype bfloat16 --draft-vocab 4096 --batch 8 --json figures/d-head-smollm2.json

HEAD is the folder to make, in the layout of SpecForge's. The model answers questions
greedily: those of the embedded model's training side, or the lines of a file, of which
the last 100 are held out. Then the head learns, from the states of three layers, to say
the model's next tokens, several in a row as in use: what it made of one draft is what
it reads for the next (EAGLE-3's training-time test, Li et al. 2025). At last the engine
drafts with it on questions that are held out, and the record says what was accepted,
and how many answers are the same without drafts; with --speeds also how fast each of
them is answered by itself, with and without drafts in turns. With --minutes 0 nothing
is learned: HEAD is there.

A run that was interrupted goes on where it was, if it's started again: until it's done,
HEAD/unfinished has the answers and what has been learned.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
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
from simplellm.model.eagle import as_model, with_taps
from simplellm.model.kv_pool import KVPool
from simplellm.model.machine import find_device, name_of
from simplellm.model.model import Model
from simplellm.model.one_sequence import PAGE
from simplellm.model.ops import rms_norm
from simplellm.model.rope_cache import rotations

STEPS = 3  # drafts in a row that are learned
DECAY = 0.8  # of the weight of each further one
READ = 64  # texts whose states are computed at once
CACHE = 2**31  # bytes
EFFORTS = ("low", "medium", "high")
EVALUATION = 100  # questions
WARM = 5  # of them, that are answered once before
NEWS = 5.0  # seconds from one line about how it goes to the next
ROUND = 128  # answers that are written, and kept, at once
KEEP = 60.0  # seconds after which what has been learned is kept
Answer = tuple[list[int], int]  # a prompt with the model's answer; where that begins


@dataclass(frozen=True)
class Lesson:
    """B answers side by side, padded to T tokens, and what the model made of them."""

    tokens: Tensor  # int64 [B, T + STEPS + 1]
    wanted: Tensor  # bool, of this shape: the tokens that a head is to draft
    best: Tensor  # int64, of this shape: the model's next token as the head numbers it
    states: Tensor  # bfloat16 [B, T, 3 * hidden]
    last: Tensor  # bfloat16 [B, T + STEPS + 1, hidden], what the model's head gets


def questions(args: argparse.Namespace, held_out: bool) -> list[Any]:
    """What the model is asked: a prompt, and how long to think, of each."""
    if args.prompts is not None:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.strip()]
        part = kept[-EVALUATION:] if held_out else kept[:-EVALUATION]
        return [(line, None) for line in part[: args.texts]]
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
    process, chats = llm.input_processor.process_chat, list[list[int]]()
    for text, effort in pairs:
        options: Any = {} if effort is None else {"reasoning_effort": effort}
        chats.append(process([{"role": "user", "content": text}], **options).tokens)
    return chats


def opened(args: argparse.Namespace, dtype: str | None = None, **options: Any) -> LLM:
    """The model, exact on a CPU: there a file of few bits would stay packed."""
    device = find_device(args.device)
    if dtype is None and device.type == "cpu":
        dtype = "float32"
    return LLM(args.model, device=device, dtype=dtype, **options)


def answers(llm: LLM, args: argparse.Namespace, kept: Path) -> list[Answer]:
    """What the model says to questions that aren't held out; ``kept`` as it comes."""
    chats = prompts(llm, questions(args, held_out=False))
    options: Any = {"temperature": 0, "max_tokens": args.max_tokens}
    pairs = list[Answer]()
    if kept.exists():
        with kept.open(encoding="utf-8") as lines:
            pairs += (tuple(json.loads(line)) for line in lines)
    while len(pairs) < len(chats):
        began, some = time.monotonic(), chats[len(pairs) : len(pairs) + ROUND]
        outputs = llm.generate(some, **options).result()
        spent = time.monotonic() - began
        new = [
            ([*prompt, *output.token_ids], len(prompt))
            for prompt, output in zip(some, outputs, strict=True)
        ]
        pairs += new
        with kept.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(answer) + "\n" for answer in new)
        written = sum(len(output.token_ids) for output in outputs)
        rate = f"{written / spent:.0f} a second"
        print(f"{len(pairs)} answers; {written} tokens more, {rate}", flush=True)
    return pairs


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
    model = replace(model, ops=replace(with_taps(model, taps), attend=attend))
    last = model.forward(batch, pool, batch.tokens[:1]).bfloat16()
    states, counts = torch.cat(seen, dim=-1).bfloat16(), [*map(len, texts)]
    return [*zip(states.split(counts), last.split(counts), strict=True)]


def draft_vocabulary(answers: Sequence[Answer], size: int) -> Tensor | None:
    """The most frequent tokens of the answers, int64 [size]; None: all that there are.

    As few as the answers have, if that is less.
    """
    if size == 0:
        return None
    counts = Counter(token for ids, first in answers for token in ids[first:])
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


@torch.no_grad()  # and not inference_mode: gradients are computed with a lesson
def lesson(
    model: Model,
    layers: Sequence[int],
    answers: Sequence[Answer],
    numbers: Tensor,
) -> Lesson:
    """Of these answers, by a model that computes them again.

    ``numbers`` [V] are the head's of all tokens, -1 of those that it can't draft.
    """
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
    best = torch.zeros(shape, dtype=torch.int64, device=device)
    states, last = states.to(device), last.to(device)
    for row, ((ids, first), made) in enumerate(zip(answers, computed, strict=True)):
        size = len(ids)
        tokens[row, :size], wanted[row, first + 1 : size] = torch.tensor(ids), True
        states[row, :size], last[row, :size] = made
        head, x = model.lm_head, made[1].to(model.dtype)
        assert isinstance(head, Tensor)  # as it always is without few bits
        best[row, :size] = numbers[functional.linear(x, head).argmax(-1)]
    return Lesson(tokens.to(device), wanted.to(device), best, states, last)


class Student(nn.Module):
    """A head that learns: the layer of `model.eagle`, for batches of whole texts."""

    def __init__(self, config: HeadConfig, model: Model, ids: Tensor | None) -> None:
        super().__init__()
        self.config, self.ids = config, ids
        lacking = {*may_lack(config), "embed_tokens.weight", "lm_head.weight", "d2t"}
        assert isinstance(model.lm_head, Tensor)
        self.embed, self.lm_head = model.embed_tokens.float(), model.lm_head.float()
        if ids is not None:  # the model's own rows, which don't learn
            self.lm_head = self.lm_head[ids].clone()
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
        """What logits are made of, [B, T, hidden], after each of STEPS drafts.

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
            yield normed
            x = normed if config.norm_output else x


def loss_of(student: Student, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """The loss, and the share of right drafts at each place. Waits for nothing."""
    count, states = lesson.states.shape[1], lesson.states.float()
    total, rights = states.new_zeros(()), list[Tensor]()
    for step, normed in enumerate(student(states, lesson.tokens)):
        wanted = lesson.wanted[:, 2 + step : 2 + step + count]
        said = slice(1 + step, 1 + step + count)  # by the model, in these rows
        best, last = lesson.best[:, said][wanted], lesson.last[:, said][wanted]
        logits = (normed[wanted] @ student.lm_head.T).float()
        targets = (last.float() @ student.lm_head.T).float().softmax(-1)
        losses = -(targets * logits.log_softmax(-1)).sum(-1)
        # What it can't draft is never right, and it needn't learn what comes there.
        losses = losses * (best >= 0)
        total = total + DECAY**step * losses.mean()
        rights.append((logits.argmax(-1) == best).float().mean())
    return total, torch.stack(rights)


def train(
    student: Student, lessons: Sequence[Lesson], args: argparse.Namespace, kept: Path
) -> int:
    """Learn for as long as ``args`` say, and keep it; how many steps that were."""
    rng, count, order = random.Random(args.seed), 0, [*lessons]
    autocast = torch.autocast(
        student.embed.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"
    )
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    began, news = time.monotonic(), 0.0
    if kept.exists():
        state = torch.load(kept)
        count, before = state["count"], state["seconds"]
        student.load_state_dict(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        began -= before
    keep = time.monotonic() + KEEP
    while (spent := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        if count % len(order) == 0:
            rng.shuffle(order)
        warm = min(1.0, (count + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * warm * max(1 - spent, 0.02)
        with autocast:
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
        if now > keep:
            state = {
                "student": student.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            state |= {"count": count, "seconds": now - began}
            torch.save(state, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)
            keep = now + KEEP
    return count


def config_of(
    args: argparse.Namespace, target: ModelConfig, ids: Tensor | None
) -> HeadConfig:
    """A head for ``target``, which drafts the tokens ``ids``.

    Raises ConfigError if the model has too few layers.
    """
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
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
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
    """What the engine accepts of the head's drafts on held-out questions.

    And how many of its answers are those of an engine without drafts.
    """
    limits: Any = {"temperature": 0, "max_tokens": args.max_tokens}
    with opened(args, cache_bytes=CACHE) as llm:
        chats = prompts(llm, questions(args, held_out=True))
        plain = llm.generate(chats, **limits).result()
    options: Any = {"speculative": str(args.head), "num_speculative_tokens": STEPS}
    with opened(args, cache_bytes=CACHE, **options) as llm:
        outputs = llm.generate(chats, **limits).result()
        stats = llm.stats()
    pairs = zip(plain, outputs, strict=True)
    same = sum(one.token_ids == other.token_ids for one, other in pairs)
    right = sum(stats.accepted_tokens.values())
    rates = [
        stats.accepted_tokens.get(place, 0) / count
        for place, count in stats.draft_tokens.items()
    ]
    tensors = read_head(args.head, read_head_config(args.head))
    return {
        "numbers": sum(tensor.numel() for tensor in tensors.values()),
        "questions": len(chats),
        "same_answers": same,
        "answer_tokens": sum(len(output.token_ids) for output in outputs),
        "checked": stats.drafts,
        "acceptance_length": 1 + right / stats.drafts,
        "right_by_place": rates,
    }


def in_turns(
    engines: Mapping[str, LLM], chats: Sequence[list[int]], **limits: Any
) -> dict[str, float]:
    """Tokens a second of each of ``engines``, by itself with each prompt.

    Every prompt is answered by all of them, one after the other, so that what else the
    machine does slows them all. The first ones are answered once before.
    """
    spent, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    for turn, prompt in enumerate([*chats[:WARM], *chats]):
        for name, llm in engines.items():
            (output,) = llm.generate([prompt], **limits).result()
            if turn >= WARM:
                times, count = output.metrics, len(output.token_ids) - 1
                spent[name] += times.finished_time - times.first_token_time
                tokens[name] += count
    return {name: tokens[name] / spent[name] for name in engines}


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second at batch 1, of an engine without drafts and of one with them.

    The number of drafts is the engine's choice.
    """
    device = find_device(args.device)
    limits: Any = {"temperature": 0, "max_tokens": args.max_tokens}
    ways: dict[str, Any] = {"without": {}, "with": {"speculative": str(args.head)}}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(args.model, device=device, cache_bytes=CACHE, **way)
            )
            for name, way in ways.items()
        }
        chats = prompts(engines["with"], questions(args, held_out=True))
        rates = in_turns(engines, chats, **limits)
        threads, why = torch.get_num_threads(), engines["with"].backend_reason
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
    parser.add_argument(
        "--draft-vocab", type=int, default=0, help="tokens it can draft"
    )
    parser.add_argument("--dtype", help="of what the model writes and the head learns")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    device = name_of(find_device(args.device))
    record = header() | {"device": device, "simplellm": __version__, "drafts": STEPS}
    record["model"] = args.model or "embedded"
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
    began, unfinished = time.monotonic(), args.head / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    options: Any = {"max_waiting": args.texts, "cache_bytes": CACHE}
    # Little memory for a cache: how much is free when it ends is up to Python.
    with opened(args, args.dtype, **options) as llm:
        written = answers(llm, args, unfinished / "answers.jsonl")
        ids = draft_vocabulary(written, args.draft_vocab)
        config = config_of(args, llm.config, ids)
    texts = sorted(written, key=lambda text: len(text[0]))
    # In float32 unless said, whatever the engine computes in: the head is for both.
    model = load_model(args.model, args.dtype or "float32", args.device)
    layers, size = config.layers(model.config.num_hidden_layers), args.batch
    every = torch.arange(config.vocab_size)
    numbers = every if ids is None else torch.full_like(every, -1)
    if ids is not None:
        numbers[ids] = torch.arange(len(ids))
    lessons = list[Lesson]()
    for start in range(0, len(texts), size):
        some = texts[start : start + size]
        lessons.append(lesson(model, layers, some, numbers.to(model.device)))
    student = Student(config, model, ids)
    learning = sum(weight.numel() for weight in student.parameters())
    spent = time.monotonic() - began
    print(f"{len(texts)} texts in {spent:.0f} s; a head of {learning:,} numbers")
    steps = train(student, lessons, args, unfinished / "learned.pt")
    weights = {name.replace("/", "."): w for name, w in student.weights.items()}
    if ids is not None:
        weights["lm_head.weight"] = student.lm_head
    tensors = {
        name: weight.detach().bfloat16().cpu().contiguous()
        for name, weight in weights.items()
    }
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
    head_files(args.head, config, tensors)
    shutil.rmtree(unfinished)
    return {
        "texts": len(texts),
        "tokens": sum(len(tokens) - first for tokens, first in texts),
        "batches": steps,
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    main()
