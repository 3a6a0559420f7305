"""`Model` by what it gives: logits of whole texts, and of texts in steps.

The comparison with transformers is in test_oracle.py, mistakes in test_mutations.py.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from course.integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import prompt, relative_errors
from stepping import Stepper
from torch import Tensor

from simplellm import LLM, EngineConfig, EngineError, load_model
from simplellm.base.config import LAYER_TYPES
from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.model import memory
from simplellm.model.layers import Experts, Layer
from simplellm.model.model import CHUNK, Model
from simplellm.model.one_sequence import check_tokens
from simplellm.model.ops import PLAIN, Ops
from simplellm.model.ops_numpy import FEW, NUMPY

TOLERANCE = 1e-5  # of the largest logit, in float32
SLIDING, FULL = LAYER_TYPES
CONFIGS = {
    "alternating": replace(TINY, num_hidden_layers=4, layer_types=LAYER_TYPES * 2),
    "sliding only": replace(TINY, layer_types=(SLIDING, SLIDING), sliding_window=5),
    "full only": replace(TINY, layer_types=(FULL, FULL), sliding_window=None),
    "window of one": replace(TINY, sliding_window=1),
    "window beyond the text": replace(TINY, sliding_window=1000),
    "one kv head": replace(TINY, num_key_value_heads=1),
    "no groups": replace(TINY, num_key_value_heads=6),
    "one expert": replace(TINY, num_experts_per_tok=1),
    "all experts": replace(TINY, num_experts_per_tok=5),
    "without YaRN": replace(TINY, rope_scaling=None),
    "tied": replace(TINY, tie_word_embeddings=True),
}
TABLES = {"plain": PLAIN, "NumPy": NUMPY}


def assert_same(got: Tensor, expected: Tensor) -> None:
    error = (got - expected).abs().max().item()
    assert error <= TOLERANCE * max(1.0, expected.abs().max().item())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Model]:
    """A small model by the names of its config and of its table of operations."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[Any, Model] = {}

    def model(name: str, table: str) -> Model:
        path = folder / name.replace(" ", "-")
        if not path.exists():
            quantized = len(name) % 2 == 0  # some packed, some not
            write_checkpoint(path, CONFIGS[name], quantized=quantized)
        if (name, table) not in known:
            ops = TABLES[table]
            known[name, table] = load_model(path, device="cpu", ops=ops)
        return known[name, table]

    return model


# Steps give what whole texts give


@given(
    data=st.data(),
    name=st.sampled_from(sorted(CONFIGS)),
    table=st.sampled_from(sorted(TABLES)),
    page_size=st.sampled_from([1, 4, 7]),
)
@settings(max_examples=20)
def test_any_schedule_gives_the_recomputed_logits(
    models: Any, data: st.DataObject, name: str, table: str, page_size: int
) -> None:
    check_schedule(models, data, name, table, page_size)


@pytest.mark.exhaustive
@given(
    data=st.data(),
    name=st.sampled_from(sorted(CONFIGS)),
    table=st.sampled_from(sorted(TABLES)),
    page_size=st.integers(1, 70),
)
@settings(max_examples=80)
def test_many_schedules_give_the_recomputed_logits(
    models: Any, data: st.DataObject, name: str, table: str, page_size: int
) -> None:
    check_schedule(models, data, name, table, page_size)


def check_schedule(
    models: Any, data: st.DataObject, name: str, table: str, page_size: int
) -> None:
    """Sequences take chunks of any length side by side; all memory begins as NaN."""
    stepper = Stepper(models(name, table), page_size=page_size)
    stepper.pool.memory.fill_(torch.nan)
    plain = models(name, "plain")
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    seed = data.draw(st.integers(0, 2**16))
    texts = {100 + i: prompt(TINY, n, seed + i) for i, n in enumerate(lengths)}
    expected = {number: plain.logits(text) for number, text in texts.items()}
    left = {number: len(text) for number, text in texts.items()}
    for number, text in texts.items():
        stepper.add(number, text)
    while left:
        chosen = data.draw(st.permutations(sorted(left)))
        step = {
            number: data.draw(st.one_of(st.just(1), st.integers(1, left[number])))
            for number in chosen[: data.draw(st.integers(1, len(chosen)))]
        }
        for (number, length), found in zip(
            step.items(), stepper.step(step), strict=True
        ):
            left[number] -= length
            assert_same(found, expected[number][-1 - left[number]])
            if left[number] == 0:
                stepper.remove(number)
                del left[number]
        check_integrity(stepper.manager)
    assert stepper.manager.usage == 0


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", CONFIGS)
def test_decodes_give_the_recomputed_logits(models: Any, name: str, table: str) -> None:
    """Token by token; what one step gives stays when the next one comes."""
    ids = prompt(CONFIGS[name], 25)
    expected = models(name, "plain").logits(ids)
    assert_same(Stepper(models(name, table)).forward(3, ids), expected)
    assert_same(models(name, table).logits(ids), expected)


