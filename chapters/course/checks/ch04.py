"""Chapter 4: the router and the experts that it chooses."""

import math
from dataclasses import replace
from itertools import combinations, product
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B, GPT_OSS_120B
from simplellm.checkpoint.mxfp4 import MXFP4, quantize
from simplellm.model.layers import Experts
from simplellm.model.memory import count_parameters


def seeded(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found, expected):
    """The norm of the difference over the norm of what is expected."""
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm()).item()


def number(found, what):
    """The candidate's result has to be one number."""
    one = isinstance(found, int | float) or getattr(found, "shape", None) == ()
    assert one, f"{what} is one number; yours is {found!r}"[:200]
    return float(found)


def is_tensor(found, shape, what):
    """The candidate's result has to be a tensor of this shape."""
    assert isinstance(found, torch.Tensor) and tuple(found.shape) == tuple(shape), (
        f"{what} is a tensor {list(shape)}; yours is "
        f"{list(getattr(found, 'shape', [])) or type(found).__name__}"
    )


def pair_of(found, what):
    """The two tensors that a router returns."""
    assert isinstance(found, tuple | list) and len(found) == 2, (
        f"return two tensors, {what}; yours is {type(found).__name__}"
    )
    ids, weights = found
    assert not ids.is_floating_point() and weights.is_floating_point(), (
        "first the experts' numbers, which are whole, then their weights; yours are "
        f"{ids.dtype} and {weights.dtype}"
    )
    return ids.long(), weights


def softmax_of_chosen(scores, top_k):
    """Ids and weights of one token's scores, in Python's numbers, best first."""
    ids = sorted(range(len(scores)), key=lambda e: -scores[e])[:top_k]
    powers = [math.exp(scores[e] - scores[ids[0]]) for e in ids]
    return ids, [power / sum(powers) for power in powers]


def check_expected_distinct(expected_distinct):
    """All ways to choose, counted, then a binomial for large numbers."""
    for num_experts, top_k in ((4, 2), (5, 1), (6, 3)):
        found = number(expected_distinct(num_experts, top_k, 1), "the mean")
        assert found > 1 or top_k == 1, (
            "it's a number of experts, not a share of them; for one token that "
            f"chooses {top_k} of {num_experts} yours is {found:.3g}"
        )
        assert math.isclose(found, top_k, rel_tol=1e-6), (
            f"one token's {top_k} choices are different experts, so a batch of 1 "
            f"touches exactly {top_k} of {num_experts}; yours is {found:.3f}"
        )
    for num_experts, top_k, batch in ((4, 2, 2), (4, 2, 3), (5, 1, 4), (6, 3, 2)):
        choices = list(combinations(range(num_experts), top_k))
        ways = list(product(choices, repeat=batch))
        mean = sum(len(set().union(*way)) for way in ways) / len(ways)
        found = float(expected_distinct(num_experts, top_k, batch))
        assert found <= num_experts, f"there are only {num_experts} experts"
        assert found < min(num_experts, batch * top_k) - 1e-9, (
            f"{batch} tokens with {top_k} of {num_experts} choose some experts twice, "
            f"so the mean is below {min(num_experts, batch * top_k)}; yours is "
            f"{found:.3f}"
        )
        assert math.isclose(found, mean, rel_tol=1e-6), (
            f"{batch} tokens choose {top_k} of {num_experts} in {len(ways)} ways; the "
            f"mean of the distinct experts over all of them isn't {found:.3f}"
        )
    for num_experts, top_k, batch in ((128, 4, 64), (32, 4, 256), (16, 4, 8)):
        left = math.comb(num_experts - 1, top_k) / math.comb(num_experts, top_k)
        found = float(expected_distinct(num_experts, top_k, batch))
        assert math.isclose(found, num_experts * (1 - left**batch), rel_tol=1e-6), (
            f"{batch} tokens, {top_k} of {num_experts}: {found:.3f} is off"
        )


def gated(gate, up, limit, alpha):
    """One number of a SwiGLU, from its formula."""
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate / (1 + math.exp(-alpha * gate)) * (up + 1)


def pairs(numbers):
    """The last axis by twos, as lists."""
    return numbers.unflatten(-1, (-1, 2)).tolist()


