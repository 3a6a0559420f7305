"""ops.py against transformers and closed forms, and the NumPy table against ops.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, Qwen3Config
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssExperts,
    GptOssMLP,
    GptOssTopKRouter,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from simplellm.checkpoint.mxfp4 import MXFP4, quantize
from simplellm.model import family_rules, moe, ops, ops_cpu, ops_numpy, rope
from simplellm.model.attention import QUERY_CHUNK, attention, visible
from simplellm.model.batch import KVGroup
from simplellm.model.feed_forward import route, swiglu
from simplellm.model.layers import Attention, Dense, Experts, Layer, SandwichNorm
from simplellm.model.ops import PLAIN
from simplellm.model.ops_cpu import QUERY_BLOCK, WINDOW_QUERY_BLOCK, prompt_attention
from simplellm.model.ops_numpy import FEW, NUMPY

# float32 sums over up to 700 keys in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(ours: Tensor, theirs: Tensor) -> float:
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    return error.item()


# Embeddings, norms and products


def test_embed_takes_rows_by_token_or_by_what_was_sampled() -> None:
    table = normal(9, 4)
    tokens = torch.tensor([3, -1, 8, -3, 0], dtype=torch.int32)
    previous = torch.tensor([5, 6, 7], dtype=torch.int32)
    assert torch.equal(ops.embed(tokens, previous, table), table[[3, 5, 8, 7, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_divides_by_the_root_mean_square(dtype) -> None:
    x, weight = (3 * normal(5, 64)).to(dtype), (1 + normal(64, seed=1)).to(dtype)
    x64 = x.double()
    scale = (x64.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    result = ops.rms_norm(x, weight, 1e-2)
    assert result.dtype == dtype
    expected = x64 * scale * weight.double()
    bits = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(result.double(), expected, rtol=bits, atol=0)


def test_rms_norm_is_that_of_qwen3() -> None:
    theirs = Qwen3RMSNorm(32, eps=1e-5)
    theirs.weight.data = 1 + normal(32)
    x = normal(3, 7, 32, seed=1)
    expected = theirs(x)
    torch.testing.assert_close(ops.rms_norm(x, theirs.weight, 1e-5), expected)


@pytest.mark.parametrize("parts", [None, 0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_adds_in_place(parts: int | None, dtype: torch.dtype) -> None:
    """``parts`` None is no update, 0 one of two dimensions."""
    x, weight = normal(4, 32).to(dtype), normal(32, seed=1).to(dtype)
    update = None
    summed = x.clone()
    if parts is not None:
        shape = (4, parts, 32) if parts else (4, 32)
        update = normal(*shape, seed=2).to(dtype if parts == 0 else torch.float32)
        summed = (x + (update.sum(1) if parts else update)).to(dtype)
    residual, normed = ops.add_norm(x, update, weight, 1e-5)
    assert residual is x
    torch.testing.assert_close(x, summed, rtol=0, atol=0)
    assert torch.equal(normed, ops.rms_norm(summed, weight, 1e-5))


def test_project_dequantizes_what_is_packed() -> None:
    weight, x, bias = normal(64, 96), normal(5, 96, seed=1), normal(64, seed=2)
    packed = quantize(weight)
    expected = x @ packed.dequantize(torch.float32).T + bias
    torch.testing.assert_close(ops.PLAIN.project(x, packed, bias), expected)
    torch.testing.assert_close(ops.PLAIN.project(x, weight, None), x @ weight.T)


def test_head_fills_the_logits_and_the_lower_id_wins() -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16()
    weight = torch.tensor([[0.0, 1.0], [2.0, 3.0], [2.0, 1.0], [1.0, 3.0]]).bfloat16()
    logits = torch.full((2, 4), torch.nan)
    best = ops.head(hidden, weight, logits)
    assert best.dtype == torch.int32 and best.tolist() == [1, 1]
    assert logits.tolist() == [[0, 2, 2, 1], [1, 3, 1, 3]]


def test_draw_takes_the_best_of_rows_without_temperature() -> None:
    logits = normal(64, 1000)
    best = logits.argmax(-1).int()
    temperature = torch.tensor([0.0, 1.0] * 32)
    seeds, steps = torch.arange(64), torch.arange(64)
    drawn = ops.draw(logits, best, temperature, seeds, steps)
    assert drawn.dtype == torch.int32
    assert torch.equal(drawn[::2], best[::2])
    assert (drawn[1::2] != best[1::2]).float().mean() > 0.5
    alone = ops.draw(logits[3:4], best[3:4], temperature[3:4], seeds[3:4], steps[3:4])
    assert alone[0] == drawn[3]


# Rotation, and the way into the pages


def angles(count: int, dim: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of the first positions."""
    frequencies = theta ** (-torch.arange(0, dim, 2) / dim)
    turned = torch.arange(count)[:, None] * frequencies
    return turned.cos(), turned.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotates_as_transformers_does(dtype):
    q, k = normal(300, 6, 64).to(dtype), normal(300, 2, 64, seed=1).to(dtype)
    cos, sin = angles(300, 64)
    mine = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
    # In float32: transformers rounds cos, sin and every product to bf16, we only the
    # result.
    heads_first = [x.float().transpose(0, 1)[None] for x in (q, k)]
    theirs = apply_rotary_pos_emb(*heads_first, cos[None], sin[None])
    for x, y in zip(mine, theirs, strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, y[0].transpose(0, 1).to(dtype))


