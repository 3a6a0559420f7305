"""Every kind of bad input gets one message: what is wrong, and what was expected."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint

from simplellm import LLM, ContextLengthError
from simplellm.api.load import load_model
from simplellm.base.config import ConfigError, EngineConfig
from simplellm.checkpoint.checkpoint import INDEX, CheckpointError
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.text.harmony import Message, render
from simplellm.text.tokenizer import TokenizerError

ATTENTION = "model.layers.0.self_attn.k_proj.weight"
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"
CONFIG = replace(TINY, vocab_size=2000)  # more than the embedded tokenizer has
Header = dict[str, dict[str, Any]]


def edit_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Damage that changes one of the folder's JSON files."""

    def damage(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return damage


def edit_header(change: Callable[[Header], object]) -> Callable[[Path], None]:
    """Damage that changes the JSON header of model.safetensors."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:end])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    return damage


def rename(old: str, new: str) -> Callable[[Path], None]:
    return edit_header(lambda header: header.__setitem__(new, header.pop(old)))


def overwrite(name: str, content: bytes, start: int = 0) -> Callable[[Path], None]:
    """Damage that puts ``content`` over a file's bytes from ``start`` on."""

    def damage(folder: Path) -> None:
        raw = (folder / name).read_bytes() if (folder / name).exists() else b""
        end = start + len(content)
        (folder / name).write_bytes(raw[:start] + content + raw[end:])

    return damage


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_shard(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def write_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_checkpoint(folder, CONFIG, shards=2)


def index_to_nowhere(folder: Path) -> None:
    write_shards(folder)
    edit_json(INDEX, lambda index: index["weight_map"].update(x="nowhere"))(folder)


def shrink(header: Header) -> None:
    header[ATTENTION]["shape"].reverse()


def overlap(header: Header) -> None:
    offsets = header[ATTENTION]["data_offsets"]
    offsets[0], offsets[1] = offsets[0] - 2, offsets[1] - 2


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


# What is done to a good checkpoint, and what the error says.
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], type[Exception], list[str]]] = {
    "no weights": (
        remove("model.safetensors"),
        CheckpointError,
        ["is not a checkpoint", "expected config.json and *.safetensors"],
    ),
    "no config": (remove("config.json"), ConfigError, ["config.json"]),
    "config is no JSON": (
        overwrite("config.json", b"!!"),
        ConfigError,
        ["config.json", "JSON"],
    ),
    "unknown model_type": (
        edit_json("config.json", lambda config: config.update(model_type="mamba")),
        ConfigError,
        ["model_type is 'mamba'", "expected one of 'gpt_oss', 'qwen3'"],
    ),
    "no model_type": (
        edit_json("config.json", lambda config: config.pop("model_type")),
        ConfigError,
        ["model_type is None", "expected one of 'gpt_oss'"],
    ),
    "truncated": (truncate, CheckpointError, ["model.safetensors", "expected"]),
    "empty file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        CheckpointError,
        ["model.safetensors", "expected"],
    ),
    "oversized header": (
        overwrite("model.safetensors", b"\xff" * 7 + b"\x0f"),
        CheckpointError,
        ["model.safetensors", "header", "expected"],
    ),
    "overlapping tensors": (
        edit_header(overlap),
        CheckpointError,
        ["model.safetensors", "expected"],
    ),
    "dtype of no model": (
        edit_header(lambda header: header[ATTENTION].update(dtype="I16")),
        CheckpointError,
        [ATTENTION, "is I16", "expected BF16"],
    ),
    "dtype of another tensor": (
        edit_header(lambda header: header[BLOCKS].update(dtype="F8_E4M3")),
        CheckpointError,
        [BLOCKS, "F8_E4M3", "expected"],
    ),
    "shard missing": (
        lose_shard,
        CheckpointError,
        ["'model-00002-of-00002.safetensors' is missing", INDEX],
    ),
    "index to no file": (index_to_nowhere, CheckpointError, [INDEX, "'nowhere'"]),
    "tensor missing": (
        edit_header(lambda header: header.update(x=header.pop(ATTENTION))),
        CheckpointError,
        [f"lacks '{ATTENTION}'", "expected the 41 tensors"],
    ),
    "wrong shape": (
        edit_header(shrink),
        CheckpointError,
        [f"'{ATTENTION}' has shape [", "expected ["],
    ),
    "only pickles": (
        only_pickles,
        CheckpointError,
        ["pytorch_model.bin", "never loaded", "expected *.safetensors"],
    ),
    "vocabulary smaller than the tokenizer": (
        lambda folder: write_checkpoint(folder, TINY),
        ConfigError,
        [
            "tokenizer.json: the tokenizer has ",
            "expected at most the model's vocab_size, 97",
        ],
    ),
    "generation_config that no sampler understands": (
        overwrite("generation_config.json", b'{"top_k": 50.0}'),
        ConfigError,
        ["generation_config.json: top_k is 50.0", "expected an integer"],
    ),
    "tokenizer is no tokenizer": (
        overwrite("tokenizer.json", b"[" + b" " * 100_000),
        TokenizerError,
        ["tokenizer.json", "not JSON"],
    ),
}


