"""Wrong answers to appendix C."""

import torch
from torch.nn import functional

from simplellm.checkpoint import scaled
from simplellm.checkpoint.families.decoder import COMMON, decoder
from simplellm.checkpoint.families.family import Family
from simplellm.checkpoint.families.mistral import same_windows
from simplellm.checkpoint.scaled import LARGEST, LEAST_TILE, multiply_tiles
from simplellm.model.feed_forward import route
from simplellm.model.ops import rms_norm
from wrong import wrong


def heads_of(qkv, kv_heads, dim):
    x = qkv.unflatten(-1, (-1, dim))
    return x.split([x.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)


@wrong("normed_heads", "each head's own")
def norms_the_whole_token(qkv, q_norm, k_norm, kv_heads, eps):
    q, k, v = heads_of(qkv, kv_heads, len(q_norm))
    flat = (
        rms_norm(x.flatten(1), norm.repeat(x.shape[1]), eps).view_as(x)
        for x, norm in ((q, q_norm), (k, k_norm))
    )
    return *flat, v


@wrong("normed_heads", "its own weight")
def swaps_the_weights(qkv, q_norm, k_norm, kv_heads, eps):
    q, k, v = heads_of(qkv, kv_heads, len(q_norm))
    return rms_norm(q, k_norm, eps), rms_norm(k, q_norm, eps), v


@wrong("normed_heads", "comes third is k")
def exchanges_keys_and_values(qkv, q_norm, k_norm, kv_heads, eps):
    q, k, v = heads_of(qkv, kv_heads, len(q_norm))
    return rms_norm(q, q_norm, eps), v, rms_norm(k, k_norm, eps)


@wrong("normed_heads", "v has no norm")
def norms_values(qkv, q_norm, k_norm, kv_heads, eps):
    q, k, v = heads_of(qkv, kv_heads, len(q_norm))
    return rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps), rms_norm(v, k_norm, eps)


@wrong("route_among_all", "before the choice")
def chooses_first(x, weight, bias, top_k):
    return route(x, weight, bias, top_k)


@wrong("route_among_all", "before the choice")
def makes_them_add_up(x, weight, bias, top_k):
    shares, ids = functional.linear(x, weight, bias).softmax(-1).topk(top_k)
    return ids, shares / shares.sum(-1, keepdim=True)


@wrong("route_among_all", "over all experts")
def forgets_the_bias(x, weight, bias, top_k):
    shares, ids = functional.linear(x, weight).softmax(-1).topk(top_k)
    return ids, shares


@wrong("route_among_all", "token 6 chooses experts [1]")
def takes_the_softmax_over_tokens(x, weight, bias, top_k):
    shares, ids = functional.linear(x, weight, bias).softmax(0).topk(top_k)
    return ids, shares


SIZES = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
}
FUSED = {
    "layers.{n}.attn.qkv.weight": "self_attn.qkv_proj.weight",
    "layers.{n}.mlp.gate_up.weight": "mlp.gate_up_proj.weight",
}


def names():
    return tuple(
        name._replace(stored=f"model.layers.{{n}}.{FUSED[name.ours]}")
        if name.ours in FUSED
        else name
        for name in decoder()
    )


SMOLLM3_SIZES = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}


def nope(data, first=1):
    every, count = data["no_rope_layer_interval"], data["num_hidden_layers"]
    turns = data.get("no_rope_layers") or [(n + first) % every for n in range(count)]
    return {"nope_layers": tuple(n for n, x in enumerate(turns) if not x)}


def smol_family(**changes):
    right = {
        "name": "SmolLM3",
        "model_types": ("smollm3",),
        "architectures": ("SmolLM3ForCausalLM",),
        "names": decoder(),
        "defaults": COMMON | SMOLLM3_SIZES,
        "fields": nope,
        "extra_keys": ("no_rope_layers",),
    }
    return Family(**{**right, **changes})


@wrong("smollm3", "no_rope_layers is [1, 0, 1]; expected no")
def does_not_read_the_list():
    return smol_family(extra_keys=())


