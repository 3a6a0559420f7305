"""The command line: what goes where, and how it fails."""

import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import TINY, config_json, write_checkpoint
from models import TOKENIZER
from rich.console import Console

from simplellm import __version__
from simplellm.api.reply import ChatChoice, ChatReply
from simplellm.apps import calculator, cli, options, screen
from simplellm.base.config import LAYER_TYPES, EngineConfig
from simplellm.base.request import Event, Request
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B
from simplellm.checkpoint.names import stored_shapes
from simplellm.text.harmony import Delta, from_openai, render


class ScriptedStream(Iterator[Delta]):
    """What comes of a prepared turn; None in its place is Ctrl-C."""

    def __init__(self, turn: str, reason: str) -> None:
        self.closed = False
        self.reply = ChatReply(Request([0], max_tokens=100), TOKENIZER)
        text, self.interrupted, _ = turn.partition(CONTROL_C)
        ids = TOKENIZER.encode(text, special=True)
        events = [Event(0, [token]) for token in ids[:-1]]
        events.append(Event(0, ids[-1:], finish_reason=reason))
        self.deltas = (delta for event in events for delta in self.reply.push(event))

    def __next__(self) -> Delta:
        try:
            return next(self.deltas)
        except StopIteration:
            if self.interrupted:
                raise KeyboardInterrupt from None
            raise

    def close(self) -> None:
        self.closed = True

    def output(self) -> ChatChoice:
        return self.reply.output()


class ScriptedLLM:
    """Answers with prepared turns; remembers the messages and options it was given."""

    def __init__(self, *turns: str, reason: str = "stop") -> None:
        self.turns, self.reason = list(turns), reason
        self.seen: list[list[dict[str, Any]]] = []
        self.options: dict[str, Any] = {}

    def __enter__(self) -> "ScriptedLLM":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def stream_chat(
        self, messages: list[dict[str, Any]], **options: Any
    ) -> ScriptedStream:
        if messages[-1]["content"] == "too long":
            raise ValueError("the prompt is too long")
        self.seen.append([dict(message) for message in messages])
        self.options = options
        self.stream = ScriptedStream(self.turns.pop(0), self.reason)
        return self.stream


CONTROL_C = "^C"
CALLED = "<|call|>"


def said(channel: str, text: str, end: str = "<|end|>") -> str:
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}{end}"


def call(arguments: str, name: str = "functions.calculator") -> str:
    return said(f"commentary to={name}", arguments, CALLED)


def calculation(expression: str) -> str:
    return call(json.dumps({"expression": expression}))


THOUGHT = said("analysis", "7+5=12")
ANSWER = THOUGHT + said("final", "47 + 85 = 132", "<|return|>")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch):
    """Make the commands use a ScriptedLLM of the given turns."""

    def use(*turns: str, reason: str = "stop") -> ScriptedLLM:
        llm = ScriptedLLM(*turns, reason=reason)
        monkeypatch.setattr(cli, "load_llm", lambda *arguments, **choices: llm)
        return llm

    return use


def test_answer_and_reasoning_go_apart(scripted, capsys):
    llm = scripted(ANSWER)
    assert cli.main(["What is 47 + 85?", "--temperature", "0", "--seed", "3"]) == 0
    assert capsys.readouterr() == ("47 + 85 = 132\n", "7+5=12\n")
    assert llm.seen == [[{"role": "user", "content": "What is 47 + 85?"}]]
    assert llm.options == {
        "reasoning_effort": None,
        "tools": None,
        "temperature": 0.0,
        "seed": 3,
    }


def test_options_reach_the_model(scripted):
    llm = scripted(ANSWER)
    options = "--reasoning-effort low --calculator --max-tokens 9 --developer Brief."
    assert cli.main([*options.split(), "Hi"]) == 0  # options may come first
    assert llm.seen[0][0] == {"role": "developer", "content": "Brief."}
    assert llm.options["reasoning_effort"] == "low"
    assert llm.options["max_tokens"] == 9
    assert llm.options["tools"] == [calculator.CALCULATOR]


