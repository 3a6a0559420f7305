"""Chapter 8: pages."""

import copy
import random
import sys
from typing import ClassVar

from course.integrity import check_integrity
from simplellm.engine import page_manager as pages
from simplellm.engine.page_manager import NULL

ROOM = "there are pages enough, so allocate makes room and returns True"


def manager(candidate, *arguments, **options):
    """A manager of the class ``candidate``; what the class lacks is the package's.

    A reader's class has the methods that the chapter has told so far.
    """
    if not issubclass(candidate, pages.PageManager):
        bases = (candidate, pages.PageManager)
        candidate = type(candidate.__name__, bases, {})
    return candidate(*arguments, **options)


def compute(books, sequence, tokens, end):
    """What a step does to the books; there are always pages enough."""
    groups, had = len(books.windows), books.free_pages
    missing = -(-end // books.page_size) - len(books.tables[sequence].groups[0])
    needed = max(0, missing) * groups
    assert books.allocate(sequence, end), (
        f"{needed} pages were needed and {had} could be had, and allocate said False: "
        f"self.windows has {groups} group{'s' * (groups > 1)} here, and each needs "
        f"{missing}; count pages for each group of this manager"
    )
    books.take_copies()
    books.commit(sequence, tokens, end)


def check_PageManager__cached_prefix(PageManager):
    """Random holes in the cache, against a search that tries every prefix."""
    is_list(manager(PageManager, 60, 4)._cached_prefix([1] * 9))
    rng = random.Random(8)
    for trial in range(120):
        size, count = rng.randint(1, 4), rng.randint(1, 10)
        window = rng.choice([None, 1, 2, 4, 8, 9])
        sliding = 1 + trial % 3 // 2  # in every third trial two groups
        books = manager(PageManager, 60, size, window=window, sliding_groups=sliding)
        tokens = [rng.randint(0, 9) for _ in range(size * count)]
        books.add(0, [*tokens, 0])
        assert books.tables[0].num_computed_tokens == 0, (
            "nothing is cached yet, and yours found it"
        )
        # Step by step, so that each page has its name before a window leaves it.
        for end in range(1, len(tokens) + 1):
            compute(books, 0, [*tokens, 0], end)
        page_hashes = list(books.tables[0].page_hashes)
        books.remove(0)
        there = [[True] * count for _ in books.windows]
        for page, (group, digest) in sorted(books.hash_of.items()):
            if rng.random() < 0.15 or trial < 2:
                books.cached.pop(page)
                books._forget_hash(page)
                books.free.append(page)
                there[group][page_hashes.index(digest)] = False
        kept = rng.randint(0, len(tokens))
        part = [*tokens[:kept], *[10] * rng.randint(1, 9)]
        prompt = rng.choice([part, tokens, [*tokens, 11]])
        judge_prefix(books, prompt, tokens, page_hashes, there)
    books = manager(PageManager, 60, 4, enable_caching=False)
    books.add(0, [1] * 9)
    compute(books, 0, [1] * 9, 9)
    found = list(books._cached_prefix([1] * 9))
    assert found == [], "a manager that does not share finds nothing"
    books = manager(PageManager, 60, 4)
    books.add(0, [1] * 9)
    compute(books, 0, [1] * 9, 9)
    books.enable_caching = False
    found = list(books._cached_prefix([1] * 9))
    assert found == [], (
        "pages have names, and the manager does not share: ask self.enable_caching "
        "first, and find nothing"
    )
    prefix_is_hashed_once(PageManager)


def is_list(found):
    assert isinstance(found, list), (
        "a list of digests is expected, since the table adds to it later; yours is of "
        f"type {type(found).__name__}"
    )


def prefix_is_hashed_once(PageManager):
    """Twelve pages, all of them cached, and then all but the third."""
    books = manager(PageManager, 60, 4)
    tokens = list(range(48))
    books.add(0, tokens)
    compute(books, 0, tokens, 48)
    found, hashed = count_hashes(lambda: books._cached_prefix([*tokens, 0]))
    assert len(found) == 12, f"12 pages are cached, and you found {len(found)}"
    assert hashed <= 13, (
        f"a prompt of 12 full pages took {hashed} calls of hash_page: each page's "
        "digest follows from the one before, so 12 are enough; don't begin again for "
        "each length"
    )
    books._forget_hash(books.tables[0].groups[0][2])
    found, hashed = count_hashes(lambda: books._cached_prefix([*tokens, 0]))
    assert len(found) == 2, f"2 pages can be used, and you found {len(found)}"
    assert hashed <= 4, (
        "of 12 pages the full layers lack the third: nothing behind it can be used, so "
        f"stop there; yours has hashed {hashed} pages"
    )


def count_hashes(function):
    """What ``function`` returns, and how often it calls a `hash_page`."""
    count, before = 0, sys.getprofile()

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_name == "hash_page"

    sys.setprofile(profile)
    try:
        return function(), count
    finally:
        sys.setprofile(before)


def judge_prefix(books, prompt, tokens, page_hashes, there):
    size = books.page_size
    same = 0
    while same < min(len(prompt), len(tokens)) and prompt[same] == tokens[same]:
        same += 1
    best, good_of = 0, []
    for pages_of in range(same // size + 1):
        length = pages_of * size
        good = []
        for group, window in enumerate(books.windows):
            first = 0 if window is None else max(0, length + 1 - window)
            good.append(all(there[group][p // size] for p in range(first, length)))
        good_of.append(good)
        if all(good) and length < len(prompt):
            best = pages_of
    found = books._cached_prefix(prompt)
    is_list(found)
    told = (
        f"pages of {size}, windows {books.windows}, a prompt of {len(prompt)} tokens, "
        "cached "
        + " and ".join("".join("x" if page else "." for page in row) for row in there)
    )
    assert len(found) * size < len(prompt), (
        f"{told}: all of the prompt was found; at least one token is left to compute"
    )
    if len(found) > best and len(found) < len(good_of) and good_of[len(found)][0]:
        lacking = good_of[len(found)].index(False)
        raise AssertionError(
            f"{told}: you found {len(found)} pages, but group {lacking}, of sliding "
            "layers, lacks one that the next token looks back on: it would read "
            "somebody else's. Count for every group of self.windows"
        )
    assert len(found) <= best, (
        f"{told}: {best} pages can be used, you found {len(found)}; a page that the "
        "prompt needs is not there"
    )
    assert len(found) == best, (
        f"{told}: {best} pages can be used, you found {len(found)}; the sliding layers "
        "need only what the next token sees, and the full layers all pages"
    )
    assert found == page_hashes[:best], f"{told}: the digests of the pages, in order"


def check_PageManager_allocate(PageManager):
    """Room, refusals and copies, against what the tables must say."""
    books = manager(PageManager, 10, 4, window=8)
    tokens = list(range(20))
    books.add(0, tokens)
    assert books.allocate(0, 9) is True, (
        "there is room for 9 tokens, so allocate returns True"
    )
    lengths = [len(group) for group in books.tables[0].groups]
    assert lengths == [3, 3], (
        "9 tokens need 3 pages of 4 in each group, full and sliding; yours has "
        f"{lengths}"
    )
    check_integrity(books)
    assert books.allocate(0, 5), "what is there already is room enough"
    assert len(books.tables[0].groups[0]) == 3, "allocate gives no pages back"
    books.add(1, [99] * 12)
    before = state(books)
    found = tries(books, 1, 12)
    assert not found, "4 pages can be had, and 12 tokens need 3 in each of 2 groups"
    assert state(books) == before, (
        "allocate said False and has changed something: first count all pages that it "
        "needs, then take them"
    )
    assert books.allocate(1, 8), "4 pages can be had, and 8 tokens need 2 in each group"
    check_integrity(books)
    forks(PageManager)
    copies_count(PageManager)
    cached_pages_count(PageManager)
    names_after_truncate(PageManager)
    three_groups(PageManager)


def three_groups(PageManager):
    """Sliding layers may need two groups, as in models with few full layers."""
    for num_pages in (11, 12):
        books = manager(PageManager, num_pages, 4, window=8, sliding_groups=2)
        books.add(0, list(range(9)))
        assert books.allocate(0, 9), "11 pages can be had, and 3 groups need 3 each"
        lengths = [len(group) for group in books.tables[0].groups]
        assert lengths == [3, 3, 3], (
            "9 tokens need 3 pages of 4 in each of the table's groups, which are 3 "
            f"here; yours has {lengths}"
        )
        books.add(1, [99] * 4)
        assert tries(books, 1, 4) == (num_pages == 12), (
            f"{num_pages - 9} pages can be had, and 4 tokens need 1 in each of 3 "
            "groups: count pages for each of self.windows"
        )


def state(books):
    """Everything that the books hold, to be compared."""
    return copy.deepcopy(vars(books))


def tries(books, sequence, length):
    """What allocate returns; True if it takes a page where there is none."""
    try:
        return books.allocate(sequence, length)
    except (IndexError, KeyError, StopIteration):
        return True


def forks(PageManager):
    """A half-full page in three hands, and a full one."""
    books = manager(PageManager, 40, 4, window=8)
    tokens = list(range(6))
    books.add(0, tokens)
    compute(books, 0, tokens, 6)
    books.fork(0, 1)
    books.fork(0, 2)
    held = [list(group) for group in books.tables[0].groups]
    assert books.allocate(0, 6) and not books.take_copies(), (
        "six tokens are computed, and room for six is asked for: nothing will be "
        "written, so nothing is copied"
    )
    assert [list(group) for group in books.tables[0].groups] == held, (
        "nothing will be written, so the tables stay"
    )
    for name, users in ((1, 2), (2, 1)):
        assert books.allocate(name, 7), ROOM
        copies = [tuple(pair) for pair in books.take_copies()]
        now = [list(group) for group in books.tables[name].groups]
        for group in (0, 1):
            assert now[group][0] == held[group][0], (
                "a full page is never written to and stays shared"
            )
            assert now[group][1] != held[group][1], (
                "the next token goes to a page that others use: in both groups it must "
                "be exchanged for a copy, or it changes what they read"
            )
            assert (held[group][1], now[group][1]) in copies, (
                "the copy must be noted in self._copies as (old, new), or the new page "
                f"holds nothing of the old one; noted is {copies}"
            )
            assert books.references[held[group][1]] == users, (
                "whoever has a copy no longer uses the old page: it has to be "
                f"released; it has {books.references[held[group][1]]} users, not "
                f"{users}"
            )
        assert len(copies) == 2, f"one copy in each group, not {len(copies)}"
        check_integrity(books)
    assert books.allocate(0, 7), ROOM
    assert not books.take_copies(), (
        "the last user of the old page has it alone: a copy is not needed"
    )
    for name in range(3):
        books.commit(name, [*tokens, name], 7)
        compute(books, name, [*tokens, name, 5], 8)
    books.fork(0, 3)
    assert books.allocate(3, 9) and not books.take_copies(), (
        "eight tokens fill two pages of 4: the ninth goes to a page of its own, and "
        "nothing is copied"
    )
    check_integrity(books)
    books = manager(PageManager, 40, 4, window=8)
    books.add(0, tokens)
    assert books.allocate(0, 11), (
        ROOM
    )  # room for more than the six that are computed then
    books.commit(0, tokens, 6)
    books.fork(0, 1)
    held = [group[1] for group in books.tables[0].groups]
    assert books.allocate(0, 7), ROOM
    copied = [old for old, _ in books.take_copies()]
    assert copied == held, (
        "six tokens are computed, and the table has room for 12: the seventh goes to "
        f"its second page of 4, not to its last; {held} are to be copied, and not "
        f"{copied}"
    )
    check_integrity(books)


def copies_count(PageManager):
    """A copy needs a page, too."""
    for num_pages in (6, 7, 8):
        books = manager(PageManager, num_pages, 4, window=8)
        books.add(0, [1] * 6)
        compute(books, 0, [1] * 6, 6)
        books.fork(0, 1)
        if num_pages == 8:
            assert books.allocate(1, 9) is True, (
                "4 pages can be had: one copy and one new page in each of two groups"
            )
            continue
        before = state(books)
        found = tries(books, 1, 9)
        assert not found and state(books) == before, (
            f"{num_pages - 4} pages can be had, and 4 are needed, a copy and a new "
            "page in each of two groups: allocate says False, and changes nothing"
        )
    books = manager(PageManager, 6, 4, window=8)
    books.add(0, [1] * 6)
    books.allocate(0, 11)
    books.commit(0, [1] * 6, 6)
    books.fork(0, 1)
    assert books.free_pages == 0, "6 pages are in use: none can be had"
    before = state(books)
    found = tries(books, 0, 7)
    assert not found and state(books) == before, (
        "the table has more pages than the seven tokens need, and no page can be had "
        "for the copies: pages to spare don't count as pages for copies, so the number "
        "of missing ones is never below 0"
    )


def cached_pages_count(PageManager):
    """What nobody uses can be had as well."""
    books = manager(PageManager, 4, 4)
    books.add(0, [1] * 16)
    compute(books, 0, [1] * 16, 16)
    books.remove(0)
    books.add(1, [2] * 16)
    assert books.allocate(1, 16), (
        "no page is free, but four are cached and nobody uses them: they can be had"
    )
    check_integrity(books)


def names_after_truncate(PageManager):
    """A page that was full and will be written again is not what it is named for."""
    books = manager(PageManager, 9, 4)
    books.add(0, [1] * 8)
    compute(books, 0, [1] * 8, 8)
    page = books.tables[0].groups[0][1]
    assert books.truncate(0, 6), "the last two tokens can be taken back"
    assert books.allocate(0, 6) and page in books.hash_of, (
        "six tokens are computed, and room for six is asked for: nothing will be "
        "written, so the page still holds what it is named for and keeps its name"
    )
    assert books.allocate(0, 7), ROOM
    assert page not in books.hash_of, (
        "after truncate, page 2 of the sequence was to be written again and kept the "
        "name of what it held; `_forget_hash` it"
    )
    assert not books.take_copies(), "nobody else uses the page: there is no copy"
    books = manager(PageManager, 4, 4)
    books.add(0, [1] * 9)
    compute(books, 0, [1] * 9, 8)
    books.add(1, [2] * 8)
    compute(books, 1, [2] * 8, 8)
    assert books.truncate(0, 6), "the last two tokens can be taken back"
    before = state(books)
    assert not books.allocate(0, 9), "no page can be had, and 9 tokens need one more"
    assert state(books) == before, (
        "allocate said False, and yet the open page has lost its name: count the "
        "missing pages first, and forget names once you know that there is room"
    )


def check_8_1(pages_held):
    """The books of a sequence that grows token by token."""
    for size, window in [(16, 128), (1, 5), (7, 10), (64, 32), (4, 1), (3, 2)]:
        books = pages.PageManager(2000, size, window=window)
        books.add(0, [1])
        for n in range(1, 300):
            books.allocate(0, n)
            books.commit(0, [1] * n, n)
            held = books.num_pages - books.free_pages
            found = pages_held(n, size, window)
            assert found == held, (
                f"{n} tokens, pages of {size}, a window of {window}: {held} pages are "
                f"held, you say {found}; the next token, at position {n}, sees as many "
                "positions as the window has, itself included, and a page that it sees "
                "in part is kept whole"
            )
    found = pages_held(50_000, 16, 128)
    full = -(-50_000 // 16)
    assert full < found < full + 10, (
        "of 50,000 tokens the sliding layers keep a few pages only"
    )


def check_8_2(pages_of_samples):
    """The books of forks, with prompts that fill their last page and that do not."""
    cases = [(10, 3, 1, 4), (8, 3, 5, 4), (33, 5, 20, 16), (10, 3, 3, 4)]
    cases += [(15, 2, 2, 16), (1000, 8, 110, 16), (1000, 8, 100, 16), (16, 4, 16, 16)]
    cases += [(3, 5, 1, 8), (5, 1, 30, 4)]
    for prompt, samples, new, size in cases:
        books, ids = pages.PageManager(700, size), [1] * prompt
        books.add(0, ids)
        books.allocate(0, prompt)
        books.commit(0, ids, prompt)
        for sample in range(1, samples):
            books.fork(0, sample)
        for sample in range(samples):
            books.allocate(sample, prompt + new)
            books.commit(sample, ids + [sample + 2] * new, prompt + new)
        held = books.num_pages - books.free_pages
        found = pages_of_samples(prompt, samples, new, size)
        told = f"a prompt of {prompt}, {samples} samples of {new}, pages of {size}"
        assert found >= held, (
            f"{told}: {held} pages are held, you say {found}; a page that the prompt "
            "fills in part is written to, so each sample has a copy of it"
        )
        assert found == held, (
            f"{told}: {held} pages are held, you say {found}; the prompt's full pages "
            "are there once for all samples"
        )


def check_8_3(PageManager):
    """Names and windows after each step, against a count by position."""
    rng = random.Random(8)
    for _ in range(40):
        size, window = rng.randint(1, 4), rng.choice([None, 1, 2, 3, 4, 8, 9])
        books = manager(PageManager, 90, size, window=window)
        tokens = [rng.randint(0, 9) for _ in range(40)]
        books.add(0, tokens)
        length = 0
        while length < len(tokens):
            start, length = length, min(40, length + rng.choice([1, 1, 2, 3, 7]))
            assert books.allocate(0, length), ROOM
            before = [list(group) for group in books.tables[0].groups]
            books.commit(0, tokens, length)
            judge_commit(books, before, start, length, tokens)
    books = manager(PageManager, 20, 4, window=4, enable_caching=False)
    books.add(0, [1] * 12)
    compute(books, 0, [1] * 12, 12)
    assert not books.hash_of, "a manager that does not share gives no names"
    books = manager(PageManager, 20, 4, window=4)
    books.add(0, [1] * 8)
    compute(books, 0, [*[1] * 7, -1], 8)
    assert len(books.tables[0].page_hashes) == 1, (
        "the last token is not known yet, so the second page has no name yet"
    )
    compute(books, 0, [1] * 9, 9)
    check_integrity(books)
    books = manager(PageManager, 2100, 4, window=4)
    tokens = [1] * 4096
    books.add(0, tokens)
    compute(books, 0, tokens, 4000)
    books.allocate(0, 4001)
    lines = lines_of(lambda: books.commit(0, tokens, 4001))
    assert lines < 500, (
        f"to commit one token after 4,000, {lines:,} lines ran: the pages before "
        "table.first were given back long ago, so begin there"
    )


def lines_of(function):
    """How many lines of Python ``function`` runs."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def judge_commit(books, before, start, length, tokens):
    size, table = books.page_size, books.tables[0]
    told = f"{start} to {length} tokens, pages of {size}, windows {books.windows}"
    assert table.num_computed_tokens == length, (
        f"{told}: table.num_computed_tokens is {table.num_computed_tokens}; "
        f"{length} tokens are computed now"
    )
    assert len(table.page_hashes) == length // size, (
        f"{told}: {length // size} pages are full and get names, not "
        f"{len(table.page_hashes)}"
    )
    for group, window in enumerate(books.windows):
        first = 0 if window is None else max(0, length + 1 - window) // size
        found = list(table.groups[group])
        gone = [index for index, page in enumerate(found) if page == NULL]
        kept = [page for page in found if page != NULL]
        assert len(gone) <= first, (
            f"{told}: the token at position {length} sees back to page {first}, and "
            f"your table lacks {gone}"
        )
        assert gone == list(range(first)), (
            f"{told}: the token at position {length} sees back to page {first}; the "
            f"entries before it become NULL, yours do at {gone}"
        )
        assert table.first[group] == first, (
            f"{told}: table.first[{group}] is {table.first[group]}, the first page in "
            f"use is {first}"
        )
        assert kept == before[group][first:], f"{told}: what is in view stays"
        left = [page for page in before[group][:first] if page != NULL]
        assert all(books.references[page] == 0 for page in left), (
            f"{told}: a page that the window has left is released"
        )
        named = [page for page in left if page in books.hash_of]
        assert left == named, (
            f"{told}: a full page was released before it had its name: nobody will "
            "find it again"
        )
        left = [page for page in left if page not in books.kept_longer]
        victims = list(books.cached)[: len(left)]
        assert set(victims) == set(left), (
            f"{told}: pages that a window left, {left}, are the next victims: release "
            "them with behind=True"
        )
    check_integrity(books)


def check_8_4(take_turns):
    """The same driver written here, on pools of several sizes."""

    def expected(books, conversations, rounds):
        said, totals = [list(tokens) for tokens in conversations], []
        for _ in range(rounds):
            totals.append(0)
            for tokens in said:
                totals[-1] += books.add(7, tokens)
                books.allocate(7, len(tokens))
                books.commit(7, tokens, len(tokens))
                books.remove(7)
                tokens.extend(tokens[:1] * 40)
        return totals

    class Watched(pages.PageManager):
        """Notes what is computed."""

        computed: ClassVar[list[list[int]]] = []

        def add(self, sequence, tokens):
            assert not self.tables, (
                f"sequence {sequence} comes while {list(self.tables)} still hold their "
                "pages: remove each one at the end of its own turn, not of the round"
            )
            self.computed.append(list(tokens))
            return super().add(sequence, tokens)

    for people, length, num_pages in ((1, 50, 60), (3, 100, 60), (4, 333, 200)):
        talks = [[n, *range(100, 99 + length)] for n in range(people)]
        before = copy.deepcopy(talks)
        books = pages.PageManager(num_pages, 16, window=32)
        wanted = expected(books, before, 4)
        books = Watched(num_pages, 16, window=32)
        Watched.computed.clear()
        found = list(take_turns(books, talks, 4))
        told = f"{people} x {length} tokens in {num_pages} pages"
        assert talks == before, f"{told}: the caller's lists have changed"
        assert not books.tables, (
            f"{told}: sequences {list(books.tables)} were not removed; they keep their "
            "pages from the others"
        )
        assert len(found) == 4, f"{told}: four rounds are four numbers"
        second = Watched.computed[people : people + 1]
        assert second == [talks[0] + talks[0][:1] * 40], (
            f"{told}: in round 2 the first conversation is the same tokens, and 40 "
            f"times its first one, {talks[0][0]}; yours ends in {second[0][-3:]}"
        )
        assert found[0] == wanted[0] == 0, (
            f"{told}: in the first round nothing is cached; you found {found[0]}"
        )
        assert found == wanted, (
            f"{told}: {wanted} tokens are found, you say {found}; each conversation is "
            "computed whole, removed, and longer by 40 tokens in the next round"
        )


def check_8_5(RadixTree):
    """A few splits by hand, then random sequences."""
    tree = RadixTree()
    assert tree.match([1, 2]) == 0, "an empty tree has no prefix of anything"
    tree.insert([1, 2, 3, 4])
    assert tree.edges() == 1, "one sequence is one edge, however long"
    assert tree.match([1, 2, 9]) == 2, "a match may end inside an edge: 1, 2 is there"
    tree.insert([1, 2, 9])
    assert tree.edges() == 3, (
        "1 2 3 4 and 1 2 9 part after 2: one edge to there, two after it; yours has "
        f"{tree.edges()}"
    )
    tree.insert([1, 2, 3, 4])
    assert tree.edges() == 3, "this sequence was there already"
    tree.insert([1])
    assert tree.edges() == 4, (
        "a sequence that ends inside an edge splits it; yours has "
        f"{tree.edges()} edges, expected 4"
    )
    assert tree.match([1, 2, 3]) == 3, "after a split all of it is still there"
    rng, tree, ends, prefixes = random.Random(9), RadixTree(), set(), set()
    for _ in range(300):
        ids = tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 12)))
        begins = [ids[:i] for i in range(1, len(ids) + 1)]
        known = sum(begin in prefixes for begin in begins)
        found = tree.match(list(ids))
        assert found == known, f"{known} tokens of {ids} are there, you find {found}"
        tree.insert(list(ids))
        ends.add(ids)
        prefixes.update(begins)
    parts = {p for p in prefixes if sum((*p, t) in prefixes for t in range(3)) > 1}
    many, tokens = RadixTree(), []
    for _ in range(3000):
        tokens = [rng.randint(0, 2) for _ in range(14)]
        many.insert(tokens)
    lines = lines_of(lambda: many.match(tokens))
    assert lines < 1500, (
        f"to match 14 tokens among 3,000 sequences, {lines:,} lines ran: walk down "
        "from the root, one edge at a time, and don't compare with every sequence"
    )
    edges = len(ends | parts)  # one edge leads to each of them
    assert tree.edges() == edges, (
        f"{edges} edges are needed, yours has {tree.edges()}: split an edge only where "
        "sequences part or one ends"
    )
