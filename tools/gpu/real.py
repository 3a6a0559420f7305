"""A model with its real weights on a GPU, beside transformers: is it the same model?

    python tools/gpu/real.py SmolLM2-135M-Instruct --json figures/real-gpu-smollm2.json

The folder is as the hub has it; of a GGUF file, tests/real_weights.py makes one. What
the kernels compute in bfloat16 is compared with transformers in float32, and with how
far its own bfloat16 is from that. With --device cpu it says less, and needs no GPU.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from real_weights import PROMPTS, perplexity, text_ids
from records import argument_parser, header, save

from simplellm import LLM
from simplellm.api.load import load_model
from simplellm.apps.quantize import TARGETS, quantize_checkpoint

TOKENS, GREEDY, AT_ONCE = 1000, 48, 32
# A token may be second best where the two likeliest are so near, in nats.
NEAR_TIE = 0.25
CACHE: dict[str, Any] = {"cache_bytes": 2**28}  # many engines come one after the other
Found = dict[str, Any]


def compare(logits: Tensor, exact: Tensor, ids: list[int]) -> Found:
    """How far rows of logits are from the exact ones."""
    first, second = (x.cpu().float().log_softmax(-1) for x in (exact, logits))
    apart = (first.exp() * (first - second)).sum(-1)
    return {
        "mean_kl": apart.mean().item(),
        "worst_kl": apart.max().item(),
        "same_argmax": (first.argmax(-1) == second.argmax(-1)).float().mean().item(),
        "perplexity": perplexity(second, ids),
    }


@torch.inference_mode()
def theirs(model: Any, ids: Sequence[int]) -> Tensor:
    """transformers' logits [T, V] of one sequence."""
    found: Tensor = model(torch.tensor([ids], device=model.device)).logits[0]
    return found


def opened(folder: Path, dtype: torch.dtype, device: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval().to(device)


def greedy_gaps(llm: LLM, exact: Any) -> Found:
    """Greedy texts, each token beside the likeliest in float32 after the same ones."""
    options: Found = {"max_tokens": GREEDY, "temperature": 0, "ignore_eos": True}
    outputs = llm.generate(PROMPTS, **options).result()
    gaps = []
    for output in outputs:
        prompt, new = list(output.prompt_token_ids), list(output.token_ids)
        logs = theirs(exact, prompt + new)[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logs.gather(1, torch.tensor(new, device=logs.device)[:, None])
        gaps += (logs.amax(-1) - chosen[:, 0]).tolist()
    return {
        "greedy_tokens": len(gaps),
        "not_the_likeliest": sum(gap > 0 for gap in gaps),
        "widest_gap": max(gaps),
    }


def equal_to_alone(folder: Path, device: str) -> int:
    """How many of 32 texts written at once are those that each is alone.

    On a GPU that takes sums whose order a batch doesn't change.
    """
    prompts = [f"{prompt} {n}" for n in range(4) for prompt in PROMPTS[:8]]
    options: Found = {"max_tokens": GREEDY, "temperature": 0, "ignore_eos": True}
    gpu = device == "cuda"
    with LLM(folder, device=device, batch_invariant=gpu, **CACHE) as llm:
        together = llm.generate(prompts, **options).result()
        alone = [llm.generate(prompt, **options).result()[0] for prompt in prompts]
    pairs = zip(together, alone, strict=True)
    return sum(one.token_ids == other.token_ids for one, other in pairs)


def of_formats(
    folder: Path, ids: list[int], unrounded: Tensor, device: str
) -> Iterator[Found]:
    """What each format that `simplellm quantize` writes makes of the model.

    Its logits are compared with those of the same rounded weights in float32, and
    these with the ``unrounded`` ones: where the inputs of products are rounded, too,
    each way to compute rounds others.
    """
    with TemporaryDirectory() as made:
        for form in TARGETS:
            target = Path(made) / form
            try:
                quantize_checkpoint(folder, target, form)
            except ValueError as error:  # sizes that a format isn't for
                print(f"{form:10} {str(error)[-60:]}")
                continue
            exact = load_model(target, torch.float32, device).logits(ids).cpu()
            cost = compare(exact, unrounded, ids)["mean_kl"]
            with LLM(target, device=device, **CACHE) as llm:
                found = compare(llm.model.logits(ids), exact, ids)
            yield {"format": form, **found, "kl_of_rounding": cost}


def report(row: Found) -> None:
    """One line of the table."""
    print(
        f"{row['format']:24}{row['mean_kl']:12.1e}{row['worst_kl']:12.1e}"
        f"{row['same_argmax']:12.1%}{row['perplexity']:12.2f}"
        f"{row.get('kl_of_rounding', 0):12.1e}",
        flush=True,
    )


def measure(folder: Path, device: str) -> Found:
    """All that is found of one model, printed as it comes."""
    titles = "mean KL", "worst KL", "same best", "perplexity", "of rounding"
    print(f"{'':24}", *(f"{title:>12}" for title in titles), sep="")
    rows: list[Found] = []
    with LLM(folder, device=device, **CACHE) as llm:
        ids = text_ids(llm, TOKENS)
        wide = opened(folder, torch.float32, device)
        exact = theirs(wide, ids).cpu()
        half = opened(folder, torch.bfloat16, device)
        for name, logits in (
            ("this engine", llm.model.logits(ids)),
            ("transformers, bfloat16", theirs(half, ids)),
        ):
            rows.append({"format": name, **compare(logits, exact, ids)})
            report(rows[-1])
        texts = greedy_gaps(llm, wide)
    print(texts, flush=True)
    ours, reference = (row["mean_kl"] for row in rows)
    assert ours <= 2 * reference, "further from float32 than transformers' bfloat16"
    assert texts["widest_gap"] < NEAR_TIE, "a token that no rounding explains"
    same = equal_to_alone(folder, device)
    print(f"{same} of {AT_ONCE} texts written at once are those that each is alone")
    assert same == AT_ONCE, "a text depends on what is computed beside it"
    for row in of_formats(folder, ids, exact, device):
        rows.append(row)
        report(row)
        assert row["mean_kl"] < 2 * (reference + row["kl_of_rounding"])
    about = {"perplexity_float32": perplexity(exact, ids), "tokens": len(ids)}
    return {**about, **texts, "equal_to_alone": same, "rows": rows}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    found = measure(options.folder, options.device)
    about = header("transformers") | {"model": options.folder.name}
    save(about | found, options.json)


if __name__ == "__main__":
    main()
