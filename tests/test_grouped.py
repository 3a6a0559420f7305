"""AWQ, GPTQ and compressed-tensors in words, against transformers with the numbers.

Words are packed here as the formats define them, once more and number by number.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import change, put, rewrite, write
from test_formats_loaded import CASES, PROMPTS, errors, logits
from torch import Tensor

from simplellm import LLM
from simplellm.api.load import load_model
from simplellm.apps.info import describe
from simplellm.base.config import ConfigError
from simplellm.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    RandomCheckpoint,
)
from simplellm.checkpoint.sharding import Shard, ShardedSource
from simplellm.model.memory import weight_bytes

pytestmark = pytest.mark.usefixtures("quiet_transformers")

AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7  # the column that each place of a word has
IN_ORDER = range(8)


def words(values: Tensor, order: Any = IN_ORDER) -> Tensor:
    """int32 [..., N / 8]: of eight values, the one in ``order`` first lowest.

    Of four values, if that is how many there are in order.
    """
    count = len(order)
    found = torch.zeros(
        *values.shape[:-1], values.shape[-1] // count, dtype=torch.int64
    )
    for place, column in enumerate(order):
        found |= values.long()[..., column::count] << (32 // count * place)
    return found.where(found < 2**31, found - 2**32).int()


@dataclass
class Rounded:
    """A weight [out, in] rounded to ``bits`` in groups of inputs."""

    values: Tensor
    zeros: Tensor  # [out, groups]
    scales: Tensor
    index: Tensor  # the group of each input
    bits: int = 4

    @classmethod
    def of(
        cls, weight: Tensor, size: int, symmetric: bool, mixed: bool, bits: int = 4
    ) -> "Rounded":
        width, most = weight.shape[1], 2**bits - 1
        index = torch.arange(width) // size
        if mixed:  # as act-order leaves it
            index = index[torch.randperm(width, generator=torch.Generator())]
        low, high = (
            torch.stack([pick(weight[:, index == g]) for g in index.unique()], 1)
            for pick in (lambda x: x.amin(1), lambda x: x.amax(1))
        )
        scales = ((high - low) / most).half()
        zeros = (-low / scales).round().clamp(1, most).int()
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        values = (weight / scales[:, index]).round() + zeros[:, index]
        return cls(values.clamp(0, most).int(), zeros, scales, index, bits)

    def numbers(self) -> Tensor:
        steps = self.values - self.zeros[:, self.index]
        return steps * self.scales.float()[:, self.index]

    def awq(self, name: str) -> dict[str, Tensor]:
        stem = name.removesuffix("weight")
        return {
            stem + "qweight": words(self.values.T, AWQ_ORDER),
            stem + "qzeros": words(self.zeros.T, AWQ_ORDER),
            stem + "scales": self.scales.T.contiguous(),
        }

    def gptq(self, name: str, less: int = 1) -> dict[str, Tensor]:
        stem, order = name.removesuffix("weight"), range(32 // self.bits)
        return {
            stem + "qweight": words(self.values, order).T.contiguous(),
            stem + "qzeros": words(self.zeros.T - less, order),
            stem + "scales": self.scales.T.contiguous(),
            stem + "g_idx": self.index.int(),
        }

    def gptq_v2(self, name: str) -> dict[str, Tensor]:
        return self.gptq(name, 0)

    def compressed(self, name: str) -> dict[str, Tensor]:
        return {
            name + "_packed": words(self.values, range(32 // self.bits)),
            name + "_scale": self.scales.bfloat16(),
            name + "_shape": torch.tensor(self.values.shape),
        }

    def with_zeros(self, name: str) -> dict[str, Tensor]:
        zeros = words(self.zeros.T, range(32 // self.bits)).T.contiguous()
        return self.compressed(name) | {name + "_zero_point": zeros}

    def in_any_order(self, name: str) -> dict[str, Tensor]:
        return self.compressed(name) | {name + "_g_idx": self.index.int()}


def in_scheme(size: int | None, **changes: Any) -> dict[str, Any]:
    """As RedHatAI's w4a16 says it, but for ``changes`` of how weights are rounded."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "group_size": size,
        "strategy": "group" if size else "channel",
        "dynamic": False,
        "actorder": "weight",
        **changes,
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


@dataclass(frozen=True)
class Way:
    """A format: what packs a weight, what config.json says, and what rounds."""

    pack: Callable[[Rounded, str], dict[str, Tensor]]
    config: dict[str, Any]
    size: int
    symmetric: bool = False
    mixed: bool = False
    bits: int = 4


