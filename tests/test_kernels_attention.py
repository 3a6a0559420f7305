"""Attention over pages: kernels against the plain operation and plain attention."""

import ctypes
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from simplellm.model import attention, ops
from simplellm.model.batch import KVGroup
from simplellm.model.kernels import decode as decoding
from simplellm.model.kernels import launch
from simplellm.model.kernels.attention import attend
from simplellm.model.kernels.decode import DECODE_TILES, Scratch, choose_splits

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
exhaustive = pytest.mark.exhaustive


@dataclass
class Case:
    """Sequences whose keys and values lie in shuffled pages, among NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    group: KVGroup
    sinks: Tensor | None
    parts: list[tuple[Tensor, Tensor, Tensor]]  # q, k, v of each sequence

    def scratch(self) -> Scratch:
        """As a table has it. NaN in it shows what is read without being written."""
        scratch = Scratch.create(
            max(1, self.group.decodes),
            *(self.q.shape[1], self.keys.shape[2], self.q.shape[2]),
            self.q.device,
        )
        scratch.parts.fill_(math.nan)
        scratch.sums.fill_(math.nan)
        return scratch

    def attend(self, **options: Any) -> Tensor:
        """What the kernels make of it."""
        options = {"scratch": self.scratch()} | options
        return attend(self.q, self.keys, self.values, self.group, self.sinks, **options)

    def expected(self) -> Tensor:
        """What plain attention makes of each sequence."""
        outputs = []
        for q, k, v in self.parts:
            if len(k) == 0:
                outputs.append(torch.zeros_like(q))
            else:
                q, k, v = q.double(), k.double(), v.double()
                window = self.group.window
                outputs.append(attention.attention(q, k, v, self.sinks, window=window))
        return torch.cat(outputs)


def make_case(
    device: str,
    lengths: list[int],
    chunks: list[int] | None = None,
    *,
    decodes: int | None = None,
    queries: int = 1,
    window: int | None = None,
    heads: tuple[int, int] = (8, 2),
    dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype | None = None,
    sinks: Tensor | str | None = "random",
) -> Case:
    """``chunks`` are the numbers of new tokens of each sequence, 1 if not given.

    Of these, ``decodes`` go through the decode kernel: all if there are no chunks.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    if decodes is None:
        decodes = 0 if chunks else len(lengths)
    chunks = chunks or [1] * len(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    offsets = [
        0 if window is None else max(0, n - c + 1 - window) // page_size * page_size
        for n, c in zip(lengths, chunks, strict=True)
    ]
    counts = [-(-(n - o) // page_size) for n, o in zip(lengths, offsets, strict=True)]
    pages = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)]
    shape = (sum(counts) + 2, page_size, heads[1], dim)
    keys = torch.full(shape, math.nan, device=device, dtype=dtype)
    values = keys.clone()
    tables = torch.zeros(len(lengths), max([1, *counts]), dtype=torch.int32)
    parts = []
    rows = zip(lengths, chunks, offsets, pages.split(counts), strict=True)
    for number, (length, chunk, offset, mine) in enumerate(rows):
        k, v = normal(length, heads[1], dim), normal(length, heads[1], dim)
        parts.append((normal(chunk, heads[0], dim), k, v))
        tables[number, : len(mine)] = mine
        places = torch.arange(length - offset)
        where = mine[places // page_size].to(device), (places % page_size).to(device)
        keys[where], values[where] = k[offset:], v[offset:]
    if isinstance(sinks, str):
        sinks = normal(heads[0])
    group = KVGroup(
        slots=torch.zeros(0, dtype=torch.int32, device=device),
        tables=tables.to(device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, *chunks], device=device).cumsum(0).int(),
        decodes=decodes,
        window=window,
        page_size=page_size,
        queries=queries,
    )
    q = torch.cat([q for q, _, _ in parts])
    return Case(q, keys, values, group, sinks, parts)


def assert_near(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=tolerance, atol=tolerance
    )


def in_fp8(case: Case, dtype: torch.dtype = torch.float8_e4m3fn) -> Case:
    """The same with rounded keys and values; `Case.expected` knows them rounded."""
    rounded = [
        (q, *(x.to(dtype).to(x.dtype) for x in (k, v))) for q, k, v in case.parts
    ]
    keys, values = case.keys.to(dtype), case.values.to(dtype)
    return replace(case, keys=keys, values=values, parts=rounded)


EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 0, 144]


