"""What tests share: the device that kernels are tested on, a model, its server."""

import gc
import signal
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from browser import NAMES, Browser, find
from hypothesis import settings

if TYPE_CHECKING:
    from serving import Served

# How long an example takes says how busy the machine is.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

NEED_TRITON = ["test_kernels_*.py", "test_drawings.py"]
collect_ignore_glob = [] if find_spec("triton") else NEED_TRITON


def pytest_configure() -> None:
    """Ctrl-C interrupts, also where a shell has had it ignored: behind nohup or &."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is there now stays: collecting garbage need not walk all of it each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries written in C++ say at the end what was never collected."""
    gc.unfreeze()


def release(package: str) -> tuple[int, ...]:
    """Major and minor number of the installed ``package``."""
    return tuple(int(number) for number in version(package).split(".")[:2])


@pytest.fixture
def kernel_device() -> Iterator[str]:
    """ "cuda" if there is a GPU, else "cpu", where kernels are then interpreted."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip(
            "the interpreter of Triton before 3.7 makes integers of arrays of one "
            "element, which NumPy refuses from 2.4 on"
        )
    from kernels_interpreter import interpreted

    with interpreted():
        yield "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small random model, with a tokenizer."""
    from models import write_model

    return write_model(tmp_path_factory.mktemp("model") / "tiny")


# Servers, of one model for a module's tests. Imports wait: most tests need none.


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator["Served"]:
    """A server of the small model."""
    from models import SMALL
    from serving import serving

    from simplellm import LLM

    with LLM(folder, SMALL) as llm, serving(llm) as found:
        yield found


@pytest.fixture(scope="module")
def strict(served: "Served") -> Iterator["Served"]:
    """The same model, and nothing is ignored."""
    from serving import serving

    with serving(served.service.llm, strict=True) as found:
        yield found


@pytest.fixture
def prompts(served: "Served") -> Iterator[list[list[int]]]:
    """The prompts of this test's requests."""
    from serving import noted

    with noted(served.service.llm) as found:
        yield found


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """It says much about random models."""
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture
def processes() -> Iterator[Callable[..., Any]]:
    from serving import Process

    found: list[Process] = []

    def start(*arguments: str, before: str = "") -> Process:
        found.append(Process(*arguments, before=before))
        return found[-1]

    yield start
    for one in found:
        if one.process.poll() is None:
            one.process.kill()
            one.finish()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A headless browser, where there is one."""
    program = find()
    if program is None:
        pytest.skip(f"no browser is here: none of {', '.join(NAMES)}")
    opened = Browser(program)
    yield opened
    opened.close()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark kernel tests "gpu" where they run on one; skip what needs one elsewhere."""
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU that PyTorch can use")
    for item in items:
        if torch.cuda.is_available():
            if {"kernel_device", "twins"} & set(getattr(item, "fixturenames", ())):
                item.add_marker("gpu")
        elif item.get_closest_marker("gpu"):
            item.add_marker(skip)
