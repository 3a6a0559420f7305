"""Wrong answers to chapter 6."""

import copy
from dataclasses import replace

import torch

from simplellm.model import ops
from simplellm.model.model import Model
from simplellm.model.ops import rms_norm
from wrong import wrong


def num_tokens(x):
    return torch.tensor([len(x)], dtype=torch.int32)


class Pass(Model):
    """The right forward pass in pieces, of which the wrong ones change one each."""

    def start(self, batch, previous):
        x = self.ops.embed(batch.tokens, previous, self.embed_tokens)
        return self.embed_transform(x, batch.positions)

    def attend(self, h, n, batch, pool, group=None, bias=None):
        attn = self.layers[n].attn
        group = batch.groups[pool.groups[n]] if group is None else group
        keys, values = pool.keys[n], pool.values[n]
        qkv = self.ops.project(h, attn.qkv, bias)
        where = batch.positions, keys, values, group.slots
        q = self.ops.rope_and_cache(qkv, attn, *where)
        out = self.ops.attend(q, keys, values, group, attn.sinks)
        return self.ops.project(self.joined(out), attn.o, attn.o_bias)

    def joined(self, out):
        return out.flatten(1)

    def run(self, batch, pool, previous, group=None, biased=False, feed=None):
        """The stream, and the update that is still to be added."""
        x, update = self.start(batch, previous), None
        eps = self.config.rms_norm_eps
        feed = feed or (lambda mlp, h, num_tokens: mlp.forward(self.ops, h, num_tokens))
        for n, layer in enumerate(self.layers):
            bias = layer.attn.qkv_bias if biased else None
            x, h = self.ops.add_norm(x, update, layer.attn_norm, eps)
            update = self.attend(h, n, batch, pool, group, bias)
            x, h = self.ops.add_norm(x, update, layer.mlp_norm, eps)
            update = feed(layer.mlp, h, batch.num_tokens)
        return x, update

    def finish(self, x, update):
        return self.ops.add_norm(x, update, self.norm, self.config.rms_norm_eps)[1]


@wrong("Model.forward", "final norm is missing")
class NoFinalNorm(Pass):
    def forward(self, batch, pool, previous):
        x, update = self.run(batch, pool, previous)
        return x + update


@wrong("Model.forward", "heads joined")
class HeadsApart(Pass):
    def forward(self, batch, pool, previous):
        return self.finish(*self.run(batch, pool, previous))

    def joined(self, out):
        return out


@wrong("Model.forward", "got lost")
class LosesTheLastUpdate(Pass):
    def forward(self, batch, pool, previous):
        x, _ = self.run(batch, pool, previous)
        return self.finish(x, None)


@wrong("Model.forward", "windows are")
class OneGroupForAll(Pass):
    def forward(self, batch, pool, previous):
        return self.finish(*self.run(batch, pool, previous, group=batch.groups[0]))


@wrong("Model.forward", "bias twice")
class BiasTwice(Pass):
    def forward(self, batch, pool, previous):
        return self.finish(*self.run(batch, pool, previous, biased=True))


@wrong("Model.forward", "each layer's own")
class OneLayersMemoryForAll(Pass):
    def forward(self, batch, pool, previous):
        first = copy.copy(pool)
        first.keys = pool.keys[:1] * len(self.layers)
        first.values = pool.values[:1] * len(self.layers)
        return self.finish(*self.run(batch, first, previous))


@wrong("Model.forward", "batch.positions")
class CountsFromZero(Pass):
    def forward(self, batch, pool, previous):
        places = torch.arange(len(batch.tokens), dtype=torch.int32)
        batch = replace(batch, positions=places)
        return self.finish(*self.run(batch, pool, previous))


@wrong("Model.forward", "o_bias")
class ForgetsABias(Pass):
    def attend(self, h, n, batch, pool, group=None, bias=None):
        found = super().attend(h, n, batch, pool, group, bias)
        return found - self.layers[n].attn.o_bias

    def forward(self, batch, pool, previous):
        return self.finish(*self.run(batch, pool, previous))


