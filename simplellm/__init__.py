"""SimpleLLM: an inference engine for gpt-oss that a course builds step by step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplellm.checkpoint import Checkpoint, CheckpointError
    from simplellm.config import ConfigError, ModelConfig
    from simplellm.engine import EngineConfig, EngineError, Stats
    from simplellm.generate import ChatOutput, RequestOutput
    from simplellm.graphs import GPUConfig
    from simplellm.harmony import Delta, Message, Tool, ToolCall
    from simplellm.llm import LLM
    from simplellm.model import Transformer, load_model
    from simplellm.sampler import SamplingParams
    from simplellm.scheduler import QueueFullError
    from simplellm.tokenizer import Tokenizer, TokenizerError

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ChatOutput",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "EngineConfig",
    "EngineError",
    "GPUConfig",
    "Message",
    "ModelConfig",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "Stats",
    "Tokenizer",
    "TokenizerError",
    "Tool",
    "ToolCall",
    "Transformer",
    "load_model",
]

# Importing torch takes a second or more: a name brings its module when first used.
_MODULES = {
    "checkpoint": ("Checkpoint", "CheckpointError"),
    "config": ("ConfigError", "ModelConfig"),
    "engine": ("EngineConfig", "EngineError", "Stats"),
    "generate": ("ChatOutput", "RequestOutput"),
    "graphs": ("GPUConfig",),
    "harmony": ("Delta", "Message", "Tool", "ToolCall"),
    "llm": ("LLM",),
    "model": ("Transformer", "load_model"),
    "sampler": ("SamplingParams",),
    "scheduler": ("QueueFullError",),
    "tokenizer": ("Tokenizer", "TokenizerError"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
