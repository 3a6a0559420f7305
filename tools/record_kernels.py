"""Write figures/11-kernels.json from what the scripts in tools/gpu/ measured.

    python3 tools/gpu/small.py --json OUT       and likewise the others, on one GPU
    python tools/record_kernels.py RESULTS      their JSON files, in folders as below

Each entry says which kernel, in which version, at which shape, how many bytes it has to
move, in how many launches, and how many microseconds it took.
"""

import argparse
import json
from pathlib import Path
from typing import Any

FIGURE = Path(__file__).resolve().parents[1] / "figures/11-kernels.json"

# What to take: a folder's file, then kernel, shape, config there -> kernel, version.
SMALL, LATER = "1/small.json", "3/small.json"
ATTENTION, MANY = "4/attention.json", "1/many.json"
FEW, LAST = "3/few.json", "6/few.json"
READY = "11/attention-tune.json"
Choice = tuple[str, str, str, str, str, str]
CHOICES: list[Choice] = [
    (SMALL, "add_norm", "T1 S1", "no PDL", "add_norm", "plain launch"),
    (SMALL, "add_norm", "T1 S1", "PDL", "add_norm", "dependent launch"),
    (SMALL, "add_norm", "T64 S1", "no PDL", "add_norm", "plain launch"),
    (SMALL, "add_norm", "T64 S1", "PDL", "add_norm", "dependent launch"),
    (SMALL, "add_norm", "T256 S4", "no PDL", "add_norm", "plain launch"),
    (SMALL, "add_norm", "T256 S4", "PDL", "add_norm", "dependent launch"),
    *(
        (ATTENTION, "rope", tokens, "", "rope", "dependent launch")
        for tokens in ("1", "64", "256", "2048", "65536")
    ),
    *(
        (ATTENTION, "decode", shape, config, "decode", version)
        for shape, config, version in (
            ("1 x 1000", "b64 w4 s4 l1024 j8.1 x64", "unsplit"),
            ("1 x 1000", "b64 w4 s4 l256 j8.1 x64", "split by 256"),
            ("1 x 1000", "b64 w4 s4 l128 j8.1 x64", "split by 128"),
            ("1 x 32768", "b64 w4 s4 l128 j8.1 x64", "split by 128, at most 64"),
            ("1 x 131072", "b64 w4 s4 l128 j8.1 x64", "split by 128, at most 64"),
            ("8 x 32768", "b64 w4 s4 l128 j8.1 x8", "at most 8 splits"),
            ("64 x 1000", "b64 w4 s2 l1024 j8.1 x4", "unsplit, 2 tiles under way"),
            ("64 x 1000", "b64 w4 s3 l256 j8.1 x4", "split by 256, 3 under way"),
            ("64 x 1000", "b64 w4 s4 l1024 j8.1 x4", "unsplit, 4 under way"),
            ("256 x 500", "b64 w4 s2 l1024 j8.1 x4", "unsplit"),
        )
    ),
    *(
        (ATTENTION, "dec 128", "64 x 1000 p64", config, "window", version)
        for config, version in (
            ("b64 w4 s3 l128 j8.1 x4", "two tiles"),
            ("b128 w4 s1 l128 j8.1 x4", "one tile"),
        )
    ),
    *(
        (READY, "decode", shape, config, "decode", version)
        for shape, config, version in (
            ("1 x 1000", "R b64 w4 s4 l128 j8", "keys early"),
            ("1 x 8192", "b64 w4 s4 l128 j8", "at most 64 splits"),
            ("1 x 8192", "R b64 w4 s3 l128 j33 x49", "49, keys early"),
            ("1 x 32768", "R b64 w4 s4 l128 j8 x33", "33, keys early"),
            ("1 x 32768", "R b64 w4 s3 l128 j33 x49", "49, keys early"),
            ("1 x 131072", "b64 w4 s4 l128 j33 x33", "33 splits"),
            ("1 x 131072", "R b64 w4 s3 l128 j33 x49", "49, keys early"),
            ("2 x 32768", "b64 w4 s4 l128 j8", "at most 32 splits"),
            ("2 x 32768", "R b64 w4 s3 l128 j33 x25", "25, keys early"),
            ("8 x 32768", "R b64 w4 s4 l128 j8", "keys early"),
            ("64 x 1000", "R b64 w4 s4 l1024 j8", "unsplit, 4, keys early"),
        )
    ),
    (READY, "dec 128", "64 x 1000", "R b128 w4 s1 l128 j8", "window", "one, early"),
    *(
        (LATER, kernel, "T1", config, name, version)
        for kernel, name, config in (
            ("qkv", "qkv projection", "gemv r2 w4 a0"),
            ("o", "o projection", "gemv r2 w4 a0"),
            ("router", "router", "gemv r4 w4 a0"),
        )
        for config, version in (("cuBLAS", "cuBLAS"), (config, "rows in registers"))
    ),
    *(
        (LATER, "chain", f"T{tokens} a layer", config, "chain", version)
        for tokens in (1, 2)
        for config, version in (
            ("usual", "6 kernels"),
            ("+qr gemv r4 w4 a0", "norms in the projections"),
        )
    ),
    (LATER, "torch", "T64", "", "routing", "PyTorch: matmul and topk"),
    (LATER, "route", "T64", "", "routing", "matmul, top 4 and softmax"),
    (LATER, "torch", "T1", "", "routing", "PyTorch: matmul and topk"),
    (LATER, "all", "T1", "", "routing", "two kernels, pairs sorted too"),
    (LATER, "head", "T1", "cuBLAS + argmax", "head", "cuBLAS, then argmax"),
    (LATER, "head", "T1", "gemv r8 w4 a0", "head", "argmax on the way"),
    (LATER, "head", "T8", "cuBLAS + argmax", "head", "cuBLAS, then argmax"),
    (LATER, "head", "T8", "dot 128x128 p1 w4 s3 a0", "head", "dependent launch"),
    (LATER, "head", "T8", "dot 128x128 p1 w4 s3 a1", "head", "and prefetch"),
    (LATER, "head", "T8", "dot 128x128 p1 w4 s3 -", "head", "plain launch"),
    (LATER, "sample", "B1", "temperature", "draw", "PyTorch sampler"),
    (LATER, "draw", "B1", "", "draw", "noise in the kernel"),
    (LATER, "sample", "B64", "temperature", "draw", "PyTorch sampler"),
    (LATER, "draw", "B64", "", "draw", "noise in the kernel"),
    (MANY, "gate_up", "64", "128x16x1x1x5x3x4", "gate_up", "fragments, unroll 5"),
    (MANY, "gate_up", "64", "128x16x1x1x3x3x4", "gate_up", "fragments, unroll 3"),
    (MANY, "gate_up", "256", "128x16x1x1x3x3x4", "gate_up", "fragments, unroll 3"),
    (MANY, "down", "64", "128x16x1x1x3x3x4", "down", "fragments, unroll 3"),
    (FEW, "gate_up", "2", "1x6x4", "gate_up", "mma, a tile a program"),
    (LAST, "gate_up", "2", "128x16x1x1x3x4x4", "gate_up", "fragments, unroll 3"),
    (FEW, "gate_up", "4", "1x6x4", "gate_up", "mma, a tile a program"),
    (LAST, "gate_up", "4", "64x16x1x1x3x3x4", "gate_up", "fragments, unroll 3"),
    (FEW, "gate_up", "1", "64x16x1x1x5x3x4", "gate_up", "fragments, unroll 5"),
    (FEW, "gate_up", "1", "2x2x4", "gate_up", "mma, a tile a program"),
    (LAST, "gate_up", "1", "66x1x1x8x0x128", "gate_up", "mma, many tiles a program"),
]  # fmt: skip

