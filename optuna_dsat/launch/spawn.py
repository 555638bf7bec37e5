"""Starts the processes of a launch on slots taken for it: forked where possible, else by plain torchrun."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from optuna_dsat.launch.agent_handle import AgentHandle
from optuna_dsat.launch.build_locks import remove_stale_locks
from optuna_dsat.launch.forking import Forking
from optuna_dsat.launch.preload import Preload
from optuna_dsat.launch.processes import kernel_oom_kills
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.run_files import PreparedLaunch, prepare_launch
from optuna_dsat.launch.running import RunningLaunch
from optuna_dsat.launch.slots import SlotLease, SlotPool
from optuna_dsat.launch.warm import WarmOrder

__all__ = ["Started", "spawn", "start_processes"]


@dataclass(frozen=True, kw_only=True)
class Started:
    """The processes of a launch on this machine, just started."""

    agent: AgentHandle
    preloaded: Preload | None
    """Imports of the process that they were forked from; None for plain torchrun."""
    command: tuple[str, ...]
    """As plain torchrun, without secrets."""
    started: float
    """Monotonic time."""
    started_unix: float
    oom_kills_before: int | None
    """The kernel's count of processes killed for want of memory; None if unknown."""


def spawn(
    request: LaunchRequest,
    directory: RunDirectory,
    lease: SlotLease,
    *,
    pool: SlotPool,
    base_env: Mapping[str, str],
    forking: Forking | None,
    mark: str,
) -> RunningLaunch:
    """Start a launch.

    Args:
        request: The launch.
        directory: Its run directory, written.
        lease: Its slots.
        pool: The pool they are from.
        base_env: Environment to inherit from.
        forking: Forks launches; None for plain torchrun.
        mark: Mark of its processes.

    Raises:
        OutputError: If the run directory cannot be written.
    """
    prepared = prepare_launch(request, directory, lease, pool=pool, base_env=base_env, mark=mark)
    begun = start_processes(request, prepared, base_env=base_env, forking=forking, mark=mark)
    return RunningLaunch(
        request=request,
        directory=directory,
        lease=lease,
        mark=mark,
        agent=begun.agent,
        preloaded=begun.preloaded,
        command=begun.command,
        started=begun.started,
        started_unix=begun.started_unix,
        oom_kills_before=begun.oom_kills_before,
        look_at_gpus=lambda own: pool.sight(lease, own),
    )


def start_processes(
    request: LaunchRequest,
    prepared: PreparedLaunch,
    *,
    base_env: Mapping[str, str],
    forking: Forking | None,
    mark: str,
) -> Started:
    """Start the processes of a launch on this machine.

    Args:
        request: The launch.
        prepared: Its command and environment.
        base_env: Environment that they are made from.
        forking: Forks launches; None for plain torchrun.
        mark: Mark of its processes.
    """
    remove_stale_locks(base_env)
    oom_kills = kernel_oom_kills()
    agent = None if forking is None else forking.start(_warm_order(request, prepared, mark))
    # A fork may have waited for the imports; the launch begins here.
    started, started_unix = time.monotonic(), time.time()
    return Started(
        agent=_start_torchrun(request, prepared) if agent is None else agent,
        preloaded=None if agent is None else agent.preload,
        command=prepared.shown,
        started=started,
        started_unix=started_unix,
        oom_kills_before=oom_kills,
    )


def _warm_order(request: LaunchRequest, prepared: PreparedLaunch, mark: str) -> WarmOrder:
    return WarmOrder(
        launch_id=request.launch_id,
        mark=mark,
        arguments=prepared.arguments,
        environ=prepared.environ,
        cwd=request.command.cwd,
        directory=prepared.directory,
    )


def _start_torchrun(request: LaunchRequest, prepared: PreparedLaunch) -> AgentHandle:
    with prepared.directory.agent_log.open("wb") as log:
        return subprocess.Popen(
            prepared.argv,
            cwd=request.command.cwd,
            env=prepared.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
