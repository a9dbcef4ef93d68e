"""The contender on the same scheduler: Ray Data, `map_batches` with an actor class, `write_parquet`.

*documented*: what the guides show: a class that loads the model, a pool that grows from one actor to one a
core, defaults elsewhere. (A pool that has one actor a core from the start never scores anything with Ray 2.60:
the actors hold every CPU, and the task that lists the files waits for one.) *tuned*: as somebody with
experience writes it. Ray is told of one CPU more, for listing, reading and writing, so that there is an actor a
core; threads are set by hand; the batch size is what the sweep found for one thread; there are as many blocks
as `rescore` has shards, so that nothing waits long for the last one. *checkpointed*: the tuned one with Ray
Data's own checkpoints.

The steady window goes from the first batch that any actor starts to the last file written. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data

from tests.benchmarks.corpora import QUERY

Batch = dict[str, Any]


class Scorer:
    """The documented way: load in `__init__`, score in `__call__`."""

    def __init__(self, checkpoint: str, max_length: int, dtype: str, batch_size: int, log: str) -> None:
        import torch
        from sentence_transformers import CrossEncoder

        self._batch_size, self._log = batch_size, Path(log)
        self._model = CrossEncoder(
            checkpoint, max_length=max_length, model_kwargs={"dtype": getattr(torch, dtype)}, device="cpu"
        )

    def __call__(self, batch: Batch) -> Batch:
        note(self._log)
        pairs = [(QUERY, text) for text in batch["text"]]
        scores = self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        return {"doc_id": batch["doc_id"], "score": np.asarray(scores, dtype=np.float32)}


class TunedScorer(Scorer):
    """One thread an actor, whatever the environment says."""

    def __init__(self, *args: Any) -> None:
        import torch

        torch.set_num_threads(1)
        super().__init__(*args)


def main() -> None:
    """Run one variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=["documented", "tuned", "checkpointed"])
    parser.add_argument("corpus")
    parser.add_argument("checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--actors", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block-rows", type=int, default=100)
    args = parser.parse_args()
    start(args.out, None if args.variant == "documented" else args.actors + 1)
    constructor = (args.checkpoint, args.max_length, args.dtype, args.batch_size, str(log_of(args.out)))
    if args.variant == "documented":
        scored = ray.data.read_parquet(args.corpus).map_batches(
            Scorer,
            fn_constructor_args=constructor,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=args.actors),
        )
    else:
        if args.variant == "checkpointed":
            keep_checkpoints(args.out)
        blocks = ray.data.read_parquet(args.corpus).repartition(target_num_rows_per_block=args.block_rows)
        scored = blocks.map_batches(
            TunedScorer,
            fn_constructor_args=constructor,
            compute=ray.data.ActorPoolStrategy(size=args.actors),
            num_cpus=1,
        )
    scored.write_parquet(str(args.out / "scores"))
    print(json.dumps({"steady_s": steady_seconds(args.out)}))


def start(out: Path, cpus: int | None = None) -> None:
    """A Ray of this process's own, quiet; with `cpus`, it believes that there are so many."""
    (out / "log").mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False


def keep_checkpoints(out: Path) -> None:
    """Ray Data's checkpoints, by doc_id, beside the output; gone when the run succeeds, which is the default."""
    from ray.data.checkpoint import CheckpointConfig

    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="doc_id", checkpoint_path=str(out / "checkpoints")
    )


def log_of(out: Path) -> Path:
    """Where the batches of a run note their starts."""
    return out / "log"


def note(log: Path) -> None:
    """One line a batch, in a file a process."""
    with (log / str(os.getpid())).open("a") as file:
        file.write(f"{time.time()}\n")


def steady_seconds(out: Path) -> float:
    """From the first batch's start to the last file written."""
    first = min(float(path.read_text().split("\n", 1)[0]) for path in log_of(out).iterdir())
    last = max(path.stat().st_mtime for path in (out / "scores").rglob("*.parquet"))
    return last - first


if __name__ == "__main__":
    main()
