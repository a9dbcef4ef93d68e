"""Digests of large files, remembered by what says that a file is still the same one. Losing them costs one read."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SMALLEST = 1 << 20
"""Bytes from which a file is remembered: a smaller one is hashed in a millisecond."""
SETTLED_NS = 2_000_000_000
"""A file that changed less than this ago is not remembered: a second change within the same tick of the file
system's clock (2 s on the coarsest) would not show in its times."""
MOST = 1_000
"""Files that are remembered; beyond it the oldest entry goes."""

_Stamp = tuple[int, int, int, int]


def stamp(path: Path) -> _Stamp:
    """(size, mtime_ns, ctime_ns, inode) of the file behind `path`. ctime cannot be set back: it tells an edit
    that restored the size and the mtime."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


class DigestCache:
    """Digests of files whose path and `stamp` are as they were.

    It never fails: a file of it that is damaged or cannot be read is empty, one that cannot be written stays as
    it is. Processes that save at the same time may lose each other's entries, never mix them.

    Args:
        path: where it lies; None: it remembers nothing beyond this object.
        kind: how digests are made; those of another kind are not found.
        now_ns: the time of day, as `time.time_ns`.
    """

    def __init__(self, path: Path | None, *, kind: str, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path, self._kind, self._now_ns = path, kind, now_ns
        self._known = _load(path)
        self._new: dict[str, list[object]] = {}
        self.hashed = 0
        """Bytes that were not known and had to be read."""

    def get(self, path: Path) -> bytes | None:
        """The digest, if the file is known and unchanged. Raises OSError if there is no such file."""
        entry = self._known.get(self._key(path))
        if not isinstance(entry, list) or entry[:-1] != list(stamp(path)):
            return None
        with contextlib.suppress(TypeError, ValueError):
            return bytes.fromhex(entry[-1])
        return None

    def put(self, path: Path, before: _Stamp, digest: bytes) -> None:
        """Remember a digest that was made after `before` was taken: a file that changed meanwhile has another."""
        size, mtime_ns, ctime_ns, _ = before
        self.hashed += size
        settled = self._now_ns() - max(mtime_ns, ctime_ns) >= SETTLED_NS
        if size >= SMALLEST and settled:
            self._new[self._key(path)] = [*before, digest.hex()]

    def save(self) -> None:
        """Add what is new to the file, as it is by now."""
        if not self._new or self._path is None:
            return
        kept = {key: entry for key, entry in _load(self._path).items() if key not in self._new} | self._new
        self._known, self._new = dict(list(kept.items())[-MOST:]), {}
        with contextlib.suppress(OSError):
            _replace(self._path, json.dumps(self._known).encode())

    def _key(self, path: Path) -> str:
        return f"{self._kind} {path.absolute()}"


def default_path() -> Path | None:
    """`rescore/digests.json` in the user's cache directory; None if there is no such place."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # relative ones are to be ignored, says the XDG specification
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "rescore" / "digests.json"


def _load(path: Path | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
