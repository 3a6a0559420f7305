"""The runner and the scheduler that an engine has, as its config and ranks say."""

from collections.abc import Callable, Mapping
from typing import Any

from simplellm.base.config import EngineConfig
from simplellm.engine.build_speculation import build_speculative_scheduler
from simplellm.engine.data_ranks import DataLeader
from simplellm.engine.data_runner import DataParallelRunner
from simplellm.engine.data_scheduler import DataParallelScheduler
from simplellm.engine.page_manager import PageManager
from simplellm.engine.ranks import Ranks
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Scheduler
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model


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
    _, _, manager, config, _ = parts
    if isinstance(ranks, DataLeader):
        every = DataParallelRunner(*parts, ranks, make_manager)
        return every, DataParallelScheduler(every.managers, **rules)
    runner = Runner(*parts, ranks)
    if config.speculative is None:
        return runner, Scheduler(manager, **rules)
    return runner, build_speculative_scheduler(runner, config, rules, draft)
