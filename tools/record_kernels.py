"""Add a version of a kernel, as tools/gpu/tune.py measured it, to chapter 11's record.

    python tools/gpu/tune.py --only decode --variants --json OUT     on a GPU
    python tools/record_kernels.py OUT "decode 1 x 32768 64x4x4x128" "64 splits"

The second argument names a row of OUT, as the tuner prints it: kernel, shape, config.
The third is what the chapter calls that version. An entry of figures/11-kernels.json
says which kernel, in which version, at which shape, how many bytes it has to move, in
how many launches, how many microseconds it took, whether it was kept, and maybe why.
"""

import argparse
import json
from pathlib import Path
from typing import Any

FIGURE = Path(__file__).resolve().parents[1] / "figures/11-kernels.json"
Row = dict[str, Any]


def key(row: Row) -> str:
    """How a row of the results is named."""
    return f"{row['kernel']} {row['shape']} {row['config']}".strip()


def find(rows: list[Row], name: str) -> Row:
    """The quickest row of that name. Raises ValueError if there is none."""
    found = [row for row in rows if key(row) == name]
    if not found:
        kernel = [key(row) for row in rows if row["kernel"] == name.split()[0]]
        known = "\n  ".join(kernel[:20] or sorted({row["kernel"] for row in rows}))
        raise ValueError(f"no row is {name!r}; expected one like\n  {known}")
    return min(found, key=lambda row: row["us"])


def entry(row: Row, options: argparse.Namespace) -> Row:
    """What the record says about a row."""
    made = {"kernel": row["kernel"], "shape": row["shape"], "version": options.version}
    made |= {"bytes": round(row["bytes"]), "launches": 1, "us": round(row["us"], 2)}
    made |= {"kept": False} if options.dropped else {}
    return made | ({"why": options.why} if options.why else {})


def add(rows: list[Row], new: Row) -> list[Row]:
    """``rows`` with ``new`` in the place of the same version, or at the end."""
    same = ("kernel", "shape", "version")
    others = [any(row[name] != new[name] for name in same) for row in rows]
    if all(others):
        return [*rows, new]
    return [row if other else new for row, other in zip(rows, others, strict=True)]


def main(arguments: list[str] | None = None, figure: Path = FIGURE) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON that the tuner wrote")
    parser.add_argument("row", help="its kernel, shape and config")
    parser.add_argument("version", help="what to call it")
    parser.add_argument("--dropped", action="store_true", help="the version lost")
    parser.add_argument("--why", help="it is as fast as it is, in a sentence")
    options = parser.parse_args(arguments)
    record = json.loads(figure.read_text(encoding="utf-8"))
    rows = json.loads(options.results.read_text(encoding="utf-8"))["rows"]
    try:
        new = entry(find(rows, options.row), options)
    except ValueError as error:
        parser.error(str(error))
    record["rows"] = add(record["rows"], new)
    figure.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(new))


if __name__ == "__main__":
    main()
