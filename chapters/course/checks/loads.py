"""Loads beyond a tensor, seen where Triton's interpreter runs the kernel.

A margin of NaN shows a load from outside only if its number reaches a result. A GPU
may stop at any such load, also at one for a row that is never stored.
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