@wrong("smollm3", "has other logits")
def skips_the_list():
    return smol_family(fields=lambda data: {}, ignores=("no_rope_layers",))


@wrong("smollm3", "has other logits")
def takes_1_for_no_rotation():
    return smol_family(
        fields=lambda data: {
            "nope_layers": tuple(
                n for n, x in enumerate(data.get("no_rope_layers") or ()) if x
            )
        }
    )


@wrong("smollm3", "with an interval of 2")
def counts_from_0():
    return smol_family(fields=lambda data: nope(data, first=0))


@wrong("smollm3", "for SmolLM3, and with your defaults")
def has_llamas_heads():
    return smol_family(defaults=COMMON | SMOLLM3_SIZES | {"num_key_value_heads": None})


def family(**changes):
    right = {
        "name": "Phi-3",
        "model_types": ("phi3",),
        "architectures": ("Phi3ForCausalLM",),
        "names": names(),
        "defaults": COMMON | SIZES | {"rms_norm_eps": 1e-5, "sliding_window": None},
        "fields": same_windows,
    }
    return Family(**{**right, **changes})


@wrong("phi3", "isn't loaded")
def expects_llamas_names():
    return family(names=decoder())


@wrong("phi3", "sliding_window 19")
def forgets_the_window():
    return family(fields=lambda data: {})


@wrong("phi3", "1e-05 for Phi-3")
def takes_anybodys_defaults():
    return family(defaults=COMMON | SIZES | {"sliding_window": None})


@wrong("phi3", "what do your defaults lack")
def takes_no_defaults():
    return family(defaults=COMMON | {"rms_norm_eps": 1e-5, "sliding_window": None})


@wrong("phi3", "no sliding_window")
def takes_mistrals_window():
    known = COMMON | SIZES | {"rms_norm_eps": 1e-5}
    return family(defaults=known | {"sliding_window": 4096})


@wrong("phi3", "no rope_theta")
def takes_another_base():
    known = COMMON | SIZES | {"rms_norm_eps": 1e-5, "sliding_window": None}
    return family(defaults=known | {"rope_theta": 1e6})


@wrong("phi3", "other logits")
def takes_another_activation():
    return family(activation="geglu")


