"""Searches whose launches run on a cluster: checks before the start, and the launcher that holds the nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.agent.agent import digest_of
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine.devices import Device, Devices
from optuna_dsat.launch.places.cluster import Cluster, Limits
from optuna_dsat.launch.places.engine import Engine
from optuna_dsat.launch.places.place import Layout
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.study.options.parse import one_count
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.tuning.options.tune_options import TuneOptions


def cluster_devices(options: TuneOptions) -> Devices:
    """Return the slots of one launch on a cluster, described by the options; ``UsageError`` if these do not fit."""
    if options.gpus_per_trial is not None:
        raise UsageError(f"--gpus-per-trial is for this machine: with --on {options.on} give --gpus-per-node.")
    gpus = options.gpus_per_node
    ranks = one_count(options.cpu_ranks, option="--cpu-ranks")
    if (gpus is None) == (ranks is None):
        asked = "not both" if gpus is not None else "one of them"
        raise UsageError(f"--on {options.on} takes --gpus-per-node N, or --cpu-ranks N for ranks on the CPU: {asked}.")
    count = ranks if gpus is None else gpus
    if count is None or count < 1 or options.nodes_per_trial < 1:
        raise UsageError("--nodes-per-trial, --gpus-per-node and --cpu-ranks are at least 1.")
    kind = "cpu" if gpus is None or os.environ.get("DS_ACCELERATOR") == "cpu" else "cuda"
    return _devices(kind, options.nodes_per_trial * count, " ".join([options.on, *(options.slurm_arg or ())]))


def devices_of(spec: StudySpec) -> Devices:
    """Return the slots of one launch of a stored study."""
    return _devices(spec.device, spec.slots_per_trial, " ".join([spec.on, *(spec.slurm_arg or ())]))


def _devices(kind: str, count: int, name: str) -> Devices:
    """Return devices described by the cluster from which they are requested."""
    slots = tuple(Device(index=index, visible_id="", name=name, memory_bytes=0) for index in range(count))
    return Devices(kind=kind, devices=slots, host_memory_bytes=0)


def check_cluster(spec: StudySpec) -> None:
    """Raise if the cluster can never satisfy the request."""
    with closing(_engine(spec)) as engine:
        engine.check(nodes=spec.nodes_per_trial, slots=spec.gpus_per_node or 0)


def cluster_launcher(
    spec: StudySpec,
    *,
    own_files: Collection[str],
    on_notice: Callable[[str], None],
    on_phase: Callable[[str], None],
) -> TorchrunLauncher:
    """Return the launcher of a study whose launches run on a cluster."""
    output_dir = Path(spec.study_dir)
    most = spec.max_concurrent_trials if spec.max_slots is None else spec.max_slots // spec.slots_per_trial
    forking = Forking(output_dir / "warm.log", enabled=spec.launcher == "warm", on_notice=on_notice)
    nodes = Cluster(
        output_dir,
        engine=_engine(spec),
        layout=Layout(
            nodes=spec.nodes_per_trial,
            slots=spec.slots_per_node,
            kind=spec.device,
            gpus=spec.gpus_per_node or 0,
            python=spec.python,
        ),
        limits=Limits(
            places=max(1, min(spec.max_concurrent_trials, most)),
            queue_s=spec.queue_timeout,
            idle_s=spec.idle_release,
        ),
        files=_needed_files(spec),
        forking=forking,
        own_files=own_files,
        on_notice=on_notice,
        on_phase=on_phase,
    )
    return TorchrunLauncher(output_dir, nodes, forking=forking, on_notice=on_notice)


def _needed_files(spec: StudySpec) -> dict[str, str]:
    """Return a mapping from each file that every node must have to the digest of its content."""
    script = spec.script
    paths = [script.cwd, *([] if script.is_module else [script.script]), *filter(None, [script.config_path])]
    result = {path: digest_of(Path(path)) for path in paths}
    return {path: digest for path, digest in result.items() if digest}


def _engine(spec: StudySpec) -> Engine:
    """Return the engine that allocates nodes in a cluster."""
    if spec.on == "slurm":
        from optuna_dsat.launch.places.slurm import SlurmEngine

        return SlurmEngine(spec.slurm_arg or (), python=spec.agent_python)
    from optuna_dsat.launch.places.ray_engine import RayEngine

    return RayEngine(spec.ray_address, names=spec.ray_node or (), python=spec.agent_python)