def test_scores_depend_on_the_distance_alone():
    q, k = normal(1, 1, 64), normal(1, 1, 64, seed=1)
    cos, sin = angles(6000, 64)

    def score(query: int, key: int) -> float:
        turned = [
            rope.rotate(x, cos[None, position], sin[None, position])
            for x, position in ((q, query), (k, key))
        ]
        return (turned[0] * turned[1]).sum().item()

    # The angles are float32: at position 5,000 the fastest pair's is off by up to
    # 2.4e-4 radians.
    assert score(5137, 5000) == pytest.approx(score(137, 0), abs=2e-2)
    assert abs(score(138, 0) - score(137, 0)) > 0.1


def attention_weights(
    heads: int = 6, kv_heads: int = 2, dim: int = 16, hidden: int = 40, **changes
) -> Attention:
    """Random weights without norms of q and k, for 64 positions."""
    width = (heads + 2 * kv_heads) * dim
    cos, sin = angles(64, dim)
    attn = Attention(
        qkv=normal(width, hidden) / hidden**0.5,
        qkv_bias=normal(width, seed=1),
        o=normal(hidden, heads * dim, seed=2) / (heads * dim) ** 0.5,
        o_bias=normal(hidden, seed=3),
        sinks=2 * normal(heads, seed=4),
        q_norm=None,
        k_norm=None,
        cos=cos,
        sin=sin,
        head_dim=dim,
        eps=1e-5,
    )
    return replace(attn, **changes)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_cache_norms_turns_and_writes(norms, bias, dtype) -> None:
    attn = attention_weights()
    if norms:
        attn = replace(attn, q_norm=1 + normal(16), k_norm=1 + normal(16, seed=8))
    attn = attn if bias else replace(attn, qkv_bias=None)
    qkv = normal(5, 10 * 16, seed=5).to(dtype)
    positions = torch.tensor([0, 7, 8, 63, 2], dtype=torch.int32)
    slots = torch.tensor([4, -1, 9, 0, 11], dtype=torch.int32)
    keys, values = (torch.full((3, 4, 2, 16), -99.0, dtype=dtype) for _ in range(2))
    q = ops.rope_and_cache(qkv, attn, positions, keys, values, slots)
    x = qkv.float()
    if attn.qkv_bias is not None:
        x = x + attn.qkv_bias
    x = x.unflatten(1, (10, 16))
    turned = x[:, :8]
    if norms:
        weights = torch.stack([attn.q_norm] * 6 + [attn.k_norm] * 2)
        scale = (turned.square().mean(-1, keepdim=True) + attn.eps).rsqrt()
        turned = turned * scale * weights
    turned = rope.rotate(turned, attn.cos[positions], attn.sin[positions])
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(q, turned[:, :6].to(dtype), **exact)
    for pages, rows in ((keys, turned[:, 6:]), (values, x[:, 8:])):
        flat = pages.flatten(0, 1)
        torch.testing.assert_close(flat[[4, 9, 0, 11]], rows[[0, 2, 3, 4]].to(dtype))
        untouched = [i for i in range(12) if i not in (4, 9, 0, 11)]
        assert (flat[untouched] == -99).all(), "slot -1 is written nowhere"


def test_rope_and_cache_sums_parts() -> None:
    attn, slots = attention_weights(), torch.arange(5).int()
    qkv = normal(5, 3, 160, seed=5)
    found = []
    for x in (qkv, qkv.sum(1)):
        pages = torch.zeros(2, 2, 4, 2, 16)
        found.append(
            [ops.rope_and_cache(x, attn, slots, pages[0], pages[1], slots), pages]
        )
    torch.testing.assert_close(*found)


def test_an_fp8_cache_holds_divided_and_rounded_numbers() -> None:
    scales, dtype = (0.5, 0.004), torch.float8_e4m3fn
    attn, slots = attention_weights(dtype=torch.float32), torch.arange(5).int()
    qkv = normal(5, 160, seed=5)
    exact = torch.zeros(2, 2, 4, 2, 16)
    q = ops.rope_and_cache(qkv, attn, slots, exact[0], exact[1], slots)
    pages = torch.zeros(2, 2, 4, 2, 16, dtype=dtype)
    attn = replace(attn, kv_scales=scales)
    scaled = ops.rope_and_cache(qkv, attn, slots, pages[0], pages[1], slots)
    torch.testing.assert_close(scaled, q * scales[0])
    assert (exact[1] / scales[1]).abs().max() > 448, "some are too large"
    for stored, numbers, scale in zip(pages, exact, scales, strict=True):
        wanted = (numbers * (1 / scale)).clamp(-448, 448).to(dtype)
        assert torch.equal(stored.float(), wanted.float())


# Attention of one sequence


