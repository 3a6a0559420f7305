"""Choose each token's experts, and sort the choices by expert.

T tokens, E experts, k experts a token, n = T * k (token, choice) pairs, N hidden size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels import supports_pdl
from simplellm.kernels.keys import LOWEST, index_of, ordered
from simplellm.kernels.linear import (
    INVARIANT,
    Dot,
    Gemv,
    check_linear,
    choose,
    gemv,
    linear_parts,
    linear_torch,
)

FEW_PAIRS = 16  # that are chosen and sorted in one program
SMALL = 4096  # pairs of which each is compared with each
CHUNK = 512  # pairs that a program counts and then places when there are more
MANY = Dot(rows=128, depth=64, parts=1, warps=8, stages=4)  # the router's tokens
# What changes from step to step. Triton would compile a kernel again for numbers that
# 16 divides, and for 1, in the middle of somebody's answer.
VARYING = ["tokens", "n", "num_blocks"]


@triton.jit
def top_k_of(logits, experts, choices, TOP_K: tl.constexpr):
    """logits float32 [rows, E] -> ids, weights [rows, CHOICES], best first.

    weights = softmax over the chosen logits; columns from TOP_K on are padding
    """
    keys = ordered(logits, experts)
    ids = tl.zeros([logits.shape[0], choices.shape[1]], tl.int32)
    best = tl.zeros([logits.shape[0], choices.shape[1]], tl.float32) - float("inf")
    for choice in tl.static_range(TOP_K):
        key = tl.max(keys, 1, keep_dims=True)  # [rows, 1]
        taken = keys == key
        value = tl.sum(tl.where(taken, logits, 0.0), 1, keep_dims=True)
        ids = tl.where(choices == choice, index_of(key), ids)
        best = tl.where(choices == choice, value, best)
        keys = tl.where(taken, LOWEST, keys)
    top = tl.sum(tl.where(choices == 0, best, 0.0), 1, keep_dims=True)
    odds = tl.where(choices < TOP_K, tl.exp(best - top), 0.0)
    return ids, odds / tl.sum(odds, 1, keep_dims=True)


@triton.jit
def load_logits(
    logits_ptr,
    bias_ptr,
    rows,
    experts,
    tokens,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """float32 [rows, experts]: the sum of the parts [T, PARTS, E] plus the bias."""
    inside = (rows < tokens) & (experts < E)
    logits = tl.zeros([rows.shape[0], experts.shape[1]], tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + experts, experts < E, 0).to(tl.float32)
    for part in tl.static_range(PARTS):
        where = (rows.to(tl.int64) * PARTS + part) * E + experts
        logits += tl.load(logits_ptr + where, inside, 0).to(tl.float32)
    return tl.where(experts < E, logits, -float("inf"))


@triton.jit(do_not_specialize=VARYING)
def top_k_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    tokens,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS tokens: ids = the k largest; weights = their softmax."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    logits = load_logits(
        logits_ptr, bias_ptr, rows, experts, tokens, E, PARTS, HAS_BIAS
    )
    ids, weights = top_k_of(logits, experts, choices, TOP_K)
    where = rows * TOP_K + choices
    inside = (rows < tokens) & (choices < TOP_K)
    tl.store(ids_ptr + where, ids, inside)
    tl.store(weights_ptr + where, weights, inside)


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and how much each one counts.

    x [T, N], weight [E, N], bias [E] -> ids int32 [T, k] and weights float32 [T, k],
    a softmax over the chosen logits. Of equal logits the lower id comes first; NaN
    comes before every number and makes the token's weights NaN. Logits stay in float32,
    where hardly any are equal.
    """
    return top_k_softmax(router_logits(x, weight, bias), top_k, bias)


