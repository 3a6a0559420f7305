"""The numbers that the chapters' prose quotes are those of the records.

Each function below writes the passages of one chapter that quote a record, with the
record's numbers and dates in them; the chapter has to say just that. And whatever else
a numbered chapter's costs say of a record may hold no number.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cells
import pytest

ROOT = Path(__file__).parents[2]
CITED = re.compile(r"`figures/[\w-]+\.json`")
COSTS = re.compile(r"^## Costs and limits$(.*?)^## ", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^- (?:.*\n)(?:  .*\n)*", re.MULTILINE)
# No quantities: code, dates, names such as 120b, and the chapters'.
NAMES = re.compile(r"`[^`]*`|\d{4}-\d\d-\d\d|\b\w*[A-Za-z]\w*\b|[Cc]hapter \d+")


def recorded(name: str) -> Any:
    return json.loads((ROOT / f"figures/{name}.json").read_text(encoding="utf-8"))


def source(name: str, part: str = "") -> str:
    """How a passage cites a record, or a part of it that was measured anew."""
    record = recorded(name)
    date = record["renewed"][part]["date"] if part else record["date"]
    return f"({date}, `figures/{name}.json`)"


def told_02() -> list[str]:
    size, read, mapped = recorded("02-open")["rows"][-1]
    started = recorded("12-start")
    run, copy = started["starts"][1], started["copy"]
    assert run["name"] == "kernels compiled"
    return [
        f"{read:,.0f} ms to read a sparse file of {size:,} MB, {mapped:.1f} ms to map "
        f"it {source('02-open')}",
        f"{started['file_bytes'] / 1e9:.1f} GB of gpt-oss-20b in the page cache are "
        f"repacked weights on the GPU after {run['weights']:.1f} s, and a new process "
        f"has its first token after {run['seconds']:.1f} s",
        f"arrive at {copy['to'] / 1e9:.1f} GB/s, through the pinned buffers of "
        f"`Upload` at {copy['upload'] / 1e9:.1f} {source('12-start')}",
    ]


def told_03() -> list[str]:
    run, h200 = recorded("gpu-ledger")["mxfp4"], recorded("04-h200")
    return [
        f"a table lookup is {run['gathers_ms'] / run['table_ms']:.1f} times as fast as "
        "two gathers, in PyTorch. It reads and writes "
        f"{run['read_and_written'] / 1e9:.0f} GB/s, where memory gives "
        f"{h200['read_bandwidth_bytes_per_second'] / 1e9:,.0f}",
        f"is {run['packed_linear_us'] / run['plain_linear_us']:.1f} times as slow as a "
        f"plain one, for one token {source('gpu-ledger')}",
    ]


def told_04() -> list[str]:
    here, ledger = recorded("04-dispatch"), recorded("gpu-ledger")
    h200, vllm = recorded("04-h200"), recorded("vllm-h200")["decode"]
    ours = [here["naive_ms"][n] / here["kept_ms"][n] for n in ("1", "16", "256")]
    rows = ledger["dispatch"]["rows"]
    assert [row["tokens"] for row in rows] == [1, 16, 256]
    theirs = [row["naive_ms"] / row["kept_ms"] for row in rows]
    first, many = (
        next(row for row in vllm if (row["model"], row["batch"]) == (name, batch))
        for name, batch in (("gpt-oss-120b", 1), ("gpt-oss-120b", 64))
    )

    def times(ratios: list[float]) -> str:
        return (
            f"{ratios[0]:.1f} times as fast as every expert on every token at 1 token, "
            f"{ratios[1]:.1f} times at 16, {ratios[2]:.1f} times at 256"
        )

    speeds = h200["vllm_tokens_per_second"]
    routing = recorded("04-routing")
    counts = routing["glossary_counts"]
    busiest = sorted(max(row) * len(row) / sum(row) for row in counts)
    tokens = sum(counts[0]) // 4  # each chooses four
    return [
        f"glossary's {tokens:,} tokens on {routing['date']}; there chance averages "
        f"out, and what's left is the router's taste: {busiest[0]:.1f} to "
        f"{busiest[-1]:.1f} times the mean.",
        f"{times(ours)} (one CPU thread, {here['date']}, `figures/04-dispatch.json`)",
        f"{times(theirs)} {source('gpu-ledger')}",
        f"{h200['versions'].split(',')[0]} with the 120b does {speeds['1']} tokens/s "
        f"at batch 1, where the ceiling is {first['limit']}; at batch 64 it reads "
        f"{h200['distinct_at_64']} distinct experts, the formula says "
        f"{many['distinct_experts']} {source('04-h200')}",
    ]


def told_05() -> list[str]:
    here, h200 = recorded("05-attention"), recorded("gpu-ledger")["windows"]
    lengths = here["lengths"]
    full, sliding = (
        dict(zip(lengths, here[f"{kind}_ms"], strict=True))
        for kind in ("full", "sliding")
    )
    least, most = 1024, lengths[-1]
    tokens = h200["tokens"]
    return [
        f"From {least:,} to {most:,} tokens the prompt becomes {most // least} times "
        f"as long. The full layer then takes {full[most] / full[least]:.0f} times as "
        "long, about the square of that, and the sliding one "
        f"{sliding[most] / sliding[least]:.0f} times.",
        f"full over sliding at {most:,} tokens on one CPU thread, {full[most]:,.0f} "
        f"against {sliding[most]:.0f} ms, {full[most] / sliding[most]:.1f} times "
        f"{source('05-attention')}",
        f"full over sliding at {tokens:,} tokens, 64 heads, bfloat16, "
        f"{h200['full_ms']:.1f} against {h200['sliding_ms']:.1f} ms, "
        f"{h200['full_ms'] / h200['sliding_ms']:.1f} times {source('gpu-ledger')}",
    ]


def told_06() -> list[str]:
    here, h200 = recorded("06-recompute"), recorded("gpu-ledger")["recompute"]
    seconds = dict(zip(here["lengths"], here["seconds"], strict=True))
    ms = h200["step_ms"]
    computed = sum(range(10, 210))
    return [
        f"{computed / 209:.0f} times the tokens that were needed (10 in, 200 out); a "
        f"step at 1,024 tokens takes {seconds[1024] / seconds[16]:.1f} times one at 16 "
        f"{source('06-recompute')}",
        f"takes {ms['1024']:.0f} ms for a step at 1,024 tokens, "
        f"{ms['1024'] / ms['16']:.1f} times one at 16",
        f"64 rows of 201,088 tokens take {h200['noise_us'] / 1e3:.2f} ms, where "
        "softmax and `torch.multinomial` together take "
        f"{h200['multinomial_us'] / 1e3:.2f}; chapter 11",
    ]


def told_07() -> list[str]:
    here, h200 = recorded("07-cache"), recorded("gpu-ledger")["cache"]
    cache, alone = here["cache"], here["batch_1"]["times_as_long"]
    slot = cache["ms"]["slot"][1:]  # the first step takes the prompt
    late = sum(slot[-100:]) / sum(slot[:100])
    (date,) = set(here["dates"].values())
    assert min(cache["ms"]["recompute"][-25:]) > 200  # and both caches stay below 10:
    assert all(median(cache["ms"][name][-25:]) < 10 for name in ("slot", "concat"))
    again, kept = h200["recompute"]["1"], h200["slot"]["1"]
    return [
        "Recomputing ends beyond 200 ms per token, and both caches stay below 10.",
        f"{here['new_tokens']:,} new tokens, recorded on one CPU thread: recomputing "
        f"takes {cache['recompute_over_slot']:.1f} times as long, concatenating "
        f"{cache['concat_over_slot']:.2f} times; the last 100 tokens took "
        f"{late:.2f} times as long as the first.",
        f"{alone['transformers float32 over packed']:.2f} with our experts packed, "
        f"{alone['transformers float32 over CPU']:.1f} with experts unpacked at load",
        f"({date}, `figures/07-cache.json`)",
        f"after {h200['context']:,} tokens: {kept:.0f} ms a step, recomputing "
        f"{again:.0f}, {again / kept:.1f} times as long {source('gpu-ledger')}",
    ]


def told_08() -> list[str]:
    here, h200 = recorded("08-paged"), recorded("gpu-ledger")
    mixed, whole = (here["capacity"][name] for name in ("mixed", "all of 4,096"))
    first = here["first_token"]
    steps = sorted(row["paged_ms"] / row["slot_ms"] for row in here["decode"])
    cache, hits = h200["cache"], h200["prefix"]
    slower = [cache["paged"][n] / cache["slot"][n] for n in ("1", "32")]
    sooner = [hits[n]["miss_ms"] / hits[n]["hit_ms"] for n in ("1000", "16000")]
    return [
        f"{mixed['paged'] / mixed['slot']:.1f} times as many sequences of mixed "
        "lengths in the same bytes, "
        f"{whole['paged'] / whole['slot']:.2f} times if all have 4,096 tokens; first "
        f"token {first['miss_ms'] / first['hit_ms']:.1f} times sooner with 1,000 of "
        "1,030 tokens shared; a decode step of "
        f"{here['batch']} sequences takes {steps[0]:.1f} to {steps[-1]:.1f} times as "
        f"long as with reserved memory {source('08-paged')}",
        f"a decode step after {cache['context']:,} tokens takes {slower[0]:.2f} times "
        "as long as with reserved memory for one sequence, "
        f"{slower[1]:.2f} times for 32; with all kernels the first token comes "
        f"{sooner[0]:.1f} times sooner with 1,000 of 1,030 tokens shared, "
        f"{sooner[1]:.1f} times with 16,000 of 16,030 {source('gpu-ledger')}",
    ]


def told_09() -> list[str]:
    here, h200 = recorded("09-serving"), recorded("gpu-ledger")

    def static(backend: str, lengths: str) -> str:
        ratios = sorted(
            f"{case['seconds']:.1f}"
            for case in here["static"][backend]
            if case["lengths"] == lengths and case["batch"] > 1
        )
        return " to ".join(dict.fromkeys(ratios))

    others = {
        (case["lengths"], case["batch"]): case["speedup"]["transformers continuous"]
        for case in here["transformers"]
    }
    at_32 = [others[lengths, 32] for lengths in ("short", "medium", "long")]
    faster = {
        load: run["static"] / run["continuous"]
        for load, run in h200["continuous"].items()
    }
    gaps, gpu = here["gaps"], h200["gaps"]
    ways = [gpu[way] for way in ("whole", "chunks of 8192", "chunks of 1024")]
    gap, first = ([way[part] for way in ways] for part in ("gap_ms", "first_token_ms"))
    memory = {case["lengths"]: case["seconds"] for case in here["memory"]}
    steps, torch, numpy = (
        max(case[part] for case in here["static"][backend])
        for backend, part in (
            ("TORCH", "steps"),
            ("TORCH", "seconds"),
            ("CPU", "seconds"),
        )
    )
    assert round(torch, 1) == 2.0
    return [
        f"up to {steps:.1f} times the steps where one answer in ten is long, with up "
        f"to twice the seconds in plain PyTorch and {numpy:.1f} times in NumPy",
        f"{static('TORCH', 'one in ten long')} times faster in plain PyTorch where one "
        f"answer in ten is long and {static('TORCH', 'log-normal')} times with "
        f"log-normal lengths, {static('CPU', 'one in ten long')} and "
        f"{static('CPU', 'log-normal')} times in NumPy. Over transformers' continuous "
        f"batching, at 32 at a time {at_32[0]:.1f}, {at_32[1]:.1f} and {at_32[2]:.1f} "
        "times for short, medium and long requests, at 8 short ones "
        f"{others['short', 8]:.1f} times",
        "gpt-oss-20b, 128 requests, 32 at a time, over our own static batches: "
        f"{faster['one in ten long']:.2f} times faster where one answer in ten is "
        f"long, {faster['log-normal']:.2f} times with log-normal lengths",
        f"the longest gap is {gaps['ratio']:.1f} times shorter, and the long prompt's "
        f"own first token comes {gaps['ttft']:.1f} times later",
        f"{gpu['streams']} answers while {gpu['prompt']:,} tokens arrive: the longest "
        f"gap is {gap[0]:.0f} ms, in chunks of 8,192 {gap[1]:.0f} ms, in chunks of "
        f"1,024 {gap[2]:.0f} ms; that prompt's own first token comes after "
        f"{first[0] / 1e3:.2f}, {first[1] / 1e3:.2f} and {first[2] / 1e3:.2f} s "
        f"{source('gpu-ledger', 'gaps')}",
        f"{memory['one in ten long']:.1f} times faster where one answer in ten is "
        f"long, {memory['all long']:.1f} times where all are",
        f"is {1e3 * gaps['whole']['undisturbed_gap']:.0f} milliseconds while nothing "
        f"arrives, {1e3 * gaps['chunked']['longest_gap']:.0f} beside a prompt in "
        f"chunks of {gaps['chunk']}, and {1e3 * gaps['whole']['longest_gap']:,.0f}",
    ]


def told_10() -> list[str]:
    here, small = recorded("10-graphs"), recorded("10-small")["ways"]
    runs = {
        (row["batch"], row["graphs"], row["overlap"]): row for row in here["decode"]
    }
    ms = {key: row["step_ms"] for key, row in runs.items()}
    host = {key: row["host_ms"] for key, row in runs.items()}
    graphs = [ms[n, False, False] / ms[n, True, False] for n in (1, 8, 64)]
    with_, without = (
        [ms[n, way, False] / ms[n, way, True] for n in (1, 8, 64)]
        for way in (True, False)
    )
    kernels = 36 * 10 + 4
    launch = 1e3 * host[1, False, False] / kernels
    speed = runs[1, False, False]["tokens_per_second"]
    padded = recorded("gpu-ledger")["padding"]["step_ms"]
    called, replayed, compiled, reduced = small.values()
    assert f"{with_[1]:.2f}" == f"{with_[2]:.2f}"
    return [
        f"our engine's host took {launch:.0f} µs for each of the {kernels} "
        f"({here['date']})",
        f"An empty kernel takes less, {here['launch']['triton_us']:.0f} µs",
        f"and so was the engine: it gave {speed:.0f} tokens a second of the 930",
        f"the host takes {called['host_us'] / 1e3:.1f} ms to launch 500 kernels",
        f"kernels replayed take {replayed['us'] / 1e3:.1f} ms",
        f"and they take {compiled['us'] / 1e3:.1f} ms",
        f"a graph take {reduced['us'] / 1e3:.1f} ms",
        f"{reduced['first_s']:.1f} seconds, {compiled['first_s']:.1f} for",
        f"its decodes of gpt-oss-120b in {here['capture_s']:.1f} seconds",
        f"at batch 64 the host launches a step in {host[64, False, False]:.1f} ms, the "
        f"GPU needs {ms[64, True, True]:.1f} for it",
        f"{graphs[0]:.2f} times as fast at batch 1, {graphs[1]:.2f} at 8, "
        f"{graphs[2]:.2f} at 64: gpt-oss-120b, random weights, {here['date']}",
        f"16 take {padded['16']:.2f} ms, 17 (padded to 24) {padded['17']:.2f}, a full "
        f"24 take {padded['24']:.2f}; 32 take {padded['32']:.2f}, 33 (padded to 48) "
        f"{padded['33']:.2f}, a full 48 take {padded['48']:.2f} "
        f"{source('gpu-ledger', 'padding')}",
        f"costs {100 * (1 / without[1] - 1):.1f} % at batch 8",
        f"{with_[0]:.2f} times as fast at batch 1, {with_[1]:.2f} at 8 and at 64, with "
        f"graphs; without them {without[0]:.2f}, {without[1]:.2f} and "
        f"{without[2]:.2f}",
    ]


def told_11() -> list[str]:
    rows = recorded("11-kernels")["rows"]
    found: dict[tuple[str, ...], Any] = {
        (row["kernel"], row["shape"], row["version"]): row for row in rows
    }

    def us(*key: str) -> float:
        return found[key]["us"]

    def least(*key: str) -> float:
        """Microseconds that reading the bytes and launching take."""
        return found[key]["bytes"] / 4650e3 + 1.2 * found[key]["launches"]

    qkv = "qkv projection", "T1", "rows in registers"
    final = "64, 3 stages, 164 KB shared"
    one = "decode", "1 x 500", final
    many = "decode", "64 x 1000", "joined apart, 3 stages, early"
    long = "decode", "1 x 32768", final
    share = found[long]["bytes"] / 4650e3 / us(*long)
    short = [us("add_norm", "T1 S1", f"{way} launch") for way in ("plain", "dependent")]
    few = "add_norm", "T256 S4", "dependent launch"
    turned = "rope", "65536", "dependent launch"

    def saved(kernel: str) -> int:
        """The percentage that a product of one token takes less than in cuBLAS."""
        ours = us(kernel, "T1", "rows in registers")
        return round(100 - 100 * ours / us(kernel, "T1", "cuBLAS"))

    qkv_saved, o_saved, router_saved = map(
        saved, ("qkv projection", "o projection", "router")
    )
    heads = [round(us("head", "T8", f"{way} launch")) for way in ("plain", "dependent")]
    assert heads[0] == heads[1]

    def decode(shape: str, version: str) -> float:
        return us("decode", shape, version)

    widest, kept = (
        us("shared memory", room, "tiles of 64, 4 stages")
        for room in ("228 KB", "164 KB")
    )
    split = decode("1 x 32768", "split by 128, at most 64")
    return [
        f"it's {100 - 100 * us(*few) / least(*few):.0f} % below the roofline",
        f"the projections take {qkv_saved} to {o_saved} % less time than in cuBLAS, "
        f"and the router {router_saved} %",
        f"takes {us(*turned) / least(*turned):.2f} times as long as reading would",
        f"brings nothing, {heads[0]} µs with and without",
        f"{decode('64 x 1000', 'unsplit, 4, keys early'):.1f} µs, where the final "
        f"version takes {us(*many):.1f}",
        f"from {split:.1f} µs to {decode('1 x 32768', '49, keys early'):.1f} two",
        f"and 33 splits it's {decode('1 x 32768', '33, keys early'):.1f}",
        f"a layer took {kept:.1f} µs where attention had 164 KB of shared memory, and "
        f"{widest:.1f} where it had 228",
        f"At 1,000 tokens {decode('1 x 1000', 'unsplit'):.1f} µs become "
        f"{decode('1 x 1000', 'keys early'):.1f}, at 32,768 tokens {split:.1f} become "
        f"{us(*long):.1f}",
        f"{short[1]:.2f} µs for a norm of one token, "
        f"{us('add_norm', 'T64 S1', 'dependent launch'):.2f} for 64; "
        f"{us('rope', '1', 'dependent launch'):.2f} µs for rotation and cache write",
        f"{us(*qkv):.2f} µs for the qkv projection of one token, {least(*qkv):.1f} "
        "predicted",
        f"{least(*one):.1f} µs predicted and {us(*one):.1f} measured for 1 x 500; "
        f"{least(*many):.1f} and {us(*many):.1f} for 64 x 1,000; {least(*long):.1f} "
        f"and {us(*long):.1f} for 1 x 32,768, {100 * share:.0f} % of the bandwidth",
        f"{short[0]:.2f} µs become {short[1]:.2f} for a norm",
    ]


def told_12() -> list[str]:
    kernels = {
        (row["kernel"], row["shape"], row["version"]): row
        for row in recorded("11-kernels")["rows"]
    }

    def us(shape: str, version: str) -> float:
        return kernels["gate_up", shape, version]["us"]

    best = kernels["gate_up", "64", "8 tokens, mma, 2 warps"]
    roofline = best["bytes"] / 4650e3 + 1.2
    rows, other = (
        recorded(name)["decode"] for name in ("12-bench", "12-bench-other-card")
    )
    h200, h100 = (
        {row["batch"]: f"{100 * row['share']:.0f} %" for row in found}
        for found in (rows, recorded("12-bench-h100")["decode"])
    )
    apart = max(
        theirs["tokens_per_second"] / ours["tokens_per_second"]
        for ours, theirs in zip(rows, other, strict=True)
    )
    vllm = recorded("vllm-h200")
    ablation = {
        row["name"]: row["tokens_per_second"]
        for key in ("cumulative", "without")
        for row in recorded("12-ablation-h200")[key]
    }
    lost = ablation["+ overlap"] / ablation["- continuous batching"]
    small = {row["batch"]: row for row in recorded("12-bench-20b")["decode"]}
    shares = sorted(
        row["share"]
        for name in ("12-bench", "12-bench-20b", "12-bench-h100")
        for row in recorded(name)["decode"]
        if row["batch"] in (1, 8, 64, 256)
    )
    overlapped = ablation["+ overlap"] / ablation["+ CUDA graphs"]
    kernels_bring = ablation["+ Triton kernels"] / ablation["+ pages, shared prefixes"]
    plain = ablation["+ overlap"] / ablation["- Triton kernels"]
    prompt = small[1]["ttft_ms"] / small[8]["step_ms"]
    one = us("1", "mma, many tiles a program")
    grouped = us("1", "fragments, unroll 5")
    race = kernels["gate_up of a prompt", "4096", "4 warps, decoding while wgmmas read"]
    assert "in 100 of 100 repeats" in race["why"]
    bursts = kernels["gate_up", "64", "fragments, unroll 3"]
    assert "in bursts of 40 launches 250 us" in bursts["why"]
    steps = {
        "64": [
            ("out = tl.dot_scaled(codes, scales, x)", "tl.dot_scaled"),
            ("tl.dot(high_half, x_odd)", "two planes, two tl.dot"),
            ("UNROLL=5", "fragments, unroll 5"),
            ("UNROLL=3", "fragments, unroll 3"),
            ("# mma, 8 tokens", "8 tokens, mma, 4 warps"),
            ("num_warps=2", "8 tokens, mma, 2 warps"),
        ],
        "1": [
            ("out = tl.dot_scaled(codes, scales, x)", "tl.dot_scaled"),
            ("tl.dot(high_half, x_odd)", "two planes, two tl.dot"),
            ("UNROLL=5", "fragments, unroll 5"),
            ("x spread over its 8 columns", "mma, a tile a program"),
            ("the next one on its way", "mma, many tiles a program"),
        ],
    }
    ladder = [
        f"{change} # {us(shape, version):.{1 if shape == '1' else 0}f} µs"
        for shape, changes in steps.items()
        for change, version in changes
    ]
    most = max(kernels["gate_up", "64", v]["bytes"] for _, v in steps["64"])
    last = kernels["gate_up", "1", "mma, many tiles a program"]
    return [
        *ladder,
        f"last of these runs has a roofline of {roofline:.0f}; in others, whose tokens "
        f"chose other experts, it was up to {most / 4650e3 + 1.2:.0f}",
        f"one token, whose roofline is {last['bytes'] / 4650e3 + 1.2:.1f}",
        f"{us('64', 'tl.dot_scaled'):.0f} µs with `tl.dot_scaled` become "
        f"{best['us']:.0f} for 64 tokens, where the roofline is {roofline:.0f}",
        f"one token take {one:.1f} µs, and {grouped:.1f} with the grouped kernel",
        f"{h200[1]} of the limit for the 120b at batch 1, {h200[64]} at 64; on an H100 "
        f"{h100[1]} and {h100[64]}",
        f"up to {100 * (apart - 1):.0f} % apart",
        f"in bursts of 40 launches, and the {bursts['us']:.0f} of the list",
        "in 100 of 100 repeats it didn't",
        "vLLM on an H200: {} where that was run, else {}.".format(*vllm["runs"]),
        f"adds up blocks reached {vllm['read_gigabytes_per_second']:,.0f}",
        f"it takes {lost:.2f} times as long",
        f"shares are {100 * shares[0]:.0f} to {100 * shares[-1]:.0f} %, the highest",
        f"Triton kernels another {kernels_bring:.1f}, CUDA graphs almost 5, overlap "
        f"{100 * (overlapped - 1):.0f} percent; without the kernels it takes "
        f"{plain:.0f} times as long",
        f"as much as {('four', 'five', 'six')[round(prompt) - 4]} decodes",
    ]


def told_a() -> list[str]:
    record = recorded("a-serving")
    fast, fast_end, slow, slow_end = record["slow"]
    assert record["wasted"] == 0
    return [
        f"its first byte after {record['streamed'][3][0]:.2f} s. Naively that's "
        f"{record['naive'][3][0]:.2f}, with three answers",
        f"gets {slow} pieces, a fast one {fast}, and the slow one is done "
        f"{slow_end - fast_end:.1f} s later",
        f"take {record['box'] / 1e6:.1f} MB instead of {record['pile'] / 1e6:.1f}",
        f"no more tokens after the client has left, and naively "
        f"{record['wasted naive']}",
        *told_a_lock(),
    ]


def told_a_lock() -> list[str]:
    """What clients get of `generate` alone, on a GPU."""
    rows = recorded("a-lock")["h200"]["rows"]

    def of(how: str, streams: int, what: str) -> list[float]:
        return [r[what] for r in rows if (r["how"], r["streams"]) == (how, streams)]

    ways = "process", "thread"
    two, one = (of(how, 256, "share") for how in ways)
    gaps = [1e3 * min(of(how, 64, "gap_p50")) for how in ways]
    (same,) = {round(share, 2) for how in ways for share in of(how, 64, "share")}
    larger = {row["streams"]: row["share"] for row in recorded("a-clients")["rows"]}
    return [
        f"With gpt-oss-120b, on an H100, it's {larger[256]:.2f} with 256 streams and "
        f"{larger[64]:.2f} with 64",
        f"with 256 streams {min(two):.2f} and {max(two):.2f} in two runs, in one "
        f"process {max(one):.2f} and {min(one):.2f}; with 64 it is {same:.2f} both "
        f"ways, but pieces come every {gaps[0]:.0f} ms instead of {gaps[1]:.0f}",
    ]


def schema_cost(record: str, strings: str, batch: int, kind: str, what: str) -> float:
    """The mean of a number in a record's rows of one kind."""
    wanted, rows = (strings, batch, kind), recorded(record)["rows"]
    found = [r for r in rows if (r["strings"], r["batch"], r["kind"]) == wanted]
    return sum(row[what] for row in found) / len(found)


