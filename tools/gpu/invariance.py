"""Whether `batch_invariant` keeps its promise, and what it costs, on one GPU.

    python tools/gpu/invariance.py --json figures/12-invariance.json
    python tools/gpu/invariance.py --only bits,kernels,steps --variants --json OUT
    python tools/gpu/invariance.py --only steps --layers 36 --json OUT

bits: rows of each operation, few and many at once, in the widths of gpt-oss-120b, and
of other families' products. kernels: times of each operation, ordinary and invariant,
and with --variants in other ways. steps: times of whole steps. company: greedy answers
of a model with random weights, alone and in many kinds of company, with the switch and
without. --variants also times the invariant kernels as they were at first, one tiling
for any number of tokens. Ends with 1 if a bit differs that must not.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

import torch
import tune
from cases import CUDA, MAX_NUM_SEQS, Case, Cases, integers, normal, random_model
from client import Client, make_engine, random_prompt
from records import argument_parser, header, save
from torch import Tensor
from tune import Variant, chosen

from simplellm.api.load import build_engine
from simplellm.base.config import EngineConfig
from simplellm.engine.engine import Engine
from simplellm.engine.graphs import CaptureShape
from simplellm.engine.warmup import dummy_run
from simplellm.model.batch import KVGroup
from simplellm.model.kernels import experts, grouped, linear, prefill
from simplellm.model.kernels.compiling import compile_in_threads
from simplellm.model.kernels.experts import Tiling
from simplellm.model.kernels.linear import Dot
from simplellm.model.kernels.prefill import PrefillTiles
from simplellm.model.kernels.triton_ops import triton_ops
from simplellm.model.layers import Experts
from simplellm.model.model import Model

MODEL = "gpt-oss-120b"
REQUESTS = 64
COMMON: dict[str, Any] = {
    "max_num_seqs": REQUESTS,
    "max_model_len": 2304,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "cache_bytes": 2**32,
}
BATCHES = 1, 8, 64
PROMPTS = 4, 2048
COUNTS = 1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 65, 128, 273, 274, 291, 300, 512, 1000, 2185
began = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} {text}", flush=True)


# Variants


def old_variant() -> Variant:
    """The invariant kernels of 2026-11: one tiling for any number of tokens."""
    dot = Dot(64, 64, 3, 4, 6, pdl=False, width=64)
    tiles_now = prefill.prefill_tiles

    def product(tokens: int, size_out: int, size_in: int) -> Dot:
        return dot if size_out <= 8192 else dot._replace(parts=1)

    def tiles(dim: int, heads: int, window: int | None, invariant: bool) -> Any:
        if window is None or not invariant:
            return tiles_now(dim, heads, window, invariant)
        return PrefillTiles(prefill.block_of(32, dim), 4, 3, tokens=1)

    return Variant(
        "old",
        {
            "linear.choose_invariant": product,
            "other_families.choose_invariant": product,
            **chosen("head.choose_head", dot._replace(parts=1)),
            **chosen("experts.tilings", (experts.MIDDLE, experts.MIDDLE)),
            **chosen("grouped.choose_grouping", grouped.GROUPINGS[1][1]),
            "prefill.prefill_tiles": tiles,
        },
    )


def product_variants(case: Case) -> Iterator[Variant]:
    tokens, (size_out, size_in) = len(case.arguments[0][0]), case.arguments[0][1].shape
    few = linear.choose_invariant(1, size_out, size_in)
    if tokens <= 64:
        for parts in (1, 2, few.parts + 1):
            yield product_variant(few._replace(parts=parts))
        yield product_variant(few._replace(depth=128, stages=3))
        yield product_variant(few._replace(pdl=True, ahead=1))
        yield product_variant(few._replace(width=64))
        return
    now = linear.choose_invariant(tokens, size_out, size_in)
    yield product_variant(now._replace(stages=3))
    yield product_variant(now._replace(pdl=False))
    yield product_variant(now._replace(joined=False))
    yield product_variant(now._replace(parts=1, joined=False))
    yield product_variant(now._replace(parts=1, joined=False, width=256, stages=3))
    yield product_variant(now._replace(width=64, warps=4))
    yield product_variant(now._replace(rows=64, warps=4))
    yield product_variant(now._replace(depth=32, stages=6))


def product_variant(config: Dot) -> Variant:
    name = tune.named(config) + f" width {config.width}"
    return Variant(name, chosen("linear.choose_invariant", config))


def expert_variants(case: Case) -> Iterator[Variant]:
    tokens = len(case.arguments[0][0])
    some = "64x8x1x3x4x4 64x8x1x5x3x4 64x8x1x3x4x2 64x8x1x5x3x2 32x8x1x3x3x2 "
    some += "32x8x1x5x3x2 16x8x1x5x3x1 128x8x1x3x3x2 64x16x1x5x4x4 128x16x2x3x3x4"
    if tokens <= 4:
        for numbers in tune.spelled(some):
            tiling = Tiling(*numbers)
            name = tune.named(tiling)
            yield Variant(name, chosen("experts.tilings", (tiling, tiling)))


def attention_variants(case: Case) -> Iterator[Variant]:
    if case.arguments[0][3].window is None:
        return
    for numbers in tune.spelled("32x4x3x16 64x4x3x8 64x4x2x8 64x8x3x16 32x4x4x8"):
        tiles = PrefillTiles(*numbers)._replace(aligned=True)
        yield Variant(tune.named(tiles), chosen("prefill.prefill_tiles", tiles))
    # What the ordinary kernel may be, too.
    for numbers in tune.spelled("32x4x3x8"):
        tiles = PrefillTiles(*numbers)
        yield Variant(tune.named(tiles), chosen("prefill.prefill_tiles", tiles))


# Bits


def added(parts: Tensor) -> Tensor:
    """Parts [T, S, N] as the next kernel adds them up."""
    if parts.ndim == 2:
        return parts
    total = parts[:, 0]
    for part in range(1, parts.shape[1]):
        total = total + parts[:, part]
    return total


def compared(
    name: str, operation: Callable[[slice], Sequence[Tensor]], counts: Sequence[int]
) -> dict[str, str]:
    """How many rows have the bits that they have among the most rows."""
    most = max(counts)
    jobs = [partial(operation, slice(0, count)) for count in counts]
    compile_in_threads(jobs, partial(torch.cuda.set_device, 0))
    torch.cuda.synchronize()
    together, found = operation(slice(0, most)), {}
    for count in counts:
        first = (most - count) // 3
        rows = slice(first, first + count)
        same = torch.ones(count, dtype=torch.bool, device=CUDA)
        for whole, some in zip(together, operation(rows), strict=True):
            same &= (whole[rows] == some).flatten(1).all(1)
        found[str(count)] = f"{int(same.sum())} of {count}"
    wrong = {n: text for n, text in found.items() if text != f"{n} of {n}"}
    assert all(x.isfinite().all() for x in together), f"{name}: not finite"
    say(f"bits {name:<34} {'DIFFER: ' + str(wrong) if wrong else 'the same'}")
    return found


def bits(model: Model) -> dict[str, dict[str, str]]:
    """All operations in which rows meet, of this model and of others' shapes."""
    found: dict[str, dict[str, str]] = {}
    ops, layer = model.ops, model.layers[0]
    counts = [*COUNTS, 8192]
    attn = layer.attn
    products = {
        "qkv": (attn.qkv, attn.qkv_bias),
        "o": (attn.o, attn.o_bias),
        "8B qkv": (0.02 * normal(6144, 4096), None),
        "8B down": (0.02 * normal(4096, 12288), None),
        "8B gate_up": (0.02 * normal(24576, 4096), None),
    }
    for name, (weight, bias) in products.items():
        x = normal(8192, weight.shape[1])

        def multiply(
            rows: slice, x: Tensor = x, weight: Tensor = weight, bias: Any = bias
        ) -> list[Tensor]:
            return [added(ops.project(x[rows], weight, bias))]

        found[name] = compared(name, multiply, counts)
    hidden, own = normal(8192, model.config.hidden_size), cast(Experts, layer.mlp)

    def through_experts(rows: slice) -> list[Tensor]:
        some = hidden[rows]
        return [ops.experts(some, own, integers([len(some)]))]

    found["experts"] = compared("experts", through_experts, counts)

    def logits(rows: slice) -> list[Tensor]:
        some, weight = hidden[rows], model.lm_head
        out = torch.empty(len(some), len(weight), device=CUDA)  # type: ignore[arg-type]
        return [ops.head(some, weight, out)[:, None], out]

    found["head"] = compared("head", logits, [n for n in COUNTS if n < 200] + [200])
    for window in (None, 128):
        for page in (16, 64):
            name = f"attention, window {window}, pages of {page}"
            found[name] = attention_bits(model, window, page)
    for name in ("Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8"):
        other = random_model(name, 1, batch_invariant=True)
        x = normal(8192, other.config.hidden_size)
        mlp = other.layers[0].mlp

        def through_others(
            rows: slice, x: Tensor = x, mlp: Any = mlp, ops: Any = other.ops
        ) -> list[Tensor]:
            return [ops.experts(x[rows], mlp, integers([len(x[rows])]))]

        found[f"{name}: experts"] = compared(f"{name}: experts", through_others, counts)
        del other, mlp, x, through_others
        gc.collect()
        torch.cuda.empty_cache()
    return found


