"""Fill in what is computed: tables and numbers in README.md and on pages of chapters/.

python tools/tables.py            write them, and the picture of the speed
python tools/tables.py --check    exit 1 if one of them is out of date
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import headline
import marks
from cells import chapter_files, number_of
from headline import read

ROOT = Path(__file__).resolve().parents[1]
TITLE = re.compile(r"# (.+)")
READING = re.compile(r"(\d+) minutes? to read, (\d+) to write")
WRAPPING: Any = {"break_long_words": False, "break_on_hyphens": False}
SESSION = 90  # minutes that a group writes at a time
EXERCISE = re.compile(r"^\*Difficulty: \w+\. (\d+) minutes\.\*$", re.MULTILINE)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1
) -> str:
    """A Markdown table, its first columns of ``words`` to the left, others right."""
    lines = [headers, ["---"] * words + ["--:"] * (len(headers) - words), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def replace(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the comments of ``name`` replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no <!-- {name} --> … <!-- /{name} --> in the text")
    return before + start + content + "\n" + end + after


class Minutes(NamedTuple):
    """How long a chapter takes: to read, to write its blanks, to do its exercises."""

    link: str
    read: int
    write: int
    exercises: int
    tasks: int  # exercises

    @property
    def is_numbered(self) -> bool:
        """Whether it is one of the twelve and no appendix."""
        return self.link[1].isdigit()  # [7. KV cache](…)


def minutes(chapters: Iterable[Path]) -> list[Minutes]:
    """What the heads and the exercises of ``chapters`` say."""
    rows = []
    for path in chapters:
        text = path.read_text(encoding="utf-8")
        title, reading = TITLE.match(text), READING.search(text)
        if not (title and reading):
            raise ValueError(f"{path.name}: no title or no minutes")
        link = f"[{number_of(path)}. {title[1]}]({path.name})"
        exercises = [*map(int, EXERCISE.findall(text))]
        read, write = map(int, reading.groups())
        rows.append(Minutes(link, read, write, sum(exercises), len(exercises)))
    return rows


def duration(minutes: int) -> str:
    """ "45 min", "1 h 25"."""
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{rest} min"
    return f"{hours} h {rest:02}"


def total(rows: Sequence[Minutes], name: str = "") -> Minutes:
    """The sum of what several chapters take."""
    sums = [sum(column) for column in zip(*(m[1:] for m in rows), strict=True)]
    return Minutes(name, *sums)


def parts(rows: Sequence[Minutes]) -> list[tuple[str, list[Minutes]]]:
    """The chapters and the appendices, if there are any, each with its sum's name."""
    numbered = [m for m in rows if m.is_numbered]
    others = [m for m in rows if not m.is_numbered]
    named = (f"chapters 1 to {len(numbered)}", numbered), ("appendices", others)
    return [(name, part) for name, part in named if part]


def with_sums(rows: Sequence[Minutes]) -> list[Minutes]:
    """The chapters and their sum, then the appendices and theirs."""
    return [m for name, part in parts(rows) for m in (*part, total(part, name))]


def times(chapters: Iterable[Path]) -> str:
    """How long each chapter takes to read and its code to write, and the sums."""
    rows = [
        (
            m.link,
            duration(m.read),
            duration(m.write),
            f"{m.tasks} in {duration(m.exercises)}",
        )
        for m in with_sums(minutes(chapters))
    ]
    return table(("chapter", "to read", "to write", "exercises"), rows)


MODEL, ENGINE = (5, 4, 6), (7, 8, 9)  # chapters, in the order of the shorter paths
FIRST, SECOND = 60, 30  # minutes of the pages before the chapters, as they tell


def hours(rows: Sequence[Minutes], pages: int = FIRST + SECOND) -> int:
    """To read and to write chapters and the pages before them."""
    sums = total(rows)
    return round((pages + sums.read + sums.write) / 60)


