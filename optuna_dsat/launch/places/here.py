"""The slots of this machine: launches run as children of this process, and their files are read where they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.agent.command import device_environment, prepare_launch, write_run_directory
from optuna_dsat.launch.agent.run import MachineLaunch
from optuna_dsat.launch.isolation import FolderWatch
from optuna_dsat.launch.launch import Launch, WaitingLaunch
from optuna_dsat.launch.machine.journal import LeftoverWatch, TunerNotes, remove_noted
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.machine.operators import BuildWatch, compile_operators, remove_stale_locks
from optuna_dsat.launch.machine.processes import kill_leftovers, new_mark
from optuna_dsat.launch.machine.slots import SlotLease, SlotPool
from optuna_dsat.launch.protocol import Holder, LaunchRequest
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.runtime.agent.operators import ASYNC_IO, COMMUNICATION, operator_name
from optuna_dsat.runtime.isolation.world import NEW_CACHES


class Here:
    """The slots of this machine (``Places`` of ``launch/launcher.py``)."""

    def __init__(
        self,
        output_dir: Path,
        *,
        pool: SlotPool,
        forking: Forking,
        base_env: Mapping[str, str],
        own_files: Collection[str] = (),
        on_notice: Callable[[str], None],
        on_phase: Callable[[str], None],
    ) -> None:
        self._output_dir = output_dir
        self._notify = on_notice
        self._on_phase = on_phase
        self._pool = pool
        self._base_env = base_env
        self._forking = forking
        self._launches: dict[str, MachineLaunch] = {}
        self._withheld: list[MachineLaunch] = []
        """Ended launches whose devices are still in use."""
        self._changes = FolderWatch(output_dir, own_files=own_files)
        self._notes = TunerNotes(output_dir)
        self._leftovers = LeftoverWatch(self._base_env, on_notice=on_notice)
        self._operators: Sequence[str] = ()
        self._builds = BuildWatch(self._base_env, on_phase=on_phase)

    @property
    def total_slots(self) -> int:
        """Slots, busy or free."""
        return self._pool.total

    @property
    def free_slots(self) -> int:
        """Slots that neither a launch nor another process occupies."""
        self._recheck()
        return self._pool.free

    def holders(self) -> Sequence[Holder]:
        """Return what occupies the slots that are not free, measured now, in the order of the slots."""
        return self._pool.holders()

    def prepare(self, operators: Sequence[str]) -> None:
        """Set the operators that are compiled with the first launch, as that takes a process with torch."""
        self._operators = operators

    def admit(self, request: LaunchRequest) -> None:
        """Compile the operators that are not compiled yet.

        Raises:
            UsageError: If the operator of NVMe offload, which is asked for, cannot be compiled.
        """
        wanted, self._operators = self._operators, ()
        if not wanted:
            return
        python = request.command.interpreter
        environ = device_environment(self._base_env, kind=self._pool.kind, python=python)
        for name, why in compile_operators(wanted, environ, python=python, on_phase=self._on_phase).items():
            if name == ASYNC_IO:
                raise UsageError(f"Offload to NVMe needs DeepSpeed's async_io, which cannot be built here: {why}.")
            means = "gloo alone is used" if name == COMMUNICATION else "what needs it will fail, too"
            self._notify(f"DeepSpeed's {operator_name(name)} cannot be built here, and {means}: {why}.")

    def write(self, request: LaunchRequest) -> RunDirectory:
        """Write the run directory of a launch."""
        return write_run_directory(request, self._output_dir, leavings=self._notes.begin())

    def begin(self, waiting: WaitingLaunch) -> Launch:
        """Take slots and start a launch in them; an interruption leaves neither processes nor files."""
        lease, mark = self._pool.take(waiting.request.slots), new_mark()
        directory = waiting.directory
        try:
            directory = self.write(waiting.request) if directory is None else directory
            return self._start(waiting, directory, lease, mark)
        except BaseException:
            kill_leftovers(mark)
            if directory is not None and directory.leavings is not None:
                remove_noted(directory.leavings)
            self._pool.give_back(lease)
            raise

    def _start(self, waiting: WaitingLaunch, directory: RunDirectory, lease: SlotLease, mark: str) -> Launch:
        request = waiting.request
        if warning := self._changes.begin(request, here=directory.root):
            self._notify(warning)
        prepared = prepare_launch(request, directory, lease, pool=self._pool, base_env=self._base_env, mark=mark)
        processes = MachineLaunch.start(
            request,
            prepared,
            lease=lease,
            pool=self._pool,
            base_env=self._base_env,
            forking=self._forking if waiting.repeats is None else None,
        )
        self._launches[request.launch_id] = processes
        return Launch(
            request=request,
            directory=directory,
            processes=processes,
            devices=lease.indices,
            command=prepared.shown,
            started=processes.started,
            started_unix=processes.started_unix,
            preloaded=processes.preloaded,
            repeats=waiting.repeats,
        )

    def continue_with(self, request: LaunchRequest, launch: Launch, changes: Mapping[str, Any]) -> Launch:
        """Have the ranks of a launch that wait for an order measure another trial."""
        self._changes.check(launch)
        continued = launch.continued(request, changes)
        processes = self._launches[launch.request.launch_id]
        processes.take_on(request, continued.directory)
        self._launches[request.launch_id] = self._launches.pop(launch.request.launch_id)
        return continued

    def advance(self, pause_s: float) -> None:
        """Wait; remove leftovers of killed tuners now and then.

        Raises:
            DeviceError: If nothing runs and the devices of an ended launch are still not free.
        """
        self._leftovers.check()
        if pause_s:
            if not self._launches:
                self._recheck()
                self._refuse_withheld()
            time.sleep(pause_s)

    def tend(self, _waiting: int) -> None:
        """Report builds of operators while launches run."""
        (self._builds.check if self._launches else self._builds.end)()

    def ended(self, launch: Launch, *, note: str) -> None:
        """Forget a launch; withhold its slots if its devices are not free."""
        processes = self._launches.pop(launch.request.launch_id)
        if note:
            self._withheld.append(processes)
        remove_stale_locks(self._base_env)
        self._changes.check(launch)

    def _recheck(self) -> None:
        """Give back the withheld slots whose devices have become free."""
        self._withheld = [processes for processes in self._withheld if not processes.give_back_free()]

    def _refuse_withheld(self) -> None:
        if self._withheld:
            processes = self._withheld[0]
            raise DeviceError(
                f"The devices of {processes.name} are not free although all its processes are gone "
                f"({processes.use_in_words}). See what holds them with nvidia-smi, then resume."
            )

    def close(self) -> None:
        """End everything still running, and wait until its processes are gone."""
        for processes in self._launches.values():
            processes.kill_all()
        for processes in self._launches.values():
            processes.close()
        for processes in self._withheld:
            processes.give_back()
        self._launches.clear()
        self._withheld.clear()
        self._forking.close()
        self._notes.close()
        remove_stale_locks(self._base_env)  # scripts without this package would wait for them forever
        _remove_empty(self._output_dir / NEW_CACHES)
        self._leftovers.look()  # another tuner may have been killed just now, and there may be no later start


def _remove_empty(folder: Path) -> None:
    """Remove the empty folders in a folder, and the folder if nothing is left."""
    with contextlib.suppress(OSError):
        for entry in (*folder.iterdir(), folder):
            with contextlib.suppress(OSError):
                entry.rmdir()