def random_qkv(
    queries: int, keys: int, heads: int, kv_heads: int, dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and sinks that make attention peaked, as trained heads are."""
    q = 1.7 * normal(queries, heads, dim, seed=4 * seed)
    k = 1.7 * normal(keys, kv_heads, dim, seed=4 * seed + 1)
    v = normal(keys, kv_heads, dim, seed=4 * seed + 2)
    return q, k, v, 2 * normal(heads, seed=4 * seed + 3)


def slow_attention(q, k, v, sinks, window):
    """The definition, one query and one head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    num_queries, num_heads, dim = q.shape
    out = torch.zeros_like(q)
    for i in range(num_queries):
        position = k.shape[0] - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(num_heads):
            kv = h // (num_heads // k.shape[1])
            scores = k[first : position + 1, kv] @ q[i, h] / dim**0.5
            terms = scores.exp()
            total = terms.sum() + (0 if sinks is None else sinks[h].double().exp())
            out[i, h] = (terms / total) @ v[first : position + 1, kv]
    return out


def transformers_attention(q, k, v, sinks, window):
    """transformers' eager attention, which wants [1, heads, tokens, dim]."""
    module = SimpleNamespace(
        num_key_value_groups=q.shape[1] // k.shape[1], sinks=sinks, training=False
    )
    num_queries, num_keys = q.shape[0], k.shape[0]
    rows = torch.arange(num_keys - num_queries, num_keys)[:, None]
    columns = torch.arange(num_keys)
    mask = columns <= rows
    if window is not None:
        mask &= columns >= rows - (window - 1)
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    out, _ = eager_attention_forward(
        module, q, k, v, bias[None, None].to(q.dtype), scaling=scale
    )
    return out[0]


@pytest.mark.parametrize("window", [None, 1, 5, 128])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "dim"),
    [(1, 1, 2, 1, 8), (1, 300, 8, 2, 64), (300, 300, 6, 3, 22), (70, 700, 4, 4, 16)],
)
def test_equals_transformers(queries, keys, heads, kv_heads, dim, window):
    q, k, v, sinks = random_qkv(queries, keys, heads, kv_heads, dim)
    expected = transformers_attention(q, k, v, sinks, window)
    result = attention(q, k, v, sinks, window=window)
    torch.testing.assert_close(result, expected, **TOLERANCE)


@settings(max_examples=25)
@given(
    keys=st.integers(1, 24),
    queries=st.integers(1, 24),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    window=st.none() | st.integers(1, 30),
    with_sinks=st.booleans(),
    seed=st.integers(0, 9),
)
def test_equals_the_definition(
    keys, queries, kv_heads, group, window, with_sinks, seed
):
    queries = min(queries, keys)
    q, k, v, sinks = random_qkv(queries, keys, kv_heads * group, kv_heads, 6, seed)
    maybe_sinks = sinks if with_sinks else None
    expected = slow_attention(q, k, v, maybe_sinks, window).float()
    result = attention(q, k, v, maybe_sinks, window=window)
    torch.testing.assert_close(result, expected, **TOLERANCE)


def test_without_sinks_equals_torch():
    q, k, v, _ = random_qkv(90, 90, 6, 2, 32)
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    expected = functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, enable_gqa=True
    )
    result = attention(q, k, v, None)
    torch.testing.assert_close(result, expected.transpose(0, 1), **TOLERANCE)


def test_a_sink_is_a_sigmoid_on_the_output():
    q, k, v, sinks = random_qkv(40, 40, 6, 2, 32)
    k_of_head = k.repeat_interleave(3, dim=1)
    scores = torch.einsum("qhd,shd->qhs", q, k_of_head) / 32**0.5
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)[:, None]
    lse = scores.masked_fill(future, -torch.inf).logsumexp(dim=-1)  # [Q, H]
    share = torch.sigmoid(lse - sinks)[..., None]
    expected = attention(q, k, v, None) * share
    torch.testing.assert_close(attention(q, k, v, sinks), expected, **TOLERANCE)
    assert share.min() < 0.2 and share.max() > 0.8


def test_the_window_is_128_keys():
    positions = torch.arange(300)
    mask = visible(positions, positions, 128)
    for query in (0, 126, 127, 128, 299):
        seen = mask[query].nonzero().flatten().tolist()
        assert seen == list(range(max(0, query - 127), query + 1))
    assert torch.equal(
        visible(positions, positions, None), torch.ones(300, 300).tril() > 0
    )


@pytest.mark.parametrize("window", [None, 128])
def test_chunks_of_queries_do_not_show(window):
    """A prompt of more than two chunks equals its rows asked for one at a time."""
    length = 2 * QUERY_CHUNK + 7
    q, k, v, sinks = random_qkv(length, length, 4, 2, 16)
    together = attention(q, k, v, sinks, window=window)
    for row in (0, QUERY_CHUNK - 1, QUERY_CHUNK, 2 * QUERY_CHUNK, length - 1):
        seen = slice(row + 1)
        alone = attention(q[row : row + 1], k[seen], v[seen], sinks, window=window)
        torch.testing.assert_close(together[row : row + 1], alone, **TOLERANCE)


