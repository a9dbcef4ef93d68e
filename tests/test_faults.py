"""Clusters that lose nodes, processes that hang, stop or cannot start, and signals: on real Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from shards.layout import Layout
from shards.lock import holder
from tests.chaos.cluster import How, PrivateCluster, private_cluster
from tests.projects import Project, wait_until

pytestmark = pytest.mark.ray

RAY = str(Path(sys.executable).with_name("ray"))


@dataclass
class Elsewhere(Project):
    """A project on a cluster of the test's own instead of the session's."""

    cluster_env: dict[str, str] = field(default_factory=dict)

    def env(self) -> dict[str, str]:
        return {**self.cluster_env, "RAY_ADDRESS": self.address}

    def attempts(self, event: str) -> int:
        return int(self.sql(f"SELECT count(*) FROM attempts WHERE event = '{event}'")[0][0])

    def nodes(self) -> set[str]:
        """Where something was scored, as far as it is published."""
        if not (self.output / "manifest.duckdb").exists():
            return set()
        return {node for (node,) in self.sql("SELECT DISTINCT node FROM attempts WHERE event = 'done'")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateCluster]:
    """A head without CPUs: what works comes and goes with the other nodes."""
    with private_cluster() as cluster:
        cluster.add(num_cpus=0)
        yield cluster


@pytest.fixture
def elsewhere(project: Project, cluster: PrivateCluster) -> Iterator[Elsewhere]:
    sick(project)
    project.config["workers"] = {"count": "auto", "cpus": 1}
    yield Elsewhere(project.root, cluster.address, project.config, cluster.env)
    for number in list(cluster.nodes)[1:]:
        cluster.lose(number, "graceful")


def sick(project: Project) -> None:
    options = {"marks": str(project.marks), "output": str(project.output)}
    project.config["ranker"] |= {"class": "tests.chaos.rankers:Sick", "options": options}


def slow(count: int) -> list[str]:
    """50 ms each; all different, because equal ones are scored once a shard."""
    return [f"slow {i}" for i in range(count)]


def test_node_that_is_unfit_gets_no_worker_and_the_run_goes_on_until_none_is_left(
    elsewhere: Elsewhere, cluster: PrivateCluster
) -> None:
    unfit = cluster.nodes[cluster.add(num_cpus=2, env_vars={"RESCORE_TEST_UNFIT": "1"})]
    elsewhere.corpus(["x"] * 100)
    alone = elsewhere.run()
    assert alone.returncode == 2, alone.stderr
    assert "rescore: no bfloat16 here" in alone.stderr
    fit = cluster.nodes[cluster.add(num_cpus=1)]
    done = elsewhere.run()
    assert done.returncode == 0, done.stderr
    assert f"node {unfit[:12]} gets no workers" in done.stderr
    assert done.stderr.count("no bfloat16 here") == 1
    assert elsewhere.nodes() == {fit}


@pytest.mark.parametrize("how", ["graceful", "raylet"])  # "all": see below
def test_node_lost_in_any_way_costs_only_what_it_held(
    elsewhere: Elsewhere, cluster: PrivateCluster, how: How
) -> None:
    nodes = [cluster.add(num_cpus=1), cluster.add(num_cpus=1)]
    elsewhere.corpus([*slow(100), *["gate"] * 40])
    driver = elsewhere.start("run", elsewhere.write_config())
    wait_until((elsewhere.marks / "gate").exists)
    wait_until(lambda: len(elsewhere.nodes()) == 2)
    cluster.lose(nodes[0], how)
    wait_until(lambda: elsewhere.attempts("released") + elsewhere.attempts("died") > 0)
    (elsewhere.marks / "open").touch()
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, output
    assert elsewhere.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(140, 140)]
    assert elsewhere.attempts("died") == 0  # the infrastructure's fault: nobody is suspected
    assert elsewhere.verify()["ok"]


def test_nodes_that_join_get_workers_and_the_loss_of_all_is_waited_for(
    elsewhere: Elsewhere, cluster: PrivateCluster
) -> None:
    first = cluster.add(num_cpus=1)
    elsewhere.corpus([*slow(250), "gate", *slow(100)])
    driver = elsewhere.start("run", elsewhere.write_config())
    wait_until(lambda: bool(elsewhere.nodes()))
    second = cluster.add(num_cpus=1)
    wait_until(lambda: cluster.nodes[second] in elsewhere.nodes())
    wait_until((elsewhere.marks / "gate").exists)
    cluster.lose(first, "all")
    cluster.lose(second, "all")
    assert driver.stdout is not None
    said = next(line for line in driver.stdout if line.startswith("Waiting"))
    assert "(1 CPU each); free in the cluster: 0 of" in said
    (elsewhere.marks / "open").touch()
    third = cluster.add(num_cpus=2)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, output
    assert cluster.nodes[third] in elsewhere.nodes()
    assert elsewhere.attempts("died") == 0
    assert elsewhere.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(351, 351)]
    assert elsewhere.verify()["ok"]


def test_checkpoint_that_goes_during_a_run_lets_the_living_go_on_and_then_stops_it(project: Project) -> None:
    sick(project)
    project.config["workers"]["count"] = 2
    project.corpus([*slow(200), "gate"])
    driver = project.start("run", project.write_config())
    wait_until(lambda: len(pids(project)) == 2)
    (project.marks / "gone").touch()
    first, second = pids(project)
    os.kill(first, signal.SIGKILL)
    wait_until((project.marks / "gate").exists)
    assert driver.poll() is None
    os.kill(second, signal.SIGKILL)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 4, output
    assert "no node is left for a worker" in output
    assert "no checkpoint at" in output
    # Nothing is charged: with the checkpoint back, and the gate open, the same command goes on.
    (project.marks / "gone").unlink()
    (project.marks / "open").touch()
    assert project.run().returncode == 0
    assert project.verify()["ok"]


def test_checkpoint_that_was_never_there_is_refused_at_once(project: Project) -> None:
    sick(project)
    project.corpus(["x"] * 30)
    (project.marks / "gone").touch()
    done = project.run()
    assert done.returncode == 2, done.stderr
    assert "no checkpoint at" in done.stderr


def test_document_that_hangs_costs_one_document(project: Project) -> None:
    sick(project)
    project.config["retry"]["lease_s"] = 2
    project.config["workers"]["count"] = 3
    project.corpus(["x"] * 35 + ["hang"] + ["x"] * 24)
    done = project.run()
    assert done.returncode == 3, done.stderr
    letters = project.sql("SELECT doc_id, row, stage, error_type FROM dead_letters")
    assert letters == [("d35", 35, "worker", "LeaseExpired")]
    assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(59, 59)]
    assert project.verify()["ok"]


def test_stopped_process_that_wakes_up_late_changes_nothing(project: Project) -> None:
    sick(project)
    project.config["retry"]["lease_s"] = 2
    # Until the gate opens the run goes on, and the stopped process is still the run's.
    project.corpus(["x"] * 15 + ["stop-itself"] + ["x"] * 24 + ["gate"])
    stopped = project.marks / "stopped"
    driver = project.start("run", project.write_config())
    try:
        wait_until(lambda: stopped.exists() and bool(stopped.read_text()))
        process = psutil.Process(int(stopped.read_text()))
        part = parts_of(project, "d15")
        wait_until(lambda: bool(part()))
        before = {path: path.stat() for path in part()}
        process.send_signal(signal.SIGCONT)
        (project.marks / "open").touch()
        output, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == 0, output
    assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(41, 41)]
    assert project.sql("SELECT count(*) FROM attempts WHERE event = 'hung'")[0][0] >= 1
    assert {path: path.stat() for path in part()} == before
    assert project.verify()["ok"]


def test_second_interrupt_stops_at_once(project: Project) -> None:
    sick(project)
    project.corpus(["x"] * 30 + ["gate"])
    project.config["workers"]["count"] = 1
    driver = project.start("run", project.write_config())
    wait_until((project.marks / "gate").exists)
    assert driver.stdout is not None
    driver.send_signal(signal.SIGINT)
    assert any("again to stop at once" in line for line in driver.stdout)
    began = time.monotonic()
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 5, output
    assert time.monotonic() - began < 15  # of the 30 s of grace
    (project.marks / "open").touch()
    assert project.run().returncode == 0
    assert project.verify()["ok"]


def test_ray_job_stopped_with_or_without_time_to_drain_leaves_a_resumable_run(project: Project) -> None:
    sick(project)
    project.corpus([*slow(50), "gate", *slow(300)])
    with private_cluster() as cluster:
        ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
        cluster.add(num_cpus=2, include_dashboard=True, **ports)
        here = Elsewhere(project.root, cluster.address, project.config, cluster.env)
        # Ray's default: SIGKILL 3 s after SIGTERM, and the gate holds the shard for longer.
        submit(here, cluster, "killed", {})
        wait_until((here.marks / "gate").exists)
        stop(here, cluster, "killed")
        assert state_of(here) == "interrupted"
        assert here.sql("SELECT ended_at FROM runs") == [(None,)]
        (here.marks / "open").touch()
        done = len(parts_of(here)())
        submit(here, cluster, "drained", {"RAY_JOB_STOP_WAIT_TIME_S": "60"})
        wait_until(lambda: len(parts_of(here)()) > done + 2)
        stop(here, cluster, "drained")
        assert state_of(here) == "interrupted"
        assert here.sql("SELECT exit_code FROM runs ORDER BY run DESC LIMIT 1") == [(5,)]
        assert here.sql("SELECT count(*) FROM shards WHERE state = 'leased'") == [(0,)]
        assert here.attempts("died") == 0
        resumed = here.run()
        assert resumed.returncode == 0, resumed.stderr
        assert here.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(351, 351)]
        assert here.verify()["ok"]


def submit(project: Elsewhere, cluster: PrivateCluster, name: str, variables: dict[str, str]) -> None:
    environment = json.dumps({"env_vars": variables})
    command = ["submit", "--no-wait", "--submission-id", name, "--runtime-env-json", environment, "--"]
    command += [*project.command("run", project.write_config(), "--root", str(project.root))]
    # The head's agent for jobs may be a second behind the head itself.
    wait_until(lambda: job(project, cluster, *command).returncode == 0)


def stop(project: Elsewhere, cluster: PrivateCluster, name: str) -> None:
    """And wait until it has stopped."""
    done = job(project, cluster, "stop", name)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: holder(Layout(project.output)) is None)


def job(project: Elsewhere, cluster: PrivateCluster, what: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", what, "--address", f"http://{cluster.dashboard}", *args]
    return subprocess.run(command, env=project.env(), capture_output=True, text=True, timeout=60, check=False)


def state_of(project: Project) -> str:
    return str(json.loads(project.rescore("status", str(project.output), "--json").stdout)["state"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def pids(project: Project) -> list[int]:
    """Of the workers, as published."""
    if not (project.output / "manifest.duckdb").exists():
        return []
    return [json.loads(info)["pid"] for (info,) in project.sql("SELECT info FROM workers")]


def parts_of(project: Project, doc_id: str | None = None) -> Callable[[], list[Path]]:
    """Finds the parts that are there, or the one with `doc_id`."""

    def find() -> list[Path]:
        paths = list(project.output.glob("scores/m1/e0/[0-9a-f][0-9a-f]/*.parquet"))
        return [p for p in paths if doc_id is None or doc_id in doc_ids(p)]

    return find


def doc_ids(path: Path) -> list[str]:
    return pq.read_table(path, columns=["doc_id"])["doc_id"].to_pylist()
