"""Projects on real Ray: a corpus, a configuration and the program, in a folder of a test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import yaml

from tests.outputs import write_corpus

REPO = Path(__file__).resolve().parents[1]


@dataclass
class Project:
    """A folder with a corpus and a configuration, and the program to run on it."""

    root: Path
    address: str
    config: dict[str, Any]

    @property
    def output(self) -> Path:
        return self.root / "out"

    @property
    def marks(self) -> Path:
        return self.root / "marks"

    def corpus(self, texts: list[Any], *, name: str = "a.parquet", group: int = 1000, first: int = 0) -> None:
        ids = [f"d{first + i}" for i in range(len(texts))]
        write_corpus(self.root / "corpus" / name, ids, group=group, text=texts)

    def command(self, *args: str) -> list[str]:
        return [sys.executable, str(REPO / "jobs" / "rescore.py"), *args]

    def env(self) -> dict[str, str]:
        return {**os.environ, "RAY_ADDRESS": self.address, "COLUMNS": "200"}

    def rescore(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args),
            capture_output=True,
            text=True,
            cwd=self.root,
            env=self.env(),
            timeout=120,
            check=False,
        )

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*args),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.root,
            env=self.env(),
        )

    def write_config(self) -> str:
        path = self.root / "config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return str(path)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.rescore("run", self.write_config(), *args)

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.output / "manifest.duckdb"), read_only=True) as connection:
            return connection.execute(query).fetchall()

    def verify(self) -> dict[str, Any]:
        done = self.rescore("verify", str(self.output), "--json")
        return json.loads(done.stdout)


def with_faults(project: Project) -> None:
    project.config["ranker"] |= {
        "class": "tests.rankers:Faults",
        "options": {"marks": str(project.marks), "output": str(project.output)},
    }


def wait_until(true: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """For what another process does; fails instead of hanging."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
