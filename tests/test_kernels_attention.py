"""Attention over pages: kernels against twins, twins against plain attention."""

import ctypes
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from simplellm import attention as plain
from simplellm import kernels
from simplellm.attention import attention
from simplellm.kernels.attention import (
    DECODE,
    Scratch,
    attend,
    paged_decode,
    paged_decode_torch,
    paged_prefill,
    paged_prefill_torch,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """Sequences whose keys and values lie in shuffled pages, among NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    offsets: Tensor
    lengths: Tensor
    queries: Tensor
    sinks: Tensor | None
    window: int | None
    parts: list[tuple[Tensor, Tensor, Tensor]]  # q, k, v of each sequence

    def decode(self, function, **options) -> Tensor:
        return function(
            self.q,
            self.keys,
            self.values,
            self.tables,
            self.offsets,
            self.lengths,
            self.sinks,
            self.window,
            **options,
        )

    def prefill(self, function, **options) -> Tensor:
        return function(
            self.q,
            self.keys,
            self.values,
            self.tables,
            self.offsets,
            self.lengths,
            self.queries,
            self.sinks,
            self.window,
            **options,
        )

    def expected(self) -> Tensor:
        """What chapter 5's attention makes of each sequence."""
        outputs = []
        for q, k, v in self.parts:
            if len(k) == 0:
                outputs.append(torch.zeros_like(q))
            else:
                q, k, v = q.double(), k.double(), v.double()
                outputs.append(attention(q, k, v, self.sinks, window=self.window))
        return torch.cat(outputs)


def make_case(
    device: str,
    lengths: list[int],
    chunks: list[int] | None = None,
    *,
    window: int | None = None,
    heads: tuple[int, int] = (8, 2),
    dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype | None = None,
    sinks: Tensor | str | None = "random",
    seed: int = 0,
) -> Case:
    """``chunks`` are the numbers of new tokens of each sequence, 1 if not given."""
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    chunks = chunks or [1] * len(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    offsets = [
        0 if window is None else max(0, n - c + 1 - window) // page_size * page_size
        for n, c in zip(lengths, chunks, strict=True)
    ]
    counts = [-(-(n - o) // page_size) for n, o in zip(lengths, offsets, strict=True)]
    pages = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)]
    width = max([1, *counts])
    keys = torch.full(
        (sum(counts) + 2, page_size, heads[1], dim),
        math.nan,
        device=device,
        dtype=dtype,
    )
    values = keys.clone()
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
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
    return Case(
        q=torch.cat([q for q, _, _ in parts]),
        keys=keys,
        values=values,
        tables=tables.to(device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        queries=torch.tensor([0, *chunks], device=device).cumsum(0).int(),
        sinks=sinks,
        window=window,
        parts=parts,
    )


def assert_near(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=tolerance, atol=tolerance
    )


EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 0, 144]


@pytest.mark.parametrize("window", [None, 1, 16, 128])
@pytest.mark.parametrize("sinks", ["random", None])
def test_decode_at_edges(kernel_device, window, sinks):
    case = make_case(kernel_device, EDGES, window=window, sinks=sinks)
    expected = case.expected()
    assert_near(case.decode(paged_decode_torch), expected)
    assert_near(case.decode(paged_decode), expected)


@pytest.mark.parametrize("window", [None, 129, 300])
@pytest.mark.parametrize("sinks", ["random", None])
def test_decode_of_few_at_edges(kernel_device, window, sinks):
    """Other tiles than for many: the newest key has a step of its own."""
    for one, other in zip(EDGES, [*EDGES[1:], 2], strict=True):
        case = make_case(kernel_device, [one, other], window=window, sinks=sinks)
        assert_near(case.decode(paged_decode), case.expected())


def test_decode_of_many(kernel_device):
    lengths = [*EDGES, *range(500, 519)]  # 32, some of them split
    case = make_case(kernel_device, lengths, heads=(2, 1))
    assert_near(case.decode(paged_decode), case.expected())


LEAST = DECODE[1].least


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    "lengths",
    [
        [LEAST, LEAST + 1, 2 * LEAST, 2 * LEAST + 1, 1500, 3],
        [LEAST + 1, LEAST + 2],
        [2 * LEAST + 1, 2 * LEAST + 2],
        [5000],
    ],
)
def test_decode_joins_splits(kernel_device, lengths, window):
    case = make_case(kernel_device, lengths, window=window)
    scratch = Scratch.create(len(lengths), 8, 2, 16, kernel_device)
    # Poison shows what is read without having been written.
    scratch.parts.fill_(math.nan)
    scratch.sums.fill_(math.nan)
    expected = case.expected()
    assert_near(case.decode(paged_decode, scratch=scratch), expected)
    assert_near(case.decode(paged_decode, scratch=scratch), expected)


@pytest.mark.parametrize("batch", [2, 9])
def test_decode_joins_odd_sizes(kernel_device, batch):
    """Three heads a group and 24 numbers a head: neither fills its tile."""
    lengths = [LEAST + 1, 3 * LEAST, *range(1, batch - 1)]
    case = make_case(kernel_device, lengths, heads=(6, 2), dim=24)
    scratch = Scratch.create(batch, 6, 2, 24, kernel_device)
    scratch.parts.fill_(math.nan)
    scratch.sums.fill_(math.nan)
    assert_near(case.decode(paged_decode, scratch=scratch), case.expected())


def test_decode_has_the_same_bits_twice(kernel_device):
    case = make_case(kernel_device, [1100, 700, 5])
    scratch = Scratch.create(3, 8, 2, 16, kernel_device)
    once = case.decode(paged_decode, scratch=scratch)
    scratch.parts.fill_(math.nan)
    scratch.sums.fill_(math.nan)
    assert torch.equal(case.decode(paged_decode, scratch=scratch), once)


@pytest.mark.parametrize("name, room", [("parts", 16), ("sums", 1)])
def test_a_scratch_must_have_room(kernel_device, name, room):
    """Enough of it for what a launch uses, which may be less than it could."""
    case = make_case(kernel_device, [LEAST + 2, 3 * LEAST])
    scratch = Scratch.create(2, 8, 2, 16, kernel_device)
    splits = -(-case.tables.shape[1] * 16 // LEAST)
    needed = 2 * 8 * splits * room
    enough = replace(scratch, **{name: getattr(scratch, name)[:needed]})
    assert_near(case.decode(paged_decode, scratch=enough), case.expected())
    short = replace(scratch, **{name: getattr(scratch, name)[: needed - 1]})
    message = f"scratch has .*{needed - 1}.*; expected at least .*{splits} splits"
    with pytest.raises(ValueError, match=message):
        case.decode(paged_decode, scratch=short)


@pytest.mark.parametrize("level", [-1e4, 30.0])
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_at_extremes(kernel_device, level, window):
    case = make_case(kernel_device, [1, 40, 600], window=window)
    case.sinks = torch.full_like(case.sinks, level)
    got = case.decode(paged_decode)
    assert_near(got, case.expected())
    if level > 0:
        assert got.abs().max() < 1e-3  # nearly all weight is on the sink
    assert_near(case.prefill(paged_prefill), case.expected())


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize(
    "heads, dim", [((8, 2), 16), ((4, 4), 32), ((6, 2), 64), ((8, 1), 64)]
)
def test_sizes(kernel_device, page_size, heads, dim):
    options = {"page_size": page_size, "heads": heads, "dim": dim}
    case = make_case(kernel_device, [5, 70], **options)
    assert_near(case.decode(paged_decode), case.expected())
    case = make_case(kernel_device, [5, 70], [5, 33], window=20, **options)
    assert_near(case.prefill(paged_prefill), case.expected())


def test_half_precision(kernel_device):
    case = make_case(kernel_device, [3, 300], [3, 20], dtype=torch.float16)
    assert_near(case.prefill(paged_prefill), case.expected())
    case = make_case(kernel_device, [3, 300], dtype=torch.float16)
    assert_near(case.decode(paged_decode), case.expected())


CHUNKS = {
    "whole": ([1, 15, 16, 17, 129], [1, 15, 16, 17, 129]),
    "later": ([200, 131, 65, 17], [60, 1, 64, 16]),
    "absent": ([0, 40, 0, 33], [0, 40, 0, 2]),
}


@pytest.mark.parametrize("window", [None, 1, 16, 128])
@pytest.mark.parametrize("name", CHUNKS)
def test_prefill_of_chunks(kernel_device, name, window):
    lengths, chunks = CHUNKS[name]
    case = make_case(kernel_device, lengths, chunks, window=window)
    expected = case.expected()
    assert_near(case.prefill(paged_prefill_torch), expected)
    assert_near(case.prefill(paged_prefill), expected)


@pytest.mark.parametrize("window", [None, 20])
def test_the_twin_takes_a_long_chunk_in_pieces(monkeypatch, window):
    """Its scores would not fit into memory otherwise."""
    pieces: list[int] = []

    def observed(q: Tensor, *rest) -> Tensor:
        pieces.append(len(q))
        return masked_attention(q, *rest)

    masked_attention = plain.masked_attention
    monkeypatch.setattr(plain, "masked_attention", observed)
    chunk = 2 * plain.QUERY_CHUNK + 5
    case = make_case("cpu", [9, chunk + 30], [9, chunk], window=window)
    got = case.prefill(paged_prefill_torch)
    assert pieces == [9, plain.QUERY_CHUNK, plain.QUERY_CHUNK, 5]
    assert_near(got, case.expected())


def test_prefill_without_sinks(kernel_device):
    case = make_case(kernel_device, [90], [70], sinks=None, window=33)
    assert_near(case.prefill(paged_prefill), case.expected())


@pytest.mark.parametrize("window", [None, 128])
def test_beyond_4096(kernel_device, window):
    case = make_case(kernel_device, [4096, 4097], window=window, heads=(2, 1))
    assert_near(case.decode(paged_decode), case.expected())
    case = make_case(kernel_device, [4110], [20], window=window, heads=(2, 1))
    assert_near(case.prefill(paged_prefill), case.expected())


@pytest.mark.parametrize("window", [None, 20, 128])
def test_a_token_has_the_same_bits_in_any_chunk(kernel_device, window):
    case = make_case(kernel_device, [150, 9], [150, 9], window=window)
    whole = case.prefill(paged_prefill, batch_invariant=True)
    assert_near(whole, case.expected())
    for begin, end in ((0, 1), (37, 38), (0, 33), (70, 100), (149, 150)):
        # Pages behind the window may be gone from the table.
        first = 0 if window is None else max(0, begin + 1 - window) // 16
        table = case.tables[:1, first:]
        ends = torch.tensor([[0, end - begin], [first * 16, end]], dtype=torch.int32)
        ends = ends.to(kernel_device)
        chunk = attend(
            case.q[begin:end],
            case.keys,
            case.values,
            table,
            ends[1, :1],
            ends[1, 1:],
            ends[0],
            int(end - begin == 1),
            case.sinks,
            window,
            batch_invariant=True,
        )
        assert torch.equal(chunk, whole[begin:end])


def test_padding_tokens_become_zeros(kernel_device):
    case = make_case(kernel_device, [40], [20])
    expected = case.expected()
    case.q = torch.cat([case.q, torch.full_like(case.q, math.nan)])
    out = torch.full_like(case.q, math.nan)
    assert case.prefill(paged_prefill, out=out) is out
    assert_near(out[:20], expected)
    assert not out[20:].any()


def test_empty_batches(kernel_device):
    case = make_case(kernel_device, [40], [20])
    case.q, case.queries = case.q[:0], torch.zeros_like(case.queries)
    assert case.prefill(paged_prefill).shape == (0, 8, 16)


@pytest.mark.parametrize("decodes", [0, 2, 4])
def test_attend_splits_the_batch(kernel_device, decodes):
    chunks = [1, 1, 30, 50] if decodes < 4 else [1] * 4
    case = make_case(kernel_device, [20, 300, 100, 50], chunks, window=64)
    got = attend(
        case.q,
        case.keys,
        case.values,
        case.tables,
        case.offsets,
        case.lengths,
        case.queries,
        decodes,
        case.sinks,
        case.window,
    )
    assert_near(got, case.expected())


def test_strided_pages(kernel_device):
    """Layers may share pages: only the inside of a page must be contiguous."""
    case = make_case(kernel_device, [100, 20])
    both = torch.stack([case.keys, case.values], dim=1)
    case.keys, case.values = both[:, 0], both[:, 1]
    assert_near(case.decode(paged_decode), case.expected())
    assert_near(case.prefill(paged_prefill), case.expected())


def strided(x: Tensor) -> Tensor:
    """The same numbers, with others between them."""
    return torch.stack([x, x + 1], dim=-1)[..., 0]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda x: x[:, :3], r"q is .*multiple of 2"),
        ("values", lambda x: x[:1], "keys is .* and values"),
        ("keys", lambda x: x.transpose(1, 2), "keys is"),
        ("sinks", lambda x: x[:2], r"sinks is \[2\] .*expected \[8\], contiguous"),
        ("offsets", lambda x: x[:1], r"offsets is \[1\] .*expected \[2\]"),
        ("lengths", lambda x: x[:1], r"lengths is \[1\] .*expected \[2\]"),
        ("sinks", strided, r"sinks is \[8\] with strides \[2\]"),
        ("offsets", strided, r"offsets is \[2\] with strides \[2\]"),
        ("lengths", strided, r"lengths is \[2\] with strides \[2\]"),
        ("window", lambda x: 0, "window is 0; expected at least 1"),
    ],
)
def test_bad_input(name, change, message):
    case = make_case("cpu", [5, 7])
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(ValueError, match=message):
        case.decode(paged_decode)


