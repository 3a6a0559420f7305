"""cpu.py against transformers and against the model that it stands in for.

A text is fed token by token, so that all but its prefill is computed in NumPy.
"""

import inspect
import random
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TINY, write_checkpoint
from oracle import oracle_config, prompt, relative_errors, save_mxfp4
from test_oracle import FP32_TOLERANCE, their_logits
from torch import Tensor

from simplellm import LLM, cpu
from simplellm.cache import Chunk, SlotCache
from simplellm.config import GPT_OSS_20B, LAYER_TYPES, ModelConfig
from simplellm.cpu import (
    CPU,
    UNPACKED_BYTES,
    CPUTransformer,
    choose_backend,
    unpack,
)
from simplellm.generate import RecomputeEngine, Request
from simplellm.model import TORCH, Transformer, load_model
from simplellm.moe import Experts
from simplellm.paged import READ, PagedCache, alike
from simplellm.sampler import SamplingParams
from simplellm.weights import MXFP4

TOLERANCE = 1e-5  # of the largest logit, against our own model in float32
SLIDING, FULL = LAYER_TYPES
CONFIGS = {
    "alternating": replace(TINY, num_hidden_layers=4, layer_types=LAYER_TYPES * 2),
    "sliding only": replace(TINY, layer_types=(SLIDING, SLIDING), sliding_window=5),
    "full only": replace(TINY, layer_types=(FULL, FULL), sliding_window=None),
    "window of one": replace(TINY, sliding_window=1),
    "one kv head": replace(TINY, num_key_value_heads=1),
    "no groups": replace(TINY, num_key_value_heads=6),
    "one expert": replace(TINY, num_experts_per_tok=1),
    "all experts": replace(TINY, num_experts_per_tok=5),
    "without YaRN": replace(TINY, rope_scaling=None),
    "tied": replace(TINY, tie_word_embeddings=True),
}
CACHES: dict[str, Callable[[ModelConfig], SlotCache | PagedCache]] = {
    "slot": lambda config: SlotCache(config, max_num_seqs=4, max_model_len=300),
    "paged": lambda config: PagedCache(config, num_pages=300, page_size=4),
}


@torch.inference_mode()
def decode(
    model: Transformer,
    ids: list[int],
    cache: SlotCache | PagedCache,
    prefill: int = 0,
) -> Tensor:
    """The logits of each of ``ids``: a prefill, and the rest token by token."""
    manager, start = cache.manager, 0
    manager.add(7, ids)
    logits = []
    for end in [prefill] * (prefill > 0) + list(range(prefill + 1, len(ids) + 1)):
        assert manager.grow(7, end)
        step = cache.step([Chunk(7, start, end - start)])
        tokens, positions = torch.tensor(ids[start:end]), torch.arange(start, end)
        logits.append(model.lm_head(model(tokens, positions, step)))
        manager.commit(7, ids, end)
        start = end
    manager.remove(7)
    return torch.cat(logits).float()


def assert_same(got: Tensor, expected: Tensor) -> None:
    error = (got - expected).abs().max().item()
    assert error <= TOLERANCE * max(1.0, expected.abs().max().item())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Transformer, Transformer]:
    """One checkpoint as the CPU's model and as the plain one."""
    return load_model(folder, device="cpu", backend=CPU), load_model(
        folder, device="cpu"
    )


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_lone_decodes_give_the_recomputed_logits(
    tmp_path: Path, name: str, cache: str, quantized: bool
) -> None:
    config = CONFIGS[name]
    folder = write_checkpoint(tmp_path / "model", config, quantized=quantized)
    ids = prompt(config, 40)
    plain = load_model(folder, device="cpu").logits(ids)
    ours = load_model(folder, device="cpu", backend=CPU)
    assert_same(decode(ours, ids, CACHES[cache](config)), plain)
    assert_same(ours.logits(ids), plain)  # all at once, the way of every model


