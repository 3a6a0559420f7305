"""What an engine that checks drafts is made of: by its config, once, at load."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simplellm.base.config import EngineConfig, ModelConfig, expect, read_json
from simplellm.base.host_memory import host_pages
from simplellm.checkpoint.eagle import (
    ARCHITECTURES,
    HeadConfig,
    read_head,
    read_head_config,
)
from simplellm.checkpoint.families import read_config
from simplellm.engine.data_parallel_runner import DataParallelRunner
from simplellm.engine.draft_budget import StepCosts
from simplellm.engine.graphs import MOST_VERIFIED, bucket_sizes
from simplellm.engine.head_drafter import AuxHiddenStates, HeadProposer
from simplellm.engine.host_proposer import HostProposer
from simplellm.engine.model_drafter import ModelDrafter, seconds_per_draft
from simplellm.engine.page_manager import PageManager
from simplellm.engine.runner import Runner
from simplellm.engine.speculative_scheduler import SpeculativeScheduler
from simplellm.engine.speculator import (
    DRAFTERS,
    LONGEST_DRAFT,
    HeadDrafts,
    Speculator,
)
from simplellm.engine.step_times import time_steps
from simplellm.model.eagle import as_model, build_head
from simplellm.model.kv_pool import KVPool
from simplellm.model.memory import page_bytes
from simplellm.model.model import Model

HEAD = "head"  # what `speculative` is for the head in the model's own folder
HEAD_DRAFTS = 5  # of a head or a model in a step at most, where that is chosen


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


def is_model(name: str | None) -> bool:
    """Whether ``speculative`` is the folder of a model, and not of a head."""
    file = Path(name or "") / "config.json"
    if name is None or name in DRAFTERS or not file.is_file():
        return False
    names = read_json(file).get("architectures") or [None]
    return names[0] not in ARCHITECTURES


def check_drafter(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError for what is no drafter, or none for this model."""
    find_head(config, model)


def find_head(config: EngineConfig, model: ModelConfig) -> HeadConfig | None:
    """The config of the head whose folder ``speculative`` is; None: there is none.

    Raises ValueError as `check_drafter` does.
    """
    name = config.speculative
    if name is None or name in DRAFTERS:
        return None
    known = ", ".join(map(repr, [*DRAFTERS, HEAD]))
    expected = f"one of {known}, or the folder of an EAGLE-3 head or of a model"
    expect(Path(name).is_dir(), "speculative", name, expected)
    if is_model(name):
        size, wanted = read_config(Path(name) / "config.json").vocab_size, "the model's"
        what = "vocab_size of the model that drafts"
        expect(size == model.vocab_size, what, size, f"{model.vocab_size}, {wanted}")
        return None
    head = read_head_config(Path(name))
    head.check_fits(model)
    return head


