"""What a machine does at best: how fast it reads memory and multiplies, measured."""

import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from simplellm.apps.roofline import Machine

CPU = torch.device("cpu")


def seconds_of(
    work: Callable[[], object],
    device: torch.device = CPU,
    # Bound here: what is timed may exchange time.perf_counter, and changes nothing.
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The seconds that ``work`` takes on a device, once."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = clock()
    work()
    return clock() - start


def shortest_time(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of ten times that ``work`` takes, in seconds.

    Whatever disturbs a run makes it longer.
    """
    work()  # compiles kernels, touches memory
    return min(seconds_of(work, device) for _ in range(10))


def read_speed(device: torch.device, nbytes: int) -> float:
    """Bytes a second at which ``nbytes`` of memory are read, the quickest way here."""
    x = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    read: Callable[[Tensor], Tensor] = torch.sum
    if device.type == "cuda" and find_spec("triton"):
        from simplellm.model.kernels.bandwidth import read_memory as read
    elif device.type == "cpu":
        x = x.view(torch.float32)  # the sum of integers takes longer than reading them
    return nbytes / shortest_time(lambda: read(x), device)


def matmul_speed(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of the product of two square matrices.

    They are random: a GPU needs less power for constants, and is then faster.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / shortest_time(lambda: a @ b, device)


def measure_machine(device: torch.device, nbytes: int) -> Machine:
    """Read 4 GiB and multiply 8192^3 on a GPU; ``nbytes`` and 1024^3 on a CPU.

    Of ``nbytes`` at most 256 MiB count; fewer may fit the cache, faster than memory.
    """
    size, dtype, nbytes = 1024, torch.float32, min(nbytes, 2**28)
    if device.type == "cuda":
        half = torch.cuda.mem_get_info(device)[0] // 2
        size, dtype = 8192, torch.bfloat16
        nbytes = min(2**32, 2 ** (half.bit_length() - 1))
    machine = Machine(read_speed(device, nbytes), matmul_speed(device, size, dtype))
    torch.cuda.empty_cache()  # the engine takes what is free
    return machine
