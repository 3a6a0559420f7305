"""What a model is made of and how an engine runs it: declared fields, checked once.

`check` needs no more than a field's annotation and the bounds that `declared` gives it;
`read` finds the same fields in a config.json.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

LAYER_TYPES = ("sliding_attention", "full_attention")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
BLOCK = 32  # elements of an MXFP4 weight that share a scale; packed, they are 16 bytes
MAX_LAYERS = 1024
MAX_SIZE = 2**31 - 1


class ConfigError(ValueError):
    """A config that cannot be read or that describes no model we know."""


class CheckpointError(ValueError):
    """A folder that is no checkpoint we can read; the message says why."""


class ParameterError(ValueError):
    """A wrong value; ``param`` is where it stands, such as "messages[0].role"."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ParameterTypeError(ParameterError, TypeError):
    """A value of the wrong type."""


@contextmanager
def reraise_as(kind: type[ValueError], where: object = "") -> Iterator[None]:
    """Turn a TypeError or ValueError inside into a ``kind``, which begins ``where``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise kind(f"{where}: {error}" if where else str(error)) from None


def declared(
    default: Any = MISSING,
    *,
    low: float = 1,
    high: float = MAX_SIZE,
    above: float | None = None,
) -> Any:
    """A dataclass field with bounds, which `read` finds in a config.json.

    A number is ``low`` to ``high`` or, if ``above`` is given, more than that.
    """
    bounds = {"low": low, "high": high, "above": above}
    return field(default=default, metadata={"bounds": bounds})


KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (int, "an integer"),
    float: (int | float, "a number"),
    str: (str, "a string"),
}


def expect(
    ok: object,
    name: str,
    value: object,
    expected: str,
    error: type[Exception] = ValueError,
    param: str | None = None,
) -> None:
    """Raise a ParameterError unless ``ok``: what ``value`` is and what is ``expected``.

    It is a TypeError too where ``error`` says so. ``param`` is the parameter that is
    wrong, if ``name`` calls it otherwise.
    """
    if not ok:
        kind = ParameterTypeError if error is TypeError else ParameterError
        raise kind(f"{name} is {short(value)}; expected {expected}", param or name)


def one_of(
    name: str, value: object, allowed: Sequence[object], param: str | None = None
) -> None:
    """Raise ValueError for something of ``name`` that is not known here."""
    expected = f"one of {', '.join(map(repr, allowed))}"
    expect(value in allowed, name, value, expected, param=param)


def check_names(what: str, names: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise TypeError for the first of ``names`` that is not a ``what`` we know."""
    odd = next((name for name in names if name not in allowed), None)
    if odd is not None:
        wrong = f"there is no {what} {odd!r}; expected one of {', '.join(allowed)}"
        raise ParameterTypeError(wrong, odd)


def expect_type(
    name: str, value: object, kinds: Any, expected: str, param: str | None = None
) -> None:
    """Raise TypeError unless ``value`` is of these ``kinds``; it names the type."""
    if not isinstance(value, kinds):
        kind = None if value is None else type(value).__name__
        wrong = f"{name} is {kind}; expected {expected}"
        raise ParameterTypeError(wrong, param or name)


def check_kind(name: str, value: object, kind: type, param: str | None = None) -> None:
    """Raise TypeError unless ``value`` is of a ``kind`` in KINDS. A bool is no int."""
    allowed, expected = KINDS[kind]
    ok = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    expect(ok, name, value, expected, TypeError, param)


def check_number(
    name: str,
    value: Any,
    kind: type,
    low: float,
    high: float,
    above: float | None = None,
    param: str | None = None,
) -> None:
    """Raise TypeError or ValueError unless ``value`` is what `declared` would allow.

    ``kind`` is int or float; an int is as good as a float.
    """
    check_kind(name, value, kind, param)
    inside, expected = low <= value <= high, f"{low} to {high}"  # NaN is in no bounds
    if above is not None:
        inside, expected = above < value <= high, f"more than {above}, up to {high}"
    expect(inside, name, value, expected, param=param)


