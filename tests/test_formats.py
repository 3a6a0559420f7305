"""quantization_config: which weights are in which format, and what is refused."""

import copy

import pytest
import torch

from simplellm.checkpoint.formats import (
    FLOAT8,
    STATIC_SCALE,
    Quantization,
    is_linear,
    read_quantization,
)
from simplellm.checkpoint.mxfp4 import MXFP4, quantize
from simplellm.checkpoint.stored import decode_weight, encode_weight

LAYER = "model.layers.0."
Q = LAYER + "self_attn.q_proj.weight"
GATE = LAYER + "mlp.gate_proj.weight"
ROUTER = LAYER + "mlp.gate.weight"
EXPERT = LAYER + "mlp.experts.3.down_proj.weight"
NORM = LAYER + "input_layernorm.weight"
HEAD = "lm_head.weight"

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "group_size": None,
    "strategy": "channel",
    "block_structure": None,
    "dynamic": False,
    "actorder": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
INPUTS = {**WEIGHTS, "strategy": "token", "dynamic": True, "observer": None}


def scheme(weights=(), inputs=(), **group):
    return {
        "targets": ["Linear"],
        "weights": WEIGHTS | dict(weights),
        "input_activations": None if inputs is None else INPUTS | dict(inputs),
        "output_activations": None,
        **group,
    }


def compressed(group=None, **fields):
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "config_groups": {"group_0": group or scheme()},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "sparsity_config": {},
        "version": "0.9.2",
        **fields,
    }


