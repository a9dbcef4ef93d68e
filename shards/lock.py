"""One driver (or redrive) at a time: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from shards.errors import LockedError
from shards.layout import Layout

_TRIES = 10
_PAUSE_S = 0.02


@contextmanager
def run_lock(layout: Layout, *, purpose: str) -> Iterator[None]:
    """Hold the output's lock. Raises LockedError that names the holder's pid, host and start time."""
    fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _take(fd):
            raise LockedError(_refusal(layout, _contents(fd)))
        _write(fd, purpose)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)  # nobody shall read the name of a holder that is gone
    finally:
        os.close(fd)


def holder(layout: Layout) -> dict[str, Any] | None:
    """Who holds the lock now (pid, host, started_at, purpose); None if it is free."""
    try:
        fd = os.open(layout.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _contents(fd)
    finally:
        os.close(fd)
    return None


def _take(fd: int) -> bool:
    # A `holder()` elsewhere takes the lock for some microseconds to see whether it is free; a driver
    # must not be refused because of that, so a few tries are made before it counts as held.
    for attempt in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _write(fd: int, purpose: str) -> None:
    value = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "purpose": purpose,
    }
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(value).encode(), 0)


def _contents(fd: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(fd, 4096, 0))
    except ValueError:  # the holder has the lock and has not yet written its name
        return {}
    return value if isinstance(value, dict) else {}


def _refusal(layout: Layout, who: dict[str, Any]) -> str:
    known = f"pid {who.get('pid', '?')} on {who.get('host', '?')} since {who.get('started_at', '?')}"
    return f"output {layout.root} is in use: {who.get('purpose', 'a run')}, {known}"