def told_b_h200() -> list[str]:
    """What schemas cost on a GPU."""
    of = partial(schema_cost, "b-structured-h200")

    def cost(strings: str) -> tuple[str, ...]:
        many, rate = (1, 64, 256), "tokens_per_second"
        masks = [of(strings, batch, "masked", "masks_ms") for batch in many]
        shares = [
            of(strings, batch, "masked", rate) / of(strings, batch, "free", rate)
            for batch in many
        ]
        free = of(strings, 64, "free", "itl_free_ms")
        waits = [of(strings, 64, f"{n} masked", "itl_free_ms") for n in ("1", "half")]
        return (
            f"masks take {masks[0]:.1f}, {masks[1]:.0f} and {masks[2]:.0f} ms",
            f"{shares[0]:.2f}, {shares[1]:.2f} and {shares[2]:.2f} of the tokens a "
            "second that free ones get",
            f"{100 * (waits[0] / free - 1):+.1f} % beside one with a schema and by "
            f"{100 * (waits[1] / free - 1):+.1f} % beside 32",
        )

    speed = [
        of("usual", 1, kind, "tokens_per_second")
        for kind in ("forced", "masked", "free")
    ]
    return [
        *cost("usual"),
        *cost("endless"),
        f"{of('usual', 1, 'forced', 'steps'):.0f} steps instead of "
        f"{of('usual', 1, 'masked', 'steps'):.0f} for an answer of 256 tokens, which "
        f"is {speed[0] / speed[2]:.2f} of a free one's speed instead of "
        f"{speed[1] / speed[2]:.2f}",
        f"{of('usual', 256, 'forced', 'tokens_per_second'):,.0f} tokens a second with "
        f"forced tokens and {of('usual', 256, 'masked', 'tokens_per_second'):,.0f} "
        "without",
    ]


