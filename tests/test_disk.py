"""The output's disk: full, read-only, failing. Nothing half-written is ever seen, and all of it is resumable."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shards import files, parts
from shards.errors import ManifestError
from shards.layout import Layout
from shards.manifest import Manifest
from shards.types import EventKind
from shards.verify import verify
from tests.outputs import NOW, Output, event, make_output
from tests.projects import Project
from tests.rankers import fill


@contextmanager
def small_disk(at: Path, megabytes: int) -> Iterator[Path]:
    """A file system of that size, mounted there; skips where that is not allowed."""
    at.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "rescore-test", str(at)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a disk of a test's own needs the right to mount a tmpfs")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def remount(at: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(at)], check=True)


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    """An output of 8 shards on a disk of 16 MB; the corpus lies elsewhere."""
    made = make_output(tmp_path, docs=25, group=10, shard_size=4)
    with small_disk(tmp_path / "out", 16):
        yield made


def temps(output: Output) -> list[Path]:
    return [path for path in output.layout.root.rglob("*") if ".tmp-" in path.name]


def until_full(act: Callable[[], object]) -> Exception:
    for _ in range(10_000):
        try:
            act()
        except (OSError, ManifestError) as error:
            return error
    pytest.fail("the disk never filled")


# -- full ------------------------------------------------------------------------------------------


def test_part_disk_full_leaves_nothing_behind_and_is_written_when_there_is_room(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0])
        ballast = output.layout.root / "ballast"
        fill(ballast)
        with pytest.raises(OSError, match="No space left") as caught:
            output.publish(plan, shards[1])
        assert caught.value.errno == errno.ENOSPC
        assert list(parts.scan(output.layout, "m1", 0)) == [shards[0].key]
        assert temps(output) == []
        ballast.unlink()
        output.score(manifest, run, plan, shards[1])
    assert verify(output.layout, "m1").ok


def test_manifest_commit_disk_full_is_an_error_and_loses_nothing_committed(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0], dead=[1])
        footer = output.publish(plan, shards[1])
        ballast = output.layout.root / "ballast"
        fill(ballast)
        leased = [event(EventKind.LEASED, shard) for shard in shards[1:]]
        error = until_full(lambda: manifest.commit(run, leased))
        assert isinstance(error, ManifestError)
        assert "No space left" in str(error)
        assert "\n" not in str(error)
    ballast.unlink()
    with output.open() as manifest:
        assert not manifest.rebuilt
        run, plan, shards = output.start(manifest)
        assert manifest.reconcile(plan, []).adopted == 1
        assert (manifest.counts("m1").scored, manifest.counts("m1").dead) == (3 + footer.scored, 1)
    output.score_all()
    assert verify(output.layout, "m1").ok


def test_snapshot_disk_full_leaves_the_last_one_and_no_temp(output: Output) -> None:
    output.score_all()
    with output.open() as manifest:
        manifest.publish()
        before = output.layout.manifest.read_bytes()
        ballast = output.layout.root / "ballast"
        fill(ballast)
        with pytest.raises((ManifestError, OSError), match="No space left"):
            manifest.publish()
        assert output.layout.manifest.read_bytes() == before
        assert temps(output) == []
        ballast.unlink()
        manifest.publish()


def test_manifest_first_start_on_a_full_disk_is_an_error_in_one_line(output: Output) -> None:
    layout = output.layout
    fill(layout.root / "ballast")
    with pytest.raises(ManifestError, match="No space left"):
        output.open()


def test_plan_disk_full_leaves_no_plan(output: Output) -> None:
    fill(output.layout.root / "ballast")
    with pytest.raises(OSError, match="No space left"):
        output.make_plan()
    assert not list(output.layout.plans.glob("*/*"))
    (output.layout.root / "ballast").unlink()
    assert output.plan.docs == 25


# -- read-only -------------------------------------------------------------------------------------


def test_manifest_on_a_read_only_disk_is_refused_and_not_taken_for_damage(output: Output) -> None:
    output.score_all()
    remount(output.root / "out", "ro")
    try:
        with pytest.raises(ManifestError, match="Read-only"):
            Manifest.open(Layout(output.root / "out"), now=lambda: NOW)
        assert verify(Layout(output.root / "out"), "m1").ok  # who only reads needs no more
    finally:
        remount(output.root / "out", "rw")
    with output.open() as manifest:
        assert not manifest.rebuilt


# -- failing ---------------------------------------------------------------------------------------


def failing_fsync(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if fails(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def is_dir(fd: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{fd}")  # noqa: PTH112 - a descriptor, not a path


@pytest.fixture
def healthy(tmp_path: Path) -> Output:
    return make_output(tmp_path, docs=25, group=10, shard_size=4)


def test_part_fsync_error_leaves_nothing_and_the_next_try_writes_it(
    healthy: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with healthy.open() as manifest:
        run, plan, shards = healthy.start(manifest)
        with monkeypatch.context() as patch:
            failing_fsync(patch, lambda fd: not is_dir(fd))
            with pytest.raises(OSError, match="Input/output error"):
                healthy.publish(plan, shards[0])
        assert parts.scan(healthy.layout, "m1", 0) == {}
        assert temps(healthy) == []
        healthy.score(manifest, run, plan, shards[0])


def test_part_fsync_error_of_the_directory_leaves_a_whole_part_that_is_adopted(
    healthy: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with healthy.open() as manifest:
        _, plan, shards = healthy.start(manifest)
        files.make_dir(healthy.layout.part("m1", 0, *shards[0].key).parent)
        with monkeypatch.context() as patch:
            failing_fsync(patch, is_dir)
            with pytest.raises(OSError, match="Input/output error"):
                healthy.publish(plan, shards[0])
        assert temps(healthy) == []
        assert healthy.publish(plan, shards[0], run=2).run == 1
        assert manifest.reconcile(plan, []).adopted == 1


def test_order_fsync_error_orders_nothing(healthy: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy.score_all(dead=[1])
    with healthy.open() as manifest:
        with monkeypatch.context() as patch:
            failing_fsync(patch, lambda fd: not is_dir(fd))
            with pytest.raises(OSError, match="Input/output error"):
                manifest.redrive("m1", where=None, dry_run=False)
        assert manifest.letters("m1", 0).num_rows == 1
        assert manifest.redrive("m1", where=None, dry_run=False).letters == 1


def test_snapshot_fsync_error_leaves_the_last_one(healthy: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy.score_all()
    before = healthy.layout.manifest.read_bytes()
    with healthy.open() as manifest, monkeypatch.context() as patch:
        failing_fsync(patch, lambda fd: True)
        with pytest.raises(OSError, match="Input/output error"):
            manifest.publish()
    assert healthy.layout.manifest.read_bytes() == before
    assert temps(healthy) == []


# -- whole runs ------------------------------------------------------------------------------------


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "No space left" in line or "Traceback" in line]


@pytest.mark.ray
def test_run_disk_full_stops_with_one_line_and_goes_on_when_there_is_room(project: Project) -> None:
    ballast, room = project.output / "ballast", project.root / "room"
    options = {"ballast": str(ballast), "room": str(room)}
    project.config["ranker"] |= {"class": "tests.rankers:Filler", "options": options}
    project.corpus(["x"] * 20 + ["fill"] * 280)
    with small_disk(project.output, 16):
        stopped = project.run()
        assert stopped.returncode == 4, stopped.stderr
        assert len(errors(stopped.stderr)) == 1, stopped.stderr
        assert "rescore: the output fails: " in stopped.stderr
        ballast.unlink()
        assert project.verify()["damaged_parts"] == 0
        room.touch()
        resumed = project.run()
        assert resumed.returncode == 0, resumed.stderr
        assert "rebuilt" not in resumed.stderr
        assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(300, 300)]
        assert project.sql("SELECT count(*) FROM dead_letters") == [(0,)]
        assert project.verify()["ok"]


@pytest.mark.ray
def test_run_read_only_output_is_refused_in_one_line(project: Project) -> None:
    project.corpus(["x"] * 10)
    with small_disk(project.output, 16):
        assert project.run().returncode == 0
        remount(project.output, "ro")
        refused = project.run()
        assert refused.returncode == 2, refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
        assert "Read-only file system" in refused.stderr
        assert project.rescore("status", str(project.output)).returncode == 0
        assert project.verify()["ok"]
