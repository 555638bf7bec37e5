"""The command and the environment of a launch: pure functions, pinned by golden files in the tests."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from optuna_dsat.launch.machine.devices import Device
from optuna_dsat.launch.machine.nvme import in_own_folders, swap_paths
from optuna_dsat.launch.machine.slots import SlotLease, SlotPool
from optuna_dsat.launch.protocol import LaunchRequest, Rendezvous
from optuna_dsat.launch.run_directory import _TRACKER_PLACES, RANK_VARIABLES, PreparedLaunch, RunDirectory
from optuna_dsat.runtime.adapt.journal import note
from optuna_dsat.runtime.agent.processes import MARK_ENV
from optuna_dsat.runtime.agent.torchrun import LOOPBACK, LOOPBACK_ENVIRONMENT
from optuna_dsat.runtime.imports import ALLOCATOR
from optuna_dsat.runtime.isolation.world import WorldPlan
from optuna_dsat.runtime.measure.memory import usable_cores
from optuna_dsat.runtime.overlay import binds_cores, without_model
from optuna_dsat.runtime.rank import CORES_ENV, LAUNCH_ENV, MANUAL_INIT_ENV, OF_JOB, LaunchPlan
from optuna_dsat.script.arg_mapping import map_arguments
from optuna_dsat.script.command.interception import is_of_rank
from optuna_dsat.script.interpreter import with_package
from optuna_dsat.secrecy.references import resolved, values_for, without_secrets

_OWN_PREFIXES = ("OPTUNA_DSAT_", "PET_", "TORCHELASTIC_")
"""Prefixes of variables of the tuner, or of a parent torchrun, that a launch must not inherit (PET_*: torchrun's
defaults)."""


_QUIET_TRACKERS = {
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # else MLflow 3.13 and newer refuse a folder
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}
"""Settings that keep a trial's experiment tracking on this machine; downloads of models and data sets still work. A
value of "disabled" set by the user is kept."""


def torchrun_command(
    request: LaunchRequest,
    *,
    directory: RunDirectory,
    rendezvous: Rendezvous | None = None,
) -> tuple[str, ...]:
    """Return the launch's command as plain torchrun; with ``rendezvous``, the command of a node.

    Without it, the operating system chooses a port, so that launches do not clash; the ranks' store shares it.
    """
    return (
        request.command.interpreter,
        "-m",
        "torch.distributed.run",
        *_meeting(request, rendezvous),
        *("--max_restarts", "0"),
        *("--log_dir", str(directory.torchrun_dir)),  # else torchrun leaves a folder in the temporary directory
        *rank_words(request),
    )


def rank_words(request: LaunchRequest) -> tuple[str, ...]:
    """Return the program and arguments that torchrun starts on each rank, which need ``rank_variables``."""
    script = request.command
    return (
        *("-m", "--", "optuna_dsat.runtime"),  # behind "--", the script's --run is no abbreviation of --run-path
        *(("--module",) if script.is_module else ()),
        script.script,
        *map_arguments(
            script.args,
            script.arg_mappings,
            request.ds_config,
            world_size=script.data_parallel_size or request.slots,
        ),
    )


def rank_variables(directory: RunDirectory) -> dict[str, str]:
    """Return the variables through which a rank finds its launch description."""
    return {LAUNCH_ENV: str(directory.launch)}


def _meeting(request: LaunchRequest, rendezvous: Rendezvous | None) -> tuple[str, ...]:
    if rendezvous is None:
        return (
            *("--nnodes", "1"),
            *("--nproc_per_node", str(request.slots)),
            *("--rdzv_backend", "c10d"),
            *("--rdzv_endpoint", f"{LOOPBACK}:0"),
            *("--rdzv_id", request.launch_id),
            *("--local_addr", LOOPBACK),
        )
    return (
        *("--nnodes", str(rendezvous.nodes)),
        *("--node_rank", str(rendezvous.node_rank)),
        *("--nproc_per_node", str(request.slots // rendezvous.nodes)),
        *("--rdzv_backend", "static"),
        *("--master_addr", rendezvous.address),
        *("--master_port", str(rendezvous.port)),
        *("--rdzv_id", request.launch_id),
    )


def launch_environment(
    base: Mapping[str, str],
    *,
    request: LaunchRequest,
    directory: RunDirectory,
    devices: Sequence[Device],
    kind: str,
    total_slots: int,
    mark: str,
    rendezvous: Rendezvous | None = None,
) -> dict[str, str]:
    """Return the environment of a launch, based on the tuner's.

    ``request.env`` overrides ``base``, but not variables required by the launch. ``total_slots`` is the maximum number
    of concurrent ranks on this machine, over all launches, which share the cores of this process.
    """
    environ = {
        name: value
        for name, value in base.items()
        if name == MANUAL_INIT_ENV or not (name in RANK_VARIABLES or is_of_rank(name) or name.startswith(_OWN_PREFIXES))
    }
    if request.purpose != "full":
        environ |= {name: value for name, value in _QUIET_TRACKERS.items() if environ.get(name) != "disabled"}
        environ |= {name: place(directory.trackers_dir) for name, place in _TRACKER_PLACES.items()}
        environ.setdefault("PYTHONBREAKPOINT", "0")  # nobody is at a trial's debugger, which would end the script
    given = resolved(request.env, base)
    environ = {**given, **_network(rendezvous), **environ}
    environ |= {name: value for name, value in given.items() if value not in OF_JOB}
    environ.update(values_for([request.command.args, request.ds_config, request.overlay], base))
    environ = device_environment(environ, kind=kind, python=request.command.interpreter)
    if kind == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.visible_id for device in devices)
    else:
        environ["LOCAL_SIZE"] = str(len(devices))
    # Set for started and forked ranks alike: torchrun's default is one thread, a fork inherits its parent's number.
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // max(1, total_slots))))
    environ.update(rank_variables(directory))
    environ[MARK_ENV] = mark
    return environ


def _network(rendezvous: Rendezvous | None) -> Mapping[str, str]:
    """Return variables with the interface by which ranks reach each other; the user's values take precedence."""
    if rendezvous is None or rendezvous.address == LOOPBACK:
        return LOOPBACK_ENVIRONMENT
    return {"GLOO_SOCKET_IFNAME": rendezvous.interface} if rendezvous.interface else {}


