"""Chapter 6: the model and the sampler."""

import math
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.names import NAMES
from simplellm.model.kv_pool import KVPool
from simplellm.model.layers import Attention, Dense, Experts, Layer
from simplellm.model.one_sequence import PAGE, one_sequence
from simplellm.model.ops import PLAIN

EPS = 1e-5
HIDDEN, HEADS, KV_HEADS, DIM, NUM_EXPERTS, INNER, VOCAB = 24, 4, 2, 8, 5, 16, 40


def seeded(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_layer(seed):
    """A layer of random float32 weights, large enough for each of them to matter."""

    def part(number, *shape):
        size = shape[-1] ** -0.5 if len(shape) > 1 else 0.5
        return size * seeded(100 * seed + number, *shape)

    angles = torch.arange(32.0)[:, None] * 0.7 ** torch.arange(DIM // 2)
    rows = (HEADS + 2 * KV_HEADS) * DIM
    attn = Attention(
        qkv=2 * part(0, rows, HIDDEN),
        qkv_bias=part(1, rows),
        o=part(2, HIDDEN, HEADS * DIM),
        o_bias=part(3, HIDDEN),
        sinks=part(4, HEADS),
        q_norm=None,
        k_norm=None,
        cos=angles.cos(),
        sin=angles.sin(),
        head_dim=DIM,
        eps=EPS,
    )
    mlp = Experts(
        router=part(5, NUM_EXPERTS, HIDDEN),
        router_bias=part(6, NUM_EXPERTS),
        gate_up=2 * part(7, NUM_EXPERTS, 2 * INNER, HIDDEN),
        gate_up_bias=part(8, NUM_EXPERTS, 2 * INNER),
        down=part(9, NUM_EXPERTS, HIDDEN, INNER),
        down_bias=part(10, NUM_EXPERTS, HIDDEN),
        top_k=2,
        limit=7.0,
        alpha=1.702,
    )
    return Layer(1 + part(11, HIDDEN), attn, 1 + part(12, HIDDEN), mlp)


def normed(x, weight, eps=EPS):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def attended(h, attn, window):
    """What attention adds, float64, one head at a time."""
    tokens, half = len(h), attn.head_dim // 2
    qkv = h @ attn.qkv.double().T + attn.qkv_bias.double()
    qkv = qkv.view(tokens, -1, attn.head_dim)
    turn = torch.complex(attn.cos.double(), attn.sin.double())[:tokens, None]
    turned = torch.complex(qkv[..., :half], qkv[..., half:]) * turn
    turned = torch.cat([turned.real, turned.imag], -1)
    place = torch.arange(tokens)
    back = place[:, None] - place
    hidden = back < 0
    if window is not None:
        hidden |= back >= window
    heads = []
    for head in range(HEADS):
        kv = HEADS + head // (HEADS // KV_HEADS)
        scores = turned[:, head] @ turned[:, kv].T / math.sqrt(attn.head_dim)
        scores = scores.masked_fill(hidden, -math.inf)
        sink = attn.sinks[head].double().expand(tokens, 1)
        shares = torch.cat([scores, sink], 1).softmax(-1)[:, :-1]
        heads.append(shares @ qkv[:, kv + KV_HEADS])
    return torch.cat(heads, -1) @ attn.o.double().T + attn.o_bias.double()


def experts_say(h, mlp):
    """What the experts add, float64, one token and one expert at a time."""
    out = torch.zeros_like(h)
    scores = h @ mlp.router.double().T + mlp.router_bias.double()
    for token, row in enumerate(scores):
        best = row.topk(mlp.top_k)
        for share, expert in zip(best.values.softmax(0), best.indices, strict=True):
            both = mlp.gate_up[expert].double() @ h[token]
            both = both + mlp.gate_up_bias[expert].double()
            gate = both[0::2].clamp(max=mlp.limit)
            up = both[1::2].clamp(-mlp.limit, mlp.limit)
            inner = gate * torch.sigmoid(mlp.alpha * gate) * (up + 1)
            down = mlp.down[expert].double() @ inner + mlp.down_bias[expert].double()
            out[token] += share * down
    return out


def exact_block(x, layer, window, mistake="", eps=EPS):
    """The stream after a layer in float64; ``mistake`` names one to make."""
    h = normed(x, layer.attn_norm, eps)
    update = attended(h, layer.attn, window)
    if mistake == "replaced":
        x2 = update
    elif mistake == "copy":
        x2 = h + update
    else:
        x2 = x + update
    early = mistake == "parallel"
    h = normed(x if early else x2, layer.mlp_norm, eps)
    if mistake == "bare":
        h = x2
    says = dense_says if isinstance(layer.mlp, Dense) else experts_say
    update = says(h, layer.mlp)
    return update if mistake == "replaced" else x2 + update


def dense_says(h, mlp):
    """What a network without experts adds, float64."""
    gate, up = (h @ mlp.gate_up.double().T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ mlp.down.double().T


def near(found, expected):
    error = (found.double() - expected).abs().max().item()
    return error <= 1e-3 * expected.abs().max().item()


MISTAKES = {
    "parallel": "the experts read the norm of the stream *after* attention has added "
    "to it; yours read the stream from before",
    "replaced": "a layer adds to the stream, twice; yours replaces it",
    "copy": "the sum is the stream plus the update; yours adds the update to the "
    "normed copy",
    "bare": "the experts read a normed copy of the stream too; yours read the stream "
    "as it is",
}


def changed(layer):
    """The layer as a block sees it that leaves something out, and what that is."""
    attn = layer.attn
    for name, told in (
        ("qkv_bias", "queries, keys and values have a bias, attn.qkv_bias"),
        ("o_bias", "what attention adds has a bias, attn.o_bias"),
    ):
        without = replace(attn, **{name: torch.zeros_like(getattr(attn, name))})
        yield replace(layer, attn=without), f"{told}; yours leaves it out"
    without = replace(attn, sinks=torch.full_like(attn.sinks, -1e9))
    yield (
        replace(layer, attn=without),
        "attention has sinks, attn.sinks; yours has none",
    )
    turned = replace(layer, attn_norm=layer.mlp_norm, mlp_norm=layer.attn_norm)
    yield (
        turned,
        "attn_norm is for attention, mlp_norm for the experts; yours are swapped",
    )


CONFIG = ModelConfig(
    names=NAMES,
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=3,
    num_local_experts=NUM_EXPERTS,
    num_experts_per_tok=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    sliding_window=3,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    rope_theta=10_000.0,
    max_position_embeddings=32,
)


class Table:
    """The plain operations, with a note of each call; projections come in two parts."""

    def __init__(self):
        self.called = []
        self.biased = False
        self.windows = []
        self.counts = []

    def embed(self, tokens, previous, table):
        self.called.append("embed")
        return PLAIN.embed(tokens, previous, table)

    def add_norm(self, residual, update, weight, eps):
        self.called.append("add_norm")
        return PLAIN.add_norm(residual, update, weight, eps)

    def project(self, x, weight, bias):
        self.called.append("project")
        if len(weight) != HIDDEN and bias is not None:
            self.biased = True
        found = PLAIN.project(x, weight, bias)
        return torch.stack([0.25 * found, 0.75 * found], dim=1)

    def rope_and_cache(self, qkv, attn, positions, keys, values, slots):
        self.called.append("rope_and_cache")
        return PLAIN.rope_and_cache(qkv, attn, positions, keys, values, slots)

    def attend(self, q, keys, values, group, sinks):
        self.called.append("attend")
        self.windows.append(group.window)
        return PLAIN.attend(q, keys, values, group, sinks)

    def experts(self, x, mlp, num_tokens):
        self.called.append("experts")
        self.counts.append(num_tokens)
        assert isinstance(mlp, Experts), (
            "layer 1 of this model has no experts but one plain network: call "
            "layer.mlp.forward, which knows the operation that it needs"
        )
        return PLAIN.experts(x, mlp, num_tokens)

    def dense(self, x, mlp):
        self.called.append("dense")
        return PLAIN.dense(x, mlp)

    def reduce(self, x):  # of one rank; whoever leaves it out computes the same
        return PLAIN.reduce(x)


def check_Model_forward(candidate):
    """Two steps of one text, against float64 without a cache."""
    layers = [make_layer(seed) for seed in (3, 4, 5)]
    plain = Dense(
        gate_up=0.5 * seeded(8, 2 * INNER, HIDDEN),
        gate_up_bias=None,
        down=0.5 * seeded(9, HIDDEN, INNER),
        down_bias=None,
    )
    layers[1] = replace(layers[1], mlp=plain)
    table = Table()
    embed, norm = seeded(6, VOCAB, HIDDEN), 1 + 0.5 * seeded(7, HIDDEN)
    model = candidate(
        CONFIG, table, embed_tokens=embed, layers=layers, norm=norm, lm_head=embed
    )
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    x = embed[ids].double()
    for n, layer in enumerate(layers):
        x = exact_block(x, layer, CONFIG.window(n))
    expected = normed(x, norm)
    device, windows = torch.device("cpu"), CONFIG.windows
    pool = KVPool(CONFIG, len(windows), PAGE, torch.float32, device)
    previous = torch.tensor([39, ids[5]], dtype=torch.int32)
    known = torch.tensor(ids)
    known[5] = -2  # previous[1], which the step before has sampled
    weights = embed.clone()
    for start, stop in ((0, 5), (5, 8)):
        batch = one_sequence(known[start:stop], start, 1, windows, device)
        try:
            found = model.forward(batch, pool, previous)
        except RuntimeError as error:
            assert "must match the size" not in str(error), (
                "a projection may come in parts, [T, parts, hidden], and only add_norm "
                "knows how to put them together: hand each update to the next add_norm "
                f"as it is, and add nothing yourself ({error})"
            )
            assert "shapes cannot be multiplied" not in str(error), (
                "attend returns [T, H, D], and project wants the heads joined, "
                f"[T, H * D] ({error})"
            )
            raise
        needed = "embed add_norm project rope_and_cache attend experts dense"
        missing = [name for name in needed.split() if name not in table.called]
        assert not missing, (
            f"self.ops.{missing[0]} was never called: take every operation from "
            "self.ops, so that a faster table can take this one's place"
        )
        assert not table.biased, (
            "queries, keys and values got their bias twice: rope_and_cache adds it, so "
            "their projection has None there"
        )
        wanted = [CONFIG.window(n) for n in range(3)]
        assert table.windows[:3] == wanted, (
            f"the layers' windows are {wanted}, and yours attended with "
            f"{table.windows[:3]}: a layer's group is batch.groups[pool.groups[index]]"
        )
        assert isinstance(found, torch.Tensor), "return the hidden states, a tensor"
        assert found.shape == (stop - start, HIDDEN), (
            f"{stop - start} tokens have hidden states [{stop - start}, {HIDDEN}]; "
            f"yours are {list(found.shape)}"
        )
        here = expected[start:stop]
        if not near(found, here):
            assert not near(normed(found.double(), norm), here), (
                "the final norm is missing: what leaves the pass is normed"
            )
            short = embed[ids].double()
            for n, layer in enumerate(layers):
                h = normed(short, layer.attn_norm)
                middle = short + attended(h, layer.attn, CONFIG.window(n))
                after = exact_block(short, layer, CONFIG.window(n))
                short = middle if n == 2 else after
            assert not near(found, normed(short, norm)[start:stop]), (
                "what the last layer's experts say got lost: the final add_norm still "
                "has an update to add"
            )
        assert near(found, here) or start == 0, (
            f"the first {start} tokens are right, and those that go on from there in a "
            "second batch aren't: hand on batch.positions, and each layer's own keys "
            "and values"
        )
        assert near(found, here), (
            f"positions {start} to {stop - 1} aren't what a computation in float64 "
            "gives; compare your lines with `block`, o_bias and window among them"
        )
    count = table.called.count("add_norm")
    assert count == 2 * 7, (
        f"two calls of add_norm a layer and the final one are 7 for 3 layers; yours "
        f"were {count / 2:g}"
    )
    assert torch.equal(embed, weights), "the embedding itself was changed"
    other = replace(CONFIG, rms_norm_eps=1.0)
    for config, factor, told in (
        (
            other,
            1,
            "with an eps of 1, large enough to show, the result differs: each add_norm "
            "takes self.config.rms_norm_eps",
        ),
        (
            CONFIG,
            3,
            "another family multiplies its embedding by 3, in self.embed_transform, "
            "and yours doesn't: what `embed` returns goes through "
            "self.embed_transform(x, batch.positions) before the first layer",
        ),
    ):
        table = Table()
        model = candidate(
            config,
            table,
            embed_tokens=embed,
            layers=layers,
            norm=norm,
            lm_head=embed,
            embed_transform=lambda x, positions, factor=factor: factor * x,
        )
        batch = one_sequence(torch.tensor(ids[:5]), 0, 1, windows, device)
        batch = replace(batch, query_start_loc=torch.tensor([0, 4], dtype=torch.int32))
        found = model.forward(batch, pool, previous)[:4]
        eps = config.rms_norm_eps
        x = factor * embed[ids[:5]].double()
        for n, layer in enumerate(layers):
            x = exact_block(x, layer, config.window(n), eps=eps)
        assert near(found, normed(x, norm, eps)[:4]), told
        counts = [torch.as_tensor(count).tolist() for count in table.counts]
        assert counts == [[4]] * len(counts), (
            "5 rows, of which the last is padding: batch.num_tokens is [4], and your "
            f"experts were told {counts[0]}. On a GPU they'd skip tokens or compute "
            "padding; hand on batch.num_tokens"
        )


def kept_by_loops(logits, top_k, top_p, min_p):
    """The set of tokens that stay of one row, in Python's floats."""
    best = max(logits)
    p = {i: math.exp(z - best) for i, z in enumerate(logits)}
    ranked = sorted(p, key=lambda i: -p[i])
    ranked = [i for i in ranked if p[i] >= min_p][:top_k]
    total, mass, kept = sum(p[i] for i in ranked), 0.0, set()
    for i in ranked:
        if mass < top_p * total:
            kept.add(i)
        mass += p[i]
    return kept


def check_filter_tokens(candidate):
    """Against loops over one row at a time."""

    def run(logits, *columns):
        """The kept tokens of each row; ``columns`` are top_k, top_p and min_p."""
        top_k, top_p, min_p = columns
        given = logits.clone()
        found = candidate(
            given,
            torch.tensor(top_k)[:, None],
            torch.tensor(top_p)[:, None],
            torch.tensor(min_p)[:, None],
        )
        assert isinstance(found, torch.Tensor) and found.shape == logits.shape, (
            f"logits {list(logits.shape)} stay {list(logits.shape)}; yours are "
            f"{list(getattr(found, 'shape', []))}"
        )
        assert torch.equal(given, logits), "the logits that it gets must stay"
        stays = found != -torch.inf
        assert torch.equal(found[stays], logits[stays]), (
            "a token that stays keeps its logit; for the others put -torch.inf"
        )
        return [set(row.nonzero().flatten().tolist()) for row in stays]

    p = torch.tensor([[0.1, 0.5, 0.05, 0.2, 0.15]])
    found = run(p.log(), [3], [1.0], [0.0])
    assert found == [{1, 3, 4}], (
        f"top-k of 3 keeps the 3 best, here {{1, 3, 4}}; yours are {found[0]}"
    )
    tied = torch.tensor([[2.0, 1.0, 2.0, 2.0]])
    found = run(tied, [2], [1.0], [0.0])
    assert found == [{0, 2, 3}], (
        "three tokens share the best logit: with top-k of 2 all of them stay, because "
        f"nothing but chance would choose among them; yours are {found[0]}"
    )
    found = run(p.log(), [5], [1.0], [0.25])
    assert found == [{1, 3, 4}], (
        "min-p of 0.25 keeps what is at least a quarter as likely as the best, which "
        f"has 0.5: at least 0.125, so {{1, 3, 4}}; yours are {found[0]}"
    )
    found = run(p.log(), [5], [1.0], [1.0])
    assert found == [{1}], (
        "min-p of 1 keeps what is at least as likely as the best, so the best itself "
        f"stays, and here only that, {{1}}; yours are {found[0] or 'none'}"
    )
    found = run(p.log(), [5], [0.6], [0.0])
    assert found == [{1, 3}], (
        "top-p of 0.6: the best has 0.5, too little, and with the next it is 0.7; that "
        f"one is kept too, so {{1, 3}}; yours are {found[0]}"
    )
    half = torch.tensor([[0.5, 0.25, 0.25]])
    found = run(half.log(), [3], [0.5], [0.0])
    assert found == [{0}], (
        "top-p of 0.5, and the best has exactly 0.5: that is enough, so the next isn't "
        f"kept; yours are {found[0]} of probabilities {half[0].tolist()}"
    )
    found = run(torch.zeros(1, 4), [4], [0.5], [0.0])
    assert found == [{0, 1, 2, 3}], (
        "four tokens have 0.25 each: with top-p of 0.5 the second is the last one "
        "needed, and those that tie with it stay, because nothing but chance would "
        f"choose among them; yours are {found[0]}"
    )
    found = run(p.log(), [5], [0.72], [0.15])
    assert found == [{1, 3}], (
        "min-p leaves 0.5, 0.2, 0.15 and 0.1, and top-p sees them renormalized, over "
        f"0.95: two are enough for 0.72; yours are {found[0]}"
    )
    found = run(p.log(), [4], [0.72], [0.0])
    assert found == [{1, 3}], (
        "top-k runs before top-p, which sees what is left renormalized: of 0.526, "
        f"0.211, ... two are enough for 0.72; yours are {found[0]}"
    )
    found = run(p.log(), [5], [1e-50], [0.0])
    assert found == [{1}], (
        "top-p of 1e-50 is 0 in float32; the best token stays all the same, yours "
        f"are {found[0]}"
    )
    gap = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    found = run(gap, [4], [1.0], [0.0])
    assert found == [{0, 2}], (
        "a token that was ruled out before, at -inf, stays out and harms nobody; you "
        f"keep {found[0]} of logits {gap[0].tolist()}"
    )
    sure = torch.tensor([[0.0, 30.0, -1.0, 1.0]])
    found = run(sure, [4], [1.0], [0.0])
    assert found == [{0, 1, 2, 3}], (
        "the best of four tokens has a probability that float32 rounds to 1, so a sum "
        "passes 1 early; still, a row whose top-p is 1 loses nothing. Yours keeps "
        f"{found[0]}"
    )
    tail = seeded(1, 2, 60_000)
    found = run(tail, [60_000] * 2, [1.0, 0.5], [0.0] * 2)
    assert len(found[0]) == 60_000, (
        f"a row with top-p 1 lost {60_000 - len(found[0])} of 60,000 tokens because a "
        "rounded sum of probabilities passes 1 early: a row without top-p loses nothing"
    )
    logits = 2 * seeded(2, 8, 200)
    top_k = [200, 50, 7, 1, 200, 30, 200, 60]
    top_p = [0.9, 0.8, 1.0, 0.5, 1.0, 0.33, 0.05, 0.95]
    min_p = [0.0, 0.01, 0.0, 0.3, 0.1, 0.0, 0.02, 0.005]
    found = run(logits, top_k, top_p, min_p)
    for n, (row, kept) in enumerate(zip(logits.tolist(), found, strict=True)):
        expected = kept_by_loops(row, top_k[n], top_p[n], min_p[n])
        assert kept == expected, (
            f"row {n} of 8, with top-k {top_k[n]}, top-p {top_p[n]} and min-p "
            f"{min_p[n]}, keeps {len(expected)} tokens; you keep {len(kept)}, "
            f"{len(kept & expected)} of them right. Each row has its own parameters"
        )


def check_6_1(candidate):
    """Against the softmax of the logits."""
    z = torch.tensor([1.3, -0.4, 2.2, 0.0], dtype=torch.float64)
    for temperature in (0.3, 1.0, 2.0, 5.0):
        found = torch.as_tensor(candidate(z.softmax(0).tolist(), temperature)).double()
        assert found.shape == (4,), "four probabilities in, four out"
        total = found.sum().item()
        assert abs(total - 1) < 1e-6, (
            f"at temperature {temperature} yours add up to {total:.3f}"
        )
        wanted = (z / temperature).softmax(0)
        assert torch.allclose(found, wanted, atol=1e-6), (
            f"at temperature {temperature} yours aren't the softmax of the same logits "
            "over the temperature: it divides logits, not probabilities"
        )


def check_6_2(candidate):
    """Random streams, whose logits are known at every depth."""
    stream = seeded(1, 5, 32).cumsum(0) * 3
    norm, row = 1 + 0.3 * seeded(2, 32), seeded(3, 32)
    judge_terms(candidate, stream, norm, EPS, row)
    scale = (stream[-1].double().pow(2).mean() + 50).rsqrt()
    total = (stream[-1].double() * scale * norm.double() * row.double()).sum()
    found = torch.as_tensor(candidate(stream.clone(), norm, 50.0, row)).double().sum()
    assert torch.allclose(found, total, atol=1e-3), (
        "with an eps of 50, large enough to show, the terms don't add up to the logit: "
        "the final norm adds eps to the mean of the squares"
    )


def judge_terms(candidate, stream, norm, eps, row):
    terms = candidate(stream.clone(), norm, eps, row)
    assert terms is not None, "your function returns nothing"
    terms = torch.as_tensor(terms)
    assert terms.shape == (5,), "one term for the embedding and one for each layer"
    scale = (stream[-1].double().pow(2).mean() + eps).rsqrt()
    logit = (stream[-1].double() * scale * norm.double() * row.double()).sum()
    total = terms.double().sum()
    assert torch.allclose(total, logit, atol=1e-3), (
        f"the terms add up to the logit, {logit:.3f}; yours add up to {total:.3f}. The "
        "final norm divides the whole stream by one number"
    )
    for n in range(5):
        held = (stream[n].double() * scale * norm.double() * row.double()).sum()
        assert torch.allclose(terms[: n + 1].double().sum(), held, atol=1e-3), (
            f"the terms up to number {n} aren't what the stream holds by then, all of "
            "it divided by the same, final number"
        )


def check_6_3(candidate):
    """Against counting, for several requests; and one far too long to count."""
    cases = [([7, 3], [4, 9]), ([10], [200]), ([2, 8, 5], [30, 1, 12]), ([4], [1])]
    for prompts, answers in cases:
        counted = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            for step in range(answer):
                counted += prompt + step
        tokens, operations = candidate(list(prompts), list(answers), 11)
        assert tokens == counted, (
            f"prompts of {prompts} with answers of {answers} run {counted} tokens; you "
            f"say {tokens}. Each prompt has its own answer, and the step that makes "
            "the first token runs the prompt alone"
        )
        assert operations == 2 * 11 * counted, (
            "each active parameter takes part in two operations for each token that "
            f"runs: {22 * counted}, and you say {operations}"
        )
    answer = 10**9 + 3
    found = candidate([1], [answer], 1)[0]
    assert found == answer + answer * (answer - 1) // 2, (
        "for an answer of a billion tokens the formula must be exact: whole numbers, "
        "with // for the half"
    )


class Watch(TorchDispatchMode):
    """Notes what sorts or waits, and counts the operations."""

    SORTS = ("sort", "topk", "kthvalue", "median", "unique", "mode", "argsort")
    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.count, self.found = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        self.count += 1
        assert self.count < 1500, (
            "more than 1,500 operations for one batch: is there a loop over the tokens?"
        )
        plain = name.strip("_0123456789").removesuffix("_dim")
        if plain in self.SORTS or name.startswith("_unique"):
            self.found.add(f"{name}: that sorts or selects")
        if name in self.WAITS:
            self.found.add(f"{name}: for that value a CPU waits for its GPU")
        return func(*args, **(kwargs or {}))


def check_6_4(candidate):
    """Against loops; on the meta device, where no tensor has a value to read."""
    z = 3 * seeded(0, 16, 2000)
    for top_p in (0.05, 0.5, 0.9, 0.99):
        with Watch() as watch:
            found = candidate(z.clone(), top_p)
        assert not watch.found, f"you use {min(watch.found)}"
        assert isinstance(found, torch.Tensor) and found.dtype == torch.bool, (
            "return a mask, a bool tensor"
        )
        assert found.shape == z.shape, (
            f"a mask for logits {list(z.shape)} has that shape; yours is "
            f"{list(found.shape)}"
        )
        wrong = 0
        for row, mask in zip(z.tolist(), found, strict=True):
            kept = set(mask.nonzero().flatten().tolist())
            expected = kept_by_loops(row, len(row), top_p, 0.0)
            wrong += len(kept ^ expected)
        assert wrong <= 2, (
            f"at top-p {top_p}, {wrong} tokens of 16 rows are on the wrong side; the "
            "one with which the mass reaches top-p is kept, so compare with a bound "
            "that's surely below it"
        )
    try:
        candidate(torch.empty(2, 50, device="meta"), 0.5)
    except Exception as error:
        raise AssertionError(
            "on a device whose tensors have shapes and no values, yours fails: it "
            "reads a tensor's value in Python, or makes tensors on another device than "
            f"that of logits ({type(error).__name__})"
        ) from None
