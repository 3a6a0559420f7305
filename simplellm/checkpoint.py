"""Checkpoints: opened by their headers, read through the memory map.

V vocabulary, H query heads, Q rows of all query heads, KV rows of all key heads,
QKV = Q + 2 * KV, E experts, I intermediate size. A weight's output axis comes before
its input axis.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from simplellm.config import ConfigError, ModelConfig, read_json


class CheckpointError(ValueError):
    """A folder that is no checkpoint we can read; the message says why."""


class Name(NamedTuple):
    """What one tensor is called by us and on disk; ``{n}`` is the layer."""

    ours: str
    original: str
    huggingface: str  # {qkv}: three tensors, joined along the first axis
    shape: str

    def at(self, layer: int) -> "Name":
        return Name(*(field.replace("{n}", str(layer)) for field in self))


# fmt: off
NAMES = (
    Name("embed_tokens.weight", "embedding.weight",
         "model.embed_tokens.weight", "V hidden"),
    Name("layers.{n}.attn_norm.weight", "block.{n}.attn.norm.scale",
         "model.layers.{n}.input_layernorm.weight", "hidden"),
    Name("layers.{n}.attn.qkv.weight", "block.{n}.attn.qkv.weight",
         "model.layers.{n}.self_attn.{qkv}_proj.weight", "QKV hidden"),
    Name("layers.{n}.attn.qkv.bias", "block.{n}.attn.qkv.bias",
         "model.layers.{n}.self_attn.{qkv}_proj.bias", "QKV"),
    Name("layers.{n}.attn.o.weight", "block.{n}.attn.out.weight",
         "model.layers.{n}.self_attn.o_proj.weight", "hidden Q"),
    Name("layers.{n}.attn.o.bias", "block.{n}.attn.out.bias",
         "model.layers.{n}.self_attn.o_proj.bias", "hidden"),
    Name("layers.{n}.attn.sinks", "block.{n}.attn.sinks",
         "model.layers.{n}.self_attn.sinks", "H"),
    Name("layers.{n}.mlp_norm.weight", "block.{n}.mlp.norm.scale",
         "model.layers.{n}.post_attention_layernorm.weight", "hidden"),
    Name("layers.{n}.router.weight", "block.{n}.mlp.gate.weight",
         "model.layers.{n}.mlp.router.weight", "E hidden"),
    Name("layers.{n}.router.bias", "block.{n}.mlp.gate.bias",
         "model.layers.{n}.mlp.router.bias", "E"),
    Name("layers.{n}.experts.gate_up", "block.{n}.mlp.mlp1_weight",
         "model.layers.{n}.mlp.experts.gate_up_proj", "E 2I hidden"),
    Name("layers.{n}.experts.gate_up_bias", "block.{n}.mlp.mlp1_bias",
         "model.layers.{n}.mlp.experts.gate_up_proj_bias", "E 2I"),
    Name("layers.{n}.experts.down", "block.{n}.mlp.mlp2_weight",
         "model.layers.{n}.mlp.experts.down_proj", "E hidden I"),
    Name("layers.{n}.experts.down_bias", "block.{n}.mlp.mlp2_bias",
         "model.layers.{n}.mlp.experts.down_proj_bias", "E hidden"),
    Name("norm.weight", "norm.scale",
         "model.norm.weight", "hidden"),
    Name("lm_head.weight", "unembedding.weight",
         "lm_head.weight", "V hidden"),
)
# fmt: on

Shape = tuple[int, ...]


def axes(config: ModelConfig) -> dict[str, int]:
    """The sizes that the name table's shapes speak of."""
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    return {
        "V": config.vocab_size,
        "hidden": config.hidden_size,
        "H": config.num_attention_heads,
        "Q": q,
        "KV": kv,
        "QKV": q + 2 * kv,
        "E": config.num_local_experts,
        "I": config.intermediate_size,
        "2I": 2 * config.intermediate_size,
    }


