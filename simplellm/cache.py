"""Keys and values that stay: what of each token is kept, where, and for how long.

B decodes, T packed tokens, S positions, H query heads, K kv heads, G = H / K heads a
group, D head_dim.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from numpy import ndarray
from torch import Tensor

from simplellm.attention import attention
from simplellm.config import ModelConfig


def kv_bytes(
    config: ModelConfig, tokens: int, *, itemsize: int = 2, windowed: bool = True
) -> int:
    """Bytes of the keys and values of one sequence of ``tokens`` tokens.

    ``itemsize`` is the bytes of one number. ``windowed`` lets a sliding layer keep no
    more than its window.
    """
    position = 2 * config.num_key_value_heads * config.head_dim * itemsize
    windows = map(config.window, range(config.num_hidden_layers))
    kept = (min(tokens, w) if w and windowed else tokens for w in windows)
    return position * sum(kept)


@dataclass(frozen=True)
class Chunk:
    """Some tokens of one sequence that take part in a step, in the packed order."""

    sequence: int  # the name under which the cache's manager knows it
    start: int  # how many of its tokens the cache holds already
    length: int  # how many new ones follow them


class Manager(Protocol):
    """The bookkeeping of a cache: who has how much room. Pure Python, no tensors.

    A sequence is a number of the caller's choice. Its life: `add`; for every step
    `grow`, the forward pass, `commit`; `remove`.
    """

    def add(self, sequence: int, tokens: Sequence[int]) -> int:
        """Register a sequence; how many of its first tokens the cache already holds.

        The answer is below ``len(tokens)``, so that one token is left to compute.
        Raises ValueError if the sequence is there already, or can never fit.
        """
        ...

    def grow(self, sequence: int, length: int) -> bool:
        """Make room for ``length`` tokens in all, or change nothing and say False.

        Raises ValueError for a length that can never fit.
        """
        ...

    def commit(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        """Note that the first ``length`` of its ``tokens`` are in the cache now."""
        ...

    def fork(self, parent: int, child: int) -> bool:
        """Register ``child`` with what ``parent`` has computed; False if it cannot."""
        ...

    def remove(self, sequence: int) -> None:
        """Forget the sequence and give back its room."""
        ...

    @property
    def max_tokens(self) -> int:
        """The longest that a sequence can get if it is alone."""
        ...

    @property
    def free_tokens(self) -> int:
        """How many tokens of new sequences fit at most."""
        ...

    @property
    def usage(self) -> float:
        """The share of the room that is taken, 0 to 1."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not add up."""
        ...


@dataclass
class Holding:
    """What one sequence has in the slot cache."""

    slot: int | None = None  # taken when it first grows
    room: int = 0  # tokens it asked room for
    computed: int = 0  # tokens that are in the cache


