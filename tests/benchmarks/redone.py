"""Work that is done again after a kill -9 of the driver at 60 %, and what was kept.

`make bench-redone`, or `python -m tests.benchmarks.redone --docs 100000`. A light ranker keeps a tally of what it
has scored, outside of everything. When 60 % of the documents are in the tally, the driver gets kill -9, and then
every process that it has started, its own Ray included; when all are gone, the same command runs to its end. *Kept*
are the documents that the second run does not score; *redone* those that were scored more than once. `rescore` as
it comes, against Ray Data with its checkpoints at three sizes of block. Prints Markdown; nothing is gated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from tests.benchmarks import ours
from tests.benchmarks.control_plane import build
from tests.benchmarks.measure import REPO, environment, kill_tree, private_token
from tests.benchmarks.rankers import tallied
from tests.benchmarks.tables import header, progress, table

_SHARE = 0.6
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command that can be started again, its tally, and a glob of its results."""

    command: list[str]
    tally: Path
    scores: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Documents, and seconds of the two runs."""

    at_kill: int
    kept: int
    redone: int
    missing: int
    doubled: int
    seconds: tuple[float, float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=int, default=100_000)
    parser.add_argument("--hashes", type=int, default=800, help="rounds of SHA-256 a document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        root = Path(folder)
        corpus = build(args.docs, root / "corpus")
        contenders: list[tuple[str, Callable[[Path], Job]]] = [
            ("`rescore run`", lambda out: _ours(corpus, out, args.hashes)),
            ("Ray Data, its checkpoints, blocks as it makes them", lambda out: _ray(corpus, out, args.hashes, 0)),
            ("Ray Data, its checkpoints, 100 blocks", lambda out: _ray(corpus, out, args.hashes, 100)),
            ("Ray Data, its checkpoints, 1,000 blocks", lambda out: _ray(corpus, out, args.hashes, 1000)),
        ]
        results = []
        for i, (name, job) in enumerate(contenders):
            progress(f"redone: {name}")
            results.append(kill_and_resume(job(root / f"out-{i}"), args.docs))
        header(f"{args.docs:,} documents, {args.hashes} rounds of SHA-256 each; kill -9 at {_SHARE:.0%}.")
        columns = ["scored at the kill", "kept", "redone", "missing", "doubled", "first run, s", "second run, s"]
        table(["", *columns], [[name, *_cells(r)] for (name, _), r in zip(contenders, results, strict=True)])


def kill_and_resume(job: Job, docs: int) -> Result:
    """The first run to 60 %, the second to its end."""
    began = time.monotonic()
    driver = _start(job)
    while tallied(job.tally) < _SHARE * docs:
        if driver.poll() is not None or time.monotonic() - began > _PATIENCE_S:
            kill_tree(driver)
            sys.exit(f"{' '.join(job.command)} ended before it could be killed:\n{_output(job)}")
        time.sleep(0.005)
    kill_tree(driver)
    first, at_kill, again = time.monotonic() - began, tallied(job.tally), time.monotonic()
    if _start(job).wait(_PATIENCE_S):
        sys.exit(f"{' '.join(job.command)} failed when it was started again:\n{_output(job)}")
    second, total = time.monotonic() - again, tallied(job.tally)
    rows, distinct = duckdb.execute(  # type: ignore[misc]
        "SELECT count(*), count(DISTINCT doc_id) FROM read_parquet(?)", [job.scores]
    ).fetchone()
    return Result(
        at_kill=at_kill,
        kept=docs - (total - at_kill),
        redone=total - docs,
        missing=docs - distinct,
        doubled=rows - distinct,
        seconds=(first, second),
    )


def _ours(corpus: Path, out: Path, hashes: int) -> Job:
    tally = out.with_suffix(".tally")
    ranker = {
        "kind": "custom",
        "class": "tests.benchmarks.rankers:Tallied",
        "options": {"tally": str(tally), "rounds": hashes},
    }
    command = ours.command(out, corpus={"path": str(corpus), "query": "q"}, ranker=ranker, workers={})
    return Job(command=command, tally=tally, scores=f"{out}/scores/{ours.MODEL_VERSION}/e0/*/*.parquet")


def _ray(corpus: Path, out: Path, hashes: int, blocks: int) -> Job:
    tally = out.with_suffix(".tally")
    command = [sys.executable, "-m", "tests.benchmarks.ray_light", str(corpus), "--out", str(out), "--checkpoints"]
    options = ["--blocks", str(blocks), "--tally", str(tally), "--rounds", str(hashes)]
    return Job(command=[*command, *options], tally=tally, scores=f"{out}/scores/*.parquet")


def _start(job: Job) -> subprocess.Popen[bytes]:
    env = environment(**({} if "ray_light" not in job.command[2] else private_token()))
    with _log(job).open("ab") as log:
        return subprocess.Popen(job.command, cwd=REPO, env=env, stdout=log, stderr=log)


def _log(job: Job) -> Path:
    return job.tally.with_suffix(".log")


def _output(job: Job) -> str:
    return _log(job).read_text(errors="replace")[-8000:]


def _cells(result: Result) -> list[str]:
    counts = (result.at_kill, result.kept, result.redone, result.missing, result.doubled)
    return [*(f"{count:,}" for count in counts), *(f"{seconds:.1f}" for seconds in result.seconds)]


if __name__ == "__main__":
    main()