def test_nothing_from_the_future_or_from_outside_the_window():
    q, k, v, sinks = random_qkv(200, 200, 4, 2, 16)
    result = attention(q, k, v, sinks, window=30)
    k[150:], v[150:] = torch.nan, torch.nan
    k[:100], v[:100] = 99.0, 99.0
    changed = attention(q[:150], k[:150], v[:150], sinks, window=30)
    # Rows 129 to 149 see keys 100 to 149 alone.
    torch.testing.assert_close(changed[129:150], result[129:150], **TOLERANCE)
    assert (changed[128] - result[128]).abs().max() > 0.1


def test_bf16_is_computed_in_float32():
    q, k, v, sinks = (x.bfloat16() for x in random_qkv(150, 150, 8, 2, 64))
    exact = slow_attention(q, k, v, sinks, 64)
    result = attention(q, k, v, sinks, window=64)
    assert result.dtype == torch.bfloat16
    # Only the result is rounded: half a unit in the last of bf16's 8 significant bits,
    # plus float32's own error where the sum cancels.
    error = (result.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all()
    # transformers rounds the scores and the probabilities as well.
    other = transformers_attention(q, k, v, sinks, 64)
    assert (other.double() - exact).norm() > 2 * (result.double() - exact).norm()


def test_huge_scores_do_not_overflow():
    q, k, v, sinks = random_qkv(20, 20, 4, 2, 16)
    result = attention(q * 1e4, k * 1e4, v, sinks * 1e4)
    assert torch.isfinite(result).all()


def test_scale():
    q, k, v, sinks = random_qkv(20, 20, 4, 2, 16)
    expected = attention(q * 4 * 0.1, k, v, sinks)
    result = attention(q, k, v, sinks, scale=0.1)
    torch.testing.assert_close(result, expected, **TOLERANCE)


# Prompts on a CPU


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300, 5000])
def test_prompts_on_a_cpu_equal_the_reference(heads, with_sinks, window) -> None:
    """A block of queries and less and more, with and without keys before them."""
    for queries in (1, 7, WINDOW_QUERY_BLOCK + 1, QUERY_BLOCK, 2 * QUERY_BLOCK + 9):
        for before in (0, 1, 600):
            before = min(before, (window or before + 1) - 1)
            sizes = queries, queries + before, heads[0], heads[1], 16
            q, k, v, logits = random_qkv(*sizes)
            sinks = logits if with_sinks else None
            expected = attention(q, k, v, sinks, window=window)
            found = prompt_attention(q, k, v, sinks, window=window)
            torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("window", [None, 64])
