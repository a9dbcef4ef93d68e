"""How `rescore` scales on one machine: 1, 2 or more workers of one CPU each, and one worker of all CPUs.

`make bench-scaling`, or `python -m tests.benchmarks.scaling --workers 1,2`. The corpora and the checkpoint of
`peers`; rates are those between the first lease and the last ack. Where the rate per worker falls is the knee:
memory bandwidth and clocks are shared, whatever the number of cores. Prints Markdown; nothing is gated.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from tests.benchmarks import corpora
from tests.benchmarks.contenders import Bench
from tests.benchmarks.ours import Rescored, rescore
from tests.benchmarks.tables import cores, header, progress, spread, table

Shape = tuple[int, int]
"""Workers, and CPUs of each."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default=f"1,{cores()}", help="comma-separated")
    parser.add_argument("--corpus", default="both", choices=["short", "long", "both"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--docs-short", type=int, default=1000)
    parser.add_argument("--docs-long", type=int, default=160)
    args = parser.parse_args()
    shapes = [*((int(count), 1) for count in args.workers.split(",")), (1, cores())]
    sizes = {"short": args.docs_short, "long": args.docs_long}
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        root = Path(folder)
        checkpoint = corpora.build_checkpoint(root / "checkpoint")
        header(f"{args.dtype}, rounds: {args.rounds}.")
        for name, docs in sizes.items():
            if args.corpus in (name, "both"):
                corpus = corpora.build(name, docs, checkpoint, root / name)
                _scale(
                    Bench.of(corpus, checkpoint, args.dtype, root, cores()),
                    list(dict.fromkeys(shapes)),
                    args.rounds,
                )


def _scale(bench: Bench, shapes: list[Shape], rounds: int) -> None:
    runs: dict[Shape, list[Rescored]] = {shape: [] for shape in shapes}
    for n in range(rounds):
        for shape in shapes:
            progress(f"scaling, {bench.corpus.name}, round {n + 1} of {rounds}: {shape[0]} × {shape[1]} CPU")
            out = bench.root / f"{bench.corpus.name}-{n}-{shape[0]}x{shape[1]}"
            runs[shape].append(rescore(out, **bench.config(*shape)))
    alone = bench.corpus.docs / median(run.steady_s for run in runs[shapes[0]])
    print(f"**{bench.corpus.name}**: {bench.corpus.docs:,} documents.\n")
    table(
        ["workers × CPUs", "docs/s, once started", "a worker", f"against {shapes[0][0]} × {shapes[0][1]}"],
        [
            [f"{count} × {cpus}", *_cells(bench.corpus.docs, runs[count, cpus], count, alone)]
            for count, cpus in shapes
        ],
    )


def _cells(docs: int, runs: list[Rescored], count: int, alone: float) -> list[str]:
    rates = [docs / run.steady_s for run in runs]
    return [spread(rates, ".1f"), spread([rate / count for rate in rates], ".1f"), f"{median(rates) / alone:.2f}"]


if __name__ == "__main__":
    main()
