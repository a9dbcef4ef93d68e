"""The pool of Ray actors. Never reuses a handle after a death; never lets Ray retry anything."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.utils import read_ray_address
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from jobs.protocol import Died, ErrorReport, Failed, Lease, Loss, PoolEvent, Ready, Refused, WorkerId, WorkerInfo
from jobs.worker import Worker, WorkerSpec, describe, is_refusal
from ranker.errors import DeviceBroken, NodeUnfit
from shards.errors import UsageError
from shards.types import Stage

log = logging.getLogger("rescore")

_RECOUNT_S = 10.0
_SLOW_START_S = 120.0
_MAX_STARTS = 3
"""Failed starts in a row after which a node gets no more workers."""
_TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - its name

_own_clusters: set[str] = set()
"""Addresses of the clusters that this process has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one worker takes of the cluster, and how many workers are wanted now."""

    count: int
    cpus: float
    gpus: float
    in_flight: int
    accelerator_type: str | None = None
    resources: dict[str, float] = field(default_factory=dict)
    unfit: frozenset[str] = frozenset()
    """Nodes that get no worker."""
    room: int = 0
    """Workers for which the nodes that are alive have room."""

    def options(self) -> dict[str, Any]:
        """For `ActorClass.options`. One thread more than shards in flight: a call must never queue behind
        another that waits for its turn at a stage."""
        options: dict[str, Any] = {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": self.in_flight + 1,
        }
        if self.accelerator_type:
            options["accelerator_type"] = self.accelerator_type
        if self.resources:
            options["resources"] = self.resources
        if self.unfit:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(self.unfit))})"}
        return options

    def __str__(self) -> str:
        wants = [f"{self.cpus:g} CPU"]
        if self.gpus:
            wants.append(f"{self.gpus:g} GPU" + (f" ({self.accelerator_type})" if self.accelerator_type else ""))
        wants += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        return " + ".join(wants)


class _Actor(Worker):
    """A `Worker` that knows which node it is on."""

    def start(self, node: str = "") -> WorkerInfo | ErrorReport:
        return super().start(node or ray.get_runtime_context().get_node_id())


@dataclass(slots=True)
class _Member:
    handle: Any
    placing: Any
    """The pending sign of life of a process that Ray has yet to place, or None once it has."""
    since: float
    starting: Any = None
    """The pending reply of `start`, while the ranker is loaded."""
    node: str = ""
    calls: dict[Any, Lease] = field(default_factory=dict)


class RayPool:
    """`Pool` on Ray. `spec(worker_id)` says what a new worker is told; `place(unfit nodes)` what is wanted now."""

    def __init__(
        self, spec: Callable[[WorkerId], WorkerSpec], place: Callable[[frozenset[str]], Placement]
    ) -> None:
        self._spec, self._place = spec, place
        self._placement = place(frozenset())
        self._failed_starts: Counter[str] = Counter()
        self.unfit: dict[str, str] = {}
        """Nodes that get no more workers, and why."""
        self._refused: Refused | None = None
        self._reasons: set[tuple[str, str]] = set()
        """(message, node) of every refusal."""
        self._ready: set[str] = set()
        """Nodes where a worker has started: one that is lost may come back, one that refuses is out."""
        self._members: dict[WorkerId, _Member] = {}
        self._started = 0
        self._recounted = time.monotonic()
        self._actor = ray.remote(_Actor)
        self._fill()

    # -- the Pool protocol ---------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> Sequence[PoolEvent]:
        """What happened; see `jobs.protocol.Pool`."""
        events: list[PoolEvent] = []
        if self._refused is not None and not self._members and self._no_node_left():
            return [replace(self._refused, last=True)]
        waits = self._waits()
        if not waits:
            time.sleep(timeout_s)
        ready = ray.wait(list(waits), num_returns=1, timeout=timeout_s)[0] if waits else []
        while ready:
            # Everything that is ready now, one item a call and round: no worker can starve another.
            for ref in ray.wait(list(waits), num_returns=len(waits), timeout=0)[0] or ready:
                events += self._collect(waits[ref], ref)
            waits = self._waits()
            ready = ray.wait(list(waits), num_returns=1, timeout=0)[0] if waits and len(events) < 512 else []
        self._recount()
        return events

    def submit(self, worker: WorkerId, lease: Lease) -> None:
        """Send the lease. A worker that is already gone is reported by the next `poll`."""
        member = self._members.get(worker)
        if member is not None:
            call = member.handle.score.options(num_returns="streaming").remote(lease)
            member.calls[call] = lease

    def kill(self, worker: WorkerId) -> None:
        """End the worker and start another."""
        self._discard(worker)
        self._fill()

    def close(self) -> None:
        """End every worker."""
        for worker in list(self._members):
            self._discard(worker)

    # -- what the driver shows -----------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """Workers wanted now."""
        return self._placement.count

    def waiting(self) -> str | None:
        """What the pool has waited for these ten seconds or more, in one line; None if for nothing."""
        now = time.monotonic()
        late = [now - m.since for m in self._members.values() if m.placing is not None and now - m.since > 10]
        slow = [now - m.since for m in self._members.values() if m.starting is not None]
        if not late and max(slow, default=0.0) > _SLOW_START_S:
            return f"{len(slow)} workers have been loading their ranker for up to {max(slow):.0f} s"
        if not late:
            return None
        free, total = ray.available_resources(), ray.cluster_resources()
        has = ", ".join(f"{free.get(r, 0):g} of {total.get(r, 0):g} {r}" for r in ("CPU", "GPU"))
        return (
            f"waiting {max(late):.0f} s for {len(late)} of {self.wanted} workers "
            f"({self._placement} each); free in the cluster: {has}"
            + (f"; {len(self.unfit)} nodes get none" if self.unfit else "")
        )

    # -- members -------------------------------------------------------------------------------------

    def _waits(self) -> dict[Any, WorkerId]:
        waits: dict[Any, WorkerId] = {}
        for worker, member in self._members.items():
            for pending in (member.placing, member.starting):
                if pending is not None:
                    waits[pending] = worker
            for call in member.calls:
                waits[call] = worker
        return waits

    def _fill(self) -> None:
        if self._no_node_left():
            return
        while len(self._members) < self._placement.count:
            self._started += 1
            worker = f"w{self._started}"
            handle = self._actor.options(**self._placement.options()).remote(self._spec(worker))
            self._members[worker] = _Member(handle, handle.__ray_ready__.remote(), time.monotonic())

    def _no_node_left(self) -> bool:
        return bool(self.unfit) and self._placement.room < 1 and not self._ready - self.unfit.keys()

    def _same_everywhere(self, error: ErrorReport) -> bool:
        """Whether a refusal is the configuration's: nobody has started, and another node says the same or no
        other worker is on its way. (What is a node's own fault says so: NodeUnfit.)"""
        if self._ready or not is_refusal(error) or NodeUnfit.__name__ in error.bases:
            return False
        others = any(member.placing is None for member in self._members.values())
        nodes = {node for message, node in self._reasons if message == error.message}
        return len(nodes) > 1 or not others

    def _recount(self) -> None:
        if time.monotonic() - self._recounted > _RECOUNT_S:
            self._recounted = time.monotonic()
            # Nodes that joined get workers; those that left are not waited for. A busy worker stays.
            now = self._place(frozenset(self.unfit))
            count = max(now.count, 1)
            self._placement = replace(self._placement, count=count, room=now.room)
            surplus = len(self._members) - (0 if self._no_node_left() else count)
            for worker in [w for w, m in self._members.items() if m.placing is not None][: max(0, surplus)]:
                self._discard(worker)
            self._fill()

    def _discard(self, worker: WorkerId) -> None:
        member = self._members.pop(worker, None)
        if member is not None:
            ray.kill(member.handle, no_restart=True)

    def _collect(self, worker: WorkerId, ref: Any) -> list[PoolEvent]:
        member = self._members.get(worker)
        if member is None:
            return []
        try:
            if ref is member.placing:
                ray.get(ref)
                member.placing, member.starting = None, member.handle.start.remote()
                return []
            if ref is member.starting:
                return [self._on_started(worker, member, ray.get(ref))]
            try:
                item = ray.get(next(ref))
            except StopIteration:
                member.calls.pop(ref, None)
                return []
            return self._on_item(worker, item)
        except RayTaskError as e:
            # The actor itself never raises: this is Ray failing to run the call, or a bug of ours.
            return [self._on_task_error(worker, member, ref, e)]
        except RayError as e:
            return [self._on_death(worker, member, e)]

    def _on_item(self, worker: WorkerId, item: PoolEvent) -> list[PoolEvent]:
        if isinstance(item, Failed) and DeviceBroken.__name__ in item.error.bases:
            self.kill(worker)
            return [item, Died(worker=worker, loss=Loss.NODE, message=item.error.message)]
        return [item]

    def _on_started(self, worker: WorkerId, member: _Member, reply: Any) -> PoolEvent:
        member.starting = None
        if isinstance(reply, ErrorReport):
            self._mind_node(reply)
            self.kill(worker)
            last = self._same_everywhere(reply)
            self._refused = Refused(worker=worker, error=reply, fatal=is_refusal(reply), last=last)
            return self._refused
        member.node = reply.node
        del self._failed_starts[reply.node]
        self._ready.add(reply.node)
        return Ready(worker=worker, info=reply)

    def _mind_node(self, error: ErrorReport) -> None:
        """A node that refuses the ranker, or where workers never start, gets no more of them in this run."""
        self._failed_starts[error.node] += 1
        self._reasons.add((error.message, error.node))
        if is_refusal(error) or self._failed_starts[error.node] >= _MAX_STARTS:
            self.unfit.setdefault(error.node, error.message)
            self._placement = self._place(frozenset(self.unfit))

    def _on_task_error(self, worker: WorkerId, member: _Member, ref: Any, e: RayTaskError) -> PoolEvent:
        error = describe(e, Stage.WORKER)
        lease = member.calls.pop(ref, None)
        if lease is None:
            self.kill(worker)
            return Refused(worker=worker, error=error, fatal=False)
        return Failed(worker=worker, key=lease.key, attempt=lease.attempt, error=error)

    def _on_death(self, worker: WorkerId, member: _Member, e: RayError) -> PoolEvent:
        loss = _loss(e, member.node)
        self.kill(worker)
        return Died(worker=worker, loss=loss, message=_last_words(e))


def _loss(e: RayError, node: str) -> Loss:
    """What took the worker away. Ray names a dead node in words only, and only sometimes."""
    if isinstance(e, OutOfMemoryError):
        return Loss.MEMORY
    if not isinstance(e, RayActorError) or isinstance(e, ActorUnavailableError):
        return Loss.NODE
    if "its node has died" in str(e) or (node and not any(n["Alive"] for n in ray.nodes() if n["NodeID"] == node)):
        return Loss.NODE
    return Loss.PROCESS


def _last_words(e: RayError) -> str:
    """What Ray knows of a death, without its ids and its advice: the pid, and how the process ended."""
    text = " ".join(str(e).split())
    pid = re.search(r"\bpid: (\d+)", text)
    detail = re.search(r"exit detail: (.*?)(?: Some common causes| There are some potential|$)", text)
    if detail is None:
        return _first_lines(e)
    return f"its process{f' ({pid[0]})' if pid else ''} is gone: {detail[1]}"


def _first_lines(e: Exception) -> str:
    """Ray's words without the addresses and hints below them."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return " ".join(lines)[:1000]


# -- the cluster --------------------------------------------------------------------------------------


def connect() -> str:
    """Join the cluster of RAY_ADDRESS or the one that `ray start` has left running on this machine; else
    start one for this run.

    Returns how to name it to a person; once connected, it only says so again. The actors' output is not
    forwarded to the driver's terminal: it goes to Ray's log files, node and worker on every line.
    Raises UsageError if the named cluster does not answer.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if ray.is_initialized():
        pass
    elif address := _standing():
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RayError) as e:
            raise UsageError(f"the Ray cluster at {address} does not answer: {_first_lines(e)}") from None
    else:
        _own_token()
        ray.init(address="local", include_dashboard=False, **quiet)
        _own_clusters.add(ray.get_runtime_context().gcs_address)
    if ray.get_runtime_context().gcs_address in _own_clusters:
        return "a Ray cluster of this run's own"
    return f"the Ray cluster at {ray.get_runtime_context().gcs_address}"


