"""Each deliberate mistake in the model's arithmetic makes the oracle comparison fail.

A mutation replaces one snippet in the source of one function. The changed function is
compiled and its code put in place of the original's, so that every reference to the
function runs the mistake. The comparison is that of test_oracle.py: one MXFP4
checkpoint, 200 tokens at a window of 128, float32, tolerance 1e-4.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest
import torch
from oracle import oracle_config, prompt, relative_errors, save_mxfp4
from test_oracle import FP32_TOLERANCE, their_logits

from simplellm import attention, model, moe, mxfp4, rope


@dataclass(frozen=True)
class Mutation:
    function: Callable[..., Any]
    old: str
    new: str

    def code(self) -> Any:
        """The code object of the function with the mistake in it."""
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, (
            f"{self.function.__qualname__} has {source.count(self.old)} times "
            f"{self.old!r}; expected one: did the function change?"
        )
        namespace = dict(self.function.__globals__)
        exec(source.replace(self.old, self.new), namespace)
        mutant = namespace[self.function.__name__]
        assert isinstance(mutant, FunctionType)
        return mutant.__code__


TILED = "k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))\n    "
SOFTMAX_FIRST = "expert_ids, logits.softmax(dim=-1).gather(-1, expert_ids)"

MUTATIONS = {
    "nibbles swapped": Mutation(
        mxfp4.MXFP4.dequantize,
        "self.blocks.flatten().int()",
        "((self.blocks >> 4) | (self.blocks << 4)).flatten().int()",
    ),
    "scale one too large": Mutation(
        mxfp4.MXFP4.dequantize,
        "decode_scales(self.scales,",
        "decode_scales(self.scales + 1,",
    ),
    "scale one too small": Mutation(
        mxfp4.MXFP4.dequantize,
        "decode_scales(self.scales,",
        "decode_scales(self.scales - 1,",
    ),
    "gate and up swapped": Mutation(
        moe.swiglu,
        "gate_up[..., 0::2], gate_up[..., 1::2]",
        "gate_up[..., 1::2], gate_up[..., 0::2]",
    ),
    "gate and up not interleaved": Mutation(
        moe.swiglu,
        "gate_up[..., 0::2], gate_up[..., 1::2]",
        "gate_up.chunk(2, dim=-1)",
    ),
    "+1 dropped": Mutation(
        moe.swiglu,
        "torch.sigmoid(alpha * gate) * (up + 1)",
        "torch.sigmoid(alpha * gate) * up",
    ),
    "gate's clamp dropped": Mutation(moe.swiglu, "gate.clamp(max=limit)", "gate"),
    "up's clamp dropped": Mutation(moe.swiglu, "up.clamp(-limit, limit)", "up"),
    "sigmoid without alpha": Mutation(
        moe.swiglu, "torch.sigmoid(alpha * gate)", "torch.sigmoid(gate)"
    ),
    "softmax before top-k": Mutation(
        moe.route, "expert_ids, chosen.softmax(dim=-1)", SOFTMAX_FIRST
    ),
    "router's bias dropped": Mutation(moe.route, "weight, bias)", "weight)"),
    "down's bias not weighted": Mutation(
        moe.experts,
        "y * expert_weights.flatten()[group, None]",
        "(y - weights.down_bias[expert]) * expert_weights.flatten()[group, None]"
        " + weights.down_bias[expert]",
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
        rope.apply_rope,
        "x.float().chunk(2, dim=-1)",
        "(x.float()[..., 0::2], x.float()[..., 1::2])",
    ),
    "rotation backwards": Mutation(rope.apply_rope, "sin[:, None]", "-sin[:, None]"),
    "norm without its weight": Mutation(
        model.rms_norm, "x32 * scale * weight.float()", "x32 * scale"
    ),
}


@pytest.fixture(scope="module")
def worst_error(tmp_path_factory) -> Callable[[], float]:
    """Load the checkpoint anew, and return the largest relative error of its logits."""
    path = tmp_path_factory.mktemp("mutations") / "model"
    oracle = save_mxfp4(path, oracle_config(), seed=6)
    ids = prompt(oracle.config, 200)
    expected = their_logits(oracle, ids)

    def measure() -> float:
        ours = model.load_model(path, dtype=torch.float32, device="cpu")
        return relative_errors(ours.logits(ids), expected).max().item()

    return measure


def test_passes_without_a_mistake(worst_error):
    assert worst_error() < FP32_TOLERANCE


@pytest.mark.parametrize("name", MUTATIONS)
def test_fails_with_a_mistake(name, worst_error, monkeypatch):
    mutation = MUTATIONS[name]
    monkeypatch.setattr(mutation.function, "__code__", mutation.code())
    error = worst_error()
    print(f"{name:30} {error:.1e}")  # the table: pytest -rP
    # NaN counts as caught; anything else has to be far from passing.
    assert not error < 10 * FP32_TOLERANCE


def test_the_mistakes_are_gone_afterwards(worst_error):
    assert worst_error() < FP32_TOLERANCE
