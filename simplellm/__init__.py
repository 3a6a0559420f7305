"""SimpleLLM: an inference engine for gpt-oss that a course builds step by step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplellm.checkpoint import Checkpoint, CheckpointError
    from simplellm.config import ConfigError, EngineConfig, ModelConfig
    from simplellm.harmony import Delta, Message, Tool, ToolCall
    from simplellm.llm import LLM
    from simplellm.load import load_model
    from simplellm.model import Model
    from simplellm.outputs import ChatChoice, ChatOutput, RequestOutput, Usage
    from simplellm.request import EngineError, QueueFullError
    from simplellm.sampling_params import SamplingParams, StructuredOutputs
    from simplellm.stats import Stats
    from simplellm.tokenizer import Tokenizer, TokenizerError

__version__ = "0.1.0"

# Importing torch takes a second or more: a name brings its module when first used.
_NAMES_OF = {
    "checkpoint": ("Checkpoint", "CheckpointError"),
    "config": ("ConfigError", "EngineConfig", "ModelConfig"),
    "harmony": ("Delta", "Message", "Tool", "ToolCall"),
    "llm": ("LLM",),
    "load": ("load_model",),
    "model": ("Model",),
    "outputs": ("ChatChoice", "ChatOutput", "RequestOutput", "Usage"),
    "request": ("EngineError", "QueueFullError"),
    "sampling_params": ("SamplingParams", "StructuredOutputs"),
    "stats": ("Stats",),
    "tokenizer": ("Tokenizer", "TokenizerError"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
