"""One experiment: a corpus with poison in it, the program that scores it, and a count of what came out."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import duckdb
import yaml

from tests.chaos.cluster import REPO, PrivateCluster
from tests.chaos.rankers import expected
from tests.outputs import write_corpus

MODEL_VERSION = "hash-1"
_SAMPLE = 40
_LETTERS = """
SELECT l.doc_id, s.start, l.docs FROM dead_letters l
JOIN shards s USING (model_version, epoch, shard_id, generation) WHERE l.state = 'dead'
"""
_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of it."""

    docs: int = 2000
    shard: int = 10
    poison_every: int = 1000
    rounds: int = 20_000
    workers: int = 4
    seed: int = 1
    max_kills: int = 200

    @property
    def poison(self) -> int:
        return self.docs // self.poison_every


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What an experiment did and left, in documents where nothing else is said."""

    scenario: str
    kills: int
    attempts: int
    """Leases, searches for killers included."""
    redone: int
    """Scored beyond the first time."""
    scored: int
    dead: int
    innocents: int
    """Dead, and not poison."""
    lost: int
    doubled: int
    changed: int
    """Parts that were there once and are gone or different."""
    seconds: float
    exit: int
    verified: bool
    wrong: int = 0
    """Of a sample: scores that are not what the ranker says."""

    @property
    def clean(self) -> bool:
        return self.verified and not (self.innocents or self.lost or self.doubled or self.changed or self.wrong)

    @classmethod
    def header(cls) -> str:
        names = [f.name for f in fields(cls) if f.name != "wrong"]
        return "| " + " | ".join(names) + " |\n|" + "---|" * len(names)

    def line(self) -> str:
        verdict = "yes" if self.verified else "no"
        cells: list[Any] = [self.scenario, self.kills, self.attempts, self.redone, self.scored, self.dead]
        cells += [self.innocents, self.lost, self.doubled, self.changed, f"{self.seconds:.0f}", self.exit, verdict]
        return "| " + " | ".join(f"{c:,}" if isinstance(c, int) else c for c in cells) + " |"


@dataclass(slots=True)
class Arena:
    """An experiment in folder `root` on `cluster`. `protocol`: see tests/chaos/protocols.py."""

    root: Path
    cluster: PrivateCluster
    scale: Scale
    protocol: str = "honest"
    kills: int = 0
    began: float = field(default_factory=time.monotonic)
    random: random.Random = field(init=False)
    driver: subprocess.Popen[bytes] | None = None
    seen: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.scale.seed)
        (self.root / "tally").mkdir(parents=True)
        n = self.scale.docs
        write_corpus(self.root / "corpus.parquet", range(n), group=n, text=[self.text(i) for i in range(n)])
        (self.root / "config.yaml").write_text(yaml.safe_dump(self._config()))

    def text(self, doc_id: int) -> str:
        return f"{'poison' if self.is_poison(doc_id) else 'document'} {doc_id}"

    def is_poison(self, doc_id: int) -> bool:
        return doc_id % self.scale.poison_every == self.scale.poison_every - 1

    def _config(self) -> dict[str, Any]:
        options = {"tally": str(self.root / "tally"), "rounds": self.scale.rounds}
        return {
            "corpus": {"path": str(self.root / "corpus.parquet"), "query": "q", "shard_size": self.scale.shard},
            "ranker": {
                "kind": "custom",
                "class": "tests.chaos.rankers:Hash",
                "options": options,
                "model_version": MODEL_VERSION,
            },
            "output": {"path": str(self.output)},
            "workers": {"count": self.scale.workers, "cpus": 0.5},
        }

    @property
    def output(self) -> Path:
        return self.root / "out"

    # -- the program ---------------------------------------------------------------------------------

    def start(self) -> subprocess.Popen[bytes]:
        """Start the driver, for the first time or again."""
        command = [
            sys.executable,
            "-m",
            "tests.chaos.protocols",
            self.protocol,
            "run",
            str(self.root / "config.yaml"),
        ]
        with (self.root / "log").open("ab") as log:
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, env=self._env(), cwd=self.root)
        return self.driver

    def _env(self) -> dict[str, str]:
        return {**self.cluster.env, "RAY_ADDRESS": self.cluster.address}

    @property
    def running(self) -> bool:
        assert self.driver is not None
        assert time.monotonic() - self.began < _TIMEOUT_S, f"no end in sight: see {self.root / 'log'}"
        return self.driver.poll() is None

    def parts(self) -> int:
        """How many parts stand; remembers them, to see later that none has changed."""
        found = 0
        for path in self.output.glob(f"scores/{MODEL_VERSION}/e0/[0-9a-f][0-9a-f]/*.parquet"):
            found += 1
            if path not in self.seen:
                self.seen[path] = _identity(path)
        return found

    def wait_to_kill(self, more: int) -> bool:
        """Until so many more parts stand than now, and more kills are allowed. False if the run ended before."""
        wanted = self.parts() + more
        while self.running:
            if self.parts() >= wanted and self.kills < self.scale.max_kills:
                return True
            time.sleep(0.01)
        return False

    def stop(self) -> None:
        """kill -9 to the driver, if it still runs."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()

    # -- the count, from the files alone -------------------------------------------------------------

    def row(self, scenario: str) -> Row:
        """What the ended run has left. Counted by SQL over the files, not by the program's own verification;
        that one is asked as well."""
        assert self.driver is not None
        seconds = time.monotonic() - self.began
        parts = f"'{self.output}/scores/{MODEL_VERSION}/e0/*/*.parquet'"
        rows = _sql(f"SELECT doc_id, score FROM read_parquet({parts})")
        scored = dict(rows)
        manifest = str(self.output / "manifest.duckdb")
        letters = _sql(_LETTERS, manifest)
        # A shard that is dead as a whole names no document; ids are row numbers here.
        dead = [i for doc, start, n in letters for i in (range(start, start + n) if doc is None else [int(doc)])]
        self.parts()
        sample = self.random.sample(sorted(scored), min(_SAMPLE, len(scored)))
        return Row(
            scenario=scenario,
            kills=self.kills,
            attempts=_sql("SELECT count(*) FROM attempts WHERE event = 'leased'", manifest)[0][0],
            redone=sum(p.stat().st_size for p in (self.root / "tally").iterdir()) - len(scored),
            scored=len(scored),
            dead=len(dead),
            innocents=sum(not self.is_poison(i) for i in dead),
            lost=self.scale.docs - len(scored.keys() | set(dead)),
            doubled=len(rows) - len(scored) + len(dead) - len(set(dead)) + len(scored.keys() & set(dead)),
            changed=sum(_identity(path) != was for path, was in self.seen.items()),
            seconds=seconds,
            exit=self.driver.returncode,
            verified=self._verified(),
            wrong=sum(scored[i] != expected(self.text(i), self.scale.rounds) for i in sample),
        )

    def _verified(self) -> bool:
        command = [sys.executable, str(REPO / "jobs" / "rescore.py"), "verify", str(self.output), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=self._env(), timeout=120, check=False)
        return bool(done.stdout and json.loads(done.stdout)["ok"])


def _identity(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _sql(query: str, database: str = ":memory:") -> list[tuple[Any, ...]]:
    with duckdb.connect(database, read_only=database != ":memory:") as connection:
        return connection.execute(query).fetchall()
