"""Checkpoints of transformers, rounded by `simplellm quantize`, through our engine.

They are compared with transformers' own models, whose weights are the dequantized
numbers, and whose linear layers round their inputs where the format says so. Rounding
is written down here once more, in float64.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    GEMMA_ROPE,
    GRANITE,
    case,
    change,
    put,
    rewrite,
    rope,
    sparse,
    write,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from simplellm import LLM, EngineConfig
from simplellm.api.load import load_model
from simplellm.apps.cli import main
from simplellm.apps.info import describe
from simplellm.base.config import ConfigError
from simplellm.checkpoint.checkpoint import Checkpoint, CheckpointError
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.formats import SQUARES
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.checkpoint.scaled import Scaled
from simplellm.checkpoint.stored import encode_weight, tensors
from simplellm.model.memory import weight_bytes
from simplellm.model.ops import PLAIN, Ops
from simplellm.model.ops_numpy import NUMPY, is_small

pytestmark = pytest.mark.usefixtures("quiet_transformers")

# The same numbers, added up in another order. Where inputs are rounded, the last bit of
# a sum decides now and then to which of two neighbors, which may be 1/8 apart, and all
# that follows moves, later tokens too. So many short prompts are compared: most are
# within this tolerance, and none is farther off than rounding as such moves some.
TOLERANCE = 1e-4
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 96,
    "num_hidden_layers": 2,
}
CASES = {
    "Qwen3": lambda: case("Qwen3", **SIZES | rope(1e6)),
    "Llama": lambda: case("Llama", **SIZES | rope(5e5), tie_word_embeddings=True),
    "Qwen3-MoE": lambda: sparse(
        "Qwen3Moe", norm_topk_prob=True, moe_intermediate_size=384, **SIZES
    ),
    "Mixtral": lambda: sparse("Mixtral", **SIZES | rope(1e6)),
    "Qwen2": lambda: case("Qwen2", **SIZES | rope(1e6)),
    "SmolLM3": lambda: case("SmolLM3", **SIZES, no_rope_layers=[0, 1]),
    "Granite": lambda: case("Granite", **SIZES, **GRANITE),
    "Mistral": lambda: case("Mistral", **SIZES, sliding_window=None),
    "Gemma3": lambda: case("Gemma3", **SIZES, **GEMMA_ROPE, sliding_window=19),
}
MAIN = "Qwen3", "Llama", "Qwen3-MoE"
# Tiles are cut off at the right, below, and where q, k and v are joined.
UNEVEN = SIZES | {"hidden_size": 200, "intermediate_size": 296, "head_dim": 28}
PROMPTS = torch.randint(101, (24, 3), generator=torch.Generator().manual_seed(1))
ENGINE = EngineConfig(
    page_size=4,
    num_pages=200,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    prefill_chunk=16,
)


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """A scale for each number: those of 128 x 128 tiles, or of whole rows."""
    if scales.shape[-1] == 1 and scales.shape[-2] == shape[-2]:
        return scales.double()
    wide = scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return wide[..., : shape[-2], : shape[-1]]


def round_inputs(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., in], each 128 numbers (for int8, each row) rounded to 8 bits and back."""
    if dtype == torch.int8:
        step = x.double().abs().amax(-1, keepdim=True) / 127
        return (x / step).round() * step
    parts = functional.pad(x.double(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    step = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    rounded = (parts / step).float().to(torch.float8_e4m3fn).double() * step
    return rounded.flatten(-2)[..., : x.shape[-1]]


class RoundingExperts(torch.nn.Module):
    """The experts of a layer, whose products round their inputs first."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        super().__init__()
        pairs = zip(experts.gate_up_proj, experts.down_proj, strict=True)
        self.pairs = [[RoundingLinear(x, dtype) for x in pair] for pair in pairs]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(self.pairs):
            tokens, place = torch.where(chosen == expert)
            gate, up = gate_up(x[tokens]).chunk(2, -1)
            y = down(functional.silu(gate) * up) * weights[tokens, place, None]
            out.index_add_(0, tokens, y)
        return out


class RoundingLinear(torch.nn.Module):
    """A linear layer of dequantized weights that rounds its inputs first."""

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.matrix, self.dtype = weight.double(), dtype
        self.bias = None if bias is None else bias.double()

    def forward(self, x: Tensor) -> Tensor:
        rounded = round_inputs(x, self.dtype)
        return functional.linear(rounded, self.matrix, self.bias).float()


@dataclass
class Made:
    """A quantized checkpoint, and transformers' models before and after."""

    folder: Path
    dense: Any
    reference: Any
    weights_only: Any  # as the reference, without rounded inputs

    @torch.inference_mode()
    def logits(self, model: Any) -> Tensor:
        return model(PROMPTS).logits[:, -1]


SIZES_OF_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def four_bits(values: Tensor, scales: Tensor) -> Tensor:
    """e2m1 numbers, the first of two in the low half of a byte, times 2^(scale-127)."""
    rows = values.flatten(1)
    codes = torch.stack([rows & 15, rows >> 4], -1).flatten(1).long()
    numbers = SIZES_OF_E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    return numbers * powers


def dequantized(folder: Path) -> dict[str, tuple[Tensor, torch.dtype]]:
    """By its name, the float64 numbers of each rounded weight, and its dtype."""
    stored = load_file(folder / "model.safetensors")
    found = {}
    for name, values in stored.items():
        for packed, suffix in (("_packed", "_scale"), ("_blocks", "_scales")):
            base = name.removesuffix(packed)
            if values.dtype == torch.uint8 and base != name:
                numbers = four_bits(values, stored[base + suffix])
                found[base] = numbers, torch.uint8
        for suffix in ("_scale_inv", "_scale"):
            if (scales := stored.get(name + suffix)) is not None:
                numbers = values.double() * spread(scales, values.shape)
                found[name] = numbers, values.dtype
    return found


def references(folder: Path, model: Any) -> tuple[Any, Any]:
    """Copies of ``model`` with a folder's weights: rounding inputs, and not."""
    copies = [type(model)(model.config).eval() for _ in range(2)]
    weights = dequantized(folder)
    for copy in copies:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, (numbers, _) in weights.items():
            put(state, name, numbers.float())
        copy.load_state_dict(state)
    for name, (numbers, dtype) in weights.items():
        if ".experts." not in name and dtype != torch.uint8:
            place = name.removesuffix(".weight")
            bias = copies[0].get_submodule(place).bias
            copies[0].set_submodule(place, RoundingLinear(numbers, dtype, bias))
    for name, module in list(copies[0].named_modules()):
        if name.endswith(".experts") and dtype != torch.uint8:
            copies[0].set_submodule(name, RoundingExperts(module, dtype))
    return copies[0], copies[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """Checkpoints by their models' names and formats; do not change the folders."""
    found: dict[tuple[str, str], Made] = {}

    def of(name: str, form: str) -> Made:
        if (name, form) not in found:
            folder = tmp_path_factory.mktemp("quantized")
            model = CASES[name]().build()
            write(folder / "dense", model)
            arguments = [str(folder / "dense"), str(folder / form), "--format", form]
            assert main(["quantize", *arguments]) == 0
            pair = references(folder / form, model)
            found[name, form] = Made(folder / form, model, *pair)
        return found[name, form]

    return of


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """The relative error of each prompt's logits."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def logits(folder: Path, ops: Ops = PLAIN) -> Tensor:
    """Those of each prompt's last token."""
    model = load_model(folder, device="cpu", ops=ops)
    return torch.stack([model.logits(prompt)[-1] for prompt in PROMPTS])


def without_rounded_inputs(data: dict[str, Any]) -> dict[str, Any]:
    """A quantization_config of INT8 whose products leave their inputs alone."""
    (group,) = data["quantization_config"]["config_groups"].values()
    group["input_activations"] = None
    return data


ROUNDED = ["fp8", "int8"]  # whose inputs are rounded, too
FORMATS = {"fp8": "FP8 in blocks", "int8": "INT8", "mxfp4": "MXFP4"}


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_rounded_numbers(
    name: str, form: str, made, record_property
) -> None:
    """With both tables of operations; and rounding, of either kind, is seen."""
    one = made(name, form)
    record_property("family", CASES[name]().family)
    record_property("format", form.upper())
    expected = one.logits(one.reference)
    far = [
        errors(one.logits(other), expected) for other in (one.dense, one.weights_only)
    ]
    assert all(found.min() > 10 * TOLERANCE for found in far)
    for ops in (PLAIN, NUMPY):
        found = errors(logits(one.folder, ops), expected)
        assert found.median() < TOLERANCE
        assert found.max() < min(each.max() for each in far)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_weights_alone(name: str, packed: bool, made, tmp_path: Path) -> None:
    """INT8 whose products leave their inputs alone; four numbers a word, or not."""
    one = made(name, "int8")
    copy(one.folder, tmp_path)
    change(tmp_path, without_rounded_inputs)
    if packed:
        rewrite(tmp_path, pack)
        change(tmp_path, as_packed)
    expected = one.logits(one.weights_only)
    assert errors(one.logits(one.dense), expected).min() > 10 * TOLERANCE
    for ops in (PLAIN, NUMPY):
        assert errors(logits(tmp_path, ops), expected).max() < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_mxfp4(name: str, made, record_property) -> None:
    """All linear layers, in the way of compressed-tensors."""
    one = made(name, "mxfp4")
    record_property("family", CASES[name]().family)
    record_property("format", "MXFP4")
    expected = one.logits(one.weights_only)
    assert errors(one.logits(one.dense), expected).min() > 10 * TOLERANCE
    for ops in (PLAIN, NUMPY):
        assert errors(logits(one.folder, ops), expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral"])
def test_experts_in_blocks(name: str, made, tmp_path: Path) -> None:
    """The experts alone, in the way of gpt-oss; and a layer of them is left out."""
    one = made(name, "mxfp4")
    copy(one.folder, tmp_path)
    rewrite(tmp_path, as_blocks)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0"]}
    change(tmp_path, lambda data: data | {"quantization_config": config})
    expected = one.logits(one.weights_only)
    for ops in (PLAIN, NUMPY):
        assert errors(logits(tmp_path, ops), expected).max() < TOLERANCE
    experts = Checkpoint(tmp_path)["layers.1.experts.gate_up"]
    assert isinstance(experts, MXFP4)
    assert isinstance(Checkpoint(tmp_path)["layers.0.experts.gate_up"], Tensor)
    assert is_small(Checkpoint(tmp_path).config)


def test_tiles_that_are_cut_off(tmp_path: Path) -> None:
    """No size is a multiple of 128: at the right, below, and where parts are joined."""
    model = case("Qwen3", **UNEVEN, **rope(1e6)).build()
    write(tmp_path, model)
    rewrite(tmp_path, in_squares)
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    change(tmp_path, lambda data: data | {"quantization_config": config})
    reference, _ = references(tmp_path, model)
    with torch.inference_mode():
        expected = reference(PROMPTS).logits[:, -1]
    assert errors(logits(tmp_path), expected).median() < TOLERANCE


@pytest.mark.parametrize("form", ROUNDED)
def test_routers_need_not_be_listed(form: str, made, tmp_path: Path) -> None:
    """To transformers they are no linear layers, and so nothing that is rounded."""
    skip, model = ["lm_head"], CASES["Qwen3-MoE"]().build()
    replace_with_fp8_linear(model, skip, FineGrainedFP8Config())
    kinds = {
        name: type(m).__name__ for name, m in model.model.layers[0].named_modules()
    }
    assert kinds["self_attn.q_proj"] == "FP8Linear" and "Router" in kinds["mlp.gate"]
    one = made("Qwen3-MoE", form)
    copy(one.folder, tmp_path)
    field = "modules_to_not_convert" if form == "fp8" else "ignore"
    change(tmp_path, given(**{field: skip}))
    assert torch.equal(logits(tmp_path), logits(one.folder))


def test_experts_in_squares(made) -> None:
    """Of each expert's parts, which lie apart, and with what lies beside them."""
    checkpoint = Checkpoint(made("Qwen3-MoE", "fp8").folder)
    numbers = dequantized(checkpoint.path)
    for layer in range(2):
        for number in range(5):
            theirs = f"model.layers.{layer}.mlp.experts.{number}."
            gate, up, down = (
                numbers[f"{theirs}{part}_proj.weight"][0]
                for part in ("gate", "up", "down")
            )
            for ours, expected in (
                ("gate_up", torch.cat([gate, up])),
                ("down", down),
            ):
                weight = checkpoint[f"layers.{layer}.experts.{ours}"]
                assert isinstance(weight, Scaled) and weight.inputs
                found = weight[number].dequantize(torch.float32)
                torch.testing.assert_close(found, expected.float())
    assert logits(checkpoint.path).isfinite().all()


@pytest.mark.bits
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MAIN)
def test_the_engine_continues(name: str, form: str, made, caplog) -> None:
    """Through pages and chunks, as the forward pass without them; and says of what.

    A chunk has other rows than the whole text, so a processor may add in another order.
    Where inputs are rounded, a token may then lose to another one by less than rounding
    them moves logits. Where they aren't, each token is the best.
    """
    one = made(name, form)
    prompts = [PROMPTS[:9].flatten().tolist(), PROMPTS[3].tolist(), PROMPTS[4].tolist()]
    with (
        caplog.at_level("INFO", logger="simplellm"),
        LLM(one.folder, ENGINE, device="cpu") as llm,
    ):
        done = llm.generate(prompts, temperature=0, max_tokens=8, ignore_eos=True)
        outputs = [output.token_ids for output in done.result()]
    assert f" ({FORMATS[form]}) on " in caplog.text
    model = load_model(one.folder, device="cpu")
    losses = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        rows = model.logits(prompt + tokens)[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        losses.append(rows.max(-1).values - chosen)
    loss = torch.cat(losses)
    moved = (one.logits(one.weights_only) - one.logits(one.reference)).abs().max()
    assert (moved > 0) == (form in ROUNDED)
    assert loss.max() <= moved
    assert (loss == 0).sum() > 0.75 * 3 * 8


@pytest.mark.parametrize("form", FORMATS)
def test_people_are_told(form: str, made) -> None:
    folder = made("Qwen3", form).folder
    lines = [*describe(str(folder))]
    assert f"format       {FORMATS[form]}" in lines
    (row,) = (line for line in lines if line.startswith("feed-forward  "))
    assert row.split()[1] == FORMATS[form].split()[0]
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    (total,) = (line for line in lines if line.startswith("total"))
    assert 0.9 * files < int(total.split()[2].replace(",", "")) < files
    assert max(map(len, lines[1:])) <= 80


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MAIN)
def test_sizes_and_random_weights(name: str, form: str, made) -> None:
    """What a model will take is told from config.json, and is what it takes."""
    folder = made(name, form).folder
    model = load_model(folder, device="cpu", random_weights=True)
    assert model.logits(PROMPTS[0]).isfinite().all()
    loaded = load_model(folder, device="cpu")
    for layer, other in zip(model.layers, loaded.layers, strict=True):
        for one, two in (
            (layer.attn.qkv, other.attn.qkv),
            (layer.mlp.down, other.mlp.down),
        ):
            assert one.shape == two.shape
            for part, same_part in zip(tensors(one), tensors(two), strict=True):
                assert (part.shape, part.dtype) == (same_part.shape, same_part.dtype)
            if form != "mxfp4":
                assert (one.tile, one.inputs) == (two.tile, two.inputs)
    wanted = weight_bytes(loaded.config, 4)
    mlps = [layer.mlp for layer in loaded.layers]
    taken = sum(mlp.gate_up.nbytes + mlp.down.nbytes for mlp in mlps)
    assert taken == wanted["experts" if name == "Qwen3-MoE" else "feed-forward"]


# Other ways to store the same.


def copy(source: Path, target: Path) -> None:
    """A checkpoint with the same numbers, in files of its own."""
    for file in ("config.json", "model.safetensors"):
        (target / file).write_bytes((source / file).read_bytes())


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """INT8 in words of four numbers, the first lowest, 128 added to each."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int8:
            found[name] = tensor
            continue
        words = (tensor.int() + 128).to(torch.uint8).view(torch.int32)
        shape = torch.tensor(tensor.shape)
        found |= {f"{name}_packed": words, f"{name}_shape": shape}
    return found


def as_packed(data: dict[str, Any]) -> dict[str, Any]:
    data["quantization_config"]["format"] = "pack-quantized"
    return data


def as_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """MXFP4 of the last layer's experts under gpt-oss's names; all else float32."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base, scales = (
            name.removesuffix("_packed"),
            tensors.get(f"{name[:-7]}_scale", tensor),
        )
        if not name.endswith("_packed"):
            found |= {} if name.endswith("_scale") else {name: tensor}
        elif ".layers.1." in name and ".experts." in name:
            found[f"{base}_blocks"] = tensor.unflatten(-1, (-1, 16))
            found[f"{base}_scales"] = scales
        else:
            found[base] = four_bits(tensor, scales).float()
    return found


def in_squares(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Linear layers in FP8, whatever their sizes."""
    found = {}
    for name, tensor in given.items():
        found[name] = tensor
        if "_proj.weight" in name:
            found[name], found[f"{name}_scale_inv"] = tensors(
                encode_weight(SQUARES, tensor)
            )
    return found


# One scale for a whole weight.

STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def compressed(inputs: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors, FP8 with a scale a weight."""
    group = {"targets": ["Linear"], "weights": STATIC, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **fields,
    }


def old_fp8(scheme: str) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "weight_block_size": None,
    }


WAYS: dict[str, tuple[dict[str, Any], str, tuple[int, ...], str]] = {
    "static": (compressed(STATIC), "_scale", (1,), "input_scale"),
    "weights alone": (compressed(None), "_scale", (), ""),
    "keys and values too": (
        compressed(None, kv_cache_scheme=STATIC), "_scale", (1, 1), "output_scale",
    ),
    "dynamic": (compressed(STATIC | {"dynamic": True}), "_scale", (1,), ""),
    "vLLM's static": (old_fp8("static"), "_scale", (), "input_scale"),
    "NVIDIA's": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        "_scale", (), "input_scale",
    ),
    "transformers' static": (old_fp8("static"), "_scale_inv", (), "activation_scale"),
    "transformers' dynamic": (old_fp8("dynamic"), "_scale_inv", (), ""),
}  # fmt: skip


def with_one_scale(
    folder: Path, way: str, model: Any, field: str = "quantization_config"
) -> dict[str, Tensor]:
    """Write ``model`` with a scale for each weight; the numbers that are stored."""
    config, suffix, shape, static = WAYS[way]
    numbers: dict[str, Tensor] = {}

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        written = dict(tensors)
        for name, tensor in tensors.items():
            if "_proj.weight" not in name:
                continue
            scale = tensor.abs().max() / 448
            written[name] = (tensor / scale).to(torch.float8_e4m3fn)
            written[name + suffix] = scale.reshape(shape)
            if static:
                at = name.replace("weight", static)
                written[at] = torch.tensor(0.01).reshape(shape)
            numbers[name] = written[name].float() * scale
        return written

    write(folder, model)
    rewrite(folder, rounded)
    change(folder, lambda data: data | {field: config})
    return numbers


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if few else pytest.mark.exhaustive)
        for place, way in enumerate(WAYS)
        for number, name in enumerate(MAIN)
        for few in [number == place % 3]
    ],
)
def test_one_scale_for_a_weight(name: str, way: str, tmp_path: Path) -> None:
    """The numbers are transformers'; inputs are rounded by the token, if at all."""
    model = CASES[name]().build()
    numbers = with_one_scale(tmp_path, way, model)
    dense = model(PROMPTS).logits[:, -1]
    state = model.state_dict()
    for stored, tensor in numbers.items():
        put(state, stored, tensor)
    expected = model(PROMPTS).logits[:, -1]
    far = errors(dense, expected).median()
    for ops in (PLAIN, NUMPY):
        found = errors(logits(tmp_path, ops), expected)
        if WAYS[way][0] in (compressed(None), WAYS["keys and values too"][0]):
            assert found.max() < TOLERANCE
        else:
            assert TOLERANCE < found.median() < 1.5 * far
    with LLM(tmp_path, ENGINE, device="cpu") as llm:
        ids = PROMPTS[0].tolist()
        assert llm.generate(ids, max_tokens=3, ignore_eos=True).result()
    lines = [*describe(str(tmp_path))]
    assert "format       FP8" in lines