def as_texts(name: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
    """One text, a list of them, or None for none. Raises TypeError or ValueError."""
    texts = (value,) if isinstance(value, str) else () if value is None else value
    ok = isinstance(texts, list | tuple) and all(isinstance(x, str) for x in texts)
    expect(ok, name, texts, "a list of str", TypeError)
    characters = sum(map(len, texts))
    if len(texts) > most or characters > most_chars:
        wrong = (
            f"{name} has {len(texts)} texts of {characters} characters; expected "
            f"at most {most} texts and {most_chars} characters in all"
        )
        raise ParameterError(wrong, name)
    expect("" not in texts, name, texts, "texts that are not empty")
    return tuple(texts)


def as_plain(value: Any) -> Any:
    """A number of NumPy's as Python's; all else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def as_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids, or None for none. Raises TypeError or ValueError."""
    ids = () if value is None else value
    if hasattr(ids, "tolist") or isinstance(ids, range):
        ids = [*ids]
    ids = [*map(as_plain, ids)] if isinstance(ids, list | tuple) else ids
    ok = isinstance(ids, list) and all(isinstance(x, int) for x in ids)
    expect(ok, name, ids, "a list of int", TypeError)
    for token in ids:
        check_number(f"an entry of {name}", token, int, 0, MAX_SIZE, param=name)
    return tuple(ids)


def check_value(name: str, value: Any, spec: Field) -> None:
    """Raise TypeError or ValueError unless ``value`` is what ``spec`` declares.

    None is right where the annotation or the default says so. A list or a record is
    left to whoever declares it.
    """
    several = get_origin(spec.type) in (UnionType, Union)
    kinds = get_args(spec.type) if several else (spec.type,)
    if value is None and (NoneType in kinds or spec.default is None):
        return
    kind, *others = (kind for kind in kinds if kind is not NoneType)
    if kind in (int, float):
        check_number(name, value, kind, **spec.metadata["bounds"])
    elif get_origin(kind) is Literal:
        check_kind(name, value, str)
        one_of(name, value, get_args(kind))
    elif kind in KINDS and not others:
        check_kind(name, value, kind)


def check(record: Any) -> None:
    """`check_value` for every field of a dataclass's instance."""
    for spec in fields(record):
        check_value(spec.name, getattr(record, spec.name), spec)


def read(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The `declared` fields of the dataclass ``kind`` that a parsed config.json holds.

    null counts as absent. Raises TypeError or ValueError for a value that does not fit,
    and for an absent one without a default.
    """
    values = {}
    for spec in fields(kind):
        if not spec.metadata:
            continue
        value = data.get(spec.name)
        if value is not None:
            check_value(spec.name, value, spec)
            values[spec.name] = float(value) if spec.type is float else value
        elif spec.default is MISSING:
            expected = KINDS[spec.type][1]
            raise ValueError(f"{spec.name} is missing; expected {expected}")
    return values


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError if there is none."""
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}; expected a JSON file"
    except (ValueError, RecursionError) as error:
        wrong = f"is not JSON: {error}"
    else:
        if isinstance(data, dict):
            return data
        wrong = f"holds a JSON {type(data).__name__}; expected an object"
    raise ConfigError(wrong)


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def nesting(value: Any) -> int:
    """How deep lists and dicts are nested in parsed JSON. Raises RecursionError."""
    if not isinstance(value, dict | list):
        return 0
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(map(nesting, inside), default=0)


def end_token_ids(data: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ids that ``eos_token_id`` names: one, a list of them, or none, also as -1.

    Raises ValueError for anything else.
    """
    ids = data.get("eos_token_id")
    none = ids is None or ids == -1
    token_ids = () if none else ids if isinstance(ids, list) else (ids,)
    ok = all(type(i) is int and 0 <= i < vocab_size for i in token_ids)
    expected = f"a token id or a list of them, each 0 to {vocab_size - 1}"
    expect(ok, "eos_token_id", ids, expected)
    return tuple(token_ids)


# What an entry of config.json may have beside the fields of `RopeScaling`.
ROPE_KEYS = {"type", "rope_theta", "partial_rotary_factor", "finetuned"}
ROPE_KEYS |= {"mscale", "mscale_all_dim", "attn_factor", "max_position_embeddings"}


def stretch(kind: str, data: Mapping[str, Any]) -> Any:
    """The factor of an entry, or that between its lengths, as transformers takes it."""
    longest: Any = data.get("max_position_embeddings")
    length: Any = data.get("original_max_position_embeddings")
    known = all(isinstance(n, int) and n > 0 for n in (longest, length))
    differ = longest != length or kind == "longrope"  # whose lists say the rest
    if data.get("factor") is None and known and differ:
        return longest / length
    return data.get("factor")


def attention_factor(kind: str, data: Mapping[str, Any]) -> float | None:
    """What multiplies cos and sin where an entry doesn't say; None: YaRN's own."""
    factor = data["factor"]
    if kind == "yarn" and data.get("attn_factor"):  # vLLM's field: it multiplies that
        for name in ("attn_factor", "factor"):
            check_number(name, data[name], float, 0, 1e9, 0)
        return data["attn_factor"] * (0.1 * math.log(max(factor, 1)) + 1)
    if kind == "yarn" and data.get("mscale") and data.get("mscale_all_dim"):
        for name in ("mscale", "mscale_all_dim"):
            check_number(name, data[name], float, 0, 1e9)
        check_number("factor", factor, float, 0, 1e9, 0)
        log = 0.1 * math.log(max(factor, 1))
        return (log * data["mscale"] + 1) / (log * data["mscale_all_dim"] + 1)
    if kind == "longrope":
        length: Any = data.get("original_max_position_embeddings")
        check_number("original_max_position_embeddings", length, int, 2, MAX_SIZE)
        check_number("factor", factor, float, 0, 1e9, 0)
        return (1 + math.log(max(factor, 1)) / math.log(length)) ** 0.5
    return None


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE is stretched; lengths in tokens, betas in rotations.

    By YaRN (arXiv:2309.00071), or as the entry of config.json says. Betas are YaRN's,
    the factors of low and high frequencies llama3's.
    """

    factor: float = declared(above=0, high=1e9)
    original_max_position_embeddings: int = declared()
    beta_fast: float = declared(32.0, above=0, high=1e9)
    beta_slow: float = declared(1.0, above=0, high=1e9)
    truncate: bool = declared(True)
    rope_type: Literal["yarn", "llama3", "linear", "longrope", "dynamic"] = "yarn"
    low_freq_factor: float = declared(1.0, above=0, high=1e9)
    high_freq_factor: float = declared(4.0, above=0, high=1e9)
    # On cos and sin, instead of YaRN's own.
    attention_factor: float | None = declared(None, above=0, high=1e9)
    # What LongRoPE (arXiv:2402.13753) divides each pair's frequency by.
    short_factor: tuple[float, ...] = ()  # up to the original length
    long_factor: tuple[float, ...] = ()

    @reraise_as(ConfigError)
    def __post_init__(self) -> None:
        check(self)
        fast, slow = self.beta_fast, self.beta_slow
        expect(fast > slow, "beta_fast", fast, f"more than beta_slow, {slow}")
        low, high = self.low_freq_factor, self.high_freq_factor
        expected = f"more than low_freq_factor, {low}"
        expect(high > low, "high_freq_factor", high, expected)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RopeScaling | None":
        """Read a `rope_scaling` or `rope_parameters` entry; None is plain RoPE.

        `truncate` is true when absent and false when null, as in transformers.
        """
        kind: Any = data.get("rope_type") or data.get("type")
        one_of("rope_type", kind, ROPE_TYPES)
        known = {spec.name for spec in fields(cls)} | ROPE_KEYS
        for name in data.keys() - known:
            expected = "no such field in an entry of RoPE"
            expect(data[name] is None, name, data[name], expected)
        if kind == "default":
            return None
        if kind == "dynamic":  # transformers reads no other length of it
            longest = data.get("max_position_embeddings")
            data = {**data, "original_max_position_embeddings": longest}
        truncate = data.get("truncate", True)
        data = {**data, "factor": stretch(kind, data), "truncate": truncate}
        if data["truncate"] is None:
            data["truncate"] = False
        if data.get("attention_factor") is None:
            data["attention_factor"] = attention_factor(kind, data)
        lists: dict[str, Any] = {}
        if kind == "longrope":
            for name in ("short_factor", "long_factor"):
                factors = data.get(name)
                expect(isinstance(factors, list), name, factors, "a list of numbers")
                for factor in factors or ():
                    check_number(f"an entry of {name}", factor, float, 0, 1e9, 0)
                lists[name] = tuple(map(float, factors or ()))
        return cls(**read(cls, data), rope_type=kind, **lists)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model is made of; the names are those of Hugging Face's config.json.

    A dense model has no experts: num_local_experts and num_experts_per_tok are 0, and
    intermediate_size is that of the one feed-forward network. Where only some layers
    have experts, the others are ``dense_layers``. Defaults are gpt-oss's. Raises
    ConfigError for values that describe no model.
    """

    model_type: str = "gpt_oss"  # a key of `simplellm.checkpoint.families.FAMILIES`
    # Which tensors it has, each a `checkpoint.names.Name`.
    names: tuple[Any, ...] = field(repr=False)
    # By our name, each a `checkpoint.formats.NumberFormat`; the rest are plain numbers.
    formats: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    vocab_size: int = declared()
    hidden_size: int = declared()
    intermediate_size: int = declared()
    num_hidden_layers: int = declared(high=MAX_LAYERS)
    num_local_experts: int = declared(low=0, high=4096)
    num_experts_per_tok: int = declared(low=0)
    num_attention_heads: int = declared()
    num_key_value_heads: int = declared()
    head_dim: int = declared()
    rms_norm_eps: float = declared(1e-5, above=0, high=1)
    sliding_window: int | None = declared(None)
    layer_types: tuple[str, ...]
    rope_theta: float = declared(above=1, high=1e18)
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = declared()
    # Of LongRoPE, where it stands outside of the entry: the default of max_model_len.
    original_max_position_embeddings: int | None = declared(None)
    swiglu_limit: float = declared(7.0, above=0, high=1e18)
    swiglu_alpha: float = declared(1.702, above=0, high=1e18)
    attention_bias: bool = declared(True)  # of the projections of attention
    mlp_bias: bool = declared(True)  # of those of a dense feed-forward network
    activation: Literal["clamped_swiglu", "swiglu", "geglu", "gelu"] = "clamped_swiglu"
    norm_topk_prob: bool = True  # the weights of a token's experts add up to 1
    dense_layers: tuple[int, ...] = ()
    dense_intermediate_size: int | None = declared(None)  # None: intermediate_size
    held_experts: range | None = None  # of several ranks, this one's; None: all
    norm_offset: float = declared(0.0, low=0)  # added to the weights of all norms
    # Scores are divided by its root; None: head_dim.
    query_pre_attn_scalar: float | None = declared(None, above=0, high=1e9)
    embedding_scale: float = declared(1.0, above=0, high=1e9)  # of a token's row
    logits_scaling: float = declared(1.0, above=0, high=1e9)  # logits are divided by it
    learned_positions: bool = False  # are added to it, in place of RoPE
    # Of the sliding layers, which are not stretched then; None: as the others.
    local_rope_theta: float | None = declared(None, above=1, high=1e18)
    nope_layers: tuple[int, ...] = ()  # do not rotate q and k
    tie_word_embeddings: bool = declared(False)
    eos_token_ids: tuple[int, ...] = ()

    @reraise_as(ConfigError)
    def __post_init__(self) -> None:
        check(self)
        most, chosen = self.num_local_experts, self.num_experts_per_tok
        least = min(most, 1)
        ok = least <= chosen <= most
        expect(ok, "num_experts_per_tok", chosen, f"{least} to {most}")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        expected = f"a multiple of num_key_value_heads, {groups}"
        expect(heads % groups == 0, "num_attention_heads", heads, expected)
        scaling = self.rope_scaling
        if scaling and scaling.rope_type == "longrope":
            for name in ("short_factor", "long_factor"):
                count, pairs = len(getattr(scaling, name)), self.head_dim // 2
                expected = f"{pairs}, one for each pair of head_dim"
                expect(count == pairs, f"the length of {name}", count, expected)
        odd = self.head_dim % 2
        expect(not odd, "head_dim", self.head_dim, "an even number, for RoPE")
        count, layers = len(self.layer_types), self.num_hidden_layers
        expected = f"one for each of the {layers} layers"
        expect(count == layers, "the number of layer_types", count, expected)
        for layer_type in self.layer_types:
            one_of("an entry of layer_types", layer_type, LAYER_TYPES)
        window, full = self.sliding_window, {*self.layer_types} <= {"full_attention"}
        expect(window or full, "sliding_window", window, "a number of tokens")

    def with_max_model_len(self, max_model_len: int | None) -> "ModelConfig":
        """The config for texts of so many tokens, if RoPE depends on their length.

        LongRoPE and dynamic RoPE choose frequencies once, by max_position_embeddings,
        for those of a cached key can't change while its text grows. None: as in vLLM.
        """
        kind = self.rope_scaling and self.rope_scaling.rope_type
        if kind not in ("longrope", "dynamic"):
            return self
        if kind == "longrope" and max_model_len is None:
            max_model_len = self.original_max_position_embeddings
        longest = min(max_model_len or MAX_SIZE, self.max_position_embeddings)
        return replace(self, max_position_embeddings=longest)

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, itself included; None: all."""
        sliding = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the groups that layers form by them: None, for all, first."""
        sliding = "sliding_attention" in self.layer_types
        return (None, self.sliding_window) if sliding else (None,)

    @property
    def has_mxfp4(self) -> bool:
        """Whether any weight is MXFP4."""
        return any(form.is_mxfp4 for form in self.formats.values())


DEFAULTS = {  # on a CPU, on a GPU
    "page_size": (16, 64),
    "max_num_seqs": (64, 256),
    "max_num_batched_tokens": (2048, 8192),
    "prefill_chunk": (512, 8192),
}
MAX_LAUNCH = 2**16 - 1  # programs of a kernel along one axis of its grid


@dataclass(frozen=True)
class EngineConfig:
    """The size of everything in an engine, and a switch for each mechanism.

    Where the default is None it suits the machine: the first four fields are filled in
    by `resolved`; the others follow from the model and the memory. vLLM's names stand
    in parentheses where they differ. Raises TypeError or ValueError.
    """

    page_size: int = declared(None)  # tokens in a page (block_size)
    max_num_seqs: int = declared(None)  # that run at once
    max_num_batched_tokens: int = declared(None)  # in a step
    # Tokens of a prompt in a step (long_prefill_token_threshold).
    prefill_chunk: int = declared(None)
    # Instead of cache_bytes (num_gpu_blocks_override).
    num_pages: int | None = declared(None, high=2**48)
    # For keys and values (kv_cache_memory_bytes).
    cache_bytes: int | None = declared(None, high=2**48)
    # Of the host's memory, of all ranks together, for what the cache evicts: a prefix
    # comes back from there (kv_offloading_size).
    cpu_cache_bytes: int = declared(0, low=0, high=2**48)
    max_model_len: int | None = declared(None)  # tokens of prompt and output
    # The share of a GPU's memory that may be in use, the cache included; None: 85 % of
    # what is free once the model is loaded becomes the cache.
    gpu_memory_utilization: float | None = declared(None, above=0, high=1)
    max_waiting: int = declared(10_000)  # requests that wait; more are refused
    overtakes: int = declared(100, low=0)  # earlier requests that may be passed
    # Find the pages of equal prompts again.
    enable_prefix_caching: bool = True
    continuous: bool = True  # requests join a running batch; False: static batches
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step
    # Replay steps instead of starting each of their kernels (not enforce_eager).
    cuda_graphs: bool = True
    # Schedule the next step while this one is computed (async_scheduling).
    overlap: bool = True
    # Tokens do not depend on other requests; slower (VLLM_BATCH_INVARIANT).
    batch_invariant: bool = False
    operations: Literal["auto", "plain", "fused"] = "auto"  # PyTorch's or Triton's
    # Prompts that are in no graph: through our kernel; through flash-attn 2, 3 or 4,
    # which has to be installed; "auto", through that where it's known to be faster.
    attention_backend: Literal["auto", "triton_attn", "flash_attn"] = "auto"
    # Keys and values in the model's dtype, or as e4m3, a byte each, but for those of
    # sliding layers.
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    # What MXFP4 experts are multiplied by if each has many tokens, as in prompts:
    # numbers of the model's dtype, or these rounded to e4m3.
    moe_activation_dtype: Literal["auto", "fp8"] = "auto"
    # Processes that share each weight, and compute each step together.
    tensor_parallel_size: int = declared(1)
    # Processes that each compute requests of their own, and share the experts. Sizes
    # above are those of each, but for max_waiting and cpu_cache_bytes.
    data_parallel_size: int = declared(1)
    # Of all these, each has whole experts, and not a slice of each.
    enable_expert_parallel: bool = False
    # What drafts the next tokens: "suffix", what the text said before; the folder of an
    # EAGLE-3 head or of a smaller model with the same tokenizer; or "head", the EAGLE-3
    # head in the folder head/ of the model's (method and model in speculative_config).
    speculative: str | None = None
    # Drafts of a request in a step; None: as many as are worth what they cost.
    num_speculative_tokens: int | None = declared(None, high=64)

    def __post_init__(self) -> None:
        check(self)
        alone = None in (self.num_pages, self.cache_bytes)
        expect(alone, "cache_bytes", self.cache_bytes, "None beside num_pages")
        host, ok = self.cpu_cache_bytes, self.enable_prefix_caching
        expect(ok or not host, "cpu_cache_bytes", host, "0 without prefix caching")
        number, alone = self.num_speculative_tokens, self.speculative is None
        name, wanted = "num_speculative_tokens", "None without speculative"
        expect(not alone or number is None, name, number, wanted)
        size, ranks = self.data_parallel_size, self.tensor_parallel_size
        expected = "1 without enable_expert_parallel: whole engines are replicas"
        ok = size == 1 or self.enable_expert_parallel
        expect(ok, "data_parallel_size", size, expected)
        expected = f"1 beside data_parallel_size {size}"
        expect(1 in (size, ranks), "tensor_parallel_size", ranks, expected)
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is None or seqs is None:
            return
        name, each = "max_num_batched_tokens", "a token for each of max_num_seqs"
        expect(tokens >= seqs, name, tokens, f"at least {seqs}, {each}")
        # A kernel may have a program for each token and each sequence.
        expected = f"less than {MAX_LAUNCH:,} together with max_num_seqs, {seqs}"
        expect(tokens + seqs < MAX_LAUNCH, name, tokens, expected)

    @property
    def num_ranks(self) -> int:
        """Processes that compute together, each on a GPU of its own."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def max_drafts(self) -> int:
        """The most drafts that a step checks, of all requests together."""
        if self.speculative is None:
            return 0
        free = self.max_num_batched_tokens - self.max_num_seqs
        return min(max(256, 4 * self.max_num_seqs), free)

    def changed(self, options: Mapping[str, Any]) -> "EngineConfig":
        """This config with some fields replaced."""
        check_names("option", options, [spec.name for spec in fields(self)])
        return replace(self, **options)

    def resolved(self, device_type: str) -> "EngineConfig":
        """This config with the defaults of a machine: "cuda" is a GPU, else a CPU."""
        missing: dict[str, Any] = {
            name: values[device_type == "cuda"]
            for name, values in DEFAULTS.items()
            if getattr(self, name) is None
        }
        return replace(self, **missing)
