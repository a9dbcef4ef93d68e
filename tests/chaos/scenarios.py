"""Who is killed, and when. Every kill waits for progress, so that even a run that is killed all the time ends.

Each takes a cluster of a head without CPUs and two nodes with one each, and leaves one of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.arena import Arena, Row, Scale
from tests.chaos.cluster import How, PrivateCluster, private_cluster

LOSSES: tuple[How, ...] = ("raylet", "all", "graceful")


@contextmanager
def two_nodes() -> Iterator[PrivateCluster]:
    with private_cluster() as cluster:
        cluster.add(num_cpus=0)
        cluster.add(num_cpus=1)
        cluster.add(num_cpus=1)
        yield cluster


@contextmanager
def started(arena: Arena) -> Iterator[Arena]:
    """The driver runs; whatever happens, none is left behind."""
    try:
        arena.start()
        yield arena
    finally:
        arena.stop()


def kill_workers(cluster: PrivateCluster, root: Path, scale: Scale, *, protocol: str, name: str) -> Row:
    """kill -9 to a random worker whenever one more part stands."""
    with started(Arena(root, cluster, scale, protocol)) as arena:
        while arena.wait_to_kill(1):
            _kill_one_worker(arena)
        return arena.row(name)


def kill_driver(cluster: PrivateCluster, root: Path, scale: Scale) -> Row:
    """kill -9 to the driver 4 to 10 parts after its start, and the same command again."""
    with started(Arena(root, cluster, scale)) as arena:
        while arena.wait_to_kill(arena.random.randint(4, 10)):
            _kill_the_driver(arena)
        return arena.row("driver")


def lose_nodes(cluster: PrivateCluster, root: Path, scale: Scale) -> Row:
    """Whenever ten more parts stand the older node is lost, in turn by kill -9 of its raylet, by kill -9 of
    all its processes, and gracefully; then another one joins."""
    with started(Arena(root, cluster, scale)) as arena:
        while arena.wait_to_kill(10):
            _lose_a_node(arena, LOSSES[arena.kills % len(LOSSES)])
        return arena.row("nodes")


def kill_everything(cluster: PrivateCluster, root: Path, scale: Scale) -> Row:
    """At every third part: of ten times a worker eight times, the driver and a node once each; and 0.3 s
    between part and ack."""
    with started(Arena(root, cluster, scale, "slow-ack")) as arena:
        while arena.wait_to_kill(3):
            die = arena.random.random()
            if die < 0.1:
                _kill_the_driver(arena)
            elif die < 0.2:
                _lose_a_node(arena, arena.random.choice(LOSSES))
            else:
                _kill_one_worker(arena)
        return arena.row("workers, driver and nodes; 0.3 s between part and ack")


def _kill_one_worker(arena: Arena) -> None:
    workers = arena.cluster.workers()
    if workers and arena.running:
        arena.random.choice(workers).kill()
        arena.kills += 1


def _kill_the_driver(arena: Arena) -> None:
    arena.stop()
    arena.kills += 1
    arena.start()


def _lose_a_node(arena: Arena, how: How) -> None:
    _head, oldest, *_ = arena.cluster.nodes
    arena.cluster.lose(oldest, how)
    arena.kills += 1
    arena.cluster.add(num_cpus=1)


Scenario = Callable[[PrivateCluster, Path, Scale], Row]


def _workers(protocol: str, name: str) -> Scenario:
    return lambda cluster, root, scale: kill_workers(cluster, root, scale, protocol=protocol, name=name)


HONEST: dict[str, Scenario] = {
    "workers": _workers("honest", "workers"),
    "slow-ack": _workers("slow-ack", "workers; 0.3 s between part and ack"),
    "driver": kill_driver,
    "nodes": lose_nodes,
    "all": kill_everything,
}
BROKEN: dict[str, Scenario] = {
    "ack-first": _workers("ack-first", "*broken:* workers; ack before work"),
    "append": _workers("append", "*broken:* workers; 0.3 s, parts without keys"),
}
