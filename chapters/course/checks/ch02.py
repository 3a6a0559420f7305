"""Chapter 2: opening a checkpoint."""

import json
import math
import mmap
import struct
import tempfile
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import torch

from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.checkpoint.names import TensorInfo, stored_shapes


def a_file(entries: dict, data: bytes, padding: int = 0) -> bytes:
    """A safetensors file, its header padded with spaces as writers do."""
    text = json.dumps(entries, ensure_ascii=False).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + data


def check_read_header(candidate):
    """Headers written by hand, and a mapping of which only the header may be read."""
    names = [f"Gewicht {n} für Schicht {n}" for n in range(4)] + ["_scale", "__w__"]
    entries = {
        name: {"dtype": "U8", "shape": [2], "data_offsets": [2 * n, 2 * n + 2]}
        for n, name in enumerate(names)
    }
    size = 2 * len(names)
    raw = a_file({"__metadata__": {"format": "pt"}, **entries}, bytes(range(size)), 3)
    try:
        header, start = candidate(raw)
    except (json.JSONDecodeError, UnicodeDecodeError, struct.error) as error:
        raise AssertionError(
            f"what you took for the header isn't JSON ({type(error).__name__}); its "
            "length is in the first 8 bytes, the lowest byte first (little-endian), "
            "and the JSON is that many bytes after it and no more"
        ) from None
    assert "__metadata__" not in header, (
        "the entry __metadata__ is text about the file and no tensor; leave it out"
    )
    for name in names[4:]:
        assert name in header, (
            f"the tensor {name} is missing; only __metadata__ is no tensor, and others "
            "may begin with _ too"
        )
    assert dict(header) == entries, (
        f"the header has {len(entries)} tensors with what JSON says of each; yours has "
        f"{len(header)} entries, the first {next(iter(header.items()), None)}"
    )
    assert start == len(raw) - size, (
        f"the data begins at byte {len(raw) - size}, after the 8 bytes of the length "
        f"and the whole header with its padding; yours begins at {start}"
    )
    plain, _ = candidate(a_file(entries, bytes(size)))
    assert dict(plain) == entries, "a file without __metadata__ is just as good"
    mapped = mmap.mmap(-1, 2**26)  # as if of a file of 64 MiB
    mapped[: len(raw)] = raw
    tracemalloc.start()
    try:
        candidate(mapped)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**22, (
        f"of a file of 67 MB you copied {peak / 1e6:.0f} MB; a slice of a mapping is a "
        "copy, so take 8 bytes and then the header"
    )


def check_tensor_view(candidate):
    """Views of three dtypes at known places, which must share the file's bytes."""
    data = bytearray(struct.pack("<16e6f", *range(16), *range(100, 106)))
    data += bytes(range(41))  # the file's end is no multiple of any item's size

    def view(dtype, shape, nbytes, offset):
        info = TensorInfo("x", dtype, shape, nbytes, Path("x"), offset)
        try:
            return candidate(data, info)
        except NotImplementedError:
            raise
        except (RuntimeError, ValueError) as error:
            raise AssertionError(
                f"for {dtype} {list(shape)}, {nbytes} bytes from byte {offset} on, "
                f"torch says: {error}. A count is in numbers, an offset in bytes"
            ) from None

    numbers = view("F32", (2, 3), 24, 32)
    assert isinstance(numbers, torch.Tensor), "return a torch.Tensor"
    assert numbers.dtype == torch.float32, (
        f"the header says F32, which is torch.float32; your dtype is {numbers.dtype}"
    )
    assert tuple(numbers.shape) == (2, 3), (
        f"the shape is [2, 3]; yours is {list(numbers.shape)}"
    )
    assert numbers.tolist() == [[100, 101, 102], [103, 104, 105]], (
        f"the floats at byte 32 are 100 to 105, a row after the other; yours are "
        f"{numbers.flatten().tolist()}: watch the offset"
    )
    struct.pack_into("<f", data, 36, 7.0)
    assert numbers[0, 1] == 7, (
        "the bytes of the file changed and the tensor did not: it is a copy"
    )
    numbers[1, 2] = -1
    assert struct.unpack_from("<f", data, 52) == (-1.0,), (
        "the tensor was written to and the file's bytes did not change: it is a copy"
    )
    halves = view("F16", (4, 1, 2), 16, 8)
    assert halves.dtype == torch.float16 and tuple(halves.shape) == (4, 1, 2), (
        f"[4, 1, 2] of F16 came out as {list(halves.shape)} of {halves.dtype}"
    )
    assert halves.flatten().tolist() == list(range(4, 12)), (
        f"the halves at byte 8 are 4 to 11; yours are {halves.flatten().tolist()}: an "
        "offset counts bytes, also where a number has two of them"
    )
    brain = view("BF16", (3,), 6, 34).dtype
    assert brain == torch.bfloat16, f"BF16 is torch.bfloat16, not {brain}"
    codes = view("U8", (2, 4), 8, 57)
    assert codes.dtype == torch.uint8 and codes.tolist() == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
    ], f"the bytes from 57 on are 1 to 8; yours are {codes.tolist()} of {codes.dtype}"
    over_a_mapping(candidate)


