"""Read shards: one open stream per row group, so that neighbours cost one decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shards import columns, nested, staged, template
from shards.decode import Column, Decoded, read_ids, read_texts
from shards.errors import CorpusChanged, CorpusError, ShardUnreadable
from shards.fingerprint import fingerprint
from shards.types import CorpusSpec, DocId, Failure, IdType, Shard, Stage

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """A shard's documents, in row order, and those that could not be read: together `shard.docs`."""

    doc_ids: list[DocId]
    rows: list[int]
    """The document's row in its file, from 0."""
    texts: list[str]
    queries: list[str] | None
    """Each document's own query, if the corpus has a query column."""
    failures: list[Failure]


@dataclass(slots=True)
class _Stream:
    """An open row group; `at` is the next row that it will give."""

    file: pq.ParquetFile
    batches: Iterator[pa.RecordBatch]
    at: int = 0
    left: list[pa.RecordBatch] = field(default_factory=list)

    def take(self, count: int) -> pa.Table | None:
        """The next `count` rows; None if the row group ends before."""
        taken: list[pa.RecordBatch] = []
        missing = count
        while missing > 0:
            batch = self.left.pop() if self.left else next(self.batches, None)
            if batch is None:
                return None
            if batch.num_rows > missing:
                self.left.append(batch.slice(missing))
                batch = batch.slice(0, missing)
            taken.append(batch)
            missing -= batch.num_rows
        self.at += count
        return pa.Table.from_batches(taken)

    def skip(self, count: int, step: int) -> None:
        """Decode and drop, in steps: memory stays that of one shard."""
        while count > 0 and self.take(min(count, step)) is not None:
            count -= min(count, step)