def mixture(num_experts=6, hidden=8, inner=4, top_k=2, scale=1.0):
    """A small layer with random weights, no two experts alike."""
    return Experts(
        router=seeded(num_experts, hidden, seed=1),
        router_bias=seeded(num_experts, seed=2),
        gate_up=seeded(num_experts, 2 * inner, hidden, seed=3, scale=scale),
        gate_up_bias=seeded(num_experts, 2 * inner, seed=4),
        down=seeded(num_experts, hidden, inner, seed=5, scale=scale),
        down_bias=seeded(num_experts, hidden, seed=6),
        top_k=top_k,
        limit=2.0,
        alpha=1.5,
    )


def numbers(weight):
    """A weight of either kind in float64."""
    if isinstance(weight, MXFP4):
        weight = weight.dequantize(torch.float32)
    return weight.double()


def as_given(ids, weights):
    return weights


def one_by_one(
    x,
    mlp,
    shares=as_given,
    late_bias=False,
    early_weight=False,
    last_only=False,
    everyone=False,
):
    """What the layer adds to each token, token by token, choice by choice.

    ``mlp`` and the numbers make the right sums; all else is for mistakes that a check
    knows by name: other ``shares``, the weight on the input, a bias that no weight
    multiplies, the last expert alone, or ``everyone``, with a weight of 0 if it isn't
    chosen.
    """
    gate_up, down = numbers(mlp.gate_up), numbers(mlp.down)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        scores = mlp.router.double() @ row
        if mlp.router_bias is not None:
            scores += mlp.router_bias.double()
        ids, weights = softmax_of_chosen(scores.tolist(), mlp.top_k)
        given = dict(zip(ids, shares(ids, weights), strict=True))
        if everyone:
            given = dict.fromkeys(range(len(mlp.router)), 0.0) | given
        for expert, weight in given.items():
            if last_only and expert != max(ids):
                continue
            both = gate_up[expert] @ (weight * row if early_weight else row)
            if mlp.gate_up_bias is not None:
                both += mlp.gate_up_bias[expert].double()
            gates = [gated(g, u, mlp.limit, mlp.alpha) for g, u in pairs(both)]
            y = down[expert] @ torch.tensor(gates, dtype=torch.float64)
            bias = 0.0 if mlp.down_bias is None else mlp.down_bias[expert].double()
            if late_bias:
                out[token] += weight * y + bias
            else:
                out[token] += (1 if early_weight else weight) * (y + bias)
    return out


def judge(run, x, mlp):
    """Whether ``run`` gives the sums; names the mistakes whose sums it knows."""
    given = x.clone()
    found = run(x, mlp)
    is_tensor(found, x.shape, f"x is {list(x.shape)}, and the output")
    assert torch.equal(x, given), "x has changed; write your sums to a new tensor"

    expected = one_by_one(x, mlp)
    if not found.isfinite().all() or relative(found, expected) > 1e-4:
        raise AssertionError(explained(found, x, mlp))


