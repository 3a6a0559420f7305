"""Draw each row's next token from its logits, with the noise of `simplellm.base.noise`.

S rows, V vocabulary. What min_p, top_k and top_p leave, `kernels.filters` finds out.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.argmax_keys import LOWEST, index_of, largest_key, ordered
from simplellm.model.kernels.exchange import (
    ALONE,
    Peers,
    exchange_largest,
    load_addresses,
)
from simplellm.model.kernels.filters import (
    COLUMNS,
    LogitsShard,
    bounds,
    depth_of,
    peak_of,
)
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait
from simplellm.sampling.filters import Filters

DRAW_BLOCK = 2048  # logits a program looks at


@triton.jit
def mix_bits(x):
    """`base.noise.mix` in uint32, whose products wrap around by themselves."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def log1p(x):
    """log(1 + x), exact for small x because what 1 + x rounds off is divided out."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def gumbel(bits, LIBRARY: tl.constexpr):
    """-log(-log(1 - u)) for the midpoint u of one of 2^32 intervals."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.0**-32
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    if LIBRARY:  # the logarithms that PyTorch uses; tl.log is less exact
        exponential = -tl.extra.cuda.libdevice.log1p(-uniform)
        return -tl.extra.cuda.libdevice.log(exponential)
    else:
        return -tl.log(-log1p(-uniform))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def draw_kernel(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    seeds_ptr,
    steps_ptr,
    deepest_ptr,
    floors_ptr,
    peaks_ptr,
    keys_ptr,
    width,
    first_token,
    BLOCK: tl.constexpr,
    LIBRARY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK logits of a row: keys[row, block] = their largest score.

    The logits are those of ``width`` tokens from the first one on.

    score[v] = (logit[v] - logit[best]) / temperature + gumbel(hash(seed, step, v))

    What is below a row's floor or deeper than its deepest is never drawn, if these are
    not None.
    """
    pdl_wait(PDL)
    row = tl.program_id(1)
    block = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        logits = logits_ptr + row.to(tl.int64) * width
        inside = tokens < width
        score = tl.load(logits + tokens, inside, -float("inf"))
        score -= peak_of(logits, best_ptr, peaks_ptr, row)
        tokens += first_token
        seed = tl.load(seeds_ptr + row)
        first = mix_bits(mix_bits(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
        first = mix_bits(first ^ tl.load(steps_ptr + row).to(tl.uint32))
        second = mix_bits(first ^ 0x5BD1E995)
        bits = mix_bits(mix_bits(tokens.to(tl.uint32) ^ first) ^ second)
        score = tl.div_rn(score, temperature + tl.zeros([BLOCK], tl.float32))
        if deepest_ptr is not None:
            keep = depth_of(score) <= tl.load(deepest_ptr + row)
            keep &= score >= tl.load(floors_ptr + row)
            score = tl.where(keep, score, -float("inf"))
        score += gumbel(bits, LIBRARY)
        keys = tl.where(inside, ordered(score, tokens), LOWEST)
        tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def drawn_kernel(
    keys_ptr,
    best_ptr,
    temperature_ptr,
    ids_ptr,
    peers_ptr,
    count,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: ids = the index in the largest key; best at temperature 0.

    With peers, in the largest of all ranks'.
    """
    pdl_wait(PDL)
    row = tl.program_id(0)
    key = largest_key(keys_ptr + row * count, count, BLOCK)
    if peers_ptr is not None:
        addresses = load_addresses(peers_ptr, RANKS)
        key = exchange_largest(key, row, addresses, WORDS, RANK, RANKS, ROWS)
    sampled = index_of(key)
    greedy = tl.load(temperature_ptr + row) <= 0
    tl.store(ids_ptr + row, tl.where(greedy, tl.load(best_ptr + row), sampled))


@cache
def draw_launchers(
    on_gpu: bool, peers: Peers | None = None
) -> tuple[Launcher, Launcher]:
    """For the keys, and for the ids, of all ranks' keys if there are ``peers``."""
    keys = launcher(draw_kernel, BLOCK=DRAW_BLOCK, LIBRARY=on_gpu, num_warps=8)
    ranks = ALONE if peers is None else peers.constants()
    return keys, launcher(drawn_kernel, BLOCK=128, **ranks, num_warps=4)


def draw(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    steps: Tensor,
    filters: Filters | None = None,
    shard: LogitsShard | None = None,
    peers: Peers | None = None,
) -> Tensor:
    """One token for each row of ``logits`` float32 [S, V]: int32 [S].

    ``best`` int32 [S] is each row's likeliest token, as `head` finds it; rows whose
    ``temperature``, float32 [S], is 0 get that one. ``seeds`` int64 [S] and ``steps``
    int64 [S] fix the noise, as in `simplellm.model.ops.draw`, whose tokens these are:
    hash, subtraction, division and sum are the same to the bit, and on a GPU the
    logarithms come from the same library. All are contiguous. A rank that has the
    logits [S, W] of a ``shard`` draws with its ``peers``.
    """
    rows, width = logits.shape
    limits: tuple[Tensor | None, Tensor | None] = None, None
    if filters is not None:
        limits = bounds(logits, best, temperature, filters, shard)
    ids = torch.empty_like(best)
    blocks = -(-width // DRAW_BLOCK)
    keys = seeds.new_empty(rows, blocks)
    start, finish = draw_launchers(logits.is_cuda, peers)
    peaks, first = (None, 0) if shard is None else (shard.peaks, shard.first)
    inputs = logits, best, temperature, seeds, steps, *limits, peaks
    start((blocks, rows, 1), *inputs, keys, width, first)
    addresses = None if peers is None else peers.addresses
    finish((rows, 1, 1), keys, best, temperature, ids, addresses, blocks)
    return ids
