"""What a server needs before anything heavy is imported: options, socket, process."""

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from simplellm.base.config import expect

# Seconds for which an engine's process may be silent, or in one step; SGLang has the
# same. A step takes less than a second on a GPU, but minutes on a slow CPU.
WATCHDOG_TIMEOUT = 300.0
Spawn = Callable[[], tuple[subprocess.Popen[bytes], socket.socket]]


@dataclass(frozen=True)
class Options:
    """The server's options of the command line."""

    names: Sequence[str]  # that the model goes by; the first one is its own
    key: str | None = None  # that clients must send
    timeout: float = 600.0  # seconds that a request may take
    grace: float = 30.0  # seconds for running requests once it is to end
    log_level: str = "warning"
    access_log: str = "off"  # or "requests" or "prompts", with bodies
    strict: bool = False  # refuses what is unknown or a hint, where others ignore it
    # Pages that come from these may ask, too: "https://example.org", or "*" for all.
    allowed_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        expect(self.key != "", "the API key", self.key, "one that is not empty")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address; it doesn't listen yet.

    So a port that is taken is known before a model is loaded. Raises ValueError.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host is {host!r}, which has no address: {error}") from None
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        wrong = f"port is {port}, which {host} cannot give: {error.strerror}"
        raise ValueError(f"{wrong}; expected a free one") from None
    return bound


def spawn(**variables: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that will run `remote/engine_process.py`, and the link to it.

    It ends once the link is closed. It is in a group of its own: Ctrl-C in a terminal
    is for the server, which then ends it or lets it finish. Its environment is this
    process's, with ``variables``.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        module = "simplellm.server.remote.engine_process"
        command = [sys.executable, "-m", module, str(number)]
        process = subprocess.Popen(
            command, pass_fds=[number], process_group=0, env={**os.environ, **variables}
        )
    return process, ours


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, each as CUDA_VISIBLE_DEVICES names it.

    Another process counts them: nothing here needs PyTorch.
    """
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    count = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (names if names != [""] else [*map(str, range(count))])[:count]


def spawn_each(count: int, device: str | None) -> list[Spawn]:
    """`spawn` for each of ``count`` engines, each with an equal share of the cores.

    Each also has a GPU of its own, unless ``device`` is "cpu" or there is none. Raises
    ValueError if there are fewer GPUs.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if gpus:
        expected = f"at most {len(gpus)}, the GPUs that there are"
        expect(count <= len(gpus), "--replicas", count, expected)
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count)))
    each = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]] or [{}] * count
    return [partial(spawn, OMP_NUM_THREADS=threads, **one) for one in each]


def freeze_objects() -> None:
    """Exclude all objects that exist now from garbage collection.

    Going through all the objects of the model, the libraries and the server would stop
    every thread for tenths of a second.
    """
    gc.collect()
    gc.freeze()
