"""Each mistake that people make with a family moves its logits away from transformers'.

As test_mutations.py does for gpt-oss: a snippet of one function is replaced. The
checkpoints are those of families.py, config.json in the words of the hub's files.
Some mistakes change nothing that can be measured: they are listed as such.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from course.mutation import Mutation
from families import CASES, write
from test_mutations import TILED

from simplellm.api.load import load_model
from simplellm.checkpoint import checkpoint
from simplellm.checkpoint.families import family, granite, qwen2, smollm3
from simplellm.model import (
    attention,
    build,
    family_rules,
    feed_forward,
    model,
    moe,
    ops,
    other_families,
    rope,
    rope_cache,
)

pytestmark = pytest.mark.usefixtures("quiet_transformers")

# Below the 1e-4 of test_families.py: in a gated network, a GELU's tanh moves 9e-5.
TOLERANCE = 4e-5
IDS = torch.randint(101, (150,), generator=torch.Generator().manual_seed(1))
QK_NORM = """\
    if attn.q_norm is not None and attn.k_norm is not None:
        q, k = rms_norm(q, attn.q_norm, attn.eps), rms_norm(k, attn.k_norm, attn.eps)
    cos, sin = attn.cos[positions], attn.sin[positions]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
"""
NORMED_LAST = """\
    cos, sin = attn.cos[positions], attn.sin[positions]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q, k = rms_norm(q, attn.q_norm, attn.eps), rms_norm(k, attn.k_norm, attn.eps)
