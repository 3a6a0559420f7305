"""The protocol of checkpoints: what a model is loaded from, whatever its files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.names import TensorInfo


class Source(Protocol):
    """What a model is loaded from: weights by our names, however they are stored."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold the weights; none if they are made up."""

    @property
    def mapped(self) -> bool:
        """Whether all experts are views of a file, and take no memory on a CPU."""

    def names(self) -> list[str]:
        """Our names of all tensors, in the model's order."""

    def stored(self, ours: str) -> list[TensorInfo]:
        """What is stored for the tensor that we call ``ours``."""

    def __getitem__(self, ours: str) -> Weight | PackedExperts:
        """The weight [..., out, in] as it is stored, joined if it lies in parts."""
