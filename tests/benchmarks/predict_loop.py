"""The contender: what people write first. Read Parquet, `CrossEncoder.predict` in batches of 32, write Parquet.

`python -m tests.benchmarks.predict_loop CORPUS CHECKPOINT OUT THREADS DTYPE QUERY`; prints its scoring seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sentence_transformers import CrossEncoder


def main(corpus: str, checkpoint: str, out: str, threads: str, dtype: str, query: str) -> None:
    """Score every document of `corpus`, 1,000 at a time."""
    torch.set_num_threads(int(threads))
    model = CrossEncoder(checkpoint, max_length=256, model_kwargs={"dtype": getattr(torch, dtype)}, device="cpu")
    start = time.perf_counter()
    ids: list[str] = []
    scores: list[float] = []
    for path in sorted(Path(corpus).glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(1000):
            pairs = [(query, text) for text in batch.column("text").to_pylist()]
            scores += model.predict(pairs, batch_size=32, show_progress_bar=False).tolist()
            ids += batch.column("doc_id").to_pylist()
    Path(out).mkdir(parents=True)
    pq.write_table(pa.table({"doc_id": ids, "score": pa.array(scores, pa.float32())}), f"{out}/scores.parquet")
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