def told_b_h100() -> list[str]:
    """What they cost where many requests have one."""
    of = partial(schema_cost, "b-structured-h100", "usual", 256)

    free, kinds = of("free", "itl_free_ms"), ("1 masked", "half masked")
    one, half = (100 * (of(kind, "itl_free_ms") / free - 1) for kind in kinds)
    forced, masked = (
        of(kind, "tokens_per_second") / of("free", "tokens_per_second")
        for kind in ("forced", "masked")
    )
    return [
        f"Of 256 requests, on an H100, it changes by {one:+.1f} % beside one and by "
        f"{half:+.1f} % beside 128",
        f"with and without it's then {forced:.2f} and {masked:.2f} of free ones' speed",
    ]


def told_b() -> list[str]:
    record = recorded("b-structured")
    fills = [record[f"fill {count}"] for count in (1, 64, 256)]
    median, worst = (
        ", ".join(f"{fill[place]:.{digits}f}" for fill in fills[:2])
        + f" and {fills[2][place]:.{digits}f} ms"
        for place, digits in ((0, 2), (1, 1))
    )
    faster = [
        record[f"every {state}"] / record[f"walk {state}"]
        for state in ("number", "string")
    ]
    return [
        f"{faster[0]:.0f} times as fast as token by token for a number, and "
        f"{faster[1]:.1f} times in a string",
        f"in a string took {1e3 * record['library string']:.1f} ms",
        f"{record['row bytes']:,} bytes per state",
        f"{1e6 * record['kept']:.1f} µs for a mask that's kept, where a walk took "
        f"{1e3 * record['walk string']:.0f} ms",
        f"256 requests a median of {median}",
        f"and {worst} in the worst step",
        f"{record['steps forced']} steps instead of {record['steps chosen']}",
        *told_b_h200(),
        *told_b_h100(),
    ]


