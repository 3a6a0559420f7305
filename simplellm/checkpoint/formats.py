"""How a checkpoint stores its weights, as config.json's quantization_config says.

Six quantization methods: "fp8" of DeepSeek and Qwen, "compressed-tensors" of
llm-compressor and vLLM, "mxfp4" of gpt-oss, "modelopt" of NVIDIA, "awq" and "gptq".
What is quantized otherwise is refused by name. All of this is read without PyTorch;
`stored.py` makes weights of what is said here, and `awq_gptq.py` of a `GroupedInt`.
"""

import fnmatch
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simplellm.base.config import ModelConfig, as_texts, expect, one_of
from simplellm.checkpoint.names import (
    Name,
    Shape,
    is_expert_weight,
    packed_shapes,
    stored_names,
    tensor_names,
)

LOGGER = logging.getLogger("simplellm")
FIELD = "quantization_config"
FLOATS = "BF16", "F16", "F32"  # ordinary numbers, as safetensors spells them
SQUARE_TILE, ROW_TILE = (128, 128), (1, 0)  # tiles; 0 columns are all of them
PACKED = "_packed", "_scale", "_shape"
AWQ = "qweight", "scales", "qzeros"
GPTQ = (*AWQ, "g_idx")


@dataclass(frozen=True)
class NumberFormat:
    """A way to store a weight [..., out, in]: as several tensors, named after it.

    ``dtype`` is what PyTorch calls that of the numbers, "uint8" for MXFP4, and "int4"
    or "float16" for what `int4.py` and `float16.py` have for a CPU. For the others,
    ``tile`` and ``inputs`` are those of `simplellm.checkpoint.scaled.Scaled`; with
    ``one_scale`` a single one is stored, which all rows get. An "int4" is the sum of
    ``addends`` of 4 bits; with ``keep_dequantized``, its numbers are kept for many
    tokens, too.
    """

    name: str
    suffixes: tuple[str, ...]  # what the tensors' names add to the weight's
    dtype: str
    tile: tuple[int, int] = ROW_TILE
    inputs: bool = True
    one_scale: bool = False
    addends: int = 1
    keep_dequantized: bool = False

    @property
    def is_mxfp4(self) -> bool:
        return self.dtype == "uint8"

    @property
    def is_kept(self) -> bool:
        """Whether a weight stays so once it is loaded, and is no ordinary numbers."""
        return True

    def stored_name(self, weight: str, suffix: str) -> str:
        """What the tensor with this suffix is called, of a ``weight`` so called."""
        return weight + suffix

    def stored_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Shapes of the tensors that hold a weight of this ``shape``, by suffix."""
        *leading, height, width = shape
        rows, columns = self.tile[0], self.tile[1] or width
        scales: Shape = (*leading, -(-height // rows), -(-width // columns))
        scales = (1,) if self.one_scale else scales
        parts: tuple[Shape, ...] = shape, scales
        if self.is_mxfp4:
            parts = packed_shapes(shape)
            if self.suffixes[0] == PACKED[0]:  # its blocks one after the other
                parts = (*leading, height, width // 2), parts[1]
        elif self.suffixes == PACKED:
            parts = (*leading, height, -(-width // 4)), scales, (2,)
        return dict(zip(self.suffixes, parts, strict=True))

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """The dtypes that each of the tensors may have, as safetensors spells them."""
        if self.is_mxfp4:
            return ("U8",), ("U8",)
        if self.suffixes == PACKED:
            return ("I32",), FLOATS, ("I32", "I64")
        return ("I8" if self.dtype == "int8" else "F8_E4M3",), FLOATS

    def nbytes(self, shape: Shape) -> int:
        """Bytes in memory of a weight of this ``shape``; scales become float32.

        Without what ``keep_dequantized`` keeps.
        """
        if self.dtype == "float16":
            return 2 * math.prod(shape)
        in_rows = replace(self, one_scale=False)
        first, scales, *_ = map(math.prod, in_rows.stored_shapes(shape).values())
        if self.dtype == "int4":  # with an offset beside each scale, in two bytes
            return self.addends * (first // 2 + 4 * scales)
        return first + scales if self.is_mxfp4 else math.prod(shape) + 4 * scales


@dataclass(frozen=True)
class GroupedInt(NumberFormat):
    """Of 4 or 8 ``bits``, in words of 32: a weight [out, in] of ordinary numbers here.

    ``group_size`` inputs of a row share a scale, 0: all of them. The suffixes say how
    the tensors lie: `AWQ`, `GPTQ`, or `PACKED` and what compressed-tensors adds to it.
    Zero points are packed as well; ``zero`` is added to them.
    """

    dtype: str = "int32"
    inputs: bool = False
    bits: int = 4
    group_size: int = 0
    zero: int = 0
    in_order: bool = False  # the groups' inputs are, and need not be listed

    @property
    def is_kept(self) -> bool:
        return False

    @property
    def is_awq(self) -> bool:
        return self.name == "AWQ"

    @property
    def without_index(self) -> "GroupedInt":
        """The format of a file that does not list the group of each input."""
        listed = "g_idx" in self.suffixes and self.in_order
        return replace(self, suffixes=self.suffixes[:-1]) if listed else self

    def stored_name(self, weight: str, suffix: str) -> str:
        """AWQ and GPTQ have a suffix in the place of "weight"."""
        compressed = suffix.startswith("_")
        return (weight if compressed else weight.removesuffix("weight")) + suffix

    def stored_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Shapes of the tensors that hold a weight of this ``shape``, by suffix."""
        height, width = shape
        groups = -(-width // (self.group_size or width))
        rows, columns = (-(-size * self.bits // 32) for size in shape)
        shapes: dict[str, Shape] = {
            "_packed": (height, columns),
            "_scale": (height, groups),
            "_shape": (2,),
            "_zero_point": (rows, groups),
            "_g_idx": (width,),
            "qweight": (width, rows) if self.is_awq else (columns, height),
            "scales": (groups, height),
            "qzeros": (groups, rows),
            "g_idx": (width,),
        }
        return {suffix: shapes[suffix] for suffix in self.suffixes}

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        others = {"_scale": FLOATS, "scales": FLOATS, "_shape": ("I32", "I64")}
        return tuple(others.get(suffix, ("I32",)) for suffix in self.suffixes)


FLOAT8 = "float8_e4m3fn"
SQUARES = NumberFormat("FP8 in blocks", ("", "_scale_inv"), FLOAT8, SQUARE_TILE)
ONE_SCALE = NumberFormat("FP8", ("", "_scale"), FLOAT8, one_scale=True)
MXFP4_EXPERTS = NumberFormat("MXFP4", ("_blocks", "_scales"), "uint8", inputs=False)
SCHEMES = {  # of compressed-tensors, by type, bits and strategy
    ("float", 8, "block"): replace(SQUARES, suffixes=("", "_scale")),
    ("float", 8, "channel"): NumberFormat("FP8", ("", "_scale"), FLOAT8),
    ("float", 8, "tensor"): ONE_SCALE,
    ("int", 8, "channel"): NumberFormat("INT8", ("", "_scale"), "int8"),
    ("int", 8, "tensor"): replace(ONE_SCALE, name="INT8", dtype="int8"),
    ("float", 4, "group"): replace(MXFP4_EXPERTS, suffixes=PACKED[:2]),
}
# What a field that is missing means; None for all others.
IMPLIED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "float",
    "expert_dtype": "fp8",
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "dynamic": False,
}
Find = Callable[[str], object]  # something true for a name that is meant


@dataclass(frozen=True)
class Quantization:
    """Which of a checkpoint's weights are stored in which format.

    ``groups``: formats, each with what finds the weights that it is for, of which the
    first counts. ``ignored`` finds modules whose weights are ordinary tensors.
    """

    groups: tuple[tuple[NumberFormat, Find], ...]
    ignored: Find

    def format_of(self, name: str) -> NumberFormat | None:
        """The format of the weight ``name``, as the hub calls it without suffixes.

        None for an ordinary tensor. Lists of modules may have them as parts of a model
        that sees images.
        """
        seeing = re.sub(r"^model\.", "model.language_model.", name)
        names = name, f"language_model.{name}", seeing
        if any(self.ignored(one.removesuffix(".weight")) for one in names):
            return None
        return next(
            (form for form, finds in self.groups if any(map(finds, names))), None
        )


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """What a ``quantization_config`` says.

    Raises TypeError or ValueError, which name what is not supported here.
    """
    check_allowed(FIELD, config)
    method, known = config.get("quant_method"), ", ".join(map(repr, QUANT_METHODS))
    expected = (
        f"one of {known}. `simplellm quantize` writes the first three from weights of "
        "16 bits"
    )
    expect(method in QUANT_METHODS, f"{FIELD}.quant_method", method, expected)
    if config.get("kv_cache_scheme") is not None:
        LOGGER.warning("kv_cache_scheme is ignored unless kv_cache_dtype is 'fp8'")
    return QUANT_METHODS[config["quant_method"]](config)


def formats(config: ModelConfig, stored: Quantization) -> dict[str, NumberFormat]:
    """Formats of the weights that are not ordinary tensors, by our names.

    Raises ValueError for parts of one weight in several formats, and for a weight that
    no operation reads in any.
    """
    forms_of = {}
    for ours, name in tensor_names(config).items():
        if ".router." in ours:  # newer files don't list them, as no linear layers
            continue
        parts = stored_names(name, config.num_local_experts)
        forms = [stored.format_of(part) for part in parts]
        names = ["ordinary numbers" if form is None else form.name for form in forms]
        # Parts are joined, and a joined weight has one format.
        for part, form, said in zip(parts, forms, names, strict=True):
            expected = f"that of {parts[0]}, {names[0]}"
            expect(form == forms[0], f"the format of {part}", said, expected)
        if forms[0] is not None:
            where = f"the format of {parts[0]}"
            packed = forms[0].is_mxfp4 and is_expert_weight(ours)
            expect(packed or is_matrix(name), where, names[0], "ordinary numbers")
            forms_of[ours] = forms[0]
    return forms_of


# What rounds keys and values, or the inputs of products, by a number that was measured
# once: each token's own, which is closer, is found while the model runs.
STATIC_SCALE = re.compile(r"\.(input|activation|output|[qkv]|kv)_scale$")


def same_scales(actual: Shape, expected: Shape) -> bool:
    """Whether two shapes of scales are the same, axes of 1 aside."""
    return [n for n in actual if n != 1] == [n for n in expected if n != 1]


def is_matrix(name: Name) -> bool:
    """Whether operations multiply with the tensor of this name in any format."""
    other = name.turned or ".router." in name.ours or name.ours.endswith("bias")
    return " " in name.shape and not other


def config_once_loaded(config: ModelConfig) -> ModelConfig:
    """``config`` with the formats that its weights have once they are loaded."""
    formats = {ours: form for ours, form in config.formats.items() if form.is_kept}
    return replace(config, formats=formats)


def format_names(config: ModelConfig) -> str:
    """What a model's formats are called; "" where all numbers are ordinary."""
    return ", ".join(dict.fromkeys(form.name for form in config.formats.values()))


def check_allowed(where: str, section: Any, **allowed: Sequence[Any]) -> None:
    """Raise TypeError or ValueError unless ``section``'s fields are as ``allowed``."""
    expect(isinstance(section, Mapping), where, section, "an object", TypeError)
    for key, values in allowed.items():
        one_of(f"{where}.{key}", section.get(key, IMPLIED.get(key)), values)


def is_linear(name: str) -> bool:
    """Whether ``name`` is that of a linear layer's weight."""
    others = r"(norm|embed_tokens|embeddings?)\.weight$"
    return name.endswith(".weight") and not re.search(others, name)


def match_prefixes(where: str, expressions: Sequence[str]) -> Find:
    """A test for names that begin with one of some regular expressions."""
    try:
        patterns = [re.compile(expression) for expression in expressions]
    except re.error as error:
        expect(False, where, expressions, f"regular expressions ({error})")
    return lambda name: any(each.match(name) for each in patterns)


def modules_in(where: str, section: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """The modules that a field lists. Raises TypeError or ValueError."""
    return as_texts(f"{where}.{field}", section.get(field), 2**16, 2**24)


def match_skipped(config: Mapping[str, Any], default: Sequence[str]) -> Find:
    """A test for modules that are not converted, as transformers names them."""
    field = "modules_to_not_convert"
    field = "ignored_layers" if config.get(field) is None else field
    names = modules_in(FIELD, config, field) or default
    inside = [rf"(?:{name})(?:(?<=\.)|(?=\.|$))" for name in names]
    ends = [rf".*{re.escape(name)}$" for name in names]
    return match_prefixes(f"{FIELD}.{field}", inside + ends)


def match_listed(where: str, section: Mapping[str, Any], field: str) -> Find:
    """A test for modules in a list of compressed-tensors."""
    names = modules_in(where, section, field)
    expressions = [
        name[3:] if name.startswith("re:") else f"{re.escape(name)}$" for name in names
    ]
    return match_prefixes(f"{where}.{field}", expressions)


def read_fp8(config: Mapping[str, Any]) -> Quantization:
    """The method "fp8": squares of 128 x 128 numbers, or one scale for a weight."""
    check_allowed(
        FIELD,
        config,
        activation_scheme=("dynamic", "static"),
        weight_block_size=([*SQUARE_TILE], None),
        fmt=("e4m3",),
        scale_fmt=("float", None),
        expert_dtype=("fp8", None),
        modules_to_convert=(None, []),
    )
    form = SQUARES if config.get("weight_block_size") else ONE_SCALE
    return Quantization(((form, is_linear),), match_skipped(config, ["lm_head"]))


def read_mxfp4(config: Mapping[str, Any]) -> Quantization:
    """The method "mxfp4": experts, whether a layer's lie in one weight or apart."""
    experts = re.compile(r".*\.experts\.(.+\.weight|(gate_up|down)_proj)$").match
    return Quantization(((MXFP4_EXPERTS, experts),), match_skipped(config, ()))


def read_modelopt(config: Mapping[str, Any]) -> Quantization:
    """The method "modelopt", of which FP8 is read; its lists have wildcards."""
    check_allowed(FIELD, config, quant_algo=("FP8",))
    field = "ignore" if config.get("ignore") is not None else "exclude_modules"
    expressions = map(fnmatch.translate, modules_in(FIELD, config, field))
    ignored = match_prefixes(f"{FIELD}.{field}", [*expressions])
    return Quantization(((ONE_SCALE, is_linear),), ignored)


def in_layers(name: str) -> bool:
    """Whether ``name`` is that of a linear layer's weight, and not of the head's."""
    return is_linear(name) and ".layers." in name


def group_size(where: str, size: object) -> int:
    """Inputs that share a scale, 0 for all, which a file may call -1."""
    ok = isinstance(size, int) and (size == -1 or size > 0)
    expect(ok, f"{where}.group_size", size, "a number of inputs, or -1 for all")
    return max(0, int(str(size)))


def read_awq(config: Mapping[str, Any]) -> Quantization:
    """The method "awq", as AutoAWQ writes it."""
    check_allowed(
        FIELD,
        config,
        bits=(4,),
        zero_point=(True,),
        version=("gemm", "GEMM", None),
        format=("gemm", None),
    )
    size = group_size(FIELD, config.get("group_size", 128))
    form = GroupedInt("AWQ", AWQ, group_size=size)
    return Quantization(((form, in_layers),), match_skipped(config, ["lm_head"]))


def read_gptq(config: Mapping[str, Any]) -> Quantization:
    """The method "gptq", as AutoGPTQ and GPTQModel write it.

    Zero points are one less in the file than they are, but in version 2. ``dynamic``
    may take modules out, by regular expressions behind "-:".
    """
    check_allowed(
        FIELD,
        config,
        bits=(4, 8),
        checkpoint_format=("gptq", "gptq_v2", None),
        format=("gptq", "gptq_v2", None),
        pack_dtype=("int32", None),
        is_marlin_format=(False, None),
        lm_head=(False, None),
        modules_in_block_to_quantize=(None,),
    )
    size = group_size(FIELD, config.get("group_size", 128))
    version = config.get("checkpoint_format") or config.get("format")
    zero = int(version != "gptq_v2")
    form = GroupedInt("GPTQ", GPTQ, bits=config["bits"], group_size=size, zero=zero)
    form = replace(form, in_order=not config.get("desc_act"))
    dynamic = config.get("dynamic") or {}
    check_allowed(f"{FIELD}.dynamic", dynamic)
    ok = all(expression.startswith("-:") for expression in dynamic)
    expect(ok, f"{FIELD}.dynamic", dynamic, "modules that are left out, behind -:")
    skipped = match_skipped(config, ["lm_head"])
    left_out = match_prefixes(f"{FIELD}.dynamic", [key[2:] for key in dynamic])
    return Quantization(((form, in_layers),), lambda n: skipped(n) or left_out(n))


def read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    """The method "compressed-tensors": a scheme for each group of modules."""
    check_allowed(FIELD, config, transform_config=(None, {}))
    sparsity = config.get("sparsity_config") or {}
    check_allowed(f"{FIELD}.sparsity_config", sparsity, format=(None, "dense"))
    schemes = config.get("config_groups")
    ok = isinstance(schemes, Mapping) and len(schemes) > 0
    expect(ok, f"{FIELD}.config_groups", schemes, "an object", TypeError)
    groups = []
    for name, scheme in (schemes or {}).items():
        where = f"{FIELD}.config_groups.{name}"
        form = read_scheme(where, scheme, config.get("format"))
        groups.append((form, match_targets(where, scheme)))
    return Quantization(tuple(groups), match_listed(FIELD, config, "ignore"))


def match_targets(where: str, scheme: Mapping[str, Any]) -> Find:
    """What finds the weights that a scheme is for. "Linear" is a class of modules."""
    every = "Linear" in modules_in(where, scheme, "targets")
    by_name = match_listed(where, scheme, "targets")
    return lambda name: (
        is_linear(name) and (every or by_name(name.removesuffix(".weight")))
    )


def read_scheme(where: str, scheme: Any, default: Any) -> NumberFormat:
    """The format of one scheme; ``default`` is what says how all are packed."""
    check_allowed(where, scheme, output_activations=(None,))
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    check_allowed(f"{where}.weights", weights, dynamic=(False,), type=("int", "float"))
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    mine = [key for key in SCHEMES if key[0] == kind]
    packing = scheme.get("format") or default
    grouped = weights.get("strategy") == "group" or weights.get("symmetric") is False
    if kind == "int" and (bits == 4 or (packing == "pack-quantized" and grouped)):
        return read_grouped_int(where, scheme, packing)
    four = bits == 4
    check_allowed(
        f"{where}.weights",
        weights,
        num_bits=list(dict.fromkeys(known for _, known, _ in mine)),
        strategy=[strategy for _, known, strategy in mine if known == bits],
        symmetric=(True,),
        group_size=(32,) if four else (None, -1),
        block_structure=(None, [*SQUARE_TILE]),
        actorder=(None, "static", "weight"),
    )
    square = weights["strategy"] == "block"
    one = (inputs or {}).get("strategy") == "tensor" and not square
    check_allowed(where, scheme, **({"input_activations": (None,)} if four else {}))
    if inputs is not None:
        check_allowed(
            f"{where}.input_activations",
            inputs,
            num_bits=(8,),
            type=(kind,),
            symmetric=(True,),
            dynamic=(True, False) if one else (True,),
            strategy=("group",) if square else ("token", "tensor"),
            group_size=(128,) if square else (None,),
        )
    known: tuple[str, ...] = f"{kind}-quantized", "naive-quantized"
    known += ("pack-quantized",) if kind == "int" else ()
    one_of(f"{where}.format", packing, ("mxfp4-pack-quantized",) if four else known)
    form = replace(SCHEMES[kind, bits, weights["strategy"]], inputs=inputs is not None)
    return replace(form, suffixes=PACKED) if packing == "pack-quantized" else form


def read_grouped_int(
    where: str, scheme: Mapping[str, Any], packing: object
) -> GroupedInt:
    """The format of a scheme of packed bits, whose products leave their inputs alone.

    Of 8 bits only those in groups or with zero points, as all else is `Scaled`.
    """
    weights = scheme["weights"]
    check_allowed(where, scheme, input_activations=(None,))
    check_allowed(
        f"{where}.weights",
        weights,
        num_bits=(4, 8),
        strategy=("group", "channel"),
        symmetric=(True, False),
        actorder=(None, "static", "weight", "group"),
    )
    one_of(f"{where}.format", packing, ("pack-quantized",))
    size = weights.get("group_size") if weights["strategy"] == "group" else -1
    size = group_size(f"{where}.weights", size)
    suffixes: tuple[str, ...] = PACKED
    suffixes += () if weights.get("symmetric", True) else ("_zero_point",)
    suffixes += ("_g_idx",) if weights.get("actorder") == "group" else ()
    bits = weights.get("num_bits", 8)
    return GroupedInt(f"INT{bits}", suffixes, bits=bits, group_size=size)


QUANT_METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
    "awq": read_awq,
    "gptq": read_gptq,
}
