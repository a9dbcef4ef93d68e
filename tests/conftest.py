"""Fixtures that more than one subject needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.projects import Project

# A test never depends on the machine's speed: an example may take as long as it takes.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory for the programs of this session: the user's own stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache_home")
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def cross_encoder_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT cross-encoder with one label and 128 positions, read only."""
    from tests import checkpoints  # torch: only the tests that ask for it wait for its import

    return checkpoints.tiny_cross_encoder(tmp_path_factory.mktemp("cross_encoder"))


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster for all runs of this session, as a user's running head would be."""
    import ray

    from jobs.pool import connect

    os.environ["RAY_ADDRESS"] = "local"
    connect()
    del os.environ["RAY_ADDRESS"]
    address = str(ray.get_runtime_context().gcs_address)
    yield address
    ray.shutdown()


@pytest.fixture
def project(tmp_path: Path, ray_address: str) -> Project:
    (tmp_path / "marks").mkdir()
    config = {
        "corpus": {"path": "corpus", "query": "q", "shard_size": 10},
        "ranker": {"kind": "custom", "class": "tests.rankers:Length", "model_version": "m1"},
        "output": {"path": "out"},
        "workers": {"count": 2, "cpus": 0.5},
        "retry": {"backoff_s": 0.01},
    }
    return Project(tmp_path, ray_address, config)
