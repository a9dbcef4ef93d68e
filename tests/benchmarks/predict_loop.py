"""The contender that people write first: read Parquet, `CrossEncoder.predict`, write Parquet.

`loop` scores a corpus, 1,000 documents a call (`predict` sorts them by length itself). `sweep` looks for the
batch size that is fastest on every n-th document, after a warm-up, and prints the winner. Both in one process
with the threads that they are told. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sentence_transformers import CrossEncoder

from tests.benchmarks.corpora import QUERY, read

_SWEPT = (8, 16, 32, 64, 128)


def main() -> None:
    """`loop` or `sweep`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["loop", "sweep"])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sample", type=int, default=0, help="documents of a sweep")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = CrossEncoder(
        args.checkpoint,
        max_length=args.max_length,
        model_kwargs={"dtype": getattr(torch, args.dtype)},
        device=args.device,
    )
    if args.what == "loop":
        print(json.dumps({"steady_s": loop(model, args.corpus, args.out, args.batch_size)}))
    else:
        print(json.dumps({"rates": sweep(model, args.corpus, args.sample)}))


def loop(model: CrossEncoder, corpus: Path, out: Path, batch_size: int) -> float:
    """Seconds from the first read to the file written."""
    start = time.perf_counter()
    ids: list[str] = []
    scores: list[float] = []
    for path in sorted(corpus.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(1000):
            pairs = [(QUERY, text) for text in batch.column("text").to_pylist()]
            scores += model.predict(pairs, batch_size=batch_size, show_progress_bar=False).tolist()
            ids += map(str, batch.column("doc_id").to_pylist())
    out.mkdir(parents=True)
    pq.write_table(pa.table({"doc_id": ids, "score": pa.array(scores, pa.float32())}), out / "scores.parquet")
    return time.perf_counter() - start


def sweep(model: CrossEncoder, corpus: Path, sample: int) -> dict[int, float]:
    """Documents per second by batch size, the fastest first."""
    texts = read(corpus)[1]
    pairs = [(QUERY, text) for text in texts[:: max(1, len(texts) // sample)][:sample]]
    model.predict(pairs[:32], show_progress_bar=False)
    rates = {}
    for size in _SWEPT:
        start = time.perf_counter()
        model.predict(pairs, batch_size=size, show_progress_bar=False)
        rates[size] = len(pairs) / (time.perf_counter() - start)
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    main()