@pytest.mark.parametrize(
    "change, strides",
    [(strided, r"\[256, 32, 2\]"), (lambda x: x[:1], r"\[128, 16, 1\]")],
)
def test_out_is_contiguous_and_as_large_as_q(change, strides):
    case = make_case("cpu", [5, 7])
    out = change(torch.zeros_like(case.q))
    message = rf"out is .* with strides {strides}; expected \[2, 8, 16\], contiguous"
    for call in (case.decode, case.prefill):
        function = paged_decode if call == case.decode else paged_prefill
        with pytest.raises(ValueError, match=message):
            call(function, out=out)


def test_pages_of_keys_and_values_have_one_stride():
    case = make_case("cpu", [5, 7])
    case.values = torch.stack([case.values] * 2, dim=1)[:, 0]
    with pytest.raises(ValueError, match="a page of keys has the stride 512 and one"):
        case.decode(paged_decode)


def test_decode_wants_one_query_a_sequence():
    case = make_case("cpu", [5, 7], [2, 1])
    with pytest.raises(ValueError, match="one query for each of the 2"):
        case.decode(paged_decode)


def test_prefill_wants_an_end_for_each_sequence():
    case = make_case("cpu", [5, 7])
    case.queries = case.queries[:-1]
    with pytest.raises(ValueError, match=r"queries is \[2\] .*; expected \[3\]"):
        case.prefill(paged_prefill)


