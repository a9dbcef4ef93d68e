"""Files → shards, and which rows of them are documents. The path from a directory to a list of pointers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shards import columns, duplicates, fingerprint, formats, planfile, staged, staging
from shards.corpus import list_files
from shards.errors import CorpusError
from shards.fingerprint import FingerprintCache
from shards.formats import Kind
from shards.layout import Layout
from shards.staging import Staging
from shards.types import CorpusFile, CorpusSpec, Duplicates, IdType, Shard

_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What new files add to a plan."""

    files: tuple[CorpusFile, ...]
    shards: tuple[Shard, ...]
    duplicates: int


def survey(layout: Layout, spec: CorpusSpec, how: Staging) -> tuple[CorpusFile, ...]:
    """Every file of the corpus with its fingerprint, in corpus order; what is not Parquet is staged.

    Raises CorpusError.
    """
    cache = FingerprintCache(layout.fingerprints)
    names = columns.read_columns(spec)
    look = partial(_describe, cache=cache, names=names, skip=spec.skip_unreadable)
    # An output may lie in its corpus' directory; what it holds is no document.
    paths = [path for path in list_files(spec.path, spec.format) if not Path(path).is_relative_to(layout.root)]
    if not paths:
        raise CorpusError(f"no corpus file: {spec.path}")
    sources = [formats.source(path, spec.format) for path in paths]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(look, [item.path for item in sources if item.kind is Kind.PARQUET]))
    others = [item for item in sources if item.kind is not Kind.PARQUET]
    found += staging.survey(layout, spec, others, cache, how)
    cache.save()
    return tuple(sorted(found, key=lambda file: file.path))


def id_type(files: Sequence[CorpusFile], spec: CorpusSpec, known: IdType | None = None) -> IdType:
    """The one id type of the corpus. Raises CorpusError for a column that will not do, or two types."""
    decided: tuple[IdType, str] | None = None if known is None else (known, "the plan")
    readable = [file for file in files if file.unreadable is None]
    for file in readable:
        with columns.open_file(file.data) as parquet:
            found = staged.id_type(file, parquet, spec)
        if found is None:
            continue
        if decided is None:
            decided = (found, file.path)
        elif decided[0] != found:
            raise CorpusError(
                f"column {spec.id_column!r} is {decided[0]} in {decided[1]} and {found} in {file.path};"
                " one corpus has one type of id"
            )
    empty = next((file.path for file in readable if file.rows), None)
    if decided is None and empty is not None:
        raise CorpusError(f"column {spec.id_column!r} has only nulls in {empty}: no document has an id")
    return "string" if decided is None else decided[0]


def cut(
    new: Sequence[CorpusFile],
    planned: Sequence[CorpusFile],
    spec: CorpusSpec,
    kind: IdType,
    layout: Layout,
) -> Cut:
    """Shards for the `new` files, without the rows whose id stands elsewhere in them or in `planned`."""
    files = sorted([*new, *planned], key=lambda file: file.path)
    old = {file.path for file in planned}
    unique, copies = _without_copies(files, old, spec.duplicates)
    while True:
        readable = [file for file in unique if file.unreadable is None]
        source = duplicates.IdSource(
            files=readable,
            planned=[file.path in old for file in readable],
            id_column=spec.id_column,
            id_type=kind,
        )
        try:
            excluded = duplicates.find(source, policy=spec.duplicates, temp=layout.private)
        except duplicates.UnreadableIdsError as error:
            bad = readable[error.number]
            if not spec.skip_unreadable or bad.path in old:
                raise CorpusError(f"cannot read {bad.path}: {error.why}") from error
            unique = [replace(file, rows=0, unreadable=error.why) if file is bad else file for file in unique]
        else:
            break
    rows = {file.path: excluded[number] for number, file in enumerate(readable) if number in excluded}
    added = [file for file in unique if file.path not in old]
    listed = tuple(sorted([*added, *copies], key=lambda file: file.path))
    return Cut(
        files=listed,
        shards=tuple(_shards(added, rows, spec.shard_size)),
        duplicates=sum(map(len, rows.values())) + sum(file.rows for file in copies),
    )


def _describe(path: str, *, cache: FingerprintCache, names: Sequence[str], skip: bool) -> CorpusFile:
    try:
        return cache.get(path, names)
    except CorpusError as error:
        why = str(error)
        if not path.lower().endswith(".parquet"):
            why += "; corpus.format says what a file is whose name does not"
        if not skip:
            raise CorpusError(why) from error
        return fingerprint.unreadable(path, why)


def _without_copies(
    files: Sequence[CorpusFile], old: set[str], policy: Duplicates
) -> tuple[list[CorpusFile], list[CorpusFile]]:
    """Two files with the same content are duplicates row by row, those without an id included."""
    kept: dict[str, CorpusFile] = {}
    alone: list[CorpusFile] = []
    copies: list[CorpusFile] = []
    for file in files:
        if file.unreadable is not None:
            alone.append(file)
            continue
        other = kept.setdefault(file.fingerprint, file)
        if other is file:
            continue
        both_old = file.path in old and other.path in old
        if policy == "fail" and file.rows and not both_old:
            raise CorpusError(
                f"{other.path} and {file.path} have the same content: every document would be scored twice."
                " Remove one, or set corpus.duplicates to keep_first or keep_last (default: fail)"
            )
        later_wins = policy == "keep_last" and other.path not in old
        if file.path in old and other.path not in old:
            later_wins = True
        if later_wins:
            kept[file.fingerprint] = file
        copies.append(other if later_wins else file)
    unique = sorted([*kept.values(), *alone], key=lambda file: file.path)
    return unique, [file for file in copies if file.path not in old]


def _shards(files: Sequence[CorpusFile], excluded: dict[str, list[int]], size: int) -> list[Shard]:
    shards: list[Shard] = []
    ordinals: dict[str, int] = {}
    for file in files:
        if file.unreadable is not None:
            # Two empty files have the same content and are two dead letters: the ordinal tells them apart.
            ordinal = ordinals.get(file.fingerprint, 0)
            ordinals[file.fingerprint] = ordinal + 1
            shards.append(_shard(file, -1, ordinal, 0, 0, ()))
        else:
            shards.extend(_file_shards(file, excluded.get(file.path, []), size))
    return shards


def _file_shards(file: CorpusFile, excluded: list[int], size: int) -> list[Shard]:
    shards = []
    first = 0
    with columns.open_file(file.data) as parquet:
        groups = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
    for group, rows in enumerate(groups):
        for start in range(0, rows, size):
            count = min(size, rows - start)
            at = first + start
            low, high = bisect_left(excluded, at), bisect_left(excluded, at + count)
            offsets = tuple(row - at for row in excluded[low:high])
            if len(offsets) < count:
                shards.append(_shard(file, group, start, count, at, offsets))
        first += rows
    return shards


def _shard(file: CorpusFile, group: int, start: int, rows: int, first_row: int, excluded: tuple[int, ...]) -> Shard:
    return Shard(
        shard_id=planfile.shard_id(file.fingerprint, group, start, rows, excluded),
        file=file.path,
        fingerprint=file.fingerprint,
        size=file.size,
        mtime_ns=file.mtime_ns,
        row_group=group,
        start=start,
        rows=rows,
        first_row=first_row,
        excluded=excluded,
        unreadable=file.unreadable,
        staged=file.staged,
    )
