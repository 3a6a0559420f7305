"""What a family of models is: how its checkpoints say what `ModelConfig` says."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simplellm.base.config import (
    LAYER_TYPES,
    MAX_SIZE,
    ConfigError,
    ModelConfig,
    RopeScaling,
    as_texts,
    check_number,
    end_token_ids,
    expect,
    one_of,
    read,
    reraise_as,
)
from simplellm.checkpoint.names import Name

Data = dict[str, Any]  # a parsed config.json

# By its field of config.json, the values that a thing may have in every model here,
# unless a family says otherwise.
EVERYWHERE: dict[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "is_decoder": (None, True, False),
    "add_cross_attention": (None, False),
    "tie_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
}
# What every family reads, beside what it has a default for.
SHARED = frozenset(
    "model_type architectures text_config auto_map quantization_config "
    "compression_config eos_token_id vocab_size hidden_size intermediate_size "
    "num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "max_position_embeddings original_max_position_embeddings rope_theta rope_scaling "
    "rope_parameters layer_types tie_word_embeddings".split()
)
# What changes nothing that is computed: how a model was trained, what transformers
# returns, how it would sample, who wrote the file.
HARMLESS = frozenset(
    "initializer_range initializer_factor gradient_checkpointing neftune_noise_alpha "
    "pretraining_tp router_aux_loss_coef router_jitter_noise output_router_logits "
    "use_cache cache_implementation attn_implementation output_attentions "
    "output_hidden_states output_scores return_dict return_dict_in_generate "
    "torchscript torch_dtype dtype use_bfloat16 chunk_size_feed_forward "
    "bos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id "
    "decoder_start_token_id tokenizer_class model_max_length max_sequence_length "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens finetuning_task id2label label2id num_labels problem_type "
    "task_specific_params prefix tf_legacy_loss cross_attention_hidden_size "
    "transformers_version transformers.js_config unsloth_version unsloth_fixed "
    "is_llama_config".split()
)
# Such as _name_or_path and _attn_implementation_autoset, and what only trains.
PRIVATE = re.compile(r"^_|dropout$|_pdrop$|^summary_")

OLD_ANGLES = (r"\.rotary_emb\.inv_freq$", None)  # transformers' until 2023
VALUE_HEAD = (r"^v_head\.", None)  # TRL's, of a model trained by PPO
# Spellings of the tensors of a model that sees images, too; only its text part runs.
TEXT_PART = (
    (r"^(model\.)?(vision_tower|multi_modal_projector)\.", None),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.", ""),
)


@dataclass(frozen=True)
class Family:
    """A family as data; `Model.forward` computes them all."""

    name: str  # for people
    model_types: tuple[str, ...]  # in config.json
    architectures: tuple[str, ...]  # likewise
    names: tuple[Name, ...]  # what its tensors are called by us and on the hub
    defaults: Data  # transformers', for what a config.json omits
    activation: str = "swiglu"
    stretched: bool = False  # max_position_embeddings has RoPE's factor in it
    fields: Callable[[Data], Mapping[str, Any]] = lambda data: {}  # of `ModelConfig`
    # Fields of config.json that have another name here.
    keys: Mapping[str, str] = field(default_factory=dict)
    # Values that a field of config.json may have.
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # Fields beside `SHARED` that it reads, and beside `HARMLESS` that change nothing.
    extra_keys: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    # Patterns in tensors' names, and what we expect there; None: nobody needs it.
    spellings: tuple[tuple[str, str | None], ...] = ()

    def spelled(self, stored: str) -> str | None:
        """The name that we expect for a tensor ``stored`` under another."""
        for pattern, mine in (OLD_ANGLES, VALUE_HEAD, *self.spellings):
            if mine is None and re.search(pattern, stored):
                return None
            stored = re.sub(pattern, mine or "", stored)
        return stored

    @property
    def _theirs(self) -> dict[str, str]:
        """What config.json calls those fields that it calls otherwise."""
        return {ours: key for key, ours in self.keys.items()}

    @reraise_as(ConfigError)
    def config(self, data: Data) -> ModelConfig:
        """The config that a parsed config.json describes.

        Raises ConfigError, which has the file's names of fields.
        """
        try:
            return self._config(data)
        except (TypeError, ValueError) as error:
            theirs = self._theirs
            named = re.sub(
                r"\w+", lambda word: theirs.get(word[0], word[0]), str(error)
            )
            error.args = (named,)
            raise

    def _config(self, outer: Data) -> ModelConfig:
        text = outer.get("text_config") or {}
        expect(isinstance(text, dict), "text_config", text, "an object")
        given = {**outer, **text}
        tied = "tie_word_embeddings"
        if outer.get(tied) is not None:  # the head is the whole model's
            given[tied] = outer[tied]
        fixed = {**EVERYWHERE, **self.fixed}
        for key in self.extra_keys:
            fixed.pop(key, None)
        defaults, theirs = dict(self.defaults), self._theirs
        known = SHARED | self.keys.keys() | {*self.extra_keys} | fixed.keys()
        known |= {theirs.get(ours, ours) for ours in defaults}
        for key, value in given.items():
            harmless = key in self.ignores or key in HARMLESS or PRIVATE.search(key)
            what = f"what it changes in a {self.name} is not known here"
            expected = f"no such field: {what}"
            expect(key in known or harmless or value is None, key, value, expected)
        if given.get("rope_parameters") or given.get("rope_scaling"):
            defaults.pop("rope_scaling", None)
        data = defaults | {
            self.keys.get(key, key): value
            for key, value in given.items()
            if key in known
        }
        for name in as_texts("architectures", data.get("architectures"), 8, 800):
            one_of("an entry of architectures", name, self.architectures)
        for key, values in fixed.items():
            one_of(key, data.get(key), values)
        scaling, theta = rope(data)
        fields = read(ModelConfig, {**sizes(data), "rope_theta": theta})
        ends = (end_token_ids(part, fields["vocab_size"]) for part in (outer, text))
        if scaling and not self.stretched:
            longest = longest_text(scaling, fields["max_position_embeddings"])
            fields["max_position_embeddings"] = longest
        count = fields["num_hidden_layers"]
        types = data.get("layer_types") or ["full_attention"] * count
        expect(isinstance(types, list), "layer_types", types, "a list")
        fields |= {
            "activation": self.activation,
            "layer_types": tuple(types),
            **self.fields({**data, **fields}),
        }
        if "sliding_attention" not in fields["layer_types"]:
            fields["sliding_window"] = None
        return ModelConfig(
            **fields,
            model_type=outer["model_type"],
            names=self.names,
            rope_scaling=scaling,
            eos_token_ids=next(filter(None, ends), ()),
        )


def sizes(data: Data) -> dict[str, Any]:
    """``data`` with what follows from other numbers where a file leaves it out."""
    given = {key: value for key, value in data.items() if value is not None}
    names = "hidden_size", "num_attention_heads"
    for name in names:
        check_number(name, data.get(name), int, 1, MAX_SIZE)
    hidden, heads = (data[name] for name in names)
    expected = f"a multiple of num_attention_heads, {heads}, or a head_dim beside it"
    whole = "head_dim" in given or hidden % heads == 0
    expect(whole, "hidden_size", hidden, expected)
    fields = {
        "attention_bias": False,
        "mlp_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "head_dim": hidden // heads,
        "num_key_value_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    return fields | given


def longest_text(scaling: RopeScaling, length: int) -> int:
    """The tokens of a text, where max_position_embeddings is ``length``; as in vLLM."""
    if scaling.rope_type in ("llama3", "longrope"):  # which have the factor in it
        return length
    if scaling.rope_type == "yarn":
        stretched = scaling.original_max_position_embeddings * scaling.factor
    else:
        stretched = length * scaling.factor
    return max(length, int(stretched))


def rope(data: Data) -> tuple[RopeScaling | None, Any]:
    """How the full layers' RoPE is stretched, and its theta, in any spelling."""
    for name in ("rope_parameters", "rope_scaling"):
        value = data.get(name)
        expect(isinstance(value, dict | None), name, value, "an object")
    names = [name for name in ("rope_parameters", "rope_scaling") if data.get(name)]
    entries = [rope_entry(name, data) for name in names] or [(None, None)]
    if len(entries) == 2:  # transformers takes the older one, which others don't
        (first, _), (second, _) = entries
        expected = "what rope_parameters says, or none beside it"
        expect(first == second, "rope_scaling", data["rope_scaling"], expected)
    thetas = [theta for _, theta in entries if theta is not None]
    return entries[0][0], thetas[0] if thetas else data.get("rope_theta")


def rope_entry(name: str, data: Data) -> tuple[RopeScaling | None, Any]:
    """The scaling and the theta, if any, that one field of config.json has."""
    nested = data[name].keys() & set(LAYER_TYPES)
    entry = data[name].get("full_attention", {}) if nested else data[name]
    expect(isinstance(entry, dict), f"full_attention of {name}", entry, "an object")
    one_of("partial_rotary_factor", entry.get("partial_rotary_factor"), (None, 1, 1.0))
    if not entry.get("rope_type") and not entry.get("type"):
        entry = {**entry, "rope_type": "default"}
    longest = data.get("max_position_embeddings")
    length = "original_max_position_embeddings"
    entry = {length: longest, "max_position_embeddings": longest, **entry}
    if data.get(length):  # as transformers has it, which Phi-3 needs
        entry[length] = data[length]
    return RopeScaling.from_dict(entry), entry.get("rope_theta")