def told_c_h200() -> list[str]:
    """What `simplellm bench` found of other families' models and formats."""

    def of(name: str, batch: int, what: str = "tokens_per_second") -> float:
        rows = recorded(f"c-bench-{name}")["decode"]
        return next(row[what] for row in rows if row["batch"] == batch)

    def prompts(name: str) -> float:
        plain, other = (recorded(f"c-bench-{n}") for n in ("qwen3", name))
        speeds = [r["prefill"][0]["tokens_per_second"] for r in (plain, other)]
        return speeds[1] / speeds[0]

    two = "qwen3", "llama-3"
    one, many = ([100 * of(name, batch, "share") for name in two] for batch in (1, 64))
    fp8, int8 = ([of(f"qwen3-{form}", n) for n in (1, 64)] for form in ("fp8", "int8"))
    plain = [of("qwen3", batch) for batch in (1, 64)]
    return [
        f"write {plain[0]:,.0f} and {of('llama-3', 1):,.0f} tokens a second for one "
        f"request, {one[0]:.0f} and {one[1]:.0f} % of the limit, and 64 requests get "
        f"{many[0]:.0f} and {many[1]:.0f} % of it",
        f"{fp8[0]:,.0f} tokens a second for one request to Qwen3-8B, where bfloat16 "
        f"has {plain[0]:,.0f}, and {fp8[1]:,.0f} for 64, where it has {plain[1]:,.0f}. "
        f"Prompts are {prompts('qwen3-fp8'):.2f} times as fast",
        f"{int8[0]:,.0f} tokens a second for one request to Qwen3-8B, and "
        f"{int8[1]:,.0f} for 64; prompts are {prompts('qwen3-int8'):.2f} times as fast",
    ]


