"""flash-attn's versions as an operation, and what is said without any.

No machine of the tests has the library: functions with the signatures of its versions
stand for it, except in the last test.
"""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import write_checkpoint
from test_kernels_attention import assert_near, make_case

from simplellm import LLM, EngineConfig, load_model
from simplellm.api import choose_operations
from simplellm.checkpoint.checkpoint import Checkpoint
from simplellm.model import ops
from simplellm.model.kernels import flash

LENGTHS, CHUNKS = [300, 1, 0, 70, 45], [1, 1, 1, 70, 20]


def attention_of(q, k, v, cu_seqlens_q, cu_seqlens_k, most_q, most_k, causal, window):
    """(out, lse), as flash-attn documents it; ``window`` is (left, right)."""
    left, right = window
    assert causal and right == min(left, 0)
    assert k.is_contiguous() and v.is_contiguous() and q.dtype == k.dtype == v.dtype
    ends, key_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert ends[0] == 0 and ends[-1] == len(q) and key_ends[-1] == len(k)
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), math.inf)
    for i in range(len(ends) - 1):
        mine, seen = slice(*ends[i : i + 2]), slice(*key_ends[i : i + 2])
        count, length = mine.stop - mine.start, seen.stop - seen.start
        assert count <= most_q and length <= most_k
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
    return out, lse