@pytest.mark.parametrize(
    "window, sinks",
    [
        (None, "random"),
        (1, None),
        (16, "random"),
        (128, "random"),
        *(
            pytest.param(*pair, marks=exhaustive)
            for pair in ((None, None), (1, "random"), (16, None), (128, None))
        ),
    ],
)
def test_decode_at_edges(kernel_device, window, sinks):
    case = make_case(kernel_device, EDGES, window=window, sinks=sinks)
    expected = case.expected()
    plain = ops.attend(case.q, case.keys, case.values, case.group, case.sinks)
    assert_near(plain, expected)
    assert_near(case.attend(), expected)


@pytest.mark.parametrize(
    "window, sinks",
    [
        (None, "random"),
        (129, None),
        *(
            pytest.param(*pair, marks=exhaustive)
            for pair in ((None, None), (129, "random"), (300, "random"), (300, None))
        ),
    ],
)
def test_decode_of_few_at_edges(kernel_device, window, sinks):
    """Other tiles than for many: the newest key has a step of its own."""
    pairs = [(1, 64), (15, 65), (16, 0), (17, 128), (63, 130), (127, 129)]
    for pair in pairs:
        case = make_case(kernel_device, [*pair], window=window, sinks=sinks)
        assert_near(case.attend(), case.expected())


def test_decode_of_many(kernel_device):
    lengths = [*range(0, 130, 5), *range(510, 516)]  # 32, some of them split
    case = make_case(kernel_device, lengths, heads=(2, 1))
    assert_near(case.attend(), case.expected())


LEAST = DECODE_TILES[1].least


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    "lengths",
    [
        [LEAST, LEAST + 1, 2 * LEAST, 2 * LEAST + 1, 500, 3],
        [LEAST + 1, LEAST + 2],
        [2 * LEAST + 1, 2 * LEAST + 2],
        pytest.param([5000], marks=exhaustive),
    ],
)
def test_decode_joins_splits(kernel_device, lengths, window):
    case = make_case(kernel_device, lengths, window=window, heads=(4, 1))
    scratch = case.scratch()
    expected = case.expected()
    assert_near(case.attend(scratch=scratch), expected)
    assert_near(case.attend(scratch=scratch), expected)


@pytest.mark.parametrize("batch", [2, 9])
def test_decode_joins_odd_sizes(kernel_device, batch):
    """Three heads a group and 24 numbers a head: neither fills its tile."""
    lengths = [LEAST + 1, 3 * LEAST, *range(1, batch - 1)]
    case = make_case(kernel_device, lengths, heads=(6, 2), dim=24)
    assert_near(case.attend(), case.expected())


@pytest.mark.bits
def test_decode_has_the_same_bits_twice(kernel_device):
    case = make_case(kernel_device, [700, 300, 5], heads=(4, 1))
    assert torch.equal(case.attend(), case.attend())


@given(st.integers(1, 300), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 5, 8]))
def test_a_scratch_has_room_for_every_batch(most, kv_heads, per_kv_head):
    heads = kv_heads * per_kv_head
    scratch = Scratch.create(most, heads, kv_heads, 64, "meta")
    for batch in range(1, most + 1):
        rows = batch * heads * choose_splits(batch, kv_heads)
        assert scratch.sums.numel() >= rows
        assert scratch.parts.numel() >= rows * 64


def verify_case(device: str, lengths: list[int], counts: list[int], **options: Any):
    """Rows of up to 4 tokens, then rows of none, as many as there are tokens."""
    tokens = sum(counts) + 3
    lengths = lengths + [0] * (tokens - len(lengths))
    counts = counts + [0] * (tokens - len(counts))
    case = make_case(device, lengths, counts, decodes=tokens, queries=4, **options)
    expected = torch.cat([case.expected(), torch.zeros_like(case.q[:3]).double()])
    case.q = torch.cat([case.q, torch.full_like(case.q[:3], math.nan)])
    return case, expected


