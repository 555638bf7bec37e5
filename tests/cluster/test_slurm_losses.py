"""What becomes of a search when a node of SLURM dies; one that falls silent is in ``test_slurm``."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from optuna_dsat.launch.places.slurm import SlurmEngine
from optuna_dsat.outcome import Outcome
from tests.cluster.launches import finish, launcher_on, poll_until, stub
from tests.harness.slurm import SlurmCluster, stretched
from tests.harness.workers import wait_until

pytestmark = pytest.mark.torchrun

LOST_S = 40.0
"""Longest time until a node that died or froze is missed, on a machine with nothing else to do."""


def test_a_node_without_its_daemons_is_lost_and_the_search_goes_on_elsewhere(
    breakable_slurm: SlurmCluster, tmp_path: Path
) -> None:
    words: list[str] = []
    engine = SlurmEngine(())
    launcher = launcher_on(engine, tmp_path, on_notice=words.append)
    try:
        launcher.start(stub(tmp_path, "trial-0000", "--end", "sleep"))
        poll_until(launcher, lambda seen: len(seen) == 2, what="it runs on two nodes")
        node = sorted(agent.environ()["SLURMD_NODENAME"] for agent in breakable_slurm.agents())[1]
        begun = time.monotonic()
        for process in breakable_slurm.keepers(node):
            process.kill()
        report = finish(launcher, limit_s=stretched(LOST_S))
        lost_s = time.monotonic() - begun
        assert report.outcome is Outcome.KILLED
        assert "was lost" in report.message
        wait_until(lambda: not breakable_slurm.ranks(), what="no rank is left", limit_s=stretched(LOST_S) - lost_s)
        launcher.start(stub(tmp_path, "trial-0001"))
        again = finish(launcher)
        assert (again.outcome, node in again.host) == (Outcome.MEASURED, False), again.message
    finally:
        launcher.close()
