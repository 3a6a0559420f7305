"""SimpleLLM: an inference engine for gpt-oss that a course builds step by step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplellm.api.input_processor import ContextLengthError
    from simplellm.api.llm import LLM
    from simplellm.api.load import load_model
    from simplellm.api.outputs import ChatChoice, ChatOutput, RequestOutput, Usage
    from simplellm.base.config import ConfigError, EngineConfig, ModelConfig
    from simplellm.base.request import EngineError, QueueFullError
    from simplellm.base.sampling_params import SamplingParams, StructuredOutputs
    from simplellm.checkpoint.checkpoint import Checkpoint, CheckpointError
    from simplellm.engine.stats import Stats
    from simplellm.model.model import Model
    from simplellm.text.harmony import Delta, Message, Tool, ToolCall
    from simplellm.text.tokenizer import Tokenizer, TokenizerError

__version__ = "0.1.0"

# Importing torch takes a second or more: a name brings its module when first used.
_NAMES_OF = {
    "checkpoint.checkpoint": ("Checkpoint", "CheckpointError"),
    "base.config": ("ConfigError", "EngineConfig", "ModelConfig"),
    "text.harmony": ("Delta", "Message", "Tool", "ToolCall"),
    "api.input_processor": ("ContextLengthError",),
    "api.llm": ("LLM",),
    "api.load": ("load_model",),
    "model.model": ("Model",),
    "api.outputs": ("ChatChoice", "ChatOutput", "RequestOutput", "Usage"),
    "base.request": ("EngineError", "QueueFullError"),
    "base.sampling_params": ("SamplingParams", "StructuredOutputs"),
    "engine.stats": ("Stats",),
    "text.tokenizer": ("Tokenizer", "TokenizerError"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
