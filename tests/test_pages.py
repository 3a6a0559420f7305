"""paged.py: the books against a plain model, the tensors against recomputation."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from simplellm.cache import Chunk, kv_bytes
from simplellm.config import GPT_OSS_20B
from simplellm.model import Transformer, load_model
from simplellm.paged import NULL, PagedCache, PageManager

# float32 logits with a standard deviation near 3, added up in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}


# The books


def compute(manager: PageManager, sequence: int, tokens: Sequence[int], end: int):
    """Grow and commit as a step would, without any tensors."""
    assert manager.grow(sequence, end)
    manager.take_copies()
    manager.commit(sequence, tokens, end)
    manager.check_integrity()


@dataclass
class Known:
    """What the plain model knows of a sequence."""

    tokens: list[int]
    computed: int


class Books(RuleBasedStateMachine):
    """Random operations on a PageManager and on two dictionaries.

    ``memory`` plays the tensors: what lies at a position of a page. The keys and values
    of a token depend on it and on all before it, so that is what it holds.
    """

    @initialize(
        num_pages=st.sampled_from([2, 7, 12, 20, 40, 80]),
        page_size=st.integers(1, 5),
        window=st.sampled_from([None, 1, 2, 3, 4, 6, 9]),
        share=st.booleans(),
        max_chunk=st.none() | st.integers(1, 9),
    )
    def start(self, num_pages, page_size, window, share, max_chunk):
        self.manager = PageManager(
            num_pages, page_size, window=window, share=share, max_chunk=max_chunk
        )
        self.sequences: dict[int, Known] = {}
        self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.count = 0

    def name(self) -> int:
        self.count += 1
        return self.count

    @rule(shared=st.integers(0, 40), own=st.lists(st.integers(0, 1), max_size=9))
    def add(self, shared, own):
        name = self.name()
        tokens = [7] * shared + own or [7]
        if len(tokens) > self.manager.max_tokens:
            with pytest.raises(ValueError, match=f"has {len(tokens)} tokens"):
                self.manager.add(name, tokens)
            return
        computed = self.manager.add(name, tokens)
        assert 0 <= computed < len(tokens)
        assert computed % self.manager.page_size == 0
        assert computed == 0 or self.manager.share
        self.sequences[name] = Known(tokens, computed)

    @rule(lengths=st.lists(st.integers(1, 9), min_size=1), token=st.integers(0, 1))
    def step(self, lengths, token):
        """Compute chunks of as many sequences as there are lengths and pages."""
        manager, running = self.manager, []
        for (name, known), length in zip(self.sequences.items(), lengths, strict=False):
            if known.computed == len(known.tokens):
                known.tokens = [*known.tokens, token]
            chunk = min(length, manager.max_chunk or length)
            end = min(known.computed + chunk, len(known.tokens), manager.max_tokens)
            if end > known.computed and self.grow(name, end):
                running.append((name, known, end))
        self.copy()
        for name, known, end in running:
            for group, pages in enumerate(manager.table(name).groups):
                for position in range(known.computed, end):
                    index, place = divmod(position, manager.page_size)
                    prefix = tuple(known.tokens[: position + 1])
                    self.memory[pages[index], place] = (group, prefix)
        for name, known, end in running:
            manager.commit(name, known.tokens, end)
            known.computed = end

    @rule()
    def prefill(self):
        """Compute whatever there is room for."""
        self.step([99] * len(self.sequences), 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), length=st.integers(1, 9))
    def fail(self, data, length):
        """A step that never happens: room is made and nothing computed."""
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        end = self.sequences[name].computed + min(length, self.manager.max_chunk or 9)
        if end <= self.manager.max_tokens:
            self.grow(name, end)

    def grow(self, name: int, end: int) -> bool:
        before = repr(vars(self.manager))
        grown = self.manager.grow(name, end)
        if not grown:
            assert repr(vars(self.manager)) == before, "a refusal changed something"
            assert len(self.sequences) > 1, "no room for a sequence that is alone"
        return grown

    def copy(self) -> None:
        for source, target in self.manager.take_copies():
            assert source != target
            for place in range(self.manager.page_size):
                old = self.memory.get((source, place), (0, ()))
                self.memory[target, place] = old

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.sequences)))
        known, name = self.sequences[parent], self.name()
        assert self.manager.fork(parent, name)
        last = data.draw(st.integers(0, 1))
        tokens = [*known.tokens[: known.computed], last]
        self.sequences[name] = Known(tokens, known.computed)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), again=st.booleans())
    def remove(self, data, again):
        """``again`` is what a preempted sequence does."""
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        known = self.sequences.pop(name)
        self.manager.remove(name)
        if again and len(known.tokens) <= self.manager.max_tokens:
            computed = self.manager.add(name, known.tokens)
            self.sequences[name] = Known(known.tokens, computed)

    @invariant()
    def the_books_add_up(self):
        manager = self.manager
        manager.check_integrity()
        held = {
            page
            for name in self.sequences
            for pages in manager.table(name).groups
            for page in pages
            if page != NULL
        }
        assert manager.usage == pytest.approx(len(held) / manager.num_pages)
        assert len(held) + manager.free_pages == manager.num_pages
        assert set(manager.tables) == set(self.sequences)

    @invariant()
    def every_visible_position_holds_what_was_computed(self):
        manager = self.manager
        # Copies are made before anything is read: follow the last one back.
        origin = {target: source for source, target in manager._copies}
        for name, known in self.sequences.items():
            table = manager.table(name)
            assert table.computed == known.computed
            for group, window in enumerate(manager.windows):
                oldest = 0 if window is None else known.computed + 1 - window
                for position in range(max(0, oldest), known.computed):
                    index, place = divmod(position, manager.page_size)
                    page = table.groups[group][index]
                    while page in origin:
                        page = origin[page]
                    expected = (group, tuple(known.tokens[: position + 1]))
                    assert self.memory[page, place] == expected


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_prefix_hits_and_leaves_a_token() -> None:
    """Whole pages are shared, never all tokens, and never more than is equal."""
    manager = PageManager(100, 4)
    tokens = list(range(20))
    assert manager.add(0, tokens) == 0
    compute(manager, 0, tokens, 20)
    for length, expected in [(4, 0), (5, 4), (8, 4), (19, 16), (20, 16), (21, 20)]:
        name = 100 + length
        assert manager.add(name, [*tokens, 99][:length]) == expected
        manager.remove(name)
    assert manager.add(1, [*tokens[:9], 99, *tokens[10:]]) == 8
    assert manager.add(2, [99, *tokens[1:]]) == 0
    manager.check_integrity()


def test_pages_are_shared_only_once_they_are_computed() -> None:
    manager = PageManager(100, 4)
    tokens = list(range(20))
    manager.add(0, tokens)
    manager.grow(0, 20)
    assert manager.add(1, tokens) == 0
    manager.commit(0, tokens, 11)
    assert manager.add(2, tokens) == 8
    manager.remove(0)
    assert manager.add(3, tokens) == 8, "pages outlive the sequence that filled them"


def test_without_sharing_nothing_is_found() -> None:
    manager = PageManager(100, 4, share=False)
    tokens = list(range(20))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 20)
    assert manager.add(1, tokens) == 0
    manager.remove(0)
    manager.check_integrity()
    assert manager.usage == 0 and not manager.cached


@pytest.mark.parametrize("chunk", [1000, 256, 16])
def test_hits_with_the_window_of_gpt_oss(chunk: int) -> None:
    """A long prefix is found though its sliding pages fell behind the window."""
    manager = PageManager(400, 16, window=128)
    prefix = [i % 50 for i in range(1000)]
    tokens = prefix + [77] * 90
    manager.add(0, tokens)
    for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
        compute(manager, 0, tokens, end)
    assert manager.add(1, prefix + [88] * 30) == 992
    full, sliding = manager.table(1).groups
    assert full == manager.table(0).groups[0][:62]
    live = [page for page in sliding if page != NULL]
    assert len(live) == 8, "127 positions before the 993rd token end within 8 pages"


def test_a_hit_needs_the_pages_of_the_window() -> None:
    """Full pages alone give wrong tokens: the sliding layers would see nothing."""
    manager = PageManager(14, 4, window=8)
    tokens = list(range(20))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 20)
    manager.remove(0)
    # Sliding pages 0 to 2 went first, then the end: evict all three.
    other = [50 + i for i in range(14)]
    manager.add(1, other)
    compute(manager, 1, other, 14)
    assert sum(group == 0 for group, _ in manager.names.values()) >= 4
    hit = manager.add(2, tokens)
    first = max(0, hit + 1 - 8) // 4
    assert all(page != NULL for page in manager.table(2).groups[1][first:])
    manager.check_integrity()


def test_pages_behind_the_window_are_given_back() -> None:
    """However long a sequence gets, its sliding layers hold one window."""
    manager = PageManager(200, 16, window=128, share=False)
    tokens: list[int] = [1]
    manager.add(0, tokens)
    held = set()
    for end in range(1, 1001):
        assert manager.grow(0, end)
        manager.commit(0, tokens, end)
        tokens.append(1)
        pages = manager.table(0).groups[1]
        held.add(sum(page != NULL for page in pages))
    manager.check_integrity()
    assert max(held) == 9
    assert manager.num_pages - manager.free_pages == 63 + 9


def test_the_longest_unused_page_is_evicted_first() -> None:
    manager = PageManager(8, 2)
    for name in range(4):
        tokens = [name] * 4
        manager.add(name, tokens)
        compute(manager, name, tokens, 4)
    for name in (2, 0, 3, 1):
        manager.remove(name)
    manager.add(9, [9, 9, 9])
    compute(manager, 9, [9, 9, 9], 3)  # takes two pages, those of 2
    found = {}
    for name in range(4):
        found[name] = manager.add(name, [name] * 4 + [5])
        manager.remove(name)
    assert found == {0: 4, 1: 4, 2: 0, 3: 4}


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    manager = PageManager(5, 2)
    tokens = list(range(10))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 10)
    manager.remove(0)
    manager.add(1, [50, 51, 52])
    compute(manager, 1, [50, 51, 52], 3)
    assert manager.add(2, tokens) == 6


def test_conversations_that_take_turns_keep_their_prefixes() -> None:
    """Pages behind the window would need twice the room and push everything out.

    Eight conversations of 200 tokens: 50 pages of the full layers each, and 2 or 3
    that the window needs. A ninth may be computed at once.
    """
    manager = PageManager(8 * 54 + 110, 4, window=8)
    chats = [[i] * 200 for i in range(8)]
    for turn in range(4):
        for name, chat in enumerate(chats):
            hit = manager.add(name, chat)
            assert hit == ((len(chat) - 1) // 4 * 4 if turn else 0)
            compute(manager, name, chat, len(chat))
            chat.append(turn)
            manager.remove(name)


def test_a_boundary_that_was_hit_outlives_other_pages_behind_the_window() -> None:
    """Pages are evicted first behind the window, but not those of a shared prefix."""
    prefix, manager = list(range(40)), PageManager(60, 4, window=8)
    for name in range(2):
        tokens = [*prefix, *[50 + name] * 20]
        assert manager.add(name, tokens) == 40 * name
        compute(manager, name, tokens, 60)
        manager.remove(name)
    other = [99] * 90  # needs 46 pages: evicts 20 at least
    manager.add(3, other)
    compute(manager, 3, other, 44)
    compute(manager, 3, other, 90)
    manager.remove(3)
    assert manager.add(4, [*prefix, 77]) == 40


def test_a_preempted_sequence_hits_its_own_pages() -> None:
    manager = PageManager(40, 4, window=6)
    tokens = list(range(30))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 30)
    manager.remove(0)
    assert manager.add(0, tokens) == 28


def test_forks_copy_a_page_when_they_write_to_it() -> None:
    """Three samples of 10 tokens: two copies, and the last writer keeps the page."""
    manager = PageManager(20, 4)
    tokens = list(range(10))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 10)
    for child in (1, 2):
        assert manager.fork(0, child)
    assert manager.num_pages - manager.free_pages == 3
    shared = manager.table(0).groups[0][2]
    for name in (1, 0, 2):
        assert manager.grow(name, 11)
        manager.check_integrity()
    ends = [manager.table(name).groups[0][2] for name in (0, 1, 2)]
    assert ends[2] == shared and len(set(ends)) == 3
    assert manager.take_copies() == [(shared, ends[1]), (shared, ends[0])]
    assert manager.take_copies() == []
    assert manager.num_pages - manager.free_pages == 5


@given(
    num_pages=st.integers(2, 40),
    page_size=st.integers(1, 20),
    window=st.none() | st.integers(1, 50),
    max_chunk=st.none() | st.integers(1, 60),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_longest_sequence_fits_and_one_more_token_does_not(
    num_pages, page_size, window, max_chunk, data
) -> None:
    manager = PageManager(num_pages, page_size, window=window, max_chunk=max_chunk)
    length = manager.max_tokens
    tokens = [1] * (length + 1)
    with pytest.raises(
        ValueError, match=f"{length + 1} tokens; expected 1 to {length}"
    ):
        manager.add(0, tokens)
    manager.add(0, tokens[:length])
    computed = 0
    while computed < length:
        most = min(length - computed, max_chunk or length)
        computed += data.draw(st.integers((most + 1) // 2, most))
        compute(manager, 0, tokens, computed)
    with pytest.raises(
        ValueError, match=f"{length + 1} tokens; expected 1 to {length}"
    ):
        manager.grow(0, length + 1)
    # Not by a wide margin: the rest would not hold one more page of each kind.
    used = -(-length // page_size)
    if window is not None:
        span = window - 1 + (max_chunk or length)
        used += min(used, -(-span // page_size) + 1)
    assert num_pages - used <= 1 + (window is not None)


class Counted(list):
    """A list that counts what is read from it."""

    read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        raise AssertionError("all tokens were read")


def test_a_token_is_hashed_once() -> None:
    """The books read each token once in its life, not once a step."""
    manager = PageManager(300, 16, window=128)
    tokens = Counted([1] * 100)
    manager.add(0, tokens)
    tokens.read = 0
    for end in range(100, 2001):
        tokens.append(end)
        assert manager.grow(0, end)
        manager.commit(0, tokens, end)
    assert tokens.read == 2000


def test_bad_calls_are_refused() -> None:
    manager = PageManager(10, 4)
    manager.add(0, [1, 2, 3])
    for call in (
        lambda: manager.grow(7, 3),
        lambda: manager.commit(7, [1], 1),
        lambda: manager.fork(7, 8),
        lambda: manager.remove(7),
        lambda: manager.table(7),
    ):
        with pytest.raises(ValueError, match="sequence 7 is unknown"):
            call()
    with pytest.raises(ValueError, match="sequence 0 is here already"):
        manager.add(0, [1])
    with pytest.raises(ValueError, match="sequence 0 is here already"):
        manager.fork(0, 0)
    with pytest.raises(ValueError, match="has 0 tokens; expected 1 to 40"):
        manager.add(1, [])
    with pytest.raises(ValueError, match="has 41 tokens; expected 1 to 40"):
        manager.add(1, [1] * 41)
    with pytest.raises(ValueError, match="commit of 3 tokens"):
        manager.commit(0, [1, 2, 3], 3)  # no room was made
    manager.grow(0, 3)
    manager.commit(0, [1, 2, 3], 2)
    with pytest.raises(ValueError, match="commit of 1 tokens"):
        manager.commit(0, [1, 2, 3], 1)
    manager.check_integrity()


@pytest.mark.parametrize("name", ["num_pages", "page_size", "window", "max_chunk"])
def test_sizes_that_hold_nothing_are_refused(name: str) -> None:
    sizes = {"num_pages": 9, "page_size": 4, "window": 8, "max_chunk": 5} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0; expected at least"):
        PageManager(**sizes)


# The tensors


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """Four layers, two of them sliding with a window of 8."""
    config = replace(TINY, num_hidden_layers=4, layer_types=TINY.layer_types * 2)
    folder = write_checkpoint(tmp_path_factory.mktemp("paged") / "tiny", config)
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def embedded() -> Transformer:
    return load_model(device="cpu")


@torch.inference_mode()
def run(
    model: Transformer, cache: PagedCache, steps: Sequence[tuple[int, list[int], int]]
) -> list[torch.Tensor]:
    """One step: (sequence, tokens, end) -> logits of the new tokens of each."""
    chunks = []
    for name, _, end in steps:
        start = cache.manager.table(name).computed
        assert cache.manager.grow(name, end)
        chunks.append(Chunk(name, start, end - start))
    tokens = []
    for (_, ids, end), chunk in zip(steps, chunks, strict=True):
        tokens += ids[chunk.start : end]
    positions = [p for c in chunks for p in range(c.start, c.start + c.length)]
    step = cache.step(chunks)
    hidden = model(torch.tensor(tokens), torch.tensor(positions), step)
    for name, ids, end in steps:
        cache.manager.commit(name, ids, end)
    cache.manager.check_integrity()
    return list(model.lm_head(hidden).float().split([c.length for c in chunks]))


@pytest.mark.parametrize(
    ("page_size", "share"),
    [(1, True), (2, True), (3, True), (7, True), (16, True), (64, True), (4, False)],
)
def test_logits_are_those_of_recomputation(
    tiny: Transformer, page_size: int, share: bool
) -> None:
    """Random schedules: chunks, shared prefixes, forks, preemption, few pages."""
    rng = random.Random(10 * page_size + share)
    num_pages = 8 + 160 // page_size
    cache = PagedCache(
        tiny.config, num_pages=num_pages, page_size=page_size, share=share
    )
    manager = cache.manager
    prefix = [rng.randrange(97) for _ in range(40)]
    known: dict[int, list[int]] = {}
    counts = dict.fromkeys(["checked", "hit", "forked", "preempted"], 0)

    def token() -> int:
        return rng.randrange(97)

    for name in range(36):
        if len(known) < 6:
            shared, own = rng.randrange(41), rng.randrange(1, 9)
            tokens = prefix[:shared] + [token() for _ in range(own)]
            if len(tokens) <= manager.max_tokens:
                counts["hit"] += manager.add(name, tokens)
                known[name] = tokens
        if rng.random() < 0.15 and known:
            parent = rng.choice(list(known))
            computed = manager.table(parent).computed
            manager.fork(parent, 1000 + name)
            known[1000 + name] = [*known[parent][:computed], token()]
            counts["forked"] += 1
        steps = []
        for sequence in rng.sample(list(known), len(known)):
            tokens, start = known[sequence], manager.table(sequence).computed
            if start == len(tokens):
                tokens.append(token())
            end = min(len(tokens), start + rng.choice([1, 2, 11, 50]))
            if len(tokens) > manager.max_tokens or rng.random() < 0.04:
                manager.remove(sequence)
                del known[sequence]
            elif manager.grow(sequence, end):
                steps.append((sequence, tokens, end))
        if not steps and known:  # out of pages: preempt one
            sequence = rng.choice(list(known))
            manager.remove(sequence)
            counts["hit"] += manager.add(sequence, known[sequence])
            counts["preempted"] += 1
            continue
        for (_, tokens, end), logits in zip(
            steps, run(tiny, cache, steps) if steps else [], strict=True
        ):
            expected = tiny.logits(tokens[:end])[-len(logits) :]
            torch.testing.assert_close(logits, expected, **TOLERANCE)
            counts["checked"] += len(logits)
    assert counts["checked"] > 100 and counts["forked"] > 0, counts
    assert (counts["hit"] > 0) == (share and page_size < 40), counts


def greedy(
    model: Transformer, cache: PagedCache, name: int, prompt: list[int], new: int
) -> list[int]:
    """Continue one prompt, in chunks of 100 tokens at first."""
    tokens = list(prompt)
    computed = cache.manager.add(name, tokens)
    while len(tokens) < len(prompt) + new:
        computed = min(len(tokens), computed + 100)
        (logits,) = run(model, cache, [(name, tokens, computed)])
        if computed == len(tokens):
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_the_embedded_model_says_the_same(
    embedded: Transformer, page_size: int
) -> None:
    """Prompts around the window of 128, missed and hit, beside a crowd of others."""
    window = embedded.config.sliding_window
    assert window is not None
    generator = torch.Generator().manual_seed(page_size)
    vocab = embedded.config.vocab_size
    prefix = torch.randint(vocab, (300,), generator=generator).tolist()
    cache = PagedCache(
        embedded.config, num_pages=2500 // page_size, page_size=page_size
    )
    for length in (window - 1, window, window + 1, 256, 290):
        prompt = prefix[:length]
        expected = list(prompt)
        for _ in range(3):
            expected.append(int(embedded.logits(expected)[-1].argmax()))
        for name in (2 * length, 2 * length + 1):
            assert greedy(embedded, cache, name, prompt, 3) == expected[length:]
        hit = cache.manager.add(0, prompt)
        assert hit == (length - 1) // page_size * page_size
        cache.manager.remove(0)
        cache.manager.remove(2 * length)


def test_what_others_left_in_a_page_does_no_harm(tiny: Transformer) -> None:
    """Every page that is not in use is full of NaN, as after a bad request."""
    cache = PagedCache(tiny.config, num_pages=40, page_size=16)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    tokens = list(range(40))
    for name in (0, 1):
        cache.manager.add(name, tokens[name:])
    for end in (20, 21, 33):
        steps = [(name, tokens[name:], end - name) for name in (0, 1)]
        for (_, ids, stop), logits in zip(steps, run(tiny, cache, steps), strict=True):
            expected = tiny.logits(ids[:stop])[-len(logits) :]
            torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_long_contexts_decode_one_by_one(tiny: Transformer) -> None:
    """Short and long sequences in one step, the long ones beyond what is padded."""
    cache = PagedCache(tiny.config, num_pages=200, page_size=16)
    rng = random.Random(0)
    steps = []
    for name, length in enumerate((5, 700, 255, 256, 257, 90)):
        tokens = [rng.randrange(97) for _ in range(length + 1)]
        cache.manager.add(name, tokens)
        run(tiny, cache, [(name, tokens, length)])
        steps.append((name, tokens, length + 1))
    for (_, tokens, _), logits in zip(steps, run(tiny, cache, steps), strict=True):
        expected = tiny.logits(tokens)[-1:]
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "kinds", ["f", "s", "ffs", "sfsfs", "ff"], ids=lambda kinds: kinds
)
def test_any_mix_of_layers(tmp_path: Path, kinds: str) -> None:
    types = {"f": "full_attention", "s": "sliding_attention"}
    config = replace(
        TINY,
        num_hidden_layers=len(kinds),
        layer_types=tuple(types[kind] for kind in kinds),
    )
    model = load_model(write_checkpoint(tmp_path / "mix", config), device="cpu")
    cache = PagedCache(config, num_pages=30, page_size=4)
    assert len(cache.k) == max(kinds.count("f"), kinds.count("s"))
    tokens = list(range(25))
    cache.manager.add(0, tokens)
    for end in (13, 14, 25):
        (logits,) = run(model, cache, [(0, tokens, end)])
        expected = model.logits(tokens[:end])[-len(logits) :]
        torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_bytes() -> None:
    """A page of gpt-oss-20b: 16 positions of 12 layers, 2 KiB each; 2 GiB hold 5461."""
    options = {"dtype": torch.bfloat16, "device": "meta"}
    one = PagedCache(GPT_OSS_20B, num_pages=2, **options)
    assert one.nbytes == 2 * one.page_nbytes == 2 * 16 * 12 * 2048
    assert one.page_nbytes == kv_bytes(GPT_OSS_20B, 16) // 2
    many = PagedCache(GPT_OSS_20B, max_bytes=2**31, **options)
    assert many.manager.num_pages == 5461
    assert 2**31 - many.page_nbytes < many.nbytes <= 2**31
    for size in ({"max_bytes": 1000}, {"num_pages": 0}):
        (given,) = size.values()
        message = rf"{given}\b.*; expected .* one page of {one.page_nbytes} bytes"
        with pytest.raises(ValueError, match=message) as error:
            PagedCache(GPT_OSS_20B, **size, **options)
        assert ("num_pages" in str(error.value)) == ("num_pages" in size)
    with pytest.raises(ValueError, match="expected one of them"):
        PagedCache(GPT_OSS_20B, num_pages=9, max_bytes=2**31, **options)


def test_steps_that_cannot_run_are_refused(tiny: Transformer) -> None:
    cache = PagedCache(tiny.config, num_pages=9, page_size=4)
    cache.manager.add(0, list(range(10)))
    cache.manager.grow(0, 6)
    for chunks, message in (
        ([], "expected at least one"),
        ([Chunk(3, 0, 1)], "sequence 3 is unknown"),
        ([Chunk(0, 1, 2)], "starts at 0"),
        ([Chunk(0, 0, 0)], "starts at 0"),
        ([Chunk(0, 0, 9)], "stops by 8"),
        ([Chunk(0, 0, 2), Chunk(0, 2, 2)], "two chunks"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.step(chunks)
    step = cache.step([Chunk(0, 0, 6)])
    q = torch.zeros(5, 6, 16)
    with pytest.raises(ValueError, match="5 packed tokens; expected 6"):
        step.attend(0, q, q[:, :2], q[:, :2], None, 8)
