"""Run the package's Triton kernels on a CPU, in Triton's interpreter.

Triton chooses between compiling and interpreting when `@triton.jit` decorates a
function, and does so from the variable TRITON_INTERPRET. Its own library (`tl.sum` and
the like) is decorated too, when Triton is imported. Setting the variable for a whole
test process would therefore take the compiler away from every other test in it.
`interpreted` instead swaps every jitted function, ours and Triton's, for an interpreted
one, and undoes this at its end. Tests need only the fixture `kernel_device` of
tests/conftest.py: it is "cuda" where there is a GPU, else "cpu" inside `interpreted`.

The interpreter is silently wrong for arithmetic on bfloat16 (loads and stores are
right) and raises on inline assembly. Its conversions from and to e4m3 round wrongly
and lose NaN: `interpreted` has PyTorch do them. Matrices of bfloat16 are multiplied as
float32, which holds the same numbers, and every product adds in one order.

The interpreter also patches Triton's language, at every launch and at every call of a
device function, and looks through all of the language each time, which is most of what
it does. Here the language is patched once. Half of the rest is a sum, product or
difference of integers computed again in 64 bits, for an assertion of overflow that only
Triton's debug mode makes and the interpreter drops: here it isn't computed.

Triton's code generator knows `tl.static_assert` and its kin by identity, from a table
that is made when it is imported. Interpreting a kernel that passes tuples imports it,
and while the language is patched the table would hold what stands in for them: all that
this process compiles later would do without its assertions.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
import triton
import triton.compiler.code_generator  # before the language is patched: see below
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
    interpreter_builder,
)
from triton.runtime.jit import JITFunction

import simplellm.model.kernels

# What the interpreter patches while it runs, and does not always restore.
LANGUAGE = (
    tl,
    tl.core,
    tl.math,
    tl.standard,
    tl.tensor,
    tl.dtype,
    tl.condition,
    tl.core.tensor_descriptor_base,
)


def kernel_modules() -> list[ModuleType]:
    """All modules of `simplellm.model.kernels`, imported."""
    names = [
        module.name for module in pkgutil.iter_modules(simplellm.model.kernels.__path__)
    ]
    return [
        importlib.import_module(f"simplellm.model.kernels.{name}") for name in names
    ]


def interpret(jitted: JITFunction) -> InterpretedFunction:
    """The same function for the interpreter."""
    return InterpretedFunction(jitted.fn)


def method(function: InterpretedFunction):
    """A plain function, so that `x.sum()` passes x along as `tl.sum(x)` does."""
    return lambda *args, **kwargs: function(*args, **kwargs)


FLOATS = {
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float8e4nv: torch.float8_e4m3fn,
}


def convert_float(
    value, source, target, rounding, *, original=interpreter._convert_float
):
    """The interpreter's conversion of floats, but from and to e4m3."""
    if tl.float8e4nv not in (source, target) or not {source, target} <= FLOATS.keys():
        return original(value, source, target, rounding)
    numbers = torch.from_numpy(value.copy()).view(FLOATS[source])
    if target == tl.float8e4nv:
        numbers = numbers.clamp(-448, 448)  # as Hopper saturates
    integer = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    converted = numbers.to(FLOATS[target])
    return converted.view(integer[converted.itemsize]).numpy()


def numbers(value: TensorHandle) -> np.ndarray:
    """The numbers of a factor of `tl.dot`, exactly, in a dtype that NumPy has."""
    dtype = value.dtype.scalar
    if dtype == tl.bfloat16:  # of which the interpreter has the bits alone
        return (value.data.astype(np.uint32) << 16).view(np.float32)
    if dtype.is_floating() and dtype.primitive_bitwidth == 8:
        half = interpreter._convert_float(value.data, dtype, tl.float16, None)
        return half.view(np.float16)
    return value.data


def product(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
    """a [..., M, K] times b [..., K, N], each number the sum over k in ascending order.

    `np.matmul` leaves the order to a BLAS, and most of them choose it by the number of
    rows. A kernel's own order is what decides whether a row's bits depend on the rows
    beside it, so here nothing else may. `np.einsum` loops over M, K and N, the last one
    innermost, unless that is a single column, which it would sum in another order.
    """
    a, b = np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype)
    if b.shape[-1] == 1:
        return product(a, b.repeat(2, axis=-1), dtype)[..., :1]
    return np.einsum("...mk,...kn->...mn", a, b, optimize=False)


@cache
def scalar_dtype(dtype: tl.dtype, *, original=interpreter._get_np_dtype) -> np.dtype:
    return original(dtype)


def numpy_dtype(dtype: tl.dtype) -> np.dtype:
    """NumPy's for Triton's, of a block that of its numbers: looked up once for each."""
    if isinstance(dtype.scalar, tl.pointer_type):
        return np.dtype(np.uint64)
    return scalar_dtype(dtype.scalar)


def dot(builder, a, b, d, precision, imprecise):
    """The interpreter's `tl.dot`, right for bfloat16 too, and in one order of sums."""
    found = product(numbers(a), numbers(b), d.data.dtype)
    return TensorHandle(found + d.data, d.dtype.scalar)


@contextmanager
def patched_language() -> Iterator[None]:
    """What the interpreter patches for each function, for all functions at once."""
    seen = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(seen)
    nothing = SimpleNamespace(restore=lambda: None)
    try:
        with mock.patch.object(interpreter, "_patch_lang", lambda function: nothing):
            yield
    finally:
        scope.restore()


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it, launching a kernel of the package interprets it, on CPU tensors."""
    modules = kernel_modules()
    forget_launchers(modules)
    saved = [(owner, dict(vars(owner))) for owner in (*LANGUAGE, *modules)]
    swapped: dict[int, InterpretedFunction] = {}
    try:
        for owner, members in saved:
            for name, member in members.items():
                if isinstance(member, JITFunction):
                    new = swapped.setdefault(id(member), interpret(member))
                    setattr(owner, name, method(new) if owner is tl.tensor else new)
        converts = mock.patch.object(interpreter, "_convert_float", convert_float)
        multiplies = mock.patch.object(InterpreterBuilder, "create_dot", dot)
        looks_up = mock.patch.object(interpreter, "_get_np_dtype", numpy_dtype)
        unasserted = replace(interpreter_builder.options, sanitize_overflow=False)
        options = mock.patch.object(interpreter_builder, "options", unasserted)
        with ExitStack() as stack:
            for patch in (converts, multiplies, looks_up, options):
                stack.enter_context(patch)
            stack.enter_context(triton.knobs.runtime.scope())
            stack.enter_context(patched_language())
            triton.knobs.runtime.interpret = True
            yield
    finally:
        for owner, members in saved:
            restore(owner, members)
        forget_launchers(modules)


def forget_launchers(modules: list[ModuleType]) -> None:
    """Empty the modules' caches: launchers hold the kernels that they start."""
    for module in modules:
        for member in vars(module).values():
            if hasattr(member, "cache_clear"):
                member.cache_clear()


def restore(owner: object, members: dict[str, object]) -> None:
    """Put ``members`` of ``owner`` back; what was added to a class goes."""
    for name, member in list(vars(owner).items()):
        if name in members:
            if member is not members[name]:
                setattr(owner, name, members[name])
        elif isinstance(owner, type):
            # Additions to a module stay: interpreted functions are cached and use them.
            delattr(owner, name)