@pytest.mark.parametrize("prompt", ["chat", "--help", "-3 + 5"])
def test_any_text_can_be_a_prompt(scripted, prompt):
    llm = scripted(ANSWER)
    assert cli.main(["ask", "--", prompt]) == 0
    assert llm.seen[0][0]["content"] == prompt


def test_prompt_from_standard_input(scripted, monkeypatch):
    llm = scripted(ANSWER)
    text = "Größer?\nJa.\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert cli.main(["-"]) == 0
    assert llm.seen[0][0]["content"] == "Größer?\nJa."


def test_tool_is_called_and_answered(scripted, capsys):
    thought = said("analysis", "I call it.")
    llm = scripted(thought + calculation("12 * 34"), said("final", "12 * 34 = 408"))
    assert cli.main(["What is 12 * 34?", "--calculator"]) == 0
    out, err = capsys.readouterr()
    assert out == "12 * 34 = 408\n"
    assert err == 'I call it.\ncalculator {"expression": "12 * 34"}\n= 408\n'
    _, assistant, tool = llm.seen[1]
    function = {"name": "calculator", "arguments": '{"expression": "12 * 34"}'}
    assert assistant["tool_calls"][0]["function"] == function
    assert assistant["reasoning"] == "I call it."
    assert tool["content"] == "408"
    assert tool["tool_call_id"] == assistant["tool_calls"][0]["id"]


def test_two_calls_of_one_function_are_two(scripted, capsys):
    both = calculation("1+1") + calculation("2+2")
    llm = scripted(said("analysis", "Two.") + both, said("final", "2 and 4"))
    assert cli.main(["What are 1+1 and 2+2?", "--calculator"]) == 0
    out, err = capsys.readouterr()
    assert out == "2 and 4\n"
    assert err.splitlines() == [
        "Two.",
        'calculator {"expression": "1+1"}',
        'calculator {"expression": "2+2"}',
        "= 2",
        "= 4",
    ]
    _, assistant, *answers = llm.seen[1]
    ids = [made["id"] for made in assistant["tool_calls"]]
    assert [(a["tool_call_id"], a["content"]) for a in answers] == [
        (ids[0], "2"),
        (ids[1], "4"),
    ]
    assert ids[0] != ids[1]


def test_a_call_without_arguments_is_answered(scripted, capsys):
    llm = scripted(call(""), said("final", "Sorry."))
    assert cli.main(["What is 1?", "--calculator"]) == 0
    assert capsys.readouterr().err.startswith("calculator \n= error: ")
    assert llm.seen[1][-1]["content"].startswith("error: ")


@pytest.mark.parametrize("name", ["a<b", "a\0b", "é b", ""])
def test_the_next_prompt_can_hold_any_call(scripted, name):
    llm = scripted(call("{}", f"functions.{name}"), said("final", "Sorry."))
    assert cli.main(["What is 1?", "--calculator"]) == 0
    assert "expected 'calculator'" in llm.seen[1][-1]["content"]
    render(from_openai(llm.seen[1]), TOKENIZER)


