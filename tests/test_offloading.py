"""Pages that were evicted go to the host's memory, and come back by their names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from course.integrity import check_integrity
from heads import write_head
from test_page_manager import compute

from simplellm import LLM, EngineConfig
from simplellm.base import host_memory
from simplellm.engine.offloading import OffloadingPageManager
from simplellm.model import memory

# The books


def fill(manager: OffloadingPageManager, sequence: int, tokens: list[int]) -> int:
    """A sequence comes, is computed and goes; how many of its tokens were there."""
    found = manager.add(sequence, tokens)
    check_integrity(manager)
    compute(manager, sequence, tokens, len(tokens))
    manager.remove(sequence)
    check_integrity(manager)
    return found


def text(number: int, length: int = 20) -> list[int]:
    return [number] * length


def test_an_evicted_prefix_comes_back_and_is_not_computed_again() -> None:
    manager = OffloadingPageManager(6, 4, host_pages=20)
    assert fill(manager, 1, text(1)) == 0
    assert manager.add(2, text(2)) == 0
    assert manager.allocate(2, 20)
    saved = manager.take_copies()  # one page was free, and the first of text 1 stays
    assert len(saved) == 4 and all(there >= 6 > here for here, there in saved)
    manager.commit(2, text(2), 20)
    manager.remove(2)
    assert manager.add(1, text(1)) == 16 and manager.loaded_tokens == 12
    loaded = [pair for pair in manager.take_copies() if pair[0] >= 6]
    assert {here for here, _ in loaded} < {there for _, there in saved}
    assert [there for _, there in loaded] == [*manager.tables[1].groups[0][1:]]
    check_integrity(manager)


def test_what_came_back_is_not_brought_to_the_host_again() -> None:
    manager = OffloadingPageManager(5, 4, host_pages=20)
    copies = []
    for turn in range(6):
        name = turn % 2
        assert manager.add(name, text(name)) == (16 if turn > 1 else 0)
        assert manager.allocate(name, 20)
        copies.append([*manager.take_copies()])
        manager.commit(name, text(name), 20)
        manager.remove(name)
    saved = [sum(there >= 5 for _, there in some) for some in copies]
    assert saved == [0, 5, 5, 0, 0, 0], "each page of two texts once"
    assert manager.loaded_tokens == 4 * 16


def test_the_host_forgets_what_is_unused_the_longest() -> None:
    manager = OffloadingPageManager(5, 4, host_pages=10)
    for name in (1, 2, 3):  # 1 and 2 are on the host now
        fill(manager, name, text(name))
    assert fill(manager, 1, text(1)) == 16
    fill(manager, 4, text(4))
    fill(manager, 5, text(5))  # five pages had to make room, and then five
    assert len(manager.on_host) == 10
    assert fill(manager, 2, text(2)) == 0
    assert manager.add(5, text(5)) > 0


def test_a_shared_page_that_came_back_serves_the_next_request() -> None:
    manager = OffloadingPageManager(12, 4, host_pages=20)
    fill(manager, 1, text(1))
    fill(manager, 2, text(2, 48))
    assert manager.add(1, [*text(1), 8]) == 20 == manager.loaded_tokens
    assert manager.add(2, [*text(1), 9]) == 20 == manager.loaded_tokens
    assert [*manager.tables[1].groups[0]] == [*manager.tables[2].groups[0]]
    check_integrity(manager)


def test_what_finds_no_room_stays_on_the_host() -> None:
    manager = OffloadingPageManager(6, 4, host_pages=20)
    fill(manager, 1, text(1))
    manager.add(2, text(2))
    compute(manager, 2, text(2), 16)  # two pages are left
    before = dict(manager.page_of)
    assert manager.add(1, text(1)) == 0
    assert manager.page_of == before and not manager.take_copies()
    manager.remove(1)
    manager.remove(2)
    assert manager.add(1, text(1)) == 16


def test_pages_behind_the_window_are_not_brought() -> None:
    """But those near a prompt's end are: with them its prefix is found."""
    manager = OffloadingPageManager(40, 4, window=8, max_chunk=4, host_pages=100)
    for name in (1, 2):
        tokens = [name + n % 50 for n in range(102)]
        manager.add(name, tokens)
        for end in [*range(4, 101, 4), 102]:
            compute(manager, name, tokens, end)
        manager.remove(name)
    groups = [group for group, _ in manager.on_host]
    assert groups.count(0) >= 10 and 1 <= groups.count(1) <= 4
    assert manager.add(3, [1 + n % 50 for n in range(102)]) == 100
    assert manager.loaded_tokens > 40
    check_integrity(manager)


def test_a_page_that_is_written_to_is_found_on_the_host() -> None:
    """Its name stays with the copy."""
    manager = OffloadingPageManager(5, 4, host_pages=20)
    fill(manager, 1, text(1))
    fill(manager, 2, text(2))
    assert manager.add(1, text(1)) == 16
    manager.take_copies()
    assert manager.truncate(1, 14) and manager.allocate(1, 15)
    check_integrity(manager)
    assert not manager.take_copies()
    manager.remove(1)
    assert manager.add(1, text(1)) == 16


