"""What is remembered of large files, and every way in which it must not be believed. Counted in bytes read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ranker import digests
from ranker.digests import DigestCache, default_path, stamp
from ranker.fingerprint import components
from ranker.types import RankerSpec

SIZE = digests.SMALLEST
LATER = digests.SETTLED_NS + 1_000_000_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights just large enough to be remembered, and a small file."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"w" * SIZE)
    (path / "vocab.txt").write_bytes(b"[PAD]")
    return path


def cache_at(path: Path | None, *, later: int = LATER, kind: str = "k") -> DigestCache:
    """A cache as another process opens it, `later` nanoseconds from now."""
    return DigestCache(path, kind=kind, now_ns=lambda: time.time_ns() + later)


def weights(checkpoint: Path, cache: DigestCache) -> tuple[str, int]:
    """(the digest of the weights, the bytes that had to be read for all components)"""
    return components(RankerSpec(kind="cross-encoder", checkpoint=str(checkpoint), dtype="float32"), cache)[
        "weights"
    ], cache.hashed


def edit_in_place(path: Path) -> None:
    """Another content of the same size with the same mtime and inode, in another tick of the clock."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        with path.open("r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def test_second_time_only_small_files_are_read(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache" / "digests.json"
    first, read = weights(checkpoint, cache_at(file))
    assert read == SIZE + 5
    assert weights(checkpoint, cache_at(file)) == (first, 5)


def test_touched_file_is_read_anew(checkpoint: Path, tmp_path: Path) -> None:
    first, _ = weights(checkpoint, cache_at(tmp_path / "cache"))
    os.utime(checkpoint / "model.safetensors", (1, 1))
    assert weights(checkpoint, cache_at(tmp_path / "cache")) == (first, SIZE + 5)


def test_edit_that_restores_size_and_mtime_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    first, _ = weights(checkpoint, cache_at(tmp_path / "cache"))
    edit_in_place(checkpoint / "model.safetensors")
    second, read = weights(checkpoint, cache_at(tmp_path / "cache"))
    assert second != first
    assert read == SIZE + 5


def test_file_replaced_by_another_of_the_same_size_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    first, _ = weights(checkpoint, cache_at(tmp_path / "cache"))
    (tmp_path / "new").write_bytes(b"v" * SIZE)
    (tmp_path / "new").replace(checkpoint / "model.safetensors")
    assert weights(checkpoint, cache_at(tmp_path / "cache"))[0] != first


def test_file_of_this_moment_is_not_remembered(checkpoint: Path, tmp_path: Path) -> None:
    weights(checkpoint, cache_at(tmp_path / "cache", later=0))
    assert not (tmp_path / "cache").exists()
    assert weights(checkpoint, cache_at(tmp_path / "cache"))[1] == SIZE + 5


def test_file_that_changed_while_it_was_read_is_not_remembered(checkpoint: Path, tmp_path: Path) -> None:
    path, cache = checkpoint / "model.safetensors", cache_at(tmp_path / "cache")
    before = stamp(path)
    edit_in_place(path)
    cache.put(path, before, b"of the old content, or of a mixture")
    cache.save()
    assert cache.get(path) is None


def entry_of(file: Path) -> tuple[str, list[object]]:
    [(key, entry)] = json.loads(file.read_bytes()).items()
    return key, entry


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b"null"],
    ids=["empty", "torn", "a list", "no text", "deep", "null"],
)
def test_damaged_cache_is_as_good_as_none(checkpoint: Path, tmp_path: Path, damage: bytes) -> None:
    first, _ = weights(checkpoint, cache_at(tmp_path / "cache"))
    (tmp_path / "cache").write_bytes(damage)
    assert weights(checkpoint, cache_at(tmp_path / "cache")) == (first, SIZE + 5)
    assert weights(checkpoint, cache_at(tmp_path / "cache")) == (first, 5)  # and it has been replaced


@pytest.mark.parametrize("digest", ["zz", None, 7])
def test_damaged_entry_is_as_good_as_none(checkpoint: Path, tmp_path: Path, digest: object) -> None:
    first, _ = weights(checkpoint, cache_at(tmp_path / "cache"))
    key, entry = entry_of(tmp_path / "cache")
    for value in ([*entry[:-1], digest], [], "text"):
        (tmp_path / "cache").write_text(json.dumps({key: value}))
        assert weights(checkpoint, cache_at(tmp_path / "cache")) == (first, SIZE + 5)


def test_cache_that_cannot_be_written_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    first = weights(checkpoint, cache_at(tmp_path / "file" / "cache"))
    assert weights(checkpoint, cache_at(tmp_path / "file" / "cache")) == first
    assert weights(checkpoint, cache_at(Path("/proc/no/cache"))) == first
    assert weights(checkpoint, cache_at(None)) == first


def test_digests_made_otherwise_are_not_mixed_up(checkpoint: Path, tmp_path: Path) -> None:
    weights(checkpoint, cache_at(tmp_path / "cache"))
    assert weights(checkpoint, cache_at(tmp_path / "cache", kind="other"))[1] == SIZE + 5


def test_two_processes_at_once_keep_both_and_leave_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "cache" / "digests.json", tmp_path / "other.bin"
    other.write_bytes(b"o" * SIZE)
    one, two = cache_at(file), cache_at(file)
    one.put(checkpoint / "model.safetensors", stamp(checkpoint / "model.safetensors"), b"1")
    two.put(other, stamp(other), b"2")
    one.save()
    two.save()
    later = cache_at(file)
    assert (later.get(checkpoint / "model.safetensors"), later.get(other)) == (b"1", b"2")
    assert list(file.parent.iterdir()) == [file]


def test_oldest_entry_goes_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MOST", 2)
    monkeypatch.setattr(digests, "SMALLEST", 1)
    files = [tmp_path / name for name in "abc"]
    for number, path in enumerate(files):
        path.write_text("x")
        cache = cache_at(tmp_path / "cache")
        cache.put(path, stamp(path), bytes([number]))
        cache.save()
    assert [cache_at(tmp_path / "cache").get(path) for path in files] == [None, b"\x01", b"\x02"]


def test_default_path_follows_xdg_and_ignores_what_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/rescore/digests.json")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_path() == tmp_path / ".cache" / "rescore" / "digests.json"


def test_components_remember_in_the_users_cache_unless_told_otherwise(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(digests, "SETTLED_NS", -1)
    components(RankerSpec(kind="cross-encoder", checkpoint=str(checkpoint), dtype="float32"))
    key, _ = entry_of(tmp_path / "xdg" / "rescore" / "digests.json")
    assert key.endswith(str(checkpoint / "model.safetensors"))
