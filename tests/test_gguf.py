"""GGUF files: read, decoded and computed as llama.cpp and transformers mean them."""

import importlib.util
import json
import math
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import families_text
import gguf
import numpy as np
import pytest
import torch
import transformers
from families import (
    GRANITE,
    WINDOW,
    Case,
    case,
    change,
    rewrite,
    rope,
    sparse,
    write,
)
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import converted, write_gguf
from tokenizers import Tokenizer
from torch import Tensor
from transformers.integrations.gguf import dequant

from simplellm import LLM
from simplellm.api.load import read_weights
from simplellm.apps.info import describe
from simplellm.apps.quantize import quantize_checkpoint
from simplellm.base.config import CheckpointError, ConfigError
from simplellm.checkpoint.gguf.blocks import MIDDLES
from simplellm.checkpoint.gguf.container import TYPES, open_container
from simplellm.checkpoint.gguf.metadata import read_gguf_config
from simplellm.checkpoint.gguf.source import GGUFCheckpoint
from simplellm.checkpoint.gguf.tensors import (
    as_array,
    dequantize_rows,
    mxfp4_of,
    scaled_of,
)
from simplellm.checkpoint.gguf.tokens import (
    generation_data,
    settings_data,
    tokenizer_data,
)
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.checkpoint.scaled import Scaled
from simplellm.model.ops import PLAIN
from simplellm.model.rope_cache import stretched_frequencies

pytestmark = pytest.mark.usefixtures("quiet_transformers")

SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
MOE = {"moe_intermediate_size": 64}
IDS = torch.randint(101, (90,), generator=torch.Generator().manual_seed(1))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
GEMMA_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
MODELS: dict[str, Callable[[], Case]] = {
    "Llama": lambda: case("Llama", **SIZES, **rope(5e5, **LLAMA3)),
    "Llama tied": lambda: case("Llama", tie_word_embeddings=True, **SIZES, **rope(1e5)),
    "Llama biases": lambda: case("Llama", attention_bias=True, mlp_bias=True, **SIZES),
    "Mistral": lambda: case("Mistral", sliding_window=None, **SIZES),
    "Mistral windows": lambda: case("Mistral", **WINDOW, **SIZES),
    "Mixtral": lambda: sparse("Mixtral", **SIZES, **rope(1e6)),
    "Qwen2": lambda: case("Qwen2", **SIZES, **rope(1e6, **YARN)),
    "Qwen3": lambda: case("Qwen3", tie_word_embeddings=True, **SIZES, **rope(1e6)),
    "Qwen3-MoE": lambda: sparse("Qwen3Moe", norm_topk_prob=True, **MOE, **SIZES),
    "Gemma3": lambda: case(
        "Gemma3", **SIZES, **GEMMA_ROPE, **WINDOW, query_pre_attn_scalar=32,
        num_hidden_layers=7, layer_types=[*5 * ["sliding_attention"],
        "full_attention", "sliding_attention"],
    ),
    "gpt-oss": lambda: case("GptOss", sliding_window=8, **SIZES, **GPT_OSS),
    "SmolLM3": lambda: case("SmolLM3", **SIZES, num_hidden_layers=5, **rope(2e6)),
    "Granite": lambda: case("Granite", **SIZES, **GRANITE, **rope(1e4)),
    "GPT2": lambda: case("GPT2", n_embd=96, n_inner=160),
}  # fmt: skip
TYPES_IN_TURN = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 BF16 F16 F32".split()


def in_turn(name: str, tensor: Tensor) -> str:
    """A type for each matrix, another one for each layer and kind of tensor."""
    return TYPES_IN_TURN[sum(map(ord, name)) % len(TYPES_IN_TURN)]


class Written:
    """A model of transformers, its GGUF file, and what the file's numbers are."""

    def __init__(self, name: str, folder: Path, type_of: Any = in_turn) -> None:
        self.folder, self.path = folder, folder / "model.gguf"
        write(folder, MODELS[name]().build())
        self.meant = write_gguf(self.path, folder, type_of)

    def logits(self) -> Tensor:
        """transformers' of IDS, from the numbers that the file's blocks stand for."""
        rewrite(self.folder, lambda tensors: meant_by(self.folder, tensors, self.meant))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.inference_mode():
            return model(IDS[None]).logits[0]


