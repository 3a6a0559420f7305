"""What a model is made of and how an engine runs it: declared fields, checked once.

`check` needs no more than a field's annotation and the bounds that `declared` gives it;
`read` finds the same fields in a config.json.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

MODEL_TYPES = ("gpt_oss",)
LAYER_TYPES = ("sliding_attention", "full_attention")
ROPE_TYPES = ("default", "yarn")
MAX_LAYERS = 1024
MAX_SIZE = 2**31 - 1
HARMONY_EOS = (200002, 199999, 200012)  # <|return|>, <|endoftext|>, <|call|>


class ConfigError(ValueError):
    """A config that cannot be read or that describes no model we know."""


def declared(
    default: Any = MISSING,
    *,
    low: float = 1,
    high: float = MAX_SIZE,
    above: float | None = None,
    keys: str = "",
) -> Any:
    """A dataclass field with bounds, which `read` also looks for under ``keys``.

    A number is ``low`` to ``high`` or, if ``above`` is given, more than that.
    """
    bounds = {"low": low, "high": high, "above": above}
    facts = {"bounds": bounds, "keys": keys.split()}
    return field(default=default, metadata=facts)


KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (int, "an integer"),
    float: (int | float, "a number"),
    str: (str, "a string"),
}


def check_number(
    name: str,
    value: Any,
    kind: type,
    low: float,
    high: float,
    above: float | None = None,
    error: type[Exception] | None = None,
) -> None:
    """Raise unless ``value`` is an int or float, as ``kind`` says, within its bounds.

    Raises ``error``, or without it TypeError or ValueError. A bool is no number.
    """
    allowed, wanted = KINDS[kind]
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise (error or TypeError)(f"{name} is {short(value)}; expected {wanted}")
    inside, wanted = low <= value <= high, f"{low:g} to {high:g}"  # NaN is in no bounds
    if kind is int:
        wanted = f"{low} to {high}"
    if above is not None:
        inside, wanted = above < value <= high, f"more than {above:g}, up to {high:g}"
    if not inside:
        raise (error or ValueError)(f"{name} is {short(value)}; expected {wanted}")


def check_value(
    name: str, value: Any, spec: Field, error: type[Exception] | None = None
) -> None:
    """Raise ``error`` unless ``value`` is what the field ``spec`` declares.

    Without ``error`` it is TypeError or ValueError. None is right where the annotation
    or the default says so.
    """
    kinds = get_args(spec.type) if isinstance(spec.type, UnionType) else (spec.type,)
    if value is None and (NoneType in kinds or spec.default is None):
        return
    kind, *others = (kind for kind in kinds if kind is not NoneType)
    is_literal = get_origin(kind) is Literal
    if others or not (is_literal or kind in KINDS):
        return  # a list or a record: who declares it checks it
    if kind in (int, float):
        check_number(name, value, kind, **spec.metadata["bounds"], error=error)
        return
    allowed, wanted = KINDS[str if is_literal else kind]
    if not isinstance(value, allowed):
        raise (error or TypeError)(f"{name} is {short(value)}; expected {wanted}")
    if is_literal and value not in (options := get_args(kind)):
        wanted = f"one of {', '.join(map(repr, options))}"
        raise (error or ValueError)(f"{name} is {short(value)}; expected {wanted}")


def check(record: Any, error: type[Exception] | None = None) -> None:
    """`check_value` for every field of a dataclass's instance."""
    for spec in fields(record):
        check_value(spec.name, getattr(record, spec.name), spec, error)