class SlotManager:
    """One slot of ``max_model_len`` tokens a sequence; the lowest free one is next."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.free = list(range(max_num_seqs))  # a heap
        self.holdings: dict[int, Holding] = {}

    def add(self, sequence: int, tokens: Sequence[int]) -> int:
        """Register a sequence; 0, for nothing of it is in the cache."""
        if sequence in self.holdings:
            raise ValueError(f"sequence {sequence} is in the cache; expected a new one")
        self._check_length(sequence, len(tokens))
        self.holdings[sequence] = Holding()
        return 0

    def grow(self, sequence: int, length: int) -> bool:
        """Take a slot, unless it has one; False if none is free."""
        holding = self.holding(sequence)
        self._check_length(sequence, length)
        if holding.slot is None:
            if not self.free:
                return False
            holding.slot = heapq.heappop(self.free)
        holding.room = max(holding.room, length)
        return True

    def commit(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        """Note that the first ``length`` of its ``tokens`` are in the cache now."""
        holding = self.holding(sequence)
        if not holding.computed <= length <= holding.room:
            raise ValueError(
                f"sequence {sequence} commits {length} tokens; expected "
                f"{holding.computed}, which it has, to {holding.room}, its room"
            )
        holding.computed = length

    def fork(self, parent: int, child: int) -> bool:
        """False: two sequences cannot share a slot."""
        return False

    def remove(self, sequence: int) -> None:
        """Forget the sequence; its slot is free, with nothing copied or cleared."""
        slot = self.holding(sequence).slot
        del self.holdings[sequence]
        if slot is not None:
            heapq.heappush(self.free, slot)

    def holding(self, sequence: int) -> Holding:
        """What the sequence has. Raises ValueError if it is not registered."""
        if sequence not in self.holdings:
            raise ValueError(f"sequence {sequence} is unknown; expected an added one")
        return self.holdings[sequence]

    def slot(self, chunk: Chunk) -> int:
        """The slot of the chunk's sequence. Raises ValueError if it cannot run."""
        holding = self.holding(chunk.sequence)
        if holding.slot is None:
            raise ValueError(
                f"sequence {chunk.sequence} has no slot, {len(self.free)} of "
                f"{self.max_num_seqs} are free; expected grow() to give it one first"
            )
        if chunk.length < 1 or chunk.start != holding.computed:
            raise ValueError(
                f"{chunk}: expected at least one token, the first at "
                f"{holding.computed}, how many are in the cache"
            )
        if chunk.start + chunk.length > holding.room:
            raise ValueError(
                f"{chunk}: expected to end by {holding.room}, the room it asked for"
            )
        return holding.slot

    @property
    def max_tokens(self) -> int:
        return self.max_model_len

    @property
    def free_tokens(self) -> int:
        return len(self.free) * self.max_model_len

    @property
    def usage(self) -> float:
        return 1 - len(self.free) / self.max_num_seqs

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or has one owner."""
        taken = [h.slot for h in self.holdings.values() if h.slot is not None]
        assert sorted(self.free + taken) == list(range(self.max_num_seqs))
        for sequence, holding in self.holdings.items():
            room = 0 if holding.slot is None else self.max_model_len
            assert 0 <= holding.computed <= holding.room <= room, (sequence, holding)

    def _check_length(self, sequence: int, length: int) -> None:
        if not 1 <= length <= self.max_model_len:
            raise ValueError(
                f"sequence {sequence} has {length} tokens; expected 1 to "
                f"{self.max_model_len}, max_model_len"
            )


@dataclass(frozen=True)
class Span:
    """Decodes whose slots are neighbors, computed as one batch with no copy."""

    tokens: slice | Tensor  # the packed tokens
    slots: slice
    rows: Tensor | None  # which of the slots; None: all, in the order of the tokens
    longest: int  # positions that the longest of them reads
    hidden: Tensor | None  # bool [slots, 1, 1, longest]: what a slot must not read


@dataclass(frozen=True)
class Prefill:
    """Several tokens of one sequence."""

    tokens: slice
    slot: int
    start: int
    past: Tensor | None  # where a ring holds the positions before them; None: no ring


@dataclass(frozen=True)
class Plan:
    """Who writes and reads what in a step, the same for all layers of a kind."""

    kept: Tensor | None  # the packed tokens that are stored; None: all
    places: Tensor  # [kept * K] rows of a layer's memory, seen as [slots * K * S, D]
    spans: list[Span]
    prefills: list[Prefill]
    order: Tensor | None  # brings the outputs of both into the packed order; None: is


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, hidden: Tensor | None
) -> Tensor:
    """One query a sequence: q [B, H, D], k and v [B, K, S, D] -> [B, H, D].

    The output has q's dtype; scores, softmax and the weighted sum are float32. The bool
    tensor ``hidden`` broadcasts to [B, K, G, S], sinks are [H].
    """
    (batch, _, dim), (_, kv_heads, num_keys, _) = q.shape, k.shape
    grouped = (q.float() * dim**-0.5).view(batch * kv_heads, -1, dim)  # [B*K, G, D]
    k, v = k.float().flatten(0, 1), v.float().flatten(0, 1)  # [B*K, S, D], no copies
    scores = torch.bmm(grouped, k.transpose(1, 2))  # [B*K, G, S]
    if hidden is not None:
        scores.view(batch, kv_heads, -1, num_keys).masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, -1, 1).repeat(batch, 1, 1)  # [B*K, G, 1]
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return torch.bmm(weights, v).view(q.shape).to(q.dtype)


class Read(NamedTuple):
    """What some decodes attend to: the memory of the cache, or gathered from it."""

    rows: slice | ndarray  # of the packed tokens, n of them
    keys: ndarray  # float32 [n, K, S, D]
    values: ndarray
    hidden: ndarray | None  # bool, as [n, 1, 1, S]: what a row must not read


class DecodeStep:
    """A cache during one forward pass.

    ``decodes`` is true if each chunk is one token and the memory float32 on a CPU. Only
    then may `extend` be used.
    """

    def __init__(self, chunks: Sequence[Chunk], memory: Tensor) -> None:
        self.chunks = chunks
        self.num_tokens = sum(chunk.length for chunk in chunks)
        plain = memory.dtype == torch.float32 and memory.device.type == "cpu"
        self.decodes = plain and self.num_tokens == len(chunks)

    def extend(self, layer: int, k: ndarray, v: ndarray) -> Iterable[Read]:
        """Store k and v float32 [T, K, D]; what the tokens attend to, new and old."""
        raise NotImplementedError


class SlotStep(DecodeStep):
    """The slot cache during one forward pass over ``chunks``."""

    def __init__(
        self, cache: "SlotCache", chunks: Sequence[Chunk], slots: Sequence[int]
    ) -> None:
        self.layers = cache.layers
        super().__init__(chunks, self.layers[0][0])
        self.cache = cache
        self.slots = slots

    @cached_property
    def plans(self) -> list[Plan]:
        """One for each layer, drawn up if somebody asks."""
        return self.cache.plans(self.chunks, self.slots)

    def extend(self, layer: int, k: ndarray, v: ndarray) -> Iterable[Read]:
        """Store k and v float32 [T, K, D]; what the tokens attend to, new and old."""
        keys, values = self.cache.arrays[layer]
        size = keys.shape[2]  # of [slots, K, S, D]
        for row, (chunk, slot) in enumerate(zip(self.chunks, self.slots, strict=True)):
            place, length = chunk.start % size, min(chunk.start + 1, size)
            keys[slot, :, place], values[slot, :, place] = k[row], v[row]
            seen = slice(slot, slot + 1), slice(None), slice(length)
            yield Read(slice(row, row + 1), keys[seen], values[seen], None)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor:
        """Store k and v [T, K, D], attend with q [T, H, D] to old and new -> [T, H, D].

        Raises ValueError if T is not the sum of the chunks' lengths.
        """
        if q.shape[0] != self.num_tokens:
            raise ValueError(
                f"{q.shape[0]} packed tokens; expected {self.num_tokens}, the sum of "
                "the chunks' lengths"
            )
        plan = self.plans[layer]
        keys, values = self.layers[layer]  # [slots, K, S, D]
        # A ring is read before the new tokens overwrite the oldest of it.
        pasts = [
            None
            if p.past is None
            else (keys[p.slot, :, p.past], values[p.slot, :, p.past])
            for p in plan.prefills
        ]
        for memory, new in ((keys, k), (values, v)):
            new = new if plan.kept is None else new[plan.kept]
            rows = new.reshape(-1, new.shape[-1]).to(memory.dtype)
            memory.view(-1, memory.shape[-1]).index_copy_(0, plan.places, rows)

        outputs = []
        for span in plan.spans:
            queries = q[span.tokens]
            if span.rows is not None:
                slots = span.slots.stop - span.slots.start
                spread = queries.new_zeros(slots, *queries.shape[1:])
                queries = spread.index_copy_(0, span.rows, queries)
            seen = (span.slots, slice(None), slice(span.longest))
            found = decode_attention(
                queries, keys[seen], values[seen], sinks, span.hidden
            )
            outputs.append(found if span.rows is None else found[span.rows])
        for p, past in zip(plan.prefills, pasts, strict=True):
            new_k, new_v = k[p.tokens], v[p.tokens]
            if past is not None:
                old_k, old_v = (x.transpose(0, 1).to(k.dtype) for x in past)
                new_k, new_v = torch.cat([old_k, new_k]), torch.cat([old_v, new_v])
            elif p.start:
                end = p.start + len(new_k)
                new_k, new_v = (
                    m[p.slot, :, :end].transpose(0, 1) for m in (keys, values)
                )
            outputs.append(attention(q[p.tokens], new_k, new_v, sinks, window=window))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if plan.order is None else out[plan.order]


class SlotCache:
    """Keys and values of up to ``max_num_seqs`` sequences, one slot each.

    All memory is allocated here, once: [slots, K, S, D] for the keys and for the values
    of each layer. S is ``max_model_len`` in a full layer. In a sliding layer it is the
    window, used as a ring: position p lies at p modulo S.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.manager = SlotManager(max_num_seqs, max_model_len)
        self.device = torch.device(device)
        self.kv_heads = config.num_key_value_heads
        windows = [config.window(n) for n in range(config.num_hidden_layers)]
        self.sizes = [min(w or max_model_len, max_model_len) for w in windows]
        self.windows = windows

        def memory(size: int) -> Tensor:
            # Zeros, for a hidden position has weight 0 and must hold a number.
            shape = (max_num_seqs, self.kv_heads, size, config.head_dim)
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.layers = [(memory(size), memory(size)) for size in self.sizes]

    @cached_property
    def arrays(self) -> list[tuple[ndarray, ndarray]]:
        """``layers`` for NumPy, in the same memory; only float32 on a CPU has it."""
        return [(keys.numpy(), values.numpy()) for keys, values in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, used or not."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def step(self, chunks: Sequence[Chunk]) -> SlotStep:
        """What the model needs as its cache to run ``chunks``, packed in this order.

        Raises ValueError for chunks that do not continue what is in the cache.
        """
        sequences = [chunk.sequence for chunk in chunks]
        if not chunks or len(set(sequences)) < len(sequences):
            raise ValueError(
                f"chunks of the sequences {sequences}; expected at least one, and none "
                "of them twice"
            )
        slots = [self.manager.slot(chunk) for chunk in chunks]
        return SlotStep(self, chunks, slots)

    def plans(self, chunks: Sequence[Chunk], slots: Sequence[int]) -> list[Plan]:
        """Who writes and reads what in a step, for each layer."""
        kinds = {
            kind: self._plan(chunks, slots, *kind)
            for kind in set(zip(self.windows, self.sizes, strict=True))
        }
        return [kinds[kind] for kind in zip(self.windows, self.sizes, strict=True)]

    def _plan(
        self,
        chunks: Sequence[Chunk],
        slots: Sequence[int],
        window: int | None,
        size: int,
    ) -> Plan:
        heads = torch.arange(self.kv_heads) * size

        def rows(slot: int | Tensor, positions: Tensor) -> Tensor:
            return (slot * self.kv_heads * size + positions % size)[:, None] + heads

        decodes: list[tuple[int, int, int]] = []  # slot, packed token, position
        kept, places, prefills = [], [], []
        first = 0
        for chunk, slot in zip(chunks, slots, strict=True):
            start, end = chunk.start, chunk.start + chunk.length
            tokens = slice(first, first + chunk.length)
            first = tokens.stop
            if chunk.length == 1:
                decodes.append((slot, tokens.start, start))
                continue
            # Of a long chunk only the last `size` tokens stay in a ring.
            stored = torch.arange(max(start, end - size), end)
            kept.append(stored + (tokens.start - start))
            places.append(rows(slot, stored))
            past = None
            if window is not None and start:
                oldest = max(0, start + 1 - window)
                past = (torch.arange(oldest, start) % size).to(self.device)
            prefills.append(Prefill(tokens, slot, start, past))
        decodes.sort()
        columns = torch.tensor(decodes, dtype=torch.int64).view(-1, 3)
        slot_ids, packed, positions = columns.unbind(1)
        kept.append(packed)
        places.append(rows(slot_ids, positions))
        every, ids = torch.cat(kept), torch.arange(first)
        order = torch.cat([packed, *(ids[p.tokens] for p in prefills)])
        return Plan(
            kept=None if every.equal(ids) else every.to(self.device),
            places=torch.cat(places).flatten().to(self.device),
            spans=self._spans(decodes, size),
            prefills=prefills,
            order=None if order.equal(ids) else order.argsort().to(self.device),
        )

    def _spans(self, decodes: list[tuple[int, int, int]], size: int) -> list[Span]:
        """All decodes as one batch, or each for itself where that reads much less."""
        if not decodes:
            return []
        slots, tokens, positions = map(list, zip(*decodes, strict=True))
        lengths = [min(position + 1, size) for position in positions]
        first, last, longest = slots[0], slots[-1], max(lengths)
        count = last + 1 - first
        if count * longest > 2 * sum(lengths):
            return [
                Span(slice(token, token + 1), slice(slot, slot + 1), None, length, None)
                for slot, token, length in zip(slots, tokens, lengths, strict=True)
            ]
        rows = torch.tensor(slots) - first
        read = torch.zeros(count, dtype=torch.int64).index_copy_(
            0, rows, torch.tensor(lengths)
        )
        hidden = torch.arange(longest) >= read[:, None]
        together = tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        return [
            Span(
                tokens=slice(tokens[0], tokens[-1] + 1)
                if together
                else torch.tensor(tokens, device=self.device),
                slots=slice(first, last + 1),
                rows=None if count == len(decodes) else rows.to(self.device),
                longest=longest,
                hidden=hidden[:, None, None].to(self.device) if hidden.any() else None,
            )
        ]
