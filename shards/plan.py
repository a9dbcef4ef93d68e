"""The plan: made once, extended when files are added, and otherwise never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from shards import cut, files, parts, planfile
from shards.errors import OutputError, PlanError, UsageError
from shards.layout import Layout, check_name
from shards.planfile import PlanFile
from shards.types import Binding, CorpusFile, CorpusSpec, Plan, QuerySet

_EPOCH = 0  # a changed corpus will build the next one; until then it is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """What a start did to the plan. `replaced`: no part existed yet, so another plan took its place."""

    kind: Literal["created", "unchanged", "extended", "replaced"]
    new_files: int
    new_shards: int

    def __str__(self) -> str:
        return f"extended by {self.new_files:,} new files" if self.kind == "extended" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    layout: Layout
    spec: CorpusSpec
    binding: Binding
    queries: QuerySet | None
    now: datetime
    settings: Mapping[str, str]


def make_plan(
    layout: Layout,
    spec: CorpusSpec,
    binding: Binding,
    queries: QuerySet | None,
    *,
    now: datetime,
    settings: Mapping[str, str],
) -> tuple[Plan, PlanChange]:
    """Plan the corpus, or check it against the plan that stands. Needs the run lock.

    Raises CorpusError for a corpus that cannot be planned, and PlanError where the output's plan
    differs: other columns, queries or ranker, a planned file that changed or vanished.
    """
    request = _Request(layout=layout, spec=spec, binding=binding, queries=queries, now=now, settings=settings)
    standing = _read(layout, check_name(binding.model_version))
    if not standing:
        return _create(request, "created")
    difference = _difference(standing[0], request)
    if difference:
        if parts.scan(layout, binding.model_version, standing[0].epoch):
            raise PlanError(_refusal(layout, binding.model_version, difference))
        return _replace(request, standing)
    return _resume(request, standing)


def read_plan(layout: Layout, model_version: str) -> Plan | None:
    """The plan from its files alone; paths are those it was made with. Raises PlanError if damaged."""
    standing = _read(layout, model_version)
    return planfile.join(standing) if standing else None


def only_plan(layout: Layout, model_version: str | None) -> Plan:
    """The plan of a model_version; None: of the only one there is. Raises UsageError if there is none such."""
    known = model_versions(layout)
    if model_version is None:
        if len(known) != 1:
            what = f"several model_versions, name one: {', '.join(known)}" if known else "no plan"
            raise UsageError(f"{layout.root} holds {what}")
        model_version = known[0]
    plan = read_plan(layout, model_version) if model_version in known else None
    if plan is None:
        raise UsageError(f"no model_version {model_version!r} in {layout.root}; there is: {', '.join(known)}")
    return plan


def model_versions(layout: Layout) -> list[str]:
    """The model_versions that have a plan, sorted."""
    if not layout.plans.is_dir():
        return []
    names = [item.name for item in layout.plans.iterdir() if item.is_dir()]
    return sorted(name for name in names if planfile.paths(layout, name))


def _read(layout: Layout, model_version: str) -> list[PlanFile]:
    found = planfile.paths(layout, model_version)
    if not found:
        return []
    epoch = max(epoch for epoch, _ in found)
    numbers = [number for at, number in found if at == epoch]
    if numbers != list(range(len(numbers))):
        raise PlanError(f"{layout.plan_dir(model_version)}: a plan file of epoch {epoch} is missing")
    return [planfile.decode(found[epoch, number]) for number in numbers]


def _create(request: _Request, kind: Literal["created", "replaced"]) -> tuple[Plan, PlanChange]:
    found = cut.survey(request.layout, request.spec)
    id_type = cut.id_type(found, request.spec)
    _check_id_type(request, id_type)
    made = cut.cut(found, (), request.spec, id_type, request.layout)
    plan = _plan_file(request, made, number=0, epoch=_EPOCH, id_type=id_type)
    _write(request.layout, plan)
    change = PlanChange(kind=kind, new_files=len(made.files), new_shards=len(made.shards))
    return planfile.join([plan]), change


def _replace(request: _Request, standing: Sequence[PlanFile]) -> tuple[Plan, PlanChange]:
    model_version = request.binding.model_version
    # From the last to the first: what a crash leaves in between is a shorter plan, never a torn one.
    for plan in reversed(standing):
        planfile.path(request.layout, model_version, plan.epoch, plan.number).unlink()
    files.fsync_dir(request.layout.plan_dir(model_version))
    return _create(request, "replaced")


def _resume(request: _Request, standing: list[PlanFile]) -> tuple[Plan, PlanChange]:
    found = cut.survey(request.layout, request.spec)
    planned = [file for plan in standing for file in plan.files]
    here, new, gone = _match(planned, found)
    if gone:
        if not parts.scan(request.layout, request.binding.model_version, standing[0].epoch):
            return _replace(request, standing)
        raise PlanError(f"{gone}; restore it, or score the changed corpus into another output")
    moved = [_moved(plan, here) for plan in standing]
    kept = [file for plan in moved for file in plan.files if file.path in {item.path for item in found}]
    if not new:
        return planfile.join(moved), PlanChange(kind="unchanged", new_files=0, new_shards=0)
    id_type = cut.id_type(new, request.spec, known=standing[0].id_type)
    made = cut.cut(new, [file for file in kept if file.unreadable is None], request.spec, id_type, request.layout)
    more = _plan_file(request, made, number=len(standing), epoch=standing[0].epoch, id_type=id_type)
    _write(request.layout, more)
    change = PlanChange(kind="extended", new_files=len(made.files), new_shards=len(made.shards))
    return planfile.join([*moved, more]), change


def _match(
    planned: Sequence[CorpusFile], found: Sequence[CorpusFile]
) -> tuple[dict[str, CorpusFile], list[CorpusFile], str]:
    """(planned path → the file that now has its content, files that are new, what is wrong or '')."""
    free: dict[str, dict[str, CorpusFile]] = {}
    for file in found:
        free.setdefault(file.fingerprint, {})[file.path] = file
    paths = {file.path for file in found}
    here: dict[str, CorpusFile] = {}
    for at_home in (True, False):  # files that did not move take their content first
        for file in planned:
            same = free.get(file.fingerprint, {})
            if file.path in here or (at_home and file.path not in same) or not same:
                continue
            here[file.path] = same.pop(file.path if at_home else next(iter(same)))
    content = {file.fingerprint for file in here.values()}
    for file in planned:
        # A copy that had no document of its own, or a file that could not be read, may go.
        if file.path not in here and file.fingerprint not in content and file.rows:
            what = "changed" if file.path in paths else "is gone (no file of the corpus has its content)"
            return here, [], f"planned file {file.path} {what}"
    new = [file for rest in free.values() for file in rest.values()]
    return here, sorted(new, key=lambda file: file.path), ""


def _moved(plan: PlanFile, here: Mapping[str, CorpusFile]) -> PlanFile:
    """The plan file with the paths, sizes and times of now."""
    now = {path: (file.path, file.size, file.mtime_ns) for path, file in here.items()}
    by_content = {file.fingerprint: file for file in here.values()}

    def place(path: str, fingerprint: str) -> tuple[str, int, int] | None:
        other = by_content.get(fingerprint)
        if path in now or other is None:
            return now.get(path)
        return other.path, other.size, other.mtime_ns

    def file_now(file: CorpusFile) -> CorpusFile:
        at = place(file.path, file.fingerprint)
        return file if at is None else replace(file, path=at[0], size=at[1], mtime_ns=at[2])

    return replace(
        plan,
        files=tuple(file_now(file) for file in plan.files),
        shards=tuple(
            shard
            if (at := place(shard.file, shard.fingerprint)) is None
            or at == (shard.file, shard.size, shard.mtime_ns)
            else replace(shard, file=at[0], size=at[1], mtime_ns=at[2])
            for shard in plan.shards
        ),
    )


def _plan_file(request: _Request, made: cut.Cut, *, number: int, epoch: int, id_type: str) -> PlanFile:
    queries = request.queries
    return PlanFile(
        model_version=request.binding.model_version,
        epoch=epoch,
        number=number,
        id_type="int64" if id_type == "int64" else "string",
        spec=planfile.spec_facts(request.spec),
        queries=1 if queries is None else len(queries.ids),
        queries_digest=planfile.queries_digest(queries),
        query_set=queries is not None,
        binding=request.binding,
        duplicates=made.duplicates,
        planned_at=request.now,
        settings=dict(request.settings),
        files=made.files,
        shards=made.shards,
    )


def _write(layout: Layout, plan: PlanFile) -> None:
    path = planfile.path(layout, plan.model_version, plan.epoch, plan.number)
    files.make_dir(path.parent)
    if not files.publish_new(path, planfile.encode(plan)):
        raise OutputError(f"{path} exists already: another driver plans into the same output")


def _difference(base: PlanFile, request: _Request) -> str:
    old = {**base.spec, **base.binding.components, "queries": base.queries_digest}
    new = {
        **planfile.spec_facts(request.spec),
        **request.binding.components,
        "queries": planfile.queries_digest(request.queries),
    }
    old["label_scores"], new["label_scores"] = str(base.binding.label_scores), str(request.binding.label_scores)
    names = [name for name in (*old, *(set(new) - set(old))) if old.get(name) != new.get(name)]
    return ", ".join(f"{name}: {_short(old.get(name))} → {_short(new.get(name))}" for name in names)


def _short(value: str | None) -> str:
    if value is None or value == "":
        return "none"
    return value if len(value) <= 40 else f"{value[:12]}…"


def _refusal(layout: Layout, model_version: str, difference: str) -> str:
    return (
        f"model_version {model_version!r} in {layout.root} was planned otherwise ({difference});"
        " give this ranker another model_version, or use another output"
    )


def _check_id_type(request: _Request, id_type: str) -> None:
    # One `scores` view spans all model_versions: a doc_id has one type per output.
    for name in model_versions(request.layout):
        if name == request.binding.model_version:
            continue
        other = _read(request.layout, name)[0]
        if other.id_type != id_type and other.files:
            raise PlanError(
                f"doc_id is {other.id_type} for model_version {name!r} in {request.layout.root}"
                f" and would be {id_type} here; use another output"
            )
