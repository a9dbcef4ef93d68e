"""The driver: one run over an output directory, from the configuration to the verified end."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from random import Random
from types import FrameType
from typing import TYPE_CHECKING

from jobs import binding, specs
from jobs.config import Config
from jobs.outcome import Exit, Outcome
from jobs.progress import Reporter, View
from jobs.scheduler import Scheduler
from jobs.staging import staging
from jobs.state import Stop, StopKind, WorkerView
from jobs.store import ManifestStore
from jobs.worker import WorkerSpec
from shards import orders, parts, plan, verify
from shards.errors import ManifestError, UsageError
from shards.layout import Layout, check_name
from shards.lock import run_lock
from shards.manifest import Manifest, Resume
from shards.types import Plan, Shard, ShardState

if TYPE_CHECKING:
    from jobs import pool as ray_pool

log = logging.getLogger("rescore")

_SNAPSHOT_S = 2.0
_SAMPLE_S = 1.0
_MAX_REPAIRS = 3


def run(config: Config, reporter: Reporter, *, now: float | None = None) -> Outcome:
    """Plan, score, verify; resumes by itself. `now` is the monotonic second the command began.

    Raises UsageError and RankerError for what the user must change; everything that was acknowledged
    before stays.
    """
    started = time.monotonic() if now is None else now
    check_name(config.ranker.model_version)
    layout = Layout.open(config.output.path)
    try:
        with run_lock(layout, purpose="run"), Manifest.open(layout, now=_utc_now) as manifest:
            return _Driver(config, layout, manifest, reporter, started).run()
    except UsageError:
        raise
    except (OSError, ManifestError) as e:
        # Before the run had a number, or after it was over: there is nowhere to record it.
        return _output_fails(e)


def _output_fails(error: Exception | str) -> Outcome:
    return Outcome(
        exit=Exit.BREAKER,
        state="stopped",
        message=f"the output fails: {error}; what was acknowledged is safe, and the same command goes on from it",
    )


class _Driver:
    def __init__(
        self, config: Config, layout: Layout, manifest: Manifest, reporter: Reporter, started: float
    ) -> None:
        self._config, self._layout, self._manifest = config, layout, manifest
        self._reporter, self._started = reporter, started
        self._model_version = config.ranker.model_version
        self._corpus = specs.corpus(config)
        self._interrupts = 0
        self._pool: ray_pool.RayPool | None = None
        self._published, self._publish_cost = 0.0, 0.0
        self._scoring_seconds = 0.0
        self._scored_now = 0
        self._seconds: dict[str, float] = {}
        self._worker_seconds = 0.0
        self._ranker_info: Mapping[str, str] = {}
        self._truncated = 0
        self._preflight: dict[str, float] = {}
        self._warnings: dict[str, None] = {}

    # -- from the configuration to the plan ----------------------------------------------------------

    def run(self) -> Outcome:
        if self._manifest.rebuilt:
            self._reporter.note("The manifest was missing or damaged: rebuilt from plan, orders and parts.")
        self._scored_dtype = binding.scored_dtype(self._config)
        bound = binding.bind(self._config, gpus=self._gpus, note=self._reporter.note, dtype=self._scored_dtype)
        self._ranker, self._queries = bound.ranker, bound.queries
        self._plan = self._make_plan(bound)
        self._run = self._manifest.begin_run(
            model_version=self._model_version,
            pid=os.getpid(),
            host=socket.gethostname(),
            command=" ".join(sys.argv),
            config_json=self._config.model_dump_json(by_alias=True),
            versions=_versions(),
        )
        outcome = Outcome(exit=Exit.UNFORESEEN, state="failed", message="ended by an error")
        try:
            outcome = self._score_and_verify()
        except (OSError, ManifestError) as e:
            # The output's disk: nothing more can be promised there, and what is there stays.
            outcome = _output_fails(e)
        finally:
            try:
                self._end(outcome)
                shutil.rmtree(self._layout.crashes, ignore_errors=True)
                # Last: with a cluster that was killed around us, Ray can take a minute over this.
                self._close_pool()
            except (OSError, ManifestError) as e:
                if outcome.exit is not Exit.BREAKER:  # else the disk has spoken already
                    outcome = _output_fails(e)
        return outcome

    def _end(self, outcome: Outcome) -> None:
        self._manifest.end_run(
            self._run,
            state=outcome.state,
            exit_code=int(outcome.exit),
            message=outcome.message,
            summary={
                "expected": outcome.expected,
                "scored": outcome.scored,
                "dead": outcome.dead,
                "seconds": round(outcome.seconds, 3),
                "scoring_seconds": round(outcome.scoring_seconds, 3),
                "seconds_by_stage": {stage: round(s, 3) for stage, s in self._seconds.items()},
                "truncated": outcome.truncated,
                "ranker": dict(outcome.workers),
                "preflight": {**self._preflight, "warnings": list(self._warnings)},
            },
        )
        self._manifest.publish([])

    def _make_plan(self, bound: binding.Bound) -> Plan:
        made, change = plan.make_plan(
            self._layout,
            self._corpus,
            bound.binding,
            self._queries,
            now=_utc_now(),
            settings={},
            staging=staging(self._reporter),
        )
        self._reporter.planned(made, str(change))
        return made

    # -- the loop ------------------------------------------------------------------------------------

    def _score_and_verify(self) -> Outcome:
        ordered = orders.read_orders(self._layout, self._model_version)
        shards = [*self._plan.shards, *orders.shards_of(self._plan, ordered)]
        self._manifest.register(self._plan, ordered)
        resume = self._manifest.reconcile(self._plan, ordered)
        self._write_seed()
        self._publish_now([])
        self._reporter.resumed(resume, time.monotonic() - self._started)
        stopped = None
        verified: verify.Verification | None = None
        for _ in range(_MAX_REPAIRS):
            todo = self._pending(shards)
            if todo:
                stopped = self._score(todo)
                if stopped is not None:
                    break
            self._publish_now([])
            verified = verify.verify(self._layout, self._model_version)
            broken = [*verified.damaged_keys, *verified.missing_parts]
            if not broken:
                break
            self._reporter.note(f"{len(broken)} parts are damaged or gone: scoring those shards again.")
            self._manifest.repair(self._model_version, broken)
        return self._outcome(stopped, verified, resume)

    def _pending(self, shards: Sequence[Shard]) -> list[Shard]:
        self._histories = self._manifest.histories(self._model_version)
        finished = {ShardState.DONE, ShardState.DEAD}
        return [s for s in shards if s.key not in self._histories or self._histories[s.key].state not in finished]

    def _score(self, todo: Sequence[Shard]) -> tuple[Exit, str, str] | None:
        """Score `todo`. None when it is all done or dead; else (exit, state, message)."""
        gpus = self._gpus()
        # Only where there is work: what is complete is complete on any hardware.
        refused = self._scored_dtype and binding.other_dtype(self._config, self._scored_dtype, gpus)
        if refused:
            return Exit.USAGE, "stopped", refused
        from jobs import pool as ray_pool  # Ray is loaded only where there is work for it

        cluster = ray_pool.connect()
        workers = self._config.workers

        def place(unfit: frozenset[str] = frozenset()) -> ray_pool.Placement:
            return ray_pool.placement(
                count=None if workers.count == "auto" else workers.count,
                cpus=None if workers.cpus == "auto" else workers.cpus,
                gpus=gpus,
                in_flight=workers.in_flight,
                accelerator_type=workers.accelerator_type,
                resources=workers.resources,
                unfit=unfit,
            )

        placement = place()
        spec = self._worker_spec(device="cuda" if gpus else "cpu", threads=max(1, int(placement.cpus)))
        self._pool = pool = ray_pool.RayPool(lambda worker: replace(spec, worker=worker), place)
        self._reporter.connected(cluster, str(placement), placement.count)
        if self._ranker.kind != "custom":
            auto = " (ranker.dtype: auto)" if self._config.ranker.dtype == "auto" else ""
            self._reporter.note(f"Scoring in {self._ranker.dtype}{auto}.")
        scheduler = Scheduler(
            todo,
            pool=pool,
            store=ManifestStore(self._manifest, self._layout, self._plan, self._run),
            clock=_Clock(),
            random=Random(),  # noqa: S311 - jitter, not a secret
            policy=specs.policy(self._config),
            histories=self._histories,
            in_flight=workers.in_flight,
            trusted=self._manifest.counts(self._model_version).scored > 0,
        )
        begun = time.monotonic()
        try:
            with self._signals(scheduler), self._reporter.live(self._plan):
                return self._loop(scheduler, pool)
        finally:
            self._scoring_seconds += time.monotonic() - begun
            self._scored_now += scheduler.tally.scored
            self._truncated += scheduler.tally.truncated
            self._hear(scheduler, pool)
            for worker in scheduler.workers.values():
                self._ranker_info = worker.info.ranker or self._ranker_info
                self._worker_seconds += time.monotonic() - worker.since
                for stage, seconds in worker.seconds.items():
                    self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def _loop(self, scheduler: Scheduler, pool: ray_pool.RayPool) -> tuple[Exit, str, str] | None:
        deadline = None
        sampled = cost = 0.0
        while not scheduler.finished and scheduler.stop is None:
            scheduler.tick(0.5)
            now = time.monotonic()
            if self._interrupts and deadline is None:
                deadline = now + self._config.retry.grace_s
            if self._interrupts > 1 or (deadline is not None and now > deadline):
                break
            if now - sampled >= max(_SAMPLE_S, 20 * cost):
                self._sample(scheduler, pool)
                sampled = time.monotonic()
                cost = sampled - now
            self._publish(scheduler)
        scheduler.abandon(scheduler.stop.message if scheduler.stop else "interrupted")
        if scheduler.stop is not None:
            return self._stopped(scheduler.stop)
        if scheduler.unfinished:
            return Exit.INTERRUPTED, "interrupted", "The same command goes on from here."
        self._close_pool()
        return None

    def _stopped(self, stop: Stop) -> tuple[Exit, str, str]:
        match stop.kind:
            case StopKind.REFUSED:
                return Exit.USAGE, "stopped", stop.message
            case StopKind.FATAL:
                return Exit.BREAKER, "stopped", _output_fails(stop.message).message
            case StopKind.BREAKER:
                if stop.traceback:
                    log.error("%s", stop.traceback)
                return Exit.BREAKER, "stopped", stop.message

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _hear(self, scheduler: Scheduler, pool: ray_pool.RayPool) -> None:
        """What the workers' preflights say: each warning once, of each figure the worst."""
        if scheduler.stop is None:  # else the last line says it
            for why, node in {why: node for node, why in reversed(pool.unfit.items())}.items():
                self._warn(f"node {node[:12]} gets no workers: {why}")
        for info in [worker.info for worker in scheduler.workers.values()]:
            for warning in info.warnings:
                self._warn(warning)
            for name, figure in info.preflight.items():
                worst = min if name == "spread" else max
                self._preflight[name] = worst(figure, self._preflight.get(name, figure))

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings[text] = None
            self._reporter.note(f"Warning: {text}")

    def _sample(self, scheduler: Scheduler, pool: ray_pool.RayPool) -> None:
        self._hear(scheduler, pool)
        counts = self._manifest.counts(self._model_version)
        view = View(
            expected=counts.total,
            scored=counts.scored,
            dead=counts.dead,
            in_flight=scheduler.keys_in_flight,
            workers=len(scheduler.workers),
            wanted=pool.wanted,
            retries=scheduler.tally.retries,
            deaths=scheduler.tally.deaths,
            waiting=pool.waiting(),
        )
        rate = self._reporter.update(view)
        self._manifest.sample(
            self._run,
            pending_shards=scheduler.unfinished - scheduler.leased,
            leased_shards=scheduler.leased,
            pending_docs=scheduler.unfinished_docs(),
            docs_per_s=rate,
        )

    # -- the snapshot --------------------------------------------------------------------------------

    def _publish(self, scheduler: Scheduler) -> None:
        # Never more than a twentieth of the driver's time, however large the manifest has become.
        if time.monotonic() - self._published > max(_SNAPSHOT_S, 20 * self._publish_cost):
            self._publish_now([_worker_row(w) for w in scheduler.workers.values()])

    def _publish_now(self, workers: Sequence[Mapping[str, object]]) -> None:
        start = time.monotonic()
        self._manifest.publish(workers)
        self._published = time.monotonic()
        self._publish_cost = self._published - start

    def _write_seed(self) -> None:
        schema = parts.part_schema(
            self._plan.id_type, query_set=self._plan.query_set, label_scores=self._plan.binding.label_scores
        )
        parts.write_seed(self._layout, self._model_version, self._plan.epoch, schema)

    # -- the end -------------------------------------------------------------------------------------

    def _outcome(
        self, stopped: tuple[Exit, str, str] | None, verified: verify.Verification | None, resume: Resume
    ) -> Outcome:
        counts = self._manifest.counts(self._model_version)
        if stopped is not None:
            exit_, state, message = stopped
        elif verified is None or verified.missing_docs or verified.duplicate_keys or verified.damaged_parts:
            exit_, state = Exit.UNFORESEEN, "failed"
            message = f"verification failed: see `rescore verify {self._layout.root}`"
        elif counts.dead > self._config.retry.dead_letters_ok:
            exit_, state, message = Exit.DEAD_LETTERS, "complete_with_dead_letters", ""
        else:
            exit_, state, message = Exit.COMPLETE, "complete", ""
        return Outcome(
            exit=exit_,
            state=state,
            message=message,
            output=str(self._layout.root),
            model_version=self._model_version,
            expected=counts.total,
            scored=counts.scored,
            dead=counts.dead,
            duplicates=self._plan.duplicates,
            scored_now=self._scored_now,
            truncated=self._truncated,
            preflight=self._preflight,
            seconds=time.monotonic() - self._started,
            scoring_seconds=self._scoring_seconds,
            shares=_shares(self._seconds, self._worker_seconds),
            workers=self._ranker_info,
        )

    # -- small parts ---------------------------------------------------------------------------------

    def _gpus(self) -> float:
        """GPUs of one worker. Settled once: a cluster scaled to zero must not turn into CPUs."""
        wanted = self._config.workers.gpus
        if wanted != "auto":
            return wanted
        from jobs import pool as ray_pool

        ray_pool.connect()
        return 1.0 if ray_pool.can_have_gpus() else 0.0

    def _worker_spec(self, *, device: str, threads: int) -> WorkerSpec:
        return WorkerSpec(
            worker="",
            output=str(self._layout.root),
            corpus=self._corpus,
            id_type=self._plan.id_type,
            query=self._config.corpus.query,
            queries=self._queries,
            ranker=self._ranker,
            device=device,
            threads=threads,
            model_version=self._model_version,
            epoch=self._plan.epoch,
            binding=self._plan.binding.digest,
            label_scores=self._plan.binding.label_scores,
            run=self._run,
            import_paths=tuple(p for p in sys.path if p),
        )

    @contextmanager
    def _signals(self, scheduler: Scheduler) -> Iterator[None]:
        """SIGTERM and Ctrl-C drain; the second one stops at once. The third gets Python's own handling."""
        previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

        def on_signal(signum: int, _: FrameType | None) -> None:
            self._interrupts += 1
            scheduler.drain()
            if self._interrupts == 1:
                self._reporter.note(
                    f"{signal.Signals(signum).name}: finishing what is in flight, at most "
                    f"{self._config.retry.grace_s:g} s; again to stop at once."
                )
            else:
                restore()

        for signum in previous:
            signal.signal(signum, on_signal)
        try:
            yield
        finally:
            restore()


class _Clock:
    def monotonic(self) -> float:
        return time.monotonic()


def _worker_row(worker: WorkerView) -> dict[str, object]:
    return {
        "worker": worker.info.worker,
        "node": worker.info.node,
        "pid": worker.info.pid,
        "device": worker.info.ranker.get("device", ""),
        "shards": worker.shards,
        "docs": worker.keys,
        "leased": len(worker.held),
        "shares": _shares(worker.seconds, time.monotonic() - worker.since),
    }


def _shares(seconds: Mapping[str, float], wall: float) -> dict[str, float]:
    """Each stage's share of the workers' wall time, 0…1. Stages of neighbouring shards overlap."""
    return {stage: round(s / wall, 3) for stage, s in seconds.items()} if wall else {}


def _versions() -> dict[str, str]:
    names = ("ray", "torch", "transformers", "sentence-transformers", "pyarrow", "duckdb")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _utc_now() -> datetime:
    return datetime.now(UTC)
