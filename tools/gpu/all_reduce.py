"""What it takes two or more GPUs of a machine to add up some rows, in several ways.

    python tools/gpu/all_reduce.py --json figures/e-all-reduce.json

Microseconds a call of a CUDA graph that has as many as a step of gpt-oss-120b, the best
of some replays. The sums are compared with those of one GPU first. Multicast stays off.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
sys.path.append(str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl
from records import argument_parser, header, save
from torch import Tensor

from simplellm.engine.graphs import capture_graph
from simplellm.model.kernels.exchange import Peers, exchange, load_addresses
from simplellm.model.kernels.norm import add_norm
from simplellm.model.kernels.reduce import share
from simplellm.model.parallel import Group

ROWS, SIZE = (1, 8, 64, 256), 2880
CALLS, REPLAYS, TURNS = 72, 10, 5
MOST = max(ROWS)
COPIED = 2**28  # bytes
SUMS = "NCCL", "one-shot, PyTorch", "two-shot, PyTorch", "one-shot, Triton"


@triton.jit
def empty_kernel(x_ptr):
    """Nothing."""


@triton.jit
def one_shot_kernel(
    x_ptr,
    out_ptr,
    peers_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program a row: out = the sum of all ranks' x."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row * N + columns, inside, 0)
    dtype = x_ptr.dtype.element_ty
    addresses = load_addresses(peers_ptr, RANKS)
    total = exchange(
        *(x.to(tl.float32), columns, inside, row, addresses),
        *(WORDS, RANK, RANKS, ROWS, dtype),
    )
    tl.store(out_ptr + row * N + columns, total.to(dtype), inside)


def one_shot(x: Tensor, peers: Peers) -> Tensor:
    """The sum of all ranks' x [T, N]."""
    out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    sizes = {"N": x.shape[1], "BLOCK": block, **peers.constants()}
    one_shot_kernel[(len(x),)](x, out, peers.addresses, **sizes, num_warps=8)
    return out


def numbers(rank: int, rows: int, device: torch.device) -> Tensor:
    """What a rank has, bfloat16."""
    generator = torch.Generator(device).manual_seed(100 * rows + rank)
    x = torch.randn(rows, SIZE, generator=generator, device=device)
    return x.bfloat16()


def ways(x: Tensor, group: Group, peers: Peers) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    weight, residual = torch.ones(SIZE, device=x.device), torch.zeros_like(x)
    shared = shared_copy(x, group)
    torch_ops = torch.ops.symm_mem
    return {
        "an empty kernel": lambda: empty_kernel[(1,)](x),
        "NCCL": lambda: group.sum(x.clone()),
        "one-shot, PyTorch": lambda: torch_ops.one_shot_all_reduce(
            shared, "sum", group.name
        ),
        "two-shot, PyTorch": lambda: torch_ops.two_shot_all_reduce_(
            shared, "sum", group.name
        ),
        "one-shot, Triton": lambda: one_shot(x, peers),
        "a norm alone": lambda: add_norm(residual, x, weight, 1e-5),
        "NCCL and the norm": lambda: add_norm(
            residual, group.sum(x.clone()), weight, 1e-5
        ),
        "one-shot with the norm": lambda: add_norm(residual, x, weight, 1e-5, peers),
    }


def shared_copy(x: Tensor, group: Group) -> Tensor:
    """x in memory of PyTorch's, which its own operations add up."""
    from torch._C._distributed_c10d import _SymmetricMemory as symmetric

    numbers = tuple(x.shape), x.stride(), x.dtype, x.device
    memory = symmetric.empty_strided_p2p(*numbers)
    symmetric.rendezvous(memory, group.name)
    return memory.copy_(x)


def microseconds(run: Callable[[], Any], group: Group) -> float:
    """Of a call in a graph of CALLS, which all ranks replay at once."""

    def calls() -> None:
        for _ in range(CALLS):
            run()

    run()
    graph = capture_graph(calls)
    times = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        group.min(torch.zeros(1))
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (CALLS * REPLAYS))
    return min(times)


def check(group: Group, peers: Peers, device: torch.device) -> None:
    """Raise AssertionError if the sums are wrong, or other bits on other ranks."""
    for rows in ROWS:
        each = [numbers(rank, rows, device) for rank in range(group.size)]
        expected = torch.stack(each).float().sum(0).bfloat16()
        for _ in range(5):
            summed = one_shot(each[group.rank], peers)
            residual = torch.zeros_like(summed)
            weight = torch.ones(SIZE, device=device)
            total, _ = add_norm(residual, each[group.rank], weight, 1e-5, peers)
            assert summed.equal(expected) and total.equal(expected), rows
        summed = group.sum(each[group.rank].clone())
        torch.testing.assert_close(summed, expected)


def measure(group: Group, device: torch.device) -> list[dict[str, Any]]:
    """The rows of the record, on any rank."""
    peers = share(group, SIZE // 2, MOST)
    assert peers is not None, "GPUs share no memory"
    check(group, peers, device)
    times: dict[str, list[float | None]] = {}
    for rows in ROWS:
        x = numbers(group.rank, rows, device)
        for how, run in ways(x, group, peers).items():
            us = None
            try:
                us = round(microseconds(run, group), 2)
            except RuntimeError as error:  # of all ranks, as of an operation not there
                print(how, rows, error, file=sys.stderr)
            times.setdefault(how, []).append(us)
    return [{"how": how, "us": us} for how, us in times.items()]


def copy_rate(ranks: int) -> float:
    """Bytes a second from one GPU to the next."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{ranks - 1}")
    target = torch.empty(COPIED, dtype=torch.uint8, device="cuda:0")
    best = 0.0
    for _ in range(TURNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, COPIED / (time.perf_counter() - begin))
    return best


def run_rank(folder: str, rank: int, ranks: int) -> list[dict[str, Any]]:
    """All that a rank does."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        return measure(Group(folder, rank, ranks, 60, device), device)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help="for the processes that this starts")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.folder, options.rank, options.ranks)
        return
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(options.ranks)]
        command += ["--folder", folder, "--rank"]
        others = [
            subprocess.Popen([*command, str(rank)]) for rank in range(1, options.ranks)
        ]
        rows = run_rank(folder, 0, options.ranks)
        assert [process.wait() for process in others] == [0] * len(others)
    print(f"{'microseconds a call':24}" + "".join(f"{n:>9}" for n in ROWS))
    for row in rows:
        cells = (f"{'-' if us is None else us:>9}" for us in row["us"])
        print(f"{row['how']:24}{''.join(cells)}")
    rate = copy_rate(options.ranks)
    print(f"a copy: {rate / 1e9:.0f} GB/s")
    result = {
        **header(),
        "gpus": options.ranks,
        "method": f"microseconds a call in a CUDA graph of {CALLS}, bfloat16 rows",
        "size": SIZE,
        "rows": ROWS,
        "all_reduce": [row for row in rows if row["how"] in SUMS],
        "with_norm": [row for row in rows if "norm" in row["how"]],
        "empty_kernel_us": rows[0]["us"][0],
        "peer_copy_bytes_per_second": rate,
    }
    save(result, options.json)


if __name__ == "__main__":
    main()
