"""Build the book: execute the chapters, let mdBook render them, check the pages.

python tools/book.py build          into book/ (exit status 69: no mdBook here)
python tools/book.py preprocess     what mdBook calls, see book.toml

The folder can be put on any host of static files, or be opened as files. Each page is
there as a notebook, too, with its outputs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from bookbuild import execute, mdbook, page
from bookbuild.check import SUMMARY_LINK, check_html, parse
from bookbuild.execute import BookError
from cells import CHAPTER, PAGES

AT_ONCE = 2  # pages whose cells are executed
NO_MDBOOK = 69  # EX_UNAVAILABLE of sysexits.h
FONTS = Path(__file__).parent / "bookbuild/fonts"
PAGE_LINK = re.compile(r"(?<!!)\]\((?P<page>[\w-]+)\.md")
# mdBook takes what book.toml says from its environment, too.
WITHOUT_ANSWERS = {
    "MDBOOK_PREPROCESSOR__SIMPLELLM__COMMAND": (
        "python tools/book.py --without-answers preprocess"
    )
}


def runs(name: str) -> bool:
    """Whether a page's cells are executed; code on other pages is only shown."""
    return name in PAGES or bool(CHAPTER.fullmatch(name))


def outputs(root: Path, name: str, source: str) -> execute.Outputs:
    """Outputs of a page's cells."""
    if runs(name):
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
    chapters, book = root / "chapters", root / "book"
    summary = (chapters / "SUMMARY.md").read_text(encoding="utf-8")
    names = SUMMARY_LINK.findall(summary)
    sources = {}
    for name in names:
        chapter = chapters / f"{name}.md"
        if not chapter.is_file():
            raise BookError(f"SUMMARY.md lists {name}.md, but there is no such file")
        sources[name] = chapter.read_text(encoding="utf-8")
    with ThreadPoolExecutor(AT_ONCE) as pool:  # each page has a process of its own
        pages = [pool.submit(outputs, root, *page) for page in sources.items()]
        for future in pages:
            future.result()
    shutil.rmtree(root / ".cache/book/images", ignore_errors=True)
    # `python` in book.toml is this one, whatever the shell would find.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    searched = root / ".cache/book/searched"
    for folder, more in ((book, {}), (searched, WITHOUT_ANSWERS)):
        command: list[str | Path] = [program, "build", root, "--dest-dir", folder]
        built = subprocess.run(command, env={**os.environ, "PATH": path, **more})
        if built.returncode:
            print(f"mdBook failed with exit status {built.returncode}")
            return 1
    # The search finds no answers, since it looks into pages that have none.
    (index,), (open_one,) = (f.glob("searchindex-*.js") for f in (book, searched))
    shutil.copyfile(open_one, index)
    clear(book, chapters)
    for name in filter(runs, names):
        write_notebook(root, name)
    bring_along(root)
    problems = check_html(book, chapters)
    if problems:
        print(*problems, f"the book has {len(problems)} problems", sep="\n")
        return 1
    print(f"the book is in {book / 'index.html'}")
    return 0


def clear(book: Path, chapters: Path) -> None:
    """Remove what mdBook has copied that is no page: the chapters' modules."""
    for path in chapters.iterdir():
        copied = book / path.name
        if path.is_dir():
            shutil.rmtree(copied, ignore_errors=True)
        elif path.suffix != ".md":
            copied.unlink(missing_ok=True)


def write_notebook(root: Path, name: str) -> None:
    """Write a page as a notebook with its outputs."""
    source = (root / f"chapters/{name}.md").read_text(encoding="utf-8")
    found = outputs(root, name, source)

    def linked(match: re.Match[str]) -> str:
        page = match["page"]
        return f"]({page}.ipynb" if runs(page) else f"](../{page}.html"

    notebook = execute.read(PAGE_LINK.sub(linked, source))
    cells = execute.code_cells(notebook)
    for cell, shown in zip(cells, found, strict=True):
        cell.outputs = [nbformat.from_dict(output) for output in shown]
    target = root / f"book/notebooks/{name}.ipynb"
    target.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, target)


def bring_along(root: Path) -> None:
    """Copy what the pages refer to and mdBook leaves behind: fonts, images, files."""
    book = root / "book"
    shutil.rmtree(book / "fonts", ignore_errors=True)  # mdBook's own
    shutil.copytree(FONTS, book / "fonts")
    images = root / ".cache/book/images"
    if images.exists():
        shutil.copytree(images, book, dirs_exist_ok=True)
    for path in book.glob("*.html"):
        page = parse(path)
        for link in (*page.links, *(source for source, _ in page.images)):
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


def preprocess(answers: bool) -> None:
    """mdBook's protocol: [context, book] in JSON on stdin, the book on stdout."""
    context, book = json.load(sys.stdin)
    root = Path(context["root"])
    for chapter in chapters_of(book["items"]):
        name, source = Path(chapter["path"]).stem, chapter["content"]
        notebook = f"notebooks/{name}.ipynb" if runs(name) else ""
        found = outputs(root, name, source)
        made = page.make(name, source, found, answers=answers, notebook=notebook)
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
    parser.add_argument("--without-answers", action="store_true")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args()
    try:
        if arguments.command == "build":
            return build(arguments.root)
        if arguments.question:
            return 0 if arguments.question == ["supports", "html"] else 1
        preprocess(not arguments.without_answers)
        return 0
    except BookError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
