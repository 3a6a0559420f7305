"""Wrong answers to chapter 4."""

from dataclasses import replace

import torch
from torch.nn import functional

from simplellm.checkpoint.families.gpt_oss import GPT_OSS_120B
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.model import feed_forward, moe
from simplellm.model.feed_forward import linear
from simplellm.model.memory import count_parameters
from wrong import wrong


@wrong("expected_distinct", "choose some experts twice")
def no_overlap(num_experts, top_k, batch):
    return min(num_experts, top_k * batch)


@wrong("expected_distinct", "different experts")
def with_replacement(num_experts, top_k, batch):
    return num_experts * (1 - (1 - 1 / num_experts) ** (top_k * batch))


@wrong("expected_distinct", "not a share")
def probability_of_one(num_experts, top_k, batch):
    return 1 - (1 - top_k / num_experts) ** batch


@wrong("expected_distinct", "touches exactly")
def the_untouched(num_experts, top_k, batch):
    return num_experts * (1 - top_k / num_experts) ** (batch + 1) + 1


def expert(x, mlp, e, first_bias=True, second_bias=True):
    """Expert ``e`` of ``mlp`` on x [T, hidden], perhaps without its biases."""
    bias = mlp.gate_up_bias
    bias = bias[e] if first_bias and bias is not None else None
    hidden = feed_forward.swiglu(linear(x, mlp.gate_up[e], bias), mlp.limit, mlp.alpha)
    bias = mlp.down_bias
    bias = bias[e] if second_bias and bias is not None else None
    return linear(hidden, mlp.down[e], bias)


def spread(x, mlp):
    """Each token's weights over all experts, [T, E]."""
    ids, weights = feed_forward.route(x, mlp.router, mlp.router_bias, mlp.top_k)
    return torch.zeros(len(x), len(mlp.router)).scatter(1, ids, weights)


def dense_sum(x, mlp, shares, **biases):
    """The sum over all experts of their share, [T, E], of every token."""
    numbers = range(len(mlp.router))
    return sum(shares[:, e, None] * expert(x, mlp, e, **biases) for e in numbers)


def grouped(x, mlp, token=None, weight=None, put=None, **biases):
    """`experts`, with one of its three steps replaced."""
    ids, scores = feed_forward.route(x, mlp.router, mlp.router_bias, mlp.top_k)
    out = torch.zeros_like(x)
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount().tolist()
    for e, chosen in enumerate(order.split(counts)):
        if len(chosen) == 0:
            continue
        tokens = token(chosen) if token else chosen // mlp.top_k
        shares = weight(scores, chosen) if weight else scores.flatten()[chosen]
        y = expert(x[tokens], mlp, e, **biases) * shares[:, None]
        if put:
            put(out, tokens, y)
        else:
            out.index_add_(0, tokens, y)
    return out


@wrong("experts", "must not even run")
def every_expert(x, mlp, num_tokens):
    return dense_sum(x, mlp, spread(x, mlp))


@wrong("experts", "skip those")
def decodes_everything(x, mlp, num_tokens):
    if isinstance(mlp.gate_up, MXFP4):
        mlp = replace(
            mlp,
            gate_up=mlp.gate_up.dequantize(x.dtype),
            down=mlp.down.dequantize(x.dtype),
        )
    return moe.experts(x, mlp, num_tokens)


@wrong("experts", "runs once")
def token_by_token(x, mlp, num_tokens):
    return torch.cat([moe.experts(row[None], mlp, num_tokens) for row in x])