@pytest.mark.parametrize("cache", CACHES)
def test_logits_are_those_of_transformers(tmp_path: Path, cache: str) -> None:
    """Prefilled by 100 and decoded across a window of 128."""
    oracle = save_mxfp4(tmp_path / "model", oracle_config(), seed=3)
    ids = prompt(oracle.config, 180)
    ours = load_model(tmp_path / "model", device="cpu", backend=CPU)
    got = decode(ours, ids, CACHES[cache](ours.config), prefill=100)
    assert relative_errors(got, their_logits(oracle, ids)).max() < FP32_TOLERANCE


def test_greedy_tokens_are_those_of_the_engine_without_a_cache() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    prompts = ["What is 47 + 85?", "Hello", "x" * 100]
    with LLM(device="cpu") as llm:
        assert isinstance(llm.model, CPUTransformer)
        outputs = llm.generate(prompts, params).result(300)
        alone = [llm.generate(p, params).result(300)[0] for p in prompts]
    engine = RecomputeEngine(load_model(device="cpu"))
    requests = [
        Request(output.prompt_token_ids, params, frozenset(), 48) for output in outputs
    ]
    while any(request.finish_reason is None for request in requests):
        engine.step(requests)
    for request, output, single in zip(requests, outputs, alone, strict=True):
        assert output.token_ids == single.token_ids == request.output


