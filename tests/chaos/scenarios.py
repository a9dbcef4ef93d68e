"""Who is killed, and when. Every kill waits for progress, so that even a run that is killed all the time ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.chaos.arena import Arena, Row, Scale
from tests.chaos.cluster import How, PrivateCluster, private_cluster

LOSSES: tuple[How, ...] = ("raylet", "all", "graceful")


def kill_workers(root: Path, scale: Scale, *, protocol: str = "honest", every: int = 1, name: str = "") -> Row:
    """kill -9 to a random worker whenever `every` more parts stand."""
    with private_cluster() as cluster:
        cluster.add(num_cpus=2)
        arena = Arena(root, cluster, scale, protocol)
        arena.start()
        try:
            while arena.wait_for_parts(every):
                arena.kills += _kill_one_worker(arena, cluster)
            return arena.row(name or f"workers, {protocol}")
        finally:
            arena.stop()


def kill_driver(root: Path, scale: Scale, *, after: tuple[int, int] = (4, 12), name: str = "driver") -> Row:
    """kill -9 to the driver after a random number of further parts, and the same command again."""
    with private_cluster() as cluster:
        cluster.add(num_cpus=2)
        arena = Arena(root, cluster, scale)
        try:
            driver = arena.start()
            while arena.wait_for_parts(arena.random.randint(*after)):
                driver.kill()
                driver.wait()
                arena.kills += 1
                driver = arena.start()
            return arena.row(name)
        finally:
            arena.stop()


def kill_nodes(root: Path, scale: Scale, *, every: int = 10, name: str = "raylet") -> Row:
    """Two nodes with workers beside the head; the older is lost and replaced whenever `every` more parts stand."""
    with private_cluster() as cluster:
        cluster.add(num_cpus=0)
        nodes = [cluster.add(num_cpus=1), cluster.add(num_cpus=1)]
        arena = Arena(root, cluster, scale)
        arena.start()
        try:
            while arena.wait_for_parts(every):
                cluster.lose(nodes.pop(0), LOSSES[arena.kills % len(LOSSES)])
                arena.kills += 1
                nodes.append(cluster.add(num_cpus=1))
            return arena.row(name)
        finally:
            arena.stop()


def kill_everything(root: Path, scale: Scale, *, every: int = 2, name: str = "all of them") -> Row:
    """At every second part a worker; now and then a node or the driver instead."""
    with private_cluster() as cluster:
        cluster.add(num_cpus=0)
        nodes = [cluster.add(num_cpus=1), cluster.add(num_cpus=1)]
        arena = Arena(root, cluster, scale, "slow-ack")
        try:
            driver = arena.start()
            while arena.wait_for_parts(every):
                die = arena.random.random()
                if die < 0.1:
                    driver.kill()
                    driver.wait()
                    arena.kills += 1
                    driver = arena.start()
                elif die < 0.2:
                    cluster.lose(nodes.pop(0), arena.random.choice(LOSSES))
                    arena.kills += 1
                    nodes.append(cluster.add(num_cpus=1))
                else:
                    arena.kills += _kill_one_worker(arena, cluster)
            return arena.row(name)
        finally:
            arena.stop()


def _kill_one_worker(arena: Arena, cluster: PrivateCluster) -> bool:
    workers = cluster.workers()
    if not workers or not arena.running:
        return False
    arena.random.choice(workers).kill()
    return True


Scenario = Callable[[Path, Scale], Row]

HONEST: dict[str, Scenario] = {
    "workers": lambda root, scale: kill_workers(root, scale, name="workers"),
    "slow-ack": lambda root, scale: kill_workers(
        root, scale, protocol="slow-ack", name="workers, 0.3 s between part and ack"
    ),
    "driver": kill_driver,
    "nodes": kill_nodes,
    "all": kill_everything,
}
BROKEN: dict[str, Scenario] = {
    "ack-first": lambda root, scale: kill_workers(
        root, scale, protocol="ack-first", name="*broken:* ack before work"
    ),
    "append": lambda root, scale: kill_workers(root, scale, protocol="append", name="*broken:* parts without keys"),
}
