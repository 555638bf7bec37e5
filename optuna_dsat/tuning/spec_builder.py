"""Build a study's ``StudySpec`` from checked options, and select its devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import ZERO_STAGE
from optuna_dsat.config.documents import is_pipe
from optuna_dsat.config.knobs import BIND_CORES, MODEL
from optuna_dsat.errors import ConfigError, UsageError
from optuna_dsat.launch.machine.devices import Devices, cpu_devices, detect_devices, refuse_build
from optuna_dsat.launch.machine.host import available_memory_bytes
from optuna_dsat.launch.machine.slots import only_free
from optuna_dsat.script.arg_mapping import parse_mappings
from optuna_dsat.script.interpreter import examined, script_python
from optuna_dsat.secrecy.references import References, keep, refer_in_command
from optuna_dsat.study.options.parse import one_count
from optuna_dsat.study.options.settings import SearchSettings
from optuna_dsat.study.spec import MethodOptions, ScriptSpec, StudySpec, make_spec, parse_bytes
from optuna_dsat.tuning.options.given import config_path, user_config
from optuna_dsat.tuning.options.tune_options import TuneOptions
from optuna_dsat.tuning.target import find_target, writable


def build_spec(method: str, options: TuneOptions, devices: Devices) -> StudySpec:
    """Check all options and return the spec; nothing is launched or written.

    It contains references to secrets, of which this process keeps the values. ``UsageError`` at the first invalid
    option.
    """
    python = options.python  # nodes of a cluster check it themselves
    if options.on == "here":
        python = script_python(python)
        if options.cpu_ranks is None:
            refuse_build(examined(python or sys.executable).versions["torch"])
    target = find_target(options, python=python)
    path = config_path(options)
    user = user_config(options)
    config = ds_config.merge(user.raw, target.overwrites)
    slots = one_count(options.gpus_per_trial, option="--gpus-per-trial") or devices.per_launch
    configured = ds_config.effective(config)
    with _named(path, target.overwrites):
        ds_config.batch_triangle(configured, world_size=ds_config.data_parallel_ranks(configured, slots))
    mappings = {**(user.autotuning.arg_mappings or {}), **(options.arg_mapping or {})}
    stem = "".join(name if name.isprintable() else "_" for name in target.stem)  # a folder's name, without line breaks
    secrets = References(target.args, options.env or {}, config)
    values = {
        **_settings(options),
        "name": f"{stem}-{method}" if options.study is None else options.study,
        "method": method,
        "options": {name: getattr(options, name) for name in MethodOptions.model_fields if hasattr(options, name)},
        "script": ScriptSpec(
            script=target.script,
            args=refer_in_command(target.args, secrets),
            is_module=target.is_module,
            cwd=str(Path.cwd()),
            config_path="" if path is None else str(path.absolute() if is_pipe(path) else path.resolve()),
            arg_mappings=parse_mappings(mappings),
            environment=secrets.data(_variables(options.env or {})),
        ),
        "python": python,
        "ds_config": secrets.data(config),
        "device": devices.kind,
        "slots_per_trial": slots,
        "device_memory_bytes": _device_memory(options, devices),
        "free_memory": options.device_memory is None and devices.kind == "cpu" and options.on == "here",
        "output_dir": str(writable(Path(options.output_dir))),
    }
    spec = make_spec(**values)
    if (spec.fix or {}).get(BIND_CORES):  # for every launch, the baseline's too: it is as if the config had it
        bound = ds_config.merge(spec.ds_config, {MODEL: {BIND_CORES: True}})
        fixed = {name: value for name, value in (spec.fix or {}).items() if name != BIND_CORES}
        spec = spec.model_copy(update={"ds_config": bound, "fix": fixed})
    if spec.only and ZERO_STAGE not in spec.only and options.zero_stages is not None:
        raise UsageError(
            "--zero-stages is about the ZeRO stage, which --only leaves as your config has it; add --only stage, or "
            "drop one of them."
        )
    if spec.nvme_path is not None and 3 not in spec.stages:
        raise UsageError(
            "--nvme-path is for ZeRO 3, as DeepSpeed offloads to NVMe at no other stage; add 3 to --zero-stages, or "
            "drop one of them."
        )
    keep(secrets.values)
    from optuna_dsat.study.space import space_of

    with _named(path, target.overwrites):
        space_of(_at_known_batch(spec), None)  # rejects knobs and values outside the space
    return spec


@contextmanager
def _named(path: Path | None, overwrites: Mapping[str, Any]) -> Iterator[None]:
    """Name the config's file in errors on its values, unless hyperparameters may have set them."""
    try:
        yield
    except ConfigError as error:
        section = error.key.partition(".")[0]
        if not section or path is None or section in overwrites:
            raise
        raise ConfigError(f"{path}: {error}") from None