FOUR: dict[str, Any] = {"bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "version": "gemm", "zero_point": True, **FOUR}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": False, **FOUR}
WAYS = {
    "AWQ": Way(Rounded.awq, {**AWQ, "modules_to_not_convert": ["gate"]}, 32),
    "AWQ by rows": Way(Rounded.awq, {**AWQ, "group_size": -1}, 4096),
    "GPTQ": Way(Rounded.gptq, GPTQ, 32),
    "GPTQ act-order": Way(Rounded.gptq, {**GPTQ, "desc_act": True}, 32, mixed=True),
    "GPTQ 2": Way(Rounded.gptq_v2, {**GPTQ, "checkpoint_format": "gptq_v2"}, 32),
    "GPTQ 8 bits": Way(Rounded.gptq, {**GPTQ, "bits": 8}, 32, bits=8),
    "INT4": Way(Rounded.compressed, in_scheme(32), 32, symmetric=True),
    "INT4 by rows": Way(Rounded.compressed, in_scheme(None), 4096, symmetric=True),
    "INT4 asymmetric": Way(Rounded.with_zeros, in_scheme(32, symmetric=False), 32),
    "INT8": Way(Rounded.compressed, in_scheme(32, num_bits=8), 32, True, bits=8),
    "INT8 by rows, asymmetric": Way(
        Rounded.with_zeros,
        in_scheme(None, num_bits=8, symmetric=False, actorder=None),
        *(4096, False, False, 8),
    ),
    "INT4 act-order": Way(
        Rounded.in_any_order, in_scheme(32, actorder="group"), 32, True, True
    ),
}


def is_rounded(name: str, tensor: Tensor) -> bool:
    router = name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight"))
    return tensor.ndim == 2 and ".layers." in name and not router


def written(name: str, way: Way, folder: Path) -> Any:
    """Write a checkpoint of 4 bits; return transformers' model of its numbers."""
    model = CASES[name]().build()
    write(folder, model)
    state = model.state_dict()

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one, tensor in tensors.items():
            if not is_rounded(one, tensor):
                found[one] = tensor
                continue
            made = Rounded.of(tensor, way.size, way.symmetric, way.mixed, way.bits)
            if "config_groups" in way.config:  # whose scales are bfloat16 in the file
                made.scales = made.scales.bfloat16()
            put(state, one, made.numbers())
            found |= way.pack(made, one)
        return found

    rewrite(folder, rounded)
    change(folder, lambda data: data | {"quantization_config": way.config})
    model.load_state_dict(state)
    return model


# Each way for a dense model and a sparse one, in turn; all pairs are in make test-all.
PAIRS = [
    pytest.param(way, name, marks=() if (turn + place) % 2 else pytest.mark.exhaustive)
    for turn, way in enumerate(WAYS)
    for names in (("Llama", "Qwen2"), ("Qwen3-MoE", "Mixtral"))
    for place, name in enumerate(names)
]


@pytest.mark.parametrize(("way", "name"), PAIRS)
def test_logits_are_those_of_the_numbers(name: str, way: str, tmp_path: Path) -> None:
    before = CASES[name]().build()
    coarse = WAYS[way].bits == 4
    reference = written(name, WAYS[way], tmp_path)
    with torch.inference_mode():
        expected = reference(PROMPTS).logits[:, -1]
        other = before(PROMPTS).logits[:, -1]
    assert errors(other, expected).min() > (1e-2 if coarse else 1e-3)
    assert errors(logits(tmp_path), expected).max() < 1e-4


@pytest.mark.parametrize("way", ["AWQ", "GPTQ act-order", "INT4"])
def test_a_rank_has_its_part(way: str, tmp_path: Path) -> None:
    written("Qwen2", WAYS[way], tmp_path)
    source = Checkpoint(tmp_path)
    ranks = [ShardedSource(source, Shard(rank, 2), lambda x: x) for rank in range(2)]
    for ours, axis in (("layers.1.mlp.down.weight", 1), ("layers.0.attn.o.weight", 1)):
        parts: list[Any] = [rank[ours] for rank in ranks]
        assert torch.equal(torch.cat(parts, axis), source[ours])


@pytest.mark.parametrize("way", ["AWQ", "GPTQ", "INT4"])
def test_people_are_told_what_becomes_of_it(way: str, tmp_path: Path) -> None:
    written("Llama", WAYS[way], tmp_path)
    text = " ".join(" ".join(describe(str(tmp_path))).split())
    assert f"{way} become bfloat16 on a GPU, float16 or float32 on a CPU" in text
    source = Checkpoint(tmp_path)
    assert not source.config.formats
    numbers = sum(weight_bytes(source.config, 4).values())
    stored = sum(i.nbytes for ours in source.names() for i in source.stored(ours))
    assert stored < numbers / 2
    random = RandomCheckpoint(source.config, dtype=torch.float32)
    assert isinstance(random["layers.0.attn.o.weight"], Tensor)


