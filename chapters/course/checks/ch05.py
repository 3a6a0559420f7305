"""Chapter 5: positions, masks and attention."""

import math
import sys
from dataclasses import replace
from typing import Any

import torch

from course.checks.ch04 import Watch
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B

YARN: Any = GPT_OSS_20B.rope_scaling  # which it has


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found, expected):
    """The norm of the difference over the norm of what is expected."""
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm()).item()


def is_tensor(found, shape, what):
    """The candidate's result has to be a tensor of this shape."""
    assert isinstance(found, torch.Tensor) and tuple(found.shape) == tuple(shape), (
        f"{what} is a tensor {list(shape)}; yours is "
        f"{list(getattr(found, 'shape', [])) or type(found).__name__}"
    )
    assert found.isfinite().all(), f"{what} has NaN or infinity in it"


def number(found, what):
    """The candidate's result has to be one number."""
    one = isinstance(found, int | float) or getattr(found, "shape", None) == ()
    assert one and math.isfinite(found), f"{what} is one number; yours is {found!r}"
    return found


def turned(x, angles):
    """Each head of x [T, N, D] by its token's angles [T, D/2], in float64."""
    half = x.shape[-1] // 2
    first, second = x.double()[..., :half], x.double()[..., half:]
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def yarn(config, truncate=None, blend="frequencies", ramped=True):
    """Frequencies by the formulas, in Python's numbers; options are mistakes."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None:
        return plain

    def end(turns):
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = end(scaling.beta_fast), end(scaling.beta_slow)
    if scaling.truncate if truncate is None else truncate:
        low, high = math.floor(low), math.ceil(high)
    found = []
    for i, f in enumerate(plain):
        r = min(max((i - low) / (high - low), 0), 1) if ramped else 1
        if blend == "frequencies":
            found.append(f * (1 - r) + f / scaling.factor * r)
        else:
            found.append(1 / ((1 - r) / f + r * scaling.factor / f))
    return found


def grouped_attention(
    q, k, v, sinks, window=None, *, scale=None, kv_of=None, wide=0, future=False
):
    """Attention [T, H, D] by the definition, in float64. The last three: mistakes."""
    q, k, v = (x.double() for x in (q, k, v))
    length, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q)
    for i in range(length):
        first = 0 if window is None else max(0, i - window - wide + 1)
        seen = slice(first, length if future else i + 1)
        for h in range(heads):
            kv = kv_of(h) if kv_of else h // group
            scores = k[seen, kv] @ q[i, h] * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].double()[None]])
            share = scores.softmax(0)[: k[seen].shape[0]]
            out[i, h] = share @ v[seen, kv]
    return out


def judge_heads(run, q, k, v, sinks):
    """Six query heads on three kv heads, with and without a window."""
    one_sink = sinks[:1].expand_as(sinks)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"future": True}, "a token sees itself and those before it, not the future"),
        (
            {"kv_of": lambda h: h % k.shape[1]},
            "neighboring query heads share a kv head: with 6 and 3, heads 0 and 1 read "
            "kv head 0, h // 2 and not h % 3",
        ),
        (
            {"kv_of": lambda h: 0},
            "every query head has read kv head 0; head h belongs to kv head h // 2",
        ),
    ]
    found = run(q, k, v, sinks, None)
    is_tensor(found, q.shape, "the output")
    expected = grouped_attention(q, k, v, sinks)
    if not relative(found, expected) < 1e-4:
        for mistake, told in mistakes:
            wrong = grouped_attention(q, k, v, sinks, **mistake)
            assert relative(found, wrong) > 1e-4, told
        wrong = grouped_attention(q, k, v, one_sink)
        assert relative(found, wrong) > 1e-4, "each head has a sink of its own"
        assert relative(found, grouped_attention(q, k, v, None)) > 1e-4, (
            "the sinks have no effect"
        )
        off = relative(found, expected)
        raise AssertionError(f"6 query heads, 3 kv heads: off by {off:.2g} of its norm")
    for window in (3, 1, 20):
        found = run(q, k, v, sinks, window)
        expected = grouped_attention(q, k, v, sinks, window)
        for wide in (1, -1) if window == 3 else ():
            wrong = grouped_attention(q, k, v, sinks, window, wide=wide)
            assert relative(found, wrong) > 1e-4, (
                f"a window of 3 is the query's own position and the 2 before it; yours "
                f"has {window + wide} positions"
            )
        assert relative(found, expected) < 1e-4, (
            f"with a window of {window} it's off by {relative(found, expected):.2g}"
        )


def few_lines(function, most=10_000):
    """What ``function`` returns, if it gets by with so many lines of Python."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        assert count < most, (
            "a Python loop over the tokens: right, but too slow for 131,072 of them; "
            "compare all positions at once"
        )
        return trace

    sys.settrace(trace)
    try:
        return function()
    except MemoryError:
        raise AssertionError(
            "a Python list of the tokens: right, but too large for 131,072 of them; "
            "compare all positions at once"
        ) from None
    finally:
        sys.settrace(before)


