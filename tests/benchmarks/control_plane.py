"""What the control plane costs: a ranker that costs nothing over a million tiny documents.

`make bench-control`, or `python -m tests.benchmarks.control_plane --docs 1000000`. `rescore` makes every part
durable (fsync, then its name) and every event a row of the manifest, and verifies everything at the end; Ray Data
runs the same function and writes its files, as few as it likes or a thousand. Two sizes of corpus show whether the
driver's memory grows with it. Prints Markdown; nothing is gated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.measure import Measured, measure, private_token
from tests.benchmarks.ours import rescore
from tests.benchmarks.tables import header, progress, spread, table

_FILES = 10
_RANKER = {"kind": "custom", "class": "tests.benchmarks.rankers:Length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run; `files`: how many Parquet files have the results."""

    docs: int
    measured: Measured
    steady_s: float
    files: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        root = Path(folder)
        few, many = build(args.docs // 4, root / "few"), build(args.docs, root / "many")
        contenders: list[tuple[str, Callable[[Path], Run]]] = [
            ("`rescore run`", lambda out: _ours(few, args.docs // 4, out)),
            ("`rescore run`", lambda out: _ours(many, args.docs, out)),
            ("Ray Data, files as it makes them", lambda out: _ray_data(many, args.docs, out, 0)),
            ("Ray Data, `repartition(1000)`", lambda out: _ray_data(many, args.docs, out, 1000)),
        ]
        runs: list[list[Run]] = [[] for _ in contenders]
        for n in range(args.rounds):
            for i, (name, run) in enumerate(contenders):
                progress(f"control plane, round {n + 1} of {args.rounds}: {name}")
                runs[i].append(run(root / f"out-{n}-{i}"))
        header("A ranker that returns the length of the text.")
        columns = ["documents", "docs/s, end to end", "docs/s, once started", "peak memory of all, GB"]
        table(
            ["", *columns, "of the driver alone, MB", "files"],
            [[name, *_cells(done)] for (name, _), done in zip(contenders, runs, strict=True)],
        )


def build(docs: int, path: Path, files: int = _FILES) -> Path:
    """`docs` documents of 16 to 81 characters in ten files, in row groups of 100,000."""
    path.mkdir(parents=True)
    for number, rows in enumerate(np.array_split(np.arange(docs), files)):
        ids = [f"{row:07}" for row in rows]
        columns = {"doc_id": ids, "text": [f"document {i}" + " word" * (int(i) % 14) for i in ids]}
        pq.write_table(pa.table(columns), path / f"part-{number:03}.parquet", row_group_size=100_000)
    return path


def _ours(corpus: Path, docs: int, out: Path) -> Run:
    done = rescore(out, corpus={"path": str(corpus), "query": "q"}, ranker=_RANKER, workers={})
    return _checked(docs, done.measured, done.steady_s, done.scores)


def _ray_data(corpus: Path, docs: int, out: Path, blocks: int) -> Run:
    command = [sys.executable, "-m", "tests.benchmarks.ray_light", str(corpus), "--out", str(out)]
    done = measure([*command, "--blocks", str(blocks)], env=private_token())
    steady: float = json.loads(done.stdout.strip().splitlines()[-1])["steady_s"]
    return _checked(docs, done, steady, f"{out}/scores/*.parquet")


def _checked(docs: int, measured: Measured, steady_s: float, scores: str) -> Run:
    row = duckdb.execute(
        "SELECT count(*), count(DISTINCT doc_id), count(DISTINCT filename) FROM read_parquet(?, filename := true)",
        [scores],
    ).fetchone()
    assert row is not None
    if row[:2] != (docs, docs):
        sys.exit(f"{scores}: {row[0]} rows, {row[1]} documents of {docs}")
    return Run(docs=docs, measured=measured, steady_s=steady_s, files=row[2])


def _cells(runs: list[Run]) -> list[str]:
    return [
        f"{runs[0].docs:,}",
        spread([run.docs / run.measured.seconds for run in runs], ",.0f"),
        spread([run.docs / run.steady_s for run in runs], ",.0f"),
        spread([run.measured.peak_bytes / 1e9 for run in runs], ".2f"),
        spread([run.measured.root_peak_bytes / 1e6 for run in runs], ".0f"),
        f"{runs[0].files:,}",
    ]


if __name__ == "__main__":
    main()
