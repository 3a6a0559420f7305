"""What a GGUF file calls our tensors."""

from simplellm.checkpoint.names import parts_of

# By the end of our name: in a layer, behind "blk.{n}.", or else at the top.
STORED = {
    "embed_tokens.weight": "token_embd.weight",
    "attn_norm.weight": "attn_norm.weight",
    "attn.qkv.weight": "attn_{q,k,v}.weight",
    "attn.qkv.bias": "attn_{q,k,v}.bias",
    "attn.o.weight": "attn_output.weight",
    "attn.o.bias": "attn_output.bias",
    "attn.sinks": "attn_sinks.weight",
    "attn.q_norm.weight": "attn_q_norm.weight",
    "attn.k_norm.weight": "attn_k_norm.weight",
    "attn_post_norm.weight": "post_attention_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp.gate_up.weight": "ffn_{gate,up}.weight",
    "mlp.gate_up.bias": "ffn_{gate,up}.bias",
    "mlp.down.weight": "ffn_down.weight",
    "mlp.down.bias": "ffn_down.bias",
    "mlp_post_norm.weight": "post_ffw_norm.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "experts.gate_up": "ffn_{gate,up}_exps.weight",
    "experts.gate_up_bias": "ffn_{gate,up}_exps.bias",
    "experts.down": "ffn_down_exps.weight",
    "experts.down_bias": "ffn_down_exps.bias",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# By model_type, what it calls otherwise.
STORED_OF = {
    "gpt_oss": STORED | {"mlp_norm.weight": "post_attention_norm.weight"},
    "gpt2": STORED
    | {
        "embed_positions.weight": "position_embd.weight",
        "attn_norm.bias": "attn_norm.bias",
        "attn.qkv.weight": "attn_qkv.weight",
        "attn.qkv.bias": "attn_qkv.bias",
        "mlp_norm.bias": "ffn_norm.bias",
        "mlp.gate_up.weight": "ffn_up.weight",
        "mlp.gate_up.bias": "ffn_up.bias",
        "norm.bias": "output_norm.bias",
    },
}


def stored_as(ours: str, model_type: str) -> list[str]:
    """What is in the file for our tensor ``ours``: one name, or those of its parts."""
    table = STORED_OF.get(model_type, STORED)
    prefix, rest = "", ours
    if ours.startswith("layers."):
        _, layer, rest = ours.split(".", 2)
        prefix = f"blk.{layer}."
    return [prefix + part for part in parts_of(table[rest])]