LAUNCHES = {"6 kernels": 6, "norms in the projections": 4}
LAUNCHES["two kernels, pairs sorted too"] = 2

# Before there were scripts that write JSON: gate_up of one layer, 4 experts for one
# token and 112 for 64, printed on 2026-11-20. An expert is 5760 x 2880 of 4.25 bits.
EXPERT = 5760 * 2880 * 17 // 32
EARLY = [
    ("1", 4, "tl.dot_scaled", 46.0),
    ("1", 4, "two planes, two tl.dot", 25.6),
    ("1", 4, "no tensor cores", 18.0),
    ("64", 112, "tl.dot_scaled", 908.0),
    ("64", 112, "two planes, two tl.dot", 465.0),
]


def number(x: object) -> object:
    """True and False as 1 and 0; nothing for None."""
    return int(x) if isinstance(x, bool) else "" if x is None else x


def rows_of(path: Path) -> dict[tuple[str, str, str], tuple[float, float]]:
    """(kernel, shape, config) -> microseconds, bytes, in one form for all scripts."""
    rows: dict[tuple[str, str, str], tuple[float, float]] = {}
    moves: dict[tuple[str, str], float] = {}  # the slower versions come without a rate
    for row in json.loads(path.read_text(encoding="utf-8")):
        if "us" in row:
            work, us = (row["kernel"], row["shape"]), row["us"]
            rate = row.get("gbs", row.get("gbps"))
            if rate is not None:
                moves[work] = rate * us * 1e3
            if work in moves:
                rows[*work, row["config"]] = us, moves[work]
        elif "half" in row:
            tiling = [str(x) for x in map(number, row["tiling"]) if x != ""]
            us = row["seconds"] * 1e6
            moved = row["gb"] * 1e9 if "gb" in row else row["rate"] * us * 1e3
            key = row["half"], str(row["tokens"]), "x".join(tiling)
            # With and without a dependent launch: the faster one counts.
            rows[key] = min(rows.get(key, (us, moved)), (us, moved))
    return rows


def collect(results: Path) -> list[dict[str, Any]]:
    """All entries. Raises KeyError for one that was not measured."""
    files = {name: rows_of(results / name) for name in {c[0] for c in CHOICES}}
    entries = []
    for tokens, experts, version, us in EARLY:
        entry = {"kernel": "gate_up", "shape": tokens, "version": version}
        entries.append(entry | {"bytes": experts * EXPERT, "launches": 1, "us": us})
    for file, kernel, shape, config, name, version in CHOICES:
        us, moved = files[file][kernel, shape, config]
        short = shape.removesuffix(" a layer").removesuffix(" p64")
        entry = {"kernel": name, "shape": short, "version": version}
        cost = {"bytes": round(moved), "launches": LAUNCHES.get(version, 1)}
        entries.append(entry | cost | {"us": round(us, 2)})
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="numbered folders of JSON files")
    results = parser.parse_args().results
    rows = json.loads((results / ATTENTION).read_text(encoding="utf-8"))
    gpu, version = rows[0]["note"].split(", torch ")
    record = {
        "date": "2026-11-21",
        "gpu": gpu,
        "torch": version,
        "triton": "3.6.0",
        "command": "python3 tools/gpu/{small,attention,experts_many,experts_few}"
        ".py --json OUT; python tools/record_kernels.py RESULTS",
        "bandwidth": 4650,  # GB/s, the best that a Triton kernel read
        "launch_us": 1.2,  # an empty kernel in a CUDA graph
        "rows": collect(results),
    }
    FIGURE.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
