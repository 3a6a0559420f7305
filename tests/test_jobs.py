"""`simplellm batch`: every request answered once, whatever stops the run."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from simplellm import LLM, QueueFullError, RequestOutput, SamplingParams
from simplellm.apps import cli, jobs
from simplellm.apps.calculator import CALCULATOR


class EchoLLM:
    """Answers a text with itself, after a moment and out of order."""

    def __init__(self, *, delay: float = 0.0, log: Path | None = None) -> None:
        self.delay = delay
        self.log = log
        self.crowd = threading.Semaphore(1)
        self.pool = ThreadPoolExecutor(8)
        self.random = random.Random(os.getpid())

    def __enter__(self) -> "EchoLLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.shutdown()

    def generate(
        self, prompts: list[str], *, n: int = 1, **options: Any
    ) -> Future[list[RequestOutput]]:
        SamplingParams(**options)
        (prompt,) = prompts
        if prompt == "refuse":
            raise ValueError("the engine refuses this")
        if prompt == "dead":
            raise RuntimeError("the engine is dead")
        # Of a crowd the engine takes only one at a time.
        if prompt == "crowd" and not self.crowd.acquire(blocking=False):
            raise QueueFullError("too many requests wait")
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{prompt}\n")
        return self.pool.submit(self.answer, prompt, self.random.uniform(0, self.delay))

    def answer(self, prompt: str, delay: float) -> list[RequestOutput]:
        time.sleep(delay)
        if prompt == "crowd":
            self.crowd.release()
        if prompt == "fail":
            raise RuntimeError("out of memory")
        return [
            RequestOutput(
                text=f"{prompt}!",
                token_ids=[1, 2],
                finish_reason="length",
                logprobs=None,
                prompt_token_ids=[0],
            )
        ]


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load_llm", lambda *arguments: EchoLLM())


@pytest.fixture(scope="module")
def llm():
    with LLM() as llm:
        yield llm


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def results(path: Path) -> dict[Any, dict[str, Any]]:
    """The lines of an output by id, each id at most once."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {line.pop("id"): line for line in lines}
    assert len(found) == len(lines)
    assert all(len(line.pop("digest")) == 16 for line in lines)
    return found


def run(llm: Any, source: Path, target: Path) -> tuple[int, int, int]:
    """One run without the command line: how many are answered, rejected and failed."""
    requests = jobs.read_requests(source)
    with jobs.open_results(target, requests) as (file, done):
        failures = jobs.answer_all(llm, requests, file, done)
    rejected = sum(done.values())
    return len(done) - rejected, rejected, len(failures)


def call(source: Path, target: Path) -> int:
    return cli.main(["batch", str(source), str(target)])


def test_results_have_the_ids_of_their_requests(echo, tmp_path, capsys):
    source = write(
        tmp_path / "in.jsonl",
        {"id": "größer", "prompt": "a"},
        {"prompt": "b"},
        "",
        {"id": 3, "prompt": "c"},
        {"id": "3", "prompt": "d"},
    )
    target = tmp_path / "out.jsonl"
    assert call(source, target) == 0
    texts = {name: result["text"] for name, result in results(target).items()}
    assert texts == {"größer": "a!", "line-2": "b!", 3: "c!", "3": "d!"}
    result = results(target)[3]
    assert (result["finish_reason"], result["prompt_tokens"]) == ("length", 1)
    assert result["completion_tokens"] == 2
    assert "4 requests: 4 answered, 0 errors" in capsys.readouterr().err


BIAS = "a logit_bias token id is 'a'; expected an integer"


