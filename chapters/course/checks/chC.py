"""Appendix C: other models."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional

from simplellm.api.load import load_model
from simplellm.checkpoint.families import FAMILIES
from simplellm.checkpoint.families.family import Family
from simplellm.checkpoint.scaled import E4M3, LARGEST, Scaled


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found, expected, allowed, said):
    """That numbers are right up to a share of the largest one."""
    assert isinstance(found, torch.Tensor), f"expected a tensor, got {type(found)}"
    shapes = list(found.shape), list(expected.shape)
    assert shapes[0] == shapes[1], f"its shape is {shapes[0]}, expected {shapes[1]}"
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= allowed, f"off by {error:.2g} of the largest number: {said}"


def rms(x, weight, eps):
    """In float64, over the last axis."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def check_normed_heads(normed_heads):
    """q and k by the head, each with its own weight; v stays."""
    heads, kv, dim, eps = 6, 2, 10, 1e-3
    x = random(4, (heads + 2 * kv) * dim) * torch.logspace(-2, 2, 100)
    weights = 1 + random(dim, seed=1) / 3, 1 + random(dim, seed=2) / 3
    given = x.clone()
    found = normed_heads(x, *weights, kv, eps)
    assert found is not None and len(found) == 3, "return q, k and v"
    assert torch.equal(x, given), "qkv itself has to stay as it is"
    q, k, v = given.unflatten(-1, (-1, dim)).split([heads, kv, kv], dim=1)
    exchanged = rms(k, weights[1], eps)
    assert found[2].shape != k.shape or (found[2] - exchanged).abs().max() > 1e-3, (
        "what comes third is k with its norm: qkv holds q, then k, then v, and so does "
        "what you return"
    )
    close(found[2], v.double(), 1e-6, "v has no norm")
    for name, got, part, weight in zip("qk", found, (q, k), weights, strict=False):
        whole = rms(part.flatten(1), weight.repeat(part.shape[1]), eps)
        wrong = got.double() - whole.unflatten(-1, (-1, dim))
        assert wrong.abs().max() > 1e-3, (
            f"{name}: the mean of the squares is each head's own, over its {dim} "
            "numbers, not one over all heads of the token"
        )
        why = f"{name} has its own weight, and eps is added under the root"
        close(got, rms(part, weight, eps), 1e-4, why)


def check_route_among_all(route_among_all):
    """Shares of all experts, of which the best ones are kept as they are."""
    x, weight, bias = random(7, 12), random(5, 12, seed=1), random(5, seed=2)
    for given in (bias, None):
        for top_k in (1, 2):
            found = route_among_all(x, weight, given, top_k)
            assert found is not None, "return the ids and the weights"
            ids, weights = found
            assert not ids.is_floating_point(), "the ids come first, then the weights"
            logits = x.double() @ weight.double().T
            logits = logits if given is None else logits + given
            all_of_them = logits.softmax(-1)
            expected, best = all_of_them.topk(top_k)
            for token, (right, yours) in enumerate(zip(best, ids, strict=True)):
                assert torch.equal(yours, right), (
                    f"token {token} chooses experts {right.tolist()}, best first, and "
                    f"yours are {yours.tolist()}; is the bias in?"
                )
            total = weights.sum(-1)
            assert not torch.allclose(total, torch.ones_like(total)), (
                "the weights add up to 1: what the other experts got is gone. The "
                "softmax comes before the choice"
            )
            close(weights, expected, 1e-5, "a weight is a softmax over all experts")


# Adding a family

VOCAB = 101
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": None,
}
WINDOW, TOKENS = 19, 40
DEFAULTS = *list(SIZES)[:7], "rms_norm_eps", "sliding_window", "tie_word_embeddings"


