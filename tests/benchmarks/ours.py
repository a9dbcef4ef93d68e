"""`rescore run` as a user types it, and what its manifest says about it afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import yaml

from tests.benchmarks.measure import REPO, Measured, measure

MODEL_VERSION = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """`steady_s`: from the first lease to the last ack. `by_stage`: seconds, added over the workers."""

    measured: Measured
    steady_s: float
    by_stage: Mapping[str, float]
    output: Path

    @property
    def scores(self) -> str:
        """A glob of the parts."""
        return f"{self.output}/scores/{MODEL_VERSION}/e0/*/*.parquet"


def command(
    path: Path, *, corpus: Mapping[str, Any], ranker: Mapping[str, Any], workers: Mapping[str, Any]
) -> list[str]:
    """The command line of a run whose configuration and output are called `path`."""
    config = {
        "corpus": dict(corpus),
        "ranker": {"model_version": MODEL_VERSION, **ranker},
        "output": {"path": str(path)},
        "workers": dict(workers),
    }
    file = path.with_name(path.name + ".yaml")
    file.write_text(yaml.safe_dump(config))
    return [sys.executable, str(REPO / "jobs/rescore.py"), "run", str(file)]


def rescore(path: Path, **config: Mapping[str, Any]) -> Rescored:
    """Run it to its end and read the manifest."""
    measured = measure(command(path, **config))
    with duckdb.connect(str(path / "manifest.duckdb"), read_only=True) as connection:
        row = connection.execute(
            "SELECT (SELECT summary FROM runs ORDER BY run DESC LIMIT 1),"
            " epoch(max(happened_at) FILTER (event = 'done') - min(happened_at) FILTER (event = 'leased'))"
            " FROM attempts"
        ).fetchone()
    assert row is not None
    return Rescored(
        measured=measured, steady_s=row[1], by_stage=json.loads(row[0])["seconds_by_stage"], output=path
    )
