"""Asks the model held-out problems for JSON, and counts valid and right answers.

    python tools/embedded/evaluate_schemas.py --json figures/b-answers.json

Each problem is asked four times, greedily: freely, where the answer is right as in
evaluate.py; with a response_format, which the model is told of; with
structured_outputs, of which it isn't; and so once more, "bounded", by a schema that
says how large the integer may be. An answer in JSON is valid if jsonschema says so, and
right if it is the expected value.
"""

import json
import re
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jsonschema
from problems import Problem, evaluation_set
from records import argument_parser, header, save

from simplellm import LLM
from simplellm.api.build_outputs import ChatOutput

# What an answer is called is what the model calls it in its thoughts.
SKILLS = ("addition", "subtraction", "counting", "comparing")
MAX_TOKENS = 300
WAYS = ("freely", "structured_outputs", "response_format", "bounded")
COUNT, RESULT = {"minimum": 0, "maximum": 13}, {"minimum": -999, "maximum": 1998}
Asked = tuple[Problem, dict[str, Any], dict[str, Any]]  # its schema, and what is right


def asked_of(problem: Problem) -> Asked:
    """The form of an answer: an integer, or one of what is compared."""
    answer = problem.answer
    value: dict[str, Any] = {"type": "integer"}
    right: Any
    if problem.skill == "counting":
        name, right = "total", int(re.findall(r"\d+", answer)[0])
    elif problem.skill == "comparing":
        right, name, other = re.findall(r"[\d.]*\d|larger|smaller", answer)
        value = {"enum": sorted([right, other])}
    else:
        name, right = "result", int(answer.rpartition(" = ")[2])
    schema = {"type": "object", "properties": {name: value}, "required": [name]}
    return problem, schema | {"additionalProperties": False}, {name: right}


def chosen(count: int) -> list[Asked]:
    """``count`` held-out problems, as many of each skill."""
    every = sorted(evaluation_set(), key=lambda problem: problem.skill)
    return [
        asked_of(problem)
        for skill, some in groupby(every, lambda problem: problem.skill)
        if skill in SKILLS
        for problem in [*some][: count // len(SKILLS)]
    ]


def options_of(how: str, schema: dict[str, Any]) -> dict[str, Any]:
    """What asks for the form of an answer."""
    if how == "response_format":
        named = {"name": "answer", "strict": True, "schema": schema}
        return {how: {"type": "json_schema", "json_schema": named}}
    return {} if how == "freely" else {"structured_outputs": {"json": schema}}


def bounded(question: Asked) -> Asked:
    """The same with an integer as narrow as one knows it to be."""
    problem, schema, right = question
    if problem.skill == "comparing":
        return question
    ((name, value),) = schema["properties"].items()
    value = value | (COUNT if problem.skill == "counting" else RESULT)
    return problem, schema | {"properties": {name: value}}, right


def verdict(how: str, question: Asked, output: ChatOutput) -> tuple[bool, bool]:
    """Whether an answer is valid, and whether it is right."""
    problem, schema, right = question
    if how == "freely":
        return True, output.content == problem.answer
    try:
        answer = json.loads(output.content)
        jsonschema.validate(answer, schema)
    except (ValueError, jsonschema.ValidationError):
        return False, False
    return True, answer == right


def evaluate(llm: LLM, some: list[Asked], how: str, effort: str) -> dict[str, Any]:
    """What became of the problems, asked in one way: by skill, right answers."""
    some = [bounded(asked) for asked in some] if how == "bounded" else some
    futures = [
        llm.chat_future(
            [{"role": "user", "content": problem.question}],
            temperature=0,
            max_tokens=MAX_TOKENS,
            reasoning_effort=effort,
            **options_of(how, schema),
        )
        for problem, schema, _ in some
    ]
    found = [
        (asked[0].skill, *verdict(how, asked, future.result()))
        for asked, future in zip(some, futures, strict=True)
    ]
    table: dict[str, Any] = {"of": len(found), "valid": sum(v for _, v, _ in found)}
    table["right"] = sum(right for *_, right in found)
    for skill in SKILLS:
        table[skill] = sum(right for name, _, right in found if name == skill)
    return table


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--problems", type=int, default=200)
    args = parser.parse_args()
    some, began = chosen(args.problems), time.time()
    results: dict[str, dict[str, Any]] = {}
    with LLM(device="cpu") as llm:
        for effort in ("high", "medium"):
            results[effort] = {}
            for how in WAYS:
                results[effort][how] = evaluate(llm, some, how, effort)
                print(f"{effort:8}{how:20}{results[effort][how]}")
    seconds = round(time.time() - began, 1)
    save(header() | {"seconds": seconds, "efforts": results}, args.json)


if __name__ == "__main__":
    main()
