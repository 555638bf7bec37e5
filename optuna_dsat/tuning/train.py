"""Full training with a configuration of a stored study."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from optuna.trial import FrozenTrial

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.agent.command import rank_variables, rank_words, write_run_directory
from optuna_dsat.launch.full_run import run_full
from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.launch.places.slurm import agent_environment
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.secrecy.references import values_for
from optuna_dsat.store import Store
from optuna_dsat.study.command import cluster_training_command, device_settings
from optuna_dsat.study.confirm.measured import configuration_of
from optuna_dsat.study.requests import full_request
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.stored import StoredStudy, read_stored
from optuna_dsat.study.trust import require_secrets
from optuna_dsat.trials import attributes
from optuna_dsat.tuning.resume import devices_for, spec_here


def train_study(
    name: str,
    storage: str,
    *,
    trial: int | None,
    args: Sequence[str],
    workdir: Path | None,
    python: str | None,
    on_notice: Callable[[str], None],
    approve: Callable[[Sequence[str], bool], None],
    ask_for_secrets: Callable[[StudySpec], None],
) -> int:
    """Train a stored study's script to its end in the foreground; return its exit code.

    Raises:
        UsageError: If the study or trial does not exist, or script or devices do not meet its requirements.
        NothingRunnableError: If nothing was measured yet.
        UnreadableStudyError: If the study cannot be read.
        DeviceError: If other processes use the devices for too long.
        OutputError: If the run directory cannot be written.
    """
    with Store.open(storage, create=False) as store:
        study = read_stored(store, name)
    here = spec_here(study, workdir=workdir, python=python, approve=approve)
    chosen, words = study.selected() if trial is None else _trial(study, trial)
    on_notice(f"Training with {words}")
    ask_for_secrets(here)
    require_secrets(here)
    spec = here if study.profiled is None else study.profiled.followed_by(here)
    return train_trial(study, chosen, spec=spec, devices=devices_for(spec, on_notice), args=args, on_notice=on_notice)


def train_trial(
    study: StoredStudy,
    trial: FrozenTrial,
    *,
    spec: StudySpec,
    devices: Devices,
    args: Sequence[str] = (),
    stdout: TextIO | None = None,
    on_notice: Callable[[str], None],
) -> int:
    """Train with the configuration of a trial, applied as in its launch; return the exit code."""
    request = full_request(
        spec,
        config=study.complete_config(trial),
        overlay=trial.user_attrs[attributes.OVERLAY],
        args=args,
        host_threads=trial.user_attrs.get(attributes.HOST_THREADS),
    )
    if spec.on != "here":
        return _train_on_cluster(spec, request, stdout=stdout)
    return run_full(
        request,
        devices=devices,
        output_dir=spec.study_dir,
        max_slots=spec.max_slots,
        stdout=stdout,
        wait_for_gpus_s=spec.wait_for_gpus,
        on_notice=on_notice,
    )


def _train_on_cluster(spec: StudySpec, request: LaunchRequest, *, stdout: TextIO | None) -> int:
    """Train on nodes of the study's cluster; return the exit code."""
    variables = {**request.env, **rank_variables(write_run_directory(request, spec.study_dir))}
    settings = [*device_settings(spec), *(f"{name}={value}" for name, value in variables.items())]
    shown = cluster_training_command(spec, settings=settings, words=rank_words(request))
    needed = [request.command.args, request.ds_config, request.overlay, request.env]
    environ = agent_environment({**os.environ, **values_for(needed)})
    done = subprocess.run(["bash", "-c", shown], cwd=spec.script.cwd, env=environ, stdout=stdout, check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _trial(study: StoredStudy, number: int) -> tuple[FrozenTrial, str]:
    launched = {trial.number: trial for trial in study.trials if attributes.OVERLAY in trial.user_attrs}
    if number not in launched:
        raise UsageError(f"--trial {number}: the study {study.spec.name!r} has launched no trial of this number.")
    return launched[number], f"trial {number}: {configuration_of(launched[number])}."
