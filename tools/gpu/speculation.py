"""Tokens a second with drafts and without, in turns, on random weights.

    python tools/gpu/speculation.py gpt-oss-20b --json figures/d-gpu-20b.json
    python tools/gpu/speculation.py Llama-3.1-8B --length 3.0 --json OUT
    python tools/gpu/speculation.py gpt-oss-120b --apart --copies 0.9 --batches 1

Random weights accept no drafts, so a coin does, such that a step that checks three
gives --length tokens in the mean: synthetic acceptance, as in InferenceX. It's tossed
where drafts are compared, for a head's on the device: what is drafted next has to
follow. Tosses are spread evenly, so that a short answer has about this mean, too. What
it takes to make drafts, to check them and to choose their number is real.
The head has the size of the public ones.

With --copies there is no head: suffix drafts are made as if the answer were a copy of
the prompt, of which each next token is as it was with this chance.

For each batch there are four ways, whose turns repeat: no speculation; three drafts;
as many as are chosen; and as many as are chosen where no draft is ever right. What is
known of drafts from earlier turns is that of the same way. With --apart all turns
without speculation come first, for a model of which the GPU can't hold two. Each
request has a prompt of random tokens of its own. What counts are the tokens between the
moment when the last request got its first and that when the first one ended.

Without a model it is the embedded one, to try the script itself.
"""

import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))

import torch
from records import argument_parser, header, save
from speeds import model_argument
from train_head import head_files

from simplellm import EngineConfig, SamplingParams
from simplellm.api.load import load_engine
from simplellm.base.config import ModelConfig
from simplellm.base.request import Request
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.checkpoint.eagle import HeadConfig, head_shapes, may_lack
from simplellm.engine import head_drafter, speculator, step_output
from simplellm.engine.draft_budget import DraftBackoff, Overhead, StepCosts
from simplellm.engine.engine import Engine
from simplellm.engine.speculative_scheduler import SpeculativeScheduler
from simplellm.engine.speculator import LONGEST_DRAFT, Speculator
from simplellm.engine.suffix_drafter import SuffixDrafter
from simplellm.model.machine import find_device, find_dtype

DRAFTS = 3
DRAFT_VOCAB = 32_000  # of public heads
INNER = {2880: 17_280, 4096: 14_336}  # their MLP's size, by the model's hidden size
WAYS = "none", "three", "chosen", "wrong"
GOLDEN, ROWS = (5**0.5 - 1) / 2, 2**0.5 - 1


def write_head(folder: Path, model: ModelConfig) -> None:
    """A random head of the public size for ``model``."""
    hidden = model.hidden_size
    config = HeadConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=INNER.get(hidden, 4 * hidden),
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        draft_vocab_size=min(DRAFT_VOCAB, model.vocab_size // 2),
    )
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in head_shapes(config).items():
        if name == "d2t":
            tensors[name] = torch.zeros(shape, dtype=torch.int64)
        elif name == "lm_head.weight" or name not in may_lack(config):
            one = torch.ones(shape) if "norm" in name else torch.empty(shape)
            if len(shape) > 1:
                one.normal_(std=shape[1] ** -0.5, generator=draw)
            tensors[name] = one.bfloat16()
    head_files(folder, config, tensors)


