"""The container: metadata and tensors of a GGUF file, or of several that are one model.

A header of typed key-value pairs, then each tensor's name, sides, type and offset, then
the data, aligned (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Only the
header is read. That happens here and not by the package `gguf`, which makes two NumPy
views of every token: opening a vocabulary of 262,144 takes it seconds.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simplellm.base.config import CheckpointError, expect, reraise_as
from simplellm.base.files import map_private
from simplellm.checkpoint.names import TensorInfo

# By ggml's number: the name, the elements of a block, and its bytes.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
OTHERS = {40: "NVFP4", 41: "Q1_0"}  # which nobody here decodes, for the message
MAGIC = b"GGUF"  # a file's first bytes
STRING, ARRAY, FLOAT32 = 8, 9, 6
# The struct code of a value by its type.
CODES = dict(zip([*range(8), 10, 11, 12], "BbHhIif?Qqd", strict=True))
LENGTH = struct.Struct("<Q")
MAX_DIMENSIONS = 4
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Container:
    """What the headers of one model's files say; the data stays where it is."""

    path: Path  # the first file
    metadata: Mapping[str, Any]  # of the first file
    tensors: Mapping[str, TensorInfo]  # by their names in the files
    data: Mapping[Path, mmap.mmap]  # each file, mapped whole


class Header:
    """Reads values one after the other. Raises ValueError where the file ends."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def unpack(self, codes: str) -> tuple[Any, ...]:
        """Little-endian numbers, as `struct` writes their ``codes``."""
        form = struct.Struct("<" + codes)
        self.expect_bytes(form.size)
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values

    def expect_bytes(self, size: int) -> None:
        rest = len(self.data) - self.at
        expected = f"{size} more bytes of a header; the file is cut off or damaged"
        expect(size <= rest, "the rest of the file", rest, expected)

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Many, as fast as may be: vocabularies have hundreds of thousands."""
        self.expect_bytes(LENGTH.size * count)
        data, at, texts = self.data, self.at, []
        for _ in range(count):
            start = at + LENGTH.size
            if start > len(data):
                break
            at = start + LENGTH.unpack_from(data, at)[0]
            texts.append(data[start:at])
        self.at = min(at, len(data) + 1)
        self.expect_bytes(0)
        return [text.decode(errors="replace") for text in texts]

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of metadata; an array is a list."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            expect(depth < 2, "the depth of an array", depth + 1, "1 or 2")
            kind, count = self.unpack("IQ")
            if kind in CODES:
                self.expect_bytes(count * struct.calcsize("<" + CODES[kind]))
                return list(self.unpack(f"{count}{CODES[kind]}"))
            if kind == STRING:
                return self.texts(count)
            self.expect_bytes(12 * count)  # of arrays' own types and lengths
            return [self.value(kind, depth + 1) for _ in range(count)]
        expect(kind in CODES, "the type of a value", kind, "0 to 12")
        (number,) = self.unpack(CODES[kind])
        return shortest_decimal(number) if kind == FLOAT32 else number


def shortest_decimal(number: float) -> float:
    """The decimal number that a float32 was meant to be: 1e-05, not 9.99999975e-06."""
    if not math.isfinite(number):
        return number
    said = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next(x for x in said if struct.pack("<f", x) == struct.pack("<f", number))


def read_gguf_header(
    file: Path, data: mmap.mmap
) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Metadata and tensors of one mapped file. Raises ValueError."""
    header = Header(data)
    magic, version = header.unpack("4sI")
    expect(magic == MAGIC, "the file's first four bytes", magic, f"{MAGIC!r}")
    known = "2 or 3, in little-endian order"
    expect(version in (2, 3), "the version of GGUF", version, known)
    tensor_count, value_count = header.unpack("QQ")
    header.expect_bytes(24 * tensor_count + 12 * value_count)  # at the least
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = header.text()
        (kind,) = header.unpack("I")
        expect(key not in metadata, "a key of the metadata", key, "each once")
        metadata[key] = header.value(kind)
    entries = [read_entry(header, file) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    ok = isinstance(alignment, int) and alignment > 0 and not alignment % 8
    expect(ok, "general.alignment", alignment, "a multiple of 8")
    start = -(-header.at // alignment) * alignment
    tensors = []
    for entry in entries:
        tensor = replace(entry, offset=start + entry.offset)
        end = tensor.offset + tensor.nbytes
        expected = (
            f"up to {len(data)}, the file's end; the file is cut off, or has not been "
            "downloaded to its end"
        )
        expect(end <= len(data), f"the end of {tensor.name!r}", end, expected)
        tensors.append(tensor)
    return metadata, tensors


def read_entry(header: Header, file: Path) -> TensorInfo:
    """What a header says of one tensor; its offset counts from where data begins.

    Raises ValueError for a type that nobody here decodes.
    """
    name = header.text()
    (count,) = header.unpack("I")
    known = f"1 to {MAX_DIMENSIONS}"
    expect(1 <= count <= MAX_DIMENSIONS, f"the sides of {name!r}", count, known)
    shape = header.unpack(f"{count}Q")[::-1]  # the contiguous side comes first there
    kind, offset = header.unpack("IQ")
    known = ", ".join(name for name, *_ in TYPES.values())
    said = OTHERS.get(kind, kind)
    expect(kind in TYPES, f"the type of {name!r}", said, f"one of {known}")
    type, elements, nbytes = TYPES[kind]
    ok = min(shape) > 0 and shape[-1] % elements == 0
    expected = f"rows of a multiple of {elements} elements, for {type}"
    expect(ok, f"the shape of {name!r}", [*shape], expected)
    size = math.prod(shape) // elements * nbytes
    return TensorInfo(name, type, shape, size, file, offset)


def shards_of(path: Path, count: int) -> list[Path]:
    """The files of a model whose first one says that there are so many."""
    named: Any = SHARD.fullmatch(path.name)
    expected = f"name-00001-of-{count:05}.gguf, the first of its {count} files"
    ok = named and (int(named[2]), int(named[3])) == (1, count)
    expect(ok, "the file's name", path.name, expected)
    shards = [
        path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in shards if not file.is_file()]
    expect(not missing, "the missing files of this model", missing, "none")
    return shards


def open_container(path: str | Path) -> Container:
    """Read the header of a GGUF file and, if it is the first of several, of all.

    Raises CheckpointError, which names the file.
    """
    path = Path(path)
    data: dict[Path, mmap.mmap] = {}
    tensors: dict[str, TensorInfo] = {}

    def read(file: Path) -> dict[str, Any]:
        with reraise_as(CheckpointError, file):
            try:
                data[file] = map_private(file)
            except OSError as error:
                raise ValueError(f"cannot be read: {error.strerror}") from None
            metadata, held = read_gguf_header(file, data[file])
            for tensor in held:
                expect(tensor.name not in tensors, "a tensor", tensor.name, "it once")
                tensors[tensor.name] = tensor
        return metadata

    metadata = read(path)
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        with reraise_as(CheckpointError, path):
            rest = shards_of(path, count)[1:]
        for file in rest:
            read(file)
        with reraise_as(CheckpointError, path):
            total = metadata.get("split.tensors.count", len(tensors))
            expected = f"{total}, as split.tensors.count says"
            name = f"the number of tensors in {count} files"
            expect(len(tensors) == total, name, len(tensors), expected)
    return Container(path, metadata, tensors, data)
