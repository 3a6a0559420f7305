"""Assert on the HTML of a built book what mdBook itself lets pass."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bookbuild.page import MADE

# mdBook's own files beside the pages: it checks neither, and 404.html is not made.
NOT_A_PAGE = {"toc.html", "print.html", "404.html"}
VOID = {"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
SUMMARY_LINK = re.compile(r"\]\((?:\./)?([^)]+)\.md\)")


class PageParser(HTMLParser):
    """Collects what the checks need from one page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.images: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.comments: list[str] = []
        self.open: list[tuple[str, str]] = []
        self.code: list[str] = []  # Python blocks

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a":
            self.ids.add(values.get("name", ""))
            self.links.append(values.get("href", ""))
        if tag == "img":
            self.images.append((values.get("src", ""), values.get("alt", "")))
        if tag == "script" or (tag == "link" and values.get("rel") != "canonical"):
            self.loaded.append(values.get("src", values.get("href", "")))
        if tag == "code" and "language-python" in values.get("class", ""):
            self.code.append("")
        if tag not in VOID:
            self.open.append((tag, values.get("class", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self.open and tag in (name for name, _ in self.open):
            if self.open.pop()[0] == tag:
                break

    def handle_comment(self, data: str) -> None:
        self.comments.append(data.strip())

    def handle_data(self, data: str) -> None:
        tags = {name for name, _ in self.open}
        classes = {value for _, values in self.open for value in values.split()}
        if "language-python" in classes:
            self.code[-1] += data
        literal = tags & {"pre", "code", "script", "style", "title"}
        if not literal and "dollar" not in classes and "$" in data:
            self.problems.append(f"raw $ in {data.strip()[:60]!r}")
        if "math" in tags and "\\" in data:
            self.problems.append(f"LaTeX left in the math {data.strip()!r}")


def parse(path: Path) -> PageParser:
    parser = PageParser()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    return parser


def check_html(book: Path, chapters: Path) -> list[str]:
    """Everything wrong with the pages in ``book``, made of ``chapters``; none is well.

    All pages of SUMMARY.md are there and made by the preprocessor; no raw dollar sign,
    no directive line, no dead relative link or anchor; each image is there and has alt
    text; what a page loads is there, and nothing comes from elsewhere.
    """
    summary = (chapters / "SUMMARY.md").read_text(encoding="utf-8")
    pages = {f"{name}.html" for name in SUMMARY_LINK.findall(summary)}
    problems = [
        f"{page}: the page is missing"
        for page in sorted(pages)
        if not (book / page).exists()
    ]
    parsed = {
        path: parse(path)
        for path in sorted(book.rglob("*.html"))
        if path.name not in NOT_A_PAGE
    }
    for path, page in parsed.items():
        name = path.relative_to(book).as_posix()
        faults = list(page.problems)
        if MADE not in page.comments:
            faults.append("the preprocessor did not run")
        if any("#region" in comment for comment in page.comments):
            faults.append("a region comment")
        faults += [
            f"directive line {line!r}"
            for block in page.code
            for line in re.findall(r"^[ \t]*#\|.*", block, re.MULTILINE)
        ]
        faults += [
            f"loads {address}"
            for address in (*page.loaded, *(src for src, _ in page.images))
            if urlsplit(address).netloc
        ]
        faults += [
            f"{address} is missing"
            for address in filter(None, page.loaded)
            if not urlsplit(address).netloc
            and not (path.parent / urlsplit(address).path).is_file()
        ]
        for source, alt in page.images:
            if not alt.strip():
                faults.append(f"image {source} has no alt text")
            if not (path.parent / unquote(urlsplit(source).path)).is_file():
                faults.append(f"image {source} is missing")
        faults += dead_links(path, page, parsed)
        problems += [f"{name}: {problem}" for problem in dict.fromkeys(faults)]
    return problems


def dead_links(
    path: Path, page: PageParser, parsed: dict[Path, PageParser]
) -> list[str]:
    """Relative links of a page whose file or anchor is not there."""
    dead = []
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        anchor = unquote(parts.fragment)
        if not target.is_file():
            dead.append(f"dead link {link}")
        elif anchor and target in parsed and anchor not in parsed[target].ids:
            dead.append(f"dead anchor {link}")
    return dead
