"""The command and the environment of a launch: pure functions, pinned by golden files in the tests."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from optuna_dsat.launch.devices import Device
from optuna_dsat.launch.loopback import LOOPBACK, LOOPBACK_ENVIRONMENT
from optuna_dsat.launch.processes import MARK_ENV
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.rendezvous import Rendezvous
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.runtime.launch_plan import LAUNCH_ENV
from optuna_dsat.runtime.rank import MANUAL_INIT_ENV
from optuna_dsat.script.arg_mapping import map_arguments
from optuna_dsat.script.wrapped_launch import is_of_rank
from optuna_dsat.secrecy.references import resolved, values_for

__all__ = [
    "RANK_VARIABLES",
    "TRACKER_FOLDERS",
    "agent_command",
    "device_environment",
    "launch_environment",
    "needs_python_path",
    "package_dir",
    "rank_variables",
    "rank_words",
    "torchrun_command",
]

_OWN_PREFIXES = ("OPTUNA_DSAT_", "PET_", "TORCHELASTIC_")
"""Prefixes of variables of the tuner, or of a torchrun above it, that a launch must not inherit (PET_*: torchrun's
defaults)."""

RANK_VARIABLES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)
"""Variables that torchrun sets for its ranks; a stale value would tie a launch to another job or a port in use."""

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
"""Settings that keep what a trial logs to experiment trackers on this machine; downloads of models and data sets still
work. A value of "disabled" set by the user is kept."""


_TRACKER_PLACES: dict[str, Callable[[Path], str]] = {
    "COMET_OFFLINE_DIRECTORY": str,
    "MLFLOW_TRACKING_URI": lambda folder: (folder / "mlflow").as_uri(),
    "TENSORBOARD_LOGGING_DIR": lambda folder: str(folder / "tensorboard"),
    "WANDB_DIR": str,
}
"""Variable with a tracker's location -> that location in the launch's folder for trackers."""

TRACKER_FOLDERS = frozenset(_TRACKER_PLACES)
"""Variables whose value is a folder of the launch."""


def torchrun_command(
    request: LaunchRequest,
    *,
    directory: RunDirectory,
    rendezvous: Rendezvous | None = None,
    python: str = sys.executable,
) -> tuple[str, ...]:
    """Return the launch's command as plain torchrun, that of one node where ``rendezvous`` is given.

    On one machine a rendezvous on port 0 lets the operating system choose the port, so that concurrent launches do not
    clash; the ranks' own store shares that port.
    """
    return (
        python,
        "-m",
        "torch.distributed.run",
        *_meeting(request, rendezvous),
        *("--max_restarts", "0"),
        *("--log_dir", str(directory.torchrun_dir)),  # else torchrun leaves a folder among the temporary files
        *rank_words(request),
    )


def rank_words(request: LaunchRequest) -> tuple[str, ...]:
    """Return what torchrun starts on each rank, which needs ``rank_variables``."""
    script = request.command
    return (
        *("-m", "optuna_dsat.runtime"),
        *(("--module",) if script.is_module else ()),
        script.script,
        *map_arguments(script.args, script.arg_mappings, request.ds_config, world_size=request.slots),
    )


def rank_variables(directory: RunDirectory) -> dict[str, str]:
    """Return the variables by which a rank finds its launch description."""
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


def agent_command(command: Sequence[str], *, record: Path, tuner_pid: int) -> list[str]:
    """Return ``command`` (from ``torchrun_command``) run by ``launch/agent.py``, which ends with ``tuner_pid``."""
    python, _, _, *arguments = command
    return [python, "-P", "-m", "optuna_dsat.launch.agent", str(record), str(tuner_pid), *arguments]


def launch_environment(
    base: Mapping[str, str],
    *,
    request: LaunchRequest,
    directory: RunDirectory,
    devices: Sequence[Device],
    kind: str,
    total_slots: int,
    mark: str,
    cores: int | None = None,
    rendezvous: Rendezvous | None = None,
    python: str = sys.executable,
) -> dict[str, str]:
    """Return the environment of a launch.

    Args:
        base: The tuner's own environment.
        request: The launch; its ``env`` overrides ``base``, but not what the launch itself needs.
        directory: Its run directory.
        devices: Its devices.
        kind: ``cuda`` or ``cpu``.
        total_slots: Ranks that may run at once on this machine, over all launches.
        mark: Mark of the launch's processes.
        cores: CPU cores to share; None for those this process may use.
        rendezvous: Where the nodes of the launch meet; None for a launch on this machine alone.
        python: Interpreter of the launch. Its folder is added to the end of ``PATH``: DeepSpeed looks there for ninja
            when it compiles its operators, and the virtual environment may not be activated.
    """
    environ = {
        name: value
        for name, value in base.items()
        if name == MANUAL_INIT_ENV or not (name in RANK_VARIABLES or is_of_rank(name) or name.startswith(_OWN_PREFIXES))
    }
    if request.purpose != "full":
        environ.update(_tracker_settings(environ, directory))
    environ = {**_network(rendezvous), **environ, **resolved(request.env, base)}
    environ.update(values_for([request.command.args, request.ds_config, request.overlay], base))
    environ = device_environment(environ, kind=kind, python=python)
    if kind == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.visible_id for device in devices)
    else:
        environ["LOCAL_SIZE"] = str(len(devices))
    # Set for started and forked ranks alike: torchrun's default is one thread, a fork's that of its parent.
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, total_slots))))
    environ.update(rank_variables(directory))
    environ[MARK_ENV] = mark
    return environ


def _network(rendezvous: Rendezvous | None) -> Mapping[str, str]:
    """Return variables that say by which interface ranks reach each other; what the user has set takes precedence."""
    if rendezvous is None or rendezvous.address == LOOPBACK:
        return LOOPBACK_ENVIRONMENT
    return {"GLOO_SOCKET_IFNAME": rendezvous.interface} if rendezvous.interface else {}


def device_environment(base: Mapping[str, str], *, kind: str, python: str = sys.executable) -> dict[str, str]:
    """Return ``base`` with variables that make DeepSpeed use a kind of device (``cuda`` or ``cpu``) and find ninja."""
    environ = dict(base)
    if kind == "cuda":
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environ.setdefault("DS_ACCELERATOR", "cuda")
    else:
        environ["CUDA_VISIBLE_DEVICES"] = ""
        environ["DS_ACCELERATOR"] = "cpu"
    folders = [*filter(None, environ.get("PATH", "").split(os.pathsep))]
    if (own := str(Path(python).parent)) not in folders:
        environ["PATH"] = os.pathsep.join([*folders, own])
    return environ


def _tracker_settings(environ: Mapping[str, str], directory: RunDirectory) -> dict[str, str]:
    settings = {name: value for name, value in _QUIET_TRACKERS.items() if environ.get(name) != "disabled"}
    return settings | {name: place(directory.trackers_dir) for name, place in _TRACKER_PLACES.items()}


def package_dir() -> Path:
    """Return the folder of the running optuna_dsat package."""
    return Path(__file__).resolve().parents[1]


@functools.cache
def needs_python_path(python: str = sys.executable) -> bool:
    """Whether a fresh interpreter finds no optuna_dsat or another than the running one.

    That is so if the package was found through the working directory or a changed ``sys.path``.
    """
    code = "import optuna_dsat; print(optuna_dsat.__file__)"
    answer = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False, cwd="/")
    found = answer.stdout.strip()
    return not found or Path(found).resolve().parent != package_dir()