@wrong("experts", "matrix products")
def token_by_token_decoded_once(x, mlp, num_tokens):
    ids, scores = feed_forward.route(x, mlp.router, mlp.router_bias, mlp.top_k)
    decoded = {}
    for e in ids.unique().tolist():
        weights = mlp.gate_up[e], mlp.down[e]
        if isinstance(mlp.gate_up, MXFP4):
            weights = tuple(weight.dequantize(x.dtype) for weight in weights)
        decoded[e] = weights
    out = torch.zeros_like(x)
    for t, choice in ((t, c) for t in range(len(x)) for c in range(mlp.top_k)):
        e = int(ids[t, choice])
        hidden = linear(x[t], decoded[e][0], mlp.gate_up_bias[e])
        hidden = feed_forward.swiglu(hidden, mlp.limit, mlp.alpha)
        out[t] += scores[t, choice] * linear(hidden, decoded[e][1], mlp.down_bias[e])
    return out


@wrong("experts", "output is bfloat16")
def sums_in_float32(x, mlp, num_tokens):
    return moe.experts(x, mlp, num_tokens).float()


@wrong("experts", "like x")
def sums_of_another_dtype(x, mlp, num_tokens):
    if x.dtype == torch.float32:
        return moe.experts(x, mlp, num_tokens)
    out = torch.zeros(x.shape)
    return out.index_add_(0, torch.arange(len(x)), moe.experts(x, mlp, num_tokens))


@wrong("experts", "its number // k")
def pair_modulo_tokens(x, mlp, num_tokens):
    return grouped(x, mlp, token=lambda chosen: chosen % len(x))


@wrong("experts", "where you assign")
def assigned_instead_of_added(x, mlp, num_tokens):
    def put(out, tokens, y):
        out[tokens] = y

    return grouped(x, mlp, put=put)