INT = {"type": "int"}
STATIC = {"strategy": "tensor", "dynamic": False}
W8A8 = compressed(scheme(INT, INT), format="int-quantized")
W8A16 = compressed(scheme(INT, None), format="pack-quantized")
SQUARES = {"strategy": "block", "block_structure": [128, 128]}
BLOCKS = compressed(scheme(SQUARES, {"strategy": "group", "group_size": 128}))
FOUR = {"num_bits": 4, "strategy": "group", "group_size": 32}
FOUR |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
MX = compressed(scheme(FOUR, None), format="mxfp4-pack-quantized")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
SUPPORTED = {
    "fp8": (FP8, ("", "_scale_inv"), FLOAT8, (128, 128), True),
    "compressed FP8": (compressed(), ("", "_scale"), FLOAT8, (1, 0), True),
    "compressed FP8 in blocks": (BLOCKS, ("", "_scale"), FLOAT8, (128, 128), True),
    "FP8 weights alone": (
        *(compressed(scheme((), None), format="naive-quantized"), ("", "_scale")),
        *(FLOAT8, (1, 0), False),
    ),
    "FP8 of one scale": (
        *({**FP8, "weight_block_size": None}, ("", "_scale")),
        *(FLOAT8, (1, 0), True),
    ),
    "static FP8": (
        *(compressed(scheme({"strategy": "tensor"}, STATIC)), ("", "_scale")),
        *(FLOAT8, (1, 0), True),
    ),
    "dynamic FP8 of one scale": (
        *(compressed(scheme({"strategy": "tensor"}, {"strategy": "tensor"})),),
        *(("", "_scale"), FLOAT8, (1, 0), True),
    ),
    "static w8a8": (
        *(compressed(scheme(INT, INT | STATIC), format="int-quantized"),),
        *(("", "_scale"), "int8", (1, 0), True),
    ),
    "w8a8": (W8A8, ("", "_scale"), "int8", (1, 0), True),
    "w8a16": (
        *(W8A16, ("_packed", "_scale", "_shape")),
        *("int8", (1, 0), False),
    ),
    "NVIDIA's FP8": (MODELOPT, ("", "_scale"), FLOAT8, (1, 0), True),
    "mxfp4": (MX, ("_packed", "_scale"), "uint8", (1, 0), False),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_each_format_is_found(name):
    config, suffixes, dtype, tile, inputs = SUPPORTED[name]
    quantization = read_quantization(config)
    for weight in (Q, GATE, EXPERT):
        form = quantization.format_of(weight)
        assert (form.suffixes, form.dtype, form.tile, form.inputs) == (
            *(suffixes, dtype, tile, inputs),
        )
        kinds = {"int8": "INT8", "uint8": "MXFP4", FLOAT8: "FP8"}
        assert form.name.startswith(kinds[dtype])
    for plain in (HEAD, NORM, "model.embed_tokens.weight", Q[:-6] + "bias"):
        assert quantization.format_of(plain) is None


def found(quantization: Quantization, names) -> list[bool]:
    return [quantization.format_of(name) is not None for name in names]


def test_modules_that_are_not_converted():
    """By name with all inside, by regular expression, or by how they end."""
    names = Q, GATE, ROUTER, EXPERT, HEAD, "model.layers.10.mlp.up_proj.weight"
    for skip, expected in (
        (None, [1, 1, 1, 1, 0, 1]),
        (["model.layers.0.mlp.gate", "lm_head"], [1, 1, 0, 1, 0, 1]),
        (["model.layers.1"], [1, 1, 1, 1, 1, 1]),
        (["model.layers.1.*"], [1, 1, 1, 1, 1, 0]),
        (["self_attn", "q_proj"], [0, 1, 1, 1, 1, 1]),
        (["mlp"], [1, 1, 1, 1, 1, 1]),  # neither a beginning nor an end
        (["model.layers.0.mlp"], [1, 0, 0, 0, 1, 1]),
    ):
        for field in ("modules_to_not_convert", "ignored_layers"):
            config = FP8 | {field: skip}
            assert found(read_quantization(config), names) == [*map(bool, expected)]


def test_transformers_skips_the_same_modules():
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils")
    names = Q, GATE, ROUTER, EXPERT, HEAD, "model.layers.10.mlp.up_proj.weight"
    for skip in (
        ["lm_head", "model.layers.0.mlp.gate"],
        ["model.layers.1", "k_proj"],
        ["model.layers.*.mlp", "gate"],
        ["layers.0", "model.layers.1."],
        ["q_proj|down_proj"],
    ):
        quantization = read_quantization(FP8 | {"modules_to_not_convert": skip})
        expected = [
            utils.should_convert_module(name.removesuffix(".weight"), skip)
            for name in names
        ]
        assert found(quantization, names) == expected, skip


def test_targets_and_ignored_modules():
    def reads(targets, ignore):
        group = scheme(targets=targets)
        return read_quantization(compressed(group, ignore=ignore))

    names = Q, GATE, ROUTER, EXPERT, NORM
    for targets, ignore, expected in (
        (["Linear"], [], [1, 1, 1, 1, 0]),
        (["Linear"], None, [1, 1, 1, 1, 0]),
        (["Linear"], ["re:.*mlp.gate$"], [1, 1, 0, 1, 0]),
        (["Linear"], ["model.layers.0.mlp"], [1, 1, 1, 1, 0]),
        (["re:.*experts.*"], ["lm_head"], [0, 0, 0, 1, 0]),
        (["re:mlp"], [], [0, 0, 0, 0, 0]),  # matched from the beginning
        ([Q.removesuffix(".weight")], [], [1, 0, 0, 0, 0]),
    ):
        assert found(reads(targets, ignore), names) == [*map(bool, expected)]


def test_modules_of_a_model_that_sees_images():
    """Lists name them with its prefixes, which the text part does not have here."""
    for ignored in ("language_model.lm_head", "re:language_model.lm_head", "lm_head"):
        quantization = read_quantization(compressed(ignore=[ignored, "re:vision.*"]))
        assert found(quantization, (HEAD, Q)) == [False, True]
    modules = "model.language_model.layers.0.self_attn", "language_model.lm_head"
    for field in ("modules_to_not_convert", "ignored_layers"):
        quantization = read_quantization(FP8 | {field: [*modules]})
        assert found(quantization, (HEAD, Q, GATE)) == [False, False, True]


def test_nvidias_lists_have_wildcards():
    for field in ("ignore", "exclude_modules"):
        data = {**MODELOPT, "ignore": None, field: ["lm_head", "*.mlp.gate", "*norm*"]}
        quantization = read_quantization(data)
        assert found(quantization, (HEAD, ROUTER, Q, GATE)) == [
            False,
            False,
            True,
            True,
        ]


def test_a_sparsity_of_none_may_say_more():
    """As files of 2024 do, which were written before it could be left out."""
    dense = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "0:0"}
    assert read_quantization(compressed(sparsity_config=dense)).format_of(Q)