def over_a_mapping(candidate):
    """A file of 64 MiB that is mapped for reading only, and changed on disk."""
    room = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with room as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that nobody may write to the tensor
        path, offset = Path(folder) / "mapped", 2**26 - 32
        with path.open("wb") as file:
            file.truncate(2**26)
        with path.open("r+b", buffering=0) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            info = TensorInfo("x", "F32", (2, 4), 32, path, offset)
            tracemalloc.start()
            try:
                last = candidate(data, info)
                peak = tracemalloc.get_traced_memory()[1]
            except (BufferError, TypeError) as error:
                raise AssertionError(
                    f"a mapping may be read-only, as of a file of 65 GB that nobody "
                    f"may change; yours fails there: {error}"
                ) from None
            finally:
                tracemalloc.stop()
            assert peak < 2**22, (
                f"of a mapped file of 67 MB you copied {peak / 1e6:.0f} MB, and the "
                "next one may be larger than memory"
            )
            file.seek(offset + 4)
            file.write(struct.pack("<f", 7.0))
            assert last[0, 1] == 7, (
                "a file was mapped read-only and changed on disk, and the tensor over "
                "the mapping did not: it is a copy"
            )
            del last, data


def check_2_1(candidate):
    """Against a count of the pages that each byte lies in."""
    assert candidate(0, 1) == 1, "one byte lies in one page"
    assert candidate(0, 4096) == 1, (
        "4,096 bytes from byte 0 on fill one page; the last of them is byte 4,095"
    )
    assert candidate(4095, 2) == 2, "two bytes can lie in two pages, across the border"
    assert candidate(4096, 0) == 0, "reading no bytes touches no page"
    for page in (16, 4096):
        for offset in (0, 1, page - 1, page, 5 * page + 3):
            for length in (1, 2, page - 1, page, page + 1, 3 * page, 3 * page + 2):
                touched = len({byte // page for byte in range(offset, offset + length)})
                found = candidate(offset, length, page)
                assert found == touched, (
                    f"{length} bytes from byte {offset} on touch {touched} pages of "
                    f"{page} bytes, not {found}"
                )


def check_2_2(candidate):
    """Both models, from the shapes that OpenAI's model card describes."""
    lines = []
    for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
        hidden, q, kv = 2880, 64 * 64, 8 * 64
        attention = (q + 2 * kv) * (hidden + 1) + hidden * (q + 1) + 64
        others = 2 * (attention + 2 * hidden + experts * (hidden + 1))
        expert = 3 * hidden * hidden * 17 // 32 + 2 * 3 * hidden
        head = 2 * (201_088 * hidden + hidden)  # and the last norm
        expected = layers * (others + 4 * expert) + head
        found = candidate(MODELS[name])
        all_experts = expected + layers * (experts - 4) * expert
        assert not math.isclose(found, all_experts, rel_tol=1e-6), (
            f"you read all {experts} experts of {name}; a token uses 4 of each layer"
        )
        more = expected + 2 * 201_088 * hidden
        assert not math.isclose(found, more, rel_tol=1e-6), (
            "you count the embedding, of which a token reads one row"
        )
        less = expected - 2 * 201_088 * hidden
        assert not math.isclose(found, less, rel_tol=1e-6), (
            "you left out the LM head, which a token reads in full"
        )
        assert math.isclose(found, expected, rel_tol=1e-6), (
            f"{name}: {found / 1e9:.2f} GB is not what the experts in use, attention, "
            "router, norms and LM head add up to; is each at its own bytes per number?"
        )
        lines.append(f"{name}: {found / 1e9:.2f} GB, {4650e9 / found:,.0f} tokens/s")
    print(*lines, sep="\n")


def check_2_3(candidate):
    """Small plans by hand, and gpt-oss-120b at 5 GB."""
    one, two = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    plan = candidate({"a": 3, "b": 3, "c": 3}, 6)
    assert list(plan) == ["a", "b", "c"], "every tensor is in the plan, in order"
    assert plan == {"a": one, "b": one, "c": two}, (
        "at 6 bytes a shard, 3 and 3 just fit, and the next 3 begin a second shard: "
        f"{plan}"
    )
    plan = candidate({"a": 4, "b": 5, "c": 2}, 6)
    assert [file[6:11] for file in plan.values()] == ["00001", "00002", "00003"], (
        "a shard that is left is never gone back to, so that tensors stay in order: "
        f"{plan}"
    )
    plan = candidate({"a": 6}, 6)
    assert plan == {"a": "model-00001-of-00001.safetensors"}, (
        f"one tensor that fills a shard makes one shard of one: {plan}"
    )
    try:
        plan = candidate({"a": 2, "b": 7}, 6)
    except ValueError:
        pass
    else:
        raise AssertionError(f"7 bytes do not fit into 6: ValueError, and not {plan}")
    sizes = {}
    for parts in stored_shapes(MODELS["gpt-oss-120b"]).values():
        for name, shape in parts.items():
            itemsize = 1 if name.endswith(("_blocks", "_scales")) else 2
            sizes[name] = math.prod(shape) * itemsize
    limit = 5 * 10**9
    filled: Counter[str] = Counter()
    for name, file in candidate(sizes, limit).items():
        filled[file] += sizes[name]
    assert max(filled.values()) <= limit, "a shard is larger than the limit"
    numbered = [f"model-{n:05}-of-{len(filled):05}.safetensors" for n in range(1, 99)]
    assert list(filled) == numbered[: len(filled)], (
        f"the files are numbered from 1 to their count: {list(filled)[:3]}"
    )
    assert len(filled) == 15, (
        f"gpt-oss-120b comes to {len(filled)} shards; fill each until the next tensor "
        "does not fit, and no further"
    )
    print(f"gpt-oss-120b: {len(filled)} shards of {limit / 1e9:.0f} GB at most")