@wrong("experts", "in the same place")
def every_pair_the_first_weight(x, mlp, num_tokens):
    return grouped(
        x,
        mlp,
        weight=lambda scores, chosen: (
            scores.flatten()[chosen] if len(x) == 1 else scores[chosen // 2, 0]
        ),
    )


def late_bias(x, mlp):
    shares = spread(x, mlp)
    biases = (shares > 0).float() @ mlp.down_bias
    return dense_sum(x, mlp, shares, second_bias=False) + biases


@wrong("experts", "before the router's weight")
def bias_after_the_weight(x, mlp, num_tokens):
    if mlp.down_bias is None:
        return moe.experts(x, mlp, num_tokens)
    return late_bias(x, mlp)


def read_a_token(config, batch, distinct):
    """Bytes; the formula of the chapter with another number of experts."""
    hidden, inner = config.hidden_size, config.intermediate_size
    one = 3 * hidden * inner * 17 // 32 + 2 * (2 * inner + hidden)
    kinds = count_parameters(config).by_kind
    rest = 2 * sum(n for k, n in kinds.items() if k not in ("experts", "embedding"))
    return (rest + config.num_hidden_layers * distinct * one) / batch


def first_below(config, limit, distinct, batches=range(1, 4096)):
    """The first of ``batches`` at which ``distinct`` experts cost less than a limit."""
    experts, top_k = config.num_local_experts, config.num_experts_per_tok
    for batch in batches:
        if read_a_token(config, batch, distinct(experts, top_k, batch)) < limit:
            return batch
    return batch


def mean_distinct(experts, top_k, batch):
    return experts * (1 - (1 - top_k / experts) ** batch)


@wrong("4.1", "too small")
def last_one_above(config, limit):
    return max(first_below(config, limit, mean_distinct) - 1, 1)


@wrong("4.1", "not the smallest")
def powers_of_two(config, limit):
    return first_below(config, limit, mean_distinct, [2**n for n in range(12)])


@wrong("4.1", "not the smallest")
def without_sharing(config, limit):
    return first_below(config, limit, no_overlap)


@wrong("4.1", "already reads")
def for_the_120b_only(config, limit):
    return first_below(GPT_OSS_120B, limit, mean_distinct)


@wrong("4.2", "have nobody")
def over_those_chosen(expert_ids, num_experts):
    counts = expert_ids.flatten().bincount()
    return (counts.max() / counts[counts > 0].float().mean()).item()


@wrong("4.2", "perfectly even")
def tokens_not_choices(expert_ids, num_experts):
    counts = expert_ids.flatten().bincount(minlength=num_experts)
    return (counts.max() / (len(expert_ids) / num_experts)).item()


@wrong("4.2", "have nobody")
def without_minlength(expert_ids, num_experts):
    counts = expert_ids.flatten().bincount()
    return (counts.max() / counts.float().mean()).item()


def softmax_over_all(x, weight, bias, top_k):
    shares, ids = functional.linear(x, weight, bias).softmax(-1).topk(top_k)
    return ids, shares


@wrong("4.3", "by their sum")
def forgets_to_divide(x, weight, bias, top_k):
    return softmax_over_all(x, weight, bias, top_k)


@wrong("4.3", "ratio")
def softmax_twice(x, weight, bias, top_k):
    ids, shares = softmax_over_all(x, weight, bias, top_k)
    return ids, shares.softmax(-1)


@wrong("4.4", "sorts")
def sorted_pairs(expert_ids, num_experts):
    flat = expert_ids.flatten()
    return flat.argsort(stable=True), functional.one_hot(flat, num_experts).sum(0)


@wrong("4.4", "sorts")
def sorted_by_the_operator(expert_ids, num_experts):
    flat = expert_ids.flatten()
    _, pairs = torch.ops.aten.sort.stable(flat, stable=True)
    return pairs, functional.one_hot(flat, num_experts).sum(0)


@wrong("4.4", "waits for a value")
def by_nonzero(expert_ids, num_experts):
    flat = expert_ids.flatten()
    found = [(flat == e).nonzero()[:, 0] for e in range(num_experts)]
    return torch.cat(found), torch.tensor([len(pairs) for pairs in found])


@wrong("4.4", "waits for a value")
def by_one_nonzero(expert_ids, num_experts):
    one_hot = functional.one_hot(expert_ids.flatten(), num_experts)
    return one_hot.T.nonzero()[:, 1], one_hot.sum(0)


@wrong("4.4", "waits for a value")
def by_bincount(expert_ids, num_experts):
    pairs, _ = by_ranks(expert_ids, num_experts)
    return pairs, expert_ids.flatten().bincount(minlength=num_experts)


@wrong("4.4", "every other")
def by_comparing_all(expert_ids, num_experts):
    flat = expert_ids.flatten()
    place = torch.arange(len(flat), device=flat.device)
    before = (flat[None] < flat[:, None]) | (
        (flat[None] == flat[:, None]) & (place[None] < place[:, None])
    )
    pairs = torch.empty_like(flat)
    pairs[before.sum(1)] = place
    return pairs, functional.one_hot(flat, num_experts).sum(0)


@wrong("4.4", "loop over the pairs")
def pair_by_pair(expert_ids, num_experts):
    flat = expert_ids.flatten()
    one_hot = functional.one_hot(flat, num_experts)
    counts = one_hot.sum(0)
    places = counts.cumsum(0) - counts
    pairs = torch.empty_like(flat)
    for pair in range(len(flat)):
        one = one_hot[pair]
        pairs.scatter_(0, (places * one).sum()[None], torch.full_like(flat[:1], pair))
        places = places + one
    return pairs, counts


def by_ranks(expert_ids, num_experts, base=1):
    flat = expert_ids.flatten()
    one_hot = functional.one_hot(flat, num_experts)
    counts = one_hot.sum(0)
    ranks = one_hot.cumsum(0).gather(1, flat[:, None])[:, 0] - base
    places = (counts.cumsum(0) - counts)[flat] + ranks
    pairs = torch.empty_like(flat)
    pairs[places] = torch.arange(len(flat), device=flat.device)
    return pairs, counts


@wrong("4.4", "which pair is there")
def the_places(expert_ids, num_experts):
    flat = expert_ids.flatten()
    pairs, counts = by_ranks(expert_ids, num_experts)
    places = torch.empty_like(flat)
    places[pairs] = torch.arange(len(flat), device=flat.device)
    return places, counts
