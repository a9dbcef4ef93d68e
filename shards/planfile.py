"""Plan files: the durable to-do list. The shards are rows, everything else is one sealed JSON value."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from shards import sealed
from shards.errors import PartDamaged, PlanError
from shards.layout import Layout
from shards.types import Binding, CorpusFile, CorpusSpec, IdType, Plan, QuerySet, Shard

FORMAT = 1
_NAME = re.compile(r"e([0-9]+)\.([0-9]+)\.parquet")
_FIELDS: list[tuple[str, pa.DataType]] = [
    ("shard_id", pa.string()),
    ("file", pa.int32()),
    ("row_group", pa.int32()),
    ("start", pa.int64()),
    ("rows", pa.int32()),
    ("first_row", pa.int64()),
    ("excluded", pa.list_(pa.int32())),
]
_SCHEMA = pa.schema(_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """One plan file: the base (number 0) or an extension with the files that came later."""

    model_version: str
    epoch: int
    number: int
    id_type: IdType
    spec: Mapping[str, str]
    """What decides how the corpus is cut, by name; a later run must agree."""
    queries: int
    queries_digest: str
    query_set: bool
    binding: Binding
    duplicates: int
    planned_at: datetime
    settings: Mapping[str, str]
    files: tuple[CorpusFile, ...]
    shards: tuple[Shard, ...]


def spec_facts(spec: CorpusSpec) -> dict[str, str]:
    """The parts of a spec that a plan is bound to. The path is not one of them: a corpus may move."""
    # Absent where it is not set: plans that were made before there were templates stay valid.
    template = {} if spec.text_template is None else {"text_template": spec.text_template}
    return {
        "id_column": spec.id_column,
        "text_column": "" if template else spec.text_column,
        "query_column": spec.query_column or "",
        "shard_size": str(spec.shard_size),
        "duplicates": spec.duplicates,
        **template,
    }


def queries_digest(queries: QuerySet | None) -> str:
    if queries is None:
        return ""
    value = json.dumps([queries.ids, queries.texts])
    return hashlib.blake2b(value.encode(), digest_size=16).hexdigest()


def shard_id(fingerprint: str, row_group: int, start: int, rows: int, excluded: Sequence[int]) -> str:
    """A shard's name, from content alone: the same rows of a moved file keep it."""
    value = json.dumps([fingerprint, row_group, start, rows, list(excluded)])
    return hashlib.blake2b(value.encode(), digest_size=16).hexdigest()


def paths(layout: Layout, model_version: str) -> dict[tuple[int, int], Path]:
    """(epoch, number) → plan file, in order."""
    folder = layout.plan_dir(model_version)
    found = {}
    for item in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(item.name)
        if match:
            found[int(match[1]), int(match[2])] = item
    return dict(sorted(found.items()))


def path(layout: Layout, model_version: str, epoch: int, number: int) -> Path:
    return layout.plan_dir(model_version) / f"e{epoch}.{number}.parquet"


def encode(plan: PlanFile) -> bytes:
    numbers = {file.path: number for number, file in enumerate(plan.files)}
    columns: dict[str, list[Any]] = {
        "shard_id": [shard.shard_id for shard in plan.shards],
        "file": [numbers[shard.file] for shard in plan.shards],
        "row_group": [shard.row_group for shard in plan.shards],
        "start": [shard.start for shard in plan.shards],
        "rows": [shard.rows for shard in plan.shards],
        "first_row": [shard.first_row for shard in plan.shards],
        "excluded": [shard.excluded for shard in plan.shards],
    }
    value = {
        "format": FORMAT,
        "model_version": plan.model_version,
        "epoch": plan.epoch,
        "number": plan.number,
        "id_type": plan.id_type,
        "spec": dict(plan.spec),
        "queries": plan.queries,
        "queries_digest": plan.queries_digest,
        "query_set": plan.query_set,
        "components": dict(plan.binding.components),
        "label_scores": plan.binding.label_scores,
        "duplicates": plan.duplicates,
        "planned_at": plan.planned_at.isoformat(),
        "settings": dict(plan.settings),
        "files": [_file_json(file) for file in plan.files],
    }
    return sealed.seal(pa.table(columns, schema=_SCHEMA), value)


def _file_json(file: CorpusFile) -> dict[str, Any]:
    """Of what stands in for a file only that there is something: its name is the fingerprint."""
    value = {name: item for name, item in asdict(file).items() if name != "staged"}
    return value if file.staged is None else {**value, "staged": True}


def decode(where: Path) -> PlanFile:
    """Raises PlanError if the file is damaged: a plan is not guessed."""
    data = where.read_bytes()
    try:
        value = sealed.unseal(data, str(where))
    except PartDamaged as error:
        raise PlanError(f"damaged plan: {error}; restore it from a copy, or start with another output") from error
    if value.get("format") != FORMAT:
        raise PlanError(f"{where}: plan format {value.get('format')!r}, this program reads {FORMAT}")
    return _from_json(value, sealed.rows(data), Layout(where.parents[2]))


def _from_json(value: dict[str, Any], table: pa.Table, layout: Layout) -> PlanFile:
    files = tuple(
        CorpusFile(**{**item, "staged": layout.stand_in(item["fingerprint"]) if item.get("staged") else None})
        for item in value["files"]
    )
    return PlanFile(
        model_version=value["model_version"],
        epoch=value["epoch"],
        number=value["number"],
        id_type=value["id_type"],
        spec=value["spec"],
        queries=value["queries"],
        queries_digest=value["queries_digest"],
        query_set=value["query_set"],
        binding=Binding(
            model_version=value["model_version"],
            components=value["components"],
            label_scores=value["label_scores"],
        ),
        duplicates=value["duplicates"],
        planned_at=datetime.fromisoformat(value["planned_at"]),
        settings=value["settings"],
        files=files,
        shards=_shards(files, table),
    )


def _shards(files: tuple[CorpusFile, ...], table: pa.Table) -> tuple[Shard, ...]:
    columns = [table.column(name).to_pylist() for name in _SCHEMA.names]
    shards = []
    for name, number, row_group, start, rows, first_row, excluded in zip(*columns, strict=True):
        file = files[number]
        shards.append(
            Shard(
                shard_id=name,
                file=file.path,
                fingerprint=file.fingerprint,
                size=file.size,
                mtime_ns=file.mtime_ns,
                row_group=row_group,
                start=start,
                rows=rows,
                first_row=first_row,
                excluded=tuple(excluded),
                unreadable=file.unreadable,
                staged=file.staged,
            )
        )
    return tuple(shards)


def join(files: Sequence[PlanFile]) -> Plan:
    """The plan that a base and its extensions make together."""
    base = files[0]
    return Plan(
        model_version=base.model_version,
        epoch=base.epoch,
        id_type=base.id_type,
        files=tuple(item for file in files for item in file.files),
        shards=tuple(shard for file in files for shard in file.shards),
        duplicates=sum(file.duplicates for file in files),
        queries=base.queries,
        query_set=base.query_set,
        binding=base.binding,
        planned_at=base.planned_at,
        settings=base.settings,
    )