class Written:
    """A small random model with its weights in a folder, and what it should say.

    ``kind`` is what transformers' classes begin with.
    """

    def __init__(self, kind: str, **options: Any) -> None:
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        settings = getattr(transformers, f"{kind}Config")(
            **SIZES, **options, attn_implementation="eager"
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = False
            around = 1 if "norm" in name else 0
            parameter.normal_(around, 0.3, generator=generator)
        self.temporary = TemporaryDirectory()  # gone when nobody has the Written
        self.folder = Path(self.temporary.name)
        model.save_pretrained(self.folder)
        self.tokens = torch.arange(TOKENS) * 37 % VOCAB
        self.logits = model(self.tokens[None]).logits[0].double()
        self.data = json.loads((self.folder / "config.json").read_text())


@cache
def written(window: int | None) -> Written:
    """A Phi-3."""
    return Written("Phi3", sliding_window=window)


@cache
def smol() -> Written:
    """A SmolLM3, of whose layers the middle one does not rotate."""
    return Written("SmolLM3", no_rope_layers=[1, 0, 1])


@contextmanager
def known(family: Family) -> Iterator[None]:
    """The family among those that the package knows, in the body."""
    before = dict(FAMILIES)
    FAMILIES.update(dict.fromkeys(family.model_types, family))
    try:
        yield
    finally:
        FAMILIES.clear()
        FAMILIES.update(before)


def check_phi3(phi3):
    """Loaded by the package, it computes what transformers computes."""
    from transformers import Phi3Config

    family: Any = phi3()
    assert isinstance(family, Family), f"return a Family, not {type(family)}"
    assert family.model_types == ("phi3",), (
        'config.json says "model_type": "phi3"; model_types is a tuple of such words'
    )
    for window in (None, WINDOW):
        reference = written(window)
        with known(family):
            try:
                model = load_model(reference.folder, device="cpu")
            except ValueError as error:
                raise AssertionError(f"the folder isn't loaded: {error}") from None
            found = model.logits(reference.tokens)
        said = (
            f"transformers' Phi-3 computes other logits, with sliding_window {window}"
        )
        close(found, reference.logits, 1e-4, said)
    judge_defaults(family, Phi3Config(), "phi3")


def judge_defaults(family, expected, model_type):
    """A config.json that says nothing means what transformers takes it to mean."""
    try:
        found = family.config({"model_type": model_type})
    except (ValueError, KeyError) as error:
        raise AssertionError(
            f"a config.json that leaves everything out isn't read; what do your "
            f"defaults lack? {type(error).__name__}: {error}"
        ) from None
    known = {name: getattr(expected, name) for name in DEFAULTS}
    known["rope_theta"] = expected.rope_parameters["rope_theta"]
    for name, right in known.items():
        yours = getattr(found, name)
        assert yours == right, (
            f"where config.json has no {name}, transformers takes {right} for "
            f"{family.name}, and with your defaults it's {yours}"
        )


def check_smollm3(smollm3):
    """Loaded by the package, it computes what transformers computes."""
    from transformers import SmolLM3Config

    family: Any = smollm3()
    assert isinstance(family, Family), f"return a Family, not {type(family)}"
    reference = smol()
    with known(family):
        try:
            model = load_model(reference.folder, device="cpu")
        except (ValueError, KeyError) as error:
            raise AssertionError(f"the folder isn't loaded: {error}") from None
        found = model.logits(reference.tokens)
    said = "transformers' SmolLM3, whose middle layer doesn't rotate, has other logits"
    close(found, reference.logits, 1e-4, said)
    judge_defaults(family, SmolLM3Config(), "smollm3")
    for every, still in ((2, (1, 3)), (3, (2,))):
        data = {"num_hidden_layers": 4, "no_rope_layer_interval": every}
        ours = family.config({"model_type": "smollm3", **data}).nope_layers
        assert tuple(ours) == still, (
            f"without a list, and with an interval of {every}, the layers {still} of 4 "
            f"don't rotate (the first is 0); yours are {ours}"
        )


# Numbers of 8 bits


def tiles(matrix, tile):
    """Each tile of a matrix, with its place among the scales."""
    rows, columns = tile
    for r, part in enumerate(matrix.split(rows)):
        for c, square in enumerate(part.split(columns, 1)):
            yield (r, c), square


def check_round_tiles(round_tiles):
    """The largest of each tile becomes the largest there is, others the nearest."""
    shape = 6, 10
    x = random(*shape) * torch.logspace(-2, 2, 10)
    x[2:4, 4:8] = 0
    x[4:6, :4] *= 1e-8  # little, and yet more than LEAST_TILE
    for dtype, tile in product(LARGEST, ((2, 4), (1, 10), (1, 4))):
        found = round_tiles(x.clone(), tile, dtype)
        assert found is not None, "return the values and the scales"
        values, scales = found
        assert values.dtype == dtype, f"values are {values.dtype}, expected {dtype}"
        wide = [-(-n // t) for n, t in zip(shape, tile, strict=True)]
        assert list(values.shape) == list(shape), (
            f"values are {list(values.shape)}, expected {list(shape)}: tiles at the "
            "edge are cut off"
        )
        assert list(scales.shape) == wide, (
            f"scales are {list(scales.shape)}, expected {wide}: one for each tile, and "
            "one for a tile that's cut off"
        )
        pairs = zip(tiles(x, tile), tiles(values.float(), tile), strict=True)
        for (place, source), (_, rounded) in pairs:
            judge_tile(source, rounded, scales[place], dtype)
    short = round_tiles(x.bfloat16(), (2, 4), E4M3)
    again = round_tiles(x.bfloat16().float(), (2, 4), E4M3)
    assert short[1].dtype == torch.float32, (
        f"scales are {short[1].dtype}, expected torch.float32, also of a weight in "
        "bfloat16"
    )
    assert torch.equal(short[1], again[1]) and torch.equal(
        short[0].float(), again[0].float()
    ), "a weight in bfloat16 is computed with in float32, as any other"
    three = torch.stack([x, 2 * x, x / 8])
    whole = round_tiles(three.clone(), (2, 4), E4M3)
    for number, matrix in enumerate(three):
        alone = round_tiles(matrix.clone(), (2, 4), E4M3)
        same = (a[number].float() for a in whole), (b.float() for b in alone)
        assert all(torch.equal(a, b) for a, b in zip(*same, strict=True)), (
            "dimensions in front of the last two are matrices of their own, with "
            "scales of their own: each is rounded as if it were alone, and yours "
            f"rounds number {number} of three otherwise"
        )


def judge_tile(source, rounded, scale, dtype):
    assert rounded.isfinite().all() and scale.isfinite(), (
        "a tile of zeros needs a scale, too: LEAST_TILE is the least that its largest "
        "number counts as"
    )
    largest = source.abs().max()
    if largest == 0:
        assert not rounded.any(), "zero stays zero"
        return
    expected = largest / LARGEST[dtype]
    assert abs(scale / expected - 1) < 1e-4, (
        f"a tile whose largest number is {largest:.3g} has scale {scale:.3g}, expected "
        f"{expected:.3g}: a number is its value times the scale, and the largest "
        f"becomes {LARGEST[dtype]:g}"
    )
    half = scale / 2  # of a step
    if dtype == E4M3:  # three bits of mantissa; the least number is 2^-9
        half = torch.maximum(source.abs() / 16, scale * 2**-10)
    error = (rounded * scale - source).abs()
    assert (error <= half * 1.01).all(), (
        "some number isn't rounded to the nearest value; a conversion to int8 cuts off "
        "what's after the point"
    )


def weights_of(dtype, tile, inputs, shape):
    weight = random(*shape) * torch.logspace(-1, 1, shape[0])[:, None]
    return Scaled.of(weight * torch.logspace(1, -1, shape[1]), tile, dtype, inputs)


def plain(values, scales, tile):
    """float64 numbers, tile by tile."""
    out = torch.empty(values.shape, dtype=torch.float64)
    for place, square in tiles(out, tile):
        rows, columns = tile
        at = place[0] * rows, place[1] * columns
        part = values[at[0] : at[0] + rows, at[1] : at[1] + columns]
        square[:] = part.double() * scales[place].double()
    return out


def check_float_product(float_product):
    """In blocks and in rows, with inputs rounded or not."""
    shapes = ((300, 200), (128, 256), (7, 130))
    forms = (E4M3, (128, 128)), (E4M3, (1, 0)), (torch.int8, (1, 0))
    for shape, (dtype, tile), inputs in product(shapes, forms, (True, False)):
        weight = weights_of(dtype, tile, inputs, shape)
        x = random(5, shape[1], seed=1) * torch.logspace(-2, 2, shape[1])
        x = x * torch.logspace(-3, 3, 5)[:, None]
        numbers = plain(weight.values, weight.scales, weight.tile)
        x = x.bfloat16() if tile == (128, 128) else x  # as in an engine
        values, scales = weight.round_inputs(x)
        rounded = plain(values, scales, (1, weight.tile[1]))
        right, other = (rounded, x.double()) if inputs else (x.double(), rounded)
        expected = functional.linear(right, numbers)
        found = float_product(x, weight)
        assert found is not None and list(found.shape) == list(expected.shape), (
            f"a product of {list(x.shape)} and {list(shape)} is {list(expected.shape)}"
        )
        token = expected.abs().amax(1, keepdim=True)
        error = ((found.double() - expected).abs() / token).max()
        if error > 1e-4:
            swapped = functional.linear(other, numbers)
            same = ((found.double() - swapped).abs() / token).max() < 1e-4
            assert not same, (
                f"the weight's inputs is {inputs}, so x is "
                f"{'rounded first' if inputs else 'not rounded'}"
            )
        assert error <= 1e-4, (
            f"off by {error:.2g} of a token's largest: each tile of {tile} has a scale "
            "of its own, and each token one for as many columns"
        )


def check_integer_product(integer_product):
    """Exact sums, then both scales."""
    for shape in ((24, 4096), (9, 40)):
        weight = weights_of(torch.int8, (1, 0), True, shape)
        x = random(5, shape[1], seed=1) * torch.logspace(-3, 3, 5)[:, None]
        x[0] = 1  # all as large as they get
        weight.values[0], weight.values[1, ::3] = 127, -127
        values, scales = weight.round_inputs(x)
        sums = values.long() @ weight.values.long().T
        expected = sums.double() * scales.double() * weight.scales.double().T
        found = integer_product(x, weight)
        assert found is not None and list(found.shape) == list(expected.shape), (
            f"a product of {list(x.shape)} and {list(shape)} is {list(expected.shape)}"
        )
        assert found.is_floating_point(), "the scales make floating point of the sums"
        ratio = found[0, 0].double() / expected[0, 0]
        assert abs(ratio - 1) < 1e-3, (
            f"{shape[1]} products of 127 and 127 are {expected[0, 0]:.6g} with their "
            f"scales, and yours are {found[0, 0]:.6g}: the sum needs 32 bits, and each "
            "token and each row its scale"
        )
        token = expected.abs().amax(1, keepdim=True)
        error = ((found.double() - expected).abs() / token).max()
        assert error < 1e-5, (
            f"off by {error:.2g} of a token's largest: integers add up exactly, so "
            "multiply by the scales after the sum, a token's and a row's"
        )
    judge_sums(integer_product)


def judge_sums(integer_product):
    """A large sum of which hardly anything is left shows what was lost on the way."""
    half = 2**16
    up = torch.randint(64, 128, (half,), generator=torch.Generator().manual_seed(0))
    down = up[torch.randperm(half, generator=torch.Generator().manual_seed(1))]
    down[0] -= 1
    values = torch.cat((up, down)).to(torch.int8)[None]
    weight = Scaled(values, torch.full((1, 1), 0.1), (1, 2 * half), True)
    x = torch.ones(1, 2 * half)
    x[:, half:] = -1
    found = integer_product(x, weight).item() / 0.1
    assert abs(found - 1) < 1e-5, (
        f"{half:,} products up and as many down leave 1, and yours leave {found:g}: "
        "the sums aren't exact. Are they of integers?"
    )


# Exercises


def check_C_1(folded_norm):
    """What is stored, as the weight of a plain norm; scores come out the same."""
    eps, dim = 1e-6, 16
    x, stored = random(3, dim), random(dim, seed=1) / 4
    for offset, scalar in product((0.0, 1.0), (None, dim, 4, 50)):
        weight = folded_norm(stored, offset, dim, scalar)
        assert weight is not None, "return the weight"
        scale = 1 if scalar is None else (dim / scalar) ** 0.5
        # What is asked for, and what attention does with our q.
        expected = rms(x, stored.double() + offset, eps) * scale
        why = (
            f"stored less {offset:g}, and with scores over the root of {scalar}: the "
            "weight is first what the norm multiplies with, and then it's scaled"
        )
        close(rms(x, weight.double(), eps), expected, 1e-5, why)


def check_C_2(llama3_frequencies):
    """Against the three cases in which Meta wrote it, pair by pair."""
    for low, high, factor, length in ((1.0, 4.0, 8.0, 8192), (2.0, 3.0, 32.0, 500)):
        plain_ones = 500_000.0 ** (-torch.arange(0, 64, 2) / 64)
        found = llama3_frequencies(plain_ones.clone(), factor, low, high, length)
        assert found is not None, "return the frequencies"
        for before, after in zip(plain_ones.tolist(), found.tolist(), strict=True):
            wave = 2 * torch.pi / before  # in tokens
            if wave < length / high:
                expected, which = before, "turns fast, and stays"
            elif wave > length / low:
                expected, which = before / factor, "turns slowly, and is stretched"
            else:
                smooth = (length / wave - low) / (high - low)
                expected = (1 - smooth) * before / factor + smooth * before
                which = "is between, a mixture of both"
            assert abs(after / expected - 1) < 1e-4, (
                f"a pair that turns {length / wave:.3g} times over {length} tokens "
                f"{which}: expected {expected:.4g}, yours is {after:.4g}"
            )
