"""attention.py against transformers, torch's own attention and closed forms."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from simplellm.attention import QUERY_CHUNK, NoCache, attention, visible

# float32 sums over up to 700 keys in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


def random_qkv(
    queries: int, keys: int, heads: int, kv_heads: int, dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and sinks that make attention peaked, as trained heads are."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = 1.7 * normal(queries, heads, dim), 1.7 * normal(keys, kv_heads, dim)
    return q, k, normal(keys, kv_heads, dim), 2 * normal(heads)


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


@settings(max_examples=25, deadline=None)
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


def test_packed_sequences_do_not_see_each_other():
    lengths = [3, 200, 1]
    q, k, v, sinks = random_qkv(204, 204, 4, 2, 16)
    packed = NoCache(lengths).attend(0, q, k, v, sinks, 128)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = attention(q[rows], k[rows], v[rows], sinks, window=128)
        assert torch.equal(packed[rows], alone)
        start += length


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_lengths_must_be_positive(lengths):
    with pytest.raises(ValueError, match="expected positive"):
        NoCache(lengths)


def test_lengths_must_add_up():
    q, k, v, sinks = random_qkv(5, 5, 4, 2, 16)
    with pytest.raises(ValueError, match="5 packed tokens; expected 6"):
        NoCache([4, 2]).attend(0, q, k, v, sinks, None)


def test_shapes_that_do_not_fit():
    q, k, v, sinks = random_qkv(5, 5, 4, 2, 16)
    with pytest.raises(ValueError, match="expected k and v of one shape"):
        attention(q, k, v[:4], sinks)
    with pytest.raises(ValueError, match="expected k and v of one shape"):
        attention(q, k[:4], v[:4], sinks)
    with pytest.raises(ValueError, match="3 query heads do not divide among 2"):
        attention(q[:, :3], k, v, sinks[:3])
