"""The model against transformers' GptOssForCausalLM, its independent oracle."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, config_json, write_checkpoint
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from simplellm.attention import NoCache
from simplellm.checkpoint import CheckpointError
from simplellm.config import MODELS, ConfigError
from simplellm.model import (
    EMBEDDED,
    TORCH,
    Transformer,
    check_tokens,
    config_of,
    find_device,
    load_model,
    rms_norm,
)
from simplellm.moe import Experts
from simplellm.weights import MXFP4

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 16,
    "max_position_embeddings": 131072,
    "rope_parameters": YARN,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "small": {},
    "one kv head": {"num_key_value_heads": 1, "num_hidden_layers": 2},
    "as many kv heads": {"num_key_value_heads": 6, "head_dim": 16},
    "one expert a token": {"num_experts_per_tok": 1, "num_local_experts": 3},
    "every expert": {"num_experts_per_tok": 4, "num_local_experts": 4},
    "all full": {"layer_types": ["full_attention"] * 3},
    "plain rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "tied": {"tie_word_embeddings": True},
    "tight clamp": {"swiglu_limit": 0.5},
}


def save_random(folder: Path, seed: int = 0, **changes: Any) -> GptOssForCausalLM:
    """A transformers model with weights that leave no term at zero, saved dense."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif "embed" in name or "sinks" in name or "bias" in name:
                weight.normal_()
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def token_ids(count: int, vocab_size: int = 211, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    oracle = save_random(tmp_path, **VARIANTS[variant])
    tokens = token_ids(60)
    with torch.no_grad():
        theirs = oracle(tokens[None]).logits[0]
    ours = load_model(tmp_path, device="cpu").logits(tokens)
    assert ours.dtype == torch.float32 and ours.shape == (60, 211)
    assert relative(ours, theirs) < 1e-5
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_positions_beyond_the_original_context(tmp_path: Path) -> None:
    oracle = save_random(tmp_path, num_hidden_layers=2)
    model = load_model(tmp_path, device="cpu")
    tokens = token_ids(40)
    positions = torch.arange(40) + 5000
    with torch.no_grad():
        theirs = oracle(tokens[None], position_ids=positions[None]).logits[0]
        ours = model.lm_head(model(tokens, positions, NoCache([40])))
    assert relative(ours, theirs) < 1e-5


def test_packed_sequences_do_not_see_each_other(tmp_path: Path) -> None:
    save_random(tmp_path)
    model = load_model(tmp_path, device="cpu")
    sequences = [token_ids(n, seed=n) for n in (5, 1, 40)]
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    with torch.no_grad():
        packed = model(torch.cat(sequences), positions, NoCache([5, 1, 40]))
        packed = model.lm_head(packed).split([5, 1, 40])
    for sequence, together in zip(sequences, packed, strict=True):
        assert relative(together, model.logits(sequence)) < 1e-5


def test_a_token_cannot_see_the_future(tmp_path: Path) -> None:
    save_random(tmp_path)
    model = load_model(tmp_path, device="cpu")
    tokens = token_ids(30)
    changed = tokens.clone()
    changed[20:] = (changed[20:] + 1) % 211
    before, after = model.logits(tokens), model.logits(changed)
    assert relative(after[:20], before[:20]) < 1e-6
    assert relative(after[20:], before[20:]) > 1e-2


def test_embedded_model_equals_transformers() -> None:
    oracle = GptOssForCausalLM.from_pretrained(
        EMBEDDED, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    oracle = oracle.float().eval()  # some versions leave experts in bfloat16
    model = load_model(device="cpu")
    tokens = token_ids(200, model.config.vocab_size)
    with torch.no_grad():
        theirs = oracle(tokens[None]).logits[0]
        ours = model.logits(tokens)
    assert relative(ours, theirs) < 1e-4
    # Greedy continuations are the same, too.
    ours_tokens = tokens[:20].tolist()
    for _ in range(12):
        ours_tokens.append(int(model.logits(ours_tokens)[-1].argmax()))
    theirs_tokens = oracle.generate(
        tokens[None, :20], max_new_tokens=12, do_sample=False, eos_token_id=-1
    )
    assert ours_tokens == theirs_tokens[0].tolist()


def test_experts_stay_packed() -> None:
    model = load_model(device="cpu")
    for layer in model.layers:
        assert isinstance(layer.mlp.experts.gate_up, MXFP4)
        assert isinstance(layer.mlp.experts.down, MXFP4)


def test_bfloat16_is_close_away_from_routing_ties(tmp_path: Path) -> None:
    oracle = save_random(tmp_path)
    tokens = token_ids(60)
    with torch.no_grad():
        theirs = oracle(tokens[None]).logits[0]
    model = load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert model.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.float32
    ours = model.logits(tokens)
    assert ours.dtype == torch.float32
    # A router's near tie flips an expert and moves that position's logits by far:
    # the median position tells about the arithmetic.
    per_position = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert per_position.median() < 0.05


def test_float64_tells_that_float32_is_exact_enough(tmp_path: Path) -> None:
    save_random(tmp_path)
    tokens = token_ids(60)
    exact = load_model(tmp_path, dtype=torch.float64, device="cpu").logits(tokens)
    assert relative(load_model(tmp_path, device="cpu").logits(tokens), exact) < 1e-4


def test_rms_norm_multiplies_before_the_cast() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 1.5, 96)
    exact = x.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.equal(rms_norm(x, weight, 1e-5), exact.float().bfloat16())


def test_random_weights_in_a_known_shape() -> None:
    config = replace(
        MODELS["gpt-oss-20b"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=("sliding_attention", "full_attention"),
        num_local_experts=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", config)
        one, two, other = (
            load_model("tiny", device="cpu", random_weights=True, seed=seed)
            for seed in (0, 0, 1)
        )
    tokens = token_ids(10, 64)
    assert isinstance(one.layers[0].mlp.experts.gate_up, MXFP4)
    assert one.logits(tokens).isfinite().all()
    assert torch.equal(one.logits(tokens), two.logits(tokens))
    assert not torch.allclose(one.logits(tokens), other.logits(tokens))


def test_a_tied_head_is_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept once, although a dtype other than that on disk needs a copy."""
    write_checkpoint(tmp_path, replace(TINY, tie_word_embeddings=True))
    monkeypatch.setattr("simplellm.model.BIG", 0)  # shows the progress bar
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.data_ptr()
    taken, total = re.findall(r"(\d+)/(\d+)", capsys.readouterr().err)[-1]
    assert taken == total


def test_random_weights_need_a_name_or_a_folder() -> None:
    with pytest.raises(ConfigError):
        load_model("gpt-oss-7b", random_weights=True, device="cpu")


def test_a_backend_replaces_functions() -> None:
    calls: list[str] = []

    def counting_norm(x: Any, weight: Any, eps: float) -> Any:
        calls.append("norm")
        return rms_norm(x, weight, eps)

    def prepare(weights: Experts) -> Experts:
        calls.append("prepare")
        return replace(weights, gate_up=weights.gate_up, limit=0.0)

    plain = load_model(device="cpu")
    counted = load_model(
        device="cpu", backend=replace(TORCH, norm=counting_norm, prepare=prepare)
    )
    layers = plain.config.num_hidden_layers
    assert calls == ["prepare"] * layers
    logits = counted.logits([1, 2, 3])
    assert calls.count("norm") == 2 * layers + 1
    assert not torch.allclose(logits, plain.logits([1, 2, 3]))


def test_nothing_asks_for_gradients_and_hooks_work() -> None:
    model = load_model(device="cpu")
    assert not any(p.requires_grad for p in model.parameters())
    seen = []
    hook = model.layers[2].register_forward_hook(lambda *args: seen.append(args[2]))
    model.logits([1, 2, 3])
    hook.remove()
    assert seen[0].shape == (3, model.config.hidden_size)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "expected [T], T > 0"),
        ([[1, 2]], "expected [T], T > 0"),
        ([1.5], "expected integers"),
        ([-1, 4], "token ids run from -1 to 4; expected 0 to"),
        ([10**6], "token ids run from"),
    ],
)
def test_bad_tokens_are_named(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_model(device="cpu").logits(tokens)
    assert message in str(error.value)


def test_too_many_tokens_are_named() -> None:
    config = replace(MODELS["gpt-oss-20b"], max_position_embeddings=8)
    with pytest.raises(ValueError, match="9 tokens; expected at most 8"):
        check_tokens(torch.zeros(9, dtype=torch.int64), config)


def test_a_loaded_model_cannot_be_moved_or_cast() -> None:
    model: Transformer = load_model(device="cpu")
    with pytest.raises(RuntimeError, match=r"given to load_model\(\)"):
        model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; expected one of"):
        load_model(dtype=torch.int8)
    with pytest.raises(ValueError, match=r"dtype is torch\.float8_e4m3fn; expect"):
        load_model(dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"dtype is 'float32'; expected a torch\.d"):
        load_model(dtype="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", [False, True])
def test_the_device_is_the_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert find_device(None) == torch.device("cuda" if gpu else "cpu")
    assert find_device("cpu") == find_device(torch.device("cpu")) == torch.device("cpu")
    if gpu:
        assert find_device("cuda:0") == torch.device("cuda:0")
        return
    with pytest.raises(ValueError, match="PyTorch finds no GPU; expected cpu"):
        find_device("cuda:0")
    with pytest.raises(ValueError, match="device is cuda, but"):
        load_model(device="cuda")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:"])
def test_a_name_of_no_device_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{device}'; expected a device's"):
        find_device(device)


def test_a_config_is_refused_as_its_model_is(tmp_path: Path) -> None:
    pickle, empty = tmp_path / "model.pt", tmp_path / "empty"
    pickle.touch()
    empty.mkdir()
    for path, fault in {
        tmp_path / "absent": "does not exist; expected a checkpoint folder",
        pickle: "is a pickle file, which runs code when loaded",
        empty: "is not a checkpoint, it holds no weights",
    }.items():
        for load in (config_of, load_model):
            with pytest.raises(CheckpointError, match=fault):
                load(path)
    with pytest.raises(ConfigError, match=r"model\.pt is neither a checkpoint folder"):
        config_of(pickle, random_weights=True)
    (empty / "config.json").write_text(json.dumps(config_json(TINY)))
    assert config_of(empty, random_weights=True) == TINY  # it needs no weights


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same_logits() -> None:
    model = load_model(device="cuda", dtype=torch.float32)
    assert load_model(device="cuda").dtype == torch.bfloat16
    tokens = token_ids(200, model.config.vocab_size)
    ours = model.logits(tokens).cpu()
    assert relative(ours, load_model(device="cpu").logits(tokens)) < 1e-4


def test_a_seed_without_random_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="seed is 1; expected None without random_wei"):
        load_model(device="cpu", seed=1)
