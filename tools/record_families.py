"""Record what the tests find of each family of models: figures/c-families.json.

    OMP_NUM_THREADS=1 python tools/record_families.py        some minutes

They compare with transformers on small random checkpoints, and leave what they measured
in pytest's report. README's table of families is made of the record. Nothing is written
if a test fails.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from records import ROOT, header, save

RECORD = ROOT / "figures/c-families.json"
TESTS = (
    "test_oracle.py::test_dense",
    "test_oracle.py::test_mxfp4",
    "test_mutations.py::test_fails_with_a_mistake",
    "test_families.py::test_logits",
    "test_families_mutations.py::test_fails_with_a_mistake",
    "test_formats_loaded.py::test_logits_are_those_of_the_rounded_numbers",
    "test_formats_loaded.py::test_mxfp4",
    "test_dialects.py::test_chats_are_rendered_as_by_transformers",
    "test_dialects.py::test_turns_are_taken_apart",
    "test_dialects_structured.py::test_answers_that_fit_are_served",
)
Found = dict[str, Any]


def run_tests(report: Path) -> None:
    """Run them; what they measured is in ``report``."""
    tests = [f"tests/{test}" for test in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", *tests, f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, check=True)


def passed(report: Path) -> Iterator[tuple[str, Found]]:
    """The name of each test that ran, and the properties that it recorded."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            properties = {
                p.attrib["name"]: p.attrib["value"] for p in case.iter("property")
            }
            yield case.attrib["name"].partition("[")[0], properties


def summarize(report: Path) -> tuple[dict[str, Found], dict[str, Found]]:
    """What was found of each family, and of each kind of chat."""
    families: dict[str, Found] = {}
    chats: dict[str, Found] = {}
    for test, properties in passed(report):
        if "kind" in properties:
            none = {"rendered": 0, "calls_read": 0, "answers_that_fit": 0}
            kind = chats.setdefault(properties["kind"], none)
            kind["rendered"] += test.startswith("test_chats")
            kind["answers_that_fit"] += test.startswith("test_answers")
            kind["calls_read"] += int(properties.get("calls", 0))
            continue
        new: Found = {"checkpoints": 0, "worst_error": 0.0, "mistakes_noticed": 0}
        family = families.setdefault(properties["family"], {**new, "formats": []})
        if test == "test_fails_with_a_mistake":
            family["mistakes_noticed"] += 1
        elif "error" in properties:
            family["checkpoints"] += 1
            worst = max(family["worst_error"], float(properties["error"]))
            family["worst_error"] = worst
        if (form := properties.get("format")) and form not in family["formats"]:
            family["formats"].append(form)
    return families, chats


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run_tests(report)
        families, chats = summarize(report)
    about = header("transformers", "tokenizers")
    save(about | {"families": families, "chats": chats}, RECORD)


if __name__ == "__main__":
    main()