def test_bad_lines_do_not_stop_the_rest(echo, tmp_path, capsys):
    bad = [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "not JSON"),
        ("[1]", "the line is a list"),
        ({"id": None, "prompt": "x"}, "id is None; expected a text or an integer"),
        ({"id": True, "prompt": "x"}, "id is True"),
        ({"id": 1.5, "prompt": "x"}, "id is 1.5"),
        ({"id": "empty"}, "the fields are none; expected either prompt or messages"),
        ({"id": "both", "prompt": "x", "messages": []}, "expected either"),
        ({"id": "typo", "prompt": "x", "temprature": 1}, "unknown field 'temprature'"),
        ({"id": "hot", "prompt": "x", "temperature": 1e9}, "temperature is"),
        ({"id": "bias", "prompt": "x", "logit_bias": {"a": 1}}, BIAS),
        ({"id": "refused", "prompt": "refuse"}, "the engine refuses this"),
    ]
    source = write(
        tmp_path / "in.jsonl", *(line for line, _ in bad), {"id": "good", "prompt": "x"}
    )
    target = tmp_path / "out.jsonl"
    assert call(source, target) == 1
    found = results(target)
    assert found.pop("good")["text"] == "x!"
    assert len(found) == len(bad)
    errors = {result["error"].split(":")[0]: result for result in found.values()}
    for number, (_, part) in enumerate(bad, start=1):
        assert part in errors[f"line {number}"]["error"]
    assert f"1 answered, {len(bad)} errors" in capsys.readouterr().err
    before = target.read_bytes()
    assert call(source, target) == 1  # and no line of it is tried again
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    "message",
    [
        {"messages": []},
        {"messages": {}},
        {"messages": "Hi"},
        {"messages": [1]},
        {"messages": [{}]},
        {"messages": None},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        {"messages": [{"role": "user", "content": "Hi"}], "tools": 5},
        {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "max"},
        {"messages": [{"role": "user", "content": "Hi"}], "stop": ["x"] * 65},
        {"messages": [{"role": "user", "content": "Hi"}], "stop": "x" * 5000},
        {"prompt": ["a", "b"]},
        {"prompt": []},
        {"prompt": 5},
        {"prompt": [10**9]},
        {"prompt": {"a": 1}},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "stop": 5},
        {"prompt": "x", "n": "many"},
        {"prompt": "x", "ignore_eos": "false"},
        {"prompt": True},
        {"prompt": "x", "timeout": 1},
        {"prompt": None, "messages": None},
    ],
)
def test_bad_requests_get_an_error(llm, tmp_path, message):
    source = write(tmp_path / "in.jsonl", message)
    assert run(llm, source, tmp_path / "out.jsonl") == (0, 1, 0)
    assert results(tmp_path / "out.jsonl")["line-1"]["error"].startswith("line 1: ")


def test_null_is_as_good_as_absent(llm, tmp_path):
    names = [field.name for field in fields(SamplingParams)]
    nulls = dict.fromkeys([*names, "n", "user"])
    text = {"prompt": "What is 3 + 4?"}
    chat = {"messages": [{"role": "user", "content": "What is 47 + 85?"}]}
    source = write(
        tmp_path / "in.jsonl",
        text,
        text | nulls | {"messages": None},
        chat,
        chat | nulls | {"prompt": None, "tools": None, "reasoning_effort": None},
    )
    target = tmp_path / "out.jsonl"
    assert run(llm, source, target) == (4, 0, 0)
    found = results(target)
    assert found["line-1"] == found["line-2"] and found["line-1"]["text"]
    assert found["line-3"] == found["line-4"] and found["line-3"]["content"]


