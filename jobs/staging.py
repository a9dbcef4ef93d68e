"""Staging on the driver's machine: a process a file, as many as there are CPUs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext
from typing import Any

from jobs.progress import Reporter
from shards.errors import CorpusError
from shards.lines import Tell
from shards.staging import Job, Result, Staging, one_by_one, stage

_SMALL = 32 << 20  # bytes: starting a process costs a second, and so does staging this much
_LOOK_S = 1.0
_read: Any = None  # in a staging process: bytes that this pool has read, shared by all of it


def staging(reporter: Reporter) -> Staging:
    """How a run stages what is not Parquet."""
    return Staging(run=_run, report=reporter.staging)


def _run(jobs: Sequence[Job], tell: Tell) -> Iterator[Result]:
    if len(jobs) == 1 or sum(job.size for job in jobs) < _SMALL:
        return one_by_one(jobs, tell)
    return in_processes(jobs, tell, processes=min(len(jobs), os.cpu_count() or 1))


def in_processes(jobs: Sequence[Job], tell: Tell, *, processes: int) -> Iterator[Result]:
    """Stage the largest files first. What is left is given up when the caller is: a start stages it again."""
    # Not forked: the driver may have Ray's threads by now.
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0)
    pool = _pool(context, processes, shared)
    done = 0
    left: set[Future[Result]] = set()
    try:
        ordered = sorted(jobs, key=lambda job: job.size, reverse=True)
        left = {pool.submit(_stage, job) for job in ordered}
        while left:
            ended, left = wait(left, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                result = future.result()
                done += result.job.size
                yield result
            tell(max(0, shared.value - done))
    except BrokenProcessPool as error:
        raise CorpusError("a process that staged files was killed (out of memory?); run again") from error
    finally:
        pool.shutdown(wait=not left, cancel_futures=True)
        for process in multiprocessing.active_children() if left else ():
            process.terminate()


def _pool(context: SpawnContext, processes: int, shared: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(shared,))


def _begin(shared: Any) -> None:
    global _read
    _read = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
    threading.Thread(target=_end_with_the_driver, daemon=True).start()


def _end_with_the_driver() -> None:
    # A pool's processes do not notice that their parent was killed: they would wait for work for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _stage(job: Job) -> Result:
    last = 0

    def tell(at: int) -> None:
        nonlocal last
        with _read.get_lock():
            _read.value += at - last
        last = at

    return stage(job, tell)
