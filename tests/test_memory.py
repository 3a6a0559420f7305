"""Sizes against the model card, transformers, real tensors; too little memory."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import TINY, config_json, write_checkpoint

from simplellm.base.config import LAYER_TYPES, EngineConfig, ModelConfig
from simplellm.checkpoint.checkpoint import Checkpoint, RandomCheckpoint
from simplellm.checkpoint.families import family_config
from simplellm.checkpoint.families.gpt_oss import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    MODELS,
)
from simplellm.checkpoint.names import NAMES, part_of_model, tensor_names, tensor_shapes
from simplellm.model import memory
from simplellm.model.memory import (
    Counts,
    Need,
    activation_bytes,
    check_room,
    count_parameters,
    enough,
    free_bytes,
    kv_bytes,
    num_pages,
    page_bytes,
    weight_bytes,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SLIDING, FULL = LAYER_TYPES


@pytest.mark.parametrize(
    ("config", "total", "active", "experts"),
    [
        (GPT_OSS_20B, 20.91, 3.61, 19.12),
        (GPT_OSS_120B, 116.83, 5.13, 114.71),
    ],
)
def test_parameters_as_in_the_model_card(config, total, active, experts) -> None:
    """arXiv:2508.10925, table 1, in billions; its MLP row includes the router."""
    counts = count_parameters(config)
    assert round(counts.total / 1e9, 2) == total
    assert round(counts.active / 1e9, 2) == active
    mlp = counts.by_kind["experts"] + counts.by_kind["router"]
    assert round(mlp / 1e9, 2) == experts


def test_counts_are_the_model_s_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(**config_json(TINY))
    model = transformers.GptOssForCausalLM(config)
    counts = count_parameters(TINY)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.total == sum(counts.by_kind.values())
    unused = (TINY.num_local_experts - TINY.num_experts_per_tok) * sum(
        parameter[0].numel()
        for name, parameter in model.named_parameters()
        if "experts" in name
    )
    embedding = model.model.embed_tokens.weight.numel()
    assert counts.active == counts.total - unused - embedding


def test_tied_counts() -> None:
    tied, untied = (
        count_parameters(replace(TINY, tie_word_embeddings=tie))
        for tie in (True, False)
    )
    assert isinstance(tied, Counts)
    assert untied.total - tied.total == TINY.vocab_size * TINY.hidden_size
    assert untied.active == tied.active


def test_every_tensor_has_a_kind() -> None:
    kinds = {part_of_model(name) for name in tensor_shapes(TINY)}
    assert kinds == set(count_parameters(TINY).by_kind)
    assert part_of_model("layers.3.attn_norm.weight") == "norms"
    assert part_of_model("layers.3.experts.down_bias") == "experts"


def test_each_tensor_is_split_along_an_axis_that_it_has() -> None:
    for name in NAMES:
        assert name.split in {"", *name.shape.split()}
    shapes = tensor_shapes(GPT_OSS_120B)
    for name in tensor_names(GPT_OSS_120B).values():
        axes = name.shape.split()
        if name.split:  # among up to eight devices
            assert shapes[name.ours][axes.index(name.split)] % 8 == 0


# Weights.


@pytest.mark.parametrize("quantized", [True, False])
def test_weights_are_as_large_as_their_tensors(quantized: bool, tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path, quantized=quantized))
    found: dict[str, int] = {}
    for name in checkpoint.names():
        size = checkpoint[name].nbytes
        size *= 2 if part_of_model(name) == "norms" else 1  # kept in float32
        found[part_of_model(name)] = found.get(part_of_model(name), 0) + size
    assert weight_bytes(checkpoint.config, 2) == found


def test_random_weights_are_as_large_as_loaded_ones() -> None:
    source = RandomCheckpoint(TINY, dtype=torch.float32)
    held = sum(source[name].nbytes for name in source.names())
    assert sum(weight_bytes(TINY, 4).values()) == held


def test_unpacked_experts_take_more() -> None:
    unpacked = weight_bytes(replace(GPT_OSS_20B, formats={}))["experts"]
    packed = weight_bytes(GPT_OSS_20B)["experts"]
    assert unpacked / packed == pytest.approx(32 / 8.5, rel=0.01)


def test_a_tied_head_is_kept_once() -> None:
    apart = weight_bytes(GPT_OSS_20B)
    tied = weight_bytes(replace(GPT_OSS_20B, tie_word_embeddings=True))
    assert sum(apart.values()) - sum(tied.values()) == apart["embedding"]


# Keys and values.


def test_keys_and_values_of_the_known_models() -> None:
    assert kv_bytes(GPT_OSS_20B, 100) == 24 * 100 * 2048
    assert kv_bytes(GPT_OSS_20B, 131_072) == 12 * 2048 * (131_072 + 128)
    assert kv_bytes(GPT_OSS_20B, 131_072, windowed=False) == 24 * 2048 * 131_072
    assert kv_bytes(GPT_OSS_120B, 4096) == 18 * 2048 * (4096 + 128)
    assert kv_bytes(GPT_OSS_120B, 4096, itemsize=1) == 18 * 1024 * (4096 + 128)
    assert kv_bytes(GPT_OSS_120B, 0) == 0


@pytest.mark.parametrize(
    ("layer_types", "layers"),
    [((SLIDING, FULL), 1), ((FULL, FULL), 2), ((SLIDING, FULL, FULL), 2)],
)
def test_a_page_has_the_layers_of_the_larger_group(
    layer_types: tuple[str, ...], layers: int
) -> None:
    config = replace(TINY, num_hidden_layers=len(layer_types), layer_types=layer_types)
    heads = config.num_key_value_heads * config.head_dim
    keys = torch.empty(layers, 8, heads, dtype=torch.bfloat16)
    assert page_bytes(config, 8, 2) == 2 * keys.nbytes


@pytest.mark.parametrize(
    ("kinds", "itemsize", "numbers"),  # of FP8's size, in a page, by a key's
    [("ff", 2, 2), ("fs", 2, 2), ("ffss", 2, 2), ("fs" * 9, 2, 10), ("fs" * 4, 4, 4)],
)
def test_a_page_of_fp8_is_as_large_as_the_full_layers_need(
    kinds: str, itemsize: int, numbers: int
) -> None:
    layer_types = tuple({"f": FULL, "s": SLIDING}[kind] for kind in kinds)
    config = replace(TINY, num_hidden_layers=len(kinds), layer_types=layer_types)
    found = page_bytes(config, 8, itemsize, "fp8")
    assert found == 2 * numbers * 8 * config.num_key_value_heads * config.head_dim
    tokens = config.sliding_window + 5
    least = kv_bytes(config, tokens, itemsize=1)
    kept = kv_bytes(config, tokens, itemsize=itemsize, kv_cache_dtype="fp8")
    assert least <= kept < kv_bytes(config, tokens, itemsize=itemsize)


def test_a_dense_model_has_a_size_too() -> None:
    config = replace(TINY, num_local_experts=0, num_experts_per_tok=0)
    assert kv_bytes(config, 5) == kv_bytes(TINY, 5)
    assert 0 < activation_bytes(config, 9, 1, 4) < activation_bytes(TINY, 9, 1, 4)


def test_pages_are_those_asked_for_or_fill_their_room() -> None:
    def pages(**options: int) -> int:
        config = EngineConfig(page_size=8, **options).resolved("cpu")
        return num_pages(TINY, config, 4, CPU)

    each = page_bytes(TINY, 8, 4)
    assert pages(num_pages=7) == 7
    assert pages(cache_bytes=5 * each + 1) == 5
    with pytest.raises(ValueError, match=f"is 9; expected .* page of {each} by"):
        pages(cache_bytes=9)


# Memory.


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU's memory as far as one can ask PyTorch for it; ``free`` may be changed."""
    card = SimpleNamespace(free=20 * 10**9)
    answers: dict[str, Callable] = {
        "get_device_name": lambda device: "a card",
        "mem_get_info": lambda device: (card.free, 80 * 10**9),
        "memory_reserved": lambda device: 3,
        "memory_allocated": lambda device: 2,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return card


def need(model: ModelConfig, device: torch.device, **options: int) -> Need:
    return Need.of(model, EngineConfig(**options).resolved(device.type))


def test_what_pytorch_keeps_is_free_too(card: SimpleNamespace) -> None:
    assert free_bytes(GPU) == (card.free + 1, 80 * 10**9)


def test_the_cpu_has_some_memory_free() -> None:
    free, total = free_bytes(CPU)
    assert 2**20 < free <= total


V2 = "memory.max", "memory.current", "memory.stat", "inactive_file"
V1 = (
    *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    *("memory/memory.stat", "total_inactive_file"),
)


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_a_container_s_limit_counts(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less what it has, but for pages of files that can be given back."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    limit, used, stat, idle = files
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("3000000\n")
    (tmp_path / used).write_text("2500000\n")
    (tmp_path / stat).write_text(f"anon 7\n{idle} 400000\nfile 9\n")
    assert free_bytes(CPU)[0] == 900_000
    with pytest.raises(MemoryError, match="the CPU has not enough memory"):
        check_room(CPU, 10**6, "weights")
    (tmp_path / limit).write_text("max\n")
    assert free_bytes(CPU)[0] > 2**20


def test_ulimit_counts() -> None:
    code = (
        "import resource, torch; from simplellm.model.memory import free_bytes;"
        "pages = int(open('/proc/self/statm').read().split()[0]);"
        "most = pages * resource.getpagesize() + 5 * 10**7;"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most));"
        "print(free_bytes(torch.device('cpu'))[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) <= 5 * 10**7


def test_a_cpu_s_cache_follows_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is free; at least 256 MiB, at most that and a whole text."""
    config = EngineConfig().resolved("cpu")
    each = page_bytes(GPT_OSS_20B, 16, 4)
    whole = kv_bytes(GPT_OSS_20B, 131_072, itemsize=4) + 2**28
    for free, room in ((2 * 10**9, 5 * 10**8), (10**8, 2**28), (10**12, whole)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, n=free: (n, 2 * n))
        assert num_pages(GPT_OSS_20B, config, 4, CPU) == room // each
    few = replace(config, max_model_len=5000)
    monkeypatch.setattr(memory, "free_bytes", lambda device: (10**12, 10**12))
    room = kv_bytes(GPT_OSS_20B, 5000, itemsize=4) + 2**28
    assert num_pages(GPT_OSS_20B, few, 4, CPU) == room // each


def test_pages_of_a_gpu_are_a_share_of_what_is_free(card: SimpleNamespace) -> None:
    config = EngineConfig().resolved("cuda")
    pages = num_pages(GPT_OSS_20B, config, 2, GPU)
    assert pages * page_bytes(GPT_OSS_20B, 64, 2) == pytest.approx(17e9, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_the_need_of_a_model(name: str) -> None:
    model = MODELS[name]
    config = EngineConfig(num_pages=3, page_size=8).resolved("cuda")
    found = Need.of(model, config)
    assert found.weights == sum(weight_bytes(model).values())
    assert found.cache == 3 * page_bytes(model, 8, 2)
    assert found.step == activation_bytes(model, 8192, 256, 2)
    mapped = Need.of(model, config, mapped=True)
    assert found.weights - mapped.weights == weight_bytes(model)["experts"]
    plain = replace(model, formats={})
    assert Need.of(plain, config).weights > 2 * found.weights
    assert need(model, GPU, cache_bytes=12345).cache == 12345
    assert need(model, GPU).cache == kv_bytes(model, 8192)  # at least a step's


def test_a_model_too_large_is_refused_before_it_loads(card: SimpleNamespace) -> None:
    wanted = need(GPT_OSS_120B, GPU)
    with (
        pytest.raises(torch.OutOfMemoryError) as error,
        enough(wanted, GPU),
    ):
        pytest.fail("nothing may be loaded")
    message = str(error.value)
    weights = f"{wanted.weights / 1e9:.1f} GB for its weights"
    for part in ("a card", weights, "20.0 of 80.0 GB", "cache_bytes"):
        assert part in message
    card.free = 80 * 10**9
    with enough(wanted, GPU):
        pass


def test_a_cache_too_large_is_refused(card: SimpleNamespace) -> None:
    wanted = need(TINY, GPU, cache_bytes=30 * 10**9)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"30\.0 for keys and values"),
        enough(wanted, GPU),
    ):
        pytest.fail("nothing may be loaded")
    with pytest.raises(torch.OutOfMemoryError, match=r"keys take 30\.0 GB; 20\.0 of"):
        check_room(GPU, 30 * 10**9, "keys")
    check_room(GPU, 10 * 10**9, "keys")


@pytest.mark.parametrize("options", [{"num_pages": 2**33}, {"cache_bytes": 2**45}])
def test_absurd_caches_are_refused_on_a_cpu(options: dict[str, int]) -> None:
    model = family_config(config_json(TINY))
    with (
        pytest.raises(MemoryError, match=r"the CPU has not enough .*num_pages"),
        enough(need(model, CPU, **options), CPU),
    ):
        pytest.fail("nothing may be loaded")
    with enough(need(model, CPU), CPU):
        pass


@pytest.mark.parametrize("device", [CPU, GPU])
def test_memory_that_runs_out_during_the_load_is_explained(
    card: SimpleNamespace, device: torch.device
) -> None:
    kind_of_error = MemoryError if device.type == "cpu" else torch.OutOfMemoryError
    with (
        pytest.raises(kind_of_error, match="not enough memory") as error,
        enough(need(TINY, device), device),
    ):
        raise kind_of_error("no more")
    assert "no more" in str(error.value.__cause__)
