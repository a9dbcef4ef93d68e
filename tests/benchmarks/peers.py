"""Documents per second: `rescore` beside what else one would use, and below the ceiling of forward passes alone.

`make bench-peers`, or `python -m tests.benchmarks.peers --corpus short --dtype float32 --rounds 2`. Every contender
gets the same Parquet, checkpoint, dtype and cores, and runs in processes of its own, start-up included; they
alternate within a round, and every second round goes backwards. Every score is compared with those of
`CrossEncoder.predict`. Prints Markdown; nothing is gated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import duckdb

from tests.benchmarks import corpora
from tests.benchmarks.contenders import CEILING, OURS, PREDICT, Bench, Run, contenders, sweep
from tests.benchmarks.tables import cores, header, progress, spread, table

_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

Runs = dict[str, list[Run]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", default="both", choices=["short", "long", "both"])
    parser.add_argument("--dtype", default="both", choices=["float32", "bfloat16", "both"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--docs-short", type=int, default=1500)
    parser.add_argument("--docs-long", type=int, default=240)
    args = parser.parse_args()
    names = ["short", "long"] if args.corpus == "both" else [args.corpus]
    dtypes = ["float32", "bfloat16"] if args.dtype == "both" else [args.dtype]
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        root = Path(folder)
        checkpoint = corpora.build_checkpoint(root / "checkpoint")
        header(f"Rounds: {args.rounds}.")
        for name in names:
            docs = args.docs_short if name == "short" else args.docs_long
            corpus = corpora.build(name, docs, checkpoint, root / name)
            for dtype in dtypes:
                folder_of = root / f"{name}-{dtype}"
                folder_of.mkdir()
                compare(Bench.of(corpus, checkpoint, dtype, folder_of, cores()), args.rounds)


def compare(bench: Bench, rounds: int) -> None:
    """All contenders over one corpus in one dtype."""
    progress(f"{bench.corpus.name}, {bench.dtype}: looking for the best batch size of predict")
    bench, swept = sweep(bench)
    runs: Runs = {}
    differences: list[float] = []
    for n in range(rounds):
        order = contenders(bench)
        for name, run in order if n % 2 == 0 else reversed(order):
            progress(f"{bench.corpus.name}, {bench.dtype}, round {n + 1} of {rounds}: {name}")
            corpora.read(bench.corpus.path)  # warm, for everybody
            done = run(bench, n)
            runs.setdefault(name, []).append(done)
            differences.append(_difference(bench, name, done, runs[PREDICT][0]))
    _report(bench, runs, swept, max(differences))


def _difference(bench: Bench, name: str, run: Run, reference: Run) -> float:
    """The largest difference from the reference. Ends the program unless all scored the same documents alike."""
    row = duckdb.execute(
        "WITH a AS (FROM read_parquet(?)), b AS (FROM read_parquet(?))"
        " SELECT (SELECT count(*) FROM b), (SELECT count(DISTINCT doc_id) FROM b), count(*),"
        " max(abs(a.score - b.score)) FROM a JOIN b USING (doc_id)",
        [reference.scores, run.scores],
    ).fetchone()
    assert row is not None
    if row[:3] != (bench.corpus.docs,) * 3 or not row[3] <= _TOLERANCE[bench.dtype]:
        sys.exit(
            f"{name}: {row[0]} rows, {row[1]} documents, {row[2]} in common of {bench.corpus.docs}; "
            f"largest difference {row[3]}"
        )
    return float(row[3])


def _report(bench: Bench, runs: Runs, swept: str, difference: float) -> None:
    docs = bench.corpus.docs
    print(f"**{bench.corpus.name}, {bench.dtype}**: {docs:,} documents, `max_length` {bench.corpus.max_length}.\n")
    table(
        ["", "docs/s, end to end", "docs/s, once started", "start-up and end, s", "peak memory, GB"],
        [[name, *_cells(done, docs)] for name, done in runs.items()],
    )
    ours = runs[OURS]
    table(
        ["`rescore run` divided by", "end to end", "once started"],
        [[name, *_ratios(ours, done)] for name, done in runs.items() if name != OURS],
    )
    print(f"Scores agree with `CrossEncoder.predict` to {difference:.1e}, {docs:,} documents each, none twice.")
    print(f"Batch sizes of `predict`: {swept}.")
    for line in (run.notes for name in (CEILING, OURS) for run in runs[name][:1]):
        print(line)
    print(flush=True)


def _cells(runs: Sequence[Run], docs: int) -> list[str]:
    alone = [run.alone for run in runs]
    return [
        "–" if any(alone) else spread([docs / run.measured.seconds for run in runs], ".1f"),
        spread([docs / run.steady_s for run in runs], ".1f"),
        "–" if any(alone) else spread([run.measured.seconds - run.steady_s for run in runs], ".1f"),
        spread([run.measured.peak_bytes / 1e9 for run in runs], ".2f"),
    ]


def _ratios(ours: Sequence[Run], theirs: Sequence[Run]) -> list[str]:
    end_to_end = median(run.measured.seconds for run in theirs) / median(run.measured.seconds for run in ours)
    steady = median(run.steady_s for run in theirs) / median(run.steady_s for run in ours)
    return ["–" if theirs[0].alone else f"{end_to_end:.2f}", f"{steady:.2f}"]


if __name__ == "__main__":
    main()