def head_page_bytes(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """A page of the head's keys and values; 0 without a head."""
    head = find_head(config, model)
    if head is None:
        return 0
    return page_bytes(as_model(head, 1), config.page_size, itemsize)


def capture_drafts(scheduler: object, runner: Runner) -> None:
    """Record what is done for drafts, and measure again: steps are captured now."""
    every: Any = getattr(scheduler, "ranks", [scheduler])
    speculators = [one.speculator for one in every if hasattr(one, "speculator")]
    if not speculators:
        return
    if runner.proposer is not None:
        graphs = [*(runner.drafting_graphs or runner.decode_graphs)]
        graphs += runner.verify_graphs
        views = {graph.shape: runner.batch_of(graph.shape) for graph in graphs}
        sizes, most = bucket_sizes(runner.max_num_seqs), speculators[0].most
        numbers = [most] if speculators[0].costs is None else range(1, most + 1)
        runner.proposer.capture(views, runner.sampled_tokens, sizes, numbers)
    measure_costs(speculators, runner)


def measure_costs(speculators: Sequence[Speculator], runner: Runner) -> None:
    """What steps and drafts cost, if the number of drafts is chosen by that."""
    first = speculators[0]
    if first.costs is None:
        return
    costs, seconds = StepCosts(time_steps(runner)), {1: 0.0}
    if runner.proposer is not None:
        seconds = runner.proposer.seconds_per_draft()
    elif first.serial_drafter:
        drafter: Any = first.drafter()
        one_draft = seconds_per_draft(drafter.model)
        seconds = {1: one_draft, 2: 2 * one_draft}  # one request after another
    for one in speculators:
        one.costs, one.draft_costs = costs, StepCosts(seconds)
        if runner.verify_graphs:  # what has no graph is bound by the host
            one.max_verify_tokens = runner.verify_graphs[-1].size


def build_speculative_schedulers(
    runner: Runner,
    managers: Sequence[PageManager],
    config: EngineConfig,
    rules: Mapping[str, Any],
    draft: Model | None,
) -> list[SpeculativeScheduler]:
    """Schedulers of ``rules`` for an engine that checks drafts, one of each manager.

    Drafts are those of the model ``draft``, which one of several ranks has, or what
    ``config`` says. They are counted in one place.
    """
    name, number = config.speculative, config.num_speculative_tokens
    proposers = list[HostProposer | None]([None for _ in managers])
    assert name is not None
    most, drafter = number or HEAD_DRAFTS, DRAFTERS.get(name)
    if drafter is not None:
        most = number or LONGEST_DRAFT
    elif draft is not None:
        drafter = partial(ModelDrafter, draft)
    else:  # made on the device, or by a model that another rank has
        drafter = HeadDrafts
        if (form := find_head(config, runner.model.config)) is not None:
            runner.proposer = head_proposer(runner, config, form, most)
            proposers = [runner.proposer, *others_proposers(runner)]
    costs = StepCosts({1: 0.0}) if number is None else None
    how: Any = {"serial_drafter": draft is not None}
    # Other ranks don't have what is drafted on this one's device.
    how["overlaps"] = runner.proposer is None or runner.ranks.size == 1
    speculators = [
        Speculator(most, costs, drafter, proposer=one, **how) for one in proposers
    ]
    measure_costs(speculators, runner)
    schedulers = []
    for manager, one in zip(managers, speculators, strict=True):
        one.checked, one.accepted = speculators[0].checked, speculators[0].accepted
        more = {**rules, "speculator": one, "max_drafts": config.max_drafts}
        schedulers.append(SpeculativeScheduler(manager, **more))
    return schedulers


def others_proposers(runner: Runner) -> list[HostProposer]:
    """What this rank does for the heads of others, if it has runners for these."""
    others = runner.others if isinstance(runner, DataParallelRunner) else ()
    host, own = torch.device("cpu"), runner.proposer
    proposers = []
    for other in others:
        other.host_proposer = HostProposer(own.rows, own.page_size, host)
        proposers.append(other.host_proposer)
    return proposers


def head_proposer(
    runner: Runner, config: EngineConfig, form: HeadConfig, most: int
) -> HeadProposer | None:
    """What drafts with the head of this ``form``, whose folder ``speculative`` is.

    It's whole, on each rank with requests of its own; None on others, which only lend
    it what it has of the model.
    """
    model, pool, ranks = runner.model, runner.pool, runner.ranks
    assert config.speculative is not None
    tensors = read_head(Path(config.speculative), form)
    head = build_head(form, tensors, model, ranks.whole)
    if not ranks.has_requests:
        return None
    aux = AuxHiddenStates(model, head.layers, config.max_num_batched_tokens)
    rows = config.max_num_seqs
    if model.device.type == "cuda":  # for captured steps, with a row for each token
        rows = max(rows, MOST_VERIFIED)
    ops = ranks.operations_alone(model.ops)
    if ops.name == "Triton":
        from simplellm.model.kernels.triton_ops import attend_in

        heads = form.num_attention_heads, form.num_key_value_heads, form.head_dim
        attend = attend_in(rows, *heads, model.device, config.batch_invariant)
        ops = replace(ops, attend=attend)
    layer = as_model(form, model.config.max_position_embeddings)
    sizes = len(pool.keys[0]), pool.page_size
    own = KVPool(layer, *sizes, model.dtype, model.device)
    own.host_pages = host_pages(own.page(0), len(pool.host_pages))
    return HeadProposer(head, ops, aux, own, rows, runner.table_width, most)