@pytest.mark.parametrize(
    "window, sinks", [(None, "random"), (1, None), (3, "random"), (130, None)]
)
def test_a_few_queries_see_those_before_them(kernel_device, window, sinks):
    """At edges of tiles, shares and windows; padding tokens become zeros."""
    lengths, counts = [4, 1, 63, 65, 66, 130, 131, 16], [4, 1, 3, 4, 1, 2, 4, 2]
    case, expected = verify_case(
        kernel_device, lengths, counts, window=window, sinks=sinks
    )
    plain = ops.attend(case.q, case.keys, case.values, case.group, case.sinks)
    invariant = case.attend(batch_invariant=True)
    for out in (case.attend(), plain, invariant):
        assert_near(out, expected)


@pytest.mark.parametrize(
    "heads, dim, window",
    [  # with a window and without, in turn; all pairs are in make test-all
        pytest.param(*shape, window, marks=() if (turn + place) % 2 else exhaustive)
        for turn, shape in enumerate([((6, 2), 24), ((4, 1), 128), ((2, 2), 16)])
        for place, window in enumerate([None, 300])
    ],
)
def test_shares_of_a_few_queries_are_joined(kernel_device, heads, dim, window):
    """The last share may have a key for the last query alone."""
    lengths = [2 * LEAST + 1, 3, 4 * LEAST + 2, LEAST + 1]
    case, expected = verify_case(
        kernel_device, lengths, [2, 3, 4, 1], heads=heads, dim=dim, window=window
    )
    assert_near(case.attend(), expected)
    assert torch.equal(case.attend(), case.attend())


@pytest.mark.parametrize("level", [-1e4, 30.0])
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_at_extremes(kernel_device, level, window):
    for chunks in (None, [1, 7, 20]):
        case = make_case(kernel_device, [1, 40, 300], chunks, window=window)
        assert case.sinks is not None
        case.sinks = torch.full_like(case.sinks, level)
        got = case.attend()
        assert_near(got, case.expected())
        if level > 0:
            assert got.abs().max() < 1e-3  # nearly all weight is on the sink


SIZES = [
    ((8, 2), 16, 16),
    ((4, 4), 32, 1),
    ((6, 2), 64, 32),
    ((8, 1), 64, 64),
    ((4, 1), 128, 16),
    ((10, 2), 128, 64),
    ((2, 1), 256, 16),
]


@pytest.mark.parametrize("heads, dim, page_size", SIZES)
def test_sizes(kernel_device, heads, dim, page_size):
    options = {"page_size": page_size, "heads": heads, "dim": dim}
    case = make_case(kernel_device, [5, 150], **options)
    assert_near(case.attend(), case.expected())
    case = make_case(kernel_device, [5, 70], [5, 33], window=20, **options)
    assert_near(case.attend(), case.expected())


# Any two of them meet in one case at least.
PAIRS = AllPairs(
    [
        [1, 16, 32, 64],
        [*dict.fromkeys((heads, dim) for heads, dim, _ in SIZES)],
        ["random", None],
        [None, 20, 200],
    ]
)


@exhaustive
@pytest.mark.parametrize("page_size, shape, sinks, window", [*PAIRS])
def test_all_sizes(kernel_device, page_size, shape, sinks, window):
    options = {"page_size": page_size, "heads": shape[0], "dim": shape[1]}
    options |= {"sinks": sinks, "window": window}
    case = make_case(kernel_device, [5, 270, 64], **options)
    assert_near(case.attend(), case.expected())
    case = make_case(kernel_device, [5, 270], [5, 33], **options)
    assert_near(case.attend(), case.expected())


def test_half_precision(kernel_device):
    case = make_case(kernel_device, [3, 300], [3, 20], dtype=torch.float16)
    assert_near(case.attend(), case.expected())
    case = make_case(kernel_device, [3, 300], dtype=torch.float16)
    assert_near(case.attend(), case.expected())


