"""The experts' kernels for many tokens against plain PyTorch, and the packed order."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from oracle_kernels import (
    plain_products,
    plain_sort,
    random_experts,
    random_weight,
    repacked,
)

from simplellm.checkpoint.mxfp4 import quantize
from simplellm.model import feed_forward, ops
from simplellm.model.kernels import experts as kernels
from simplellm.model.kernels.experts import (
    AHEAD,
    FP8_AHEAD,
    FP8_WAITING,
    FP8_WIDE,
    MIDDLE,
    TILINGS,
    WIDE_AHEAD,
    Tiling,
    Tokens,
    down,
    experts,
    gate_up,
    round_tokens,
    tilings,
)
from simplellm.model.kernels.fragments import (
    SPARE,
    hidden_scale,
    prepare,
    repack,
)
from simplellm.model.layers import Attention, Dense, Layer

HIDDEN, INTERMEDIATE = 96, 64
SOME_TILINGS = [
    Tiling(rows=64, tokens=16),
    Tiling(rows=128, tokens=16, unroll=2, stages=2),
    Tiling(rows=64, tokens=64, widths=3, unroll=3),
    Tiling(rows=64, tokens=8, warps=2),
    Tiling(rows=64, tokens=16, widths=2),
    Tiling(rows=64, tokens=16, tiles=2),
]


def number(value: int, device: str) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [32, 64, 224])
def test_repacked_weights_are_the_same_numbers(interleaved, columns):
    weight = random_weight(5, 48, columns)
    fragments = repack(weight, interleaved)
    assert fragments.shape == weight.shape
    assert torch.equal(fragments.dequantize(), weight.dequantize())


def test_repacking_needs_no_more_memory():
    weight = random_weight(5, 64, 2880)
    assert repack(weight, interleaved=True).nbytes == weight.nbytes


def test_what_is_loaded_beyond_the_last_row_is_zeros():
    """Whatever was in that memory: zeros of x times an infinity would not be zero."""
    fragments = repack(random_weight(5, 48, 96), interleaved=False)
    for part, width in ((fragments.words, 128), (fragments.scales, 8)):
        assert part.is_contiguous() and part.storage_offset() == 0
        spare = part.as_strided((SPARE.value, width), (width, 1), part.numel())
        assert not spare.any()


def test_a_scale_that_is_too_large_is_refused():
    weight = random_weight(5, 16, 64)
    weight.scales[2, 3, 1] = 136
    repack(weight, interleaved=False)
    weight.scales[2, 3, 1] = 137
    with pytest.raises(ValueError, match=r"2\^10; expected at most 2\^9"):
        repack(weight, interleaved=False)


def test_scales_that_fp8_has_no_room_for_are_refused():
    mlp = random_experts("cpu", HIDDEN, INTERMEDIATE)
    prepare(make_layer(mlp), fp8=True)
    mlp.down.scales[2, 3, 1] = 105
    prepare(make_layer(mlp))
    with pytest.raises(ValueError, match=r"from 2\^-22 to .* room from 2\^-21 to 2\^5"):
        prepare(make_layer(mlp), fp8=True)
    mlp.down.blocks[2, 3, 1] &= 0x88  # zeros may have any
    prepare(make_layer(mlp), fp8=True)
    mlp.gate_up.scales[1, 2, 0] = 132
    prepare(make_layer(mlp), fp8=True)
    mlp.gate_up.scales[1, 2, 0] = 133
    with pytest.raises(ValueError, match=r"to 2\^6, and FP8 has room"):
        prepare(make_layer(mlp), fp8=True)


@pytest.mark.parametrize(
    ("limit", "alpha", "scale"),
    [(7.0, 1.702, 8), (20.6, 1.702, 1), (0.01, 1.702, 2048), (7.0, 0.01, 2)],
)
def test_activations_have_room_in_fp8(limit, alpha, scale):
    mlp = replace(random_experts("cpu", 32, 32), limit=limit, alpha=alpha)
    assert hidden_scale(mlp) == scale
    gate, up = torch.linspace(-1000, 1000, 5001), torch.full([5001], 1e9)
    both = torch.stack([gate, up], -1)
    largest = feed_forward.swiglu(both, limit, alpha).abs().max() * scale
    assert 448 / 4 < largest <= 448


@pytest.mark.parametrize(("limit", "alpha"), [(21.0, 1.702), (7.0, 1e-6), (1e-9, 1e9)])
def test_activations_without_room_in_fp8_are_refused(limit, alpha):
    mlp = replace(random_experts("cpu", 32, 32), limit=limit, alpha=alpha)
    with pytest.raises(ValueError, match=r"moe_activation_dtype.*swiglu_limit"):
        prepare(make_layer(mlp), fp8=True)
    prepare(make_layer(mlp))


def test_rows_must_fill_tiles():
    with pytest.raises(ValueError, match="multiple of 16"):
        repack(random_weight(5, 24, 64), interleaved=False)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_experts_are_the_plain_ones(kernel_device, tokens, invariant):
    mlp = random_experts(kernel_device, HIDDEN, INTERMEDIATE)
    torch.manual_seed(tokens)
    x, num_tokens = torch.randn(tokens, HIDDEN).to(kernel_device), number(tokens, "cpu")
    num_tokens = num_tokens.to(kernel_device)
    expected = ops.experts(x, mlp, num_tokens)
    parts = experts(x, repacked(mlp), num_tokens, batch_invariant=invariant)
    assert parts.shape == (tokens, mlp.top_k, HIDDEN)
    torch.testing.assert_close(parts.sum(1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hidden", [96, 736])
@pytest.mark.parametrize("held", [range(5), range(1, 4)])
def test_many_tokens_are_multiplied_in_fp8_if_asked_for(kernel_device, hidden, held):
    """Of several experts, or of those that a rank holds; few stay as they are."""
    mlp = random_experts(kernel_device, hidden, INTERMEDIATE)
    parts = {  # of the others' too
        name: getattr(mlp, name)[held.start : held.stop]
        for name in ("gate_up", "gate_up_bias", "down", "down_bias")
    }
    mlp = repacked(replace(mlp, **parts, first=held.start))
    torch.manual_seed(0)
    x = torch.randn(150, hidden).to(kernel_device)
    x[7], x[9] = 0, torch.nan

    def result(rows: slice, fp8: bool) -> torch.Tensor:
        num_tokens = number(len(x[rows]) - 5, kernel_device)  # and padding
        return experts(x[rows], mlp, num_tokens, fp8=fp8)[:-5]

    few = slice(0, 120)  # 48 for each of five experts
    torch.testing.assert_close(
        result(few, True), result(few, False), rtol=0, atol=0, equal_nan=True
    )
    rounded, exact = result(slice(0, 150), True), result(slice(0, 150), False)
    assert torch.equal(rounded[9].isnan(), exact[9].isnan())
    rest = torch.arange(len(exact)) != 9
    rounded, exact = rounded[rest].float(), exact[rest].float()
    error = (rounded - exact).norm() / exact.norm()
    assert 0.01 < error < 0.08


def test_padding_changes_nothing(kernel_device):
    mlp = repacked(random_experts(kernel_device, HIDDEN, INTERMEDIATE))
    torch.manual_seed(0)
    x = torch.randn(19, HIDDEN).to(kernel_device)
    alone = experts(x[:17].contiguous(), mlp, number(17, kernel_device))
    x[17:] = torch.nan
    padded = experts(x, mlp, number(17, kernel_device))
    assert torch.equal(padded[:17], alone)


def halves(device, tokens, tiling, dtype=torch.float32, seed=0):
    """Everything that both halves of the experts take, routed at random."""
    mlp = random_experts(device, HIDDEN, INTERMEDIATE, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    # Expert 3 is left out, and expert 0 gets most tokens.
    odds = torch.rand(tokens, 5, generator=generator)
    scores, ids = (odds + torch.tensor([0.5, 0, 0, -2, 0])).topk(mlp.top_k)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype)
    ids, scores = ids.int().to(device), scores.softmax(-1).to(device)
    return mlp, x, ids, scores, plain_sort(ids, 5, tiling.tokens)


@pytest.mark.parametrize(
    ("tiling", "dtype"),
    [
        pytest.param(
            *(tiling, dtype),
            marks=[] if tiling is SOME_TILINGS[0] or number == 0 else exhaustive,
        )
        for exhaustive in [pytest.mark.exhaustive]
        for tiling in SOME_TILINGS
        for number, dtype in enumerate([torch.float32, torch.float16])
    ],
)
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.exhaustive), 19])
def test_each_half_is_the_plain_one(kernel_device, tokens, tiling, dtype):
    mlp, x, ids, scores, pairs = halves(kernel_device, tokens, tiling, dtype)
    ready = repacked(mlp)
    order = pairs.pairs.long()
    chosen = ids.flatten()[order]
    tolerance = dict(rtol=2e-3, atol=2e-3) if dtype == torch.float16 else {}

    result = gate_up(Tokens(x), ready, pairs, tiling)
    hidden = result.values
    assert hidden.dtype == dtype
    rows = x[order // mlp.top_k]
    both = plain_products(rows, mlp.gate_up, mlp.gate_up_bias, chosen)
    expected = feed_forward.swiglu(both, mlp.limit, mlp.alpha).to(dtype)
    torch.testing.assert_close(hidden, expected, **tolerance)

    out = down(result, ready, scores, pairs, tiling)
    assert out.dtype == dtype and out.shape == (tokens, mlp.top_k, HIDDEN)
    y = plain_products(hidden, mlp.down, mlp.down_bias, chosen)
    expected = torch.empty_like(y)
    expected[order] = y * scores.flatten()[order, None]
    torch.testing.assert_close(out.flatten(0, 1), expected.to(dtype), **tolerance)


@pytest.mark.gpu  # assembly
@pytest.mark.parametrize("tiling", SOME_TILINGS)
def test_assembly_decodes_as_plain_operations_do(tiling):
    """bfloat16 inputs take the fast path; their exact float32 copies the other."""
    mlp, x, _, scores, pairs = halves("cuda", 19, tiling, torch.bfloat16)
    mlp = repacked(mlp)
    fast = gate_up(Tokens(x), mlp, pairs, tiling)
    plain = gate_up(Tokens(x.float()), mlp, pairs, tiling).values
    torch.testing.assert_close(fast.values.float(), plain, rtol=2**-8, atol=1e-4)
    plain = down(Tokens(fast.values.float()), mlp, scores, pairs, tiling)
    found = down(fast, mlp, scores, pairs, tiling)
    torch.testing.assert_close(found, plain, rtol=2**-7, atol=1e-4)


def skip_unless_safe(tiling: Tiling, device: str) -> None:
    if device == "cuda" and tiling.ahead and not kernels.decodes_ahead():
        pytest.skip("the assembler would overwrite what is under way")


def in_order(values: torch.Tensor) -> torch.Tensor:
    """e4m3 numbers [n, K] in `fragment_order`, as float32 in the order of columns."""
    place = torch.arange(values.shape[1], device=values.device)
    column = place & ~14 | (place & 2) << 2 | place >> 1 & 6
    out = torch.empty(values.shape, device=values.device)
    out[:, column] = values.float()
    return out


def test_tokens_are_rounded_with_a_scale_each(kernel_device):
    mlp, x, *_ = halves(kernel_device, 19, FP8_WAITING)
    x[3] *= 1000
    tokens = round_tokens(x, mlp)
    assert tokens.scales is not None and tokens.hidden_scale == 8
    rounded = in_order(tokens.values) * tokens.scales[:, None]
    torch.testing.assert_close(rounded, x, rtol=2**-4, atol=1e-4 * float(x.abs().max()))
    torch.testing.assert_close(rounded.abs().amax(1), x.abs().amax(1))


@pytest.mark.parametrize("tiling", [FP8_WAITING, FP8_AHEAD, FP8_WIDE])
@pytest.mark.parametrize("tokens", [1, 19, 150])
def test_each_half_in_fp8_is_the_plain_one_of_rounded_numbers(
    kernel_device, tokens, tiling
):
    """Between the halves e4m3 rounds once more. Tensor cores add up with 14 bits."""
    on_gpu = kernel_device == "cuda"
    skip_unless_safe(tiling, kernel_device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    mlp, x, ids, scores, pairs = halves(kernel_device, tokens, tiling, dtype)
    ready, order = repacked(mlp), pairs.pairs.long()
    chosen = ids.flatten()[order]

    rounded = round_tokens(x, mlp)
    assert rounded.scales is not None
    hidden = gate_up(rounded, ready, pairs, tiling)
    rows = in_order(rounded.values) * rounded.scales[:, None]
    both = plain_products(rows[order // 2], mlp.gate_up, mlp.gate_up_bias, chosen)
    expected = feed_forward.swiglu(both, mlp.limit, mlp.alpha)
    found = in_order(hidden.values) / hidden.hidden_scale
    torch.testing.assert_close(found, expected, rtol=2**-4 + 2**-8, atol=2e-3)

    out = down(hidden, ready, scores, pairs, tiling)
    assert out.dtype == dtype and out.shape == (tokens, mlp.top_k, HIDDEN)
    y = plain_products(found, mlp.down, mlp.down_bias, chosen)
    expected = torch.empty_like(y)
    expected[order] = y * scores.flatten()[order, None]
    tolerance = dict(rtol=2**-7, atol=2e-3) if on_gpu else {}
    torch.testing.assert_close(out.flatten(0, 1).float(), expected, **tolerance)


@pytest.mark.bits
@pytest.mark.parametrize("tiling", [SOME_TILINGS[0], MIDDLE, WIDE_AHEAD])
def test_pairs_of_other_tokens_do_not_matter(kernel_device, tiling):
    """A token's result has the same bits alone and in a crowd."""
    skip_unless_safe(tiling, kernel_device)
    mlp, x, ids, scores, _ = halves(kernel_device, 150, tiling)
    mlp = repacked(mlp)

    def result(rows: slice) -> torch.Tensor:
        pairs = plain_sort(ids[rows], 5, tiling.tokens)
        hidden = gate_up(Tokens(x[rows]), mlp, pairs, tiling)
        return down(hidden, mlp, scores[rows], pairs, tiling)

    together = result(slice(0, 150))
    for rows in (slice(7, 8), slice(100, 119)):
        assert torch.equal(result(rows), together[rows])


