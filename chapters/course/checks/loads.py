"""Loads and stores that leave no trace, seen where Triton's interpreter runs them.

A margin of NaN shows a load from outside only if its number reaches a result. A GPU
may stop at any such load, also at one for a row that is never stored. And where two
programs store the same number at one place, nobody sees it in the result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor


@contextmanager
def beyond(**guards: tuple[Tensor, Tensor]) -> Iterator[list[str]]:
    """The names of those ``guards`` of which a kernel in the body reads a margin.

    Each is a tensor with its margins and the tensor between them. The list is filled
    while kernels run; on a GPU it stays empty.
    """
    found: list[str] = []
    if any(whole.is_cuda for whole, _ in guards.values()):
        yield found
        return
    from triton.runtime.interpreter import interpreter_builder

    load = interpreter_builder.create_masked_load

    def watched(pointers: Any, mask: Any, *rest: Any) -> Any:
        places = pointers.data[np.broadcast_to(mask.data, pointers.data.shape) != 0]
        for name, (whole, inside) in guards.items():
            first, begin = whole.data_ptr(), inside.data_ptr()
            before = (first <= places) & (places < begin)
            end, last = begin + inside.nbytes, first + whole.nbytes
            behind = (end <= places) & (places < last)
            if (before | behind).any() and name not in found:
                found.append(name)
        return load(pointers, mask, *rest)

    interpreter_builder.create_masked_load = watched
    try:
        yield found
    finally:
        del interpreter_builder.create_masked_load


def assert_inside(told: str, found: list[str]) -> None:
    """``found`` is what `beyond` has seen."""
    assert not found, (
        told + f"a load reads beyond {' and '.join(found)}. What it finds is never "
        "stored, but a GPU may end the program there: every load needs its mask"
    )


@contextmanager
def clashes(tensor: Tensor) -> Iterator[list[int]]:
    """The place of the first number of ``tensor`` that two programs store, if any.

    Of the kernel that the body runs, once. The list is filled while it runs; on a GPU
    it stays empty.
    """
    found: list[int] = []
    if tensor.is_cuda:
        yield found
        return
    from triton.runtime.interpreter import interpreter_builder

    builder: Any = interpreter_builder
    inner = builder.create_masked_store
    writers: dict[int, tuple[int, ...]] = {}
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    def watched(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        places = pointers.data[np.broadcast_to(mask.data, pointers.data.shape) != 0]
        program = builder.grid_idx
        for place in places[(begin <= places) & (places < end)].tolist():
            if writers.setdefault(place, program) != program and not found:
                found.append((place - begin) // tensor.element_size())
        return inner(pointers, value, mask, *rest)

    builder.create_masked_store = watched
    try:
        yield found
    finally:
        del builder.create_masked_store


@contextmanager
def only_program(x: int, y: int = 0) -> Iterator[None]:
    """Be this program of a large grid in the body, which starts a grid of one."""
    from triton.runtime.interpreter import interpreter_builder

    builder: Any = interpreter_builder
    builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (x, y, 0))
    try:
        yield
    finally:
        del builder.set_grid_idx
