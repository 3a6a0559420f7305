"""Wrong answers to chapter 8."""

from simplellm.engine.page_manager import NULL, PageManager, hash_page
from wrong import wrong


def prefix(books, tokens, needed, last=0):
    """The digests as far as ``needed(group, index, end)`` says that a page matters."""
    size, page_hashes, digest, usable = books.page_size, [], b"", 0
    for end in range(size, len(tokens) + last, size):
        digest = hash_page(digest, tokens[end - size : end])
        page_hashes.append(digest)
        if all(
            (group, name) in books.page_of
            for group in range(len(books.windows))
            for index, name in enumerate(page_hashes)
            if needed(group, index, end)
        ):
            usable = len(page_hashes)
    return page_hashes[:usable] if books.enable_caching else []


def in_view(books, group, index, end):
    return index >= books._first_page(end, books.windows[group])


@wrong("PageManager._cached_prefix", "only what the next token sees")
class AllPagesOfBothGroups(PageManager):
    def _cached_prefix(self, tokens):
        return prefix(self, tokens, lambda group, index, end: True)


@wrong("PageManager._cached_prefix", "somebody else's")
class FullLayersOnly(PageManager):
    def _cached_prefix(self, tokens):
        return prefix(self, tokens, lambda group, index, end: group == 0)


@wrong("PageManager._cached_prefix", "one token is left")
class NothingLeftToCompute(PageManager):
    def _cached_prefix(self, tokens):
        def needed(group, index, end):
            return in_view(self, group, index, end)

        return prefix(self, tokens, needed, last=1)


@wrong("PageManager._cached_prefix", "pages can be used")
class StopsAtTheFirstGap(PageManager):
    """Never looks further once a sliding page is missing."""

    def _cached_prefix(self, tokens):
        size, page_hashes, digest = self.page_size, [], b""
        for end in range(size, len(tokens) if self.enable_caching else 0, size):
            digest = hash_page(digest, tokens[end - size : end])
            groups = range(len(self.windows))
            if not all((group, digest) in self.page_of for group in groups):
                break
            page_hashes.append(digest)
        return page_hashes


def committed(books, sequence, tokens, length, shift=0, name_first=True, null=NULL):
    """What `commit` does, with a mistake perhaps."""
    table = books.tables[sequence]
    table.num_computed_tokens = length
    if name_first and books.enable_caching:
        books._hash_full_pages(table, tokens)
    for group, window in enumerate(books.windows):
        first = books._first_page(length + shift, window)
        group_pages = table.groups[group]
        for index in range(table.first[group], min(first, len(group_pages))):
            books._release(group_pages[index], behind=True)
            group_pages[index] = NULL if null else group_pages[index]
        table.first[group] = max(first, table.first[group])
    if not name_first and books.enable_caching:
        books._hash_full_pages(table, tokens)


@wrong("8.3", "sees back to page")
class OneTooEarly(PageManager):
    def commit(self, sequence, tokens, length):
        committed(self, sequence, tokens, length, shift=1)


@wrong("8.3", "sees back to page")
class OneTooLate(PageManager):
    def commit(self, sequence, tokens, length):
        committed(self, sequence, tokens, length, shift=-1)


@wrong("8.3", "get names")
class NeverNames(PageManager):
    def commit(self, sequence, tokens, length):
        share, self.enable_caching = self.enable_caching, False
        super().commit(sequence, tokens, length)
        self.enable_caching = share


@wrong("8.3", "before it had its name")
class NamesTooLate(PageManager):
    def commit(self, sequence, tokens, length):
        committed(self, sequence, tokens, length, name_first=False)


@wrong("8.3", "NULL")
class LeavesTheEntries(PageManager):
    def commit(self, sequence, tokens, length):
        committed(self, sequence, tokens, length, null=None)


@wrong("8.3", "behind=True")
class ReleasesPlainly(PageManager):
    def _release(self, page, behind=False):
        super()._release(page)


