"""Damaged checkpoints open and read, or raise one of our errors; nothing else.

Every example runs with a limit on the process's address space, so that a size that a
header or a config merely declares cannot be allocated without the test failing.
"""

import json
import math
import resource
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from simplellm.base.config import ConfigError
from simplellm.checkpoint.checkpoint import INDEX, Checkpoint, CheckpointError
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.checkpoint.names import packed_shapes, tensor_shapes

HEADER_DAMAGES = ["dtype", "shape", "reversed", "offsets", "name", "any", "gone"]
ABSURD = [-1, 0, 1, 3, 10**9, 2**63, 10**30, 0.5, 1e300, math.nan, "x", None, [], {}]

Files = dict[str, bytes]
Draw = Callable[[st.SearchStrategy[Any]], Any]
HEADROOM = 64 * 2**20  # bytes an example may map; the files hold less than 1 MB

INTS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 7, 96, 97, 2**31, 2**32, 2**62, 2**63, 2**64, 10**9]),
    st.integers(-(10**20), 10**20),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), INTS, st.floats(), st.text(max_size=8), st.just("x" * 999)
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=4),
    st.dictionaries(st.text(max_size=8), SCALARS, max_size=3),
    st.just([[[]]] * 3),
)
DTYPES = st.sampled_from(
    ["BF16", "F16", "F32", "U8", "I8", "I64", "BOOL", "F8_E4M3", "F4", "C64", "X", ""]
)


def contents(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@cache
def good_folders() -> list[Files]:
    """The files of a good checkpoint of each kind."""
    kinds: list[dict[str, Any]] = [
        {"shards": 2},
        {"quantized": False},
        {},
        {"shards": 2, "quantized": False},
    ]
    found = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            found.append(contents(write_checkpoint(Path(name), **kind)))
    return found


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def damage_bytes(draw: Draw, files: Files) -> None:
    """Cut, overwrite or insert anywhere; mostly where the structure is."""
    name = draw(st.sampled_from(sorted(files)))
    raw = files[name]
    last = draw(st.sampled_from([min(len(raw), 16), min(len(raw), 6000), len(raw)]))
    start = draw(st.integers(0, last))
    new = draw(st.binary(max_size=9))
    overwrite = start + len(new)
    end = draw(st.sampled_from([start, start + 1, overwrite, overwrite, len(raw)]))
    files[name] = raw[:start] + new + raw[end:]


def damage_header(draw: Draw, files: Files) -> None:
    """Change what a safetensors header says of one tensor, the file's size apart."""
    name = draw(st.sampled_from([n for n in sorted(files) if n[-1] == "s"]))
    try:
        header, data = split(files[name])
        tensor = sorted(header)[draw(st.integers(0, 40)) % len(header)]
        entry = header[tensor]
        shape, (begin, end) = list(entry["shape"]), entry["data_offsets"]
        begin, end = begin + 0, end + 0
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error):
        return  # damaged before
    match draw(st.sampled_from(HEADER_DAMAGES)):
        case "dtype":
            entry["dtype"] = draw(DTYPES)
        case "shape":
            shape[draw(st.integers(0, len(shape) - 1)) if shape else 0 :] = draw(
                st.lists(INTS, max_size=4)
            )
            entry["shape"] = shape
        case "reversed":
            entry["shape"] = shape[::-1]
        case "offsets":
            shift = draw(st.sampled_from([-8, -2, -1, 1, 2, 8, 2**40, 2**63]))
            entry["data_offsets"] = draw(
                st.sampled_from(
                    [[begin + shift, end], [begin, end + shift], [end, begin], [0, 0]]
                )
            )
        case "name":
            header[draw(st.text(max_size=8))] = header.pop(tensor)
        case "any":
            entry[draw(st.sampled_from(sorted(entry)))] = draw(VALUES)
        case "gone":
            del header[tensor]
    files[name] = join(header, data)


