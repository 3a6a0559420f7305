"""The families of models that run here, each one file of data; `family.py` reads it.

A new one is such a file and an entry below. What it says in other words than those
before it (a norm, an activation, a rule of routing) is a record of `model/layers.py`
and a case of an operation in `model/ops.py`; the forward pass stays as it is. For
GGUF files, `checkpoint/gguf/metadata.py` (MODEL_TYPES, OF_FAMILY) and perhaps
`checkpoint/gguf/source.py` (PAIRED_HEADS) and `checkpoint/gguf/names.py` have to know
it. CASES of tests/families.py has what it is compared with.

`decoder.py` has the tensors that most families share. The families: `gpt_oss.py`,
`llama.py`, `qwen2.py`, `qwen3.py`, `qwen3_moe.py`, `mistral.py`, `mixtral.py`,
`gemma3.py`, `gpt2.py`, `smollm3.py`, `granite.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from simplellm.base.config import (
    ConfigError,
    ModelConfig,
    expect,
    expect_type,
    one_of,
    read_json,
    reraise_as,
)
from simplellm.checkpoint.families.family import Data, Family
from simplellm.checkpoint.families.gemma3 import GEMMA3
from simplellm.checkpoint.families.gpt2 import GPT2
from simplellm.checkpoint.families.gpt_oss import GPT_OSS
from simplellm.checkpoint.families.granite import GRANITE
from simplellm.checkpoint.families.llama import LLAMA
from simplellm.checkpoint.families.mistral import MISTRAL
from simplellm.checkpoint.families.mixtral import MIXTRAL
from simplellm.checkpoint.families.qwen2 import QWEN2
from simplellm.checkpoint.families.qwen3 import QWEN3
from simplellm.checkpoint.families.qwen3_moe import QWEN3_MOE
from simplellm.checkpoint.families.smollm3 import SMOLLM3
from simplellm.checkpoint.formats import (
    FIELD,
    format_names,
    formats,
    read_quantization,
)

ALL = (
    *(GPT_OSS, QWEN3, QWEN3_MOE, LLAMA, QWEN2, MISTRAL, MIXTRAL, GEMMA3, GPT2),
    SMOLLM3,
    GRANITE,
)
# By what config.json calls its model_type.
FAMILIES: dict[str, Family] = {
    model_type: family for family in ALL for model_type in family.model_types
}


def title(config: ModelConfig) -> str:
    """The family, and the formats of weights that are not ordinary numbers."""
    said = format_names(config)
    return FAMILIES[config.model_type].name + (f" ({said})" if said else "")


@reraise_as(ConfigError)
def family_config(data: Data) -> ModelConfig:
    """The config of a parsed config.json of any family. Raises ConfigError.

    That is also for what would need the checkpoint's own Python code, and for formats
    of weights that nobody here reads. Of a model_type that is known here, such code is
    left aside, as it is in transformers unless one trusts it.
    """
    expected = "none beside an unknown model_type: Python code that comes with a "
    expected += "checkpoint is never run"
    known = data.get("model_type") in FAMILIES or not data.get("auto_map")
    expect(known, "auto_map", data.get("auto_map"), expected)
    expected = "that of the hub: this is OpenAI's own, of a folder named original; the "
    expected += "folder that it lies in has the same weights"
    layout = "rope_scaling_factor" in data and "model_type" not in data
    expect(not layout, "the layout", "original", expected)
    expected = "none, which is MLX's format: the weights that it was made of run here"
    expect(not data.get("quantization"), "quantization", "given", expected)
    one_of("model_type", data.get("model_type"), tuple(FAMILIES))
    config = FAMILIES[data["model_type"]].config(data)
    old = data.get("compression_config")  # compressed-tensors' own field once
    if quantization := data.get("quantization_config") or old:
        stored = formats(config, read_quantization(quantization))
        config = replace(config, formats=stored)
    return config


def read_config(file: str | Path) -> ModelConfig:
    """`family_config` of a file, which errors name.

    NVIDIA once wrote how weights are stored into a file beside it.
    """
    with reraise_as(ConfigError, file):
        data, beside = read_json(file), Path(file).with_name("hf_quant_config.json")
        if not data.get(FIELD) and beside.is_file():
            said: Any = read_json(beside).get("quantization")
            expect_type(f"quantization of {beside.name}", said, dict, "an object")
            data = {**data, FIELD: {"quant_method": "modelopt", **said}}
        return family_config(data)