def second(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    shape = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attention_of(q, k, v, *shape, causal, window_size)
    return (out, lse, None) if return_attn_probs else out


def third(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None,
    k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    shape = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attention_of(q, k, v, *shape, causal, window_size)
    return (out, lse) if return_attn_probs else out


def fourth(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
    gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, return_lse=False,
):  # fmt: skip
    window = tuple(-1 if side is None else side for side in window_size)
    shape = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attention_of(q, k, v, *shape, causal, window)
    return out, lse if return_lse else None


LIBRARIES = {2: second, 3: third, 4: fourth}


def install(monkeypatch, *versions):
    """Only these versions can be imported."""
    for module, version in flash.MODULES.items():
        fake = SimpleNamespace(flash_attn_varlen_func=LIBRARIES[version])
        there = version in versions
        monkeypatch.setitem(sys.modules, module, fake if there else None)
    if 2 not in versions and 4 in versions:  # the package is there, its parts are not
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())


@pytest.fixture(params=LIBRARIES, ids="flash-attn {}".format)
def attend(request):
    """Our operation, in which the library does prompts."""
    library = flash.Library(request.param, LIBRARIES[request.param])
    return flash.with_flash(ops.attend, library, (None, 1, 100, 128))


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("sinks", ["random", None])
@pytest.mark.parametrize("decodes", [0, 3])
def test_prompts_go_through_the_library(attend, window, sinks, decodes):
    case = make_case(
        "cpu", LENGTHS, CHUNKS, decodes=decodes, window=window, sinks=sinks
    )
    q = torch.cat([case.q, torch.full_like(case.q[:3], math.nan)])  # padding
    for _ in range(2):  # layers of one step
        got = attend(q, case.keys, case.values, case.group, case.sinks)
        assert_near(got[:-3], case.expected())
        assert not got[-3:].any()


def test_decodes_do_not(attend, monkeypatch):
    monkeypatch.setattr(flash.Library, "__call__", None)
    case = make_case("cpu", [300, 1, 0])
    assert_near(
        attend(case.q, case.keys, case.values, case.group, case.sinks), case.expected()
    )


def test_sinks_of_any_size(attend):
    for level in (-1e4, 1e4):
        sinks = torch.full((8,), level)
        case = make_case("cpu", LENGTHS, CHUNKS, decodes=3, sinks=sinks)
        got = attend(case.q, case.keys, case.values, case.group, sinks)
        assert_near(got, case.expected())


@pytest.mark.parametrize(
    ("versions", "capability", "wanted"),
    [
        ((2, 3, 4), (9, 0), 3), ((2, 4), (9, 0), 4), ((2,), (9, 0), 2),
        ((2, 3, 4), (10, 0), 4), ((2, 3), (10, 0), 2), ((3,), (8, 0), None),
        ((), (9, 0), None),
    ],
)  # fmt: skip
def test_which_version_is_taken(monkeypatch, versions, capability, wanted):
    install(monkeypatch, *versions)
    found = flash.find_library(capability)
    assert (found and found.version) == wanted


def test_a_model_says_the_same(attend):
    model, ids = load_model(device="cpu"), [*range(100), *range(200, 0, -1)]
    expected = model.logits(ids)
    found = replace(model, ops=replace(model.ops, attend=attend)).logits(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("versions", "options", "why"),
    [
        ((), {}, "no flash-attn is installed"),
        ((3,), {"batch_invariant": True}, "batch"),
    ],
)
def test_it_is_refused_by_name(monkeypatch, tmp_path, versions, options, why):
    install(monkeypatch, *versions)
    monkeypatch.setattr(choose_operations, "why_not_triton", lambda *where: None)
    monkeypatch.setattr(choose_operations, "capability", lambda device: (9, 0))
    config = EngineConfig(attention_backend="flash_attn", **options)
    source, where = Checkpoint(write_checkpoint(tmp_path)), torch.device("cuda:0")
    with pytest.raises(ValueError, match=f"attention_backend is .*'auto', since {why}"):
        choose_operations.choose_operations(config, source, torch.bfloat16, where)
    install(monkeypatch, 2)
    config = EngineConfig(attention_backend="flash_attn")
    chosen = choose_operations.choose_operations(config, source, torch.bfloat16, where)
    assert chosen[0] == "fused"


@pytest.mark.parametrize("backend", ["flash_attn", "triton_attn"])
def test_without_a_gpu_it_is_refused(backend):
    with pytest.raises(ValueError, match=f"attention_backend is '{backend}'; expected"):
        LLM(device="cpu", attention_backend=backend)


def no_windows(q, k, v, window_size=None, **options):
    """A build that knows no windows, and that says zero of everything."""
    if window_size not in ((-1, -1), (None, None)):
        raise RuntimeError(
            "This flash attention build does not support local attention"
        )
    return torch.zeros_like(q), torch.zeros(q.shape[1], len(q))


class Chosen:
    """Which of the two computes prompts of a model, whose heads are 4,096 wide."""

    def __init__(self, monkeypatch, folder, version, dim, capability=(9, 0), **options):
        monkeypatch.setitem(LIBRARIES, version, no_windows)
        install(monkeypatch, version)
        monkeypatch.setattr(choose_operations, "capability", lambda device: capability)
        heads = options.pop("heads", 4096 // dim)
        self.model = replace(
            Checkpoint(write_checkpoint(folder)).config,
            **{"head_dim": dim, "num_attention_heads": heads, "num_key_value_heads": 8},
            layer_types=("sliding_attention", "full_attention"),
            sliding_window=128,
        )
        config, where = EngineConfig(**options), torch.device("cpu")
        self.attend = choose_operations.choose_attend(
            lambda q, *arguments: torch.ones_like(q),
            *(self.model, config, torch.float32, where),
        )

    def is_library(self, lengths, chunks, dtype=None, padding=0, **options):
        shape = {"heads": (1, 1), "dim": 4, "sinks": None}
        case = make_case("cpu", lengths, chunks, **shape, **options)
        q = torch.cat([case.q, case.q.new_zeros(padding, 1, 4)])
        keys, values = (x.to(dtype or x.dtype) for x in (case.keys, case.values))
        out = self.attend(q, keys, values, case.group, None)
        decodes = case.group.decodes
        assert (out[:decodes] == 1).all()
        return not out[decodes:].any()


@pytest.mark.parametrize(
    ("version", "dim", "least"),
    [(3, 128, 8192), (3, 64, 32_768), (4, 128, 32_768), (4, 64, 32_768)],
)
def test_it_is_the_default_for_long_prompts(monkeypatch, tmp_path, version, dim, least):
    chosen = Chosen(monkeypatch, tmp_path, version, dim)
    assert chosen.is_library([least], [4096])
    assert chosen.is_library([9, 1, least], [1, 1, 4096], decodes=2)
    assert not chosen.is_library([least - 1], [4096])
    assert not chosen.is_library([least], [4095])
    assert not chosen.is_library([least], [4095], padding=9)  # of other ranks' tokens
    assert not chosen.is_library([least, 9], [4096, 9])
    assert not chosen.is_library([least], [4096], window=128)
    assert not chosen.is_library([least], [4096], dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (2, {}), (3, {"dim": 256}), (3, {"heads": 16}), (4, {"capability": (10, 0)}),
        (3, {"batch_invariant": True}), (3, {"attention_backend": "triton_attn"}),
    ],
)  # fmt: skip
def test_else_prompts_are_ours(monkeypatch, tmp_path, version, options):
    chosen = Chosen(monkeypatch, tmp_path, version, **{"dim": 128} | options)
    assert not chosen.is_library([32_768], [4096])


def test_asked_for_it_does_what_it_can(monkeypatch, tmp_path, caplog):
    chosen = Chosen(monkeypatch, tmp_path, 3, 256, attention_backend="flash_attn")
    assert chosen.is_library([30, 20], [7, 20])
    assert not chosen.is_library([300], [200], window=128)
    assert "flash-attn 3, window 128: our kernel does that, since Runt" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
def test_the_library_agrees(window):
    library = flash.find_library(torch.cuda.get_device_capability())
    if library is None:
        pytest.skip("no flash-attn is installed")
    case = make_case("cuda", LENGTHS, CHUNKS, decodes=3, window=window, dim=64)
    attend = flash.with_flash(ops.attend, library, (window,))
    got = attend(case.q, case.keys, case.values, case.group, case.sinks)
    assert_near(got, case.expected())