@wrong("Model.forward", "self.ops.")
class OwnOperations(Pass):
    def forward(self, batch, pool, previous):
        table, self.ops = self.ops, ops.PLAIN
        x, update = self.run(batch, pool, previous)
        self.ops = table
        return ops.add_norm(x, update, self.norm, self.config.rms_norm_eps)[1]


@wrong("Model.forward", "self.ops.add_norm")
class AddsByItself(Pass):
    def forward(self, batch, pool, previous):
        x, eps = self.start(batch, previous), self.config.rms_norm_eps
        for n, layer in enumerate(self.layers):
            h = rms_norm(x, layer.attn_norm, eps)
            x = x + self.attend(h, n, batch, pool).sum(1)
            h = rms_norm(x, layer.mlp_norm, eps)
            x = x + layer.mlp.forward(self.ops, h, batch.num_tokens)
        return rms_norm(x, self.norm, eps)


@wrong("Model.forward", "self.ops.experts")
class ExpertsOfThePackage(Pass):
    """The right numbers, but a faster table never gets to see the experts."""

    def forward(self, batch, pool, previous):
        def feed(mlp, h, num_tokens):
            return mlp.forward(ops.PLAIN, h, num_tokens)

        return self.finish(*self.run(batch, pool, previous, feed=feed))


@wrong("Model.forward", "layer.mlp.forward")
class ExpertsInEveryLayer(Pass):
    """Right for gpt-oss; a layer of another family may have a plain network."""

    def forward(self, batch, pool, previous):
        def feed(mlp, h, num_tokens):
            return self.ops.experts(h, mlp, num_tokens)

        return self.finish(*self.run(batch, pool, previous, feed=feed))


def filtered(logits, top_k, top_p, min_p, *, whole=False, crossing=True, all_of_1=True):
    """`filter_tokens`; ``whole``: top-p looks at all probabilities, not what is left;
    not ``crossing``: it drops the token with which it has enough."""
    ordered = logits.sort(dim=-1, descending=True).values
    keep = ordered >= ordered[:, :1] + min_p.log()
    keep &= torch.arange(logits.shape[1]) < top_k
    left = ordered if whole else ordered.masked_fill(~keep, -torch.inf)
    probs = left.softmax(-1)
    mass = probs.cumsum(-1) - (probs if crossing else 0)
    inside = mass < top_p
    keep &= inside | (top_p >= 1) if all_of_1 else inside
    last = (keep.sum(-1, keepdim=True) - 1).clamp(min=0)
    return logits.masked_fill(logits < ordered.gather(1, last), -torch.inf)


@wrong("filter_tokens", "renormalized")
def looks_at_all(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, whole=True)


@wrong("filter_tokens", "that one is kept too")
def drops_the_crossing_token(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, crossing=False)


@wrong("filter_tokens", "passes 1 early")
def loses_the_tail(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p, all_of_1=False)


@wrong("filter_tokens", "at least a quarter as likely")
def min_p_of_the_whole(logits, top_k, top_p, min_p):
    logits = logits.masked_fill(logits.softmax(-1) < min_p, -torch.inf)
    return filtered(logits, top_k, top_p, torch.zeros_like(min_p))


@wrong("filter_tokens", "the 3 best")
def one_too_many(logits, top_k, top_p, min_p):
    return filtered(logits, top_k + 1, top_p, min_p)


@wrong("filter_tokens", "keeps its logit")
def gives_probabilities(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p).softmax(-1).log()


@wrong("filter_tokens", "the best token stays")
def may_keep_none(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, top_p, min_p).masked_fill(top_p == 0, -torch.inf)


@wrong("filter_tokens", "its own parameters")
def first_row_for_all(logits, top_k, top_p, min_p):
    return filtered(logits, top_k[:1], top_p, min_p[:1])


