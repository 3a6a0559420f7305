"""SimpleLLM: an inference engine for gpt-oss that a course builds step by step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplellm.generate import LLM, RequestOutput
    from simplellm.model import load_model
    from simplellm.sampler import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams", "load_model"]
__version__ = "0.1.0"

# PyTorch takes seconds to import: names that need it are imported at first use, so
# that `simplellm --help` and the modules without tensors start at once.
MODULES = {
    "LLM": "simplellm.generate",
    "RequestOutput": "simplellm.generate",
    "SamplingParams": "simplellm.sampler",
    "load_model": "simplellm.model",
}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module 'simplellm' has no attribute {name!r}")
