"""The ceiling: forward passes and nothing else, and what share of the machine's matrix multiplication they reach.

Everything is tokenised before the clock starts; pairs are sorted by length and cut into batches by a budget of
padded tokens. Budgets of 1,024, 2,048 and 4,096 are tried on a part of the corpus, for one process with all
threads and for one process a core with one thread each (which start together, at a barrier, and whose rates are
added). The best of the six then scores the whole corpus: that rate is the ceiling. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ranker.batching import batches
from tests.benchmarks.corpora import QUERY, read, tokenizer
from tests.benchmarks.flops import matmul_peak, model_flops

_OVERHEAD = 24
"""As `rescore` cuts on a CPU."""

BUDGETS = (1024, 2048, 4096)
_PART = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every process of a team is told once."""

    corpus: Path
    checkpoint: str
    max_length: int
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a process did between the barrier and its end."""

    rows: list[int]
    scores: list[float]
    seconds: float


def main() -> None:
    """Sweep, take the winner over the whole corpus, and write its scores: it must have done the same work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    task = Task(
        corpus=args.corpus,
        checkpoint=args.checkpoint,
        max_length=args.max_length,
        dtype=args.dtype,
        threads=args.threads,
    )
    with ExitStack() as stack:
        teams = [stack.enter_context(Team(task, size)) for size in sorted({1, args.threads})]
        swept = {(team, budget): team.rate(budget, _PART)[0] for team in teams for budget in BUDGETS}
        best, budget = max(swept, key=lambda key: swept[key])
        rate, passes = best.rate(budget, 1)
    _write(task, passes, args.out)
    flops = model_flops(args.checkpoint, _lengths(task))
    documents = sum(len(done.rows) for done in passes)
    torch.set_num_threads(args.threads)
    print(
        json.dumps(
            {
                "rate": rate,
                "processes": best.size,
                "threads": args.threads // best.size,
                "budget": budget,
                "swept": {f"{team.size}×{args.threads // team.size}, {b}": r for (team, b), r in swept.items()},
                "gflops": flops / documents * rate / 1e9,
                "peak_gflops": matmul_peak(args.checkpoint, args.dtype) / 1e9,
            }
        )
    )


class Team:
    """`size` processes that share the batches of a pass."""

    def __init__(self, task: Task, size: int) -> None:
        self.size = size
        context = mp.get_context("spawn")
        self._barrier = context.Barrier(size)  # kept: its semaphore goes with the last reference
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(target=_member, args=(task, rank, size, theirs, self._barrier), daemon=True)
            process.start()
            self._processes.append(process)

    def rate(self, budget: int, every: int) -> tuple[float, list[Pass]]:
        """Documents per second over every n-th document, added over the processes."""
        for connection in self._connections:
            connection.send((budget, every))
        passes: list[Pass] = [connection.recv() for connection in self._connections]
        return sum(len(done.rows) / done.seconds for done in passes), passes

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _member(task: Task, rank: int, size: int, connection: Connection, barrier: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(task.threads // size)
    model = AutoModelForSequenceClassification.from_pretrained(task.checkpoint, dtype=getattr(torch, task.dtype))
    model.eval()
    encoded, pad = _encoded(task)
    lengths = np.array([len(ids) for ids in encoded["input_ids"]])
    _forward(model, _tensors(encoded, np.arange(min(8, len(lengths))), pad))
    while True:
        budget, every = connection.recv()
        rows = np.arange(0, len(lengths), every)
        mine = [rows[cut] for cut in batches(lengths[rows], budget, _OVERHEAD)][rank::size]
        tensors = [_tensors(encoded, batch, pad) for batch in mine]
        barrier.wait()
        start = time.perf_counter()
        outputs = [_forward(model, tensor) for tensor in tensors]
        seconds = time.perf_counter() - start
        scores = torch.cat(outputs).float().sigmoid().reshape(-1).tolist() if outputs else []
        connection.send(Pass(rows=[int(row) for batch in mine for row in batch], scores=scores, seconds=seconds))


def _forward(model: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**tensors).logits  # [rows, 1]
    return logits


def _tensors(encoded: dict[str, list[list[int]]], rows: Any, pad: int) -> dict[str, torch.Tensor]:
    """[rows, width] each: ids, types and mask of one batch, padded to its own widest."""
    width = max(len(encoded["input_ids"][row]) for row in rows)
    fill = {"input_ids": pad, "token_type_ids": 0, "attention_mask": 0}
    return {
        name: torch.tensor([values[row] + [fill[name]] * (width - len(values[row])) for row in rows])
        for name, values in encoded.items()
    }


def _encoded(task: Task) -> tuple[dict[str, list[list[int]]], int]:
    tokens = tokenizer(Path(task.checkpoint))
    texts = read(task.corpus)[1]
    return dict(
        tokens([QUERY] * len(texts), texts, truncation=True, max_length=task.max_length)
    ), tokens.pad_token_id


def _lengths(task: Task) -> list[int]:
    return [len(ids) for ids in _encoded(task)[0]["input_ids"]]


def _write(task: Task, passes: list[Pass], out: Path) -> None:
    ids = read(task.corpus)[0]
    rows = [row for done in passes for row in done.rows]
    scores = pa.array([score for done in passes for score in done.scores], pa.float32())
    out.mkdir(parents=True)
    pq.write_table(pa.table({"doc_id": [ids[row] for row in rows], "score": scores}), out / "scores.parquet")


if __name__ == "__main__":
    main()