def explained(found, x, mlp):
    """What is wrong with ``found``, if it is a mistake that has a name here."""
    bare = replace(mlp, gate_up_bias=None)
    at_once = replace(mlp, top_k=len(mlp.router))
    late = (
        "the down bias belongs to the expert: add it before the router's weight "
        "multiplies"
    )
    early = (
        "the router's weight multiplies what an expert says, not what it reads: an "
        "expert isn't linear"
    )
    mistakes = [
        (
            one_by_one(x, mlp, last_only=True),
            "each token has only the last of its experts: several add to the same row, "
            "so add (index_add_, +=) where you assign",
        ),
        (
            one_by_one(x, mlp, late_bias=True),
            late,
        ),
        (
            one_by_one(x, mlp, late_bias=True, everyone=True),
            f"{late}, which is 0 for experts that a token didn't choose",
        ),
        (one_by_one(x, mlp, early_weight=True), early),
        (one_by_one(x, mlp, early_weight=True, everyone=True), early),
        (
            one_by_one(x, mlp, shares=lambda ids, weights: [1.0] * len(ids)),
            "the sum is a weighted one: multiply what an expert says by its weight",
        ),
        (
            one_by_one(x, mlp, shares=lambda ids, weights: [1 / len(ids)] * len(ids)),
            "the sum is a weighted one, and yours is the mean: multiply what an expert "
            "says by its weight",
        ),
        (
            one_by_one(x, mlp, shares=lambda ids, weights: weights[:1] * len(ids)),
            "each expert of a token has its own weight, and yours all have the first",
        ),
        (
            one_by_one(x, mlp, shares=in_order_of_ids),
            "the weights are in the order of route's ids, best first: whoever sorts "
            "the ids sorts the weights along",
        ),
        (
            one_by_one(x, at_once),
            "every expert has added a share of a softmax over all: a token's weights "
            "are for the experts in route's ids alone",
        ),
        (
            one_by_one(x, replace(mlp, limit=7.0, alpha=1.702)),
            "the limit and alpha are mlp's; yours are 7 and 1.702, gpt-oss's, "
            "whatever mlp says",
        ),
        (
            one_by_one(x, replace(mlp, limit=7.0)),
            "the limit is mlp's, and yours is 7 whatever mlp says",
        ),
        (
            one_by_one(x, replace(mlp, alpha=1.702)),
            "alpha is mlp's, and yours is 1.702 whatever mlp says",
        ),
        (
            one_by_one(x, bare),
            "both products of an expert have a bias; gate_up_bias is missing",
        ),
        (
            one_by_one(x, replace(mlp, down_bias=None)),
            "both products of an expert have a bias; down_bias is missing",
        ),
    ]
    for sums, told in mistakes:
        if relative(found, sums) < 1e-4:
            return told
    alone = replace(mlp, top_k=1, router=torch.zeros_like(mlp.router))
    by_itself = [
        one_by_one(x, replace(alone, router_bias=bias))
        for bias in torch.eye(len(mlp.router))
    ]
    if mlp.top_k == 1 and all(
        any(relative(row, other[t]) < 1e-4 for other in by_itself)
        for t, row in enumerate(found)
    ):
        return (
            "of the experts, one per token, the wrong one counted: which expert a "
            "weight belongs to is in route's ids"
        )
    return (
        f"tokens: {len(x)}, experts: {len(mlp.router)}, experts a token: {mlp.top_k}; "
        f"your output is off by {relative(found, one_by_one(x, mlp)):.2g} of its norm"
    )


def in_order_of_ids(ids, weights):
    """What each of ``ids`` gets of weights that are meant for the ids in order."""
    return [weights[sorted(ids).index(id)] for id in ids]


