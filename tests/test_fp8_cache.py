"""Keys and values in FP8, against a reference that rounds them by itself."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from recompute import Recompute
from safetensors.torch import save_file
from stepping import Stepper
from test_equivalence import run_case
from torch import Tensor

from simplellm import LLM, EngineConfig, SamplingParams, load_model
from simplellm.api.choose_operations import choose_operations
from simplellm.api.load import read_weights
from simplellm.base.config import LAYER_TYPES
from simplellm.checkpoint.checkpoint import Checkpoint
from simplellm.checkpoint.scaled import Scaled
from simplellm.model.build import scaled_output
from simplellm.model.feed_forward import linear
from simplellm.model.fp8_cache import MixedPool, kv_scales, make_pool
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN, Ops

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
SLIDING, FULL = LAYER_TYPES
# No number of layers of a kind divides the other.
KINDS = SLIDING, FULL, SLIDING, FULL, SLIDING
CONFIG = replace(TINY, num_hidden_layers=5, layer_types=KINDS)
SCALES = [(9.0, 9.0), (0.25, 0.11), (9.0, 9.0), (0.07, 0.5), (9.0, 9.0)]
ONES = [(1.0, 1.0)] * 5
PROMPT = [*range(3, 97, 5), *range(1, 97, 7)]


def rounded_by_hand(x: Tensor, scale: float) -> Tensor:
    """The nearest of the numbers that e4m3 has, times a scale."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    every = every[~every.isnan()].unique() * scale
    return every[(x.float()[..., None] - every).abs().argmin(-1)]


def rounding(model: Model, scales: Sequence[tuple[float, float]]) -> Ops:
    """The plain operations, which round what full layers write to their cache."""
    config, layers = model.config, enumerate(model.layers)
    full = {
        id(layer.attn): scales[index]
        for index, layer in layers
        if config.window(index) is None
    }

    def rope_and_cache(
        qkv: Any, attn: Any, positions: Any, keys: Any, values: Any, slots: Any
    ) -> Tensor:
        q = PLAIN.rope_and_cache(qkv, attn, positions, keys, values, slots)
        pair = full.get(id(attn), ())
        for pages, scale in zip((keys, values), pair, strict=False):
            rows, written = pages.flatten(0, 1), slots[slots >= 0].long()
            rows[written] = rounded_by_hand(rows[written], scale)
        return q

    return replace(PLAIN, rope_and_cache=rope_and_cache)


def reference(
    folder: Path, scales: Sequence[tuple[float, float]] | None = None
) -> Model:
    model = load_model(folder, device="cpu")
    scales = scales or [(1.0, 1.0)] * model.config.num_hidden_layers
    return replace(model, ops=rounding(model, scales))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fp8"), CONFIG, quantized=False)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("scales", [ONES, SCALES], ids=["ones", "scales"])
@pytest.mark.parametrize("prefill", [0, 20])
def test_logits_are_those_of_rounded_keys_and_values(
    folder: Path, scales: list[tuple[float, float]], prefill: int
) -> None:
    """Written by chunks or token by token, and read in either way."""
    source = Checkpoint(folder)
    model = read_weights(source, torch.float32, CPU, PLAIN, scales=scales)
    stepper = Stepper(model, kv_cache_dtype="fp8")
    found = stepper.forward(0, PROMPT, prefill)
    expected = reference(folder, scales).logits(PROMPT)[-len(found) :]
    exact = load_model(folder, device="cpu").logits(PROMPT)[-len(found) :]
    # A number between two of FP8 may go to either; the rounding itself is far larger.
    assert relative(found, expected) < 0.1 * relative(exact, expected)
    assert relative(exact, expected) > 1e-3


def test_any_schedule_gives_the_tokens_of_a_request_alone(folder: Path) -> None:
    """Shared pages, copies, evictions and preemptions are as in any other cache."""
    model, alone = load_model(folder, device="cpu"), Recompute(reference(folder))
    counts: Counter[str] = Counter()
    for seed in range(5, 8):
        counts += run_case(model, alone, seed, kv_cache_dtype="fp8")
    assert min(counts[what] for what in ("hits", "evictions", "shared")) > 0, counts
    assert counts["preemptions"] > 0, counts


def test_the_embedded_model_says_nearly_the_same() -> None:
    """The divergence of its next tokens is small, along an answer of its own."""
    greedy = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with LLM(device="cpu") as llm:
        prompt = llm.tokenizer.encode("How many r are in strawberry?")
        (answer,) = llm.generate([prompt], greedy).result()
    tokens = [*prompt, *answer.token_ids]
    model = load_model(device="cpu")
    found = Stepper(model, page_size=16, kv_cache_dtype="fp8").forward(0, tokens, 9)
    exact = model.logits(tokens)[-len(found) :].log_softmax(-1)
    found = found.log_softmax(-1)
    divergence = (exact.exp() * (exact - found)).sum(-1)
    assert 0 < divergence.mean() < 5e-3
    assert (exact.argmax(-1) == found.argmax(-1)).float().mean() > 0.95