def route_torch(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    return top_k_softmax_torch(router_logits_torch(x, weight, bias), top_k, bias)


def router_logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """float32 [T, S, E], S parts whose sum plus the bias is the logits."""
    check_linear(x, weight, bias)
    config = choose(x.shape[0], *weight.shape) or MANY
    if isinstance(config, Gemv):
        return gemv(x, weight, None, config, torch.float32)[:, None]
    return linear_parts(x, weight, None, config)


def router_logits_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_torch(x.float(), weight.float())[:, None]


def top_k_softmax(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    pdl: bool = True,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` from the logits on: [T, E], or parts [T, S, E] to be summed, contiguous;
    ``bias`` [E] is added. A program takes ``rows`` tokens; None: what is fastest."""
    tokens, parts, experts = check_logits(logits, top_k, bias)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return ids, weights
    pdl = pdl and supports_pdl(logits.device)
    rows = rows or (1 if tokens <= 512 else 4)
    top_k_kernel[(triton.cdiv(tokens, rows),)](
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        tokens,
        E=experts,
        PARTS=parts,
        HAS_BIAS=bias is not None,
        TOP_K=top_k,
        ROWS=rows,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        PDL=pdl,
        num_warps=rows,
        launch_pdl=pdl,
    )
    return ids, weights


def top_k_softmax_torch(
    logits: Tensor, top_k: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if logits.ndim == 3:
        logits = logits.float().sum(1)
    if bias is not None:
        logits = logits.float() + bias.float()
    # A stable sort: topk promises no order among equal logits.
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    chosen, ids = order.values[:, :top_k], order.indices[:, :top_k]
    return ids.int(), chosen.softmax(dim=-1)


def check_logits(
    logits: Tensor, top_k: int, bias: Tensor | None
) -> tuple[int, int, int]:
    """T, S and E; raises ValueError unless that many can be chosen."""
    if logits.ndim not in (2, 3) or not logits.is_contiguous():
        raise ValueError(
            f"logits are {list(logits.shape)} with strides {list(logits.stride())}; "
            "expected [T, E] or [T, S, E], contiguous"
        )
    tokens, experts = logits.shape[0], logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; expected 1 to {experts}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias is {list(bias.shape)}; expected [{experts}]")
    return tokens, 1 if logits.ndim == 2 else logits.shape[1], experts


class Dispatch(NamedTuple):
    """The n pairs in order of their experts, and blocks of pairs of one expert.

    Pairs of padding come last, after ``offsets[E]``.
    """

    pairs: Tensor  # int32 [n]; pair p is choice p % k of token p // k
    offsets: Tensor  # int32 [E + 1], where each expert's pairs begin
    blocks: Tensor  # int32 [blocks, 2], expert and first position; -1, 0 if empty

    @classmethod
    def empty(cls, pairs: int, experts: int, block: int, device) -> "Dispatch":
        """Room for so many pairs, however they are routed."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            empty(pairs),
            empty(experts + 1),
            empty(max_blocks(pairs, experts, block), 2),
        )


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """The most blocks that ``pairs`` pairs can fill, however they are routed."""
    return min(pairs, (pairs + min(pairs, experts) * (block - 1)) // block)


@triton.jit
def write_blocks(
    count,
    offsets_ptr,
    blocks_ptr,
    num_blocks,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """From how many pairs each expert has: the offsets and this program's STEP blocks.

    Block b is of the expert whose blocks, counted up over the experts, b falls into.
    Returns the offsets.
    """
    program = tl.program_id(0)
    experts = tl.arange(0, count.shape[0])
    end = tl.cumsum(count, 0)
    begin = end - count
    if program == 0:
        tl.store(offsets_ptr + experts, begin, experts < E)
        tl.store(offsets_ptr + experts + 1, end, experts == E - 1)

    own = (count + BLOCK - 1) // BLOCK
    last = tl.cumsum(own, 0)  # blocks up to and with this expert's
    b = program * STEP + tl.arange(0, STEP)
    nth = b[:, None] - (last - own)[None, :]  # which of this expert's
    hit = (nth >= 0) & (nth < own[None, :])
    expert = tl.sum(tl.where(hit, experts[None, :] + 1, 0), 1) - 1
    first = tl.sum(tl.where(hit, begin[None, :] + nth * BLOCK, 0), 1)
    tl.store(blocks_ptr + b * 2, expert, b < num_blocks)
    tl.store(blocks_ptr + b * 2 + 1, first, b < num_blocks)
    return begin


@triton.jit
def count_live(live_ptr, tokens):
    """How many tokens have experts; those after them are padding."""
    live = tokens
    if live_ptr is not None:
        live = tl.load(live_ptr)
    return live


@triton.jit
def count_live_pairs(live_ptr, n, TOP_K: tl.constexpr):
    """How many pairs have experts."""
    return count_live(live_ptr, n // TOP_K) * TOP_K


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["live_ptr"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    live_ptr,
    tokens,
    num_blocks,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all tokens: what `top_k_kernel` and `sort_small_kernel` do.

    position[i] = #{j: (id[j], j) < (id[i], i)}
    """
    live = count_live(live_ptr, tokens)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    logits = load_logits(
        logits_ptr, bias_ptr, rows, experts, tokens, E, PARTS, HAS_BIAS
    )
    ids, weights = top_k_of(logits, experts, choices, TOP_K)
    where = rows * TOP_K + choices
    inside = (rows < tokens) & (choices < TOP_K)
    tl.store(ids_ptr + where, ids, inside)
    tl.store(weights_ptr + where, weights, inside)

    SIZE: tl.constexpr = ROWS * BLOCK_K
    # After every expert come the pairs of padding, and then what is no pair.
    ids = tl.where(rows < live, ids, E)
    keys = tl.where(inside, ids, E + 1) * SIZE + where
    keys = tl.reshape(keys, [SIZE])
    position = tl.sum((keys[None, :] < keys[:, None]).to(tl.int32), 1)
    expert, pair = keys // SIZE, keys % SIZE
    tl.store(pairs_ptr + position, pair, expert <= E)
    count = tl.histogram(expert, BLOCK_E, expert < E)
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)


def route_and_dispatch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    block: int,
    live: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Dispatch]:
    """`route` and `dispatch` of its ids, in one kernel after the router's matmul if
    there are few tokens. With ``batch_invariant`` no token's weights depend on the
    others."""
    if batch_invariant:
        logits = linear_parts(x, weight, None, INVARIANT)
        ids, weights = top_k_softmax(logits, top_k, bias, rows=1)
        return ids, weights, dispatch(ids, len(weight), block, live)
    logits = router_logits(x, weight, bias)
    return top_k_and_dispatch(logits, top_k, block, bias, live)


def route_and_dispatch_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    block: int,
    live: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Dispatch]:
    ids, weights = route_torch(x, weight, bias, top_k)
    return ids, weights, dispatch_torch(ids, len(weight), block, live)


def top_k_and_dispatch(
    logits: Tensor,
    top_k: int,
    block: int,
    bias: Tensor | None = None,
    live: Tensor | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor, Dispatch]:
    """`route_and_dispatch` from the logits on, which are as for `top_k_softmax`."""
    tokens, parts, experts = check_logits(logits, top_k, bias)
    check_block(block)
    if not 0 < tokens * top_k <= FEW_PAIRS:
        ids, weights = top_k_softmax(logits, top_k, bias, pdl)
        return ids, weights, dispatch(ids, experts, block, live, pdl)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    result = Dispatch.empty(tokens * top_k, experts, block, logits.device)
    blocks = len(result.blocks)
    rows = triton.next_power_of_2(tokens)
    pdl = pdl and supports_pdl(logits.device)
    route_kernel[(1,)](
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        *result,
        live,
        tokens,
        blocks,
        E=experts,
        PARTS=parts,
        HAS_BIAS=bias is not None,
        TOP_K=top_k,
        ROWS=rows,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK=block,
        STEP=triton.next_power_of_2(blocks),
        PDL=pdl,
        num_warps=max(1, rows // 2),
        launch_pdl=pdl,
    )
    return ids, weights, result


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["live_ptr"])
def sort_small_kernel(
    ids_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    live_ptr,
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
    """One program for ROWS pairs, each of which it compares with all the others.

    position[i] = #{j: (id[j], j) < (id[i], i)}
    """
    live = count_live_pairs(live_ptr, n, TOP_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(ids_ptr + i, i < live, E) * n + i
    position = tl.zeros([ROWS], tl.int32)
    count = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, n, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(ids_ptr + j, j < live, E)  # the others come after every expert
        count += tl.histogram(other, BLOCK_E, j < live)
        lower = (other * n + j)[None, :] < mine[:, None]
        position += tl.sum(lower.to(tl.int32), 1)
    tl.store(pairs_ptr + position, i, i < n)
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["live_ptr"])
def count_kernel(
    ids_ptr,
    counts_ptr,
    live_ptr,
    n,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a chunk of pairs: counts[chunk, e] = #{i in chunk: id[i] = e}."""
    live = count_live_pairs(live_ptr, n, TOP_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    count = tl.histogram(tl.load(ids_ptr + i, i < live, 0), BLOCK_E, i < live)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), count)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["live_ptr"])
def place_kernel(
    ids_ptr,
    counts_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    live_ptr,
    n,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a chunk of pairs, which it puts where they belong.

    position[i] = offset[id[i]] + #{j in earlier chunks: id[j] = id[i]}
                  + #{j < i in this chunk: id[j] = id[i]}

    Pairs of padding stay in their places, after all others.
    """
    live = count_live_pairs(live_ptr, n, TOP_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    count = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, tl.num_programs(0), TILE):
        c = (first + tl.arange(0, TILE))[:, None]
        where = counts_ptr + c * BLOCK_E + experts[None, :]
        counts = tl.load(where, c < tl.num_programs(0), 0)
        count += tl.sum(counts, 0)
        before += tl.sum(tl.where(c < chunk, counts, 0), 0)
    begin = write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)

    i = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + i
    mine = tl.load(ids_ptr + pair, pair < live, 0)
    position = tl.gather(begin + before, mine, 0)
    for first in range(0, CHUNK, TILE):
        j = first + tl.arange(0, TILE)
        other = tl.load(ids_ptr + chunk * CHUNK + j, chunk * CHUNK + j < n, E)
        same = (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
        position += tl.sum(same.to(tl.int32), 1)
    tl.store(pairs_ptr + tl.where(pair < live, position, pair), pair, pair < n)


def dispatch(
    ids: Tensor,
    experts: int,
    block: int,
    live: Tensor | None = None,
    pdl: bool = True,
) -> Dispatch:
    """Sort the pairs of ``ids`` int32 [T, k] by expert, in blocks of ``block``.

    The sort is stable: an expert's pairs stay in order. ``block`` is a power of two.
    Only the first ``live``, int32 [1], tokens have experts, all if None. The others are
    padding: their pairs come last, and no block has them.

    The caller answers for ids in 0 to ``experts`` - 1 and ``live`` in 0 to T. Never
    waits for the GPU.
    """
    n = check_ids(ids)
    check_block(block)
    result = Dispatch.empty(n, experts, block, ids.device)
    if n == 0:
        result.offsets.zero_()
        return result
    pdl = pdl and supports_pdl(ids.device)
    blocks = len(result.blocks)
    rows = CHUNK if n > SMALL else 32
    programs = triton.cdiv(n, rows)
    widths = {"TOP_K": ids.shape[1], "BLOCK_E": triton.next_power_of_2(experts)}
    sizes = widths | {
        "E": experts,
        "BLOCK": block,
        "STEP": triton.next_power_of_2(triton.cdiv(blocks, programs)),
    }
    warps = 8 if n <= SMALL else 16
    how = {"PDL": pdl, "num_warps": warps, "launch_pdl": pdl}
    if n <= SMALL:
        chunk = min(512, max(32, triton.next_power_of_2(n)))
        sort_small_kernel[(programs,)](
            ids, *result, live, n, blocks, ROWS=rows, CHUNK=chunk, **sizes, **how
        )
        return result
    shape = programs, sizes["BLOCK_E"]
    counts = torch.empty(shape, dtype=torch.int32, device=ids.device)
    count_kernel[(programs,)](ids, counts, live, n, CHUNK=rows, **widths, **how)
    place_kernel[(programs,)](
        ids, counts, *result, live, n, blocks, CHUNK=rows, TILE=32, **sizes, **how
    )
    return result


def dispatch_torch(
    ids: Tensor, experts: int, block: int, live: Tensor | None = None
) -> Dispatch:
    ids = ids.long()
    if live is not None:
        padding = torch.arange(len(ids), device=ids.device) >= live
        ids = ids.masked_fill(padding[:, None], experts)  # after every expert
    flat = ids.flatten()
    pairs = flat.argsort(stable=True).int()
    counts = flat.bincount(minlength=experts + 1)[:experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    entries = [
        (expert, first)
        for expert in range(experts)
        for first in range(int(offsets[expert]), int(offsets[expert + 1]), block)
    ]
    entries += [(-1, 0)] * (max_blocks(len(flat), experts, block) - len(entries))
    blocks = torch.tensor(entries, dtype=torch.int32, device=ids.device).view(-1, 2)
    return Dispatch(pairs, offsets, blocks)


def check_ids(ids: Tensor) -> int:
    """How many pairs there are; raises ValueError unless they can be sorted."""
    if ids.ndim != 2 or ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(
            f"ids are {ids.dtype} {list(ids.shape)} with strides "
            f"{list(ids.stride())}; expected torch.int32 [T, k], contiguous"
        )
    return ids.numel()


def check_block(block: int) -> None:
    """Raise ValueError unless ``block`` is a power of two."""
    if block < 1 or block & (block - 1):
        raise ValueError(f"block is {block}; expected a power of two")