def tensor_names(config: ModelConfig) -> dict[str, Name]:
    """The name table written out for every layer, by our name, in model order."""
    layers = range(config.num_hidden_layers)
    per_layer = [name for name in NAMES if "{n}" in name.ours]
    embedding, norm, head = (name for name in NAMES if "{n}" not in name.ours)
    if config.tie_word_embeddings:  # stored once, under the embedding's name
        head = embedding._replace(ours=head.ours)
    in_layers = (name.at(n) for n in layers for name in per_layer)
    names = [embedding, *in_layers, norm, head]
    return {name.ours: name for name in names}


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The logical shape of each tensor by our name: [out, in], experts unpacked."""
    size = axes(config)
    return {
        ours: tuple(size[axis] for axis in name.shape.split())
        for ours, name in tensor_names(config).items()
    }


BLOCK = 32  # neighbors along the input axis that share one scale


class Packed(NamedTuple):
    """An MXFP4 weight [..., out, in] as it lies on disk, both parts uint8."""

    blocks: torch.Tensor  # [..., out, in / 32, 16], two elements a byte
    scales: torch.Tensor  # [..., out, in / 32]


def packed_shapes(shape: Shape) -> tuple[Shape, Shape]:
    """The shapes of blocks and scales that hold a weight of logical ``shape``."""
    *rows, columns = shape
    if columns % BLOCK:
        raise CheckpointError(
            f"an MXFP4 weight has {columns} input columns; expected a multiple of "
            f"{BLOCK}"
        )
    return (*rows, columns // BLOCK, BLOCK // 2), (*rows, columns // BLOCK)


def is_expert_weight(ours: str) -> bool:
    """Whether our ``ours`` may be stored as MXFP4."""
    return ours.endswith((".gate_up", ".down"))


def stored(
    name: Name, shape: Shape, config: ModelConfig, layout: str, packed: bool
) -> dict[str, Shape]:
    """Under which names and in which shapes a layout stores one tensor."""
    base: str = getattr(name, layout)
    if packed and is_expert_weight(name.ours):
        dot = "_" if layout == "huggingface" else "."
        parts = f"{base}{dot}blocks", f"{base}{dot}scales"
        return dict(zip(parts, packed_shapes(shape), strict=True))
    if "{qkv}" in base:
        size = axes(config)
        rows = {"q": size["Q"], "k": size["KV"], "v": size["KV"]}
        return {base.replace("{qkv}", p): (rows[p], *shape[1:]) for p in rows}
    if layout == "huggingface" and is_expert_weight(name.ours):
        experts, out_features, in_features = shape
        return {base: (experts, in_features, out_features)}
    return {base: shape}


def stored_shapes(
    config: ModelConfig, layout: str, packed: bool
) -> dict[str, dict[str, Shape]]:
    """For each of our names, the names and shapes on disk that make it up."""
    shapes = tensor_shapes(config)
    return {
        ours: stored(name, shapes[ours], config, layout, packed)
        for ours, name in tensor_names(config).items()
    }


ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor; ``name`` is the name on disk."""

    name: str
    dtype: str  # as safetensors spells it: BF16, F16, F32 or U8
    shape: Shape
    nbytes: int
    file: Path


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a checkpoint and its index, {} when it has none."""
    if not folder.exists():
        raise CheckpointError(f"{folder}: does not exist; expected a checkpoint folder")
    if folder.suffix in PICKLES and folder.is_file():
        raise CheckpointError(
            f"{folder}: is a pickle file, which runs code when loaded, and is never "
            "loaded here; expected a folder with *.safetensors"
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; expected the folder that holds it")
    if (folder / INDEX).is_file():
        return _indexed_shards(folder)
    single = folder / "model.safetensors"
    shards = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if shards:
        return shards, {}
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder}: holds only pickle files ({some(pickles)}), which run code "
            "when loaded and are never loaded here; expected *.safetensors"
        )
    raise CheckpointError(
        f"{folder}: is not a checkpoint, it holds no weights; expected config.json "
        "and *.safetensors"
    )


def _indexed_shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        index = read_json(folder / INDEX).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(f"{folder / INDEX}: {error}") from None
    if not isinstance(index, dict) or not index:
        raise CheckpointError(
            f"{folder / INDEX}: has no weight_map; expected an object that maps "
            "tensor names to files"
        )
    for file in index.values():
        if not isinstance(file, str) or Path(file).suffix != ".safetensors":
            raise CheckpointError(
                f"{folder / INDEX}: maps a tensor to {short(file)}; expected the name "
                "of a .safetensors file"
            )
    shards = sorted(set(index.values()))
    for file in shards:
        if file != Path(file).name or not (folder / file).is_file():
            raise CheckpointError(
                f"{folder}: shard {file!r} is missing; expected every file that "
                f"{INDEX} names"
            )
    return [folder / file for file in shards], index


def open_shard(file: Path) -> safe_open:
    """Map one safetensors file. Raises CheckpointError if it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except OSError as error:
        fault = str(error)
    except SafetensorError as error:
        fault = repr(str(error)[:200])  # which may quote any bytes of the file
        with file.open("rb") as start:
            if start.read(20) == b"version https://git-":
                fault = "is a Git LFS pointer, not the weights"
    raise CheckpointError(
        f"{file}: {fault}; expected a safetensors file: 8 bytes of header length, "
        "a JSON header, and as many bytes of data as the header declares"
    )


