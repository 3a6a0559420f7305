"""Every family against transformers, on small random checkpoints that it wrote itself.

All parameters are drawn at random, norms and biases too, and no size is the square of
another: a mistake with any of them is seen.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import CASES, SIZES, Case, change, older, rewrite, write
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from simplellm import LLM, EngineConfig
from simplellm.api.load import load_model
from simplellm.apps.info import describe
from simplellm.base.config import ConfigError
from simplellm.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    RandomCheckpoint,
)
from simplellm.checkpoint.families import ALL, FAMILIES, family_config, read_config
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B
from simplellm.checkpoint.families.llama import LLAMA
from simplellm.checkpoint.formats import format_names
from simplellm.checkpoint.names import tensor_names
from simplellm.model import memory
from simplellm.model.build import embed_transform
from simplellm.model.ops import PLAIN
from simplellm.model.ops_numpy import NUMPY

pytestmark = pytest.mark.usefixtures("quiet_transformers")

TOLERANCE = 1e-4  # worst relative error of a position's logits in float32
MAIN = {  # one of each family
    "Llama llama3", "Qwen2 YaRN", "Qwen3", "Mistral windows", "Mixtral",
    "Qwen3-MoE unnormed", "Gemma3", "SmolLM3", "Granite", "GPT2",
}  # fmt: skip
IDS = torch.randint(101, (150,), generator=torch.Generator().manual_seed(1))
ENGINE = EngineConfig(
    page_size=4,
    num_pages=200,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    prefill_chunk=16,
)


class Theirs:
    """transformers' model of a case, its folder, and the logits of IDS."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.model, self.folder = case.build(), folder
        write(folder, self.model)
        with torch.inference_mode():
            self.logits = self.model(IDS[None]).logits[0]

    @torch.inference_mode()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        for _ in range(count):
            logits = self.model(torch.tensor([ids]), use_cache=False).logits
            ids = [*ids, int(logits[0, -1].argmax())]
        return ids[-count:]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
    """Models of transformers by the names of their cases; do not change the folders."""
    made: dict[str, Theirs] = {}

    def of(name: str) -> Theirs:
        if name not in made:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            made[name] = Theirs(CASES[name](), folder)
        return made[name]

    return of


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a position's logits; NaN if one is."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors.max().item()


def logits(folder: Path, **options: Any) -> Tensor:
    return load_model(folder, device="cpu", **options).logits(IDS)


# The same numbers.


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, theirs, tmp_path: Path, record_property) -> None:
    """With both tables of operations, and config.json in old and new words."""
    oracle = theirs(name)
    assert oracle.logits.std() > 1, "every part is felt in the logits"
    record_property("family", CASES[name]().family)
    errors = [
        worst(logits(oracle.folder, ops=ops), oracle.logits) for ops in (PLAIN, NUMPY)
    ]
    assert all(error < TOLERANCE for error in errors)
    record_property("error", max(errors))
    data = json.loads((oracle.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(older(data)))
    old, new = (read_config(at / "config.json") for at in (tmp_path, oracle.folder))
    assert old == new
    assert older(data) != data


@pytest.mark.parametrize("name", sorted(MAIN))
def test_the_engine_continues_as_they_do(name: str, theirs) -> None:
    """Prompts of mixed lengths, in chunks and pages, beside each other."""
    oracle = theirs(name)
    prompts = [IDS[start : start + n].tolist() for start, n in ((0, 1), (9, 70))]
    prompts += [prompts[1], IDS[50:53].tolist(), IDS[100:133].tolist()]
    expected = [oracle.greedy(prompt, 12) for prompt in prompts]
    assert sum(len({*ids}) for ids in expected) > 15, "who repeats says little"
    for operations in ("auto", "plain"):
        with LLM(oracle.folder, ENGINE, device="cpu", operations=operations) as llm:
            done = llm.generate(prompts, temperature=0, max_tokens=12, ignore_eos=True)
            assert [one.token_ids for one in done.result()] == expected


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE unnormed", "Gemma3"])
def test_several_shards(name: str, theirs, tmp_path: Path) -> None:
    oracle = theirs(name)
    write(tmp_path, oracle.model, shards=3)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    assert worst(logits(tmp_path), oracle.logits) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, theirs) -> None:
    """As near to float32 as transformers is in that dtype, or nearer."""
    oracle = theirs("Qwen3")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        oracle.folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        their_error = worst(again(IDS[None]).logits[0].float(), oracle.logits)
    found = load_model(oracle.folder, device="cpu", dtype=dtype).logits(IDS)
    assert worst(found, oracle.logits) < 1.2 * their_error