class Reader:
    """A worker's view of the corpus. Keeps one row group open; not for several threads."""

    def __init__(self, spec: CorpusSpec, id_type: IdType) -> None:
        self._spec = spec
        self._id_type = id_type
        self._columns = columns.read_columns(spec)
        self._template = None if spec.text_template is None else template.parse(spec.text_template)
        self._open: tuple[str, str, int] | None = None
        self._stream: _Stream | None = None
        self._verified: dict[tuple[str, int, int], str] = {}

    def read(self, shard: Shard) -> ShardRows:
        """The shard's documents; one bad document is a failure and costs no other.

        Raises CorpusChanged if the file is not the planned one any more (checked after the last row),
        ShardUnreadable if its rows cannot be decoded; OSErrors and MemoryErrors, which may pass, propagate.
        """
        if shard.unreadable is not None:
            raise ShardUnreadable(f"cannot read {shard.file}: {shard.unreadable}")
        try:
            table = self._take(shard)
        except MemoryError:  # Arrow's is an ArrowException too, and may pass where memory is free again
            self.close()
            raise
        except (pa.ArrowException, CorpusError) as error:
            self._failed(shard, error)
        except OSError as error:
            self.close()
            if error.errno is not None:
                raise
            self._failed(shard, error)  # Arrow gives decode errors as OSError too, without an errno
        self._check_unchanged(shard)
        return self._rows(shard, table)

    def close(self) -> None:
        """Let go of the open row group."""
        if self._stream is not None:
            self._stream.file.close()
        self._stream = self._open = None

    def _failed(self, shard: Shard, error: Exception) -> Any:
        self.close()
        self._check_unchanged(shard)
        raise ShardUnreadable(f"{_place(shard)}: {columns.reason(shard.data, error)}") from error

    def _take(self, shard: Shard) -> pa.Table:
        wanted = (shard.file, shard.fingerprint, shard.row_group)
        stream = self._stream
        if stream is None or self._open != wanted or shard.start < stream.at:
            self.close()
            stream = self._start(shard)
            self._stream, self._open = stream, wanted
        stream.skip(shard.start - stream.at, self._spec.shard_size)
        table = stream.take(shard.rows)
        if table is None:
            raise CorpusError("the row group ends before the shard does")
        return table

    def _start(self, shard: Shard) -> _Stream:
        with Path(shard.data).open("rb"):
            pass  # a missing or forbidden file is an OSError with an errno: it may pass
        file = columns.open_file(shard.data)
        if shard.row_group >= file.num_row_groups:
            file.close()
            raise CorpusError("the row group is not there")
        columns.check(shard.file, file.schema_arrow, self._spec)
        names = [*self._columns, *(name for name in staged.ABOUT if shard.staged and name in file.schema.names)]
        batches = file.iter_batches(batch_size=self._spec.shard_size, row_groups=[shard.row_group], columns=names)
        return _Stream(file=file, batches=batches)

    def _check_unchanged(self, shard: Shard) -> None:
        if shard.staged is not None:
            return  # its name is its content, it is written once, and its pages carry checksums
        stat = Path(shard.file).stat()
        if (stat.st_size, stat.st_mtime_ns) == (shard.size, shard.mtime_ns):
            return
        key = (shard.file, stat.st_size, stat.st_mtime_ns)
        if key not in self._verified:
            try:
                self._verified[key] = fingerprint(shard.file, self._columns).fingerprint
            except CorpusError as error:
                raise CorpusChanged(f"{shard.file} is not the file that was planned: {error}") from error
        if self._verified[key] != shard.fingerprint:
            raise CorpusChanged(f"{shard.file} is not the file that was planned: its content changed")

    def _rows(self, shard: Shard, table: pa.Table) -> ShardRows:
        at = offsets(shard)
        if len(at) != shard.rows:
            table = table.take(at)
        rows = (at + shard.first_row).tolist()
        spec = self._spec
        lines: list[Any] | None = (
            table.column(staged.LINE).to_pylist() if staged.LINE in table.column_names else None
        )
        ids = read_ids(_column(table, spec.id_column, shard, rows, lines), self._id_type)
        texts = self._texts(table, shard, rows, lines)
        own = None
        if spec.query_column is not None:
            own = read_texts(_column(table, spec.query_column, shard, rows, lines))
        # One failure a document; that of the record comes before that of the id, and that before its text's.
        bad = (own.bad if own is not None else {}) | texts.bad | ids.bad
        bad |= _record_errors(table, shard, rows)
        good = [index for index in range(len(rows)) if index not in bad]
        return ShardRows(
            doc_ids=[ids.values[index] for index in good],
            rows=[rows[index] for index in good],
            texts=[texts.values[index] for index in good],
            queries=None if own is None else [own.values[index] for index in good],
            failures=[
                bad[index] if index in ids.bad else replace(bad[index], doc_id=ids.values[index])
                for index in sorted(bad)
            ],
        )

    def _texts(self, table: pa.Table, shard: Shard, rows: list[int], lines: list[int] | None) -> Decoded[str]:
        names = columns.text_columns(self._spec)
        read = {name: read_texts(_column(table, name, shard, rows, lines)) for name in names}
        if self._template is None:
            return read[names[0]]
        # Of several bad columns, the first one says why.
        bad = {index: failure for name in reversed(names) for index, failure in read[name].bad.items()}
        return Decoded(values=self._template.fill({name: read[name].values for name in names}), bad=bad)


def _column(table: pa.Table, name: str, shard: Shard, rows: list[int], lines: list[int] | None) -> Column:
    return Column(name=name, values=nested.column(table, name), file=shard.file, rows=rows, lines=lines)


def _record_errors(table: pa.Table, shard: Shard, rows: list[int]) -> dict[int, Failure]:
    """What was wrong with a staged file's records when they were read, by their place in the table."""
    if staged.ERROR not in table.column_names or table.column(staged.ERROR).null_count == table.num_rows:
        return {}
    about = [table.column(name).to_pylist() for name in (staged.LINE, staged.ERROR_TYPE, staged.ERROR)]
    found = {}
    for index, (line, kind, what) in enumerate(zip(*about, strict=True)):
        if what is not None:
            message = f"{what} ({shard.file}, line {line})"
            found[index] = Failure(
                row=rows[index],
                doc_id=None,
                stage=Stage.READ,
                error_type=kind,
                message=message,
                traceback=f"{kind}: {message}\n",
            )
    return found


def offsets(shard: Shard) -> Offsets:
    """The rows of the shard that are its documents, counted from its first."""
    if shard.only is not None:
        return np.asarray(shard.only, dtype=np.int64)
    offsets = np.arange(shard.rows, dtype=np.int64)
    return np.delete(offsets, list(shard.excluded)) if shard.excluded else offsets


def _place(shard: Shard) -> str:
    last = shard.start + shard.rows - 1
    return f"cannot read {shard.file}, row group {shard.row_group}, rows {shard.start} to {last}"
