"""The flash-attn library as an attention operation, and what is said without it."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from test_kernels_attention import assert_near, make_case

from simplellm.model.kernels import flash

LENGTHS, CHUNKS = [300, 1, 0, 70, 45], [1, 1, 1, 70, 20]


def library(q, k, v, **options):
    """What flash-attn documents of flash_attn_varlen_func: (out, lse, unused)."""
    left, right = options["window_size"]
    assert right == min(left, 0)
    assert options["return_attn_probs"] and options["causal"]
    ends, key_ends = (options[f"cu_seqlens_{x}"].tolist() for x in "qk")
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), math.inf)
    for i in range(len(ends) - 1):
        mine, seen = slice(*ends[i : i + 2]), slice(*key_ends[i : i + 2])
        count, length = mine.stop - mine.start, seen.stop - seen.start
        assert count <= options["max_seqlen_q"] and length <= options["max_seqlen_k"]
        if length == 0:  # out is 0 and lse infinite
            continue
        group = q.shape[1] // k.shape[1]
        keys, values = (x[seen].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,shd->hqs", q[mine], keys) * q.shape[-1] ** -0.5
        place = torch.arange(length - count, length)[:, None]
        hidden = torch.arange(length) > place
        if left >= 0:
            hidden = hidden | (torch.arange(length) < place - left)
        scores = scores.masked_fill(hidden, -math.inf)
        out[mine] = torch.einsum("hqs,shd->qhd", scores.softmax(-1), values)
        lse[:, mine] = scores.logsumexp(-1)
    return out, lse, None


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("sinks", ["random", None])
def test_sinks_and_window_around_the_library(monkeypatch, window, sinks):
    fake = SimpleNamespace(flash_attn_varlen_func=library)
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    case = make_case("cpu", LENGTHS, CHUNKS, decodes=3, window=window, sinks=sinks)
    q = torch.cat([case.q, torch.full_like(case.q[:3], math.nan)])  # padding
    got = flash.attend(q, case.keys, case.values, case.group, case.sinks)
    assert_near(got[:-3], case.expected())
    assert not got[-3:].any()


def test_sinks_of_any_size(monkeypatch):
    fake = SimpleNamespace(flash_attn_varlen_func=library)
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    for level in (-1e4, 1e4):
        sinks = torch.full((8,), level)
        case = make_case("cpu", LENGTHS, CHUNKS, decodes=3, sinks=sinks)
        got = flash.attend(case.q, case.keys, case.values, case.group, sinks)
        assert_near(got, case.expected())


def test_without_the_library_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    case = make_case("cpu", [5])
    with pytest.raises(ImportError, match=r"pip install simplellm\[flash-attn\]"):
        flash.attend(case.q, case.keys, case.values, case.group, case.sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
def test_the_library_agrees(window):
    pytest.importorskip("flash_attn")
    case = make_case("cuda", LENGTHS, CHUNKS, decodes=3, window=window, dim=64)
    got = flash.attend(case.q, case.keys, case.values, case.group, case.sinks)
    assert_near(got, case.expected())
