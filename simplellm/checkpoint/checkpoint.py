"""Checkpoints: opened by their headers, read through the memory map."""

import hashlib
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from reprlib import repr as short

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simplellm.base.config import (
    CheckpointError,
    ModelConfig,
    expect,
    read_json,
    reraise_as,
)
from simplellm.base.files import map_private
from simplellm.checkpoint.awq_gptq import dequantize_each
from simplellm.checkpoint.families import FAMILIES, read_config
from simplellm.checkpoint.folder import check_downloaded, is_gguf, open_config
from simplellm.checkpoint.formats import (
    FLOATS,
    MXFP4_EXPERTS,
    STATIC_SCALE,
    GroupedInt,
    NumberFormat,
    config_once_loaded,
    same_scales,
)
from simplellm.checkpoint.in_float16 import InFloat16
from simplellm.checkpoint.mxfp4 import MXFP4, StoredWeight, Weight
from simplellm.checkpoint.names import (
    Shape,
    TensorInfo,
    is_expert_weight,
    packed_shapes,
    stored_shapes,
    tensor_names,
    tensor_shapes,
)
from simplellm.checkpoint.source import Source
from simplellm.checkpoint.stored import decode_weights, encode_weight
from simplellm.checkpoint.tensors import DTYPES, assembled, read_header, tensor_view


def map_shard(file: Path) -> mmap.mmap:
    """Map one safetensors file. Raises CheckpointError if it is damaged."""
    try:
        with safe_open(file, framework="numpy"):
            pass  # which checks the header, in itself and against the file's size
        return map_private(file)
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


