"""Add a version of a kernel, as a script in tools/gpu/ measured it, to a record.

    python tools/gpu/attention.py --tune --json OUT     or another script, on a GPU
    python tools/record_kernels.py OUT "decode 1 x 32768 b64 w4 s4 l128 j8" "64 splits"

The second argument names a row of OUT: kernel, shape and config, or half, tokens and
tiling, as the script prints them, with an x between a tiling's numbers. The third is
what the chapter calls that version. An entry of figures/11-kernels.json says which
kernel, in which version, at which shape, how many bytes it has to move, in how many
launches, how many microseconds it took, maybe at what clock and power (mhz, watts),
whether it was kept, and maybe why. Several kernels that were timed together have null
bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

FIGURE = Path(__file__).resolve().parents[1] / "figures/11-kernels.json"
Row = dict[str, Any]


def show(tiling: list[Any]) -> str:
    """A tiling's numbers, without what it leaves out."""
    return "x".join(str(x) for x in tiling if x is not None and x != "")


def key(row: Row) -> str:
    """How a row of a script's results is named."""
    if "kernel" in row:
        return f"{row['kernel']} {row['shape']} {row['config']}".strip()
    tilings = [row[name] for name in ("tiling", "up", "down") if name in row]
    return " ".join([row["half"], str(row["tokens"]), *map(show, tilings)])


def microseconds(row: Row) -> float:
    if "us" in row:
        return row["us"]
    return 1e6 * (row["seconds"] if "seconds" in row else row["s"])


def moved(row: Row) -> float | None:
    """Bytes, or None for a row without a rate."""
    if "gb" in row:
        return 1e9 * row["gb"]
    rates = [row[name] for name in ("gbs", "gbps", "rate") if name in row]
    return 1e3 * rates[0] * microseconds(row) if rates else None


def find(results: list[Row], name: str) -> Row:
    """The quickest row of that name. Raises ValueError if there is none."""
    named = [
        row
        for row in results
        if {"kernel", "half"} & set(row) and {"us", "seconds", "s"} & set(row)
    ]
    found = [row for row in named if key(row) == name]
    if not found:
        kernel = [key(row) for row in named if key(row).split()[0] == name.split()[0]]
        known = "\n  ".join(kernel[:20] or sorted({key(r).split()[0] for r in named}))
        raise ValueError(f"no row is {name!r}; expected one like\n  {known}")
    return min(found, key=microseconds)


def entry(row: Row, options: argparse.Namespace) -> Row:
    """What the record says about a row."""
    size = moved(row)
    made = {
        "kernel": options.kernel or key(row).split()[0],
        "shape": options.shape or str(row.get("shape", row.get("tokens"))),
        "version": options.version,
        "bytes": None if size is None else round(size),
        "launches": options.launches,
        "us": round(microseconds(row), 2),
    }
    made |= {name: row[name] for name in ("mhz", "watts") if name in row}
    if options.dropped:
        made["kept"] = False
    return made | ({"why": options.why} if options.why else {})


def add(rows: list[Row], new: Row) -> list[Row]:
    """``rows`` with ``new`` in the place of the same version, or at the end."""
    same = ("kernel", "shape", "version")
    kept = [
        [row[name] for name in same] != [new[name] for name in same] for row in rows
    ]
    if all(kept):
        return [*rows, new]
    return [row if keep else new for row, keep in zip(rows, kept, strict=True)]


def main(arguments: list[str] | None = None, figure: Path = FIGURE) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON that a script wrote")
    parser.add_argument("row", help="its kernel, shape and config")
    parser.add_argument("version", help="what to call it")
    parser.add_argument("--kernel", help="its name in the record, if another")
    parser.add_argument("--shape", help="its shape in the record, if another")
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--dropped", action="store_true", help="the version lost")
    parser.add_argument("--why", help="it is as fast as it is, in a sentence")
    options = parser.parse_args(arguments)
    record = json.loads(figure.read_text(encoding="utf-8"))
    try:
        row = find(json.loads(options.results.read_text(encoding="utf-8")), options.row)
    except ValueError as error:
        parser.error(str(error))
    new = entry(row, options)
    record["rows"] = add(record["rows"], new)
    figure.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(new))


if __name__ == "__main__":
    main()