def told_c() -> list[str]:
    record = recorded("c-errors")
    rows, blocks, whole, alone, four = (
        record[name]
        for name in (
            "FP8 in rows",
            "FP8 in blocks",
            "INT8",
            "INT8, weights alone",
            "MXFP4",
        )
    )
    tiles = [record[f"product, {name}"] for name in ("INT8", "FP8 in blocks")]
    naive = [record[f"one scale, {name}"] for name in ("INT8", "FP8")]
    return [
        *told_c_h200(),
        f"0.0 % off with weights of 1, and {100 * record['norms swapped']:.1f} % with "
        "random ones",
        f"{100 * blocks['off']:.1f} % off in the embedded model's logits with "
        f"{blocks['bytes']:.2f} bytes per number, in rows {100 * rows['off']:.1f} %, "
        f"and MXFP4 {100 * four['off']:.1f} % with {four['bytes']:.2f}; in a product "
        f"with a column 50 times as large {100 * tiles[1][1]:.1f} %, with one of "
        f"100,000 times {100 * tiles[1][2]:.0f} %, where a single scale has "
        f"{100 * naive[1][1]:.1f} and {100 * naive[1][2]:.0f}",
        f"{100 * whole['off']:.1f} % off in the embedded model's logits, "
        f"{100 * alone['off']:.1f} % with weights alone; in a product with a column "
        f"50 times as large {100 * tiles[0][1]:.0f} % where a single scale has "
        f"{100 * naive[0][1]:.0f}",
    ]


