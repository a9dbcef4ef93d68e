"""The ways to a cluster: a Ray job on a head, a local one of the run's own, and what neither may leave behind."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import rankers
from tests.projects import REPO, Project, wait_until

pytestmark = pytest.mark.ray

RAY = str(Path(sys.executable).with_name("ray"))


def clean_env(home: Path) -> dict[str, str]:
    """A user's environment on a machine that has never run Ray: no token, no address, no session."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**env, "HOME": str(home), "RAY_TMPDIR": str(home / "ray")}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: Ray's sockets live below it, and their names must fit into 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="h", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def head(home: Path) -> Iterator[str]:
    """`ray start --head`, as a user types it; the address of its job server."""
    port = free_port()
    command = [RAY, "start", "--head", f"--port={free_port()}", f"--dashboard-port={port}", "--num-cpus=2"]
    # Its default port is taken by this session's cluster.
    command += [f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats"]
    try:
        subprocess.run(command, env=clean_env(home), stdout=subprocess.DEVNULL, check=True, timeout=60)
        wait_until(lambda: accepts(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        # `ray stop` would end every Ray process of the machine, this session's cluster too.
        for process in psutil.process_iter(["cmdline"]):
            if any(str(home) in argument for argument in process.info["cmdline"] or []):
                process.kill()


def accepts(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def submit(head: str, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", "submit", "--address", head, "--working-dir", str(REPO), "--"]
    command += [sys.executable, "jobs/rescore.py", *args]
    for _ in range(20):
        done = subprocess.run(
            command, env=clean_env(home), cwd=home, capture_output=True, text=True, timeout=120, check=False
        )
        if "No available agent" not in done.stderr:  # the head is young: Ray says to try again
            break
    return done


def test_ray_job_scores_the_corpus_and_refuses_relative_paths(project: Project, head: str, home: Path) -> None:
    project.corpus(["x" * i for i in range(30)])
    # A ranker of the user's own, beside her configuration: --root puts it on the path.
    (project.root / "mine.py").write_text(inspect.getsource(rankers))
    project.config["ranker"]["class"] = "mine:Length"
    relative = submit(head, home, "run", project.write_config())
    assert relative.returncode == 1  # Ray's own: it turns every non-zero code into 1
    assert "corpus.path: corpus is relative" in relative.stdout
    assert "exit code 2" in relative.stdout
    done = submit(head, home, "run", project.write_config(), "--root", str(project.root))
    assert done.returncode == 0, done.stdout
    assert project.sql("SELECT count(*) FROM scores") == [(30,)]
    # The same head serves a run that is not a job, and a local run beside it leaves no token behind
    # that a later job would be refused with.
    env = {**clean_env(home), "RAY_ADDRESS": "local"}
    local = subprocess.run(
        project.command("run", project.write_config(), "--set", "output.path=local"),
        env=env, cwd=project.root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert local.returncode == 0, local.stderr
    assert not (home / ".ray").exists()
    again = submit(head, home, "run", project.write_config(), "--root", str(project.root))
    assert again.returncode == 0, again.stdout
    assert "3 shards done, 0 to do" in again.stdout


def test_local_run_starts_and_stops_a_cluster_of_its_own(project: Project, home: Path) -> None:
    project.corpus(["x" * i for i in range(10)])
    done = subprocess.run(
        project.command("run", project.write_config()),
        env=clean_env(home), cwd=project.root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "a Ray cluster of this run's own" in done.stderr
    assert not (home / ".ray").exists()


def test_run_waiting_for_resources_says_what_it_waits_for(project: Project) -> None:
    project.corpus(["x"] * 10)
    project.config["workers"] |= {"resources": {"unobtainium": 1}, "count": 1}
    process = project.start("run", project.write_config())
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Waiting"):
                break
        assert "1 unobtainium" in lines[-1]
        assert "of 1 workers" in lines[-1]
        state = json.loads(project.rescore("status", str(project.output), "--json").stdout)
        assert (state["state"], state["shards"]["pending"]) == ("running", 1)
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 5, rest
