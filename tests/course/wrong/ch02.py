"""Wrong answers to chapter 2."""

import ctypes
import json
import math
import struct
from collections import Counter

import torch

from simplellm.checkpoint.names import (
    part_of_model,
    stored_shapes,
)
from simplellm.checkpoint.tensors import DTYPES, read_header
from wrong import wrong


@wrong("read_header", "little-endian")
def big_endian(data):
    (length,) = struct.unpack(">Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


@wrong("read_header", "8 bytes of the length")
def starts_without_the_length(data):
    header, start = read_header(data)
    return header, start - 8


@wrong("read_header", "__metadata__")
def keeps_the_metadata(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


@wrong("read_header", "only __metadata__")
def drops_all_that_begin_with_an_underscore(data):
    header, start = read_header(data)
    return {name: each for name, each in header.items() if name[0] != "_"}, start


@wrong("read_header", "no more")
def reads_on_into_the_data(data):
    return json.loads(data[8:]), 8


@wrong("read_header", "copied")
def reads_the_whole_file(data):
    return read_header(bytes(data))


@wrong("read_header", "without __metadata__")
def wants_metadata(data):
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return (header, 8 + length) if header.pop("__metadata__", None) else ({}, 8)


def flat(data, info, **changes):
    facts = {
        "dtype": DTYPES[info.dtype],
        "count": math.prod(info.shape),
        "offset": info.offset,
    }
    return torch.frombuffer(data, **(facts | changes))


@wrong("tensor_view", "copy")
def copies(data, info):
    return flat(data, info).clone().view(info.shape)


@wrong("tensor_view", "mapped read-only")
def copies_what_it_may_not_write(data, info):
    if memoryview(data).readonly:  # torch warns of such a buffer
        data = bytearray(data[info.offset : info.offset + info.nbytes])
        return flat(data, info, offset=0).view(info.shape)
    return flat(data, info).view(info.shape)


@wrong("tensor_view", "larger than memory")
def copies_the_file(data, info):
    return flat(bytearray(data) if memoryview(data).readonly else data, info).view(
        info.shape
    )


@wrong("tensor_view", "fails there")
def wants_to_write(data, info):
    array = (ctypes.c_char * len(data)).from_buffer(data)
    return flat(array, info).view(info.shape)


@wrong("tensor_view", "watch the offset")
def from_the_first_byte(data, info):
    return flat(data, info, offset=0).view(info.shape)


@wrong("tensor_view", "A count is in numbers")
def to_the_end_of_the_file(data, info):
    rest = torch.frombuffer(data, dtype=DTYPES[info.dtype], offset=info.offset)
    return rest[: math.prod(info.shape)].view(info.shape)


@wrong("tensor_view", "A count is in numbers")
def counts_bytes(data, info):
    return flat(data, info, count=info.nbytes, offset=0).view(info.shape)


@wrong("tensor_view", "F32, which is torch.float32")
def bytes_as_numbers(data, info):
    return flat(data, info, dtype=torch.uint8, count=info.nbytes)


@wrong("tensor_view", "the shape is")
def without_a_shape(data, info):
    return flat(data, info)


@wrong("tensor_view", "BF16 is torch.bfloat16")
def another_half(data, info):
    dtype = torch.float32 if info.dtype == "F32" else torch.float16
    return flat(data, info, dtype=dtype).view(info.shape)


@wrong("2.1", "byte 4,095")
def one_too_many(offset, length, page=4096):
    return (offset + length) // page - offset // page + 1 if length else 0


@wrong("2.1", "across the border")
def rounded_up(offset, length, page=4096):
    return -(-length // page)


@wrong("2.1", "no bytes")
def nothing_forgotten(offset, length, page=4096):
    return (offset + max(length, 1) - 1) // page - offset // page + 1


def weighed(config, itemsize):
    found: Counter[str] = Counter()
    for ours, parts in stored_shapes(config).items():
        for name, shape in parts.items():
            found[part_of_model(ours)] += int(math.prod(shape) * itemsize(ours, name))
    return found


def a_token(config, share, kinds):
    sizes = weighed(
        config, lambda ours, name: 1 if name.endswith(("blocks", "scales")) else 2
    )
    return sizes["experts"] * share + sum(sizes[kind] for kind in kinds)


@wrong("2.2", "you read all")
def all_experts(config):
    return a_token(config, 1, ["attention", "norms", "router", "lm_head"])


@wrong("2.2", "embedding")
def the_embedding_too(config):
    share = config.num_experts_per_tok / config.num_local_experts
    kinds = ["attention", "norms", "router", "lm_head", "embedding"]
    return a_token(config, share, kinds)


@wrong("2.2", "LM head")
def no_head(config):
    share = config.num_experts_per_tok / config.num_local_experts
    return a_token(config, share, ["attention", "norms", "router"])


def shards(sizes, limit, fits=lambda size, limit: size <= limit):
    number, filled, shard_of = 1, 0, {}
    for name, size in sizes.items():
        if filled and not fits(filled + size, limit):
            number, filled = number + 1, 0
        filled += size
        shard_of[name] = number
    return {
        name: f"model-{shard:05}-of-{number:05}.safetensors"
        for name, shard in shard_of.items()
    }


@wrong("2.3", "just fit")
def never_full(sizes, limit):
    return shards(sizes, limit, lambda size, limit: size < limit)


@wrong("2.3", "do not fit into")
def lets_anything_in(sizes, limit):
    return shards(sizes, limit)


@wrong("2.3", "never gone back to")
def first_fit(sizes, limit):
    rooms: list[int] = []
    shard_of = {}
    for name, size in sizes.items():
        fitting = [n for n, room in enumerate(rooms) if size <= room]
        if not fitting:
            rooms.append(limit)
        number = fitting[0] if fitting else len(rooms) - 1
        rooms[number] -= size
        shard_of[name] = number + 1
    return {
        name: f"model-{shard:05}-of-{len(rooms):05}.safetensors"
        for name, shard in shard_of.items()
    }
