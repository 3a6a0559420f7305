"""What each number format makes of a model: its size, its speed, its answers.

The weights of the layers are rounded as they are loaded; nothing is written.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from simplellm.api.choose_operations import takes_packed
from simplellm.api.input_processor import InputProcessor, LoadedModel
from simplellm.api.load import load_engine
from simplellm.apps.bench import Bench, Case
from simplellm.apps.quantize import TARGETS
from simplellm.apps.report import circumstances
from simplellm.base.config import BLOCK, EngineConfig, ModelConfig
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.checkpoint.folder import EMBEDDED, path_of
from simplellm.checkpoint.formats import NumberFormat
from simplellm.checkpoint.in_float16 import InFloat16, product_weights
from simplellm.checkpoint.mxfp4 import MXFP4, Weight
from simplellm.checkpoint.names import tensor_shapes
from simplellm.checkpoint.scaled import Scaled
from simplellm.checkpoint.source import Source
from simplellm.checkpoint.stored import encode_weight
from simplellm.model.machine import dtype_name, find_device, find_dtype
from simplellm.model.memory import weight_bytes

BATCHES, INPUT_LEN, OUTPUT_LEN = (1, 8), 128, 64
PROBLEMS = EMBEDDED / "problems.json"  # held out, made by tools/embedded/problems.py


FORMAT_ROWS = {
    "format": ("layers' weights", "s"),
    "weights": ("bytes", ",d"),
    "one": ("tok/s\nbatch 1", ",.1f"),  # of the median step
    "eight": ("tok/s\nbatch 8", ",.1f"),
    "right": ("right\nanswers", "s"),  # to the letter, and of how many
}


class RoundedCheckpoint:
    """The mapping of a checkpoint, its layers' weights rounded to a ``form``."""

    def __init__(self, source: Source, form: NumberFormat) -> None:
        self.source = source
        forms = dict.fromkeys(rounded_weights(source.config, form), form)
        self.config = replace(source.config, formats=forms)
        self.names, self.stored = source.names, source.stored
        self.files, self.mapped = source.files, False

    def __getitem__(self, ours: str) -> Weight:
        weight, form = self.source[ours], self.config.formats.get(ours)
        if isinstance(weight, MXFP4 | Scaled):
            weight = weight.dequantize(torch.float32)
        assert isinstance(weight, torch.Tensor)  # as none is packed for a CPU
        return encode_weight(form, weight) if form else weight


def rounded_weights(config: ModelConfig, form: NumberFormat) -> Iterator[str]:
    """The weights that are rounded; rows that MXFP4's blocks do not fill are not."""
    shapes = tensor_shapes(config)
    for ours in product_weights(config):
        fits = not form.is_mxfp4 or shapes[ours][-1] % BLOCK == 0
        if ours.startswith("layers.") and fits:
            yield ours


def count_right(llm: Any) -> str:
    """How many of the embedded model's held-out problems it answers, and of how many.

    Greedily, at medium effort; an answer counts if it is right to the letter.
    """
    problems = json.loads(PROBLEMS.read_text(encoding="utf-8"))
    chats = [[{"role": "user", "content": one["question"]}] for one in problems]
    answers = llm.chat(chats, temperature=0, max_tokens=300)
    pairs = zip(answers, problems, strict=True)
    right = sum(one.content == problem["answer"] for one, problem in pairs)
    return f"{right} of {len(chats)}"


def measure_row(llm: Any, name: str, nbytes: int, asks: bool) -> dict[str, Any]:
    """The row of a model in one format, measured on an LLM that is otherwise idle."""
    bench = Bench(llm, torch.Generator().manual_seed(0))
    cases = [Case("decode", batch, INPUT_LEN, OUTPUT_LEN) for batch in BATCHES]
    steps = [bench.case(case)[0].full_steps(case.batch) for case in cases]
    one, eight = (x / median(y) for x, y in zip(BATCHES, steps, strict=True))
    return {
        "format": name,
        "weights": nbytes,
        "one": one,
        "eight": eight,
        "right": count_right(llm) if asks else "not asked",
        "backend": llm.backend_reason,
    }


def measure_formats(
    start: Any,
    model: str | None = None,
    *,
    random_weights: bool = False,
    device: str | None = None,
    command: str = "",
) -> dict[str, Any]:
    """The record of a checkpoint as it is stored, and in each format.

    These are the formats that some of its weights may have. ``start`` is the class
    `LLM`. The embedded model's answers are counted, too.
    """
    target = find_device(device)
    dtype = find_dtype(None, target)
    config = EngineConfig(max_num_seqs=32).resolved(target.type)
    packed = takes_packed(config, None, target)
    source, stored = (
        open_weights(model, dtype, target, random_weights, None, way)
        for way in (False, packed)
    )
    input_processor = InputProcessor.open(path_of(model), source.config)
    load = os.getloadavg()[0]
    rows, asks = [], model is None and not random_weights
    forms: dict[str, NumberFormat | None] = {"as stored": None, **TARGETS}
    for name, form in tqdm(forms.items(), disable=None, leave=False):
        if form and not any(rounded_weights(source.config, form)):
            continue
        one: Any = RoundedCheckpoint(source, form) if form else stored
        one = InFloat16(one) if form and packed else one  # as it is once it's written
        size = weight_bytes(one.config, dtype.itemsize)
        engine, how, seconds = load_engine(one, config, dtype, target)
        limited = replace(input_processor, max_model_len=engine.max_model_len)
        with start.of(LoadedModel(engine, limited, how, seconds)) as llm:
            rows.append(measure_row(llm, name, sum(size.values()), asks))
    return circumstances(model, target, command) | {
        "dtype": dtype_name(dtype),
        "load_average": load,  # of the machine, before
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "rows": rows,
    }