def _at_known_batch(spec: StudySpec) -> StudySpec:
    """Return the spec with the global batch of every launch, if that is known and within the bounds."""
    from optuna_dsat.study.profile.script import stated_batch

    stated = stated_batch(spec, ranks=spec.data_parallel_ranks) if spec.batch == "keep" else None
    batch = spec.train_batch_size if stated is None else stated.train_batch_size
    bounds = {
        "--max-train-batch-size": spec.max_train_batch_size,
        "autotuning.max_train_batch_size": ds_config.parse_autotuning(spec.ds_config).max_train_batch_size,
    }
    for name, most in bounds.items():
        if batch is not None and most is not None and batch > most:
            raise UsageError(f"Every launch would have a global batch of {batch}, above {name} {most}: change one.")
    return spec.model_copy(update={"train_batch_size": batch})


def _settings(options: TuneOptions) -> dict[str, Any]:
    """Return the spec's fields that options set."""
    settings = {field_.name: getattr(options, field_.name) for field_ in fields(SearchSettings)}
    if stages := settings["zero_stages"]:
        settings["zero_stages"] = tuple(sorted(set(stages)))
    if options.nvme_path is not None:
        settings["nvme_path"] = _existing_folder(os.fspath(options.nvme_path))
    if options.prepared is not None:
        settings["prepared"] = os.path.abspath(options.prepared)  # noqa: PTH100 - keeps links
    settings["writable"] = tuple(os.path.abspath(path) for path in options.writable or ())  # noqa: PTH100 - keeps links
    return settings


def _variables(given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment variables as given."""
    if wrong := [name for name in given if not name or "=" in name]:
        raise UsageError(f"--env has a variable named {wrong[0]!r}; write NAME=VALUE, the name without '='.")
    return given


def _existing_folder(path: str) -> str:
    """Return the path of the folder for NVMe offload."""
    if not Path(path).is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme-path is {path}, which is not a writable folder.")
    return os.path.abspath(path)  # noqa: PTH100 - keeps links


def _device_memory(options: TuneOptions, devices: Devices) -> int | None:
    """Return the bytes that one rank may allocate; None for no limit.

    The default on a GPU is None: an allocation that does not fit fails on its own. The default on the CPU is three
    quarters of a rank's share of the host memory available now. Beyond that, the kernel may kill any process on the
    machine, including other users'.
    """
    if options.device_memory is not None:
        try:
            return parse_bytes(str(options.device_memory))
        except UsageError as error:
            raise UsageError(f"--device-memory: {error}") from None
    if devices.kind != "cpu" or options.on != "here":  # a cluster node determines its own limit
        return None
    share = min(devices.host_memory_bytes, available_memory_bytes()) // len(devices.devices)
    return max(1, share * 3 // 4)


def search_devices(options: TuneOptions) -> Devices:
    """Return the devices to tune on."""
    if options.on != "here":
        from optuna_dsat.tuning.cluster import cluster_devices

        return cluster_devices(options)
    return choose_devices(
        one_count(options.gpus_per_trial, option="--gpus-per-trial"),
        one_count(options.cpu_ranks, option="--cpu-ranks"),
        option="--gpus-per-trial",
        free_only=options.only_free_gpus,
    )


def choose_devices(wanted: int | None, cpu_ranks: int | None, *, option: str, free_only: bool = False) -> Devices:
    """Return the GPUs that may be used (all if no number is wanted), or CPU ranks.

    Raises:
        UsageError: If more GPUs are requested than exist, or both GPUs and CPU ranks.
        DeviceError: If GPUs do not respond, or only free GPUs were requested and all are in use.
    """
    if cpu_ranks is not None:
        if wanted is not None:
            raise UsageError(f"{option} and --cpu-ranks exclude each other: give one.")
        return cpu_devices(cpu_ranks)
    devices = detect_devices()
    if free_only:
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