class Checkpoint:
    """A checkpoint folder as a mapping from our names to its tensors: a `Source`.

    Opening reads config.json and the headers and checks all that they can tell;
    the data stays on disk until a tensor is touched. Raises CheckpointError or
    ConfigError. ``path``, ``config``, ``files``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files, index = find_shards(self.path)
        self.config = read_config(self.path / "config.json")
        self._shards = {file: map_shard(file) for file in self.files}
        with reraise_as(CheckpointError, self.path):
            self._expect(self.config)
        self._infos = read_headers(self._shards, self._spelled)
        with reraise_as(CheckpointError, self.path):
            self._find_lm_head()
            self._find_indices()
            self._drop_zero_biases()
            self._check_names(index)
            self._check_headers()

    def __getitem__(self, ours: str) -> Weight:
        """The weight [..., out, in] in its dtype on disk.

        Backed by the file, except for what is stored in parts, like q, k and v, which
        are joined into a copy. Writing to a tensor does not change the file.
        """
        parts, form = self._views(ours), self.config.formats.get(ours)
        return assembled(parts, self._table[ours], self._shapes[ours], form)

    def parts(self, ours: str, held: range | None = None) -> list[StoredWeight]:
        """What `__getitem__` joins, each [..., out, in], as views of the files.

        They are in the order of `stored_names`. Of experts that lie apart, only those
        that are ``held``.
        """
        views = self._views(ours, held)
        if (form := self.config.formats.get(ours)) is None:
            return [view.mT if self._table[ours].turned else view for view in views]
        return [*decode_weights(form, views)]

    def names(self) -> list[str]:
        return list(self._stored)

    def stored(self, ours: str) -> list[TensorInfo]:
        """What is on disk for the tensor that we call ``ours``.

        Where a weight does not keep its format, the dtype is that format's name.
        """
        infos = [self._infos[name] for name in self._stored[ours]]
        form = self._formats.get(ours)
        if form is None or form.is_kept:
            return infos
        return [replace(info, dtype=form.name) for info in infos]

    def _views(self, ours: str, held: range | None = None) -> list[Tensor]:
        """Views of the files, or the numbers of weights that are unpacked."""
        infos = [self._infos[name] for name in self._stored[ours]]
        if held is not None and "{e}" in self._table[ours].stored:
            each = len(infos) // self.config.num_local_experts
            infos = infos[held.start * each : held.stop * each]
        views, form = [*map(self._view, infos)], self._formats.get(ours)
        return dequantize_each(form, views) if isinstance(form, GroupedInt) else views

    def _view(self, info: TensorInfo) -> Tensor:
        return tensor_view(self._shards[info.file], info)

    @property
    def mapped(self) -> bool:
        """Whether all experts are views of a file, and take no memory on a CPU."""
        experts = [ours for ours in self._stored if is_expert_weight(ours)]
        packed = (self.config.formats.get(ours) == MXFP4_EXPERTS for ours in experts)
        return all(packed) and all(len(self._stored[ours]) == 2 for ours in experts)

    def _expect(self, config: ModelConfig) -> None:
        """Note what a checkpoint of this config holds. Raises ValueError."""
        self._formats: Mapping[str, NumberFormat] = config.formats
        self.config, self._table = config_once_loaded(config), tensor_names(config)
        self._shapes, self._stored = tensor_shapes(config), stored_shapes(config)
        self._expected = {name for part in self._stored.values() for name in part}

    def _find_lm_head(self) -> None:
        """Settle whether the LM head is the embedding, as transformers does.

        If they are tied, one of them alone is both; a head that differs is not tied.
        """
        head = self._infos.get("lm_head.weight")
        if head is None or not self.config.tie_word_embeddings:
            return
        name = self._table["embed_tokens.weight"].stored
        embedding = self._infos.setdefault(name, replace(head, name=name))
        first, second = map(self._view, (embedding, head))
        if first.dtype == second.dtype and torch.equal(first, second):
            del self._infos["lm_head.weight"]
        else:
            untied = replace(self.config, tie_word_embeddings=False)
            self._expect(replace(untied, formats=self._formats))

    def _find_indices(self) -> None:
        """Settle whether GPTQ's groups are listed: GPTQModel may leave them out."""
        if any(name.endswith(".g_idx") for name in self._infos):
            return
        formats = {
            ours: form.without_index if isinstance(form, GroupedInt) else form
            for ours, form in self._formats.items()
        }
        self._expect(replace(self.config, formats=formats))

    def _drop_zero_biases(self) -> None:
        """Forget biases of zeros that the model lacks: AutoGPTQ writes them for all."""
        biases = (n for n in self._infos.keys() - self._expected if n.endswith(".bias"))
        self._zero_biases = {n for n in biases if not self._view(self._infos[n]).any()}
        for name in self._zero_biases:
            del self._infos[name]

    def _spelled(self, stored: str) -> str | None:
        """The name that we expect for a tensor ``stored`` under another; None: none."""
        name = FAMILIES[self.config.model_type].spelled(stored)
        if name is None or name in self._expected or not self.config.formats:
            return name
        for other in (f"{name}_inv", name.removesuffix("_inv")):
            if other in self._expected:  # the same scale has two names
                return other
        return None if STATIC_SCALE.search(name) else name

    def _check_names(self, index: Mapping[str, str]) -> None:
        """Raise ValueError if the files hold other tensors than they should."""
        stored_names, expected = self._infos.keys(), self._expected
        wrong = ""
        if missing := expected - stored_names:
            here = {file.name for file in self.path.glob("*.safetensors")}
            unlisted = here - {file.name for file in self._shards}
            hint = f" ({some(unlisted)} is not in {INDEX})" if unlisted else ""
            if missing == {"lm_head.weight"}:
                hint = " (a model whose head is its embedding has tie_word_embeddings)"
            wrong = f"lacks {some(missing)}{hint}"
        elif extra := stored_names - expected:
            wrong = f"holds {some(extra)} too"
        if wrong:
            raise ValueError(
                f"{wrong}; expected the {len(expected)} tensors that config.json "
                "implies"
            )
        for stored, file in index.items():
            name = self._spelled(stored)
            tied = name == "lm_head.weight" and self.config.tie_word_embeddings
            if not name or tied or name in self._zero_biases:
                continue
            if name not in stored_names or self._infos[name].file.name != file:
                raise ValueError(
                    f"{INDEX} places {stored!r} in {file!r}, which lacks it; expected "
                    "the file that holds it"
                )

    def _check_headers(self) -> None:
        """Raise ValueError for a tensor stored in another way than it should be."""
        for ours, parts in self._stored.items():
            form = self._formats.get(ours)
            for number, (name, shape) in enumerate(parts.items()):
                info = self._infos[name]
                actual, expected = short(list(info.shape)), list(shape)
                scales = form is not None and number % len(form.kinds) == 1
                same = same_scales if scales else tuple.__eq__
                if not same(info.shape, shape):
                    raise ValueError(
                        f"{name!r} has shape {actual}; expected {expected}"
                    )
                kinds = form.kinds[number % len(form.kinds)] if form else FLOATS
                allowed = ", ".join(kinds)
                expect(info.dtype in kinds, repr(name), info.dtype, allowed)
                if name.endswith("_shape"):  # that of numbers packed into words
                    stored = self._view(info).tolist()
                    columns = self._shapes[ours][-1]
                    expect(
                        stored[-1] == columns, repr(name), stored, f"{columns} columns"
                    )


