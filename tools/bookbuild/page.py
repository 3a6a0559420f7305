"""Turn a chapter and its outputs into the Markdown that mdBook understands."""

import base64
import html
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import CHAPTER, EDITION, number_of
from latex2mathml.converter import convert

from bookbuild.execute import ANSI, BookError, Outputs, code_cells, read

WIDGET = "application/vnd.simplellm.page+html"  # from chapters/course/widgets
MADE = "page made by tools/book.py"  # a comment at the head of each page

# What the text of a page may hold, in the order in which the readings are tried: code
# of either kind comes first, for what it holds is neither math nor a path.
TOKEN = re.compile(
    r"""
    ^(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)\n
        (?P<code>(?:.*\n)*?)(?P<close>[ \t>]*(?P=fence)[ \t]*)$
    | (?P<span>(?<!`)(?P<ticks>`+)(?!`)(?:.|\n(?!\s*\n))+?(?<!`)(?P=ticks)(?!`))
    | (?P<comment><!--(?s:.*?)-->)
    | (?P<dollar>\\\$)
    | \$\$(?P<display>(?s:.+?))\$\$
    | \$(?P<inline>(?![\s$])(?:\\.|[^$\\\n]|\n(?!\s*\n))+?(?<!\s))\$(?!\d)
        (?P<after>[.,;:!?)]*)
    | (?P<outside>(?<=\]\()\.\./|(?<=\]:[ ])\.\./|(?<=src=")\.\./|(?<=href=")\.\./)
    """,
    re.VERBOSE | re.MULTILINE,
)
DIRECTIVE_LINE = re.compile(r"^[ \t>]*#\|.*\n?", re.MULTILINE)
# ln, max, softmax: a name of several letters, and what follows if it opens a bracket.
FUNCTION = re.compile(r"<(m[io])>([A-Za-z]{2,})</\1>(?P<call><mo[^>]*>&#x00028;)?")
DETAILS = re.compile(r"<details\b")
DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)
DOLLAR = '<span class="dollar">$</span>'
RAISED_CHARACTERS = 160
TITLE = re.compile(r"^# (?=.)", re.MULTILINE)
# In one cell of Markdown; those of blanks have their code in cells of its own.
ANSWER = re.compile(
    r"^<details>\s*<summary>(?:Solution|Hint)\b.*?^</details>$",
    re.MULTILINE | re.DOTALL,
)
EDITION_NOTE = """\
<p class="edition">This is the book, the course with all its outputs. You write the
engine yourself in the workbook, the same pages as notebooks with empty blanks:
<code>make lab</code> opens it.</p>
"""
BLANK_NOTE = """\
<p class="output blank">This is yours to write, in the workbook.</p>"""
DRAWS = {"save_figure(": "figure", "widget(": "widget", "table(": "table"}


@dataclass
class Page:
    """Markdown for mdBook, and the images it shows by their path from the page."""

    markdown: str
    images: dict[str, bytes] = field(default_factory=dict)


def make(
    name: str,
    source: str,
    outputs: Outputs,
    *,
    answers: bool = True,
    notebook: str = "",
) -> Page:
    """The page of chapter ``name``; ``outputs`` holds one list for each code cell.

    Without ``answers`` it lacks our versions, solutions and hints: so the search finds
    none. ``notebook`` is the address of the same as a notebook.

    Raises BookError for math that cannot be turned into MathML and for an image
    without alt text.
    """
    page = Page("")
    source = EDITION.sub(EDITION_NOTE, source)
    if not answers:
        source = ANSWER.sub("", source)
    if CHAPTER.fullmatch(name):
        source = TITLE.sub(f"# {number_of(Path(name))}. ", source, count=1)
    if notebook:
        link = f'\n\n<p class="as-notebook"><a href="{notebook}">As a notebook</a></p>'
        source = re.sub(r"^(# .*)$", rf"\1{link}", source, count=1, flags=re.MULTILINE)
    read_source = read(source)
    if len(outputs) != len(code_cells(read_source)):
        raise BookError(f"{name}: {len(outputs)} outputs for another number of cells")
    remaining = iter(outputs)
    blocks, module = [f"<!-- {MADE} -->"], ""
    depth = 0  # of the <details> that are open in the chapter itself
    for cell in read_source.cells:
        if cell.cell_type != "code":
            blocks.append(prose(name, cell.source))
            depth += len(DETAILS.findall(cell.source)) - cell.source.count("</details>")
            continue
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        fold = hidden and not depth
        if fold:
            blocks.append(f"<details><summary>{label(cell.source)}</summary>")
        directives = [line.split() for line in DIRECTIVE_LINE.findall(cell.source)]
        for words in directives:
            if words[1:2] == ["default_exp"]:
                module = words[2]
            if words[1:2] == ["export"]:
                written = (words[2:] or [module])[0].replace(".", "/")
                blocks.append(f'<div class="module">simplellm/{written}.py</div>')
        solves = any(words[1:2] == ["solution"] for words in directives)
        code = without_directives(cell.source)
        if code and (answers or not solves):
            blocks.append(fenced(code, "python"))
        if fold:
            blocks.append("</details>")
        alts = [words[2:] for words in directives if words[1:2] == ["alt"]]
        alt = " ".join(" ".join(words) for words in alts)
        blocks += [shown(name, page, output, alt) for output in next(remaining)]
    page.markdown = "\n\n".join(block for block in blocks if block) + "\n"
    return page


def without_directives(code: str) -> str:
    return DIRECTIVE_LINE.sub("", code).strip("\n")


