"""From what was given to a study that may start: one path for the commands and for ``optuna_dsat.tune``."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.autotuning_section import options_of
from optuna_dsat.config.knobs import KNOBS, NVME
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.slots import only_free
from optuna_dsat.script.arg_mapping import parse_mappings
from optuna_dsat.script.module_file import module_file
from optuna_dsat.script.trial_class import (
    RUNNER,
    Hparams,
    find_trial_class,
    is_trial_class,
    own_overwrites,
    runner_arguments,
)
from optuna_dsat.study.request import StudyRequest
from optuna_dsat.study.spec import MethodOptions, ScriptSpec, StudySpec, make_spec, parse_bytes
from optuna_dsat.tuning.options import TuneOptions

__all__ = [
    "Prepared",
    "check_storage",
    "devices_for",
    "make_devices",
    "prepare",
    "spec_of",
    "target_of",
    "trial_target",
    "with_autotuning",
]


_DEFAULT_METHOD = "asha"
"""Where neither an option nor the config names one."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study that may start: all that was given is checked, and nothing is launched or written yet."""

    request: StudyRequest
    options: TuneOptions
    """The options, with those of the config's ``autotuning`` section where none were given."""
    notes: Sequence[str]
    """Lines for the user: what of the ``autotuning`` section cannot be honoured, and what is odd about the devices."""


def prepare(method: str | None, options: TuneOptions) -> Prepared:
    """Check what was given and say what it comes to.

    Args:
        method: Search method; None for the one that the options or the config name.
        options: The options.

    Raises:
        UsageError: On the first thing that cannot be used.
    """
    options, notes = with_autotuning(_one_kind_of_device(options))
    if method is None:
        method = getattr(options, "method", None) or _DEFAULT_METHOD
    devices = make_devices(options)
    notes += devices.notices
    request = StudyRequest(
        spec=spec_of(method, options, devices),
        devices=devices,
        storage=options.storage,
        reuse_profile=options.profile_reuse,
        check_loss=options.check_loss,
    )
    return Prepared(request=request, options=options, notes=notes)


_DEVICES = ("gpus_per_trial", "cpu_ranks")
_FIRST_HAND = ("command line", "argument")
"""Origins of what was given for this search; a file or the environment speaks for all of them."""


def _one_kind_of_device(options: TuneOptions) -> TuneOptions:
    """Return the options without the kind of device that a file names, where this search was given the other."""
    given = [name for name in _DEVICES if options.origins.get(name) in _FIRST_HAND]
    if len(given) != 1:
        return options
    (other,) = set(_DEVICES) - set(given)
    origins = {name: origin for name, origin in options.origins.items() if name != other}
    if other == "cpu_ranks":
        return replace(options, origins=origins, cpu_ranks=None)
    return replace(options, origins=origins, gpus_per_trial=None)


def with_autotuning(options: TuneOptions) -> tuple[TuneOptions, list[str]]:
    """Return the options, taken from the config's ``autotuning`` section where none were given, and lines for the user.

    The lines name what of the section cannot be honoured.

    Raises:
        ConfigError: If the config cannot be read.
    """
    user = ds_config.load(options.ds_config)
    wanted, notes = options_of(user.autotuning)
    names = {field.name for field in fields(options)}
    offered = names - options.origins.keys()
    gpus = wanted.pop("gpus_per_trial", None)
    if gpus is not None and options.gpus_per_trial is None and options.cpu_ranks is None:
        found = detect_devices()
        available = len(found.devices) if found.kind == "cuda" else 0
        if gpus <= available:
            wanted["gpus_per_trial"] = gpus
        else:
            notes.append(f"autotuning.num_gpus is not used: it is {gpus}, and this machine offers {available} GPUs.")
    if user.autotuning.fast:
        listed = {key.split(".")[1] for key in user.lists if "." in key}
        kept = {knob.name for knob in KNOBS if knob.name not in listed and knob.path[-1] != "stage"}
        fixed = {pair.partition("=")[0] for pair in options.fix or ()}
        wanted["no_tune"] = sorted({*(options.no_tune or ()), *kept} - fixed - {NVME})
        offered.add("no_tune")
    if "method" in wanted and "method" not in offered:
        del wanted["method"]
        notes = [note for note in notes if "tuner_type" not in note]  # a method was named on the command line
    if "early_stopping" in wanted and "early_stopping" not in names:
        notes.append("autotuning.tuner_early_stopping is not used by this method.")
    taken = {name: value for name, value in wanted.items() if name in offered}
    origins = {**options.origins, **dict.fromkeys(taken, f"autotuning in {options.ds_config}")}
    return replace(options, **taken, origins=origins), notes


