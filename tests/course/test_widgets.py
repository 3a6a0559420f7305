"""The widgets: what they are given is the engine's, what they compute is Python's.

Their JavaScript runs in Node or in a browser. Pages are opened in a browser and moved
by keys, where this machine has Chromium.
"""

import ast
import json
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch
from bookbuild import page
from course import widgets
from course.widgets import live
from course.widgets.data import batch_routers, merge_table, rope_dial, weight_block

from simplellm.api.llm import LLM
from simplellm.checkpoint.mxfp4 import PAIRS, VALUES, quantize
from simplellm.model.rope import rotate
from simplellm.model.rope_cache import rotations
from simplellm.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
RECORD = ROOT / "figures/09-live.json"
ALT = "A thing that moves. It has a <slider> & says more."
NAMES = ("merge", "scale", "experts", "rope", "engine")
TEXTS = (
    "Answer the tokenizer: What is 47 + 85?",
    "Letting requests join and leave the running batch at every step.",
    "  two  spaces\nand a line,\ttabs \r\n",
    "naïve 名前はまだ無い 🙂 \U0001f468\u200d\U0001f469",
    "xxxxxxxxxxxx === 1234567",
)


# --- Where JavaScript runs ----------------------------------------------------------


@pytest.fixture(scope="module")
def javascript(request: pytest.FixtureRequest) -> Any:
    """A function: the value of an expression with the names of modules."""
    node = shutil.which("node")
    screen = None if node else request.getfixturevalue("chromium")

    def evaluate(expression: str, *names: str) -> Any:
        code = re.sub("^export default .*$", "", widgets.source(*names), flags=re.M)
        wrapped = f"(() => {{ {code}\nreturn {expression}; }})()"
        if screen is not None:
            return screen.evaluate(wrapped)
        script = f"console.log(JSON.stringify({wrapped}))"
        assert node is not None
        done = subprocess.run([node, "-"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return evaluate


# --- What the widgets are given -----------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def pattern() -> str:
    path = ROOT / "simplellm/embedded/tokenizer.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    return config["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]


@pytest.fixture(scope="module")
def given(llm: LLM, pattern: str) -> dict[str, Any]:
    """The data of every widget, much as the chapters make them."""
    generator = torch.Generator().manual_seed(0)
    routing = json.loads((ROOT / "figures/04-routing.json").read_text("utf-8"))
    ranks = {token: id for id, token in llm.tokenizer.tokens.items()}
    large = replace(llm.config, num_local_experts=128)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {
        "merge": [merge_table("the model", ranks, pattern, "Answer the tokenizer")],
        "scale": weight_block(torch.randn(32, generator=generator) / 8),
        "experts": batch_routers(
            routing["expert_ids"], llm.config, large, lambda config: 70_000
        ),
        "rope": rope_dial(llm.config),
        "engine": {"choices": live.CHOICES, "record": record},
    }


def test_merges_end_in_the_tokens_of_the_tokenizer(llm, given, javascript) -> None:
    table, texts = json.dumps(given["merge"][0]), json.dumps(TEXTS)
    found = javascript(f"{texts}.map((text) => encode(text, {table}))", "merge")
    assert found == [llm.tokenizer.encode(text) for text in TEXTS]


def test_each_merge_takes_the_pair_with_the_lowest_id(given, javascript) -> None:
    table = given["merge"][0]
    ids = {token: id for id, token in enumerate(table["tokens"])}
    pieces = javascript(f"walk('the tokenizer', {json.dumps(table)})", "merge")
    for states in pieces:
        for before, state in pairwise(states):
            parts, at = before["parts"], before["next"]
            pairs = [a + b for a, b in pairwise(parts)]
            known = {place: ids[p] for place, p in enumerate(pairs) if p in ids}
            assert at == min(known, key=lambda place: (known[place], place))
            assert state["parts"] == [*parts[:at], pairs[at], *parts[at + 2 :]]
        assert states[-1]["next"] == -1


def test_a_tokenizer_of_one_merge(javascript) -> None:
    """Independent of the embedded one: only "ab" merges, and never across pieces."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    small = Tokenizer.from_ranks(ranks, r"\w+|\W+", {})
    table = json.dumps(merge_table("small", ranks, r"\w+|\W+", ""))
    found = javascript(f"encode('abab a b', {table})", "merge")
    assert found == [256, 256, 32, 97, 32, 98] == small.encode("abab a b")


def blocks() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(20, 32, generator=generator).bfloat16().float()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.0] * 4)[:32]
    ties[-1] = 6.5
    return torch.cat([drawn, drawn * 1e-3, ties[None]])


def test_a_block_has_the_codes_of_quantize(javascript) -> None:
    """Ties too, which go to the even code, and a minus zero."""
    weights = blocks()
    packed = quantize(weights)
    codes = torch.stack([packed.blocks & 15, packed.blocks >> 4], -1).flatten(-3)
    rows, values = json.dumps(weights.tolist()), json.dumps(VALUES[:8])
    choose = f"{rows}.map((row) => [specified(row), quantize(row, specified(row), "
    found = javascript(f"{choose}{values}).codes])", "scale")
    exponents = packed.scales[:, 0].int() - 127
    assert [exponent for exponent, _ in found] == exponents.tolist()
    assert [codes for _, codes in found] == codes.tolist()


@pytest.mark.parametrize("exponent", [-5, -2, 0, 3])
def test_any_scale_takes_the_nearest_value(javascript, exponent: int) -> None:
    weights = blocks()[0]
    grid = torch.tensor(sorted({*VALUES})) * 2.0**exponent
    nearest = (weights[:, None] - grid).abs().min(-1).values
    call = f"quantize({weights.tolist()}, {exponent}, {list(VALUES[:8])})"
    found = javascript(call, "scale")
    off = torch.tensor(found["values"]) - weights
    assert torch.allclose(off.abs(), nearest)
    assert found["error"] == pytest.approx(nearest.square().sum().item())
    assert PAIRS[found["codes"], 0].mul(2.0**exponent).tolist() == found["values"]


def test_the_experts_of_a_batch(given, javascript) -> None:
    for router in given["experts"]["routers"]:
        assert {len(set(chosen)) for chosen in router["routes"]} == {4}
        text = json.dumps(router)
        for batch in (1, 3, len(router["routes"])):
            call = f"[loads({text}, {batch}), expected({text}, {batch})]"
            found = javascript(call, "experts")
            counts = Counter(e for chosen in router["routes"][:batch] for e in chosen)
            assert found[0] == [counts[e] for e in range(router["experts"])]
            share = 1 - 4 / router["experts"]
            assert found[1] == pytest.approx(router["experts"] * (1 - share**batch))


def test_real_routes_are_those_of_the_record(given) -> None:
    recorded = json.loads((ROOT / "figures/04-routing.json").read_text("utf-8"))
    for router, layer in zip(given["experts"]["routers"][1:], (0, -1), strict=True):
        assert sorted(router["routes"]) == sorted(recorded["expert_ids"][layer])


def test_chance_comes_close_to_its_formula(given) -> None:
    """Else the routes that were drawn are not what the line beside them says."""
    drawn = given["experts"]["routers"][0]["routes"]
    rng = random.Random(1)
    for batch, formula in ((8, 28.7), (32, 81.7), (64, 111.2)):
        counts = [
            len({e for r in rng.sample(drawn, batch) for e in r}) for _ in range(40)
        ]
        assert sum(counts) / 40 == pytest.approx(formula, rel=0.03)


@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_scores_are_those_of_rotated_heads(llm, given, javascript, kind) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 64, generator=generator)
    dials = given["rope"] | {"query": query.tolist(), "key": key.tolist()}
    config = llm.config if kind == "yarn" else replace(llm.config, rope_scaling=None)
    cos, sin = rotations(config, torch.device("cpu"))
    for start, distance in ((0, 0), (0, 1), (40, 9), (7, 4096), (64, 131_000)):
        at = torch.tensor([start + distance, start])
        q, k = rotate(torch.stack([query, key])[:, None], cos[at], sin[at])[:, 0]
        given_data, turns = json.dumps(dials), json.dumps(dials[kind])
        found = javascript(f"score({given_data}, {turns}, {distance})", "rope")
        # Angles of float32 positions are off by some 1e-2 far away.
        assert found == pytest.approx((q @ k).item() / 8, abs=0.02 + 1e-6 * distance)


# --- The live engine ----------------------------------------------------------------


def states(run: dict[str, Any], javascript: Any) -> list[dict[str, Any]]:
    """The state after each step, as the widget puts it together."""
    fold = "run.steps.reduce((all, told) => [...all, after(all.at(-1), told)], "
    fold += "[after({}, run.first)])"
    return javascript(f"((run) => {fold})({json.dumps(run)})", "run")


def test_the_widget_knows_the_engines_books(llm, javascript) -> None:
    """After each step its snapshot is the engine's own."""
    engine = live.LiveEngine(llm)
    run = engine.start(4, 28)
    run["steps"], real = [], [engine.engine.snapshot()]
    while len(real) < 90:
        run["steps"].append(engine.step())
        real.append(engine.engine.snapshot())
    found = states(run, javascript)
    assert [state["snapshot"] for state in found] == json.loads(json.dumps(real))
    assert found[-1]["preemptions"] == engine.engine.scheduler.preemptions > 0


def test_a_run_ends_and_says_what_the_engine_said(llm) -> None:
    engine = live.LiveEngine(llm)
    engine.start(1, 40)
    steps = list(iter(engine.step, None))
    events = [event for told in steps for event in told["events"]]
    text = "".join(event["text"] for event in events)
    alone = llm.chat(
        [{"role": "user", "content": live.QUESTIONS[0]}],
        reasoning_effort="high",
        temperature=0,
    )
    assert text == llm.tokenizer.decode(alone.choices[0].token_ids)
    assert "cached_tokens" in events[0] and "cached_tokens" not in events[1]
    assert events[-1]["finish_reason"] == "stop"
    assert engine.step() is None


def test_the_record_is_a_run_of_this_engine(llm, javascript) -> None:
    """Its snapshots have this engine's form, and their books agree with each other."""
    assert RECORD.stat().st_size < 200_000
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    engine = live.LiveEngine(llm)
    for run in record["runs"]:
        now = engine.start(len(run["requests"]), run["num_pages"])
        assert now["requests"] == run["requests"]
        assert now["first"] == run["first"]
        known = engine.engine.snapshot()
        for state in states(run, javascript):
            snapshot = state["snapshot"]
            assert snapshot.keys() == known.keys()
            assert snapshot["pages"].keys() == known["pages"].keys()
            held = Counter(
                page
                for groups in snapshot["pages"]["tables"].values()
                for table in groups
                for page in table
                if page >= 0
            )
            references = [held[page] for page in range(run["num_pages"])]
            assert snapshot["pages"]["references"] == references
            running = {str(request["request_id"]) for request in snapshot["running"]}
            assert snapshot["pages"]["tables"].keys() == running
        ended = [
            e for told in run["steps"] for e in told["events"] if "finish_reason" in e
        ]
        assert len(ended) == len(run["requests"])
    assert [run["num_pages"] for run in record["runs"]] == record["choices"]["pages"]


def test_pages_have_as_many_owners_as_references(javascript) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    found = states(record["runs"][0], javascript)
    pages = [state["snapshot"]["pages"] for state in found[::20]]
    every = javascript(f"{json.dumps(pages)}.map(owners)", "run")
    for book, owned in zip(pages, every, strict=True):
        assert [len(page["owners"]) for page in owned] == book["references"]
        assert [n for n, page in enumerate(owned) if page["kept"]] == sorted(
            book["cached"]
        )


def test_the_kernel_answers_the_widget(llm, monkeypatch) -> None:
    shown = widgets.widget(
        "engine", {"choices": live.CHOICES}, ALT, live.LiveEngine(llm).answer
    )
    sent: list[Any] = []
    monkeypatch.setattr(shown, "send", sent.append)
    for question in ({"start": {"requests": 2, "pages": 24}}, {"step": True}):
        shown._handle_custom_msg(question, [])
    assert shown.live
    assert sent[0]["num_pages"] == 24 and len(sent[0]["requests"]) == 2
    assert sent[1]["step"]["snapshot"]["running"]


# --- Notebooks and pages ------------------------------------------------------------


def test_a_widget_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="no text alternative"):
        widgets.widget("merge", {}, " ")
    with pytest.raises(ValueError, match=r"no nosuch\.js"):
        widgets.widget("nosuch", {}, ALT)