def test_the_result_that_a_model_invents_is_no_call(scripted, capsys):
    header = "<|start|>functions.calculator to=assistant<|channel|>commentary"
    invented = f"{header}<|message|>3<|end|>"
    llm = scripted(calculation("1+1") + invented, said("final", "2"))
    assert cli.main(["What is 1+1?", "--calculator"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        'calculator {"expression": "1+1"}',
        "3",
        "= 2",
    ]
    assert [message["content"] for message in llm.seen[1][1:]] == ["", "2"]


def test_lines_end_in_the_stream_they_began_in(scripted, capsys):
    preamble = said("commentary", "One moment.") + said("analysis", "I call it.")
    scripted(preamble + calculation("1"), said("final", "It is 1."))
    assert cli.main(["What is 1?", "--calculator"]) == 0
    out, err = capsys.readouterr()
    assert out == "One moment.\nIt is 1.\n"
    assert err == 'I call it.\ncalculator {"expression": "1"}\n= 1\n'


def test_no_answer_is_said(scripted, capsys):
    scripted(THOUGHT)
    assert cli.main(["What is 47 + 85?"]) == 0
    assert capsys.readouterr() == (
        "",
        "7+5=12\n(the model stopped without an answer)\n",
    )


@pytest.mark.parametrize("turn", [THOUGHT, ANSWER])
def test_a_turn_that_is_cut_short_says_so(scripted, capsys, turn):
    scripted(turn.removesuffix("<|return|>"), reason="length")
    assert cli.main(["What is 47 + 85?", "--max-tokens", "5"]) == 0
    remark = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"\(cut short after \d+ tokens; --max-tokens .*\)", remark)


def test_tool_calls_end(scripted, capsys):
    turns = [calculation("1 + 1")] * (screen.MAX_TOOL_CALLS + 1)
    llm = scripted(*turns)
    assert cli.main(["What is 1 + 1?", "--calculator"]) == 0
    assert len(llm.turns) == 1
    assert capsys.readouterr().err.endswith("(the model stopped without an answer)\n")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 * 34", 408), ("-(3 - 5) * 2", 4), (" 1.5 + 1 ", 2.5), ("007", None)]
    + [
        (text, None)
        for text in ("2 ** 9", "1 / 2", "", "'a' * 3", "x", "f()", "1\0", "1 +", "True")
    ]
    + [("1" + "+1" * 100, None), ("(" * 99, None), ("-" * 99 + "1", -1)],
)
def test_calculate(expression, value):
    if value is None:
        with pytest.raises(ValueError, match=r"cannot evaluate .* expected numbers"):
            calculator.calculate(expression)
    else:
        assert calculator.calculate(expression) == value


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("calculator", '{"expression": "2 ** 3"}', "cannot evaluate '2 ** 3'"),
        ("calculator", '{"expression": 3}', "error:"),
        ("calculator", '{"expr": "1"}', "expression"),
        ("calculator", "[", "error:"),
        ("calculator", "3", "error:"),
        ("calculator", "[" * 100_000, "error:"),
        ("weather", "{}", "no function 'weather'"),
    ],
)
def test_bad_tool_call_is_reported_to_the_model(name, arguments, part):
    result = calculator.call_tool(name, arguments)
    assert result.startswith("error: ")
    assert part in result


def test_chat_keeps_history(scripted, monkeypatch, capsys):
    llm = scripted(ANSWER, ANSWER, ANSWER)
    lines = "one\n\ntoo long\ntwo\n/reset\nthree\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert cli.main(["chat", "--developer", "Brief."]) == 0
    texts = [[message["content"] for message in seen] for seen in llm.seen]
    assert texts == [
        ["Brief.", "one"],
        ["Brief.", "one", "47 + 85 = 132", "two"],
        ["Brief.", "three"],
    ]
    out, err = capsys.readouterr()
    assert out == "47 + 85 = 132\n" * 3
    assert err.count("error: the prompt is too long") == 1


def test_control_c_ends_the_answer_and_not_the_conversation(
    scripted, monkeypatch, capsys
):
    llm = scripted(THOUGHT + said("final", "47 + 85 = ", CONTROL_C), ANSWER)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ngo on\n"))
    assert cli.main(["chat"]) == 0
    texts = [message["content"] for message in llm.seen[1]]
    assert texts == ["one", "47 + 85 = ", "go on"]
    out, err = capsys.readouterr()
    assert out == "47 + 85 = \n47 + 85 = 132\n"
    assert "(stopped)\n" in err


def test_control_c_ends_a_question(scripted, capsys):
    llm = scripted(said("final", "47 + ", CONTROL_C))
    assert cli.main(["What is 47 + 85?"]) == 130
    assert llm.stream.closed
    assert capsys.readouterr() == ("47 + ", "")


