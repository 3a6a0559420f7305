"""Checkpoints against safetensors and transformers, and bad ones."""

import itertools
import json
import math
import pickle
import resource
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    PLAIN_TINY,
    TINY,
    config_json,
    random_tensors,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file

from simplellm.base.config import ConfigError
from simplellm.checkpoint.checkpoint import (
    INDEX,
    Checkpoint,
    CheckpointError,
    RandomCheckpoint,
    Upload,
)
from simplellm.checkpoint.mxfp4 import MXFP4, Weight
from simplellm.checkpoint.names import (
    TensorInfo,
    packed_shapes,
    stored_shapes,
    tensor_shapes,
)
from simplellm.checkpoint.source import Source

STATM = Path("/proc/self/statm")
ALL = list(itertools.product([True, False], [1, 3]))


def parts(value: Weight) -> tuple[torch.Tensor, ...]:
    if isinstance(value, MXFP4):
        return value.blocks, value.scales
    assert isinstance(value, torch.Tensor)
    return (value,)


def same(a: Weight, b: Weight) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


@pytest.mark.parametrize(("quantized", "shards"), ALL)
def test_every_kind_of_folder(quantized: bool, shards: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, quantized=quantized, shards=shards, seed=3)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.mapped == quantized
    assert len(checkpoint.files) == shards
    assert checkpoint.config == (TINY if quantized else PLAIN_TINY)
    shapes = tensor_shapes(TINY)
    assert checkpoint.names() == list(shapes)
    for name, shape in shapes.items():
        value = checkpoint[name]
        expected = packed_shapes(shape) if isinstance(value, MXFP4) else (shape,)
        assert tuple(tuple(part.shape) for part in parts(value)) == expected
        assert isinstance(value, MXFP4) == (quantized and len(shape) == 3)