def attention_bits(model: Model, window: int | None, page: int) -> dict[str, str]:
    """Chunks of a sequence beside another one, against all of it at once."""
    config, sinks = model.config, model.layers[0].attn.sinks
    length, pages = 1500, -(-1500 // page)
    shape = 2 * pages, page, config.num_key_value_heads, config.head_dim
    keys, values = normal(*shape), normal(*shape)
    tables = torch.randperm(2 * pages, device=CUDA).int().view(2, pages)
    q = normal(length, config.num_attention_heads, config.head_dim)

    def attend(begin: int, end: int, others: int) -> Tensor:
        first = 0 if window is None else max(0, begin + 1 - window) // page
        tokens = end - begin
        # The other sequence's last tokens, in front; its table is as long.
        table = torch.zeros_like(tables)
        table[0], table[1, : pages - first] = tables[1], tables[0, first:]
        group = KVGroup(
            slots=integers([0] * (tokens + others)),
            tables=table,
            offsets=integers([0, first * page]),
            lengths=integers([700, end]),
            query_start_loc=integers([0, others, others + tokens]),
            decodes=2 if tokens == others == 1 else 0,
            window=window,
            page_size=page,
        )
        both = torch.cat([q[:others], q[begin:end]])
        return model.ops.attend(both, keys, values, group, sinks)[others:]

    whole, found = attend(0, length, 3), {}
    for begin, size, others in (
        *((n, 1, 1) for n in (0, 1, 127, 128, 131, 140, 699, 1023, 1024, 1499)),
        *((n, 7, 5) for n in (0, 120, 126, 509, 1300)),
        *((n, 333, 1) for n in (0, 33, 99, 1100)),
    ):
        same = attend(begin, begin + size, others) == whole[begin : begin + size]
        count = int(same.flatten(1).all(1).sum())
        found[f"{begin} to {begin + size}"] = f"{count} of {size}"
    right = all(
        text.split(" of ")[0] == text.split(" of ")[1] for text in found.values()
    )
    wrong = "" if right else f"DIFFER: {found}"
    say(f"bits attention {window} {page:<25} {wrong or 'the same'}")
    return found


# Kernels


def sizes(cases: Cases) -> Iterator[Callable[[], Case]]:
    """Of a step with few requests, with many, and of four prompts."""
    count, length = PROMPTS
    for name in ("qkv", "o"):
        yield from (partial(cases.project, name, n) for n in (*BATCHES, count * length))
    yield from (partial(cases.experts, n) for n in (*BATCHES, count * length))
    yield from (partial(cases.head, n) for n in BATCHES)
    for window in (None, 128):
        for batch in BATCHES:
            yield partial(cases.attend, [200] * batch, [1] * batch, window)
        yield partial(cases.attend, [length] * count, [length] * count, window)
    yield partial(cases.attend, [8192], [1], None)


VARIANTS = {
    "qkv": product_variants,
    "o": product_variants,
    "experts": expert_variants,
    "decode 128": attention_variants,
    "prefill 128": attention_variants,
}


def kernels(ordinary: Model, invariant: Model, every: bool) -> Iterator[dict[str, Any]]:
    """Microseconds of each operation, by way; ordinary once more at the end."""
    pairs = zip(sizes(Cases(ordinary)), sizes(Cases(invariant)), strict=True)
    for make, make_invariant in pairs:
        plain, case = make(), make_invariant()
        ways: list[tuple[str, Case, Any]] = [
            ("ordinary", plain, nullcontext()),
            ("invariant", case, nullcontext()),
        ]
        if every:
            some = [old_variant(), *VARIANTS.get(case.kernel, lambda case: ())(case)]
            ways += [(way.name, case, way.patched) for way in some]
        ways += [("ordinary again", plain, nullcontext())]
        row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "us": {}}
        for name, mine, context in ways:
            with context() if callable(context) else context:
                try:
                    row["us"][name] = tune.microseconds(mine.calls())
                except Exception as failure:  # of one variant; the others go on
                    torch.cuda.synchronize()
                    say(f"{case.kernel} {case.shape} {name}: {str(failure)[:120]}")
        quickest = sorted(row["us"].items(), key=lambda item: item[1])
        shown = ", ".join(f"{name} {us:.1f}" for name, us in quickest[:8])
        say(f"{case.kernel:<12}{case.shape:<10} {shown}")
        yield row
        del plain, case, ways
        torch.cuda.empty_cache()


