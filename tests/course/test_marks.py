"""Numbers in the prose are those of the records that its marks name."""

import re
from collections.abc import Iterator
from pathlib import Path

import cells
import marks
import pytest

ROOT = Path(__file__).parents[2]
CITED = re.compile(r"`figures/[\w-]+\.json`")
COSTS = re.compile(r"^## Costs and limits$(.*?)^## ", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^- (?:.*\n)(?:  .*\n)*", re.MULTILINE)
MEASURED = re.compile(r"\d{4}-\d\d-\d\d|(?<![\w.])\d[\d,]*\.\d+")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only record is named "run"."""
    rows = (
        '[{"batch": 1, "ms": 4.0}, {"batch": 64, "ms": 10.0}, {"batch": 64, "ms": 20}]'
    )
    (tmp_path / "run.json").write_text(
        f'{{"date": "2026-11-22", "in all": {{"16": 1234.5}}, "rows": {rows}}}'
    )
    monkeypatch.setattr(marks, "FIGURES", tmp_path)
    marks.record.cache_clear()
    yield
    marks.record.cache_clear()


@pytest.mark.usefixtures("record")
def test_numbers_become_those_of_the_record_with_the_decimals_of_the_page() -> None:
    text = """\
It took 9 ms before.

It takes 9 ms, {ms} in all, {long}
times as long at batch 64 ({date}).
<!-- run
longest = max(column(rows, "ms",
  batch=64))
takes {few} = one(rows, batch=1).ms
{ms} = in_all[16]
{long}
times = longest / one(rows, batch=1).ms
{date} = date
-->
"""
    old = {"few": 9, "ms": "1.00", "long": "+7.1", "date": "2020-01-01"}
    new = {"few": 4, "ms": "1,234.50", "long": "+5.0", "date": "2026-11-22"}
    given = text.replace("takes 9 ms", "takes {few} ms").replace(
        "{long}\ntimes =", "{long} ="
    )
    assert marks.renewed(given.format(**old)) == given.format(**new)


@pytest.mark.usefixtures("record")
def test_a_mark_speaks_of_the_item_or_the_fence_above() -> None:
    row = "<!-- run\n1 = one(rows, batch=1).ms\n-->\n"
    text = f"\n\n- it took 1\n- it takes 1\n{row}- 1\n\n```diff\n+ a # 1 µs\n```\n{row}"
    assert marks.renewed(text) == text.replace("takes 1", "takes 4").replace(
        "# 1", "# 4"
    ).replace("run\n1", "run\n4")


@pytest.mark.usefixtures("record")
def test_two_marks_may_follow_one_paragraph() -> None:
    row = "<!-- run\n{} = one(rows, batch=1).ms\n-->\n"
    text = "\n\n2 and 3\n" + row.format(2) + row.format(3)
    assert marks.renewed(text) == "\n\n4 and 4\n" + 2 * row.format(4)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("paragraph", ["It takes 5 ms.", "4 ms, then 4 ms.", "4.5 ms"])
def test_words_that_are_not_there_once_are_refused(paragraph: str) -> None:
    text = f"\n\n{paragraph}\n<!-- run\n4 = one(rows, batch=1).ms\n-->\n"
    with pytest.raises(ValueError, match="of '4' in"):
        marks.renewed(text)


def unmarked(path: Path) -> Iterator[str]:
    """What a chapter says of costs with a record's name, without marked numbers."""
    text = marks.replace(path.read_text(encoding="utf-8"), lambda number: "")
    (costs,) = COSTS.findall(cells.FENCE.sub("", marks.MARK.sub("", text)))
    yield from (item for item in ITEM.findall(costs) if CITED.search(item))


@pytest.mark.parametrize(
    "path",
    [p for p in cells.chapter_files(ROOT / "chapters") if p.name[0].isdigit()],
    ids=lambda path: path.stem,
)
def test_an_entry_that_cites_a_record_has_no_other_measurement(path: Path) -> None:
    for item in unmarked(path):
        assert not MEASURED.findall(CITED.sub("", item)), item
