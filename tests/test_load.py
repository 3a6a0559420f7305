"""From a folder to an LLM: what is found there, what is chosen, what is refused."""

import json
import logging
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, config_json, write_checkpoint
from models import CONFIG
from safetensors.torch import load_file, save_file

from simplellm import (
    LLM,
    CheckpointError,
    ConfigError,
    EngineConfig,
    SamplingParams,
    load_model,
)
from simplellm.api.load import load
from simplellm.base.config import LAYER_TYPES
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B, MODELS
from simplellm.checkpoint.folder import recommended
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.model import memory
from simplellm.model.machine import find_device
from simplellm.model.ops_numpy import UNPACKED_BYTES, is_small

# The machine


@pytest.mark.parametrize("gpu", [False, True])
def test_the_device_is_the_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cpu") == find_device(torch.device("cpu")) == torch.device("cpu")
    for name in ("meta", "xla", "mps", "cuda:9"):
        wanted = r"one of ('cpu', 'cuda'|the 2 GPUs: up to cuda:1)|no GPU"
        with pytest.raises(ValueError, match=wanted):
            find_device(name)
    if gpu:
        assert find_device(None) == find_device("cuda") == torch.device("cuda:1")
        assert find_device("cuda:0") == torch.device("cuda:0")
        return
    assert find_device(None) == torch.device("cpu")
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match="expected cpu: PyTorch finds no GPU"):
            find_device(name)
        with pytest.raises(ValueError, match=f"device is '{name}'; expected cpu"):
            load_model(device=name)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:"])
def test_a_name_of_no_device_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{device}'; expected a device's"):
        find_device(device)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int8, r"dtype is torch\.int8; expected one of"),
        (torch.float8_e4m3fn, r"dtype is torch\.float8_e4m3fn; expected one of"),
        (32, r"dtype is int; expected a torch\.dtype"),
    ],
)
def test_a_dtype_that_no_model_has_is_refused(dtype: Any, message: str) -> None:
    for call in (load_model, LLM):
        with pytest.raises((TypeError, ValueError), match=message):
            call(dtype=dtype, device="cpu")


def test_small_models_are_unpacked_on_a_cpu(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "simplellm")
    how = []
    for options in (
        {},
        {"dtype": torch.bfloat16},
        {"config": EngineConfig(operations="plain")},
    ):
        with LLM(folder, device="cpu", **options) as llm:
            how.append((llm.model.ops.name, llm.model.dtype))
            assert llm.backend_reason in caplog.messages[-1]
    plain, bfloat16 = ("PyTorch", torch.float32), ("CPU", torch.bfloat16)
    assert how == [("NumPy", torch.float32), bfloat16, plain]
    assert len(caplog.messages) == 3


