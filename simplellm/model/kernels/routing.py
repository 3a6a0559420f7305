"""Choose each token's experts, and sort the choices by expert.

T tokens, E experts, k experts a token, n = T * k (token, choice) pairs, N hidden size.
"""

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.argmax_keys import LOWEST, index_of, ordered
from simplellm.model.kernels.expert_blocks import (
    ExpertBlocks,
    count_pairs,
    write_blocks,
)
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.linear import project_exactly
from simplellm.model.kernels.sorting import VARYING, max_blocks, sort_small_kernel
from simplellm.model.layers import Experts

COMPARED = 1024  # pairs of which each is compared with each
# Those that a program takes, for at most so many in all. Of more than are compared it
# counts them first. On an H200 on 2026-11-30: 2,816 took 6.6 us so, where comparing all
# took 12, and 131,072 took 64.
CHUNKS = ((COMPARED, 32), (32_768, 128), (math.inf, 256))


@triton.jit(
    do_not_specialize=VARYING, do_not_specialize_on_alignment=["num_tokens_ptr"]
)
def count_kernel(
    ids_ptr,
    counts_ptr,
    num_tokens_ptr,
    n,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a chunk of pairs: counts[chunk, e] = #{i in chunk: id[i] = e}."""
    num_pairs = count_pairs(num_tokens_ptr, n, TOP_K)
    pdl_wait(PDL)
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    count = tl.histogram(tl.load(ids_ptr + i, i < num_pairs, 0), BLOCK_E, i < num_pairs)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), count)


@triton.jit
def top_k_of(logits, experts, choices, TOP_K: tl.constexpr, NORMALIZED: tl.constexpr):
    """logits float32 [rows, E] -> ids, scores [rows, CHOICES], best first.

    scores = softmax over the chosen logits, or over all if not NORMALIZED; columns from
    TOP_K on are padding
    """
    keys = ordered(logits, experts)
    ids = tl.zeros([logits.shape[0], choices.shape[1]], tl.int32)
    best = tl.zeros([logits.shape[0], choices.shape[1]], tl.float32) - float("inf")
    for choice in tl.static_range(TOP_K):
        key = tl.max(keys, 1, keep_dims=True)  # [rows, 1]
        hit = keys == key
        value = tl.sum(tl.where(hit, logits, 0.0), 1, keep_dims=True)
        ids = tl.where(choices == choice, index_of(key), ids)
        best = tl.where(choices == choice, value, best)
        keys = tl.where(hit, LOWEST, keys)
    top = tl.sum(tl.where(choices == 0, best, 0.0), 1, keep_dims=True)
    odds = tl.where(choices < TOP_K, tl.exp(best - top), 0.0)
    among = odds if NORMALIZED else tl.exp(logits - top)
    return ids, odds / tl.sum(among, 1, keep_dims=True)


@triton.jit(do_not_specialize=VARYING)
def top_k_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    scores_ptr,
    tokens,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZED: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS tokens: ids = the k largest; scores = their softmax.

    Logits are the sum of the parts [T, PARTS, E] and the bias. Ids count from FIRST on;
    those that aren't among the HELD next ones are HELD.
    """
    pdl_wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < tokens) & (experts < E)
    logits = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for part in tl.static_range(PARTS):  # the bias last: parts may come joined
        where = (rows.to(tl.int64) * PARTS + part) * E + experts
        logits += tl.load(logits_ptr + where, inside, 0).to(tl.float32)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + experts, experts < E, 0).to(tl.float32)
    logits = tl.where(experts < E, logits, -float("inf"))
    ids, scores = top_k_of(logits, experts, choices, TOP_K, NORMALIZED)
    if HELD < E:
        ids -= FIRST
        ids = tl.where((ids >= 0) & (ids < HELD), ids, HELD)
    offsets = rows * TOP_K + choices
    real = (rows < tokens) & (choices < TOP_K)
    tl.store(ids_ptr + offsets, ids, real)
    tl.store(scores_ptr + offsets, scores, real)


@triton.jit(
    do_not_specialize=VARYING, do_not_specialize_on_alignment=["num_tokens_ptr"]
)
def scatter_kernel(
    ids_ptr,
    counts_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    num_tokens_ptr,
    n,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program scatters a chunk of pairs, each to those of its expert.

    position[i] = offset[id[i]] + #{j in earlier chunks: id[j] = id[i]}
                  + #{j < i in this chunk: id[j] = id[i]}

    Pairs of padding stay in their places, after all others.
    """
    num_pairs = count_pairs(num_tokens_ptr, n, TOP_K)
    pdl_wait(PDL)
    chunk = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    count = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    TILE: tl.constexpr = CHUNK * 128 // BLOCK_E if BLOCK_E > 128 else CHUNK
    for first in range(0, tl.num_programs(0), TILE):
        c = (first + tl.arange(0, TILE))[:, None]
        where = counts_ptr + c * BLOCK_E + experts[None, :]
        counts = tl.load(where, c < tl.num_programs(0), 0)
        count += tl.sum(counts, 0)
        before += tl.sum(tl.where(c < chunk, counts, 0), 0)
    begin = write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)

    i = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + i
    mine = tl.load(ids_ptr + pair, pair < num_pairs, 0)
    position = tl.gather(begin + before, mine, 0)
    same = (mine[None, :] == mine[:, None]) & (i[None, :] < i[:, None])
    position += tl.sum(same.to(tl.int32), 1)
    tl.store(pairs_ptr + tl.where(pair < num_pairs, position, pair), pair, pair < n)


