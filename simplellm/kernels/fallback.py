"""What happens when a kernel does not compile on this GPU or with this Triton."""

import logging
from collections.abc import Callable
from subprocess import SubprocessError
from typing import Any

import torch
from triton import TritonError

LOGGER = logging.getLogger("simplellm")
# Triton reports a pass that failed and a missing C compiler as RuntimeErrors.
FAILURES = TritonError, RuntimeError, OSError, SubprocessError
# What a RuntimeError says when there was no room for a kernel or for cuBLAS.
NO_ROOM = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)
# How an error of the GPU begins, and what says that it only cannot run this kernel.
GPU_ERROR = "Triton Error [CUDA]"
NOT_LOADED = (
    "no kernel image",
    "invalid ptx",
    "image is invalid",
    "too many resources",
)


class Fallback:
    """A launcher that gives way to its twin, once its kernel does not compile.

    From then on the twin computes all; a warning in the log says why. Errors of
    arguments, of memory and of the GPU are raised as they are.
    """

    def __init__(self, launcher: Callable[..., Any], twin: Callable[..., Any]) -> None:
        self.launcher, self.twin = launcher, twin
        self.broken = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        """What the launcher or its twin returns."""
        if self.broken:
            return self.twin(*args, **options)
        try:
            return self.launcher(*args, **options)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except FAILURES as error:
            message = str(error)
            if any(words in message for words in NO_ROOM):
                raise torch.OutOfMemoryError(message) from error
            loaded = not any(words in message for words in NOT_LOADED)
            if message.startswith(GPU_ERROR) and loaded:
                raise
            self._give_way(error)
        return self.twin(*args, **options)

    def _give_way(self, error: Exception) -> None:
        if self.broken:  # another thread has said it
            return
        self.broken = True
        LOGGER.warning(
            "%s does not compile, so that PyTorch computes it, which is slower: %s: %s",
            self.launcher.__name__,
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )
