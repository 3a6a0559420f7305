"""Chapter 11: kernels, each on a GPU or in Triton's interpreter.

Tensors lie between margins of NaN: a load outside spoils the result, or is seen by
`loads`, a store outside is found afterwards, and neither ends the process.
"""

import math
import mmap
from typing import Any

import torch
import triton
import triton.language as tl

from course.checks.compiled import assert_compiles
from course.checks.loads import (
    assert_inside,
    beyond,
    clashes,
    only_program,
)
from course.checks.races import race

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 1 << 16  # numbers on both sides, for strides that are far too large as well
LOG2E = math.log2(math.e)


class Guarded:
    """A tensor between margins."""

    def __init__(self, inner, margin=math.nan):
        inner = inner.to(DEVICE)
        size = inner.numel()
        self.margin = margin
        self.whole = inner.new_full((size + 2 * MARGIN,), margin)
        self.inner = self.whole[MARGIN : MARGIN + size].view(inner.shape)
        self.inner.copy_(inner)

    @property
    def guard(self):
        """What `beyond` watches."""
        return self.whole, self.inner

    def untouched(self):
        """Whether both margins are as they were."""
        ends = torch.cat([self.whole[:MARGIN], self.whole[-MARGIN:]])
        same = ends.isnan() if math.isnan(self.margin) else ends == self.margin
        return bool(same.all())


def empty(*shape, dtype=torch.float32):
    """What a kernel has to fill."""
    if dtype.is_floating_point:
        return Guarded(torch.full(shape, math.nan, dtype=dtype))
    return Guarded(torch.full(shape, -1, dtype=dtype), -1)