def test_a_chat_says_what_can_be_typed(scripted, monkeypatch, capsys):
    llm = scripted(ANSWER)
    lines = "/help\n/helo\n/reset\n/half of it?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert cli.main(["chat"]) == 0
    (seen,) = llm.seen
    assert [message["content"] for message in seen] == ["/half of it?"]
    err = capsys.readouterr().err
    assert err.count("/help says this again") == 1  # no greeting: nobody types here
    assert "up to 999" in err and max(map(len, err.splitlines())) <= 80
    assert "there is no /helo" in err and "(forgotten)" in err


def test_another_model_is_greeted_by_its_folder():
    told = screen.greeting("models/gpt-oss-20b")
    assert told.startswith("models/gpt-oss-20b: ") and "999" not in told


@pytest.mark.parametrize("word", ["/exit", "/quit", "/q", "/bye"])
def test_chat_ends_at_exit(scripted, monkeypatch, word):
    llm = scripted()
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{word}\nmore\n"))
    assert cli.main(["chat"]) == 0
    assert llm.seen == []


def terminal() -> Console:
    return screen.console(file=io.StringIO(), force_terminal=True, width=80)


def shown(console: Console) -> str:
    deltas = [Delta("analysis", None, "hm \x1b[2J"), Delta("final", None, "[b]yes\x07")]
    place = screen.Screen(console, console)
    with place.waiting("Starting"):
        pass
    place.show(deltas)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_terminal_shows_reasoning_dim_and_no_escapes(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = shown(terminal())
    assert text.endswith(
        "\x1b[2mhm \N{REPLACEMENT CHARACTER}[2J\x1b[0m\n[b]yes\ufffd\n"
    )
    assert "Starting" in text


def test_no_color_is_no_escape_sequence(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal()
    assert shown(console) == "hm \N{REPLACEMENT CHARACTER}[2J\n[b]yes\ufffd\n"
    screen.Screen(console, console).error("no")
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\nlines"), 2, "error: two lines\n"),
        (TypeError("not text"), 2, "error: not text\n"),
        (RuntimeError("out of memory"), 1, "error: RuntimeError: out of memory\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures(monkeypatch, capsys, error, status, line):
    def fail(*arguments: object, **choices) -> None:
        raise error

    monkeypatch.setattr(cli, "load_llm", fail)
    assert cli.main(["Hi"]) == status
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["Hi", "--temprature", "1"], "No such option: --temprature"),
        (["Hi", "there"], "unexpected extra argument"),
        (["Hi", "--temperature", "warm"], "--temperature"),
        (["chat", "--temperature", "-1"], "temperature is -1.0; expected 0 to"),
        (["Hi", "--max-tokens", "0"], "max_tokens is 0; expected 1 or"),
        (["Hi", "--reasoning-effort", "huge"], "'low', 'medium', 'high'"),
        (["--seed", "1"], "prompt"),
        (["Hi", "--device", "abacus"], "'cpu', 'cuda'"),
        ([" "], "the prompt is empty; expected a question"),
    ],
)
def test_usage_errors(capsys, arguments, part):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part.lower() in err.lower()


def sparse_checkpoint(folder: Path) -> int:
    """gpt-oss-20b with real headers over files that are all hole; the bytes of data."""
    header, end = {}, 0
    for parts in stored_shapes(GPT_OSS_20B).values():
        for name, shape in parts.items():
            packed = name.endswith(("blocks", "scales"))
            start, end = end, end + math.prod(shape) * (1 if packed else 2)
            header[name] = {
                "dtype": "U8" if packed else "BF16",
                "shape": shape,
                "data_offsets": [start, end],
            }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config_json(GPT_OSS_20B)))
    return end