def meant_by(
    folder: Path, tensors: dict[str, Tensor], meant: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A folder's ``tensors``, their matrices replaced by what its GGUF file has.

    `converted` moves elements about: numbering them all tells which is where.
    """
    config = json.loads((folder / "config.json").read_text())
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    sizes = [tensor.numel() for tensor in tensors.values()]
    numbers = torch.arange(len(flat)).split(sizes)
    pairs = zip(tensors.items(), numbers, strict=True)
    numbered = {name: n.view(t.shape) for (name, t), n in pairs}
    for name, place in converted(config, numbered).items():
        if place.ndim > 1:  # all else is float32
            flat[place.flatten()] = meant[name].flatten()
    parts = zip(tensors.items(), flat.split(sizes), strict=True)
    return {name: part.view(t.shape) for (name, t), part in parts}


def our_logits(source: GGUFCheckpoint) -> Tensor:
    model = read_weights(source, torch.float32, torch.device("cpu"), PLAIN)
    return model.logits(IDS.tolist())


def worst(ours: Tensor, theirs: Tensor) -> float:
    difference = (ours.float() - theirs.float()).norm(dim=-1)
    return float((difference / theirs.norm(dim=-1)).max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    written = Written(name, tmp_path)
    assert worst(our_logits(GGUFCheckpoint(written.path)), written.logits()) < 1e-4


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "gpt-oss"])
def test_what_stays_small_computes_the_same(
    name: str, kind: str, tmp_path: Path
) -> None:
    written = Written(name, tmp_path, lambda name, tensor: kind)
    source = GGUFCheckpoint(written.path)
    assert worst(our_logits(source), written.logits()) < 1e-4
    weights = {ours: source[ours] for ours in source.config.formats}
    record = MXFP4 if kind == "MXFP4" else Scaled
    assert weights and {*map(type, weights.values())} == {record}
    for ours, weight in weights.items():
        stored = sum(info.nbytes for info in source.stored(ours))
        assert weight.nbytes <= stored * 36 / 34  # scales of Q8_0 are float32 here


def test_what_stays_small_are_matrices_of_layers(tmp_path: Path) -> None:
    write(tmp_path, MODELS["Llama tied"]().build())
    write_gguf(tmp_path / "a.gguf", tmp_path, lambda name, tensor: "Q8_0")
    source = GGUFCheckpoint(tmp_path / "a.gguf", torch.bfloat16)
    kept = {ours.split(".", 2)[2] for ours in source.config.formats}
    names = "attn.qkv attn.o mlp.gate_up mlp.down"
    assert kept == {f"{name}.weight" for name in names.split()}
    assert source["embed_tokens.weight"].dtype == torch.bfloat16
    on_gpu = GGUFCheckpoint(tmp_path / "a.gguf", torch.bfloat16, "cuda")
    assert on_gpu.config.formats == {}  # no kernel reads such scales
    for ours in source.config.formats:
        weight = source[ours]
        assert isinstance(weight, Scaled)
        assert torch.equal(on_gpu[ours], weight.dequantize(torch.bfloat16))
    mixed = {"blk.1.attn_k.weight": "Q4_0"}
    write_gguf(
        tmp_path / "b.gguf", tmp_path, lambda name, tensor: mixed.get(name, "Q8_0")
    )
    formats = GGUFCheckpoint(tmp_path / "b.gguf").config.formats
    assert "layers.0.attn.qkv.weight" in formats
    assert "layers.1.attn.qkv.weight" not in formats  # its parts are joined


# The numbers


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Blocks of random bits, but with scales that are finite."""
    _, elements, size = next(t for t in TYPES.values() if t[0] == kind)
    rng = np.random.default_rng(sum(map(ord, kind)))
    blocks = rng.integers(0, 256, (rows, columns // elements, size), np.uint8)
    # Where the float16 numbers of a block lie.
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    halves |= {"TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": ()}
    default = (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    for at in halves.get(kind, default) if kind != "MXFP4" else ():
        scale = rng.normal(0, 0.1, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scale.view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(100, 140, blocks.shape[:2])
    if kind == "IQ1_M":  # whose scale is in the upper halves of eight bytes
        blocks[..., 55] = blocks[..., 55] & 15 | 0x30
    return blocks.reshape(rows, -1)


def write_tensors(path: Path, tensors: dict[str, tuple[Any, str]]) -> Path:
    writer = GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QUANTIZED = [name for name, elements, _ in TYPES.values() if elements > 1]


def in_file(kind: str, rows: Any, path: Path) -> tuple[Any, Any]:
    """Rows of blocks as they come back from a file, and what it says of them."""
    from simplellm.checkpoint.gguf.tensors import as_array

    container = open_container(write_tensors(path, {"a": (rows, kind)}))
    tensor = container.tensors["a"]
    found = as_array(container.data[path], tensor)
    assert np.array_equal(found, rows)
    return found, tensor


@pytest.mark.parametrize("kind", QUANTIZED)
def test_numbers_are_those_of_ggml(kind: str, tmp_path: Path) -> None:
    rows = random_blocks(kind, 6, 512)
    found, tensor = in_file(kind, rows, tmp_path / "a.gguf")
    assert tensor.shape == (6, 512)
    numbers = dequantize_rows(found, tensor, torch.float32)
    number = GGMLQuantizationType[kind]
    assert torch.equal(numbers, torch.from_numpy(gguf.dequantize(rows, number)))
    if number.value in dequant.GGML_BLOCK:  # transformers' own way
        theirs = dequant.dequantize(torch.from_numpy(rows), number.value)
        torch.testing.assert_close(numbers.flatten(), theirs.flatten())
    half = dequantize_rows(found, tensor, torch.bfloat16)
    assert torch.equal(half, numbers.bfloat16())


def test_packed_numbers_are_kept_exactly() -> None:
    for kind, read in (("MXFP4", mxfp4_of), ("Q8_0", scaled_of)):
        rows = random_blocks(kind, 8, 256)
        wanted = gguf.dequantize(rows, GGMLQuantizationType[kind])
        kept = read(torch.from_numpy(rows))
        assert np.array_equal(kept.dequantize(torch.float32).numpy(), wanted)
        stacked = read(torch.from_numpy(rows.reshape(2, 4, -1)))
        assert stacked.shape == (2, 4, 256)
        assert torch.equal(stacked[1].dequantize(), kept[4:].dequantize())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_ordinary_numbers_are_views_of_the_file(kind: str, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    rows = gguf.quantize(numbers, GGMLQuantizationType[kind])
    path = tmp_path / "a.gguf"
    container = open_container(write_tensors(path, {"a": (rows, kind)}))
    found = as_array(container.data[path], container.tensors["a"])
    tensor = dequantize_rows(found, container.tensors["a"], torch.float32)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert torch.equal(tensor, torch.from_numpy(numbers).to(dtype))
    assert tensor.data_ptr() == found.ctypes.data


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    """It is mapped, and what isn't looked at isn't read."""
    file, rows, columns = tmp_path / "large.gguf", 2**26, 1024
    writer = gguf.GGUFWriter(file, "llama")
    shape, kind = (rows, columns), np.dtype(np.float16)
    writer.add_tensor_info("token_embd.weight", shape, kind, rows * columns * 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    begin = file.stat().st_size + writer.data_alignment
    os.truncate(file, begin + rows * columns * 2)  # 137 GB of zeros
    container = open_container(file)
    tensor = container.tensors["token_embd.weight"]
    array = as_array(container.data[tensor.file], tensor)
    assert len(array) == rows and not array[-1].any()


# The tokenizer

TEXTS = [
    "",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x ** 2  # naïve café — ünïcödé 日本語 🙂\n",
    "  two spaces, three   and\t\ttabs\n\n\nlines\r\n\r\n ",
    "It's 1234567 or 3.14159, 1st and 22nd; DON'T we'LL.",
    "e\u0301 is é, \u1e9b\u0323 and \ufb01",
    "path/to/file.py://x?y=1&z=2\x00\x07",
    "McDonald iPhone HTTPServer ÀÉ ŽivotČ",
    "<table> </td> covid19 6G-RAN2 <think>",
]


def tokenizer_of(
    kind: str, tmp_path: Path, library: Tokenizer
) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    """The library's tokenizer of a GGUF file, its settings, and all the metadata."""
    path = tmp_path / "tokens.gguf"
    writer = GGUFWriter(path, "llama")
    from gguf_files import add_tokenizer

    settings = dict(families_text.SETTINGS.get(kind, {}))
    settings["chat_template"] = families_text.TEMPLATES.get(kind)
    add_tokenizer(writer, library, kind, settings)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = dict(open_container(path).metadata)
    made = Tokenizer.from_str(json.dumps(tokenizer_data(metadata)))
    return made, settings_data(metadata), metadata


# The regular expression of each, from transformers' own table.
PATTERNS = transformers.integrations.gguf.gguf_tokenizer_mapping
SPLITS = PATTERNS.GGUF_PRE_TOKENIZER_SPLITS


@pytest.mark.parametrize("kind", ["qwen", "llama", "gpt2", "tekken", "gpt-oss"])
def test_byte_level_ids_are_the_librarys(kind: str, tmp_path: Path) -> None:
    pre = {"qwen": "qwen2", "llama": "llama3", "gpt-oss": "gpt-4o"}.get(kind, kind)
    library = families_text.byte_level(
        SPLITS.get(pre), families_text.LLAMA, "<think> covid19", nfc=kind == "qwen"
    )
    if kind in ("llama", "tekken"):
        data = json.loads(library.to_str())
        data["model"]["ignore_merges"] = True
        library = Tokenizer.from_str(json.dumps(data))
    made, settings, _ = tokenizer_of(kind, tmp_path, library)
    for text in TEXTS:
        theirs = library.encode(text, add_special_tokens=False)
        assert made.encode(text, add_special_tokens=False).ids == theirs.ids
        assert made.decode(theirs.ids) == library.decode(theirs.ids)
    adds = families_text.SETTINGS.get(kind, {}).get("add_bos_token")
    known = kind in ("llama", "tekken")
    assert settings["add_bos_token"] == (known if adds is None else adds)


def test_a_rule_goes_by_several_names(tmp_path: Path) -> None:
    """Falcon 3's is Llama 3's; so is SmolLM3's, but that no text begins with BOS."""
    _, _, metadata = tokenizer_of("llama", tmp_path, families_text.llama())
    metadata = {k: v for k, v in metadata.items() if "add_bos_token" not in k}
    made, begins = dict[str, Any](), dict[str, bool]()
    for pre in ("llama-bpe", "falcon3", "smaug-bpe"):
        named = {**metadata, "tokenizer.ggml.pre": pre}
        made[pre] = Tokenizer.from_str(json.dumps(tokenizer_data(named)))
        begins[pre] = settings_data(named)["add_bos_token"]
    assert begins == {"llama-bpe": True, "falcon3": True, "smaug-bpe": False}
    for text in TEXTS:
        ids = [one.encode(text, add_special_tokens=False).ids for one in made.values()]
        assert ids == [ids[0]] * 3


def test_smollm_takes_digits_one_by_one(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    library = families_text.byte_level(None, "<|im_end|>")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    _, _, metadata = tokenizer_of("gpt2", tmp_path, library)
    made = Tokenizer.from_str(
        json.dumps(tokenizer_data({**metadata, "tokenizer.ggml.pre": "smollm"}))
    )
    for text in TEXTS:
        assert made.encode(text).ids == library.encode(text).ids
    assert made.encode("12345").ids != library_of_gpt2().encode("12345").ids


TEXT = "It's  2.50 a\n\n\u6d4b\u8bd5x!"
ODD = "\u0294\u0295 \u10d0 \u01c4 `$1234567"  # letters of which some have no case
CUTS = {
    "deepseek-coder": (
        ["It", "'", "s", "  ", "2", ".", "5", "0", " a", "\n", "\n"],
        ["\u6d4b\u8bd5", "x", "!"],
        ["\u0294\u0295", " ", "\u10d0", " \u01c4", " `$", *"1234567"],
    ),
    "deepseek-llm": (
        ["It", "'", "s", "  ", "2", ".", "50", " a", "\n", "\n"],
        ["\u6d4b\u8bd5", "x", "!"],
        ["\u0294", "\u0295", " ", "\u10d0", " \u01c4", " `$", "1234567"],
    ),
    "default": (
        ["It", "'", "s", " ", " ", "2", ".", "50", " a", "\n", "\n"],
        ["\u6d4b\u8bd5x", "!"],
        ["\u0294\u0295", " \u10d0", " \u01c4", " `", "$", "123", "456", "7"],
    ),
}


@pytest.mark.parametrize("pre", [*CUTS, None])
def test_cuts_are_llama_cpps(pre: str | None, tmp_path: Path) -> None:
    """One after another, each within what those before it have left.

    Its ids of thousands of random texts were those of our cuts, except where there were
    spaces beyond ASCII, for which it looks in another way than the hub's files.
    """
    _, _, metadata = tokenizer_of("gpt2", tmp_path, library_of_gpt2())
    del metadata["tokenizer.ggml.pre"]
    named = {**metadata, "tokenizer.ggml.pre": pre} if pre else metadata
    made = Tokenizer.from_str(json.dumps(tokenizer_data(named)))
    assert made.pre_tokenizer is not None
    first, second, odd = CUTS[pre or "default"]
    for text, wanted in ((TEXT, first + second), (ODD, odd)):
        found = made.pre_tokenizer.pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in found] == wanted
    assert settings_data(named).get("add_bos_token") is False


def library_of_gpt2() -> Tokenizer:
    return families_text.byte_level(None, "<|im_end|>")


def test_the_best_pieces_are_merged_first() -> None:
    """By their scores, which need not fall with the ids: pieces may be added later."""
    pieces = ["<unk>", "\u2581", "a", "b", "c", "ab", "bc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, *[1] * 6],
    }
    for scores, expected in (
        ({}, ["\u2581", "ab", "c"]),
        (
            {"tokenizer.ggml.scores": [0.0, -1, -2, -3, -4, -5, 0]},
            ["\u2581", "a", "bc"],
        ),
    ):
        data = tokenizer_data({**metadata, **scores})
        assert Tokenizer.from_str(json.dumps(data)).encode("abc").tokens == expected


def test_a_text_gets_a_space_in_front() -> None:
    """Whatever it begins with, as of Llama 2 and Phi-3 in llama.cpp and on the hub; in
    Mistral's later files only the first one, unless it has a space."""
    pieces = ["<unk>", "\u2581", "a", "\u2581a", "<s>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 3],
    }
    later = {
        "tokenizer.ggml.tokens": [*pieces, "[INST]"],
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 3, 3],
    }
    bare = {"tokenizer.ggml.add_space_prefix": False}
    for more, texts in (
        ({}, {"a": [3], " a": [1, 3], "<s>a": [4, 3], "<s> a": [4, 1, 3]}),
        (later, {"a": [3], " a": [3], "<s>a": [4, 2], "<s> a": [4, 3]}),
        (bare, {"a": [2], " a": [3], "<s>a": [4, 2], "<s> a": [4, 3]}),
    ):
        made = Tokenizer.from_str(json.dumps(tokenizer_data({**metadata, **more})))
        assert {text: made.encode(text).ids for text in texts} == texts


def sentencepiece_ids(text: str, ids: dict[str, int]) -> list[int]:
    """SentencePiece's algorithm, as its paper has it: merge the best pair, again."""
    pieces = list(text)
    while True:
        pairs = [
            (ids[a + b], place)
            for place, (a, b) in enumerate(pairwise(pieces))
            if a + b in ids
        ]
        if not pairs:
            break
        _, place = min(pairs)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    found = []
    for piece in pieces:
        spelled = [f"<0x{byte:02X}>" for byte in piece.encode()]
        found += [ids[piece]] if piece in ids else [ids[byte] for byte in spelled]
    return found


@pytest.mark.parametrize("kind", ["mistral", "gemma"])
def test_sentencepiece_ids_are_those_of_its_algorithm(
    kind: str, tmp_path: Path
) -> None:
    library = families_text.sentencepiece(kind)
    made, settings, metadata = tokenizer_of(kind, tmp_path, library)
    tokens = [text.replace(" ", "▁") for text in metadata["tokenizer.ggml.tokens"]]
    kinds = metadata["tokenizer.ggml.token_type"]
    ids = {t: n for n, t in enumerate(tokens) if kinds[n] in (1, 4, 6)}
    for text in TEXTS[:-1]:
        # Runs of line ends are tokens of Gemma's, found before all else is merged.
        parts = re.split("(\n\n\n|\n\n)", text) if kind == "gemma" else [text]
        prefix = "▁" * (kind == "mistral" and text != "" and text[0] != " ")
        wanted: list[int] = []
        for piece in parts:
            spelled = prefix + piece.replace(" ", "▁")
            run = piece in ids and not piece.strip("\n")
            wanted += [ids[piece]] if run else sentencepiece_ids(spelled, ids)
        assert made.encode(text, add_special_tokens=False).ids == wanted
    assert settings["bos_token"] == families_text.SETTINGS[kind]["bos_token"]
    assert settings["chat_template"][0]["template"] == families_text.TEMPLATES[kind]
    for name in ("<unk>", "<table>", "</s>", "<start_of_turn>"):
        if (id := library.token_to_id(name)) is not None:
            assert made.encode(name, add_special_tokens=False).ids == [id]


def test_what_ends_a_turn_and_how_to_sample() -> None:
    tokens = ["<|eot_id|>", "<|im_end|>", "a", "<|end|>", "<eos>"]
    metadata = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.mirostat": 0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 1, 3, 3],
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.eot_token_id": 2,
    }
    wanted = {"temperature": 0.6, "top_k": 20, "eos_token_id": [4, 2, 0]}
    assert generation_data(metadata) == wanted
    oss = metadata | {"general.architecture": "gpt-oss"}
    assert generation_data(oss)["eos_token_id"] == [4, 2]


def test_tokens_that_repeat_or_are_empty_are_taken() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "", "ab", "a", "<x>", "<x>", "", "[PAD8]"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 3, 3, 5],
        "tokenizer.ggml.merges": ["a b"],
    }
    data = tokenizer_data(metadata)
    assert data is not None
    assert data["model"]["vocab"] == {"a": 0, "b": 1, "ab": 3, "<x>": 5}
    assert [token["id"] for token in data["added_tokens"]] == [5]
    assert Tokenizer.from_str(json.dumps(data)).encode("abba<x>").ids == [3, 1, 0, 5]


# What is refused


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write(folder, MODELS["Llama tied"]().build())
    write_gguf(folder / "model.gguf", folder)
    return folder


def changed(path: Path, target: Path, **values: Any) -> Path:
    """A GGUF file with other metadata: of 'a__b', the key 'a.b'; None takes it out."""
    reader = gguf.GGUFReader(path)
    architecture = values.pop("architecture", "llama")
    writer = GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        new = values.get(key.replace(".", "__"), field.contents())
        ours = key.startswith("GGUF.") or key == "general.architecture"
        if not ours and new is not None and key.replace(".", "__") not in values:
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, new, field.types[0], sub)
    for key, value in values.items():
        if value is not None:
            add: Any = {
                bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array,
                float: writer.add_float32, str: writer.add_string,
            }[value.__class__]  # fmt: skip
            add(key.replace("__", "."), value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama__attention__clamp_kqv", 8.0, "clamp_kqv is 8.0; expected no such"),
        ("llama__logit_scale", 0.5, "llama.logit_scale is 0.5; expected one of"),
        ("llama__rope__dimension_count", 16, "dimension_count is 16; expected 32"),
        ("llama__rope__scaling__type", "longrope", "type is 'longrope'"),
        ("llama__rope__scaling__attn_factor", 0.8, "attn_factor is 0.8"),
        ("llama__attention__head_count_kv", [2, 1, 2], "the same number for all"),
        ("llama__final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0"),
        ("architecture", "mamba", "general.architecture is 'mamba'; expected one of"),
        ("llama__block_count", 4, "what it lacks is ['blk.3.attn_k.weight'"),
        ("llama__block_count", 2, "what it holds is ['blk.2.attn_k.weight'"),
        ("llama__attention__head_count", 4, "shape of 'blk.0.attn_q.weight' is"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(
    llama: Path, tmp_path: Path, key: str, value: Any, said: str
) -> None:
    path = changed(llama / "model.gguf", tmp_path / "a.gguf", **{key: value})
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        GGUFCheckpoint(path)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)


def test_lists_and_neutral_values_are_taken(llama: Path, tmp_path: Path) -> None:
    path = changed(
        llama / "model.gguf",
        tmp_path / "a.gguf",
        llama__attention__head_count_kv=[2, 2, 2],
        llama__logit_scale=1.0,
        llama__expert_count=0,
        llama__rope__scaling__type="none",
    )
    plain = open_container(llama / "model.gguf")
    assert read_gguf_config(open_container(path)) == read_gguf_config(plain)


def test_a_context_length_has_the_factor_in_it(llama: Path, tmp_path: Path) -> None:
    """Unlike max_position_embeddings, which vLLM multiplies by it."""
    path = changed(
        llama / "model.gguf",
        tmp_path / "a.gguf",
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=4.0,
    )
    config = read_gguf_config(open_container(path))
    assert config.rope_scaling is not None and config.rope_scaling.factor == 4
    assert config.max_position_embeddings == 256


@torch.inference_mode()
def test_yarns_factor_of_attention_is_llama_cpps(tmp_path: Path) -> None:
    """It multiplies YaRN's own; fields that llama.cpp doesn't read change nothing."""
    model = MODELS["Qwen2"]().build()
    write(tmp_path, model)
    write_gguf(tmp_path / "model.gguf", tmp_path)
    fields = {"attn_factor": 0.8, "yarn_attn_factor": 0.9, "yarn_ext_factor": 0.5}
    fields |= {"yarn_log_multiplier": 0.7}
    prefix = "qwen2__rope__scaling__"
    said: dict[str, Any] = {prefix + name: value for name, value in fields.items()}
    path = tmp_path / "a.gguf"
    changed(tmp_path / "model.gguf", path, architecture="qwen2", **said)
    change(
        tmp_path,
        lambda data: {
            **data,
            "rope_parameters": data["rope_parameters"]
            | {"attention_factor": 0.8 * (0.1 * math.log(4) + 1)},
        },
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = theirs(IDS[None]).logits[0]
    assert worst(our_logits(GGUFCheckpoint(path)), expected) < 1e-5
    plain = GGUFCheckpoint(tmp_path / "model.gguf")
    assert worst(our_logits(plain), expected) > 1e-3


def test_gemmas_pattern_may_be_a_list(tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    write(folder, MODELS["Gemma3"]().build())
    write_gguf(folder / "model.gguf", folder)
    path = folder / "a.gguf"
    said: dict[str, Any] = {"architecture": "gemma3"}
    local = [True, False, True, True, True, False, True]
    said |= {"gemma3__attention__sliding_window_pattern": local}
    changed(folder / "model.gguf", path, **said, gemma3__rope__freq_base_swa=2e4)
    config = read_gguf_config(open_container(path))
    assert [kind == "sliding_attention" for kind in config.layer_types] == local
    assert config.local_rope_theta == 2e4


def test_other_pre_tokenizers_are_refused_by_name() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "viking",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(
        ValueError, match=r"tokenizer.ggml.pre is 'viking'; expected one"
    ):
        tokenizer_data(metadata)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model is 'bert'"):
        tokenizer_data({**metadata, "tokenizer.ggml.model": "bert"})
    assert tokenizer_data({"tokenizer.ggml.model": "none"}) is None


def test_types_without_a_decoder_are_refused_by_name(tmp_path: Path) -> None:
    rows = np.zeros((2, 18), np.uint8)
    path = write_tensors(tmp_path / "a.gguf", {"x": (rows, "Q1_0")})
    with pytest.raises(CheckpointError, match=r"type of 'x' is 'Q1_0'; expected one"):
        open_container(path)


def test_rope_factors_divide_frequencies(tmp_path: Path) -> None:
    """Llama 3.1's come from a formula; these come from nowhere."""
    write(tmp_path, MODELS["Llama"]().build())
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path)
    data = bytearray(path.read_bytes())
    at = open_container(path).tensors["rope_freqs.weight"].offset
    data[at : at + 4] = struct.pack("<f", 3.0)
    path.write_bytes(data)
    config = GGUFCheckpoint(path).config
    found, factor = stretched_frequencies(config)
    plain, _ = stretched_frequencies(replace(config, rope_scaling=None))
    assert factor == 1 and torch.equal(plain[:1] / found[:1], torch.tensor([3.0]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"GGUF", "the file is cut off"),
        (b"GGML" + bytes(40), "first four bytes is b'GGML'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version of GGUF is 1; expected"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "in little-endian order"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "the file is cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(9), "is cut off"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_container(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_files_cut_anywhere_are_refused(llama: Path, tmp_path: Path) -> None:
    data = (llama / "model.gguf").read_bytes()
    path = tmp_path / "a.gguf"
    for size in [*range(1, 1200, 7), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="cut off"):
            open_container(path)


# Files


def test_several_files_are_one_model(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, llama, split_max_tensors=10)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 2
    one, several = GGUFCheckpoint(llama / "model.gguf"), GGUFCheckpoint(shards[0])
    assert several.files == shards
    for ours in one.names():
        assert torch.equal(one[ours], several[ours])
    with pytest.raises(CheckpointError, match="name-00001-of-"):
        GGUFCheckpoint(shards[1])
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"missing.*{shards[1].name}"):
        GGUFCheckpoint(shards[0])


# As users meet them


def test_info_says_what_becomes_of_the_numbers(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    types = {"blk.0.ffn_down.weight": "Q4_0", "token_embd.weight": "Q5_1"}
    write_gguf(path, llama, lambda name, tensor: types.get(name, "Q8_0"))
    text = "\n".join(describe(str(path)))
    assert "GGUF files: 1" in text
    said = " ".join(text.split())
    assert "Q4_0, Q5_1 become bfloat16 on a GPU, float16 or float32 on a CPU" in said
    assert "a CPU with AVX2 may keep Q4_0, Q5_1, Q8_0 packed" in said
    assert max(map(len, text.splitlines()[1:])) <= 80
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert rows["attention"].split()[1] == "Q8_0"
    assert rows["feed-forward"].split("  ")  # a row of each part
    stored = sum(t.nbytes for t in open_container(path).tensors.values())
    assert rows["total"].split()[2] == f"{stored:,}"


def test_an_llm_of_a_file(tmp_path: Path) -> None:
    library, path = families_text.llama(), tmp_path / "model.gguf"
    rows = library.get_vocab_size() + 3
    model = case("Llama", tie_word_embeddings=True, **SIZES | {"vocab_size": rows})
    folder = write(tmp_path / "hub", model.build())
    settings = dict(families_text.SETTINGS["llama"])
    settings["chat_template"] = families_text.TEMPLATES["llama"]
    write_gguf(path, folder, in_turn, library, "llama", settings)
    families_text.write_text_side(folder, "llama")
    text = "What is <|eot_id|> 12345?"
    with LLM(path) as one, LLM(folder) as other:
        ours, theirs = (
            llm.input_processor.process_chat(
                [{"role": "user", "content": text}], current_date="1 May 2026"
            )
            for llm in (one, other)
        )
        assert ours.tokens == theirs.tokens
        ends = "<|eot_id|> <|eom_id|> <|end_of_text|>".split()
        assert one.eos_token_ids == {*map(library.token_to_id, ends)}
        prompts = [llm.generate(text, max_tokens=2).result() for llm in (one, other)]
        first = library.token_to_id("<|begin_of_text|>")
        for output in (prompts[0][0], prompts[1][0]):
            assert output.prompt_token_ids[0] == first
            assert output.prompt_token_ids[1:] == one.tokenizer.encode(text)


def test_files_in_a_folder_and_other_files_are_told_apart(
    llama: Path, tmp_path: Path
) -> None:
    """A download may leave a folder with one, and ollama keeps them without a name."""
    for name in ("a.gguf", "mmproj-a.gguf", "sha256-1f2e"):
        (tmp_path / name).symlink_to(llama / "model.gguf")
    for path in (tmp_path, tmp_path / "sha256-1f2e"):
        with LLM(path) as llm:
            assert llm.config.hidden_size == 96
    (tmp_path / "b.gguf").symlink_to(llama / "model.gguf")
    with pytest.raises(
        CheckpointError, match=r"holds GGUF files .* one of them itself"
    ):
        LLM(tmp_path)
    shutil.copy(llama / "model.safetensors", tmp_path)
    shutil.copy(llama / "config.json", tmp_path)
    with LLM(tmp_path) as llm:  # as the hub has it goes first
        assert not llm.config.formats
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"is a file; .* or a \*\.gguf file"):
        LLM(tmp_path / "other.txt")
    with pytest.raises(ValueError, match="numbers are rounded already"):
        quantize_checkpoint(llama / "model.gguf", tmp_path / "out", "int8")


@pytest.mark.parametrize("packed", [False, True])
def test_without_the_library_most_numbers_load(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
    model = case("Llama", num_attention_heads=8, head_dim=32, **sizes)
    write(tmp_path, model.build())
    kinds = iter(10 * [*MIDDLES])
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    write_gguf(path, tmp_path, lambda name, tensor: next(kinds))
    write_gguf(other, tmp_path, lambda name, tensor: "TQ2_0")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "simplellm.checkpoint.gguf.source.find_spec",
        lambda name: None if name == "gguf" else find(name),
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    source = GGUFCheckpoint(path, packed=packed)
    assert all(source[name] is not None for name in source.names())
    with pytest.raises(CheckpointError, match=r"pip install 'simplellm\[gguf\]'"):
        GGUFCheckpoint(other, packed=packed)
