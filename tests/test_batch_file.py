"""`simplellm batch`: every request answered once, whatever stops the run."""

import asyncio
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response

from simplellm import LLM, QueueFullError
from simplellm.apps import batch_file, cli, offline

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLOSED = {"type": "object", "additionalProperties": False}
EXPRESSION = CLOSED | {
    "properties": {"expression": {"type": "string", "maxLength": 20}},
    "required": ["expression"],
}
RESULT = CLOSED | {
    "properties": {"result": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["result"],
}
QUESTION = [{"role": "user", "content": "What is 47 + 85?"}]


class Echo:
    """Answers a prompt with itself, after a moment and out of order."""

    def __init__(self, *, delay: float = 0.0, log: Path | None = None) -> None:
        self.delay = delay
        self.log = log
        self.crowd = 0
        self.random = random.Random(os.getpid())

    async def __call__(self, line: batch_file.Line) -> tuple[int, Any]:
        prompt = line.request["body"]["prompt"]
        if prompt == "refuse":
            return 400, {"error": {"message": "refused"}}
        if prompt == "dead":
            raise RuntimeError("the engine is dead")
        # Of a crowd the engine takes only one at a time.
        if prompt == "crowd" and self.crowd:
            raise QueueFullError("too many requests wait")
        self.crowd += 1
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{prompt}\n")
        await asyncio.sleep(self.random.uniform(0, self.delay))
        self.crowd -= 1
        if prompt == "fail":
            raise RuntimeError("out of memory")
        usage = {"completion_tokens": 2}
        return 200, {"choices": [{"text": f"{prompt}!"}], "usage": usage}


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Echo()
    monkeypatch.setattr(cli, "load_llm", lambda *arguments: nullcontext())
    monkeypatch.setattr(
        offline, "answer_line", lambda llm, defaults, line: answer(line)
    )


@pytest.fixture(scope="module")
def llm():
    with LLM() as llm:
        yield llm


def ask(prompt: object, custom_id: object = None, **body: Any) -> dict[str, Any]:
    """A line that asks for a completion."""
    line = {"url": TEXT, "body": {"prompt": prompt, **body}}
    return line if custom_id is None else {"custom_id": custom_id, **line}


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def results(path: Path) -> dict[Any, dict[str, Any]]:
    """The responses of an output by custom_id, each at most once."""
    raw = path.read_bytes().splitlines()
    assert all(line.startswith(batch_file.HEAD) for line in raw)
    lines = [json.loads(line) for line in raw]
    responses = {line["custom_id"]: line["response"] for line in lines}
    assert len(responses) == len(lines)
    assert all(line["error"] is None for line in lines)
    return responses


def texts(path: Path) -> dict[Any, str | None]:
    """The first choice of each result; None for an error."""
    return {
        name: response["body"]["choices"][0]["text"]
        if response["status_code"] == 200
        else None
        for name, response in results(path).items()
    }


def run(answer: Any, source: Path, target: Path) -> tuple[int, int, int]:
    """One run without the command line: how many are answered, rejected and failed."""
    requests = batch_file.read_requests(source)
    with batch_file.open_results(target, requests) as (file, done):
        failures = batch_file.answer_all(answer, requests, file, done)
    rejected = sum(done.values())
    return len(done) - rejected, rejected, len(failures)


def run_engine(llm: LLM, source: Path, target: Path) -> tuple[int, int, int]:
    return run(partial(offline.answer_line, llm, {}), source, target)


def call(source: Path, target: Path) -> int:
    return cli.main(["batch", str(source), str(target)])


def test_results_have_the_ids_of_their_requests(echo, tmp_path, capsys):
    source = write(
        tmp_path / "in.jsonl",
        ask("a", "größer"),
        ask("b"),
        "",
        ask("c", 3),
        ask("d", "3"),
    )
    target = tmp_path / "out.jsonl"
    assert call(source, target) == 0
    assert texts(target) == {"größer": "a!", "line-2": "b!", 3: "c!", "3": "d!"}
    assert "4 requests: 4 answered, 0 errors" in capsys.readouterr().err


def test_half_a_character_is_mended_as_in_the_server():
    raw = rb'{"custom_id": "a", "body": {"prompt": "x\ud800"}}'
    line = batch_file.read_line(1, raw)
    assert line.request["body"]["prompt"] == "x\ufffd"


def test_bad_lines_do_not_stop_the_rest(llm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_llm", lambda *arguments: nullcontext(llm))
    bad = [
        ("{", "not JSON", None),
        ("[" * 100_000, "not JSON", None),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "not JSON", None),
        ("[1]", "the line is a list", None),
        ({"custom_id": None}, "custom_id is None; expected a text or an integer", None),
        ({"custom_id": True}, "custom_id is True", None),
        ({"custom_id": 1.5}, "custom_id is 1.5", None),
        ({"input": "x"}, "a field is 'input'", None),
        (ask("x") | {"metod": "POST"}, "metod", None),
        (ask("x") | {"method": "GET"}, "method is 'GET'", "method"),
        (ask("x") | {"url": "/v1/embeddings"}, "url is '/v1/embeddings'", "url"),
        (ask("x") | {"body": 5}, "body is 5; expected an object", "body"),
        ({"url": TEXT}, "prompt is missing", "prompt"),
        (ask("x", temperature=1e9), "temperature is", "temperature"),
        (ask("x", logit_bias={"a": 1}), "logit_bias", "logit_bias"),
        (ask("x", stream=True), "expected false in a batch", "stream"),
        (ask([10**9]), "prompt", "prompt"),
        ({"url": CHAT, "body": {"messages": [{"role": 5}]}}, "role", None),
        (
            {
                "url": "/v1/responses",
                "body": {"input": "x", "previous_response_id": "r"},
            },
            "is not here, or no longer",
            "previous_response_id",
        ),
    ]
    lines = [line for line, _, _ in bad]
    source = write(tmp_path / "in.jsonl", *lines, ask("x", "good", max_tokens=1))
    target = tmp_path / "out.jsonl"
    assert call(source, target) == 1
    found = results(target)
    assert found.pop("good")["status_code"] == 200
    assert len(found) == len(bad)
    for number, (line, message, param) in enumerate(bad, start=1):
        response = found[f"line-{number}"]
        assert response["status_code"] == 400, line
        error = response["body"]["error"]
        assert message in error["message"]
        assert param is None or error["param"] == param
    assert f"1 answered, {len(bad)} errors" in capsys.readouterr().err
    before = target.read_bytes()
    assert call(source, target) == 1  # and no line of it is tried again
    assert target.read_bytes() == before


def test_nothing_is_computed_behind_a_stop_string(llm, tmp_path):
    endless = {"ignore_eos": True, "max_tokens": 50_000, "temperature": 0}
    body = {"messages": QUESTION, "stop": " =", "reasoning_effort": "low"} | endless
    source = write(tmp_path / "in.jsonl", {"url": CHAT, "body": body})
    before = llm.stats().generated_tokens
    assert run_engine(llm, source, tmp_path / "out.jsonl") == (1, 0, 0)
    (choice,) = results(tmp_path / "out.jsonl")["line-1"]["body"]["choices"]
    assert choice["message"]["content"] == "47 + 85"
    assert llm.stats().generated_tokens - before < 25_000


def test_failed_requests_are_tried_again(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", ask("fail"), ask("x"))
    target = tmp_path / "out.jsonl"
    assert call(source, target) == 1
    assert "1 requests failed, the last one with RuntimeError('out of memory')" in (
        " ".join(capsys.readouterr().err.split())
    )
    assert set(results(target)) == {"line-2"}
    write(source, ask("works"), ask("x"))
    assert call(source, target) == 0
    assert texts(target) == {"line-1": "works!", "line-2": "x!"}


def test_a_full_queue_is_waited_for(echo, tmp_path):
    source = write(tmp_path / "in.jsonl", *[ask("crowd")] * 9)
    assert call(source, tmp_path / "out.jsonl") == 0
    assert len(results(tmp_path / "out.jsonl")) == 9


def test_a_dead_engine_fails_all_that_is_left(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", ask("dead"), ask("dead"))
    assert call(source, tmp_path / "out.jsonl") == 1
    assert (
        "2 requests failed, the last one with RuntimeError('the engine is dead')"
        in (" ".join(capsys.readouterr().err.split()))
    )
    assert results(tmp_path / "out.jsonl") == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_ends_the_run(tmp_path):
    source = write(tmp_path / "in.jsonl", *[ask("x")] * 300)
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left"),
    ):
        batch_file.answer_all(Echo(), batch_file.read_requests(source), full, {})


def test_a_corrected_line_is_tried_again(echo, tmp_path, capsys):
    good, refused = ask("x", "a"), ask("refuse", "c")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    write(source, ask("refuse", "b", seed=1), good, refused)
    assert call(source, link) == 1
    old = target.read_bytes().splitlines()
    target.chmod(0o640)
    write(source, ask("refuse", "b", seed=2), good, refused)
    assert call(source, link) == 1
    new = target.read_bytes().splitlines()
    assert {*results(target)} == {*"abc"} and len({*old} & {*new}) == 2
    write(source, ask("y", "b"), good, refused)
    assert call(source, link) == 1
    assert "3 requests: 2 answered, 1 errors" in capsys.readouterr().err
    assert texts(target) == {"a": "x!", "b": "y!", "c": None}
    assert len({*old} & {*target.read_bytes().splitlines()}) == 2
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (source, target, link)
    }


def test_what_interrupts_a_correction_changes_nothing(echo, tmp_path, monkeypatch):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert call(write(source, ask("x"), ask("refuse")), target) == 1
    before = target.read_bytes()
    write(source, ask("x"), ask("y"))
    with monkeypatch.context() as patch:
        patch.setattr(batch_file.shutil, "copymode", lambda *paths: 1 / 0)
        assert call(source, target) == 1
    assert target.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    assert call(source, target) == 0


def test_a_second_writer_is_refused_while_lines_are_corrected(echo, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert call(write(source, ask("x"), ask("refuse")), target) == 1
    write(source, ask("x"), ask("y"))
    with batch_file.open_results(target, batch_file.read_requests(source)):
        assert call(source, target) == 2
    assert "another run is writing to it" in capsys.readouterr().err
    assert call(source, target) == 0


def test_an_answer_to_another_question_is_refused(echo, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert call(write(source, ask("x", 7), ask("y")), target) == 0
    before = target.read_bytes()
    # The same in other words: its fields in another order.
    same = f'{{"body": {{"prompt": "x" }}, "url": "{TEXT}", "custom_id": 7}}'
    assert call(write(source, same, ask("y")), target) == 0
    for changed in (ask("z", 7), ask("x", 7, seed=1)):
        assert call(write(source, changed, ask("y")), target) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert "answers what 7 asked before it was changed" in message
        assert "expected the same request, or a new custom_id for the new" in message
    # Lines without an id are called by their number: here one came in above.
    write(source, ask("x", 7), ask("new"), ask("y"))
    assert call(source, target) == 2
    assert target.read_bytes() == before


def test_the_output_is_no_stream(echo, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.jsonl", ask("x"))
    assert cli.main(["batch", str(source), "-"]) == 2
    assert (
        "- is no file; expected one that can be read again" in capsys.readouterr().err
    )
    assert not Path("-").exists()


def test_duplicate_ids_are_refused(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", *(ask("x", name) for name in (1, 2, "1", 2)))
    assert call(source, tmp_path / "out.jsonl") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "lines 2 and 4 both have the custom_id 2" in message
    write(source, ask("x", "line-2"), ask("y"))
    assert call(source, tmp_path / "out.jsonl") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert 'a line without one is called "line-" and its number' in message
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_are_not_results_stay_as_they_are(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", ask("x", 1))
    assert call(source, tmp_path / "out.jsonl") == 0
    whole = (tmp_path / "out.jsonl").read_text()
    for text in (
        "My notes",
        "My notes\n",
        '{"id": "batch_req_1", "custom_id": 2}\n',  # of another input
        '{"id": "batch_req_1", "custom_id": 1}\n',
        whole + whole,
        f"{whole}\n",
        '{"custom_id": [1]}\n',
        "[" * 100_000 + "\n",
    ):
        target = tmp_path / "out.jsonl"
        target.write_text(text)
        assert call(source, target) == 2
        assert "is not the only result of a request" in capsys.readouterr().err
        assert target.read_text() == text
    assert call(source, source) == 2
    assert "both input and output" in capsys.readouterr().err
    assert call(tmp_path / "missing.jsonl", target) == 2
    assert call(source, tmp_path / "missing" / "out.jsonl") == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo")
def test_a_pipe_is_refused(echo, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert call(tmp_path / "pipe", tmp_path / "out.jsonl") == 2
    assert "is no file; expected one that can be read again" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo")
def test_an_output_that_cannot_be_read_again_is_refused(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", ask("x"))
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null"), Path("/dev/full")):
        assert call(source, target) == 2
        assert f"{target} is no file; expected one that can be read again" in " ".join(
            capsys.readouterr().err.split()
        )


def test_a_torn_line_is_done_again(echo, tmp_path):
    source = write(tmp_path / "in.jsonl", *(ask(text) for text in "abc"))
    target = tmp_path / "out.jsonl"
    assert call(source, target) == 0
    whole = target.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (*range(last, last + 12), len(whole) - 1):
        target.write_bytes(whole[:end])
        assert call(source, target) == 0
        assert target.read_bytes().startswith(whole[:last])
        assert set(results(target)) == {"line-1", "line-2", "line-3"}


def test_two_runs_at_once_are_refused(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", ask("x"))
    target = tmp_path / "out.jsonl"
    with batch_file.open_results(target, batch_file.read_requests(source)):
        assert call(source, target) == 2
    assert "another run is writing to it" in capsys.readouterr().err


def run_slowly(source: Path, target: Path, log: Path) -> None:
    run(Echo(delay=0.03, log=log), source, target)
    os._exit(0)


def nbytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_killed_at_random_moments(tmp_path):
    chance = random.Random(0)
    source = write(tmp_path / "in.jsonl", *(ask(f"text {n}") for n in range(1, 401)))
    target, log = tmp_path / "out.jsonl", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    finished: set[str] = set()
    for kills in range(100):  # noqa: B007
        log.unlink(missing_ok=True)
        process = context.Process(target=run_slowly, args=(source, target, log))
        process.start()
        enough = nbytes(target) + chance.randrange(12_000)
        while process.is_alive() and nbytes(target) < enough:
            time.sleep(0.001)
        process.kill()
        process.join()
        if log.exists():
            assert finished.isdisjoint(log.read_text().splitlines())
        if process.exitcode == 0:
            break
        if target.exists() and chance.random() < 0.5:  # the disk lost the end, too
            os.truncate(target, max(0, nbytes(target) - chance.randrange(100)))
        whole = target.read_bytes() if target.exists() else b""
        done = [json.loads(line) for line in whole.split(b"\n")[:-1]]
        finished = {f"text {str(one['custom_id'])[5:]}" for one in done}
    assert process.exitcode == 0
    assert kills >= 3
    assert texts(target) == {f"line-{n}": f"text {n}!" for n in range(1, 401)}


@pytest.mark.exhaustive
def test_control_c_leaves_a_resumable_file(tmp_path):
    quick = [ask(f"What is {n} + 5?", max_tokens=16) for n in range(30)]
    sorting = ask("Sort 3 1 2.", ignore_eos=True, max_tokens=5)
    endless = ask("Sort 3 1 2.", ignore_eos=True, max_tokens=100_000)
    source = write(tmp_path / "in.jsonl", *quick, *[endless] * 3)
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "simplellm.apps.cli", "batch", source, target]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (target.exists() and target.stat().st_size):
        time.sleep(0.02)
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "stopped; the same command goes on" in stderr
    assert "Traceback" not in stderr
    before = target.read_bytes()
    assert 1 <= len(results(target)) <= len(quick)
    write(source, *quick, *[sorting] * 3)
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0
    assert "33 requests: 33 answered, 0 errors" in result.stderr
    assert target.read_bytes().startswith(before)
    assert len(results(target)) == 33


def test_answers_are_those_of_the_server(llm, tmp_path):
    def line(name: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    chat = {"model": "gpt-oss-20b", "messages": QUESTION}
    source = write(
        tmp_path / "in.jsonl",
        line("a", CHAT, **chat, temperature=0),
        line("b", TEXT, prompt=["1, 2, 3,", "2, 4,"], max_tokens=4, n=2),
        line("c", "/v1/responses", input="What is 47 + 85?", temperature=0),
        line("d", CHAT, messages=QUESTION, store=True, max_tokens=1),
    )
    target = tmp_path / "out.jsonl"
    assert run_engine(llm, source, target) == (4, 0, 0)
    bodies = {name: response["body"] for name, response in results(target).items()}
    turn = llm.chat(QUESTION, temperature=0)
    (choice,) = bodies["a"]["choices"]
    assert choice["message"]["content"] == turn.content != ""
    assert bodies["a"]["object"] == "chat.completion"
    assert bodies["a"]["model"] == "gpt-oss-20b"
    assert bodies["a"]["usage"]["completion_tokens"] == turn.usage.completion_tokens
    assert [choice["index"] for choice in bodies["b"]["choices"]] == [0, 1, 2, 3]
    *_, said = bodies["c"]["output"]
    assert bodies["c"]["object"] == "response" and bodies["c"]["status"] == "completed"
    assert said["content"][0]["text"] == turn.content
    assert bodies["d"]["usage"]["completion_tokens"] == 1


def test_lines_ask_for_responses(llm, tmp_path):
    """Whatever one can hold that needs no other one."""
    pytest.importorskip("llguidance")
    tool = {"type": "function", "name": "calculator", "parameters": EXPRESSION}
    form = {"type": "json_schema", "name": "sum", "schema": RESULT, "strict": True}
    asked: dict[str, dict[str, Any]] = {
        "call": {"tools": [tool], "tool_choice": "required"},
        "form": {"text": {"format": form}},
        "short": {"max_output_tokens": 5, "background": True},
        "hosted": {"tools": [{"type": "web_search"}]},
        "later": {"previous_response_id": "resp_1"},
        "stream": {"stream": True},
    }
    body = {"input": [{"role": "user", "content": "What is 47 + 85?"}]}
    lines = [
        {"custom_id": name, "url": "/v1/responses", "body": body | fields}
        for name, fields in asked.items()
    ]
    target = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", *lines)
    assert run_engine(llm, source, target) == (3, 3, 0)
    found = results(target)
    bodies = {name: one["body"] for name, one in found.items()}
    for name in ("call", "form", "short"):
        Response.model_validate(bodies[name])
    assert bodies["call"]["output"][-1]["type"] == "function_call"
    assert "expression" in json.loads(bodies["call"]["output"][-1]["arguments"])
    (said,) = bodies["form"]["output"][-1]["content"]
    assert json.loads(said["text"]).keys() == {"result"}
    assert bodies["short"]["status"] == "incomplete"
    statuses = {name: one["status_code"] for name, one in found.items()}
    assert statuses["hosted"] == statuses["later"] == statuses["stream"] == 400
    assert "web_search" in bodies["hosted"]["error"]["message"]


def test_sampling_options_are_for_lines_that_leave_them_open(tmp_path):
    lines = ask("1, 2, 3,", "a"), ask("1, 2, 3,", "b", max_tokens=3)
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    options = ["--max-tokens", "2", "--top-p", "0.9", "--top-k", "1"]
    assert cli.main(["batch", str(source), str(target), *options]) == 0
    counts = {
        name: response["body"]["usage"]["completion_tokens"]
        for name, response in results(target).items()
    }
    assert counts == {"a": 2, "b": 3}
    assert cli.main(["batch", str(source), str(target), "--top-p", "2"]) == 2


def test_without_the_extra_it_says_what_to_install(tmp_path):
    source = write(tmp_path / "in.jsonl", ask("x"))
    code = (
        "import sys; sys.modules['orjson'] = None; from simplellm.apps.cli import main;"
        "sys.exit(main(['batch', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, source, tmp_path / "out.jsonl"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2
    assert "orjson is not installed" in result.stderr
    assert "pip install 'simplellm[serve]'" in " ".join(result.stderr.split())