def test_extreme_gates_overflow_to_nothing(folder: Path) -> None:
    """Without a warning: exp() of the gates' opposites is infinite."""

    def extreme(weights: Experts) -> Experts:
        bias = weights.gate_up_bias.clone()
        bias[:, 0::4] = -1e4  # every second gate
        bias[:, 1::4] = 1e4
        return replace(weights, gate_up_bias=bias)

    backend = replace(CPU, prepare=lambda weights: unpack(extreme(weights)))
    ours = load_model(folder, device="cpu", backend=backend)
    plain = load_model(folder, device="cpu", backend=replace(TORCH, prepare=extreme))
    ids = prompt(TINY, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = decode(ours, ids, CACHES["slot"](TINY))
    assert_same(got, plain.logits(ids))


def test_stale_memory_is_not_read(pair: tuple[Transformer, Transformer]) -> None:
    ours, plain = pair
    ids = prompt(TINY, 30)
    for make in CACHES.values():
        cache = make(TINY)
        slots = isinstance(cache, SlotCache)
        layers = cache.layers if slots else [(cache.k, cache.v)]
        for tensor in (tensor for layer in layers for tensor in layer):
            tensor.fill_(torch.nan)
        assert_same(decode(ours, ids, cache), plain.logits(ids))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("config", ["alternating", "window of one"])
@torch.inference_mode()
def test_lone_steps_between_others(
    tmp_path: Path, config: str, cache: str, seed: int
) -> None:
    """Two texts, one a fork of the other if that can be, at random alone or not."""
    shape, chance = CONFIGS[config], random.Random(seed)
    folder = write_checkpoint(tmp_path / "model", shape)
    plain = load_model(folder, device="cpu")
    ours = load_model(folder, device="cpu", backend=CPU)
    stem, tails = prompt(shape, 6), [prompt(shape, 34, n) for n in (1, 2)]
    texts = {5: stem + tails[0], 6: stem + tails[1]}
    memory = CACHES[cache](shape)
    manager = memory.manager
    done = dict.fromkeys(texts, 0)
    got: dict[int, list[Tensor]] = {5: [], 6: []}

    def step(*lengths: tuple[int, int]) -> None:
        chunks = [Chunk(name, done[name], length) for name, length in lengths]
        for name, length in lengths:
            assert manager.grow(name, done[name] + length)
        spans = {c.sequence: range(c.start, c.start + c.length) for c in chunks}
        tokens = [texts[name][p] for name, span in spans.items() for p in span]
        positions = [p for span in spans.values() for p in span]
        hidden = ours(
            torch.tensor(tokens), torch.tensor(positions), memory.step(chunks)
        )
        parts = ours.lm_head(hidden).split([length for _, length in lengths])
        for (name, length), part in zip(lengths, parts, strict=True):
            done[name] += length
            manager.commit(name, texts[name], done[name])
            got[name].append(part)

    manager.add(5, texts[5])
    for _ in range(6):
        step((5, 1))
    if manager.fork(5, 6):
        done[6] = 6
        got[6] = list(got[5])
    else:
        manager.add(6, texts[6])
    while left := [name for name in texts if done[name] < len(texts[name])]:
        chosen = chance.sample(left, chance.randint(1, len(left)))
        length = chance.choice([1, 1, 1, 1, 3])
        step(*((n, min(length, len(texts[n]) - done[n])) for n in chosen))
        manager.check_integrity()
    for name, parts in got.items():
        assert_same(torch.cat(parts), plain.logits(texts[name]))


@pytest.mark.parametrize("cache", CACHES)
@torch.inference_mode()
def test_a_step_that_failed_can_be_tried_again(
    pair: tuple[Transformer, Transformer], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its layers have stored the token by then; and it may be another one."""
    ours, plain = pair
    ids, memory = prompt(TINY, 20), CACHES[cache](TINY)
    memory.manager.add(0, ids)
    mixture = CPUTransformer.mixture

    def fail(self: CPUTransformer, layer: Any, h: Any) -> Any:
        if layer.number == 1 and failing:
            raise RuntimeError("on purpose")
        return mixture(self, layer, h)

    monkeypatch.setattr(CPUTransformer, "mixture", fail)
    for position, token in enumerate(ids):
        memory.manager.grow(0, position + 1)
        for failing in (True, False):
            step = memory.step([Chunk(0, position, 1)])
            sent = torch.tensor([3 if failing else token])
            with suppress(RuntimeError):
                last = ours(sent, torch.tensor([position]), step)
        memory.manager.commit(0, ids, position + 1)
    assert_same(ours.lm_head(last), plain.logits(ids)[-1:])


@pytest.mark.parametrize("cache", CACHES)
@torch.inference_mode()
def test_decodes_of_any_lengths_together(
    pair: tuple[Transformer, Transformer], cache: str
) -> None:
    ours, plain = pair
    texts = [prompt(TINY, length, length) for length in (3, 290, 70, 40)]
    memory = CACHES[cache](TINY)
    for name, text in enumerate(texts):
        memory.manager.add(name, text)
        memory.manager.grow(name, len(text))
        ends = torch.arange(len(text) - 1)
        ours(torch.tensor(text[:-1]), ends, memory.step([Chunk(name, 0, len(ends))]))
        memory.manager.commit(name, text, len(ends))
    step = memory.step([Chunk(n, len(text) - 1, 1) for n, text in enumerate(texts)])
    last = torch.tensor([len(text) - 1 for text in texts])
    got = ours.lm_head(ours(torch.tensor([text[-1] for text in texts]), last, step))
    for row, text in zip(got, texts, strict=True):
        assert_same(row, plain.logits(text)[-1])


def test_rows_of_equal_length_go_together() -> None:
    assert [len(rows) for rows in alike(np.full(65, 30))] == [64, 1]


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_like_lengths(seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(5, 2, 200).astype(int) + 1
    batches = list(alike(lengths))
    assert sorted(np.concatenate(batches)) == list(range(200))
    for rows in batches:
        longest = lengths[rows].max()
        assert longest <= max(64, 2 * lengths[rows].min())
        assert len(rows) == 1 or len(rows) * longest <= READ


def test_a_result_stays_when_the_next_one_comes(
    pair: tuple[Transformer, Transformer],
) -> None:
    cache = CACHES["slot"](TINY)
    cache.manager.add(0, [1, 2])
    cache.manager.grow(0, 2)
    results, copies = [], []
    for position in range(2):
        step = cache.step([Chunk(0, position, 1)])
        token = torch.tensor([position + 1])
        results.append(pair[0](token, torch.tensor([position]), step))
        copies.append(results[-1].clone())
        cache.manager.commit(0, [1, 2], position + 1)
    assert results[0].equal(copies[0])
    assert not results[0].equal(results[1])


def test_threads_share_a_model(pair: tuple[Transformer, Transformer]) -> None:
    texts = [prompt(TINY, 60, seed) for seed in range(4)]
    got: dict[int, Tensor] = {}

    def work(number: int) -> None:
        got[number] = decode(pair[0], texts[number], CACHES["slot"](TINY))

    threads = [threading.Thread(target=work, args=[n]) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, ids in enumerate(texts):
        assert_same(got[number], pair[1].logits(ids))


def test_a_bfloat16_cache_is_left_to_the_plain_path(
    pair: tuple[Transformer, Transformer],
) -> None:
    ours, plain = pair
    ids = prompt(TINY, 20)
    for cache in (
        SlotCache(TINY, max_num_seqs=1, max_model_len=20, dtype=torch.bfloat16),
        PagedCache(TINY, num_pages=40, page_size=4, dtype=torch.bfloat16),
    ):
        got = decode(ours, ids, cache)
        assert relative_errors(got, plain.logits(ids)).median() < 0.05


def test_unpacked_weights_are_the_dequantized_ones(folder: Path) -> None:
    plain = load_model(folder, device="cpu").layers[0].mlp.experts
    assert isinstance(plain.gate_up, MXFP4) and isinstance(plain.down, MXFP4)
    unpacked = unpack(plain)
    for ours, theirs in (
        (unpacked.gate_up, plain.gate_up),
        (unpacked.down, plain.down),
    ):
        assert isinstance(ours, Tensor)
        assert ours.dtype == torch.float32
        assert ours.equal(theirs.dequantize(torch.float32))


def test_only_float32_on_a_cpu(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"bfloat16 on cpu; expected torch.float32"):
        load_model(folder, torch.bfloat16, "cpu", backend=CPU)


def test_the_choice_of_a_backend() -> None:
    float32, cpu = torch.float32, torch.device("cpu")
    # 8 layers of 32 experts with 3 * 1024 * 1024 / 3 weights of 4 bytes: 1 GiB.
    config = replace(
        TINY,
        num_hidden_layers=8,
        layer_types=LAYER_TYPES * 4,
        num_local_experts=32,
        intermediate_size=1024,
        hidden_size=1024 // 3,
    )
    nbytes = 8 * 32 * 3 * 1024 * (1024 // 3) * 4
    assert UNPACKED_BYTES - 2**22 < nbytes <= UNPACKED_BYTES
    assert choose_backend(config, float32, cpu) is CPU
    larger = replace(config, hidden_size=1024 // 3 + 1)
    assert choose_backend(larger, float32, cpu) is TORCH
    assert choose_backend(GPT_OSS_20B, float32, cpu) is TORCH
    assert choose_backend(TINY, torch.bfloat16, cpu) is TORCH
    assert choose_backend(TINY, float32, torch.device("cuda")) is TORCH


def test_a_caller_may_choose(folder: Path) -> None:
    seen = []

    def choose(*asked: Any) -> Any:
        seen.append(asked)
        return TORCH

    assert type(load_model(folder, device="cpu", backend=choose)) is Transformer
    [(config, dtype, device)] = seen
    assert (config.hidden_size, dtype, device.type) == (96, torch.float32, "cpu")
    with LLM(folder, device="cpu", backend=TORCH) as llm:
        assert type(llm.model) is Transformer


# One entry of each line that computes: (where, what stands there, the mistake).
MISTAKES = {
    "epsilon too large": ("rms_norm", "+ eps", "+ 0.1"),
    "norm's weight dropped": ("rms_norm", "normed *= weight", "pass"),
    "not normed": ("rms_norm", "** -0.5", "** 0"),
    "queries not scaled": ("__init__", "*= config.head_dim**-0.5", "*= 1"),
    "concentration dropped": ("__init__", "self.rope.concentration", "1.0"),
    "turned backwards": ("forward", "sin = np.sin", "sin = -np.sin"),
    "halves not swapped": (
        "rotate",
        "multiply(x[..., half:]",
        "multiply(x[..., :half]",
    ),
    "sink dropped from the sum": ("attend", "np.exp(sinks - top)", "0"),
    "last norm's weight dropped": ("forward", "self.last_norm", "1"),
    "biases dropped": ("linear", "out += dense.bias", "pass"),
    "the worst experts": ("choose", "argsort(-logits", "argsort(logits"),
    "shares not normed": (
        "choose",
        "shares /= shares.sum(axis=1, keepdims=True)",
        "pass",
    ),
    "gate and up swapped": (
        "swiglu",
        "gate_up[:, 0::2], np.maximum(gate_up[:, 1::2]",
        "gate_up[:, 1::2], np.maximum(gate_up[:, 0::2]",
    ),
    "clamp from above dropped": (
        "swiglu",
        "np.minimum(gate_up, np.float32(limit))",
        "gate_up.copy()",
    ),
    "clamp from below dropped": ("swiglu", "np.float32(-limit)", "-np.inf"),
    "+1 dropped": ("swiglu", "up += 1", "pass"),
    "sigmoid without alpha": ("swiglu", "np.float32(-alpha)", "-1"),
    "experts' biases dropped": ("multiply", "out += bank.biases", "bank.biases"),
    "biases of another expert": ("multiply", "counts, axis", "counts[::-1], axis"),
    "rows of another expert": (
        "mixture",
        "minlength=logits.shape[1]).tolist()",
        "minlength=logits.shape[1]).tolist()[::-1]",
    ),
    "rows of another token": (
        "mixture",
        "h[order // chosen.shape[1]]",
        "h[order % len(h)]",
    ),
    "results in another order": ("mixture", "out[order] =", "out[:] ="),
}


@pytest.fixture(scope="module")
def worst_error(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("mistakes") / "model"
    oracle = save_mxfp4(path, oracle_config(), seed=6)
    ids = prompt(oracle.config, 60)
    expected = their_logits(oracle, ids)

    def measure(others: int) -> float:
        ours = load_model(path, device="cpu", backend=CPU)
        cache = SlotCache(ours.config, max_num_seqs=others + 1, max_model_len=60)
        got = decode_among(ours, ids, cache, others)
        return relative_errors(got, expected).max().item()

    yield measure


@torch.inference_mode()
def decode_among(
    model: Transformer, ids: list[int], cache: SlotCache, others: int
) -> Tensor:
    """The logits of a text that is decoded with some others."""
    # Ours is the first, which a later one may overwrite.
    shifts, vocab = range(others + 1), model.config.vocab_size
    texts = [[(token + shift) % vocab for token in ids] for shift in shifts]
    logits = []
    for sequence, text in enumerate(texts):
        cache.manager.add(sequence, text)
    for position, tokens in enumerate(zip(*texts, strict=True)):
        for sequence in range(len(texts)):
            cache.manager.grow(sequence, position + 1)
        step = cache.step(
            [Chunk(sequence, position, 1) for sequence in range(len(texts))]
        )
        positions = torch.full([len(texts)], position)
        hidden = model(torch.tensor(tokens), positions, step)
        logits.append(model.lm_head(hidden[:1]))
        for sequence, text in enumerate(texts):
            cache.manager.commit(sequence, text, position + 1)
    return torch.cat(logits)


@pytest.mark.parametrize("others", [0, 1, 4])
def test_passes_without_a_mistake(
    worst_error: Callable[[int], float], others: int
) -> None:
    assert worst_error(others) < FP32_TOLERANCE


@pytest.mark.parametrize("small", [0, 10**9], ids=["PyTorch", "NumPy"])
def test_passes_with_products_of_either_library(
    worst_error: Callable[[int], float], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "SMALL", small)
    assert worst_error(4) < FP32_TOLERANCE


def apply_mistake(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str
) -> None:
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
    source = source.replace(old, new).replace("super()", "super(CPUTransformer, self)")
    namespace = dict(vars(cpu))
    exec(source, namespace)
    monkeypatch.setattr(owner, name, namespace[name])


@pytest.mark.parametrize("name", MISTAKES)
def test_fails_with_a_mistake(
    name: str, worst_error: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = CPUTransformer if MISTAKES[name][0] in vars(CPUTransformer) else cpu
    apply_mistake(monkeypatch, owner, *MISTAKES[name])
    # NaN counts as caught; anything else has to be far from passing.
    assert not worst_error(1) < 10 * FP32_TOLERANCE