def told_speed() -> list[str]:
    even = [round(r["tokens_per_second"]) for r in recorded("12-steady")["rows"]]
    return [
        f"writes {even[0]:,} tokens a second with 1,000 tokens in and 1,000 out, "
        f"{even[1]:,} with 1,024 and 8,192, and {even[2]:,} with 8,192 and 1,024",
    ]


def told_manual() -> list[str]:
    record = recorded("12-invariance")
    changed = sorted(run["differ"] for run in record["contrast"] if run["differ"])
    slower = sorted(run["ratio"] for run in record["cost"].values())
    one, two = (max(row["rates"]) for row in recorded("a-replicas")["rows"])
    return [
        f"H100s write {two / one:.2f} times as much as one: {two:,.0f} tokens",
        f"Without it, {changed[0]} to {changed[-1]} of 64 greedy answers changed",
        f"take {slower[0]:.2f} to {slower[-1]:.2f} times as long with it",
    ]


TOLD: dict[str, Callable[[], list[str]]] = {
    "02": told_02,
    "03": told_03,
    "04": told_04,
    "05": told_05,
    "06": told_06,
    "07": told_07,
    "08": told_08,
    "09": told_09,
    "10": told_10,
    "11": told_11,
    "12": told_12,
    "a": told_a,
    "b": told_b,
    "c": told_c,
    "chapters/speed.md": told_speed,
    "chapters/manual.md": told_manual,
}


