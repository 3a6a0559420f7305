"""What the README and the landing page say is what is there."""

import json
import re
import shutil
from pathlib import Path

import headline
import tables
from export import chapter_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "chapters/index.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#:]+)\)")


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
    assert [row[:2] for row in rows[:3]] == [
        ["**gpt-oss-120b**", "**601**"],
        ["vLLM 0.26.0", "240"],
        ["the GPU's limit", "1,000"],
    ]
    assert "gpt-oss-120b: 60 and 26 at 1," in below
    assert headline.is_old(tmp_path)
    headline.draw(tmp_path)
    assert not headline.is_old(tmp_path)


def test_linked_files_exist():
    for text, folder in ((README, ROOT), (INDEX, ROOT / "chapters")):
        links = LINK.findall(text)
        assert links
        assert [link for link in links if not (folder / link).exists()] == []


def test_every_chapter_is_listed():
    for chapter in chapter_files(ROOT):
        assert f"(chapters/{chapter.name})" in README
        assert f"({chapter.name})" in INDEX


def test_commands_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"make (\w+)(?=`|$| +#)", README + INDEX, re.MULTILINE))
    assert {"demo", "test", "lab", "book", "export", "check"} <= named <= {*targets}


def test_python_example_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 6
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_demo_picture_loads_nothing():
    svg = (ROOT / "figures/demo.svg").read_text(encoding="utf-8")
    assert "47&#160;+&#160;85&#160;=&#160;132" in svg
    assert "url(" not in svg.replace("url(#", "")
    assert "font-face" not in svg