# Steps


def start_engine(model: Model) -> Engine:
    """With the graphs that are timed, whose kernels compile side by side."""
    config = EngineConfig(**COMMON).resolved("cuda")
    engine = build_engine(model, config)
    shapes = [CaptureShape(size, size) for size in BATCHES]
    shapes += [CaptureShape(size, 0, 1) for size in (8192, 1024, 128)]
    jobs = [partial(dummy_run, engine.runner, shape, model.ops) for shape in shapes]
    compile_in_threads(jobs, partial(torch.cuda.set_device, 0))
    engine.runner.capture(list(BATCHES), [])
    return engine


def step_ms(engine: Engine, batch: int) -> float:
    """Milliseconds of a step in which all requests of a batch get a token."""
    client, times = Client(engine), []
    for number in range(batch):
        client.ask(random_prompt(128, number), 100)
    while client.busy:
        start = time.perf_counter()
        if client.step() == batch:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def prefill_ms(engine: Engine) -> float:
    """Milliseconds until prompts have their first token, the least of three times."""
    times, (count, length) = [], PROMPTS
    for seed in range(3):
        prompts = [random_prompt(length, 10 * seed + n) for n in range(count)]
        torch.cuda.synchronize()
        client, start = Client(engine), time.perf_counter()
        for prompt in prompts:
            client.ask(prompt, 1)
        client.finish()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def steps(
    ordinary: Model, invariant: Model, every: bool
) -> dict[str, dict[str, float]]:
    """Each kind of step in turns: ordinary, old and new, three times."""
    ways: dict[str, tuple[Model, Any]] = {"": (ordinary, nullcontext)}
    if every:
        ways["old_"] = invariant, old_variant().patched
    ways["invariant_"] = invariant, nullcontext
    engines = {}
    for name, (model, context) in ways.items():
        with context():
            engines[name] = start_engine(model)
        say(f"engine {name or 'ordinary'} is ready")
    cases: dict[str, Callable[[Engine], float]] = {
        f"batch {batch}": partial(step_ms, batch=batch) for batch in BATCHES
    }
    cases["prefill {} x {}".format(*PROMPTS)] = prefill_ms
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(4):
        for name, (_, context) in [*ways.items()][:: 1 if turn % 2 else -1]:
            for case, measure in cases.items():
                with context():
                    found = measure(engines[name])
                if turn:  # the first one warms up
                    times.setdefault((case, name), []).append(found)
    rows: dict[str, dict[str, float]] = {}
    for case in cases:
        row = {f"{name}ms": statistics.median(times[case, name]) for name in ways}
        row["ratio"] = row["invariant_ms"] / row["ms"]
        if every:
            row["old_ratio"] = row["old_ms"] / row["ms"]
        spread = max(times[case, ""]) / min(times[case, ""])
        rows[case] = row | {"spread": spread}
    return rows