def far_apart(numbers, dtype):
    """So many numbers behind a margin, of which only those exist that are touched.

    None on a GPU without that much memory, which knows no such thing.
    """
    if DEVICE == "cuda":
        nbytes = (MARGIN + numbers) * dtype.itemsize
        if torch.cuda.mem_get_info()[0] < nbytes + 2**30:
            return None
        return torch.zeros(MARGIN + numbers, dtype=dtype, device=DEVICE)[MARGIN:]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, (MARGIN + numbers) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)[MARGIN:]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def is_close(found, expected, tolerance=2e-3):
    """TF32, as a GPU's tensor cores may round, is close enough."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return bool(((found - expected).abs() <= tolerance * (1 + expected.abs())).all())


def assert_kernel(kernel):
    """Triton runs what it has decorated, and nothing else."""
    assert hasattr(kernel, "__getitem__"), (
        "this is no kernel, which would be started by kernel[grid](...): decorate it "
        "with @triton.jit"
    )


def assert_jitted(function):
    """A kernel calls what Triton has decorated, and nothing else."""
    assert hasattr(function, "fn"), (
        "a kernel can't call plain Python: decorate it with @triton.jit"
    )


def assert_alone(told, name, found):
    """``found`` is what `clashes` has seen."""
    assert not found, (
        told + f"two programs store number {found[0]} of {name}. That's a race, even "
        "if both store the same: what lies beyond the tensor is nobody's, so mask the "
        "store"
    )


# Puzzles


def race_softmax(kernel):
    """4,096 rows of as many numbers, read and written."""
    x = torch.randn(4096, 4096, device=DEVICE)
    out = torch.empty_like(x)
    launch = kernel[(4096,)]
    rivals = {"PyTorch": lambda: torch.softmax(x, 1)}
    return race(
        lambda: launch(x, out, 4096, BLOCK=4096), out, rivals, nbytes=2 * x.nbytes
    )


# Products


def check_matvec_kernel(kernel):
    """Sizes that fill no tile; sums in float32."""
    assert_kernel(kernel)
    for rows, columns in ((10, 40), (4, 16), (5, 7), (6, 17)):
        weight = Guarded(normal(rows, columns, seed=rows))
        x, y = Guarded(normal(columns, seed=9)), empty(rows)
        grid = (triton.cdiv(rows, 4),)
        tensors, tiles = (x.inner, weight.inner, y.inner), {"ROWS": 4, "BLOCK": 16}
        guards = {"x": x.guard, "weight": weight.guard}
        with beyond(**guards) as outside, clashes(y.inner) as twice:
            kernel[grid](*tensors, rows, columns, **tiles)
        told = f"with N = {rows}, K = {columns}, ROWS = 4 and BLOCK = 16: "
        assert y.untouched(), told + "a store went beyond y; rows from N on need a mask"
        found, expected = y.inner, weight.inner.double() @ x.inner.double()
        assert not found.isnan().all(), (
            told + "y is NaN everywhere: was it written? What lies beyond a tensor is "
            "NaN here, so every load needs its mask, and 0 where it is false"
        )
        assert not found.isnan().any(), (
            told + "some of y is NaN, which is what lies beyond a tensor: every load "
            "needs its mask, and 0 where it is false; 0 times NaN is NaN"
        )
        last = columns - (columns - 1) % 16 - 1
        tail = weight.inner[:, last:].double() @ x.inner[last:].double()
        assert columns <= 16 or not is_close(found, tail), (
            told + "y has the last tile of columns only; add to what is there"
        )
        head = weight.inner[:, :16].double() @ x.inner[:16].double()
        assert columns <= 32 or not is_close(found, head), (
            told + "y has the first BLOCK columns only; loop over all K"
        )
        assert not is_close(found, expected - tail), (
            told + f"y lacks the last tile, columns {last} to {columns - 1}: the loop "
            "goes on while its first column is below K"
        )
        assert is_close(found, expected, 1e-4), told + "y is not weight @ x"
        assert_inside(told, outside)
        assert_alone(told, "y", twice)
    ones = torch.ones(4, 8192, dtype=torch.float16, device=DEVICE)
    y = empty(4)
    kernel[(1,)](ones[0], ones, y.inner, 4, 8192, ROWS=4, BLOCK=256)
    assert (y.inner == 8192).all(), (
        "8,192 ones in float16 add up to 8192 only if the sum is kept in float32; "
        f"yours is {y.inner[0].item():g}"
    )
    above = ones[:, :512] + 2**-10  # whose square is no number of float16's
    kernel[(1,)](above[0], above, y.inner, 4, 512, ROWS=4, BLOCK=256)
    exact = 513 + 2**-11
    assert (y.inner - exact).abs().max() < 2e-4, (
        f"512 products of float16 numbers add up to {exact:.4f}, yours to "
        f"{y.inner[0].item():.4f}: turn both factors to float32 before you multiply"
    )
    assert_compiles(kernel, "*bf16 *bf16 *fp32 i32 i32", ROWS=4, BLOCK=256)
    if DEVICE == "cuda":
        race_matvec(kernel)


def race_matvec(kernel):
    """The qkv projection of one token of gpt-oss-120b."""
    weight = torch.randn(5120, 2880, device=DEVICE).bfloat16()
    x, y = weight[0].clone(), torch.empty(5120, device=DEVICE)
    launch, tiles = kernel[(triton.cdiv(5120, 4),)], {"ROWS": 4, "BLOCK": 512}
    return race(
        lambda: launch(x, weight, y, 5120, 2880, **tiles),
        y,
        {"cuBLAS": lambda: weight @ x},
        nbytes=weight.nbytes,
    )


def check_product_kernel(kernel):
    """Sizes that fill no tile in any direction, and tiles that are not square."""
    assert_kernel(kernel)
    for m, n, k in ((20, 40, 24), (16, 32, 16), (3, 70, 50), (18, 34, 17)):
        a, b = Guarded(normal(m, k, seed=m)), Guarded(normal(n, k, seed=n))
        c = empty(m, n)
        grid = triton.cdiv(m, 16), triton.cdiv(n, 32)
        tiles = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 16}
        with beyond(a=a.guard, b=b.guard) as outside, clashes(c.inner) as twice:
            kernel[grid](a.inner, b.inner, c.inner, m, n, k, **tiles)
        told = f"with M = {m}, N = {n}, K = {k} in tiles of 16, 32 and 16: "
        assert c.untouched(), (
            told
            + "a store went beyond c; rows from M and columns from N on need a mask"
        )
        left, right = a.inner.double(), b.inner.double()
        found, expected = c.inner, left @ right.T
        assert not found.isnan().all(), (
            told + "c is NaN everywhere: was it written? What lies beyond a tensor is "
            "NaN here, so every load needs its mask, and 0 where it is false"
        )
        last = k - (k - 1) % 16 - 1
        tail = left[:, last:] @ right[:, last:].T
        assert k <= 16 or not is_close(found, tail), (
            told + "c has the last step of K only; add up all steps"
        )
        assert not found.isnan().any(), (
            told + "some of c is NaN: it was not written, or a load without its mask "
            "took what lies beyond a tensor"
        )
        assert not is_close(found, expected - tail), (
            told + "c lacks the last step of K: the loop goes on while its first "
            "column is below K"
        )
        assert is_close(found, expected, 2e-2), (
            told + "c is not a @ b.T. Is K masked in at least one operand, and does "
            "program (i, j) make tile (i, j)?"
        )
        assert_inside(told, outside)
        assert_alone(told, "c", twice)
    judge_16_bits(kernel)
    judge_far_rows(kernel)
    if DEVICE == "cpu":
        judge_far_loads(kernel)
    tiles = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 16}
    assert_compiles(kernel, "*bf16 *bf16 *fp32 i32 i32 i32", **tiles)
    if DEVICE == "cuda":
        race_product(kernel)


def race_product(kernel, size=4096):
    """Two square matrices in bfloat16."""
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    c = torch.empty(size, size, device=DEVICE)
    tiles = {"TILE_M": 128, "TILE_N": 128, "TILE_K": 64}
    launch = kernel[triton.cdiv(size, 128), triton.cdiv(size, 128)]
    return race(
        lambda: launch(a, b, c, size, size, size, **tiles),
        c,
        {"cuBLAS": lambda: a @ b.T},
        nbytes=a.nbytes + b.nbytes + c.nbytes,
        flops=2 * size**3,
    )


def judge_16_bits(kernel):
    """float16 in, float32 out: a sum that float16 would round."""
    k = 528  # times 1 + 2^-10, that is no number of float16's
    a = Guarded(torch.ones(16, k, dtype=torch.float16))
    b = Guarded(torch.full((32, k), 1 + 2**-10, dtype=torch.float16))
    c = empty(16, 32)
    tiles = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 16}
    kernel[(1, 1)](a.inner, b.inner, c.inner, 16, 32, k, **tiles)
    assert (c.inner == k * (1 + 2**-10)).all(), (
        f"operands of float16: {k} times 1 x {1 + 2**-10:.6f} are {k * (1 + 2**-10):g} "
        f"only if the sum stays float32; yours is {c.inner[0, 0].item():g}"
    )


def judge_far_rows(kernel):
    """A third row that begins beyond 2^32 numbers; only the first tile is computed."""
    m, n, k = 3, 2**31 - 8, 16
    c = far_apart(2 * n + 64, torch.float32)
    if c is None:
        return
    a, b = normal(m, k, seed=1), normal(32, k, seed=2)  # no other rows of b are read
    tiles = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 16}
    kernel[(1, 1)](a.to(DEVICE), b.to(DEVICE), c, m, n, k, **tiles)
    found = torch.stack([c[row * n : row * n + 32] for row in range(m)])
    assert is_close(found, a @ b.T, 2e-2), (  # also where row 2 lands in row 0
        f"with N = {n:,}, row 2 of c begins at {2 * n:,}, which 32 bits can't count: "
        "make m int64 before you multiply it by N, not the product"
    )


def judge_far_loads(kernel):
    """One tile, whose rows of a, or of b, begin beyond 2^32 numbers."""
    tiles = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 16}
    far, k = 2**28, 16
    for name, m, n in (("a", far + 16, 4), ("b", 3, far + 32)):
        a, b = (far_apart(rows * k, torch.float32).view(rows, k) for rows in (m, n))
        a[-16:], b[-32:] = normal(16, k, seed=1)[-m:], normal(32, k, seed=2)[-n:]
        c = far_apart(m * n, torch.float32).view(m, n)
        with only_program((m - 1) // 16, (n - 1) // 32):
            kernel[(1, 1)](a, b, c, m, n, k, **tiles)
        assert is_close(c[-16:, -32:], a[-16:] @ b[-32:].T, 2e-2), (
            f"with M = {m:,}, N = {n:,} and K = {k}, the last rows of {name} begin at "
            f"{far * k:,} and behind, which 32 bits can't count: make m and n int64 "
            "before you multiply them by K"
        )


# Attention


@triton.jit
def update_kernel(
    logits_ptr,  # [TILES, 16, 16]
    values_ptr,  # [TILES, 16, 16]
    state_ptr,  # [2, 16], top and total; both ways
    acc_ptr,  # [16, 16]
    scale,
    TILES: tl.constexpr,
    UPDATE: tl.constexpr,
):
    n = tl.arange(0, 16)
    cell = n[:, None] * 16 + n[None, :]
    top, total = tl.load(state_ptr + n), tl.load(state_ptr + 16 + n)
    acc = tl.load(acc_ptr + cell)
    for tile in range(TILES):
        logits = tl.load(logits_ptr + tile * 256 + cell)
        v = tl.load(values_ptr + tile * 256 + cell)
        top, total, acc = UPDATE(logits, v, top, total, acc, scale)
    tl.store(state_ptr + n, top)
    tl.store(state_ptr + 16 + n, total)
    tl.store(acc_ptr + cell, acc)


def updated(update, logits, values, scale):
    """float64 top, total and acc after all tiles, beginning with nothing."""
    state = torch.stack([torch.full((16,), -1e30), torch.zeros(16)]).to(DEVICE)
    acc = torch.zeros(16, 16, device=DEVICE)
    tensors = (logits.to(DEVICE), values.to(DEVICE), state, acc, scale)
    update_kernel[(1,)](*tensors, TILES=len(logits), UPDATE=update)
    return state[0].double().cpu(), state[1].double().cpu(), acc.double().cpu()


def check_softmax_update(update):
    """Tiles against a softmax of all, small and large, and tiles that nobody sees."""
    assert_jitted(update)
    scale = 0.5
    values = normal(3, 16, 16, seed=7)
    for size in (400.0, 1.0):
        logits = size * normal(3, 16, 16, seed=8)
        top, total, acc = updated(update, logits, values, scale)
        whole = logits.double().transpose(0, 1).flatten(1) * scale  # [16, 48]
        told = f"three tiles of 16 keys, logits of about {size:g}: "
        assert is_close(top, whole.amax(1)), (
            told + "top is the largest of all logits so far, times scale"
        )
        assert total.isfinite().all() and acc.isfinite().all(), (
            told + "NaN or infinity came out; subtract the largest logit before exp2"
        )
        weights = torch.exp2(whole - top[:, None])
        last = weights[:, 32:].sum(1)
        assert not is_close(total, last), (
            told + "total has the last tile only; what was there shrinks and stays"
        )
        natural = torch.exp(whole - top[:, None]).sum(1)
        assert not is_close(total, natural), (
            told + "the sum is of exp; logits are in units of log2, so take exp2"
        )
        assert is_close(total, weights.sum(1)), (
            told + "total is not the sum of exp2(logit - top). When top grows, the old "
            "total shrinks by exp2(old top - new top)"
        )
        assert is_close(acc, weights @ values.double().flatten(0, 1), 2e-2), (
            told
            + "total is right and acc is not: it shrinks by the same factor, row by "
            "row, before the new values are added"
        )
    hidden = normal(2, 16, 16, seed=9)
    hidden[0] = -math.inf  # a tile that no query sees
    _, total, acc = updated(update, hidden, values[:2], scale)
    assert not (total.isnan().any() or acc.isnan().any()), (
        "a tile of which no query sees a key has to change nothing; yours gives NaN"
    )
    judge_half_values(update)


def judge_half_values(update):
    """Values of float16, whose sum in float16 would be rounded."""
    tiles, value = 33, 1 + 3 * 2**-10
    values = torch.full((tiles, 16, 16), value, dtype=torch.float16)
    told = "values of float16: "
    try:
        _, _, acc = updated(update, torch.zeros(tiles, 16, 16), values, 1.0)
    except Exception as error:
        raise AssertionError(
            told + f"tl.dot wants weights of the same dtype, v.dtype ({error})"
        ) from error
    assert (acc == tiles * 16 * value).all(), (
        told + f"{tiles * 16} of {value:.6f}, all weighing 1, add up to "
        f"{tiles * 16 * value:g} if acc stays float32; yours is {acc[0, 0].item():g}"
    )


def check_split_kernel(kernel):
    """One split and more, shuffled pages, NaN wherever no key is, sinks."""
    assert_kernel(kernel)
    whole = [3, 0, 6, 2, 5, 1]  # pages in order; page 4 is nobody's, page 0 is full
    ends_in_0 = [3, 1, 6, 2, 5, 0]  # whose last rows are NaN
    for order, share in (
        (whole, 48),
        (whole, 24),
        (whole, 16),
        (whole, 17),
        (ends_in_0, 48),
        (ends_in_0, 17),
    ):
        judge_splits(kernel, order, share)
    sizes = {"K": 2, "G": 4, "D": 16, "PAGE": 8, "BLOCK": 16}
    types = "*fp32 *fp32 *fp32 *i32 *fp32 *fp32 *fp32 i32 i32 fp32 i32"
    assert_compiles(kernel, types, **sizes)
    if DEVICE == "cuda":
        race_split(kernel)


def judge_splits(kernel, order, share):
    """All splits of 45 keys in the pages of ``order``."""
    heads, group, dim, page, length = 2, 4, 16, 8, 45
    q, sinks = normal(heads * group, dim, seed=10), normal(heads * group, seed=11)
    k, v = normal(length, heads, dim, seed=12), normal(length, heads, dim, seed=13)
    keys, values = torch.full((2, 7, page, heads, dim), math.nan)
    for place in range(length):
        keys[order[place // page], place % page] = k[place]
        values[order[place // page], place % page] = v[place]
    given = {
        "q": Guarded(q),
        "keys": Guarded(keys),
        "values": Guarded(values),
        "the table": Guarded(torch.tensor(order, dtype=torch.int32), -1),
        "sinks": Guarded(sinks),
    }
    scale = LOG2E / dim**0.5
    logits = torch.einsum(
        "hgd,shd->hgs", q.double().view(heads, group, dim), k.double()
    ).mul(scale)
    splits = -(-length // share)
    parts, sums = empty(heads, splits, group, dim), empty(heads, splits, group)
    with beyond(**{name: one.guard for name, one in given.items()}) as outside:
        kernel[(heads, splits)](
            *(one.inner for one in given.values()),
            *(parts.inner, sums.inner, length, share, scale, keys.stride(0)),
            **{"K": heads, "G": group, "D": dim, "PAGE": page, "BLOCK": 16},
        )
    told = f"{length} keys in {splits} splits of {share}, "
    assert parts.untouched() and sums.untouched(), (
        told + "a store went beyond parts or sums"
    )
    for split in range(splits):
        here = slice(split * share, min((split + 1) * share, length))
        judge_split(
            told + f"split {split}: ",
            sums.inner[:, split].double().cpu(),
            parts.inner[:, split].double().cpu(),
            logits[:, :, here],
            sinks.double().view(heads, group) * LOG2E,
            v.double()[here],
            split,
            next_keys(logits, split, share),
            in_page_0(logits, split, share, order, page),
        )
    assert outside != ["the table"], (
        told + "find_rows reads beyond the table, where a GPU finds any number, and at "
        "that page anything: its `stop` is where the split ends, or the sequence, if "
        "that's earlier"
    )
    assert_inside(told, outside)


def race_split(kernel, length=32768):
    """Attention of gpt-oss-120b for one token after so many, in splits of 512 keys."""
    heads, group, dim, page, share = 8, 8, 64, 64, 512
    splits, pages = length // share, length // page
    draw = torch.Generator(DEVICE).manual_seed(0)
    options: Any = {"device": DEVICE, "generator": draw}
    q = torch.randn(heads * group, dim, **options).bfloat16()
    keys, values = torch.randn(2, pages, page, heads, dim, **options).bfloat16()
    table = torch.randperm(pages, **options).int()
    sinks = torch.randn(heads * group, **options).bfloat16()
    parts = torch.empty(heads, splits, group, dim, device=DEVICE)
    sums = torch.empty(heads, splits, group, device=DEVICE)
    sizes = {"K": heads, "G": group, "D": dim, "PAGE": page, "BLOCK": 64}
    launch, scale = kernel[heads, splits], LOG2E / dim**0.5
    tensors = (q, keys, values, table, sinks, parts, sums)
    # PyTorch's has the keys in one piece, and no sinks.
    k, v = (x.flatten(0, 1).transpose(0, 1)[None].contiguous() for x in (keys, values))
    attend = torch.nn.functional.scaled_dot_product_attention
    query = q[None, :, None]
    return race(
        lambda: launch(*tensors, length, share, scale, keys.stride(0), **sizes),
        parts,
        {"PyTorch": lambda: attend(query, k, v, enable_gqa=True)},
        nbytes=keys.nbytes + values.nbytes,
    )


def next_keys(logits, split, share):
    """Logits of the next split's keys that the last tile of 16 reaches."""
    end = (split + 1) * share
    return logits[:, :, end : split * share + -(-share // 16) * 16]


def in_page_0(logits, split, share, order, page):
    """Logits of the keys that are found where find_rows sends those of no split.

    Once up to the sequence's end, once up to the split's, and once of a whole tile.
    """
    start, length = split * share, logits.shape[-1]
    stop = min(start + share, length)
    whole = start + -(-(stop - start) // 16) * 16
    found = []
    for end in (length, start + share, whole):
        places = range(stop, min(end, whole))
        keys = [order.index(0) * page + place % page for place in places]
        if keys and max(keys) < length:  # others are NaN
            found.append(logits[:, :, keys])
    return found


def judge_split(told, found_sums, found_parts, logits, sinks, v, split, behind, sent):
    """Compare what one split left; logits [K, G, s], v [s, K, D]."""
    weights = torch.exp2(logits)
    plain = weights.sum(-1)
    with_sink = plain + torch.exp2(sinks)
    total = plain if split else with_sink
    assert not (found_sums.isnan().any() or found_parts.isnan().any()), (
        told + "NaN came out, or nothing was written. What lies in a page after the "
        "sequence's end is NaN, also in page 0: is such a key there? Then load_pair "
        "loads it, and even with a weight of 0 its value makes NaN"
    )
    if split:
        assert not is_close(found_sums, with_sink.log2(), 1e-4), (
            told + "the sink is counted again; it is one key of the whole sequence"
        )
    else:
        assert not is_close(found_sums, plain.log2(), 1e-4), (
            told + "the sink is not counted; it begins the first split"
        )
    twice = (total + torch.exp2(behind).sum(-1)).log2()
    assert not behind.numel() or not is_close(found_sums, twice, 1e-4), (
        told + "keys of the next split are counted as well, and so twice in the end: a "
        "split ends after its share, also where that is within a tile"
    )
    for others in sent:
        more = (total + torch.exp2(others).sum(-1)).log2()
        assert not is_close(found_sums, more, 1e-4), (
            told + "keys from its end on are counted, those of page 0, to which "
            "find_rows sends them: a key is there if it's before the split's end and "
            "the sequence's"
        )
    padding = -(-logits.shape[-1] // 16) * 16 - logits.shape[-1]
    assert not padding or not is_close(found_sums, (total + padding).log2(), 1e-4), (
        told + "keys that are not there have logits of 0 and so weigh 1 each; they "
        "have to get -inf"
    )
    first = (logits.shape[-1] - 1) // 16 * 16  # of the last tile
    less = (total - weights[..., first:].sum(-1)).log2()
    assert not first or not is_close(found_sums, less, 1e-4), (
        told + f"the last tile is missing, key {first} of the split and what follows: "
        "the loop goes on while a tile's first key is before the split's end"
    )
    assert not is_close(found_sums, total.log(), 1e-4), (
        told + "the logarithm of the sum has base 2 here, as exp2 has"
    )
    assert not is_close(found_sums, (total / weights.amax(-1)).log2(), 1e-3), (
        told + "the sum is that of exp2(logit - top): add top to its logarithm"
    )
    assert is_close(found_sums, total.log2(), 1e-2), (
        told + "sums is not log2 of the sum of exp2(logit) over the split's keys, and "
        "in the first split the sink"
    )
    expected = torch.einsum("hgs,shd->hgd", weights, v)
    assert is_close(found_parts, expected / total[..., None], 1e-2), (
        told + "the sum is right and the part is not: it is the weighted mean of "
        "values, divided by its own sum"
    )


# Exercises


def check_11_1(kernel):
    """Rows with NaN between them, and sizes that fill no tile."""
    assert_kernel(kernel)
    for m, n, stride in ((8, 4, 4), (5, 7, 7), (6, 9, 13), (3, 2, 6)):
        whole = torch.full((m, stride), math.nan)
        whole[:, :n] = normal(m, n, seed=m)
        given, out = Guarded(whole), Guarded(torch.full((n, m), math.nan), 777.0)
        grid = triton.cdiv(m, 4), triton.cdiv(n, 4)
        with beyond(x=given.guard) as outside, clashes(out.inner) as twice:
            kernel[grid](given.inner, out.inner, m, n, stride, TILE=4)
        found, right = out.inner.cpu(), whole[:, :n]
        told = f"with M = {m}, N = {n}, stride = {stride} in tiles of 4 x 4: "
        assert out.untouched(), (
            told + "a store went beyond out; it needs the mask of rows and columns"
        )
        assert not torch.equal(found.flatten(), right.flatten()), (
            told + "out is x as it was: x[m, n] goes to out[n, m], which lies at "
            "n * M + m"
        )
        assert not (stride > n and found.isnan().any()), (
            told + "there is NaN in out, which is what lies between the rows of x: row "
            "m begins at m * stride, and columns end at N. Or some of out was not "
            "written: program (i, j) takes rows from i * TILE, columns from j * TILE"
        )
        assert not found.isnan().any(), (
            told + "some of out is NaN: it was not written, or holds what lies beyond "
            "x. Program (i, j) takes rows from i * TILE, columns from j * TILE of x, "
            "and x[m, n] goes to out[n, m]: it lies at n * M + m"
        )
        assert torch.equal(found, right.T), (
            told + "out[n, m] is not x[m, n]. Rows of x are stride apart, of out M"
        )
        assert_inside(told, outside)
        assert_alone(told, "out", twice)
    assert_compiles(kernel, "*fp32 *fp32 i32 i32 i32", TILE=4)


def key_parts(key):
    """The number and the index of a key, by `keys.ordered`'s description."""
    bits, index = key >> 32, 0x7FFFFFFF - (key & 0x7FFFFFFF)
    bits = bits ^ 0x7FFFFFFF if bits < 0 else bits
    value = torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
    return value, index


def check_11_2(kernel):
    """Blocks that end outside the row, negative logits, ties, several rows."""
    assert_kernel(kernel)
    size, block = 50, 16
    logits = normal(3, size, seed=6)
    logits[0] -= 100
    logits[1] = 0
    logits[1, [7, 9, 40]] = 3
    logits[2, 49] = 50
    guarded, blocks = Guarded(logits), -(-size // block)
    keys = empty(3, blocks, dtype=torch.int64)
    with beyond(logits=guarded.guard) as outside:
        kernel[(blocks, 3)](guarded.inner, keys.inner, size, BLOCK=block)
    assert keys.untouched(), (
        "a store went beyond keys: a row has as many keys as the grid has blocks"
    )
    for row in range(3):
        for number in range(blocks):
            part = logits[row, number * block : (number + 1) * block]
            value, index = key_parts(keys.inner[row, number].item())
            told = f"row {row}, block {number} of {size} logits in blocks of {block}: "
            assert keys.inner[row, number] != -1, told + "no key was written"
            assert index < size and not math.isnan(value), (
                told + "the winner lies beyond the row, where only NaN is: NaN wins "
                "unless places from vocabulary on get LOWEST"
            )
            first = int(part.argmax())
            assert not (index == first and number), (
                told + f"the key says index {index}, which counts from the block; the "
                "index in the row is wanted"
            )
            assert value == part.max(), (
                told + f"the largest logit is {part.max():g}, your key has {value:g}. "
                "What is masked must lose against negative logits too, and each row "
                "begins at row * vocabulary"
            )
            assert index == number * block + first, (
                told + f"of equal logits the lower index wins, "
                f"{number * block + first}; yours is {index}"
            )
    assert_inside(f"{size} logits in blocks of {block}: ", outside)
    judge_half_logits(kernel)
    assert_compiles(kernel, "*bf16 *i64 i32", BLOCK=1024)


def judge_half_logits(kernel):
    """float16 logits, whose third row begins beyond 2^32 of them."""
    size, block = 2**31 - 8, 16
    logits = far_apart(2 * size + 64, torch.float16)
    if logits is None:
        return
    keys = empty(3, 1, dtype=torch.int64)
    for row in range(3):
        here = normal(block, seed=row).half()
        here[5 + row] = 7 + row / 2
        logits[row * size : row * size + block] = here
    try:  # the first block of each row, and no other
        kernel[(1, 3)](logits, keys.inner, size, BLOCK=block)
    except Exception as error:
        raise AssertionError(
            "logits of float16: turn them to float32 before `ordered` reads their bits "
            f"({error})"
        ) from error
    for row in range(3):
        found = key_parts(keys.inner[row, 0].item())
        assert found == (7 + row / 2, 5 + row), (
            f"float16 logits, row {row}, block 0: the largest is {7 + row / 2:g} at "
            f"index {5 + row}, yours says {found[0]:g} at {found[1]}. The row begins "
            f"at {row * size:,}, which 32 bits can't count: make row int64 first"
        )


def check_11_3(candidate):
    """Against a softmax with the sink as a key; sums too large for an exponential."""
    scores = normal(7, 8, 30, seed=16)
    values = normal(30, 8, 32, seed=17)
    for shift in (0.0, 300.0, -300.0):
        for sink in (0.0, -200.0, 200.0):
            moved = scores + shift
            sinks = normal(8, seed=18) + sink
            lse = moved.logsumexp(-1)
            out = torch.einsum("qhs,shd->qhd", moved.softmax(-1), values)
            key = sinks.view(1, 8, 1).expand(7, 8, 1)
            weights = torch.cat([moved, key], -1).double().softmax(-1)[..., :-1]
            expected = torch.einsum("qhs,shd->qhd", weights, values.double())
            found = candidate(out, lse, sinks)
            told = f"scores of about {shift:g} and sinks of about {sink:g}: "
            assert tuple(found.shape) == (7, 8, 32), (
                told + f"the shape is {list(found.shape)}; expected [7, 8, 32]"
            )
            assert found.isfinite().all(), (
                told + "the result is not finite. exp of 100 is infinite in float32; "
                "torch.sigmoid of a difference is not"
            )
            assert is_close(found, expected, 1e-4), (
                told
                + "not the softmax with the sink as one more key. Where it's right "
                "for small numbers only, an exponential has become 0 or infinite"
            )
