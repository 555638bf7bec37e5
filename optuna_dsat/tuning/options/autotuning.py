"""Translate the ``autotuning`` section of a config to options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.config.autotuning_section import IGNORED, Autotuning
from optuna_dsat.config.conditions import NVME, ZERO_STAGE
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.launch.machine.devices import detect_devices
from optuna_dsat.study.options.declaration import options_in
from optuna_dsat.tuning.options.given import Given, user_config
from optuna_dsat.tuning.options.tune_options import AutotuningOptions, TuneOptions
from optuna_dsat.words import things_in_words

_METRICS = {"flops": "FLOPS_per_gpu"} | {
    name: name for name in ("throughput", "latency", "forward", "backward", "step")
}
"""DeepSpeed's metric, in lower case -> ours."""
_METHODS = {"random": "random", "gridsearch": "binary", "model_based": "asha"}
"""DeepSpeed's tuner -> the method nearest to it."""


def options_of(section: Autotuning) -> tuple[dict[str, Any], list[str]]:
    """Return options (including ``method``) by an ``autotuning`` section, and a line for each unsupported key."""
    declared = options_in(AutotuningOptions)
    options = {
        name: getattr(section, option.autotuning) for name, option in declared.items() if option.autotuning is not None
    }
    notes = _not_honoured(section)
    if section.metric is not None:
        options["metric"] = _METRICS.get(section.metric.lower())
        if options["metric"] is None:
            notes.append(f"autotuning.metric is not used: {section.metric!r} (known: {', '.join(_METRICS)}).")
    if section.tuner_type is not None:
        options["method"] = method = _METHODS.get(section.tuner_type)
        if method is None:
            notes.append(f"autotuning.tuner_type is not used: {section.tuner_type!r} (known: {', '.join(_METHODS)}).")
        elif method != section.tuner_type:
            notes.append(
                f"autotuning.tuner_type {section.tuner_type!r} is not available: `tune` and `run` use {method}."
            )
    return {name: value for name, value in options.items() if value is not None}, notes


def _not_honoured(section: Autotuning) -> list[str]:
    """Return a line for each key of the section without an equivalent option."""
    notes = [f"autotuning.{key} is not used: {IGNORED[key]}." for key in section.ignored]
    notes += [f"autotuning.{key} is not used: neither DeepSpeed nor this tuner knows it." for key in section.unknown]
    if section.enabled is False:
        notes.append("autotuning.enabled is false; the section is honoured all the same, since you started a tuner.")
    if section.num_nodes is not None and section.num_nodes > 1:
        notes.append(
            "autotuning.num_nodes is not used: a launch runs on this machine; with --on slurm or --on ray it runs on "
            f"{section.num_nodes} nodes."
        )
    if section.mp_size is not None and section.mp_size > 1:
        notes.append(
            f"autotuning.mp_size is not used: batch sizes are those of {section.mp_size} times as many data-parallel "
            "ranks as a model-parallel script has."
        )
    return notes


_UNITS = {"gpus_per_trial": "gpu", "cpu_ranks": "rank", "gpus_per_node": "gpu", "nodes_per_trial": "node"}
"""Option with a number of resources of a launch -> the resource."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Numbers of GPUs, CPU ranks or nodes, with one search for each."""

    option: str
    """Name of the option with the number."""
    counts: tuple[int, ...]
    origin: str
    """Where they come from."""

    @property
    def unit(self) -> str:
        """The counted unit, as used in names of studies."""
        return _UNITS[self.option]


def sweep_of(given: Given) -> tuple[Sweep | None, list[str]]:
    """Return the numbers of devices to search at, and a line for each unavailable number.

    The numbers are from an option that lists several, else from a list in ``autotuning.num_gpus``; on a cluster, also
    from a list in ``autotuning.num_nodes``. None if there is a single search.
    """
    options = given.options
    for name in ("gpus_per_trial", "cpu_ranks"):
        value = getattr(options, name)
        if value is not None and not isinstance(value, int) and len(value) > 1:
            counts = tuple(sorted(set(value)))
            return Sweep(option=name, counts=counts, origin=given.origins.get(name, "argument")), []
    if options.on != "here":
        return _sweep_of_cluster(given, user_config(options).autotuning)
    if options.gpus_per_trial is not None or options.cpu_ranks is not None:
        return None, []
    user = user_config(options)
    listed = user.autotuning.gpu_counts
    if len(listed) < 2:
        return None, []
    available = _gpus_here()
    notes = [_too_many(count, available) for count in listed if count > available]
    counts = tuple(count for count in listed if count <= available)
    return (Sweep(option="gpus_per_trial", counts=counts, origin="autotuning.num_gpus") if counts else None), notes