def check_visible(visible):
    """Against comparisons of whole numbers, one by one."""
    cases = [
        (range(4), range(4), None, "every token before"),
        (range(6), range(6), 1, "a window of 1 is the token itself"),
        (range(6), range(6), 3, "a window of 3"),
        (range(7, 10), range(10), None, "three queries, the last of ten positions"),
        (range(7, 10), range(10), 4, "three queries with a window of 4"),
        (range(20, 23), range(15, 23), 4, "keys that begin at position 15"),
        (range(3), range(3), 128, "a window larger than the text"),
        (range(2, 5), range(8), 3, "queries in the middle of the keys"),
        ((5, 2), (7, 3, 2, 5), 4, "positions in any order"),
    ]
    for queries, keys, window, what in cases:
        found = visible(torch.tensor(queries), torch.tensor(keys), window)
        is_tensor(found, (len(queries), len(keys)), f"{what}: the mask")
        assert found.dtype == torch.bool, f"a mask is bool, not {found.dtype}"
        for i, query in enumerate(queries):
            row = dict(zip(keys, found[i].tolist(), strict=True))
            told = f"{what}, query at {query}"
            late = [key for key in row if row[key] and key > query]
            assert not late, f"{told}: it sees {late}, which is the future"
            assert row[query], f"{told}: it doesn't see itself"
            for key, seen in row.items():
                near = window is None or query - key < window
                assert seen or key > query or not near, (
                    f"{told}: it doesn't see position {key}, which is {query - key} "
                    "before it; the window counts the query itself"
                )
                assert near or not seen, (
                    f"{told}: it sees position {key}, which is {query - key} before "
                    "it; the window counts the query itself"
                )
    many = torch.arange(300)
    few_lines(lambda: visible(many, many, 128))


