"""The actor on a device: read → tokenise → score → write, one call a shard, neighbouring shards overlapping.

Each call runs in a thread of its own and passes the stages one after the other; a stage admits one shard
at a time. So while one shard is in the forward pass the next is read and tokenised and the last is
written, and memory is bounded by how many shards the driver lends the worker.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jobs.protocol import Done, ErrorReport, Failed, Lease, Progress, WorkerInfo
from ranker.errors import DeviceBroken, RankerError
from ranker.load import load
from ranker.types import Pair, RankerSpec, Scored
from shards import parts
from shards.corpus import Reader, ShardRows
from shards.layout import Layout
from shards.types import CorpusSpec, DocId, Failure, Footer, IdType, QuerySet, Shard, Stage

log = logging.getLogger("rescore.worker")

_HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What every worker of a run is told once. Plain values only: it travels."""

    worker: str
    output: str
    corpus: CorpusSpec
    id_type: IdType
    query: str | None
    queries: QuerySet | None
    ranker: RankerSpec
    threads: int
    model_version: str
    epoch: int
    binding: str
    label_scores: bool
    run: int
    import_paths: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Keys:
    """The keys of a shard, in the order of its pairs: one entry a (document, query)."""

    doc_ids: list[DocId]
    rows: list[int]
    query_ids: list[str] | None
    pairs: list[Pair]


@dataclass(slots=True)
class _Seconds:
    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[stage] = self.spent.get(stage, 0.0) + time.perf_counter() - start

    def each(self, stage: str, steps: Iterator[int]) -> Iterator[int]:
        """`steps`, each timed by itself: the time between two of them is the caller's."""
        while True:
            with self.time(stage):
                step = next(steps, None)
            if step is None:
                return
            yield step


