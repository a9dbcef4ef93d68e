"""The values that cross the borders of the data plane. All frozen: `dataclasses.replace` derives the next one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from shards.formats import Format

DocId = str | int
IdType = Literal["string", "int64"]
Duplicates = Literal["fail", "keep_first", "keep_last"]
ShardKey = tuple[str, int]
"""(shard_id, generation): what is leased, done or dead."""


class Stage(StrEnum):
    """Where a document or a shard failed."""

    READ = "read"
    TOKENIZE = "tokenize"
    SCORE = "score"
    WRITE = "write"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSpec:
    """Which documents there are, and how they are cut into shards."""

    path: str
    id_column: str
    text_column: str
    query_column: str | None = None
    shard_size: int = 1000
    duplicates: Duplicates = "fail"
    skip_unreadable: bool = False
    format: Format = "auto"
    text_template: str | None = None
    """Makes the text of several columns; then there is no `text_column`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySet:
    """The queries that every document is scored against (the cross product). Keys are (doc_id, query_id)."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFile:
    """One file of the corpus. `fingerprint` is content; path, size and mtime_ns only cache it."""

    path: str
    size: int
    mtime_ns: int
    fingerprint: str
    rows: int
    unreadable: str | None = None
    """Why the file cannot be read, if `skip_unreadable` let it through: one dead shard stands for it."""
    staged: str | None = None
    """The Parquet file that stands in for one of another format."""

    @property
    def data(self) -> str:
        """The Parquet file with its rows."""
        return self.staged or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A pointer to at most `shard_size` consecutive rows of one row group; never the documents themselves.

    `start` counts rows within the row group, `first_row` is the same row counted within the file.
    `excluded` are offsets from `start` that are no documents of this corpus (duplicates elsewhere).
    `generation` 0 is the plan's; a redrive makes a shard of a later generation with `only` some offsets.
    `only_queries` stands beside `only` where single queries of a document are redriven: for each offset
    the query ids that are asked for, or None for all of them; empty: all queries for every offset.
    """

    shard_id: str
    file: str
    fingerprint: str
    size: int
    mtime_ns: int
    row_group: int
    start: int
    rows: int
    first_row: int
    excluded: tuple[int, ...] = ()
    generation: int = 0
    only: tuple[int, ...] | None = None
    only_queries: tuple[tuple[str, ...] | None, ...] = ()
    unreadable: str | None = None
    staged: str | None = None

    @property
    def data(self) -> str:
        """The Parquet file with its rows: `file`, or what stands in for it."""
        return self.staged or self.file

    @property
    def key(self) -> ShardKey:
        return self.shard_id, self.generation

    @property
    def docs(self) -> int:
        """How many documents a part of this shard must account for."""
        return len(self.only) if self.only is not None else self.rows - len(self.excluded)

    def keys(self, queries: int) -> int:
        """How many keys (documents × queries) a part of this shard must account for: `Footer.expected`."""
        if self.only_queries:
            return sum(queries if asked is None else len(asked) for asked in self.only_queries)
        return self.docs * queries


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a document has no score. `row` counts within the file, from 0; None: the shard as a whole.
    `doc_id` None: unknown or null."""

    row: int | None
    doc_id: DocId | None
    stage: Stage
    error_type: str
    message: str
    traceback: str
    query_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a part says about itself: the sole verdict on the documents of its shard and generation.

    `expected` keys = documents × queries; `scored + dead == expected`. A failure without a `query_id`
    stands for all of its document's queries. A shard that is dead as a whole (`whole`) has no rows and
    one failure, which stands for all its keys.
    """

    model_version: str
    epoch: int
    shard_id: str
    generation: int
    file: str
    file_fingerprint: str
    row_group: int
    start: int
    rows: int
    first_row: int
    binding: str
    """Digest of all that decides a score (see `Binding.digest`)."""
    expected: int
    scored: int
    dead: int
    failures: tuple[Failure, ...]
    whole: bool
    run: int
    attempt: int
    worker: str
    attempts: int = 1
    """Tries that were charged to the shard, this one included."""

    @classmethod
    def of(cls, shard: Shard, **verdict: Any) -> Footer:
        """The footer of a part of `shard`: its pointer, and what `verdict` says in all other fields."""
        return cls(
            shard_id=shard.shard_id,
            generation=shard.generation,
            file=shard.file,
            file_fingerprint=shard.fingerprint,
            row_group=shard.row_group,
            start=shard.start,
            rows=shard.rows,
            first_row=shard.first_row,
            **verdict,
        )

    @property
    def key(self) -> ShardKey:
        return self.shard_id, self.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What a model_version stands for: name → value or digest of every component that decides a score."""

    model_version: str
    components: Mapping[str, str]
    label_scores: bool = False
    """Whether parts carry all labels' scores beside the one that ranks."""

    @property
    def digest(self) -> str:
        """Hex digest of the components; a part carries it, so that scores of two rankers never mix."""
        value = json.dumps([dict(self.components), self.label_scores], sort_keys=True)
        return hashlib.blake2b(value.encode(), digest_size=16).hexdigest()


