"""Every request gets the tokens that chapter 6's engine gives it alone.

Whatever surrounds it: other requests, any cache, page size, chunking, hits, evictions,
preemptions, aborts of others, one sample or several. A case is a seed; to see one that
fails again: `run_case(model, seed)`.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY, write_checkpoint

from simplellm.cpu import CPU
from simplellm.engine import LLM, Engine, EngineConfig, Event, Submission, Ticket
from simplellm.generate import LLM as PlainLLM
from simplellm.generate import RecomputeEngine, Request, Whole
from simplellm.harmony import Message, render
from simplellm.model import TORCH, Transformer, load_model
from simplellm.paged import PageManager
from simplellm.sampler import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "tools/embedded"))
from problems import evaluation_set

CASES = 200
VOCAB = TINY.vocab_size
WINDOW = TINY.sliding_window
LONGEST = 60  # tokens of a request in the random cases, prompt and output


@pytest.fixture(scope="module", params=[TORCH, CPU], ids=["plain", "decodes in NumPy"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Transformer:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), quantized=False)
    return load_model(folder, device="cpu", backend=request.param)


def make_prompts() -> list[tuple[int, ...]]:
    """Beginnings of two texts, some with another end: they share prefixes.

    Lengths lie around multiples of the window and of the page sizes, and at random.
    """
    chance = random.Random(0)
    stems = [[chance.randrange(VOCAB) for _ in range(44)] for _ in range(2)]
    edges = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 44]
    prompts = [stem[:length] for stem in stems for length in edges]
    for _ in range(8):
        stem = chance.choice(stems)[: chance.randrange(1, 40)]
        prompts.append(stem + [chance.randrange(VOCAB) for _ in range(3)])
    return [tuple(prompt) for prompt in prompts]


PROMPTS = make_prompts()


def make_params(chance: random.Random) -> SamplingParams:
    """Few different ones, so that many requests have the same reference."""
    options: dict[str, Any] = {"max_tokens": 12, "stop_token_ids": (3, 41, 77, 90)}
    kind = chance.randrange(8)
    if kind < 5:
        return SamplingParams(temperature=0.0, max_tokens=12)
    if kind == 5:
        return SamplingParams(temperature=0.0, repetition_penalty=1.3, **options)
    filters = {"top_p": 0.9} if kind == 6 else {"top_k": 20, "presence_penalty": 1.0}
    return SamplingParams(
        temperature=1.0, seed=chance.randrange(2), **filters, **options
    )


class Reference:
    """The tokens of a request alone in chapter 6's engine."""

    def __init__(self, model: Transformer) -> None:
        self.engine = RecomputeEngine(model)
        self.known: dict[Any, tuple[list[int], str | None]] = {}

    def __call__(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[list[int], str | None]:
        key = (tuple(prompt), params)
        if key not in self.known:
            stops = frozenset(params.stop_token_ids)
            request = Request(list(prompt), params, stops, params.max_tokens)
            while request.finish_reason is None:
                self.engine.step([request])
            self.known[key] = request.output, request.finish_reason
        return self.known[key]


@cache
def reference(model: Transformer) -> Reference:
    return Reference(model)


def make_config(model: Transformer, chance: random.Random) -> EngineConfig:
    """Any cache, and a pool so small that two or three requests fill it."""
    max_num_seqs = chance.choice([1, 2, 3, 5, 8])
    chunk_size = chance.choice([None, None, 1, 3, 7, 16, 30])
    budget = LONGEST if chunk_size is None else chance.choice([8, 11, 24, 64, 400])
    config = EngineConfig(
        cache=chance.choice(["paged", "paged", "paged", "paged", "slot", "none"]),
        page_size=chance.choice([1, 2, 3, 4, 7, 8, 16, 64]),
        share_prefixes=chance.random() < 0.8,
        continuous=chance.random() < 0.9,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        prefill_chunk=chunk_size,
        max_model_len=LONGEST,
        overtakes=chance.choice([0, 3, 100]),
    )
    if config.cache != "paged":
        return config
    # The fewest pages with which the longest request runs, and a few more.
    room = max(config.max_num_batched_tokens, chunk_size or 0)
    for num_pages in range(2, 4 * LONGEST):
        manager = PageManager(
            num_pages, config.page_size, window=WINDOW, max_chunk=chunk_size or room
        )
        if manager.max_tokens >= LONGEST:
            break
    extra = chance.choice([0, 0, 0, 1, 4, 4 * num_pages])
    return replace(config, num_pages=num_pages + extra)


@dataclass(eq=False)
class Client:
    """One sample of a request, and what came of it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    ticket: Ticket = field(init=False)
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    aborted: bool = False

    def __post_init__(self) -> None:
        request = Submission(
            list(self.prompt),
            self.params,
            frozenset(self.params.stop_token_ids),
            self.params.max_tokens,
        )
        self.ticket = Ticket(request, self.take)

    def take(self, event: Event) -> None:
        assert not self.ends, "an event after the last one"
        if event.token_id is not None:
            self.tokens.append(event.token_id)
        if event.finish_reason is not None:
            self.ends.append(event.finish_reason)


def make_family(chance: random.Random) -> list[Client]:
    """The samples of one request; they draw with seeds one after the other."""
    prompt, params = chance.choice(PROMPTS), make_params(chance)
    priority = chance.choice([0, 0, 0, -1, 2])
    family = []
    for number in range(chance.choice([1, 1, 1, 2, 3])):
        seed = None if params.seed is None else params.seed + number
        client = Client(prompt, replace(params, seed=seed))
        client.ticket.job.priority = priority
        family.append(client)
    return family


def run_case(model: Transformer, seed: int) -> Counter[str]:
    """One random schedule against the reference; what happened in it."""
    chance = random.Random(seed)
    config = make_config(model, chance)
    engine = Engine(model, config)
    manager = engine.scheduler.manager
    families = [make_family(chance) for _ in range(chance.randrange(3, 8))]
    clients = [client for family in families for client in family]
    aborts = [client for client in clients if chance.random() < 0.08]
    seen: set[Any] = set()  # names of pages: one that is gone was evicted
    counts: Counter[str] = Counter(requests=len(clients), **{config.cache: 1})
    while families or engine.scheduler.jobs:
        while families and (chance.random() < 0.2 or not engine.scheduler.jobs):
            family = families.pop()
            engine.submit([[client.ticket for client in family]])
        for client in list(aborts):
            if client.ticket.job.number >= 0 and chance.random() < 0.1:
                aborts.remove(client)
                client.aborted = not client.ends
                engine.end(client.ticket.job, "abort")
        if not engine.scheduler.jobs:
            continue
        engine.step()
        manager.check_integrity()
        if isinstance(manager, PageManager):
            seen.update(manager.pages)
            counts["shared"] += max(manager.references) > 1
    for client in clients:
        expected, reason = reference(model)(client.prompt, client.params)
        if client.aborted:
            assert client.tokens == expected[: len(client.tokens)]
            assert client.ends == ["abort"]
        else:
            assert (client.tokens, client.ends) == (expected, [reason])
        counts[client.ends[0]] += 1
    assert manager.usage == 0
    assert not engine.tickets
    counts["preemptions"] += engine.scheduler.preemptions
    counts["hits"] += engine.meter.cached_tokens
    if isinstance(manager, PageManager):
        counts["evictions"] += len(seen) - len(manager.pages)
    return counts


def test_any_schedule_gives_the_tokens_of_a_request_alone(tiny: Transformer) -> None:
    counts: Counter[str] = Counter()
    for seed in range(CASES):
        try:
            counts += run_case(tiny, seed)
        except BaseException as error:
            error.add_note(f"run_case(tiny, {seed})")
            raise
    assert min(counts[kind] for kind in ("none", "slot", "paged")) >= 20, counts
    assert min(counts[reason] for reason in ("stop", "length", "abort")) >= 20, counts
    assert counts["preemptions"] >= 80, counts
    assert min(counts["hits"], counts["evictions"], counts["shared"]) >= 1000, counts


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainLLM]:
    with PlainLLM(device="cpu") as llm:
        yield llm


def rendered(question: str, effort: str, llm: PlainLLM) -> list[int]:
    message = Message(role="user", content=question)
    return render([message], llm.tokenizer, reasoning_effort=effort)


@pytest.mark.parametrize("kind", ["none", "slot", "paged"])
def test_the_embedded_model_across_its_window(plain: PlainLLM, kind: Any) -> None:
    """Prompts and outputs cross 128 tokens, in chunks; with pages, preempted."""
    text = (Path(__file__).parents[1] / "chapters/glossary.md").read_text()
    tokens = plain.tokenizer.encode(text)[:160]
    prompts = [tokens[:length] for length in (122, 126, 127, 128, 129, 160)]
    config = EngineConfig(
        cache=kind,
        num_pages=None if kind != "paged" else 40,
        max_num_seqs=4,
        max_num_batched_tokens=100,
        prefill_chunk=60,
        max_model_len=200,
    )
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True}
    expected = answers(plain)(prompts, options)
    with LLM(device="cpu", config=config) as llm:
        outputs = llm.generate(prompts, **options).result()
        stats = llm.stats()
    assert [output.token_ids for output in outputs] == expected
    assert (stats.preemptions > 0, stats.cache_hit_rate > 0) == (kind == "paged",) * 2


@cache
def answers(plain: PlainLLM) -> Any:
    """Each prompt alone in the plain engine; every prompt once."""
    known: dict[Any, list[int]] = {}

    def ask(prompts: Sequence[Sequence[int]], options: dict[str, Any]) -> Any:
        for prompt in prompts:
            if (key := tuple(prompt)) not in known:
                (output,) = plain.generate([list(prompt)], **options).result()
                known[key] = output.token_ids
        return [known[tuple(prompt)] for prompt in prompts]

    return ask


def test_the_evaluation_gets_the_same_answers(plain: PlainLLM) -> None:
    """Held-out problems of several skills, from many threads, whole and streamed."""
    problems = evaluation_set(4)
    prompts = [rendered(p.question, "low", plain) for p in problems]
    prompts += [rendered(p.question, "high", plain) for p in problems[:1]]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60}
    expected = [plain.generate([prompt], **options).result()[0] for prompt in prompts]
    config = EngineConfig(max_num_seqs=5, prefill_chunk=32, num_pages=60)
    with (
        LLM(device="cpu", config=config) as llm,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        found = pool.map(
            lambda prompt: llm.generate([prompt], n=2, **options).result(), prompts
        )
        for outputs, output in zip(found, expected, strict=True):
            assert outputs == [output, output]
        parts = pool.map(lambda prompt: list(llm.stream(prompt, **options)), prompts)
        for stream, output in zip(parts, expected, strict=True):
            whole = Whole()
            for part in stream:
                whole.add(part)
            assert whole.output() == output


def test_seeded_samples_do_not_depend_on_the_batch(tiny: Transformer) -> None:
    """A seed gives the same tokens alone, among others, and as the n-th sample."""
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=2**64 - 2)
    engine = Engine(tiny, EngineConfig(max_num_seqs=6, page_size=4, num_pages=60))
    families = [
        [Client(prompt, replace(params, seed=(params.seed or 0) + number))]
        for prompt in PROMPTS[:12]
        for number in range(2)
    ]
    engine.submit([[client.ticket for client in family] for family in families])
    while engine.scheduler.jobs:
        engine.step()
    for (client,) in families:
        assert client.tokens == reference(tiny)(client.prompt, client.params)[0]
    assert len({tuple(client.tokens) for (client,) in families}) > 12  # seeds matter


def test_logprobs_are_those_of_the_plain_engine(plain: PlainLLM) -> None:
    prompts = [rendered(f"What is {n} + 85?", "low", plain) for n in (7, 47, 470)]
    options: dict[str, Any] = {"max_tokens": 8, "logprobs": 3}
    expected = plain.generate(prompts, **options).result()
    with LLM(device="cpu") as llm:
        llm.generate(prompts[0], **options).result()
        found = llm.generate(prompts, **options).result()
    for output, other in zip(found, expected, strict=True):
        assert output.token_ids == other.token_ids
        for entry, wanted in zip(output.logprobs, other.logprobs, strict=True):
            assert entry.token_id == wanted.token_id
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [token for token, _ in entry.top][:1] == [wanted.top[0][0]]