def ways(numbered: Sequence[Minutes]) -> tuple[list[Minutes], list[Minutes]]:
    """The chapters of a weekend and those of a week."""
    weekend = [numbered[n - 1] for n in MODEL]
    return weekend, [*weekend, *(numbered[n - 1] for n in ENGINE)]


def begin(chapters: Iterable[Path]) -> str:
    """Where to begin, and the hours of a weekend, of a week and of all."""
    numbered = [m for m in minutes(chapters) if m.is_numbered]
    weekend, week = ways(numbered)
    text = (
        "Begin with `make lab`: it opens your workbook at its first page, and there "
        f"you write. A weekend, about {hours(weekend, FIRST)} hours, is enough for the "
        "model; "
        f"a week, {hours(week)} hours, for an engine that serves many; all twelve "
        f"chapters take about {hours(numbered)}."
    )
    return fill(text, 88, **WRAPPING)


def paths(chapters: Iterable[Path]) -> str:
    """Ways through the course, and the hours that they take."""
    numbered = [m for m in minutes(chapters) if m.is_numbered]

    def links(numbers: Sequence[int]) -> str:
        files = [numbered[n - 1].link.partition("]")[2] for n in numbers]
        *some, last = (f"[{n}]{file}" for n, file in zip(numbers, files, strict=True))
        return f"chapters {', '.join(some)} and {last}"

    weekend, week = ways(numbered)
    every = total(numbered)
    lines = (
        f"**A weekend, about {hours(weekend, FIRST)} hours:** this page, then "
        f"{links(MODEL)}. They are the model, and at the end text comes from functions "
        "of yours.",
        f"**A week, about {hours(week)} hours:** then [the second page]"
        f"(small-engine.md), half an hour, and {links(ENGINE)}. Now many requests "
        "share the model, as in any engine that serves.",
        f"**All twelve chapters, about {hours(numbered)} hours**, and "
        f"{round(every.exercises / 60)} more for {every.tasks} exercises: chapters 1 "
        "to 3 when you want to know where tokens and weights come from, 10 to 12 when "
        "you want to know the GPU. If you don't write kernels, leave out 11 and 12.",
    )
    return "\n".join(
        fill(line, 88, initial_indent="- ", subsequent_indent="  ", **WRAPPING)
        for line in lines
    )


