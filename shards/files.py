"""Durable files: created once under their final name, complete or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from uuid import uuid4

_TEMP = ".tmp-"  # dot first and no .parquet last: DuckDB's globs match dot files
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def publish_new(path: Path, data: bytes) -> bool:
    """Write `data` under a name that must be free; durable on return.

    True if it was published, False if the name was taken (the file there is left as it is).
    OSErrors propagate; the temp file is removed in any case.
    """
    temp = _write_temp(path, data)
    try:
        published = _claim(temp, path)
    finally:
        temp.unlink(missing_ok=True)
    if published:
        fsync_dir(path.parent)
    return published


def replace(path: Path, data: bytes) -> None:
    """Write `data` over whatever stands under the name: the name is never free. Durable on return."""
    temp = _write_temp(path, data)
    try:
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    fsync_dir(path.parent)


def publish_file(temp: Path, path: Path, *, replace: bool) -> bool:
    """As `publish_new` (or `replace`), for a file of the same directory that is written already."""
    fsync_file(temp)
    if replace:
        temp.replace(path)
    elif not _claim(temp, path):
        return False
    fsync_dir(path.parent)
    return True


def make_dir(path: Path) -> None:
    """Create a directory durably: a file in it is only as durable as the directory's own entry."""
    if path.is_dir():
        return
    make_dir(path.parent)
    path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_temps(root: Path) -> int:
    """Remove what killed writers left in `root` and its folders; returns how many. Only the lock's holder may."""
    found = 0
    for folder in (root, *(item for item in root.iterdir() if item.is_dir())) if root.is_dir() else ():
        for entry in os.scandir(folder):
            if entry.name.startswith(_TEMP):
                Path(entry.path).unlink(missing_ok=True)
                found += 1
    return found


def temp_name(folder: Path) -> Path:
    """A name for a file in the making, which `remove_temps` knows."""
    return folder / f"{_TEMP}{uuid4().hex}"


def _write_temp(path: Path, data: bytes) -> Path:
    temp = temp_name(path.parent)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        temp.unlink(missing_ok=True)
        raise
    return temp


def _claim(temp: Path, path: Path) -> bool:
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_noreplace(temp, path)
    return True


def _rename_noreplace(temp: Path, path: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, "neither hard links nor renameat2", str(path))
    done = call(_AT_FDCWD, os.fsencode(temp), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, os.strerror(code), str(path))
