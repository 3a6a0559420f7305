"""The bars of the twenty challenges: right, readable, slow. And what they're fed.

Each challenge is a function and, below it, how its arguments are drawn: ``edge`` asks
for small shapes with what is easily forgotten, else they are those of a timed run.

T tokens, B sequences, S positions, V vocabulary, H query heads, K kv heads, D head_dim,
E experts, N and R rows.
"""

from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from simplellm.base.noise import gumbel_noise

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def normal(rng: Generator, *shape: int) -> Tensor:
    """float32 of ``shape``."""
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def integers(rng: Generator, low: int, high: int, *shape: int) -> Tensor:
    """int64 of ``shape``, from ``low`` to ``high - 1``."""
    return torch.from_numpy(rng.integers(low, high, shape))


# Weights


def mxfp4(x: Tensor, blocks: Tensor, scales: Tensor) -> Tensor:
    """The product of x with a weight in MXFP4, whose rows are the outputs.

    x float32 [T, 32 * G], blocks uint8 [N, G, 16] of two numbers each, the low nibble
    first, scales uint8 [N, G], which mean 2^(scale - 127) -> float32 [T, N].
    """
    table = torch.tensor([*FP4, *(-number for number in FP4)])
    columns = []
    for row, exponents in zip(blocks, scales, strict=True):
        low, high = table[(row & 15).long()], table[(row >> 4).long()]
        numbers = torch.stack([low, high], dim=-1).flatten(1)  # [G, 32]
        weight = numbers * torch.exp2(exponents.float() - 127)[:, None]
        columns.append(x @ weight.flatten())
    return torch.stack(columns, dim=1)


def draw_mxfp4(rng: Generator, edge: bool) -> tuple[Any, ...]:
    tokens, rows, groups = rng.integers(1, 5, 3) if edge else (2, 512, 32)
    blocks = integers(rng, 0, 256, rows, groups, 16).byte()
    scales = integers(rng, 118, 128, rows, groups).byte()
    return normal(rng, tokens, 32 * groups), blocks, scales


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in 8 bits with a scale for each row.

    weight float32 [N, M] -> int8 [N, M] and scales float32 [N]. The largest magnitude
    of a row becomes 127; numbers are divided by the scale and rounded half to even. A
    row of zeros has the scale 1.
    """
    numbers, scales = [], []
    for row in weight:
        scale = row.abs().max() / 127
        if scale == 0:
            scale = torch.tensor(1.0)
        numbers.append((row / scale).round().to(torch.int8))
        scales.append(scale)
    return torch.stack(numbers), torch.stack(scales).float()


def draw_int8(rng: Generator, edge: bool) -> tuple[Any, ...]:
    rows, columns = rng.integers(1, 9, 2) if edge else (1024, 256)
    weight = normal(rng, rows, columns) * torch.exp2(normal(rng, rows, 1) * 4)
    if edge:
        weight[rng.integers(rows)] = 0
    return (weight,)


# Experts


def router(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best experts of each token, best first, and a softmax over these k logits.

    logits float32 [T, E], of which no two in a row are equal -> ids int64 [T, k] and
    weights float32 [T, k].
    """
    chosen = []
    for row in logits.tolist():
        best = sorted(range(len(row)), key=lambda expert: -row[expert])
        chosen.append(best[:k])
    ids = torch.tensor(chosen, device=logits.device)
    return ids, logits.gather(1, ids).softmax(dim=-1)


def draw_router(rng: Generator, edge: bool) -> tuple[Any, ...]:
    tokens, experts, k = (3, 5, rng.integers(1, 6)) if edge else (256, 128, 4)
    ranks = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)
    logits = torch.from_numpy(ranks).float() / experts * 8 - rng.uniform(0, 8)
    return logits.float(), int(k)


