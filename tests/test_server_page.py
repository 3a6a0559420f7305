"""The page at /: its files, and what it does in a browser, where this machine has one.

The model says what a test tells it to, above all what would be HTML.
"""

import gzip
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from models import HELLO, SMALL, saying, until
from serving import Served, idle, serving, slow

from simplellm import LLM
from simplellm.api.input_processor import InputProcessor
from simplellm.apps.serving import EMBEDDED_NAME
from simplellm.server.http.live_view import EVERY
from simplellm.server.page import FOLDER

FILES = sorted(
    path for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file()
)
NAMES = [path.name for path in FILES]
PAGES = 240  # long answers have room
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
CONFIG = replace(SMALL, num_pages=PAGES)
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'"
EVIL += "</script>&lt;b&gt; **x**"
ANSWER = "<|channel|>analysis<|message|>Hm, {0}<|end|><|start|>assistant"
ANSWER += "<|channel|>final<|message|>So {0}<|return|>"
CALL = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
CALL += "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{0}<|call|>"
ENDLESS = "<|channel|>analysis<|message|>" + "Hm, and so on. " * 300


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with LLM(folder, CONFIG) as llm, serving(llm) as found:
        yield found


# --- The files ----------------------------------------------------------------------


def address(path: Path) -> str:
    return "/" if path.name == "index.html" else f"/page/{path.name}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_is_served_as_what_it_is(served: Served, path: Path) -> None:
    answer = served.client.get(address(path))
    assert answer.status_code == 200 and answer.content == path.read_bytes()
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
    assert answer.headers["content-type"] == f"{kinds[path.suffix]}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    rules = dict(
        rule.split(" ", 1)
        for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert rules == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_a_compressed_file_is_sent_as_one_or_unpacked(served: Served) -> None:
    for name in ("swagger-ui-bundle.js", "swagger-ui.css"):
        packed = (FOLDER / "swagger" / f"{name}.gz").read_bytes()
        whole = gzip.decompress(packed)
        for takes in ("gzip, br", "identity"):
            headers = {"accept-encoding": takes}
            answer = served.client.get(f"/docs/{name}", headers=headers)
            assert answer.content == whole  # unpacked by the client
            sent = answer.headers.get("content-encoding")
            assert sent == ("gzip" if "gzip" in takes else None)


def test_the_browser_keeps_files_until_they_change(served: Served) -> None:
    first = served.client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        answer = served.client.get("/page/main.js", headers={"if-none-match": known})
        assert answer.status_code == 304 and answer.content == b""
        assert answer.headers["etag"] == tag
    answer = served.client.get("/page/main.js", headers={"if-none-match": '"other"'})
    assert answer.status_code == 200
    assert served.client.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/__init__.py"])
def test_nothing_else_is_served(served: Served, path: str) -> None:
    assert served.client.get(path).status_code == 404
    assert served.client.get("/page/..%2f__init__.py").status_code == 404
    assert served.client.post("/").status_code == 405


def test_every_file_is_used_and_there() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    used = {"index.html", *re.findall(r'(?:src|href)="page/([^"]+)"', page)}
    for path in SCRIPTS:
        code = path.read_text(encoding="utf-8")
        used |= set(re.findall(r'^import .* from "\./(.+)";$', code, re.MULTILINE))
    assert used == set(NAMES)


def test_nothing_comes_from_elsewhere_or_makes_html() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace(
            "http://www.w3.org/2000/svg", ""
        )
        assert not re.search(r"https?:|@import|url\(", text), path.name
        makes = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b"
        assert not re.search(makes + "|setHTML|createContextual", text), path.name
        assert not re.search(r"localStorage|sessionStorage|cookie", text), path.name


# --- In a browser -------------------------------------------------------------------

LAST = "[...document.querySelectorAll('#turns .answer')].at(-1)"
NOTE = f"{LAST}?.querySelector('.note').textContent"
LINE = "document.querySelector('#engine .line').textContent"


def opened(
    chromium: Browser, served: Served, width: int = 1100, dark: bool = False
) -> None:
    """Show the page, with the chat there."""
    time.sleep(EVERY)  # until what was seen of other tests' requests is old
    chromium.errors.clear()
    chromium.requests.clear()
    chromium.open(f"http://127.0.0.1:{served.port}/", width, dark)
    chromium.wait("!document.querySelector('main').hidden")


