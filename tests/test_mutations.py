"""Each deliberate mistake in the model's arithmetic makes the oracle comparison fail.

A mutation replaces one snippet in the source of one function. The changed function is
compiled and its code put in place of the original's, so that every reference to the
function runs the mistake. The comparison is that of test_oracle.py: one MXFP4
checkpoint, 200 tokens at a window of 128, float32, tolerance 1e-4. NumPy's operations
have mistakes of their own; there a text is decoded token by token beside another one.
"""

from collections.abc import Callable

import pytest
import torch
from course.mutation import Mutation
from oracle import oracle_config, prompt, relative_errors, save_mxfp4
from stepping import Stepper
from test_oracle import FP32_TOLERANCE, their_logits

from simplellm import load_model
from simplellm.checkpoint import mxfp4 as weights
from simplellm.model import (
    attention,
    chunks_as_decodes,
    feed_forward,
    model,
    ops,
    ops_cpu,
    ops_numpy,
    rope,
)
from simplellm.model import kv_gather as reads

TILED = "k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))\n    "
SOFTMAX_FIRST = "expert_ids, logits.softmax(dim=-1).gather(-1, expert_ids)"

MUTATIONS = {
    "nibbles swapped": Mutation(
        weights.MXFP4.dequantize,
        "self.blocks.flatten().int()",
        "((self.blocks >> 4) | (self.blocks << 4)).flatten().int()",
    ),
    "scale one too large": Mutation(
        weights.MXFP4.dequantize,
        "decode_scales(self.scales,",
        "decode_scales(self.scales + 1,",
    ),
    "scale one too small": Mutation(
        weights.MXFP4.dequantize,
        "decode_scales(self.scales,",
        "decode_scales(self.scales - 1,",
    ),
    "gate and up swapped": Mutation(
        feed_forward.swiglu,
        "gate_up[..., 0::2], gate_up[..., 1::2]",
        "gate_up[..., 1::2], gate_up[..., 0::2]",
    ),
    "gate and up not interleaved": Mutation(
        feed_forward.swiglu,
        "gate_up[..., 0::2], gate_up[..., 1::2]",
        "gate_up.chunk(2, dim=-1)",
    ),
    "+1 dropped": Mutation(
        feed_forward.swiglu,
        "torch.sigmoid(alpha * gate) * (up + 1)",
        "torch.sigmoid(alpha * gate) * up",
    ),
    "gate's clamp dropped": Mutation(
        feed_forward.swiglu, "gate.clamp(max=limit)", "gate"
    ),
    "up's clamp dropped": Mutation(
        feed_forward.swiglu, "up.clamp(-limit, limit)", "up"
    ),
    "sigmoid without alpha": Mutation(
        feed_forward.swiglu, "torch.sigmoid(alpha * gate)", "torch.sigmoid(gate)"
    ),
    "softmax before top-k": Mutation(
        feed_forward.route, "expert_ids, top_logits.softmax(dim=-1)", SOFTMAX_FIRST
    ),
    "router's bias dropped": Mutation(feed_forward.route, "weight, bias)", "weight)"),
    "down's bias not weighted": Mutation(
        ops.experts,
        "y * weights.flatten()[pair_ids, None]",
        "(y - second_bias) * weights.flatten()[pair_ids, None] + second_bias",
    ),
    "biases of q, k and v dropped": Mutation(
        ops.rope_and_cache, "x + attn.qkv_bias.float()", "x"
    ),
    "bias of o dropped": Mutation(model.Model.forward, "attn.o_bias)", "None)"),
    "a layer's update dropped": Mutation(
        model.Model.forward,
        "ops.add_norm(x, update, self.norm",
        "ops.add_norm(x, None, self.norm",
    ),
    "sink scaled": Mutation(
        attention.masked_attention, "sinks.float()", "(sinks.float() * scale)"
    ),
    "sink dropped": Mutation(
        attention.masked_attention, "if sinks is not None:", "if False:"
    ),
    "window one too wide": Mutation(
        attention.visible, "keys > queries[:, None] - w", "keys >= queries[:, None] - w"
    ),
    "window one too narrow": Mutation(attention.visible, "- window", "- window + 1"),
    "window dropped": Mutation(attention.visible, "window is not None", "False"),
    "future visible": Mutation(
        attention.visible, "keys <= queries", "keys <= 1 + queries"
    ),
    "kv head mapping wrong": Mutation(
        attention.attention, "scale = q.shape[2]", TILED + "scale = q.shape[2]"
    ),
    "YaRN truncated": Mutation(
        rope.yarn_frequencies, "if scaling.truncate:", "if True:"
    ),
    "YaRN dropped": Mutation(rope.yarn_frequencies, "if scaling is None:", "if True:"),
    "concentration dropped": Mutation(
        rope.yarn_frequencies,
        "return frequencies, concentration",
        "return frequencies, 1.0",
    ),
    "rotation interleaved": Mutation(
        rope.rotate,
        "x.float().chunk(2, dim=-1)",
        "(x.float()[..., 0::2], x.float()[..., 1::2])",
    ),
    "rotation backwards": Mutation(rope.rotate, "sin[:, None]", "-sin[:, None]"),
    "keys not rotated": Mutation(
        ops.rope_and_cache,
        "rotate(q, cos, sin), rotate(k, cos, sin)",
        "rotate(q, cos, sin), k",
    ),
    "norm without its weight": Mutation(
        ops.rms_norm, "x32 * scale * weight.float()", "x32 * scale"
    ),
}


