"""Stage what is not Parquet: once for its content and what is read of it, streaming, and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shards import arrowfile, columns, files, fingerprint, jsonl, lines, separated, staged
from shards.errors import CorpusError
from shards.fingerprint import FingerprintCache
from shards.formats import Kind, Source
from shards.layout import Layout
from shards.record import TRUNCATED, Fields, FileError, Parser, Record, Wanted, bad
from shards.types import CorpusFile, CorpusSpec

_THREADS = 8
_PARSERS: dict[Kind, Parser] = {
    Kind.JSONL: jsonl.parse,
    Kind.CSV: separated.parse_csv,
    Kind.TSV: separated.parse_tsv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One file to stage. Plain values only: it travels."""

    source: Source
    size: int
    mtime_ns: int
    target: str
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`target` stands, or `error` says why the file cannot be read."""

    job: Job
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far staging is, in files and in bytes of the corpus."""

    files: int
    of_files: int
    bytes: int
    of_bytes: int


Runner = Callable[[Sequence[Job], lines.Tell], Iterable[Result]]
"""Stages jobs, in any order and any number at a time; tells how many bytes of the unfinished ones are read."""


def one_by_one(jobs: Sequence[Job], tell: lines.Tell) -> Iterator[Result]:
    """The runner that needs no other process."""
    return (stage(job, tell) for job in jobs)


def _ignore(progress: Progress) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """How a start stages: by whom, and who hears about it."""

    run: Runner = one_by_one
    report: Callable[[Progress], None] = _ignore


def survey(
    layout: Layout, spec: CorpusSpec, sources: Sequence[Source], cache: FingerprintCache, how: Staging
) -> list[CorpusFile]:
    """The files with their fingerprints and where they are staged; what is staged already is not read again.

    Raises CorpusError for a file that cannot be read, unless the spec skips such. Needs the run lock.
    """
    if not sources:
        return []
    files.make_dir(layout.staged)
    files.remove_temps(layout.staged)
    wanted = Wanted(id=spec.id_column, texts=tuple(columns.read_columns(spec)[1:]))
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = list(pool.map(lambda source: _job(layout, source, wanted, cache), sources))
    missing = {job.target: job for job in jobs if not _stands(Path(job.target))}
    errors = {result.job.target: result.error for result in _run(list(missing.values()), how)}
    found = []
    for job in jobs:
        error = errors.get(job.target)
        if error is not None and not spec.skip_unreadable:
            raise CorpusError(error)
        found.append(_described(job) if error is None else fingerprint.unreadable(job.source.path, error))
    return found


def stage(job: Job, tell: lines.Tell) -> Result:
    """Write the file's stand-in. What is wrong with the file is the result's error; OSErrors of the output pass."""
    target = Path(job.target)
    temp = files.temp_name(target.parent)
    try:
        _write(job, temp, tell)
        _check_unchanged(job)
        files.publish_file(temp, target, replace=target.exists())
    except CorpusError as error:
        return Result(job=job, error=str(error))
    finally:
        temp.unlink(missing_ok=True)
    return Result(job=job)


def _job(layout: Layout, source: Source, wanted: Wanted, cache: FingerprintCache) -> Job:
    file = cache.get_whole(source.path)
    options = [str(staged.FORMAT), source.kind, source.compression, wanted.id, *wanted.texts]
    return Job(
        source=source,
        size=file.size,
        mtime_ns=file.mtime_ns,
        target=layout.stand_in(fingerprint.read_as(file, options)),
        wanted=wanted,
    )


def _stands(path: Path) -> bool:
    """A damaged stand-in is staged anew."""
    if not path.exists():
        return False
    try:
        columns.open_file(str(path)).close()
    except CorpusError:
        return False
    return True


def _run(jobs: Sequence[Job], how: Staging) -> Iterator[Result]:
    if not jobs:
        return
    total = sum(job.size for job in jobs)
    done = read = 0

    def report(more: int) -> None:
        how.report(Progress(files=done, of_files=len(jobs), bytes=min(total, read + more), of_bytes=total))

    report(0)
    for result in how.run(jobs, report):
        done, read = done + 1, read + result.job.size
        report(0)
        yield result


def _described(job: Job) -> CorpusFile:
    with columns.open_file(job.target) as parquet:
        rows = parquet.metadata.num_rows
    return CorpusFile(
        path=job.source.path,
        size=job.size,
        mtime_ns=job.mtime_ns,
        fingerprint=Path(job.target).stem,
        rows=rows,
        staged=job.target,
    )


def _write(job: Job, temp: Path, tell: lines.Tell) -> None:
    if job.source.kind is Kind.ARROW:
        _write_arrow(job, temp, tell)
        return
    facts = staged.Facts()
    fields = Fields()
    with staged.writer(temp, staged.schema(job.wanted)) as writer:
        for table in staged.tables(_records(job, fields, tell), job.wanted, facts):
            writer.write_table(table)
        facts.names, facts.seen = fields.names, sorted(fields.seen)
        writer.add_key_value_metadata(staged.metadata(facts))


def _write_arrow(job: Job, temp: Path, tell: lines.Tell) -> None:
    tables = arrowfile.tables(job.source.path, job.wanted, tell)
    first = next(tables)
    with staged.writer(temp, first.schema) as writer:
        for table in tables:
            writer.write_table(table)


def _records(job: Job, fields: Fields, tell: lines.Tell) -> Iterator[Record]:
    source = job.source
    parse = _PARSERS[source.kind]
    try:
        yield from parse(lines.split(lines.read(source.path, source.compression, tell)), job.wanted, fields)
    except lines.EndsEarlyError as error:
        yield bad(error.line, TRUNCATED, str(error), len(job.wanted.texts))
    except FileError as error:
        raise CorpusError(f"cannot read {source.path}: {error}") from None


def _check_unchanged(job: Job) -> None:
    try:
        stat = Path(job.source.path).stat()
    except OSError as error:
        raise CorpusError(f"cannot read {job.source.path}: {error.strerror}") from error
    if (stat.st_size, stat.st_mtime_ns) != (job.size, job.mtime_ns):
        raise CorpusError(f"{job.source.path} changed while it was being read; run again when it is complete")
