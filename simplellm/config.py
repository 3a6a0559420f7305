"""What a model is made of: the numbers in a checkpoint's config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

MODEL_TYPES = ("gpt_oss",)
LAYER_TYPES = ("sliding_attention", "full_attention")
ROPE_TYPES = ("default", "yarn")
MAX_LAYERS = 1024
MAX_SIZE = 2**31 - 1


class ConfigError(ValueError):
    """A config that cannot be read or that describes no model we know."""


def number(
    data: Mapping[str, Any],
    kind: type[int] | type[float],
    *names: str,
    default: float | None = None,
) -> Any:
    """The first of ``names`` that ``data`` holds, an int or a finite float.

    null counts as absent. Raises ConfigError when all are absent and there is no
    default, or when the value is not a number of that kind.
    """
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        allowed = int if kind is int else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ConfigError(
                f"{name} is {short(value)}; expected "
                f"{'an integer' if kind is int else 'a number'}"
            )
        if abs(value) > 1e18 or not math.isfinite(value):
            raise ConfigError(f"{name} is {short(value)}; expected a sensible number")
        return kind(value)
    if default is None:
        raise ConfigError(f"{' or '.join(names)} is missing; expected a number")
    return default


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError if there is none."""
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}; expected a JSON file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"holds a JSON {type(data).__name__}; expected an object")
    return data


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name) or False
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {short(value)}; expected true or false")
    return value


@dataclass(frozen=True)
class RopeScaling:
    """YaRN's numbers (arXiv:2309.00071); lengths in tokens, betas in rotations."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_slow"):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"{name} is {value}; expected more than 0")
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"beta_fast is {self.beta_fast}; expected more than beta_slow, "
                f"{self.beta_slow}"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RopeScaling | None":
        """Read a `rope_scaling` or `rope_parameters` entry; None is plain RoPE.

        `truncate` is true when absent, as in transformers.
        """
        kind = data.get("rope_type", data.get("type"))
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type is {short(kind)}; expected one of {', '.join(ROPE_TYPES)}"
            )
        if kind == "default":
            return None
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if data.get(name) is not None:
                raise ConfigError(f"{name} is set in the YaRN entry; expected it unset")
        truncate = data.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ConfigError(f"truncate is {short(truncate)}; expected true or false")
        length = "original_max_position_embeddings"
        return cls(
            factor=number(data, float, "factor"),
            original_max_position_embeddings=number(data, int, length),
            beta_fast=number(data, float, "beta_fast", default=32.0),
            beta_slow=number(data, float, "beta_slow", default=1.0),
            truncate=truncate,
        )


HARMONY_EOS = (200002, 199999, 200012)  # <|return|>, <|endoftext|>, <|call|>


def _rope(
    data: Mapping[str, Any], original: bool
) -> tuple[float, RopeScaling | None, int]:
    """Base, scaling and the longest context, from any of the three spellings."""
    if original:
        length = number(data, int, "initial_context_length")
        factor = number(data, float, "rope_scaling_factor")
        scaling = RopeScaling(
            factor=factor,
            original_max_position_embeddings=length,
            beta_fast=number(data, float, "rope_ntk_beta"),
            beta_slow=number(data, float, "rope_ntk_alpha"),
            truncate=False,
        )
        context = int(length * factor)
        return number(data, float, "rope_theta"), scaling, context
    entry = data.get("rope_parameters") or data.get("rope_scaling")
    if not isinstance(entry, dict):
        raise ConfigError(
            "rope_parameters (rope_scaling in older files) is missing; expected an "
            "object with rope_type"
        )
    entry = {name: value for name, value in entry.items() if value is not None}
    context = number(data, int, "max_position_embeddings")
    theta = number({**data, **entry}, float, "rope_theta")
    return theta, RopeScaling.from_dict(entry), context


def end_token_ids(data: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that ``eos_token_id`` names: one, a list of them, or none."""
    found = data.get("eos_token_id")
    ids = () if found is None else found if isinstance(found, list) else (found,)
    if not all(type(i) is int for i in ids):
        raise ConfigError(
            f"eos_token_id is {short(found)}; expected a token id or a list of them"
        )
    return tuple(ids)


def _eos(data: Mapping[str, Any], original: bool) -> tuple[int, ...]:
    """The ids that end a turn; the original layout leaves them to its tokenizer."""
    if data.get("eos_token_id") is None and original:
        vocab_size = number(data, int, "vocab_size")
        return tuple(i for i in HARMONY_EOS if i < vocab_size)
    return end_token_ids(data)