def test_groups_have_formats_of_their_own():
    groups = {
        "group_0": scheme(INT, INT, targets=["re:.*mlp.*"], format="int-quantized"),
        "group_1": scheme(format="float-quantized"),
    }
    config = compressed(config_groups=groups, format="mixed-precision")
    quantization = read_quantization(config)
    assert quantization.format_of(GATE).dtype == "int8"
    assert quantization.format_of(Q).dtype == FLOAT8


def test_experts_of_gpt_oss_are_mxfp4():
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    quantization = read_quantization(config)
    for part in ("gate_up", "down"):
        form = quantization.format_of(f"{LAYER}mlp.experts.{part}_proj")
        assert form.suffixes == ("_blocks", "_scales")
    for name in (Q, ROUTER, f"{LAYER}mlp.experts.gate_up_proj_bias"):
        assert quantization.format_of(name) is None


def changed(config, path, value):
    config = copy.deepcopy(config)
    place = config
    *way, last = path.split(".")
    for key in way:
        place = place[key]
    place[last] = value
    return config


GROUP = "config_groups.group_0"
REFUSED = [
    *(({"quant_method": m}, m) for m in ("hqq", "bitsandbytes", "quark")),
    ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
    ({}, "quant_method is None"),
    ({**FP8, "activation_scheme": "fixed"}, "activation_scheme is 'fixed'"),
    ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
    ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    ({**FP8, "modules_to_convert": ["x"]}, "modules_to_convert is"),
    ({**FP8, "modules_to_not_convert": ["("]}, "regular expressions"),
    ({**FP8, "modules_to_not_convert": 7}, "modules_to_not_convert is 7"),
    (
        compressed(sparsity_config={"format": "sparse-24"}),
        "config.format is 'sparse-24'",
    ),
    (compressed(config_groups={}), "config_groups is {}"),
    (compressed(config_groups={"FP8": ["Linear"]}), "config_groups.FP8 is"),
    (compressed(format="marlin-24"), r"group_0.format is 'marlin-24'"),
    (compressed(format=None), "group_0.format is None"),
    (changed(W8A8, f"{GROUP}.weights.num_bits", 3), "weights.num_bits is 3"),
    (changed(W8A8, f"{GROUP}.weights.num_bits", 4), "input_activations is {"),
    (changed(W8A8, f"{GROUP}.weights.symmetric", False), "weights.symmetric is False"),
    (
        changed(W8A8, f"{GROUP}.weights.strategy", "group"),
        "weights.strategy is 'group'",
    ),
    (
        changed(W8A8, f"{GROUP}.weights.strategy", "block"),
        "weights.strategy is 'block'",
    ),
    (changed(W8A8, f"{GROUP}.weights.group_size", 128), "weights.group_size is 128"),
    (changed(W8A8, f"{GROUP}.weights", None), "group_0.weights is None"),
    (changed(W8A8, f"{GROUP}.output_activations", {}), "output_activations is {}"),
    (
        changed(W8A8, f"{GROUP}.input_activations.dynamic", False),
        "input_activations.dynamic is False",
    ),
    (
        changed(W8A8, f"{GROUP}.input_activations.symmetric", False),
        "input_activations.symmetric is False",
    ),
    (
        changed(compressed(), f"{GROUP}.input_activations.type", "int"),
        "input_activations.type is 'int'",
    ),
    (changed(MX, f"{GROUP}.weights.num_bits", 8), "weights.strategy is 'group'"),
    (changed(MX, f"{GROUP}.weights.group_size", 16), "weights.group_size is 16"),
    (changed(MX, f"{GROUP}.input_activations", INPUTS), "input_activations is {"),
    (changed(MX, "format", "nvfp4-pack-quantized"), "format is 'nvfp4-pack-quan"),
    (
        changed(BLOCKS, f"{GROUP}.weights.block_structure", [64, 128]),
        "block_structure is",
    ),
]


