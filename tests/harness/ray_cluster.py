"""A real Ray cluster of three nodes on this machine, in a separate process, entirely on 127.0.0.1.

``python -m tests.harness.ray_cluster`` starts a head without cores and two nodes with two cores and two (logical) GPUs,
prints its address, and prints the process number of the control service for each line that it reads. It ends at the end
of its input.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.waits import HANG_S

ROOT = Path(__file__).parents[2]
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",
}
"""Variables that keep Ray's nodes and drivers on 127.0.0.1 and disable usage reports. Workers get normal priority,
since Ray's default (15) starves them on a busy machine. Ray detects a missing node after five health checks: in 5 s
instead of 13."""


def why_no_ray() -> str:
    """Return the reason why a Ray cluster cannot be started here; empty if it can."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed (the extra: ray)"


@dataclass(kw_only=True)
class RayCluster:
    """A running cluster."""

    address: str
    process: subprocess.Popen[str]

    def control(self) -> int:
        """Return the process number of the control service."""
        assert self.process.stdin is not None
        self.process.stdin.write("control\n")
        self.process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def running_ray() -> Iterator[RayCluster]:
    """Start a cluster; stop it at the end."""
    process = subprocess.Popen(
        ["timeout", "--signal=KILL", "3600", sys.executable, "-m", "tests.harness.ray_cluster"],
        cwd=ROOT,
        env={**os.environ, **LOOPBACK},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    cluster = RayCluster(address="", process=process)
    try:
        cluster.address = cluster._answer()
        yield cluster
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(HANG_S)
        process.stdout.close()


def main() -> None:
    """Run a cluster until the end of the input."""
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep Ray's output out of the answers
    common = {"node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, **common})

    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=2, **common)
    answers.write(json.dumps(cluster.address) + "\n")
    for _ in sys.stdin:
        answers.write(json.dumps(cluster.head_node.all_processes["gcs_server"][0].process.pid) + "\n")
    cluster.shutdown()


if __name__ == "__main__":
    main()