def sessions(chapters: Iterable[Path]) -> str:
    """How long each chapter takes, and how often a group meets to write it."""
    each = minutes(chapters)
    meetings = {m.link: -(-m.write // SESSION) for m in each}
    for name, part in parts(each):
        meetings[name] = sum(meetings[m.link] for m in part)
    rows = [(m.link, *map(duration, m[1:4]), meetings[m.link]) for m in with_sums(each)]
    headers = "chapter", "read", "write", "exercises", f"sessions of {SESSION} minutes"
    return table(headers, rows)


def evaluation(recorded: dict[str, Any]) -> str:
    """Right answers of each skill at each reasoning effort, from the evaluation's JSON.

    `{"efforts": {"high": {"addition": {"right": 150, "of": 150}, …}, …}}`
    """
    efforts = recorded["efforts"]
    skills = dict.fromkeys(skill for results in efforts.values() for skill in results)

    def cell(effort: str, skill: str) -> str:
        result = efforts[effort].get(skill)
        if result is None:
            return ""
        right, of = result["right"], result["of"]
        return f"{right} of {of} ({percent(right, of)})"

    rows = [[skill, *(cell(effort, skill) for effort in efforts)] for skill in skills]
    filled = table(["skill", *(f"effort {effort}" for effort in efforts)], rows)
    return (
        f"{filled}\n\nRecorded {recorded['date']} on one {recorded['device']} in "
        f"{recorded['dtype']} with torch {recorded['torch']}, in "
        f"{recorded['seconds']:.0f} seconds."
    )


def answers(recorded: dict[str, Any]) -> str:
    """How many answers under a schema are valid and right, from their record."""
    rows = recorded["efforts"]["high"]
    free, held, narrow = rows["freely"], rows["structured_outputs"], rows["bounded"]
    return (
        "Its training had no answers in JSON. Held to a schema (an integer, or one of "
        f"two\nnumbers), it gives {held['valid']} valid answers to {held['of']} "
        f"questions, {held['right']} of them right;\n{narrow['right']} if the integer "
        f"has bounds. Left free, it gets {free['right']} of them right. Recorded\n"
        f"{recorded['date']} with\n`{recorded['command']}`."
    )


def percent(right: int, of: int) -> str:
    """A share in percent, rounded down, so that 100 % means all."""
    return f"{right * 1000 // of / 10} %"


def measurements(figures: Path) -> str:
    """One line for each measurement that a chapter records, from its JSON."""
    names = "01-encode 02-open 03-decode 04-dispatch 05-attention 06-recompute"
    records = [read(figures, name) for name in names.split()]
    encode, opening, decode, dispatch, attention, step = records
    text = encode["seconds"][-1]
    size, copied, mapped = opening["rows"][-1]
    number = decode["ns_per_element"]
    tokens = max(dispatch["kept_ms"], key=int)
    kept, naive = dispatch["kept_ms"][tokens], dispatch["naive_ms"][tokens]
    full, sliding = attention["full_ms"][-1], attention["sliding_ms"][-1]
    first, last = (1e3 * step["seconds"][i] for i in (0, -1))
    rows = [
        (
            f"encode {text['characters']:,} characters in one piece",
            f"{1e3 * text['tiktoken']:.2f} ms; naive {1e3 * text['naive']:.0f} ms",
        ),
        (
            f"map {size:,} MB of weights",
            f"{mapped:.1f} ms; read them {copied:,.0f} ms",
        ),
        (
            "dequantize one MXFP4 number",
            f"{number['table']:.2f} ns; by two gathers {number['gathers']:.1f} ns",
        ),
        (
            f"one layer of experts, {tokens} tokens",
            f"{kept:.1f} ms; every expert on every token {naive:.1f} ms",
        ),
        (
            f"one layer of attention, {attention['lengths'][-1]:,} tokens",
            f"sliding {sliding:,.0f} ms; full {full:,.0f} ms",
        ),
        (
            "one more token, everything computed again",
            f"{first:.0f} ms after {step['lengths'][0]:,} tokens; "
            f"{last:.0f} ms after {step['lengths'][-1]:,}",
        ),
    ]
    return table(
        ["measured", "result", "chapter", "date"],
        [
            (*row, chapter, record["date"])
            for chapter, (row, record) in enumerate(zip(rows, records, strict=True), 1)
        ],
    )


# The kinds of chat in the tests of `simplellm.text.dialects`, by family.
CHATS = {
    "Qwen3": "qwen",
    "Qwen3-MoE": "qwen",
    "Qwen2.5": "qwen",
    "Llama 3": "llama",
    "Mistral": "mistral",
    "Mixtral": "mistral",
    "Gemma 3": "gemma",
}
FAMILY_HEADERS = (
    "family",
    "quantized",
    "tools",
    "schema",
    "checkpoints",
    "worst error",
    "mistakes",
    "tokens a second",
)


def families(figures: Path) -> str:
    """A line for each family of models, from what its tests recorded."""
    record = read(figures, "c-families")

    def row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
        kind = record["chats"].get(CHATS.get(name, ""), {})
        harmony = name == "gpt-oss"
        return (
            name,
            ", ".join(entry["formats"]),
            "yes" if harmony or kind.get("calls_read") else "",
            "yes" if harmony or kind.get("answers_that_fit") else "",
            str(entry["checkpoints"]),
            f"{entry['worst_error']:.0e}",
            str(entry["mistakes_noticed"]),
            speed_of(name, figures),
        )

    rows = [row(*item) for item in record["families"].items()]
    filled = table(FAMILY_HEADERS, rows, words=4)
    said = record["versions"]
    below = (
        f"Recorded {record['date']} with transformers {said['transformers']} and torch "
        f"{said['torch']} by `{record['command']}`."
    )
    return f"{filled}\n\n{below}"


def speed_of(family: str, figures: Path) -> str:
    """What `simplellm bench --json` recorded of a family's model on an H200."""
    name = f"c-bench-{family.lower().replace(' ', '-')}"
    name = "12-bench" if family == "gpt-oss" else name
    if not (figures / f"{name}.json").exists():
        return "not measured yet"
    report = read(figures, name)
    first = next(row for row in report["decode"] if row["batch"] == 1)
    return f"{first['tokens_per_second']:,.0f} ({report['model']})"


REAL = "real-weights"
REAL_HEADERS = "model license package format where compared".split()


def real(figures: Path) -> str:
    """What ran with its published weights, from the record `REAL`, if there is one.

    `{"date": ..., "command": ..., "rows": [{"model": ..., "license": ..., "package":
    ..., "format": ..., "where": ..., "tokens_per_second": 31.2, "compared": "logits
    within ..."}]}`, with null for the speed on a machine that was busy. Without any
    speed there is no column of them.
    """
    if not (figures / f"{REAL}.json").exists():
        return "No model has run here with its published weights yet."
    record = read(figures, REAL)
    rows = [[row[name] for name in REAL_HEADERS] for row in record["rows"]]
    headers, speeds = REAL_HEADERS, [row["tokens_per_second"] for row in record["rows"]]
    if any(speeds):
        headers = [*headers, "tokens a second"]
        for row, speed in zip(rows, speeds, strict=True):
            row.append(f"{speed:,.0f}" if speed else "not measured")
    said = record["versions"]
    return (
        f"{table(headers, rows, words=len(REAL_HEADERS))}\n\n"
        f"Recorded {record['date']} with transformers {said['transformers']} and gguf "
        f"{said['gguf']} by `{record['command']}`.{real_on_gpus(figures)}"
        f"{llama_cpp_texts(figures)}{real_texts(figures)}"
    )


def real_on_gpus(figures: Path) -> str:
    """A paragraph on each model that ran in bfloat16 on a GPU, from its record."""
    paragraphs = []
    for path in sorted(figures.glob("real-gpu-*.json")):
        record = read(figures, path.stem)
        rows = {row["format"]: row for row in record["rows"]}
        ours, theirs = rows.pop("this engine"), rows.pop("transformers, bfloat16")
        rounded = [
            f"{row['perplexity']:.2f} as {name.upper()}" for name, row in rows.items()
        ]
        numbers = ", ".join([f"{ours['perplexity']:.2f} in bfloat16", *rounded])
        text = (
            f"On an {record['gpu']}, the kernels' bfloat16 logits of {record['model']} "
            f"are {ours['mean_kl']:.0e} nats (KL, mean of {record['tokens']} tokens) "
            f"from float32's, transformers' own bfloat16 is {theirs['mean_kl']:.0e}. "
            f"Of {record['greedy_tokens']} greedy tokens {record['not_the_likeliest']} "
            "aren't float32's likeliest, each a tie within "
            f"{record['widest_gap']:.2f} nats; {record['equal_to_alone']} texts "
            "written at once are each the same as alone, with `batch_invariant`. "
            f"Perplexity: {record['perplexity_float32']:.2f} in float32, {numbers}. "
            f"Recorded {record['date']} by `{record['command']}`."
        )
        paragraphs.append(paragraph(text))
    return "".join(paragraphs)


def paragraph(text: str) -> str:
    """One more, behind what is there."""
    return f"\n\n{fill(text, 88, **WRAPPING)}"


def llama_cpp_texts(figures: Path) -> str:
    """A paragraph on greedy texts of llama.cpp's, if their record is there."""
    if not (figures / "llama-cpp-texts.json").exists():
        return ""
    record = read(figures, "llama-cpp-texts")
    text = (
        f"llama.cpp (xllamacpp {record['versions']['xllamacpp']}) writes the same "
        f"{record['texts']} greedy texts from the numbers of {record['model']}'s GGUF "
        "file, computing in float32. From the file as it is, its products round their "
        f"inputs to 8 bits, and it writes {record['stored']} of them. Recorded "
        f"{record['date']} by `{record['command']}`."
    )
    return paragraph(text)


def real_texts(figures: Path) -> str:
    """A paragraph on published tokenizers and templates, if their record is there."""
    if not (figures / "real-texts.json").exists():
        return ""
    record = read(figures, "real-texts")
    text = (
        f"The ids of {record['vocabularies']} published vocabularies that come with "
        f"llama.cpp's source are those that it expects, and its {record['templates']} "
        f"chat templates write the same {record['prompts']} prompts as in "
        "transformers. Of Mistral's first two tekken.json the ids are tiktoken's. "
        f"Recorded {record['date']} by `{record['command']}`."
    )
    return paragraph(text)


def clients(figures: Path) -> str:
    """Which agents ran against a server of ours, from their record."""
    record = read(figures, "clients")
    rows = [
        (row["client"], ", ".join(row["packages"]), " ".join(row["paths"]))
        for row in record["rows"]
    ]
    filled = table(("client", "packages", "endpoints"), rows, words=3)
    return f"{filled}\n\nRecorded {record['date']} with `{record['command']}`."


def ran(figures: Path) -> str:
    """What of the world has run here: the names in both records."""
    models = [row["model"] for row in read(figures, REAL)["rows"]]
    *some, last = [row["client"] for row in read(figures, "clients")["rows"]]
    text = (
        f"{' and '.join(models)} ran with their published weights, {', '.join(some)} "
        f"and {last} against the server: [in which versions](chapters/models.md)."
    )
    return fill(text, 88, **WRAPPING)


def filled() -> dict[Path, str]:
    """Each page with its tables and its marked numbers computed again."""
    chapters, figures = chapter_files(ROOT / "chapters"), ROOT / "figures"
    measured = {}
    for place, section in (("speed", headline.section), ("load", headline.load)):
        headers, rows, below = section(figures)
        measured[place] = f"{table(headers, rows)}\n\n{below}"
    contents: dict[str, dict[str, str]] = {
        "chapters/teaching.md": {"sessions": sessions(chapters)},
        "chapters/index.md": {
            "times": times(chapters),
            "paths": paths(chapters),
        },
        "chapters/models.md": {
            "evaluation": evaluation(read(figures, "evaluation")),
            "answers": answers(read(figures, "b-answers")),
            "families": families(figures),
            "real": real(figures),
            "clients": clients(figures),
        },
        "chapters/speed.md": {"measurements": measurements(figures), **measured},
        "README.md": {
            "begin": begin(chapters),
            "reach": headline.reach(figures),
            "ran": ran(figures),
        },
    }
    pages = [ROOT / "README.md", *sorted((ROOT / "chapters").glob("*.md"))]
    texts = {page: page.read_text("utf-8") for page in pages}
    for name, tables in contents.items():
        for place, content in tables.items():
            texts[ROOT / name] = replace(texts[ROOT / name], place, content)
    return {page: marks.renewed(text) for page, text in texts.items()}


def main(arguments: list[str]) -> int:
    stale = {
        path: text
        for path, text in filled().items()
        if text != path.read_text(encoding="utf-8")
    }
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: its tables or numbers are out of date")
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    if old := headline.is_old(ROOT / "figures"):
        print(f"figures/{headline.PICTURE}.svg is out of date")
        if "--check" not in arguments:
            headline.draw(ROOT / "figures")
    return int(bool(stale or old) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