def test_info_reads_headers_only(tmp_path):
    """13.8 GB of tensors described without touching a page of them."""
    nbytes = sparse_checkpoint(tmp_path)
    code = (
        "import sys; from simplellm.apps.cli import main; status = main();"
        "lines = open('/proc/self/status').read().splitlines();"
        "print(*(s.split()[1] for s in lines if 'VmHWM' in s), file=sys.stderr);"
        "sys.exit(status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "info", str(tmp_path)],
        capture_output=True,
        timeout=200,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "safetensors files: 1" in result.stdout
    assert f"{nbytes:,}" in result.stdout
    assert "20,914,757,184, of which 3,608,307,264 active" in result.stdout
    kilobytes = int(result.stderr.split()[-1])
    # Torch itself takes a quarter of it. (getrusage counts what started the process.)
    assert kilobytes < 2_000_000
    blocks = (tmp_path / "model.safetensors").stat().st_blocks
    assert blocks * 512 < 1_000_000  # the hole is still one


@pytest.mark.parametrize(
    ("name", "parts"),
    [  # parameters in arXiv:2508.10925, table 1; bytes in the published index files
        ("gpt-oss-20b", ["20,914,757,184", "3,608,307,264", "13,761,264,768"]),
        ("gpt-oss-120b", ["116,829,156,672", "5,132,849,472", "65,248,815,744"]),
    ],
)
def test_info_of_published_shapes(capsys, name, parts):
    assert cli.main(["info", name]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in parts)
    assert "MXFP4, BF16" in out
    assert max(map(len, out.splitlines())) <= 80


def test_info_cuts_nothing_in_a_narrow_terminal(capsys, monkeypatch):
    assert cli.main(["info"]) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "20")
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out == wide
    assert max(map(len, wide.splitlines())) > 40


