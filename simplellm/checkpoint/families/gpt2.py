"""GPT-2: LayerNorms, learned positions, and weights stored the other way round."""

from simplellm.checkpoint.families.family import Family
from simplellm.checkpoint.names import Name


def conv(ours: str, shape: str, theirs: str, split: str = "") -> Name:
    """One tensor of every layer; a matrix is stored [in, out], as a Conv1D."""
    name = Name(f"layers.{{n}}.{ours}", shape, f"h.{{n}}.{theirs}", split)
    return name._replace(turned=" " in shape)


GPT2 = Family(
    name="GPT-2",
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    names=(
        Name("embed_tokens.weight", "V hidden", "wte.weight", "V"),
        Name("embed_positions.weight", "P hidden", "wpe.weight"),
        conv("attn_norm.weight", "hidden", "ln_1.weight"),
        conv("attn_norm.bias", "hidden", "ln_1.bias"),
        conv("attn.qkv.weight", "QKV hidden", "attn.c_attn.weight", "QKV"),
        conv("attn.qkv.bias", "QKV", "attn.c_attn.bias", "QKV"),
        conv("attn.o.weight", "hidden Q", "attn.c_proj.weight", "Q"),
        conv("attn.o.bias", "hidden", "attn.c_proj.bias"),
        conv("mlp_norm.weight", "hidden", "ln_2.weight"),
        conv("mlp_norm.bias", "hidden", "ln_2.bias"),
        conv("mlp.gate_up.weight", "F hidden", "mlp.c_fc.weight", "F"),
        conv("mlp.gate_up.bias", "F", "mlp.c_fc.bias", "F"),
        conv("mlp.down.weight", "hidden F", "mlp.c_proj.weight", "F"),
        conv("mlp.down.bias", "hidden", "mlp.c_proj.bias"),
        Name("norm.weight", "hidden", "ln_f.weight"),
        Name("norm.bias", "hidden", "ln_f.bias"),
        Name("lm_head.weight", "V hidden", "lm_head.weight", "V"),
    ),
    keys={
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    defaults={
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "activation_function": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 10_000.0,  # of no use: see `learned_positions`
    },
    activation="gelu",
    fields=lambda data: {"learned_positions": True},
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
    },
    ignores=(
        *("n_ctx", "n_special", "predict_special_tokens", "output_past"),
        "reorder_and_upcast_attn",
    ),
    # The hub's own files lack the prefix, and hold the masks.
    spellings=((r"^transformer\.", ""), (r"\.attn\.(masked_)?bias$", None)),
)
