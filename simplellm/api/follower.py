"""The worker process of tensor or data parallelism, of each rank other than 0.

It loads its shard, and takes part in steps; `Leader` of engine/ranks.py starts it.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch

from simplellm.api.load import load_engine
from simplellm.base.config import EngineConfig
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.engine.ranks import Link
from simplellm.engine.start_ranks import follower_kind

LOGGER = logging.getLogger("simplellm")
PATIENCE = 2.0  # seconds that this process has to end by itself


def follow(
    link: Link,
    *,
    folder: str,
    memory: int,
    progress: int,
    rank: int,
    size: int,
    path: str | None,
    config: dict[str, Any],
    dtype: str,
    device: str,
    random_weights: bool,
    seed: int | None,
    threads: int,
) -> None:
    """Load what rank 0 has said, and do what it says, until it ends."""
    torch.set_num_threads(threads)
    kind, where = getattr(torch, dtype), torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    options = EngineConfig(**config)
    numbers = rank, size, where, memory, progress
    ranks = follower_kind(options)(link, folder, *numbers)
    try:
        source = open_weights(path, kind, where, random_weights, seed)
        engine, *_ = load_engine(source, options, kind, where, ranks)
    except Exception as error:
        link.send({"failed": repr(error)})
        raise
    with torch.inference_mode():
        ranks.follow(engine.runner)


def end_with(link: socket.socket) -> None:
    """End this process soon after the other end of ``link``, whatever it waits for."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends us, by the link
    status = 1
    try:
        link = Link(socket.socket(fileno=int(sys.argv[1])))
        threading.Thread(target=end_with, args=[link.link], daemon=True).start()
        if (options := link.receive()) is not None:
            follow(link, **options)
        status = 0
    except ConnectionError:
        pass  # rank 0 is gone
    except BaseException:
        LOGGER.exception("a rank failed")
    os._exit(status)  # Python and the group would only take time to take apart