def test_what_is_small_enough_to_be_unpacked() -> None:
    # 8 layers of 32 experts with 3 * 1024 * 1024 / 3 weights of 4 bytes: 1 GiB.
    config = replace(
        TINY,
        num_hidden_layers=8,
        layer_types=LAYER_TYPES * 4,
        num_local_experts=32,
        intermediate_size=1024,
        hidden_size=1024 // 3,
    )
    nbytes = 8 * 32 * 3 * 1024 * (1024 // 3) * 4
    assert UNPACKED_BYTES - 2**22 < nbytes <= UNPACKED_BYTES
    assert is_small(config) and is_small(TINY) and not is_small(GPT_OSS_20B)
    assert not is_small(replace(config, hidden_size=1024 // 3 + 1))


# The weights


def test_random_weights_in_a_known_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", CONFIG)
    one, two, other = (
        load_model("tiny", device="cpu", random_weights=True, seed=seed)
        for seed in (0, 0, 1)
    )
    tokens = list(range(10))
    assert isinstance(one.layers[0].mlp.gate_up, MXFP4)
    assert one.logits(tokens).isfinite().all()
    assert torch.equal(one.logits(tokens), two.logits(tokens))
    assert not torch.allclose(one.logits(tokens), other.logits(tokens))


def test_random_weights_take_token_ids_without_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS, "tiny", CONFIG)
    with LLM("tiny", random_weights=True, device="cpu") as random:
        output = random.generate([1, 2, 3], max_tokens=4, ignore_eos=True).result()[0]
        assert len(output.token_ids) == 4 and output.text == ""
        for refused in (
            lambda: random.generate("text"),
            lambda: random.generate([1], stop="x"),
            lambda: random.chat([{"role": "user", "content": "x"}]),
        ):
            with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
                refused()


def test_a_tied_head_is_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept once, although a dtype other than that on disk needs a copy."""
    write_checkpoint(tmp_path, replace(TINY, tie_word_embeddings=True))
    monkeypatch.setattr("simplellm.api.load.BIG", 0)  # shows the progress bar
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert model.lm_head.data_ptr() == model.embed_tokens.data_ptr()
    taken, total = re.findall(r"(\d+)/(\d+)", capsys.readouterr().err)[-1]
    assert taken == total


def test_norms_stay_exact(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16, device="cpu")
    layer = model.layers[0]
    for norm in (model.norm, layer.attn_norm, layer.mlp_norm):
        assert norm.dtype == torch.float32
    assert model.dtype == layer.attn.qkv.dtype == torch.bfloat16
    assert model.logits([1, 2, 3]).dtype == torch.float32


def test_the_config_alone_is_enough_for_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(TINY)))
    model = load_model(tmp_path, device="cpu", random_weights=True)
    assert model.config == TINY


@pytest.mark.parametrize("call", [load_model, LLM])
def test_what_cannot_be_loaded_says_so(call: Any, tmp_path: Path) -> None:
    pickle, empty = tmp_path / "model.pt", tmp_path / "empty"
    pickle.touch()
    empty.mkdir()
    (adapter := tmp_path / "adapter").mkdir()
    said = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    for path, fault in {
        tmp_path / "absent": "does not exist; expected a checkpoint folder",
        pickle: "is one of the pickle files, which run code when loaded",
        empty: "is not a checkpoint; expected config.json",
        adapter: "is an adapter .* of org/base; expected a whole model: .*merge_and_",
    }.items():
        with pytest.raises(CheckpointError, match=fault):
            call(path, device="cpu")
    for name in ("gpt-oss-7b", pickle):
        with pytest.raises(
            ConfigError, match="neither a checkpoint folder nor a known"
        ):
            call(name, random_weights=True, device="cpu")
    with pytest.raises(ValueError, match="seed is 1; expected None without random_wei"):
        call(device="cpu", seed=1)


def test_a_config_is_no_dict(folder: Path) -> None:
    with pytest.raises(TypeError, match="expected an EngineConfig"):
        LLM(folder, {"num_pages": 9}, device="cpu")  # type: ignore[arg-type]


# The other files


@pytest.mark.parametrize(
    ("generation", "params"),
    [
        ({}, SamplingParams()),
        ({"do_sample": True}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0)),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "bos_token_id": 3},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=20),
        ),
        ({"repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
        ({"temperature": 0, "top_k": 0}, SamplingParams(temperature=0)),
        ({"do_sample": None, "top_p": None}, SamplingParams()),
    ],
)
def test_defaults_come_from_generation_config(
    generation: dict[str, Any], params: SamplingParams
) -> None:
    assert recommended(generation) == params


def test_a_turn_ends_by_config_generation_config_and_harmony(
    folder: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, replace(CONFIG, eos_token_ids=(11,)))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for ends, listed in ((12, {12}), ([12, 13], {12, 13})):
        generation = json.dumps({"eos_token_id": ends, "temperature": 0.5})
        (tmp_path / "generation_config.json").write_text(generation)
        input_processor = load(tmp_path, device="cpu").input_processor
        names = ("<|return|>", "<|call|>", "<|endoftext|>")
        harmony = {input_processor.need_tokenizer().special[name] for name in names}
        assert input_processor.eos_token_ids == {11} | listed | harmony
        assert input_processor.default_params == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"eos_token_id": True}, "eos_token_id is True; expected a token id or a list"),
        ({"eos_token_id": "<|return|>"}, "eos_token_id is '<|return|>'; expected"),
        ({"eos_token_id": ["1044"]}, "eos_token_id is ['1044']; expected"),
        ({"eos_token_id": 5.5}, "eos_token_id is 5.5; expected"),
        ({"eos_token_id": [1, 1100]}, "eos_token_id is [1, 1100]; expected"),
        ({"top_k": 50.0}, "top_k is 50.0; expected an integer"),
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
        ({"top_p": 0}, "top_p is 0; expected more than 0"),
        ({"do_sample": "no"}, "do_sample is 'no'; expected True or False"),
        (None, "is not JSON"),
    ],
)
def test_a_wrong_generation_config_is_named(
    folder: Path, tmp_path: Path, generation: dict[str, Any] | None, message: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "generation_config.json"
    file.write_text("{" if generation is None else json.dumps(generation))
    with pytest.raises(ConfigError) as error:
        LLM(copy, device="cpu")
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value)


def test_a_wrong_tokenizer_is_refused_before_the_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, TINY)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    monkeypatch.setattr("simplellm.api.load.read_weights", None)
    with pytest.raises(ConfigError, match="tokenizer has 1053 token ids"):
        LLM(tmp_path, device="cpu")


# Room


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with 2 GB of memory; nothing is loaded on it."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: (2 * 10**9, 3 * 10**9))
    monkeypatch.setattr("simplellm.api.load.read_weights", None)
    yield


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(num_pages=2**33),
        EngineConfig(cache_bytes=2**45),
        EngineConfig(max_num_batched_tokens=65_000, max_num_seqs=500),
    ],
)
def test_sizes_that_the_memory_has_no_room_for_are_refused(
    free: None, folder: Path, config: EngineConfig
) -> None:
    """Also on a CPU, and before anything is allocated."""
    if config.max_num_seqs:
        config = replace(config, num_pages=10**6)
    with pytest.raises(
        MemoryError, match=r"the CPU has not enough memory: .* 2\.0 of 3"
    ):
        LLM(folder, config, device="cpu")


def test_a_model_that_the_memory_has_no_room_for_is_refused(free: None) -> None:
    with pytest.raises(MemoryError, match="for its weights"):
        LLM("gpt-oss-20b", random_weights=True, device="cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(cache_bytes=100), "for pages, in bytes, is 100; expected"),
        (EngineConfig(num_pages=1), "the number of pages of 16 tokens is 1"),
        (
            EngineConfig(num_pages=2, page_size=1),
            "request's tokens is 1; expected 2 or more",
        ),
        (EngineConfig(max_model_len=1), "request's tokens is 1; expected 2 or more"),
    ],
)
def test_an_engine_that_would_refuse_every_prompt_is_refused(
    folder: Path, config: EngineConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, config, device="cpu")


def test_the_smallest_engine_answers(folder: Path) -> None:
    config = EngineConfig(num_pages=4, page_size=1, max_num_seqs=1)
    with LLM(folder, config, device="cpu") as llm:
        assert llm.engine_core.max_model_len == 2
        (output,) = llm.generate([5], max_tokens=9, temperature=0).result()
        assert len(output.token_ids) == 1


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_weight_that_is_not_finite_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float, dtype: str
) -> None:
    """By its name. Nothing else would: all tokens would be the first one."""
    file = write_checkpoint(tmp_path, quantized=False) / "model.safetensors"
    load_model(tmp_path, dtype, "cpu")
    assert not caplog.messages
    weights = load_file(file)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        weights[name].view(-1)[-1] = value
    save_file(weights, file)
    load_model(tmp_path, dtype, "cpu")
    (message,) = caplog.messages
    assert "infinity in 2 of the weights, first in layers.1.attn.qkv.weight" in message


def test_a_length_that_the_model_does_not_have_is_told(caplog) -> None:
    with LLM(max_model_len=200_000, cache_bytes=2**24) as llm:
        assert llm.input_processor.max_model_len <= 131_072
    wanted = "max_model_len is 200000, but the model reads texts of up to 131072 tokens"
    assert wanted in caplog.messages