def _sweep_of_cluster(given: Given, section: Autotuning) -> tuple[Sweep | None, list[str]]:
    """Return the numbers of GPUs per node, else of nodes, to search at; and lines about unused values."""
    options = given.options
    gpus = section.gpu_counts if options.gpus_per_node is None and options.cpu_ranks is None else ()
    nodes = () if "nodes_per_trial" in given.origins else section.node_counts
    if len(gpus) > 1:
        largest = "autotuning.num_nodes is used for its largest number alone, as num_gpus is a list."
        sweep = Sweep(option="gpus_per_node", counts=gpus, origin="autotuning.num_gpus")
        return sweep, [largest] if len(nodes) > 1 else []
    if len(nodes) > 1:
        return Sweep(option="nodes_per_trial", counts=nodes, origin="autotuning.num_nodes"), []
    return None, []


def _gpus_here() -> int:
    devices = detect_devices()
    return devices.per_launch if devices.kind == "cuda" else 0


def _too_many(count: int, available: int) -> str:
    return f"autotuning.num_gpus {count} is not used: this machine offers {things_in_words(available, 'GPU')}."


def with_autotuning(given: Given, *, keep_values: bool = False) -> tuple[Given, list[str]]:
    """Fill unset options from the config's ``autotuning`` section; also return notes about unsupported keys.

    ``keep_values`` tells whether knobs with a single value in the config stay fixed, as in DeepSpeed's autotuner, if
    the config enables autotuning.
    """
    options = given.options
    user = user_config(options)
    wanted, notes = options_of(user.autotuning)
    names = {field.name for field in fields(options)}
    offered = names - given.origins.keys()
    gpus = wanted.pop("gpus_per_trial", None)
    if options.on != "here":
        notes = [note for note in notes if "num_nodes" not in note]
        wanted |= _places_of(options, user.autotuning)
    elif gpus is not None and options.gpus_per_trial is None and options.cpu_ranks is None:
        available = _gpus_here()
        if gpus <= available:
            wanted["gpus_per_trial"] = gpus
        elif len(user.autotuning.gpu_counts) < 2:  # lists are reported by ``sweep_of``
            notes.append(_too_many(gpus, available))
    kept = _single_values(options, user) if keep_values and user.autotuning.enabled and not options.only else {}
    if kept:
        notes.append(
            "Kept as your config says, as DeepSpeed's autotuner does: "
            + ", ".join(f"{name} {value}" for name, value in kept.items())
            + ". A list of values, or --fix and --zero-stages, says otherwise; guided and asha tune all."
        )
        if ZERO_STAGE in kept:
            wanted["zero_stages"] = (kept[ZERO_STAGE],)
    if user.autotuning.fast and not options.only:
        wanted["no_tune"] = _kept_by_fast(options, user)
        offered.add("no_tune")
    if named := kept.keys() - {ZERO_STAGE}:
        wanted["no_tune"] = sorted({*wanted.get("no_tune", options.no_tune or ()), *named})
        offered.add("no_tune")
    if "method" in wanted and "method" not in offered:
        del wanted["method"]
        notes = [note for note in notes if "tuner_type" not in note]  # the command line names a method
    if "early_stopping" in wanted and "early_stopping" not in names:
        notes.append("autotuning.tuner_early_stopping is not used by this method.")
    taken: dict[str, Any] = {name: value for name, value in wanted.items() if name in offered}
    return given.with_values(taken, f"autotuning in {options.ds_config}"), notes


def _places_of(options: TuneOptions, section: Autotuning) -> dict[str, int]:
    """Return the options for nodes of a cluster: DeepSpeed's ``num_gpus`` counts the GPUs of one node."""
    gpus = section.num_gpus if options.gpus_per_node is None and options.cpu_ranks is None else None
    result = {"nodes_per_trial": section.num_nodes, "gpus_per_node": gpus}
    return {name: count for name, count in result.items() if count is not None}


def _single_values(options: TuneOptions, user: user_file.UserConfig) -> dict[str, Any]:
    """Return the knobs with a single value in the config, without knobs set by an option: name -> value."""
    zero = ds_config.zero_section(user.raw)
    kept: dict[str, Any] = {}
    for knob in KNOBS:
        value = knob.value_in(zero)
        if value is None or isinstance(value, list) or value in (ds_config.AUTO, ds_config.ALL):
            continue
        given = options.zero_stages if knob.name == ZERO_STAGE else None
        if knob.name != NVME and knob.name not in (options.fix or ()) and not given:
            kept[knob.name] = value
    return kept


def _kept_by_fast(options: TuneOptions, user: user_file.UserConfig) -> list[str]:
    """Return the knobs that ``autotuning.fast`` leaves unchanged: all but the stage, listed and fixed knobs."""
    zero = ds_config.zero_section(user.raw)
    listed = {
        knob.name for knob in KNOBS if isinstance(knob.value_in(zero), list) or knob.value_in(zero) == ds_config.ALL
    }
    kept = {knob.name for knob in KNOBS if knob.name not in listed and knob.path[-1] != "stage"}
    return sorted({*(options.no_tune or ()), *kept} - set(options.fix or ()) - {NVME})
