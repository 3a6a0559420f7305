"""config.json in all its spellings, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, config_json

from simplellm.base.config import (
    LAYER_TYPES,
    MAX_LAYERS,
    ConfigError,
    EngineConfig,
    ModelConfig,
    RopeScaling,
)
from simplellm.checkpoint.families import family_config, read_config
from simplellm.checkpoint.families.gpt_oss import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    MODELS,
)
from simplellm.model.rope import yarn_frequencies

# What the config.json of openai/gpt-oss-120b holds on the hub, older spelling.
HUB_120B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}


def changed(**changes: Any) -> dict[str, Any]:
    """The config.json of TINY with these entries; ... removes one."""
    data = config_json(TINY) | changes
    return {name: value for name, value in data.items() if value is not ...}


def test_the_hub_spelling() -> None:
    expected = replace(GPT_OSS_120B, eos_token_ids=(200002,))
    assert family_config(HUB_120B) == expected


@pytest.mark.parametrize("config", [TINY, *MODELS.values()])
def test_the_transformers_5_spelling(config: ModelConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    written = transformers.GptOssConfig(**config_json(config))
    written.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in data  # else this is a test of the older spelling
    assert "rope_theta" not in data
    assert read_config(tmp_path / "config.json") == config


def test_what_a_file_leaves_out_is_gpt_oss_120b_s() -> None:
    assert family_config({"model_type": "gpt_oss"}) == replace(
        GPT_OSS_120B, eos_token_ids=(), formats={}
    )


def test_plain_rope() -> None:
    config = family_config(changed(rope_scaling={"rope_type": "default"}))
    assert config.rope_scaling is None


def test_yarn_truncates_when_it_does_not_say() -> None:
    entry = {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
    }
    scaling = family_config(changed(rope_scaling=entry)).rope_scaling
    assert scaling == RopeScaling(4.0, 64, 32.0, 1.0, True)


def test_a_truncate_of_null_is_false_as_in_transformers() -> None:
    """Against the frequencies that transformers computes."""
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    found = {}
    for truncate in (None, False, True):
        entry = config_json(TINY)["rope_scaling"] | {"truncate": truncate}
        ours = family_config(changed(rope_scaling=entry))
        theirs = transformers.GptOssConfig(**changed(rope_scaling=entry))
        expected, _ = rope.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        found[truncate] = yarn_frequencies(ours)[0]
        assert torch.allclose(found[truncate], expected, rtol=1e-5)
    assert torch.equal(found[None], found[False])
    assert not torch.allclose(found[None], found[True])


def test_null_in_the_rope_entry_is_as_good_as_absent() -> None:
    expected = family_config(changed())
    entry = config_json(TINY)["rope_scaling"] | {"rope_theta": None, "mscale": None}
    assert family_config(changed(rope_scaling=entry)) == expected
    entry |= {"type": entry.pop("rope_type"), "rope_type": None}
    assert family_config(changed(rope_scaling=entry)) == expected


@pytest.mark.parametrize(
    ("written", "read"), [(7, (7,)), ([7, 9], (7, 9)), (None, ()), (..., ())]
)
def test_eos_token_id(written: Any, read: tuple[int, ...]) -> None:
    config = family_config(changed(eos_token_id=written))
    assert config.eos_token_ids == read


def test_window_alternates() -> None:
    windows = [GPT_OSS_20B.window(layer) for layer in range(24)]
    assert windows == [128, None] * 12
    assert GPT_OSS_20B.windows == (None, 128)  # of the groups, the full one first
    full = replace(TINY, layer_types=LAYER_TYPES[1:] * 2)
    assert full.windows == (None,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ...}, "model_type is None; expected one of 'gpt_oss'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "97"}, "vocab_size is '97'; expected an integer"),
        ({"vocab_size": 97.5}, "vocab_size is 97.5; expected an integer"),
        ({"vocab_size": True}, "vocab_size is True; expected an integer"),
        ({"vocab_size": 0}, "vocab_size is 0; expected 1 to"),
        ({"hidden_size": -96}, "hidden_size is -96; expected 1 to"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; expected 1 to"),
        ({"head_dim": 15}, "head_dim is 15; expected an even number"),
        ({"num_key_value_heads": 4}, "expected a multiple of num_key_value_heads, 4"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6; expected 1 to 5"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0; expected 1 to 5"),
        ({"num_local_experts": 0}, "num_local_experts is 0; expected 1 to"),
        ({"sliding_window": 0}, "sliding_window is 0; expected 1 to"),
        ({"rope_theta": 10**400}, "expected more than 1, up to 1e+18"),
        ({"num_hidden_layers": 10**9}, f"expected 1 to {MAX_LAYERS}"),
        (
            {"num_hidden_layers": 3},
            "of layer_types is 2; expected one for each of the 3",
        ),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types is 'linear'"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"sliding_window": None}, "sliding_window is None; expected a number of tok"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected more than 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0; expected more than 1"),
        ({"swiglu_limit": -7.0}, "swiglu_limit is -7.0; expected more than 0"),
        ({"rope_scaling": []}, "rope_scaling is []; expected an object"),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            "expected one of 'default', 'linear', 'llama3', 'yarn', 'longrope', 'dyn",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
        (
            {"quantization_config": 4},
            "quantization_config is 4; expected an object",
        ),
        ({"attention_bias": False}, "attention_bias is False; expected one of True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected one of None, 'silu'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1.5]}, "eos_token_id is [1.5]"),
        ({"eos_token_id": True}, "eos_token_id is True; expected a token id or a"),
    ],
)
def test_one_message_for_each_mistake(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        family_config(changed(**changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_longrope_between_equal_lengths_is_not_stretched() -> None:
    """A file without a factor says so, which is that of the lengths in transformers."""
    lists = dict.fromkeys(("short_factor", "long_factor"), [2.0] * 8)
    config = family_config(changed(rope_scaling={"rope_type": "longrope", **lists}))
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == config.rope_scaling.attention_factor == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.0}, "factor is 0.0; expected more than 0"),
        ({"beta_fast": 1.0}, "beta_fast is 1.0; expected more than beta_slow, 1.0"),
        ({"truncate": "no"}, "truncate is 'no'; expected True or False"),
        ({"attention_factor": 0}, "attention_factor is 0; expected more than 0"),
        ({"mscale": "x", "mscale_all_dim": 1}, "mscale is 'x'; expected a number"),
        ({"alpha": 7}, "alpha is 7; expected no such field in an entry of RoPE"),
    ],
)
def test_yarn_mistakes(changes: dict[str, Any], message: str) -> None:
    entry = config_json(TINY)["rope_scaling"] | changes
    with pytest.raises(ConfigError) as error:
        family_config(changed(rope_scaling=entry))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"vocab_size": ' + "9" * 5_000 + "}", "is not JSON"),
        ("[]", "holds a JSON list; expected an object"),
        ("{}", "model_type is None"),
    ],
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0, "layer_types": ()}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True; expected an integer"),
        ({"hidden_size": 2.0}, "hidden_size is 2.0; expected an integer"),
        ({"head_dim": None}, "head_dim is None; expected an integer"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; expected a number"),
        ({"mlp_bias": 1}, "mlp_bias is 1; expected True or False"),
        ({"num_local_experts": 0}, "num_experts_per_tok is 2; expected 0 to 0"),
    ],
)
def test_direct_construction_is_checked_too(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        replace(TINY, **changes)
    assert message in str(error.value)


# How an engine runs.


def test_a_machine_fills_in_what_is_not_given() -> None:
    asked = EngineConfig(page_size=32, overlap=False)
    assert asked.max_num_seqs is None
    cpu, gpu = asked.resolved("cpu"), asked.resolved("cuda")
    assert (cpu.page_size, gpu.page_size) == (32, 32)
    assert (cpu.max_num_seqs, gpu.max_num_seqs) == (64, 256)
    assert (cpu.max_num_batched_tokens, gpu.max_num_batched_tokens) == (2048, 8192)
    assert (cpu.prefill_chunk, gpu.prefill_chunk) == (512, 8192)
    assert EngineConfig().resolved("cpu").page_size == 16
    assert EngineConfig().resolved("cuda").page_size == 64
    assert not cpu.overlap
    assert cpu.resolved("cuda") == cpu


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"page_size": 0}, ValueError, "page_size is 0; expected 1 to"),
        ({"page_size": 1.0}, TypeError, "page_size is 1.0; expected an integer"),
        ({"max_num_seqs": True}, TypeError, "max_num_seqs is True; expected an integ"),
        ({"num_pages": "8"}, TypeError, "num_pages is '8'; expected an integer"),
        ({"cache_bytes": 2**60}, ValueError, "expected 1 to 281474976710656"),
        ({"overtakes": -1}, ValueError, "overtakes is -1; expected 0 to"),
        ({"max_waiting": None}, TypeError, "max_waiting is None; expected an integer"),
        ({"overlap": 1}, TypeError, "overlap is 1; expected True or False"),
        ({"continuous": None}, TypeError, "continuous is None; expected True or Fal"),
        ({"operations": "fast"}, ValueError, "expected one of 'auto', 'plain', 'fus"),
        ({"operations": 3}, TypeError, "operations is 3; expected a string"),
        ({"num_pages": 8, "cache_bytes": 9}, ValueError, "is 9; expected None beside"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            ValueError,
            "max_num_batched_tokens is 8; expected at least 9, a token for each",
        ),
        (
            {"max_num_seqs": 1, "max_num_batched_tokens": 2**16 - 2},
            ValueError,
            "expected less than 65,535 together",
        ),
    ],
)
def test_an_engine_s_bounds(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        EngineConfig(**options)
    assert message in str(raised.value)


def test_bounds_across_fields_hold_once_the_machine_is_known() -> None:
    EngineConfig(overtakes=0, max_num_seqs=1, max_num_batched_tokens=2**16 - 3)
    many = EngineConfig(max_num_seqs=3000)
    assert many.resolved("cuda").max_num_batched_tokens == 8192
    with pytest.raises(ValueError, match="2048; expected at least 3000, a token for"):
        many.resolved("cpu")
