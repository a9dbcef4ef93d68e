"""CSV and TSV → records. The first line that is not empty is the header; every value is a string.

CSV is RFC 4180: a field in quotes may hold commas, newlines and doubled quotes. TSV knows no quotes: a tab ends a
field and a newline a record, whatever stands between, as in text/tab-separated-values. (With quotes, one stray
quote in a text would silently swallow the documents that follow.)
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shards.lines import LIMIT, Line
from shards.record import MALFORMED, NULL, TOO_LARGE, Fields, FileError, Record, Wanted, bad, printable


@dataclass(frozen=True, slots=True)
class _Problem:
    kind: str
    what: str


_Row = tuple[int, list[str] | _Problem]
"""(the line where it begins; its fields, or what is wrong)"""


def parse_csv(lines: Iterator[Line], wanted: Wanted, fields: Fields) -> Iterator[Record]:
    """A record for each row. One that is not RFC 4180 ends with the line that shows it, and is one error."""
    return _records(_csv_rows(lines), wanted, fields)


def parse_tsv(lines: Iterator[Line], wanted: Wanted, fields: Fields) -> Iterator[Record]:
    """A record for each line that is not empty."""
    return _records(_tsv_rows(lines), wanted, fields)


def _records(rows: Iterator[_Row], wanted: Wanted, fields: Fields) -> Iterator[Record]:
    header = _header(rows, wanted, fields)
    names = (wanted.id, *wanted.texts)
    if fields.seen != set(names):
        return  # the plan will say so: nothing in this file is a document
    at = [header.index(name) for name in names]
    for line, row in rows:
        if isinstance(row, _Problem):
            yield bad(line, row.kind, row.what, len(wanted.texts))
        elif len(row) != len(header):
            what = f"{_count(len(row), 'field')}, and the header has {len(header)}"
            yield bad(line, MALFORMED, what, len(wanted.texts))
        else:
            yield _record(line, [row[index] for index in at], names)


def _header(rows: Iterator[_Row], wanted: Wanted, fields: Fields) -> list[str]:
    line, row = next(rows, (1, _Problem(MALFORMED, "it has no header")))
    if isinstance(row, _Problem):
        raise FileError(f"{row.what} (line {line}, the header)")
    fields.names = [printable(name) for name in row]
    for name in (wanted.id, *wanted.texts):
        if row.count(name) > 1:
            raise FileError(f"column {name!r} stands {row.count(name)} times in the header")
        if name in row:
            fields.seen.add(name)
    return row


def _record(line: int, values: Sequence[str], names: Sequence[str]) -> Record:
    name: str | None = None
    for column, value in zip(names, values, strict=True):
        what = "" if value.isascii() else _invalid(value)
        if what:
            return bad(line, MALFORMED, f"column {column!r}: {what}", len(names) - 1, id=name)
        if name is None:  # the id comes first
            if not value:
                return bad(line, NULL, f"column {column!r}: empty", len(names) - 1)
            name = value
    return Record(line, name, False, tuple(values[1:]))


def _invalid(value: str) -> str:
    """What is no UTF-8 in it. Its bytes were decoded to half characters, which nothing else makes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8: byte 0x{ord(value[error.start]) & 0xFF:02x}"
    return ""


def _tsv_rows(lines: Iterator[Line]) -> Iterator[_Row]:
    for number, line in lines:
        if line is None:
            yield number, _too_large()
        elif text := line.decode(errors="surrogateescape").removesuffix("\r"):
            yield number, text.split("\t")


def _csv_rows(lines: Iterator[Line]) -> Iterator[_Row]:
    csv.field_size_limit(2 * LIMIT)  # the module's own limit is 128 KiB, and is the process's
    text = _Text(lines)
    rows = csv.reader(text, strict=True)
    while True:
        text.begin()
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield text.first, _Problem(MALFORMED, f"not CSV: {str(error).partition(' - ')[0]}{text.span}")
        except _TooLargeError:
            yield text.first, _too_large()
        else:
            if row is None:
                return
            if row:
                yield text.first, row


class _TooLargeError(Exception):
    """A line is longer than a record may be."""


class _Text:
    """Lines as the csv module takes them, and where the record began that it is in."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._number = 0
        self._size = 0
        self.first = 1

    def begin(self) -> None:
        self.first = self._number + 1
        self._size = 0

    @property
    def span(self) -> str:
        return f", lines {self.first} to {self._number}" if self._number > self.first else ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self._number, line = next(self._lines)
        if line is None:
            raise _TooLargeError
        self._size += len(line)
        if self._size > LIMIT:
            raise FileError(f"the quote that opens on line {self.first} does not close within {LIMIT >> 20} MiB")
        return line.decode(errors="surrogateescape") + "\n"


def _too_large() -> _Problem:
    return _Problem(TOO_LARGE, f"a line of more than {LIMIT >> 20} MiB")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
