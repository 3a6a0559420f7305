"""Whether a rank that others wait for is busy or hangs.

A long step and one that never ends look alike from outside, and a sign of life that a
thread of its own sends says nothing about the one that computes. But the ranks do the
same, so that a rank is late only by what it does more slowly, and whoever computes,
compiles or loads uses a processor, waits for one or for a disk, itself or in a process
that it has started. A rank that is late and does nothing of this, again and again,
hangs. So does one that a signal has stopped, wherever it was: perhaps it had come to
where it waits, and the others wait for what it did not send. A busy loop is not found
here; once all have loaded, REPLY_SECONDS of ranks.py ends the wait for it.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

BUSY = {"R", "D"}  # states of threads: they run or could, or wait for a disk
IDLE_TICKS = 1  # of a processor, between two checks of a process that does nothing


class Progress:
    """How often each of several processes has come to where it waits for the others.

    ``number`` is an open file of all of them, which has room for it.
    """

    def __init__(self, number: int, size: int) -> None:
        self.counts = memoryview(mmap.mmap(number, 8 * size)).cast("q")

    @staticmethod
    def create(size: int) -> int:
        """A file in memory for so many processes."""
        number = os.memfd_create("simplellm-progress")
        os.ftruncate(number, 8 * size)
        return number

    def advance(self, rank: int) -> None:
        """Process ``rank`` has come to where it waits once more."""
        self.counts[rank] += 1

    def is_late(self, rank: int) -> bool:
        """Whether it is behind the first one."""
        return self.counts[rank] < self.counts[0]


class StallDetector:
    """Counts the checks at which process ``pid`` is late and has done nothing."""

    def __init__(self, pid: int) -> None:
        self.pid, self.idle_checks, self.ticks, self.count = pid, 0, 0, -1

    def check(self, late: bool, count: int) -> int:
        """Check once more. Returns how many such checks there were in a row.

        The process is ``late`` or not, and has come ``count`` times to where it waits.
        """
        late = late or is_stopped(self.pid)
        if not late or count != self.count:
            self.idle_checks, self.ticks, self.count = 0, 0, count
            return 0
        ticks, busy = activity(self.pid)
        if busy or ticks - self.ticks > IDLE_TICKS:
            self.idle_checks = 0
        else:
            self.idle_checks += 1
        self.ticks = ticks
        return self.idle_checks


def is_stopped(pid: int) -> bool:
    """Whether a process does nothing until it gets SIGCONT."""
    try:
        return stat_fields(Path(f"/proc/{pid}"))[0] == "T"
    except OSError:
        return False


def activity(pid: int) -> tuple[int, bool]:
    """What a process and its children have done, by /proc.

    The ticks of a processor that they have used, and whether one of their threads is
    BUSY.
    """
    ticks, busy = 0, False
    for each in with_children(pid):
        with suppress(OSError):
            fields = stat_fields(each)
            ticks += int(fields[11]) + int(fields[12])
            threads = [*(each / "task").iterdir()]
            busy = busy or any(stat_fields(thread)[0] in BUSY for thread in threads)
    return ticks, busy


def with_children(pid: int) -> Iterator[Path]:
    """The folders in /proc of a process and of all that it has started."""
    folder = Path(f"/proc/{pid}")
    yield folder
    with suppress(OSError):
        for thread in (folder / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from with_children(int(child))


def stat_fields(folder: Path) -> list[str]:
    """What /proc says of a process or thread, from its state on."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
