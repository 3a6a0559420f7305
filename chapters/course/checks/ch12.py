"""Chapter 12: the experts' kernels, their tilings, the roofline."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import triton

from course.checks.compiled import assert_compiles
from course.checks.loads import assert_inside, beyond
from course.checks.races import race
from simplellm.apps.roofline import Machine
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B, GPT_OSS_120B
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.model.memory import count_parameters, weight_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 1024  # elements on either side of a guarded tensor


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Guarded:
    """A tensor between margins, so that a missing mask is seen and harms nothing."""

    def __init__(self, shape, margin, dtype=torch.int32, fill=None):
        size = math.prod(shape)
        self.margin = margin
        whole = torch.full((size + 2 * MARGIN,), margin, dtype=dtype)
        self.whole = whole.to(DEVICE)
        self.inside = self.whole[MARGIN : MARGIN + size].view(shape)
        if isinstance(fill, torch.Tensor):
            self.inside.copy_(fill)
        elif fill is not None:
            self.inside.fill_(fill)

    @property
    def guard(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `beyond` watches."""
        return self.whole, self.inside

    @property
    def intact(self) -> bool:
        """Whether nothing was written outside."""
        size = self.inside.numel()
        edges = torch.cat([self.whole[:MARGIN], self.whole[MARGIN + size :]])
        return bool((edges == self.margin).all())


def random_ids(tokens, experts, top_k, seed=0):
    """int32 [T, k], expert 1 chosen by nobody, expert 0 by most."""
    odds = torch.rand(tokens, experts, generator=seeded(seed))
    odds[:, 0] += 0.4
    odds[:, 1] -= 2
    return odds.topk(top_k).indices.int()


