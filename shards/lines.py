"""Bytes of a file → its lines. A line ends at a newline byte and nowhere else."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from shards import columns
from shards.errors import CorpusError
from shards.formats import Compression

LIMIT = 64 << 20
"""Bytes of one record: what is longer would decide how much memory a file takes."""

Line = tuple[int, bytes | None]
"""(number, from 1; the bytes without the newline, or None: longer than the limit)."""
Tell = Callable[[int], None]
"""Told how many bytes of the file have been read."""

_BOM = b"\xef\xbb\xbf"
_PIECE = 1 << 20


class EndsEarlyError(Exception):
    """A compressed file stops in the middle of its stream. `line` (from 1) is where; what came before is whole."""

    def __init__(self, line: int = 1) -> None:
        super().__init__("the compressed file ends early: the rest of it is missing")
        self.line = line


def split(chunks: Iterable[bytes], *, limit: int = LIMIT) -> Iterator[Line]:
    """The lines of a stream, wherever its chunks end. A byte order mark at its start is left out.

    U+2028, U+0085 and a lone carriage return end no line; the last one needs no newline.
    Raises EndsEarlyError after the last whole line, and what `chunks` raises.
    """
    number = held = 0  # `held`: bytes of the line so far
    pieces: list[bytes] = []

    def line(last: bytes) -> Line:
        nonlocal number, held
        data = b"".join([*pieces, last])
        whole = held + len(last)
        pieces.clear()
        number, held = number + 1, 0
        return number, (data.removeprefix(_BOM) if number == 1 else data) if whole <= limit else None

    try:
        for chunk in chunks:
            *ended, rest = chunk.split(b"\n")
            for piece in ended:
                yield line(piece)
            held += len(rest)
            if held <= limit:
                pieces.append(rest)
            else:
                pieces.clear()
    except EndsEarlyError:
        raise EndsEarlyError(number + 1) from None
    if held:
        yield line(b"")


def read(path: str, compression: Compression, tell: Tell) -> Iterator[bytes]:
    """The bytes of a file, unpacked. Raises CorpusError for one that cannot be read, and EndsEarlyError."""
    try:
        if compression and Path(path).stat().st_size == 0:
            raise CorpusError(f"cannot read {path}: the file has 0 bytes")
        match compression:
            case "gzip":
                yield from _gzip(path, tell)
            case "zstd":
                yield from _zstd(path, tell)
            case "":
                yield from _plain(path, tell)
    except (OSError, zlib.error, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or columns.reason(path, error)
        raise CorpusError(f"cannot read {path}: {why}") from error


def _plain(path: str, tell: Tell) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        while piece := file.read(_PIECE):
            tell(file.tell())
            yield piece


def _gzip(path: str, tell: Tell) -> Iterator[bytes]:
    # Not Arrow's: of the piece in which a stream ends early, that one gives nothing.
    with Path(path).open("rb") as raw, gzip.GzipFile(fileobj=raw) as file:
        try:
            while piece := file.read1(_PIECE):
                tell(raw.tell())
                yield piece
        except EOFError:
            raise EndsEarlyError from None


def _zstd(path: str, tell: Tell) -> Iterator[bytes]:
    given = 0
    try:
        for piece in _zstd_pieces(path, tell):
            given += len(piece)
            yield piece
    except OSError as error:
        if not _truncated(error):
            raise
        yield _zstd_rest(path, given)
        raise EndsEarlyError from None


def _zstd_pieces(path: str, tell: Tell) -> Iterator[bytes]:
    with pa.OSFile(path, "rb") as raw, pa.CompressedInputStream(raw, "zstd") as file:
        while piece := file.read(_PIECE):
            tell(raw.tell())
            yield piece


def _zstd_rest(path: str, given: int) -> bytes:
    """What a truncated stream still has after `given` bytes: Arrow drops the piece in which it ends."""
    with pa.OSFile(path, "rb") as raw, pa.CompressedInputStream(raw, "zstd") as file:
        while given:
            given -= len(file.read(min(given, _PIECE)))
        rest = bytearray()
        try:
            while byte := file.read(1):
                rest += byte
        except OSError as error:
            if not _truncated(error):
                raise
    return bytes(rest)


def _truncated(error: Any) -> bool:
    return "Truncated compressed stream" in str(error)
