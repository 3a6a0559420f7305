"""Experts of ordinary numbers, and of 8 bits, against plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from allpairspy import AllPairs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simplellm.checkpoint.checkpoint import RandomCheckpoint
from simplellm.checkpoint.families import FAMILIES
from simplellm.checkpoint.formats import SCHEMES
from simplellm.checkpoint.mxfp4 import quantize
from simplellm.checkpoint.names import tensor_names
from simplellm.checkpoint.scaled import E4M3, Scaled, join
from simplellm.model import family_rules, feed_forward, ops
from simplellm.model.build import build
from simplellm.model.kernels.expert_blocks import ExpertBlocks
from simplellm.model.kernels.fragments import prepare
from simplellm.model.kernels.grouped import (
    GROUPINGS,
    Grouping,
    choose_grouping,
    experts,
    multiply_groups,
)
from simplellm.model.kernels.routing import sort_pairs
from simplellm.model.kernels.triton_ops import triton_ops
from simplellm.model.layers import Attention, Experts, Layer

exhaustive = pytest.mark.exhaustive
HIDDEN, INTERMEDIATE = 160, 72
FORMATS = {
    "numbers": None,
    "FP8 in blocks": ((128, 128), E4M3, True),
    "FP8 in blocks, weights alone": ((128, 128), E4M3, False),
    "FP8": ((1, 0), E4M3, True),
    "INT8": ((1, 0), torch.int8, True),
    "INT8, weights alone": ((1, 0), torch.int8, False),
}
KINDS = pytest.mark.parametrize("kind", FORMATS)
# Sums in another order. In float16, what is between the halves is rounded once by the
# kernel and three times by PyTorch.
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.float16: dict(rtol=4e-3, atol=4e-3),
}
# Where inputs are rounded to 8 bits, the last bit of a sum decides now and then which
# of two neighbors a number between the halves becomes.
ROUNDED = dict(rtol=3e-2, atol=3e-2)
TINY = {"hidden": 136, "intermediate": 24}
SMALL = Grouping(rows=32, tokens=16, warps=4, stages=2)
NARROWED = Grouping(rows=32, tokens=32, warps=4, stages=2, widths=2)


def number(value: int, device: str) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def make_experts(
    device: str,
    kind: str = "numbers",
    *,
    count: int = 5,
    top_k: int = 2,
    normalized: bool = True,
    dtype: torch.dtype = torch.float32,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> Experts:
    """A layer's experts; the last one is never chosen."""
    generator = torch.Generator().manual_seed(count * hidden)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def made(*parts: torch.Tensor) -> torch.Tensor | Scaled:
        if FORMATS[kind] is None:
            return torch.cat(parts, 1).to(device, dtype)
        return join([Scaled.of(part, *FORMATS[kind]) for part in parts]).to(device)

    halves = [normal(count, intermediate, hidden, scale=0.1) for _ in "gu"]
    bias = torch.zeros(count)
    bias[-1] = -1000
    return Experts(
        router=normal(count, hidden, scale=0.1).to(device, dtype),
        router_bias=bias.to(device, dtype),
        gate_up=made(*halves),
        gate_up_bias=None,
        down=made(normal(count, hidden, intermediate, scale=0.1)),
        down_bias=None,
        top_k=top_k,
        limit=7.0,
        alpha=1.702,
        activation="swiglu",
        normalized=normalized,
    )


def tokens_for(mlp: Experts, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, mlp.router.shape[1], generator=generator)
    return x.to(mlp.router.device, mlp.router.dtype)


