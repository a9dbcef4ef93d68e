"""Arrow IPC (file or stream; Feather is the former) → tables of the wanted columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from shards import columns, nested
from shards.errors import CorpusError
from shards.lines import Tell
from shards.record import BATCH_BYTES, BATCH_ROWS, Wanted

_MAGIC = b"ARROW1"


def tables(path: str, wanted: Wanted, tell: Tell) -> Iterator[pa.Table]:
    """The wanted columns, at most 10,000 rows or 32 MiB at a time; at least one table, which may be empty.

    They keep their types, a dictionary's values aside. Raises CorpusError for a file that is damaged or not
    whole, and for one without such a column.
    """
    try:
        names = list(dict.fromkeys((wanted.id, *wanted.texts)))
        with _open(path, names) as (schema, batches, at):
            kinds = [columns.plain(nested.kind(path, schema, name)) for name in names]
            kept = pa.schema([pa.field(name, kind) for name, kind in zip(names, kinds, strict=True)])
            yield kept.empty_table()
            for batch in batches:
                tell(at())
                step = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
                for start in range(0, batch.num_rows, step):
                    table = pa.Table.from_batches([batch.slice(start, step)])
                    values = [columns.decoded(nested.column(table, name)) for name in names]
                    yield pa.Table.from_arrays(values, schema=kept)
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"cannot read {path}: {columns.reason(path, error)}") from error


@contextmanager
def _open(path: str, names: list[str]) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch], Any]]:
    # Mapped, because a batch may be the whole file.
    with pa.memory_map(path, "r") as file:
        is_file = file.read(len(_MAGIC)) == _MAGIC
        open_: Any = pa.ipc.open_file if is_file else pa.ipc.open_stream
        file.seek(0)
        schema = open_(file).schema
        file.seek(0)
        fields = sorted({index for name in names for index in _top(schema, name)})
        found = open_(file, options=pa.ipc.IpcReadOptions(included_fields=fields))
        batches = (found.get_batch(at) for at in range(found.num_record_batches)) if is_file else iter(found)
        yield schema, batches, file.tell


def _top(schema: pa.Schema, name: str) -> list[int]:
    """The columns at the top that a name may be of."""
    return [index for index, top in enumerate(schema.names) if name == top or name.startswith(f"{top}.")]
