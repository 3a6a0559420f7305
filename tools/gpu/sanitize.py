"""Run each kernel on little, and all of them under compute-sanitizer.

    python tools/gpu/sanitize.py --json figures/11-sanitizer.json
    compute-sanitizer --tool memcheck python tools/gpu/sanitize.py decode rope

The first form runs memcheck and racecheck over every kernel, several processes at a
time. With names it only runs these kernels once each, for a tool that watches.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from cases import random_model, small_cases
from records import argument_parser, header, save

KERNELS = "embed norm rope linear experts experts_one head draw decode prefill".split()
TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed"
)
REFUSED = re.compile(r"=+ (?:Error|Internal|Warning).*", re.IGNORECASE)
DONE = "every kernel has run"


@torch.inference_mode()
def run(names: list[str]) -> None:
    """Launch these kernels. Raises RuntimeError for a result that is not finite."""
    torch.manual_seed(0)
    cases = small_cases(random_model("gpt-oss-20b", 1))
    for name in names:
        for case in cases[name]:
            for number, out in enumerate(case.outcome()):
                if not out.cpu().isfinite().all():
                    raise RuntimeError(
                        f"{name} {case.shape}, result {number} is not finite"
                    )
        print(name)
    torch.cuda.synchronize()
    print(DONE)


@dataclass(frozen=True)
class Finding:
    """What one tool said about one kernel; no ``errors`` if it did not run."""

    kernel: str
    tool: str
    errors: int | None
    message: str = ""


def understand(kernel: str, tool: str, output: str) -> Finding:
    """The finding in what a tool and the program under it have printed."""
    counts = [int(a or b) for a, b in SUMMARY.findall(output)]
    if counts and DONE in output and "not supported" not in output:
        return Finding(kernel, tool, sum(counts))
    said = REFUSED.search(output)
    lines = output.strip().splitlines() or ["no output"]
    return Finding(kernel, tool, None, said[0] if said else lines[-1])


def watch(job: tuple[str, str], program: str = "compute-sanitizer") -> Finding:
    """Run a kernel's case under a tool."""
    kernel, tool = job
    command = [program, "--tool", tool, sys.executable, __file__, kernel]
    # Each tensor in an allocation of its own, so that no neighbor hides a bad access.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=400
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(kernel, tool, None, str(error)[:200])
    finding = understand(kernel, tool, done.stdout + done.stderr)
    if finding.errors != 0:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    return finding


def table(findings: list[Finding]) -> str:
    """A row for each kernel, a column for each tool."""
    found = {(f.kernel, f.tool): f for f in findings}
    lines = ["| kernel | " + " | ".join(TOOLS) + " |", "|---" * 3 + "|"]
    for kernel in dict.fromkeys(f.kernel for f in findings):
        cells = [found[kernel, tool] for tool in TOOLS]
        shown = [
            f"did not run: {c.message}" if c.errors is None else str(c.errors)
            for c in cells
        ]
        lines.append(f"| {kernel} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.kernels) - {*KERNELS}:
        parser.error(f"no kernel {', '.join(unknown)}; expected {', '.join(KERNELS)}")
    if arguments.kernels:
        run(arguments.kernels)
        return
    run(KERNELS)  # compiles them, once
    with ThreadPoolExecutor(arguments.jobs) as pool:
        findings = list(pool.map(watch, product(KERNELS, TOOLS)))
    print(table(findings))
    found = {"findings": [asdict(finding) for finding in findings]}
    save(header() | {"cuda": torch.version.cuda} | found, arguments.json)
    sys.exit(any(finding.errors != 0 for finding in findings))


if __name__ == "__main__":
    main()