def read_headers(
    shards: Mapping[Path, mmap.mmap], spelled: Callable[[str], str | None] = str
) -> dict[str, TensorInfo]:
    """What all the shards hold, by name; ``spelled`` gives the one that we expect.

    For a tensor that nobody needs it gives None.
    """
    infos: dict[str, TensorInfo] = {}
    for file, shard in shards.items():
        header, start = read_header(shard)
        for stored, entry in header.items():
            if (name := spelled(stored)) is None:
                continue
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            wrong = ""
            if dtype not in DTYPES:
                wrong = f"is {dtype}; expected {', '.join(DTYPES)}"
            elif name in infos:
                wrong = f"is in {infos[name].file.name} too; expected each tensor once"
            if wrong:
                raise CheckpointError(f"{file}: {name!r} {wrong}")
            size = end - begin
            infos[name] = TensorInfo(name, dtype, shape, size, file, start + begin)
    return infos


INDEX = "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a checkpoint and its index, {} when it has none.

    As transformers has it, one file counts before an index, which may be of files that
    were there before.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single], {}
    if (folder / INDEX).is_file():
        with reraise_as(CheckpointError, folder / INDEX):
            return indexed_shards(folder)
    for pattern in ("model*.safetensors", "*.safetensors"):  # adapters may lie beside
        if shards := sorted(folder.glob(pattern)):
            return shards, {}
    raise CheckpointError(f"{folder}: {why_no_shards(folder)}")


def why_no_shards(folder: Path) -> str:
    """What ``folder`` is instead of a checkpoint with safetensors files."""
    pickles = "pickle files, which run code when loaded and are never loaded here"
    if not folder.exists():
        return "does not exist; expected a checkpoint folder"
    if folder.is_file() and folder.suffix in PICKLES:
        return f"is one of the {pickles}; expected a folder with *.safetensors"
    if folder.is_file():
        return "is a file; expected the folder that holds it, or a *.gguf file"
    if names := [file.name for file in folder.iterdir() if file.suffix in PICKLES]:
        return f"holds only {pickles} ({some(names)}); expected *.safetensors"
    if names := [file.name for file in folder.glob("*.gguf")]:
        expected = "one of them itself, of parts the first"
        return f"holds GGUF files ({some(names)}); expected {expected}"
    return "is not a checkpoint; expected config.json and *.safetensors"


def indexed_shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that a folder's index maps its tensors to. Raises ValueError."""
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(
            "has no weight_map; expected an object that maps tensor names to files"
        )
    for file in index.values():
        is_shard = isinstance(file, str) and Path(file).suffix == ".safetensors"
        expect(is_shard, "a tensor's file", file, "the name of a .safetensors file")
    shards = sorted({*index.values()})
    for file in shards:
        if file != Path(file).name or not (folder / file).is_file():
            raise ValueError(
                f"shard {file!r} is missing; expected every file that it names"
            )
    return [folder / file for file in shards], index


