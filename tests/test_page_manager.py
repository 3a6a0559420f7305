"""pages.py: the books against a plain model, and the memory that they speak of."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from course.integrity import check_integrity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from simplellm.engine.offloading import OffloadingPageManager
from simplellm.engine.page_manager import PageManager, hash_page
from simplellm.engine.page_pool import NULL
from simplellm.model.kv_pool import KVPool

# The books


def compute(manager: PageManager, sequence: int, tokens: Sequence[int], end: int):
    """Grow and commit as a step would, without any tensors."""
    assert manager.allocate(sequence, end)
    manager.take_copies()
    manager.commit(sequence, tokens, end)
    check_integrity(manager)


@dataclass
class Known:
    """What the plain model knows of a sequence."""

    tokens: list[int]
    num_computed_tokens: int


PICK = st.integers(0, 99)  # one of those there are, counted round and round


class Books(RuleBasedStateMachine):
    """Random operations on a PageManager and on two dictionaries.

    ``memory`` plays the tensors: what lies at a position of a page. The keys and values
    of a token depend on it and on all before it, so that is what it holds.
    """

    @initialize(
        num_pages=st.sampled_from([2, 7, 12, 20, 40, 80]),
        page_size=st.integers(1, 5),
        window=st.sampled_from([None, 1, 2, 3, 4, 6, 9]),
        enable_caching=st.booleans(),
        max_chunk=st.none() | st.integers(1, 9),
        host_pages=st.sampled_from([0, 0, 1, 4, 9, 60]),
    )
    def start(
        self, num_pages, page_size, window, enable_caching, max_chunk, host_pages
    ):
        kind = partial(OffloadingPageManager, host_pages=host_pages)
        self.manager = (kind if host_pages else PageManager)(
            num_pages,
            page_size,
            window=window,
            enable_caching=enable_caching,
            max_chunk=max_chunk,
        )
        self.sequences: dict[int, Known] = {}
        self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.count = 0

    def name(self) -> int:
        self.count += 1
        return self.count

    def picked(self, pick: int) -> int:
        return sorted(self.sequences)[pick % len(self.sequences)]

    @rule(shared=st.integers(0, 40), own=st.lists(st.integers(0, 1), max_size=9))
    def add(self, shared, own):
        name = self.name()
        tokens = [7] * shared + own or [7]
        if len(tokens) > self.manager.max_tokens:
            return
        computed = self.manager.add(name, tokens)
        assert 0 <= computed < len(tokens)
        assert computed % self.manager.page_size == 0
        assert computed == 0 or self.manager.enable_caching
        self.sequences[name] = Known(tokens, computed)

    @rule(
        lengths=st.lists(st.integers(1, 9), min_size=1),
        token=st.integers(0, 1),
        unknown=st.booleans(),
    )
    def step(self, lengths, token, unknown=False):
        """Compute chunks of as many sequences as there are lengths and pages.

        An ``unknown`` token gets its name in the books only with the step after.
        """
        manager, running = self.manager, []
        for (name, known), length in zip(self.sequences.items(), lengths, strict=False):
            if known.num_computed_tokens == len(known.tokens):
                known.tokens = [*known.tokens, token]
            chunk = min(length, manager.max_chunk or length)
            end = min(
                known.num_computed_tokens + chunk, len(known.tokens), manager.max_tokens
            )
            if end > known.num_computed_tokens and self.allocate(name, end):
                running.append((name, known, end))
        self.copy()
        for name, known, end in running:
            for group, pages in enumerate(manager.tables[name].groups):
                for position in range(known.num_computed_tokens, end):
                    index, place = divmod(position, manager.page_size)
                    self.write(name, pages[index])
                    prefix = tuple(known.tokens[: position + 1])
                    self.memory[pages[index], place] = (group, prefix)
        for name, known, end in running:
            tokens = known.tokens[:end]
            if unknown and end == len(known.tokens):
                tokens[-1] = -1
            manager.commit(name, tokens, end)
            known.num_computed_tokens = end

    def write(self, name: int, page: int) -> None:
        """Nobody else holds a page that is written to, or can find it by its tokens."""
        holders = [
            other
            for other, table in self.manager.tables.items()
            for pages in table.groups
            if page in pages
        ]
        assert holders == [name]
        assert page not in self.manager.hash_of

    @rule()
    def prefill(self):
        """Compute whatever there is room for."""
        self.step([99] * len(self.sequences), 1)

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, length=st.integers(1, 9))
    def fail(self, pick, length):
        """A step that never happens: room is made and nothing computed."""
        name = self.picked(pick)
        end = self.sequences[name].num_computed_tokens + min(
            length, self.manager.max_chunk or 9
        )
        if end <= self.manager.max_tokens:
            self.allocate(name, end)

    def allocate(self, name: int, end: int) -> bool:
        before = repr(vars(self.manager))
        grown = self.manager.allocate(name, end)
        if not grown:
            assert repr(vars(self.manager)) == before, "a refusal changed something"
            assert len(self.sequences) > 1, "no room for a sequence that is alone"
        return grown

    def copy(self) -> None:
        self.memory = self.copied(self.manager.take_copies())

    def copied(self, pages) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
        """The memory once these copies are made, in their order."""
        memory = dict(self.memory)
        for source, target in pages:
            assert source != target
            for place in range(self.manager.page_size):
                memory[target, place] = memory.get((source, place), (0, ()))
        return memory

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, last=st.integers(0, 1))
    def fork(self, pick, last):
        parent = self.picked(pick)
        known, name = self.sequences[parent], self.name()
        self.manager.fork(parent, name)
        tokens = [*known.tokens[: known.num_computed_tokens], last]
        self.sequences[name] = Known(tokens, known.num_computed_tokens)

    @precondition(
        lambda self: any(k.num_computed_tokens for k in self.sequences.values())
    )
    @rule(pick=PICK, back=PICK, last=st.integers(0, 1))
    def truncate(self, pick, back, last):
        """Go on from an earlier token, with another one perhaps."""
        manager = self.manager
        begun = sorted(n for n, k in self.sequences.items() if k.num_computed_tokens)
        name = begun[pick % len(begun)]
        known = self.sequences[name]
        most = min(known.num_computed_tokens - 1, 2 * manager.page_size)
        length = known.num_computed_tokens - back % (most + 1)
        before = repr(vars(manager))
        if manager.truncate(name, length):
            self.sequences[name] = Known([*known.tokens[:length], last], length)
            return
        assert repr(vars(manager)) == before, "a refusal changed something"
        first = manager.tables[name].first[-1] * manager.page_size
        assert length + 1 - manager.windows[-1] < first, "all it would see is there"

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, again=st.booleans())
    def remove(self, pick, again):
        """``again`` is what a preempted sequence does."""
        name = self.picked(pick)
        known = self.sequences.pop(name)
        self.manager.remove(name)
        if again and len(known.tokens) <= self.manager.max_tokens:
            computed = self.manager.add(name, known.tokens)
            self.sequences[name] = Known(known.tokens, computed)

    @invariant()
    def the_books_add_up(self):
        manager = self.manager
        check_integrity(manager)
        held = {
            page
            for name in self.sequences
            for pages in manager.tables[name].groups
            for page in pages
            if page != NULL
        }
        assert manager.usage == pytest.approx(len(held) / manager.num_pages)
        assert len(held) + manager.free_pages == manager.num_pages
        assert set(manager.tables) == set(self.sequences)

    @invariant()
    def every_visible_position_holds_what_was_computed(self):
        manager = self.manager
        memory = self.copied(manager._copies)  # before anything is read
        for name, known in self.sequences.items():
            table = manager.tables[name]
            assert table.num_computed_tokens == known.num_computed_tokens
            for group, window in enumerate(manager.windows):
                oldest = 0 if window is None else known.num_computed_tokens + 1 - window
                for position in range(max(0, oldest), known.num_computed_tokens):
                    index, place = divmod(position, manager.page_size)
                    page = table.groups[group][index]
                    expected = (group, tuple(known.tokens[: position + 1]))
                    assert memory[page, place] == expected

    @invariant()
    def what_can_be_found_is_what_its_name_says(self):
        """No page is written to after it got a name, whoever holds it or does not."""
        size, chains = self.manager.page_size, {}
        memory = self.copied(self.manager._copies)
        places = [*self.manager.page_of.items()]
        if isinstance(self.manager, OffloadingPageManager):
            places += self.manager.on_host.items()  # it may be in both
        for known in self.sequences.values():
            digest = b""
            for end in range(size, len(known.tokens) + 1, size):
                digest = hash_page(digest, known.tokens[end - size : end])
                chains[digest] = tuple(known.tokens[:end])
        for (group, digest), page in places:
            if digest in chains:
                for place in range(size):
                    count = len(chains[digest]) - size + place + 1
                    expected = (group, chains[digest][:count])
                    assert memory[page, place] == expected


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("seed", range(24))
def test_the_books_of_long_lives(seed: int) -> None:
    """The same operations in longer rows than hypothesis tries."""
    rng, books = random.Random(seed), Books()
    books.start(
        num_pages=rng.choice([12, 20, 40]),
        page_size=rng.choice([2, 3, 4]),
        window=rng.choice([None, None, 4, 9]),
        enable_caching=True,
        max_chunk=None,
        host_pages=rng.choice([0, 5, 40]),
    )
    for _ in range(120):
        pick, bit = rng.randrange(99), rng.randrange(2)
        name = rng.choice(["add", "step", "step", "step", "truncate", "more"])
        if name == "add" or not books.sequences:
            books.add(shared=rng.randrange(30), own=[bit] * rng.randrange(5))
        elif name == "step":
            lengths = [rng.randrange(1, 9) for _ in range(6)]
            books.step(lengths=lengths, token=bit, unknown=rng.random() < 0.5)
        elif name == "truncate":
            if any(known.num_computed_tokens for known in books.sequences.values()):
                books.truncate(pick=pick, back=rng.randrange(99), last=bit)
        elif rng.random() < 0.3:
            books.fork(pick=pick, last=bit)
        else:
            books.remove(pick=pick, again=rng.random() < 0.5)
        books.the_books_add_up()
        books.every_visible_position_holds_what_was_computed()
        books.what_can_be_found_is_what_its_name_says()


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
    check_integrity(manager)


def test_pages_are_shared_only_once_they_are_computed() -> None:
    manager = PageManager(100, 4)
    tokens = list(range(20))
    manager.add(0, tokens)
    manager.allocate(0, 20)
    assert manager.add(1, tokens) == 0
    manager.commit(0, tokens, 11)
    assert manager.add(2, tokens) == 8
    manager.remove(0)
    assert manager.add(3, tokens) == 8, "pages outlive the sequence that filled them"


def test_without_sharing_nothing_is_found() -> None:
    manager = PageManager(100, 4, enable_caching=False)
    tokens = list(range(20))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 20)
    assert manager.add(1, tokens) == 0
    manager.remove(0)
    check_integrity(manager)
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
    full, sliding = manager.tables[1].groups
    assert full == manager.tables[0].groups[0][:62]
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
    assert sum(group == 0 for group, _ in manager.hash_of.values()) >= 4
    hit = manager.add(2, tokens)
    first = max(0, hit + 1 - 8) // 4
    assert all(page != NULL for page in manager.tables[2].groups[1][first:])
    check_integrity(manager)


def test_pages_behind_the_window_are_given_back() -> None:
    """However long a sequence gets, its sliding layers hold one window."""
    manager = PageManager(200, 16, window=128, enable_caching=False)
    tokens: list[int] = [1]
    manager.add(0, tokens)
    held = set()
    for end in range(1, 1001):
        assert manager.allocate(0, end)
        manager.commit(0, tokens, end)
        tokens.append(1)
        pages = manager.tables[0].groups[1]
        held.add(sum(page != NULL for page in pages))
    check_integrity(manager)
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


@pytest.mark.parametrize(("pages", "share"), [(1200, 0.5), (1600, 1.0)])
def test_the_next_turn_of_a_chat_finds_its_prompt_in_a_full_pool(
    pages: int, share: float
) -> None:
    """The window before a prompt's end isn't what a full pool gives up first.

    20 chats, four at a time: a prompt of 300 tokens, a turn of 310, of which the next
    prompt repeats none, but has 100 others. The full layers keep 39 pages of each chat.
    """
    manager = PageManager(pages, 16, window=128)
    prompts = [[chat] * 300 for chat in range(20)]
    hits = []
    for turn in range(2):
        for some in (range(first, first + 4) for first in range(0, 20, 4)):
            texts = {chat: list(prompts[chat]) for chat in some}
            for chat, text in texts.items():
                hits.append(manager.add(chat, text))
                compute(manager, chat, text, 300 + 100 * turn)
            for _ in range(310):
                for chat, text in texts.items():
                    text.append(50 + turn)
                    assert manager.allocate(chat, len(text))
                    manager.commit(chat, text, len(text))
            for chat in some:
                manager.remove(chat)
                prompts[chat] += [90] * 100
        assert len(manager.free) < pages / 10, "the pool is as good as full"
    check_integrity(manager)
    assert sum(hits[:20]) == 0 and sum(hits[20:]) >= share * 20 * 288


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
        manager.fork(0, child)
    assert manager.num_pages - manager.free_pages == 3
    shared = manager.tables[0].groups[0][2]
    for name in (1, 0, 2):
        assert manager.allocate(name, 11)
        check_integrity(manager)
    ends = [manager.tables[name].groups[0][2] for name in (0, 1, 2)]
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
@settings(max_examples=150)
def test_the_longest_sequence_fits_and_one_more_token_does_not(
    num_pages, page_size, window, max_chunk, data
) -> None:
    manager = PageManager(num_pages, page_size, window=window, max_chunk=max_chunk)
    length = manager.max_tokens
    tokens = [1] * length
    manager.add(0, tokens)
    computed = 0
    while computed < length:
        most = min(length - computed, max_chunk or length)
        computed += data.draw(st.integers((most + 1) // 2, most))
        compute(manager, 0, tokens, computed)
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
        assert manager.allocate(0, end)
        manager.commit(0, tokens, end)
    assert tokens.read == 2000


def test_truncate_gives_back_what_lies_beyond() -> None:
    manager = PageManager(20, 4)
    tokens = list(range(18))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 18)
    assert manager.truncate(0, 10)
    check_integrity(manager)
    assert manager.tables[0].num_computed_tokens == 10
    assert manager.num_pages - manager.free_pages == 3
    assert manager.add(1, tokens) == 16, "full pages are found until they are evicted"
    assert manager.truncate(0, 10) and manager.truncate(0, 8)
    assert len(manager.tables[0].groups[0]) == 2


def test_a_truncated_page_is_copied_if_another_holds_it() -> None:
    manager = PageManager(20, 4)
    tokens = list(range(9))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 8)
    assert manager.add(1, tokens) == 8
    assert manager.truncate(0, 6)
    shared = manager.tables[0].groups[0][1]
    assert manager.allocate(0, 8)
    mine = manager.tables[0].groups[0][1]
    assert manager.tables[1].groups[0][1] == shared != mine
    assert manager.take_copies() == [(shared, mine)]
    manager.commit(0, [*range(6), 50, 51], 8)
    check_integrity(manager)
    assert manager.add(2, [*range(6), 50, 51, 52]) == 8
    assert manager.add(3, tokens) == 8


def test_a_truncated_page_that_nobody_holds_loses_its_name() -> None:
    manager = PageManager(20, 4)
    tokens = list(range(9))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 8)
    page = manager.tables[0].groups[0][1]
    assert manager.truncate(0, 6)
    assert manager.add(1, tokens) == 8, "until it is written to, it is what it was"
    manager.remove(1)
    assert manager.allocate(0, 7)
    assert manager.tables[0].groups[0][1] == page and not manager.take_copies()
    assert manager.add(2, tokens) == 4


def test_what_fell_behind_the_window_cannot_be_truncated_to() -> None:
    manager = PageManager(20, 4, window=4)
    tokens = list(range(20))
    manager.add(0, tokens)
    compute(manager, 0, tokens, 12)  # position 12 sees 9 to 12: pages 0 and 1 are gone
    before = manager.snapshot()
    assert not manager.truncate(0, 10)  # position 10 would see 7
    assert manager.snapshot() == before
    assert manager.truncate(0, 11)
    check_integrity(manager)
    compute(manager, 0, tokens, 20)


def test_a_snapshot_is_plain_data_that_nobody_changes() -> None:
    manager = PageManager(12, 4, window=8)
    tokens = list(range(20))
    manager.add(3, tokens)
    compute(manager, 3, tokens, 13)
    manager.fork(3, 5)
    taken = manager.snapshot()
    kept = json.dumps(taken)
    full, sliding = ([*pages] for pages in manager.tables[3].groups)
    assert taken["tables"] == {3: [full, sliding], 5: [full, sliding]}
    assert sliding[0] == NULL and NULL not in full
    assert (taken["num_pages"], taken["page_size"]) == (12, 4)
    assert taken["windows"] == [None, 8]
    held = {page for page in full + sliding if page != NULL}
    counts = [2 if page in held else 0 for page in range(12)]
    assert taken["references"] == counts
    assert taken["free"] + len(taken["cached"]) == 12 - len(held)
    compute(manager, 3, tokens, 20)
    manager.remove(5)
    manager.remove(3)
    assert json.dumps(taken) == kept
    assert manager.snapshot()["tables"] == {}


@pytest.mark.parametrize(("window", "least"), [(None, 1), (8, 2)])
def test_fewer_pages_than_a_sequence_needs_are_refused(window, least) -> None:
    with pytest.raises(ValueError, match=f"expected at least {least}: more cache_byt"):
        PageManager(least - 1, 4, window=window)
    assert PageManager(least, 4, window=window).max_tokens == 4


# The memory


def pool(kinds: str, num_pages: int = 5, page_size: int = 4) -> KVPool:
    """Pages for layers that are full, "f", or sliding, "s"."""
    windows = [{"f": None, "s": 8}[kind] for kind in kinds]
    config = SimpleNamespace(
        num_hidden_layers=len(kinds),
        num_key_value_heads=2,
        head_dim=6,
        windows=(None, 8) if "s" in kinds else (None,),
        window=lambda layer: windows[layer],
    )
    return KVPool(config, num_pages, page_size, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kinds", ["f", "s", "ffs", "sfsfs", "ff"])
def test_any_mix_of_layers(kinds: str) -> None:
    """Every layer has its rows in a page, and shares them with no layer of its kind."""
    found = pool(kinds)
    assert found.groups == ["fs".index(kind) for kind in kinds]
    most = max(kinds.count("f"), kinds.count("s"))
    assert found.memory.nbytes == 2 * most * 5 * 4 * 2 * 6 * 4
    for kind in set(kinds):
        rows = [
            tensor
            for layer in range(len(kinds))
            if kinds[layer] == kind
            for tensor in (found.keys[layer], found.values[layer])
        ]
        for number, tensor in enumerate(rows):
            assert tensor.shape == (5, 4, 2, 6)
            tensor.fill_(number)
        for number, tensor in enumerate(rows):
            assert (tensor == number).all()


def test_layers_of_a_kind_lie_in_the_same_pages_as_those_of_the_other() -> None:
    found = pool("sfsf")
    found.keys[0][3] = 7.0
    assert (found.keys[1][3] == 7.0).all() and (found.keys[2][3] == 0.0).all()


def test_copies_are_made_in_order_and_in_all_layers() -> None:
    found = pool("sffs")
    for page in range(5):
        found.memory[:, :, page] = page
    found.copy([(0, 1), (2, 0), (1, 3)])
    for tensor in (*found.keys, *found.values):
        assert tensor[:, 0, 0, 0].tolist() == [2, 0, 2, 0, 4]


class Thorough(PageManager):
    """Looks at everything each time."""

    def allocate(self, sequence, length):
        self.tables[sequence].settled = 0
        return super().allocate(sequence, length)

    def commit(self, sequence, tokens, length):
        self.tables[sequence].settled = 0
        super().commit(sequence, tokens, length)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("enable_caching", [True, False])
def test_what_is_skipped_would_change_nothing(window, enable_caching):
    """Of tokens that come one by one, each unknown at first, forked and taken back."""
    options = {"window": window, "enable_caching": enable_caching}
    managers = [kind(64, 4, **options) for kind in (PageManager, Thorough)]
    chance = random.Random(0)
    texts: dict[int, list[int]] = {}
    for number in range(600):
        name = chance.choice([*texts, -1])
        act = "add" if name < 0 else chance.choice(["step"] * 12 + ["fork", "back"])
        length = len(texts.get(name, ()))
        if act == "back" and length < 2:
            act = "step"
        if length > 30 or (act in ("add", "fork") and len(texts) == 4):
            act, name = "remove", name if name >= 0 else chance.choice([*texts])
        if act == "add":
            texts[number] = [chance.randrange(3) for _ in range(chance.randint(2, 9))]
        for manager in managers:
            if act == "add":
                text = texts[number]
                manager.add(number, text)
                assert manager.allocate(number, len(text))
                manager.commit(number, text, len(text))
            elif act == "step":
                text = texts[name]
                assert manager.allocate(name, length + 1)
                manager.commit(name, [*text, -1], length + 1)
            elif act == "fork":
                manager.fork(name, number)
            elif act == "back":
                manager.truncate(name, length - 1)
            else:
                manager.remove(name)
        if act == "step":
            texts[name].append(chance.randrange(3))
        elif act == "fork":
            texts[number] = [*texts[name]]
        elif act == "back" and managers[0].tables[name].num_computed_tokens < length:
            texts[name].pop()
        elif act == "remove":
            del texts[name]
        first, second = managers
        assert first.snapshot() == second.snapshot()
        assert first.page_of == second.page_of
        assert first.take_copies() == second.take_copies()
