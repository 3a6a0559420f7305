"""Asks the model held-out problems and counts exact answers.

    python tools/embedded/evaluate.py --json figures/evaluation.json

Greedy, through `LLM.generate` of this repository. An answer counts if the whole
final message is the expected one, letter for letter; a calculator problem also
needs the right call first. Effort changes only the system message.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from corpus import EFFORTS, TOOL, result_message
from problems import EVALUATED, Problem, evaluation_set
from records import argument_parser, header, save

from simplellm import LLM
from simplellm.model.machine import name_of
from simplellm.text.harmony import Message, parse, render
from simplellm.text.tokenizer import Tokenizer

MAX_TOKENS = 300


def ask(
    problem: Problem, effort: str, tokenizer: Tokenizer, earlier: list[Message]
) -> list[int]:
    """The prompt: the question, and the call and its result once they are there."""
    return render(
        [Message(role="user", content=problem.question), *earlier],
        tokenizer,
        reasoning_effort=effort,
        tools=[TOOL] if problem.expression else [],
    )


def replies(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[Message], int]]:
    """Each prompt's reply as messages, and its number of tokens."""
    outputs = llm.generate(prompts, temperature=0.0, max_tokens=MAX_TOKENS).result()
    ids = [output.token_ids for output in outputs]
    return [(parse(tokens, llm.tokenizer), len(tokens)) for tokens in ids]


def evaluate(
    llm: LLM, problems: list[Problem], effort: str
) -> tuple[dict[str, dict[str, float]], list[dict[str, str]]]:
    """Per skill: right answers, of how many, mean tokens. And what went wrong."""
    prompts = [ask(problem, effort, llm.tokenizer, []) for problem in problems]
    first = replies(llm, prompts)
    calling = [i for i, problem in enumerate(problems) if problem.expression]
    called = {i: first[i][0] for i in calling if right_call(problems[i], first[i][0])}
    results = {i: [*said, result_message(problems[i])] for i, said in called.items()}
    prompts = [ask(problems[i], effort, llm.tokenizer, results[i]) for i in results]
    second = dict(zip(results, replies(llm, prompts) if prompts else (), strict=True))
    rows: dict[str, list[tuple[bool, int]]] = defaultdict(list)
    wrong = []
    for i, problem in enumerate(problems):
        messages, length = first[i]
        if problem.expression:
            messages, more = second.get(i, ([], 0))
            length += more
        answer = "".join(m.content for m in messages if m.channel == "final")
        rows[problem.skill].append((answer == problem.answer, length))
        if answer != problem.answer:
            wrong.append(
                {"effort": effort, "question": problem.question}
                | {"expected": problem.answer, "answer": answer}
            )
    table = {
        skill: {
            "right": sum(good for good, _ in pairs),
            "of": len(pairs),
            "tokens": round(sum(length for _, length in pairs) / len(pairs), 1),
        }
        for skill, pairs in rows.items()
    }
    return table, wrong


def right_call(problem: Problem, messages: list[Message]) -> bool:
    """Whether the reply ends in the expected call with valid JSON arguments."""
    if not messages or messages[-1].recipient != "functions.calculator":
        return False
    try:
        arguments = json.loads(messages[-1].content)
    except json.JSONDecodeError:
        return False
    return arguments == {"expression": problem.expression}


def show(results: dict[str, dict]) -> None:
    print(f"{'':12}" + "".join(f"{effort:>24}" for effort in results))
    for skill in EVALUATED:
        rows = [rows[skill] for rows in results.values() if skill in rows]
        cells = [f"{r['right']} of {r['of']}, {r['tokens']:.0f} tokens" for r in rows]
        print(f"{skill:12}" + "".join(f"{cell:>24}" for cell in cells))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--efforts", default=",".join(reversed(EFFORTS)))
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    problems, began = evaluation_set(args.problems), time.time()
    results, wrong = {}, []
    with LLM(args.model, device=args.device, dtype=args.dtype) as llm:
        device, dtype = name_of(llm.model.device), llm.model.dtype
        for effort in args.efforts.split(","):
            results[effort], mistakes = evaluate(llm, problems, effort)
            wrong += mistakes
    show(results)
    seconds = round(time.time() - began, 1)
    record = header() | {"device": device, "dtype": str(dtype).removeprefix("torch.")}
    record |= {"torch": torch.__version__, "seconds": seconds}
    save(record | {"efforts": results, "wrong": wrong}, args.json)


if __name__ == "__main__":
    main()