READS = reads.plan_gathers
DECODING = {
    "window of a decode too narrow": Mutation(
        READS, "ends + 1 - window", "ends + 2 - window"
    ),
    "window of a decode too wide": Mutation(
        READS, "ends + 1 - window", "ends - window"
    ),
    "the newest position hidden": Mutation(READS, "> ends[rows]", ">= ends[rows]"),
    "pages from the first": Mutation(READS, " - firsts[rows]", ""),
}
PLAIN_DECODING = {
    "window of a chunk too narrow": Mutation(
        ops.attend_chunks, "group.window + 1", "group.window + 2"
    ),
    "layers share their pages": Mutation(
        model.Model.forward,
        "pool.keys[index], pool.values[index]",
        "pool.keys[0], pool.values[index]",
    ),
    "what is hidden is seen": Mutation(
        ops.attend_decodes, "if masked is not None:", "if False:"
    ),
    "rows of another decode": Mutation(
        ops.attend_decodes, "q[which, None]", "q[which.flip(0), None]"
    ),
}
NUMPY_MUTATIONS = {
    "a chunk's tokens see those after them": Mutation(
        chunks_as_decodes.chunks_as_decodes, " - (ends[owners] - 1 - indices[:-1])", ""
    ),
    "epsilon too large": Mutation(ops_numpy.rms_norm_few, "+ eps", "+ 0.1"),
    "norm's weight dropped": Mutation(
        ops_numpy.rms_norm_few, "normed *= weight.numpy()", "pass"
    ),
    "not normed": Mutation(ops_numpy.rms_norm_few, "** -0.5", "** 0"),
    "update dropped": Mutation(ops_numpy.add_norm, "x += change", "pass"),
    "biases dropped": Mutation(ops_numpy.matmul, "out += bias.numpy()", "pass"),
    "biases of q, k and v dropped": Mutation(
        ops_numpy.rope_and_cache, "x += attn.qkv_bias.numpy()", "pass"
    ),
    "keys for values": Mutation(
        ops_numpy.rope_and_cache,
        "(values, v)",
        "(values, k)",
    ),
    "turned backwards": Mutation(ops_numpy.rotate_few, "* SIGNS", "* -SIGNS"),
    "halves not swapped": Mutation(
        ops_numpy.rotate_few, "halves[:, :, ::-1]", "halves"
    ),
    "queries not scaled": Mutation(
        ops_numpy.attend, "np.float32(dim**-0.5)", "np.float32(1)"
    ),
    "sink dropped from the sum": Mutation(ops_numpy.attend, "np.exp(sink - top)", "0"),
    "what is hidden is seen": Mutation(
        ops_numpy.attend, "if masked is not None:", "if False:"
    ),
    "the worst experts": Mutation(
        ops_numpy.experts, "argsort(-logits", "argsort(logits"
    ),
    "weights not normed": Mutation(
        ops_numpy.experts, "weights /= weights.sum(axis=1, keepdims=True)", "pass"
    ),
    "rows of another expert": Mutation(
        ops_numpy.experts,
        "minlength=logits.shape[1]).tolist()",
        "minlength=logits.shape[1]).tolist()[::-1]",
    ),
    "rows of another token": Mutation(
        ops_numpy.experts, "rows[order // top_k]", "rows[order % len(rows)]"
    ),
    "results in another order": Mutation(ops_numpy.experts, "out[order] =", "out[:] ="),
    "gate and up swapped": Mutation(
        ops_numpy.swiglu_few,
        "gate_up[:, 0::2], np.maximum(gate_up[:, 1::2]",
        "gate_up[:, 1::2], np.maximum(gate_up[:, 0::2]",
    ),
    "clamp from above dropped": Mutation(
        ops_numpy.swiglu_few,
        "np.minimum(gate_up, np.float32(limit))",
        "gate_up.copy()",
    ),
    "clamp from below dropped": Mutation(
        ops_numpy.swiglu_few, "np.float32(-limit)", "-np.inf"
    ),
    "+1 dropped": Mutation(ops_numpy.swiglu_few, "up += 1", "pass"),
    "sigmoid without alpha": Mutation(ops_numpy.swiglu_few, "np.float32(-alpha)", "-1"),
    "experts' biases dropped": Mutation(
        ops_numpy.each, "out += bias.numpy().repeat(counts, axis=0)", "pass"
    ),
    "biases of another expert": Mutation(
        ops_numpy.each, "repeat(counts, axis", "repeat(counts[::-1], axis"
    ),
}
PROMPT = ops_cpu.prompt_attention
CPU_MUTATIONS = {
    "shares swapped": Mutation(PROMPT, "(lse_before - lse)", "(lse - lse_before)"),
    "sum of the new keys alone": Mutation(PROMPT, "lse.logaddexp(lse_before)", "lse"),
    "earlier keys unseen": Mutation(PROMPT, "if first > 0:", "if False:"),
    "window too narrow": Mutation(PROMPT, "first + 1 - window", "first + 2 - window"),
    "window dropped": Mutation(PROMPT, "if window is not None", "if False"),
    "sinks dropped": Mutation(PROMPT, "if sinks is not None:", "if False:"),
    "sinks of other heads": Mutation(PROMPT, "sinks.float()", "sinks.float().roll(1)"),
    "heads in another order": Mutation(
        PROMPT, "out.permute(2, 0, 1, 3)", "out.permute(2, 1, 0, 3)"
    ),
    "future visible": Mutation(
        ops_cpu.attend_some, "is_causal=True", "is_causal=False"
    ),
    "nothing masked": Mutation(ops_cpu.attend_some, "attn_mask=bias", "attn_mask=None"),
}
CASES = [
    *((name, mutation, "whole") for name, mutation in MUTATIONS.items()),
    *((name, mutation, "decoded") for name, mutation in DECODING.items()),
    *((name, mutation, "decoded") for name, mutation in PLAIN_DECODING.items()),
    *((f"NumPy: {name}", m, "NumPy") for name, m in DECODING.items()),
    *((f"NumPy: {name}", m, "NumPy") for name, m in NUMPY_MUTATIONS.items()),
    *((f"CPU: {name}", mutation, "CPU") for name, mutation in CPU_MUTATIONS.items()),
]