def experts_order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The (token, choice) pairs by expert, so that each expert reads its rows at once.

    ids int64 [T, k]; pair p is choice p % k of token p // k. -> order int64 [T * k],
    the pairs of expert 0 first, each expert's in ascending order; starts int64 [E + 1],
    where each expert's pairs begin, and the end.
    """
    flat = ids.flatten().tolist()
    order, starts = [], [0]
    for expert in range(experts):
        for pair, chosen in enumerate(flat):
            if chosen == expert:
                order.append(pair)
        starts.append(len(order))
    return torch.tensor(order), torch.tensor(starts)


def draw_experts_order(rng: Generator, edge: bool) -> tuple[Any, ...]:
    tokens, experts, k = (int(rng.integers(1, 6)), 9, 3) if edge else (256, 128, 4)
    rows = np.tile(np.arange(experts), (tokens, 1))
    return torch.from_numpy(rng.permuted(rows, axis=1)[:, :k].copy()), experts


# Attention


def rope(
    x: Tensor, positions: Tensor, frequencies: Tensor, concentration: float
) -> Tensor:
    """Each head turned by its token's angles, as YaRN does it.

    x float32 [T, H, D], positions int64 [T], frequencies float32 [D / 2] -> [T, H, D].
    Dimension i is paired with i + D / 2 and turned by position * frequencies[i]; cos
    and sin are multiplied by ``concentration``.
    """
    out, half = torch.empty_like(x), x.shape[2] // 2
    for token, position in enumerate(positions):
        for i in range(half):
            angle = position * frequencies[i]
            cos, sin = angle.cos() * concentration, angle.sin() * concentration
            first, second = x[token, :, i], x[token, :, i + half]
            out[token, :, i] = first * cos - second * sin
            out[token, :, i + half] = second * cos + first * sin
    return out


def draw_rope(rng: Generator, edge: bool) -> tuple[Any, ...]:
    tokens, heads, half = rng.integers(1, 5, 3) if edge else (24, 8, 32)
    frequencies = 150_000.0 ** (-torch.arange(int(half)) / half)
    positions = integers(rng, 0, 4096, tokens)
    concentration = float(rng.uniform(1, 1.5))
    return normal(rng, tokens, heads, 2 * half), positions, frequencies, concentration


def sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Attention of one new token over all of S, with a sink for each head.

    q float32 [H, D], k and v float32 [S, K, D], sinks float32 [H] -> [H, D]. Head h
    reads kv head h // (H / K). Scores are divided by sqrt(D); the sink is one more
    score, undivided, whose share goes nowhere.
    """
    heads, dim = q.shape
    group, out = heads // k.shape[1], []
    for head in range(heads):
        keys, values = k[:, head // group], v[:, head // group]
        scores = keys @ q[head] / dim**0.5
        shares = torch.cat([scores, sinks[head : head + 1]]).softmax(dim=0)
        out.append(shares[:-1] @ values)
    return torch.stack(out)


def draw_sinks(rng: Generator, edge: bool) -> tuple[Any, ...]:
    length, kv_heads, group, dim = rng.integers(1, 5, 4) if edge else (512, 8, 8, 64)
    k, v = (normal(rng, length, kv_heads, dim) for _ in range(2))
    return normal(rng, kv_heads * group, dim), k, v, 3 * normal(rng, kv_heads * group)


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """Attention of one new token of each of B requests over its pages.

    q float32 [B, H, D], keys and values float32 [pages, size, H, D], tables int64
    [B, M], lengths int64 [B], at least 1 -> [B, H, D]. Position i of request b is in
    row i % size of page tables[b, i // size]; scores are divided by sqrt(D).
    """
    size, out = keys.shape[1], []
    for b, length in enumerate(lengths.tolist()):
        places = [(tables[b, i // size], i % size) for i in range(length)]
        k = torch.stack([keys[page, row] for page, row in places])  # [S, H, D]
        v = torch.stack([values[page, row] for page, row in places])
        scores = (k * q[b]).sum(-1) / q.shape[2] ** 0.5  # [S, H]
        out.append((scores.softmax(dim=0)[..., None] * v).sum(0))
    return torch.stack(out)


def draw_paged_decode(rng: Generator, edge: bool) -> tuple[Any, ...]:
    batch, size, most = (3, 4, 3) if edge else (8, 16, 12)
    heads, dim = (2, 4) if edge else (4, 32)
    pages = batch * most
    keys, values = (normal(rng, pages, size, heads, dim) for _ in range(2))
    tables = torch.from_numpy(rng.permutation(pages).reshape(batch, most))
    lengths = integers(rng, 1, size * most + 1, batch)
    return normal(rng, batch, heads, dim), keys, values, tables, lengths


def online_softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """What a softmax needs of each row, in one pass.

    scores float32 [R, N] -> the largest score of each row, float32 [R], and the sum of
    exp(score - largest), float32 [R].
    """
    top, total = scores[:, 0].clone(), torch.ones_like(scores[:, 0])
    for column in scores.T[1:]:
        new = torch.maximum(top, column)
        total = total * (top - new).exp() + (column - new).exp()
        top = new
    return top, total


def draw_online_softmax(rng: Generator, edge: bool) -> tuple[Any, ...]:
    rows, columns = rng.integers(1, 5, 2) if edge else (64, 400)
    return (normal(rng, rows, columns) * 8 + 100 * normal(rng, rows, 1),)


# The cache


def ring(lengths: Tensor, size: int) -> Tensor:
    """Which position stands in each slot of a ring that keeps the last ``size``.

    lengths int64 [B], the tokens written so far, position p into slot p % size ->
    int64 [B, size]; -1 where nothing was written.
    """
    out = []
    for length in lengths.tolist():
        slots = [-1] * size
        for position in range(length):
            slots[position % size] = position
        out.append(slots)
    return torch.tensor(out)


def draw_ring(rng: Generator, edge: bool) -> tuple[Any, ...]:
    batch, size, most = (5, rng.integers(1, 6), 12) if edge else (32, 128, 6000)
    return integers(rng, 0, most, batch), int(size)


def prefix_hash(tokens: list[int], page: int) -> list[bytes]:
    """The name of each full page: SHA-256 of all tokens up to its end.

    A token is hashed as eight bytes, little-endian.
    """
    names = []
    for end in range(page, len(tokens) + 1, page):
        data = b"".join(token.to_bytes(8, "little") for token in tokens[:end])
        names.append(sha256(data).digest())
    return names


def draw_prefix_hash(rng: Generator, edge: bool) -> tuple[Any, ...]:
    count, page = (rng.integers(0, 20), rng.integers(1, 6)) if edge else (2000, 16)
    return rng.integers(0, 200_000, count).tolist(), int(page)


def lru(accesses: list[int], capacity: int) -> list[int]:
    """Which page each access evicts, from a cache that evicts the longest unused.

    -1 for a hit, and while there is room.
    """
    cached: list[int] = []  # the longest unused first
    evicted = []
    for page in accesses:
        gone = -1
        if page in cached:
            cached.remove(page)
        elif len(cached) == capacity:
            gone = cached.pop(0)
        cached.append(page)
        evicted.append(gone)
    return evicted


def draw_lru(rng: Generator, edge: bool) -> tuple[Any, ...]:
    count, pages, capacity = (20, 5, rng.integers(1, 7)) if edge else (3000, 600, 400)
    return rng.integers(0, pages, count).tolist(), int(capacity)


def schedule(missing: list[int], budget: int) -> list[int]:
    """The step in which the last token of each prompt is computed, from 0 on.

    A step computes ``budget`` tokens, of the prompts in their order, the next one in
    pieces if need be. Each prompt has at least one token.
    """
    step, left, done = 0, budget, []
    for count in missing:
        for _ in range(count):
            if left == 0:
                step, left = step + 1, budget
            left -= 1
        done.append(step)
    return done


def draw_schedule(rng: Generator, edge: bool) -> tuple[Any, ...]:
    count, most, budget = (4, 9, rng.integers(1, 12)) if edge else (400, 500, 777)
    return rng.integers(1, most, count).tolist(), int(budget)


# Sampling


def top_k(logits: Tensor, noise: Tensor, k: int) -> Tensor:
    """A token of each row, drawn among its k likeliest.

    logits and noise float32 [B, V] -> int64 [B], where logits + noise is largest among
    tokens whose logit is at least the k-th largest of the row.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    kept = logits >= ordered[:, k - 1 : k]
    return (logits + noise).masked_fill(~kept, -torch.inf).argmax(dim=-1)


def draw_top_k(rng: Generator, edge: bool) -> tuple[Any, ...]:
    batch, vocab, k = (3, 6, rng.integers(1, 7)) if edge else (4, 40_000, 50)
    logits = normal(rng, batch, vocab) * 4
    noise = torch.from_numpy(rng.gumbel(size=(batch, vocab))).float()
    return logits.round() if edge else logits, noise, int(k)


def top_p(weights: Tensor, permille: int) -> Tensor:
    """Which tokens top_p keeps: the fewest that hold so much of a row's weight.

    weights int64 [B, V], whose sums are the same in any order -> bool [B, V]. Tokens
    are taken from the heaviest on until they hold permille / 1000 of all; tokens as
    heavy as the last one stay, too.
    """
    keep = []
    for row in weights.tolist():
        enough, held, last = permille * sum(row), 0, 0
        for weight in sorted(row, reverse=True):
            held, last = held + weight, weight
            if 1000 * held >= enough:
                break
        keep.append([weight >= last for weight in row])
    return torch.tensor(keep)


def draw_top_p(rng: Generator, edge: bool) -> tuple[Any, ...]:
    batch, vocab, width = (3, 6, 1) if edge else (4, 8000, 3)
    weights = (normal(rng, batch, vocab) * width + 20).exp2().long()
    return weights // 2**20 + 1 if edge else weights, int(rng.integers(1, 1001))


def gumbel(logits: Tensor, temperature: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """A token of each row, drawn with the engine's noise.

    logits float32 [B, V], temperature float32 [B], above 0, seeds and steps int64 [B]
    -> int64 [B], where logits / temperature + gumbel_noise is largest.
    """
    tokens = []
    for row in range(len(logits)):
        which = slice(row, row + 1)
        noise = gumbel_noise(seeds[which], steps[which], logits.shape[1])
        scores = logits[which] / temperature[which, None] + noise
        tokens.append(scores.argmax(dim=-1))
    return torch.cat(tokens)


def draw_gumbel(rng: Generator, edge: bool) -> tuple[Any, ...]:
    batch, vocab = (3, 7) if edge else (4, 40_000)
    temperature = torch.from_numpy(rng.uniform(0.1, 1, batch)).float()
    seeds, steps = integers(rng, -(2**62), 2**62, batch), integers(rng, 0, 999, batch)
    return normal(rng, batch, vocab) * 6, temperature, seeds, steps


def logprobs(
    logits: Tensor, tokens: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What an engine tells of its choice, and of the k likeliest tokens.

    logits float32 [N, V], tokens int64 [N] -> the tokens' log-probabilities, float32
    [N]; their ranks, int64 [N], one more than there are likelier ones; and ids int64
    and log-probabilities float32 [N, k] of the likeliest, best first. No two of these
    are equal.
    """
    known, chosen = logits.log_softmax(dim=-1), tokens[:, None]
    ordered, ids = logits.sort(dim=-1, descending=True)
    ranks = 1 + (ordered > logits.gather(1, chosen)).sum(dim=-1)
    top = known.gather(1, ids)[:, :k]
    return known.gather(1, chosen)[:, 0], ranks, ids[:, :k], top


def draw_logprobs(rng: Generator, edge: bool) -> tuple[Any, ...]:
    rows, vocab, k = (3, 6, rng.integers(1, 7)) if edge else (4, 40_000, 5)
    logits = normal(rng, rows, vocab) * 4
    return logits, integers(rng, 0, vocab, rows), int(k)


def verify(
    drafts: Tensor, target: Tensor, draft: Tensor, chance: Tensor
) -> tuple[Tensor, Tensor]:
    """How many drafted tokens are accepted, and from what the next one is drawn.

    drafts int64 [B, n], target float32 [B, n + 1, V] and draft float32 [B, n, V], the
    probabilities of the large model and of the small one, chance float32 [B, n] ->
    int64 [B] and float32 [B, V]. Drafts are accepted up to the first with chance *
    draft >= target. There the next token is drawn from max(target - draft, 0), normed
    to 1; if all are accepted, from the last target.
    """
    counts, rest = [], []
    for b, tokens in enumerate(drafts.tolist()):
        accepted, left = len(tokens), target[b, -1]
        for i in reversed(range(len(tokens))):
            p, q = target[b, i], draft[b, i]
            if chance[b, i] * q[tokens[i]] >= p[tokens[i]]:
                accepted, left = i, (p - q).clamp(min=0)
                left = left / left.sum()
        counts.append(accepted)
        rest.append(left)
    return torch.tensor(counts), torch.stack(rest)


def draw_verify(rng: Generator, edge: bool) -> tuple[Any, ...]:
    batch, count, vocab = (4, 2, 5) if edge else (24, 6, 2000)
    target = normal(rng, batch, count + 1, vocab)
    draft = (target[:, :-1] + 0.5 * normal(rng, batch, count, vocab)).softmax(-1)
    drafts = integers(rng, 0, vocab, batch, count)
    chance = torch.from_numpy(rng.uniform(0, 1, (batch, count))).float()
    return drafts, target.softmax(-1), draft, chance


# Text, and several GPUs


def stop_strings(pieces: list[str], stops: list[str]) -> tuple[str, int]:
    """The text up to the first stop string, and the piece with which that was complete.

    The stop string that ends first counts, of those that end together the longest.
    Without one it's the whole text, and -1.
    """
    text = ""
    for number, piece in enumerate(pieces):
        for character in piece:
            text += character
            found = [stop for stop in stops if text.endswith(stop)]
            if found:
                return text.removesuffix(max(found, key=len)), number
    return text, -1


def draw_stop_strings(rng: Generator, edge: bool) -> tuple[Any, ...]:
    count, letters = (8, "ab") if edge else (6000, "abcdefgh ")

    def text(length: int) -> str:
        return "".join(rng.choice(list(letters), length))

    pieces = [text(length) for length in rng.integers(0, 5, count)]
    return pieces, [text(int(n)) for n in rng.integers(2 if edge else 6, 9, 3)]


def utf8(pieces: list[bytes]) -> list[str]:
    """What each token's bytes add to a text that is shown in whole characters.

    All bytes together are valid UTF-8; a character may be spread over several tokens,
    and is shown with its last byte.
    """
    held, shown, out = b"", "", []
    for piece in pieces:
        held += piece
        end = len(held)
        while end > 0:
            try:
                text = held[:end].decode()
                break
            except UnicodeDecodeError:
                end -= 1
        else:
            text = ""
        out.append(text[len(shown) :])
        shown = text
    return out


def draw_utf8(rng: Generator, edge: bool) -> tuple[Any, ...]:
    letters = list("aé€😀z ")
    data = "".join(rng.choice(letters, 12 if edge else 1500)).encode()
    cuts = np.sort(rng.integers(0, len(data) + 1, 9 if edge else 1200))
    edges = [0, *cuts.tolist(), len(data)]
    return ([data[a:b] for a, b in pairwise(edges)],)


def all_reduce(a: Tensor, b: Tensor) -> Tensor:
    """The sum of what two GPUs have, as a ring adds it up: chunk by chunk.

    a and b bfloat16 [N] -> bfloat16 [N], added in float32 and rounded once.
    """
    out = torch.empty_like(a)
    for start in range(0, len(a), 256):
        chunk = slice(start, start + 256)
        out[chunk] = (a[chunk].float() + b[chunk].float()).bfloat16()
    return out


def draw_all_reduce(rng: Generator, edge: bool) -> tuple[Any, ...]:
    count = int(rng.integers(1, 600)) if edge else 300_000
    return normal(rng, count).bfloat16(), normal(rng, count).bfloat16()
