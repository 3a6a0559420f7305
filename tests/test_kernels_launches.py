"""Every launch of a forward pass hands a kernel what it asks for, without a GPU.

Nothing is computed: what starts a kernel is replaced, and its parameters are held
against what it was given.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")
from simplellm.api import choose_operations
from simplellm.base.config import EngineConfig, ModelConfig
from simplellm.checkpoint.checkpoint import RandomCheckpoint
from simplellm.checkpoint.families import FAMILIES
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B
from simplellm.checkpoint.formats import SCHEMES, SQUARES, formats, read_quantization
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.engine.graphs import MIXED_SIZES, CaptureShape, bucket_sizes
from simplellm.engine.page_manager import PageManager
from simplellm.engine.runner import Runner
from simplellm.engine.warmup import (
    DRAWS,
    dummy_run,
    dummy_run_experts,
    dummy_sampler_run,
    expert_sizes,
    one_of_each,
    prompt_lengths,
)
from simplellm.model.build import build
from simplellm.model.kernels import decode, fragments, grouped, routing
from simplellm.model.kernels import experts as kernels
from simplellm.model.kernels.experts import Tiling
from simplellm.model.kernels.fragments import Fragments
from simplellm.model.kernels.launch import Launcher
from simplellm.model.kernels.triton_ops import triton_ops
from simplellm.model.kv_pool import KVPool
from simplellm.model.ops import PLAIN

CPU = torch.device("cpu")
GPT_OSS = replace(
    GPT_OSS_20B,
    num_hidden_layers=2,
    layer_types=GPT_OSS_20B.layer_types[:2],
    num_local_experts=4,
    vocab_size=512,
    max_position_embeddings=4096,
    eos_token_ids=(),
)


def small(model_type: str, quantized: bool = False) -> ModelConfig:
    """Another family's config: two layers, and few numbers in each."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 4096}
    config = FAMILIES[model_type].config({"model_type": model_type, **sizes})
    if not quantized:
        return config
    square = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    stored = read_quantization({"quant_method": "fp8", **square})
    return replace(config, formats=formats(config, stored))


CONFIGS = {
    "gpt-oss": GPT_OSS,
    "Qwen3": small("qwen3"),
    "Qwen3 in FP8": small("qwen3", quantized=True),
    "Gemma 3": small("gemma3_text"),
    "GPT-2": small("gpt2"),
}
# Kernels that only some of them need.
OWN = {
    "gpt-oss": {"experts_kernel"},
    "Qwen3": {"activation_kernel"},
    "Qwen3 in FP8": {
        "activation_kernel",
        "round_kernel",
    },
    "Gemma 3": {"activation_kernel"},
    "GPT-2": {"activation_kernel"},
}


def unpacked(weight: MXFP4, interleaved: bool) -> Fragments:
    """Room for it, in place of seconds spent on repacking numbers that nobody reads."""
    return Fragments.empty(tuple(weight.shape), interleaved, CPU)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def start(launcher: Launcher, grid: tuple[int, int, int], *args: Any) -> Any:
        kernel, options = launcher.kernel, launcher.options
        ordinary = [p.name for p in kernel.params if not p.is_constexpr]
        constants = {p.name for p in kernel.params if p.is_constexpr} - {"PDL"}
        name = kernel.fn.__name__
        assert len(args) == len(ordinary), f"{name}: {len(args)} for {ordinary}"
        assert constants <= options.keys(), f"{name}: {constants - options.keys()}"
        assert len(grid) == 3 and min(grid) > 0, name
        names.append(name)
        return SimpleNamespace(function=0)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    monkeypatch.setattr(Launcher, "__call__", start)
    # What no kernel wrote isn't worth a product: bfloat16's take minutes below AVX-512.
    monkeypatch.setattr(functional, "linear", product)
    monkeypatch.setattr(decode, "set_carveout", lambda *arguments: None)
    monkeypatch.setattr(fragments, "repack", unpacked)
    return names


# Qwen3-MoE, whose layers differ in all that they may.
MOE = FAMILIES["qwen3_moe"].config(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 256,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "mlp_only_layers": [0, 4],
        "max_position_embeddings": 4096,
    }
)
INT8 = SCHEMES["int", 8, "channel"]
NUMBERS = {2: SQUARES, 3: INT8, 5: SQUARES}
MOE = replace(
    MOE,
    formats={
        f"layers.{layer}.{part}": form
        for layer, form in NUMBERS.items()
        for part in ("attn.qkv.weight", "experts.gate_up", "experts.down")
    },
)


