"""Workers whose protocol is slowed down at its weakest point, or broken, so that zeros mean something.

`python -m tests.chaos.protocols NAME run CONFIG` is `rescore run CONFIG` with such workers.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from jobs import cli, driver, pool
from jobs.pool import _Actor
from jobs.protocol import Done, Lease
from jobs.worker import Report, WorkerSpec
from shards.layout import Layout
from shards.types import Footer

DELAY_S = 0.3


class Honest(_Actor):
    """The worker as it is."""


class SlowAck(_Actor):
    """A pause after the part is durable and before its acknowledgement: deaths fall into it."""

    def score(self, lease: Lease) -> Iterator[Report]:
        for report in super().score(lease):
            if isinstance(report, Done):
                time.sleep(DELAY_S)
            yield report


class AckFirst(_Actor):
    """Broken: acknowledges a shard before any work is done."""

    def score(self, lease: Lease) -> Iterator[Report]:
        yield Done(
            worker=self._spec.worker,
            key=lease.key,
            attempt=lease.attempt,
            footer=self._promise(lease),
            adopted=False,
        )
        for _ in super().score(lease):
            pass

    def _promise(self, lease: Lease) -> Footer:
        shard, spec = lease.shard, self._spec
        return Footer(
            model_version=spec.model_version, epoch=spec.epoch, shard_id=shard.shard_id,
            generation=shard.generation, file=shard.file, file_fingerprint=shard.fingerprint,
            row_group=shard.row_group, start=shard.start, rows=shard.rows, first_row=shard.first_row,
            binding=spec.binding, expected=shard.docs, scored=shard.docs, dead=0, failures=(), whole=False,
            run=spec.run, attempt=lease.attempt, worker=spec.worker, attempts=lease.charged,
        )  # fmt: skip


class _NoKeys(Layout):
    """Every part has a name of its own: nothing says that two of them are the same shard's."""

    def part(self, *key: object) -> Path:
        name = super().part(*key)  # type: ignore[arg-type]
        return name.with_name(f"{uuid.uuid4().hex}.parquet")


class Append(SlowAck):
    """Broken: every attempt appends a file of its own; the name carries no key."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._layout = _NoKeys(Path(spec.output))


PROTOCOLS = {"honest": Honest, "slow-ack": SlowAck, "ack-first": AckFirst, "append": Append}
BROKEN = ("ack-first", "append")


def main() -> None:
    name = sys.argv.pop(1)
    pool._Actor = PROTOCOLS[name]  # type: ignore[misc]
    if name in BROKEN:
        # The run's own verification would find what is lost, and score it again.
        driver._MAX_REPAIRS = 1
    cli.main()


if __name__ == "__main__":
    # The class travels by name, and must not be `__main__`'s.
    from tests.chaos import protocols

    protocols.main()