class EventKind(StrEnum):
    """What happened to a shard. The last event of a shard decides its state.

    leased: a worker has it. done, dead: its part is published. failed: an attempt is charged to it. died,
    hung: its worker did while holding it. redriven: it was ordered again. released: a lease ended without a
    verdict and is charged to nobody; or, with an error_type of `CHARGE_RETURNED`, what was charged to the
    same attempt earlier is taken back, because the circuit breaker found that the shard was not to blame.
    """

    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    DIED = "died"
    HUNG = "hung"
    RELEASED = "released"
    DEAD = "dead"
    REDRIVEN = "redriven"


class ShardState(StrEnum):
    """pending: nobody works on it. leased: a worker does. done: its part is published and acknowledged.
    dead: its part says that the whole shard failed."""

    PENDING = "pending"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"


STATE_AFTER: Mapping[EventKind, ShardState] = {
    EventKind.LEASED: ShardState.LEASED,
    EventKind.DONE: ShardState.DONE,
    EventKind.FAILED: ShardState.PENDING,
    EventKind.DIED: ShardState.PENDING,
    EventKind.HUNG: ShardState.PENDING,
    EventKind.RELEASED: ShardState.PENDING,
    EventKind.DEAD: ShardState.DEAD,
    EventKind.REDRIVEN: ShardState.PENDING,
}


CHARGE_RETURNED: Mapping[EventKind, str] = {
    EventKind.FAILED: "FailureReturned",
    EventKind.DIED: "DeathReturned",
    EventKind.HUNG: "DeathReturned",
}
"""The error_type of a RELEASED event that takes a charge back; the manifest's counts subtract them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a shard's history. `footer` comes with DONE and DEAD: the verdict that was published."""

    kind: EventKind
    shard_id: str
    generation: int
    attempt: int
    worker: str = ""
    node: str = ""
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    footer: Footer | None = None
    adopted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the manifest knows of one shard: its state and what its budget has been spent on."""

    state: ShardState
    attempts: int = 0
    """The last attempt number that was leased; the next is one more."""
    failed: int = 0
    """Attempts charged to the shard, without those that were given back."""
    died: int = 0
    """Workers that died or hung while they held the shard, without those that were given back."""
    released: int = 0
    """Leases that ended without a verdict and were charged to nobody (infrastructure, a drain, a lost part)."""
    voided: int = 0
    """Those of them that a dead driver left behind."""
    first_leased_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The durable to-do list of one model_version in one epoch."""

    model_version: str
    epoch: int
    id_type: IdType
    files: Sequence[CorpusFile]
    shards: Sequence[Shard]
    """Generation 0, in corpus order."""
    duplicates: int
    """Rows excluded because their doc_id stands elsewhere."""
    queries: int
    """How many queries each document is scored against (1 without a query set)."""
    query_set: bool
    binding: Binding
    planned_at: datetime
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def docs(self) -> int:
        return sum(shard.docs for shard in self.shards)