def test_an_engine_has_more_pages_in_the_same_room() -> None:
    found = {}
    for kind in ("auto", "fp8"):
        config = EngineConfig(kv_cache_dtype=kind, cache_bytes=2**24)
        with LLM(config=config, device="cpu") as llm:
            found[kind] = llm.engine_core.scheduler.manager.max_tokens
            text = llm.generate("What is 47 + 85?").result()[0].text
            assert "132" in text
    assert found["fp8"] > 1.5 * found["auto"]


# The pool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kinds", ["sfsfs", "fs", "ssff", "fffs", "fsssss"])
def test_layers_of_a_group_share_no_bytes(kinds: str, dtype: torch.dtype) -> None:
    """And layers of different ones do: a page belongs to one group at a time."""
    types = tuple({"f": FULL, "s": SLIDING}[kind] for kind in kinds)
    config = replace(TINY, num_hidden_layers=len(kinds), layer_types=types)
    pool = MixedPool(config, 6, 4, dtype, CPU)
    assert pool.windows[0] is None
    assert set(pool.windows[1:]) == {config.sliding_window}
    for group in range(len(pool.windows)):
        mine = [layer for layer, found in enumerate(pool.groups) if found == group]
        rows = [x for n in mine for x in (pool.keys[n], pool.values[n])]
        for number, tensor in enumerate(rows):
            assert tensor.shape == (6, 4, 2, 16)
            assert tensor.dtype == (dtype if group else FP8)
            tensor.copy_(torch.full(tensor.shape, number + 1.0))
        for number, tensor in enumerate(rows):
            assert (tensor.float() == number + 1).all()
    # Page 2 of any group is page 2 of all others.
    pool.memory.zero_()
    for tensor in (*pool.keys, *pool.values):
        tensor[2] = torch.ones(4, 2, 16).to(tensor.dtype)
    assert not pool.memory[[0, 1, 3, 4, 5]].any()
    pool.copy([(2, 4), (0, 2), (4, 5)])
    for tensor in (*pool.keys, *pool.values):
        filled = [bool(page.float().any()) for page in tensor]
        assert filled == [False, False, False, False, True, True]


def test_a_model_without_a_window_has_one_kind_of_pages() -> None:
    config = replace(TINY, layer_types=(FULL, FULL))
    engine = EngineConfig(kv_cache_dtype="fp8").resolved("cpu")
    pool = make_pool(config, engine, 3, torch.bfloat16, CPU)
    assert type(pool) is KVPool
    assert pool.memory.dtype == FP8
    assert pool.keys[1].is_contiguous()


# Scales


def test_scales_are_found_by_all_their_names(tmp_path: Path) -> None:
    names = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25], dtype=torch.bfloat16),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor([[2.0]]),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor([3.0]),
        "model.layers.2.self_attn.q_scale": torch.tensor([7.0]),
        "model.layers.2.self_attn.k_proj.weight_scale": torch.ones(4),
        "model.layers.5.self_attn.k_scale": torch.tensor([7.0]),  # of no layer
    }
    file = tmp_path / "model.safetensors"
    save_file(names, file)
    found = kv_scales([file, tmp_path / "other.gguf"], 4)
    assert found == [(0.5, 0.25), (2.0, 3.0), (1.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("wrong", [[0.0], [-1.0], [torch.nan], [torch.inf], [1.0, 2.0]])
def test_a_wrong_scale_is_refused(wrong: list[float], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"model.layers.0.self_attn.k_scale": torch.tensor(wrong)}, file)
    with pytest.raises(ValueError, match="one number above 0"):
        kv_scales([file], 1)


def test_a_scale_of_values_goes_into_the_output_projection() -> None:
    x, weight = torch.randn(3, 256), torch.randn(128, 256)
    stored = Scaled.of(weight, (128, 128), FP8, inputs=False)
    for plain in (weight, stored):
        found, scale = scaled_output(plain, 0.3)
        assert scale == 0.3
        torch.testing.assert_close(linear(x, found), linear(x, plain) * 0.3)
    assert scaled_output(weight, 1.0) == (weight, 1.0)


# What is refused


def test_a_gpu_without_e4m3_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = EngineConfig(kv_cache_dtype="fp8", operations="plain")
    where = torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"'auto' on a GPU of .* \(8, 0\), below"):
        choose_operations(config, Checkpoint(folder), torch.bfloat16, where)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int4'"):
        EngineConfig(kv_cache_dtype="int4")  # type: ignore[arg-type]