class Worker:
    """Scores shards with one ranker. `jobs.pool` makes a Ray actor of it; nothing in here knows Ray."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._layout = Layout(Path(spec.output))
        self._reading, self._scoring, self._writing = threading.Lock(), threading.Lock(), threading.Lock()

    def start(self, node: str) -> WorkerInfo | ErrorReport:
        """Load the ranker. A failure is returned, not raised: exceptions travel as pickles."""
        logging.basicConfig(
            level=logging.INFO,
            stream=sys.stderr,
            format=f"%(asctime)s %(levelname)s node={node} worker={self._spec.worker} %(message)s",
        )
        for path in self._spec.import_paths:
            if path not in sys.path:
                sys.path.append(path)
        try:
            self._ranker = load(self._spec.ranker, threads=self._spec.threads)
            if self._spec.label_scores and not self._ranker.label_scores:
                raise RankerError("ranker.score_label is set, but this model has one label: remove the key")
        except Exception as e:
            log.exception("the ranker cannot be loaded")
            return describe(e, Stage.WORKER)
        self._reader = Reader(self._spec.corpus, self._spec.id_type)
        self._schema = parts.part_schema(
            self._spec.id_type,
            query_set=self._spec.queries is not None,
            label_scores=self._spec.label_scores,
        )
        return WorkerInfo(worker=self._spec.worker, node=node, pid=os.getpid(), ranker=dict(self._ranker.info))

    def score(self, lease: Lease) -> Iterator[Progress | Done | Failed]:
        """One shard, from its pointer to its part. Heartbeats on the way; the last item is the report."""
        stage = Stage.READ
        seconds = _Seconds()
        name = f"shard={lease.shard.shard_id[:8]}.g{lease.shard.generation} attempt={lease.attempt}"
        try:
            with self._reading:
                with seconds.time("read"):
                    rows = self._reader.read(lease.shard)
                    keys = self._keys(lease.shard, rows)
                yield self._progress(lease, 0)
                stage = Stage.TOKENIZE
                prepared = self._ranker.prepare(keys.pairs)
                for _ in seconds.each("tokenize", self._ranker.tokenize(prepared)):
                    yield self._progress(lease, 0)
            stage = Stage.SCORE
            with self._scoring:
                last = time.monotonic()
                for done in seconds.each("forward", self._ranker.score(prepared)):
                    if time.monotonic() - last > _HEARTBEAT_S:
                        last = time.monotonic()
                        yield self._progress(lease, done)
                scored = self._ranker.result(prepared)
            failures = [*self._spread(lease.shard, rows), *_failures(keys, scored)]
            if keys.pairs and len(scored.failures) == len(keys.pairs) and not lease.trusted:
                yield self._barren(lease, scored)
                return
            stage = Stage.WRITE
            with self._writing, seconds.time("write"):
                footer, adopted = self._publish(lease, keys, scored, failures)
            log.info("%s done: %d scored, %d dead", name, footer.scored, footer.dead)
            yield Done(
                worker=self._spec.worker,
                key=lease.key,
                attempt=lease.attempt,
                footer=footer,
                adopted=adopted,
                seconds=seconds.spent,
            )
        except DeviceBroken as e:
            log.exception("%s: the device cannot be trusted any more", name)
            yield self._failed(lease, describe(e, stage))
        except Exception as e:  # noqa: BLE001 - the one place where a shard's failure becomes a record
            log.warning("%s failed at %s: %s: %s", name, stage, type(e).__name__, e)
            yield self._failed(lease, describe(e, stage))

    def _keys(self, shard: Shard, rows: ShardRows) -> _Keys:
        """The cross product of documents and queries; without a query set, one pair a document."""
        queries = self._spec.queries
        if queries is None:
            own = rows.queries or [self._spec.query or ""] * len(rows.texts)
            pairs = list(zip(own, rows.texts, strict=True))
            return _Keys(doc_ids=rows.doc_ids, rows=rows.rows, query_ids=None, pairs=pairs)
        text = dict(zip(queries.ids, queries.texts, strict=True))
        asked = _asked(shard, queries)
        keys = [(i, query_id) for i, row in enumerate(rows.rows) for query_id in asked.get(row, queries.ids)]
        return _Keys(
            doc_ids=[rows.doc_ids[i] for i, _ in keys],
            rows=[rows.rows[i] for i, _ in keys],
            query_ids=[query_id for _, query_id in keys],
            pairs=[(text[query_id], rows.texts[i]) for i, query_id in keys],
        )

    def _spread(self, shard: Shard, rows: ShardRows) -> list[Failure]:
        """A document that cannot be read fails for every query that was asked for."""
        queries = self._spec.queries
        if queries is None:
            return rows.failures
        asked = _asked(shard, queries)
        return [
            replace(failure, query_id=query_id)
            for failure in rows.failures
            for query_id in asked.get(failure.row, queries.ids)
        ]

    def _publish(self, lease: Lease, keys: _Keys, scored: Scored, failures: list[Failure]) -> tuple[Footer, bool]:
        shard, spec = lease.shard, self._spec
        failed = {failure.index for failure in scored.failures}
        kept = [i for i in range(len(keys.pairs)) if i not in failed]
        index = np.asarray(kept, dtype=np.int64)
        table = parts.make_rows(
            self._schema,
            doc_ids=[keys.doc_ids[i] for i in kept],
            query_ids=[keys.query_ids[i] for i in kept] if keys.query_ids is not None else None,
            model_version=spec.model_version,
            scores=scored.scores[index],
            label_scores=scored.label_scores[index] if scored.label_scores is not None else None,
            n_tokens=scored.n_tokens[index],
            truncated=scored.truncated[index],
            text_hashes=[parts.text_hash(*keys.pairs[i]) for i in kept],
            shard_id=shard.shard_id,
        )
        footer = Footer(
            model_version=spec.model_version,
            epoch=spec.epoch,
            shard_id=shard.shard_id,
            generation=shard.generation,
            file=shard.file,
            file_fingerprint=shard.fingerprint,
            row_group=shard.row_group,
            start=shard.start,
            rows=shard.rows,
            first_row=shard.first_row,
            binding=spec.binding,
            expected=len(kept) + len(failures),
            scored=len(kept),
            dead=len(failures),
            failures=tuple(failures),
            whole=False,
            run=spec.run,
            attempt=lease.attempt,
            worker=spec.worker,
            attempts=lease.charged,
        )
        return parts.publish(self._layout, footer, table)

    def _progress(self, lease: Lease, keys: int) -> Progress:
        return Progress(worker=self._spec.worker, key=lease.key, attempt=lease.attempt, keys=keys)

    def _failed(self, lease: Lease, error: ErrorReport, *, barren: bool = False) -> Failed:
        return Failed(worker=self._spec.worker, key=lease.key, attempt=lease.attempt, error=error, barren=barren)

    def _barren(self, lease: Lease, scored: Scored) -> Failed:
        first = scored.failures[0]
        error = ErrorReport(
            error_type=first.error_type,
            bases=(first.error_type,),
            message=first.message,
            traceback=first.traceback,
            stage=Stage(first.stage),
        )
        return self._failed(lease, error, barren=True)


def _asked(shard: Shard, queries: QuerySet) -> dict[int | None, tuple[str, ...]]:
    """Row in the file → the query ids that a redrive asks for, where it does not ask for all."""
    only = shard.only or ()
    return {
        shard.first_row + offset: queries.ids if wanted is None else wanted
        for offset, wanted in zip(only, shard.only_queries, strict=False)
    }


def _failures(keys: _Keys, scored: Scored) -> list[Failure]:
    return [
        Failure(
            row=keys.rows[f.index],
            doc_id=keys.doc_ids[f.index],
            query_id=keys.query_ids[f.index] if keys.query_ids is not None else None,
            stage=Stage(f.stage),
            error_type=f.error_type,
            message=f.message,
            traceback=f.traceback,
        )
        for f in scored.failures
    ]


def describe(error: BaseException, stage: Stage) -> ErrorReport:
    """`error` in words: what the retry table and a dead letter need of it."""
    return ErrorReport(
        error_type=type(error).__name__,
        bases=tuple(c.__name__ for c in type(error).__mro__[:-1]),
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        stage=stage,
        errno=error.errno if isinstance(error, OSError) else None,
    )


def is_refusal(error: ErrorReport) -> bool:
    """Whether the ranker cannot be used as configured: then no other worker could use it either."""
    return RankerError.__name__ in error.bases
