"""The live manifest: an index over plan, parts and orders, which the driver alone keeps open."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from shards import publish, records, redrive
from shards.layout import Layout
from shards.live import Live, open_live, utc
from shards.orders import Order, shards_of
from shards.reconcile import Resume, reconcile, released
from shards.redrive import Redriven
from shards.types import Event, History, Plan, ShardKey, ShardState

__all__ = ["Counts", "Manifest", "Redriven", "Resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Where a model_version stands, in keys: documents, or document-query pairs where a query set is used."""

    shards: Mapping[str, int]
    """By state (pending, leased, done, dead) of their latest generation."""
    total: int
    scored: int
    dead: int


class Manifest:
    """Open with `Manifest.open`; the holder of the run lock alone may. Not for several threads.

    Every method that writes raises ManifestError if DuckDB refuses: the driver then ends, and the next
    start reconciles.
    """

    def __init__(
        self,
        layout: Layout,
        live: Live,
        *,
        rebuilt: bool,
        now: Callable[[], datetime],
    ) -> None:
        self.layout = layout
        self.rebuilt = rebuilt
        self._live = live
        self._now = now
        self._seq = self._live.scalar("SELECT coalesce(max(seq), 0) FROM events")
        self._run: int | None = None
        self._model_version = ""
        self._headers: dict[str, tuple[int, int]] = {}
        """model_version → (epoch, queries). A tick's commit must not ask DuckDB twice for what stays."""

    @classmethod
    def open(cls, layout: Layout, *, now: Callable[[], datetime]) -> Manifest:
        """Open or create the live database. `rebuilt` tells that an earlier one was lost or damaged."""
        live, rebuilt = open_live(layout, utc(now()))
        return cls(layout, live, rebuilt=rebuilt, now=now)

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._live.close()

    def begin_run(
        self,
        *,
        model_version: str,
        pid: int,
        host: str,
        command: str,
        config_json: str,
        versions: Mapping[str, str],
    ) -> int:
        """Record a run and return its number. Earlier runs that never ended are marked interrupted."""
        now = utc(self._now())
        run = max(self._live.scalar("SELECT coalesce(max(run), 0) FROM runs"), self._last_run_on_disk()) + 1
        with self._live.transaction():
            self._live.execute(
                "UPDATE runs SET state = 'interrupted', ended_at = ?, exit_code = 5,"
                " message = 'the driver died' WHERE state = 'running'",
                [now],
            )
            self._live.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, 'running', NULL, NULL, NULL)",
                [run, model_version, pid, host, command, config_json, json.dumps(dict(versions)), now],
            )
        self._run, self._model_version = run, model_version
        return run

    def end_run(self, run: int, *, state: str, exit_code: int, message: str, summary: Mapping[str, object]) -> None:
        """Record how a run ended: complete, complete_with_dead_letters, stopped, interrupted, failed."""
        values = [utc(self._now()), state, exit_code, records.clean(message), json.dumps(dict(summary)), run]
        with self._live.transaction():
            self._live.execute(
                "UPDATE runs SET ended_at = ?, state = ?, exit_code = ?, message = ?, summary = ? WHERE run = ?",
                values,
            )

    def register(self, plan: Plan, orders: Sequence[Order]) -> None:
        """Enter the plan's shards and those that were ordered. Idempotent; what is new is added.

        A plan that replaced another one (nothing was published under it) takes its place here too.
        """
        self._headers.clear()
        planned = [*plan.shards, *shards_of(plan, orders)]
        key = [plan.model_version, plan.epoch]
        table = records.shards(planned, plan, first=0, at=utc(self._now()))
        with self._live.transaction(), self._live.tables(incoming=table):
            foreign = self._live.scalar(
                "SELECT (SELECT count(*) FROM shards ANTI JOIN incoming USING (shard_id, generation)"
                " WHERE (model_version, epoch) = (?, ?))"
                " + (SELECT count(*) FROM model_versions WHERE (model_version, epoch) = (?, ?) AND binding <> ?)",
                [*key, *key, plan.binding.digest],
            )
            if foreign:
                for name in ("shards", "events", "letters"):
                    self._live.execute(f"DELETE FROM {name} WHERE (model_version, epoch) = (?, ?)", key)
            for name in ("model_versions", "corpus_files", "ordered"):
                self._live.execute(f"DELETE FROM {name} WHERE (model_version, epoch) = (?, ?)", key)
            self._live.execute("INSERT INTO model_versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _header(plan))
            self._live.execute(
                "INSERT INTO shards SELECT * FROM incoming i WHERE NOT EXISTS (SELECT 1 FROM shards s WHERE"
                " (s.model_version, s.epoch, s.shard_id, s.generation)"
                " = (i.model_version, i.epoch, i.shard_id, i.generation))"
            )
            self._live.append("corpus_files", records.corpus_files(plan))
            self._live.append("ordered", records.ordered([order for order in orders if order.epoch == plan.epoch]))

    def reconcile(self, plan: Plan, orders: Sequence[Order]) -> Resume:
        """Compare events and parts, and make the events true. See `shards.reconcile`."""
        return reconcile(self, plan, shards_of(plan, orders))

    def states(self, model_version: str, epoch: int) -> dict[ShardKey, str]:
        """The last event's kind of every shard that has one."""
        rows = self._live.rows(
            "SELECT shard_id, generation, kind FROM last_events WHERE (model_version, epoch) = (?, ?)",
            [model_version, epoch],
        )
        return {(shard_id, generation): kind for shard_id, generation, kind in rows}

    def histories(self, model_version: str) -> dict[ShardKey, History]:
        """What is known of every registered shard."""
        rows = self._live.rows(
            "SELECT shard_id, generation, state, attempts, failed, died, released, voided, first_leased_at"
            " FROM shard_states WHERE model_version = ? AND epoch ="
            " (SELECT max(epoch) FROM model_versions WHERE model_version = ?)",
            [model_version, model_version],
        )
        return {
            (shard_id, generation): History(
                state=ShardState(state),
                attempts=attempts,
                failed=failed,
                died=died,
                released=released,
                voided=voided,
                first_leased_at=None if first is None else first.replace(tzinfo=UTC),
            )
            for shard_id, generation, state, attempts, failed, died, released, voided, first in rows
        }

    def commit(self, run: int, events: Sequence[Event]) -> None:
        """Append the events of one scheduler tick, and the dead letters their footers bring, in one transaction."""
        if not events:
            return
        assert run == self._run, f"run {run} was not begun"
        self.append(events, model_version=self._model_version, run=run)

    def append(
        self,
        events: Sequence[Event],
        *,
        model_version: str,
        run: int | None = None,
        at: Sequence[datetime] | None = None,
    ) -> None:
        """As `commit`, with times of their own for events that are found later (`at`, one each)."""
        epoch, queries = self._header_of(model_version)
        now = utc(self._now())
        times = [now] * len(events) if at is None else at
        entries = [
            records.Entry(seq=self._seq + number, at=time, event=event)
            for number, (time, event) in enumerate(zip(times, events, strict=True), 1)
        ]
        letters = records.letters(entries, queries=queries)
        run = self._run if run is None else run
        with self._live.transaction():
            self._live.append("events", records.events(entries, run=run, model_version=model_version, epoch=epoch))
            if letters is not None:
                self._live.append("letters", letters)
        self._seq += len(entries)

    def _header_of(self, model_version: str) -> tuple[int, int]:
        if model_version not in self._headers:
            found = self._live.rows(
                "SELECT epoch, queries FROM model_versions WHERE model_version = ? ORDER BY epoch DESC LIMIT 1",
                [model_version],
            )
            assert found, f"{model_version} is not registered"
            self._headers[model_version] = found[0]
        return self._headers[model_version]

    def repair(self, model_version: str, keys: Iterable[ShardKey]) -> None:
        """Put shards back whose parts were found damaged or missing."""
        message = "its part is damaged or missing"
        self.append(
            [released(key, "PartDamaged", message) for key in keys],
            model_version=model_version,
        )

    def sample(
        self,
        run: int,
        *,
        pending_shards: int,
        leased_shards: int,
        pending_docs: int,
        docs_per_s: float,
    ) -> None:
        """Append one line to the lag's history."""
        with self._live.transaction():
            self._live.execute(
                "INSERT INTO lag_samples VALUES (?, ?, ?, ?, ?, ?)",
                [run, utc(self._now()), pending_shards, leased_shards, pending_docs, docs_per_s],
            )

    def redrive(
        self, model_version: str | None, epoch: int | None = None, *, where: str | None, dry_run: bool
    ) -> Redriven:
        """Order dead letters to be tried again. See `shards.redrive`."""
        return redrive.redrive(self, model_version, epoch, where=where, dry_run=dry_run)

    def letters(self, model_version: str, epoch: int) -> pa.Table:
        """The dead letters that are dead now, as `dead_letters` publishes them (doc_id as text)."""
        return self._live.table(
            "SELECT * FROM dead_letters WHERE (model_version, epoch) = (?, ?) AND state = 'dead'",
            [model_version, epoch],
        )

    def counts(self, model_version: str) -> Counts:
        """Where the model_version's current epoch stands."""
        row = self._live.rows(publish.COUNTS, [model_version] * 3)[0]
        return Counts(
            shards={"pending": row[0], "leased": row[1], "done": row[2], "dead": row[3]},
            total=row[4],
            scored=row[5],
            dead=row[6],
        )

    def publish(self, workers: Sequence[Mapping[str, object]] = ()) -> None:
        """Publish the snapshot that people and other programs open. OSErrors propagate."""
        with self._live.connection() as connection:
            publish.publish(connection, self.layout, workers)

    def _last_run_on_disk(self) -> int:
        """The highest run in any footer; only a manifest that was lost needs to ask the parts."""
        if not self.rebuilt:
            return 0
        last = 0
        for path in self.layout.root.glob("scores/*/e*/[0-9a-f][0-9a-f]/*.parquet"):
            try:
                metadata = pq.read_metadata(path).metadata or {}
                last = max(last, int(json.loads(metadata[b"rescore"])["run"]))
            except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
                continue  # a damaged part is reconcile's to report
        return last


def _header(plan: Plan) -> list[object]:
    return [
        plan.model_version,
        plan.epoch,
        plan.id_type,
        plan.queries,
        plan.query_set,
        plan.binding.digest,
        plan.binding.label_scores,
        plan.duplicates,
        json.dumps(dict(plan.settings)),
        utc(plan.planned_at),
    ]
