"""One record of a text file: what a line turns into, and every reason why it turns into none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shards.lines import Line

MALFORMED = "MalformedRecord"
TRUNCATED = "TruncatedFile"
TOO_LARGE = "RecordTooLarge"
NULL = "NullValue"
BATCH_ROWS, BATCH_BYTES = 10_000, 32 << 20
"""What is held in memory at a time while a file is staged."""
_WHAT = 1000  # characters: the keys of an object, say, are as many as somebody likes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The columns that are read: that of the ids, and the others, which are texts."""

    id: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """`line` is where it begins, from 1. An id is its literal text; `integer`: it was written as a number.

    `texts` stand in the order of the wanted columns; None: null. With an `error` (its type, what is wrong)
    the record is no document; its id is kept where it is known.
    """

    line: int
    id: str | None
    integer: bool
    texts: tuple[str | None, ...]
    error: tuple[str, str] | None = None


@dataclass(slots=True)
class Fields:
    """Which columns a file has: one that no record has is an error of the plan, not of every document."""

    names: list[str] = field(default_factory=list)
    """Of the header, or of the first record."""
    seen: set[str] = field(default_factory=set)
    """The wanted ones that some record has."""


class FileError(Exception):
    """A file is none of its kind: no record of it can be trusted, or none can be told from the next."""


Parser = Callable[[Iterator[Line], Wanted, Fields], Iterator[Record]]
"""Lines → a record for each that is not blank. For what they say it
raises FileError or nothing; errors of `lines` pass."""


def bad(line: int, kind: str, what: str, texts: int, *, id: str | None = None, integer: bool = False) -> Record:
    """A record that is no document. `texts`: how many columns of text it lacks."""
    return Record(line, id, integer, (None,) * texts, (kind, printable(what[:_WHAT])))


def printable(text: str) -> str:
    """The text with lone surrogates, which no file of ours can hold, written as escapes."""
    return text.encode(errors="backslashreplace").decode()
