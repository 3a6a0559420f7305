"""cache.py against the model that recomputes everything, and its books against a dict.

Schedules are random: sequences start, take chunks of any length side by side, end, and
leave their slot to the next one. The reference is `Transformer.logits`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from simplellm.attention import attention
from simplellm.cache import Chunk, SlotCache, SlotManager, decode_attention, kv_bytes
from simplellm.config import GPT_OSS_20B, GPT_OSS_120B, LAYER_TYPES, ModelConfig
from simplellm.model import Transformer, load_model

TOLERANCE = 1e-5  # of the largest logit, in float32

SLIDING, FULL = LAYER_TYPES
CONFIGS = {
    "alternating": replace(TINY, num_hidden_layers=4, layer_types=LAYER_TYPES * 2),
    "sliding only": replace(TINY, layer_types=(SLIDING, SLIDING), sliding_window=5),
    "full only": replace(TINY, layer_types=(FULL, FULL), sliding_window=None),
    "window of one": replace(TINY, sliding_window=1),
    "window beyond the slot": replace(TINY, sliding_window=1000),
    "one kv head": replace(TINY, num_key_value_heads=1),
}
SLOT = 40  # tokens of a slot in the random schedules


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transformer]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: load_model(write_checkpoint(folder / name, config, seed=i), device="cpu")
        for i, (name, config) in enumerate(CONFIGS.items())
    }


@pytest.fixture(scope="module")
def embedded() -> Transformer:
    return load_model(device="cpu")


@torch.inference_mode()
def run(
    model: Transformer,
    cache: SlotCache,
    chunks: Sequence[Chunk],
    texts: dict[int, list[int]],
) -> list[Tensor]:
    """Grow, run and commit ``chunks``; the logits of each one's tokens."""
    for chunk in chunks:
        assert cache.manager.grow(chunk.sequence, chunk.start + chunk.length)
    ranges = [range(c.start, c.start + c.length) for c in chunks]
    tokens = [
        texts[c.sequence][i] for c, r in zip(chunks, ranges, strict=True) for i in r
    ]
    positions = [i for r in ranges for i in r]
    hidden = model(
        torch.tensor(tokens), torch.tensor(positions), cache.step(list(chunks))
    )
    for chunk, r in zip(chunks, ranges, strict=True):
        cache.manager.commit(chunk.sequence, texts[chunk.sequence], r.stop)
    return list(model.lm_head(hidden).float().split([c.length for c in chunks]))


def assert_same(got: Tensor, expected: Tensor) -> None:
    error = (got - expected).abs().max().item()
    assert error <= TOLERANCE * max(1.0, expected.abs().max().item())


