"""Wrong answers to chapter 12."""

import triton
import triton.language as tl

from simplellm.apps.roofline import read_bytes as kept_read_bytes
from simplellm.apps.roofline import step_flops
from simplellm.model.kernels.expert_blocks import count_pairs, write_blocks
from wrong import wrong


@wrong("sort_small_kernel", "ids alone have ties")
@triton.jit
def compares_ids_alone(
    ids_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    num_tokens_ptr,
    n,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    num_pairs = count_pairs(num_tokens_ptr, n, TOP_K)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(ids_ptr + i, i < num_pairs, E)
    position = tl.zeros([ROWS], tl.int32)
    count = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, n, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(ids_ptr + j, j < num_pairs, E)
        count += tl.histogram(other, BLOCK_E, j < num_pairs)
        position += tl.sum((other[None, :] < mine[:, None]).to(tl.int32), 1)
    tl.store(pairs_ptr + position, i, i < n)
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)


@wrong("sort_small_kernel", "isn't stable")
@triton.jit
def later_pairs_first(
    ids_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    num_tokens_ptr,
    n,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    num_pairs = count_pairs(num_tokens_ptr, n, TOP_K)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(ids_ptr + i, i < num_pairs, E) * n + n - 1 - i
    position = tl.zeros([ROWS], tl.int32)
    count = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, n, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(ids_ptr + j, j < num_pairs, E)
        count += tl.histogram(other, BLOCK_E, j < num_pairs)
        lower = ((other * n + n - 1 - j)[None, :] < mine[:, None]) & (j < n)[None, :]
        position += tl.sum(lower.to(tl.int32), 1)
    tl.store(pairs_ptr + position, i, i < n)
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)


@wrong("sort_small_kernel", "over all chunks")
@triton.jit
def counts_its_own_alone(
    ids_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    num_tokens_ptr,
    n,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    num_pairs = count_pairs(num_tokens_ptr, n, TOP_K)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + i, i < num_pairs, E)
    mine = ids * n + i
    count = tl.histogram(ids, BLOCK_E, i < num_pairs)
    position = tl.zeros([ROWS], tl.int32)
    for first in range(0, n, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(ids_ptr + j, j < num_pairs, E)
        lower = (other * n + j)[None, :] < mine[:, None]
        position += tl.sum(lower.to(tl.int32), 1)
    tl.store(pairs_ptr + position, i, i < n)
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)


@triton.jit
def sort_of(
    ids_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    num_tokens_ptr,
    n,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # so many pairs before the end, the loop ends
    LESS: tl.constexpr,  # by which an id's factor is below n
    MINE: tl.constexpr,  # "E", or what padding is instead: "0" or "ids"
    OTHER: tl.constexpr,  # the same
    PLACED: tl.constexpr,  # whether padding is stored
):
    """A right answer, with one thing wrong."""
    num_pairs = count_pairs(num_tokens_ptr, n, TOP_K)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = n if MINE == "ids" else num_pairs
    ids = tl.load(ids_ptr + i, i < known, 0 if MINE == "0" else E)
    mine = ids * (n - LESS) + i
    count = tl.zeros([BLOCK_E], tl.int32)
    position = tl.zeros([ROWS], tl.int32)
    for first in range(0, n - EARLY, CHUNK):
        j = first + tl.arange(0, CHUNK)
        known = n if OTHER == "ids" else num_pairs
        other = tl.load(ids_ptr + j, j < known, E)
        if OTHER == "0":
            other = tl.where((j >= num_pairs) & (j < n), 0, other)
        count += tl.histogram(other, BLOCK_E, j < num_pairs)
        lower = (other * (n - LESS) + j)[None, :] < mine[:, None]
        position += tl.sum(lower.to(tl.int32), 1)
    tl.store(pairs_ptr + position, i, i < (n if PLACED else num_pairs))
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)


class Sort:
    """`sort_of` as a kernel with some mistake."""

    def __init__(self, name, **mistake):
        self.__name__ = name
        right = dict(EARLY=0, LESS=0, MINE="E", OTHER="E", PLACED=True)
        self.options = right | mistake

    def __getitem__(self, grid):
        return lambda *args: sort_of[grid](*args, **self.options)


wrong("sort_small_kernel", "over all n")(Sort("ends_early", EARLY=1))
wrong("sort_small_kernel", "over all n")(Sort("full_chunks", EARLY=15))
wrong("sort_small_kernel", "a factor below n")(Sort("a_factor_of_less", LESS=1))
wrong("sort_small_kernel", "padding has places")(Sort("no_padding", PLACED=False))
wrong("sort_small_kernel", "Padding's id is E")(Sort("places_of_old_ids", MINE="ids"))
wrong("sort_small_kernel", "padding's id is E")(Sort("old_ids", OTHER="ids"))
wrong("sort_small_kernel", "padding's id is E")(Sort("padding_is_0", OTHER="0"))
wrong("sort_small_kernel", "Padding's id is E")(Sort("place_of_0", MINE="0"))
wrong("sort_small_kernel", "after every expert's")(Sort("all_0", MINE="0", OTHER="0"))


