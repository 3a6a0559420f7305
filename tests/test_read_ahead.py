"""Weights that threads make, a few before they are asked for."""

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY
from torch import Tensor

from simplellm.checkpoint import read_ahead
from simplellm.checkpoint.in_float16 import FLOAT16
from simplellm.checkpoint.names import TensorInfo, tensor_shapes
from simplellm.checkpoint.read_ahead import ReadAhead


class Slow:
    """A source whose weights take a while, each a number of its own."""

    files: tuple[Path, ...] = ()
    mapped = False

    def __init__(self, packed: bool = True) -> None:
        formats = {"lm_head.weight": FLOAT16} if packed else {}
        self.config = replace(TINY, formats=formats)
        self.read: list[str] = []
        self.threads: set[int] = set()
        self.at_work = self.most_at_work = 0
        self.lock = threading.Lock()

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def stored(self, ours: str) -> list[TensorInfo]:
        raise AssertionError("nobody asks")

    def __getitem__(self, ours: str) -> Tensor:
        with self.lock:
            self.read.append(ours)
            self.threads.add(threading.get_ident())
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
        time.sleep(0.002)
        with self.lock:
            self.at_work -= 1
        if ours == "norm.weight":
            raise MemoryError("no room")
        return torch.tensor(self.names().index(ours))


def asked(source: Slow, names: list[str]) -> None:
    with ReadAhead(source) as weights:
        for ours in names:
            if ours == "norm.weight":
                with pytest.raises(MemoryError, match="no room"):
                    weights[ours]
                continue
            assert weights[ours] == source.names().index(ours)


@pytest.mark.parametrize("most", [1, 5000, 2**27])
def test_each_weight_is_read_once_by_several_threads(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MAX_NUMBERS", most)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    source = Slow()
    asked(source, source.names())
    assert sorted(source.read) == sorted(source.names())
    assert (source.most_at_work > 1) == (most > 1) and source.most_at_work <= 4


@pytest.mark.parametrize("most", [1, 5000, 2**27])
def test_another_order_is_as_right(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MAX_NUMBERS", most)
    source = Slow()
    names = source.names()
    random.Random(0).shuffle(names)
    asked(source, names)
    assert sorted(source.read) == sorted(names)


def test_where_nothing_is_packed_nobody_reads_ahead() -> None:
    source = Slow(packed=False)
    with ReadAhead(source) as weights:
        weights[source.names()[5]]
    assert source.read == source.names()[5:6]
    assert source.threads == {threading.get_ident()}


def test_leaving_early_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = Slow()
    before = threading.active_count()
    with pytest.raises(KeyError), ReadAhead(source) as weights:
        weights[source.names()[0]]
        raise KeyError("the model is another one")
    assert threading.active_count() == before
    assert len(source.read) < len(source.names())