def text_of(chapter: str) -> str:
    """The text of a chapter by its number, or of another page by its path."""
    (path,) = [*ROOT.glob(f"chapters/{chapter}-*.md"), *ROOT.glob(chapter)]
    return path.read_text(encoding="utf-8")


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("chapter", "sentence"),
    [(chapter, sentence) for chapter, told in TOLD.items() for sentence in told()],
)
def test_numbers_in_the_text_are_those_of_the_records(
    chapter: str, sentence: str
) -> None:
    text = one_line(text_of(chapter))
    assert sentence in text, f"chapter {chapter} does not say: {sentence}"


def quoting() -> Iterator[tuple[str, str]]:
    """The entries of the numbered chapters' costs that cite a record."""
    for path in cells.chapter_files(ROOT / "chapters"):
        chapter = path.name.partition("-")[0]
        (costs,) = COSTS.findall(cells.FENCE.sub("", text_of(chapter)))
        for item in ITEM.findall(costs):
            if chapter.isdigit() and CITED.search(item):
                yield chapter, one_line(item)


@pytest.mark.parametrize(("chapter", "item"), list(quoting()))
def test_an_entry_that_cites_a_record_has_no_other_number(
    chapter: str, item: str
) -> None:
    left = item
    for sentence in TOLD[chapter]():
        left = left.replace(sentence, "")
    numbers = re.findall(r"\d[\d.,]*", NAMES.sub("", left))
    assert not numbers, f"{numbers} are of no record: {left}"