# The memory


def test_pages_lie_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    page = torch.zeros(9, 3, 4).transpose(0, 1)[:, 2]  # as a pool gives them: strided
    monkeypatch.setattr(host_memory, "PIECE", 5 * page.nbytes)
    found = host_memory.host_pages(page, 12)
    assert len({one.untyped_storage().data_ptr() for one in found}) == 3
    assert len({one.data_ptr() for one in found}) == 12
    for number, one in enumerate(found):
        assert one.shape == page.shape and one.is_contiguous()
        one.fill_(number)
    assert [one.mean().item() for one in found] == [*range(12)]
    assert host_memory.host_pages(page, 0) == []


# The engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY)


PROMPTS = [[1 + n, *range(10, 90), n] * 2 for n in range(5)]
GREEDY: Any = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def answers(
    path: Path | None, repeats: int = 3, **options: Any
) -> Iterator[tuple[list[int], int, int]]:
    """Tokens of each prompt, how many of it were cached, and of those, came back."""
    with LLM(path, device="cpu", max_num_seqs=2, **options) as llm:
        for prompt in PROMPTS * repeats:
            before = llm.stats().loaded_tokens
            (output,) = llm.generate([prompt], **GREEDY).result()
            loaded = llm.stats().loaded_tokens - before
            yield [*output.token_ids], output.num_cached_tokens, loaded


@pytest.mark.parametrize(
    ("embedded", "options"),
    [
        pytest.param(False, {}, id="auto"),
        pytest.param(
            True,
            {"kv_cache_dtype": "fp8"},
            id="embedded fp8",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(False, {"kv_cache_dtype": "fp8"}, id="fp8"),
        pytest.param(True, {}, id="embedded auto", marks=pytest.mark.exhaustive),
    ],
)
def test_prefixes_come_back_and_tokens_stay(
    folder: Path, embedded: bool, options: dict[str, Any]
) -> None:
    """In a cache with room for one prompt, and as much on the host as is wanted."""
    path = None if embedded else folder
    plain = answers(path, 1, enable_prefix_caching=False, **options)
    expected = [tokens for tokens, *_ in plain]
    pages = 110 if embedded and options else 50  # it has more groups of layers then
    small: Any = {"num_pages": pages, "page_size": 8, "max_model_len": 180, **options}
    lost = [*answers(path, **small)]
    kept = [*answers(path, cpu_cache_bytes=2**25, **small)]
    assert [tokens for tokens, *_ in kept] == 3 * expected
    assert [tokens for tokens, *_ in lost] == 3 * expected
    assert max(cached for _, cached, _ in lost[5:]) < 80
    # Of 164 tokens, the last whole page that leaves one to compute.
    assert [cached for _, cached, _ in kept] == [0] * 5 + [160] * 10
    assert all(loaded == 160 for *_, loaded in kept[5:])


def test_two_ranks_keep_their_shards(folder: Path) -> None:
    small: Any = {"num_pages": 50, "page_size": 8, "max_model_len": 180}
    small |= {"tensor_parallel_size": 2, "dtype": "float32"}
    found = [*answers(folder, 2, cpu_cache_bytes=2**24, **small)]
    assert [tokens for tokens, *_ in found[:5]] == [tokens for tokens, *_ in found[5:]]
    assert [loaded for *_, loaded in found[5:]] == [160] * 5


def test_a_heads_pages_come_back_too(folder: Path, tmp_path: Path) -> None:
    """So that it drafts as it did, whatever is on the host."""
    with LLM(folder, device="cpu") as llm:
        write_head(tmp_path, llm.config)
    drafting: Any = {"speculative": str(tmp_path), "num_speculative_tokens": 3}
    drafting |= {"page_size": 8, "max_model_len": 180}
    found = []
    for options in ({"num_pages": 400}, {"num_pages": 50, "cpu_cache_bytes": 2**25}):
        with LLM(folder, device="cpu", max_num_seqs=2, **drafting, **options) as llm:
            tokens = []
            for prompt in PROMPTS * 2:
                (output,) = llm.generate([prompt], **GREEDY).result()
                tokens.append([*output.token_ids])
            found.append((tokens, llm.stats()))
    (expected, plain), (tokens, stats) = found
    assert tokens == expected and stats.loaded_tokens == 5 * 160
    assert stats.draft_tokens == plain.draft_tokens
    assert stats.accepted_tokens == plain.accepted_tokens


def test_what_cannot_be_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is 9; expected 0 without prefix caching"):
        EngineConfig(cpu_cache_bytes=9, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="is 9; expected 0, or at least"):
        LLM(folder, device="cpu", cpu_cache_bytes=9)
    monkeypatch.setattr(memory, "free_bytes", lambda device: (10**9, 10**9))
    with pytest.raises(MemoryError, match=r"pages on the host .* take 2.0 GB"):
        LLM(folder, device="cpu", cpu_cache_bytes=2 * 10**9)
