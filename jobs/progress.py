"""What a run shows while it runs: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.text import Text

if TYPE_CHECKING:
    from shards.manifest import Resume
    from shards.staging import Progress as Staged
    from shards.types import Plan

_LINE_S = 5.0
_WAIT_S = 30.0
_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run at one moment, in keys (documents × queries). `waiting`: what the pool waits for, if anything."""

    expected: int
    scored: int
    dead: int
    in_flight: int
    workers: int
    wanted: int
    retries: int
    deaths: int
    waiting: str | None = None


class Rate:
    """Keys per second over the last half minute, so that an early stall or a late one shows."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, now: float, keys: int) -> float:
        """The rate after `keys` in all at second `now`."""
        self._samples.append((now, keys))
        while self._samples[-1][0] - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        (start, before), (end, after) = self._samples[0], self._samples[-1]
        return max(0.0, (after - before) / (end - start)) if end > start else 0.0


class Reporter:
    """Speaks to the person who started the run. Everything goes to stderr: stdout is for results."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._rate = Rate()
        self._bar: Progress | None = None
        self._lined = 0.0
        self._waited = 0.0

    def note(self, text: str) -> None:
        """One line, now."""
        self._console.print(text, markup=False)

    def staging(self, progress: Staged) -> None:
        """Files that are not Parquet are being staged: the first and the last, and a line every few seconds."""
        now = time.monotonic()
        if progress.files < progress.of_files and now - self._lined < _LINE_S:
            return
        self._lined = now
        self.note(
            f"Staging: {progress.files:,} of {progress.of_files:,} files, "
            f"{_size(progress.bytes)} of {_size(progress.of_bytes)}."
        )

    def planned(self, plan: Plan, change: str) -> None:
        """The plan stands."""
        queries = f" × {plan.queries:,} queries" if plan.query_set else ""
        skipped = f", {plan.duplicates:,} duplicates left out" if plan.duplicates else ""
        self.note(
            f"Plan {change}: {plan.docs:,} documents{queries} in {len(plan.shards):,} shards "
            f"of {len(plan.files):,} files{skipped}."
        )

    def resumed(self, resume: Resume, seconds: float) -> None:
        """What an earlier run left, and how long the start took."""
        parts = [f"{resume.done:,} shards done", f"{resume.pending:,} to do"]
        if resume.adopted:
            parts.append(f"{resume.adopted:,} parts adopted")
        if resume.released:
            parts.append(f"{resume.released:,} leases of a dead driver released")
        if resume.lost:
            parts.append(f"{resume.lost:,} parts are gone and will be redone")
        if resume.damaged:
            parts.append(f"{len(resume.damaged):,} parts are damaged and will be redone")
        self.note(f"Start in {seconds:.1f} s: {', '.join(parts)}.")

    def connected(self, cluster: str, placement: str, count: int) -> None:
        """The pool is being filled."""
        self.note(f"Using {cluster}: {count} worker{'s' if count != 1 else ''} with {placement} each.")

    @contextmanager
    def live(self, plan: Plan) -> Iterator[None]:
        """The bar, while the block runs."""
        if not self._console.is_terminal:
            yield
            return
        columns: list[ProgressColumn] = [
            TextColumn("{task.fields[what]}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            _Figures(),
        ]
        with Progress(*columns, console=self._console, expand=True, transient=True) as bar:
            bar.add_task("", total=max(1, plan.docs * plan.queries), what=plan.model_version, view=None, rate=0.0)
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def update(self, view: View) -> float:
        """Show `view`; returns keys per second."""
        now = time.monotonic()
        rate = self._rate.update(now, view.scored + view.dead + view.in_flight)
        if view.waiting and now - self._waited > _WAIT_S:
            self.note(view.waiting[0].upper() + view.waiting[1:])
            self._waited = self._lined = now
        if self._bar is not None:
            done = view.scored + view.dead + view.in_flight
            self._bar.update(self._bar.task_ids[0], completed=done, view=view, rate=rate)
        elif now - self._lined > _LINE_S and (view.workers or not view.waiting):
            self._lined = now
            self.note(_line(view, rate))
        return rate


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        view: View | None = task.fields["view"]
        if view is None or not view.workers:
            return Text(f"starting {view.wanted} workers" if view else "starting workers")
        done = view.scored + view.dead + view.in_flight
        return Text(f"{done:,} of {view.expected:,} · {_figures(view, task.fields['rate'])}")


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:,.0f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def _line(view: View, rate: float) -> str:
    if not view.workers:
        return f"Starting {view.wanted} worker{'s' if view.wanted != 1 else ''}."
    done = view.scored + view.dead + view.in_flight
    share = done / view.expected if view.expected else 1.0
    return f"{done:,} of {view.expected:,} ({share:.1%}) · {_figures(view, rate)}"


def _figures(view: View, rate: float) -> str:
    figures = [f"{rate:,.0f} docs/s", f"ETA {eta(view, rate)}", f"{view.dead:,} dead"]
    figures.append(f"{view.workers} of {view.wanted} workers")
    if view.deaths:
        figures.append(f"{view.deaths} died")
    return " · ".join(figures)


def eta(view: View, rate: float) -> str:
    """The time left at `rate` keys per second, as h:mm:ss."""
    left = view.expected - view.scored - view.dead - view.in_flight
    if rate <= 0:
        return "–"
    seconds = int(max(0, left) / rate)
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
