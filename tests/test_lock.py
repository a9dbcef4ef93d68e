"""The run lock, between real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shards.errors import LockedError
from shards.layout import Layout
from shards.lock import holder, run_lock

HOLD = """
import sys
from pathlib import Path
from shards.layout import Layout
from shards.lock import run_lock
with run_lock(Layout(Path(sys.argv[1])), purpose="run"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.open(tmp_path)


@pytest.fixture
def other(layout: Layout) -> subprocess.Popen[str]:
    """Another process that holds the lock until a line is written to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(layout.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_lock_held_by_another_process_names_pid_host_and_start(
    layout: Layout, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(LockedError) as error, run_lock(layout, purpose="run"):
        pass
    text = str(error.value)
    assert f"pid {other.pid} on {socket.gethostname()} since 20" in text
    assert "\n" not in text
    who = holder(layout)
    assert who is not None
    assert (who["pid"], who["purpose"]) == (other.pid, "run")


def test_lock_of_a_killed_holder_is_free(layout: Layout, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert holder(layout) is None
    with run_lock(layout, purpose="run"):
        assert holder(layout)["pid"] == os.getpid()


def test_lock_after_its_holder_left_is_free(layout: Layout, other: subprocess.Popen[str]) -> None:
    other.communicate("\n")
    assert holder(layout) is None
    assert layout.lock.read_bytes() == b""
    with run_lock(layout, purpose="redrive"):
        pass


def test_lock_twice_in_one_process_is_refused(layout: Layout) -> None:
    with (
        run_lock(layout, purpose="run"),
        pytest.raises(LockedError, match=f"run, pid {os.getpid()}"),
        run_lock(layout, purpose="redrive"),
    ):
        pass


def test_holder_looking_does_not_disturb(layout: Layout) -> None:
    with run_lock(layout, purpose="run"):
        for _ in range(3):
            assert holder(layout) is not None
        with pytest.raises(LockedError), run_lock(layout, purpose="run"):
            pass


def test_holder_without_a_lock_file_is_none(tmp_path: Path) -> None:
    assert holder(Layout(tmp_path)) is None