def check_experts(experts):
    """Sums, then what is read: NaN where nobody chose, and a count of decoding."""

    def run(x, mlp):
        return experts(x, mlp, torch.tensor([len(x)], dtype=torch.int32))

    judge(run, seeded(1, 8, seed=8), mixture(num_experts=4, top_k=1))
    judge(run, seeded(1, 8, seed=8), mixture())
    x = seeded(7, 8, seed=9)
    found = run(x, mixture())
    alone = torch.cat([run(row[None], mixture()) for row in x])
    assert found.shape == alone.shape and relative(found, alone) < 1e-4, (
        "each token alone is right, seven together aren't: a pair's token is its "
        "number // k, its weight is in the same place, and a token's experts add up"
    )
    judge(run, x, mixture())
    judge(run, seeded(40, 8, seed=10), mixture(num_experts=12, top_k=4))

    # One token, so that most experts are nobody's choice.
    x = seeded(1, 8, seed=12)
    whole = mixture(num_experts=12)
    scores = whole.router @ x[0] + whole.router_bias
    ids, _ = softmax_of_chosen(scores.tolist(), 2)
    unread = torch.ones(12, dtype=torch.bool)
    unread[ids] = False
    poisoned = replace(whole, gate_up=whole.gate_up.clone(), down=whole.down.clone())
    poisoned.gate_up[unread] = poisoned.down[unread] = torch.nan
    found = run(x, poisoned)
    assert found.isfinite().all() and relative(found, run(x, whole)) < 1e-6, (
        "the experts that nobody chose are full of NaN here, and it shows: they must "
        "not even run, since 0 times NaN is NaN"
    )
    judge_decoding(run)
    judge_products(run)
    x = seeded(5, 8, seed=13)
    judge(run, x, replace(mixture(), gate_up_bias=None, down_bias=None))
    mlp = mixture()
    tensors = {n: t for n, t in vars(mlp).items() if isinstance(t, torch.Tensor)}
    mlp = replace(mlp, **{name: tensor.bfloat16() for name, tensor in tensors.items()})
    try:
        kind = run(x.bfloat16(), mlp).dtype
    except RuntimeError as error:
        raise AssertionError(
            f"with x and all weights in bfloat16 it fails ({str(error)[:80]}): make "
            "the sum's tensor like x, as torch.zeros_like does"
        ) from None
    assert kind == torch.bfloat16, (
        f"for x in bfloat16 the output is bfloat16 as well; yours is {kind}"
    )


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.").split(".")[0]
        self.count += name in ("mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "dot")
        return function(*args, **(kwargs or {}))


def judge_products(run):
    """Many tokens and few experts: the products are the experts', not the tokens'."""
    x, mlp = seeded(64, 8, seed=15), mixture(num_experts=4)
    with Products() as products:
        run(x, mlp)
    assert products.count <= 32, (
        f"64 tokens and 4 experts take you {products.count} matrix products: gather "
        "an expert's tokens and multiply them all at once"
    )


def judge_decoding(run):
    """Counts the matrices that a run dequantizes."""
    mlp = mixture(num_experts=8, hidden=32, inner=32, scale=0.2)
    mlp = replace(mlp, gate_up=quantize(mlp.gate_up), down=quantize(mlp.down))
    x = seeded(6, 32, seed=14)
    x[1:4] = x[0] + 0.01 * x[1:4]  # tokens that agree
    judge(run, x, mlp)
    scores = x @ mlp.router.T + mlp.router_bias
    chosen = len({e for row in scores for e in softmax_of_chosen(row.tolist(), 2)[0]})
    decode, counted = MXFP4.dequantize, []

    def counting(self, *arguments, **named):
        counted.append(math.prod(self.shape[:-2]))
        return decode(self, *arguments, **named)

    with patch.object(MXFP4, "dequantize", counting):
        run(x, mlp)
    matrices = sum(counted)
    assert matrices != 2 * 8, (
        f"all 8 experts are dequantized, where the tokens chose {chosen}: skip those "
        "whose group is empty"
    )
    assert matrices <= 2 * chosen, (
        f"{chosen} experts with 2 matrices each were chosen, and you dequantize "
        f"{matrices} matrices: each expert runs once, on all its tokens together"
    )


def bytes_a_token(config, batch):
    """What a step reads for each of its tokens, on the average."""
    num_experts, top_k = config.num_local_experts, config.num_experts_per_tok
    left = math.comb(num_experts - 1, top_k) / math.comb(num_experts, top_k)
    distinct = num_experts * (1 - left**batch)
    hidden, inner = config.hidden_size, config.intermediate_size
    one = 3 * hidden * inner * 4.25 / 8 + 2 * (2 * inner + hidden)
    kinds = count_parameters(config).by_kind
    rest = 2 * (sum(kinds.values()) - kinds["experts"] - kinds["embedding"])
    return (rest + config.num_hidden_layers * distinct * one) / batch


def check_4_1(smallest_batch):
    """Each answer has to be below its limit, and the batch before it not."""
    few = replace(GPT_OSS_20B, num_local_experts=8)
    configs = {"120b": GPT_OSS_120B, "20b": GPT_OSS_20B, "20b with 8 experts": few}
    for name, config in configs.items():
        one = bytes_a_token(config, 1)
        found = number(smallest_batch(config, 1.01 * one), "a batch size")
        assert found == 1, f"{name}: one token already reads less than the limit"
        for share in (0.9, 0.7, 0.35, 0.2, 0.03):
            limit = share * one
            batch = smallest_batch(config, limit)
            told = f"{name}, limit {limit / 1e9:.2f} GB: at batch {batch} a token reads"
            size = bytes_a_token(config, batch)
            assert size < limit, f"{told} {size / 1e9:.3f} GB, so it's too small"
            before = bytes_a_token(config, batch - 1) if batch > 1 else math.inf
            assert before >= limit, (
                f"{told} less, but so it does at batch {batch - 1}: not the smallest"
            )


def check_4_2(imbalance):
    """Counts small enough to see."""
    cases = [
        ([[0, 1], [2, 3]], 4, 1.0, "all four experts have one token: perfectly even"),
        ([[0, 1], [0, 2], [0, 3]], 4, 2.0, "3 tokens at the busiest, 1.5 on average"),
        ([[0, 1], [0, 1]], 8, 4.0, "6 of 8 experts have nobody, and they count"),
        (
            [[3, 2, 1, 0]] * 5,
            16,
            4.0,
            "4 of 16 experts have 5 tokens, a mean of 1.25",
        ),
        ([[5], [5], [2]], 6, 4.0, "2 tokens at the busiest, a mean of 3 / 6"),
    ]
    for ids, num_experts, expected, reason in cases:
        found = number(imbalance(torch.tensor(ids), num_experts), "the ratio")
        assert math.isclose(found, expected, rel_tol=1e-5), (
            f"{reason}: {ids} among {num_experts} is not {found:.3g}"
        )


def check_4_3(route_all):
    """Against the softmax of the chosen scores."""
    x, weight, bias = seeded(20, 6), seeded(16, 6, seed=1), seeded(16, seed=2)
    found = route_all(x, weight, bias, 4)
    ids, weights = pair_of(found, "the numbers of the experts and their weights")
    assert ids.shape == weights.shape == (20, 4), (
        f"20 tokens with 4 experts each are [20, 4]; yours {list(weights.shape)}"
    )
    for token in range(20):
        scores = (weight.double() @ x[token].double() + bias.double()).tolist()
        best, shares = softmax_of_chosen(scores, 4)
        assert ids[token].tolist() == best, "the same experts in the same order"
        total = weights[token].sum().item()
        assert abs(total - 1) < 1e-4, (
            f"the chosen weights add up to {total:.3f}: divide them by their sum"
        )
        assert torch.allclose(weights[token].double(), torch.tensor(shares).double()), (
            "they add up to 1, but the ratio of two weights is that of their e^score"
        )


class Watch(TorchDispatchMode):
    """Counts torch's operations, and notes sorting and the largest tensor."""

    def __init__(self):
        super().__init__()
        self.operations = self.largest = 0
        self.sorts = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.").split(".")[0]
        if name in ("sort", "argsort", "topk", "msort", "kthvalue", "_unique2"):
            self.sorts.append(name)
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def check_4_4(group_pairs):
    """Right on numbers, then watched where there are none."""
    generator = torch.Generator().manual_seed(0)
    for tokens, k, total in ((1, 4, 16), (7, 2, 3), (64, 4, 128), (40, 1, 4)):
        ids = torch.rand(tokens, total, generator=generator).topk(k).indices
        found = group_pairs(ids, total)
        assert isinstance(found, tuple | list) and len(found) == 2, (
            "return two tensors, the pairs in order and the experts' counts"
        )
        pairs, counts = found
        sizes = ids.flatten().bincount(minlength=total)
        assert counts.tolist() == sizes.tolist(), (
            f"{tokens} tokens with {k} of {total} experts: one count for each of the "
            "experts, those without a pair too"
        )
        told = f"{tokens} tokens with {k} of {total} experts"
        assert sorted(pairs.tolist()) == list(range(tokens * k)), (
            f"{told}: each pair's number, 0 to {tokens * k - 1}, is there once"
        )
        assert (ids.flatten()[pairs.long()].diff() >= 0).all(), (
            f"{told}: the pairs aren't ordered by expert; start plus rank is the place "
            "where a pair goes, and what's wanted is which pair is there"
        )
        assert pairs.tolist() == ids.flatten().argsort(stable=True).tolist(), (
            "the pairs of one expert stay in the order in which they came"
        )
    pairs, experts_ = 4096, 16
    ids = torch.empty(pairs // 4, 4, dtype=torch.int64, device="meta")
    watch = Watch()
    try:
        with watch:
            group_pairs(ids, experts_)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0][:120]
        raise AssertionError(
            "without numbers it can't go on: somewhere Python waits for a value "
            f"({reason})"
        ) from None
    assert not watch.sorts, f"{watch.sorts[0]} sorts; count instead"
    assert watch.operations <= pairs // 4, (
        f"{watch.operations} operations for {pairs} pairs: that's a loop over the pairs"
    )
    assert watch.largest <= 2 * pairs * experts_, (
        f"a tensor of {watch.largest:,} numbers for {pairs:,} pairs and {experts_} "
        "experts: every pair was compared with every other"
    )