def test_a_format_that_is_not_read_says_the_way():
    with pytest.raises(ValueError, match=r"'gptq'. `simplellm quantize` writes the"):
        read_quantization({"quant_method": "hqq", "bits": 4})


def test_a_scheme_for_keys_and_values_is_said_to_be_ignored(caplog):
    with caplog.at_level("WARNING", logger="simplellm"):
        quantization = read_quantization(compressed(kv_cache_scheme={"num_bits": 8}))
    assert quantization.format_of(Q) is not None
    (record,) = caplog.records
    assert "kv_cache_scheme is ignored" in record.message


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(config, words):
    with pytest.raises((TypeError, ValueError), match=words):
        read_quantization(config)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


WHOLE = (
    *("FP8 of one scale", "static FP8", "dynamic FP8 of one scale"),
    "NVIDIA's FP8",
)
EIGHT = [name for name in SUPPORTED if name not in ("mxfp4", *WHOLE)]


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("shape", [(256, 384), (40, 130), (3, 128, 256)])
def test_a_weight_is_made_of_what_is_stored(name, shape):
    form = read_quantization(SUPPORTED[name][0]).format_of(Q)
    weight = encode_weight(form, normal(*shape))
    parts = {"": weight.values, form.suffixes[1]: weight.scales.bfloat16()}
    if form.suffixes[0] == "_packed":
        padded = torch.nn.functional.pad(weight.values, (0, -shape[-1] % 4))
        words = (padded.to(torch.int16) + 128).to(torch.uint8).view(torch.int32)
        parts = {"_packed": words, "_scale": weight.scales.bfloat16()}
        parts["_shape"] = torch.tensor(shape[-2:])
    stored = {suffix: tuple(part.shape) for suffix, part in parts.items()}
    assert form.stored_shapes(shape) == stored
    got = decode_weight(form, [parts[suffix] for suffix in form.suffixes])
    assert torch.equal(got.values.view(torch.int8), weight.values.view(torch.int8))
    assert torch.equal(got.scales, weight.scales.bfloat16().float())
    assert (got.tile, got.inputs) == (weight.tile, weight.inputs)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
def test_one_scale_becomes_that_of_each_row(name, axes):
    form = read_quantization(SUPPORTED[name][0]).format_of(Q)
    values = normal(40, 130).to(torch.float8_e4m3fn)
    assert form.stored_shapes((40, 130)) == {"": (40, 130), "_scale": (1,)}
    found = decode_weight(form, [values, torch.tensor(0.25).reshape(axes)])
    assert torch.equal(found.dequantize(torch.float32), values.float() / 4)
    assert form.nbytes((40, 130)) == found.nbytes == 40 * 130 + 40 * 4


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "mxfp4"}, f"{LAYER}mlp.experts.down_proj"),
        ({"quant_method": "mxfp4"}, EXPERT),
        (MX, EXPERT),
    ],
)
def test_mxfp4_is_made_of_what_is_stored(config, name):
    form = read_quantization(config).format_of(name)
    weight = quantize(normal(3, 64, 96))
    blocks = weight.blocks.flatten(-2) if config is MX else weight.blocks
    parts = dict(zip(form.suffixes, (blocks, weight.scales), strict=True))
    stored = {suffix: tuple(part.shape) for suffix, part in parts.items()}
    assert form.stored_shapes((3, 64, 96)) == stored
    assert form.nbytes((3, 64, 96)) == weight.nbytes
    found = decode_weight(form, [*parts.values()])
    assert isinstance(found, MXFP4) and torch.equal(found.blocks, weight.blocks)