def read_headers(shards: Mapping[Path, safe_open]) -> dict[str, TensorInfo]:
    """What all the shards hold, by name on disk."""
    infos: dict[str, TensorInfo] = {}
    for file, shard in shards.items():
        for name in shard.keys():  # noqa: SIM118  (a safe_open is no dict)
            header = shard.get_slice(name)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            if dtype not in ITEMSIZE:
                raise CheckpointError(
                    f"{file}: {name!r} is {dtype}; expected {', '.join(ITEMSIZE)}"
                )
            if name in infos:
                raise CheckpointError(
                    f"{file}: holds {name!r}, which {infos[name].file.name} holds too; "
                    "expected each tensor once"
                )
            nbytes = math.prod(shape) * ITEMSIZE[dtype]
            infos[name] = TensorInfo(name, dtype, shape, nbytes, file)
    return infos


def some(names: Iterable[str]) -> str:
    """The first three names and how many there are beyond them."""
    first = sorted(names)
    more = f" and {len(first) - 3} more" if len(first) > 3 else ""
    return ", ".join(repr(name) for name in first[:3]) + more


class Checkpoint:
    """A gpt-oss checkpoint folder as a mapping from our names to its tensors.

    Opening reads config.json and the headers and checks all that they can tell;
    the data stays on disk until a tensor is touched. Raises CheckpointError or
    ConfigError.

    ``path``, ``config``; ``layout``: "huggingface" or "original"; ``packed``: whether
    the experts are MXFP4.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files, index = find_shards(self.path)
        self.config = ModelConfig.from_file(self.path / "config.json")
        self._shards = {file: open_shard(file) for file in files}
        self._infos = read_headers(self._shards)
        original = "embedding.weight" in self._infos
        self.layout = "original" if original else "huggingface"
        self.packed = any(info.dtype == "U8" for info in self._infos.values())
        try:
            self._stored = stored_shapes(self.config, self.layout, self.packed)
            self._check_names(index)
            self._check_headers()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _check_names(self, index: Mapping[str, str]) -> None:
        expected = {name for parts in self._stored.values() for name in parts}
        wanted = (
            f"expected the {len(expected)} tensors that config.json implies in the "
            f"{self.layout} layout"
        )
        if missing := expected - self._infos.keys():
            here = {file.name for file in self.path.glob("*.safetensors")}
            unlisted = here - {file.name for file in self._shards}
            hint = f" ({some(unlisted)} is not in {INDEX})" if unlisted else ""
            raise CheckpointError(f"lacks {some(missing)}{hint}; {wanted}")
        if extra := self._infos.keys() - expected:
            raise CheckpointError(f"holds {some(extra)} too; {wanted}")
        for name, file in index.items():
            if name not in expected or self._infos[name].file.name != file:
                raise CheckpointError(
                    f"{INDEX} places {name!r} in {file!r}, which lacks it; expected "
                    "the file that holds it"
                )

    def _check_headers(self) -> None:
        for parts in self._stored.values():
            for name, shape in parts.items():
                info = self._infos[name]
                if info.shape != shape:
                    raise CheckpointError(
                        f"{name!r} has shape {short(list(info.shape))}; "
                        f"expected {list(shape)}"
                    )
                mxfp4 = name.endswith(("blocks", "scales"))
                if (info.dtype == "U8") != mxfp4:
                    raise CheckpointError(
                        f"{name!r} is {info.dtype}; expected "
                        f"{'U8' if mxfp4 else 'BF16, F16 or F32'}"
                    )

    def names(self) -> list[str]:
        """Our names of all tensors, in the model's order."""
        return list(self._stored)

    def infos(self) -> list[TensorInfo]:
        """What is on disk, by file and name there."""
        return sorted(self._infos.values(), key=lambda info: (info.file, info.name))

    def nbytes(self, ours: str) -> int:
        """Bytes on disk of the tensor that we call ``ours``."""
        return sum(self._infos[name].nbytes for name in self._stored[ours])

    def __contains__(self, ours: object) -> bool:
        return ours in self._stored

    def __getitem__(self, ours: str) -> torch.Tensor | Packed:
        """The tensor [out, in] in its dtype on disk, or an expert weight's parts.

        Backed by the file, except for q, k and v, which the Hugging Face layout
        stores apart and which are joined into a copy. Its dense experts are a
        transposed view. Writing to a tensor does not change the file.
        """
        parts = [
            self._shards[self._infos[name].file].get_tensor(name)
            for name in self._stored[ours]
        ]
        if is_expert_weight(ours):
            if self.packed:
                return Packed(*parts)
            if self.layout == "huggingface":
                return parts[0].transpose(1, 2)
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class Upload:
    """Copies tensors from mapped files to a GPU, through two pinned buffers.

    ``nbytes`` is the size of each buffer. Tensors may be of any size; one that is on a
    GPU already is returned as it is.
    """

    def __init__(self, device: str | torch.device, nbytes: int = 2**26) -> None:
        self.device = torch.device(device)
        self.buffers = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self.sent = [torch.cuda.Event() for _ in range(2)]
        self.turn = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the GPU, contiguous. The last of it may still be on its way."""
        if tensor.is_cuda:
            return tensor
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (t.reshape(-1).view(torch.uint8) for t in (tensor, out))
        size = len(self.buffers[0])
        for part, place in zip(source.split(size), target.split(size), strict=True):
            buffer, sent = self.buffers[self.turn][: len(part)], self.sent[self.turn]
            sent.synchronize()  # what the buffer held before has arrived
            buffer.copy_(part)
            place.copy_(buffer, non_blocking=True)
            sent.record(torch.cuda.current_stream(self.device))
            self.turn ^= 1
        return out


RANDOM_SCALE = 119  # an exponent of 119 - 127 = -8


class RandomCheckpoint:
    """Random weights in the shapes of ``config``, each made when it is asked for.

    Same mapping as Checkpoint, experts packed. Nibbles are uniform, scales 2^-8,
    norms 1, biases 0, embeddings and sinks N(0, 1), other weights N(0, 0.02). A
    tensor depends on the seed, its name, shape and dtype, and the kind of device alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.seed = seed
        self._shapes = tensor_shapes(config)

    def names(self) -> list[str]:
        """Our names of all tensors, in the model's order."""
        return list(self._shapes)

    def __contains__(self, ours: object) -> bool:
        return ours in self._shapes

    def __getitem__(self, ours: str) -> torch.Tensor | Packed:
        """The tensor [out, in] in ``dtype``, or an expert weight's parts."""
        if self.config.tie_word_embeddings and ours == "lm_head.weight":
            ours = "embed_tokens.weight"
        shape = self._shapes[ours]
        digest = hashlib.sha256(f"{self.seed} {ours}".encode()).digest()
        generator = torch.Generator(self.device)
        generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
        if is_expert_weight(ours):
            blocks, scales = packed_shapes(shape)
            return Packed(
                self._empty(blocks, torch.uint8).random_(256, generator=generator),
                self._empty(scales, torch.uint8).fill_(RANDOM_SCALE),
            )
        tensor = self._empty(shape, self.dtype)
        if "norm" in ours:
            return tensor.fill_(1)
        if "bias" in ours:
            return tensor.zero_()
        std = 1.0 if ours.endswith(("embed_tokens.weight", "sinks")) else 0.02
        return tensor.normal_(std=std, generator=generator)

    def _empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def kind(ours: str) -> str:
    """Which part of the model a tensor belongs to, by our name."""
    if "norm" in ours:
        return "norms"
    for part in ("experts", "router", "attn", "embed_tokens", "lm_head"):
        if part in ours:
            return {"attn": "attention", "embed_tokens": "embedding"}.get(part, part)
    raise KeyError(ours)


class Counts(NamedTuple):
    """Parameters of a model; ``active`` ones take part in each token."""

    total: int
    active: int
    by_kind: dict[str, int]


def count_parameters(config: ModelConfig) -> Counts:
    """Count as gpt-oss's model card does (arXiv:2508.10925, table 1).

    Every weight, bias, norm and sink is a parameter; an MXFP4 scale is not. Active
    are num_experts_per_tok of the experts and everything else except the embedding,
    of which a token reads one row.
    """
    by_kind: dict[str, int] = {}
    for ours, shape in tensor_shapes(config).items():
        by_kind[kind(ours)] = by_kind.get(kind(ours), 0) + math.prod(shape)
    if config.tie_word_embeddings:
        del by_kind["embedding"]  # it is the LM head
    total = sum(by_kind.values())
    experts = by_kind["experts"]
    used = experts * config.num_experts_per_tok // config.num_local_experts
    active = total - experts + used - by_kind.get("embedding", 0)
    return Counts(total, active, by_kind)