def check_storage(request: StudyRequest) -> None:
    """Refuse a request whose study or storage a real run would refuse; create nothing.

    Raises:
        StorageUrlError: If the storage cannot be opened.
        StudyConflictError: If a study of this name is there for something else.
    """
    from optuna_dsat.store import Store, database_exists
    from optuna_dsat.study.session import check_study

    if not database_exists(request.storage):
        return  # made by the run
    with Store.open(request.storage, create=False) as store:
        check_study(store, request.spec)


def make_devices(options: TuneOptions) -> Devices:
    """Return the devices to tune on.

    Raises:
        UsageError: If more GPUs are asked for than there are, or both GPUs and CPU ranks.
        DeviceError: If GPUs do not answer, or none is free where only those were asked for.
    """
    return devices_for(
        options.gpus_per_trial, options.cpu_ranks, option="--gpus-per-trial", free_ones=options.only_free_gpus
    )


def devices_for(wanted: int | None, cpu_ranks: int | None, *, option: str, free_ones: bool = False) -> Devices:
    """Return the GPUs that may be used, of which a launch takes ``wanted`` (None: all), or CPU ranks.

    Args:
        wanted: GPUs of a launch.
        cpu_ranks: Ranks of a launch on the CPU.
        option: What the user calls ``wanted``.
        free_ones: Whether to leave out GPUs that are in use now.

    Raises:
        UsageError: If more GPUs are asked for than there are, or both GPUs and CPU ranks.
        DeviceError: If GPUs do not answer, or none is free where only those were asked for.
    """
    if cpu_ranks is not None:
        if wanted is not None:
            raise UsageError(f"{option} and --cpu-ranks exclude each other: give one.")
        return cpu_devices(cpu_ranks)
    devices = detect_devices()
    if free_ones:
        devices = only_free(devices)
    if wanted is None:
        return devices
    available = devices.per_launch if devices.kind == "cuda" else 0
    if wanted < 1 or wanted > available:
        offers = f"{'a launch can take' if devices.per_launch < len(devices.devices) else 'this machine offers'}"
        raise UsageError(
            f"{option} is {wanted}, but {offers} {available} GPU{'s' * (available != 1)}. "
            + ("Use --cpu-ranks to tune on the CPU." if available == 0 else f"Give 1 to {available}.")
            + "".join(f" {notice}" for notice in devices.notices)
        )
    return devices


def spec_of(method: str, options: TuneOptions, devices: Devices) -> StudySpec:
    """Check all options and return the spec; nothing is launched or written.

    Raises:
        UsageError: On the first thing that cannot be used.
    """
    target = target_of(options)
    user = ds_config.load(options.ds_config)
    config = ds_config.merge(user.raw, target.overwrites)
    slots = options.gpus_per_trial or devices.per_launch
    ds_config.batch_triangle(ds_config.effective(config), world_size=slots)
    own = set(MethodOptions.model_fields)
    spec = make_spec(
        name=options.study or f"{target.stem}-{method}",
        method=method,
        options=make_options({k: v for k, v in asdict(options).items() if k in own}),
        script=ScriptSpec(
            script=target.script,
            args=target.args,
            is_module=target.is_module,
            cwd=str(Path.cwd()),
            config_path=str(options.ds_config.resolve()),
            arg_mappings=_mappings(options.arg_mapping or (), user.autotuning.arg_mappings or {}),
        ),
        ds_config=config,
        metric=options.metric,
        zero_stages=_stages(options.zero_stages),
        fix=_fixed(options.fix or ()),
        no_tune=tuple(options.no_tune or ()),
        nvme_path=options.nvme_path,
        train_batch_size=options.train_batch_size,
        device=devices.kind,
        slots_per_trial=slots,
        device_memory_bytes=_device_memory(options, devices),
        max_trials=options.max_trials,
        max_concurrent_trials=options.max_concurrent_trials,
        max_slots=options.max_slots,
        wait_for_gpus_s=options.wait_for_gpus,
        start_profile_step=options.start_profile_step,
        end_profile_step=options.end_profile_step,
        adaptive_steps=options.adaptive_steps,
        trial_timeout_s=options.trial_timeout,
        stall_timeout_s=options.stall_timeout,
        timeout_s=options.timeout,
        max_retries=options.max_retries,
        random_seed=options.random_seed,
        enqueue_user_config=options.enqueue_user_config,
        confirm=options.confirm,
        launcher=options.launcher,
        preload=tuple(options.preload or ()),
        no_preload=tuple(options.no_preload or ()),
        output_dir=str(_writable(options.output_dir)),
    )
    from optuna_dsat.study.space import space_of

    space_of(spec, None)  # A knob or value that the space cannot take is refused here, before anything runs.
    return spec


def make_options(values: dict[str, Any]) -> MethodOptions:
    """Return the method's options, refusing bad ones in one line."""
    from pydantic import ValidationError

    try:
        return MethodOptions(**values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][-1]).replace("_", "-")
        raise UsageError(f"--{option} is {first['input']!r}: {first['msg'].lower()}.") from None