@wrong("6.1", "logits, not probabilities")
def divides_probabilities(probs, temperature):
    hot = (torch.tensor(probs) / temperature).softmax(0)
    return hot.tolist()


@wrong("6.1", "add up to")
def forgets_the_sum(probs, temperature):
    return [p ** (1 / temperature) for p in probs]


@wrong("6.2", "add up to the logit")
def a_norm_for_each(stream, norm, eps, row):
    added = torch.cat([stream[:1], stream.diff(dim=0)])
    return rms_norm(added, norm, eps) @ row


@wrong("6.2", "what the stream holds by then")
def lens_logits(stream, norm, eps, row):
    early = rms_norm(stream, norm, eps) @ row
    return torch.cat([early[:1], early.diff()])


@wrong("6.3", "runs the prompt alone")
def first_step_runs_one_more(prompt_lengths, new_tokens, active_parameters):
    pairs = zip(prompt_lengths, new_tokens, strict=True)
    tokens = sum(m * n + m * (m + 1) // 2 for n, m in pairs)
    return tokens, 2 * active_parameters * tokens


@wrong("6.3", "tokens; you say")
def all_with_all(prompt_lengths, new_tokens, active_parameters):
    n, m = sum(prompt_lengths), sum(new_tokens)
    tokens = m * n + m * (m - 1) // 2
    return tokens, 2 * active_parameters * tokens


@wrong("6.3", "has its own answer")
def prompts_with_the_answers_of_others(prompt_lengths, new_tokens, active_parameters):
    pairs = zip(prompt_lengths, sorted(new_tokens), strict=True)
    tokens = sum(m * n + m * (m - 1) // 2 for n, m in pairs)
    return tokens, 2 * active_parameters * tokens


@wrong("6.3", "whole numbers")
def in_floats(prompt_lengths, new_tokens, active_parameters):
    pairs = zip(prompt_lengths, new_tokens, strict=True)
    tokens = sum(m * n + m * (m - 1) / 2 for n, m in pairs)
    return tokens, 2 * active_parameters * tokens


@wrong("6.4", "sorts or selects")
def sorts_after_all(logits, top_p):
    p = logits.softmax(-1)
    ordered = p.sort(descending=True).values
    last = ((ordered.cumsum(-1) - ordered < top_p).sum(-1, keepdim=True) - 1).clamp(0)
    return p >= ordered.gather(1, last)


def bisected(logits, top_p, halvings):
    p = logits.softmax(-1)
    high = p.amax(-1, keepdim=True)
    low = torch.zeros_like(high)
    for _ in range(halvings):
        middle = (low + high) / 2
        enough = p.masked_fill(p <= middle, 0).sum(-1, keepdim=True) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return p, low, high


@wrong("6.4", "wrong side")
def eight_halvings(logits, top_p):
    p, low, _ = bisected(logits, top_p, 8)
    return p > low


@wrong("6.4", "mass reaches top-p is kept")
def without_the_crossing_token(logits, top_p):
    p, _, high = bisected(logits, top_p, 40)
    return p > high * (1 + 1e-5)


@wrong("6.4", "a CPU waits")
def looks_at_a_value(logits, top_p):
    p, low, high = bisected(logits, top_p, 40)
    while (high - low).max() > 1e-3:
        low = high
    return p > low


@wrong("6.4", "a loop over the tokens")
def token_by_token(logits, top_p):
    p = logits.softmax(-1)
    kept = torch.zeros_like(p, dtype=torch.bool)
    for token in range(p.shape[1]):
        mine = p[:, token, None]
        kept[:, token] = p.masked_fill(p <= mine, 0).sum(-1) < top_p
    return kept


@wrong("6.4", "reads a tensor's value")
def through_a_list(logits, top_p):
    p, low, _ = bisected(logits, top_p, 40)
    return p > torch.tensor(low.tolist())


@wrong("filter_tokens", "share the best logit")
def drops_ties(logits, top_k, top_p, min_p):
    kept = filtered(logits, top_k, top_p, min_p)
    ranks = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return kept.masked_fill(ranks >= top_k, -torch.inf)


@wrong("filter_tokens", "rounds to 1")
def trusts_the_sum(logits, top_k, top_p, min_p):
    ordered = logits.sort(dim=-1, descending=True).values
    keep = ordered >= ordered[:, :1] + min_p.log()
    keep &= torch.arange(logits.shape[1]) < top_k
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probs.cumsum(-1).roll(1, -1)
    before[:, 0] = -1  # the best always stays
    last = (keep & (before < top_p)).sum(-1, keepdim=True) - 1
    return logits.masked_fill(logits < ordered.gather(1, last), -torch.inf)


@wrong("Model.forward", "batch.num_tokens")
class LengthsForCounts(Pass):
    def forward(self, batch, pool, previous):
        def feed(mlp, h, num_tokens):
            return mlp.forward(self.ops, h, batch.lengths)

        return self.finish(*self.run(batch, pool, previous, feed=feed))


@wrong("Model.forward", "batch.num_tokens")
class CountsRows(Pass):
    def forward(self, batch, pool, previous):
        def feed(mlp, h, _):
            return mlp.forward(self.ops, h, num_tokens(h))

        return self.finish(*self.run(batch, pool, previous, feed=feed))


@wrong("Model.forward", "self.config.rms_norm_eps")
class EpsByHeart(Pass):
    def forward(self, batch, pool, previous):
        config, self.config = self.config, replace(self.config, rms_norm_eps=1e-5)
        found = self.finish(*self.run(batch, pool, previous))
        self.config = config
        return found


@wrong("Model.forward", "self.embed_transform")
class EmbedsAsGptOss(Pass):
    def start(self, batch, previous):
        return self.ops.embed(batch.tokens, previous, self.embed_tokens)

    def forward(self, batch, pool, previous):
        return self.finish(*self.run(batch, pool, previous))


@wrong("6.2", "with an eps of 50")
def without_eps(stream, norm, eps, row):
    added = torch.cat([stream[:1], stream.diff(dim=0)])
    return (added * stream[-1].pow(2).mean().rsqrt() * norm) @ row


@wrong("Model.forward", "add nothing yourself")
class AddsTheUpdate(Pass):
    def forward(self, batch, pool, previous):
        x, eps = self.start(batch, previous), self.config.rms_norm_eps
        for n, layer in enumerate(self.layers):
            h = self.ops.add_norm(x, None, layer.attn_norm, eps)[1]
            x = x + self.attend(h, n, batch, pool)
            h = self.ops.add_norm(x, None, layer.mlp_norm, eps)[1]
            x = x + layer.mlp.forward(self.ops, h, batch.num_tokens)
        return self.finish(x, None)


@wrong("filter_tokens", "min-p of 1")
def drops_what_is_just_as_likely(logits, top_k, top_p, min_p):
    p = logits.softmax(-1)
    dropped = (p <= min_p * p.amax(-1, keepdim=True)) & (min_p > 0)
    logits = logits.masked_fill(dropped, -torch.inf)
    return filtered(logits, top_k, top_p, torch.zeros_like(min_p))


@wrong("filter_tokens", "exactly 0.5")
def goes_on_when_it_has_enough(logits, top_k, top_p, min_p):
    return filtered(logits, top_k, torch.nextafter(top_p, top_p + 1), min_p)


@wrong("filter_tokens", "tie with it stay")
def breaks_ties_by_index(logits, top_k, top_p, min_p):
    left = filtered(logits, top_k, torch.ones_like(top_p), min_p)
    probs, order = left.softmax(-1).sort(dim=-1, descending=True, stable=True)
    enough = (probs.cumsum(-1) - probs >= top_p) & (top_p < 1)
    enough[:, 0] = False  # the best always stays
    return left.masked_fill(
        torch.zeros_like(enough).scatter(1, order, enough), -torch.inf
    )