@pytest.mark.bits
def test_invariant_experts_have_the_same_bits_in_any_company(kernel_device):
    """Routing, both halves and all."""
    mlp = repacked(random_experts(kernel_device, HIDDEN, INTERMEDIATE))
    torch.manual_seed(0)
    x = torch.randn(70, HIDDEN).to(kernel_device)

    def result(rows: slice) -> torch.Tensor:
        num_tokens = number(len(x[rows]), kernel_device)
        return experts(x[rows], mlp, num_tokens, batch_invariant=True)

    together = result(slice(0, 70))
    for rows in (slice(7, 8), slice(40, 59)):
        assert torch.equal(result(rows), together[rows])


@pytest.mark.parametrize("experts", [4, 32, 128])
@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 256, 2048, 16384])
def test_a_tiling_exists_for_every_number_of_tokens(tokens, experts):
    both = tilings(tokens, experts, 4)
    assert both[0].tokens == both[1].tokens  # they share their blocks of pairs
    assert all(tiles.tokens >> (tiles.widths - 1) >= 8 for tiles in both)


@pytest.mark.parametrize("tokens", [256, 2048, 4096, 16384])
@pytest.mark.parametrize("fp8", [False, True])
def test_weights_are_decoded_ahead_where_that_is_safe(monkeypatch, tokens, fp8):
    monkeypatch.setattr(kernels, "decodes_ahead", lambda: False)
    assert not tilings.__wrapped__(tokens, 32, 4, fp8)[0].ahead
    monkeypatch.setattr(kernels, "decodes_ahead", lambda: True)
    both = tilings.__wrapped__(tokens, 32, 4, fp8)
    assert both[0].ahead == (fp8 or tokens > 256)
    assert fp8 or both[0].tokens == {256: 64, 2048: 128}.get(tokens, 256)
    assert both[0].tokens == both[1].tokens