@pytest.mark.parametrize("table", TABLES)
def test_decodes_of_any_lengths_together(models: Any, table: str) -> None:
    model = models("alternating", table)
    texts = [prompt(TINY, length, length) for length in (3, 290, 70, 40)]
    stepper = Stepper(model)
    for number, text in enumerate(texts):
        stepper.add(number, text)
        stepper.step({number: len(text) - 1})
    found = stepper.step(dict.fromkeys(range(4), 1))
    for row, text in zip(found, texts, strict=True):
        assert_same(row, models("alternating", "plain").logits(text)[-1])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["alternating", "window of one"])
def test_a_fork_goes_its_own_way(models: Any, name: str, table: str, seed: int) -> None:
    """Two texts with one beginning, in steps together and alone."""
    chance = random.Random(seed)
    stem = prompt(TINY, 6)
    texts = {n: stem + prompt(TINY, 34, n) for n in (1, 2)}
    stepper = Stepper(models(name, table), enable_caching=True)
    stepper.add(1, texts[1])
    stepper.step({1: 6})
    stepper.fork(1, 2, texts[2])
    expected = {n: models(name, "plain").logits(text) for n, text in texts.items()}
    while left := [n for n, r in stepper.requests.items() if r.missing]:
        chosen = chance.sample(left, chance.randint(1, len(left)))
        length = chance.choice([1, 1, 1, 1, 3])
        step = {n: min(length, stepper.requests[n].missing) for n in chosen}
        for n, row in zip(step, stepper.step(step), strict=True):
            assert_same(row, expected[n][stepper.requests[n].num_computed_tokens - 1])
        check_integrity(stepper.manager)


@pytest.mark.parametrize("table", TABLES)
def test_a_step_can_be_computed_again(models: Any, table: str) -> None:
    """Also after another token stood in its place: what was written is overwritten."""
    ids = prompt(TINY, 20)
    stepper = Stepper(models("alternating", table))
    stepper.add(0, ids)
    found = []
    for position in range(len(ids)):
        request = stepper.requests[0]
        request.tokens[position] = 3
        stepper.start({0: 1})
        request.tokens[position] = ids[position]
        found.append(stepper.step({0: 1})[0])
    assert_same(torch.stack(found), models("alternating", "plain").logits(ids))


@pytest.mark.parametrize("chunk", [1, 127, 129])
def test_the_embedded_model_across_its_window(chunk: int) -> None:
    """200 tokens at a window of 128, prefilled in chunks of one length."""
    model = load_model(device="cpu", ops=NUMPY)
    text = prompt(model.config, 200, chunk)
    expected = model.logits(text)
    stepper = Stepper(model, page_size=16)
    stepper.add(7, text)
    while missing := stepper.requests[7].missing:
        found = stepper.step({7: min(chunk, missing)})
        assert_same(found[0], expected[stepper.requests[7].num_computed_tokens - 1])


# Model.logits


@pytest.mark.parametrize("count", [1, 63, 64, 65, FEW + 1, 130])
def test_every_table_gives_the_same_logits(models: Any, count: int) -> None:
    ids = prompt(TINY, count)
    plain, numpy = (models("alternating", table).logits(ids) for table in TABLES)
    assert plain.shape == numpy.shape == (count, TINY.vocab_size)
    assert plain.dtype == numpy.dtype == torch.float32
    assert_same(numpy, plain)