def text(chromium: Browser, selector: str) -> Any:
    """The text of an element of the latest answer."""
    return chromium.evaluate(f"{LAST}.querySelector('{selector}').textContent")


def ask(chromium: Browser, question: str) -> None:
    """Type a question and send it, as from a keyboard."""
    chromium.wait("document.activeElement.id === 'question'")
    chromium.type(question)
    chromium.press("Enter")


def test_a_question_is_answered(chromium: Browser, served: Served) -> None:
    opened(chromium, served)
    assert (
        chromium.evaluate("model.textContent")
        == f"model: {served.service.options.names[0]}"
    )
    with saying(served.service.llm, ANSWER.format("132")):
        ask(chromium, "What is 47 + 85?")
        chromium.wait(NOTE)
    assert chromium.evaluate("document.querySelector('.question').textContent") == (
        "What is 47 + 85?"
    )
    assert text(chromium, "details .text") == "Hm, 132"
    assert text(chromium, ":scope > .text") == "So 132"
    assert re.fullmatch(
        r"\d+ tokens, [1-9]\d* of them reasoning, in [\d.]+ s; "
        r"\d+ of the prompt's \d+ were in the cache\.",
        text(chromium, ".note"),
    )
    # The reasoning can be folded away, by keys, and so it stays for the next answer.
    assert chromium.evaluate(f"{LAST}.querySelector('details').open")
    chromium.evaluate(f"{LAST}.querySelector('summary').focus()")
    chromium.press("Enter")
    chromium.wait(f"!{LAST}.querySelector('details').open")
    chromium.evaluate("question.focus()")
    with saying(served.service.llm, ANSWER.format("5")):
        ask(chromium, "And then?")
        chromium.wait(f"{NOTE} && document.querySelectorAll('.answer').length === 2")
    assert not chromium.evaluate(f"{LAST}.querySelector('details').open")
    # The page is where it was: one origin, and nothing that the policy had to refuse.
    origin = f"http://127.0.0.1:{served.port}/"
    assert chromium.requests and chromium.errors == []
    assert all(url.startswith(origin) for url in chromium.requests)
    assert f"{origin}live" in chromium.requests
    assert chromium.evaluate("document.querySelector('nav a').href") == f"{origin}docs"


def test_an_empty_chat_says_what_can_be_asked(
    chromium: Browser, served: Served, monkeypatch: Any
) -> None:
    examples = "document.querySelectorAll('#greeting button')"
    opened(chromium, served)
    assert chromium.evaluate(f"{examples}.length") >= 3
    with saying(served.service.llm, ANSWER.format("1")):
        text = chromium.evaluate(f"{examples}[0].textContent")
        chromium.evaluate(f"{examples}[0].click()")
        chromium.wait(NOTE)
    asked = chromium.evaluate("document.querySelector('.question').textContent")
    assert asked == text
    assert chromium.evaluate("greeting.hidden")
    chromium.evaluate("document.getElementById('clear').click()")
    assert not chromium.evaluate("greeting.hidden")
    # The embedded model knows little, and says what.
    assert "999" not in chromium.evaluate("greeting.textContent")
    named = replace(served.service.options, names=[EMBEDDED_NAME])
    monkeypatch.setattr(served.service, "options", named)
    opened(chromium, served)
    assert "999" in chromium.evaluate("greeting.textContent")
    assert chromium.errors == []


def test_docs_show_the_api_and_load_nothing_from_elsewhere(
    chromium: Browser, served: Served
) -> None:
    origin = f"http://127.0.0.1:{served.port}/"
    chromium.errors.clear()
    chromium.requests.clear()
    chromium.open(f"{origin}docs", 1100)
    chromium.wait("document.querySelectorAll('.opblock').length > 5")
    assert "/v1/chat/completions" in chromium.evaluate("document.body.textContent")
    loaded = [url for url in chromium.requests if not url.startswith("data:")]
    assert all(url.startswith(origin) for url in loaded)
    chromium.evaluate("document.querySelector('.opblock-summary-control').click()")
    chromium.wait("document.querySelector('.opblock-body')")
    assert chromium.errors == []


