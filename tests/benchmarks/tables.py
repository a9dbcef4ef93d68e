"""How the benchmarks print: a header that says where and when, medians with their ranges, Markdown rows."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_STARTED = time.monotonic()
_PACKAGES = ("torch", "transformers", "sentence-transformers", "ray", "pyarrow", "duckdb")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def header(*facts: str) -> None:
    """Where, when and with what the figures below are made."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    print(
        f"\n`{_command()}`, {datetime.now(UTC):%Y-%m-%d}, {_cpu()}, {cores()} cores, {memory:.0f} GB, Python "
        f"{platform.python_version()}, {packages}. {' '.join(facts)}\n",
        flush=True,
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A Markdown table; the first column has the names."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def spread(values: Sequence[float], form: str) -> str:
    """Median and range; one value alone is printed alone."""
    median = f"{statistics.median(values):{form}}"
    return median if len(values) == 1 else f"{median} ({min(values):{form}}–{max(values):{form}})"


def progress(text: str) -> None:
    """For whoever watches: on stderr, with the minutes since the start."""
    minutes, seconds = divmod(int(time.monotonic() - _STARTED), 60)
    print(f"[{minutes:3}:{seconds:02}] {text}", file=sys.stderr, flush=True)


def _command() -> str:
    module = Path(sys.argv[0]).stem
    return " ".join(["python -m", f"tests.benchmarks.{module}", *sys.argv[1:]])


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
