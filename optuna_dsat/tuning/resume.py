"""A stored study on this machine: the request that continues it, and full training with one of its configurations."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from optuna.trial import FrozenTrial

from optuna_dsat.config import user_file
from optuna_dsat.config.documents import is_pipe
from optuna_dsat.errors import ConfigError, UsageError
from optuna_dsat.launch.agent.command import rank_variables, rank_words, write_run_directory
from optuna_dsat.launch.full_run import run_full
from optuna_dsat.launch.machine.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.places.slurm import agent_environment
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.script.command.preparation import missing_files
from optuna_dsat.script.command.source import module_file
from optuna_dsat.script.interpreter import script_python
from optuna_dsat.script.trial_class import RUNNER
from optuna_dsat.secrecy.references import resolved, values_for
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.store import Store
from optuna_dsat.study.command import cluster_training_command, device_settings
from optuna_dsat.study.config_changes import config_changes
from optuna_dsat.study.confirm.measured import configuration_of
from optuna_dsat.study.requests import full_request
from optuna_dsat.study.spec import StudyRequest, StudySpec, make_spec
from optuna_dsat.study.stored import StoredStudy, read_launches, read_stored
from optuna_dsat.study.trust import ran_here, remember, require_secrets, script_file, what_runs
from optuna_dsat.trials import attributes
from optuna_dsat.words import things_in_words


def resume_request(
    name: str,
    storage: str,
    *,
    limits: Mapping[str, float],
    workdir: Path | None,
    python: str | None = None,
    conclude: bool,
    on_notice: Callable[[str], None],
    approve: Callable[[Sequence[str], bool], None],
) -> StudyRequest:
    """Return the request that continues a stored study with its original settings.

    ``limits`` are new values of fields of ``StudySpec`` or ``MethodOptions``, which are stored; ``workdir`` and
    ``python`` are this machine's, if not as stored. ``approve`` is called with lines on the study's commands, and
    whether this user already ran exactly that on this machine; it raises ``UsageError`` to refuse.

    Raises:
        UsageError: If the study does not exist, or script or devices do not meet its requirements.
        UnreadableStudyError: If this version cannot read the stored study.
    """
    with Store.open(storage, create=False) as store:
        study = read_stored(store, name)
        read_launches(store, study.record)
        record, spec = study.record, study.stored_spec
        if "min_gain" in limits and spec.method != "guided":
            raise UsageError(f"--min-gain is an option of guided; this study is searched by {spec.method}.")
        if limits:
            values = spec.model_dump()
            for field, limit in limits.items():
                (values["options"] if field in values["options"] else values)[field] = limit
            spec = make_spec(**values)
        here = spec_here(study, spec, workdir=workdir, python=python, approve=approve)
        if edited := _edited_keys(here):
            on_notice(f"{here.script.config_path} was edited; the study keeps its config: {', '.join(edited)}.")
        if limits:
            store.update_spec(record.uuid, spec.stored())
    spec = here
    devices = devices_for(spec, on_notice)
    return StudyRequest(
        spec=spec,
        devices=devices,
        storage=storage,
        conclude=conclude,
        relocated=workdir is not None or python is not None,
    )


def _edited_keys(spec: StudySpec) -> list[str]:
    """Return each key of the config file that differs from the study's config, with both values."""
    script = spec.script
    if not script.config_path or script.script == RUNNER or is_pipe(script.config_path):
        return []  # a trial class merges its hyperparameters over its config
    try:
        now = user_file.load(script.config_path).raw
    except ConfigError:
        return []  # the file is not needed: the study contains its config
    return [
        f"{change.key} {change.own or 'unset'} (file: {change.best or 'unset'})"
        for change in config_changes(hidden_data(resolved(spec.ds_config)), hidden_data(now))
    ]


def spec_here(
    study: StoredStudy,
    spec: StudySpec | None = None,
    *,
    workdir: Path | None,
    python: str | None = None,
    approve: Callable[[Sequence[str], bool], None],
) -> StudySpec:
    """Return a stored study's spec with this machine's paths, approved; ``UsageError`` if the script is not here."""
    spec = study.stored_spec if spec is None else spec
    here = spec if workdir is None else _relocated(spec, workdir)
    if python is not None:
        here = here.model_copy(update={"python": script_python(python) if spec.on == "here" else python})
    script = here.script
    if script.is_module and module_file(script.script, Path(script.cwd), python=here.python) is None:
        raise UsageError(f"The module {script.script} is not found from {script.cwd}; give its folder with --workdir.")
    if not script.is_module and not Path(script.script).is_file():
        raise UsageError(f"The script {script.script} is not on this machine; give its folder with --workdir.")
    file = script_file(here)
    is_known = ran_here(study.stored_spec, file=file)
    approve(what_runs(here, study.profiled, is_known=is_known), is_known)
    remember(study.stored_spec, file=file)
    return here


def _relocated(spec: StudySpec, workdir: Path) -> StudySpec:
    """Return the spec with its paths, including paths among the script's arguments, moved to ``workdir``."""
    script, old = spec.script, spec.script.cwd
    if not workdir.is_dir():
        raise UsageError(f"--workdir is {workdir}, which is not a directory.")
    new = workdir.resolve()

    def moved(path: str) -> str:
        return str(new / Path(path).relative_to(old)) if Path(path).is_relative_to(old) else path

    def moved_argument(arg: str) -> str:
        flag, equals, path = arg.rpartition("=")
        return f"{flag}{equals}{moved(path)}"

    return spec.model_copy(update={"output_dir": moved(str(spec.output_dir))}).with_script(
        cwd=str(new),
        script=script.script if script.is_module else moved(script.script),
        args=tuple(map(moved_argument, script.args)),
        config_path=moved(script.config_path),
    )


def devices_for(spec: StudySpec, on_notice: Callable[[str], None]) -> Devices:
    """Return the devices of launches, on this machine or the study's cluster; ``UsageError`` if too few."""
    if spec.on != "here":
        from optuna_dsat.tuning.cluster import check_cluster, devices_of

        check_cluster(spec)
        return devices_of(spec)
    devices = detect_devices() if spec.device == "cuda" else cpu_devices(spec.slots_per_trial)
    for notice in devices.notices:
        on_notice(notice)
    if devices.kind != spec.device or len(devices.devices) < spec.slots_per_trial:
        raise UsageError(
            f"The study needs {things_in_words(spec.slots_per_trial, spec.device + ' slot')} a launch; "
            f"this machine offers {len(devices.devices)} of {devices.kind}."
        )
    return devices


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
    if spec.prepared is not None and (paths := [*missing_files(Path(spec.prepared))]):
        on_notice(
            f"Missing here, and made for trials by the command of the search: {', '.join(paths)}. Run its steps before "
            f"the training first, or copy that from {spec.prepared}."
        )
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
