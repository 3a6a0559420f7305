"""The process of a rank other than 0: it loads its shard, and takes part in steps.

`Leader` of engine/ranks.py starts it.
"""

import logging
import os
import signal
import socket
import sys
from typing import Any

import torch

from simplellm.api.load import load_engine
from simplellm.base.config import EngineConfig
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.engine.ranks import Follower, Link

LOGGER = logging.getLogger("simplellm")


def follow(
    link: Link,
    *,
    folder: str,
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
    ranks = Follower(link, folder, rank, size)
    kind, where = getattr(torch, dtype), torch.device(device)
    try:
        source = open_weights(path, kind, where, random_weights, seed)
        engine, *_ = load_engine(source, EngineConfig(**config), kind, where, ranks)
    except Exception as error:
        link.send({"failed": repr(error)})
        raise
    with torch.inference_mode():
        ranks.follow(engine.runner)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends us, by the link
    status = 1
    try:
        link = Link(socket.socket(fileno=int(sys.argv[1])))
        if (options := link.receive()) is not None:
            follow(link, **options)
        status = 0
    except ConnectionError:
        pass  # rank 0 is gone
    except BaseException:
        LOGGER.exception("a rank failed")
    os._exit(status)  # Python and the group would only take time to take apart