@triton.jit
def number_of(code):
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def product(
    x_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MISTAKE: tl.constexpr,
):
    """The grouped product with one of the usual mistakes."""
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + 2 * block)
    first = tl.load(blocks_ptr + 2 * block + 1)
    positions = first + tl.arange(0, BLOCK_T)
    valid = positions < tl.load(offsets_ptr + expert + 1)
    tokens = tl.load(pairs_ptr + positions, valid, 0) // TOP_K
    if MISTAKE == "positions":
        tokens = positions
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < tl.where(expert < 0, 0, N)
    weight_rows = expert * N + rows
    byte = tl.arange(0, 16)
    out = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for group in range(K // 32):
        code_ptrs = codes_ptr + weight_rows[:, None] * (K // 2) + group * 16 + byte
        if MISTAKE == "loads all":
            codes = tl.load(code_ptrs).to(tl.int32)
        else:
            codes = tl.load(code_ptrs, inside[:, None], 0).to(tl.int32)
        low, high = number_of(codes & 15), number_of(codes >> 4)
        if MISTAKE == "swapped":
            low, high = high, low
        scale_ptrs = scales_ptr + weight_rows * (K // 32) + group
        if MISTAKE == "one scale":
            scale_ptrs -= group
        scale = tl.load(scale_ptrs, inside, 0).to(tl.int32) << 23
        scale = scale.to(tl.float32, bitcast=True)
        if MISTAKE == "no scale":
            scale = scale * 0 + 1
        if MISTAKE == "planes":
            even = tokens[None, :] * K + group * 32 + byte[:, None]
            odd = even + 16
        else:
            even = tokens[None, :] * K + group * 32 + 2 * byte[:, None]
            odd = even + 1
        x_even = tl.load(x_ptr + even, valid[None, :], 0)
        x_odd = tl.load(x_ptr + odd, valid[None, :], 0)
        part = tl.dot(low, x_even, input_precision="ieee")
        part += tl.dot(high, x_odd, input_precision="ieee")
        out += part * scale[:, None]
    out_ptrs = out_ptr + positions[None, :] * N + rows[:, None]
    if MISTAKE == "unmasked":
        tl.store(out_ptrs, out, valid[None, :] & (rows >= 0)[:, None])
    else:
        tl.store(out_ptrs, out, inside[:, None] & valid[None, :])


class Mistaken:
    """A kernel: ``product`` with a mistake."""

    def __init__(self, mistake):
        self.mistake = mistake
        self.__name__ = mistake

    def __getitem__(self, grid):
        return lambda *args: product[grid](*args, self.mistake)


for mistake, word in {
    "positions": "at the pairs' positions",
    "swapped": "the low one is the even column",
    "planes": "the even ones",
    "no scale": "without its scale",
    "one scale": "a scale of its own",
    "unmasked": "outside of out",
    "loads all": "reads beyond the codes",
}.items():
    wrong("grouped_kernel", word)(Mistaken(mistake))


@wrong("12.1", "grow with the tokens")
def by_active_weights(config, machine):
    read = kept_read_bytes(config, 1).total / machine.bytes_per_second
    return int(read * machine.flops_per_second / step_flops(config, 1, 1)) + 1


@wrong("12.2", "the one of its own included")
def guesses_alone(config, machine, batch, guesses, accept):
    tokens = batch * (guesses + 1)
    read = kept_read_bytes(config, tokens).total
    least = machine.least_seconds(read, step_flops(config, tokens, tokens))
    expected = sum(accept**n for n in range(1, guesses + 1)) if guesses else 1
    return batch * expected / least


@wrong("12.2", "the one of its own included")
def bytes_of_a_plain_step(config, machine, batch, guesses, accept):
    read = kept_read_bytes(config, batch).total
    least = machine.least_seconds(read, step_flops(config, batch, batch))
    return batch * sum(accept**n for n in range(guesses + 1)) / least


@wrong("12.2", "the longer part is its limit")
def bytes_alone(config, machine, batch, guesses, accept):
    read = kept_read_bytes(config, batch * (guesses + 1)).total
    tokens = batch * sum(accept**n for n in range(guesses + 1))
    return tokens / (read / machine.bytes_per_second)


@wrong("12.2", "in the head")
def heads_of_few_tokens(config, machine, batch, guesses, accept):
    tokens = batch * (guesses + 1)
    read = kept_read_bytes(config, tokens).total
    least = machine.least_seconds(read, step_flops(config, tokens, batch))
    return batch * sum(accept**n for n in range(guesses + 1)) / least


@wrong("12.3", "aren't used")
def over_all_experts(ids, experts, block):
    counts = ids.flatten().long().bincount(minlength=experts)
    filled = -(-counts // block)
    return 1 - float(counts.sum() / (filled.sum() * block)), float(filled.sum()) / (
        experts
    )


@wrong("12.3", "10 pairs")
def full_blocks_alone(ids, experts, block):
    counts = ids.flatten().long().bincount(minlength=experts)
    filled = -(-counts // block)
    empty = float((block - counts[counts > 0] % block).sum() / (filled.sum() * block))
    return 1 - empty, float(filled.sum() / (counts > 0).sum())