def test_tensors_of_another_format_are_refused():
    form = read_quantization(W8A8).format_of(Q)
    with pytest.raises(TypeError, match=r"expected torch\.int8"):
        decode_weight(
            form, [torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(2, 1)]
        )
    with pytest.raises(ValueError, match="scales are"):
        decode_weight(form, [torch.zeros(2, 4).char(), torch.ones(4, 1)])


def test_scales_of_inputs_and_of_keys_and_values():
    """As engines have called them; a weight's is none of them."""
    ours = (
        "q_proj.input",
        "q_proj.activation",
        "k_proj.output",
        "k",
        "v",
        "attn.q",
        "kv",
    )
    for name in ours:
        assert STATIC_SCALE.search(f"{LAYER}self_attn.{name}_scale")
    assert not STATIC_SCALE.search(f"{Q}_scale")


def test_linear_layers_by_name():
    names = Q, GATE, EXPERT, HEAD, NORM, LAYER + "self_attn.q_norm.weight"
    assert [is_linear(name) for name in names] == [True] * 4 + [False] * 2


# The library that these checkpoints are written with


def of_library(config):
    """compressed-tensors' scheme and compressor for the first group."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    return scheme, BaseCompressor.get_value_from_registry(config["format"])


COMPRESSED = [name for name in EIGHT if "config_groups" in SUPPORTED[name][0]]


def test_the_library_reads_and_writes_the_same_mxfp4():
    theirs, compressor = of_library(MX)
    form = read_quantization(MX).format_of(Q)
    weight = quantize(normal(256, 384))
    dense, scales = weight.dequantize(torch.float32), 2.0 ** (weight.scales.int() - 127)
    stored = compressor.compress({"weight": dense, "weight_scale": scales}, theirs)
    got = decode_weight(form, [stored["weight" + suffix] for suffix in form.suffixes])
    assert torch.equal(got.scales, weight.scales)
    assert torch.equal(got.dequantize(torch.float32), dense)
    back = compressor.decompress(dict(stored), theirs)["weight"]
    torch.testing.assert_close(back.float(), dense)


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_library_reads_and_writes_the_same_tensors(name):
    config, suffixes, *_ = SUPPORTED[name]
    theirs, compressor = of_library(config)
    form = read_quantization(config).format_of(Q)
    weight = encode_weight(form, normal(256, 384))
    dense = weight.dequantize(torch.float32)
    state = {"weight": dense, "weight_scale": weight.scales}
    stored = compressor.compress(state, theirs)
    parts = [stored["weight" + suffix] for suffix in suffixes]
    assert form.stored_shapes(weight.shape) == {
        suffix: tuple(part.shape) for suffix, part in zip(suffixes, parts, strict=True)
    }
    got = decode_weight(form, parts)
    assert torch.equal(got.values.view(torch.int8), weight.values.view(torch.int8))
    back = compressor.decompress(dict(stored), theirs)["weight"]
    torch.testing.assert_close(back.float(), got.dequantize(torch.float32))


@pytest.mark.parametrize("name", COMPRESSED)
def test_inputs_are_rounded_nearly_as_the_library_does(name):
    """It spreads an integer's range over 127.5 steps, where engines have 127."""
    theirs, _ = of_library(SUPPORTED[name][0])
    args = theirs.input_activations
    if args is None or not args.dynamic:  # static scales are not used
        return
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    form = read_quantization(SUPPORTED[name][0]).format_of(Q)
    weight = encode_weight(form, normal(256, 384))
    x = normal(1, 9, 384)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    expected = fake_quantize(x, scale, zero, args)
    values, scales = weight.round_inputs(x)
    got = values.float() * scales.repeat_interleave(weight.tile[1], -1)
    if form.dtype == "int8":
        step = scales.max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=1.01 * step)
    else:
        wrong = (got - expected).abs() > 1e-6 * expected.abs()
        assert wrong.float().mean() < 1e-3  # ties
