"""Simulated launches that leave what real ones would if nobody cleared up: a run directory and a process.

A trial that continues a launch is ordered as from real ranks: ``optuna_dsat.runtime.measure.live``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.launch.agent.command import write_run_directory
from optuna_dsat.launch.machine import processes
from optuna_dsat.launch.machine.journal import TunerNotes, remove_noted
from optuna_dsat.launch.machine.processes import kill_leftovers, new_mark
from optuna_dsat.launch.protocol import Finished, LaunchRequest, LaunchUpdate
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.processes import ProcessKey, end_processes
from optuna_dsat.runtime.measure.live import order_next
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLaunch, SimulatedLauncher, SimulatedResult

SLOTS = 2
_PATIENCE_S = 20.0
"""How long a killed process may take to end."""


def _out_of_memory(config: Mapping[str, Any]) -> SimulatedResult | None:
    """End the memory of the hill sooner, so that a search of a few launches comes to its edge."""
    if int(config["train_micro_batch_size_per_gpu"]) <= 30:
        return None
    return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=10, missing_bytes=2**30)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch, as its launcher saw it start or end."""

    launch_id: str
    purpose: str
    key: str
    """Canonical key of the configuration."""
    ended: bool


@dataclass(frozen=True, kw_only=True)
class _Alive:
    """A launch that runs."""

    request: LaunchRequest
    directory: RunDirectory
    record: Path
    """Notes of what it may leave."""
    mark: str
    process: subprocess.Popen[bytes]


class ProcessLauncher(SimulatedLauncher):
    """Simulates launches; each has a run directory, and a marked process that lives as long as it does.

    Args:
        output_dir: Folder of the run directories.
        notes: Descriptor that starts and ends are written to.
    """

    def __init__(self, output_dir: Path, *, notes: int) -> None:
        super().__init__(Hill(_out_of_memory), total_slots=SLOTS, continues=True)
        self._output_dir = Path(output_dir)
        self._notes = notes
        self._left = TunerNotes(self._output_dir)
        self._alive: dict[str, _Alive] = {}

    def start(self, request: LaunchRequest) -> None:
        super().start(request)
        waits = self._alive.get(request.launch_id)
        if waits is not None:
            directory = write_run_directory(request, self._output_dir, leavings=waits.record)
            self._note(request, ended=False)
            order_next(waits.directory.root, directory.launch)
            self._alive[request.launch_id] = replace(waits, request=request, directory=directory)
            return
        record, mark = self._left.begin(), new_mark()
        directory = write_run_directory(request, self._output_dir, leavings=record)
        self._note(request, ended=False)
        process = subprocess.Popen(
            ["/bin/sleep", "600"],
            env={vars(processes)["MARK_ENV"]: mark},  # as ``command`` calls it
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._alive[request.launch_id] = _Alive(
            request=request, directory=directory, record=record, mark=mark, process=process
        )

    def _continued(self, request: LaunchRequest) -> SimulatedLaunch | None:
        parked = list(self._parked)
        launch = super()._continued(request)
        for waiting in parked:
            if waiting not in self._parked:
                self._alive[request.launch_id] = self._alive.pop(waiting.request.launch_id)
        return launch

    def _dismiss(self) -> None:
        for waiting in self._parked:
            launch_id = waiting.request.launch_id
            order_next(self._alive[launch_id].directory.root, None)
            self._end(launch_id)
        super()._dismiss()

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        updates = super().poll(timeout_s)
        for update in updates:
            if isinstance(update, Finished):
                parked = any(waiting.request.launch_id == update.launch_id for waiting in self._parked)
                launch = self._alive[update.launch_id] if parked else self._end(update.launch_id)
                launch.directory.write_report(update.report)
                self._note(launch.request, ended=True)
        return updates

    def close(self) -> None:
        super().close()
        for launch_id in list(self._alive):
            self._end(launch_id)
        self._left.close()

    def _end(self, launch_id: str) -> _Alive:
        launch = self._alive.pop(launch_id)
        key = ProcessKey.of(launch.process.pid)  # its mark is not to be seen before it has started to run
        end_processes([key] if key else ())
        kill_leftovers(launch.mark)
        launch.process.wait(_PATIENCE_S)
        remove_noted(launch.record)
        return launch

    def _note(self, request: LaunchRequest, *, ended: bool) -> None:
        key = ds_config.canonical_key(request.ds_config, params_count=self._landscape.profile(SLOTS).params)
        note = Launched(launch_id=request.launch_id, purpose=request.purpose, key=key, ended=ended)
        os.write(self._notes, f"{json.dumps(asdict(note))}\n".encode())