@given(data=st.data(), name=st.sampled_from(sorted(CONFIGS)), slots=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_any_schedule_gives_the_recomputed_logits(
    models: dict[str, Transformer], data: st.DataObject, name: str, slots: int
) -> None:
    model = models[name]
    cache = SlotCache(model.config, max_num_seqs=slots, max_model_len=SLOT)
    pointers = [tensor.data_ptr() for layer in cache.layers for tensor in layer]
    seed = data.draw(st.integers(0, 2**16), label="seed")
    lengths = data.draw(st.lists(st.integers(1, SLOT), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(seed)
    texts = {
        100 + i: torch.randint(0, 97, (n,), generator=generator).tolist()
        for i, n in enumerate(lengths)
    }
    got: dict[int, list[Tensor]] = {sequence: [] for sequence in texts}
    waiting, running = list(texts), list[int]()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop())
            assert cache.manager.add(running[-1], texts[running[-1]]) == 0
        chosen = data.draw(st.permutations(running))
        chunks = []
        for sequence in chosen[: data.draw(st.integers(1, len(chosen)))]:
            start = sum(len(part) for part in got[sequence])
            left = len(texts[sequence]) - start
            length = data.draw(st.one_of(st.just(1), st.integers(1, left)))
            chunks.append(Chunk(sequence, start, length))
        for chunk, logits in zip(chunks, run(model, cache, chunks, texts), strict=True):
            got[chunk.sequence].append(logits)
            if chunk.start + chunk.length == len(texts[chunk.sequence]):
                cache.manager.remove(chunk.sequence)
                running.remove(chunk.sequence)
        cache.manager.check_integrity()
    assert cache.manager.usage == 0
    assert pointers == [t.data_ptr() for layer in cache.layers for t in layer]
    for sequence, text in texts.items():
        assert_same(torch.cat(got[sequence]), model.logits(text))


@pytest.mark.parametrize("chunk", [1, 7, 100, 127, 128, 129, 300])
def test_the_embedded_model_across_its_window(
    embedded: Transformer, chunk: int
) -> None:
    """300 tokens at a window of 128, prefilled in chunks of one length."""
    generator = torch.Generator().manual_seed(chunk)
    text = torch.randint(0, 1000, (300,), generator=generator).tolist()
    cache = SlotCache(embedded.config, max_num_seqs=2, max_model_len=512)
    cache.manager.add(7, text)
    got = []
    for start in range(0, 300, chunk):
        length = min(chunk, 300 - start)
        got += run(embedded, cache, [Chunk(7, start, length)], {7: text})
    assert_same(torch.cat(got), embedded.logits(text))


def test_greedy_tokens_of_the_embedded_model(embedded: Transformer) -> None:
    """Five prompts through two slots, interleaved, say what each says alone."""
    generator = torch.Generator().manual_seed(0)
    new = 8
    prompts = {
        i: torch.randint(0, 1000, (n,), generator=generator).tolist()
        for i, n in enumerate((5, 126, 60, 200, 1))
    }
    expected = {}
    for i, prompt in prompts.items():
        text = list(prompt)
        for _ in range(new):
            text.append(int(embedded.logits(text)[-1].argmax()))
        expected[i] = text

    texts = {i: list(prompt) for i, prompt in prompts.items()}
    cache = SlotCache(embedded.config, max_num_seqs=2, max_model_len=256)
    done = dict.fromkeys(texts, 0)
    waiting, running = list(texts), list[int]()
    while waiting or running:
        while waiting and len(running) < 2:
            running.append(waiting.pop(0))
            cache.manager.add(running[-1], texts[running[-1]])
        chunks = [Chunk(i, done[i], min(50, len(texts[i]) - done[i])) for i in running]
        for chunk, logits in zip(
            chunks, run(embedded, cache, chunks, texts), strict=True
        ):
            i = chunk.sequence
            done[i] += chunk.length
            if done[i] < len(texts[i]):
                continue
            texts[i].append(int(logits[-1].argmax()))
            if len(texts[i]) == len(prompts[i]) + new:
                cache.manager.remove(i)
                running.remove(i)
    assert texts == expected


@pytest.mark.parametrize("lengths", [[9, 9, 9], [3, 30, 5], [1, 1, 39], [2, 3]])
@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0, 1], [5, 0, 2]])
def test_decodes_in_any_slots(
    models: dict[str, Transformer], lengths: list[int], slots: list[int]
) -> None:
    """Neighbors, out of order, with holes; of one length and of very different ones."""
    model = models["alternating"]
    cache = SlotCache(model.config, max_num_seqs=6, max_model_len=SLOT)
    generator = torch.Generator().manual_seed(1)
    texts = {
        slot: torch.randint(0, 97, (n + 1,), generator=generator).tolist()
        for slot, n in zip(slots, lengths, strict=False)
    }
    for slot in range(6):  # slots are given out from 0: name the sequences after them
        cache.manager.add(slot, [0])
        cache.manager.grow(slot, 1)
    for slot, text in texts.items():
        run(model, cache, [Chunk(slot, 0, len(text) - 1)], texts)
    decodes = [Chunk(slot, len(text) - 1, 1) for slot, text in texts.items()]
    for chunk, logits in zip(decodes, run(model, cache, decodes, texts), strict=True):
        assert_same(logits, model.logits(texts[chunk.sequence])[-1:])