@pytest.mark.parametrize("table", TABLES)
def test_logits_of_more_than_a_chunk(
    models: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks see what came before them: of one size, they give what another gives."""
    model, ids = models("alternating", table), prompt(TINY, CHUNK + 70)
    whole = model.logits(ids)
    monkeypatch.setattr("simplellm.model.model.CHUNK", 600)
    assert_same(model.logits(ids), whole)
    assert_same(model.logits(ids[:100]), whole[:100])


def test_the_logits_of_a_running_llm() -> None:
    """They need neither the engine's thread nor its pages."""
    config = EngineConfig(num_pages=40, max_num_seqs=4)
    with LLM(device="cpu", config=config) as llm:
        plain = load_model(device="cpu")
        future = llm.generate([5], max_tokens=99, ignore_eos=True, temperature=0)
        ids = prompt(llm.config, 700)  # more than the engine has room for
        assert_same(llm.model.logits(ids), plain.logits(ids))
        assert len(future.result()[0].token_ids) == 99
        model = llm.model
        llm.close()  # lets go of the model, which whoever holds it can go on using
        assert_same(model.logits(ids[:9]), plain.logits(ids[:9]))
        with pytest.raises(EngineError, match="this LLM is closed"):
            _ = llm.model


def test_too_little_memory_is_told_before_anything_is_computed(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("alternating", "plain")
    broken = replace(model, ops=replace(PLAIN, embed=None))
    monkeypatch.setattr(memory, "free_bytes", lambda device: (10**5, 10**9))
    with pytest.raises(MemoryError, match="the logits of 2000 tokens take"):
        broken.logits(prompt(TINY, 2000))


def test_a_token_cannot_see_the_future(models: Any) -> None:
    model, tokens = models("alternating", "plain"), torch.tensor(prompt(TINY, 30))
    changed = tokens.clone()
    changed[20:] = (changed[20:] + 1) % 97
    before, after = model.logits(tokens), model.logits(changed)
    assert relative_errors(after[:20], before[:20]).max() < 1e-6
    assert relative_errors(after[20:], before[20:]).min() > 1e-2


def test_threads_share_a_model(models: Any) -> None:
    model, texts = models("alternating", "NumPy"), [prompt(TINY, 40, n) for n in (1, 2)]
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        found[number] = Stepper(model).forward(0, texts[number])

    threads = [threading.Thread(target=work, args=[n]) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, ids in enumerate(texts):
        assert_same(found[number], models("alternating", "plain").logits(ids))


def test_float64_tells_that_float32_is_exact_enough(tmp_path: Path) -> None:
    folder, ids = write_checkpoint(tmp_path / "model"), prompt(TINY, 60)
    exact = load_model(folder, dtype=torch.float64, device="cpu").logits(ids)
    found = load_model(folder, device="cpu").logits(ids)
    assert relative_errors(found, exact).max() < 1e-4


# What it is made of


def test_a_table_replaces_operations(models: Any) -> None:
    calls: list[str] = []

    def counting_norm(*args: Any) -> Any:
        calls.append("norm")
        return PLAIN.add_norm(*args)

    def prepare(layer: Layer) -> Layer:
        calls.append("prepare")
        assert isinstance(layer.mlp, Experts)
        return replace(layer, mlp=replace(layer.mlp, limit=0.0))

    ops = Ops("counting", add_norm=counting_norm, prepare=prepare)
    counted = load_model(device="cpu", ops=ops)
    layers = counted.config.num_hidden_layers
    assert calls == ["prepare"] * layers
    logits = counted.logits([1, 2, 3])
    assert calls.count("norm") == 2 * layers + 1
    plain = load_model(device="cpu")
    assert not torch.allclose(logits, plain.logits([1, 2, 3]))
    assert torch.equal(replace(counted, ops=PLAIN).logits([1, 2, 3]), logits)


def test_experts_stay_packed_unless_a_table_unpacks_them() -> None:
    plain, unpacked = (load_model(device="cpu", ops=ops) for ops in (PLAIN, NUMPY))
    for layer, other in zip(plain.layers, unpacked.layers, strict=True):
        for name in ("gate_up", "down"):
            weight, numbers = getattr(layer.mlp, name), getattr(other.mlp, name)
            assert isinstance(weight, MXFP4) and isinstance(numbers, Tensor)
            assert numbers.equal(weight.dequantize(torch.float32))


def test_extreme_gates_overflow_to_nothing(tmp_path: Path, recwarn: Any) -> None:
    """Without a warning: exp() of the gates' opposites is infinite."""
    folder, ids = write_checkpoint(tmp_path / "model"), prompt(TINY, 12)

    def extreme(layer: Layer) -> Layer:
        assert isinstance(layer.mlp, Experts) and layer.mlp.gate_up_bias is not None
        bias = layer.mlp.gate_up_bias.clone()
        bias[:, 0::4] = -1e4  # every second gate
        bias[:, 1::4] = 1e4
        return replace(layer, mlp=replace(layer.mlp, gate_up_bias=bias))

    plain = load_model(folder, device="cpu", ops=replace(PLAIN, prepare=extreme))
    both = replace(NUMPY, prepare=lambda layer: NUMPY.prepare(extreme(layer)))
    recwarn.clear()
    found = Stepper(load_model(folder, device="cpu", ops=both)).forward(0, ids)
    assert not recwarn.list
    assert_same(found, plain.logits(ids))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "expected [T], T from 1 to"),
        ([[1, 2]], "expected [T], T from 1 to"),
        ([1.5], "expected integers"),
        ([True], "expected integers"),
        ([-1, 4], "token_ids' range is [-1, 4]; expected 0 to"),
        ([10**6], "token_ids' range is"),
    ],
)
def test_bad_tokens_are_named(models: Any, tokens: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        models("alternating", "plain").logits(tokens)
    assert message in str(error.value)


def test_too_many_tokens_are_named() -> None:
    config = replace(MODELS["gpt-oss-20b"], max_position_embeddings=8)
    wanted = r"shape is \[9\]; expected \[T\], T from 1 to 8"
    with pytest.raises(ValueError, match=wanted):
        check_tokens(torch.zeros(9, dtype=torch.int64), config)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_logits() -> None:
    model = load_model(device="cuda", dtype=torch.float32)
    assert load_model(device="cuda").dtype == torch.bfloat16
    ids = prompt(model.config, 200)
    expected = load_model(device="cpu").logits(ids)
    assert relative_errors(model.logits(ids).cpu(), expected).max() < 1e-4
