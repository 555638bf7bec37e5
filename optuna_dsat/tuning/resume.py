"""Turn the name of a stored study into the request that continues it on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from optuna_dsat.config import user_file
from optuna_dsat.config.documents import is_pipe
from optuna_dsat.errors import ConfigError, UsageError
from optuna_dsat.launch.machine.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.script.command.source import module_file
from optuna_dsat.script.interpreter import script_python
from optuna_dsat.script.trial_class import RUNNER
from optuna_dsat.secrecy.references import resolved
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.store import Store
from optuna_dsat.study.config_changes import config_changes
from optuna_dsat.study.spec import StudyRequest, StudySpec, make_spec
from optuna_dsat.study.stored import StoredStudy, read_launches, read_stored
from optuna_dsat.study.trust import ran_here, remember, script_file, what_runs
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
        raise UsageError(
            f"The module {script.script} is not found from {script.cwd}; say with --workdir where it lies."
        )
    if not script.is_module and not Path(script.script).is_file():
        raise UsageError(f"The script {script.script} is not on this machine; say with --workdir where it lies.")
    file = script_file(here)
    approve(what_runs(here, study.profiled), ran_here(study.stored_spec, file=file))
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

    script = script.model_copy(
        update={
            "cwd": str(new),
            "script": script.script if script.is_module else moved(script.script),
            "args": tuple(map(moved_argument, script.args)),
            "config_path": moved(script.config_path),
        }
    )
    return spec.model_copy(update={"script": script, "output_dir": moved(str(spec.output_dir))})


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