def _standing() -> str | None:
    """The address of the cluster to join; None if a run has to start one."""
    address = os.environ.get("RAY_ADDRESS") or _started()
    return None if address == "local" else address


def _started() -> str | None:
    """The address that `ray start` left, if something still answers there. (Ray's own `auto` would also
    take the private cluster of any other run on this machine, and wait long for a head that was killed.)"""
    address: str | None = read_ray_address(None)
    if not address:
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return None
    return address


def _own_token() -> None:
    """A token for this run's cluster alone: Ray's servers listen on every interface.

    Left to itself, Ray would write one to the home directory, and every later command there would speak
    with a token: a head that was started before would answer 401.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ[_TOKEN] = secrets.token_hex(32)
        # Ray has read the mode already, when it was imported and looked for a running cluster.
        Config.initialize("")


def can_have_gpus() -> bool:
    """Whether the cluster has GPUs, or its autoscaler could bring some."""
    return ray.cluster_resources().get("GPU", 0) > 0 or _possible().get("GPU", 0) > 0


def would_have_gpus() -> bool:
    """What `can_have_gpus` would say to a run from here, without a cluster being started for the answer: one that
    stands is joined, otherwise it is what Ray would count on this machine. Raises UsageError as `connect`."""
    if ray.is_initialized() or _standing():
        connect()
        return can_have_gpus()
    gpus = get_accelerator_manager_for_resource("GPU")
    visible = gpus.get_current_process_visible_accelerator_ids()  # None: no restriction
    return bool(gpus.get_current_node_num_accelerators() > 0 and visible != [])


def _possible() -> dict[str, float]:
    from ray._private.state import state

    return dict(state.get_max_resources_from_cluster_config() or {})


def placement(
    *,
    count: int | None,
    cpus: float | None,
    gpus: float,
    in_flight: int,
    accelerator_type: str | None,
    resources: dict[str, float],
    unfit: frozenset[str] = frozenset(),
) -> Placement:
    """A `Placement` for the cluster as it is now, without the nodes `unfit`; None means auto. At least one
    worker is always wanted: on a cluster scaled to zero it is what asks the autoscaler for a node."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"] and n["NodeID"] not in unfit]
    if cpus is None:
        cpus = _auto_cpus(nodes, gpus)
    asked = resources
    if accelerator_type:
        resources = {**resources, f"accelerator_type:{accelerator_type}": 0.001}  # as Ray asks for it
    room = sum(_fits(node, cpus, gpus, resources) for node in nodes)
    return Placement(
        count=count if count is not None else max(1, room or _fits(_possible(), cpus, gpus, resources)),
        cpus=cpus,
        gpus=gpus,
        in_flight=in_flight,
        accelerator_type=accelerator_type,
        resources=asked,
        unfit=unfit,
        room=room,
    )


def _auto_cpus(nodes: Iterable[dict[str, float]], gpus: float) -> float:
    if not gpus:
        return 1.0
    shares = [node.get("CPU", 1.0) // (node["GPU"] / gpus) for node in nodes if node.get("GPU", 0) >= gpus]
    return max(1.0, min(shares, default=1.0))


def _fits(node: dict[str, float], cpus: float, gpus: float, resources: dict[str, float]) -> int:
    wants = {"CPU": cpus, "GPU": gpus, **resources}
    return int(min((node.get(r, 0.0) // amount for r, amount in wants.items() if amount), default=0))
