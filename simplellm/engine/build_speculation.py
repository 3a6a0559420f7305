"""What an engine that checks drafts is made of: by its config, once, at load."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simplellm.base.config import EngineConfig, ModelConfig, expect
from simplellm.checkpoint.eagle import HeadConfig, read_head, read_head_config
from simplellm.engine.graphs import MOST_VERIFIED, bucket_sizes
from simplellm.engine.head_drafter import AuxHiddenStates, HeadDrafter, HeadProposer
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Scheduler
from simplellm.engine.speculation import (
    DRAFTERS,
    LONGEST_DRAFT,
    SpeculativeScheduler,
    Speculator,
    StepCosts,
)
from simplellm.engine.step_times import time_steps
from simplellm.model.eagle import build_head
from simplellm.model.host_pages import host_pages
from simplellm.model.ops import PLAIN

HEAD = "head"  # what `speculative` is for the head in the model's own folder
HEAD_DRAFTS = 5  # of a head in a step at most, where the number is chosen


def with_own_head(config: EngineConfig, folder: Path) -> EngineConfig:
    """``config``, where "head" has become the folder of that name in the model's.

    Raises ValueError if there is none.
    """
    if config.speculative != HEAD:
        return config
    path = folder / HEAD
    expected = f"a folder {path} with the model's own EAGLE-3 head"
    expect(path.is_dir(), "speculative", HEAD, expected)
    return config.changed({"speculative": str(path)})


def find_head(config: EngineConfig, model: ModelConfig) -> HeadConfig | None:
    """The config of the head whose folder ``speculative`` is; None: there is none.

    Raises ValueError for what is no drafter, or none for this model.
    """
    name = config.speculative
    if name is None or name in DRAFTERS:
        return None
    known = ", ".join(map(repr, [*DRAFTERS, HEAD]))
    expected = f"one of {known}, or the folder of an EAGLE-3 head"
    expect(Path(name).is_dir(), "speculative", name, expected)
    ranks = config.tensor_parallel_size
    one = "1 beside an EAGLE-3 head, which reads the model's whole embedding"
    expect(ranks == 1, "tensor_parallel_size", ranks, one)
    head = read_head_config(Path(name))
    head.check_fits(model)
    return head


def head_page_bytes(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """A page of the head's keys and values; 0 without a head."""
    head = find_head(config, model)
    if head is None:
        return 0
    numbers = head.num_key_value_heads * head.head_dim
    return 2 * config.page_size * numbers * itemsize


def capture_drafts(scheduler: Scheduler, runner: Runner) -> None:
    """Record what is done for drafts, and measure again: steps are captured now."""
    if runner.proposer is not None:
        views = {
            graph.shape: runner.batch_of(graph.shape)
            for graph in (*runner.drafting, *runner.verifying)
        }
        sizes = bucket_sizes(runner.max_num_seqs)
        runner.proposer.capture(views, runner.sampled_tokens, sizes)
    if isinstance(scheduler, SpeculativeScheduler):
        measure(scheduler.speculator, runner)


def measure(speculator: Speculator, runner: Runner) -> None:
    """What steps and drafts cost, if the number of drafts is chosen by that."""
    if speculator.costs is not None:
        speculator.costs = StepCosts(time_steps(runner))
        if runner.proposer is not None:
            speculator.seconds = runner.proposer.seconds_per_draft()


def speculative_scheduler(
    runner: Runner, config: EngineConfig, rules: Mapping[str, Any]
) -> SpeculativeScheduler:
    """The scheduler of ``rules`` for an engine that checks drafts."""
    name, number = config.speculative, config.num_speculative_tokens
    assert name is not None
    most, drafter = number or LONGEST_DRAFT, DRAFTERS.get(name)
    if drafter is None:
        most, drafter = number or HEAD_DRAFTS, HeadDrafter
        runner.proposer = head_proposer(runner, config, most)
    costs = StepCosts({1: 0.0}) if number is None else None
    speculator = Speculator(most, costs, drafter, proposer=runner.proposer)
    measure(speculator, runner)
    return SpeculativeScheduler(
        runner.manager, **rules, speculator=speculator, max_drafts=config.max_drafts
    )


def head_proposer(runner: Runner, config: EngineConfig, most: int) -> HeadProposer:
    """What drafts with the head whose folder ``speculative`` is."""
    model, pool = runner.model, runner.pool
    form = find_head(config, model.config)
    assert form is not None and config.speculative is not None
    head = build_head(form, read_head(Path(config.speculative), form), model)
    aux = AuxHiddenStates(model, head.layers, config.max_num_batched_tokens)
    rows = config.max_num_seqs
    if model.device.type == "cuda":  # for captured steps, with a row for each token
        rows = max(rows, MOST_VERIFIED)
    if model.ops.name == "Triton":
        from simplellm.model.kernels.fused import attend_in

        heads = form.num_attention_heads, form.num_key_value_heads, form.head_dim
        attend = attend_in(rows, *heads, model.device, config.batch_invariant)
        ops = replace(model.ops, attend=attend)
    else:
        ops = replace(model.ops, rope_and_cache=PLAIN.rope_and_cache)
    shape, width = (len(pool.keys[0]), pool.page_size), runner.table_width
    proposer = HeadProposer(head, ops, aux, shape, rows, width, most)
    proposer.host_pages = host_pages(proposer.page(0), len(pool.host_pages))
    return proposer