def check_masked_attention(masked_attention):
    """Against the definition; then other masks, large scores, bfloat16, sequences."""
    q, k, v = seeded(9, 6, 8), seeded(9, 3, 8, seed=1), seeded(9, 3, 8, seed=2)
    sinks, place = seeded(6, seed=3), torch.arange(9)

    def run(q, k, v, sinks, window):
        mask = place <= place[:, None]
        if window is not None:
            mask &= place > place[:, None] - window
        return masked_attention(q, k, v, mask, sinks, q.shape[-1] ** -0.5)

    judge_mask(masked_attention, q, k, v)
    given = q.clone()
    run(q, k, v, sinks, None)
    assert torch.equal(q, given), (
        "the caller's q has changed: `.float()` makes no copy of what is float32 "
        "already, so scale it with `*`, not `*=`"
    )
    scaled = grouped_attention(q, k, v, sinks * 8**-0.5)
    assert relative(run(q, k, v, sinks, None), scaled) > 1e-4, (
        "the scale is for the scores; the sink joins them unscaled"
    )
    judge_heads(run, q, k, v, sinks)
    bare = grouped_attention(q, k, v, None)
    assert relative(run(q, k, v, None, None), bare) < 1e-4, "sinks may be None"
    last = masked_attention(q[-2:], k, v, (place <= place[:, None])[-2:], sinks, 0.3)
    expected = grouped_attention(q, k, v, sinks, scale=0.3)[-2:]
    assert relative(last, expected) < 1e-4, (
        "two queries, nine keys and a scale of 0.3: their numbers differ, and the "
        "scale is an argument"
    )
    for size, below in ((200, "-100"), (200_000, "-100,000")):
        alone = run(size * q, k, v, None, None)
        expected = grouped_attention(size * q, k, v, None)
        assert not alone.isfinite().all() or (alone - expected).abs().max() < 1e-3, (
            "with large scores the future is seen: a query whose scores are all below "
            f"{below} prefers a hidden key that got a number like that; what is hidden "
            "gets -torch.inf"
        )
    for name, large_q, large_sinks in (
        ("scores", 200 * q, sinks),
        ("sinks", q, sinks.abs() + 200),
    ):
        found = run(large_q, k, v, large_sinks, None)
        assert found.isfinite().all(), (
            f"with large {name} some output is no number: e^200 is infinity in "
            "float32, so subtract a maximum that includes the sink, or let softmax do "
            "it"
        )
        expected = grouped_attention(large_q, k, v, large_sinks)
        assert (found - expected).abs().max() < 1e-3, f"with large {name} it's off"
    judge_precision(masked_attention)
    queries, keys, values = (torch.stack([x, x.flip(0)]) for x in (q, k, v))
    mask = torch.stack([place <= place[:, None], place >= place[:, None]])
    try:
        found = masked_attention(queries, keys, values, mask, sinks, 8**-0.5)
    except Exception as error:
        raise AssertionError(
            "right without leading axes; now with two sequences, q [2, 9, 6, 8], k and "
            "v [2, 9, 3, 8], mask [2, 9, 9], it fails: name the axes from the end, or "
            f"with ... in einsum ({type(error).__name__}: {error})"
        ) from None
    is_tensor(found, queries.shape, "two sequences' output")
    pair = [
        masked_attention(*one, sinks, 8**-0.5)
        for one in zip(queries, keys, values, mask, strict=True)
    ]
    assert relative(found, torch.stack(pair)) < 1e-4, (
        "two sequences at once differ from each by itself"
    )
    counts = []
    for tokens, heads in ((3, 2), (40, 32)):
        place = torch.arange(tokens)
        q, k = seeded(tokens, heads, 8), seeded(tokens, heads // 2, 8)
        with Watch() as watch:
            masked_attention(q, k, k, place <= place[:, None], seeded(heads), 0.3)
        counts.append(watch.operations)
    assert counts[1] < counts[0] + 10, (
        f"3 queries of 2 heads take {counts[0]} operations, 40 of 32 heads "
        f"{counts[1]}: a loop over queries or heads, whose every turn a GPU launches"
    )


def judge_mask(masked_attention, q, k, v):
    """One key for each query, so that its value has to come out."""
    chosen = torch.tensor([4, 0, 8, 2, 2, 7, 1, 5, 3])
    only = torch.nn.functional.one_hot(chosen, 9).bool()
    found = masked_attention(q, k, v, only, None, 1.0)
    is_tensor(found, q.shape, "the output")
    values = v[chosen].repeat_interleave(2, 1)
    if relative(found, values) < 1e-4:
        return
    hidden = masked_attention(q, k, v, ~only, None, 1.0)
    assert relative(hidden, values) > 1e-4, "True is what a query may read"
    in_turns = v[chosen].repeat(1, 2, 1)
    assert relative(found, in_turns) < 1e-4, (  # of which more later
        "a mask with one key for each query: that key's value must come out whole; "
        "what the mask hides gets its -inf before the softmax, not a zero after it"
    )


def judge_precision(masked_attention):
    """In bfloat16 only the result may be rounded."""
    q, k, v = (seeded(64, 4, 32, seed=s).bfloat16() for s in (5, 6, 7))
    sinks = seeded(4, seed=8)
    place = torch.arange(64)
    found = masked_attention(q, k, v, place <= place[:, None], sinks, 32**-0.5)
    assert found.dtype == torch.bfloat16, (
        f"the result has q's dtype, bfloat16; yours is {found.dtype}"
    )
    best = grouped_attention(q, k, v, sinks).bfloat16()
    same = (found == best).float().mean().item()
    assert same > 0.95, (
        "for bfloat16 scores, softmax and sums are float32, and only the result is "
        f"rounded: only {same:.0%} of your numbers equal the exact result, rounded once"
    )
    mixed = masked_attention(
        q, k.float(), v.float(), place <= place[:, None], None, 0.2
    )
    assert mixed.dtype == torch.bfloat16, (
        "with q in bfloat16 and keys and values in float32 the result has q's dtype; "
        f"yours is {mixed.dtype}"
    )


def check_5_1(oldest_heard):
    """Against a boolean matrix of who has heard of whom, layer by layer."""
    cases: list[tuple[list[int | None], int]] = [
        ([4], 20),
        ([1, 1, 1], 9),
        ([4, 4], 20),
        ([4, 4, 4], 7),
        ([5, 2, 9], 40),
        ([3, None, 3], 30),
        ([None, 4, 4], 30),
        ([4, 4, None], 30),
        ([6] * 5, 0),
    ]
    for windows, position in cases:
        place = torch.arange(position + 1)
        heard = torch.eye(position + 1)
        for window in windows:
            back = place[:, None] - place
            read = (back >= 0) & (back < (window or position + 1))
            heard = ((read.float() @ heard) > 0).float()
        expected = int(heard[position].nonzero()[0])
        found = number(oldest_heard(list(windows), position), "a position")
        told = f"layers with windows {windows}, position {position}"
        assert found >= 0, f"{told}: there is no position {found}"
        assert found >= expected, (
            f"{told}: {found} is too old; a window counts the token itself, so it "
            "reaches one position less far back"
        )
        assert found <= expected, (
            f"{told}: an older token than {found} is heard of; every layer reaches "
            "further back than the one above it, and a full one has no end, wherever "
            "it stands"
        )


def check_5_2(half_split):
    """Scores with neighbors as pairs have to come out of the reordered weights."""
    for dim, heads in ((4, 1), (8, 3)):
        rows = torch.arange(dim * heads, dtype=torch.float32)[:, None]
        found = half_split(rows, dim)
        is_tensor(found, rows.shape, "the reordered weight")
        order = found.flatten().int().tolist()
        assert sorted(order) == list(range(dim * heads)), (
            f"each row is there once; for {heads} heads of {dim} yours are {order}"
        )
        first = [row for row in order if row < dim]
        assert order[:dim] == first, (
            f"rows stay in their head; {heads} heads of {dim} became {order}"
        )
        pairs = [(order[i], order[i + dim // 2]) for i in range(dim // 2)]
        assert pairs == [(2 * i, 2 * i + 1) for i in range(dim // 2)], (
            f"rows 0 and 1, neighbors, go to places 0 and {dim // 2}, rows 2 and 3 to "
            f"1 and {dim // 2 + 1}; with your order the pairs are {pairs}"
        )
    x, weight = seeded(6, 10), seeded(24, 10, seed=1)
    angles = seeded(6, 4, seed=2)
    plain = (x @ weight.T).view(6, 3, 4, 2)  # pairs of neighbors
    turns = torch.polar(torch.ones(6, 1, 4), angles[:, None])
    expected = torch.view_as_complex(plain.contiguous()) * turns
    scores = torch.einsum("qnp,snp->nqs", expected, expected.conj()).real
    found = turned((x @ half_split(weight, 8).T).view(6, 3, 8), angles)
    found = torch.einsum("qnd,snd->nqs", found, found)
    assert relative(found, scores) < 1e-4, (
        "the scores of 3 heads aren't those that pairs of neighbors give"
    )


def check_5_3(add_sinks):
    """Against attention with sinks, and where powers overflow."""
    q, k, v = seeded(20, 4, 16), seeded(20, 2, 16, seed=1), seeded(20, 2, 16, seed=2)
    sinks = 3 * seeded(4, seed=3)
    keys = k.repeat_interleave(2, 1).double()
    scores = torch.einsum("qhd,shd->qhs", q.double(), keys) / 4
    place = torch.arange(20)
    hidden = (place > place[:, None])[:, None]
    lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1).float()
    found = add_sinks(grouped_attention(q, k, v, None).float(), lse, sinks)
    is_tensor(found, q.shape, "the output with sinks")
    expected = grouped_attention(q, k, v, sinks)
    if not relative(found, expected) < 1e-4:
        swapped = torch.sigmoid(sinks - lse)[..., None]
        assert relative(found, grouped_attention(q, k, v, None) * swapped) > 1e-4, (
            "that is the sink's share; what is left of the output is the rest"
        )
        off = relative(found, expected)
        raise AssertionError(
            f"20 tokens, 4 heads: off by {off:.2g} of its norm; each query and head "
            "has an L of its own, each head a sink"
        )
    ones = torch.ones(1, 2, 4)
    for level in (200.0, -200.0):
        lse = torch.full((1, 2), level)
        found = add_sinks(ones, lse, torch.tensor([level, level + 2]))
        expected = torch.tensor([0.5, 1 / (1 + math.exp(2))])
        assert found.isfinite().all(), (
            f"for an L of {level:g} your output is {found[0, 0, 0]:g}: e^200 is "
            "infinity in float32. Only the difference of L and the sink counts"
        )
        assert torch.allclose(found[0, :, 0], expected, atol=1e-4), (
            f"L is {level:g}, one sink the same and one 2 above: what is left is "
            f"{[round(n, 3) for n in found[0, :, 0].tolist()]}, which is not right"
        )


def check_5_4(first_distance):
    """Against both frequencies in Python's numbers, for several configs."""
    configs = [
        GPT_OSS_20B,
        replace(GPT_OSS_20B, head_dim=128),
        replace(GPT_OSS_20B, rope_theta=10_000.0),
        replace(
            GPT_OSS_20B,
            rope_scaling=replace(YARN, original_max_position_embeddings=8192),
        ),
    ]
    for config in configs:
        pairs = zip(yarn(config), yarn(config, truncate=True), strict=True)
        off = [abs(right - wrong) for right, wrong in pairs]
        for radians in (0.1, 1.0, 0.003):
            exact = radians / max(off)
            found = number(first_distance(config, radians), "a distance")
            told = (
                f"head_dim {config.head_dim}, theta {config.rope_theta:,.0f}, "
                f"{radians} radians: at a distance of {found:,}"
            )
            assert found == int(found), f"{told}: a distance is a whole number"
            least, most = (math.ceil(exact * x) for x in (1 - 1e-4, 1 + 1e-4))
            assert found >= least, (  # the frequencies are float32
                f"{told} the worst pair is off by {found * max(off):.4g} only"
            )
            assert found <= most, (
                f"{told} some pair is off by {found * max(off):.4g} already; look "
                "at the pair whose two frequencies differ most"
            )
