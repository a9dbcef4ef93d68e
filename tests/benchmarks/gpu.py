"""`rescore` on one GPU, and how much of it is used; `CrossEncoder.predict` beside it.

`make bench-gpu`, or `python -m tests.benchmarks.gpu`. Two models: MiniLM-L6 with its weights, and one of the shape
of XLM-RoBERTa-large, 560 million parameters, with random weights and MiniLM's tokenizer (its vocabulary of 250,000
only makes the table of embeddings larger). Two corpora: *short* with `max_length` 256, *long* with 512, as in
`peers`. In bfloat16. Prints Markdown; nothing is gated. `--device cpu --smoke` runs the same code with two layers
and few documents, so that it is known to work before a GPU is rented.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import torch

from tests.benchmarks import corpora
from tests.benchmarks.corpora import QUERY, Corpus
from tests.benchmarks.flops import model_flops, square_peak
from tests.benchmarks.measure import measure
from tests.benchmarks.ours import Rescored, rescore
from tests.benchmarks.tables import header, progress, table

_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is, by model and corpus."""

    device: str
    docs: dict[tuple[str, str], int]
    layers: dict[str, int]
    hidden: int
    vocabulary: int
    sample: int
    peak_size: int


_FULL = Scale(
    device="cuda",
    docs={
        ("MiniLM-L6", "short"): 100_000,
        ("MiniLM-L6", "long"): 30_000,
        ("XLM-R-large", "short"): 20_000,
        ("XLM-R-large", "long"): 6_000,
    },
    layers={"MiniLM-L6": 6, "XLM-R-large": 24},
    hidden=1024,
    vocabulary=250_002,
    sample=4096,
    peak_size=8192,
)
_SMOKE = Scale(
    device="cpu",
    docs={(model, name): 24 for model in ("MiniLM-L6", "XLM-R-large") for name in ("short", "long")},
    layers={"MiniLM-L6": 2, "XLM-R-large": 2},
    hidden=128,
    vocabulary=30_522,
    sample=16,
    peak_size=1024,
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="two layers, few documents")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench-gpu: there is no CUDA device here (--device cpu --smoke tries the code without one)")
    if args.device == "cpu" and not args.smoke:
        sys.exit("bench-gpu: on a CPU only with --smoke; `make bench-peers` is for CPUs")
    scale = _SMOKE if args.smoke else _FULL
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        measure_all(scale, args.device, Path(folder))


def measure_all(scale: Scale, device: str, root: Path) -> None:
    """Every model over every corpus."""
    peak = square_peak(_DTYPE, device, scale.peak_size)
    checkpoints = {
        "MiniLM-L6": corpora.build_checkpoint(root / "minilm", layers=scale.layers["MiniLM-L6"]),
        "XLM-R-large": _xlmr(root / "xlmr", root / "minilm", scale),
    }
    rows = []
    for (model, name), docs in scale.docs.items():
        place = root / f"{model}-{name}"
        place.mkdir()
        progress(f"{model}, {name}: building {docs:,} documents")
        corpus = corpora.build(name, docs, checkpoints[model], place / "corpus")
        progress(f"{model}, {name}: CrossEncoder.predict")
        batch, loop_s = _predict(scale, device, corpus, checkpoints[model], place)
        progress(f"{model}, {name}: rescore")
        ours = _rescore(device, corpus, checkpoints[model], place)
        cells = _cells(corpus, ours, str(checkpoints[model]), peak)
        loop = corpus.docs / loop_s
        rows.append([f"{model}, {name}", *cells, f"{loop:,.1f} ({batch})", f"{loop_s / ours.steady_s:.2f}"])
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU, a smoke test: figures mean nothing"
    header(f"{name}; {_DTYPE} matrix multiplication at {scale.peak_size}³: {peak / 1e12:.3g} TFLOP/s.")
    columns = [
        "documents",
        "docs/s, once started",
        "tokens/s",
        "of the peak",
        "in forward passes",
        "end to end, docs/s",
    ]
    table(["", *columns, "`predict` docs/s (its best batch size)", "rescore / predict"], rows)
    print("Tokens, and the share of the peak, are without padding. All but end to end is once started.")


def _predict(scale: Scale, device: str, corpus: Corpus, checkpoint: Path, place: Path) -> tuple[int, float]:
    """The best batch size of the loop, and its seconds over the corpus."""
    script = [sys.executable, "-m", "tests.benchmarks.predict_loop"]
    options = ["--max-length", str(corpus.max_length), "--dtype", _DTYPE, "--threads", "1", "--device", device]
    paths = [str(corpus.path), str(checkpoint)]
    swept = measure([*script, "sweep", *paths, *options, "--sample", str(scale.sample)])
    batch = int(next(iter(_last_line(swept.stdout)["rates"])))
    out = ["--out", str(place / "predict"), "--batch-size", str(batch)]
    return batch, _last_line(measure([*script, "loop", *paths, *options, *out]).stdout)["steady_s"]


def _rescore(device: str, corpus: Corpus, checkpoint: Path, place: Path) -> Rescored:
    return rescore(
        place / "rescore",
        corpus={"path": str(corpus.path), "query": QUERY},
        ranker={"checkpoint": str(checkpoint), "max_length": corpus.max_length, "dtype": _DTYPE},
        workers={"count": 1, "gpus": 1 if device == "cuda" else 0},
    )


def _cells(corpus: Corpus, ours: Rescored, checkpoint: str, peak: float) -> list[str]:
    lengths = [n for (n,) in duckdb.execute("SELECT n_tokens FROM read_parquet(?)", [ours.scores]).fetchall()]
    assert len(lengths) == corpus.docs
    return [
        f"{corpus.docs:,}",
        f"{corpus.docs / ours.steady_s:,.1f}",
        f"{sum(lengths) / ours.steady_s:,.0f}",
        f"{model_flops(checkpoint, lengths) / ours.steady_s / peak:.1%}",
        f"{ours.by_stage['forward'] / ours.steady_s:.0%}",
        f"{corpus.docs / ours.measured.seconds:,.1f}",
    ]


def _xlmr(path: Path, tokenizer: Path, scale: Scale) -> Path:
    """A model of that shape. Two segments and padding 0, as MiniLM's tokenizer has them."""
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=4 * scale.hidden,
        num_hidden_layers=scale.layers["XLM-R-large"],
        num_attention_heads=scale.hidden // 64,
        max_position_embeddings=514,
        type_vocab_size=2,
        pad_token_id=0,
        num_labels=1,
    )
    XLMRobertaForSequenceClassification(config).to(torch.bfloat16).save_pretrained(path)
    corpora.tokenizer(tokenizer).save_pretrained(path)
    return path


def _last_line(stdout: str) -> Any:
    return json.loads(stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
