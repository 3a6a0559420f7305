"""The tensors that most decoders have, as they are called on the Hugging Face hub."""

from simplellm.checkpoint.names import Name, layer_name

ATTENTION = (
    layer_name("attn.qkv.weight", "QKV hidden", "self_attn.{q,k,v}_proj.weight", "QKV"),
    layer_name("attn.o.weight", "hidden Q", "self_attn.o_proj.weight", "Q"),
)
QKV_BIAS = (layer_name("attn.qkv.bias", "QKV", "self_attn.{q,k,v}_proj.bias", "QKV"),)
# Of those families that let config.json say whether there are any.
BIASES = (
    QKV_BIAS[0]._replace(needs="attention_bias"),
    layer_name(
        "attn.o.bias", "hidden", "self_attn.o_proj.bias", needs="attention_bias"
    ),
)
QK_NORMS = (
    layer_name("attn.q_norm.weight", "D", "self_attn.q_norm.weight"),
    layer_name("attn.k_norm.weight", "D", "self_attn.k_norm.weight"),
)
MLP = (
    layer_name("mlp.gate_up.weight", "2F hidden", "mlp.{gate,up}_proj.weight", "2F"),
    layer_name("mlp.down.weight", "hidden F", "mlp.down_proj.weight", "F"),
)


def decoder(
    *attention: Name,
    mlp: tuple[Name, ...] = MLP,
    mlp_norm: str = "post_attention_layernorm.weight",
) -> tuple[Name, ...]:
    """The name table of a decoder with an RMSNorm before each of its parts.

    ``attention`` is what a layer has beside the matrices of `ATTENTION`.
    """
    return (
        Name("embed_tokens.weight", "V hidden", "model.embed_tokens.weight", "V"),
        layer_name("attn_norm.weight", "hidden", "input_layernorm.weight"),
        *ATTENTION,
        *attention,
        layer_name("mlp_norm.weight", "hidden", mlp_norm),
        *mlp,
        Name("norm.weight", "hidden", "model.norm.weight"),
        Name("lm_head.weight", "V hidden", "lm_head.weight", "V"),
    )


# What transformers takes for granted in all of these.
COMMON = {
    "hidden_act": "silu",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
