"""The actor on a device: read → tokenise → score → write, one call a shard, neighbouring shards overlapping.

Each call runs in a thread of its own and passes the stages one after the other; a stage admits one shard
at a time. So while one shard is in the forward pass the next is read and tokenised and the last is
written, and memory is bounded by how many shards the driver lends the worker.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jobs.protocol import Done, ErrorReport, Failed, Lease, Probed, Progress, WorkerInfo
from jobs.stopwatch import Stopwatch, Waiting
from ranker.errors import RankerError
from ranker.load import load
from ranker.types import Pair, RankerSpec, Scored
from shards import parts
from shards.corpus import Reader, ShardRows
from shards.layout import Layout
from shards.types import CorpusSpec, DocId, Failure, Footer, IdType, QuerySet, Shard, Stage

log = logging.getLogger("rescore.worker")

Report = Progress | Probed | Done | Failed

_HEARTBEAT_S = 0.5
_WARM_UP: Pair = ("warm-up", "A pair that harms nobody.")


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
    device: str
    """cuda where the worker was given a GPU, else cpu: never what happens to be there."""
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

    with_queries: bool
    doc_ids: list[DocId] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    query_ids: list[str | None] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def add(self, doc_id: DocId, row: int, query_id: str | None, pair: Pair) -> None:
        self.doc_ids.append(doc_id)
        self.rows.append(row)
        self.query_ids.append(query_id)
        self.pairs.append(pair)


@dataclass(slots=True)
class _Course:
    """Where a call is, and where its time went."""

    watch: Stopwatch
    stage: Stage = Stage.READ
    outcome: str = ""
    beat: float = field(default_factory=time.monotonic)

    def due(self) -> bool:
        """Whether it is time for a heartbeat. Not more of them: each costs the driver what an ack costs."""
        now = time.monotonic()
        if now - self.beat < _HEARTBEAT_S:
            return False
        self.beat = now
        return True


class Worker:
    """Scores shards with one ranker. `jobs.pool` makes a Ray actor of it; nothing in here knows Ray."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._layout = Layout(Path(spec.output))
        self._waiting = Waiting()
        self._probed = _Keys(with_queries=False)
        self._reading, self._scoring, self._writing = threading.Lock(), threading.Lock(), threading.Lock()

    def start(self, node: str) -> WorkerInfo | ErrorReport:
        """Load the ranker. A failure is returned, not raised: exceptions travel as pickles."""
        logging.basicConfig(
            level=logging.INFO,
            stream=sys.stderr,
            format=f"%(asctime)s %(levelname)s node={node} worker={self._spec.worker} %(message)s",
        )
        self._write_last_words()
        for path in self._spec.import_paths:
            if path not in sys.path:
                sys.path.append(path)
        try:
            self._ranker = load(self._spec.ranker, threads=self._spec.threads, device=self._spec.device)
            if self._spec.label_scores and not self._ranker.label_scores:
                raise RankerError("ranker.score_label is set, but this model has one label: remove the key")
            self._check_query()
        except Exception as e:
            log.exception("the ranker cannot be loaded")
            return replace(describe(e, Stage.WORKER), node=node)
        self._reader = Reader(self._spec.corpus, self._spec.id_type)
        self._schema = parts.part_schema(
            self._spec.id_type,
            query_set=self._spec.queries is not None,
            label_scores=self._spec.label_scores,
        )
        self._waiting.take()  # it has waited for nobody yet
        preflight = self._ranker.preflight
        return WorkerInfo(
            worker=self._spec.worker,
            node=node,
            pid=os.getpid(),
            ranker=dict(self._ranker.info),
            preflight=dict(preflight.figures),
            warnings=preflight.warnings,
        )

    def _check_query(self) -> None:
        """One query for all that cannot be scored is the user's mistake, not a million dead letters."""
        if self._spec.query is not None:
            prepared = self._ranker.prepare([(self._spec.query, "")])
            for failure in self._ranker.result(prepared).failures:
                raise RankerError(f"corpus.query cannot be used: {failure.error_type}: {failure.message}")

    def _write_last_words(self) -> None:
        """A fatal signal (SIGSEGV, SIGABRT, …) leaves the stacks of all threads where the driver finds them."""
        path = self._layout.crash(self._spec.run, self._spec.worker)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._last_words = path.open("w")  # kept open: nothing can be opened while a process dies
            faulthandler.enable(self._last_words)
        except OSError as e:
            log.warning("no room for last words: %s", e)

    def score(self, lease: Lease) -> Iterator[Report]:
        """One shard, from its pointer to its part; or one probe of it. Heartbeats on the way; the last
        item is the report."""
        course = _Course(Stopwatch(self._waiting))
        name = f"shard={lease.shard.shard_id[:8]}.g{lease.shard.generation} attempt={lease.attempt}"
        whole = lease.probe is None or lease.probe.whole
        try:
            yield from self._score_shard(lease, course) if whole else self._answer(lease, course)
        except Exception as e:  # noqa: BLE001 - the one place where a shard's failure becomes a record
            log.warning("%s failed at %s: %s: %s", name, course.stage, type(e).__name__, e)
            yield self._failed(lease, describe(e, course.stage))
        else:
            log.info("%s: %s", name, course.outcome)

    def _score_shard(self, lease: Lease, course: _Course) -> Iterator[Report]:
        with self._reading:
            with course.watch.time("read"):
                rows = self._reader.read(lease.shard)
                keys, failures = self._keys(lease, rows)
            if course.due():
                yield self._progress(lease, 0)
            course.stage = Stage.TOKENIZE
            # All pairs in one go; one by one only where the search for killers asks for it.
            single = lease.probe is not None and lease.probe.single
            calls = [[pair] for pair in keys.pairs] if single and keys.pairs else [keys.pairs]
            with course.watch.time("tokenize"):
                prepared = [self._ranker.prepare(pairs) for pairs in calls]
            for item in prepared:
                for _ in course.watch.each("tokenize", self._ranker.tokenize(item)):
                    if course.due():
                        yield self._progress(lease, 0)
        course.stage = Stage.SCORE
        with self._scoring:
            before = 0
            for item in prepared:
                for done in course.watch.each("forward", self._ranker.score(item)):
                    if course.due():
                        yield self._progress(lease, before + done)
                before += len(item)
            scored = join([self._ranker.result(item) for item in prepared])
        if keys.pairs and len(scored.failures) == len(keys.pairs) and not lease.trusted:
            course.outcome = "every document failed, and nothing has succeeded yet: not published"
            yield self._barren(lease, scored)
            return
        course.stage = Stage.WRITE
        with self._writing, course.watch.time("write"):
            footer, adopted = self._publish(lease, keys, scored, [*failures, *_failures(keys, scored)])
        course.outcome = f"{footer.scored} scored, {footer.dead} dead"
        yield Done(
            worker=self._spec.worker,
            key=lease.key,
            attempt=lease.attempt,
            footer=footer,
            adopted=adopted,
            seconds=course.watch.report(),
            truncated=int(scored.truncated[np.isfinite(scored.scores)].sum()),
        )

    def _answer(self, lease: Lease, course: _Course) -> Iterator[Report]:
        """A probe: one document alone, or the warm-up pair. Nothing is published; to survive is the answer."""
        probe = lease.probe
        assert probe is not None
        with self._reading, self._scoring:
            if probe.offset is None:
                self._probed, _ = self._keys(lease, self._reader.read(lease.shard))
                pairs = [_WARM_UP]
            else:
                row = lease.shard.first_row + probe.offset
                pairs = [p for p, at in zip(self._probed.pairs, self._probed.rows, strict=True) if at == row]
            for _ in course.watch.each("forward", self._ranker.score(self._ranker.prepare(pairs))):
                yield self._progress(lease, 0)
        course.outcome = f"survived {probe.offset}"
        yield Probed(worker=self._spec.worker, key=lease.key, attempt=lease.attempt, offset=probe.offset)

    def _keys(self, lease: Lease, rows: ShardRows) -> tuple[_Keys, list[Failure]]:
        """What is to be scored, and what has failed already: documents that could not be read, and those
        that are convicted of killing their process."""
        shard, queries = lease.shard, self._spec.queries
        asked = _asked(shard, queries)
        every: tuple[str | None, ...] = queries.ids if queries is not None else (None,)
        texts = dict(zip(queries.ids, queries.texts, strict=True)) if queries is not None else {}
        own = rows.queries or [self._spec.query or ""] * len(rows.texts)
        convicted = {shard.first_row + c.offset: c.error for c in lease.probe.convicted} if lease.probe else {}
        keys = _Keys(with_queries=queries is not None)
        failures = [
            replace(failure, query_id=query_id)
            for failure in rows.failures
            for query_id in asked.get(failure.row, every)
        ]
        for doc_id, row, document, query in zip(rows.doc_ids, rows.rows, rows.texts, own, strict=True):
            for query_id in asked.get(row, every):
                if row in convicted:
                    failures.append(_dead(convicted[row], row, doc_id, query_id))
                else:
                    keys.add(doc_id, row, query_id, (query if query_id is None else texts[query_id], document))
        return keys, failures

    def _publish(self, lease: Lease, keys: _Keys, scored: Scored, failures: list[Failure]) -> tuple[Footer, bool]:
        shard, spec = lease.shard, self._spec
        failed = {failure.index for failure in scored.failures}
        kept = [i for i in range(len(keys.pairs)) if i not in failed]
        index = np.asarray(kept, dtype=np.int64)
        table = parts.make_rows(
            self._schema,
            doc_ids=[keys.doc_ids[i] for i in kept],
            query_ids=[str(keys.query_ids[i]) for i in kept] if keys.with_queries else None,
            model_version=spec.model_version,
            scores=scored.scores[index],
            label_scores=scored.label_scores[index] if scored.label_scores is not None else None,
            n_tokens=scored.n_tokens[index],
            truncated=scored.truncated[index],
            text_hashes=parts.text_hashes(keys.pairs[i] for i in kept),
            shard_id=shard.shard_id,
        )
        footer = Footer.of(
            shard,
            model_version=spec.model_version,
            epoch=spec.epoch,
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


def _asked(shard: Shard, queries: QuerySet | None) -> dict[int | None, tuple[str, ...]]:
    """Row in the file → the query ids that a redrive asks for, where it does not ask for all."""
    if queries is None or shard.only is None or not shard.only_queries:
        return {}
    return {
        shard.first_row + offset: queries.ids if wanted is None else wanted
        for offset, wanted in zip(shard.only, shard.only_queries, strict=True)
    }


def _dead(error: ErrorReport, row: int, doc_id: DocId, query_id: str | None) -> Failure:
    return Failure(
        row=row,
        doc_id=doc_id,
        query_id=query_id,
        stage=error.stage,
        error_type=error.error_type,
        message=error.message,
        traceback=error.traceback,
    )


def _failures(keys: _Keys, scored: Scored) -> list[Failure]:
    return [
        Failure(
            row=keys.rows[f.index],
            doc_id=keys.doc_ids[f.index],
            query_id=keys.query_ids[f.index],
            stage=Stage(f.stage),
            error_type=f.error_type,
            message=f.message,
            traceback=f.traceback,
        )
        for f in scored.failures
    ]


def join(calls: Sequence[Scored]) -> Scored:
    """The scores of several calls, one after the other."""
    if len(calls) == 1:
        return calls[0]
    starts = np.cumsum([0, *(len(call.scores) for call in calls)])
    labels = [call.label_scores for call in calls if call.label_scores is not None]
    return Scored(
        scores=np.concatenate([call.scores for call in calls]),
        label_scores=np.concatenate(labels) if labels else None,
        n_tokens=np.concatenate([call.n_tokens for call in calls]),
        truncated=np.concatenate([call.truncated for call in calls]),
        failures=[
            replace(failure, index=failure.index + int(start))
            for call, start in zip(calls, starts, strict=False)
            for failure in call.failures
        ],
    )


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
    """Whether the ranker cannot be used here as configured: to try again would not help."""
    return RankerError.__name__ in error.bases