def test_the_names_on_disk(tmp_path: Path) -> None:
    """Written out by hand, against openai/gpt-oss and transformers."""
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "a"))
    disk = load_file(tmp_path / "a" / "model.safetensors")
    layer = "model.layers.1."
    qkv = torch.cat([disk[f"{layer}self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(parts(checkpoint["layers.1.attn.qkv.weight"])[0], qkv)
    down = checkpoint["layers.1.experts.down"]
    assert isinstance(down, MXFP4)
    assert torch.equal(down.blocks, disk[f"{layer}mlp.experts.down_proj_blocks"])
    assert torch.equal(down.scales, disk[f"{layer}mlp.experts.down_proj_scales"])
    norm = parts(checkpoint["layers.1.mlp_norm.weight"])[0]
    assert torch.equal(norm, disk[f"{layer}post_attention_layernorm.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_transformers_saves(dtype: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(**config_json(PLAIN_TINY))
    model = transformers.GptOssForCausalLM(config).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / INDEX).exists()
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == PLAIN_TINY
    layer = model.model.layers[1]
    attention, experts = layer.self_attn, layer.mlp.experts
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    expected = {
        "embed_tokens.weight": model.model.embed_tokens.weight,
        "layers.1.attn.qkv.weight": torch.cat([p.weight for p in projections]),
        "layers.1.attn.qkv.bias": torch.cat([p.bias for p in projections]),
        "layers.1.attn.o.weight": attention.o_proj.weight,
        "layers.1.attn.sinks": attention.sinks,
        "layers.1.router.weight": layer.mlp.router.weight,
        "layers.1.experts.gate_up": experts.gate_up_proj.transpose(1, 2),
        "layers.1.experts.gate_up_bias": experts.gate_up_proj_bias,
        "layers.1.experts.down": experts.down_proj.transpose(1, 2),
        "lm_head.weight": model.lm_head.weight,
    }
    for name, tensor in expected.items():
        value = checkpoint[name]
        assert isinstance(value, torch.Tensor)
        assert value.dtype == dtype
        assert torch.equal(value, tensor), name


def infos_of(source: Source) -> list[TensorInfo]:
    return [info for ours in source.names() for info in source.stored(ours)]


def test_tied_embeddings(tmp_path: Path) -> None:
    config = replace(TINY, tie_word_embeddings=True)
    checkpoint = Checkpoint(write_checkpoint(tmp_path, config))
    assert "lm_head.weight" not in {info.name for info in infos_of(checkpoint)}
    assert same(checkpoint["lm_head.weight"], checkpoint["embed_tokens.weight"])
    random = RandomCheckpoint(config)
    assert same(random["lm_head.weight"], random["embed_tokens.weight"])


def test_norms_may_have_another_dtype(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    write_checkpoint(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert parts(checkpoint["norm.weight"])[0].dtype == torch.float32
    assert parts(checkpoint["lm_head.weight"])[0].dtype == torch.bfloat16


def test_infos_cover_the_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path))
    path = tmp_path / "model.safetensors"
    (header,) = struct.unpack("<Q", path.read_bytes()[:8])
    data = path.stat().st_size - 8 - header
    infos = infos_of(checkpoint)
    assert sum(info.nbytes for info in infos) == data
    assert {info.file for info in infos} == {path}
    assert {info.name: info.shape for info in infos} == {
        name: tuple(tensor.shape) for name, tensor in load_file(path).items()
    }


def test_what_random_weights_would_store(tmp_path: Path) -> None:
    """Names, shapes, dtypes and bytes are those of a file."""
    stored = infos_of(Checkpoint(write_checkpoint(tmp_path)))
    random = infos_of(RandomCheckpoint(TINY))
    for one, other in zip(stored, random, strict=True):
        assert one == replace(other, file=one.file, offset=one.offset)


def sparse_checkpoint(folder: Path, vocab_size: int) -> Path:
    """A checkpoint whose weights are all zero and take no room on the disk."""
    config = replace(PLAIN_TINY, vocab_size=vocab_size)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    header, offset = {}, 0
    for parts_on_disk in stored_shapes(config).values():
        for name, shape in parts_on_disk.items():
            end = offset + 2 * math.prod(shape)
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            header[name] = entry
            offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return folder


@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")
def test_reading_does_not_load_the_file(tmp_path: Path) -> None:
    """Of a checkpoint of 1.15 GB only the pages that are touched take memory."""
    sparse_checkpoint(tmp_path, 3_000_000)
    before = resident_bytes()
    checkpoint = Checkpoint(tmp_path)
    values = [checkpoint[name] for name in ("embed_tokens.weight", "lm_head.weight")]
    assert sum(part.nbytes for value in values for part in parts(value)) > 1.1e9
    assert all(part[-1].eq(0).all() for value in values for part in parts(value))
    assert resident_bytes() - before < 50e6


def memory_bytes() -> int:
    """What the machine has, swap included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = dict(line.split(":") for line in lines)
    return sum(int(found[name].split()[0]) for name in ("MemTotal", "SwapTotal")) * 1024


@pytest.fixture
def sparse_folder(tmp_path: Path) -> Path:
    """A folder whose files take no room on the disk where nothing is written."""
    probe = tmp_path / "probe"
    with probe.open("wb") as file:
        file.truncate(2**24)
    if probe.stat().st_blocks * 512 > 2**20:
        pytest.skip("the file system has no sparse files")
    probe.unlink()
    return tmp_path


@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")
def test_a_file_larger_than_memory_opens(sparse_folder: Path) -> None:
    """One file of at least 30 GB, and of a quarter more than the machine has."""
    size = max(30 * 10**9, memory_bytes() * 5 // 4)
    vocab_size = size // (2 * 2 * TINY.hidden_size)  # two matrices of two bytes each
    if vocab_size >= 2**31:
        pytest.skip("the machine has more memory than a config may ask for")
    try:
        sparse_checkpoint(sparse_folder, vocab_size)
    except OSError as error:
        pytest.skip(f"the file system takes no file of {size} bytes: {error}")
    before = resident_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = Checkpoint(sparse_folder)
        tensors = [checkpoint[name] for name in checkpoint.names()]
    last = parts(checkpoint["lm_head.weight"])[0]
    assert last[[0, vocab_size // 2, -1]].eq(0).all()
    last[-1] = 1  # a page of our own; the file keeps its zeros
    assert parts(checkpoint["lm_head.weight"])[0][-1].eq(1).all()
    assert sum(part.nbytes for value in tensors for part in parts(value)) >= 0.99 * size
    assert resident_bytes() - before < 50e6
    assert (sparse_folder / "model.safetensors").stat().st_blocks * 512 < 2**20


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


def test_a_tensor_is_the_file(tmp_path: Path) -> None:
    """Two reads share memory, and writing to it leaves the file alone."""
    path = write_checkpoint(tmp_path) / "model.safetensors"
    before = path.read_bytes()
    checkpoint = Checkpoint(tmp_path)
    for name in ("embed_tokens.weight", "layers.0.experts.down"):
        first, second = (parts(checkpoint[name])[0] for _ in range(2))
        assert first.data_ptr() == second.data_ptr()
        first.zero_()
    assert path.read_bytes() == before


def test_subfolders_are_left_alone(tmp_path: Path) -> None:
    """The hub's folder holds the original files too, and pickles may lie about."""
    write_checkpoint(tmp_path, shards=2)
    write_checkpoint(tmp_path / "original", seed=1)
    (tmp_path / "metal").mkdir()
    (tmp_path / "metal" / "model.bin").write_bytes(b"metal")
    (tmp_path / "optimizer.pt").write_bytes(b"pickle")
    assert {file.parent for file in Checkpoint(tmp_path).files} == {tmp_path}


def test_the_original_layout_is_refused_with_the_way(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    original = {"num_hidden_layers": 2, "rope_scaling_factor": 32.0}
    (tmp_path / "config.json").write_text(json.dumps(original))
    wanted = "OpenAI's own, of a folder named original; the folder that it lies in has"
    with pytest.raises(ConfigError, match=wanted):
        Checkpoint(tmp_path)


def test_an_unknown_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path))
    with pytest.raises(KeyError, match=r"layers\.2\.attn\.o\.weight"):
        checkpoint["layers.2.attn.o.weight"]


# What is wrong with a folder: each breaks a good one, each has one message.


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def header_of(folder: Path) -> tuple[dict, bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put_header(folder: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + data
    (folder / "model.safetensors").write_bytes(raw)


def overlap(folder: Path) -> None:
    header, data = header_of(folder)
    entry = header["model.layers.0.self_attn.q_proj.bias"]
    entry["data_offsets"] = [n - 2 for n in entry["data_offsets"]]
    put_header(folder, header, data)


def other_dtype(folder: Path) -> None:
    header, data = header_of(folder)
    header["model.norm.weight"]["dtype"] = "I16"
    put_header(folder, header, data)


def dtype_of_another_size(folder: Path) -> None:
    header, data = header_of(folder)
    header["model.norm.weight"]["dtype"] = "F32"
    put_header(folder, header, data)


def integer_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(96, dtype=torch.uint8)


def float_scales(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].half()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def config(**changes: object) -> Callable[[Path], object]:
    text = json.dumps(config_json(TINY) | changes).encode()
    return file("config.json", text)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]):
    return lambda folder: rewrite(folder, change)


Q = "model.layers.0.self_attn.q_proj.weight"
BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: cannot be"),
    "truncated": (truncate, "not fully covered'; expected a safetensors file"),
    "empty": (file("model.safetensors", b""), "header too small'; expected a safe"),
    "header longer than the file": (
        file("model.safetensors", struct.pack("<Q", 10**6) + b"{}"),
        "expected a safetensors file",
    ),
    "header of 2^63 bytes": (
        file("model.safetensors", struct.pack("<Q", 2**63) + b"{}"),
        "header too large'; expected a safetensors file",
    ),
    "pickle in disguise": (
        file("model.safetensors", pickle.dumps({"a": list(range(99))})),
        "header too large'; expected a safetensors file",
    ),
    "Git LFS pointer": (
        file("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        "is a Git LFS pointer, not the weights; expected a safetensors file",
    ),
    "overlap": (overlap, "invalid offset for tensor"),
    "dtype and shape disagree": (dtype_of_another_size, "expected a safetensors file"),
    "dtype that no weight has": (
        other_dtype,
        "'model.norm.weight' is I16; expected BF16, F16, F32, U8",
    ),
    "float tensor stored as bytes": (
        tensors(integer_norm),
        "'model.norm.weight' is 'U8'; expected BF16, F16, F32",
    ),
    "scales stored as floats": (tensors(float_scales), "is 'F16'; expected U8"),
    "missing": (
        tensors(lambda t: t.pop(Q)),
        f"lacks {Q!r}; expected the 41 tensors that config.json implies",
    ),
    "half of an expert": (
        tensors(lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales")),
        "lacks 'model.layers.0.mlp.experts.down_proj_scales'; expected",
    ),
    "extra": (
        tensors(lambda t: t.update(adapter=torch.zeros(1))),
        "holds 'adapter' too; expected the 41 tensors",
    ),
    "wrong shape": (
        tensors(lambda t: t.update({Q: t[Q].T.contiguous()[:, :-1].contiguous()})),
        f"{Q!r} has shape [96, 95]; expected [96, 96]",
    ),
    "fewer layers than config.json says": (
        config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "and 16 more; expected the 60 tensors",
    ),
    "more layers than config.json says": (
        config(num_hidden_layers=1, layer_types=["full_attention"]),
        "and 16 more too; expected the 22 tensors",
    ),
    "a hidden size that no MXFP4 weight has": (
        config(hidden_size=97),
        "input columns of an MXFP4 weight is 97; expected a multiple of 32",
    ),
    "another model": (config(model_type="mamba"), "expected one of 'gpt_oss'"),
    "index that is no index": (file(INDEX, b"[]"), f"{INDEX}: holds a JSON list"),
    "index without a map": (file(INDEX, b"{}"), "has no weight_map"),
    "index with a number": (
        file(INDEX, b'{"weight_map": {"a": 7}}'),
        "a tensor's file is 7; expected the name of a .safetensors file",
    ),
    "index that points to a pickle": (
        file(INDEX, b'{"weight_map": {"a": "model.bin"}}'),
        "a tensor's file is 'model.bin'; expected",
    ),
    "index that leads out of the folder": (
        file(INDEX, b'{"weight_map": {"a": "../model.safetensors"}}'),
        "shard '../model.safetensors' is missing",
    ),
    "index with a shard that is not there": (
        file(INDEX, b'{"weight_map": {"a": "model-9.safetensors"}}'),
        "shard 'model-9.safetensors' is missing; expected every file that",
    ),
    "index with a tensor that is not there": (
        file(INDEX, b'{"weight_map": {"a": "model-1.safetensors"}}'),
        "places 'a' in 'model-1.safetensors', which lacks it",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_one_message_for_each_fault(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    Checkpoint(tmp_path)
    break_it, message = BREAKS[name]
    break_it(tmp_path)
    if (tmp_path / INDEX).exists():
        (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    with pytest.raises((CheckpointError, ConfigError)) as error:
        Checkpoint(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_one_file_counts_before_an_old_index(tmp_path: Path) -> None:
    """Whoever saves a model anew, in one file, may leave the index of shards there."""
    write_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(
        '{"weight_map": {"a": "model-00001-of-3.safetensors"}}'
    )
    Checkpoint(tmp_path)


def test_a_shard_that_the_index_leaves_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=3)
    index = json.loads((tmp_path / INDEX).read_text())
    gone = "model-00002-of-00003.safetensors"
    kept = {k: v for k, v in index["weight_map"].items() if v != gone}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": kept}))
    with pytest.raises(CheckpointError, match=rf"\('{gone}' is not in {INDEX}\)"):
        Checkpoint(tmp_path)


def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard 'model-00002-of-00003"):
        Checkpoint(tmp_path)


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX).unlink()
    save_file({"model.norm.weight": torch.ones(96)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="expected each tensor once"):
        Checkpoint(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; expected a checkpoint"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a checkpoint; expected config"):
        Checkpoint(tmp_path)
    path = write_checkpoint(tmp_path) / "model.safetensors"
    with pytest.raises(CheckpointError, match="is a file; expected the folder that"):
        Checkpoint(path)


class Trap:
    """Unpickling this one creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_named_and_never_loaded(name: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    file("config.json", json.dumps(config_json(TINY)).encode())(tmp_path)
    torch.save(Trap(sprung), tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=r"runs? code when loaded") as error:
            Checkpoint(path)
        assert name in str(error.value)
    assert not sprung.exists()
    torch.load(tmp_path / name, weights_only=False)
    assert sprung.exists()  # the trap works


# Random weights.


def test_random_weights() -> None:
    source = RandomCheckpoint(TINY)
    assert source.names() == list(tensor_shapes(TINY))
    for name, shape in tensor_shapes(TINY).items():
        value = source[name]
        if isinstance(value, MXFP4):
            expected = packed_shapes(shape)
            assert tuple(tuple(part.shape) for part in parts(value)) == expected
            assert value.blocks.dtype == value.scales.dtype == torch.uint8
            assert set(value.scales.unique().tolist()) == {119}
            nibbles = torch.cat([value.blocks & 15, value.blocks >> 4]).flatten()
            share = nibbles.bincount(minlength=16) / nibbles.numel()
            assert (share - 1 / 16).abs().max() < 0.005
            continue
        assert value.shape == shape
        assert value.dtype == torch.bfloat16
        if "norm" in name:
            assert value.eq(1).all()
        elif "bias" in name:
            assert value.eq(0).all()
        else:
            std = 1.0 if name.endswith(("embed_tokens.weight", "sinks")) else 0.02
            bound = 0.8 if value.numel() < 100 else 0.1
            assert abs(value.float().std().item() / std - 1) < bound, name


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    name, other = "layers.0.attn.qkv.weight", "layers.1.attn.qkv.weight"
    first, second = RandomCheckpoint(TINY, seed=4), RandomCheckpoint(TINY, seed=4)
    _ = second[other], torch.rand(3)
    assert same(first[name], second[name])
    assert not same(first[name], first[other])
    assert not same(first[name], RandomCheckpoint(TINY, seed=5)[name])


def test_random_weights_come_in_the_dtype_asked_for() -> None:
    source = RandomCheckpoint(TINY, dtype=torch.float32)
    assert parts(source["lm_head.weight"])[0].dtype == torch.float32
    assert isinstance(source["layers.0.experts.down"], MXFP4)


class NoEvent:
    """Stands for a CUDA event where there is no GPU: copies are done at once."""

    def record(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def upload(monkeypatch: pytest.MonkeyPatch) -> Upload:
    """Buffers of 64 bytes, on the GPU or, if there is none, on the CPU."""
    if torch.cuda.is_available():
        return Upload("cuda", 64)
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return Upload("cpu", 64)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (64,), (5, 7), (3, 31, 33)])
def test_upload_copies_any_size(
    upload: Upload, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    first, second = (torch.randint(100, shape).to(dtype) for _ in range(2))
    sent = [upload(first), upload(second)]
    for copy, tensor in zip(sent, (first, second), strict=True):
        assert copy.device.type == upload.device.type
        assert copy.dtype == dtype
        assert torch.equal(copy.cpu(), tensor)
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


def test_upload_of_a_transposed_view_is_contiguous(upload: Upload) -> None:
    tensor = torch.randn(4, 6, 50).transpose(1, 2)
    copy = upload(tensor)
    assert copy.is_contiguous()
    assert torch.equal(copy.cpu(), tensor)