@cache
def top_k_launcher(
    experts: int,
    parts: int,
    top_k: int,
    rows: int,
    normalized: bool = True,
    held: range | None = None,
) -> Launcher:
    """For logits in so many parts, ``rows`` tokens a program."""
    held = held or range(experts)
    return launcher(
        top_k_kernel,
        E=experts,
        PARTS=parts,
        TOP_K=top_k,
        NORMALIZED=normalized,
        FIRST=held.start,
        HELD=len(held),
        ROWS=rows,
        BLOCK_E=power_of_two(experts),
        BLOCK_K=power_of_two(top_k),
        num_warps=rows,
    )


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    rows: int,
    normalized: bool = True,
    held: range | None = None,
) -> tuple[Tensor, Tensor]:
    """`route_tokens` from the logits on, float32 parts [T, S, E] that are summed.

    A program takes ``rows`` tokens.
    """
    tokens, parts, experts = logits.shape
    ids = logits.new_empty(tokens, top_k, dtype=torch.int32)
    scores = logits.new_empty(tokens, top_k)
    start = top_k_launcher(experts, parts, top_k, rows, normalized, held)
    start((-(-tokens // rows), 1, 1), logits, bias, ids, scores, tokens)
    return ids, scores


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    batch_invariant: bool = False,
    normalized: bool = True,
    held: range | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and how much each one counts.

    x [T, N], weight [E, N], bias [E] -> ids int32 [T, k] and scores float32 [T, k], a
    softmax over the chosen logits, or over all if not ``normalized``. Of equal logits
    the lower id comes first; NaN comes before every number and makes the token's scores
    NaN. Logits stay in float32, where hardly any are equal. With ``batch_invariant`` no
    token's scores depend on the others. Of a rank that has the experts ``held``, ids
    count among these, and all others are the id len(held).
    """
    logits = project_exactly(x, weight, batch_invariant)
    rows = 1 if batch_invariant or x.shape[0] <= 512 else 4
    return choose_experts(logits, bias, top_k, rows, normalized, held)


def room(mlp: Experts, like: Tensor, *shape: int, **options: Any) -> Tensor:
    """Room for what each choice of an expert adds: zeros where some are elsewhere.

    What nobody writes is then added up with what other ranks have.
    """
    if len(mlp.held) < len(mlp.router):
        return like.new_zeros(*shape, **options)
    return like.new_empty(*shape, **options)


class SortPlan(NamedTuple):
    """How pairs are sorted, in one launch or two."""

    num_blocks: int
    grid: tuple[int, int, int]
    counter: Launcher | None  # if they are counted first
    scatter: Launcher


@lru_cache(8192)
def sort_plan(
    n: int, top_k: int, experts: int, block: int, others: bool = False
) -> SortPlan:
    """For n pairs."""
    num_blocks = max_blocks(n, experts, block)
    rows = next(chunk for most, chunk in CHUNKS if n <= most)
    programs = -(-n // rows)
    width = power_of_two(experts + others)
    options: dict[str, Any] = {"TOP_K": top_k, "BLOCK_E": width}
    # At least 32, for fewer kernels to compile.
    step = max(32, power_of_two(-(-num_blocks // programs)))
    sizes: dict[str, Any] = {"E": experts, "BLOCK": block, "STEP": step}
    grid = programs, 1, 1
    if n > COMPARED:
        options |= {"CHUNK": rows, "num_warps": rows // 32}
        counter = launcher(count_kernel, **options)
        scatter = launcher(scatter_kernel, **options, **sizes)
        return SortPlan(num_blocks, grid, counter, scatter)
    options |= {"CHUNK": min(512, max(32, power_of_two(n))), "num_warps": 8}
    small = launcher(sort_small_kernel, ROWS=rows, **options, **sizes)
    return SortPlan(num_blocks, grid, None, small)


def sort_pairs(
    ids: Tensor,
    experts: int,
    block: int,
    num_tokens: Tensor | None = None,
    others: bool = False,
) -> ExpertBlocks:
    """Sort the pairs of ``ids`` int32 [T, k] by expert, in blocks of ``block``.

    The sort is stable: an expert's pairs stay in order. ``block`` is a power of two.
    Only the first ``num_tokens``, int32 [1], have experts, all if None. The others are
    padding: their pairs come last, and no block has them. Nor has one those of the id
    ``experts``, which stands for all ``others``, of other ranks. Never waits for the
    GPU.
    """
    n, top_k = ids.numel(), ids.shape[1]
    num_blocks, grid, counter, scatter = sort_plan(n, top_k, experts, block, others)
    result = ExpertBlocks.empty(ids, experts, num_blocks)
    outputs = *result, num_tokens, n, num_blocks
    if counter is None:
        scatter(grid, ids, *outputs)
        return result
    counts = ids.new_empty(grid[0], power_of_two(experts + others))
    counter(grid, ids, counts, num_tokens, n)
    scatter(grid, ids, counts, *outputs)
    return result
