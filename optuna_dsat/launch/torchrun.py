"""Launches on this machine through torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from optuna_dsat.launch.build_locks import remove_stale_locks
from optuna_dsat.launch.classify import LaunchFacts, StopReason, Verdict, classify
from optuna_dsat.launch.command import (
    agent_command,
    launch_environment,
    needs_python_path,
    package_dir,
    torchrun_command,
)
from optuna_dsat.launch.devices import DeviceError, Devices, Nvml
from optuna_dsat.launch.processes import kernel_oom_kills, kill_leftovers, new_mark
from optuna_dsat.launch.protocol import Finished, LaunchReport, LaunchRequest, LaunchUpdate, Observed
from optuna_dsat.launch.run_directory import OutputError, RunDirectory, without_secrets
from optuna_dsat.launch.running import RunningLaunch, first_failure_code
from optuna_dsat.launch.slots import SlotLease, SlotPool
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import RankFailed, StepMeasured
from optuna_dsat.runtime.plan import LaunchPlan
from optuna_dsat.runtime.session import EXIT_EVENTS_LOST

__all__ = ["TorchrunLauncher", "run_full"]

_LOOK_S = 0.02
"""Pause between two looks at the event files."""

_FREE_DEADLINE_S = 60.0
"""After the last process is gone, a GPU's memory must be back within this time."""

_FULL_DISK_BYTES = 2**20
"""With less than this left, a rank that died without a record is taken to have found the disk full."""

_EXPLAINED_BY_LOG = frozenset({Outcome.COMMUNICATION_ERROR, Outcome.SCRIPT_ERROR, Outcome.STALLED, Outcome.TIMEOUT})
"""Outcomes for which a report quotes the end of the log where no rank recorded a traceback: shown, never read."""

_EXCERPT_BYTES = 8192
_EXCERPT_LINES = 20


