"""The contenders of `peers`: how each is started, and where each says how long its steady part took."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.corpora import QUERY, Corpus
from tests.benchmarks.measure import Measured, measure, private_token
from tests.benchmarks.ours import rescore

PREDICT = "`CrossEncoder.predict`, batch size 32"
OURS = "`rescore run`"
CEILING = "ceiling: forward passes alone"

_SHARDS = 20
"""Shards of `rescore` and blocks of Ray Data: a corpus of minutes, cut as finely as one of hours would be, so that
the wait for the last one does not decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every contender is given."""

    corpus: Corpus
    checkpoint: Path
    dtype: str
    root: Path
    threads: int
    best_batch: int = 32
    """The fastest of `predict` with all threads."""
    best_batch_alone: int = 32
    """The fastest of `predict` with one thread."""

    @classmethod
    def of(cls, corpus: Corpus, checkpoint: Path, dtype: str, root: Path, threads: int) -> Bench:
        return cls(corpus=corpus, checkpoint=checkpoint, dtype=dtype, root=root, threads=threads)

    @property
    def shard_rows(self) -> int:
        return max(1, -(-self.corpus.docs // _SHARDS))

    def config(self, workers: int, cpus: int) -> dict[str, dict[str, Any]]:
        """What `rescore` is told."""
        return {
            "corpus": {"path": str(self.corpus.path), "query": QUERY, "shard_size": self.shard_rows},
            "ranker": {
                "checkpoint": str(self.checkpoint),
                "max_length": self.corpus.max_length,
                "dtype": self.dtype,
            },
            "workers": {"count": workers, "cpus": cpus},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one contender. `alone`: it has no end to end. `notes`: what else is worth a line."""

    measured: Measured
    steady_s: float
    scores: str
    alone: bool = False
    notes: str = ""


Contender = tuple[str, Callable[[Bench, int], Run]]


def contenders(bench: Bench) -> list[Contender]:
    """By name, in the order of the table."""
    return [
        (PREDICT, lambda b, n: predict(b, n, 32)),
        (
            f"`CrossEncoder.predict`, its best batch size ({bench.best_batch})",
            lambda b, n: predict(b, n, b.best_batch),
        ),
        ("Ray Data, as documented", lambda b, n: ray_data(b, n, "documented")),
        ("Ray Data, tuned by hand", lambda b, n: ray_data(b, n, "tuned")),
        ("Ray Data, tuned, with its checkpoints", lambda b, n: ray_data(b, n, "checkpointed")),
        (OURS, ours),
        (CEILING, ceiling),
    ]


def sweep(bench: Bench) -> tuple[Bench, str]:
    """The best batch sizes of `predict`, with all threads and with one, and all that were tried, in words."""
    sample = max(32, bench.corpus.docs // 10)
    found, words = [], []
    for threads in sorted({bench.threads, 1}, reverse=True):
        done = measure(
            [*_script("predict_loop", bench, "sweep"), "--threads", str(threads), "--sample", str(sample)]
        )
        rates = {int(size): rate for size, rate in _last_line(done)["rates"].items()}
        found.append(next(iter(rates)))
        each = ", ".join(f"{size}: {rate:.1f}" for size, rate in sorted(rates.items()))
        words.append(f"with {threads} thread{'s' * (threads > 1)} {each} docs/s")
    return replace(bench, best_batch=found[0], best_batch_alone=found[-1]), "; ".join(words)


def predict(bench: Bench, n: int, batch_size: int) -> Run:
    """The loop, with all threads of one process."""
    out = bench.root / f"predict-{batch_size}-{n}"
    while out.exists():  # the best batch size may be 32
        out = out.with_name(out.name + "-again")
    command = [*_script("predict_loop", bench, "loop"), "--out", str(out), "--batch-size", str(batch_size)]
    done = measure([*command, "--threads", str(bench.threads)])
    return Run(measured=done, steady_s=_last_line(done)["steady_s"], scores=f"{out}/*.parquet")


def ray_data(bench: Bench, n: int, variant: str) -> Run:
    """An actor a core. The documented one leaves batch size and blocks as they are."""
    out = bench.root / f"{variant}-{n}"
    command = [*_script("ray_data", bench, variant), "--out", str(out), "--actors", str(bench.threads)]
    if variant != "documented":
        command += ["--batch-size", str(bench.best_batch_alone), "--block-rows", str(bench.shard_rows)]
    done = measure(command, env=private_token())
    return Run(measured=done, steady_s=_last_line(done)["steady_s"], scores=f"{out}/scores/*.parquet")


def ours(bench: Bench, n: int) -> Run:
    """`rescore run`: a worker a core, defaults elsewhere, but for shards that are cut as Ray Data's blocks are."""
    done = rescore(bench.root / f"rescore-{n}", **bench.config(bench.threads, 1))
    forward = done.by_stage["forward"] / bench.threads
    return Run(
        measured=done.measured,
        steady_s=done.steady_s,
        scores=done.scores,
        notes=f"Of `rescore`, in forward passes: {forward / done.measured.seconds:.0%} end to end, "
        f"{forward / done.steady_s:.1%} once started.",
    )


def ceiling(bench: Bench, n: int) -> Run:
    """Forward passes alone; see `tests.benchmarks.ceiling`."""
    out = bench.root / f"ceiling-{n}"
    done = measure([*_script("ceiling", bench), "--out", str(out), "--threads", str(bench.threads)])
    said = _last_line(done)
    swept = ", ".join(f"{name}: {rate:.1f}" for name, rate in said["swept"].items())
    return Run(
        measured=done,
        steady_s=bench.corpus.docs / said["rate"],
        scores=f"{out}/*.parquet",
        alone=True,
        notes=f"Ceiling: {said['processes']} × {said['threads']} threads, {said['budget']} padded tokens a batch "
        f"(on a part of the corpus, docs/s by processes × threads, budget: {swept}): {said['gflops']:.1f} GFLOP/s "
        f"without padding, {said['gflops'] / said['peak_gflops']:.0%} of the matrix-multiply peak of "
        f"{said['peak_gflops']:.1f} GFLOP/s at the model's shapes.",
    )


def _script(module: str, bench: Bench, *what: str) -> list[str]:
    paths = [str(bench.corpus.path), str(bench.checkpoint)]
    options = ["--max-length", str(bench.corpus.max_length), "--dtype", bench.dtype]
    return [sys.executable, "-m", f"tests.benchmarks.{module}", *what, *paths, *options]


def _last_line(done: Measured) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said