def test_info_of_a_tied_model_without_windows(tmp_path, capsys):
    full = LAYER_TYPES[1]
    config = replace(
        TINY, tie_word_embeddings=True, layer_types=(full, full), sliding_window=None
    )
    folder = write_checkpoint(tmp_path / "model", config)
    assert cli.main(["info", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "lm_head" in out and "embedding" not in out
    assert "window" not in out


def test_info_of_the_embedded_model(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "the embedded model" in out
    assert "safetensors files: 1" in out
    assert "experts" in out


def test_standard_input_that_is_not_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert cli.main(["-"]) == 2
    assert "can't decode byte 0xff" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help(capsys, arguments):
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("ask", "chat", "info"))
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["ask", "chat", "info", "batch", "bench", "serve"])
def test_help_of_a_command(capsys, command):
    assert cli.main([command, "-h"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: simplellm {command} [OPTIONS]")
    assert not any(odd in out for odd in ("[[", "{", " range>"))
    assert max(map(len, out.splitlines())) <= 80
    assert cli.main(["help", command]) == 0
    assert capsys.readouterr().out == out


def test_the_servers_options_are_under_headings(capsys):
    assert cli.main(["serve", "-h"]) == 0
    parts = re.split(r"\n(\w[\w ]+):\n", capsys.readouterr().out)
    options = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "MODEL" in options["Arguments"] and "--help" in options["Options"]
    assert "--api-key" in options["Network and access"]
    assert "--cpu-cache-bytes" in options["Memory"]
    assert "--speculative" in options["Speculative decoding"]
    assert "--replicas" in options["Several GPUs"]
    assert max(text.count("\n  --") for text in options.values()) < 8


@pytest.mark.parametrize(
    ("word", "command"),
    [("bnech", "bench"), ("infos", "info"), ("cht", "chat"), ("hepl", "help")],
)
def test_a_mistyped_command_is_no_prompt(scripted, capsys, word, command):
    llm = scripted(ANSWER, ANSWER)
    assert cli.main([word, "--seed", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and not llm.seen
    assert f"no command '{word}'; did you mean '{command}'? To ask the model" in err
    assert cli.main(["ask", word]) == 0
    assert cli.main([f"{word} me"]) == 0
    assert [seen[0]["content"] for seen in llm.seen] == [word, f"{word} me"]


@pytest.mark.parametrize("prompt", ["Hello", "hello", "Hi", "help me", "a batch"])
def test_a_prompt_is_no_mistyped_command(scripted, prompt):
    llm = scripted(ANSWER)
    assert cli.main([prompt]) == 0
    assert llm.seen[0][0]["content"] == prompt


@pytest.mark.parametrize("word", ["gpt-oss-20b", "SmolLM2", "my model", "q.gguf"])
def test_a_model_is_no_prompt(scripted, capsys, monkeypatch, tmp_path, word):
    monkeypatch.chdir(tmp_path)
    Path("q.gguf").touch()
    Path("my model").mkdir()
    Path("my model/config.json").touch()
    llm = scripted(ANSWER)
    assert cli.main([word, "--seed", "1"]) == 2
    told = f"To chat with it: simplellm chat {shlex.quote(word)}\n"
    assert capsys.readouterr().err.endswith(told) and not llm.seen
    assert cli.main(["ask", word]) == 0
    assert llm.seen[0][0]["content"] == word


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys; from simplellm.apps.cli import main; status = main(['--version']);"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=200, text=True
    )
    assert result.returncode == 0
    assert result.stdout == f"simplellm {__version__}\n"


def test_the_embedded_model_thinks_and_answers(capsys):
    question = "What is 47 + 85?"
    assert cli.main([question, "--reasoning-effort", "high"]) == 0
    out, err = capsys.readouterr()
    assert out == "47 + 85 = 132\n"
    assert "ones: 7+5=12, write 2, carry 1\n" in err


def test_the_embedded_model_calls_the_calculator(capsys):
    assert cli.main(["What is 12 * 34?", "--calculator"]) == 0
    out, err = capsys.readouterr()
    assert out == "12 * 34 = 408\n"
    assert 'calculator {"expression": "12 * 34"}\n= 408\n' in err


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    options = "--reasoning-effort low --max-tokens 20"
    with os.fdopen(writer, "wb") as pipe:
        result = subprocess.run(
            [sys.executable, "-m", "simplellm.apps.cli", "Hello", *options.split()],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=200,
        )
    assert result.returncode == 1
    assert b"Traceback" not in result.stderr
    assert b"Exception" not in result.stderr


COMMAND = f"exec {shlex.quote(sys.executable)} -m simplellm.apps.cli "


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    ["info", pytest.param("'What is 47 + 85?'", marks=pytest.mark.exhaustive)],
)
def test_a_full_disk_is_said_once(arguments):
    result = subprocess.run(
        f"{COMMAND} {arguments} >/dev/full",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=250,
    )
    assert result.returncode == 1
    (line,) = [text for text in result.stderr.splitlines() if "rror" in text]
    assert line.startswith("error: OSError: ")
    assert "Exception ignored" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_control_d_leaves_a_newline():
    import pty

    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", "simplellm.apps.cli", "chat"])
    text = b""
    with suppress(OSError):  # Linux's way to say that the other side is gone
        while chunk := os.read(terminal, 4096):
            text += chunk
            if text.endswith(b"> "):
                os.write(terminal, b"\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert text.endswith(b"> \r\n")


def test_an_option_named_as_a_field_of_the_engine_s_config_is_that_field():
    params = {"model": None, "seed": 7, "max_num_seqs": 3, "overlap": False}
    context: Any = SimpleNamespace(params=params)
    found = options.asked_config(context)
    assert found == EngineConfig(max_num_seqs=3, overlap=False)


def test_a_dtype_and_the_room_for_the_cache(capsys, caplog):
    """Of an engine, as a command chooses them."""
    question = ["ask", "What is 47 + 85?", "--temperature", "0", "--max-tokens", "4"]
    few = ["--dtype", "float32", "--cache-bytes", str(2**22)]
    with caplog.at_level("INFO", logger="simplellm"):
        assert cli.main([*question, *few]) == 0
    assert "the cache has room for texts of" in caplog.text
    assert cli.main([*question, "--dtype", "int8"]) == 2
    assert "int8" in capsys.readouterr().err
