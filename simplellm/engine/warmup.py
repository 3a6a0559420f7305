"""Compiling the Triton kernels that a model will need, before it is loaded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from simplellm.base.config import MAX_SIZE, EngineConfig, ModelConfig
from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.checkpoint.checkpoint import RandomCheckpoint
from simplellm.engine.graphs import (
    MIXED_SIZES,
    CaptureShape,
    bucket_sizes,
    verify_shapes,
)
from simplellm.engine.page_manager import PageManager
from simplellm.engine.runner import Runner
from simplellm.engine.sampler import SamplingTensors, adjust_logits
from simplellm.model.build import build
from simplellm.model.fp8_cache import make_pool
from simplellm.model.memory import sliding_groups
from simplellm.model.ops import Ops
from simplellm.sampling.penalties import TokenCounts

# Lengths of prompts that need other kernels than those that graphs are captured of.
PROMPTS = (8192, 2048)
# Tokens between sizes of steps whose experts are computed. How pairs are sorted depends
# on their number, and into which blocks on how many an expert has: some ways and blocks
# come together only between the lengths above.
EXPERTS_APART = 1024
# Requests whose tokens need other kernels. They are apart so that their kernels compile
# at the same time; those of one request compile one after another.
DRAWS = (
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=1),
    SamplingParams(repetition_penalty=2.0),
)


@torch.inference_mode()
def dummy_run(runner: Runner, shape: CaptureShape, ops: Ops) -> None:
    """A step of nothing but padding, computed by ``ops``, which nobody reads.

    It needs the kernels of a real step of this shape. Several may be under way at once,
    and write over each other's results.
    """
    batch = runner.batch_of(shape, torch.zeros_like(runner.inputs))
    batch.pad()
    rows = shape.decodes or 1
    model, logits = replace(runner.model, ops=ops), runner.logits[:rows]
    hidden = model.forward(batch, runner.pool, runner.sampled_tokens)
    model.head(hidden[:rows], logits)


@torch.inference_mode()
def dummy_run_experts(runner: Runner, tokens: int, ops: Ops) -> None:
    """The experts of so many tokens of padding: no other kernels take as long."""
    model, zero = runner.model, torch.zeros(1, dtype=torch.int32, device=runner.device)
    x = runner.hidden.new_zeros(tokens, model.config.hidden_size)
    for layer in model.layers:
        layer.mlp.forward(ops, x, zero)


@torch.inference_mode()
def dummy_sampler_run(runner: Runner, params: SamplingParams, ops: Ops) -> None:
    """A token drawn with ``params``, for one row: more need no other kernels."""
    model, device = runner.model.config, runner.device
    counts = TokenCounts(model.vocab_size, device)
    wanted = counts if counts.prepare([Request([0], 1, params)]) else None
    tensors = SamplingTensors.of([params], model.vocab_size, device)
    lengths = torch.zeros(1, dtype=torch.int64, device=device)
    logits = adjust_logits(runner.logits[:1], tensors, ops, wanted, None)
    how = tensors.temperature, tensors.seeds, lengths, tensors.filters
    ops.draw(logits, runner.sampled_tokens[:1], *how)


def prompt_lengths(budget: int) -> list[int]:
    """Of prompts to compute beforehand, where a step has up to ``budget`` tokens."""
    return [budget, *(length for length in PROMPTS if length < budget)]


def expert_sizes(most: int) -> list[int]:
    """Tokens of steps whose experts to compute beforehand, of up to ``most``."""
    return [most, *reversed(range(EXPERTS_APART, most, EXPERTS_APART))]


def one_of_each(model: ModelConfig) -> ModelConfig:
    """A model that has one layer of each kind that ``model`` has.

    Kinds differ in what they see, in having experts, and in their weights' formats.
    """
    kinds: dict[Any, None] = {}
    stored = model.formats.items()
    for layer, layer_type in enumerate(model.layer_types):
        begin = f"layers.{layer}."
        forms = [(n.removeprefix(begin), f) for n, f in stored if n.startswith(begin)]
        kinds[layer_type, layer in model.dense_layers, *forms] = None
    formats = {n: form for n, form in stored if not n.startswith("layers.")}
    for index, (_, _, *forms) in enumerate(kinds):
        formats |= {f"layers.{index}.{name}": form for name, form in forms}
    return replace(
        model,
        num_hidden_layers=len(kinds),
        layer_types=tuple(kind for kind, *_ in kinds),
        dense_layers=tuple(n for n, (_, dense, *_) in enumerate(kinds) if dense),
        formats=formats,
    )


def warm_up(
    ops: Ops,
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Ops:
    """The table ``ops`` of Triton kernels, compiled, as far as they compile.

    A stand-in with a layer of each kind computes steps of all the sizes that choose
    among kernels. That is before an expert is loaded: whether experts are repacked
    depends on what compiles.
    """
    from simplellm.model.kernels.compiling import compile_kernels

    small = one_of_each(model)
    source = RandomCheckpoint(small, dtype=dtype, device=device, seed=0)
    stand_in = build(small, source.__getitem__, ops)
    groups = sliding_groups(small, dtype.itemsize, config.kv_cache_dtype)
    pool = make_pool(small, config, 1 + groups, dtype, device)
    manager = PageManager(
        1 + groups, config.page_size, window=small.windows[-1], sliding_groups=groups
    )
    longest = min(model.max_position_embeddings, config.max_model_len or MAX_SIZE)
    runner = Runner(stand_in, pool, manager, config, longest)
    budget, seqs = config.max_num_batched_tokens, config.max_num_seqs
    # Prompts first: their kernels take the longest. And what takes the longest of all
    # begins at once, by itself.
    shapes = [CaptureShape(size, 0, 1) for size in prompt_lengths(budget)]
    shapes += [CaptureShape.mixed(size, seqs) for size in MIXED_SIZES if size <= budget]
    shapes += [CaptureShape(size, size) for size in bucket_sizes(seqs)]
    shapes += verify_shapes(seqs, config.max_drafts)
    ranks = config.data_parallel_size  # all of whose rows meet at the experts
    sizes = expert_sizes(ranks * budget)
    if ranks > 1:
        sizes += [ranks * shape.tokens for shape in shapes]
    steps: list[Callable[[Ops], object]] = [
        *(partial(dummy_run_experts, runner, size) for size in dict.fromkeys(sizes)),
        *(partial(dummy_sampler_run, runner, params) for params in DRAWS),
        *(partial(dummy_run, runner, shape) for shape in dict.fromkeys(shapes)),
    ]
    return compile_kernels(ops, steps, device, config.batch_invariant)