@pytest.mark.parametrize(
    ("capability", "version", "ahead"),
    [((9, 0), "13.3", True), ((9, 0), "13.10", True), ((9, 0), "12.9", False),
     ((10, 0), "13.4", False)],
)  # fmt: skip
def test_where_weights_may_be_decoded_ahead(monkeypatch, capability, version, ahead):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    tool = SimpleNamespace(version=version)
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: tool)
    monkeypatch.setattr(kernels, "assembler", kernels.assembler.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert kernels.decodes_ahead.__wrapped__() == ahead


def test_blocks_are_of_sizes_that_can_be_sorted():
    more = [AHEAD, WIDE_AHEAD, FP8_AHEAD, FP8_WAITING, FP8_WIDE]
    for tiling in [
        *more,
        *(tiling for *_, up, back in TILINGS for tiling in (up, back)),
    ]:
        assert tiling.tokens.bit_count() == 1
        assert tiling.tokens >> (tiling.widths - 1) >= 8
        assert tiling.unroll * tiling.tiles <= 1 + SPARE.value


def make_layer(mlp):
    table, norm = torch.zeros(8, 32), torch.ones(HIDDEN)
    qkv, o = torch.zeros(128, HIDDEN), torch.zeros(HIDDEN, 64)
    biases = torch.zeros(128), torch.zeros(HIDDEN)
    parts = qkv, biases[0], o, biases[1], torch.zeros(1), None, None
    return Layer(norm, Attention(*parts, table, table, 64, 1e-5), norm, mlp)


def test_a_layer_is_prepared_once_and_for_all():
    mlp = random_experts("cpu", HIDDEN, INTERMEDIATE)
    ready = prepare(make_layer(mlp)).mlp
    for name, interleaved in (("gate_up", True), ("down", False)):
        old, new = getattr(mlp, name), getattr(ready, name)
        assert new.interleaved == interleaved
        assert torch.equal(new.dequantize(), old.dequantize())
    assert ready.router is mlp.router and ready.down_bias is mlp.down_bias


def test_dense_layers_stay_as_they_are():
    layer = make_layer(Dense(torch.zeros(64, HIDDEN), None, torch.zeros(96, 32), None))
    assert prepare(layer) is layer


def test_layers_without_a_kernel_are_refused():
    mlp = random_experts("cpu", HIDDEN, INTERMEDIATE)
    dense = replace(mlp, gate_up=mlp.gate_up.dequantize())
    with pytest.raises(TypeError, match="the experts are dense"):
        prepare(make_layer(dense))
    with pytest.raises(TypeError, match="without biases"):
        prepare(make_layer(replace(mlp, down_bias=None)))
    layer = make_layer(mlp)
    packed = replace(layer.attn, o=quantize(layer.attn.o))
    with pytest.raises(TypeError, match="a weight is packed; expected a dense one"):
        prepare(replace(layer, attn=packed))