def damage_json(draw: Draw, files: Files) -> None:
    """Give one entry of config.json or of the index another value, or none."""
    name = draw(st.sampled_from([n for n in sorted(files) if n[-1] == "n"]))
    try:
        data = json.loads(files[name])
    except (ValueError, RecursionError):
        return
    place = data
    while isinstance(place, dict) and place:
        key = draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or draw(st.integers(0, 3)) == 0:
            if draw(st.booleans()):
                place[key] = draw(st.one_of(INTS, VALUES))
            else:
                del place[key]
            break
        place = place[key]
    files[name] = json.dumps(data).encode()


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let the process map HEADROOM bytes more than it has now."""
    statm = Path("/proc/self/statm")
    old = resource.getrlimit(resource.RLIMIT_AS)
    if statm.exists():
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def read_everything(folder: Path) -> str:
    """Open, read each tensor to its last byte, and say how it went."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    try:
        checkpoint = Checkpoint(folder)
    except (CheckpointError, ConfigError) as error:
        assert 0 < len(str(error)) < 2000
        assert "\n" not in str(error)
        return type(error).__name__
    infos = [info for name in checkpoint.names() for info in checkpoint.stored(name)]
    assert sum(info.nbytes for info in infos) <= size
    shapes = tensor_shapes(checkpoint.config)
    for name in checkpoint.names():
        value = checkpoint[name]
        packed = isinstance(value, MXFP4)
        tensors = (value.blocks, value.scales) if packed else (value,)
        expected = packed_shapes(shapes[name]) if packed else (shapes[name],)
        for tensor, part in zip(tensors, expected, strict=True):
            assert tensor.shape == part
            assert tensor.is_floating_point() != packed
            tensor.double().sum()
    return "opened"


def fuzz(data: st.DataObject) -> None:
    """Damage one good folder in one to three ways and read it."""
    files = dict(good_folders()[data.draw(st.integers(0, 3))])
    kinds = [damage_bytes, damage_header, damage_header, damage_json, damage_json]
    for _ in range(data.draw(st.sampled_from([1, 1, 1, 2, 3]))):
        data.draw(st.sampled_from(kinds))(data.draw, files)
    if data.draw(st.integers(0, 9)) == 0:
        del files[data.draw(st.sampled_from(sorted(files)))]
    with tempfile.TemporaryDirectory() as name:
        for file, raw in files.items():
            (Path(name) / file).write_bytes(raw)
        with limited_memory():
            event(read_everything(Path(name)))


@given(st.data())
@settings(
    max_examples=300,
    deadline=timedelta(seconds=5),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_damaged_checkpoints(data: st.DataObject) -> None:
    fuzz(data)


@pytest.mark.exhaustive
@pytest.mark.slow
@given(st.data())
@settings(
    max_examples=1_200,
    deadline=timedelta(seconds=5),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_many_damaged_checkpoints(data: st.DataObject) -> None:
    fuzz(data)


@given(st.binary(max_size=64), st.sampled_from(["config.json", INDEX, "x.safetensors"]))
@settings(max_examples=60, deadline=timedelta(seconds=5))
def test_noise(noise: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for file, raw in {**good_folders()[2], name: noise}.items():
            (Path(folder) / file).write_bytes(raw)
        with limited_memory():
            read_everything(Path(folder))


@pytest.mark.parametrize("kind", range(4))
def test_no_entry_of_config_json_is_trusted(kind: int, tmp_path: Path) -> None:
    """Each entry takes each absurd value, and is left out."""
    files = good_folders()[kind]
    for file, raw in files.items():
        (tmp_path / file).write_bytes(raw)
    config = json.loads(files["config.json"])
    with limited_memory():
        for name in config:
            changes = [{**config, name: value} for value in ABSURD]
            for change in [*changes, {k: v for k, v in config.items() if k != name}]:
                (tmp_path / "config.json").write_text(json.dumps(change))
                read_everything(tmp_path)


@pytest.mark.parametrize("kind", range(4))
def test_no_shape_is_trusted(kind: int, tmp_path: Path) -> None:
    """Shapes of the right size in the wrong order are refused."""
    files = good_folders()[kind]
    for file, raw in files.items():
        (tmp_path / file).write_bytes(raw)
    for file in files:
        if file.endswith(".safetensors"):
            header, data = split(files[file])
            for name, entry in header.items():
                shape = entry.get("shape", [])
                if shape == shape[::-1]:
                    continue
                turned = {**header, name: entry | {"shape": shape[::-1]}}
                (tmp_path / file).write_bytes(join(turned, data))
                assert read_everything(tmp_path) == "CheckpointError", name
            (tmp_path / file).write_bytes(files[file])


def test_the_limit_catches_a_declared_size() -> None:
    """Many blocks, since the first few may fit into memory freed before the limit."""
    blocks = []
    with limited_memory(), pytest.raises((MemoryError, RuntimeError)):
        for _ in range(200):
            blocks.append(torch.empty(HEADROOM, dtype=torch.uint8))


def test_the_undamaged_open(tmp_path: Path) -> None:
    for number, files in enumerate(good_folders()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file, raw in files.items():
            (folder / file).write_bytes(raw)
        with limited_memory():
            assert read_everything(folder) == "opened"