CHUNKS = {
    "whole": ([1, 15, 16, 17, 129], [1, 15, 16, 17, 129]),
    "later": ([200, 131, 65, 17], [60, 1, 64, 16]),
    "absent": ([0, 40, 0, 33], [0, 40, 0, 2]),
}


@pytest.mark.parametrize(
    "name, window",
    [
        ("whole", None),
        ("whole", 16),
        ("later", None),
        ("later", 128),
        ("absent", 1),
        *(
            pytest.param(*pair, marks=exhaustive)
            for pair in (
                *(("whole", 1), ("whole", 128), ("later", 1), ("later", 16)),
                *(("absent", None), ("absent", 16), ("absent", 128)),
            )
        ),
    ],
)
def test_prefill_of_chunks(kernel_device, name, window):
    lengths, chunks = CHUNKS[name]
    case = make_case(kernel_device, lengths, chunks, window=window)
    expected = case.expected()
    plain = ops.attend(case.q, case.keys, case.values, case.group, case.sinks)
    assert_near(plain, expected)
    assert_near(case.attend(), expected)


@pytest.mark.parametrize("dim, page_size", [(16, 64), (128, 64), (64, 128)])
def test_prefill_of_pages_that_hold_whole_tiles(kernel_device, dim, page_size):
    lengths, chunks = CHUNKS["later"]
    case = make_case(kernel_device, lengths, chunks, dim=dim, page_size=page_size)
    assert_near(case.attend(), case.expected())


def test_prefill_without_sinks(kernel_device):
    case = make_case(kernel_device, [90], [70], sinks=None, window=33)
    assert_near(case.attend(), case.expected())


@pytest.mark.parametrize("window", [None, 128])
def test_beyond_4096(kernel_device, window):
    case = make_case(kernel_device, [4096, 4097], window=window, heads=(2, 1))
    assert_near(case.attend(), case.expected())
    case = make_case(kernel_device, [4110], [20], window=window, heads=(2, 1))
    assert_near(case.attend(), case.expected())


@pytest.mark.bits
@pytest.mark.parametrize("window", [None, 20, pytest.param(128, marks=exhaustive)])
def test_a_token_has_the_same_bits_in_any_chunk(kernel_device, window):
    case = make_case(kernel_device, [150, 9], [150, 9], window=window, heads=(4, 1))
    whole = case.attend(batch_invariant=True)
    assert_near(whole, case.expected())
    for begin, end in ((0, 1), (37, 38), (0, 33), (70, 100), (149, 150)):
        # Pages behind the window may be gone from the table.
        first = 0 if window is None else max(0, begin + 1 - window) // 16
        numbers = torch.tensor([[0, end - begin], [first * 16, end]], dtype=torch.int32)
        numbers = numbers.to(kernel_device)
        group = replace(
            case.group,
            tables=case.group.tables[:1, first:].contiguous(),
            offsets=numbers[1, :1],
            lengths=numbers[1, 1:],
            query_start_loc=numbers[0],
            decodes=int(end - begin == 1),
        )
        chunk = replace(case, q=case.q[begin:end], group=group)
        assert torch.equal(chunk.attend(batch_invariant=True), whole[begin:end])


def test_padding_tokens_become_zeros(kernel_device):
    case = make_case(kernel_device, [40, 30], [1, 20], decodes=1)
    expected = case.expected()
    case.q = torch.cat([case.q, torch.full_like(case.q, math.nan)])
    out = case.attend()
    assert_near(out[:21], expected)
    assert not out[21:].any()


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_between_decodes_and_chunks_may_be_padding(
    kernel_device, window, batch_invariant
):
    """As in a captured step: rows that have neither tokens nor a length."""
    lengths, chunks = [20, 300, 0, 0, 100, 50, 0], [1, 1, 0, 0, 30, 2, 0]
    case = make_case(kernel_device, lengths, chunks, decodes=4, window=window)
    expected = case.expected()
    tokens = len(case.q)
    case.q = torch.cat([case.q, torch.full_like(case.q[:9], math.nan)])
    plain = ops.attend(case.q, case.keys, case.values, case.group, case.sinks)
    for out in (case.attend(batch_invariant=batch_invariant), plain):
        assert_near(out[:tokens], expected)
        assert not out[tokens:].any()