def test_answers_are_those_of_the_engine(llm, tmp_path):
    question = [{"role": "user", "content": "What is 47 + 85?"}]
    source = write(
        tmp_path / "in.jsonl",
        {"id": "text", "prompt": "What is 3 + 4?", "max_tokens": 20},
        {"id": "ids", "prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 2},
        {"id": "stop", "prompt": "What is 3 + 4?", "stop": "by"},
        {"id": "chat", "messages": question, "reasoning_effort": "high"},
        {"id": "cut", "messages": question, "stop": ["1", " ="]},
        {
            "id": "call",
            "messages": [{"role": "user", "content": "What is 12 * 34?"}],
            "tools": [CALCULATOR],
        },
        {"id": "seed", "prompt": "A", "temperature": 2, "seed": 1, "max_tokens": 9}
        | {"logit_bias": {"7": 5}},
        {"id": "n", "messages": question, "n": 3, "reasoning_effort": "low"},
    )
    target = tmp_path / "out.jsonl"
    assert run(llm, source, target) == (8, 0, 0)
    found = results(target)

    def text(prompt: Any, **options: Any) -> str:
        return llm.generate([prompt], **options).result()[0].text

    assert found["text"]["text"] == text("What is 3 + 4?", max_tokens=20)
    assert found["ids"]["text"] == text([5, 6, 7], max_tokens=3)
    assert [len(entry["top"]) for entry in found["ids"]["logprobs"]] == [2, 2, 2]
    assert found["stop"]["text"] == text("What is 3 + 4?", stop="by")
    assert found["stop"]["finish_reason"] == "stop"
    options = {"temperature": 2, "seed": 1, "max_tokens": 9, "logit_bias": {7: 5}}
    assert found["seed"]["text"] == text("A", **options)
    chat = llm.chat(question, reasoning_effort="high")
    assert chat.reasoning
    assert found["chat"] == {
        "content": chat.content,
        "reasoning": chat.reasoning,
        "tool_calls": [],
        "finish_reason": chat.finish_reason,
        "prompt_tokens": found["chat"]["prompt_tokens"],
        "completion_tokens": len(chat.token_ids),
    }
    chat = llm.chat(question, stop=["1", " ="])
    assert (found["cut"]["content"], found["cut"]["reasoning"]) == (
        chat.content,
        chat.reasoning,
    )
    assert found["cut"]["content"] == "47 + 85"
    chat = llm.chat(question, reasoning_effort="low")
    contents = [choice["content"] for choice in found["n"]["choices"]]
    assert contents == [chat.content] * 3
    (tool_call,) = found["call"]["tool_calls"]
    assert tool_call["name"] == "calculator"
    assert json.loads(tool_call["arguments"]) == {"expression": "12 * 34"}


def test_a_line_ends_at_its_stop_string(llm, tmp_path):
    """It is computed no further, as the counts of tokens show."""
    question = [{"role": "user", "content": "What is 47 + 85?"}]
    options = {"stop": [" ="], "logprobs": 1, "n": 2, "reasoning_effort": "low"}
    source = write(
        tmp_path / "in.jsonl",
        {"messages": question, **options},
        {"messages": question, "reasoning_effort": "low"},
        {"prompt": "What is 47 + 85?", "stop": "1", "max_tokens": 40},
    )
    run(llm, source, tmp_path / "out.jsonl")
    found = results(tmp_path / "out.jsonl")
    chat = llm.chat(question, **options)
    assert found["line-1"]["choices"] == [
        {
            "content": choice.content,
            "reasoning": choice.reasoning,
            "tool_calls": [],
            "finish_reason": "stop",
            "stop_reason": " =",
            "prompt_tokens": chat.usage.prompt_tokens,
            "completion_tokens": len(choice.token_ids),
            "logprobs": json.loads(json.dumps([asdict(x) for x in choice.logprobs])),
        }
        for choice in chat.choices
    ]
    assert chat.content == "47 + 85"
    assert chat.usage.completion_tokens == sum(
        choice["completion_tokens"] for choice in found["line-1"]["choices"]
    )
    whole = found["line-2"]["completion_tokens"]
    assert found["line-1"]["choices"][0]["completion_tokens"] < whole - 1
    assert (
        found["line-3"]["text"]
        == llm.generate("What is 47 + 85?", stop="1", max_tokens=40).result()[0].text
    )


def test_nothing_is_computed_behind_a_stop_string(llm, tmp_path):
    endless = {"ignore_eos": True, "max_tokens": 50_000, "temperature": 0}
    message = {"role": "user", "content": "What is 47 + 85?"}
    chat = {"messages": [message], "stop": " =", "reasoning_effort": "low"}
    source = write(tmp_path / "in.jsonl", chat | endless)
    before = llm.stats().generated_tokens
    run(llm, source, tmp_path / "out.jsonl")
    assert results(tmp_path / "out.jsonl")["line-1"]["content"] == "47 + 85"
    assert llm.stats().generated_tokens - before < 25_000


def test_failed_requests_are_tried_again(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", {"prompt": "fail"}, {"prompt": "x"})
    target = tmp_path / "out.jsonl"
    assert call(source, target) == 1
    assert "1 requests failed, the last one with RuntimeError('out of memory')" in (
        " ".join(capsys.readouterr().err.split())
    )
    assert set(results(target)) == {"line-2"}
    write(source, {"prompt": "works"}, {"prompt": "x"})
    assert call(source, target) == 0
    assert results(target)["line-1"]["text"] == "works!"


def test_a_full_queue_is_waited_for(echo, tmp_path):
    source = write(tmp_path / "in.jsonl", *[{"prompt": "crowd"}] * 9)
    assert call(source, tmp_path / "out.jsonl") == 0
    assert len(results(tmp_path / "out.jsonl")) == 9


def test_a_dead_engine_fails_all_that_is_left(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", {"prompt": "dead"}, {"prompt": "dead"})
    assert call(source, tmp_path / "out.jsonl") == 1
    assert (
        "2 requests failed, the last one with RuntimeError('the engine is dead')"
        in (" ".join(capsys.readouterr().err.split()))
    )
    assert results(tmp_path / "out.jsonl") == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_ends_the_run(tmp_path):
    source = write(tmp_path / "in.jsonl", *[{"prompt": "x"}] * 300)
    with (
        EchoLLM() as llm,
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left"),
    ):
        jobs.answer_all(llm, jobs.read_requests(source), full, {})


def test_a_corrected_line_is_tried_again(echo, tmp_path, capsys):
    good, bad = {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y", "foo": 1}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    write(source, bad, good, {"id": "c", "prompt": "refuse"})
    assert call(source, link) == 1
    before = results(target)
    assert "unknown field 'foo'" in before["b"]["error"]
    target.chmod(0o640)
    for wrong in (
        {"id": "b", "prompt": "y", "bar": 1},
        {"id": "b", "prompt": "refuse"},
    ):
        write(source, wrong, good, {"id": "c", "prompt": "refuse"})
        assert call(source, link) == 1
        assert results(target)["b"]["error"] != before["b"]["error"]
    write(source, {"id": "b", "prompt": "y"}, good, {"id": "c", "prompt": "refuse"})
    assert call(source, link) == 1
    assert "3 requests: 2 answered, 1 errors" in capsys.readouterr().err
    found = results(target)
    assert found["b"]["text"] == "y!"
    assert (found["a"], found["c"]) == (before["a"], before["c"])
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (source, target, link)
    }


def test_what_interrupts_a_correction_changes_nothing(echo, tmp_path, monkeypatch):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert call(write(source, {"prompt": "x"}, {"prompt": "refuse"}), target) == 1
    before = target.read_bytes()
    write(source, {"prompt": "x"}, {"prompt": "y"})
    with monkeypatch.context() as patch:
        patch.setattr(jobs.shutil, "copymode", lambda *paths: 1 / 0)
        assert call(source, target) == 1
    assert target.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    assert call(source, target) == 0


def test_a_second_writer_is_refused_while_lines_are_corrected(echo, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert call(write(source, {"prompt": "x"}, {"prompt": "refuse"}), target) == 1
    write(source, {"prompt": "x"}, {"prompt": "y"})
    with jobs.open_results(target, jobs.read_requests(source)):
        assert call(source, target) == 2
    assert "another run is writing to it" in capsys.readouterr().err
    assert call(source, target) == 0


def test_an_answer_to_another_question_is_refused(echo, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert call(write(source, {"id": 7, "prompt": "x"}, {"prompt": "y"}), target) == 0
    before = target.read_bytes()
    # The same in other words: its fields in another order, and one that says nothing.
    same = '{ "prompt": "x", "seed": null, "id": 7 }'
    assert call(write(source, same, {"prompt": "y"}), target) == 0
    for changed in ({"id": 7, "prompt": "z"}, {"id": 7, "prompt": "x", "seed": 1}):
        assert call(write(source, changed, {"prompt": "y"}), target) == 2
        message = capsys.readouterr().err
        assert "answers what 7 asked before it was changed" in message
        assert "expected the same request, or a new id for the new one" in message
    # Lines without an id are called by their number: here one came in above.
    write(source, {"id": 7, "prompt": "x"}, {"prompt": "new"}, {"prompt": "y"})
    assert call(source, target) == 2
    assert target.read_bytes() == before


def test_results_without_digests_go_on(echo, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(
        source, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, {"prompt": "refuse"}
    )
    old = write(
        target,
        {"id": "line-1", "text": "A"},
        {"id": "line-2", "error": "line 2: unknown field"},
    ).read_bytes()
    assert call(source, target) == 1
    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert target.read_bytes().startswith(old.splitlines(keepends=True)[0])
    texts = {line["id"]: line.get("text") for line in lines}
    assert texts == {"line-1": "A", "line-2": "b!", "line-3": "c!", "line-4": None}
    before = target.read_bytes()
    assert call(source, target) == 1
    assert target.read_bytes() == before


def test_the_output_is_no_stream(echo, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.jsonl", {"prompt": "x"})
    assert cli.main(["batch", str(source), "-"]) == 2
    assert (
        "- is no file; expected one that can be read again" in capsys.readouterr().err
    )
    assert not Path("-").exists()


def test_duplicate_ids_are_refused(echo, tmp_path, capsys):
    source = write(
        tmp_path / "in.jsonl", *({"id": name, "prompt": "x"} for name in (1, 2, "1", 2))
    )
    assert call(source, tmp_path / "out.jsonl") == 2
    assert "lines 2 and 4 both have the id 2" in capsys.readouterr().err
    write(source, {"id": "line-2", "prompt": "x"}, {"prompt": "y"})
    assert call(source, tmp_path / "out.jsonl") == 2
    assert 'a line without an id is called "line-" and its number' in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_are_not_results_stay_as_they_are(echo, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"})
    for text in (
        "My notes",
        "My notes\n",
        '{"id": 2, "text": "of another input"}\n',
        '{"id": 1, "text": "x"}\n{"id": 1, "text": "x"}\n',
        '{"id": 1, "text": "x"}\n\n',
        '{"id": [1]}\n',
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
    source = write(tmp_path / "in.jsonl", {"prompt": "x"})
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null"), Path("/dev/full")):
        assert call(source, target) == 2
        assert f"{target} is no file; expected one that can be read again" in " ".join(
            capsys.readouterr().err.split()
        )


def test_a_torn_line_is_done_again(echo, tmp_path):
    source = write(tmp_path / "in.jsonl", *({"prompt": text} for text in "abc"))
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
    source = write(tmp_path / "in.jsonl", {"prompt": "x"})
    target = tmp_path / "out.jsonl"
    with jobs.open_results(target, jobs.read_requests(source)):
        assert call(source, target) == 2
    assert "another run is writing to it" in capsys.readouterr().err


def run_slowly(source: Path, target: Path, log: Path) -> None:
    with EchoLLM(delay=0.03, log=log) as llm:
        run(llm, source, target)
    os._exit(0)


def nbytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_killed_at_random_moments(tmp_path):
    chance = random.Random(0)
    texts = [f"text {number}" for number in range(400)]
    source = write(tmp_path / "in.jsonl", *({"prompt": text} for text in texts))
    target, log = tmp_path / "out.jsonl", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    finished: set[str] = set()
    for kills in range(100):  # noqa: B007
        log.unlink(missing_ok=True)
        process = context.Process(target=run_slowly, args=(source, target, log))
        process.start()
        enough = nbytes(target) + chance.randrange(4000)
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
        done = whole[: whole.rindex(b"\n") + 1] if b"\n" in whole else b""
        finished = {json.loads(line)["text"][:-1] for line in done.splitlines()}
    assert process.exitcode == 0
    assert kills >= 3
    found = results(target)
    assert {found[f"line-{n + 1}"]["text"] for n in range(400)} == {
        f"{text}!" for text in texts
    }


def test_control_c_leaves_a_resumable_file(tmp_path):
    quick = [{"prompt": f"What is {n} + 5?", "max_tokens": 16} for n in range(100)]
    endless = {"prompt": "Sort 3 1 2.", "ignore_eos": True, "max_tokens": 100_000}
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
    write(source, *quick, *[endless | {"max_tokens": 5}] * 3)
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0
    assert "103 requests: 103 answered, 0 errors" in result.stderr
    assert target.read_bytes().startswith(before)
    assert len(results(target)) == 103


# OpenAI's form


def openai_line(name: object, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_lines_in_openais_form_get_openais_answers(llm, tmp_path):
    chat, text = "/v1/chat/completions", "/v1/completions"
    question = [{"role": "user", "content": "What is 47 + 85?"}]
    source = write(
        tmp_path / "in.jsonl",
        openai_line("a", chat, model="gpt-oss-20b", messages=question, temperature=0),
        openai_line("b", text, prompt=["1, 2, 3,", "2, 4,"], max_tokens=4, n=2),
        {"id": "ours", "prompt": "1, 2, 3,", "max_tokens": 2},
        openai_line("c", chat, messages=question, temperature=-1),
        openai_line("d", "/v1/embeddings", input="x"),
        openai_line("e", chat, messages=question, stream=True),
        {"custom_id": "f", "url": text},
        openai_line("g", text, prompt="x") | {"metod": "POST"},
        openai_line("h", "/v1/responses", input="What is 47 + 85?", temperature=0),
        openai_line("i", "/v1/responses", input="x", previous_response_id="resp_1"),
        openai_line("j", chat, messages=question, store=True, max_tokens=1),
    )
    target = tmp_path / "out.jsonl"
    assert run(llm, source, target) == (5, 6, 0)
    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert all(raw.startswith(jobs.HEAD) for raw in target.read_bytes().splitlines())
    found = {line["custom_id"]: line for line in lines if "custom_id" in line}
    assert all(line["error"] is None for line in found.values())
    bodies = {name: line["response"]["body"] for name, line in found.items()}
    turn = llm.chat(question, temperature=0)
    (choice,) = bodies["a"]["choices"]
    assert choice["message"]["content"] == turn.content != ""
    assert bodies["a"]["object"] == "chat.completion"
    assert bodies["a"]["model"] == "gpt-oss-20b"
    assert bodies["a"]["usage"]["completion_tokens"] == turn.usage.completion_tokens
    assert [choice["index"] for choice in bodies["b"]["choices"]] == [0, 1, 2, 3]
    status = {name: line["response"]["status_code"] for name, line in found.items()}
    assert status == dict.fromkeys("abhj", 200) | dict.fromkeys("cdefgi", 400)
    *_, said = bodies["h"]["output"]
    assert bodies["h"]["object"] == "response" and bodies["h"]["status"] == "completed"
    assert said["content"][0]["text"] == turn.content
    errors = {name: bodies[name]["error"] for name in "cdefgi"}
    params = {name: error["param"] for name, error in errors.items()}
    assert params["c"] == "temperature" and params["d"] == "url"
    assert params["e"] == "stream" and "expected false in a batch" in str(errors["e"])
    assert "prompt is missing" in errors["f"]["message"]
    assert "metod" in errors["g"]["message"]
    assert params["i"] == "previous_response_id"


def test_runs_go_on_in_openais_form_too(llm, tmp_path):
    url = "/v1/completions"
    lines = [openai_line(n, url, prompt="1, 2,", max_tokens=1) for n in range(4)]
    lines[3]["body"]["temperature"] = -1
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert run(llm, source, target) == (3, 1, 0)
    before = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(before[:2]) + before[2][:20])
    lines[3]["body"]["temperature"] = 0
    write(source, *lines)
    assert run(llm, source, target) == (4, 0, 0)
    kept = [line for line in before[:2] if b'"status_code": 200' in line]
    assert target.read_bytes().splitlines(keepends=True)[: len(kept)] == kept
    lines[0]["body"]["prompt"] = "another question"
    write(source, *lines)
    with pytest.raises(ValueError, match="answers what 0 asked before it was changed"):
        run(llm, source, target)


def test_sampling_options_are_for_lines_that_leave_them_open(tmp_path):
    url = "/v1/completions"
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "1, 2, 3,"},
        {"prompt": "1, 2, 3,", "max_tokens": 3},
        openai_line("a", url, prompt="1, 2, 3,"),
        openai_line("b", url, prompt="1, 2, 3,", max_tokens=3),
    )
    target = tmp_path / "out.jsonl"
    options = ["--max-tokens", "2", "--top-p", "0.9", "--top-k", "1"]
    assert cli.main(["batch", str(source), str(target), *options]) == 0
    found = {}
    for line in map(json.loads, target.read_bytes().splitlines()):
        if "custom_id" in line:
            usage = line["response"]["body"]["usage"]
            found[line["custom_id"]] = usage["completion_tokens"]
        else:
            found[line["id"]] = line["completion_tokens"]
    assert found == {"line-1": 2, "line-2": 3, "a": 2, "b": 3}
    assert cli.main(["batch", str(source), str(target), "--top-p", "2"]) == 2
