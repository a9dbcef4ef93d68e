"""Small corpora and outputs for tests of the data plane: real files, scored by a formula."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards import parts
from shards.corpus import Reader
from shards.layout import Layout
from shards.manifest import Manifest
from shards.orders import read_orders, shards_of
from shards.plan import PlanChange, make_plan
from shards.staging import Staging
from shards.types import (
    Binding,
    CorpusSpec,
    Event,
    EventKind,
    Failure,
    Footer,
    Plan,
    QuerySet,
    Shard,
    Stage,
)

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def write_corpus(path: Path, ids: Sequence[Any], *, group: int = 1000, **columns: Any) -> Path:
    """A Parquet file with `doc_id` and `text` (unless given), `group` rows a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if "text" not in columns:
        columns = {"text": [f"text of {value}" for value in ids], **columns}
    table = {"doc_id": ids, **columns}
    pq.write_table(pa.table(table), path, row_group_size=group)
    return path


def invalid_strings(values: Iterable[bytes | None]) -> pa.Array:
    """A string array with any bytes at all, as other writers produce them."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), raw.null_count)


@dataclass
class Output:
    """An output over the corpus in `root`/corpus, with a clock that stands still."""

    root: Path
    spec: CorpusSpec
    queries: QuerySet | None = None
    components: Mapping[str, str] = field(default_factory=lambda: {"weights": "w1", "query": "q"})
    model_version: str = "m1"
    now: datetime = NOW
    staging: Staging = field(default_factory=Staging)

    @cached_property
    def layout(self) -> Layout:
        return Layout.open(self.root / "out")

    @property
    def binding(self) -> Binding:
        return Binding(model_version=self.model_version, components=self.components)

    def make_plan(self) -> tuple[Plan, PlanChange]:
        return make_plan(
            self.layout,
            self.spec,
            self.binding,
            self.queries,
            now=self.now,
            settings={},
            staging=self.staging,
        )

    @property
    def plan(self) -> Plan:
        return self.make_plan()[0]

    def open(self) -> Manifest:
        return Manifest.open(self.layout, now=lambda: self.now)

    def start(self, manifest: Manifest) -> tuple[int, Plan, list[Shard]]:
        """As a driver starts: run, plan, and every shard that is asked for."""
        plan = self.plan
        orders = read_orders(self.layout, self.model_version)
        manifest.register(plan, orders)
        schema = parts.part_schema(plan.id_type, query_set=plan.query_set, label_scores=False)
        parts.write_seed(self.layout, self.model_version, plan.epoch, schema)
        run = manifest.begin_run(
            model_version=self.model_version,
            pid=1,
            host="here",
            command="test",
            config_json="{}",
            versions={},
        )
        return run, plan, [*plan.shards, *shards_of(plan, orders)]

    def publish(self, plan: Plan, shard: Shard, *, dead: Sequence[int] = (), run: int = 1) -> Footer:
        """Score a shard; the rows (in the file) of `dead` fail. Returns the footer that stands."""
        rows = Reader(self.spec, plan.id_type).read(shard)
        failures = [
            *rows.failures,
            *(_failure(row, doc_id) for row, doc_id in zip(rows.rows, rows.doc_ids, strict=True) if row in dead),
        ]
        kept = [i for i, row in enumerate(rows.rows) if row not in dead]
        ids = self.queries.ids if self.queries is not None else (None,)
        keys = [(i, query_id) for i in kept for query_id in ids]
        schema = parts.part_schema(plan.id_type, query_set=plan.query_set, label_scores=False)
        table = parts.make_rows(
            schema,
            doc_ids=[rows.doc_ids[i] for i, _ in keys],
            query_ids=[str(query_id) for _, query_id in keys] if plan.query_set else None,
            model_version=plan.model_version,
            scores=np.array([float(rows.rows[i]) for i, _ in keys], dtype=np.float32),
            label_scores=None,
            n_tokens=[3] * len(keys),
            truncated=[False] * len(keys),
            text_hashes=parts.text_hashes((str(query_id), rows.texts[i]) for i, query_id in keys),
            shard_id=shard.shard_id,
        )
        footer = replace(
            make_footer(plan, shard, run=run),
            scored=len(keys),
            dead=len(failures) * len(ids),
            failures=tuple(failures),
        )
        return parts.publish(self.layout, footer, table)[0]

    def bury(self, plan: Plan, shard: Shard, *, run: int = 1) -> Footer:
        """A shard that is dead as a whole."""
        keys = shard.keys(plan.queries)
        failure = Failure(
            row=None, doc_id=None, stage=Stage.WORKER, error_type="Gone", message="gone", traceback="trace"
        )
        footer = replace(make_footer(plan, shard, run=run), dead=keys, failures=(failure,), whole=True)
        schema = parts.part_schema(plan.id_type, query_set=plan.query_set, label_scores=False)
        return parts.publish(self.layout, footer, schema.empty_table())[0]

    def _verdict(self, plan: Plan, shard: Shard, dead: Sequence[int], run: int) -> Footer:
        if shard.unreadable:
            return self.bury(plan, shard, run=run)
        return self.publish(plan, shard, dead=dead, run=run)

    def score(self, manifest: Manifest, run: int, plan: Plan, shard: Shard, *, dead: Sequence[int] = ()) -> None:
        """Lease, publish and acknowledge a shard."""
        manifest.commit(run, [event(EventKind.LEASED, shard)])
        manifest.commit(run, [verdict(self.publish(plan, shard, dead=dead, run=run))])

    def score_all(self, *, dead: Sequence[int] = ()) -> None:
        """A whole run; ends with exit code 0, or 3 if something is dead."""
        with self.open() as manifest:
            run, plan, shards = self.start(manifest)
            manifest.reconcile(plan, read_orders(self.layout, self.model_version))
            histories = manifest.histories(self.model_version)
            todo = [shard for shard in shards if histories[shard.key].state == "pending"]
            manifest.commit(run, [event(EventKind.LEASED, shard) for shard in todo])
            manifest.commit(run, [verdict(self._verdict(plan, shard, dead, run)) for shard in todo])
            counts = manifest.counts(self.model_version)
            state, code = ("complete_with_dead_letters", 3) if counts.dead else ("complete", 0)
            manifest.end_run(run, state=state, exit_code=code, message="", summary={})
            manifest.publish()


def make_output(root: Path, *, docs: int = 25, group: int = 10, shard_size: int = 4, **spec: Any) -> Output:
    """One file of `docs` documents d0, d1, … and an output beside it."""
    write_corpus(root / "corpus" / "a.parquet", [f"d{i}" for i in range(docs)], group=group)
    return Output(
        root=root,
        spec=CorpusSpec(
            path=str(root / "corpus"), id_column="doc_id", text_column="text", shard_size=shard_size, **spec
        ),
    )


def make_footer(plan: Plan, shard: Shard, *, run: int = 1) -> Footer:
    """A footer for the shard, without a verdict."""
    return Footer.of(
        shard,
        model_version=plan.model_version,
        epoch=plan.epoch,
        binding=plan.binding.digest,
        expected=shard.keys(plan.queries),
        scored=0,
        dead=0,
        failures=(),
        whole=False,
        run=run,
        attempt=1,
        worker="w1",
    )


def event(kind: EventKind, shard: Shard, *, attempt: int = 1, error_type: str = "") -> Event:
    return Event(
        kind=kind,
        shard_id=shard.shard_id,
        generation=shard.generation,
        attempt=attempt,
        worker="w1",
        error_type=error_type,
    )


def verdict(footer: Footer) -> Event:
    return Event(
        kind=EventKind.DEAD if footer.whole else EventKind.DONE,
        shard_id=footer.shard_id,
        generation=footer.generation,
        attempt=footer.attempt,
        worker=footer.worker,
        footer=footer,
    )


def _failure(row: int, doc_id: str | int) -> Failure:
    return Failure(
        row=row,
        doc_id=doc_id,
        stage=Stage.SCORE,
        error_type="NonFinite",
        message=f"row {row}",
        traceback="Traceback …",
    )