def test_gemmas_scale_is_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    """The root of 2304 is a number of bfloat16, that of 1152 is not."""
    table = torch.randn(11, 1152).bfloat16()
    module = Gemma3TextScaledWordEmbedding(11, 1152, 0, embed_scale=1152**0.5)
    module.weight.data = table
    config = CASES["Gemma3"]().build().config.to_dict()
    ours = FAMILIES["gemma3_text"].config({**config, "hidden_size": 1152})
    place = embed_transform(ours, torch.bfloat16, None)
    positions = torch.arange(11)
    expected = module.to(torch.bfloat16)(positions)
    assert torch.equal(place(table.clone(), positions), expected)
    assert not torch.equal(expected, (table.float() * 1152**0.5).bfloat16())


def seeing_mistral(data: dict[str, Any]) -> dict[str, Any]:
    """The config.json of Mistral Small 3.1, which sees images."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "eos_token_id": [1, 7],
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": {key: data[key] for key in data if key != "architectures"},
        "vision_config": {"model_type": "pixtral", "hidden_size": 3},
    }


def seeing_gemma(data: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Gemma that sees images, without what is a default."""
    defaults = json.loads(transformers.Gemma3TextConfig().to_json_string())
    text = {key: value for key, value in data.items() if value != defaults.get(key)}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 7],
        "text_config": {"model_type": "gemma3_text", **text},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 3},
    }


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(
    ("name", "seeing"), [("Gemma3", seeing_gemma), ("Mistral", seeing_mistral)]
)
def test_the_text_part_of_a_model_that_sees(
    name: str, seeing: Any, prefix: str, theirs, tmp_path
) -> None:
    oracle = theirs(name)
    write(tmp_path, oracle.model)
    change(tmp_path, seeing)

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        seen = {"vision_tower.vision_model.embeddings.weight": torch.zeros(3)}
        tensors = {k.replace("model.", prefix, 1): v for k, v in tensors.items()}
        if "lm_head.weight" in tensors and not prefix.startswith("model."):
            tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
        return tensors | seen | {"multi_modal_projector.weight": torch.zeros(2)}

    rewrite(tmp_path, renamed)
    assert worst(logits(tmp_path), oracle.logits) < TOLERANCE
    assert read_config(tmp_path / "config.json").eos_token_ids == (1, 7)


def test_the_whole_models_config_ties_its_head(theirs, tmp_path: Path) -> None:
    """As transformers has it, whatever the text part says."""
    write(tmp_path, theirs("Mistral").model)
    change(tmp_path, seeing_mistral)
    change(tmp_path, lambda data: {**data, "tie_word_embeddings": True})
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert text["tie_word_embeddings"] is False
    assert read_config(tmp_path / "config.json").tie_word_embeddings


def test_other_words_for_the_same(theirs, tmp_path: Path) -> None:
    write(tmp_path, theirs("Llama").model)
    said = {"hidden_act": "swish", "eos_token_id": -1}
    change(tmp_path, lambda data: {**data, **said})
    config = read_config(tmp_path / "config.json")
    assert config.activation == "swiglu" and config.eos_token_ids == ()


def test_gpt2_as_the_hub_has_it(theirs, tmp_path: Path) -> None:
    """Without a prefix, and with the masks of its attention."""
    oracle = theirs("GPT2")
    write(tmp_path, oracle.model)

    def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {k.removeprefix("transformer."): v for k, v in tensors.items()}
        mask = torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril()
        return tensors | {"h.0.attn.bias": mask}

    rewrite(tmp_path, bare)
    assert worst(logits(tmp_path), oracle.logits) < TOLERANCE


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_angles_that_old_files_hold(name: str, theirs, tmp_path: Path) -> None:
    """Until 2023 transformers stored the frequencies of rotations as well."""
    oracle = theirs(name)
    write(tmp_path, oracle.model)
    stored = "model.layers.1.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda tensors: {**tensors, stored: torch.ones(5)})
    assert worst(logits(tmp_path), oracle.logits) < TOLERANCE