def assert_says(
    caught: pytest.ExceptionInfo[Exception], error: type[Exception], parts: list[str]
) -> None:
    """This type, a TypeError only if that is meant, one line, and all of the parts."""
    assert issubclass(caught.type, error)
    assert issubclass(caught.type, TypeError) == (error is TypeError)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def write_good(folder: Path) -> Path:
    """A checkpoint folder with nothing wrong."""
    shutil.copy(EMBEDDED / "tokenizer.json", folder)
    return write_checkpoint(folder, CONFIG)


def test_undamaged(tmp_path):
    with LLM(write_good(tmp_path)) as llm:
        output = llm.generate("Hi", max_tokens=1).result(timeout=60)[0]
    assert len(output.token_ids) == 1


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoint(tmp_path, case):
    damage, error, parts = CHECKPOINTS[case]
    write_good(tmp_path)
    damage(tmp_path)
    with pytest.raises(error) as caught:
        LLM(tmp_path)
    assert_says(caught, error, parts)


def test_no_tokenizer(tmp_path):
    """Such a model takes token ids, and says so when it is given text."""
    remove("tokenizer.json")(write_good(tmp_path))
    with LLM(tmp_path) as llm:
        assert len(llm.generate([1], max_tokens=1).result()[0].token_ids) == 1
        with pytest.raises(ValueError) as caught:
            llm.generate("Hi", max_tokens=1)
    assert_says(caught, ValueError, ["no tokenizer.json", "expected prompts of token"])


def test_path_is_no_folder(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        LLM(tmp_path / "absent")
    assert_says(caught, CheckpointError, ["absent: does not exist", "expected a"])
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        LLM(tmp_path / "model.pt")
    assert_says(caught, CheckpointError, ["pickle file", "never loaded", "expected a"])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(write_good(tmp_path_factory.mktemp("good"))) as llm:
        yield llm


PROMPTS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "empty": ("", ValueError, ["prompt is empty", "expected at least one token"]),
    "no tokens": ([[]], ValueError, ["prompt is empty", "expected at least one"]),
    "a number": (47, TypeError, ["prompts is int", "expected text"]),
    "bytes": (b"What?", TypeError, ["prompts is bytes", "expected text"]),
    "nothing": (None, TypeError, ["prompts is None", "expected text"]),
    "a number among texts": (["Hi", 3.5], TypeError, ["prompt is float", "expected"]),
    "numbers that are no ids": (
        [[1.5]],
        TypeError,
        ["a token id of a prompt is 1.5", "expected an integer"],
    ),
    "an id beyond": (
        [[1, 10**6]],
        ValueError,
        ["a token id of prompt is 1000000", "expected 0"],
    ),
    "a negative id": (
        [[-1]],
        ValueError,
        ["a token id of prompt is -1", "expected 0"],
    ),
    "too long": (
        [[1] * 131_073],
        ContextLengthError,
        ["context length is 131072 tokens", "too long: 131073 tokens > 131071"],
    ),
    "lone surrogate": ("a\ud800", TokenizerError, ["surrogate U+D800", "position 1"]),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompt(llm, case):
    prompts, error, parts = PROMPTS[case]
    with pytest.raises(error) as caught:
        llm.generate(prompts, max_tokens=1).result(timeout=60)
    assert_says(caught, error, parts)


SAMPLING: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"max_tokens": 0}, ValueError, ["max_tokens is 0", "expected 1 or more"]),
    ({"max_tokens": 1.5}, TypeError, ["max_tokens is 1.5", "expected an integer"]),
    ({"max_tokens": True}, TypeError, ["max_tokens is True", "expected an integer"]),
    ({"temperature": -0.1}, ValueError, ["temperature is -0.1", "expected 0 to"]),
    ({"temperature": math.nan}, ValueError, ["temperature is nan", "expected 0 to"]),
    ({"temperature": "hot"}, TypeError, ["temperature is 'hot'", "expected a number"]),
    ({"top_p": 0}, ValueError, ["top_p is 0", "expected"]),
    ({"top_p": 1.01}, ValueError, ["top_p is 1.01", "expected"]),
    ({"top_k": -2}, ValueError, ["top_k is -2", "expected"]),
    ({"min_p": 2}, ValueError, ["min_p is 2", "expected 0 to 1"]),
    ({"repetition_penalty": 0}, ValueError, ["repetition_penalty is 0", "expected"]),
    ({"presence_penalty": 3}, ValueError, ["presence_penalty is 3", "expected -2 to"]),
    ({"frequency_penalty": -3}, ValueError, ["frequency_penalty is -3", "expected -2"]),
    ({"stop": ["a", ""]}, ValueError, ["stop", "expected"]),
    ({"stop": 3}, TypeError, ["stop", "expected"]),
    ({"seed": "x"}, TypeError, ["seed is 'x'", "expected an integer"]),
    ({"logprobs": 21}, ValueError, ["logprobs is 21", "expected -1 to 20"]),
    ({"logit_bias": {1: math.inf}}, ValueError, ["logit_bias of token 1 is inf"]),
    ({"logit_bias": {10**6: 1.0}}, ValueError, ["logit_bias", "1000000", "expected"]),
    ({"ignore_eos": "false"}, TypeError, ["ignore_eos is 'false'", "expected True"]),
    ({"ignore_eos": 1}, TypeError, ["ignore_eos is 1", "expected True"]),
    ({"temprature": 1.0}, TypeError, ["temprature", "temperature"]),
]


