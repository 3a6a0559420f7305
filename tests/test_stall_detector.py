"""What tells a process that hangs from one that is busy; ranks' own tests use it."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from models import until

from simplellm.engine.stall_detector import StallDetector, is_stopped


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_who_is_late_and_idle_stalls(sleeper: subprocess.Popen[bytes]) -> None:
    detector = StallDetector(sleeper.pid)
    until(lambda: detector.check(True, 5) >= 3)
    assert detector.check(True, 6) == 0  # it has come further
    assert detector.check(False, 6) == 0


def test_who_is_stopped_stalls_wherever_it_was(
    sleeper: subprocess.Popen[bytes],
) -> None:
    detector = StallDetector(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(sleeper.pid))
    assert [detector.check(False, 5) for _ in range(4)][-1] >= 2
    sleeper.send_signal(signal.SIGCONT)
    until(lambda: not is_stopped(sleeper.pid))
    assert detector.check(False, 5) == 0


def test_who_is_busy_does_not_stall() -> None:
    code = "print(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        detector = StallDetector(process.pid)
        assert not any(detector.check(True, 5) for _ in range(20))
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_has_ended_is_not_stopped(
    sleeper: subprocess.Popen[bytes],
) -> None:
    sleeper.kill()
    sleeper.wait()
    assert not is_stopped(sleeper.pid)