def tolerance(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    form = FORMATS[kind]
    return ROUNDED if form is not None and form[2] else CLOSE[dtype]


FIRST = [
    (kind, normalized, 7 if normalized else 1, not normalized)
    for kind in FORMATS
    for normalized in (True, False)
]
# Any two of them meet in one case at least.
PAIRS = map(tuple, AllPairs([[*FORMATS], [70, 7, 1], [True, False], [False, True]]))
WAYS = FIRST + [
    pytest.param(kind, normalized, tokens, invariant, marks=exhaustive)
    for kind, tokens, normalized, invariant in PAIRS
    if (kind, normalized, tokens, invariant) not in FIRST
]


@pytest.mark.parametrize(("kind", "normalized", "tokens", "invariant"), WAYS)
def test_experts_are_the_plain_ones(kernel_device, kind, normalized, tokens, invariant):
    mlp = make_experts(kernel_device, kind, normalized=normalized)
    x, num_tokens = tokens_for(mlp, tokens), number(tokens, kernel_device)
    parts = experts(x, mlp, num_tokens, batch_invariant=invariant)
    assert parts.shape == (tokens, 2, HIDDEN)
    expected = ops.experts(x, mlp, num_tokens)
    torch.testing.assert_close(parts.sum(1), expected, **tolerance(kind))


def plain_half(
    x: torch.Tensor, mlp: Experts, scores: torch.Tensor | None, order: ExpertBlocks
) -> torch.Tensor:
    """What `multiply_groups` gives for those pairs that are no padding, else NaN."""
    size = mlp.down.shape[2] if scores is None else mlp.down.shape[1]
    out = x.new_full((len(order.pairs), size), torch.nan)
    for expert, (begin, end) in enumerate(zip(*ends(order), strict=True)):
        if begin == end:
            continue
        places = torch.arange(begin, end, device=x.device)
        pairs = order.pairs[places].long()
        if scores is None:
            out[places] = plain_product(x[pairs // mlp.top_k], mlp, expert, None)
        else:
            factors = scores.flatten()[pairs, None]
            out[pairs] = plain_product(x[places], mlp, expert, factors)
    return out


def plain_product(
    x: torch.Tensor, mlp: Experts, expert: int, scores: torch.Tensor | None
) -> torch.Tensor:
    """One expert's half, the second with ``scores``: x [pairs, in] -> [pairs, out]."""
    weight = mlp.gate_up if scores is None else mlp.down
    weight = weight.float() if isinstance(weight, torch.Tensor) else weight
    y = feed_forward.linear(x.float(), weight[expert])
    return (family_rules.apply_activation(y, mlp) if scores is None else y * scores).to(
        x.dtype
    )


def ends(order: ExpertBlocks) -> tuple[list[int], list[int]]:
    """Where each expert's pairs begin and end."""
    offsets = order.offsets.tolist()
    return offsets[:-1], offsets[1:]


def assert_halves(mlp: Experts, x, ids, scores, num_tokens, grouping: Grouping) -> None:
    """Both halves are the plain ones, and nothing is written for padding."""
    pairs = sort_pairs(ids, len(mlp.router), grouping.tokens, num_tokens)
    close = CLOSE[x.dtype] | dict(equal_nan=True)
    hidden = x.new_full((ids.numel(), mlp.down.shape[2]), torch.nan)
    multiply_groups(hidden, x, mlp.gate_up, None, pairs, mlp.top_k, grouping)
    expected = plain_half(x, mlp, None, pairs)
    torch.testing.assert_close(hidden, expected, **close)
    out = x.new_full((*ids.shape, x.shape[1]), torch.nan)
    multiply_groups(out, hidden, mlp.down, scores, pairs, mlp.top_k, grouping)
    expected = plain_half(hidden, mlp, scores, pairs).view(out.shape)
    torch.testing.assert_close(out, expected, **close)
    real = torch.arange(len(x), device=x.device) < num_tokens
    assert torch.equal(out.isnan().all(-1), ~real[:, None].expand(ids.shape))


HALVES = [
    pytest.param(kind, dtype, way, marks=() if few else exhaustive)
    for number_of_kind, kind in enumerate(FORMATS)
    for number_of_dtype, dtype in enumerate(CLOSE)
    for way in (SMALL, GROUPINGS[1][1], NARROWED)
    for few in [
        (way is SMALL and number_of_kind % 2 == number_of_dtype)
        or (way is NARROWED and number_of_kind == number_of_dtype == 0)
    ]
]


@pytest.mark.parametrize(("kind", "dtype", "grouping"), HALVES)
def test_each_half_is_the_plain_one(kernel_device, kind, dtype, grouping):
    """Of the same rounded inputs. Expert 3 gets nothing, expert 0 two blocks."""
    mlp = make_experts(kernel_device, kind, dtype=dtype)
    x = tokens_for(mlp, 19)
    generator = torch.Generator().manual_seed(0)
    odds = torch.rand(19, 5, generator=generator)
    scores, ids = (odds + torch.tensor([1.0, 0, 0, -2, 0])).topk(2)
    ids, scores = ids.int().to(kernel_device), scores.softmax(-1).to(kernel_device)
    num_tokens = number(18, kernel_device)
    assert_halves(mlp, x, ids, scores, num_tokens, grouping)


@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_choice_of_experts(kernel_device, data):
    """Also one that leaves experts out, or is all padding."""
    count = data.draw(st.integers(1, 5), label="experts")
    top_k = data.draw(st.integers(1, count), label="top_k")
    kind = data.draw(st.sampled_from(["numbers", "FP8 in blocks", "INT8"]))
    mlp = make_experts(kernel_device, kind, count=count, top_k=top_k, **TINY)
    choice = st.permutations(range(count)).map(lambda some: some[:top_k])
    chosen = data.draw(st.lists(choice, min_size=1, max_size=20), label="ids")
    num_tokens = data.draw(st.integers(0, len(chosen)), label="num_tokens")
    ids = torch.tensor(chosen, dtype=torch.int32, device=kernel_device)
    scores = torch.linspace(0.1, 1, ids.numel(), device=kernel_device).view(ids.shape)
    x = tokens_for(mlp, len(ids))
    x[num_tokens:] = torch.nan
    assert_halves(mlp, x, ids, scores, number(num_tokens, kernel_device), SMALL)


@pytest.mark.parametrize(
    "kind",
    [
        "numbers",
        *(pytest.param(k, marks=exhaustive) for k in ("FP8 in blocks", "INT8")),
    ],
)
def test_padding_changes_nothing(kernel_device, kind):
    mlp = make_experts(kernel_device, kind, **TINY)
    x, num_tokens = tokens_for(mlp, 9), number(7, kernel_device)
    alone = experts(x[:7].contiguous(), mlp, num_tokens)
    x[7:] = torch.nan
    assert torch.equal(experts(x, mlp, num_tokens)[:7], alone)


@pytest.mark.parametrize("kind", ["numbers", "FP8 in blocks", "INT8"])
def test_nan_stays_with_its_token(kernel_device, kind):
    mlp = make_experts(kernel_device, kind, **TINY)
    x = tokens_for(mlp, 3)
    x[1, 130] = torch.nan
    out = experts(x, mlp, number(3, kernel_device)).isnan()
    assert out[1].all() and not out[[0, 2]].any()


@pytest.mark.bits
@pytest.mark.parametrize(
    "kind", ["numbers", pytest.param("FP8 in blocks", marks=exhaustive)]
)
def test_invariant_experts_have_the_same_bits_in_any_company(kernel_device, kind):
    """Routing, both halves and all."""
    mlp = make_experts(kernel_device, kind, normalized=False, **TINY)
    x = tokens_for(mlp, 90)

    def result(rows: slice) -> torch.Tensor:
        num_tokens = number(len(x[rows]), kernel_device)
        return experts(x[rows], mlp, num_tokens, batch_invariant=True)

    together = result(slice(0, 90))
    for rows in (slice(7, 8), slice(40, 59)):
        assert torch.equal(result(rows), together[rows])


def test_blocks_are_of_sizes_that_can_be_sorted_and_multiplied():
    for _, grouping in GROUPINGS:
        narrowest = grouping.tokens >> grouping.widths - 1
        assert grouping.tokens.bit_count() == 1 and narrowest >= 16
        assert grouping.rows % 64 == 0


def test_larger_batches_have_larger_blocks():
    sizes = 1, 5, 64, 129, 512, 769, 16384
    found = [choose_grouping(tokens, 128, 8).tokens for tokens in sizes]
    assert found == [16, 16, 16, 64, 64, 128, 256]


@KINDS
def test_a_layer_stays_as_it_is(kind):
    mlp = make_experts("cpu", kind)
    table, norm = torch.zeros(8, 32), torch.ones(HIDDEN)
    qkv = make_experts("cpu", kind).gate_up[0]
    attn = Attention(qkv, None, qkv, None, None, None, None, table, table, 64, 1e-5)
    layer = Layer(norm, attn, norm, mlp)
    assert prepare(layer) is layer
    for weight in ("qkv", "o"):
        packed = replace(attn, **{weight: quantize(torch.zeros(32, 64))})
        with pytest.raises(TypeError, match="a weight is packed; expected a dense"):
            prepare(replace(layer, attn=packed))


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "tokens"), [(5, 40), (32, 4)])
@KINDS
def test_experts_can_be_captured(kind, count, tokens):
    """The host is not asked: a replay takes other tokens, and fewer. Sorted or not."""
    sizes = {"count": count, "hidden": 256, "intermediate": 128}
    mlp = make_experts("cuda", kind, dtype=torch.bfloat16, **sizes)
    x, num_tokens = tokens_for(mlp, tokens), number(tokens, "cuda")
    experts(x, mlp, num_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, mlp, num_tokens)
    for some in (tokens, tokens // 2 + 1):
        x.copy_(tokens_for(mlp, tokens, seed=some))
        num_tokens.fill_(some)
        graph.replay()
        assert torch.equal(out[:some], experts(x, mlp, num_tokens)[:some])


SIZES = {
    "model_type": "qwen3_moe",
    "vocab_size": 101,
    "hidden_size": 64,
    "moe_intermediate_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("tokens", "form"), [(12, None), (1, "INT8, weights alone")])
def test_a_whole_model_computes_the_same(kernel_device, tokens, form):
    """Qwen3-MoE's, with and without experts in a layer."""
    config = FAMILIES["qwen3_moe"].config(SIZES)
    if form:
        number_format = replace(SCHEMES["int", 8, "channel"], inputs=False)
        names = [n for n in tensor_names(config) if ".attn.o" in n or ".experts." in n]
        config = replace(config, formats=dict.fromkeys(names, number_format))
    device = torch.device(kernel_device)
    source = RandomCheckpoint(config, dtype=torch.float32, device=device)

    def take(name: str):
        """Weights large enough for every part of a layer to matter."""
        weight = source[name]
        if isinstance(weight, Scaled):
            return replace(weight, scales=weight.scales * 10)
        assert isinstance(weight, torch.Tensor)
        return weight if "norm" in name or "embed" in name else weight * 10

    table = triton_ops(config, max_num_seqs=2, device=device)
    ids = torch.arange(tokens, device=device) * 7 % 101
    found = [build(config, take, each).logits(ids) for each in (table, ops.PLAIN)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
