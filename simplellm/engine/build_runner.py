"""The runner and the scheduler that an engine has, as its config and ranks say."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simplellm.base.config import MAX_SIZE, EngineConfig
from simplellm.engine.build_speculation import build_speculative_schedulers
from simplellm.engine.data_parallel_ranks import DataLeader
from simplellm.engine.data_parallel_runner import DataParallelRunner, RemoteRunner
from simplellm.engine.data_parallel_scheduler import DataParallelScheduler
from simplellm.engine.page_manager import PageManager
from simplellm.engine.ranks import Ranks
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Scheduler
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model

LOGGER = logging.getLogger("simplellm")


def build_runner(
    parts: tuple[Model, KVPool, PageManager, EngineConfig, int],
    ranks: Ranks,
    rules: Mapping[str, Any],
    draft: Model | None,
    make_manager: Callable[[], PageManager],
) -> tuple[Runner, Scheduler | DataParallelScheduler]:
    """Both for this rank.

    ``parts`` are the first arguments of a `Runner`, ``rules`` the keyword arguments of
    a `Scheduler`. A ``draft`` model drafts; ``make_manager`` makes a manager for the
    pages of each other rank.
    """
    model, _, manager, config, longest = parts
    known, asked = model.config.max_position_embeddings, config.max_model_len or 0
    if asked > known:
        text = "max_model_len is %d, but the model reads texts of up to %d tokens"
        LOGGER.warning(text, asked, known)
    runner: Runner
    managers = [manager]
    if isinstance(ranks, DataLeader):
        runner = leading = DataParallelRunner(*parts, ranks)
        leading.others = [
            RemoteRunner(leading, make_manager(), config, longest, rank)
            for rank in ranks.others
        ]
        managers += [other.manager for other in leading.others]
        rules = {**rules, "max_waiting": MAX_SIZE}
    else:
        runner = Runner(*parts, ranks)
    if config.speculative is None:
        schedulers: Sequence[Scheduler] = [Scheduler(one, **rules) for one in managers]
    else:
        schedulers = build_speculative_schedulers(
            runner, managers, config, rules, draft
        )
    if len(managers) == 1:
        return runner, schedulers[0]
    return runner, DataParallelScheduler(schedulers, config.max_waiting)
