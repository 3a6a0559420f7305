"""The flash-attn library as an attention function, and what is said without it."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from simplellm.attention import attention
from simplellm.kernels.flash import flash_attention


def inputs(device, dtype, queries=70, keys=300):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    k, v = normal(keys, 2, 64), normal(keys, 2, 64)
    return normal(queries, 8, 64), k, v, normal(8)


def library(q, k, v, softmax_scale, causal, window_size, return_attn_probs):
    """What flash-attn documents, for one sequence: (out, lse, unused)."""
    (q, k, v), (left, right) = (x[0] for x in (q, k, v)), window_size
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,shd->hqs", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    place = torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = torch.arange(len(k)) > place if causal else torch.zeros(()).bool()
    if left >= 0:
        hidden = hidden | (torch.arange(len(k)) < place - left)
    assert right == min(left, 0) and return_attn_probs
    scores = scores.masked_fill(hidden, -math.inf)
    out = torch.einsum("hqs,shd->qhd", scores.softmax(-1), v)
    return out[None], scores.logsumexp(-1)[None], None


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_sinks_and_window_around_the_library(monkeypatch, window, has_sinks):
    fake = SimpleNamespace(flash_attn_func=library)
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    q, k, v, sinks = inputs("cpu", torch.float32)
    sinks = sinks if has_sinks else None
    got = flash_attention(q, k, v, sinks, window=window)
    torch.testing.assert_close(got, attention(q, k, v, sinks, window=window))


def test_sinks_of_any_size(monkeypatch):
    fake = SimpleNamespace(flash_attn_func=library)
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    q, k, v, _ = inputs("cpu", torch.float32)
    for level in (-1e4, 1e4):
        sinks = torch.full((8,), level)
        got = flash_attention(q, k, v, sinks, scale=0.3)
        torch.testing.assert_close(got, attention(q, k, v, sinks, scale=0.3))


def test_without_the_library_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError, match=r"pip install simplellm\[flash-attn\]"):
        flash_attention(*inputs("cpu", torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
def test_the_library_agrees(window):
    pytest.importorskip("flash_attn")
    q, k, v, sinks = inputs("cuda", torch.bfloat16)
    got = flash_attention(q, k, v, sinks, window=window)
    expected = attention(q, k, v, sinks, window=window)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