def _device_memory(options: TuneOptions, devices: Devices) -> int | None:
    """Return what a rank may allocate: as asked for; on the CPU three quarters of its share of the host's memory.

    On a GPU an allocation that does not fit fails on its own. On the CPU the kernel would end some process of the
    machine, and not always ours.
    """
    if options.device_memory is not None:
        return parse_bytes(options.device_memory)
    return devices.devices[0].memory_bytes * 3 // 4 if devices.kind == "cpu" else None


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What the ranks run."""

    script: str
    is_module: bool
    args: tuple[str, ...]
    stem: str
    """What its study is called."""
    overwrites: Mapping[str, Any] = field(default_factory=dict)
    """Of the hyperparameters, laid over the user's config."""


def target_of(options: TuneOptions) -> _Target:
    """Return what the ranks are to run: a script, a module, or the runner of a ``DeepSpeedTrial``.

    Raises:
        UsageError: If it is not there, or is no Python.
    """
    rest = tuple(options.script_args or ())
    entry = str(options.script)
    if not options.module and is_trial_class(entry) and not options.script.is_file():
        return trial_target(entry, options.ds_config, options.hparams, rest)
    if options.hparams is not None:
        raise UsageError("--hparams is for a DeepSpeedTrial (NAME:CLASS); a script takes its arguments after --.")
    script, stem = _module(entry) if options.module else _script(options.script)
    return _Target(script=script, is_module=options.module, args=rest, stem=stem)


def trial_target(entry: str, config: Path, hparams: Path | None, rest: tuple[str, ...]) -> _Target:
    """Return the runner of a ``DeepSpeedTrial`` with its arguments.

    Raises:
        UsageError: If there is no such class, or the hyperparameters cannot be used.
    """
    found = find_trial_class(entry, Path.cwd())
    overwrites = {} if hparams is None else own_overwrites(Hparams.load(hparams), config, Path.cwd())
    named = None if hparams is None else str(hparams)
    return _Target(
        script=RUNNER,
        is_module=True,
        args=runner_arguments(entry, config=str(config), hparams=named, rest=rest),
        stem=found.name,
        overwrites=overwrites,
    )


def _script(path: Path) -> tuple[str, str]:
    """Return the absolute path of a script and the name that its study gets."""
    if not path.is_file():
        raise UsageError(
            f"The script {path} {'is not a file' if path.exists() else 'does not exist'}."
            + (" To run a module, say so with -m." if module_file(str(path), Path.cwd()) else "")
        )
    _check_python(path, f"The script {path}")
    return str(path.resolve()), path.stem


def _module(name: str) -> tuple[str, str]:
    """Return the name of a module that can be run, and the name that its study gets."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"-m takes a module's name, such as package.module; got {name!r}.")
    file = module_file(name, Path.cwd())
    if file is None:
        path = name.replace(".", "/")
        raise UsageError(
            f"The module {name} was not found: there is no {path}.py and no {path}/__main__.py in {Path.cwd()}, "
            "and no such module is installed."
        )
    _check_python(file, f"The module {name}")
    return name, name.rpartition(".")[2]


def _check_python(path: Path, what: str) -> None:
    try:
        ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"{what} is not Python{where}: {error.args[0]}.") from None


def _stages(texts: Sequence[str] | None) -> tuple[int, ...]:
    if not texts:
        return (1, 2, 3)
    stages = []
    for text in re.split(r"[,\s]+", " ".join(texts).strip()):
        if text not in ("0", "1", "2", "3"):
            raise UsageError(f"--zero-stages names {text!r}; ZeRO stages are 0, 1, 2 and 3.")
        stages.append(int(text))
    return tuple(sorted(set(stages)))


def _mappings(pairs: Sequence[str], from_config: Mapping[str, str]) -> dict[str, str]:
    """Return the script's options that follow the config: those of the config's autotuning section, then ours."""
    given = dict(from_config)
    for pair in pairs:
        key, equals, option = pair.partition("=")
        if not equals:
            raise UsageError(f"--arg-mapping is {pair!r}; write KEY=--OPTION.")
        given[key] = option
    return parse_mappings(given)


def _fixed(pairs: Sequence[str]) -> dict[str, Any]:
    fixed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key or not text:
            raise UsageError(f"--fix is {pair!r}; write KEY=VALUE, such as --fix overlap_comm=true.")
        try:
            fixed[key] = json.loads(text)
        except ValueError:
            fixed[key] = text
    return fixed


def _writable(path: Path) -> Path:
    """Return the absolute output directory if it can be written to, or made; makes nothing."""
    absolute = path.absolute()
    parent = absolute
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"The output directory {path} cannot be written to ({parent}). Give another with --output-dir."
        )
    return absolute
