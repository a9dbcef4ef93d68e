"""Run a command and measure its whole process tree."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]

_INTERVAL_S = 0.25
_PATIENCE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`seconds` of wall time; peaks of memory, shared pages counted once (PSS): of the whole tree, and of the
    process that was started, alone. `began` is the epoch second of the start."""

    began: float
    seconds: float
    peak_bytes: int
    root_peak_bytes: int
    stdout: str
    stderr: str


def environment(**more: str) -> dict[str, str]:
    """What every contender gets: no network, a Ray of its own, and nobody's idea of how many threads to use."""
    own = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}}
    return {**own, "HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local", **more}


def private_token() -> dict[str, str]:
    """For a plain `ray.init`: left to itself, it writes a token to the home directory that later clusters meet."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def measure(command: Sequence[str], *, env: dict[str, str] | None = None) -> Measured:
    """Run `command` in the repository to its end; sample the memory of its tree four times a second.

    Ends this program if the command fails, or takes longer than half an hour: then it has no figures.
    """
    began, start = time.time(), time.perf_counter()
    process = subprocess.Popen(
        command, cwd=REPO, env=environment(**(env or {})), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    peaks, ended = [0, 0], threading.Event()

    def watch() -> None:
        root = psutil.Process(process.pid)
        while not ended.wait(_INTERVAL_S):
            own = _pss(process.pid)
            peaks[:] = max(peaks[0], own + _children_pss(root)), max(peaks[1], own)

    watcher = threading.Thread(target=watch)
    watcher.start()
    late = threading.Timer(_PATIENCE_S, kill_tree, [process])
    late.start()
    stdout, stderr = process.communicate()
    seconds = time.perf_counter() - start
    late.cancel()
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with {process.returncode}:\n{stdout[-2000:]}\n{stderr[-8000:]}")
    return Measured(
        began=began,
        seconds=seconds,
        peak_bytes=peaks[0],
        root_peak_bytes=peaks[1],
        stdout=stdout,
        stderr=stderr,
    )


def kill_tree(driver: subprocess.Popen[Any]) -> None:
    """SIGKILL to the driver, then to all that it has started; returns when none of them runs any more."""
    tree = _children(psutil.Process(driver.pid)) if driver.poll() is None else []
    driver.kill()
    while tree:
        # What was born between the first look and its parent's death is found below the parent.
        born = [child for process in tree for child in _children(process)]
        for process in [*tree, *born]:
            _kill(process)
        tree = [process for process in [*tree, *born] if _runs(process)]
        time.sleep(0.02)
    driver.wait()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()  # checks that the pid is still that process's
    except psutil.NoSuchProcess:
        return


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children_pss(root: psutil.Process) -> int:
    return sum(_pss(process.pid) for process in _children(root))


def _pss(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