def rehearsed(config: ModelConfig, batch_invariant: bool, fp8: bool = False) -> None:
    """Decodes and prompts of the sizes that choose among kernels."""
    options = {"batch_invariant": batch_invariant, "fp8": fp8}
    ops = triton_ops(config, max_num_seqs=64, device=CPU, **options)
    source = RandomCheckpoint(config, dtype=torch.bfloat16)
    model = build(config, source.__getitem__, ops)
    pool = KVPool(config, 4, 64, torch.bfloat16, CPU)
    manager = PageManager(4, 64, window=config.windows[-1])
    runner = Runner(model, pool, manager, EngineConfig().resolved("cpu"), 4096)
    for tokens in (1, 2, 8, 64):
        dummy_run(runner, CaptureShape(tokens, tokens), ops)
    for tokens in (2, 64, 300, 2048):
        dummy_run(runner, CaptureShape(tokens, 0, 1), ops)
    for tokens in MIXED_SIZES:
        dummy_run(runner, CaptureShape.mixed(tokens, 64), ops)
    for tokens in (64, 2048):
        dummy_run_experts(runner, tokens, ops)
    for params in DRAWS:
        dummy_sampler_run(runner, params, ops)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_kernels_get_what_they_ask_for(
    launched: list[str], batch_invariant: bool, name: str
) -> None:
    rehearsed(CONFIGS[name], batch_invariant)
    seen = set(launched)
    assert {"prefill_kernel", "dot_kernel", "draw_kernel"} <= seen
    assert {"tally_kernel", "pick_kernel", "penalize_kernel"} <= seen
    assert seen >= OWN[name]
    assert batch_invariant or "decode_kernel" in seen
    assert batch_invariant or name != "gpt-oss" or "experts_one_kernel" in seen


def test_experts_in_fp8_get_what_they_ask_for(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine's operations that were asked for it."""
    rehearsed(GPT_OSS, False, fp8=True)
    assert {"round_kernel", "experts_kernel", "experts_one_kernel"} <= set(launched)

    config = EngineConfig(moe_activation_dtype="fp8", attention_backend="triton_attn")
    asked = GPT_OSS, config.resolved("cpu"), torch.bfloat16, CPU
    monkeypatch.setattr(choose_operations, "warm_up", lambda ops, *others: ops)
    ops: Any = choose_operations.fused_operations(*asked)
    assert ops.experts.keywords["fp8"] and ops.prepare.keywords["fp8"]
    broken = replace(ops, experts=PLAIN.experts)
    monkeypatch.setattr(choose_operations, "warm_up", lambda ops, *others: broken)
    with pytest.raises(ValueError, match=r"fp8'.*the experts do not compile"):
        choose_operations.fused_operations(*asked)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_other_experts_get_what_they_ask_for(
    launched: list[str], batch_invariant: bool
) -> None:
    rehearsed(one_of_each(MOE), batch_invariant)
    assert {"grouped_kernel", "round_kernel", "top_k_kernel"} <= set(launched)
    assert batch_invariant != ("few_kernel" in launched)
    assert not {name for name in launched if name.startswith("experts")}


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("budget", [512, 2048, 8192, 32768])
def test_a_step_needs_no_tiling_that_was_not_compiled(
    monkeypatch: pytest.MonkeyPatch, budget: int, fp8: bool, experts: int
) -> None:
    monkeypatch.setattr(kernels, "decodes_ahead", lambda: True)

    def tiling(tokens: int) -> Tiling:
        rounded = fp8 and tokens * 4 > kernels.FP8_PAIRS * experts
        return kernels.tilings.__wrapped__(tokens, experts, 4, rounded)[0]

    sizes = [*prompt_lengths(budget), *bucket_sizes(256)]
    sizes += [size for size in MIXED_SIZES if size <= budget]
    compiled = {tiling(size) for size in sizes}
    for tokens in range(5, budget + 1):
        assert tiling(tokens) in compiled, tokens


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [2048, 8192, 32768])
@pytest.mark.parametrize(
    ("model", "experts", "top_k"),
    [
        *(("gpt-oss", experts, 4) for experts in (32, 128)),
        *(("gpt-oss in FP8", experts, 4) for experts in (32, 128)),
        *(("others", *sizes) for sizes in ((8, 2), (60, 4), (64, 6), (128, 8))),
    ],
)
def test_nor_another_way_to_sort(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    experts: int,
    top_k: int,
    budget: int,
    ranks: int,
) -> None:
    """Smaller steps are filled up to sizes that are captured."""
    monkeypatch.setattr(kernels, "decodes_ahead", lambda: True)

    def ways(tokens: int) -> Any:
        sizes = tokens, experts, top_k
        fp8 = model.endswith("FP8") and tokens * top_k > kernels.FP8_PAIRS * experts
        block = grouped.choose_grouping.__wrapped__(*sizes).tokens
        if model != "others":
            block = kernels.tilings.__wrapped__(*sizes, fp8)[0].tokens
        held = experts // ranks
        sort = tokens * top_k, top_k, held, block, held < experts
        return routing.sort_plan.__wrapped__(*sort)[2:]

    compiled = {ways(size) for size in expert_sizes(ranks * budget)}
    for tokens in range(MIXED_SIZES[-1] + 1, budget + 1):
        assert ways(ranks * tokens) in compiled, tokens


def test_a_stand_in_has_a_layer_of_each_kind() -> None:
    """Of those with a window and without, with experts, and with other formats."""
    small = one_of_each(MOE)
    assert small.num_hidden_layers == 4  # dense, numbers, FP8, INT8
    assert small.dense_layers == (0,)
    assert small.formats == {
        name.replace(f"layers.{layer}", f"layers.{place}"): form
        for layer, place in ((2, 2), (3, 3))
        for name, form in MOE.formats.items()
        if name.startswith(f"layers.{layer}.")
    }
    assert one_of_each(small) == small
    assert one_of_each(GPT_OSS_20B).layer_types == GPT_OSS_20B.layer_types[:2]
