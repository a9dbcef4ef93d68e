"""What a worker takes of a cluster, on a real one (in a process of its own) with GPUs that are only resources."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cluster import clean_env

pytestmark = pytest.mark.ray

REPO = Path(__file__).resolve().parents[1]

CODE = """
import json, sys
import ray
ray.init(address="local", num_cpus=8, num_gpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
from jobs.pool import can_have_gpus, placement
def place(**wanted):
    asked = {"count": None, "cpus": None, "in_flight": 2, "accelerator_type": None, "resources": {}, **wanted}
    made = placement(**asked)
    return [made.count, made.cpus, made.gpus]
print(json.dumps({
    "can": can_have_gpus(),
    "cpu": place(gpus=0.0),
    "cpu of 3": place(gpus=0.0, cpus=3.0),
    "gpu": place(gpus=1.0),
    "half": place(gpus=0.5),
    "count": place(gpus=0.0, count=5),
    "none": place(gpus=0.0, resources={"unobtainium": 1.0}),
}))
"""


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (2, {"can": True, "gpu": [2, 4.0, 1.0], "half": [4, 2.0, 0.5], "cpu": [8, 1.0, 0.0]}),
        (
            0,
            {
                "can": False,
                "cpu": [8, 1.0, 0.0],
                "cpu of 3": [2, 3.0, 0.0],
                "count": [5, 1.0, 0.0],
                "none": [1, 1.0, 0.0],
            },
        ),
    ],
)
def test_placement_takes_what_the_cluster_has(tmp_path: Path, gpus: int, expected: dict[str, object]) -> None:
    """One worker a GPU, with its share of the CPUs; without GPUs one a CPU; at least one is always wanted,
    because that is what makes an autoscaler bring a node."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(gpus)],
        env={**clean_env(tmp_path), "RAY_TMPDIR": "/tmp/ray", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPO)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected.items() <= json.loads(done.stdout.splitlines()[-1]).items()