def read(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The `declared` fields of the dataclass ``kind`` that a parsed config.json holds.

    null counts as absent. Raises ConfigError for a value that does not fit, and for an
    absent one without a default; it names the key as the file spells it.
    """
    found = {}
    for spec in fields(kind):
        if not spec.metadata:
            continue
        keys = (spec.name, *spec.metadata["keys"])
        key = next((key for key in keys if data.get(key) is not None), spec.name)
        value = data.get(key)
        if value is not None:
            check_value(key, value, spec, ConfigError)
            found[spec.name] = float(value) if spec.type is float else value
        elif spec.default is MISSING:
            wanted = KINDS[spec.type][1]
            raise ConfigError(f"{' or '.join(keys)} is missing; expected {wanted}")
    return found


def one_of(name: str, value: object, known: Sequence[object]) -> None:
    """Raise ConfigError for something of ``name`` that is not known here."""
    if value not in known:
        listed = ", ".join(map(str, known))
        raise ConfigError(f"{name} is {short(value)}; known are {listed}")


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


def end_token_ids(data: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that ``eos_token_id`` names: one, a list of them, or none."""
    found = data.get("eos_token_id")
    ids = () if found is None else found if isinstance(found, list) else (found,)
    if not all(type(i) is int for i in ids):
        raise ConfigError(
            f"eos_token_id is {short(found)}; expected a token id or a list of them"
        )
    return tuple(ids)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN's numbers (arXiv:2309.00071); lengths in tokens, betas in rotations."""

    factor: float = declared(above=0, high=1e9, keys="rope_scaling_factor")
    original_max_position_embeddings: int = declared(keys="initial_context_length")
    beta_fast: float = declared(32.0, above=0, high=1e9, keys="rope_ntk_beta")
    beta_slow: float = declared(1.0, above=0, high=1e9, keys="rope_ntk_alpha")
    truncate: bool = declared(True)

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"beta_fast is {self.beta_fast}; expected more than beta_slow, "
                f"{self.beta_slow}"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RopeScaling | None":
        """Read a `rope_scaling` or `rope_parameters` entry; None is plain RoPE.

        `truncate` is true when absent and false when null, as in transformers.
        """
        kind = data.get("rope_type") or data.get("type")
        one_of("rope_type", kind, ROPE_TYPES)
        if kind == "default":
            return None
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if data.get(name) is not None:
                raise ConfigError(f"{name} is set in the YaRN entry; expected it unset")
        if data.get("truncate", True) is None:
            data = {**data, "truncate": False}
        return cls(**read(cls, data))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model is made of; the names are those of Hugging Face's config.json.

    A dense model has no experts: num_local_experts and num_experts_per_tok are 0, and
    intermediate_size is that of the one feed-forward network. Raises ConfigError for
    values that describe no model.
    """

    vocab_size: int = declared()
    hidden_size: int = declared()
    intermediate_size: int = declared()
    num_hidden_layers: int = declared(high=MAX_LAYERS)
    num_local_experts: int = declared(low=0, keys="num_experts")
    num_experts_per_tok: int = declared(low=0, keys="experts_per_token")
    num_attention_heads: int = declared()
    num_key_value_heads: int = declared()
    head_dim: int = declared()
    rms_norm_eps: float = declared(1e-5, above=0, high=1)
    sliding_window: int | None = declared(None)
    layer_types: tuple[str, ...]
    rope_theta: float = declared(above=1, high=1e18)
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = declared()
    swiglu_limit: float = declared(7.0, above=0, high=1e18)
    swiglu_alpha: float = declared(1.702, above=0, high=1e18)
    attention_bias: bool = True  # of the projections of attention
    qk_norm: bool = False  # an RMSNorm of each head of q and k, before RoPE
    tie_word_embeddings: bool = declared(False)
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check(self, ConfigError)
        experts, chosen = self.num_local_experts, self.num_experts_per_tok
        least = min(experts, 1)
        if not least <= chosen <= experts:
            raise ConfigError(
                f"num_experts_per_tok is {chosen}; expected {least} to {experts}"
            )
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
            one_of("an entry of layer_types", layer_type, LAYER_TYPES)
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ConfigError("sliding_window is missing; expected a number of tokens")

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, itself included; None: all."""
        sliding = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the groups that layers form by them: None, for all, first."""
        sliding = "sliding_attention" in self.layer_types
        return (None, self.sliding_window) if sliding else (None,)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """Read gpt-oss's parsed config.json, Hugging Face's (old, new) or OpenAI's."""
        original = "num_experts" in data and "num_local_experts" not in data
        model_type = data.get("model_type", "gpt_oss" if original else None)
        one_of("model_type", model_type, MODEL_TYPES)
        method = data.get("quantization_config")
        if isinstance(method, dict):
            method = method.get("quant_method")
        one_of("quant_method", method, (None, "mxfp4"))
        one_of("attention_bias", data.get("attention_bias", True), (True,))
        one_of("hidden_act", data.get("hidden_act", "silu"), ("silu",))
        scaling, found = _rope(data, original)
        found = read(cls, {**data, **found})
        if not found["num_local_experts"]:
            raise ConfigError(f"num_local_experts is 0; expected 1 to {MAX_SIZE}")
        layer_types = data.get("layer_types")
        if layer_types is None:
            count = found["num_hidden_layers"]
            layer_types = [LAYER_TYPES[n % 2] for n in range(count)]
        if not isinstance(layer_types, list):
            raise ConfigError(f"layer_types is {short(layer_types)}; expected a list")
        eos = end_token_ids(data)
        if original and not eos:  # its tokenizer knows
            eos = tuple(i for i in HARMONY_EOS if i < found["vocab_size"])
        return cls(
            **found,
            layer_types=tuple(layer_types),
            rope_scaling=scaling,
            eos_token_ids=eos,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read a config.json; every ConfigError names the file."""
        try:
            return cls.from_dict(read_json(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _rope(
    data: Mapping[str, Any], original: bool
) -> tuple[RopeScaling | None, dict[str, Any]]:
    """The scaling, and the fields of the model that its spelling puts elsewhere."""
    if original:
        yarn = RopeScaling(**read(RopeScaling, {**data, "truncate": False}))
        context = int(yarn.original_max_position_embeddings * yarn.factor)
        return yarn, {"max_position_embeddings": context}
    entry = data.get("rope_parameters") or data.get("rope_scaling")
    if not isinstance(entry, dict):
        raise ConfigError(
            "rope_parameters (rope_scaling in older files) is missing; expected an "
            "object with rope_type"
        )
    theta = entry.get("rope_theta")
    return RopeScaling.from_dict(entry), {} if theta is None else {"rope_theta": theta}


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


CPU_DEFAULTS = {
    "page_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "prefill_chunk": 512,
}
GPU_DEFAULTS = {
    "page_size": 64,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "prefill_chunk": 8192,
}
MAX_LAUNCH = 2**16 - 1  # programs of a kernel along one axis of its grid


@dataclass(frozen=True)
class EngineConfig:
    """The size of everything in an engine, and a switch for each mechanism.

    Where the default is None it suits the machine: the first four fields are filled in
    by `resolved`; the others follow from the model and the memory. Raises TypeError or
    ValueError.
    """

    page_size: int = declared(None)  # tokens in a page
    max_num_seqs: int = declared(None)  # that run at once
    max_num_batched_tokens: int = declared(None)  # in a step
    prefill_chunk: int = declared(None)  # tokens of a prompt in a step
    num_pages: int | None = declared(None, high=2**48)  # instead of cache_bytes
    cache_bytes: int | None = declared(None, high=2**48)  # for keys and values
    max_model_len: int | None = declared(None)  # tokens of prompt and output
    max_waiting: int = declared(10_000)  # requests that wait; more are refused
    overtakes: int = declared(100, low=0)  # earlier requests that may be passed
    share_prefixes: bool = True  # find the pages of equal prompts again
    continuous: bool = True  # requests join a running batch; False: static batches
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step
    cuda_graphs: bool = True  # replay decode steps instead of starting each kernel
    overlap: bool = True  # schedule the next step while this one is computed
    batch_invariant: bool = False  # tokens do not depend on other requests; slower
    operations: Literal["auto", "plain", "fused"] = "auto"  # PyTorch's or Triton's

    def __post_init__(self) -> None:
        check(self)
        if self.num_pages is not None and self.cache_bytes is not None:
            raise ValueError(
                "both num_pages and cache_bytes are given; expected one of them"
            )
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is None or seqs is None:
            return
        if tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {tokens}; expected at least {seqs}, a "
                "token for each of max_num_seqs"
            )
        if tokens + seqs >= MAX_LAUNCH:  # a kernel may have a program for each
            raise ValueError(
                f"max_num_batched_tokens is {tokens} and max_num_seqs {seqs}; expected "
                f"less than {MAX_LAUNCH:,} together"
            )

    def resolved(self, device_type: str) -> "EngineConfig":
        """This config with the defaults of a machine: "cuda" is a GPU, else a CPU."""
        defaults = GPU_DEFAULTS if device_type == "cuda" else CPU_DEFAULTS
        missing: dict[str, Any] = {
            name: value
            for name, value in defaults.items()
            if getattr(self, name) is None
        }
        return replace(self, **missing)
