"""What an engine that checks drafts is made of: by its config, once, at load."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simplellm.base.config import EngineConfig, ModelConfig, expect
from simplellm.checkpoint.eagle import HeadConfig, read_head, read_head_config
from simplellm.engine.head_drafter import AuxHiddenStates, HeadDrafter
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Scheduler
from simplellm.engine.speculation import (
    DRAFTERS,
    SpeculativeScheduler,
    Speculator,
    StepCosts,
)
from simplellm.engine.step_times import REPEATS, time_steps
from simplellm.model.eagle import Head, build_head

HEAD_DRAFTS = 5  # of a head in a step at most, where the number is chosen
TIMED_TOKENS = 64  # tokens that a head is timed with


def find_head(config: EngineConfig, model: ModelConfig) -> HeadConfig | None:
    """The config of the head whose folder ``speculative`` is; None: there is none.

    Raises ValueError for what is no drafter, or none for this model.
    """
    name = config.speculative
    if name is None or name in DRAFTERS:
        return None
    known = ", ".join(map(repr, DRAFTERS))
    expected = f"one of {known}, or the folder of an EAGLE-3 head"
    expect(Path(name).is_dir(), "speculative", name, expected)
    ranks = config.tensor_parallel_size
    one = "1 beside an EAGLE-3 head, which reads the model's whole embedding"
    expect(ranks == 1, "tensor_parallel_size", ranks, one)
    head = read_head_config(Path(name))
    head.check_fits(model)
    return head


def seconds_per_draft(head: Head) -> float:
    """What a draft takes of a text that the head knows."""
    drafter, times = HeadDrafter(head), []
    size = len(head.layers) * head.config.target_hidden_size
    drafter.observe(0, head.fc.new_zeros(TIMED_TOKENS, size))
    for most in [1] + [4] * (1 + REPEATS):
        start = time.perf_counter()
        drafter.propose([0] * (TIMED_TOKENS + 1), most)
        times.append((time.perf_counter() - start) / 3)
    return min(times[2:])


def time_captured(scheduler: Scheduler, runner: Runner) -> None:
    """Measure again what steps cost, now that they are captured."""
    if isinstance(scheduler, SpeculativeScheduler):
        speculator = scheduler.speculator
        if speculator.costs is not None:
            speculator.costs = StepCosts(time_steps(runner))


def speculative_scheduler(
    runner: Runner, config: EngineConfig, rules: Mapping[str, Any]
) -> SpeculativeScheduler:
    """The scheduler of ``rules`` for an engine that checks drafts."""
    name, number = config.speculative, config.num_speculative_tokens
    assert name is not None
    if name in DRAFTERS:
        speculator = Speculator.of(name, number, partial(time_steps, runner))
    else:
        head_config = find_head(config, runner.model.config)
        assert head_config is not None
        head = build_head(head_config, read_head(Path(name), head_config), runner.model)
        aux = AuxHiddenStates(runner.model, head.layers, config.max_num_batched_tokens)
        costs = StepCosts(time_steps(runner)) if number is None else None
        with torch.inference_mode():
            seconds = seconds_per_draft(head)
        speculator = Speculator(
            number or HEAD_DRAFTS,
            costs,
            partial(HeadDrafter, head),
            seconds=seconds,
            hidden_states=aux.states,
        )
    return SpeculativeScheduler(
        runner.manager, **rules, speculator=speculator, max_drafts=config.max_drafts
    )
