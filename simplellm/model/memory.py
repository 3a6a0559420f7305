"""How large a model, its cache and its steps are, and whether there is room for them.

Each formula stands here once. All sizes are in bytes unless they say otherwise;
``itemsize`` is the bytes of one number.
"""

import math
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from simplellm.base.config import MAX_SIZE, EngineConfig, ModelConfig, expect
from simplellm.checkpoint.names import Shape, part_of_model, tensor_shapes
from simplellm.model.machine import empty_cache

CPU_CACHE_BYTES = 2**28  # at least, and beside the longest text
CPU_CACHE_SHARE = 0.25  # of the memory that is free once the model is loaded
GPU_CACHE_SHARE = 0.85  # of the memory that is free once the model is loaded


def by_kind(config: ModelConfig, size: Callable[[str, Shape], int]) -> dict[str, int]:
    """Add up a ``size`` of each tensor by the parts of the model they belong to.

    ``size`` gets our name and the shape; `part_of_model` names the parts.
    """
    sizes: dict[str, int] = {}
    for ours, shape in tensor_shapes(config).items():
        part = part_of_model(ours)
        sizes[part] = sizes.get(part, 0) + size(ours, shape)
    if config.tie_word_embeddings:
        del sizes["embedding"]  # it is the LM head
    return sizes


class Counts(NamedTuple):
    """Parameters of a model; ``active`` ones take part in each token."""

    total: int
    active: int
    by_kind: dict[str, int]


def count_parameters(config: ModelConfig) -> Counts:
    """Count as gpt-oss's model card does (arXiv:2508.10925, table 1).

    Every weight, bias, norm and sink is a parameter; an MXFP4 scale is not. Active
    are num_experts_per_tok of the experts and everything else except the embedding,
    of which a token reads one row.
    """
    counts = by_kind(config, lambda ours, shape: math.prod(shape))
    total, experts = sum(counts.values()), counts.get("experts", 0)
    used = experts * config.num_experts_per_tok // max(1, config.num_local_experts)
    return Counts(total, total - experts + used - counts.get("embedding", 0), counts)


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> dict[str, int]:
    """The loaded weights by kind: norms are float32, others may have a format."""

    def size(ours: str, shape: Shape) -> int:
        if form := config.formats.get(ours):
            return int(form.nbytes(shape))
        return math.prod(shape) * (4 if part_of_model(ours) == "norms" else itemsize)

    return by_kind(config, size)


def copied_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of dequantized copies kept beside packed weights, as some are on a CPU.

    For products with many tokens; and of a packed head that is also the embedding, rows
    to look up, with ``itemsize`` bytes a number unless it has a format.
    """
    shapes, forms = tensor_shapes(config), config.formats
    copies = (
        2 * math.prod(shapes[n]) for n, form in forms.items() if form.keep_dequantized
    )
    if not config.tie_word_embeddings or "lm_head.weight" not in forms:
        return sum(copies)
    table = "embed_tokens.weight"
    return sum(copies) + (2 if table in forms else itemsize) * math.prod(shapes[table])


def position_bytes(config: ModelConfig, itemsize: int) -> int:
    """A key and a value of one position in one layer."""
    return 2 * config.num_key_value_heads * config.head_dim * itemsize


def kv_bytes(
    config: ModelConfig,
    tokens: int,
    *,
    itemsize: int = 2,
    windowed: bool = True,
    kv_cache_dtype: str = "auto",
) -> int:
    """The keys and values of one sequence of ``tokens`` tokens.

    ``windowed`` lets a sliding layer keep no more than its window.
    """
    total, full = 0, 1 if kv_cache_dtype == "fp8" else itemsize
    for window in map(config.window, range(config.num_hidden_layers)):
        kept = min(tokens, window) if window and windowed else tokens
        total += kept * position_bytes(config, itemsize if window else full)
    return total


def sliding_groups(config: ModelConfig, itemsize: int, kv_cache_dtype: str) -> int:
    """How many groups the sliding layers form, each with pages of its own.

    One, unless the full layers are in FP8. The sliding ones never are: all in one
    group, they would make a page ``itemsize`` times as large as the full layers need.
    So they form ``itemsize`` groups.
    """
    sliding = config.layer_types.count("sliding_attention")
    return min(sliding, itemsize if kv_cache_dtype == "fp8" else 1)


def page_bytes(
    config: ModelConfig, page_size: int, itemsize: int, kv_cache_dtype: str = "auto"
) -> int:
    """A page: keys and values of the larger group of layers, full or sliding."""
    counts = Counter(config.layer_types)
    groups = max(1, sliding_groups(config, itemsize, kv_cache_dtype))
    sliding = -(-counts["sliding_attention"] // groups) * itemsize
    full = counts["full_attention"] * (1 if kv_cache_dtype == "fp8" else itemsize)
    return max(full, sliding) * page_size * position_bytes(config, 1)


def activation_bytes(
    config: ModelConfig, tokens: int, samples: int, itemsize: int
) -> int:
    """About what a step of ``tokens`` tokens has to hold, float32 logits included."""
    inner = max(config.intermediate_size, config.dense_intermediate_size or 0)
    rows = (inner + config.hidden_size) * max(config.num_experts_per_tok, 1)
    rows += 3 * config.hidden_size + 2 * config.num_attention_heads * config.head_dim
    tables = 8 * config.max_position_embeddings * config.head_dim  # of rotations, made
    return tokens * rows * itemsize + 4 * samples * config.vocab_size + tables


def free_bytes(device: torch.device) -> tuple[int, int]:
    """What this process can still take of a device's memory, and what there is."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.memory_allocated(device), total
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return total, total
    fields = dict(line.split(":") for line in lines)
    return limited(int(fields["MemAvailable"].split()[0]) * 1024), total


