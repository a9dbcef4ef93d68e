"""A Ray cluster of several nodes on this machine, in a process of its own, whose nodes can be lost.

Nothing of it touches another cluster here: own ports, own temp folder, own token, own home directory.
`python -m tests.chaos.cluster` is that process: a JSON request a line on stdin, an answer a line on stdout.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

REPO = Path(__file__).resolve().parents[2]

_OTHERS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")

How = Literal["graceful", "raylet", "all"]


@dataclass
class PrivateCluster:
    """`address` for RAY_ADDRESS, with `env`; nodes by number, in the order in which they were added."""

    process: subprocess.Popen[str]
    env: dict[str, str]
    address: str = ""
    dashboard: str = ""
    """Host and port, if the head was added with `include_dashboard=True`."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Those that are there: number → Ray's id."""

    def add(self, **resources: Any) -> int:
        """Start a node; returns its number once the cluster knows it."""
        answer = self._ask("add", **resources)
        self.address, self.dashboard = answer["address"], answer["dashboard"]
        self.nodes[answer["number"]] = answer["node"]
        return int(answer["number"])

    def lose(self, number: int, how: How) -> None:
        """graceful: it says good-bye. raylet: kill -9 of that one. all: kill -9 of all it runs."""
        self._ask("lose", number=number, how=how)
        del self.nodes[number]

    def workers(self) -> list[psutil.Process]:
        """The processes of the actors that are alive now, on any node."""
        return [p for p in self._processes() if _title(p).startswith("ray::") and not _title(p).startswith(_OTHERS)]

    def raylets(self) -> int:
        return sum("/raylet/raylet" in _title(p) for p in self._processes())

    def _processes(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"answer": '):
                answer: dict[str, Any] = json.loads(line)["answer"]
                return answer
        raise RuntimeError(f"the cluster's process ended with {self.process.wait()} instead of an answer")


@contextmanager
def private_cluster() -> Iterator[PrivateCluster]:
    """A cluster without nodes, in a temp folder with a short path: the names of Ray's sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="c", ignore_cleanup_errors=True) as home:
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "HOME": home,
            "RAY_TMPDIR": f"{home}/ray",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PYTHONPATH": str(REPO),
            "COLUMNS": "200",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.cluster"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=REPO,
        )  # fmt: skip
        cluster = PrivateCluster(process, env)
        try:
            yield cluster
        finally:
            _end(cluster, home)


def _end(cluster: PrivateCluster, home: str) -> None:
    everything = cluster._processes()
    cluster.process.kill()
    cluster.process.wait()
    # Workers whose raylet was killed are nobody's children any more; the folder stands on their command line.
    everything += [p for p in psutil.process_iter() if home in " ".join(_cmdline(p))]
    for process in everything:
        _kill(process)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _title(process: psutil.Process) -> str:
    return " ".join(_cmdline(process)[:1])


# -- the process that holds the nodes -----------------------------------------------------------------


def serve() -> None:
    """Answer requests until stdin ends. Ray's nodes are children of this process and die with it."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes: list[Any] = []
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("what") == "add":
            nodes.append(cluster.add_node(**{"include_dashboard": False, **request}))
            answer = {"number": len(nodes) - 1, "node": nodes[-1].node_id, "address": cluster.address}
            answer["dashboard"] = cluster.webui_url
        else:
            _lose(cluster, nodes[request["number"]], request["how"])
            answer = {}
        print(json.dumps({"answer": answer}), flush=True)


def _lose(cluster: Any, node: Any, how: How) -> None:
    raylet = node.all_processes["raylet"][0].process
    below = psutil.Process(raylet.pid).children(recursive=True)
    if how == "graceful":
        cluster.remove_node(node, allow_graceful=True)
        return
    os.kill(raylet.pid, signal.SIGKILL)
    raylet.wait()
    if how == "all":
        for process in below:
            _kill(process)
    cluster.worker_nodes.discard(node)


if __name__ == "__main__":
    serve()