def test_nvidias_format_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    model = CASES["Qwen3"]().build()
    with_one_scale(tmp_path, "NVIDIA's", model)
    expected = read_config(tmp_path / "config.json")
    change(tmp_path, lambda data: {k: v for k, v in data.items() if k[:5] != "quant"})
    said = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": said}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read_config(tmp_path / "config.json") == expected


@torch.inference_mode()
def test_inputs_by_the_token_are_closer_than_by_a_static_scale(tmp_path: Path) -> None:
    """What the files' own static scales, here the best there are, make of them."""
    model = CASES["Qwen3"]().build()
    numbers = with_one_scale(tmp_path, "static", model)
    for stored, tensor in numbers.items():
        put(model.state_dict(), stored, tensor)
    expected = model(PROMPTS).logits[:, -1]

    def rounding(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        step = inputs[0].abs().max() / 448
        return ((inputs[0] / step).to(torch.float8_e4m3fn).float() * step,)

    for part in {stored.removesuffix(".weight") for stored in numbers}:
        model.get_submodule(part).register_forward_pre_hook(rounding)
    static = errors(model(PROMPTS).logits[:, -1], expected)
    assert errors(logits(tmp_path), expected).median() < 1.05 * static.median()


@torch.inference_mode()
def test_scales_of_rows_without_their_last_axis(made, tmp_path: Path) -> None:
    """In the field that compressed-tensors had before transformers knew it."""
    one = made("Qwen3", "int8")
    copy(one.folder, tmp_path)

    def flat(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v[:, 0] if k.endswith("_scale") else v for k, v in tensors.items()}

    rewrite(tmp_path, lambda tensors: {k: v.clone() for k, v in flat(tensors).items()})
    renamed = {"quantization_config": "compression_config"}
    change(tmp_path, lambda data: {renamed.get(k, k): v for k, v in data.items()})
    assert torch.equal(logits(tmp_path), logits(one.folder))


# What is refused, before anything is loaded.

Edit = Callable[[dict[str, Any]], dict[str, Any]]
Q = "model.layers.1.self_attn.q_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


def same(value: dict[str, Any]) -> dict[str, Any]:
    return value


def given(**changes: Any) -> Edit:
    """Changes of tensors, or of a config.json's quantization; None takes one away."""

    def edit(data: dict[str, Any]) -> dict[str, Any]:
        inner = data.get("quantization_config", data)
        for name, value in changes.items():
            inner[name] = value
            if value is None:
                del inner[name]
        return data

    return edit


def tensor(name: str, value: Any) -> Edit:
    """One tensor in another way; None takes it away."""
    return lambda tensors: given(**{name: value(tensors[name]) if value else None})(
        tensors
    )


def ignoring(name: str) -> Edit:
    """An INT8 config that leaves a module alone."""
    return lambda data: given(ignore=[name, "lm_head"])(data)


FAULTS: dict[str, tuple[str, str, Edit, Edit, type[Exception], str]] = {
    "no scale": (
        "Qwen3", "fp8", same, tensor(f"{Q}_scale_inv", None), CheckpointError,
        f"lacks '{Q}_scale_inv'",
    ),
    "no scale of a row": (
        "Llama", "int8", same, tensor(f"{Q}_scale", None), CheckpointError,
        f"lacks '{Q}_scale'",
    ),
    "too few scales": (
        "Qwen3", "fp8", same, tensor(f"{Q}_scale_inv", lambda x: x[:-1].clone()),
        CheckpointError, f"'{Q}_scale_inv' has shape [5, 2]; expected [6, 2]",
    ),
    "a flat scale of too few": (
        "Qwen3", "int8", same, tensor(f"{Q}_scale", lambda x: x.flatten()[1:]),
        CheckpointError, f"'{Q}_scale' has shape [767]; expected [768, 1]",
    ),
    "ordinary numbers": (
        "Qwen3", "fp8", same, tensor(Q, lambda x: x.float()), CheckpointError,
        f"'{Q}' is 'F32'; expected F8_E4M3",
    ),
    "another format's numbers": (
        "Qwen3", "int8", same,
        tensor(Q, lambda x: x.float().to(torch.float8_e4m3fn)), CheckpointError,
        f"'{Q}' is 'F8_E4M3'; expected I8",
    ),
    "scales of 8 bits": (
        "Qwen3", "int8", same, tensor(f"{Q}_scale", lambda x: x.to(torch.int8)),
        CheckpointError, f"'{Q}_scale' is 'I8'; expected BF16, F16, F32",
    ),
    "ordinary for the config": (
        "Qwen3", "fp8",
        given(modules_to_not_convert=["lm_head", "model.layers.0.self_attn"]), same,
        CheckpointError,
        "holds 'model.layers.0.self_attn.k_proj.weight_scale_inv'",
    ),
    "rounded in an ordinary model": (
        "Qwen3", "fp8", lambda data: data | {"quantization_config": None}, same,
        CheckpointError, "_scale_inv'",
    ),
    "parts in several formats": (
        "Qwen3", "int8", ignoring("model.layers.1.self_attn.k_proj"), same, ConfigError,
        "the format of model.layers.1.self_attn.k_proj.weight is 'ordinary numbers'; "
        f"expected that of {Q}, INT8",
    ),
    "a router": (
        "Qwen3-MoE", "int8", same,
        lambda tensors: tensors | {f"{ROUTER}_scale": torch.ones(5, 1)},
        CheckpointError, f"holds '{ROUTER}_scale' too",
    ),
    "a router's numbers": (
        "Qwen3-MoE", "int8", same, tensor(ROUTER, lambda x: x.char()),
        CheckpointError, f"'{ROUTER}' is 'I8'; expected BF16, F16, F32",
    ),
    "no method": (
        "Qwen3", "fp8", given(quant_method=None), same, ConfigError,
        "quantization_config.quant_method is None; expected one of 'fp8'",
    ),
    "another tile": (
        "Qwen3", "fp8", given(weight_block_size=[64, 64]), same, ConfigError,
        "quantization_config.weight_block_size is [64, 64]",
    ),
    "q alone": (
        "Qwen3", "mxfp4", ignoring("model.layers.1.self_attn.q_proj"), same,
        ConfigError, "the format of model.layers.1.self_attn.k_proj.weight is 'MXFP4'; "
        f"expected that of {Q}, ordinary numbers",
    ),
    "an expert alone": (
        "Mixtral", "mxfp4",
        ignoring("re:.*(moe.gate|experts.3.w3)$"), same, ConfigError,
        "the format of model.layers.0.block_sparse_moe.experts.3.w3.weight is 'ordin",
    ),
    "too few numbers": (
        "Qwen3", "mxfp4", same, tensor(f"{Q}_packed", lambda x: x[:, :-16].clone()),
        CheckpointError, f"'{Q}_packed' has shape [768, 112]; expected [768, 128]",
    ),
    "words of other columns": (
        "Qwen3", "int8", as_packed,
        lambda tensors: tensor(f"{Q}_shape", lambda x: x + 4)(pack(tensors)),
        CheckpointError, f"'{Q}_shape' is [772, 260]; expected 256 columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_contradicts_is_refused(fault: str, made, tmp_path: Path) -> None:
    name, form, edit, edit_tensors, error, words = FAULTS[fault]
    copy(made(name, form).folder, tmp_path)
    change(tmp_path, edit)
    rewrite(tmp_path, edit_tensors)
    with pytest.raises(error) as caught:
        LLM(tmp_path, device="cpu")
    assert str(caught.value).startswith(str(tmp_path))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_family_of_no_linear_layers(tmp_path: Path) -> None:
    """GPT-2's are stored the other way round, and its parts have other names."""
    write(tmp_path, case("GPT2").build())
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change(tmp_path, lambda data: data | {"quantization_config": config})
    with pytest.raises(ConfigError, match=r"the format of \S+ is 'FP8 in blocks'"):
        Checkpoint(tmp_path)