@pytest.mark.parametrize(("options", "error", "parts"), SAMPLING)
def test_sampling(llm, options, error, parts):
    with pytest.raises(error) as caught:
        llm.generate("Hello", **{"max_tokens": 1} | options).result(timeout=60)
    assert_says(caught, error, parts)


USER = {"role": "user", "content": "Hi"}
CHATS: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "no messages": (
        [],
        {},
        ValueError,
        ["messages is []", "expected a list of at least one"],
    ),
    "a text": ("Hi", {}, ValueError, ["messages is 'Hi'", "expected a list"]),
    "no role": (
        [{"content": "Hi"}],
        {},
        ValueError,
        ["role is None", "expected one of"],
    ),
    "unknown role": (
        [{"role": "robot", "content": "Hi"}],
        {},
        ValueError,
        ["messages[0].role is 'robot'", "expected one of"],
    ),
    "content is no text": (
        [{"role": "user", "content": 3}],
        {},
        TypeError,
        ["messages[0].content is 3", "expected a str"],
    ),
    "answer to no call": (
        [USER, {"role": "tool", "tool_call_id": "7", "content": "408"}],
        {},
        ValueError,
        ["messages[1].tool_call_id is '7'", "expected the id of a call"],
    ),
    "unknown effort": (
        [USER],
        {"reasoning_effort": "huge"},
        ValueError,
        ["reasoning_effort is 'huge'", "'low', 'medium', 'high'"],
    ),
    "a tool that is none": ([USER], {"tools": [3]}, ValueError, ["tools[0] is 3"]),
    "lone surrogate": (
        [{"role": "user", "content": "\udfff"}],
        {},
        TokenizerError,
        ["surrogate U+DFFF", "position 0", "expected"],
    ),
}


@pytest.mark.parametrize("case", CHATS)
def test_chat(llm, case):
    messages, options, error, parts = CHATS[case]
    with pytest.raises(error) as caught:
        llm.chat(messages, max_tokens=1, **options)
    assert_says(caught, error, parts)
    with pytest.raises(error):
        list(llm.stream_chat(messages, max_tokens=1, **options))


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (Message("robot", "Hi"), ["role is 'robot'", "expected one of"]),
        (
            Message("assistant", "Hi", channel="thought"),
            ["channel is 'thought'", "expected one of"],
        ),
        (Message("tool", "408"), ["a tool message's name is None", "expected"]),
        (
            Message("assistant", "{}", recipient="a b"),
            ["a header is 'a b'", "expected no spaces"],
        ),
    ],
)
def test_harmony(llm, message, parts):
    with pytest.raises(ValueError) as caught:
        render([message], llm.tokenizer)
    assert_says(caught, ValueError, parts)


@pytest.mark.parametrize(
    ("token_ids", "error", "parts"),
    [
        ([], ValueError, ["expected"]),
        ([-1], ValueError, ["-1", "expected 0 to"]),
        ([10**6], ValueError, ["1000000", "expected 0 to"]),
        ([0.5], TypeError, ["float", "expected integers"]),
        ([0] * 131_073, ValueError, ["[131073]", "T from 1 to 131072"]),
    ],
)
def test_logits(llm, token_ids, error, parts):
    with pytest.raises(error) as caught:
        llm.model.logits(token_ids)
    assert_says(caught, error, parts)


def test_batch_invariance_without_the_kernels():
    with pytest.raises(ValueError, match="batch_invariant is True; expected False"):
        LLM(config=EngineConfig(batch_invariant=True), device="cpu")


def test_load_model():
    with pytest.raises(ValueError) as caught:
        load_model(dtype=torch.int8)
    assert_says(
        caught, ValueError, ["dtype is torch.int8", "expected one of", "torch.bfloat16"]
    )
    with pytest.raises(CheckpointError) as caught:
        load_model("gpt-oss-20b")
    assert_says(caught, CheckpointError, ["gpt-oss-20b: does not exist", "expected"])