@wrong("8.3", "table.num_computed_tokens")
class NotesNothing(PageManager):
    def commit(self, sequence, tokens, length):
        before = self.tables[sequence].num_computed_tokens
        super().commit(sequence, tokens, length)
        self.tables[sequence].num_computed_tokens = before


def grown(
    books,
    sequence,
    length,
    *,
    split=True,
    count_copies=True,
    always=False,
    last=False,
    least=0,
    forget=False,
    counted=None,
):
    """What `allocate` does, with a mistake perhaps."""
    table, size = books.tables[sequence], books.page_size
    count = -(-length // size)
    index, filled = divmod(table.num_computed_tokens, size)
    if last:
        index = len(table.groups[0]) - 1
    groups = (
        table.groups if split and filled and length > table.num_computed_tokens else []
    )
    if always:
        groups = [pages for pages in table.groups if index < len(pages)]
    shared = [pages for pages in groups if always or books.references[pages[index]] > 1]
    counted = counted or len(books.windows)
    needed = max(least, count - len(table.groups[0])) * counted
    if needed + len(shared) * count_copies > books.free_pages:
        return False
    for pages in shared:
        new = books._take()
        books._copies.append((pages[index], new))
        books._release(pages[index])
        pages[index] = new
    for pages in table.groups if forget and filled else groups:
        books._forget_hash(pages[index])
    for pages in table.groups:
        while len(pages) < count:
            pages.append(books._take())
    return True


@wrong("PageManager.allocate", "exchanged for a copy")
class WritesIntoSharedPages(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, split=False)


@wrong("PageManager.allocate", "has changed something")
class TakesUntilThereIsNone(PageManager):
    def allocate(self, sequence, length):
        table = self.tables[sequence]
        for group_pages in table.groups:
            while len(group_pages) * self.page_size < length:
                if not self.free_pages:
                    return False
                group_pages.append(self._take())
        return True


@wrong("PageManager.allocate", "4 are needed")
class ForgetsThatCopiesNeedRoom(PageManager):
    def allocate(self, sequence, length):
        try:
            return grown(self, sequence, length, count_copies=False)
        except KeyError:  # no page to evict
            return False


@wrong("PageManager.allocate", "nothing will be written")
class CopiesAlways(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, always=True)


@wrong("PageManager.allocate", "no longer uses the old page")
class KeepsHoldingTheOldPage(PageManager):
    def allocate(self, sequence, length):
        before = len(self._copies)
        done = super().allocate(sequence, length)
        for old, _ in self._copies[before:]:
            self.references[old] += 1
        return done


@wrong("PageManager.allocate", "must be noted")
class NotesNoCopies(PageManager):
    def allocate(self, sequence, length):
        before = len(self._copies)
        done = super().allocate(sequence, length)
        del self._copies[before:]
        return done


@wrong("PageManager.allocate", "not to its last")
class TheTablesLastPage(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, last=True)


@wrong("PageManager.allocate", "can be had")
class FreePagesOnly(PageManager):
    def allocate(self, sequence, length):
        table = self.tables[sequence]
        missing = -(-length // self.page_size) - len(table.groups[0])
        if missing * len(self.windows) > len(self.free):
            return False
        return super().allocate(sequence, length)


@wrong("8.1", "kept whole")
def as_if_never_cut(length, page_size, window):
    return -(-length // page_size) + -(-min(length, window - 1) // page_size)


@wrong("8.1", "itself included")
def window_of_the_last_token(length, page_size, window):
    full = -(-length // page_size)
    return 2 * full - max(0, length - window) // page_size


@wrong("8.2", "has a copy")
def forgets_the_half_full_page(prompt, samples, new, page_size):
    return prompt // page_size + samples * -(-new // page_size)


@wrong("8.2", "once for all samples")
def without_sharing(prompt, samples, new, page_size):
    return samples * -(-(prompt + new) // page_size)


@wrong("8.4", "its own turn")
def never_removes(manager, conversations, rounds):
    found = []
    for turn in range(rounds):
        found.append(0)
        for name, tokens in enumerate(conversations):
            said = tokens + [tokens[0]] * 40 * turn
            number = turn * len(conversations) + name
            found[-1] += manager.add(number, said)
            if manager.allocate(number, len(said)):
                manager.commit(number, said, len(said))
    return found


@wrong("8.4", "have changed")
def changes_the_lists(manager, conversations, rounds):
    found = []
    for _ in range(rounds):
        found.append(0)
        for tokens in conversations:
            found[-1] += manager.add(0, tokens)
            manager.allocate(0, len(tokens))
            manager.commit(0, tokens, len(tokens))
            manager.remove(0)
            tokens += [tokens[0]] * 40
    return found


class Trie:
    """An edge for each token."""

    def __init__(self):
        self.root = {}

    def insert(self, tokens):
        node = self.root
        for token in tokens:
            node = node.setdefault(token, {})

    def match(self, tokens):
        node, length = self.root, 0
        for token in tokens:
            if token not in node:
                break
            node, length = node[token], length + 1
        return length

    def edges(self):
        def below(node):
            return sum(1 + below(child) for child in node.values())

        return below(self.root)


wrong("8.5", "one edge")(Trie)


@wrong("8.5", "ends inside an edge")
class EndsNowhere(Trie):
    """Counts edges only where sequences part."""

    def edges(self):
        def below(node):
            children = [below(child) for child in node.values()]
            return sum(children) + (len(children) if len(children) > 1 else 0)

        return below(self.root) + (1 if len(self.root) == 1 else 0)


@wrong("8.5", "from the root, one edge at a time")
class KeepsAList:
    """Every sequence as it came, and each compared with what is looked for."""

    def __init__(self):
        self.sequences = []

    def insert(self, tokens):
        self.sequences.append(tuple(tokens))

    def match(self, tokens):
        longest = 0
        for sequence in self.sequences:
            pairs = zip(sequence, tokens, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if same is None:
                same = min(len(sequence), len(tokens))
            longest = max(longest, same)
        return longest

    def edges(self):
        trie = Trie()
        for sequence in self.sequences:
            trie.insert(sequence)
        ends = set(self.sequences)

        def below(node, path):
            found = 0
            for token, child in node.items():
                here = (*path, token)
                found += (here in ends or len(child) > 1) + below(child, here)
            return found

        return below(trie.root, ())


@wrong("PageManager.allocate", "to spare")
class CountsSparePagesAsCopies(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, least=-99)


@wrong("PageManager.allocate", "keeps its name")
class ForgetsWithoutWriting(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, forget=True)


@wrong("8.3", "begin there")
class BeginsAtTheFirstPageEachTime(PageManager):
    def commit(self, sequence, tokens, length):
        table = self.tables[sequence]
        table.num_computed_tokens = length
        if self.enable_caching:
            self._hash_full_pages(table, tokens)
        for group, window in enumerate(self.windows):
            table.first[group] = self._first_page(length, window)
            for index in range(table.first[group]):
                if table.groups[group][index] != NULL:
                    self._release(table.groups[group][index], behind=True)
                    table.groups[group][index] = NULL


@wrong("PageManager.allocate", "once you know that there is room")
class ForgetsBeforeItCounts(PageManager):
    def allocate(self, sequence, length):
        table = self.tables[sequence]
        index, filled = divmod(table.num_computed_tokens, self.page_size)
        if filled and length > table.num_computed_tokens:
            for group_pages in table.groups:
                if self.references[group_pages[index]] == 1:
                    self._forget_hash(group_pages[index])
        return super().allocate(sequence, length)


@wrong("PageManager._cached_prefix", "ask self.enable_caching first")
class FindsWithoutSharing(PageManager):
    def _cached_prefix(self, tokens):
        shares, self.enable_caching = self.enable_caching, True
        found = super()._cached_prefix(tokens)
        self.enable_caching = shares
        return found


def turns(manager, conversations, rounds, *, each, which=0):
    """Removes each sequence after its turn or all of them after the round."""
    found = []
    said = [list(tokens) for tokens in conversations]
    for _ in range(rounds):
        found.append(0)
        for name, tokens in enumerate(said):
            found[-1] += manager.add(name, tokens)
            manager.allocate(name, len(tokens))
            manager.commit(name, tokens, len(tokens))
            if each:
                manager.remove(name)
            tokens += [tokens[which]] * 40
        if not each:
            for name in range(len(said)):
                manager.remove(name)
    return found


@wrong("8.4", "its own turn")
def removes_after_the_round(manager, conversations, rounds):
    return turns(manager, conversations, rounds, each=False)


@wrong("8.4", "times its first one")
def repeats_the_last_token(manager, conversations, rounds):
    return turns(manager, conversations, rounds, each=True, which=-1)


@wrong("8.5", "walk down")
class AListOfAll:
    """No tree: every sequence is compared, and the edges are counted afterwards."""

    def __init__(self):
        self.all = set()

    def insert(self, tokens):
        self.all.add(tuple(tokens))

    def match(self, tokens):
        best = 0
        for known in self.all:
            length = 0
            for one, other in zip(known, tokens, strict=False):
                if one != other:
                    break
                length += 1
            best = max(best, length)
        return best

    def edges(self):
        after: dict[tuple[int, ...], set[int]] = {}
        for known in self.all:
            for end in range(len(known)):
                after.setdefault(known[:end], set()).add(known[end])
        parts = {p for p, tokens in after.items() if p and len(tokens) > 1}
        return len(self.all | parts)


@wrong("PageManager.allocate", "4 are needed")
class RunsOutOfPagesForCopies(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, count_copies=False)


@wrong("PageManager.allocate", "in each of 2 groups")
class CountsOneGroup(PageManager):
    def allocate(self, sequence, length):
        table = self.tables[sequence]
        count = -(-length // self.page_size)
        if count - len(table.groups[0]) > self.free_pages:
            return False
        for group_pages in table.groups:
            while len(group_pages) < count:
                group_pages.append(self._take())
        return True


@wrong("PageManager._cached_prefix", "every group of self.windows")
class FirstAndLastGroup(PageManager):
    def _cached_prefix(self, tokens):
        def needed(group, index, end):
            return group in (0, len(self.windows) - 1) and in_view(
                self, group, index, end
            )

        return prefix(self, tokens, needed)


@wrong("PageManager._cached_prefix", "type tuple")
class ReturnsATuple(PageManager):
    def _cached_prefix(self, tokens):
        return tuple(super()._cached_prefix(tokens))


@wrong("PageManager._cached_prefix", "don't begin again")
class HashesEachPrefixAnew(PageManager):
    def _cached_prefix(self, tokens):
        found = super()._cached_prefix(tokens)
        for length in range(1, -(-len(tokens) // self.page_size)):
            digest, names = b"", []
            for end in range(
                self.page_size, length * self.page_size + 1, self.page_size
            ):
                digest = hash_page(digest, tokens[end - self.page_size : end])
                names.append(digest)
            if names == found:
                return names
        return found


@wrong("PageManager._cached_prefix", "stop there")
class HashesBehindAMiss(PageManager):
    def _cached_prefix(self, tokens):
        return prefix(self, tokens, lambda *page: in_view(self, *page))


@wrong("PageManager.allocate", "each group of this manager")
class CountsTwoGroups(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, counted=2)


@wrong("PageManager.allocate", "each of self.windows")
class CountsTwoGroupsAtMost(PageManager):
    def allocate(self, sequence, length):
        return grown(self, sequence, length, counted=min(2, len(self.windows)))


@wrong("PageManager.allocate", "each of the table's groups")
class GrowsTwoGroups(PageManager):
    def allocate(self, sequence, length):
        table = self.tables[sequence]
        others = table.groups[2:]
        del table.groups[2:]
        done = super().allocate(sequence, length)
        table.groups += others
        return done
