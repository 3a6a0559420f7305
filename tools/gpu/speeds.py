"""Speeds of other families' models on one GPU, with random weights in real shapes.

    python tools/gpu/speeds.py --out figures
    python tools/gpu/speeds.py --only Qwen3-8B,Qwen3-8B-FP8 --out OUT

Each model is measured by `simplellm bench` in a process of its own, a minute each; its
record is c-bench-NAME.json. What fails, or takes longer than --seconds, is told, and
the others go on. Ends with a table of all records that the folder then has.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from simplellm.apps.quantize import TARGETS, quantization_config
from simplellm.base.config import ModelConfig
from simplellm.checkpoint.families import read_config

BENCH = "--random-weights --batch 1,8,64 --prefill 32x2048,1x2048".split()
ROOT = Path(__file__).resolve().parents[2]

# What transformers does not take for granted of each config.json.
HEADS = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
QWEN = HEADS | dict(rope_theta=1e6, max_position_embeddings=40960)
QWEN_8B = QWEN | dict(model_type="qwen3", hidden_size=4096, intermediate_size=12288)
QWEN_8B |= dict(num_hidden_layers=36)
LLAMA_8B = HEADS | dict(model_type="llama", vocab_size=128256, intermediate_size=14336)
LLAMA_8B |= dict(rope_theta=5e5, max_position_embeddings=131072)
LLAMA_70B = LLAMA_8B | dict(hidden_size=8192, intermediate_size=28672)
LLAMA_70B |= dict(num_hidden_layers=80, num_attention_heads=64)
QWEN_30B = QWEN | dict(
    model_type="qwen3_moe", num_hidden_layers=48, norm_topk_prob=True
)
QWEN_30B |= dict(num_key_value_heads=4, moe_intermediate_size=768)
QWEN_SMALL = QWEN | dict(model_type="qwen3", hidden_size=1024, intermediate_size=3072)
QWEN_SMALL |= dict(
    num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
)
FP8: dict[str, Any] = dict(quant_method="fp8", activation_scheme="dynamic")
FP8 |= dict(
    weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "mlp.gate"]
)
INT8 = quantization_config(TARGETS["int8"], ["lm_head"])
# By name, the record's and config.json.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": ("qwen3", QWEN_8B),
    "Qwen3-8B-FP8": ("qwen3-fp8", QWEN_8B | {"quantization_config": FP8}),
    "Qwen3-8B-INT8": ("qwen3-int8", QWEN_8B | {"quantization_config": INT8}),
    "Llama-3.1-8B": ("llama-3", LLAMA_8B),
    "Llama-3.1-8B-FP8": ("llama-3-fp8", LLAMA_8B | {"quantization_config": FP8}),
    "Qwen3-30B-A3B": ("qwen3-moe", QWEN_30B),
    "Qwen3-30B-A3B-FP8": ("qwen3-moe-fp8", QWEN_30B | {"quantization_config": FP8}),
    "Qwen3-0.6B": ("qwen3-small", QWEN_SMALL),
}


LARGE = {"Llama-3.3-70B": LLAMA_70B}  # for several GPUs


def write_config(name: str, folder: str) -> Path:
    """A new folder ``name`` in ``folder``, with the model's config.json."""
    made = Path(folder, name)
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LARGE.get(name) or MODELS[name][1]))
    return made


def model_argument(name: str) -> str:
    """What `LLM` takes of a model: a folder of one of these, else its own name."""
    return str(write_config(name, mkdtemp())) if name in {**MODELS, **LARGE} else name


def config_of(name: str) -> ModelConfig:
    """The model's shapes and formats."""
    with TemporaryDirectory() as folder:
        return read_config(write_config(name, folder) / "config.json")


def measure(name: str, file: Path, seconds: float) -> str:
    """Write the record of a model; what went wrong, "" if nothing did."""
    command = [sys.executable, "-m", "simplellm.apps.cli", "bench", name, *BENCH]
    command += ["--json", str(file.resolve())]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as folder:
        write_config(name, folder)
        try:
            subprocess.run(command, cwd=folder, env=env, timeout=seconds, check=True)
        except subprocess.SubprocessError as error:
            return f"{name}: {error}"
    return ""


def table(folder: Path) -> Iterator[str]:
    """A line for each record: tokens a second, and their share of the limit.

    Prefill's is the rate of matmuls in bfloat16; "times" compares with the line above.
    """
    heads = "".join(f"{head:>15}" for head in ("batch 1", "batch 64", "prefill"))
    yield f"{'':18}{heads}{'times':>7}{'start':>7}"
    before = math.inf
    for name, (record, _) in MODELS.items():
        file = folder / f"c-bench-{record}.json"
        if file.exists():
            speed = json.loads(file.read_text())
            rows = [row for row in speed["decode"] if row["batch"] in (1, 64)]
            rows += speed["prefill"][:1]
            speeds = [row["tokens_per_second"] for row in rows]
            shares = [row["share"] for row in rows]
            cells = map("{:9,.0f}{:6.1%}".format, speeds, shares)
            start = speed["load_seconds"] + speed["engine_seconds"]
            times, before = speeds[-1] / before, speeds[-1]
            yield f"{name:18}{''.join(cells)}{times:7.2f}{start:7.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    wrong: list[str] = []
    for name in options.only.split(","):
        file = options.out / f"c-bench-{MODELS[name][0]}.json"
        wrong += filter(None, [measure(name, file, options.seconds)])
    print(*table(options.out), *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