@pytest.fixture(scope="module")
def worst_error(tmp_path_factory) -> Callable[[str], float]:
    """Load a checkpoint anew, and return the largest relative error of its logits."""
    folder = tmp_path_factory.mktemp("mutations")
    oracle = save_mxfp4(folder / "model", oracle_config(), seed=6)
    ids = prompt(oracle.config, 200)
    expected = their_logits(oracle, ids)
    short = save_mxfp4(folder / "short", oracle_config(sliding_window=20), seed=6)
    expected_short = their_logits(short, ids[:60])

    def measure(how: str) -> float:
        if how == "whole":
            ours = load_model(folder / "model", dtype=torch.float32, device="cpu")
            return relative_errors(ours.logits(ids), expected).max().item()
        table = {"CPU": ops_cpu.CPU, "NumPy": ops_numpy.NUMPY}.get(how, ops.PLAIN)
        ours = load_model(folder / "short", device="cpu", ops=table)
        places, found = decode_beside_another(ours, ids[:60])
        return relative_errors(found, expected_short[places]).max().item()

    return measure


def decode_beside_another(
    ours: model.Model, ids: list[int]
) -> tuple[list[int], torch.Tensor]:
    """The logits at some positions of a text: in two chunks, then token by token."""
    stepper = Stepper(ours)
    stepper.add(0, ids)
    stepper.add(1, [5] * 30 + ids)  # longer, so that something is hidden of the first
    stepper.step({1: 63})
    places, logits = [], []
    lengths = [25, 15] + [1] * (len(ids) - 40)
    for length in lengths:
        found = stepper.step({0: length, 1: 1} if length == 1 else {0: length})
        places.append(stepper.requests[0].num_computed_tokens - 1)
        logits.append(found[0])
    return places, torch.stack(logits)


@pytest.mark.parametrize("how", ["whole", "decoded", "NumPy", "CPU"])
def test_passes_without_a_mistake(worst_error, how):
    assert worst_error(how) < FP32_TOLERANCE


@pytest.mark.parametrize("small", [0, 10**9], ids=["PyTorch", "NumPy"])
def test_passes_with_products_of_either_library(worst_error, small, monkeypatch):
    monkeypatch.setattr(ops_numpy, "SMALL", small)
    assert worst_error("NumPy") < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("mutation", "how"),
    [pytest.param(mutation, how, id=name) for name, mutation, how in CASES],
)
def test_fails_with_a_mistake(mutation, how, worst_error, monkeypatch, record_property):
    record_property("family", "gpt-oss")
    monkeypatch.setattr(mutation.function, "__code__", mutation.code())
    error = worst_error(how)
    print(f"{error:.1e}")  # the table: pytest -rP
    # NaN counts as caught; anything else has to be far from passing.
    assert not error < 10 * FP32_TOLERANCE


@pytest.mark.parametrize("how", ["whole", "decoded", "NumPy", "CPU"])
def test_the_mistakes_are_gone_afterwards(worst_error, how):
    assert worst_error(how) < FP32_TOLERANCE