"""
GATHER = "logits.softmax(dim=-1).gather(-1, expert_ids)"
BOTH = "else kind]"
OTHER = "else LAYER_TYPES[1 - LAYER_TYPES.index(kind)]]"
RULE = "route if mlp.normalized else route_among_all"
GAMMA = "(weight + config.norm_offset) * factor"
CENTERED = "functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)"
LENGTH = "turns = scaling.original_max_position_embeddings"
STRETCHED = "plain / scaling.factor * (1 - keep) + plain * keep"
ROPE, CACHE = rope_cache.stretched_frequencies, ops.rope_and_cache
TURNS = build.layer_rotations
FEED, ROUTE = ops.dense, other_families.route_among_all
TYPES = '("full_attention",) * full + ("sliding_attention",) * (count - full)'
OTHER_TYPES = '("sliding_attention",) * full + ("full_attention",) * (count - full)'

MISTAKES = {
    "Llama": {
        "kv heads not in groups": Mutation(
            attention.attention, "scale = q.shape[2]", TILED + "scale = q.shape[2]"
        ),
        "rotation interleaved": Mutation(
            rope.rotate,
            "x.float().chunk(2, dim=-1)",
            "(x.float()[..., 0::2], x.float()[..., 1::2])",
        ),
        "theta of the defaults": Mutation(family.rope, 'data.get("rope_theta")', "1e4"),
        "head_dim is hidden / heads in the scores' scale": Mutation(
            attention.attention, "q.shape[2] ** -0.5", "(48 // 6) ** -0.5"
        ),
        "head_dim is hidden / heads in RoPE": Mutation(
            rope.yarn_frequencies,
            "torch.float32) / dim)",
            "torch.float32) / (48 // 6))",
        ),
        "gate and up swapped": Mutation(
            other_families.gated, "gate, up = gate_up", "up, gate = gate_up"
        ),
        "gate and up interleaved": Mutation(
            other_families.gated,
            "gate_up.chunk(2, dim=-1)",
            "(gate_up[..., 0::2], gate_up[..., 1::2])",
        ),
        "GELU for SiLU": Mutation(
            other_families.gated, "return activation(gate)", "return gelu(gate)"
        ),
        "norm without its weight": Mutation(
            ops.rms_norm, "x32 * scale * weight.float()", "x32 * scale"
        ),
    },
    "Llama llama3": {
        "thresholds swapped": Mutation(
            ROPE,
            "scaling.low_freq_factor, scaling.high_freq_factor",
            "scaling.high_freq_factor, scaling.low_freq_factor",
        ),
        "radians for turns": Mutation(ROPE, " / (2 * math.pi)", ""),
        "of the new length": Mutation(
            ROPE, LENGTH, "turns = config.max_position_embeddings"
        ),
        "all stretched": Mutation(ROPE, 'scaling.rope_type == "llama3"', "False"),
        "none stretched": Mutation(ROPE, STRETCHED, "plain"),
        "the fast stretched": Mutation(ROPE, "clamp(0, 1)", "clamp(0, 1).neg().add(1)"),
        "a step for the ramp": Mutation(ROPE, "clamp(0, 1)", "clamp(0, 1).round()"),
    },
    "Llama linear": {
        "not stretched": Mutation(ROPE, STRETCHED, "plain"),
        "shrunk": Mutation(ROPE, "plain / scaling", "plain * scaling"),
    },
    "Llama biases": {
        "of gate and up dropped": Mutation(FEED, "mlp.gate_up_bias", "None"),
        "of down dropped": Mutation(FEED, "mlp.down_bias", "None"),
        "of o dropped": Mutation(model.Model.forward, "attn.o_bias)", "None)"),
    },
    "Qwen2": {
        "biases dropped": Mutation(CACHE, "x + attn.qkv_bias.float()", "x"),
    },
    "Qwen2 YaRN": {
        "dropped": Mutation(rope.yarn_frequencies, "scaling is None:", "True:"),
        "corners not rounded": Mutation(
            rope.yarn_frequencies, "if scaling.truncate:", "if False:"
        ),
        "concentration dropped": Mutation(
            rope.yarn_frequencies, "frequencies, concentration", "frequencies, 1.0"
        ),
    },
    "Qwen2 windows": {
        "of the lower layers": Mutation(qwen2.upper_windows, TYPES, OTHER_TYPES),
        "used though not asked": Mutation(
            qwen2.upper_windows, '["max_window_layers"]', '["max_window_layers"] * 0'
        ),
    },
    "Qwen3": {
        "qk-norm after RoPE": Mutation(CACHE, QK_NORM, NORMED_LAST),
        "qk-norm dropped": Mutation(CACHE, "attn.q_norm is not None", "False"),
        "of all heads together": Mutation(
            CACHE,
            "rms_norm(q, attn.q_norm, attn.eps)",
            "rms_norm(q.flatten(1), attn.q_norm.repeat(q.shape[1]), attn.eps)"
            ".view(q.shape)",
        ),
        "norms of q and k swapped": Mutation(
            CACHE, "rms_norm(q, attn.q_norm", "rms_norm(q, attn.k_norm"
        ),
    },
    "Mistral windows": {
        "one too wide": Mutation(
            attention.visible,
            "keys > queries[:, None] - w",
            "keys >= queries[:, None] - w",
        ),
        "dropped": Mutation(attention.visible, "window is not None", "False"),
    },
    "Mixtral": {
        "weights among all experts": Mutation(
            feed_forward.route, "top_logits.softmax(dim=-1)", GATHER
        ),
        "gate and up swapped": Mutation(
            other_families.gated, "gate, up = gate_up", "up, gate = gate_up"
        ),
        "the next expert's down": Mutation(
            moe.experts, "mlp.down[local]", "mlp.down[local - 1]"
        ),
    },
    "Qwen3-MoE": {
        "norm_topk_prob ignored": Mutation(
            family_rules.select_experts, RULE, "route_among_all"
        ),
    },
    "Qwen3-MoE unnormed": {
        "softmax after top-k": Mutation(family_rules.select_experts, RULE, "route"),
        "norm_topk_prob taken for true": Mutation(
            ROUTE,
            "expert_ids, top_probs",
            "expert_ids, top_probs / top_probs.sum(-1, True)",
        ),
    },
    "Gemma3": {
        "w for 1 + w": Mutation(build.plain_norm, GAMMA, "weight * factor"),
        "1 + w times the root": Mutation(
            build.plain_norm, GAMMA, "weight + config.norm_offset"
        ),
        "embedding not scaled": Mutation(
            build.embed_transform, "else x.to(dtype) * scale", "else x.to(dtype)"
        ),
        "its scale in bfloat16": Mutation(
            build.embed_transform, "dtype=dtype", "dtype=torch.bfloat16"
        ),
        "local and global theta swapped": Mutation(TURNS, BOTH, OTHER),
        "global theta everywhere": Mutation(
            TURNS, "config.local_rope_theta is not None", "False"
        ),
        "local layers stretched": Mutation(
            TURNS,
            "config.local_rope_theta, rope_scaling=None",
            "config.local_rope_theta",
        ),
        "what is added not normed": Mutation(
            ops.add_norm, "update = rms_norm(update, norm.update, eps)", "pass"
        ),
        "the sum normed twice": Mutation(
            ops.add_norm, "norm.update, eps)", "norm.weight, eps)"
        ),
        "GELU without tanh": Mutation(
            other_families.gated,
            "return activation(gate)",
            "return functional.gelu(gate)",
        ),
        "SiLU for GELU": Mutation(
            other_families.gated,
            "return activation(gate)",
            "return functional.silu(gate)",
        ),
    },
    "SmolLM3": {
        "all layers rotate": Mutation(TURNS, "None if n in", "kind if n in"),
        "the others rotate": Mutation(TURNS, "if n in", "if n not in"),
        "the next ones rotate": Mutation(TURNS, "n in", "n - 1 in"),
        "1 is no rotation": Mutation(smollm3.without_rope, "if not turns", "if turns"),
    },
    "SmolLM3 interval": {
        "counted from 0": Mutation(
            smollm3.without_rope, "(n + 1) % every", "n % every"
        ),
    },
    "Granite": {
        "embedding not multiplied": Mutation(
            granite.multiplied, "embedding / residual", "1 / residual"
        ),
        "what layers add not multiplied": Mutation(
            granite.multiplied, "embedding / residual", "embedding"
        ),
        "epsilon as it is": Mutation(granite.multiplied, " / residual**2", ""),
        "scores by head_dim": Mutation(granite.multiplied, "attention**-2", "None"),
        "scores by its root": Mutation(granite.multiplied, "**-2", "**-1"),
        "scores multiplied twice": Mutation(
            rope_cache.rotations, "score_scale(config) ** 0.5", "score_scale(config)"
        ),
        "logits not divided": Mutation(
            build.plain_norm, "1 / config.logits_scaling", "1"
        ),
    },
    "GPT2": {
        "Conv1D not transposed": Mutation(
            checkpoint.assembled, "[part.mT for part in parts]", "parts"
        ),
        "mean not taken off": Mutation(
            other_families.layer_norm,
            CENTERED,
            "(functional.rms_norm(x.float(), x.shape[-1:], weight, eps) + bias)",
        ),
        "norms' bias dropped": Mutation(
            other_families.layer_norm, "weight, bias, eps", "weight, None, eps"
        ),
        "positions dropped": Mutation(
            build.embed_transform, "x.to(dtype) + table[positions]", "x.to(dtype)"
        ),
        "positions from 2 on": Mutation(
            build.embed_transform, "table[positions]", "table[positions + 2]"
        ),
        "RoPE as well": Mutation(ROPE, "config.learned_positions", "False"),
        "GELU without tanh": Mutation(
            family_rules.apply_activation,
            "ACTIVATIONS[mlp.activation](first)",
            "0.5 * first * (1 + (first / 2**0.5).erf())",
        ),
        "biases of q, k and v dropped": Mutation(
            CACHE, "x + attn.qkv_bias.float()", "x"
        ),
        "bias of o dropped": Mutation(model.Model.forward, "attn.o_bias)", "None)"),
        "biases of the network dropped": Mutation(FEED, "mlp.gate_up_bias", "None"),
    },
}
# What is the same in other words, and why.
EQUAL = {
    # What the experts that were not chosen scored cancels out.
    ("Mixtral", "softmax before top-k, then made to add up to 1"): Mutation(
        feed_forward.route,
        "top_logits.softmax(dim=-1)",
        f"functional.normalize({GATHER}, p=1)",
    ),
    # Up to the scores all is linear, and RoPE keeps lengths: the factor may go to k.
    ("Gemma3", "query_pre_attn_scalar with k"): Mutation(
        build.plain_norm, "q_norm.weight", "k_norm.weight"
    ),
    # Where nothing turns, the bias of k adds the same to all scores of a query.
    ("GPT2", "no bias of k"): Mutation(
        CACHE,
        "x + attn.qkv_bias.float()",
        "x + attn.qkv_bias.float() * (torch.arange(x.shape[1]) // 48 != 1)",
    ),
}  # fmt: skip
CASE_MISTAKES = [
    pytest.param(name, mutation, id=f"{name}: {mistake}")
    for name, mistakes in MISTAKES.items()
    for mistake, mutation in mistakes.items()
]
CASE_EQUAL = [
    pytest.param(name, mutation, id=f"{name}: {text}")
    for (name, text), mutation in EQUAL.items()
]


@pytest.fixture(scope="module")
def worst_error(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    """Load a case's checkpoint, and return the largest relative error of its logits."""
    made: dict[str, tuple[Path, torch.Tensor]] = {}

    def measure(name: str) -> float:
        if name not in made:
            theirs = CASES[name]().build()
            folder = write(tmp_path_factory.mktemp("mutations"), theirs, old=True)
            with torch.inference_mode():
                made[name] = folder, theirs(IDS[None]).logits[0]
        folder, expected = made[name]
        found = load_model(folder, device="cpu").logits(IDS)
        errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        return errors.max().item()

    return measure


@pytest.mark.parametrize("name", MISTAKES)
def test_passes_without_a_mistake(name: str, worst_error) -> None:
    error = worst_error(name)
    print(f"{error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize(("name", "mutation"), CASE_MISTAKES)
def test_fails_with_a_mistake(
    name, mutation, worst_error, monkeypatch, record_property
) -> None:
    record_property("family", CASES[name]().family)
    worst_error(name)  # the checkpoint is written without it
    monkeypatch.setattr(mutation.function, "__code__", mutation.code())
    error = worst_error(name)
    print(f"{error:.1e}")  # the table: pytest -rP
    assert not error < 2 * TOLERANCE  # NaN counts as caught


@pytest.mark.parametrize(("name", "mutation"), CASE_EQUAL)
def test_equal_in_other_words(name, mutation, worst_error, monkeypatch) -> None:
    monkeypatch.setattr(mutation.function, "__code__", mutation.code())
    error = worst_error(name)
    print(f"{error:.1e}")
    assert error < TOLERANCE