def label(code: str) -> str:
    """What a folded cell is called: by what it shows, or the names that it defines."""
    for call, shown in DRAWS.items():
        if call in code:
            return f"Code of the {shown}"
    names = [f"<code>{name}</code>" for name in DEFINED.findall(code)]
    return f"Code: {', '.join(names)}" if names else "Code"


def fenced(text: str, language: str) -> str:
    """A fenced block that no run of backticks in ``text`` closes."""
    ticks = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def prose(name: str, text: str) -> str:
    """Markdown with MathML for math, no directive lines, and paths from the book."""

    def replace(match: re.Match[str]) -> str:
        if match["fence"]:
            return fence(match)
        if match["dollar"]:
            return DOLLAR
        if match["display"]:
            return display_math(name, match["display"])
        if match["inline"]:
            # Without the span a line may begin with the comma behind the formula.
            math = mathml(name, match["inline"].strip("`"), "inline")
            return f'<span class="inline-math">{math}{match["after"]}</span>'
        if match["outside"]:
            return ""  # what lies beside chapters/ is copied beside the pages
        return match[0]

    def fence(match: re.Match[str]) -> str:
        language = match["info"].split()[:1]
        if language == ["math"]:
            return display_math(name, match["code"])
        if language != ["python"]:
            return match[0]
        code = DIRECTIVE_LINE.sub("", match["code"]).lstrip("\n")
        return f"{match['indent']}{match['fence']}python\n{code}{match['close']}"

    return TOKEN.sub(replace, text)


def display_math(name: str, latex: str) -> str:
    """Math in a line of its own, which scrolls where it is too wide."""
    return f'<span class="display-math">{mathml(name, latex, "block")}</span>'


def mathml(name: str, latex: str, display: str) -> str:
    """MathML on one line, in which Markdown finds nothing to interpret."""
    latex = re.sub(r"\s+", " ", latex).strip()
    known = re.sub(r"(\\(?:begin|end)){(?:aligned|align)}", r"\1{align*}", latex)
    known = re.sub(r"\\arg(?![A-Za-z])", r"\\operatorname{arg}", known)
    if "\\\\" in known and "\\begin" not in known:
        known = rf"\begin{{align*}} {known} \end{{align*}}"
    try:
        made = convert(known, display=display)
    except Exception as error:
        raise BookError(f"{name}: cannot read the math {latex!r}: {error!r}") from None
    if unknown := re.search(r"\\[A-Za-z]+", made):
        raise BookError(f"{name}: unknown {unknown[0]} in the math {latex!r}")
    # 1{,}000 is one number, not two around a comma.
    made = re.sub(r"</mn><mrow><mo>&#x0002C;</mo></mrow><mn>", "&#x0002C;", made)
    made = FUNCTION.sub(spaced, made)
    return re.sub(r"[*_`\[\]|~$\\]", lambda special: f"&#{ord(special[0])};", made)


def spaced(function: re.Match[str]) -> str:
    """A function's name with TeX's thin space around it, none before a bracket."""
    call = function["call"] or ""
    behind = "0" if call else "0.167em"
    return f'<mo lspace="0.167em" rspace="{behind}">{function[2]}</mo>{call}'


def shown(name: str, page: Page, output: dict[str, Any], alt: str) -> str:
    """One output of a cell; its images are added to ``page``."""
    if output["output_type"] == "stream":
        # Warnings and progress bars tell of this machine, not of the chapter.
        return text_output(output["text"]) if output["name"] == "stdout" else ""
    if output["output_type"] == "error":
        if output["ename"] == "NotYours":
            return BLANK_NOTE
        return raised(output["ename"], output["evalue"])
    data = output["data"]
    if "figure" in output.get("metadata", {}):
        return ""  # the text below the cell shows the committed file
    if WIDGET in data:  # HTML of a page, with its script
        return joined(data[WIDGET])
    for mime, suffix in (("image/svg+xml", "svg"), ("image/png", "png")):
        if mime in data:
            if not alt:
                raise BookError(
                    f"{name}: a cell shows an image without alt text; "
                    "add a line `#| alt What the image shows` to the cell"
                )
            content = joined(data[mime])
            path = f"outputs/{name}-{len(page.images) + 1}.{suffix}"
            svg = suffix == "svg"
            page.images[path] = content.encode() if svg else base64.b64decode(content)
            return f'<p><img src="{path}" alt="{html.escape(alt)}"></p>'
    if "text/html" in data:
        # One HTML block: it ends at the first blank line.
        inside = re.sub(r"\n\s*\n", "\n", joined(data["text/html"]).strip())
        inside = re.sub(r"\$(?![^<]*>)", DOLLAR, inside)
        return (
            f'<div class="output">\n<div class="table-wrapper">{inside}</div>\n</div>'
        )
    if "text/markdown" in data:
        return f'<div class="output">\n\n{joined(data["text/markdown"])}\n\n</div>'
    return text_output(data.get("text/plain", ""))


def joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def text_output(text: str | list[str]) -> str:
    plain = ANSI.sub("", joined(text)).rstrip()
    if not plain.strip():
        return ""
    return f'<div class="output">\n\n{fenced(plain, "text")}\n\n</div>'


def raised(kind: str, message: str) -> str:
    """The exception of a cell that raises on purpose: one folded line."""
    lines = ANSI.sub("", message).strip().splitlines()
    line = f"{kind}: {lines[0]}" if lines else kind
    if len(line) > RAISED_CHARACTERS:
        line = line[: RAISED_CHARACTERS - 1] + "…"
    return (
        '<details class="output raised">\n'
        f"<summary>This cell raises <code>{html.escape(kind)}</code></summary>\n\n"
        f"{fenced(line, 'text')}\n\n</details>"
    )
