"""The small files of a checkpoint folder: tokenizer and generation config."""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from simplellm.base.config import (
    CheckpointError,
    ConfigError,
    ModelConfig,
    check_kind,
    end_token_ids,
    raising,
    read_json,
)
from simplellm.base.sampling_params import SamplingParams
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.text.tokenizer import Tokenizer

EMBEDDED = Path(str(files("simplellm"))) / "embedded"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def check_downloaded(path: str | Path) -> Path:
    """The folder ``path``. A hub's name raises CheckpointError: how to get it."""
    name = f"openai/{path}" if str(path) in MODELS else str(path)
    folder = Path(path)
    if not folder.exists() and HUB_NAME.fullmatch(name):
        local = name.rpartition("/")[2]
        raise CheckpointError(
            f"{path}: does not exist; expected the folder of a checkpoint. If it is on "
            f"the Hugging Face hub, download it first: hf download {name} --local-dir "
            f"{local}, and then give {local}"
        )
    return folder


def open_config(path: str | Path | None, random_weights: bool) -> ModelConfig:
    """The config of a checkpoint folder or, for random weights, of a known model.

    Raises ConfigError.
    """
    folder = EMBEDDED if path is None else Path(path)
    config = MODELS.get(str(path)) if random_weights else None
    if random_weights and config is None and not folder.is_dir():
        raise ConfigError(
            f"{path} is neither a checkpoint folder nor a known model; expected "
            f"one of {', '.join(MODELS)}"
        )
    return config or read_config(folder / "config.json")


def read_generation_config(
    folder: Path, vocab_size: int
) -> tuple[SamplingParams, tuple[int, ...]]:
    """How to sample and what ends a turn, by generation_config.json if there is one.

    Raises ConfigError, which names the file.
    """
    file = folder / "generation_config.json"
    with raising(ConfigError, file):
        generation = read_json(file) if file.is_file() else {}
        return recommended(generation), end_token_ids(generation, vocab_size)


def recommended(generation: Mapping[str, Any]) -> SamplingParams:
    """What generation_config.json recommends: five numbers, null as good as absent.

    If ``do_sample`` is false, it recommends to be greedy. Nothing else in it counts.
    Raises TypeError or ValueError.
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