def test_prompts_on_a_cpu_are_computed_in_float32(window) -> None:
    """As `test_bf16_is_computed_in_float32` has it, and without an overflow."""
    q, k, v, sinks = (x.bfloat16() for x in random_qkv(300, 400, 8, 2, 64))
    exact = slow_attention(q, k, v, sinks, window)
    result = prompt_attention(q, k, v, sinks, window=window)
    assert result.dtype == torch.bfloat16
    error = (result.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all()
    for factor in (1e4, -1e4):
        huge = prompt_attention(q * 1e4, k * 1e4, v, sinks * factor, window=window)
        assert torch.isfinite(huge).all()


def test_prompts_on_a_cpu_do_not_write_their_scores() -> None:
    """No tensor is as large as the scores of 128 queries, the reference's least."""
    q, k, v, sinks = random_qkv(QUERY_BLOCK, 4000, 8, 2, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        prompt_attention(q, k, v, sinks)
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert largest < 4 * len(k) * QUERY_CHUNK


# Attention over pages

ATTENDS = {ops.attend: "ops", ops_cpu.attend: "cpu", ops_numpy.attend: "numpy"}


class Pages:
    """Sequences in pages in a random order; what is no position of theirs is NaN.

    ``decodes`` are the lengths of sequences with one new token, ``chunks`` those of the
    others with how many are new. A length of 0 is padding.
    """

    def __init__(
        self,
        decodes: Sequence[int],
        chunks: Sequence[tuple[int, int]],
        *,
        window: int | None = None,
        page_size: int = 4,
        heads: tuple[int, int] = (6, 2),
        dim: int = 16,
        seed: int = 0,
    ) -> None:
        self.window, self.heads = window, heads
        self.lengths = [*decodes, *(length for length, _ in chunks)]
        self.news = [1] * len(decodes) + [new for _, new in chunks]
        starts = [n - new for n, new in zip(self.lengths, self.news, strict=True)]
        if window is None:
            first = [0 for _ in starts]
        else:
            first = [max(0, start + 1 - window) // page_size for start in starts]
        pages = [-(-length // page_size) for length in self.lengths]
        generator = torch.Generator().manual_seed(seed)
        order = iter(torch.randperm(sum(pages) + 3, generator=generator).tolist())
        rows, width = len(pages), max(1, *pages) + 1
        tables = torch.zeros(rows, width, dtype=torch.int32)
        shape = (sum(pages) + 3, page_size, heads[1], dim)
        self.keys, self.values = (torch.full(shape, torch.nan) for _ in range(2))
        self.parts = []
        slots: list[int] = []
        for row, (length, new) in enumerate(zip(self.lengths, self.news, strict=True)):
            q, k, v, sinks = random_qkv(new, length, *heads, dim, seed=seed + row)
            self.parts.append((q, k, v))
            self.sinks = sinks
            for index in range(first[row], pages[row]):
                page = next(order)
                tables[row, index - first[row]] = page
                inside = slice(index * page_size, min((index + 1) * page_size, length))
                for memory, x in ((self.keys, k), (self.values, v)):
                    memory[page, : inside.stop - inside.start] = x[inside]
            for position in range(starts[row], length) if length else [-1]:
                index, place = divmod(position, page_size)
                page = int(tables[row, index - first[row]]) if length else 0
                slots.append(page * page_size + place if length else -1)
        self.q = torch.cat([q for q, _, _ in self.parts])
        queries = [sum(self.news[:row]) for row in range(rows + 1)]
        self.group = KVGroup(
            slots=torch.tensor(slots, dtype=torch.int32),
            tables=tables,
            offsets=torch.tensor(first, dtype=torch.int32) * page_size,
            lengths=torch.tensor(self.lengths, dtype=torch.int32),
            query_start_loc=torch.tensor(queries, dtype=torch.int32),
            decodes=len(decodes),
            window=window,
            page_size=page_size,
        )

    def attend(
        self, attend: Callable[..., Tensor], sinks: Tensor | None
    ) -> list[Tensor]:
        """What ``attend`` gives each sequence."""
        found = attend(self.q, self.keys, self.values, self.group, sinks)
        return list(found.split(self.news))

    def expected(self, sinks: Tensor | None) -> list[Tensor]:
        """The same from contiguous keys and values, sequence by sequence."""
        return [
            attention(q, k, v, sinks, window=self.window) if len(k) else q * 0
            for q, k, v in self.parts
        ]


def lengths_of_chunks() -> st.SearchStrategy[tuple[int, int]]:
    sizes = st.tuples(st.integers(1, 60), st.integers(1, 60))
    return sizes.map(lambda pair: (max(pair), min(pair)))


@pytest.mark.parametrize("attend", ATTENDS, ids=ATTENDS.get)
@settings(max_examples=60)
@given(
    decodes=st.lists(st.integers(1, 90), max_size=5),
    chunks=st.lists(lengths_of_chunks(), max_size=3),
    window=st.none() | st.integers(1, 40),
    page_size=st.sampled_from([1, 2, 3, 4, 7, 16, 64]),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (8, 1)]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 9),
)
def test_pages_equal_contiguous_keys(
    attend, decodes, chunks, window, page_size, heads, with_sinks, seed
) -> None:
    """Decodes and chunks in one batch; nothing of the NaN around them is read."""
    if not decodes and not chunks:
        return
    pages = Pages(
        decodes, chunks, window=window, page_size=page_size, heads=heads, seed=seed
    )
    sinks = pages.sinks if with_sinks else None
    found, expected = pages.attend(attend, sinks), pages.expected(sinks)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)


@pytest.mark.parametrize("attend", ATTENDS, ids=ATTENDS.get)
@pytest.mark.parametrize("window", [None, 128])
def test_long_contexts_are_not_padded_to_the_longest(attend, window) -> None:
    """Beside short ones, and beyond what is read together."""
    pages = Pages(
        [5, 700, 255, 256, 257, 90, 4200, 4096],
        [(300, 200)],
        window=window,
        heads=(2, 1),
    )
    found = pages.attend(attend, pages.sinks)
    for mine, other in zip(found, pages.expected(pages.sinks), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
    slots = sum(read.slots.size for read in pages.group.gather_plans)
    seen = [min(length, window or length) for length in pages.lengths[:-1]]
    assert slots <= 2 * sum(max(length, 64) for length in seen)


@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_padding_rows_are_zero(with_sinks, window) -> None:
    pages = Pages([9, 0, 1, 0], [], window=window)
    sinks = pages.sinks if with_sinks else None
    found = pages.attend(ops.attend, sinks)
    for mine, other in zip(found, pages.expected(sinks), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
    none = Pages([0, 0], [], window=window)
    assert torch.equal(torch.cat(none.attend(ops.attend, sinks)), none.q * 0)


def test_bf16_pages_are_computed_in_float32() -> None:
    pages = Pages([50, 7], [(40, 12)], window=16)
    rounded = [[x.bfloat16() for x in part] for part in pages.parts]
    found = ops.attend(
        pages.q.bfloat16(),
        pages.keys.bfloat16(),
        pages.values.bfloat16(),
        pages.group,
        pages.sinks,
    )
    assert found.dtype == torch.bfloat16
    exact = [
        slow_attention(q, k, v, pages.sinks, pages.window).float()
        for q, k, v in rounded
    ]
    torch.testing.assert_close(found.float(), torch.cat(exact), rtol=2**-8, atol=1e-5)


# The router


HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LIMIT, ALPHA = 96, 64, 16, 4, 7.0, 1.702
# Relative L2. float32 measures 3e-7. bfloat16 measures 5e-3: transformers rounds a
# product before it adds the bias, we after, and a bfloat16 has 8 bits.
MOE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LIVE = torch.tensor([0], dtype=torch.int32)  # the plain operations compute all tokens


def oracle(seed: int = 0, std: float = 1.0) -> GptOssMLP:
    """transformers' MLP with random weights, wide enough to reach every clamp.

    Those of the router are a tenth, so that each token hears all its experts.
    """
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    mlp = GptOssMLP(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in mlp.parameters():
        parameter.data.normal_(0, 0.5 * std, generator=generator)
        parameter.requires_grad = False
    mlp.router.weight.data /= 10
    return mlp


def tokens(count: int, seed: int = 1) -> Tensor:
    return normal(count, HIDDEN, seed=seed)


def ours(mlp: GptOssMLP) -> Experts:
    """The same weights; transformers keeps them [E, in, out]."""
    theirs: GptOssExperts = mlp.experts
    return Experts(
        router=mlp.router.weight,
        router_bias=mlp.router.bias,
        gate_up=theirs.gate_up_proj.transpose(1, 2).contiguous(),
        gate_up_bias=theirs.gate_up_proj_bias,
        down=theirs.down_proj.transpose(1, 2).contiguous(),
        down_bias=theirs.down_proj_bias,
        top_k=TOP_K,
        limit=LIMIT,
        alpha=ALPHA,
    )


def packed(mlp: Experts) -> Experts:
    """The same in MXFP4, as far as that has room for them."""
    assert isinstance(mlp.gate_up, Tensor) and isinstance(mlp.down, Tensor)
    return replace(mlp, gate_up=quantize(mlp.gate_up), down=quantize(mlp.down))


def choosing(mlp: Experts, chosen: list[dict[int, float]]) -> tuple[Tensor, Experts]:
    """Tokens, and a router that gives each of them these experts and weights."""
    hidden, count = mlp.down.shape[1], mlp.down.shape[0]
    router = torch.full((count, hidden), -99.0)
    for token, weights in enumerate(chosen):
        for expert, weight in weights.items():
            router[expert, token] = torch.tensor(weight).log()
    x = torch.eye(hidden)[: len(chosen)]
    top_k = len(chosen[0])
    return x, replace(mlp, router=router, router_bias=None, top_k=top_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_matches_transformers(dtype):
    router: GptOssTopKRouter = oracle().router.to(dtype)
    x = tokens(300).to(dtype)
    _, scores, indices = router(x)
    expert_ids, expert_weights = route(x, router.weight, router.bias, TOP_K)
    assert torch.equal(expert_ids, indices)
    assert expert_weights.dtype == dtype
    assert relative(expert_weights, scores) < MOE_TOLERANCE[dtype]


def test_route_is_softmax_over_the_chosen_logits():
    weight, bias = torch.eye(4), torch.tensor([0.0, 0.0, 0.5, 0.0])
    expert_ids, expert_weights = route(
        torch.tensor([[3.0, 2.0, 1.0, -1.0]]), weight, bias, 2
    )
    assert expert_ids.tolist() == [[0, 1]]
    expected = torch.tensor([[3.0, 2.0]]).softmax(-1)  # 0.731, 0.269
    torch.testing.assert_close(expert_weights, expected)
    # What the others scored does not matter, as it would with a softmax over all.
    _, again = route(torch.tensor([[3.0, 2.0, -9.0, -9.0]]), weight, bias, 2)
    assert torch.equal(again, expert_weights)


def test_route_uses_its_bias():
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    expert_ids, _ = route(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.eye(4), bias, 2)
    assert expert_ids.tolist() == [[3, 0]]


# The activation


def test_swiglu_by_hand():
    """Each of gate and up below, within and beyond the limits."""
    pairs = [
        *[(g, u) for g in (-20.0, -1.0, 0.5, 9.0) for u in (-20.0, -1.0, 0.5, 9.0)]
    ]
    gate_up = torch.tensor([value for pair in pairs for value in pair])
    gate = torch.tensor([min(g, 7.0) for g, _ in pairs]).double()
    up = torch.tensor([max(-7.0, min(u, 7.0)) for _, u in pairs]).double()
    expected = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    torch.testing.assert_close(swiglu(gate_up, 7.0, 1.702), expected.float())


def test_swiglu_does_not_clamp_the_gate_from_below():
    """A gate of -8 gives -8 * sigmoid(-0.8) with alpha 0.1, not -7 * sigmoid(-0.7)."""
    out = swiglu(torch.tensor([-8.0, 0.0]), 7.0, 0.1)
    torch.testing.assert_close(out, -8 * torch.sigmoid(torch.tensor([-0.8])))


def test_swiglu_matches_transformers():
    module = oracle().experts
    gate_up = 8 * tokens(50)
    theirs = module._apply_gate(gate_up)
    assert (
        relative(swiglu(gate_up, LIMIT, ALPHA), theirs) < MOE_TOLERANCE[torch.float32]
    )
    gate_up = gate_up.bfloat16()
    theirs = module._apply_gate(gate_up)
    assert relative(swiglu(gate_up, LIMIT, ALPHA), theirs) < 4e-3


# The experts


def test_inputs_reach_every_clamp():
    """The comparisons below would not see a missing clamp if nothing exceeded it."""
    module = oracle().experts
    gate_up = tokens(300) @ module.gate_up_proj + module.gate_up_proj_bias[:, None]
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    for beyond in (gate > LIMIT, gate < -LIMIT, up > LIMIT, up < -LIMIT):
        assert beyond.float().mean() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 17, 300])
@pytest.mark.parametrize("seed", range(2))
def test_experts_match_transformers(dtype, count, seed):
    mlp = oracle(seed).to(dtype)
    x = tokens(count, seed + 10).to(dtype)
    theirs, _ = mlp(x[None])
    out = moe.experts(x, ours(mlp), LIVE)
    assert out.dtype == dtype
    assert relative(out, theirs[0]) < MOE_TOLERANCE[dtype]


def test_packed_experts_match_transformers_on_their_values():
    mlp = oracle()
    weights = packed(ours(mlp))
    for theirs, mine in (
        (mlp.experts.gate_up_proj, weights.gate_up),
        (mlp.experts.down_proj, weights.down),
    ):
        assert isinstance(mine, MXFP4)
        theirs.data = mine.dequantize(torch.float32).transpose(1, 2)
    x = tokens(40)
    theirs, _ = mlp(x[None])
    assert relative(moe.experts(x, weights, LIVE), theirs[0]) < 1e-5


def test_only_touched_experts_are_dequantized_one_at_a_time(monkeypatch):
    dequantized = []
    original = MXFP4.dequantize

    def count(self, dtype=torch.bfloat16):
        dequantized.append(self.shape)
        return original(self, dtype)

    monkeypatch.setattr(MXFP4, "dequantize", count)
    chosen = [{3: 0.5, 9: 0.5}, {9: 0.5, 15: 0.5}, {3: 0.5, 15: 0.5}]
    x, weights = choosing(packed(ours(oracle())), chosen)
    moe.experts(x, weights, LIVE)
    assert dequantized == [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)] * 3


@pytest.mark.parametrize("table", [PLAIN, NUMPY], ids=lambda table: table.name)
def test_weights_apply_after_the_down_bias(table):
    """With zero weights a token gets its experts' biases times the router's weights."""
    zeros = Experts(
        router=torch.zeros(4, 3),
        router_bias=None,
        gate_up=torch.zeros(4, 2, 3),
        gate_up_bias=None,
        down=torch.zeros(4, 3, 1),
        down_bias=torch.arange(1.0, 5.0)[:, None].expand(4, 3),  # e says e + 1
        top_k=2,
        limit=7.0,
        alpha=1.702,
    )
    x, weights = choosing(zeros, [{1: 0.75, 3: 0.25}, {2: 0.5, 0: 0.5}])
    out = table.experts(x, weights, LIVE)
    torch.testing.assert_close(out, torch.tensor([[2.5] * 3, [2.0] * 3]))


def test_no_tokens():
    assert moe.experts(tokens(0), ours(oracle()), LIVE).shape == (0, HIDDEN)


@pytest.mark.parametrize("table", [PLAIN, NUMPY], ids=lambda table: table.name)
def test_neighbors_change_nothing_but_the_rounding_of_the_matmul(table):
    x, weights = tokens(33), ours(oracle())
    whole = table.experts(x, weights, LIVE)
    for i in (0, 16, 32):
        alone = table.experts(x[i : i + 1], weights, LIVE)
        assert relative(whole[i : i + 1], alone) < 1e-6


def test_neighbors_change_nothing_at_all_when_rows_are_multiplied_alone(monkeypatch):
    """The order of the sums is ours and fixed; only a matmul may round by its shape."""

    def row_by_row(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([torch.mv(weight, row)[None] + bias for row in x])

    def routed_alone(x: Tensor, *args) -> list[Tensor]:
        rows = [route(row[None], *args) for row in x]
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    monkeypatch.setattr(moe, "linear", row_by_row)
    monkeypatch.setattr(family_rules, "route", routed_alone)
    x, weights = tokens(33), ours(oracle())
    whole = moe.experts(x, weights, LIVE)
    for rows in ([5], [32, 0], [9, 8, 7, 6, 5]):
        assert torch.equal(moe.experts(x[rows], weights, LIVE), whole[rows])


# A network that every token goes through


def dense_weights(hidden: int = 48, inner: int = 80) -> Dense:
    gate_up = normal(2 * inner, hidden, seed=1) / hidden**0.5
    return Dense(gate_up, None, normal(hidden, inner, seed=2) / inner**0.5, None)


def test_dense_is_the_mlp_of_qwen3() -> None:
    mlp = dense_weights()
    theirs = Qwen3MLP(Qwen3Config(hidden_size=48, intermediate_size=80))
    theirs.gate_proj.weight.data, theirs.up_proj.weight.data = mlp.gate_up.chunk(2)
    theirs.down_proj.weight.data = mlp.down
    x = normal(7, 48)
    expected = theirs(x).detach()
    torch.testing.assert_close(family_rules.dense(x, mlp), expected)
    torch.testing.assert_close(mlp.forward(PLAIN, x, LIVE), expected)


def test_dense_adds_its_biases() -> None:
    mlp = dense_weights()
    first, second = normal(160, seed=3), normal(48, seed=4)
    mlp = replace(mlp, gate_up_bias=first, down_bias=second)
    x = normal(7, 48)
    gate, up = (x @ mlp.gate_up.T + first).chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * up) @ mlp.down.T + second
    torch.testing.assert_close(family_rules.dense(x, mlp), expected)


# The NumPy table: float32 in another order than PyTorch's

COUNTS = (1, 2, 17, FEW, FEW + 1, 150)


def layers(mlp: Experts | Dense, hidden: int) -> tuple[Layer, Layer]:
    """A layer, and as the NumPy table wants it."""
    norms = 1 + normal(hidden, seed=20), 1 + normal(hidden, seed=21)
    attn = attention_weights(hidden=hidden)
    layer = Layer(norms[0], attn, norms[1], mlp)
    return layer, NUMPY.prepare(layer)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("pack", [False, True])
def test_numpy_computes_what_pytorch_does(count: int, pack: bool) -> None:
    """Every operation but attention over pages, which is tested with that of ops."""
    mlp = ours(oracle())
    layer, prepared = layers(packed(mlp) if pack else mlp, HIDDEN)
    weights = (layer, PLAIN), (prepared, NUMPY)
    results = []
    for mine, table in weights:
        found: dict[str, Tensor] = {}
        ids = torch.arange(count, dtype=torch.int32) % 50
        embedding = normal(50, HIDDEN, seed=30)
        previous = torch.tensor([9, 8], dtype=torch.int32)
        x = table.embed(ids, previous, embedding)
        found["embed"] = x.clone()
        ids = torch.where(ids % 3 == 0, -1 - ids % 2, ids)
        found["embed what was sampled"] = table.embed(ids, previous, embedding)
        residual, h = table.add_norm(x, None, mine.attn_norm, 1e-5)
        assert residual is x
        found["norm"] = h.clone()
        qkv = table.project(h, mine.attn.qkv, None)
        found["project"] = qkv.clone()
        keys, values = torch.zeros(2, 70, 4, 2, 16)
        slots = torch.randperm(280, generator=torch.Generator().manual_seed(1))[:count]
        q = table.rope_and_cache(
            qkv, mine.attn, torch.arange(count).int() % 64, keys, values, slots.int()
        )
        found |= {"q": q, "keys": keys, "values": values}
        update = table.project(q.flatten(1), mine.attn.o, mine.attn.o_bias)
        found["project with a bias"] = update.clone()
        residual, h = table.add_norm(x, update, mine.mlp_norm, 1e-5)
        assert residual is x
        found |= {"sum": residual.clone(), "norm of a sum": h.clone()}
        found["experts"] = mine.mlp.forward(table, h, LIVE)
        logits = torch.full((count, 50), torch.nan)
        found["best"] = table.head(h, embedding, logits)
        found["logits"] = logits
        results.append(found)
    theirs, numpys = results
    for name, expected in theirs.items():
        assert numpys[name].dtype == expected.dtype, name
        if expected.dtype == torch.int32:
            assert torch.equal(numpys[name], expected), name
        else:
            assert relative(numpys[name], expected) < 1e-5, name


def test_numpy_takes_heads_with_norms_and_dense_layers() -> None:
    norms = {"q_norm": 1 + normal(16), "k_norm": 1 + normal(16, seed=1)}
    layer, prepared = layers(dense_weights(), 48)
    x = normal(5, 48)
    torch.testing.assert_close(NUMPY.dense(x, prepared.mlp), PLAIN.dense(x, layer.mlp))
    found = []
    for mine, table in ((layer, PLAIN), (prepared, NUMPY)):
        attn, pages = replace(mine.attn, **norms), torch.zeros(2, 4, 2, 2, 16)
        slots = torch.arange(5).int()
        qkv = table.project(x, attn.qkv, None)
        q = table.rope_and_cache(qkv, attn, slots, pages[0], pages[1], slots)
        found.append([q, pages])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("count", [1, 5, ops_numpy.FEW + 1])
def test_numpy_norms_what_is_added(count: int) -> None:
    norm = SandwichNorm(1 + normal(48), 1 + normal(48, seed=1))
    found = []
    for table in (PLAIN, NUMPY):
        x, update = normal(count, 48, seed=2), normal(count, 48, seed=3)
        before = update.clone()
        found.append([*table.add_norm(x, update, norm, 1e-5), x])
        assert torch.equal(update, before)
    torch.testing.assert_close(*found)


def test_numpy_keeps_large_gates_and_equal_logits() -> None:
    """exp overflows where a gate is far below 0; of equal logits the lower id wins."""
    gate_up = torch.tensor([[-500.0, 3.0, 500.0, -500.0, 0.0, 500.0]])
    found = torch.from_numpy(ops_numpy.swiglu_few(gate_up.numpy(), LIMIT, ALPHA))
    torch.testing.assert_close(found, swiglu(gate_up, LIMIT, ALPHA))
    logits = torch.zeros(1, 4)
    weight = torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    assert NUMPY.head(torch.ones(1, 1), weight, logits).tolist() == [1]
