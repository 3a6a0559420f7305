"""NCCL, by its C interface: what ranks on GPUs of one machine exchange.

PyTorch's process group for NCCL watches with threads that end the process when a rank
is gone. These calls go to the current stream and nowhere else: a graph can record them,
and `Communicator.abort` ends those that wait for nobody.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

KINDS = {  # ncclDataType_t
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
REDUCTIONS = {"SUM": 0, "MAX": 2, "MIN": 3}  # ncclRedOp_t
ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """ncclUniqueId: how the ranks of one communicator find each other."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


@cache
def library() -> ctypes.CDLL:
    """The NCCL that PyTorch computes with, which is loaded already."""
    nccl = ctypes.CDLL("libnccl.so.2")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures: dict[str, list[Any]] = {
        "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
        "ncclCommInitRank": [ctypes.POINTER(pointer), number, UniqueId, number],
        "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclAllGather": [pointer, pointer, size, number, pointer, pointer],
        "ncclReduceScatter": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclCommAbort": [pointer],
    }
    for name, arguments in signatures.items():
        getattr(nccl, name).argtypes = arguments
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl


def call(name: str, *arguments: Any) -> None:
    """Call a function of NCCL. Raises RuntimeError with what it says of its failure."""
    if status := getattr(library(), name)(*arguments):
        why = library().ncclGetErrorString(status).decode()
        raise RuntimeError(f"{name}: {why}")


def unique_id() -> bytes:
    """What `Communicator` needs; one rank makes it and sends it to the others."""
    made = UniqueId()
    call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


class Communicator:
    """Rank ``rank`` of ``size``, with ``device`` for itself; made by all at once.

    Tensors are contiguous and on the device. Each call is one of the current stream,
    and all ranks make the same ones in the same order.
    """

    def __init__(self, made: bytes, rank: int, size: int, device: torch.device) -> None:
        self.device = device
        self.handle: ctypes.c_void_p | None = ctypes.c_void_p()
        with torch.cuda.device(device):
            of_all = UniqueId.from_buffer_copy(made)
            where = ctypes.byref(self.handle)
            call("ncclCommInitRank", where, size, of_all, rank)

    def _ends(self) -> tuple[ctypes.c_void_p | None, int]:
        return self.handle, torch.cuda.current_stream(self.device).cuda_stream

    def all_reduce(self, x: Tensor, how: str) -> None:
        """Write to ``x`` the SUM, MAX or MIN of all ranks', the same bits on each."""
        numbers = x.numel(), KINDS[x.dtype], REDUCTIONS[how]
        call("ncclAllReduce", x.data_ptr(), x.data_ptr(), *numbers, *self._ends())

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Write all ranks' ``x`` [...] to ``out`` [size, ...]."""
        ends = x.data_ptr(), out.data_ptr()
        call("ncclAllGather", *ends, x.numel(), KINDS[x.dtype], *self._ends())

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Write this rank's part of all ranks' sum of ``x`` [size, ...] to ``out``."""
        ends = x.data_ptr(), out.data_ptr()
        numbers = out.numel(), KINDS[x.dtype], REDUCTIONS["SUM"]
        call("ncclReduceScatter", *ends, *numbers, *self._ends())

    def broadcast(self, x: Tensor) -> None:
        """Write the first rank's ``x`` to that of the others."""
        numbers = x.numel(), KINDS[x.dtype], 0
        call("ncclBroadcast", x.data_ptr(), x.data_ptr(), *numbers, *self._ends())

    def abort(self) -> None:
        """End all calls under way; what they give is nothing. From any thread.

        Waits until the graphs that hold calls are gone.
        """
        handle, self.handle = self.handle, None
        if handle is not None:
            library().ncclCommAbort(handle)
