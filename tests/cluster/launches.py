"""Launches of a stub over the nodes of a cluster, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.places.cluster import Cluster, Limits
from optuna_dsat.launch.places.engine import Engine
from optuna_dsat.launch.places.place import Layout
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest, Observed
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.runtime.events import RankStarted
from tests.harness.launches import STUB, reports, request, updates_until_finished
from tests.harness.waits import wait_until

TWO_RANKS = Layout(nodes=2, slots=1, kind="cpu", gpus=2)


def launcher_on(
    engine: Engine, folder: Path, *, on_notice: Callable[[str], None] = lambda _: None, **options: Any
) -> TorchrunLauncher:
    forking = Forking(folder / "out" / "warm.log", enabled=False, on_notice=on_notice)
    values = {"layout": TWO_RANKS, "limits": Limits(), "files": {}, **options}
    places = Cluster(folder / "out", engine=engine, forking=forking, on_notice=on_notice, **values)
    return TorchrunLauncher(folder / "out", places, forking=forking, on_notice=on_notice)


def stub(folder: Path, launch_id: str = "trial-0000", *args: str, **changes: Any) -> LaunchRequest:
    return request(folder, launch_id=launch_id, script=STUB, args=args, **changes)


def finish(launcher: TorchrunLauncher) -> LaunchReport:
    [report] = reports(updates_until_finished(launcher)).values()
    return report


def poll_until(launcher: TorchrunLauncher, condition: Callable[[list[Observed]], bool], *, what: str) -> list[Observed]:
    """Poll until a condition holds; return the starts of ranks seen meanwhile."""
    seen: list[Observed] = []

    def holds() -> bool:
        seen.extend(u for u in launcher.poll(0.0) if isinstance(u, Observed) and isinstance(u.event, RankStarted))
        return condition(seen)

    wait_until(holds, what=what)
    return seen
