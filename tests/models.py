"""A small random model with a tokenizer, and a way to say what it will answer."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoints import TINY, write_checkpoint
from torch import Tensor

from simplellm import LLM, EngineConfig
from simplellm.base.config import ModelConfig
from simplellm.base.request import Request
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.text.tokenizer import Tokenizer

CONFIG = replace(TINY, vocab_size=1100)  # more than the tokenizer has
TOKENIZER = Tokenizer.from_file(EMBEDDED / "tokenizer.json")
BYTES = {TOKENIZER.token_bytes(id): id for id in range(256)}
SMALL = EngineConfig(
    page_size=4,
    num_pages=120,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    prefill_chunk=16,
    max_waiting=200,
)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PATIENCE = 100.0  # seconds after which a test says that something hangs
HELLO = [{"role": "user", "content": "?"}]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.005)


def write_model(folder: Path, config: ModelConfig = CONFIG) -> Path:
    """A random checkpoint with the embedded model's tokenizer."""
    write_checkpoint(folder, config)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    return folder


@contextmanager
def saying(llm: LLM, *scripts: str | Sequence[int]) -> Iterator[list[list[int]]]:
    """The model says texts (control tokens by name) or token ids while this is entered.

    A prompt of [n] is answered by script n; any other by the first. What an answer has
    no script for is the script's last token.
    """
    ids = [
        llm.tokenizer.encode(script, special=True)
        if isinstance(script, str)
        else list(script)
        for script in scripts
    ]
    runner = llm.engine_core.runner
    start = runner.start_forward

    def scripted(
        scheduled: Sequence[ScheduledChunk], sampling: Sequence[Request]
    ) -> None:
        start(scheduled, sampling)
        with torch.inference_mode():
            for row, request in enumerate(sampling):
                number = request.tokens[0] if request.num_prompt == 1 else 0
                script = ids[min(number, len(ids) - 1)]
                token = script[min(request.num_output, len(script) - 1)]
                favor(runner.logits[row], token)
                runner.sampled_tokens[row] = token

    runner.start_forward = scripted  # type: ignore[method-assign, assignment]
    try:
        yield ids
    finally:
        runner.start_forward = start  # type: ignore[method-assign, assignment]


def favor(logits: Tensor, token: int) -> None:
    logits.zero_()
    logits[token] = 1000.0


def spelled(text: str) -> list[int]:
    """Tokens of one byte each: every character border is a token border, or two."""
    return [BYTES[bytes([byte])] for byte in text.encode()]
