"""Run directory, command and environment of a launch, written before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.launch.command import (
    agent_command,
    launch_environment,
    needs_python_path,
    package_dir,
    torchrun_command,
)
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.rendezvous import Rendezvous
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.slots import SlotLease, SlotPool
from optuna_dsat.runtime.launch_plan import LaunchPlan
from optuna_dsat.runtime.leavings import note
from optuna_dsat.runtime.world import WorldPlan
from optuna_dsat.secrecy.command import without_secrets

__all__ = ["PreparedLaunch", "prepare_launch", "write_run_directory"]


@dataclass(frozen=True, kw_only=True)
class PreparedLaunch:
    """Command and environment of a launch whose run directory is written."""

    directory: RunDirectory
    argv: list[str]
    """Command to start."""
    arguments: tuple[str, ...]
    """torchrun's arguments, without ``python -m torch.distributed.run``."""
    shown: tuple[str, ...]
    """The command as plain torchrun, without secrets."""
    environ: dict[str, str]


def write_run_directory(request: LaunchRequest, output_dir: Path, *, leavings: Path | None = None) -> RunDirectory:
    """Create the run directory of a launch with the files that do not depend on its slots.

    Args:
        request: The launch.
        output_dir: Folder of the run directories.
        leavings: File in which its processes note what they may leave elsewhere; None for none.

    Raises:
        OutputError: If it cannot be written.
    """
    directory = replace(RunDirectory.create(output_dir, request.launch_id), leavings=leavings)
    directory.write_json(directory.config, request.ds_config)
    directory.write_json(directory.overlay, request.overlay)
    plan = _plan(request, directory)
    if plan.world.folder and leavings is not None:
        note(leavings, plan.world.folder)
    directory.write_json(directory.launch, asdict(plan))
    return directory


def prepare_launch(
    request: LaunchRequest,
    directory: RunDirectory,
    lease: SlotLease,
    *,
    pool: SlotPool,
    base_env: Mapping[str, str],
    mark: str,
    rendezvous: Rendezvous | None = None,
) -> PreparedLaunch:
    """Return command and environment of a launch on its slots, after writing both to the run directory.

    Args:
        request: The launch.
        directory: Its run directory.
        lease: Its slots.
        pool: The pool they are from.
        base_env: Environment to inherit from.
        mark: Mark of the launch's processes.
        rendezvous: Where the nodes of the launch meet; None for a launch on this machine alone.

    Raises:
        OutputError: If they cannot be written.
    """
    command = torchrun_command(request, directory=directory, rendezvous=rendezvous)
    environ = launch_environment(
        base_env,
        request=request,
        directory=directory,
        devices=lease.devices,
        kind=pool.kind,
        total_slots=pool.total,
        mark=mark,
        rendezvous=rendezvous,
    )
    if needs_python_path():
        link = str(directory.link_package(package_dir()))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (link, environ.get("PYTHONPATH"))))
    directory.write_command(command, cwd=request.command.cwd, devices=lease.indices, environ=environ)
    return PreparedLaunch(
        directory=directory,
        argv=agent_command(command, record=directory.agent_record, tuner_pid=os.getpid()),
        arguments=tuple(command[3:]),
        shown=without_secrets(command),
        environ=environ,
    )


def _plan(request: LaunchRequest, directory: RunDirectory) -> LaunchPlan:
    return LaunchPlan(
        launch_id=request.launch_id,
        purpose=request.purpose,
        events_dir=str(directory.events_dir),
        log_dir="" if request.purpose == "full" else str(directory.log_dir),
        config_path=str(directory.config),
        user_config_path=request.command.config_path,
        trackers_dir="" if request.purpose == "full" else str(directory.trackers_dir),
        leavings="" if directory.leavings is None else str(directory.leavings),
        world=_world(request, directory),
        overlay=dict(request.overlay),
        batch_source=dict(request.command.batch_source),
        start_profile_step=request.start_profile_step,
        end_profile_step=request.end_profile_step,
        device_memory_bytes=request.device_memory_bytes,
    )


def _world(request: LaunchRequest, directory: RunDirectory) -> WorldPlan:
    if request.purpose == "full" or request.isolation == "off":
        return WorldPlan()
    own = [str(directory.root), *([] if directory.leavings is None else [str(directory.leavings.parent)])]
    swapped = _nvme_paths(request.ds_config)
    return WorldPlan(
        isolation=request.isolation,
        folder=str(directory.world),
        passed=tuple(dict.fromkeys((*own, *request.writable, *swapped))),
    )


def _nvme_paths(config: Any) -> Iterator[str]:
    """Yield the folders to which DeepSpeed swaps: it removes its files itself, and no overlay may slow it down."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "nvme_path" and isinstance(value, str):
                yield value
            yield from _nvme_paths(value)