def in_tiles(x, tile):
    rows, columns = tile
    height, width = x.shape[-2:]
    x = functional.pad(x.float(), (0, -width % columns, 0, -height % rows))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def rounds(x, tile, dtype, *, largest, nearest=True):
    """The kept version, with what students change as arguments."""
    parts = in_tiles(x, tile)
    scale = largest(parts) / LARGEST[dtype]
    parts = (parts / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    values = parts.round() if nearest and dtype == torch.int8 else parts
    values = values.to(dtype).flatten(-4, -3).flatten(-2)
    values = values[..., : x.shape[-2], : x.shape[-1]]
    return values, scale.squeeze(-3).squeeze(-1)


def greatest(parts):
    return parts.abs().amax((-3, -1), keepdim=True).clamp(min=LEAST_TILE)


@wrong("round_tiles", "has scale")
def takes_one_scale(x, tile, dtype):
    return rounds(
        x,
        tile,
        dtype,
        largest=lambda parts: parts.abs().max().expand_as(greatest(parts)),
    )


@wrong("round_tiles", "scales of their own")
def shares_scales_among_matrices(x, tile, dtype):
    def largest(parts):
        found = greatest(parts)
        return found.amax(0).expand_as(found) if x.ndim > 2 else found

    return rounds(x, tile, dtype, largest=largest)


@wrong("round_tiles", "nearest")
def cuts_off(x, tile, dtype):
    return rounds(x, tile, dtype, largest=greatest, nearest=False)


@wrong("round_tiles", "needs a scale, too")
def divides_by_zero(x, tile, dtype):
    return rounds(
        x, tile, dtype, largest=lambda parts: parts.abs().amax((-3, -1), keepdim=True)
    )


@wrong("round_tiles", "has scale")
def forgets_the_sign(x, tile, dtype):
    return rounds(
        x,
        tile,
        dtype,
        largest=lambda parts: parts.amax((-3, -1), keepdim=True).clamp(min=LEAST_TILE),
    )


@wrong("round_tiles", "has scale")
def clamps_the_scale(x, tile, dtype):
    parts = in_tiles(x, tile)
    largest = parts.abs().amax((-3, -1), keepdim=True)
    scale = (largest / LARGEST[dtype]).clamp(min=LEAST_TILE)
    values, _ = scaled.round_tiles(x, tile, dtype)
    return values, scale.squeeze(-3).squeeze(-1)


@wrong("round_tiles", "bfloat16")
def computes_in_its_dtype(x, tile, dtype):
    values, scales = scaled.round_tiles(x, tile, dtype)
    return values, scales.to(x.dtype)


def numbers_of(weight):
    return multiply_tiles(weight.values, weight.scales, weight.tile)


@wrong("float_product", "rounded first")
def leaves_inputs_alone(x, weight):
    return functional.linear(x.float(), numbers_of(weight))


@wrong("float_product", "not rounded")
def rounds_always(x, weight):
    values, scales = weight.round_inputs(x)
    rounded = multiply_tiles(values, scales, (1, weight.tile[1]))
    return functional.linear(rounded, numbers_of(weight))


@wrong("float_product", "each token one")
def one_scale_for_all_tokens(x, weight):
    if weight.inputs:
        tile = len(x), weight.tile[1]
        values, scales = scaled.round_tiles(x, tile, weight.values.dtype)
        x = multiply_tiles(values, scales, tile)
    return functional.linear(x.float(), numbers_of(weight))


@wrong("float_product", "each token one")
def one_scale_a_token(x, weight):
    if weight.inputs:
        tile = 1, x.shape[1]
        values, scales = scaled.round_tiles(x, tile, weight.values.dtype)
        x = multiply_tiles(values, scales, tile)
    return functional.linear(x.float(), numbers_of(weight))


@wrong("float_product", "dtype")
def leaves_inputs_short(x, weight):
    if weight.inputs:
        values, scales = weight.round_inputs(x)
        x = multiply_tiles(values, scales, (1, weight.tile[1]))
    return x @ numbers_of(weight).T


@wrong("integer_product", "needs 32 bits")
def adds_up_in_eight_bits(x, weight):
    values, scales = weight.round_inputs(x)
    sums = values @ weight.values.T
    return sums.float() * scales * weight.scales.flatten()


@wrong("integer_product", "exactly")
def adds_up_numbers(x, weight):
    values, scales = weight.round_inputs(x)
    rounded = (values * scales).to(torch.bfloat16).float()
    return functional.linear(rounded, numbers_of(weight))


@wrong("integer_product", "Are they of integers")
def adds_up_in_float32(x, weight):
    values, scales = weight.round_inputs(x)
    sums = values.float() @ weight.values.float().T
    return sums * scales * weight.scales.flatten()


@wrong("integer_product", "Are they of integers")
def multiplies_first(x, weight):
    return scaled.float_product(x, weight)


@wrong("integer_product", "its scale")
def forgets_the_rows(x, weight):
    values, scales = weight.round_inputs(x)
    return (values.int() @ weight.values.int().T) * scales


@wrong("C.1", "and then it's scaled")
def adds_one_last(stored, offset, head_dim, scalar):
    return stored * (1 if scalar is None else (head_dim / scalar) ** 0.5) + offset


@wrong("C.1", "over the root of 4")
def turns_the_root_over(stored, offset, head_dim, scalar):
    return (stored + offset) * (1 if scalar is None else (scalar / head_dim) ** 0.5)


@wrong("C.2", "turns slowly")
def stretches_nothing_slow(plain, factor, low, high, length):
    turns = length * plain / (2 * torch.pi)
    keep = ((turns - low) / (high - low)).clamp(max=1)
    return plain / factor * (1 - keep) + plain * keep


@wrong("C.2", "turns fast")
def stretches_all(plain, factor, low, high, length):
    return plain / factor


@wrong("C.2", "a mixture")
def has_no_ramp(plain, factor, low, high, length):
    turns = length * plain / (2 * torch.pi)
    return torch.where(turns > high, plain, plain / factor)
