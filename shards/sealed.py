"""A Parquet file that proves its own bytes: one JSON value and one hash over the whole file.

Why one hash over everything: of 400 single flipped bits in a part, 376 read as silently wrong values in
Arrow and in DuckDB alike. The hash stands inside the file (a key-value entry of the Parquet footer), so
that a part stays one file and any Parquet reader can read it. It is computed with 64 zeros in its place.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shards.errors import PartDamaged

_VALUE_KEY = "rescore"
_HASH_KEY = b"rescore.hash"
_HEX = 64
_ZEROS = b"0" * _HEX
_GAP = 2  # Thrift compact: one byte for the field, one for the length (64), between key and value


def seal(
    table: pa.Table,
    value: Mapping[str, Any],
    *,
    dictionaries: Sequence[str] = (),
    byte_streams: Sequence[str] = (),
) -> bytes:
    """The bytes of a Parquet file with the table's rows (one row group), `value` and the hash."""
    sink = io.BytesIO()
    encoded: Any = list(dictionaries)  # pyarrow's stubs know only the bool
    writer = pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=encoded,
        column_encoding=dict.fromkeys(byte_streams, "BYTE_STREAM_SPLIT") or None,
        write_page_checksum=True,
        store_schema=False,
    )
    writer.write_table(table, row_group_size=max(1, table.num_rows))
    writer.add_key_value_metadata({_VALUE_KEY: _json(value), _HASH_KEY.decode(): _ZEROS.decode()})
    writer.close()
    data = bytearray(sink.getbuffer())
    at = _hash_at(data)
    data[at : at + _HEX] = _digest(data)
    return bytes(data)


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The JSON value of a sealed file. Raises PartDamaged if any bit is not as it was written."""
    copy = bytearray(data)
    at = _hash_at(copy)
    if at < 0:
        raise PartDamaged(f"{name}: no hash; truncated or not written by rescore")
    stands = bytes(copy[at : at + _HEX])
    copy[at : at + _HEX] = _ZEROS
    if _digest(copy) != stands:
        raise PartDamaged(f"{name}: its bytes do not match their hash")
    try:
        metadata = pq.read_metadata(pa.BufferReader(data)).metadata or {}
        value = json.loads(metadata[_VALUE_KEY.encode()])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise PartDamaged(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise PartDamaged(f"{name}: its metadata is no JSON object")
    return value


def rows(data: bytes) -> pa.Table:
    """The rows of a file that `unseal` accepted."""
    return pq.read_table(pa.BufferReader(data))


def _json(value: Mapping[str, Any]) -> str:
    # ASCII: a lone surrogate in an error message must not make the file unwritable. And the hash's key must
    # stand once in the metadata, whose order Arrow does not promise, even where a message quotes it.
    return json.dumps(value, separators=(",", ":")).replace(_HASH_KEY.decode(), "rescore\\u002ehash")


def _hash_at(data: bytearray) -> int:
    # The last occurrence: rows and statistics, which come before the metadata, may hold the words.
    key = data.rfind(_HASH_KEY)
    at = key + len(_HASH_KEY) + _GAP
    return at if key >= 0 and at + _HEX <= len(data) else -1


def _digest(data: bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=_HEX // 2).hexdigest().encode()
