"""Where everything lies under an output directory, and whether that directory can be used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from shards import files
from shards.errors import OutputError, UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(model_version: str) -> str:
    """Return the name if it is fit to be a directory's. Raises UsageError."""
    if not _NAME.fullmatch(model_version):
        raise UsageError(
            f"model_version {model_version!r}: 1 to 100 letters, digits, '.', '_' or '-',"
            " beginning with a letter or digit"
        )
    return model_version


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one output directory. `root` is absolute."""

    root: Path

    @property
    def private(self) -> Path:
        """What no other program should open."""
        return self.root / ".rescore"

    @property
    def live(self) -> Path:
        return self.private / "live.duckdb"

    @property
    def lock(self) -> Path:
        return self.private / "lock"

    @property
    def fingerprints(self) -> Path:
        return self.private / "fingerprints.json"

    @property
    def staged(self) -> Path:
        """Stand-ins for corpus files that are not Parquet, by their content and what is read of them."""
        return self.root / "staged"

    def stand_in(self, fingerprint: str) -> str:
        return str(self.staged / f"{fingerprint}.parquet")

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.duckdb"

    @property
    def plans(self) -> Path:
        return self.root / "plan"

    def plan_dir(self, model_version: str) -> Path:
        return self.plans / check_name(model_version)

    def epoch_dir(self, model_version: str, epoch: int) -> Path:
        return self.root / "scores" / check_name(model_version) / f"e{epoch}"

    def part(self, model_version: str, epoch: int, shard_id: str, generation: int) -> Path:
        folder = self.epoch_dir(model_version, epoch) / shard_id[:2]
        return folder / f"{shard_id}.g{generation}.parquet"

    def crash(self, run: int, worker: str) -> Path:
        """Where a worker writes its stacks if a fatal signal ends it."""
        return self.crashes / f"run{run}-{worker}.txt"

    @property
    def crashes(self) -> Path:
        """Of one run at a time; what matters stands in the dead letters."""
        return self.private / "crashes"

    def orders_dir(self, model_version: str) -> Path:
        return self.root / "orders" / check_name(model_version)

    @classmethod
    def open(cls, path: str | Path) -> Layout:
        """Make the directory usable for a run. Raises OutputError (one line) if it cannot be used."""
        layout = cls(Path(path).expanduser().absolute())
        if "?" in str(layout.root):  # DuckDB takes what follows for parameters, and puts its WAL elsewhere
            raise OutputError(f"an output's path cannot have a '?' in it: {layout.root}")
        try:
            for folder in (layout.private, layout.plans, layout.root / "scores", layout.root / "orders"):
                folder.mkdir(parents=True, exist_ok=True)
            layout._probe()
        except OSError as error:
            where = error.filename or layout.root
            raise OutputError(f"cannot write to output {layout.root}: {error.strerror} ({where})") from error
        return layout

    @classmethod
    def existing(cls, path: str | Path) -> Layout:
        """The output of an earlier run. Raises OutputError (one line) if there is none."""
        layout = cls(Path(path).expanduser().absolute())
        if not layout.root.is_dir():
            raise OutputError(f"no such output directory: {layout.root}")
        planned = layout.plans.is_dir() and any(layout.plans.glob("*/e*.parquet"))
        if not planned and not layout.manifest.is_file():
            raise OutputError(f"not an output of rescore (no manifest and no plan): {layout.root}")
        return layout

    def _probe(self) -> None:
        # The guarantee that a part is written once rests on this: a name that is taken must be refused.
        name = self.private / f"probe-{uuid4().hex}"
        try:
            if not files.publish_new(name, b"1") or files.publish_new(name, b"2"):
                raise OutputError(f"no create-only publish on the file system of {self.root}")
        finally:
            name.unlink(missing_ok=True)