def some(names: Iterable[str]) -> str:
    """The first three names and how many there are beyond them."""
    first = sorted(names)
    more = f" and {len(first) - 3} more" if len(first) > 3 else ""
    return ", ".join(repr(name) for name in first[:3]) + more


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
        self.events = [torch.cuda.Event() for _ in range(2)]
        self.turn = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the GPU, contiguous. The last of it may still be on its way."""
        if tensor.is_cuda:
            return tensor
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (t.reshape(-1).view(torch.uint8) for t in (tensor, out))
        size = len(self.buffers[0])
        for part, destination in zip(
            source.split(size), target.split(size), strict=True
        ):
            buffer, event = self.buffers[self.turn][: len(part)], self.events[self.turn]
            event.synchronize()  # what the buffer held before has arrived
            buffer.copy_(part)
            destination.copy_(buffer, non_blocking=True)
            event.record(torch.cuda.current_stream(self.device))
            self.turn ^= 1
        return out


RANDOM_SCALE = 119  # an exponent of 119 - 127 = -8


class RandomCheckpoint:
    """Random weights in the shapes of ``config``, each made when it is asked for.

    A `Source`. Of MXFP4, nibbles are uniform and scales 2^-8; norms are 1, biases 0,
    embeddings and sinks N(0, 1), other weights N(0, 0.02) and rounded to their format.
    A tensor depends on the seed, its name, shape, dtype and format, and the kind of
    device alone.
    """

    files = ()
    mapped = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        self.config, self.dtype = config_once_loaded(config), dtype
        self.device = torch.device(device)
        self.seed, self._shapes = seed, tensor_shapes(config)

    def names(self) -> list[str]:
        return list(self._shapes)

    def __getitem__(self, ours: str) -> Weight:
        """The weight [..., out, in]: in ``dtype``, or in its format."""
        if self.config.tie_word_embeddings and ours == "lm_head.weight":
            ours = "embed_tokens.weight"
        shape = self._shapes[ours]
        digest = hashlib.sha256(f"{self.seed} {ours}".encode()).digest()
        generator = torch.Generator(self.device)
        generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
        form = self.config.formats.get(ours)
        if form is not None and form.is_mxfp4:
            blocks, scales = packed_shapes(shape)
            return MXFP4(
                self._empty(blocks, torch.uint8).random_(256, generator=generator),
                self._empty(scales, torch.uint8).fill_(RANDOM_SCALE),
            )
        tensor = self._empty(shape, self.dtype)
        if "bias" in ours:
            return tensor.zero_()
        if "norm" in ours:
            return tensor.fill_(1)
        std = 1.0 if ours.endswith(("embed_tokens.weight", "sinks")) else 0.02
        tensor.normal_(std=std, generator=generator)
        return encode_weight(form, tensor) if form else tensor

    @cached_property
    def _stored(self) -> dict[str, dict[str, Shape]]:
        return stored_shapes(self.config)

    def stored(self, ours: str) -> list[TensorInfo]:
        """What a file of ordinary numbers in ``dtype`` and of formats would hold."""
        form = self.config.formats.get(ours)
        plain = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        kinds = [kinds[0] for kinds in form.kinds] if form else [plain]
        infos = []
        for number, (name, shape) in enumerate(self._stored[ours].items()):
            kind = kinds[number % len(kinds)]
            size = math.prod(shape) * DTYPES[kind].itemsize
            infos.append(TensorInfo(name, kind, shape, size, Path(), 0))
        return infos

    def _empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def open_weights(
    path: str | Path | None,
    dtype: torch.dtype,
    device: torch.device,
    random_weights: bool,
    seed: int | None,
    packed: bool = False,
) -> Source:
    """The headers of a checkpoint, or the shapes of one with random weights.

    ``path`` is a folder, a GGUF file or, for random weights, the name of a known model;
    None is the embedded one. Random weights are made in ``dtype`` from ``seed``. With
    ``packed`` they become what a CPU multiplies in 4 or 16 bits, as far as they can.
    Raises CheckpointError or ConfigError, and ValueError for a seed that nothing uses.
    """
    if random_weights:
        config = open_config(path, random_weights)
        return RandomCheckpoint(config, dtype=dtype, device=device, seed=seed or 0)
    expected = "None without random_weights. The seed for drawing tokens is one of "
    expect(seed is None, "seed", seed, expected + "SamplingParams")
    location = check_downloaded(path)
    opened: Callable[..., Source] = Checkpoint
    if is_gguf(location):
        from simplellm.checkpoint.gguf.source import GGUFCheckpoint

        opened = partial(GGUFCheckpoint, dtype=dtype, device=device, packed=packed)
    return InFloat16(opened(location)) if packed else opened(location)
