"""Where the scheduler's decisions become durable."""

from __future__ import annotations

from collections.abc import Sequence

from shards import footers, parts
from shards.errors import PartDamaged
from shards.layout import Layout
from shards.manifest import Manifest
from shards.types import Event, Failure, Footer, Plan, Shard


class ManifestStore:
    """`Store` on the real manifest and the real parts."""

    def __init__(self, manifest: Manifest, layout: Layout, plan_: Plan, run_: int) -> None:
        self._manifest, self._layout, self._plan, self._run = manifest, layout, plan_, run_

    def commit(self, events: Sequence[Event]) -> None:
        self._manifest.commit(self._run, events)

    def find(self, shard: Shard) -> Footer | None:
        plan = self._plan
        path = self._layout.part(plan.model_version, plan.epoch, *shard.key)
        try:
            footer = parts.read_footer(path)
        except (FileNotFoundError, PartDamaged):
            return None  # whoever scores the shard again puts its own part there
        mine = footers.answers(
            footer,
            shard,
            model_version=plan.model_version,
            epoch=plan.epoch,
            binding=plan.binding.digest,
            keys=shard.keys(plan.queries),
        )
        return footer if mine else None

    def last_words(self, worker: str) -> str:
        try:
            return self._layout.crash(self._run, worker).read_text(errors="replace")[-8000:]
        except OSError:
            return ""

    def bury(self, shard: Shard, failure: Failure, *, attempt: int, attempts: int, worker: str) -> Footer:
        expected = shard.keys(self._plan.queries)
        footer = Footer.of(
            shard,
            model_version=self._plan.model_version,
            epoch=self._plan.epoch,
            binding=self._plan.binding.digest,
            expected=expected,
            scored=0,
            dead=expected,
            failures=(failure,),
            whole=True,
            run=self._run,
            attempt=attempt,
            worker=worker,
            attempts=attempts,
        )
        schema = parts.part_schema(
            self._plan.id_type, query_set=self._plan.query_set, label_scores=self._plan.binding.label_scores
        )
        return parts.publish(self._layout, footer, schema.empty_table())[0]