def test_the_head_that_ppo_trains_beside_is_left_aside(theirs, tmp_path: Path) -> None:
    """TRL saves it with the model, and transformers says that it doesn't need it."""
    oracle = theirs("Llama")
    write(tmp_path, oracle.model)
    head = {"v_head.summary.weight": torch.ones(1, 48), "v_head.summary.bias": IDS[:1]}
    rewrite(tmp_path, lambda tensors: tensors | head)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert worst(logits(tmp_path), oracle.logits) < TOLERANCE


def test_code_beside_a_known_model_is_left_aside(theirs, tmp_path: Path) -> None:
    """As in transformers, which would fail if it looked for this module."""
    oracle = theirs("Llama")
    write(tmp_path, oracle.model)
    change(tmp_path, given(auto_map={"AutoModelForCausalLM": "nowhere.Mine"}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reference) is type(oracle.model)
    assert worst(logits(tmp_path), oracle.logits) < TOLERANCE


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_that_is_stored_though_tied(shards: int, theirs, tmp_path: Path) -> None:
    """As transformers does: another one counts, the same one is the embedding."""
    oracle = theirs("Llama tied")
    head = torch.randn(101, 48)

    def stored(head: Tensor) -> Tensor:
        write(tmp_path, oracle.model)
        rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": head})
        if shards == 3:
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
            (tmp_path / "model.safetensors").unlink()
            again.save_pretrained(tmp_path, max_shard_size="60KB")
        return logits(tmp_path)

    assert worst(stored(oracle.model.lm_head.weight.clone()), oracle.logits) < TOLERANCE
    assert Checkpoint(tmp_path).config.tie_word_embeddings
    found = stored(head)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(IDS[None]).logits[0]
    assert worst(found, expected) < TOLERANCE < worst(expected, oracle.logits)


def test_a_head_alone_is_the_embedding_too(theirs, tmp_path: Path) -> None:
    oracle = theirs("Llama tied")
    write(tmp_path, oracle.model)
    name = "model.embed_tokens.weight"
    rewrite(tmp_path, lambda t: {k if k != name else "lm_head.weight": t[k] for k in t})
    assert worst(logits(tmp_path), oracle.logits) < TOLERANCE


@torch.inference_mode()
def test_longrope_of_short_texts(theirs) -> None:
    """An engine whose texts don't get longer than the original length divides so."""
    oracle = theirs("Llama longrope")
    config = replace(ENGINE, max_model_len=100)
    with LLM(oracle.folder, config, device="cpu") as llm:
        found = llm.engine_core.runner.model.logits(IDS[:90])
    expected = oracle.model(IDS[None, :90]).logits[0]
    assert (
        worst(found, expected) < TOLERANCE < worst(logits(oracle.folder)[:90], expected)
    )


@torch.inference_mode()
def test_longrope_is_for_short_texts_where_vllm_has_it_so(
    theirs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless max_model_len says otherwise: Phi-3's original length is outside."""
    oracle = theirs("Llama longrope")
    write(tmp_path, oracle.model)
    change(tmp_path, given(original_max_position_embeddings=100))
    expected = oracle.model(IDS[None, :90]).logits[0]
    for longest, length in ((None, 100), (150, 150)):
        with LLM(tmp_path, ENGINE, device="cpu", max_model_len=longest) as llm:
            assert llm.engine_core.max_model_len == length
            found = llm.engine_core.runner.model.logits(IDS[:90])
        assert (worst(found, expected) < TOLERANCE) == (length == 100)
        assert ("max_model_len allows" in caplog.text) == (longest is None)
        caplog.clear()


@pytest.mark.parametrize("longest", [60, 120, None])
@torch.inference_mode()
def test_dynamic_rope_is_that_of_the_longest_text(longest: int | None, theirs) -> None:
    """transformers' base follows each text's length; ours is the same for all."""
    oracle, length = theirs("Llama dynamic"), longest or 2 * 75
    expected = oracle.model(IDS[None, :length]).logits[0]
    with LLM(oracle.folder, ENGINE, device="cpu", max_model_len=longest) as llm:
        assert llm.engine_core.max_model_len == length
        found = llm.engine_core.runner.model.logits(IDS[:length])
    assert worst(found, expected) < TOLERANCE
    plain = oracle.model(IDS[None, :50]).logits[0]  # which is as short as in training
    assert (worst(found[:50], plain) < TOLERANCE) == (length <= 75)


# What config.json leaves out.


@pytest.mark.parametrize("name", sorted(MAIN))
def test_defaults_are_those_of_transformers(name: str) -> None:
    """What they write for a config without arguments describes an empty config.json."""
    settings = getattr(transformers, CASES[name]().config)()
    family = FAMILIES[settings.model_type]
    whole = family.config(json.loads(settings.to_json_string()))
    empty = family.config({"model_type": settings.model_type})
    assert {**vars(empty), "eos_token_ids": whole.eos_token_ids} == vars(whole)


MULTIPLIERS = "embedding attention residual".split()
GRANITE = {f"{part}_multiplier": 2.0 for part in MULTIPLIERS} | {"logits_scaling": 3.0}


@pytest.mark.parametrize("field", GRANITE)
def test_a_family_knows_each_field_that_it_gets(field: str) -> None:
    """Granite as somebody adds it who takes it for a Llama: refused by its fields."""
    granite = replace(LLAMA, name="Granite", model_types=("granite",))
    data = {**SIZES, "model_type": "granite"}
    assert granite.config(data).hidden_size == 48
    message = f"{field} is {GRANITE[field]}; expected no such field: .* in a Granite is"
    with pytest.raises(ConfigError, match=message):
        granite.config({**data, field: GRANITE[field]})
    assert granite.config({**data, field: None}) == granite.config(data)


REAL = {  # what some of the hub's files have beside what transformers writes today
    "Llama": {
        "pretraining_tp": 1, "rope_interleaved": False, "is_llama_config": True,
        "transformers.js_config": {"dtype": {}}, "unsloth_version": "2025.1",
        "_attn_implementation_autoset": True, "temperature": 0.6, "id2label": {},
    },
    "Qwen3-MoE": {"max_window_layers": 48, "router_aux_loss_coef": 0.001},
    "Mixtral": {"router_jitter_noise": 0.0, "output_router_logits": False},
    "Gemma3": {
        "cache_implementation": "hybrid", "boi_token_index": 5, "eoi_token_index": 6,
        "image_token_index": 7, "mm_tokens_per_image": 256, "vision_config": {"a": 1},
    },
    "GPT2": {
        "n_ctx": 1024, "task_specific_params": {"a": 1}, "summary_type": "x",
        "n_special": 0, "predict_special_tokens": True, "output_past": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_what_changes_nothing_is_taken(name: str, theirs) -> None:
    data = json.loads((theirs(name).folder / "config.json").read_text())
    family = FAMILIES[data["model_type"]]
    assert family.config(data | REAL[name]) == family.config(data)


@pytest.mark.parametrize("gone", ["head_dim", "num_key_value_heads"])
def test_sizes_that_follow_from_others(gone: str) -> None:
    data: dict[str, Any] = {**SIZES, "model_type": "llama", gone: None}
    config = FAMILIES["llama"].config(data)
    expected = {"head_dim": 8, "num_key_value_heads": 6}
    assert getattr(config, gone) == expected[gone]


def test_yarns_own_factor_may_be_multiplied() -> None:
    """DeepSeek-R1-0528-Qwen3-8B does so, in vLLM's words, by one over that."""
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 99}
    data: dict[str, Any] = {**SIZES, "model_type": "qwen3"}
    given = [{"attn_factor": 1 / (1 + 0.1 * math.log(4))}, {"attention_factor": 1.0}]
    found = [
        FAMILIES["qwen3"].config({**data, "rope_scaling": entry | one}) for one in given
    ]
    first, second = (config.rope_scaling.attention_factor for config in found)
    assert first == pytest.approx(second)


@torch.inference_mode()
def test_yarn_makes_room_for_longer_texts(theirs) -> None:
    """People add it to Qwen's config.json, and leave the old length beside it."""
    oracle, ids = theirs("Qwen2 YaRN"), torch.arange(400) % 101
    config = read_config(oracle.folder / "config.json")
    assert oracle.model.config.max_position_embeddings == 256
    assert config.max_position_embeddings == 4 * 200
    expected = oracle.model(ids[None]).logits[0]
    found = load_model(oracle.folder, device="cpu").logits(ids)
    assert worst(found, expected) < TOLERANCE
    with LLM(oracle.folder, ENGINE, device="cpu") as llm:
        assert llm.engine_core.max_model_len == 800


@torch.inference_mode()
def test_linear_rope_makes_room_for_longer_texts(theirs) -> None:
    """Vicuna 16k's max_position_embeddings is 4096, and its factor 4."""
    oracle, ids = theirs("Llama linear"), torch.arange(600) % 101
    assert oracle.model.config.max_position_embeddings == 256
    found = load_model(oracle.folder, device="cpu").logits(ids)
    assert worst(found, oracle.model(ids[None]).logits[0]) < TOLERANCE
    with LLM(oracle.folder, replace(ENGINE, num_pages=300), device="cpu") as llm:
        assert llm.engine_core.max_model_len == 4 * 256


@pytest.mark.parametrize("name", ["Llama llama3", "Llama longrope", "Gemma3"])
def test_a_length_that_has_the_factor_in_it_stays(name: str, theirs) -> None:
    """As vLLM has it: of these, published files say how long texts are in the end."""
    config = read_config(theirs(name).folder / "config.json")
    assert config.rope_scaling is not None and config.rope_scaling.factor > 1
    assert config.max_position_embeddings == 256


def test_gemmas_local_layers() -> None:
    data = {"model_type": "gemma3_text", "num_hidden_layers": 7}
    config = FAMILIES["gemma3_text"].config(data)
    kinds = [kind.partition("_")[0] for kind in config.layer_types]
    assert kinds == ["sliding"] * 5 + ["full", "sliding"]
    config = FAMILIES["gemma3_text"].config({**data, "sliding_window_pattern": 2})
    kinds = [kind.partition("_")[0] for kind in config.layer_types]
    assert kinds == ["sliding", "full"] * 3 + ["sliding"]


# What people are told, and random weights.


@pytest.mark.parametrize("name", sorted(MAIN))
def test_info_names_the_family_and_the_format(name: str, theirs) -> None:
    oracle = theirs(name)
    family = FAMILIES[oracle.model.config.model_type].name
    lines = [*describe(str(oracle.folder))]
    assert f"family       {family}" in lines
    total = sum(parameter.numel() for parameter in oracle.model.parameters())
    (row,) = (line for line in lines if line.startswith("total"))
    assert row.split()[1:3] == [f"{total:,}", f"{4 * total:,}"]
    assert any("F32" in line for line in lines)
    assert max(map(len, lines[1:])) <= 80


def test_the_start_line_names_the_family(theirs, caplog) -> None:
    with caplog.at_level("INFO", logger="simplellm"):
        LLM(theirs("Qwen3").folder, ENGINE, device="cpu").close()
    assert any("computing Qwen3 on" in record.message for record in caplog.records)


@pytest.mark.parametrize("name", sorted(MAIN))
def test_random_weights_have_the_shapes(name: str, theirs) -> None:
    checkpoint = Checkpoint(theirs(name).folder)
    random = RandomCheckpoint(checkpoint.config, dtype=torch.float32)
    assert random.names() == checkpoint.names()
    for ours in random.names():
        assert random[ours].shape == checkpoint[ours].shape
    found = load_model(theirs(name).folder, device="cpu", random_weights=True)
    assert found.logits(IDS).isfinite().all()


def test_a_weight_is_the_file_unless_it_has_parts(theirs) -> None:
    """One write to a view shows in another; what has parts was copied, once."""
    checkpoint = Checkpoint(theirs("GPT2").folder)
    for ours in checkpoint.names():
        again = [checkpoint[ours].data_ptr() for _ in range(2)]
        assert again[0] == again[1]
    checkpoint = Checkpoint(theirs("Llama").folder)
    copies = {name for name in checkpoint.names() if is_copy(checkpoint, name)}
    assert {name.split(".", 2)[-1] for name in copies} == {
        "attn.qkv.weight",
        "mlp.gate_up.weight",
    }


def is_copy(checkpoint: Checkpoint, ours: str) -> bool:
    one, two = checkpoint[ours], checkpoint[ours]  # both live, so that none is reused
    return one.data_ptr() != two.data_ptr()


def test_tables_of_names() -> None:
    """Each family's model types, architectures and names are its own."""
    assert len({family.name for family in ALL}) == len(ALL)
    for family in ALL:
        names = [name.ours for name in family.names]
        assert len(set(names)) == len(names)
    assert "embed_tokens.weight" in tensor_names(GPT_OSS_20B)
    assert PLAIN.name != NUMPY.name


# The fields that public checkpoints have in config.json, with switches that are off.
PUBLIC: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data/public-configs.json").read_text("utf-8")
)
QUANTIZED = {
    "AWQ": "AWQ",
    "GPTQ-Int4": "GPTQ",
    "w4a16": "INT4",
    "A3B-FP8": "FP8 in blocks",
    "Instruct-FP8": "FP8",
    "oss-20b": "MXFP4",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_configs_of_public_checkpoints(name: str) -> None:
    data = PUBLIC[name]
    config = family_config(data)
    form = [form for end, form in QUANTIZED.items() if name.endswith(end)]
    assert format_names(config) == "".join(form)
    text = {**data, **data.get("text_config", {})}
    theirs = transformers.AutoConfig.for_model(**text)
    assert config.num_hidden_layers == theirs.num_hidden_layers
    assert config.vocab_size == theirs.vocab_size
    heads = theirs.num_attention_heads
    width = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    assert (config.num_attention_heads, config.head_dim) == (heads, width)
    assert config.tie_word_embeddings == theirs.tie_word_embeddings


OFF = ("use_mrope", "qkv_bias", "shared_expert_intermediate_size", "use_qk_norm")


@pytest.mark.parametrize("field", OFF)
def test_a_switch_that_is_on_is_refused(field: str) -> None:
    data = next(data for data in PUBLIC.values() if field in data)
    with pytest.raises(ConfigError, match=field):
        family_config({**data, field: not data[field]})


# What is refused, by its name and before anything is loaded.

Edit = Callable[[dict[str, Any]], dict[str, Any]]


def given(**changes: Any) -> Edit:
    return lambda data: data | changes


CONFIGS: dict[str, tuple[str, Edit, str]] = {
    "family": ("Llama", given(model_type="mamba"), "model_type is 'mamba'; expected"),
    "vision family": ("Llama", given(model_type="llava"), "model_type is 'llava'"),
    "code": (
        "Llama", given(model_type="mine", auto_map={"AutoModel": "x.Y"}),
        "auto_map is {'AutoModel': 'x.Y'}; expected none beside an unknown model_type",
    ),
    "HQQ": (
        "Llama", given(quantization_config={"quant_method": "hqq"}),
        "quantization_config.quant_method is 'hqq'",
    ),
    "MLX": (
        "Llama", given(quantization={"bits": 4, "group_size": 64}),
        "expected none, which is MLX's format: the weights",
    ),
    "GPTQ without bits": (
        "Qwen3", given(quantization_config={"quant_method": "gptq"}),
        "quantization_config.bits is None",
    ),
    "no format": (
        "Llama", given(quantization_config=3), "quantization_config is 3; expected an",
    ),
    "a classifier": (
        "Llama", given(architectures=["LlamaForSequenceClassification"]),
        "an entry of architectures is 'LlamaForSequ",
    ),
    "architectures": ("Llama", given(architectures=3), "architectures is 3"),
    "softcap": (
        "Gemma3", given(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0",
    ),
    "last softcap": (
        "Gemma3", given(final_logit_softcapping=30), "final_logit_softcapping is 30",
    ),
    "bidirectional": (
        "Gemma3", given(use_bidirectional_attention=True), "use_bidirectional_att",
    ),
    "layers without RoPE": (
        "Llama", given(no_rope_layers=[1, 0, 1]),
        "no_rope_layers is [1, 0, 1]; expected no such field: what it changes in a "
        "Llama 3 is not known here",
    ),
    "how many rotate": (
        "SmolLM3", given(no_rope_layers=[1, 0]),
        "no_rope_layers is (1, 0); expected 0 or 1 for each of the 3 layers",
    ),
    "every so many": (
        "SmolLM3", given(no_rope_layers=None, no_rope_layer_interval=0),
        "no_rope_layer_interval is 0; expected 1",
    ),
    "a multiplier": (
        "Granite", given(residual_multiplier=0),
        "residual_multiplier is 0; expected more than 0",
    ),
    "a name of ours": ("Qwen3", given(norm_offset=1.0), "norm_offset is 1.0; expected"),
    "what another family reads": (
        "Mistral", given(attention_bias=True), "attention_bias is True; expected one",
    ),
    "activation": ("Llama", given(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "another GELU": (
        "GPT2", given(activation_function="relu"), "activation_function is 'relu'",
    ),
    "scale of scores": (
        "GPT2", given(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True",
    ),
    "rope": (
        "Llama", given(rope_parameters={"rope_type": "mrope", "rope_theta": 1e4}),
        "rope_type is 'mrope'",
    ),
    "rope's fields": (
        "Llama", given(rope_parameters={"rope_type": "default", "mrope_section": [1]}),
        "mrope_section is [1]; expected no such field in an entry of RoPE",
    ),
    "two ropes": (
        "Llama", given(rope_scaling={"type": "linear", "factor": 4.0}),
        "rope_scaling is {'factor': 4.0, 'type': 'linear'}; expected what rope_paramet",
    ),
    "no factors": (
        "Llama longrope",
        lambda data: data | {
            "rope_parameters": {**data["rope_parameters"], "long_factor": None}
        },
        "long_factor is None; expected a list of numbers",
    ),
    "too few factors": (
        "Llama longrope",
        lambda data: data | {
            "rope_parameters": {**data["rope_parameters"], "long_factor": [1, 2]}
        },
        "the length of long_factor is 2; expected 5, one for each pair",
    ),
    "a factor below 0": (
        "Llama longrope",
        lambda data: data | {
            "rope_parameters": {**data["rope_parameters"], "short_factor": [-1] * 5}
        },
        "an entry of short_factor is -1; expected more than 0",
    ),
    "rope's kind": ("Llama", given(rope_parameters=[1]), "rope_parameters is [1]"),
    "rope's layers": (
        "Gemma3", given(rope_parameters={"full_attention": 3}), "full_attention of",
    ),
    "local rope": (
        "Gemma3",
        given(rope_parameters={"sliding_attention": {"rope_type": "yarn"}}),
        "rope_type of sliding_attention is 'yarn'",
    ),
    "part of a head turns": (
        "Llama", given(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5",
    ),
    "theta": ("Llama", given(rope_parameters={"rope_theta": "x"}), "rope_theta is 'x'"),
    "thresholds": (
        "Llama llama3",
        lambda data: data | {
            "rope_parameters": {**data["rope_parameters"], "high_freq_factor": 1.0}
        },
        "high_freq_factor is 1.0; expected more than low_freq_factor, 1.0",
    ),
    "heads": (
        "Llama", given(hidden_size=50, head_dim=None),
        "hidden_size is 50; expected a multiple of num_attention_heads, 6",
    ),
    "a text for a size": ("Llama", given(hidden_size="48"), "hidden_size is '48'"),
    "a name of the hub's": ("GPT2", given(n_embd="48"), "n_embd is '48'; expected an"),
    "another network's size": (
        "Qwen3-MoE", given(moe_intermediate_size=0), "moe_intermediate_size is 0",
    ),
    "that of few layers": (
        "Qwen3-MoE", given(intermediate_size="80"), ": intermediate_size is '80'",
    ),
    "heads of the hub's": (
        "GPT2", given(n_head=5), "n_embd is 48; expected a multiple of n_head, 5",
    ),
    "local theta": (
        "Gemma3", given(rope_parameters=None, rope_local_base_freq=0),
        "rope_local_base_freq is 0; expected more than 1",
    ),
    "a token below 0": ("Qwen3", given(eos_token_id=-2), "eos_token_id is -2"),
    "a token too many": (
        "Qwen3", given(eos_token_id=[7, 101]),
        "eos_token_id is [7, 101]; expected a token id or a list of them, each 0 to 1",
    ),
    "odd head_dim": ("Llama", given(head_dim=9), "head_dim is 9; expected an even"),
    "bias": ("Qwen3", given(attention_bias="yes"), "attention_bias is 'yes'"),
    "tied": ("Qwen3", given(tie_word_embeddings="no"), "tie_word_embeddings is 'no'"),
    "layer types": ("Qwen3", given(layer_types="full"), "layer_types is 'full'"),
    "a layer type": (
        "Qwen3", given(layer_types=["chunked_attention"] * 3), "entry of layer_types",
    ),
    "windows": (
        "Qwen2 windows", given(layer_types=None, max_window_layers=-1),
        "max_window_layers is -1",
    ),
    "no window": (
        "Qwen2 windows", given(sliding_window=None), "sliding_window is None",
    ),
    "pattern": (
        "Gemma3", given(layer_types=None, sliding_window_pattern="6"),
        "sliding_window_pattern is '6'",
    ),
    "text part": ("Gemma3", given(text_config=[1]), "text_config is [1]"),
    "shares": ("Qwen3-MoE", given(norm_topk_prob="yes"), "norm_topk_prob is 'yes'"),
    "every other layer": (
        "Qwen3-MoE", given(decoder_sparse_step=0), "decoder_sparse_step is 0",
    ),
    "layers without": (
        "Qwen3-MoE", given(mlp_only_layers="1"), "mlp_only_layers is '1'",
    ),
    "experts": (
        "Mixtral", given(num_experts_per_tok=9), "num_experts_per_tok is 9; expected 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONFIGS)
def test_configs_that_are_refused(fault: str, theirs, tmp_path: Path) -> None:
    name, edit, message = CONFIGS[fault]
    oracle = theirs(name)
    data = edit(json.loads((oracle.folder / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "model.safetensors").symlink_to(oracle.folder / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        LLM(tmp_path, device="cpu")
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


Q, EXPERT = "model.layers.1.self_attn.q_proj.weight", "mlp.experts.3.up_proj.weight"
TENSORS: dict[str, tuple[str, Edit, Callable[..., Any], str]] = {
    "hidden size": (
        "Llama", given(hidden_size=54), dict, "has shape [101, 48]; expected [101, 54]",
    ),
    "heads": (
        "Llama", given(num_attention_heads=8), dict,
        "self_attn.q_proj.weight' has shape [60, 48]; expected [80, 48]",
    ),
    "layers": ("Qwen3", given(num_hidden_layers=4, layer_types=None), dict,
        "lacks 'model.layers.3.input",
    ),
    "fewer layers": ("Qwen3", given(num_hidden_layers=2, layer_types=None), dict,
        "holds 'model.layers.2.",
    ),
    "tied": ("Qwen3 tied", given(tie_word_embeddings=False), dict, "lacks 'lm_head"),
    "no biases": ("Qwen3", given(attention_bias=True), dict, "lacks 'model.layers.0."),
    "experts": (
        "Qwen3-MoE", given(num_local_experts=6), dict,
        "lacks 'model.layers.0.mlp.experts.5.down_proj.weight'",
    ),
    "which have experts": (
        "Qwen3-MoE", given(mlp_only_layers=[0]), dict,
        "lacks 'model.layers.0.mlp.down_proj.weight'",
    ),
    "missing": ("Llama", dict, without(Q), f"lacks '{Q}'"),
    "missing expert": (
        "Qwen3-MoE", dict, without(f"model.layers.2.{EXPERT}"),
        f"lacks 'model.layers.2.{EXPERT}'",
    ),
    "one too many": (
        "Llama", dict, lambda tensors: {**tensors, "score.weight": torch.zeros(2)},
        "holds 'score.weight' too",
    ),
    "not turned": (
        "GPT2", dict,
        lambda tensors: {
            k: v.t().contiguous() if "c_" in k else v for k, v in tensors.items()
        },
        "'h.0.attn.c_attn.weight' has shape [144, 48]; expected [48, 144]",
    ),
    "numbers": (
        "Llama", dict,
        lambda tensors: {k: (v * 9).to(torch.uint8) for k, v in tensors.items()},
        "is 'U8'; expected BF16, F16, F32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", TENSORS)
def test_tensors_that_contradict(fault: str, theirs, tmp_path: Path) -> None:
    name, edit, edit_tensors, message = TENSORS[fault]
    write(tmp_path, theirs(name).model)
    change(tmp_path, edit)
    rewrite(tmp_path, edit_tensors)
    with pytest.raises(CheckpointError) as error:
        LLM(tmp_path, device="cpu")
    assert str(error.value).startswith(str(tmp_path))
    assert message in str(error.value)


def test_positions_beyond_all_memory(theirs, tmp_path: Path, monkeypatch) -> None:
    """The angles of all positions are a table; there is a word about its size."""
    write(tmp_path, theirs("Llama").model)
    change(tmp_path, given(max_position_embeddings=2**31 - 1))
    monkeypatch.setattr(memory, "free_bytes", lambda device: (10**11, 10**11))
    with pytest.raises(MemoryError, match=r"about 17\d\.\d for a step"):
        LLM(tmp_path, ENGINE, device="cpu")


def test_pickles_are_never_loaded(theirs, tmp_path: Path) -> None:
    write(tmp_path, theirs("Llama").model)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickle files, which run code"):
        LLM(tmp_path, device="cpu")
