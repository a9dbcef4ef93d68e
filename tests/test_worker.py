"""The worker without Ray: what it refuses before its first lease."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.protocol import ErrorReport, WorkerInfo
from jobs.worker import Worker, WorkerSpec
from ranker.types import RankerSpec
from shards.types import CorpusSpec


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    """A worker sends the stacks of a fatal signal to a file of its own; this process keeps its own way."""
    yield
    faulthandler.enable()


def started(checkpoint: str, output: Path, query: str) -> WorkerInfo | ErrorReport:
    spec = WorkerSpec(
        worker="w1",
        output=str(output),
        corpus=CorpusSpec(path="corpus", id_column="doc_id", text_column="text"),
        id_type="string",
        query=query,
        queries=None,
        ranker=RankerSpec(kind="cross-encoder", checkpoint=checkpoint, max_length=16),
        device="cpu",
        threads=1,
        model_version="m-1",
        epoch=0,
        binding="b",
        label_scores=False,
        run=1,
    )
    return Worker(spec).start("node-1")


def test_worker_that_starts_tells_what_the_canaries_said(cross_encoder_path: str, tmp_path: Path) -> None:
    info = started(cross_encoder_path, tmp_path, "copy a file")
    assert isinstance(info, WorkerInfo)
    assert info.node == "node-1"
    assert info.preflight["canaries"] == 8


def test_worker_with_one_query_that_leaves_no_room_refuses_and_names_its_node(
    cross_encoder_path: str, tmp_path: Path
) -> None:
    error = started(cross_encoder_path, tmp_path, "copy a file to another directory " * 10)
    assert isinstance(error, ErrorReport)
    assert error.message.startswith("corpus.query cannot be used: QueryTooLong: ")
    assert error.node == "node-1"
