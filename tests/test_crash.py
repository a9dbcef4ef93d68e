"""The driver may die anywhere: whatever a kill leaves, the next start ends in the same state."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from shards.live import Live
from shards.manifest import Manifest
from shards.orders import read_orders
from shards.types import EventKind, ShardState
from shards.verify import verify
from tests.outputs import Output, event, make_output, verdict

State = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], list[tuple[Any, ...]]]


@dataclass
class Camera:
    """Copies an output at every step that changes it: byte for byte what a kill -9 there would leave (a
    killed process loses nothing that it has handed to the kernel). Equal pictures are kept once."""

    output: Output
    folder: Path
    taken: dict[str, str] = field(default_factory=dict)
    """Digest of the files → the name of the step."""

    def snap(self, step: str) -> None:
        files = sorted(path for path in self.output.layout.root.rglob("*") if path.is_file())
        digest = hashlib.blake2b()
        for path in files:
            digest.update(str(path).encode() + path.read_bytes())
        if digest.hexdigest() not in self.taken:
            name = f"{len(self.taken):03}-{step}"
            self.taken[digest.hexdigest()] = name
            shutil.copytree(self.output.layout.root, self.folder / name / "out")

    def pictures(self) -> Iterator[Output]:
        for name in self.taken.values():
            yield Output(root=self.folder / name, spec=self.output.spec)


def watch(camera: Camera, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture before and after whatever makes something durable or visible."""

    def around(real: Callable[..., Any], step: str) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            camera.snap(f"before-{step}")
            result = real(*args, **options)
            camera.snap(f"after-{step}")
            return result

        return act

    monkeypatch.setattr(os, "link", around(os.link, "link"))
    monkeypatch.setattr(os, "fsync", around(os.fsync, "fsync"))
    monkeypatch.setattr(Path, "replace", around(Path.replace, "rename"))
    execute, photographed = Live.execute, around(Live.execute, "commit")
    monkeypatch.setattr(
        Live,
        "execute",
        lambda self, sql, *values: (photographed if sql == "COMMIT" else execute)(self, sql, *values),
    )


def finish(output: Output) -> None:
    """A whole run: row 1 fails at first, and no more once it is redriven."""
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.reconcile(plan, read_orders(output.layout, "m1"))
        known = manifest.histories("m1")
        for shard in shards:
            if known[shard.key].state is not ShardState.PENDING:
                continue
            attempt = known[shard.key].attempts + 1
            manifest.commit(run, [event(EventKind.LEASED, shard, attempt=attempt)])
            dead = [] if shard.generation else [1]
            footer = output.bury(plan, shard) if shard.unreadable else output.publish(plan, shard, dead=dead)
            manifest.commit(run, [verdict(footer)])
        manifest.end_run(run, state="complete", exit_code=3, message="", summary={})
        manifest.publish()


def redrive(output: Output) -> None:
    with output.open() as manifest:
        manifest.redrive("m1", where="row = 1", dry_run=False)


def drive(output: Output) -> None:
    """All that can happen to an output: plan, score, bury, redrive, score again."""
    finish(output)
    redrive(output)
    finish(output)


def state(output: Output) -> State:
    with duckdb.connect(str(output.layout.manifest), read_only=True) as connection:

        def read(sql: str) -> list[tuple[Any, ...]]:
            return connection.execute(sql).fetchall()

        return (
            read("SELECT doc_id, score, shard_id FROM scores ORDER BY ALL"),
            read("SELECT id, doc_id, row, docs, state, message FROM dead_letters ORDER BY ALL"),
            read("SELECT shard_id, generation, state, scored, dead FROM shards ORDER BY ALL"),
        )


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """8 documents in 2 shards, and a file that cannot be read."""
    made = make_output(tmp_path, docs=8, group=8, shard_size=4)
    (tmp_path / "corpus" / "z.parquet").touch()
    return replace(made, spec=replace(made.spec, skip_unreadable=True))


