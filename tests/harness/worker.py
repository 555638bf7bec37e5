"""A worker of a study over a simulated landscape: ``python -m tests.harness.worker OPTIONS`` (JSON of ``Options``).

Prints ``ready`` once its imports are done, waits for a line on stdin, runs the whole session in real time, and prints
JSON. Every launch is recorded in a file at its start, as a record independent of the database.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna

from optuna_dsat.config import ds_config
from optuna_dsat.errors import DsatError
from optuna_dsat.launch.protocol import LaunchRequest, LaunchUpdate
from optuna_dsat.store import Store
from optuna_dsat.store.leases import HEARTBEAT_INTERVAL_S
from optuna_dsat.store.reclaim import GRACE_S
from optuna_dsat.study.session import Session
from optuna_dsat.study.spec import StudyRequest
from tests.harness.landscapes import Hill
from tests.harness.simulated import SIMULATED_DEVICES, SimulatedLauncher
from tests.harness.studies import spec_of

STUDY = "shared"
SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    url: str
    folder: str
    max_trials: int
    poll_s: float = 0.0
    """Real time per poll, in seconds; a launch takes about six polls."""
    held: int | None = None
    """Number (from 1) of this worker's trial launch that pauses until ``release_file`` exists."""
    conclude: bool = False
    heartbeat_s: float = HEARTBEAT_INTERVAL_S
    grace_s: float = GRACE_S


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch, as recorded by its launcher at the start."""

    pid: int
    purpose: str
    launch_id: str
    key: str


def launches_file(folder: Path) -> Path:
    return folder / "launches.jsonl"


def release_file(folder: Path) -> Path:
    return folder / "release"


class PacedLauncher(SimulatedLauncher):
    """A simulated launcher that takes real time and records every start."""

    def __init__(self, options: Options) -> None:
        super().__init__(Hill(), total_slots=SLOTS)
        folder = Path(options.folder)
        self._notes = os.open(launches_file(folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._go_on = release_file(folder)
        self._options = options
        self._trials = 0

    def start(self, request: LaunchRequest) -> None:
        super().start(request)
        key = ds_config.canonical_key(request.ds_config, params_count=self._landscape.profile(SLOTS).params)
        note = Launched(pid=os.getpid(), purpose=request.purpose, launch_id=request.launch_id, key=key)
        os.write(self._notes, f"{json.dumps(asdict(note))}\n".encode())
        self._trials += request.purpose == "trial"

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        time.sleep(self._options.poll_s)
        if self._running and self._trials == self._options.held and not self._go_on.exists():
            time.sleep(timeout_s)
            return ()
        return super().poll(timeout_s)


def work(options: Options) -> None:
    """Run the session described by the options."""
    folder = Path(options.folder)
    brief = {"start_profile_step": 2, "end_profile_step": 3, "zero_stages": (1, 2)}  # a small space is soon looked over
    spec = spec_of(folder, name=STUDY, slots_per_trial=SLOTS, confirm=0, max_trials=options.max_trials, **brief)
    launcher = PacedLauncher(options)
    with Store.open(options.url, heartbeat_interval_s=options.heartbeat_s, grace_s=options.grace_s) as store:
        request = StudyRequest(spec=spec, devices=SIMULATED_DEVICES, storage=options.url, conclude=options.conclude)
        Session(request, store=store, launcher=launcher, observer=lambda _: None).run()


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = Options(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        work(options)
    except DsatError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