@pytest.mark.parametrize("decodes", [0, 2, 4])
def test_attend_splits_the_batch(kernel_device, decodes):
    chunks = [1, 1, 30, 50] if decodes < 4 else [1] * 4
    case = make_case(
        kernel_device, [20, 300, 100, 50], chunks, decodes=decodes, window=64
    )
    assert_near(case.attend(), case.expected())


def test_strided_pages(kernel_device):
    """Layers may share pages: only the inside of a page must be contiguous."""
    for chunks in (None, [30, 1]):
        case = make_case(kernel_device, [100, 20], chunks)
        both = torch.stack([case.keys, case.values], dim=1)
        case.keys, case.values = both[:, 0], both[:, 1]
        assert_near(case.attend(), case.expected())


def test_the_wish_for_shared_memory_reaches_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wishes: list[tuple[int | None, int, int]] = []

    def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        wishes.append((function.value, attribute, value))
        return 0

    driver = SimpleNamespace(cuFuncSetAttribute=set_attribute)
    monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
    for has_pdl in (False, True):
        monkeypatch.setattr(launch, "has_pdl", lambda has_pdl=has_pdl: has_pdl)
        kernel = SimpleNamespace(function=2**40)
        for percent in (58, 58, -1):  # the second is known already
            launch.set_carveout(kernel, percent)
    # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    assert wishes == [(2**40, 9, 58), (2**40, 9, -1)]


def test_a_decode_asks_for_what_its_tiles_say(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[tuple[object, int]] = []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, *args: self.kernel)
    monkeypatch.setattr(decoding, "set_carveout", lambda *wish: wishes.append(wish))
    make_case("cpu", [5], dim=64).attend()
    assert wishes == [(decoding.decode_kernel, DECODE_TILES[1].carveout)]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("count", [1, 4, 13])
def test_decodes_read_fp8(kernel_device, count, window):
    """Numbers of FP8 are read as they are, and multiplied in the dtype of q."""
    lengths = [700, *EDGES[:12]][:count] if window is None else EDGES[-count:]
    case = in_fp8(make_case(kernel_device, lengths, window=window))
    expected = case.expected()
    plain = ops.attend(case.q, case.keys, case.values, case.group, case.sinks)
    assert_near(plain, expected)
    assert_near(case.attend(), expected)


@pytest.mark.parametrize("invariant", [False, True])
def test_chunks_read_fp8(kernel_device, invariant):
    shape = [1, 30, 77, 100], [1, 1, 20, 100]
    case = in_fp8(make_case(kernel_device, *shape, decodes=2))
    expected = case.expected()
    plain = ops.attend(case.q, case.keys, case.values, case.group, case.sinks)
    assert_near(plain, expected)
    assert_near(case.attend(batch_invariant=invariant), expected)


def test_a_needle_of_fp8_is_found(kernel_device):
    """Among thousands of keys the one that a query looks for has all the weight."""
    case = make_case(kernel_device, [3000], heads=(2, 1), sinks=None)
    q, k, v = case.parts[0]
    place = 1234
    tables, size = case.group.tables[0], case.group.page_size
    k[place] = 40 * q[0, :1] / q[0].float().norm(dim=-1)[:1, None]  # longest by far
    case.keys[tables[place // size].long(), place % size] = k[place]
    found = in_fp8(case).attend()[0, 0]
    torch.testing.assert_close(found, v[place, 0], rtol=0.07, atol=0.05)


def test_a_few_queries_read_fp8(kernel_device):
    counts = [4, 1, 3, 2]
    case, _ = verify_case(kernel_device, [700, 65, 66, 16], counts)
    case = in_fp8(case)
    got, some = case.attend(), sum(counts)
    assert_near(got[:some], case.expected())
    assert not got[some:].any()
