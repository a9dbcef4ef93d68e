"""Ray Data with the light functions of `rankers`: `map_batches` of a function, `write_parquet`.

`--blocks 0` leaves blocks and files as Ray Data makes them; else `repartition(blocks)` before the function, which
gives as many files. With `--tally` the function is the one of `Tallied`, else the one of `Length`. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import ray.data

from tests.benchmarks.rankers import CHUNK, hashed, tally
from tests.benchmarks.ray_data import Batch, keep_checkpoints, log_of, note, start, steady_seconds


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--tally", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--checkpoints", action="store_true")
    args = parser.parse_args()
    start(args.out)
    if args.checkpoints:
        keep_checkpoints(args.out)
    documents = ray.data.read_parquet(args.corpus)
    if args.blocks:
        documents = documents.repartition(args.blocks)
    function = (
        partial(score_tallied, log=log_of(args.out), path=args.tally, rounds=args.rounds)
        if args.tally
        else partial(score, log=log_of(args.out))
    )
    documents.map_batches(function).write_parquet(str(args.out / "scores"))
    print(json.dumps({"steady_s": steady_seconds(args.out)}))


def score(batch: Batch, *, log: Path) -> Batch:
    """The length of each text."""
    note(log)
    return _scored(batch, [float(len(text)) for text in batch["text"]])


def score_tallied(batch: Batch, *, log: Path, path: Path, rounds: int) -> Batch:
    """The hash of each text, tallied as often as `rescore` does."""
    note(log)
    texts = list(batch["text"])
    scores: list[float] = []
    for at in range(0, len(texts), CHUNK):
        chunk = texts[at : at + CHUNK]
        scores += [hashed(text, rounds) for text in chunk]
        tally(path, len(chunk))
    return _scored(batch, scores)


def _scored(batch: Batch, scores: list[float]) -> Batch:
    return {"doc_id": batch["doc_id"], "score": np.asarray(scores, dtype=np.float32)}


if __name__ == "__main__":
    main()
