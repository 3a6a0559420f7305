"""Every request gets the tokens that it gets alone, computed anew for each of them.

Whatever surrounds it: other requests, page size, chunking, hits, evictions,
preemptions, aborts of others, one sample or several, steps that overlap or not. A case
is a seed; to see one that fails again: `run_case(model, alone, seed)`.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from checkpoints import TINY, write_checkpoint
from course.integrity import check_integrity
from heads import write_head
from recompute import Recompute
from stepping import drain, make_engine
from test_runner import Tape

from simplellm import LLM, EngineConfig, SamplingParams, load_model
from simplellm.base.request import Event, Request
from simplellm.engine import graphs
from simplellm.engine.build_speculation import head_page_bytes
from simplellm.engine.graphs import QUERIES, CaptureShape
from simplellm.engine.page_manager import PageManager
from simplellm.engine.speculator import DraftState, Speculator
from simplellm.model.memory import page_bytes, sliding_groups
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN
from simplellm.model.ops_numpy import NUMPY
from simplellm.text.harmony import Message, render

sys.path.append(str(Path(__file__).parents[1] / "tools/embedded"))
from problems import evaluation_set

CASES = 25
VOCAB = TINY.vocab_size
WINDOW = TINY.sliding_window
LONGEST = 60  # tokens of a request in the random cases, prompt and output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), quantized=False)


# The operations matter less to what else is tried with schedules than to schedules.
FASTER = pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.exhaustive),
        pytest.param(NUMPY, id="NumPy"),
    ],
    indirect=True,
)


@pytest.fixture(scope="module", params=[PLAIN, NUMPY], ids=["plain", "NumPy"])
def tiny(request: pytest.FixtureRequest, folder: Path) -> Model:
    return load_model(folder, device="cpu", ops=request.param)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Recompute:
    """The tokens of a request alone: the same for all operations."""
    return Recompute(load_model(folder, device="cpu", ops=NUMPY))


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
    kind = chance.randrange(9)
    if kind < 5:
        return SamplingParams(temperature=0.0, max_tokens=12)
    if kind == 5:
        return SamplingParams(temperature=0.0, repetition_penalty=1.3, **options)
    if kind == 6:
        return SamplingParams(
            temperature=0.0, frequency_penalty=0.7, logprobs=1, **options
        )
    filters = {"top_p": 0.9} if kind == 7 else {"top_k": 20, "presence_penalty": 1.0}
    return SamplingParams(
        temperature=1.0, seed=chance.randrange(2), **filters, **options
    )


def make_config(chance: random.Random, sliding_groups: int = 1) -> EngineConfig:
    """Now and then a pool so small that two or three requests fill it."""
    max_num_seqs = chance.choice([1, 2, 3, 5, 8])
    chunk = chance.choice([None, None, 1, 3, 7, 16, 30])
    budget = LONGEST if chunk is None else chance.choice([8, 11, 24, 64, 400])
    budget = max(budget, max_num_seqs)
    page_size = chance.choice([1, 2, 3, 4, 7, 8, 16, 64])
    # The fewest pages with which the longest request runs, and a few more.
    for num_pages in range(2, 8 * LONGEST):
        most = min(chunk or budget, budget)
        if num_pages <= sliding_groups:
            continue
        manager = PageManager(
            num_pages,
            page_size,
            window=WINDOW,
            sliding_groups=sliding_groups,
            max_chunk=most,
        )
        if manager.max_tokens >= LONGEST:
            break
    return EngineConfig(
        page_size=page_size,
        num_pages=num_pages + chance.choice([0, 0, 0, 1, 4, 4 * num_pages]),
        enable_prefix_caching=chance.random() < 0.8,
        continuous=chance.random() < 0.9,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefill_chunk=chunk or budget,
        enable_chunked_prefill=chunk is not None,
        max_model_len=LONGEST,
        overtakes=chance.choice([0, 3, 100]),
    )


@dataclass(eq=False)
class Client:
    """One sample of a request, and what came of it."""

    request: Request
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    submitted: bool = False
    aborted: bool = False

    def take(self, event: Event) -> None:
        assert not self.ends, "an event after the last one"
        assert event.error is None
        self.tokens += event.tokens
        if event.finish_reason is not None:
            self.ends.append(event.finish_reason)


def make_family(chance: random.Random, numbers: Iterator[int]) -> list[Client]:
    """The samples of one request; they draw with seeds one after the other."""
    prompt, params = chance.choice(PROMPTS), make_params(chance)
    priority = chance.choice([0, 0, 0, -1, 2])
    family = []
    for sample in range(chance.choice([1, 1, 1, 2, 3])):
        seed = None if params.seed is None else params.seed + sample
        request = Request(
            tokens=list(prompt),
            max_tokens=params.max_tokens,
            params=replace(params, seed=seed),
            stop_ids=frozenset(params.stop_token_ids),
            priority=priority,
            bad_sequences=[(-1, -1)] if chance.random() < 0.1 else (),
            request_id=next(numbers),
        )
        family.append(Client(request, prompt))
    family[0].request.siblings = [client.request for client in family[1:]]
    return family


class Prophet(Speculator):
    """It knows what a request gets, and says something else now and then."""

    def __init__(self, alone: Recompute, chance: random.Random) -> None:
        super().__init__(chance.choice([1, 2, 5]))
        self.alone, self.chance = alone, chance

    def _update(self, request: Request, tokens: Sequence[int]) -> DraftState:
        state = self.draft_states.setdefault(request, DraftState(self.drafter()))
        if state.length == len(tokens):
            return state
        prompt = tokens[: request.num_prompt]
        params = replace(request.params, seed=request.seed)
        expected, _ = self.alone(tuple(prompt), params)
        drafts = expected[len(tokens) - len(prompt) :][: self.most]
        # There may be more of them than it gets.
        drafts += [3, self.chance.randrange(VOCAB)][: self.most - len(drafts)]
        for index in range(len(drafts)):
            if self.chance.random() < 0.2:
                drafts[index] = self.chance.randrange(VOCAB)
        state.length = len(tokens)
        state.drafts = drafts if self.chance.random() < 0.8 else []
        return state


def guess_with(
    proposer: Any, scheduler: Any, prophet: Prophet, row_of: Callable[[], Any]
) -> None:
    """Have a head's drafts be right now and then: it drafts, and is corrected.

    ``row_of`` says which requests it drafts for, and in which rows.
    """
    head, draft, passes = proposer.head, proposer._draft, itertools.count()
    likeliest = head.draft
    # Ranks draft on threads: from one generator they would draw in no fixed order.
    chance = random.Random(prophet.chance.random())

    def begin(count: int, number: int) -> None:
        nonlocal passes
        passes = itertools.count()
        draft(count, number)

    def corrected(normed: Any) -> Any:
        tokens = likeliest(normed)
        # The first draft comes after the token behind the one that was read last.
        behind = next(passes) + 2
        for number, row in row_of().items():
            request = scheduler.requests.get(number)
            place = int(proposer.positions[row]) + behind
            if request is None or chance.random() < 0.15:
                continue
            prompt = tuple(request.tokens[: request.num_prompt])
            params = replace(request.params, seed=request.seed)
            text = [*prompt, *prophet.alone(prompt, params)[0]]
            if place < len(text):
                tokens[row] = text[place]
        return tokens

    proposer._draft = begin
    vars(head)["draft"] = corrected


def capture_steps(runner: Any, drafts: bool = False) -> None:
    """Have a runner record steps of some sizes, all of one width."""
    runner._pages = lambda scheduled: runner.table_width
    sizes = range(1, len(runner.sampled_tokens) + 1, 2)
    verifying = [CaptureShape(n, n, queries=QUERIES) for n in sizes[1:40]]
    runner.capture(sizes, (4, 8, 24, 64), verifying if drafts else ())


def run_case(
    model: Model,
    alone: Recompute,
    seed: int,
    *,
    captured: bool = False,
    drafts: bool = False,
    draft_model: str = "",
    head: str = "",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    make: Callable[..., Any] = make_engine,
    offloading: bool = False,
    guesses: Callable[[Any, Prophet], None] | None = None,
) -> Counter[str]:
    """One random schedule against the reference; what happened in it.

    Where several ranks draft with a head, ``guesses`` has their drafts be right.
    """
    chance = random.Random(seed)
    groups = sliding_groups(model.config, model.dtype.itemsize, kv_cache_dtype)
    config, prophet = make_config(chance, groups), Prophet(alone, chance)
    config = replace(config, kv_cache_dtype=kv_cache_dtype)
    if drafts:
        config = replace(config, speculative="suffix", num_speculative_tokens=5)
    if head:
        config = replace(config, speculative=head)
        config = replace(config, num_speculative_tokens=chance.choice([1, 3, 5]))
        model = replace(model)  # its operations become those that the head listens to
    if offloading:
        form = model.config, config.page_size, model.dtype.itemsize, kv_cache_dtype
        each = page_bytes(*form)
        each += head_page_bytes(config, model.config, model.dtype.itemsize)
        room = chance.choice([1, 3, 10, 40]) * each
        config = replace(config, enable_prefix_caching=True, cpu_cache_bytes=room)
    if draft_model:
        config = replace(config, speculative=draft_model)
        config = replace(config, num_speculative_tokens=chance.choice([1, 3]))
    engine = make(model, config, overlap=chance.random() < 0.5)
    if head:
        if not hasattr(engine.scheduler, "ranks"):
            own = engine.runner.proposer
            guess_with(own, engine.scheduler, prophet, lambda: own.row_of)
        elif guesses is not None:
            guesses(engine, prophet)
        prophet = engine.scheduler.speculator
    elif draft_model:
        prophet = engine.scheduler.speculator
    elif drafts:
        for one in getattr(engine.scheduler, "ranks", [engine.scheduler]):
            one.speculator = prophet
    if captured:
        capture_steps(engine.runner, drafts)
    manager = engine.scheduler.manager
    managers = getattr(manager, "managers", [manager])  # of several ranks
    numbers = itertools.count()
    families = [make_family(chance, numbers) for _ in range(chance.randrange(3, 8))]
    clients = [client for family in families for client in family]
    aborts = [client for client in clients if chance.random() < 0.08]
    seen: set[Any] = set()  # of pages: a digest that is gone was evicted
    counts: Counter[str] = Counter(overlap=engine.depth)
    while families or engine.scheduler.requests or engine.flights:
        busy = engine.scheduler.requests or engine.flights
        while families and (chance.random() < 0.2 or not busy):
            family = families.pop()
            engine.submit([family[0].request])
            for client in family:
                client.submitted = True
            busy = True
        for client in list(aborts):
            if client.submitted and chance.random() < 0.1:
                aborts.remove(client)
                client.aborted = client.request.finish_reason is None
                engine.end(client.request, "abort")
        if not (engine.scheduler.requests or engine.flights):
            continue
        engine.step()
        counts["placeholders"] += bool(head) and engine.runner.proposer.linked
        for number, one in enumerate(managers):
            check_integrity(one)
            seen.update((number, page) for page in one.page_of)
            counts["shared"] += max(one.references) > 1
    by_number = {client.request.request_id: client for client in clients}
    for event in drain(engine):
        by_number[event.request_id].take(event)
    for client in clients:
        expected, reason = alone(client.prompt, client.request.params)
        if client.aborted:
            assert client.tokens == expected[: len(client.tokens)]
            assert client.ends == ["abort"]
        else:
            assert (client.tokens, client.ends) == (expected, [reason])
        counts[client.ends[0]] += 1
    assert manager.usage == 0
    counts["preemptions"] += engine.scheduler.preemptions
    counts["hits"] += engine.meter.cached_tokens
    counts["evictions"] += len(seen) - sum(len(one.page_of) for one in managers)
    if offloading:
        counts["loaded"] = manager.loaded_tokens
    if drafts or draft_model or head:
        checked = prophet.draft_stats()
        counts["drafts"] = sum(checked["draft_tokens"].values())
        counts["right"] = sum(checked["accepted_tokens"].values())
    return counts


def run_cases(
    model: Model, alone: Recompute, seeds: range, **options: Any
) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += run_case(model, alone, seed, **options)
        except BaseException as error:
            error.add_note(f"run_case(tiny, alone, {seed})")
            raise
    return counts


@FASTER
@pytest.mark.bits
def test_any_schedule_gives_the_tokens_of_a_request_alone(
    tiny: Model, alone: Recompute
) -> None:
    counts = run_cases(tiny, alone, range(CASES))
    assert 8 <= counts["overlap"] <= 17
    assert min(counts[reason] for reason in ("stop", "length", "abort")) >= 10, counts
    assert counts["preemptions"] >= 20, counts
    assert min(counts["hits"], counts["evictions"], counts["shared"]) >= 200, counts


@FASTER
@pytest.mark.bits
def test_pages_on_the_host_change_no_token(tiny: Model, alone: Recompute) -> None:
    """They go and come back among preemptions, aborts and steps that overlap."""
    cases = range(40, 48)
    counts = run_cases(tiny, alone, cases, offloading=True)
    counts += run_cases(tiny, alone, cases, drafts=True, offloading=True)
    assert min(counts["overlap"], counts["abort"], counts["preemptions"]) >= 2, counts
    assert counts["loaded"] >= 50, counts


@FASTER
@pytest.mark.bits
def test_drafts_change_no_token(tiny: Model, alone: Recompute) -> None:
    """Right ones and wrong ones: of requests that draw, too, and that are penalized."""
    counts = run_cases(tiny, alone, range(CASES), drafts=True)
    assert 8 <= counts["overlap"] <= 17
    assert min(counts[reason] for reason in ("stop", "length", "abort")) >= 10, counts
    assert counts["preemptions"] >= 20, counts
    assert 150 <= counts["right"] < counts["drafts"] - 150, counts


@pytest.mark.bits
def test_a_models_drafts_change_no_token(folder: Path, alone: Recompute) -> None:
    """The same model drafts, so that greedy answers are guessed and others hardly."""
    model = load_model(folder, device="cpu", ops=NUMPY)
    counts = run_cases(model, alone, range(8), draft_model=str(folder))
    assert counts["right"] > 50 and counts["drafts"] > counts["right"] + 50, counts
    assert counts["preemptions"] > 0 and counts["overlap"] > 0, counts


@FASTER
@pytest.mark.bits
def test_a_heads_drafts_change_no_token(
    tiny: Model, alone: Recompute, tmp_path: Path
) -> None:
    """Among them those of steps launched before the last drafts are known."""
    write_head(tmp_path, tiny.config)
    counts = run_cases(tiny, alone, range(CASES), head=str(tmp_path))
    assert min(counts[reason] for reason in ("stop", "length", "abort")) >= 4, counts
    assert counts["preemptions"] >= 5 and counts["placeholders"] >= 80, counts
    assert 150 <= counts["right"] < counts["drafts"] - 150, counts


def test_captured_steps_give_the_tokens_of_a_request_alone(
    folder: Path, alone: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape()
    monkeypatch.setattr(graphs, "capture_graph", tape)
    model = load_model(folder, device="cpu")
    for seed in range(12):
        run_case(model, alone, seed, captured=True, drafts=seed % 2 == 0)
    kinds = Counter((shape.chunks > 0, shape.queries) for shape in tape.replays)
    assert min(kinds[True, 1], kinds[False, 1], kinds[False, QUERIES]) >= 50, kinds


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_many_schedules_give_the_tokens_of_a_request_alone(
    tiny: Model, alone: Recompute
) -> None:
    """Seeds take turns: what a schedule does to the books no operation sees."""
    turn = int(tiny.ops is NUMPY)
    run_cases(tiny, alone, range(CASES + turn, 120, 2))
    run_cases(tiny, alone, range(120 + turn, 200, 2), drafts=True)
    run_cases(tiny, alone, range(200 + turn, 240, 2), offloading=True)


@pytest.fixture(scope="module")
def embedded() -> Recompute:
    return Recompute(load_model(device="cpu", ops=NUMPY))


def rendered(question: str, effort: str, llm: LLM) -> list[int]:
    message = Message(role="user", content=question)
    return render([message], llm.tokenizer, reasoning_effort=effort)


def test_the_embedded_model_across_its_window(embedded: Recompute) -> None:
    """Prompts and outputs cross 128 tokens, in chunks, shared and preempted."""
    text = (Path(__file__).parents[1] / "chapters/glossary.md").read_text()
    config = EngineConfig(
        num_pages=40,
        max_num_seqs=4,
        max_num_batched_tokens=100,
        prefill_chunk=60,
        max_model_len=200,
    )
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    with LLM(device="cpu", config=config) as llm:
        tokens = llm.tokenizer.encode(text)[:160]
        prompts = [tokens[:length] for length in (122, 126, 127, 128, 129, 160)]
        outputs = llm.generate(prompts, params).result()
        stats = llm.stats()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (output.token_ids, "length") == embedded(prompt, params)
    assert stats.preemptions > 0 and stats.cache_hit_rate > 0


def test_the_evaluation_gets_the_same_answers(embedded: Recompute) -> None:
    """Held-out problems of several skills, from many threads, whole and streamed."""
    problems = evaluation_set(3)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    config = EngineConfig(max_num_seqs=5, prefill_chunk=32, num_pages=60)
    with LLM(device="cpu", config=config) as llm, ThreadPoolExecutor(5) as pool:
        prompts = [rendered(p.question, "low", llm) for p in problems]
        prompts += [rendered(p.question, "high", llm) for p in problems[:1]]
        ends = replace(params, stop_token_ids=tuple(llm.eos_token_ids))
        expected = [embedded(prompt, ends) for prompt in prompts]
        found = list(
            pool.map(lambda p: llm.generate([p], params, n=2).result(), prompts)
        )
        streams = list(pool.map(lambda p: list(llm.stream(p, params)), prompts))
    for outputs, parts, (tokens, reason) in zip(found, streams, expected, strict=True):
        for output in outputs:
            assert (output.token_ids, output.finish_reason) == (tokens, reason)
        assert [token for part in parts for token in part.token_ids] == tokens
        assert "".join(part.text for part in parts) == outputs[0].text
        assert parts[-1].finish_reason == reason


@pytest.mark.bits
@pytest.mark.parametrize("overlap", [False, True])
def test_seeded_samples_do_not_depend_on_the_batch(
    tiny: Model, alone: Recompute, overlap: bool
) -> None:
    """A seed gives the same tokens alone, among others, and as the n-th sample."""
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=2**64 - 2)
    config = EngineConfig(max_num_seqs=6, page_size=4, num_pages=60)
    engine = make_engine(tiny, config, overlap=overlap)
    clients = {}
    for number, (prompt, sample) in enumerate(
        itertools.product(PROMPTS[:12], range(2))
    ):
        request = Request(
            tokens=list(prompt),
            max_tokens=12,
            params=replace(params, seed=2**64 - 2 + sample),
            request_id=number,
        )
        clients[number] = Client(request, prompt)
    engine.submit([client.request for client in clients.values()])
    while engine.scheduler.requests or engine.flights:
        engine.step()
    for event in drain(engine):
        clients[event.request_id].take(event)
    for client in clients.values():
        expected, _ = alone(client.prompt, client.request.params)
        assert client.tokens == expected
    tokens = {tuple(client.tokens) for client in clients.values()}
    assert len(tokens) > 12  # seeds matter


def test_logprobs_are_those_of_the_logits(embedded: Recompute) -> None:
    with LLM(device="cpu") as llm:
        prompts = [rendered(f"What is {n} + 85?", "low", llm) for n in (7, 47, 470)]
        options: dict[str, Any] = {"max_tokens": 8, "logprobs": 3, "temperature": 0}
        llm.generate(prompts[0], **options).result()  # from here on, it is cached
        outputs = llm.generate(prompts, **options).result()
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = embedded.model.logits([*prompt, *output.token_ids])[
            len(prompt) - 1 : -1
        ]
        rows = logits.log_softmax(-1)
        for row, token, entry in zip(
            rows, output.token_ids, output.logprobs, strict=True
        ):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            values, ids = row.topk(3)
            assert [token for token, _ in entry.top][:1] == ids[:1].tolist()
            found = [value for _, value in entry.top]
            assert found == pytest.approx(values.tolist(), abs=1e-4)