def test_biases_of_zeros_are_no_biases(tmp_path: Path) -> None:
    """AutoGPTQ writes them for all linear layers, and the index lists them."""
    written("Qwen2", WAYS["GPTQ"], tmp_path)
    expected = logits(tmp_path)
    names = [f"model.layers.0.{n}.bias" for n in ("self_attn.o_proj", "mlp.up_proj")]
    zeros = {name: torch.zeros(256, dtype=torch.float16) for name in names}
    rewrite(tmp_path, lambda tensors: tensors | zeros)
    assert torch.equal(logits(tmp_path), expected)
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(tmp_path), expected)
    rewrite(tmp_path, lambda tensors: tensors | {names[1]: zeros[names[0]] + 1})
    with pytest.raises(CheckpointError, match=f"holds '{names[1]}' too"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("acting", [False, True])
def test_groups_in_order_need_no_list(acting: bool, tmp_path: Path) -> None:
    """Older files have one all the same."""
    way = replace(WAYS["GPTQ"], config={**GPTQ, "desc_act": acting})
    written("Qwen3-MoE", way, tmp_path)
    expected = logits(tmp_path)
    rewrite(tmp_path, lambda t: {n: t[n] for n in t if not n.endswith(".g_idx")})
    if acting:  # the order counts
        with pytest.raises(CheckpointError, match=r"lacks '.*\.g_idx'"):
            Checkpoint(tmp_path)
    else:
        assert torch.equal(logits(tmp_path), expected)


def test_modules_that_gptq_leaves_out(tmp_path: Path) -> None:
    """As GPTQModel names them, in "dynamic"."""
    dynamic: dict[str, Any] = {r"-:.*layers\.1\.mlp\..*": {}}
    way = replace(WAYS["GPTQ"], config={**GPTQ, "dynamic": dynamic})
    reference = written("Llama", way, tmp_path)
    state = reference.state_dict()
    part = "model.layers.1.mlp."

    def dense(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {n: t for n, t in tensors.items() if not n.startswith(part)}
        return kept | {n: t.clone() for n, t in state.items() if n.startswith(part)}

    rewrite(tmp_path, dense)
    with torch.inference_mode():
        expected = reference(PROMPTS).logits[:, -1]
    assert errors(logits(tmp_path), expected).max() < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_the_library_writes_the_same_words(bits: int) -> None:
    """Zero points too, which compressed-tensors packs along the other axis."""
    library = pytest.importorskip("compressed_tensors")
    config = in_scheme(32, num_bits=bits, symmetric=False, actorder=None)
    scheme = library.quantization.QuantizationConfig.model_validate(config)
    compressor = library.compressors.BaseCompressor.get_value_from_registry(
        "pack-quantized"
    )
    made = Rounded.of(torch.randn(40, 96), 32, False, False, bits)
    stored = compressor.compress(
        {
            "weight": made.numbers(),
            "weight_scale": made.scales.float(),
            "weight_zero_point": (made.zeros - 2 ** (bits - 1)).to(torch.int8),
        },
        scheme.config_groups["group_0"],
    )
    ours = made.with_zeros("weight")
    assert torch.equal(stored["weight_packed"], ours["weight_packed"])
    assert torch.equal(stored["weight_zero_point"], ours["weight_zero_point"])


def test_the_engine_continues(tmp_path: Path) -> None:
    reference = written("Llama", WAYS["AWQ"], tmp_path)
    ids = [5, 17, 33]
    with LLM(tmp_path, device="cpu", max_num_seqs=2, num_pages=8) as llm:
        found = llm.generate([ids], max_tokens=1, temperature=0).result()[0].token_ids
    with torch.inference_mode():
        assert found == [int(reference(torch.tensor([ids])).logits[0, -1].argmax())]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "8 bits": ({**AWQ, "bits": 8}, "quantization_config.bits is 8"),
    "another layout": ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
    "no zero points": ({**AWQ, "zero_point": False}, "zero_point is False"),
    "3 bits": ({**GPTQ, "bits": 3}, "bits is 3"),
    "groups of none": ({**GPTQ, "group_size": 0}, "group_size is 0"),
    "Marlin": (
        {**GPTQ, "checkpoint_format": "marlin"},
        "checkpoint_format is 'marlin'",
    ),
    "layers of their own": ({**GPTQ, "dynamic": {"+:x": {"bits": 8}}}, "dynamic is"),
    "a head": ({**GPTQ, "lm_head": True}, "lm_head is True"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_other_layouts_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    config, words = REFUSED[fault]
    write(tmp_path, CASES["Llama"]().build())
    change(tmp_path, lambda data: data | {"quantization_config": config})
    with pytest.raises(ConfigError, match=words):
        Checkpoint(tmp_path)


def test_a_group_without_scales_is_refused(tmp_path: Path) -> None:
    written("Llama", WAYS["GPTQ"], tmp_path)
    name = "model.layers.0.mlp.down_proj.g_idx"
    rewrite(tmp_path, lambda tensors: tensors | {name: tensors[name] + 1})
    with pytest.raises(
        ValueError, match="the group of an input is 20; expected 0 to 19"
    ):
        load_model(tmp_path, device="cpu")


def test_missing_zeros_are_missed(tmp_path: Path) -> None:
    written("Llama", WAYS["AWQ"], tmp_path)
    name = "model.layers.0.mlp.down_proj.qzeros"
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match=f"lacks '{name}'"):
        Checkpoint(tmp_path)
