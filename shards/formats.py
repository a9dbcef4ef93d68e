"""What a corpus file is, by its name or by `corpus.format`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from shards.errors import CorpusError

Format = Literal["auto", "parquet", "jsonl", "csv", "tsv", "arrow"]
Compression = Literal["", "gzip", "zstd"]


class Kind(StrEnum):
    """How the bytes of a file become records. Only Parquet is read as it is; the rest is staged first."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    ARROW = "arrow"


_KINDS = {
    ".parquet": Kind.PARQUET,
    ".jsonl": Kind.JSONL,
    ".ndjson": Kind.JSONL,
    ".json-lines": Kind.JSONL,
    ".csv": Kind.CSV,
    ".tsv": Kind.TSV,
    ".arrow": Kind.ARROW,
    ".ipc": Kind.ARROW,
    ".feather": Kind.ARROW,
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_UNKNOWN = {".bz2", ".xz", ".lz4", ".lzma", ".br", ".zip", ".7z", ".z", ".zstd"}
_TEXT = {Kind.JSONL, Kind.CSV, Kind.TSV}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A corpus file and how it is read."""

    path: str
    kind: Kind
    compression: Compression = ""


def source(path: str, wanted: Format = "auto") -> Source:
    """How `path` is read. A name that says nothing is taken for Parquet. Raises CorpusError for a compression
    that cannot be read."""
    name, packed = _unpacked(path)
    kind = _KINDS.get(name.suffix.lower(), Kind.PARQUET) if wanted == "auto" else Kind(wanted)
    if packed in _UNKNOWN:
        raise CorpusError(f"cannot read {path}: {packed} cannot be unpacked here (.gz and .zst can)")
    if packed and kind not in _TEXT:
        raise CorpusError(f"cannot read {path}: only JSON Lines, CSV and TSV (see corpus.format) may be {packed}")
    return Source(path=path, kind=kind, compression=_COMPRESSIONS.get(packed, ""))


def belongs(path: Path, wanted: Format) -> bool:
    """Whether a file that lies in a corpus directory is one of the corpus: its extension says what it is.

    With a compression that cannot be read it belongs, too, and is an error: part of a corpus is not left out.
    """
    kind = _KINDS.get(_unpacked(path)[0].suffix.lower())
    return kind is not None and wanted in ("auto", kind)


def _unpacked(path: str | Path) -> tuple[Path, str]:
    """The name without the extension of its compression, and that extension."""
    name = Path(path)
    suffix = name.suffix.lower()
    return (name.with_suffix(""), suffix) if suffix in _COMPRESSIONS or suffix in _UNKNOWN else (name, "")