@pytest.mark.parametrize("with_sinks", [True, False])
def test_decode_attention_is_attention_of_one_query(with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(3, 6, 8, generator=generator)
    k, v = torch.randn(2, 3, 2, 10, 8, generator=generator)
    sinks = torch.randn(6, generator=generator) if with_sinks else None
    lengths = torch.tensor([10, 4, 1])
    hidden = torch.arange(10) >= lengths[:, None, None, None]
    got = decode_attention(q, k, v, sinks, hidden)
    for row, n in enumerate(lengths):
        alone = attention(
            q[row : row + 1],
            k[row, :, :n].transpose(0, 1),
            v[row, :, :n].transpose(0, 1),
            sinks,
        )
        torch.testing.assert_close(got[row], alone[0], rtol=1e-5, atol=1e-6)


def test_a_bfloat16_cache_keeps_rounded_keys_and_values() -> None:
    """The output has the model's dtype, and reads what was rounded."""
    cache = SlotCache(
        CONFIGS["full only"], max_num_seqs=1, max_model_len=8, dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 6, 16, generator=generator)
    k, v = torch.randn(2, 5, 2, 16, generator=generator)
    manager = cache.manager
    manager.add(0, [1] * 5)
    manager.grow(0, 5)
    cache.step([Chunk(0, 0, 4)]).attend(0, q[:4], k[:4], v[:4], None, None)
    manager.commit(0, [1] * 5, 4)
    got = cache.step([Chunk(0, 4, 1)]).attend(0, q[4:], k[4:], v[4:], None, None)
    rounded = attention(q[4:], k.bfloat16().float(), v.bfloat16().float(), None)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, rounded, rtol=1e-5, atol=1e-6)
    exact = attention(q[4:], k, v, None)
    assert not torch.allclose(got, exact, rtol=1e-5, atol=1e-6)


def test_memory_of_the_known_models() -> None:
    assert kv_bytes(GPT_OSS_20B, 100) == 24 * 100 * 2048
    assert kv_bytes(GPT_OSS_20B, 131_072) == 12 * 2048 * (131_072 + 128)
    assert kv_bytes(GPT_OSS_20B, 131_072, windowed=False) == 24 * 2048 * 131_072
    assert kv_bytes(GPT_OSS_120B, 4096) == 18 * 2048 * (4096 + 128)
    assert kv_bytes(GPT_OSS_120B, 4096, itemsize=1) == 18 * 1024 * (4096 + 128)
    assert kv_bytes(GPT_OSS_120B, 0) == 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [3, SLOT])
def test_the_cache_allocates_what_the_arithmetic_says(name: str, length: int) -> None:
    config: ModelConfig = CONFIGS[name]
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        cache = SlotCache(config, max_num_seqs=3, max_model_len=length, dtype=dtype)
        assert cache.nbytes == 3 * kv_bytes(config, length, itemsize=itemsize)


def small_cache() -> SlotCache:
    cache = SlotCache(TINY, max_num_seqs=2, max_model_len=SLOT)
    cache.manager.add(1, [5] * 10)
    assert cache.manager.grow(1, 10)
    return cache


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one"),
        ([Chunk(1, 0, 2), Chunk(1, 2, 2)], "none of them twice"),
        ([Chunk(1, 0, 0)], "at least one token"),
        ([Chunk(1, 3, 2)], "the first at 0"),
        ([Chunk(1, 0, 11)], "end by 10"),
        ([Chunk(9, 0, 1)], "sequence 9 is unknown"),
        ([Chunk(2, 0, 1)], "sequence 2 has no slot, 1 of 2 are free"),
    ],
)
def test_chunks_that_cannot_run(chunks: list[Chunk], message: str) -> None:
    cache = small_cache()
    cache.manager.add(2, [5])
    with pytest.raises(ValueError, match=message):
        cache.step(chunks)


def test_a_chunk_must_continue_what_is_committed() -> None:
    cache = small_cache()
    cache.manager.commit(1, [5] * 10, 4)
    cache.step([Chunk(1, 4, 6)])
    for start in (0, 3, 5):
        with pytest.raises(ValueError, match="the first at 4"):
            cache.step([Chunk(1, start, 1)])


def test_tokens_that_do_not_fit_the_chunks() -> None:
    step = small_cache().step([Chunk(1, 0, 3)])
    q, k = torch.zeros(4, 6, 16), torch.zeros(4, 2, 16)
    with pytest.raises(ValueError, match="4 packed tokens; expected 3"):
        step.attend(0, q, k, k, None, 8)