def test_driver_dies_anywhere_the_next_ones_end_in_the_same_state(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera = Camera(output, tmp_path / "pictures")
    assert output.layout
    with monkeypatch.context() as patch:
        watch(camera, patch)
        drive(output)
    expected = state(output)
    assert len(expected[0]) == 8
    assert {letter[4] for letter in expected[1]} == {"resolved", "dead"}
    steps = {name[4:] for name in camera.taken.values()}
    assert {"before-fsync", "after-link", "after-rename", "after-commit"} <= steps
    assert len(camera.taken) > 40
    for picture in camera.pictures():
        drive(picture)
        left = [path for path in picture.layout.root.rglob(".tmp-*") if path.is_file()]
        assert left == [], picture.root
        assert verify(picture.layout, "m1").ok, picture.root
        scores, letters, shards = state(picture)
        assert (scores, letters) == expected[:2], picture.root
        assert shards == expected[2], picture.root


# -- the write-ahead log --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """An output whose driver was killed with much in its log: an acknowledged part, one that is not
    acknowledged, leases, a redrive."""
    root = tmp_path_factory.mktemp("killed")
    made = make_output(root / "before", docs=10, group=10, shard_size=4)
    finish(made)
    redrive(made)
    with made.open() as manifest:
        run, plan, shards = made.start(manifest)
        manifest.reconcile(plan, read_orders(made.layout, "m1"))
        again = next(shard for shard in shards if shard.generation)
        manifest.commit(run, [event(EventKind.LEASED, again, attempt=1)])
        manifest.commit(run, [verdict(made.publish(plan, again))])
        manifest.redrive("m1", where="true", dry_run=False)
        manifest.repair("m1", [shards[0].key])
        shutil.copytree(made.layout.root, root / "out")
    found = Output(root=root, spec=made.spec)
    assert found.layout.live.with_name("live.duckdb.wal").stat().st_size > 2000
    return found


def wounds(live: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Truncated at 30 places, each of the two files by itself; one lost, one garbled, both."""
    wal = live.with_name(live.name + ".wal")
    for path in (live, wal):
        data = path.read_bytes()
        for n in range(30):
            size = len(data) * n // 30 + n % 3
            yield (
                f"{path.name} cut to {size}",
                lambda path=path, data=data, size=size: (  # type: ignore[misc]
                    path.write_bytes(data[:size]),
                    None,
                )[1],
            )
        yield f"{path.name} lost", path.unlink
        middle = bytes(byte ^ 0x55 for byte in data[len(data) // 3 : len(data) // 2])
        garbled = data[: len(data) // 3] + middle + data[len(data) // 2 :]
        yield f"{path.name} garbled", lambda path=path, data=garbled: (path.write_bytes(data), None)[1]  # type: ignore[misc]


def test_manifest_and_its_log_cut_anywhere_lose_no_score(killed: Output, tmp_path: Path) -> None:
    finished = Output(root=tmp_path / "finished", spec=killed.spec)
    shutil.copytree(killed.layout.root, finished.root / "out")
    finish(finished)
    expected = state(finished)
    assert len(expected[0]) == 10
    live = killed.layout.live
    copy = Output(root=tmp_path / "copy", spec=killed.spec)
    for number, (name, _) in enumerate(list(wounds(live))):
        shutil.rmtree(copy.root, ignore_errors=True)
        shutil.copytree(killed.layout.root, copy.root / "out")
        list(wounds(copy.layout.live))[number][1]()
        finish(copy)
        assert verify(copy.layout, "m1").ok, name
        assert state(copy)[:2] == expected[:2], name


def test_manifest_of_the_first_schema_is_migrated_and_loses_nothing(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shards import migrations

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "STEPS", migrations.STEPS[:1])
        drive(output)
        before = state(output)
    with Manifest.open(output.layout, now=lambda: output.now) as manifest:
        assert not manifest.rebuilt
        manifest.publish()
    assert state(output) == before
    drive(output)
    assert state(output) == before
