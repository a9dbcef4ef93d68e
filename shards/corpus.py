"""The corpus: which files there are, and what is in them."""

from __future__ import annotations

import glob
from pathlib import Path

from shards.errors import CorpusError
from shards.fingerprint import FingerprintCache, fingerprint
from shards.formats import Format, belongs
from shards.queries import read_queries
from shards.reader import Reader, ShardRows

__all__ = ["FingerprintCache", "Reader", "ShardRows", "fingerprint", "list_files", "read_queries"]


def list_files(path: str, wanted: Format = "auto") -> list[str]:
    """The files of a file, directory (recursive) or glob: absolute, sorted, each once.

    A directory's are those whose extension is that of the wanted format (auto: of any format), without names
    that begin with '.' or '_', as every reader of Parquet does. Raises CorpusError if there is none.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        found = [
            str(item)
            for item in root.rglob("*")
            if belongs(item, wanted) and _visible(item, root) and item.is_file()
        ]
    elif root.is_file():
        found = [str(root)]
    else:
        found = [item for item in glob.glob(str(root), recursive=True) if Path(item).is_file()]
    if not found:
        raise CorpusError(f"no corpus file: {path}")
    return sorted({str(Path(item).absolute()) for item in found})


def _visible(item: Path, root: Path) -> bool:
    return not any(part[0] in "._" for part in item.relative_to(root).parts)