def test_what_the_model_is_asked(
    chromium: Browser, served: Served, monkeypatch: Any
) -> None:
    """The conversation, without reasoning, and the effort that was chosen."""
    asked: list[dict[str, Any]] = []
    ask_chat = InputProcessor.process_chat

    def heard(input_processor: InputProcessor, messages: Any, **options: Any) -> Any:
        asked.append({"messages": messages, **options})
        return ask_chat(input_processor, messages, **options)

    monkeypatch.setattr(InputProcessor, "process_chat", heard)
    opened(chromium, served)
    with saying(served.service.llm, ANSWER.format("1")):
        ask(chromium, "One")
        chromium.wait(NOTE)
        chromium.evaluate("effort.value = 'high'")
        ask(chromium, "Two")
        chromium.wait(f"{NOTE} && document.querySelectorAll('.answer').length === 2")
        chromium.evaluate("document.getElementById('clear').click()")
        assert chromium.evaluate("turns.children.length") == 0
        ask(chromium, "Three")
        chromium.wait(NOTE)
    one, two = ({"role": "user", "content": words} for words in ("One", "Two"))
    said = {"role": "assistant", "content": "So 1"}
    three = {"role": "user", "content": "Three"}
    assert [a["messages"] for a in asked] == [[one], [one, said, two], [three]]
    assert [a["reasoning_effort"] for a in asked] == ["medium", "high", "high"]


@pytest.mark.parametrize("script", [ANSWER, CALL], ids=["answer", "call"])
def test_text_stays_text(chromium: Browser, served: Served, script: str) -> None:
    """The model's, the reader's own, and what the view shows of both."""
    opened(chromium, served)
    with slow(served.service.llm), saying(served.service.llm, script.format(EVIL)):
        ask(chromium, EVIL)
        chromium.wait("document.querySelector('#engine .said')?.textContent")
        chromium.wait(NOTE)
    assert chromium.evaluate("document.querySelector('.question').textContent") == EVIL
    if script == ANSWER:
        assert text(chromium, "details .text") == f"Hm, {EVIL}"
        assert text(chromium, ":scope > .text") == f"So {EVIL}"
    else:
        assert text(chromium, ".call b") == "add"
        assert text(chromium, ".call pre") == EVIL
    assert EVIL in chromium.evaluate(
        "document.querySelector('#engine .said').textContent"
    )
    made = (
        "#turns img, #turns script, #turns b:not(.call b), #engine img, #engine script"
    )
    assert chromium.evaluate(f"document.querySelectorAll('{made}').length") == 0
    assert chromium.evaluate("document.title") == "SimpleLLM"
    assert chromium.errors == []


def test_the_policy_holds_where_a_page_fails(chromium: Browser, served: Served) -> None:
    """Were text ever to become HTML: no script runs, and nothing is sent elsewhere."""
    opened(chromium, served)
    chromium.evaluate(f"document.body.insertAdjacentHTML('beforeend', {EVIL!r})")
    chromium.evaluate("fetch('http://127.0.0.1:9/').catch(() => null)")
    until(lambda: chromium.evaluate("1") and len(chromium.errors) >= 2)
    assert all("Content Security Policy" in error for error in chromium.errors)
    assert chromium.evaluate("document.title") == "SimpleLLM"
    assert "http://127.0.0.1:9/" not in chromium.requests


def test_an_answer_can_be_stopped(chromium: Browser, served: Served) -> None:
    llm = served.service.llm
    opened(chromium, served)
    for stop in ("Escape", "button"):
        with slow(llm), saying(llm, ENDLESS):
            ask(chromium, "?")
            chromium.wait(f"{LAST}?.textContent.length > 20 && !send.offsetHeight")
            before = llm.stats().finished.get("abort", 0)
            if stop == "button":
                chromium.evaluate("document.getElementById('stop').click()")
            else:
                chromium.press("Escape")
            chromium.wait(f"{NOTE} === 'Stopped.'")
            until(lambda: idle(llm))
        assert llm.stats().finished["abort"] == before + 1
        chromium.wait("document.activeElement.id === 'question' && send.offsetHeight")
    assert chromium.errors == []