def allocator_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch's CUDA allocator in an environment that sets none.

    Segments that grow leave less memory unused, so that larger micro-batches fit. GPUs without virtual memory
    management, such as some virtual GPUs, need it off.
    """
    return {} if any(name in environ for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True"}


def device_environment(base: Mapping[str, str], *, kind: str, python: str) -> dict[str, str]:
    """Return the environment in which an interpreter imports ``optuna_dsat`` and DeepSpeed uses a kind of device.

    ``PATH`` gets the interpreter's folder, where DeepSpeed finds ninja if no virtual environment is activated.
    """
    environ = {**base, "PYTHONPATH": with_package(base.get("PYTHONPATH"))}
    if kind == "cuda":
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environ.setdefault("DS_ACCELERATOR", "cuda")
        environ |= allocator_settings(base)
    else:
        environ["CUDA_VISIBLE_DEVICES"] = ""
        environ["DS_ACCELERATOR"] = "cpu"
    folders = [*filter(None, environ.get("PATH", "").split(os.pathsep))]
    if (folder := str(Path(python).parent)) not in folders:
        environ["PATH"] = os.pathsep.join([*folders, folder])
    return environ


def share_of_cores(slot: int, *, total: int) -> list[int]:
    """Return the cores of one of ``total`` slots: whole physical cores that follow each other, where they suffice.

    They are those of ``deepspeed --bind_cores_to_rank`` if a launch takes all slots: Linux numbers the second threads
    of cores after all first ones.
    """
    usable = sorted(os.sched_getaffinity(0))
    first_threads = [core for core in usable if core < (psutil.cpu_count(logical=False) or 0)]
    cores = first_threads if len(first_threads) >= total else usable
    size = max(1, len(cores) // total)
    start = slot * size % len(cores)
    return cores[start : start + size]


def write_run_directory(
    request: LaunchRequest,
    output_dir: Path,
    *,
    leavings: Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """Create the run directory of a launch with the files that do not depend on its slots.

    ``leavings`` is the journal for leftovers of its processes elsewhere. ``changes`` of the running engine belong to a
    continued launch, which keeps the first one's view of the file system; None for a launch that starts processes.
    """
    directory = replace(RunDirectory.create(output_dir, request.launch_id), leavings=leavings)
    if changes is None and leavings is not None and request.purpose != "full":
        request = in_own_folders(request, leavings)
    directory.write_json(directory.config, {**without_model(request.ds_config), **request.in_file})
    plan = _plan(request, directory)
    if changes is not None:
        plan = replace(plan, changes=dict(changes), world=WorldPlan())
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
    """Return command and environment of a launch on its slots, after writing both to the run directory."""
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
    if binds_cores(request.overlay):
        environ[CORES_ENV] = json.dumps([share_of_cores(slot, total=pool.total) for slot in pool.places_of(lease)])
    directory.write_command(command, cwd=request.command.cwd, devices=lease.indices, environ=environ)
    return PreparedLaunch(
        launch_id=request.launch_id,
        mark=mark,
        directory=directory,
        cwd=request.command.cwd,
        python=request.command.interpreter,
        arguments=tuple(command[3:]),
        shown=without_secrets(command),
        environ=environ,
    )


def start_torchrun(prepared: PreparedLaunch) -> subprocess.Popen[bytes]:
    """Start a launch without a fork."""
    with prepared.directory.agent_log.open("wb") as log:
        return subprocess.Popen(
            prepared.argv(os.getpid()),
            cwd=prepared.cwd,
            env=prepared.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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
        end_profile_step=request.end_profile_step,
        device_memory_bytes=request.device_memory_bytes,
        continues=request.continues,
    )


def _world(request: LaunchRequest, directory: RunDirectory) -> WorldPlan:
    if request.purpose == "full" or request.isolation == "off":
        return WorldPlan()
    # The run directories of further trials are siblings of the first.
    folders = [str(directory.root.parent if request.continues else directory.root)]
    folders += [] if directory.leavings is None else [str(directory.leavings.parent)]
    swapped = (path for _, path in swap_paths(request.ds_config))  # an overlay would slow it down
    return WorldPlan(
        isolation=request.isolation,
        folder=str(directory.world),
        passed=tuple(dict.fromkeys((*folders, *request.writable, *swapped))),
        prepared=request.prepared,
    )