def test_prefill_wants_contiguous_ends():
    case = make_case("cpu", [5, 7], [2, 1])
    case.queries = strided(case.queries)
    with pytest.raises(ValueError, match=r"queries is \[3\] with strides \[2\]"):
        case.prefill(paged_prefill)


def test_the_wish_for_shared_memory_reaches_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wishes: list[tuple[int | None, int, int]] = []

    def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        wishes.append((function.value, attribute, value))
        return 0

    driver = SimpleNamespace(cuFuncSetAttribute=set_attribute)
    monkeypatch.setattr(kernels, "cuda_driver", lambda: driver)
    kernels.set_carveout(SimpleNamespace(function=2**40), 58)
    # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    assert wishes == [(2**40, 9, 58)]


def test_a_decode_asks_for_what_its_tiles_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launched:
        def __getitem__(self, grid: object) -> object:
            return lambda *args, **options: self

    wishes: list[tuple[object, int]] = []
    decode = Launched()
    module = "simplellm.kernels.attention"
    monkeypatch.setattr(f"{module}.decode_kernel", decode)
    monkeypatch.setattr(f"{module}.join_kernel", Launched())
    monkeypatch.setattr(f"{module}.set_carveout", lambda *wish: wishes.append(wish))
    q, pages = torch.zeros(1, 8, 64), torch.zeros(64, 16, 8, 64)
    tables, one = torch.zeros(1, 64, dtype=torch.int32), torch.ones(1).int()
    for pdl in (False, True):
        monkeypatch.setattr(f"{module}.supports_pdl", lambda device, pdl=pdl: pdl)
        paged_decode(q, pages, pages, tables, 0 * one, one, None, None)
    assert wishes == [(decode, DECODE[1].carveout)]
