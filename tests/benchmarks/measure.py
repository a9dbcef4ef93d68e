"""Run a command and measure its whole process tree."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`seconds` of wall time; `peak_bytes` of memory, shared pages counted once (PSS)."""

    seconds: float
    peak_bytes: int
    code: int
    stdout: str
    stderr: str


def measure(command: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None) -> Measured:
    """Run `command` to its end; sample the memory of its tree four times a second."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak, ended = [0], threading.Event()

    def watch() -> None:
        root = psutil.Process(process.pid)
        while not ended.wait(_INTERVAL_S):
            peak[0] = max(peak[0], _tree_pss(root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    stdout, stderr = process.communicate()
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    return Measured(seconds=seconds, peak_bytes=peak[0], code=process.returncode, stdout=stdout, stderr=stderr)


def _tree_pss(root: psutil.Process) -> int:
    try:
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_pss(process.pid) for process in tree)


def _pss(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