def check_sort_small_kernel(candidate):
    """Several programs and chunks, padding, and ties in their order."""
    experts, block, bins = 6, 4, 8
    for tokens, padding, top_k, rows, chunk in (
        (6, 0, 2, 16, 16),
        (20, 0, 2, 16, 32),
        (17, 0, 1, 16, 16),  # a last chunk of one pair
        (20, 0, 2, 32, 16),
        (20, 6, 2, 32, 16),
    ):
        ids = random_ids(tokens, experts, top_k, tokens)
        if tokens == 17:
            ids[0], ids[-1] = 3, 2  # the same id * 16 + i
        n, real = ids.numel(), tokens - padding
        programs = -(-n // rows)
        room = (n + experts * (block - 1)) // block
        step = triton.next_power_of_2(-(-room // programs))
        given = Guarded((n,), 0, fill=ids.flatten())
        pairs = Guarded((n,), -7, fill=-7)
        offsets = Guarded((experts + 1,), -7, fill=-7)
        blocks = Guarded((room, 2), -7, fill=-7)
        number = torch.tensor([real], dtype=torch.int32, device=DEVICE)
        with beyond(ids=given.guard) as outside:
            candidate[(programs,)](
                *(given.inside, pairs.inside, offsets.inside, blocks.inside),
                *(number if padding else None, n, room, experts, top_k, rows, chunk),
                *(bins, block, step, False),
            )
        where = f"{n} pairs, {rows} a program, chunks of {chunk}"
        if padding:  # without it, such sizes were right
            where += f", the last {padding * top_k} of them padding"
            assert pairs.intact, (
                f"{where}: you store outside of pairs; padding's id is E, also where "
                "the others are compared with it"
            )
        for name, part in (("pairs", pairs), ("offsets", offsets), ("blocks", blocks)):
            assert part.intact, (
                f"{where}: you store outside of {name}; lanes from n on have no pair, "
                "so mask the store, and don't let them count"
            )
        found = pairs.inside.cpu().tolist()
        flat = ids.flatten().tolist()
        key = [flat[i] if i < real * top_k else experts for i in range(n)]
        order = sorted(range(n), key=lambda i: (key[i], i))
        free = {position for position, pair in enumerate(found) if pair == -7}
        placed = found[: real * top_k] == order[: real * top_k]
        assert not free or not padding or not placed, (
            f"{where}: positions from {real * top_k} on were never stored: padding has "
            "places, too, after every expert's"
        )
        assert not free or not padding, (
            f"{where}: {len(free)} positions were never stored. Padding's id is E, "
            "where it's placed and where others are compared with it; its ids in "
            "memory, or 0, count as an expert's"
        )
        last = (n - 1) // chunk * chunk
        short = {sum((key[j], j) < (key[i], i) for j in range(last)) for i in range(n)}
        assert free != {*range(n)} - short, (
            f"{where}: nothing was compared with the pairs from {last} on, the last "
            "chunk: the loop goes over all n"
        )
        assert not free, (
            f"{where}: {len(free)} positions were never stored, so some pairs went to "
            "the same one: compare (id, i), since ids alone have ties; in id * n + i, "
            "a factor below n has some, too"
        )
        assert sorted(found) == list(range(n)), f"{where}: some pair is missing"
        if padding:
            assert set(found[real * top_k :]) == set(order[real * top_k :]), (
                f"{where}: padding's pairs come after every expert's"
            )
        by_expert = [key[i] for i in found] == sorted(key)
        assert by_expert, f"{where}: the pairs are not in the order of their experts"
        assert found == order, (
            f"{where}: the sort isn't stable: of one expert, earlier pairs come first"
        )
        counts = [key.count(expert) for expert in range(experts)]
        ends = [sum(counts[:expert]) for expert in range(experts + 1)]
        assert offsets.inside.tolist() == ends, (
            f"{where}: the offsets are {offsets.inside.tolist()}; expected {ends}, so "
            "count each pair of a token once, over all chunks"
        )
        firsts = [
            [expert, first]
            for expert, (start, end) in enumerate(pairwise(ends))
            for first in range(start, end, block)
        ]
        firsts += [[-1, 0]] * (room - len(firsts))
        assert blocks.inside.tolist() == firsts, (
            f"{where}: the blocks are not those of the counts; does every program call "
            "write_blocks with all counts?"
        )
        assert_inside(f"{where}: ", outside)


def packed_weight(experts, rows, columns, seed=0):
    """All codes, and scales of 2^-9 to 2^-2."""
    shape = (experts, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=seeded(seed))
    scales = torch.randint(118, 126, shape, generator=seeded(seed + 1))
    return MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))


def blocks_of(ids, experts, block, room):
    """Pairs, offsets and blocks, int32, by torch."""
    flat = ids.flatten().long()
    counts = flat.bincount(minlength=experts)
    offsets = [0, *counts.cumsum(0).tolist()]
    found = [
        [expert, first]
        for expert, (start, end) in enumerate(pairwise(offsets))
        for first in range(start, end, block)
    ]
    found += [[-1, 0]] * (room - len(found))
    tensors = flat.argsort(stable=True), torch.tensor(offsets), torch.tensor(found)
    return [tensor.int() for tensor in tensors]


def race_grouped(candidate):
    """Gate and up of a layer of gpt-oss-120b, for 64 tokens."""
    experts, top_k, rows, columns, block = 128, 4, 5760, 2880, 16
    shape = (experts, rows, columns // 32)
    draw = torch.Generator(DEVICE).manual_seed(0)
    options: Any = {"device": DEVICE, "generator": draw, "dtype": torch.uint8}
    blocks = torch.randint(0, 256, (*shape, 16), **options)
    weight = MXFP4(blocks, torch.randint(118, 126, shape, **options))
    ids = torch.rand(64, experts, generator=seeded(0)).topk(top_k).indices
    used = len(ids.unique())
    plan = blocks_of(ids, experts, block, ids.numel())
    pairs, offsets, order = (x.to(DEVICE) for x in plan)
    x = torch.randn(64, columns, device=DEVICE)
    out = torch.empty(ids.numel(), rows, device=DEVICE)
    tensors = (x, weight.blocks, weight.scales, out, pairs, offsets, order)
    launch = candidate[triton.cdiv(rows, 64), len(order)]
    tokens = pairs.long() // top_k
    ends = offsets.tolist()

    def loop():
        for expert, (start, end) in enumerate(pairwise(ends)):
            if end > start:
                matrix = weight[expert].dequantize(torch.bfloat16)
                x[tokens[start:end]].bfloat16() @ matrix.T

    return race(
        lambda: launch(*tensors, rows, columns, top_k, 64, block),
        out,
        {"the loop of chapter 4": loop},
        nbytes=used * rows * columns * 4.25 / 8,
    )


def check_grouped_kernel(candidate):
    """Two tiles of rows, the last not full, an empty block, NaN around everything."""
    experts, top_k, rows, columns, block = 4, 2, 24, 64, 16
    weight = packed_weight(experts, rows, columns)
    ids = random_ids(11, experts, top_k)
    x = torch.randn(11, columns, generator=seeded(3))
    pairs, offsets, blocks = blocks_of(ids, experts, block, 5)
    n = ids.numel()
    byte = {"dtype": torch.uint8}
    given = Guarded(x.shape, math.nan, torch.float32, x)
    codes = Guarded((experts * rows * columns // 2,), 0x77, **byte)
    codes.inside.copy_(weight.blocks.flatten())
    scales = Guarded((experts * rows * columns // 32,), 255, **byte)
    scales.inside.copy_(weight.scales.flatten())
    out = Guarded((n, rows), -777.0, torch.float32, -777.0)
    order = Guarded((n,), 11 * top_k, fill=pairs)  # the token after the last: NaN
    ends = Guarded((experts + 1,), 0, fill=offsets)  # of expert -1: 0
    guards = {"x": given.guard, "the codes": codes.guard, "the scales": scales.guard}
    with beyond(**guards) as outside:
        candidate[(2, len(blocks))](
            *(given.inside, codes.inside, scales.inside, out.inside, order.inside),
            *(ends.inside, blocks.to(DEVICE), rows, columns, top_k, 16, block),
        )
    assert out.intact, (
        "you store outside of out: rows end at N, and positions where valid ends"
    )
    found = out.inside.cpu()
    numbers = weight.dequantize(torch.float32)
    tokens = pairs.long() // top_k
    chosen = ids.flatten().long()[pairs.long()]
    expected = torch.einsum("pnk,pk->pn", numbers[chosen], x[tokens])
    assert (found != -777).all(), (
        f"{int((found == -777).sum())} of {found.numel()} numbers were never stored: "
        "every block's valid positions, and every row below N"
    )
    near = numbers[chosen[: len(x)]]
    taken = torch.einsum("pnk,pk->pn", near, x)  # where a position is one of x, too
    assert not torch.allclose(found[: len(x)], taken, rtol=1e-4, atol=1e-4), (
        "x is read at the pairs' positions: a position's row of x is its token, "
        "pairs[position] // TOP_K"
    )
    assert not found.isnan().any(), (
        "NaN came in from outside of x or the scales: mask what you load"
    )

    def close(other):
        return torch.allclose(found, other, rtol=1e-4, atol=1e-4)

    if close(expected):
        assert_inside("", outside)
        types = "*fp32 *u8 *u8 *fp32 *i32 *i32 *i32 i32"
        sizes = {"K": columns, "TOP_K": top_k, "BLOCK_N": 16, "BLOCK_T": block}
        assert_compiles(candidate, types, **sizes)
        if DEVICE == "cuda":
            race_grouped(candidate)
        return
    halves = numbers.unflatten(-1, (-1, 16, 2))
    swapped = halves.flip(-1).flatten(-3)
    other = torch.einsum("pnk,pk->pn", swapped[chosen], x[tokens])
    assert not close(other), (
        "the halves of a byte are swapped: the low one is the even column"
    )
    planes = torch.cat([halves[..., 0], halves[..., 1]], -1).flatten(-2)
    other = torch.einsum("pnk,pk->pn", planes[chosen], x[tokens])
    assert not close(other), (
        "the low halves are not the first 16 columns of a block but the even ones: "
        "start + 2 * byte"
    )
    unscaled = replace(weight, scales=torch.full_like(weight.scales, 127))
    numbers = unscaled.dequantize(torch.float32)
    other = torch.einsum("pnk,pk->pn", numbers[chosen], x[tokens])
    assert not close(other), "without its scale: multiply each block's sum by it"
    one = replace(weight, scales=weight.scales[..., :1].expand_as(weight.scales))
    numbers = one.dequantize(torch.float32)
    other = torch.einsum("pnk,pk->pn", numbers[chosen], x[tokens])
    assert not close(other), "each block of 32 columns has a scale of its own"
    worst = (found - expected).abs().max()
    raise AssertionError(
        f"some numbers are off by up to {worst:.3g}. A token's columns begin at "
        "token * K, a row of codes at weight_row * (K // 2), one of scales at "
        "weight_row * (K // 32), and a product goes to position * N + row"
    )


def reads(config, tokens):
    """Bytes of a step without a context, and its operations."""
    parts = weight_bytes(config)
    share = 1 - (1 - config.num_experts_per_tok / config.num_local_experts) ** tokens
    size = sum(parts.values()) - parts["embedding"] - parts["experts"] * (1 - share)
    flops = 2.0 * count_parameters(config).active * tokens
    return size + tokens * config.hidden_size * 2, flops


def check_12_1(candidate):
    """One token fewer, and reading is the longer part."""
    for config, machine in (
        (GPT_OSS_120B, Machine(4.65e12, 790e12)),
        (GPT_OSS_20B, Machine(1e11, 1e12)),
    ):
        found = candidate(config, machine)
        for tokens, longer in ((found, True), (found - 1, False)):
            size, flops = reads(config, tokens) if tokens > 0 else (1, 0)
            computing = flops / machine.flops_per_second
            reading = size / machine.bytes_per_second
            assert (computing > reading) == longer, (
                f"a step of {tokens} computes for {1e3 * computing:.3f} ms and reads "
                f"for {1e3 * reading:.3f}, so {found} is not the smallest number for "
                "which computing is longer; the experts' bytes grow with the tokens"
            )


def check_12_2(candidate):
    """Without guesses it is the limit; always wrong and always right are known."""
    h200 = Machine(4.65e12, 790e12)

    def limit(batch, guesses, accept):
        return candidate(GPT_OSS_120B, h200, batch, guesses, accept)

    for batch in (1, 16, 256):
        least = h200.least_seconds(*reads(GPT_OSS_120B, batch))
        found = limit(batch, 0, 0.7)
        assert abs(found * least / batch - 1) < 1e-6, (
            f"without guesses, a batch of {batch} has {batch / least:.0f} tokens/s at "
            f"most; yours is {found:.0f}"
        )
    for accept, tokens in ((0.0, 1), (1.0, 4), (0.5, 1.875)):
        least = h200.least_seconds(*reads(GPT_OSS_120B, 4))
        found = limit(1, 3, accept) * least
        assert abs(found - tokens) < 1e-6, (
            f"3 guesses, right with probability {accept}: a step reads for 4 tokens "
            f"and gives {tokens} on average, the one of its own included; yours gives "
            f"{found:.3f}"
        )
    many, guesses = 2048, 3
    size, flops = reads(GPT_OSS_120B, many * (guesses + 1))
    least = h200.least_seconds(size, flops)
    found = limit(many, guesses, 1.0)
    expected = many * (guesses + 1) / least
    assert abs(found / expected - 1) < 1e-6, (
        f"a step of {many:,} sequences with {guesses} guesses each computes for "
        f"{1e3 * flops / h200.flops_per_second:.0f} ms and reads for "
        f"{1e3 * size / h200.bytes_per_second:.0f}, and the longer part is its limit, "
        f"{expected:,.0f} tokens/s; yours is {found:,.0f}. Guesses are computed as "
        "well, in all layers and in the head"
    )


def check_12_3(candidate):
    """Choices that can be counted by hand, and random ones."""
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1], [0, 2]])  # 5, 3, 2 of 8
    empty, times = candidate(ids, 8, 4)
    assert abs(times - 4 / 3) < 1e-6, (
        "5, 3 and 2 pairs fill 2, 1 and 1 blocks of 4, so a used expert is read 4/3 "
        f"times; yours is {times:.4f}: experts without pairs aren't used"
    )
    assert abs(empty - 6 / 16) < 1e-6, (
        f"4 blocks of 4 have 16 places for 10 pairs: 0.375 are empty; yours is "
        f"{empty:.4f}"
    )
    ids = torch.rand(100, 32, generator=seeded()).topk(4).indices
    for block in (1, 8, 32):
        counts = [0] * 32
        for expert in ids.flatten().tolist():
            counts[expert] += 1
        filled = [math.ceil(count / block) for count in counts]
        empty, times = candidate(ids, 32, block)
        used = sum(count > 0 for count in counts)
        reads, unused = sum(filled) / used, 1 - 400 / (sum(filled) * block)
        assert abs(times - reads) < 1e-5, (
            f"blocks of {block}: a used expert is read {reads:.4f} times on average; "
            f"yours is {times:.4f}"
        )
        assert abs(empty - unused) < 1e-5, (
            f"blocks of {block}: {unused:.4f} of the places that are multiplied hold "
            f"no pair; yours is {empty:.4f}"
        )