def test_errors_are_told(chromium: Browser, served: Served, folder: Path) -> None:
    llm = served.service.llm
    with serving(llm, timeout=4) as hasty:
        opened(chromium, hasty)
        # One that is refused comes back, to be mended.
        ask(chromium, "x" * 300_000)
        chromium.wait(NOTE)
        assert "prompt" in text(chromium, ".note")
        assert chromium.evaluate("question.value.length") == 300_000
        chromium.evaluate("question.value = ''")
        # One whose answer goes wrong on its way keeps what came.
        with slow(llm), saying(llm, ENDLESS):
            ask(chromium, "?")
            chromium.wait(
                f"{NOTE} && document.querySelectorAll('.answer').length === 2"
            )
        assert "time limit" in text(chromium, ".note")
        assert chromium.evaluate(f"{LAST}.querySelector('[role=alert]') !== null")
        assert text(chromium, "details .text").startswith("Hm, and")
    ask(chromium, "Are you there?")
    chromium.wait(f"{NOTE} && document.querySelectorAll('.answer').length === 3")
    assert "connection" in text(chromium, ".note")
    assert chromium.evaluate("question.value") == "Are you there?"


@pytest.mark.parametrize("key", ["s3cret", "schlüssel"])
def test_the_key_is_asked_for(chromium: Browser, served: Served, key: str) -> None:
    with serving(served.service.llm, key=key) as locked:
        chromium.open(f"http://127.0.0.1:{locked.port}/")
        chromium.wait("document.activeElement.id === 'key'")
        assert chromium.evaluate("document.querySelector('main').hidden")
        chromium.type("wrong")
        chromium.press("Enter")
        chromium.wait("trouble.textContent.includes('wrong')")
        chromium.type(key)
        chromium.press("Enter")
        chromium.wait("!document.querySelector('main').hidden")
        assert chromium.evaluate("[trouble.hidden, door.hidden, key.value]") == [
            True,
            True,
            "",
        ]
        with saying(served.service.llm, ANSWER.format("132")):
            ask(chromium, "?")
            chromium.wait(NOTE)
        assert text(chromium, ":scope > .text") == "So 132"
        if not chromium.evaluate("engine.open"):
            chromium.evaluate("engine.open = true")
        chromium.wait("document.querySelector('#engine dd')")
        kept = "[localStorage.length, sessionStorage.length, document.cookie]"
        assert chromium.evaluate(kept) == [0, 0, ""]
        assert key not in chromium.evaluate("document.documentElement.outerHTML")
        # After a change of the key it is asked for again.
        locked.service.options = replace(locked.service.options, key="another")
        ask(chromium, "!")
        chromium.wait("document.activeElement.id === 'key'")


def test_the_live_view_moves(chromium: Browser, served: Served) -> None:
    llm = served.service.llm
    opened(chromium, served)
    chromium.wait(LINE)
    fact = "document.querySelector('#engine .facts dd')"
    with slow(llm), saying(llm, ENDLESS):
        ask(chromium, "Who am I?")
        body = {"messages": [*HELLO, *HELLO], "max_tokens": 60, "ignore_eos": True}
        chromium.wait("document.querySelectorAll('li.running').length === 1")
        answer = served.post("/v1/chat/completions", body | {"n": 2})
        assert answer.status_code == 200
        chromium.wait("document.querySelectorAll('#engine li.ended').length === 2")
        assert chromium.evaluate(f"{fact}.textContent") == "1"
        rows = chromium.evaluate(
            "[...document.querySelectorAll('#engine .requests li')].map((row) => "
            "['.chip', '.fate', '.asked'].map((s) => row.querySelector(s).textContent))"
        )
        assert rows[0] == ["A", "running", "Who am I?"]
        for name, row in zip("BC", rows[1:], strict=True):
            assert row[:2] == [name, "finished"] and "tokens in" in row[2]
        held = "document.querySelectorAll('.leaf[title*=\"held by A\"]').length"
        before = chromium.evaluate(held)
        assert before > 0
        chromium.wait(f"{held} > {before}")
        said = "document.querySelector('#engine .said').textContent"
        before = chromium.evaluate(said)
        chromium.wait(f"{said} !== {json.dumps(before)}")
        chromium.press("Escape")
        chromium.wait("document.querySelectorAll('#engine li.running').length === 0")
    chromium.wait(f"{LINE}.startsWith('Idle. The pages are those')")
    told = chromium.evaluate("view.textContent")
    assert "stopped" in told and "tokens a second, last" in told
    assert chromium.evaluate(held) > 0  # as it was, until somebody asks again
    assert chromium.evaluate("document.querySelector('.pool.past') !== null")
    assert chromium.errors == []