@pytest.mark.parametrize("name", NAMES)
def test_who_cannot_show_it_gets_the_words(given, name) -> None:
    shown = widgets.widget(name, given[name], ALT)
    bundle, _ = shown._repr_mimebundle_()
    assert bundle["text/plain"] == repr(shown) == ALT
    assert "application/vnd.jupyter.widget-view+json" in bundle
    output = {"output_type": "execute_result", "data": bundle}
    made = page.make("01-x", "```python\nw\n```\n", [[output]]).markdown
    assert "<p>A thing that moves. It has a &lt;slider&gt; &amp; says more.</p>" in made
    assert bundle[widgets.PAGE].strip() in made  # with every dollar and blank line


def test_data_cannot_end_its_script() -> None:
    made = widgets.page("merge", {"text": "</script><b>"}, ALT)
    assert made.count("</script>") == 2 and "<b>" not in made


def calls(cell: str) -> Iterator[ast.Call]:
    """The calls of `widget` in a cell."""
    for node in ast.walk(ast.parse(cell)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "widget":
            yield node


def test_the_chapters_widgets_have_words_and_modules() -> None:
    for path in sorted(CHAPTERS.glob("*.md")):
        cells = [c.source for c in jupytext.read(path).cells if c.cell_type == "code"]
        for cell in (cell for cell in cells if "widget(" in cell):
            for call in calls(cell):
                name = ast.literal_eval(call.args[0])
                given = {k.arg: k.value for k in call.keywords}
                assert name in NAMES, f"{path.name}: no widget {name}"
                words = ast.literal_eval(given["alt"])
                assert len(words) > 60, f"{path.name}: {name} says only {words!r}"


# --- In a browser, by keys ----------------------------------------------------------

LINE = "document.querySelector('.line').textContent"
MOVES = {  # how many Tabs to what is moved, and the key that moves it
    "merge": (3, "ArrowRight"),
    "scale": (1, "ArrowLeft"),
    "experts": (2, "ArrowRight"),
    "rope": (1, "ArrowRight"),
    "engine": (2, "Enter"),
}


def write(folder: Path, name: str, state: Any, dark: bool = False) -> str:
    """The address of a page that holds nothing but a widget."""
    ink, paper = ("#bcbdd0", "#161923") if dark else ("#000", "#fff")
    style = f"--fg: {ink}; --bg: {paper}; background: {paper}; margin: 8px"
    head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
    path = folder / f"{name}.html"
    body = f'{head}<body style="{style}">{widgets.page(name, state, ALT)}'
    path.write_text(body, encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("name", NAMES)
def test_keys_move_it(chromium, given, tmp_path, name) -> None:
    """From a file, with nothing else to load; and the page does not hear the keys."""
    chromium.errors.clear()
    chromium.open(write(tmp_path, name, given[name]))
    chromium.wait("document.querySelector('.line').textContent")
    chromium.evaluate("heard = 0; document.addEventListener('keydown', () => heard++)")
    tabs, key = MOVES[name]
    for _ in range(tabs):
        chromium.press("Tab")
    before = chromium.evaluate(LINE), chromium.evaluate("document.body.innerHTML")
    heard = chromium.evaluate("heard")
    chromium.press(key)
    chromium.wait(f"{LINE} !== {json.dumps(before[0])}")
    after = chromium.evaluate("document.body.innerHTML")
    picture = re.compile(r'<p class="line".*?</p>')
    assert picture.sub("", after) != picture.sub("", before[1]), "only the words moved"
    assert chromium.evaluate("heard") == heard
    assert chromium.evaluate("document.querySelector('details p').textContent") == ALT
    assert chromium.errors == []


@pytest.mark.parametrize("width", [700, 390])
@pytest.mark.parametrize("name", NAMES)
def test_it_fits_a_phone_and_can_be_read_in_the_dark(
    chromium, given, tmp_path, name, width
) -> None:
    chromium.open(write(tmp_path, name, given[name], dark=True), width, dark=True)
    chromium.wait(LINE)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    color = "getComputedStyle(document.querySelector('.simplellm-widget')).color"
    assert chromium.evaluate(color) == "rgb(188, 189, 208)"
    small = (
        "[...document.querySelectorAll('button, select, input:not([type=checkbox])')]"
    )
    small += ".filter((e) => e.offsetHeight && e.offsetHeight < 24).length"
    assert chromium.evaluate(small) == 0, "too small for a finger"


def test_the_record_plays_and_pauses(chromium, given, tmp_path) -> None:
    chromium.open(write(tmp_path, "engine", given["engine"]))
    step = "Number(document.querySelector('output').textContent)"
    chromium.wait(f"{step} > 0")
    start = chromium.evaluate(step)
    chromium.press("Tab")
    chromium.press("Enter")
    chromium.wait(f"{step} >= {start + 3}")
    chromium.press("Enter")
    assert chromium.evaluate("document.activeElement.textContent") == "Start"
    stopped = chromium.evaluate(step)
    chromium.evaluate("new Promise((done) => setTimeout(done, 600))")
    assert chromium.evaluate(step) == stopped


def test_the_live_view_asks_its_kernel(chromium, llm, tmp_path) -> None:
    """The engine works here, and the view follows it there, a step for each key."""
    address = write(tmp_path, "engine", {"choices": live.CHOICES})
    path = tmp_path / "engine.html"
    text = path.read_text(encoding="utf-8")
    asked = "{ get: (key) => (key === 'live' ? true : state[key]), "
    asked += "on: (_, hear) => (window.hear = hear), send: (q) => asked.push(q) };"
    text = re.sub(r"\{ get: \(key\) => state\[key\].*;", asked, text)
    path.write_text(text.replace("<body", "<script>asked = []</script><body"), "utf-8")
    chromium.errors.clear()
    chromium.open(address)
    engine = live.LiveEngine(llm)

    def answer() -> Any:
        chromium.wait("asked.length")
        question = chromium.evaluate("asked.shift()")
        chromium.evaluate(f"hear({json.dumps(engine.answer(question))})")
        return question

    assert answer()["start"] == {"requests": 3, "pages": 48}
    chromium.press("Tab")
    chromium.press("Tab")
    for step in (1, 2):
        chromium.press("Enter")
        assert answer() == {"step": True}
        chromium.wait(f"{LINE}.startsWith('Step {step}.')")
    held = "document.querySelectorAll('.leaf[title*=\"held by A\"]').length"
    assert chromium.evaluate(held) == sum(
        engine.engine.snapshot()["pages"]["references"]
    )
    assert chromium.errors == []
