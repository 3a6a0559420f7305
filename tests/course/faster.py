"""A faster version of each challenge, to see that the bar can be beaten."""

import codecs
from collections import OrderedDict
from hashlib import sha256
from itertools import accumulate

import numpy as np
import torch
from course.naive import FP4

from simplellm.base.noise import mix


def mxfp4(x, blocks, scales):
    table = torch.tensor([*FP4, *(-number for number in FP4)])
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)
    numbers = pairs[blocks.int()].flatten(2)  # [N, G, 32]
    weight = numbers * torch.exp2(scales.float() - 127)[..., None]
    return x @ weight.flatten(1).T


def int8(weight):
    scales = weight.abs().amax(1) / 127
    scales[scales == 0] = 1
    return (weight / scales[:, None]).round().to(torch.int8), scales


def router(logits, k):
    best, ids = logits.topk(k)
    return ids, best.softmax(-1)


def experts_order(ids, experts):
    flat = ids.flatten()
    counts = flat.bincount(minlength=experts).cumsum(0)
    return flat.argsort(stable=True), torch.cat([counts.new_zeros(1), counts])


def rope(x, positions, frequencies, concentration):
    angles = positions[:, None] * frequencies
    cos, sin = (t[:, None] * concentration for t in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sinks(q, k, v, sinks):
    kv_heads = k.shape[1]
    grouped = q.unflatten(0, (kv_heads, -1))  # [K, G, D]
    scores = grouped @ k.permute(1, 2, 0) / q.shape[1] ** 0.5  # [K, G, S]
    scores = torch.cat([scores, sinks.view(kv_heads, -1, 1)], dim=-1)
    return (scores.softmax(-1)[..., :-1] @ v.transpose(0, 1)).flatten(0, 1)


def paged_decode(q, keys, values, tables, lengths):
    k, v = (x[tables].flatten(1, 2) for x in (keys, values))  # [B, S, H, D]
    scores = (k * q[:, None]).sum(-1) / q.shape[2] ** 0.5  # [B, S, H]
    hidden = torch.arange(k.shape[1]) >= lengths[:, None]
    shares = scores.masked_fill(hidden[..., None], -torch.inf).softmax(1)
    return (shares[..., None] * v).sum(1)


def online_softmax(scores):
    top = scores.amax(1)
    return top, (scores - top[:, None]).exp().sum(1)


def ring(lengths, size):
    newest = lengths[:, None] - 1
    position = newest - (newest - torch.arange(size)) % size
    return position.clamp(min=-1)


def prefix_hash(tokens, page):
    data, state, names = np.array(tokens, "<i8").tobytes(), sha256(), []
    for end in range(page, len(tokens) + 1, page):
        state.update(data[8 * (end - page) : 8 * end])
        names.append(state.copy().digest())
    return names


def lru(accesses, capacity):
    cached: OrderedDict[int, None] = OrderedDict()
    evicted = []
    for page in accesses:
        gone = -1
        if page in cached:
            cached.move_to_end(page)
        else:
            if len(cached) == capacity:
                gone, _ = cached.popitem(last=False)
            cached[page] = None
        evicted.append(gone)
    return evicted


def schedule(missing, budget):
    return [(end - 1) // budget for end in accumulate(missing)]


def top_k(logits, noise, k):
    least = logits.topk(k).values[:, -1:]
    return torch.where(logits >= least, logits + noise, -torch.inf).argmax(-1)


def top_p(weights, permille):
    ordered = weights.sort(descending=True).values
    held = 1000 * ordered.cumsum(1)
    enough = held >= permille * weights.sum(1, keepdim=True)
    last = ordered.gather(1, enough.int().argmax(1, keepdim=True))
    return weights >= last


def gumbel(logits, temperature, seeds, steps):
    low, high = seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF
    first = mix(mix(mix(low) ^ high) ^ steps)
    second = mix(first ^ 0x5BD1E995)
    tokens = []
    for row, scores in enumerate(logits / temperature[:, None]):
        # The noise is between -2.9 and 23: whoever is so far behind cannot win.
        (some,) = torch.where(scores > scores.max() - 26)
        bits = mix(mix(some ^ first[row]) ^ second[row])
        uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
        noise = -torch.log(-torch.log1p(-uniform))
        tokens.append(some[(scores[some] + noise).argmax()])
    return torch.stack(tokens)


def logprobs(logits, tokens, k):
    total = logits.logsumexp(-1, keepdim=True)
    picked = logits.gather(1, tokens[:, None])
    top = logits.topk(k)
    ranks = 1 + (logits > picked).sum(-1)
    return (picked - total)[:, 0], ranks, top.indices, top.values - total


def verify(drafts, target, draft, chance):
    asked = drafts[..., None]
    p, q = target[:, :-1].gather(2, asked)[..., 0], draft.gather(2, asked)[..., 0]
    counts = (chance * q < p).long().cumprod(1).sum(1)
    rows = torch.arange(len(drafts))
    left = target[rows, counts]
    refused = torch.where(counts < drafts.shape[1])[0]
    less = left[refused] - draft[refused, counts[refused]]
    less = less.clamp(min=0)
    left[refused] = less / less.sum(1, keepdim=True)
    return counts, left


def stop_strings(pieces, stops):
    text = "".join(pieces)
    found = [(text.find(stop), stop) for stop in stops]
    ends = [(at + len(stop), -len(stop)) for at, stop in found if at >= 0]
    if not ends:
        return text, -1
    end, length = min(ends)
    sizes = accumulate(map(len, pieces))
    return text[: end + length], next(n for n, size in enumerate(sizes) if size >= end)


def utf8(pieces):
    decode = codecs.getincrementaldecoder("utf-8")().decode
    return [decode(piece) for piece in pieces]


def all_reduce(a, b):
    return a + b