class TorchrunLauncher:
    """Starts launches on this machine, each ``torchrun`` in a session of its own, and follows its event files.

    Implements the ``Launcher`` protocol. ``start`` must be called from a thread that lives as long as the launches: the
    kernel ends a launch with the thread that started it, and so with a tuner that is killed.

    Args:
        output_dir: Where the run directories go, one per launch.
        devices: The devices to use; GPUs that other processes use are left alone.
        max_slots: Use no more than this many of them at a time; None for all.
        nvml: NVML to ask about GPUs; None for the machine's.
        base_env: Environment that launches inherit from; None for this process's own.

    Raises:
        UsageError: If ``max_slots`` is less than 1.
        DeviceError: If there are GPUs but NVML does not answer.
    """

    def __init__(
        self,
        output_dir: Path | str,
        *,
        devices: Devices,
        max_slots: int | None = None,
        nvml: Nvml | None = None,
        base_env: Mapping[str, str] | None = None,
    ) -> None:
        self._output_dir = Path(output_dir)
        self._pool = SlotPool(devices, max_slots=max_slots, nvml=nvml)
        self._base_env = dict(os.environ if base_env is None else base_env)
        self._running: dict[str, RunningLaunch] = {}
        self._withheld: list[RunningLaunch] = []

    @property
    def free_slots(self) -> int:
        """Slots that a launch could take now."""
        self._recheck_withheld()
        return self._pool.free

    @property
    def total_slots(self) -> int:
        """Slots this launcher manages, busy or free."""
        return self._pool.total

    def run_directory(self, launch_id: str) -> RunDirectory:
        """Return the directory of a launch."""
        return RunDirectory(self._output_dir.resolve() / launch_id)

    def start(self, request: LaunchRequest) -> None:
        """Start a launch.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free.
            ValueError: If the purpose is ``full`` (see ``run_full``) or the name is in use.
            OutputError: If the run directory cannot be written.
        """
        if request.purpose == "full":
            raise ValueError("A full run is in the foreground and is not followed: call run_full().")
        if request.launch_id in self._running:
            raise ValueError(f"launch_id is unique; {request.launch_id!r} is running.")
        lease = self._pool.take(request.slots)
        try:
            self._running[request.launch_id] = self._spawn(request, lease)
        except BaseException:
            self._pool.give_back(lease)
            raise

    def _spawn(self, request: LaunchRequest, lease: SlotLease) -> RunningLaunch:
        mark = new_mark()
        prepared = _prepare(
            request, lease, pool=self._pool, output_dir=self._output_dir, base_env=self._base_env, mark=mark
        )
        remove_stale_locks(self._base_env)
        oom_kills = kernel_oom_kills()
        with prepared.directory.agent_log.open("wb") as log:
            agent = subprocess.Popen(
                prepared.argv,
                cwd=request.command.cwd,
                env=prepared.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return RunningLaunch(
            request=request,
            directory=prepared.directory,
            lease=lease,
            mark=mark,
            agent=agent,
            command=prepared.shown,
            started=time.monotonic(),
            started_unix=time.time(),
            oom_kills_before=oom_kills,
        )

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return what happened since the last call, waiting up to ``timeout_s`` for something to happen.

        Raises:
            DeviceError: If nothing runs and the devices of an ended launch are still not free.
            OutputError: If a launch failed because the disk is full; it has no outcome then, and can be repeated.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            updates = self._look()
            if updates or (now := time.monotonic()) >= deadline:
                return updates
            if not self._running:
                self._complain_of_withheld()
            time.sleep(min(_LOOK_S, deadline - now))

    def _look(self) -> list[LaunchUpdate]:
        updates: list[LaunchUpdate] = []
        for launch in list(self._running.values()):
            name = launch.request.launch_id
            updates += [Observed(launch_id=name, event=event) for event in launch.advance(time.monotonic())]
            if launch.gone_at is not None and (report := self._conclude(launch, launch.gone_at)) is not None:
                updates.append(Finished(launch_id=name, report=report))
        return updates

    def _conclude(self, launch: RunningLaunch, gone_at: float) -> LaunchReport | None:
        """Return the report of a launch whose processes are gone, None while its devices are not free."""
        now = time.monotonic()
        note = ""
        if not self._pool.is_free(launch.lease, launch.known):
            if now - gone_at < _FREE_DEADLINE_S:
                return None
            note = f" (not free after {_FREE_DEADLINE_S:g} s: {self._pool.describe_use(launch.lease)})"
            self._withheld.append(launch)
        else:
            self._pool.give_back(launch.lease)
        del self._running[launch.request.launch_id]
        remove_stale_locks(self._base_env, made_after=launch.started_unix)
        facts = launch.facts(kernel_oom_kills())
        verdict = classify(facts)
        report = _report(launch, facts, verdict, note=note, exit_s=now - launch.last_event)
        try:
            launch.directory.write_report(report)
        except OutputError:
            if _unrecorded(facts, verdict):
                raise
            return report  # what was measured is in it; the next launch meets the same disk
        if _unrecorded(facts, verdict) and self._output_is_full(facts):
            raise OutputError(
                f"No space left in {self._output_dir}: a launch could not write what it measured. "
                "Free some space, then resume."
            )
        return report

    def _output_is_full(self, facts: LaunchFacts) -> bool:
        lost = EXIT_EVENTS_LOST in facts.exit_codes.values()
        return lost or shutil.disk_usage(self._output_dir).free < _FULL_DISK_BYTES

    def _recheck_withheld(self) -> None:
        for launch in list(self._withheld):
            if self._pool.is_free(launch.lease, launch.known):
                self._withheld.remove(launch)
                self._pool.give_back(launch.lease)

    def _complain_of_withheld(self) -> None:
        self._recheck_withheld()
        if self._withheld:
            launch = self._withheld[0]
            raise DeviceError(
                f"The devices of {launch.request.launch_id} are not free although all its processes are gone "
                f"({self._pool.describe_use(launch.lease)}). See what holds them with nvidia-smi, then resume."
            )

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; its ``Finished`` comes with a later ``poll``. Unknown or ended launches are ignored."""
        launch = self._running.get(launch_id)
        if launch is not None:
            launch.end(StopReason(outcome=outcome, message=message))

    def close(self) -> None:
        """End everything still running, and wait until its processes are gone.

        Raises:
            TimeoutError: If processes outlive SIGKILL, which only an uninterruptible wait in the kernel explains.
        """
        for launch in self._running.values():
            launch.end(StopReason(outcome=Outcome.LOST, message="the tuner ended"))
        for launch in self._running.values():
            kill_leftovers(launch.mark)
            launch.agent.wait()
            self._pool.give_back(launch.lease)
        for launch in self._withheld:
            self._pool.give_back(launch.lease)
        self._running.clear()
        self._withheld.clear()


def run_full(
    request: LaunchRequest,
    *,
    devices: Devices,
    output_dir: Path | str | None = None,
    nvml: Nvml | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Run a launch to its end in the foreground, on the user's terminal, and return its exit code.

    Ctrl-C reaches torchrun, which ends the ranks; a second one ends everything at once.

    Args:
        request: The launch; its purpose is ``full``.
        devices: The devices to use.
        output_dir: Where its run directory goes; None for a temporary one.
        nvml: NVML to ask about GPUs; None for the machine's.
        stdout: Where its output goes; None for our own.

    Returns:
        0, or the exit code of the rank that failed first (128 plus the number of a signal, as shells do).

    Raises:
        ValueError: If the purpose is another.
        SlotsBusyError: If fewer than ``request.slots`` slots are free.
        OutputError: If the run directory cannot be written.
    """
    if request.purpose != "full":
        raise ValueError(f"Only a launch of purpose 'full' runs in the foreground; got {request.purpose!r}.")
    if output_dir is None:
        with tempfile.TemporaryDirectory(prefix="optuna-dsat-") as temporary:
            return run_full(request, devices=devices, output_dir=temporary, nvml=nvml, stdout=stdout)
    pool, mark = SlotPool(devices, nvml=nvml), new_mark()
    lease = pool.take(request.slots)
    try:
        prepared = _prepare(request, lease, pool=pool, output_dir=Path(output_dir), base_env=os.environ, mark=mark)
        agent = subprocess.Popen(prepared.argv, cwd=request.command.cwd, env=prepared.environ, stdout=stdout)
        interrupted = _wait_in_foreground(agent)
        code = first_failure_code(prepared.directory.agent_record)
    finally:
        kill_leftovers(mark)
        pool.give_back(lease)
    if interrupted:
        return 128 + signal.SIGINT
    code = agent.returncode if code is None else code
    return 128 - code if code < 0 else code


def _wait_in_foreground(agent: subprocess.Popen[bytes]) -> bool:
    """Wait for a foreground process; return whether the user interrupted it."""
    try:
        agent.wait()
    except KeyboardInterrupt:
        try:
            agent.wait()
        except KeyboardInterrupt:
            agent.kill()
            agent.wait()
        return True
    return False


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A launch that is ready to be started: its run directory is written."""

    directory: RunDirectory
    argv: list[str]
    """What is started."""
    shown: tuple[str, ...]
    """The same as plain torchrun, without secrets."""
    environ: dict[str, str]


def _prepare(
    request: LaunchRequest,
    lease: SlotLease,
    *,
    pool: SlotPool,
    output_dir: Path,
    base_env: Mapping[str, str],
    mark: str,
) -> _Prepared:
    """Write the run directory of a launch and make its command and environment."""
    directory = RunDirectory.create(output_dir, request.launch_id)
    command = torchrun_command(request, directory=directory)
    environ = launch_environment(
        base_env,
        request=request,
        directory=directory,
        devices=lease.devices,
        kind=pool.kind,
        total_slots=pool.total,
        mark=mark,
    )
    if needs_python_path():
        link = str(directory.link_package(package_dir()))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (link, environ.get("PYTHONPATH"))))
    directory.write_json(directory.config, request.ds_config)
    directory.write_json(directory.overlay, request.overlay)
    directory.write_json(directory.launch, _plan(request, directory))
    directory.write_command(command, cwd=request.command.cwd, devices=lease.indices, environ=environ)
    return _Prepared(
        directory=directory,
        argv=agent_command(command, record=directory.agent_record, tuner_pid=os.getpid()),
        shown=without_secrets(command),
        environ=environ,
    )


def _unrecorded(facts: LaunchFacts, verdict: Verdict) -> bool:
    """Whether a launch failed and no rank could say why."""
    recorded = any(isinstance(event, RankFailed) for events in facts.events.values() for event in events)
    return verdict.outcome is Outcome.SCRIPT_ERROR and not recorded


def _plan(request: LaunchRequest, directory: RunDirectory) -> dict[str, object]:
    plan = LaunchPlan(
        launch_id=request.launch_id,
        purpose=request.purpose,
        events_dir=str(directory.events_dir),
        log_dir="" if request.purpose == "full" else str(directory.log_dir),
        config_path=str(directory.config),
        user_config_path=request.command.config_path,
        trackers_dir="" if request.purpose == "full" else str(directory.trackers_dir),
        overlay=dict(request.overlay),
        start_profile_step=request.start_profile_step,
        end_profile_step=request.end_profile_step,
        device_memory_bytes=request.device_memory_bytes,
    )
    return dict(vars(plan))


def _report(launch: RunningLaunch, facts: LaunchFacts, verdict: Verdict, *, note: str, exit_s: float) -> LaunchReport:
    boundaries = [e.time for events in facts.events.values() for e in events if isinstance(e, StepMeasured)]
    ended = time.time()
    log = _log_of(launch.directory, verdict.rank)
    return LaunchReport(
        launch_id=launch.request.launch_id,
        outcome=verdict.outcome,
        message=verdict.message + note,
        exit_code=launch.agent.returncode,
        error_excerpt=verdict.error_excerpt or (_last_lines(log) if verdict.outcome in _EXPLAINED_BY_LOG else ""),
        missing_bytes=verdict.missing_bytes,
        log_path=str(log),
        command=launch.command,
        host=socket.gethostname(),
        devices=launch.lease.indices,
        pids=launch.pids,
        started_at=launch.started_unix,
        startup_s=max(0.0, min(boundaries, default=ended) - launch.started_unix),
        measured_s=max(boundaries) - min(boundaries) if boundaries else 0.0,
        exit_s=exit_s,
    )


def _log_of(directory: RunDirectory, rank: int) -> Path:
    """Return the log that tells most: the rank's errors, else its output, else torchrun's own."""
    for path in (directory.stderr(rank), directory.stdout(rank)):
        if path.exists() and path.stat().st_size:
            return path
    return directory.agent_log


def _last_lines(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _EXCERPT_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-_EXCERPT_LINES:])