class Coin:
    """A draft is right by ``chance``, if those before it are.

    Toss n is the fraction of n times the golden ratio, in place of a random number. On
    the device n counts steps, and the requests of a step are ROWS apart: a graph may
    have rows for more of them, and counting these would make streaks of equal tosses.
    """

    def __init__(self, device: torch.device) -> None:
        self.chance, self.tosses = 0.0, 0
        # The same for the device, where a captured graph finds them.
        self.device_chance = torch.zeros(1, device=device)
        self.device_tosses = torch.zeros(1, device=device, dtype=torch.float64)

    def set_chance(self, chance: float) -> None:
        self.chance = chance
        self.device_chance.fill_(chance)

    def install(self) -> ExitStack:
        """Toss it wherever an engine compares drafts, until what returns is closed.

        A graph that is captured meanwhile does so for good.
        """
        places = (
            (head_drafter, "drafts_match"),
            (step_output, "accept_drafts"),
            (speculator, "acceptance"),
        )
        patches = ExitStack()
        for module, name in places:
            patches.enter_context(mock.patch.object(module, name, getattr(self, name)))
        return patches

    def drafts_match(self, drafts: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """In place of the function of this name, for drafts of a head."""
        rows, columns = (torch.arange(n, device=drafts.device) for n in drafts.shape)
        toss = (self.device_tosses * GOLDEN + rows * ROWS) % 1
        self.device_tosses += 1
        return toss[:, None] < self.device_chance ** (1 + columns)

    def right(self, most: int) -> int:
        """How many of so many drafts are right that the host knows."""
        self.tosses += 1
        toss = self.tosses * GOLDEN % 1
        return sum(toss < self.chance**place for place in range(1, most + 1))

    def accept_drafts(self, drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """In place of the function of this name, for drafts that the host knows."""
        right = self.right(len(drafts))
        return [*drafts[:right], sampled[right]]

    def acceptance(self, drafts: Sequence[int], came: Sequence[int]) -> tuple[int, int]:
        """In place of the function of this name, for drafts that weren't checked."""
        most = min(len(drafts), len(came))
        right = self.right(most)
        return right, min(right + 1, most)


class CopyDrafter(SuffixDrafter):
    """Drafts as if the last tokens stood in the prompt's beginning, as the coin has it.

    What a real search for them takes is taken, too.
    """

    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        super().propose(tokens, most)
        return [*tokens[:most]], LONGEST_DRAFT


def chance_of(length: float) -> float:
    """With which a step with DRAFTS gives ``length`` tokens in the mean."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        mean = sum(middle**place for place in range(DRAFTS + 1))
        low, high = (middle, high) if mean < length else (low, middle)
    return low


def speed(engine: Engine, prompts: Sequence[list[int]], count: int) -> float:
    """Tokens a second while all requests run.

    Raises RuntimeError if they never do, or have to give way to one another.
    """
    preemptions = engine.scheduler.preemptions
    params = SamplingParams(temperature=0, max_tokens=count)
    engine.submit(
        [
            Request(list(prompt), count, params, request_id=number)
            for number, prompt in enumerate(prompts)
        ]
    )
    events, first, ended = [], dict[int, float](), 0
    while ended < len(prompts):
        event = engine.events.get()
        if event is None or event.error is not None:
            raise RuntimeError(f"the engine failed: {event}")
        events.append(event)
        if event.tokens:
            first.setdefault(event.request_id, event.time)
        ended += event.finish_reason is not None
    begin = max(first.values())
    end = min(event.time for event in events if event.finish_reason)
    if end <= begin:
        raise RuntimeError("the first answer ended before the last one began")
    if engine.scheduler.preemptions > preemptions:
        raise RuntimeError("the cache is too small; expected more --cache-bytes")
    inside = (len(e.tokens) for e in events if begin < e.time <= end)
    return sum(inside) / (end - begin)


class Run:
    """Two engines of a model, one of which checks drafts; or one, for some WAYS."""

    plain: Engine | None = None
    drafting: Engine | None = None
    costs: StepCosts | None = None

    def __init__(self, args: Any, folder: Path, ways: Sequence[str] = WAYS) -> None:
        self.ways = ways
        device = find_device(args.device)
        self.args, self.coin = args, Coin(device)
        dtype = find_dtype(None, device)
        batches = [int(text) for text in args.batches.split(",")]
        longest = args.prompt + args.tokens + 64
        config = EngineConfig(
            max_num_seqs=max(batches),
            max_model_len=longest,
            cache_bytes=args.cache_bytes,
            enable_prefix_caching=False,
        ).resolved(device.type)
        model = args.model and model_argument(args.model)
        weights = model, dtype, device, model is not None, None, False
        began = time.monotonic()
        source = open_weights(*weights)
        write_head(folder / "head", source.config)
        self.vocab_size, self.batches = source.config.vocab_size, batches
        self.known: dict[str, tuple[Any, Any, DraftBackoff]] = {}  # of drafts, by way
        if "none" in ways:
            self.plain, _, _ = load_engine(source, config, dtype, device)
            self.plain.start()
            print(f"without drafts: ready after {time.monotonic() - began:.0f} s")
        if set(ways) <= {"none"}:
            return
        config = replace(config, speculative=args.speculative or str(folder / "head"))
        source = open_weights(*weights)
        self.coin.install()
        if args.copies:
            mock.patch.dict(speculator.DRAFTERS, suffix=CopyDrafter).start()
        self.drafting, _, _ = load_engine(source, config, dtype, device)
        print(f"with drafts: ready after {time.monotonic() - began:.0f} s", flush=True)
        scheduler = self.drafting.scheduler
        assert isinstance(scheduler, SpeculativeScheduler)
        self.speculator: Speculator = scheduler.speculator
        self.most, self.costs = self.speculator.most, self.speculator.costs
        self.drafting.start()

    def close(self) -> None:
        """End the engines, which gives their memory back."""
        for engine in (self.plain, self.drafting):
            if engine is not None:
                engine.shutdown(cancel=True)

    def way(self, name: str, prompts: Sequence[list[int]]) -> dict[str, float]:
        """One of WAYS: its tokens a second, and what became of its drafts."""
        if name == "none":
            assert self.plain is not None
            speed_now = speed(self.plain, prompts, self.args.tokens)
            return {"tokens_per_second": speed_now}
        assert self.drafting is not None
        chooser, fixed = self.speculator, name == "three"
        chooser.costs = None if fixed else self.costs
        chooser.most = DRAFTS if fixed else self.most
        overheads = Overhead(), Overhead()
        known = self.known.setdefault(name, ({}, overheads, DraftBackoff()))
        chooser.rates, chooser.overheads, chooser.backoff = known
        chance = self.args.copies or chance_of(self.args.length)
        self.coin.set_chance(0.0 if name == "wrong" else chance)
        before = chooser.checked[1], sum(chooser.accepted.values())
        checked = sum(chooser.checked.values())
        speed_now = speed(self.drafting, prompts, self.args.tokens)
        steps = chooser.checked[1] - before[0]
        right = sum(chooser.accepted.values()) - before[1]
        drafts = sum(chooser.checked.values()) - checked
        row = {"tokens_per_second": speed_now, "checks": steps, "drafts": drafts}
        return row | {"length": 1 + right / steps if steps else 1.0}

    def batch(self, count: int) -> dict[str, Any]:
        """A row of the record: medians of the turns."""
        draw, every = random.Random(count), range(self.vocab_size)
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in self.ways}
        for turn in range(self.args.turns + 1):
            # The first one warms up, and what is known of other batches is gone. All
            # ways have the same prompts: others take other experts, and other times.
            prompts = [draw.choices(every, k=self.args.prompt) for _ in range(count)]
            for name in self.ways:
                figures = self.way(name, prompts)
                if turn:
                    turns[name].append(figures)
        row: dict[str, Any] = {"batch": count}
        for name, some in turns.items():
            rates = [t["tokens_per_second"] for t in some]
            row[name] = {"tokens_per_second": statistics.median(rates), "turns": rates}
            if name != "none":
                for figure in ("drafts", "length"):
                    row[name][figure] = statistics.mean(t[figure] for t in some)
        return row


def with_times(row: dict[str, Any]) -> dict[str, Any]:
    """``row``, where each way says how many times no speculation it is."""
    for name in WAYS[1:]:
        speeds = [row[way]["tokens_per_second"] for way in (name, "none")]
        row[name]["times"] = speeds[0] / speeds[1]
    return row


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--length", type=float, default=2.72, help="tokens of a step")
    parser.add_argument("--prompt", type=int, default=500, help="its tokens")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--cache-bytes", type=int, default=2**33)
    parser.add_argument("--speculative", help="default: a random head of public size")
    parser.add_argument("--apart", action="store_true", help="an engine at a time")
    parser.add_argument("--copies", type=float, metavar="CHANCE")
    parser.add_argument("--device")
    args = parser.parse_args()
    if args.copies:
        args.speculative = "suffix"
    record: dict[str, Any] = {
        "label": "random weights, synthetic acceptance",
        **header(),
        "model": args.model or "embedded",
        **({"copies": args.copies} if args.copies else {"length": args.length}),
        "prompt": args.prompt,
        "answer": args.tokens,
        "rows": [],
    }
    titles = "batch", "none, tok/s", "three", "length", "chosen", "length", "wrong"
    rows: dict[int, dict[str, Any]] = {}
    for ways in (WAYS[:1], WAYS[1:]) if args.apart else (WAYS,):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(args, Path(folder), ways)
        gc.collect()
        gc.freeze()  # as a server does: a collection takes a tenth of a second
        if run.costs is not None:
            costs = zip(run.costs.sizes, run.costs.seconds, strict=True)
            record["step_ms"] = {size: 1e3 * seconds for size, seconds in costs}
            drafting = run.speculator.draft_costs
            record["draft_ms"] = {count: 1e3 * drafting(count) for count in run.batches}
            print({n: round(t, 2) for n, t in record["step_ms"].items()})
            print("a draft:", {n: round(t, 3) for n, t in record["draft_ms"].items()})
        if "wrong" in ways:
            print(("{:>12}" * len(titles)).format(*titles))
        for count in run.batches:
            row = rows.setdefault(count, {})
            row |= run.batch(count)
            if "wrong" not in ways:
                continue
            record["rows"].append(with_times(row))
            cells = [f"{count}", f"{row['none']['tokens_per_second']:.0f}"]
            for name in WAYS[1:3]:
                cells += [f"{row[name]['times']:.2f}x", f"{row[name]['length']:.2f}"]
            cells.append(f"{row['wrong']['times']:.3f}x")
            print(("{:>12}" * len(cells)).format(*cells), flush=True)
            save(record, args.json)
        run.close()
        gc.unfreeze()


if __name__ == "__main__":
    main()
