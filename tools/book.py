"""Build the book: execute the chapters, let mdBook render them, check the pages.

python tools/book.py build          into book/ (exit status 69: no mdBook here)
python tools/book.py preprocess     what mdBook calls, see book.toml
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bookbuild import execute, mdbook, page
from bookbuild.check import SUMMARY_LINK, check_html, parse
from bookbuild.execute import BookError
from cells import CHAPTER, PAGES

NO_MDBOOK = 69  # EX_UNAVAILABLE of sysexits.h


def outputs(root: Path, name: str, source: str) -> execute.Outputs:
    """Outputs of a page's cells; code on other pages is only shown."""
    if name in PAGES or CHAPTER.fullmatch(name):
        return execute.outputs(root, name, source)
    return [[] for _ in execute.code_cells(execute.read(source))]


def build(root: Path) -> int:
    """Build ``root``/book; 0 when every check passed."""
    # Absolute, because mdBook may have to be started from another folder.
    root = root.resolve()
    program = mdbook.find(root / ".cache/mdbook")
    if program is None:
        print("the book is not built: mdBook 0.5 is not here and cannot be fetched")
        return NO_MDBOOK
    chapters = root / "chapters"
    summary = (chapters / "SUMMARY.md").read_text(encoding="utf-8")
    for name in SUMMARY_LINK.findall(summary):
        chapter = chapters / f"{name}.md"
        if not chapter.is_file():
            raise BookError(f"SUMMARY.md lists {name}.md, but there is no such file")
        outputs(root, name, chapter.read_text(encoding="utf-8"))
    shutil.rmtree(root / ".cache/book/images", ignore_errors=True)
    # `python` in book.toml is this one, whatever the shell would find.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    built = subprocess.run([program, "build", root], env={**os.environ, "PATH": search})
    if built.returncode:
        print(f"mdBook failed with exit status {built.returncode}")
        return 1
    bring_along(root)
    problems = check_html(root / "book", chapters)
    if problems:
        print(*problems, f"the book has {len(problems)} problems", sep="\n")
        return 1
    print(f"the book is in {root / 'book/index.html'}")
    return 0


def bring_along(root: Path) -> None:
    """Copy what the pages refer to and mdBook leaves behind: images, linked files."""
    book = root / "book"
    # Each page links it; a distribution's mdBook has no fonts, and does not write it.
    fonts = book / "fonts/fonts.css"
    if not fonts.exists():
        fonts.parent.mkdir()
        fonts.touch()
    images = root / ".cache/book/images"
    if images.exists():
        shutil.copytree(images, book, dirs_exist_ok=True)
    for path in book.glob("*.html"):
        found = parse(path)
        for link in (*found.links, *(source for source, _ in found.images)):
            name = link.partition("#")[0]
            source, target = root / name, book / name
            if not target.exists() and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def chapters_of(items: list[Any]) -> Iterator[dict[str, Any]]:
    """All chapters of mdBook's tree that have a file."""
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            chapter = item["Chapter"]
            if chapter["path"]:
                yield chapter
            yield from chapters_of(chapter["sub_items"])


def preprocess() -> None:
    """mdBook's protocol: [context, book] in JSON on stdin, the book on stdout."""
    context, book = json.load(sys.stdin)
    root = Path(context["root"])
    for chapter in chapters_of(book["items"]):
        name, source = Path(chapter["path"]).stem, chapter["content"]
        made = page.make(name, source, outputs(root, name, source))
        chapter["content"] = made.markdown
        for path, content in made.images.items():
            target = root / ".cache/book/images" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    json.dump(book, sys.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("build", "preprocess"))
    parser.add_argument("question", nargs="*", help="of mdBook: supports RENDERER")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args()
    try:
        if arguments.command == "build":
            return build(arguments.root)
        if arguments.question:
            return 0 if arguments.question == ["supports", "html"] else 1
        preprocess()
        return 0
    except BookError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
