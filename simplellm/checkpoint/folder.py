"""Where a checkpoint lies, and what the small files beside its weights say."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from simplellm.base.config import (
    CheckpointError,
    ConfigError,
    ModelConfig,
    check_kind,
    end_token_ids,
    read_json,
    reraise_as,
)
from simplellm.base.files import FolderFiles, SmallFiles
from simplellm.base.sampling_params import SamplingParams
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.checkpoint.gguf.container import MAGIC, SHARD, open_container
from simplellm.checkpoint.gguf.metadata import read_gguf_config
from simplellm.checkpoint.gguf.tokens import GGUFFiles
from simplellm.checkpoint.packages import PACKAGED, find_packaged, sampling_of
from simplellm.text.tokenizer import Tokenizer

EMBEDDED = Path(str(package_files("simplellm"))) / "embedded"
ADAPTER = "adapter_config.json"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def path_of(model: str | Path | None) -> Path:
    """The folder or file of a ``model``, None for the one that comes with the package.

    It may also be a name in `PACKAGED`, or a folder with nothing but a GGUF file.
    Raises CheckpointError if that package is missing.
    """
    if model is None:
        return EMBEDDED
    path = find_packaged(model) or Path(model)
    return only_gguf(path) or path


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file, or the first of its parts, that a download has left in a folder.

    Whether a config.json is there, too, doesn't matter; the part of a model that sees
    is none. None where there are several, or safetensors.
    """
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    files = [file for file in folder.glob("*.gguf") if "mmproj" not in file.name]
    parts = {file: SHARD.fullmatch(file.name) for file in files}
    first = [file for file, part in parts.items() if not part or int(part[2]) == 1]
    return first[0] if len(first) == 1 else None


def check_downloaded(model: str | Path | None) -> Path:
    """`path_of`. Raises CheckpointError, which says what to do, for some others.

    They are a hub's name, a name that is nothing here, and an adapter.
    """
    path = path_of(model)
    name = f"openai/{model}" if str(model) in MODELS else str(model)
    if not path.exists() and HUB_NAME.fullmatch(name):
        local = name.rpartition("/")[2]
        raise CheckpointError(
            f"{model}: does not exist; expected the folder of a checkpoint. If it is "
            f"on the Hugging Face hub, download it first: hf download {name} "
            f"--local-dir {local}, and then give {local}"
        )
    if not path.exists() and path.name == str(model):
        near = get_close_matches(path.name.lower(), PACKAGED, n=1)
        raise CheckpointError(
            f"{model}: does not exist; expected a checkpoint's folder, a .gguf file, "
            f"or {' or '.join(PACKAGED)}"
            + "".join(f". Did you mean {name}?" for name in near)
        )
    adapter = path / ADAPTER
    if adapter.is_file() and not (path / "config.json").is_file():
        with reraise_as(CheckpointError, adapter):
            base = read_json(adapter).get("base_model_name_or_path")
        raise CheckpointError(
            f"{path}: is an adapter (LoRA) of {base}; expected a whole model: peft's "
            "merge_and_unload adds it to the weights of that one"
        )
    return path


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint is a GGUF file, by its name or (ollama's) by its start."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def small_files(path: Path) -> SmallFiles:
    """The `SmallFiles` of a checkpoint, folder or GGUF. Raises CheckpointError."""
    if is_gguf(path):
        return GGUFFiles(open_container(path), sampling_of(path))
    return FolderFiles(path)


def open_config(model: str | Path | None, random_weights: bool) -> ModelConfig:
    """The config of a checkpoint or, for random weights, of a known model.

    Raises ConfigError or CheckpointError.
    """
    config = MODELS.get(str(model)) if random_weights else None
    if config is not None:
        return config
    path = path_of(model)
    if random_weights and not (path.is_dir() or is_gguf(path)):
        raise ConfigError(
            f"{model} is neither a checkpoint folder nor a known model; expected "
            f"one of {', '.join(MODELS)}"
        )
    if is_gguf(path):
        return read_gguf_config(open_container(path))
    return read_config(path / "config.json")


def read_generation_config(
    files: SmallFiles, vocab_size: int
) -> tuple[SamplingParams, tuple[int, ...]]:
    """How to sample and what ends a turn, by generation_config.json if there is one.

    Raises ConfigError, which names the file.
    """
    name = "generation_config.json"
    with reraise_as(ConfigError, files.path_of(name)):
        generation = files.json(name) or {}
        return recommended(generation), end_token_ids(generation, vocab_size)


def recommended(generation: Mapping[str, Any]) -> SamplingParams:
    """The five sampling parameters that generation_config.json may recommend.

    Null counts as absent. If ``do_sample`` is false, it recommends to be greedy; all
    its other fields are ignored. Raises TypeError or ValueError for wrong values.
    """
    do_sample = generation.get("do_sample")
    if do_sample is not None:
        check_kind("do_sample", do_sample, bool)
    if do_sample is False:
        return SamplingParams(temperature=0.0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation.get(name) for name in names}
    return SamplingParams(**{k: v for k, v in given.items() if v is not None})


def turn_ends(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    recommended: tuple[int, ...],
    names: Sequence[str],
) -> frozenset[int]:
    """The tokens that end a turn, by the config, generation_config.json and ``names``.

    Those are of control tokens; the tokenizer need not have all.
    """
    special = tokenizer.special if tokenizer else {}
    named = (special[name] for name in names if name in special)
    return frozenset([*config.eos_token_ids, *recommended, *named])
