"""Parts: the results of one shard and generation, written once, complete in themselves."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shards import files, footers, sealed
from shards.errors import PartDamaged
from shards.layout import Layout
from shards.types import DocId, Footer, IdType, ShardKey

_NAME = re.compile(r"([0-9a-f]{32})\.g([0-9]+)\.parquet")
_SEED = Path("_seed") / "seed.parquet"


def part_schema(id_type: IdType, *, query_set: bool, label_scores: bool) -> pa.Schema:
    """The columns of every part of an output; the same for each, so that a glob reads them as one table."""
    fields = [
        ("doc_id", pa.int64() if id_type == "int64" else pa.string()),
        ("query_id", pa.string()) if query_set else None,
        ("model_version", pa.string()),
        ("score", pa.float32()),
        ("label_scores", pa.list_(pa.float32())) if label_scores else None,
        ("n_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("text_hash", pa.uint64()),
        ("shard_id", pa.string()),
    ]
    return pa.schema([field for field in fields if field is not None])


def text_hashes(pairs: Iterable[tuple[str, str]]) -> list[int]:
    """For each (query, text) 64 bits over the query and the whole text, before truncation: what its score was
    computed from. A query that repeats in a row is hashed once."""
    hashes: list[int] = []
    last, state = None, hashlib.blake2b(digest_size=8)
    for query, text in pairs:
        if query != last:
            raw = query.encode()
            size = len(raw).to_bytes(8, "little")  # so that ("ab", "c") is not ("a", "bc")
            last, state = query, hashlib.blake2b(size + raw, digest_size=8)
        digest = state.copy()
        digest.update(text.encode())
        hashes.append(int.from_bytes(digest.digest(), "little"))
    return hashes


def make_rows(
    schema: pa.Schema,
    *,
    doc_ids: Sequence[DocId],
    query_ids: Sequence[str] | None,
    model_version: str,
    scores: npt.NDArray[np.float32],
    label_scores: npt.NDArray[np.float32] | None,
    n_tokens: npt.NDArray[Any] | Sequence[int],
    truncated: npt.NDArray[Any] | Sequence[bool],
    text_hashes: Sequence[int],
    shard_id: str,
) -> pa.Table:
    """The rows of a part. `scores` [n] float32, `label_scores` [n, labels] float32; all of them finite."""
    count = len(doc_ids)
    scores = np.ascontiguousarray(scores, dtype=np.float32)
    assert scores.shape == (count,), scores.shape
    assert np.isfinite(scores).all(), "a score that is not finite is a dead letter, never a row"
    values: dict[str, Any] = {
        "doc_id": doc_ids,
        "query_id": query_ids,
        "model_version": pa.repeat(model_version, count),
        "score": scores,
        "label_scores": _labels(label_scores, count),
        "n_tokens": n_tokens,
        "truncated": truncated,
        "text_hash": np.asarray(text_hashes, dtype=np.uint64),
        "shard_id": pa.repeat(shard_id, count),
    }
    columns = [pa.array(values[field.name], type=field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def publish(layout: Layout, footer: Footer, rows: pa.Table) -> tuple[Footer, bool]:
    """Write a part durably, once. Returns the footer that stands, and whether it is another's (adopted).

    A worker that the driver believed dead may write for seconds: whoever comes second discards its own
    result, so that what was acknowledged never changes. OSErrors propagate.
    """
    assert footer.scored == rows.num_rows, (footer.scored, rows.num_rows)
    assert footer.scored + footer.dead == footer.expected, footer.key
    footer = footers.cut(footer)
    path = layout.part(footer.model_version, footer.epoch, footer.shard_id, footer.generation)
    data = _encode(rows, footers.to_json(footer))
    files.make_dir(path.parent)
    if files.publish_new(path, data):
        return footer, False
    try:
        standing = read_footer(path)
        if footers.same_work(standing, footer):
            files.fsync_file(path)
            files.fsync_dir(path.parent)  # its writer may have died between the link and this
            return standing, True
    except PartDamaged:
        pass  # repaired below: the new part is renamed over it, so that the name is never free
    files.replace(path, data)
    return footer, False


def read_footer(path: Path) -> Footer:
    """A part's footer, after its whole-file hash has been checked. Raises PartDamaged, OSError."""
    return _footer(path.read_bytes(), path)


def read_part(path: Path) -> tuple[Footer, pa.Table]:
    """A part's footer and rows, after its whole-file hash has been checked. Raises PartDamaged, OSError."""
    data = path.read_bytes()
    footer = _footer(data, path)
    table = sealed.rows(data)
    if table.num_rows != footer.scored:
        raise PartDamaged(f"{path}: {table.num_rows} rows, its footer says {footer.scored}")
    return footer, table


def scan(layout: Layout, model_version: str, epoch: int) -> dict[ShardKey, Path]:
    """The parts that are there, by name only. Temp files and the seed are no parts."""
    return dict(_entries(layout, model_version, epoch))


def any_there(layout: Layout, model_version: str, epoch: int) -> bool:
    """Whether there is a part: the first that is found says so."""
    return next(_entries(layout, model_version, epoch), None) is not None


def _entries(layout: Layout, model_version: str, epoch: int) -> Iterator[tuple[ShardKey, Path]]:
    root = layout.epoch_dir(model_version, epoch)
    if not root.is_dir():
        return
    for folder in root.iterdir():
        if len(folder.name) != 2 or not folder.is_dir():
            continue
        for entry in os.scandir(folder):
            match = _NAME.fullmatch(entry.name)
            if match:
                yield (match[1], int(match[2])), Path(entry.path)


def write_seed(layout: Layout, model_version: str, epoch: int, schema: pa.Schema) -> None:
    """A file without rows, so that a view over the parts is valid before the first of them."""
    path = layout.epoch_dir(model_version, epoch) / _SEED
    data = _encode(schema.empty_table(), {"format": footers.FORMAT, "seed": True})
    if path.is_file() and path.read_bytes() == data:
        return
    files.make_dir(path.parent)
    files.replace(path, data)


def _encode(rows: pa.Table, value: dict[str, Any]) -> bytes:
    return sealed.seal(rows, value, dictionaries=("model_version", "shard_id"), byte_streams=("score",))


def _footer(data: bytes, path: Path) -> Footer:
    footer = footers.from_json(sealed.unseal(data, str(path)), str(path))
    if footer.scored + footer.dead != footer.expected:
        raise PartDamaged(f"{path}: its counts do not add up")
    return footer


def _labels(scores: npt.NDArray[np.float32] | None, count: int) -> pa.Array[Any] | None:
    if scores is None:
        return None
    assert scores.ndim == 2, scores.shape
    assert len(scores) == count, scores.shape
    assert np.isfinite(scores).all(), "a label's score that is not finite makes the document a dead letter"
    values = pa.array(np.ascontiguousarray(scores, dtype=np.float32).ravel())
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * scores.shape[1])
    return pa.ListArray.from_arrays(offsets, values)