def test_the_manager_refuses_what_cannot_be() -> None:
    manager = SlotManager(max_num_seqs=1, max_model_len=8)
    for length in (0, 9):
        with pytest.raises(ValueError, match=f"{length} tokens; expected 1 to 8"):
            manager.add(0, [1] * length)
    manager.add(0, [1] * 8)
    with pytest.raises(ValueError, match="sequence 0 is in the cache"):
        manager.add(0, [1])
    with pytest.raises(ValueError, match="9 tokens; expected 1 to 8"):
        manager.grow(0, 9)
    assert manager.grow(0, 4)
    for length in (5, -1):
        with pytest.raises(ValueError, match="expected 0, which it has, to 4"):
            manager.commit(0, [1] * 8, length)
    for refused in (manager.remove, lambda s: manager.grow(s, 1)):
        with pytest.raises(ValueError, match="sequence 3 is unknown"):
            refused(3)
    for sizes in ((0, 8), (1, 0)):
        with pytest.raises(ValueError, match="is 0; expected at least 1"):
            SlotManager(*sizes)


def test_slots_run_out_and_come_back() -> None:
    manager = SlotManager(max_num_seqs=2, max_model_len=8)
    for sequence in (10, 11, 12):
        manager.add(sequence, [1, 2])
    assert manager.free_tokens == 16
    assert manager.grow(10, 2)
    assert manager.grow(11, 2)
    assert (manager.usage, manager.free_tokens) == (1.0, 0)
    assert not manager.grow(12, 2)
    assert manager.grow(10, 8), "who has a slot has all of it"
    manager.remove(10)
    assert manager.grow(12, 2)
    assert manager.holding(12).slot == 0
    assert not manager.fork(11, 13)


def test_broken_books_are_noticed() -> None:
    manager = SlotManager(max_num_seqs=2, max_model_len=8)
    manager.add(0, [1])
    manager.grow(0, 1)
    manager.check_integrity()
    manager.free.append(0)
    with pytest.raises(AssertionError):
        manager.check_integrity()


class SlotBooks(RuleBasedStateMachine):
    """SlotManager against a dict of what each sequence was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = SlotManager(max_num_seqs=3, max_model_len=8)
        self.model: dict[int, tuple[int, int]] = {}  # sequence: (room, computed)

    @rule(sequence=st.integers(0, 5), length=st.integers(1, 8))
    def add(self, sequence: int, length: int) -> None:
        if sequence in self.model:
            return
        assert self.manager.add(sequence, [0] * length) == 0
        self.model[sequence] = (0, 0)

    @rule(sequence=st.integers(0, 5), length=st.integers(1, 8))
    def grow(self, sequence: int, length: int) -> None:
        if sequence not in self.model:
            return
        room, computed = self.model[sequence]
        others = sum(r > 0 for s, (r, _) in self.model.items() if s != sequence)
        fits = self.manager.grow(sequence, length)
        assert fits == (room > 0 or others < 3)
        if fits:
            self.model[sequence] = (max(room, length), computed)

    @rule(sequence=st.integers(0, 5), part=st.floats(0, 1))
    def commit(self, sequence: int, part: float) -> None:
        if sequence not in self.model:
            return
        room, computed = self.model[sequence]
        computed += math.floor(part * (room - computed))
        self.manager.commit(sequence, [0] * room, computed)
        self.model[sequence] = (room, computed)

    @rule(sequence=st.integers(0, 5))
    def remove(self, sequence: int) -> None:
        if sequence in self.model:
            self.manager.remove(sequence)
            del self.model[sequence]

    @invariant()
    def books_agree(self) -> None:
        self.manager.check_integrity()
        holdings = self.manager.holdings
        assert {s: (h.room, h.computed) for s, h in holdings.items()} == self.model
        taken = [h.slot for h in holdings.values() if h.room]
        assert len(set(taken)) == len(taken) == round(3 * self.manager.usage)


TestSlotBooks = SlotBooks.TestCase
TestSlotBooks.settings = settings(max_examples=40, deadline=None)