# Company

# Name, requests at once, what the engine is told, how often all of it is asked.
COMPANY: list[tuple[str, int, dict[str, Any], int]] = [
    ("alone, once more", 1, {}, 1),
    ("2 at once", 2, {}, 1),
    ("5 at once", 5, {}, 1),
    ("16 at once", 16, {}, 1),
    ("64 at once", 64, {}, 1),
    ("chunks of 33", 64, {"prefill_chunk": 33}, 1),
    ("97 tokens a step", 64, {"max_num_batched_tokens": 97}, 1),
    ("shared prefixes", 16, {"enable_prefix_caching": True}, 2),
    ("no graphs", 64, {"cuda_graphs": False, "overlap": False}, 1),
]


def make_prompts() -> list[list[int]]:
    """Half of them with a common beginning of 300 tokens, taking turns."""
    shared, half = random_prompt(300, 0), REQUESTS // 2
    prompts = [shared + random_prompt(1 + 3 * n, 1 + n) for n in range(half)]
    prompts += [random_prompt(1 + 23 * n, 1000 + n) for n in range(half)]
    return [prompts[n // 2 + n % 2 * half] for n in range(REQUESTS)]


def answers(engine: Engine, batch: int) -> list[list[int]]:
    """Greedy continuations, ``batch`` prompts at once."""
    prompts, found = make_prompts(), list[list[int]]()
    lengths = [24 + n % 3 * 12 for n in range(REQUESTS)]
    for first in range(0, REQUESTS, batch):
        client, part = Client(engine), slice(first, first + batch)
        numbers = list(map(client.ask, prompts[part], lengths[part]))
        client.finish()
        found += map(client.tokens, numbers)
    return found


def company(model: Model) -> list[dict[str, Any]]:
    """How many answers are others in company than alone."""
    engine = make_engine(model, **COMMON)
    alone, rows = answers(engine, 1), []
    for name, batch, options, times in COMPANY:
        engine = make_engine(model, **(COMMON | options))
        for _ in range(times):
            found = answers(engine, batch)
        wrong = [n for n in range(REQUESTS) if found[n] != alone[n]]
        stats = engine.stats()
        rows.append(
            {
                "company": name,
                "differ": len(wrong),
                "of": REQUESTS,
                "which": wrong,
                "preemptions": stats.preemptions,
                "hit_rate": stats.cache_hit_rate,
            }
        )
        say(f"{name:<18} {len(wrong):3} of {REQUESTS} differ")
        del engine
        gc.collect()  # it refers to itself
        torch.cuda.empty_cache()
    return rows


def shown(record: dict[str, Any]) -> Iterator[str]:
    """A short table."""
    for row in record.get("kernels", []):
        us = row["us"]
        old = f"{us['old']:10.1f}" if "old" in us else ""
        best = min(us, key=lambda name: us[name] if "ordinary" not in name else 1e9)
        yield (
            f"{row['kernel']:<12}{row['shape']:<10}{us['ordinary']:10.1f}"
            f"{us['ordinary again']:10.1f}{us['invariant']:10.1f}{old}"
            f"{us['invariant'] / us['ordinary']:7.2f}  {best} {us[best]:.1f}"
        )
    for name, row in record.get("cost", {}).items():
        numbers = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
        yield f"{name:<18}{numbers}"


@torch.inference_mode()
def main() -> None:
    parser: argparse.ArgumentParser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="bits,kernels,steps,company")
    parser.add_argument("--variants", action="store_true", help="and other ways")
    parser.add_argument("--seconds", type=float, default=0.12, help="of a measurement")
    options = parser.parse_args()
    tune.SECONDS = options.seconds
    torch.manual_seed(0)
    wanted = options.only.split(",")
    record: dict[str, Any] = header() | {"layers": options.layers}
    invariant = random_model(MODEL, options.layers, batch_invariant=True)
    table = triton_ops(invariant.config, max_num_seqs=MAX_NUM_SEQS, device=CUDA)
    ordinary = replace(invariant, ops=table)
    say(f"{options.layers} layers are there")
    wrong: list[str] = []
    if "bits" in wanted:
        record["bits"] = bits(invariant)
        save(record, options.json)
        for name, found in record["bits"].items():
            some = [text.split(" of ") for text in found.values()]
            wrong += [name] if any(a != b for a, b in some) else []
    if "steps" in wanted:
        record["cost"] = steps(ordinary, invariant, options.variants)
        save(record, options.json)
        gc.collect()
        torch.cuda.empty_cache()
        print("\n".join(shown({"cost": record["cost"]})), flush=True)
    if "company" in wanted:
        record["compare"] = company(invariant)
        wrong += [row["company"] for row in record["compare"] if row["differ"]]
        record["contrast"] = company(ordinary)
        save(record, options.json)
    if "kernels" in wanted:
        rows = record["kernels"] = []
        for row in kernels(ordinary, invariant, options.variants):
            rows.append(row)
            save(record, options.json)
    print(f"\n{'kernel, us':<22}{'ordinary':>10}{'again':>10}{'invariant':>10} (old)")
    print("\n".join(shown(record)))
    if wrong:
        sys.exit(f"OTHER BITS: {', '.join(wrong)}")
    print(
        "all bits are the same in any company"
        if {"bits", "company"} & {*wanted}
        else ""
    )


if __name__ == "__main__":
    main()
