"""Real kill -9 at random, small enough for every change; `make chaos` is the same at full length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.arena import Scale
from tests.chaos.cluster import PrivateCluster
from tests.chaos.scenarios import BROKEN, HONEST, two_nodes

pytestmark = pytest.mark.ray

SMALL = Scale(docs=120, shard=10, poison_every=60, rounds=5000, workers=2, max_kills=4)
HARMLESS = replace(SMALL, poison_every=1000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateCluster]:
    with two_nodes() as cluster:
        yield cluster


@pytest.mark.parametrize("scenario", ["slow-ack", "driver"])
def test_chaos_nothing_is_lost_doubled_or_convicted(scenario: str, cluster: PrivateCluster, tmp_path: Path) -> None:
    row = HONEST[scenario](cluster, tmp_path / "run", SMALL)
    assert row.kills > 0
    assert row.clean, row
    assert (row.scored, row.dead, row.exit) == (118, 2, 3)


@pytest.mark.parametrize(("scenario", "wrong"), [("ack-first", "lost"), ("append", "doubled")])
def test_chaos_broken_protocol_is_seen(scenario: str, wrong: str, cluster: PrivateCluster, tmp_path: Path) -> None:
    row = BROKEN[scenario](cluster, tmp_path / "run", HARMLESS)
    assert getattr(row, wrong) > 0, row