@dataclass(frozen=True)
class ModelConfig:
    """A gpt-oss model; the names are those of Hugging Face's config.json.

    Raises ConfigError for values that describe no model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_local_experts: int
    num_experts_per_tok: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    sliding_window: int | None
    layer_types: tuple[str, ...]
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size intermediate_size num_local_experts "
            "num_attention_heads num_key_value_heads head_dim max_position_embeddings"
        )
        limits = dict.fromkeys(sizes.split(), MAX_SIZE)
        limits["num_hidden_layers"] = MAX_LAYERS
        limits["num_experts_per_tok"] = self.num_local_experts
        if self.sliding_window is not None:
            limits["sliding_window"] = MAX_SIZE
        for name, limit in limits.items():
            if not 1 <= (value := getattr(self, name)) <= limit:
                raise ConfigError(f"{name} is {value}; expected 1 to {limit}")
        bounds = {
            "rope_theta": 1,
            "rms_norm_eps": 0,
            "swiglu_limit": 0,
            "swiglu_alpha": 0,
        }
        for name, bound in bounds.items():
            if (value := getattr(self, name)) <= bound:
                raise ConfigError(f"{name} is {value}; expected more than {bound}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads}; expected a "
                f"multiple of num_key_value_heads, {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim is {self.head_dim}; expected an even number, for RoPE"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries; expected one for "
                f"each of the {self.num_hidden_layers} layers"
            )
        for layer_type in self.layer_types:
            if layer_type not in LAYER_TYPES:
                raise ConfigError(
                    f"layer_types has {short(layer_type)}; expected "
                    f"{' or '.join(LAYER_TYPES)}"
                )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ConfigError("sliding_window is missing; expected a number of tokens")

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, itself included; None: all."""
        sliding = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """Read a parsed config.json, Hugging Face's (old or new) or the original's."""
        original = "num_experts" in data and "num_local_experts" not in data
        model_type = data.get("model_type", "gpt_oss" if original else None)
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type is {short(model_type)}; known are {', '.join(MODEL_TYPES)}"
            )
        fixed = {"attention_bias": True, "hidden_act": "silu"}
        for name, expected in fixed.items():
            if (value := data.get(name, expected)) != expected:
                raise ConfigError(f"{name} is {short(value)}; expected {expected!r}")
        method = data.get("quantization_config")
        if isinstance(method, dict):
            method = method.get("quant_method")
        if method not in (None, "mxfp4"):
            raise ConfigError(f"quant_method is {short(method)}; expected 'mxfp4'")
        layers = number(data, int, "num_hidden_layers")
        if not 1 <= layers <= MAX_LAYERS:  # before a list of that length is made
            raise ConfigError(
                f"num_hidden_layers is {layers}; expected 1 to {MAX_LAYERS}"
            )
        layer_types = data.get("layer_types")
        if layer_types is None:
            layer_types = [LAYER_TYPES[n % 2] for n in range(layers)]
        if not isinstance(layer_types, list):
            raise ConfigError(f"layer_types is {short(layer_types)}; expected a list")
        rope_theta, rope_scaling, context = _rope(data, original)
        return cls(
            vocab_size=number(data, int, "vocab_size"),
            hidden_size=number(data, int, "hidden_size"),
            intermediate_size=number(data, int, "intermediate_size"),
            num_hidden_layers=layers,
            num_local_experts=number(data, int, "num_local_experts", "num_experts"),
            num_experts_per_tok=number(
                data, int, "num_experts_per_tok", "experts_per_token"
            ),
            num_attention_heads=number(data, int, "num_attention_heads"),
            num_key_value_heads=number(data, int, "num_key_value_heads"),
            head_dim=number(data, int, "head_dim"),
            rms_norm_eps=number(data, float, "rms_norm_eps", default=1e-5),
            sliding_window=number(data, int, "sliding_window", default=0) or None,
            layer_types=tuple(layer_types),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=context,
            swiglu_limit=number(data, float, "swiglu_limit", default=7.0),
            swiglu_alpha=number(data, float, "swiglu_alpha", default=1.702),
            tie_word_embeddings=_flag(data, "tie_word_embeddings"),
            eos_token_ids=_eos(data, original),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read a config.json; every ConfigError names the file."""
        try:
            return cls.from_dict(read_json(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


GPT_OSS_120B = ModelConfig(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_local_experts=128,
    num_experts_per_tok=4,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    sliding_window=128,
    layer_types=LAYER_TYPES * 18,
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(32.0, 4096, 32.0, 1.0, False),
    max_position_embeddings=131072,
    eos_token_ids=HARMONY_EOS,
)
GPT_OSS_20B = replace(
    GPT_OSS_120B,
    num_hidden_layers=24,
    num_local_experts=32,
    layer_types=LAYER_TYPES * 12,
)
MODELS = {"gpt-oss-20b": GPT_OSS_20B, "gpt-oss-120b": GPT_OSS_120B}


def check_tokenizer(config: ModelConfig, n_tokens: int) -> None:
    """Refuse a tokenizer with more ids than the embedding has rows.

    ``n_tokens`` is the largest id plus one. Fewer ids are fine: checkpoints pad the
    vocabulary, gpt-oss to 201,088.
    """
    if n_tokens > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {n_tokens} token ids; expected at most the model's "
            f"vocab_size, {config.vocab_size}"
        )
