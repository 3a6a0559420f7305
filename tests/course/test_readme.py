"""What the README and the landing page say is what is there."""

import ast
import json
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import cells
import headline
import tables
from families import CASES
from families_text import KINDS, TEMPLATES
from record_clients import NPM, PYPI, name_of
from test_agents import AGENTS, FRAMEWORKS
from test_families_mutations import MISTAKES

from simplellm.checkpoint.families import ALL

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "chapters/index.md").read_text(encoding="utf-8")
TEACHING = (ROOT / "chapters/teaching.md").read_text(encoding="utf-8")
SPEED, MODELS, MANUAL = (
    (ROOT / f"chapters/{name}.md").read_text(encoding="utf-8")
    for name in ("speed", "models", "manual")
)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
HOSTED = "../../deployments/github-pages"  # the book, where the repository is hosted
LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\([./]*figures/([\w-]+)\.svg\)")
CELLS = cells.cells(INDEX)


def test_tables_are_up_to_date(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_evaluation_table():
    right = {"right": 1999, "of": 2000}
    efforts = {"high": {"addition": right, "sorting": right}, "low": {"sorting": right}}
    run = {"date": "D", "device": "X", "dtype": "float32", "torch": "2", "seconds": 9.4}
    assert tables.evaluation(run | {"efforts": efforts}).splitlines() == [
        "| skill | effort high | effort low |",
        "| --- | --: | --: |",
        "| addition | 1999 of 2000 (99.9 %) |  |",
        "| sorting | 1999 of 2000 (99.9 %) | 1999 of 2000 (99.9 %) |",
        "",
        "Recorded D on one X in float32 with torch 2, in 9 seconds.",
    ]


def test_families_are_recorded_with_the_tests_that_there_are():
    """Else the record is old: python tools/record_families.py."""
    record = json.loads((ROOT / "figures/c-families.json").read_text("utf-8"))
    found = record["families"]
    assert found.keys() == {family.name for family in ALL}
    others = {"gpt-oss", "GPT-2", "SmolLM3", "Granite"}
    assert tables.CHATS.keys() == found.keys() - others
    cases = Counter(make().family for make in CASES.values())
    noticed = Counter(
        CASES[name]().family for name, all in MISTAKES.items() for _ in all
    )
    for name, one in found.items():
        if name != "gpt-oss":
            assert one["checkpoints"] == cases[name]
            assert one["mistakes_noticed"] == noticed[name]
        assert 0 < one["worst_error"] < 1e-4
        assert one["formats"] or name == "GPT-2"
    assert record["chats"].keys() <= KINDS.keys()
    for kind in TEMPLATES:
        chats = record["chats"][kind]
        assert chats["rendered"] and chats["answers_that_fit"]
        assert bool(chats["calls_read"]) == (kind not in ("gemma", "smollm"))
    assert record["versions"].keys() >= {"python", "torch", "transformers"}


def test_speeds_of_families_are_those_of_their_records(tmp_path):
    assert tables.speed_of("Gemma 3", tmp_path) == "not measured yet"
    row = {"batch": 1, "tokens_per_second": 1234.5}
    report = {"model": "gemma-3-4b-it", "decode": [row]}
    (tmp_path / "c-bench-gemma-3.json").write_text(json.dumps(report))
    assert tables.speed_of("Gemma 3", tmp_path) == "1,234 (gemma-3-4b-it)"


def test_published_weights_are_those_of_the_record(tmp_path):
    assert "No model has run" in tables.real(tmp_path)
    row: dict[str, object] = {"model": "M", "license": "L", "package": "P 1"}
    row |= {"format": "F", "where": "W", "tokens_per_second": 31.2, "compared": "C"}
    record: dict[str, object] = {"date": "D", "command": "X", "rows": [row]}
    record |= {"versions": {"transformers": "5", "gguf": "1"}}
    path = tmp_path / "real-weights.json"
    path.write_text(json.dumps(record))
    said = tables.real(tmp_path)
    assert "| M | L | P 1 | F | W | C | 31 |" in said
    assert said.endswith("Recorded D with transformers 5 and gguf 1 by `X`.")
    row["tokens_per_second"] = None  # the machine was busy
    path.write_text(json.dumps(record))
    assert "| M | L | P 1 | F | W | C |\n" in tables.real(tmp_path)
    texts: dict[str, object] = {"date": "E", "command": "Y", "model": "M", "texts": 9}
    texts |= {"versions": {"xllamacpp": "7"}, "stored": 4}
    (tmp_path / "llama-cpp-texts.json").write_text(json.dumps(texts))
    said = " ".join(tables.real(tmp_path).split())
    assert "llama.cpp (xllamacpp 7) writes the same 9 greedy texts" in said
    assert said.endswith("it writes 4 of them. Recorded E by `Y`.")


def test_clients_of_the_record_are_those_that_the_tests_run():
    """In the versions that are installed: a pin that changes needs a new record."""
    rows = json.loads((ROOT / "figures/clients.json").read_text("utf-8"))["rows"]
    names = {*AGENTS, "AI SDK", *(client for client, *_ in FRAMEWORKS.values())}
    assert sorted(row["client"] for row in rows) == sorted(names)
    told = {package for row in rows for package in row["packages"]}
    pins = {name_of(pin): re.split("[@=]", pin)[-1] for pin in [*NPM, *PYPI]}
    del pins["zod"]  # the AI SDK's tests describe a tool with it
    assert told == {f"{name} {version}" for name, version in pins.items()}


def test_the_readme_is_one_page():
    prose = re.sub(r"(?s:<!--.*?-->)|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)", " ", README)
    words = [word for word in prose.split() if any(map(str.isalnum, word))]
    assert 600 <= len(words) <= 800


def test_durations_and_sums_of_chapters(tmp_path):
    told = "# T\n\n40 minutes to read, 85 to write\n\n"
    exercise = "*Difficulty: easy. 20 minutes.*\n"
    for name in ("01-a.md", "02-b.md", "a-c.md"):
        (tmp_path / name).write_text(told + exercise * 2)
    files = cells.chapter_files(tmp_path)
    assert tables.times(files).splitlines()[2:] == [
        "| [1. T](01-a.md) | 40 min | 1 h 25 | 2 in 40 min |",
        "| [2. T](02-b.md) | 40 min | 1 h 25 | 2 in 40 min |",
        "| chapters 1 to 2 | 1 h 20 | 2 h 50 | 4 in 1 h 20 |",
        "| [A. T](a-c.md) | 40 min | 1 h 25 | 2 in 40 min |",
        "| appendices | 40 min | 1 h 25 | 2 in 40 min |",
    ]
    _, _, *rows = tables.sessions(files).splitlines()
    assert rows[2] == "| chapters 1 to 2 | 1 h 20 | 2 h 50 | 1 h 20 | 2 |"
    assert rows[4] == "| appendices | 40 min | 1 h 25 | 40 min | 1 |"
    assert tables.duration(1630) == "27 h 10" and tables.duration(60) == "1 h 00"


def test_answers_in_json_are_counted():
    rows = {"freely": {"right": 9}, "structured_outputs": {"of": 10, "valid": 8}}
    rows["structured_outputs"]["right"] = 5
    rows["bounded"] = {"right": 7}
    run = {"date": "D", "command": "C", "efforts": {"high": rows}}
    said = " ".join(tables.answers(run).split())
    assert "8 valid answers to 10 questions, 5 of them right; 7 if the integer" in said
    assert "Left free, it gets 9 of them right." in said
    assert said.endswith("Recorded D with `C`.")


def test_speed_follows_its_records(tmp_path):
    for path in (ROOT / "figures").glob("*.*"):
        shutil.copy(path, tmp_path)
    assert not headline.is_old(tmp_path)
    record = tmp_path / "12-bench.json"
    report = json.loads(record.read_text(encoding="utf-8"))
    first = report["decode"][0]
    first["tokens_per_second"], first["limit"] = 601.4, 1000
    record.write_text(json.dumps(report), encoding="utf-8")
    headers, rows, below = headline.section(tmp_path)
    assert headers[1] == "batch 1"
    assert [row[:2] for row in rows[:6]] == [
        ["**gpt-oss-120b, H100**", "**435**"],
        ["vLLM 0.33.0", "227"],
        ["the H100's limit", "632"],
        ["**gpt-oss-120b, H200**", "**601**"],
        ["vLLM 0.33.0", "244"],
        ["the H200's limit", "1,000"],
    ]
    assert "gpt-oss-120b: 60 and 26 at 1," in below
    first_page = " ".join(headline.reach(tmp_path).split())
    assert "With random weights in gpt-oss-120b's real shapes" in first_page
    assert "it's 601 and " in first_page and ", 60 % and " in first_page
    assert "and 2.5 and " in first_page  # times vLLM
    assert headline.is_old(tmp_path)
    headline.draw(tmp_path)
    assert not headline.is_old(tmp_path)


def test_mixed_loads_follow_their_records(tmp_path):
    for name in ("vllm-h200", "12-compare-load"):
        shutil.copy(ROOT / f"figures/{name}.json", tmp_path)
    record = tmp_path / "12-compare-load.json"
    report = json.loads(record.read_text(encoding="utf-8"))
    (found,) = (
        row["found"]
        for row in report["rows"]
        if (row["tree"], row["model"]) == ("new", "gpt-oss-120b")
    )
    found["512 at once, tokens/s"] = 6543.2
    found["8 a second: next token, p99 ms"] = 9.87
    record.write_text(json.dumps(report), encoding="utf-8")
    _, rows, _ = headline.load(tmp_path)
    assert rows[0][:3] == ["512 at once", "**SimpleLLM**", "6,543"]
    assert rows[1][1:3] == ["vLLM 0.26.0", "3,091"]
    assert rows[4][-1].endswith(" / 9.9") and rows[5][-1] == "24 / 42 / 94"


def test_tabulated_speeds_of_a_model_are_of_one_version():
    vllm = headline.read(ROOT / "figures", "vllm-h200")
    for row in vllm["decode"]:
        if row["batch"] in headline.TABULATED:
            assert row["vllm"] == headline.version(row["model"], vllm)


def test_linked_files_exist():
    chapters = ROOT / "chapters"
    pages = [(README, ROOT), (CONTRIBUTING, ROOT)]
    pages += [(text, chapters) for text in (INDEX, TEACHING, SPEED, MODELS, MANUAL)]
    assert HOSTED in README
    for text, folder in pages:
        links = set(LINK.findall(text)) - {HOSTED}
        assert links
        assert [link for link in links if not (folder / link).exists()] == []


def test_every_chapter_is_listed():
    for chapter in cells.chapter_files(ROOT / "chapters"):
        assert f"(chapters/{chapter.name})" in README
        assert f"({chapter.name})" in INDEX
        assert f"({chapter.name})" in TEACHING


def test_drawings_are_described_as_they_say():
    words = tomllib.loads((ROOT / "figures/drawings/alt.toml").read_text("utf-8"))
    shown = IMAGE.findall(INDEX)
    assert [name for _, name in shown] == ["engine", "model", "request"]
    for alt, name in [*shown, *IMAGE.findall(README)]:
        assert alt == words.get(name, alt)


def test_the_first_page_has_no_long_cell():
    for cell in CELLS:
        lines = cell.body.splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 88, cell.body[:200]


def test_the_forward_pass_takes_about_eighty_lines():
    lines = [
        line
        for cell in CELLS
        for node in ast.parse(cell.body).body
        if isinstance(node, ast.FunctionDef | ast.While)
        for line in ast.unparse(node).splitlines()
        if '"""' not in line
    ]
    assert "about eighty lines" in INDEX
    assert 70 <= len(lines) <= 90


def test_each_chapter_replaces_something_on_the_page():
    code = "\n".join(cell.source for cell in CELLS)
    row = re.compile(r"^\| \[[^\]]+\]\((\d\d-[\w-]+\.md)\) \| `([^`]+)` ", re.M)
    rows = row.findall(INDEX)
    chapters = cells.chapter_files(ROOT / "chapters")
    numbered = [path.name for path in chapters if path.name[0].isdigit()]
    assert [chapter for chapter, _ in rows] == numbered
    assert [line for _, line in rows if line not in code] == []


def test_wrong_turns_are_of_blanks_whose_wrong_answers_are_kept():
    parts = re.split(r"^\*\*\[(\w+)\. .*", TEACHING, flags=re.MULTILINE)[1:]
    told = dict(zip(parts[0::2], parts[1::2], strict=True))
    for number, part in told.items():
        name = f"{number:0>2}" if number.isdigit() else number
        kept = (ROOT / f"tests/course/wrong/ch{name}.py").read_text(encoding="utf-8")
        named = set(re.findall(r"^- `([\w.]+)`:", part, re.MULTILINE))
        assert named
        assert named <= set(re.findall(r'^@wrong\("([\w.]+)"', kept, re.MULTILINE))


def test_commands_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = README + INDEX + CONTRIBUTING + MANUAL
    named = set(re.findall(r"make (\w+)(?=`|$| +#)", text, re.MULTILINE))
    assert {"demo", "test", "lab", "book", "export", "check"} <= named <= {*targets}


def test_python_example_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", MANUAL, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 6
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_demo_picture_loads_nothing():
    svg = (ROOT / "figures/demo.svg").read_text(encoding="utf-8")
    assert "47&#160;+&#160;85&#160;=&#160;132" in svg
    assert "url(" not in svg.replace("url(#", "")
    assert "font-face" not in svg