def test_pages_that_are_shared_have_the_letters_of_both(
    chromium: Browser, served: Served
) -> None:
    llm = served.service.llm
    opened(chromium, served)
    chromium.wait(LINE)
    body = {"prompt": "A prompt that is longer than one page of it.", "n": 2}
    body |= {"max_tokens": 100, "ignore_eos": True, "stream": True}
    with (
        slow(llm),
        saying(llm, ENDLESS),
        served.client.stream("POST", "/v1/completions", json=body),
    ):
        chromium.wait("document.querySelector('.leaf[title*=\"held by A, B\"]')")
        words = chromium.evaluate(
            "document.querySelector('.pool').getAttribute('aria-label')"
        )
    assert re.match(rf"\d+ of {PAGES} pages held, [1-9]\d* of them by several", words)
    # What is kept for others is a number; the pages seen are those that were held.
    chromium.wait("document.querySelector('.pool.past .leaf')")
    kept = "[...document.querySelectorAll('#engine dt')].find((e) => "
    kept += "e.textContent === 'pages kept').nextSibling.textContent"
    assert int(chromium.evaluate(kept)) > 0


def test_it_looks_only_while_it_is_looked_at(chromium: Browser, served: Served) -> None:
    opened(chromium, served)
    until(lambda: served.service.running == 1)
    chromium.evaluate("document.querySelector('#engine summary').focus()")
    chromium.press("Enter")
    until(lambda: served.service.running == 0)
    chromium.press("Enter")
    until(lambda: served.service.running == 1)
    chromium.open("about:blank")
    until(lambda: served.service.running == 0)


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(width, dark, marks=() if few else pytest.mark.exhaustive)
        for place, width in enumerate([1100, 700, 390, 320])
        for dark in (False, True)
        for few in [dark == place % 2]
    ],
)
def test_it_fits_any_screen(
    chromium: Browser, served: Served, width: int, dark: bool
) -> None:
    opened(chromium, served, width, dark)
    assert chromium.evaluate("engine.open") == (width > 600)
    chromium.evaluate("engine.open = true")
    with saying(served.service.llm, ANSWER.format("w" * 300)):
        ask(chromium, "v" * 300)
        chromium.wait(NOTE)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('#chat, #turns, #turns *, #engine *, #view')]"
    wide += f".filter((e) => e.getBoundingClientRect().right > {width} + 1).length"
    assert chromium.evaluate(wide) == 0
    # What is typed into is in sight, and large enough for a finger.
    assert chromium.evaluate("composer.getBoundingClientRect().bottom") <= 900
    small = "[...document.querySelectorAll('button, select, textarea, summary')]"
    small += ".filter((e) => e.offsetHeight && e.offsetHeight < 24).length"
    assert chromium.evaluate(small) == 0
    assert contrast(chromium, "#turns .answer > .text") > 7
    for selector in ("#turns .note", "#turns details .text", "#model", "nav a"):
        assert contrast(chromium, selector) > 4.5, selector
    # The browser asks for less motion, and nothing moves.
    assert chromium.evaluate("document.getAnimations().length") == 0


def contrast(chromium: Browser, selector: str) -> float:
    """Between an element's text and the page behind it, as WCAG computes it."""
    found = chromium.evaluate(
        f"[document.querySelector('{selector}'), document.body].map((e, at) => "
        "getComputedStyle(e)[at ? 'backgroundColor' : 'color'])"
    )

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        ]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted(map(luminance, found), reverse=True)
    return (light + 0.05) / (dark + 0.05)
