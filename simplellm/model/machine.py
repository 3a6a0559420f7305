"""What this machine has: the device, the dtype that suits it, and what runs there."""

import gc
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from simplellm.base.config import expect, expect_type, one_of

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OLDEST_GPU = "8.0"  # compute capability: the first with bfloat16
OLDEST_CUDA = "12.0"  # the first that compiles for an H100
OLDEST_TRITON = "3.6"


def find_device(device: str | torch.device | None) -> torch.device:
    """The device to run on, the GPU if there is one. Raises ValueError."""
    gpu = torch.cuda.is_available()
    try:
        chosen = torch.device(device or ("cuda" if gpu else "cpu"))
    except RuntimeError:
        raise ValueError(
            f"device is {device!r}; expected a device's name, such as cpu or cuda"
        ) from None
    one_of("the kind of device", chosen.type, ("cpu", "cuda"))
    if chosen.type == "cpu":
        return chosen
    expect(gpu, "device", str(chosen), "cpu: PyTorch finds no GPU")
    if chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    expected = f"one of the {count} GPUs: up to cuda:{count - 1}"
    expect(chosen.index < count, "device", str(chosen), expected)
    return chosen


def dtype_name(dtype: torch.dtype) -> str:
    """What PyTorch calls a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def find_dtype(dtype: Any, device: torch.device) -> torch.dtype:
    """The dtype to compute with, by default what suits ``device``.

    It may be given by its name; "auto" is as good as None. Raises TypeError or
    ValueError for one that no model has.
    """
    if isinstance(dtype, str) and dtype != "auto":
        names = {dtype_name(known): known for known in COMPUTE_DTYPES}
        names |= {"half": torch.float16, "float": torch.float32}
        one_of("dtype", dtype, ("auto", *names))
        dtype = names[dtype]
    if dtype is None or dtype == "auto":
        old = device.type == "cuda" and capability(device) < leading(OLDEST_GPU)
        return torch.float32 if device.type == "cpu" or old else torch.bfloat16
    expect_type("dtype", dtype, torch.dtype, "a torch.dtype")
    one_of("dtype", dtype, COMPUTE_DTYPES)
    return dtype


def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability."""
    return torch.cuda.get_device_capability(device)


def on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which Triton launches on ``device``."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def empty_cache(device: torch.device) -> None:
    """Give back the memory of a GPU that PyTorch holds, and nobody needs any more."""
    if device.type == "cuda":
        gc.collect()  # some may be held by objects that only hold one another
        with suppress(RuntimeError):  # the GPU has failed
            torch.cuda.empty_cache()


def name_of(device: torch.device) -> str:
    """What to call a device in a log."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the Triton kernels from running on ``device``; None if nothing."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"dtype is {dtype}, and the kernels compute with bfloat16"
    if (have := capability(device)) < leading(OLDEST_GPU):
        version = ".".join(map(str, have))
        return f"the GPU's compute capability is {version}, below {OLDEST_GPU}"
    cuda = torch.version.cuda
    if cuda is None or leading(cuda) < leading(OLDEST_CUDA):
        return f"PyTorch was built with CUDA {cuda}, not {OLDEST_CUDA} or later"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if leading(triton.__version__) < leading(OLDEST_TRITON):
        return f"Triton is {triton.__version__}, below {OLDEST_TRITON}"
    return None


def leading(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in text.split(".")[:2])
