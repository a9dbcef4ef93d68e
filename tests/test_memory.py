"""Ray's memory monitor, for real."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.projects import Project
from tests.test_cluster import clean_env

pytestmark = pytest.mark.ray


def test_memory_monitor_kills_a_document_that_eats_memory_is_found_and_costs_one_document(project: Project) -> None:
    memory = psutil.virtual_memory()
    if memory.available < 8e9:
        pytest.skip("needs 8 GB of free memory")
    texts = ["x"] * 30
    texts[17] = "eat"
    project.corpus(texts)
    project.config["ranker"]["class"] = "tests.rankers:Eater"
    project.config["workers"] = {"count": 1, "cpus": 0.5}
    env = {
        **clean_env(Path(os.environ["HOME"])),
        "RAY_TMPDIR": "/tmp/ray",
        "RAY_ADDRESS": "local",
        "RAY_memory_usage_threshold": str((memory.total - memory.available + 2.5e9) / memory.total),
        "RAY_memory_monitor_refresh_ms": "100",
    }
    done = subprocess.run(
        project.command("run", project.write_config()),
        env=env, cwd=project.root, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(29, 29)]
    assert project.sql("SELECT doc_id, stage FROM dead_letters") == [("d17", "worker")]
    # Charged to the infrastructure at first, and to nobody's attempts ever.
    assert project.sql("SELECT count(*) >= 2 FROM attempts WHERE event = 'released'") == [(True,)]
    assert project.sql("SELECT count(*) FROM attempts WHERE event = 'failed'") == [(0,)]
    assert project.verify()["ok"]