CGROUP = Path("/sys/fs/cgroup")


def limited(free: int) -> int:
    """``free`` bytes of memory, or less if this process may not take as many.

    That is by ulimit -v, or by the limit of its container (a cgroup of either version),
    to which pages of files count that the system gives back when they are needed.
    """
    limits = [free]
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits.append(most - pages * resource.getpagesize())
    for limit, used, stat, idle in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
            *("memory/memory.stat", "total_inactive_file"),
        ),
    ):
        with suppress(OSError, ValueError):  # no such version, or "max"
            left = int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
            lines = (line.split() for line in (CGROUP / stat).read_text().splitlines())
            limits.append(left + sum(int(n) for name, n in lines if name == idle))
    return max(0, min(limits))


def num_pages(
    model: ModelConfig,
    config: EngineConfig,
    itemsize: int,
    device: torch.device,
    beside: int = 0,
) -> int:
    """Pages for keys and values: as many as asked for, or as memory allows.

    ``config`` is resolved, and ``beside`` are bytes that each page takes elsewhere.
    Pages fill a share of what is free now; on a CPU no more than the longest text takes
    and, for the others, `CPU_CACHE_BYTES`. Raises ValueError if not one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    available = config.cache_bytes
    if available is None and device.type == "cuda":
        free, total = free_bytes(device)
        available = int(free * GPU_CACHE_SHARE)
        if (share := config.gpu_memory_utilization) is not None:
            available = int(free - (1 - share) * total)
    if available is None:
        longest = min(model.max_position_embeddings, config.max_model_len or MAX_SIZE)
        dtype = config.kv_cache_dtype
        wanted = kv_bytes(model, longest, itemsize=itemsize, kv_cache_dtype=dtype)
        wanted += CPU_CACHE_BYTES
        share = int(free_bytes(device)[0] * CPU_CACHE_SHARE)
        share //= config.num_ranks  # ranks on a CPU share its memory
        available = max(CPU_CACHE_BYTES, min(share, wanted))
    each = page_bytes(model, config.page_size, itemsize, config.kv_cache_dtype)
    each += beside
    expected = f"at least one page of {each} bytes"
    expect(available >= each, "the memory for pages, in bytes,", available, expected)
    return available // each


def num_host_pages(
    model: ModelConfig, config: EngineConfig, itemsize: int, beside: int = 0
) -> int:
    """Pages that a rank has on the host; arguments and errors are `num_pages`'s."""
    if config.cpu_cache_bytes == 0:
        return 0
    each = page_bytes(model, config.page_size, itemsize, config.kv_cache_dtype)
    ranks = config.num_ranks
    count = config.cpu_cache_bytes // (ranks * (each + beside))
    expected = f"0, or at least {ranks * (each + beside)}: a page of each rank"
    expect(count > 0, "cpu_cache_bytes", config.cpu_cache_bytes, expected)
    return count


@dataclass(frozen=True)
class Need:
    """What a model and what it works with take of a device's memory."""

    weights: int
    cache: int  # for the keys and values asked for, or those of one step
    step: int  # about, for what a step has to hold

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        itemsize: int = 2,
        *,
        mapped: bool = False,
    ) -> "Need":
        """The need of a resolved ``config``; ``mapped`` experts stay in their file."""
        weights = weight_bytes(model, itemsize)
        if mapped:
            weights.pop("experts", None)
        in_all = sum(weights.values()) + copied_bytes(model, itemsize)
        tokens = config.max_num_batched_tokens
        dtype = config.kv_cache_dtype
        if config.num_pages is not None:
            each = page_bytes(model, config.page_size, itemsize, dtype)
            cache = config.num_pages * each
        else:
            step = kv_bytes(model, tokens, itemsize=itemsize, kv_cache_dtype=dtype)
            cache = config.cache_bytes or step
        tokens *= config.data_parallel_size  # which meet at the experts
        step = activation_bytes(model, tokens, config.max_num_seqs, itemsize)
        return cls(in_all, cache, step)


def shortage(device: torch.device, takes: str) -> Exception:
    """What to raise where a device has less memory than something ``takes``."""
    free, total = free_bytes(device)
    gpu = device.type == "cuda"
    error = torch.OutOfMemoryError if gpu else MemoryError
    name = torch.cuda.get_device_name(device) if gpu else "the CPU"
    return error(
        f"{name} has not enough memory: {takes}; {free / 1e9:.1f} of "
        f"{total / 1e9:.1f} GB are free"
    )


def check_room(device: torch.device, nbytes: int, what: str) -> None:
    """Raise torch.OutOfMemoryError (on a CPU MemoryError) if ``nbytes`` do not fit."""
    if nbytes > free_bytes(device)[0]:
        raise shortage(device, f"{what} take {nbytes / 1e9:.1f} GB")


@contextmanager
def enough(need: Need, device: torch.device) -> Iterator[None]:
    """A context to load a model in: if memory is short, its error says of what.

    Raises torch.OutOfMemoryError (on a CPU MemoryError): before anything is loaded if
    ``need`` cannot fit, and in the place of an error like it that happens inside.
    """
    takes = (
        f"the model takes {need.weights / 1e9:.1f} GB for its weights, "
        f"{need.cache / 1e9:.1f} for keys and values and about {need.step / 1e9:.1f} "
        "for a step (a smaller model, num_pages, cache_bytes, max_num_seqs or "
        "max_num_batched_tokens takes less)"
    )
    empty_cache(device)
    if need.weights + need.cache + need.step > free_bytes(device)[0]:
        raise shortage(device, takes)
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise shortage(device, takes) from error
