"""The LLM that picks the fastest way to compute that a machine has."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simplellm.checkpoint import Checkpoint
from simplellm.engine import LLM as PlainLLM
from simplellm.engine import Engine, EngineConfig
from simplellm.graphs import GPUConfig, GraphEngine
from simplellm.memory import enough
from simplellm.model import EMBEDDED, check_dtype, config_of, find_device

LOGGER = logging.getLogger("simplellm")
OLDEST = (8, 0)  # compute capability: the first with bfloat16
OLDEST_CUDA = (12, 0)  # the first that compiles for an H100
OLDEST_TRITON = (3, 6)


def version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in text.split(".")[:2])


def why_not_fused(
    device: torch.device, dtype: torch.dtype | None, config: EngineConfig
) -> str | None:
    """What keeps the kernels from running on ``device``; None if nothing does."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (None, torch.bfloat16):
        return f"dtype is {dtype}, and the kernels compute with bfloat16"
    if config.cache != "paged":
        return f"cache is {config.cache!r}, and the kernels read pages"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        have, need = (".".join(map(str, c)) for c in (capability, OLDEST))
        return f"the GPU's compute capability is {have}, below {need}"
    if torch.version.cuda is None or version(torch.version.cuda) < OLDEST_CUDA:
        need = ".".join(map(str, OLDEST_CUDA))
        return f"PyTorch was built with CUDA {torch.version.cuda}, not {need} or later"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if version(triton.__version__) < OLDEST_TRITON:
        need = ".".join(map(str, OLDEST_TRITON))
        return f"Triton is {triton.__version__}, below {need}"
    return None


class LLM(PlainLLM):
    """A model that answers any number of threads, as fast as this machine can.

    On an NVIDIA GPU with bfloat16 it runs the Triton kernels in CUDA graphs, elsewhere
    PyTorch; ``how`` and one line of the log "simplellm" say which, and why. ``config``
    is a `GPUConfig` or an `EngineConfig`, whose sizes then count on a GPU as well.
    Raises ValueError if it asks for ``batch_invariant`` where PyTorch computes. All
    else is as in `simplellm.engine.LLM`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> None:
        device = find_device(device)
        if not isinstance(config, EngineConfig | None):
            raise TypeError(f"config is {config!r}; expected an EngineConfig")
        if dtype is not None:
            check_dtype(dtype)
        if config is None:
            config = GPUConfig() if device.type == "cuda" else EngineConfig()
        reason = why_not_fused(device, dtype, config)
        if "backend" in options:
            reason = "a backend was given"
        random, packed = options.get("random_weights", False), True
        if device.type == "cuda" and not random:
            packed = Checkpoint(EMBEDDED if path is None else path).packed
        if reason is None and not packed:
            reason = "the experts are not packed, and the kernels read MXFP4"
        self._fused = reason is None
        if self._fused and not isinstance(config, GPUConfig):
            config = GPUConfig(**asdict(config))
        if reason and isinstance(config, GPUConfig) and config.batch_invariant:
            raise ValueError(
                "batch_invariant is True; expected False, since PyTorch computes and "
                f"promises no order of sums ({reason})"
            )
        guard: AbstractContextManager[object] = nullcontext()
        current: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":
            current = torch.cuda.device(device)  # where Triton launches
            if dtype is None and torch.cuda.get_device_capability(device) < OLDEST:
                dtype = torch.float32
            itemsize = (dtype or torch.bfloat16).itemsize
            guard = enough(config_of(path, random), config, device, itemsize, packed)
        backend: dict[str, Any] = {}
        if self._fused:
            from simplellm.kernels.forward import FUSED

            backend = {"backend": FUSED}
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.how = f"PyTorch, since {reason}" if reason else "Triton kernels"
        LOGGER.info("computing on %s with %s", name, self.how)
        with guard, current:
            super().__init__(
                path, config, dtype=dtype, device=device, **backend, **options
            )

    def _make_engine(self, config: EngineConfig | None) -> Engine:
        if not self._fused:
            return super()._make_engine(config)
        assert isinstance(config, GPUConfig)  # since __init__ has chosen one
        from simplellm.kernels.forward import Fused

        fused = partial(Fused, batch_invariant=config.batch_invariant)
        return GraphEngine(self.model, config, fused)
