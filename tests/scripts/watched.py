"""The command over a simulated landscape in real time: ``python -m tests.scripts.watched PAUSE_S STOP_S ARGUMENTS...``.

Every look at the launches takes PAUSE_S seconds, every end of a launch that is stopped STOP_S.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from optuna_dsat.cli import main
from optuna_dsat.launch import launcher
from optuna_dsat.launch.machine import journal
from optuna_dsat.launch.protocol import LaunchUpdate
from optuna_dsat.outcome import Outcome
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher


class PacedLauncher(SimulatedLauncher):
    """Takes real time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(Hill(), total_slots=4, noise=0.02)

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        time.sleep(float(sys.argv[1]))
        return super().poll(timeout_s)

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        time.sleep(float(sys.argv[2]))
        super().stop(launch_id, outcome=outcome, message=message)


if __name__ == "__main__":
    launcher.local_launcher = PacedLauncher  # type: ignore[assignment]
    setattr(journal.LeftoverWatch, "begin", lambda _: None)  # noqa: B010 - those of tests beside this one
    main(sys.argv[3:])
