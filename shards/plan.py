"""The plan: made once, extended when files are added, and otherwise never changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from shards import cut, files, parts, planfile
from shards.errors import OutputError, PlanError, UsageError
from shards.layout import Layout, check_name
from shards.planfile import PlanFile
from shards.staging import Staging
from shards.types import Binding, CorpusFile, CorpusSpec, Plan, QuerySet

_BRIEF = 40
_DIGEST = re.compile(r"[0-9a-f]{32,}")
_ABSENT = {"attention": "auto"}
"""What a component means that is not there, where it is not "none"."""
_TEXTS = {"query", "text_template"}
"""Components that may hold any text at all, newlines included."""
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
class Difference:
    """Something a plan is bound to, and what it would be now. None: it is no component there."""

    name: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self._brief(self.old)} → {self._brief(self.new)}"

    @property
    def planned(self) -> str:
        """What the plan has, in few words."""
        return self._brief(self.old)

    def _brief(self, value: str | None) -> str:
        if value is None or (value in ("", "None") and self.name not in _TEXTS):
            return _ABSENT.get(self.name, "none")
        if self.name not in _TEXTS and _DIGEST.fullmatch(value):
            return f"{value[:12]}…"
        pairs = enumerate(zip(self.old or "", self.new or "", strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(len(self.old or ""), len(self.new or "")))
        start = same - _BRIEF // 2 if same > _BRIEF else 0  # of long texts, the stretch where they begin to differ
        end = start + _BRIEF
        text = ("…" if start else "") + value[start:end] + ("…" if len(value) > end else "")
        return json.dumps(text, ensure_ascii=False) if self.name in _TEXTS else text  # to see a blank too much


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The plan that a model_version has. `scored`: parts exist, so that no other plan may take its place."""

    binding: Binding
    scored: bool
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    layout: Layout
    spec: CorpusSpec
    binding: Binding
    queries: QuerySet | None
    now: datetime
    settings: Mapping[str, str]
    staging: Staging


def make_plan(
    layout: Layout,
    spec: CorpusSpec,
    binding: Binding,
    queries: QuerySet | None,
    *,
    now: datetime,
    settings: Mapping[str, str],
    staging: Staging = Staging(),  # noqa: B008 - frozen
) -> tuple[Plan, PlanChange]:
    """Plan the corpus, or check it against the plan that stands. Needs the run lock. `staging`: who stages files
    that are not Parquet, and who hears how far it is.

    Raises CorpusError for a corpus that cannot be planned, and PlanError where the output's plan
    differs: other columns, queries or ranker, a planned file that changed or vanished.
    """
    request = _Request(
        layout=layout, spec=spec, binding=binding, queries=queries, now=now, settings=settings, staging=staging
    )
    found = _read(layout, check_name(binding.model_version))
    if not found:
        return _create(request, "created")
    differences = _differences(found[0], spec, binding, queries)
    if differences:
        if parts.any_there(layout, binding.model_version, found[0].epoch):
            raise PlanError(_refusal(layout, binding.model_version, differences))
        return _replace(request, found)
    return _resume(request, found)


def read_plan(layout: Layout, model_version: str) -> Plan | None:
    """The plan from its files alone; paths are those it was made with. Raises PlanError if damaged."""
    found = _read(layout, model_version)
    return planfile.join(found) if found else None


def standing(layout: Layout, model_version: str) -> Standing | None:
    """What the plan is bound to; None: there is none of that name. Raises PlanError if it is damaged."""
    found = _read(layout, check_name(model_version))
    return _standing(layout, found[0], ()) if found else None


def compare(layout: Layout, spec: CorpusSpec, binding: Binding, queries: QuerySet | None) -> Standing | None:
    """The standing plan, and in what `make_plan` would find it bound otherwise. Changes nothing, and looks at no
    file of the corpus. None: there is no plan of that name. Raises PlanError if it is damaged."""
    found = _read(layout, check_name(binding.model_version))
    return _standing(layout, found[0], _differences(found[0], spec, binding, queries)) if found else None


def _standing(layout: Layout, base: PlanFile, differences: Sequence[Difference]) -> Standing:
    scored = parts.any_there(layout, base.model_version, base.epoch)
    return Standing(binding=base.binding, scored=scored, differences=tuple(differences))


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
    found = cut.survey(request.layout, request.spec, request.staging)
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
    found = cut.survey(request.layout, request.spec, request.staging)
    planned = [file for plan in standing for file in plan.files]
    here, new, gone = _match(planned, found)
    if gone:
        if not parts.any_there(request.layout, request.binding.model_version, standing[0].epoch):
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


def _differences(base: PlanFile, spec: CorpusSpec, binding: Binding, queries: QuerySet | None) -> list[Difference]:
    # "queries" last: a binding made before it was a component of it lacks it.
    old = {**base.spec, **base.binding.components, "queries": base.queries_digest}
    new = {**planfile.spec_facts(spec), **binding.components, "queries": planfile.queries_digest(queries)}
    old["label_scores"], new["label_scores"] = str(base.binding.label_scores), str(binding.label_scores)
    names = [name for name in (*old, *(name for name in new if name not in old)) if old.get(name) != new.get(name)]
    return [Difference(name=name, old=old.get(name), new=new.get(name)) for name in names]


def _refusal(layout: Layout, model_version: str, differences: Sequence[Difference]) -> str:
    return (
        f"model_version {model_version!r} in {layout.root} was planned otherwise"
        f" ({', '.join(map(str, differences))});"
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
