"""JSON Lines → records. A number stays the text it was: nothing becomes a float on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shards import nested
from shards.lines import LIMIT, Line
from shards.record import MALFORMED, NULL, TOO_LARGE, Fields, Record, Wanted, bad, printable

_BLANK = b" \t\r"


class _Integer(str):
    """A number without fraction and exponent, as it stands there, of any size."""

    __slots__ = ()


class _Real(str):
    """Any other number, as it stands there: 1.0 and 1e3 are no integers."""

    __slots__ = ()


_KINDS = {
    _Integer: "an integer",
    _Real: "a number that is no integer",
    bool: "true or false",
    dict: "an object",
    list: "an array",
    str: "a string",
    type(None): "null",
}
# Of keys that stand twice the last one wins, as in every common parser.
_decode = json.JSONDecoder(parse_int=_Integer, parse_float=_Real, parse_constant=_Real).decode


class _MalformedError(Exception):
    """What is wrong with a record."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind
        self.what = what


def parse(lines: Iterator[Line], wanted: Wanted, fields: Fields) -> Iterator[Record]:
    """A record for each line that is not blank. Blank are spaces, tabs and carriage returns."""
    for number, line in lines:
        if line is None:
            what = f"a line of more than {LIMIT >> 20} MiB"
            yield bad(number, TOO_LARGE, what, len(wanted.texts))
        elif line.strip(_BLANK):
            yield _record(number, line, wanted, fields)


def _record(number: int, line: bytes, wanted: Wanted, fields: Fields) -> Record:
    name: str | None = None
    integer = False
    try:
        value = _object(line)
        _note(value, wanted, fields)
        name, integer = _id(value, wanted.id)
        escaped = b"\\u" in line
        if escaped:
            _whole(name, wanted.id)
        return Record(number, name, integer, tuple([_text(value, column, escaped) for column in wanted.texts]))
    except _MalformedError as error:
        name = name if name is None or name.isascii() else _valid(name)
        return bad(number, error.kind, error.what, len(wanted.texts), id=name, integer=integer)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = _decode(line.decode())
    except UnicodeDecodeError as error:
        raise _MalformedError(MALFORMED, f"not UTF-8 at byte {error.start} of the line: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise _MalformedError(MALFORMED, f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise _MalformedError(MALFORMED, "not JSON that can be read: nested too deeply") from None
    if not isinstance(value, dict):
        raise _MalformedError(MALFORMED, f"not an object but {_KINDS[type(value)]}")
    return value


def _note(value: dict[str, Any], wanted: Wanted, fields: Fields) -> None:
    if not fields.names:
        fields.names = [printable(name) for name in value]
    if len(fields.seen) <= len(wanted.texts):
        names = (wanted.id, *wanted.texts)
        fields.seen.update(name for name in names if nested.value(value, name) is not nested.MISSING)


def _id(value: dict[str, Any], column: str) -> tuple[str, bool]:
    """(its text, whether it was written as an integer)"""
    found = nested.value(value, column)
    kind = type(found)
    if kind is str:
        return found, False
    if kind is _Integer:
        return str(found), True
    if found is None:
        raise _MalformedError(NULL, f"column {column!r}: null")
    raise _wrong(value, column, found, "an id is an integer or a string")


def _text(value: dict[str, Any], column: str, escaped: bool) -> str | None:
    found = nested.value(value, column)
    if type(found) is str:
        text: str = found
        if escaped:
            _whole(text, column)
        return text
    if found is None:
        return None
    raise _wrong(value, column, found, "a string is needed")


def _wrong(value: dict[str, Any], column: str, found: Any, needed: str) -> _MalformedError:
    if found is nested.MISSING:
        return _MalformedError(MALFORMED, f"no field {column!r}; it has: {', '.join(value)}")
    return _MalformedError(MALFORMED, f"column {column!r} is {_KINDS[type(found)]}; {needed}")


def _whole(text: str, column: str) -> None:
    """Only an escape can make half a character: the bytes of the line are UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise _MalformedError(
            MALFORMED, f"column {column!r}: half a surrogate pair ({half}), no character"
        ) from None


def _valid(text: str) -> str | None:
    """The text, or None if it has half characters in it."""
    return text if text == text.encode(errors="replace").decode() else None
