"""The options of a search, each defined once: name, type, default, meaning, and the methods that read it.

The commands (``cli/parsing/commands.py``), the keywords of ``optuna_dsat.tune`` (``keywords.py``), the keys of option
files and ``docs/reference/options.md`` are generated from these classes. Names and defaults follow the dsat guide where
it has them; the defaults of ``StudySpec`` are taken from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from optuna_dsat.study.spec import METHODS, default_stages
from optuna_dsat.tuning.options.declaration import BUDGET, MEASURE, METHOD, OUTPUT_PANEL, WHAT, Option
from optuna_dsat.tuning.options.defaults import default
from optuna_dsat.tuning.options.groups import ClusterOptions, PlaceOptions, ResultOptions, StrPath
from optuna_dsat.tuning.options.locations import DEFAULT_OUTPUT_DIR, DEFAULT_STORAGE, OUTPUT_DIR_ENV, STORAGE_ENV
from optuna_dsat.tuning.options.parse import (
    named_config,
    share,
    split_environment,
    split_fixed,
    split_mappings,
    split_stages,
)

__all__ = [
    "DEFAULT_METHOD",
    "DEFAULT_OUTPUT_DIR",
    "DEFAULT_STORAGE",
    "OUTPUT_DIR_ENV",
    "OUTPUT_PANEL",
    "STORAGE_ENV",
    "AshaOptions",
    "AutotuningOptions",
    "BinaryOptions",
    "GuidedOptions",
    "RandomOptions",
    "TuneOptions",
    "methods_of",
]


DEFAULT_METHOD = "guided"
"""Method of a search for which neither an option nor the config names one."""


def _metrics() -> Iterable[str]:
    from optuna_dsat.metrics import METRICS

    return METRICS


def _methods() -> Iterable[str]:
    return METHODS


def _knobs() -> Iterable[str]:
    from optuna_dsat.config.knobs import KNOBS

    return [knob.name for knob in KNOBS]


def _stages(method: str) -> str:
    return ", ".join(map(str, default_stages(method)))


@dataclass(frozen=True)
class TuneOptions(ResultOptions, PlaceOptions, ClusterOptions):
    """Options of every method."""

    script: Annotated[
        StrPath,
        Option(
            help="The training script, as it is; with -m a module; NAME:CLASS for a DeepSpeedTrial.",
            python_help="The training script; with ``module`` the name of a module; ``NAME:CLASS`` for a "
            "``DeepSpeedTrial``.",
            metavar="SCRIPT",
            text_type=Path,
        ),
    ]
    ds_config: Annotated[
        StrPath | Mapping[str, Any] | None,
        Option(
            help="The script's DeepSpeed config (JSON, or JSON with comments).",
            python_help="The script's DeepSpeed config: a file, or a dictionary, which is written to ``output_dir`` as "
            "the file that the script is given. None for what the script passes to ``deepspeed.initialize``.",
            none="what the script passes to deepspeed.initialize",
            metavar="[DS_CONFIG]",
            text_type=Path | None,
            parse=named_config,
        ),
    ] = None
    script_args: Annotated[
        Sequence[str] | None,
        Option(
            help="Arguments of the script, after --.",
            python_help="Arguments of the script, as on its command line.",
            metavar="[-- SCRIPT_ARGS]",
            text_type=list[str] | None,
        ),
    ] = None

    _: KW_ONLY

    module: Annotated[
        bool,
        Option(
            help="SCRIPT is a module's name, run as python -m does.",
            python_help="``script`` is a module's name, run as ``python -m`` does.",
            flags=("-m", "--module"),
            panel=WHAT,
        ),
    ] = False
    hparams: Annotated[
        StrPath | None,
        Option(help="Hyperparameters of NAME:CLASS (YAML or JSON).", text_type=Path | None, panel=WHAT),
    ] = None
    metric: Annotated[
        str,
        Option(
            help="Metric to optimise: FLOPS_per_gpu, throughput, latency, forward, backward or step.",
            python_help="Metric to optimise: ``FLOPS_per_gpu`` (FLOP/s), ``throughput`` (samples/s over all ranks), or "
            "a time in seconds per step: ``latency``, ``forward``, ``backward``, ``step``.",
            choices=_metrics,
            autotuning="metric",
            metavar="NAME",
            panel=WHAT,
        ),
    ] = default("metric")
    zero_stages: Annotated[
        Sequence[int] | int | None,
        Option(
            help="ZeRO stages to search: '1 2 3', '1,2,3' or the option repeated.",
            none=f"{_stages('random')}; guided: {_stages('guided')}",
            python_help=f"ZeRO stages to search, or the one. None for {_stages('random')}, with ``guided`` for "
            f"{_stages('guided')}.",
            metavar="STAGE,...",
            text_type=list[str] | None,
            parse=split_stages,
            first=True,
            panel=WHAT,
        ),
    ] = None
    fix: Annotated[
        Mapping[str, Any] | None,
        Option(
            help="Hold a knob at one value: KEY=VALUE (repeatable).",
            python_help="Knob -> the one value that it keeps.",
            text_type=list[str] | None,
            parse=split_fixed,
            metavar="KEY=VALUE",
            first=True,
            panel=WHAT,
        ),
    ] = None
    no_tune: Annotated[
        Sequence[str] | None,
        Option(
            help="Leave a knob as your config has it (repeatable).",
            python_help="Knobs that stay as the config has them.",
            metavar="KEY",
            text_type=list[str] | None,
            choices=_knobs,
            panel=WHAT,
        ),
    ] = None
    arg_mapping: Annotated[
        Mapping[str, str] | None,
        Option(
            help="Have an option of the script follow the config: KEY=--OPTION, such as "
            "train_micro_batch_size_per_gpu=--batch-size (repeatable).",
            python_help="Key of the DeepSpeed config -> option of the script that follows it, such as "
            '``{"train_micro_batch_size_per_gpu": "--batch-size"}``.',
            text_type=list[str] | None,
            parse=split_mappings,
            metavar="KEY=--OPTION",
            panel=WHAT,
        ),
    ] = None
    follow_batch: Annotated[
        bool,
        Option(
            help="Find out what sets the script's batch size and ZeRO stage besides its DeepSpeed config, and have it "
            "follow.",
            flags=("--follow-batch/--no-follow",),
            panel=WHAT,
        ),
    ] = default("follow_batch")
    env: Annotated[
        Mapping[str, str] | None,
        Option(
            help="Give the script this variable: NAME=VALUE (repeatable); stored with the study unless secret.",
            python_help="Variables of the environment that the script is given; stored with the study unless secret.",
            text_type=list[str] | None,
            parse=split_environment,
            metavar="NAME=VALUE",
            panel=WHAT,
        ),
    ] = None
    nvme_path: Annotated[
        StrPath | None,
        Option(
            help="Directory for NVMe offload; without it NVMe is not tried.",
            text_type=str | None,
            metavar="PATH",
            panel=WHAT,
        ),
    ] = None
    enqueue_user_config: Annotated[
        bool, Option(help="Measure your present config first, to show speed-ups over it.", panel=WHAT)
    ] = default("enqueue_user_config")
    profile_reuse: Annotated[
        bool,
        Option(help="Take the profile of an earlier study of the same script, config and hardware.", panel=WHAT),
    ] = True

    max_trials: Annotated[
        int,
        Option(
            help="Launches of trials.",
            python_help="Launches of trials; the profile launch and those of the finalists are not counted.",
            autotuning="tuner_num_trials",
            first=True,
            panel=BUDGET,
        ),
    ] = default("max_trials")
    max_concurrent_trials: Annotated[int, Option(help="Launches in flight.", panel=BUDGET)] = default(
        "max_concurrent_trials"
    )
    max_slots: Annotated[
        int | None,
        Option(
            help="GPUs (CPU ranks) in use at once.",
            python_help="GPUs (CPU ranks) in use at once. None for all.",
            panel=BUDGET,
        ),
    ] = default("max_slots")
    timeout: Annotated[
        float | None,
        Option(
            help="Seconds after which the search ends.",
            python_help="Seconds after which the search ends. None for no limit.",
            metavar="SECONDS",
            first=True,
            panel=BUDGET,
        ),
    ] = default("timeout")
    trial_timeout: Annotated[
        float | None,
        Option(
            help="Seconds after which one launch is ended.",
            python_help="Seconds after which one launch is ended. None for no limit.",
            metavar="SECONDS",
            panel=BUDGET,
        ),
    ] = default("trial_timeout")
    stall_timeout: Annotated[
        float,
        Option(
            help="Seconds without a sign of life after which one launch is ended: an event of a rank or, until it "
            "trains, processes at work. Ranks that stand still are ended after 20 times the longest step or, before "
            "the first one, 5 times the longest start so far, 30 s at least.",
            metavar="SECONDS",
            panel=BUDGET,
        ),
    ] = default("stall_timeout")
    max_retries: Annotated[
        int,
        Option(help="Further launches of a trial after a communication error or a time-out.", panel=BUDGET),
    ] = default("max_retries")
    start_profile_step: Annotated[
        int, Option(help="First step that counts (from 1).", autotuning="start_profile_step", panel=MEASURE)
    ] = default("start_profile_step")
    end_profile_step: Annotated[
        int,
        Option(
            help="Last step that counts; a launch whose step time is known to 1% ends before it.",
            autotuning="end_profile_step",
            panel=MEASURE,
        ),
    ] = default("end_profile_step")
    adaptive_steps: Annotated[
        int | None,
        Option(
            help="Steps that a finalist may count while its step time is still uncertain.",
            none="five times a trial's, at least 10",
            panel=MEASURE,
        ),
    ] = default("adaptive_steps")
    random_seed: Annotated[int, Option(help="Seed of the search.", panel=MEASURE)] = default("random_seed")

    run_full_experiment: Annotated[
        bool,
        Option(
            help="Train with the best config when the search is done.",
            python_help="Train with the best config when the search is done, before returning.",
            panel=OUTPUT_PANEL,
        ),
    ] = False
    quiet: Annotated[
        bool,
        Option(
            help="Show the result alone.",
            python_help="Print nothing; otherwise progress goes to stderr.",
            panel=OUTPUT_PANEL,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class _LineageOptions(TuneOptions):
    free_batch: Annotated[
        bool,
        Option(
            help="Launch any micro-batch that memory is thought to hold, not only up to twice (guided: eight times) "
            "the largest that fitted so far, and also where a doubling gained less than 2%.",
            panel=METHOD,
        ),
    ] = default("free_batch")


@dataclass(frozen=True, kw_only=True)
class RandomOptions(_LineageOptions):
    """Options of ``random``, in addition to the options of every method."""

    trials_per_random_config: Annotated[
        int, Option(help="Launches of configurations that differ in the micro-batch only, at most.", panel=METHOD)
    ] = default("trials_per_random_config")
    early_stopping: Annotated[
        int | None,
        Option(
            help="End after this many launches without a new best.",
            none="never",
            python_help="End after this many launches without a new best. None to go on.",
            autotuning="tuner_early_stopping",
            panel=METHOD,
        ),
    ] = default("early_stopping")


@dataclass(frozen=True, kw_only=True)
class BinaryOptions(_LineageOptions):
    """Options of ``binary``, in addition to the options of every method."""

    search_range_factor: Annotated[
        float,
        Option(
            help="Factor on the largest micro-batch that the memory model predicts.", metavar="FACTOR", panel=METHOD
        ),
    ] = default("search_range_factor")


@dataclass(frozen=True, kw_only=True)
class AshaOptions(BinaryOptions):
    """Options of ``asha``, in addition to the options of ``binary``."""

    max_rungs: Annotated[int, Option(help="Rungs.", panel=METHOD)] = default("max_rungs")
    min_binary_search_trials: Annotated[
        int,
        Option(
            help="Launches with which configurations that differ in the micro-batch only complete the lowest rung.",
            panel=METHOD,
        ),
    ] = default("min_binary_search_trials")
    divisor: Annotated[
        int, Option(help="The best 1/DIVISOR of a rung goes on (eta of arXiv:1810.05934).", panel=METHOD)
    ] = default("divisor")
    asha_early_stopping: Annotated[
        int,
        Option(
            help="s of arXiv:1810.05934: rungs start DIVISOR**s higher.",
            python_help="s of arXiv:1810.05934: rungs start ``divisor ** s`` higher.",
            panel=METHOD,
        ),
    ] = default("asha_early_stopping")


@dataclass(frozen=True, kw_only=True)
class GuidedOptions(_LineageOptions):
    """Options of ``guided``, in addition to the options of every method."""

    memory_margin: Annotated[
        float,
        Option(
            help="Share of the device's memory that a launch is expected to leave free.",
            metavar="SHARE",
            text_type=str,
            parse=partial(share, option="--memory-margin"),
            panel=METHOD,
        ),
    ] = default("memory_margin")
    min_gain: Annotated[
        float,
        Option(
            help="End when no launch, one as long as the best's, is expected to improve the best by this share, nor 20 "
            "launches together by 20 times as much; 0 for never.",
            metavar="SHARE",
            text_type=str,
            parse=partial(share, option="--min-gain"),
            panel=METHOD,
        ),
    ] = default("min_gain")
    warm_start: Annotated[
        str | None,
        Option(
            help="Begin with what this study taught, of this or a similar model on the same hardware.",
            none="studies of the same script, config and hardware",
            python_help="Study of the same storage, of this or a similar model on the same hardware, whose "
            "measurements this one begins with. None for studies of the same script, config and hardware.",
            metavar="STUDY",
            panel=METHOD,
        ),
    ] = default("warm_start")
    no_warm_start: Annotated[bool, Option(help="Begin without any earlier study.", panel=METHOD)] = default(
        "no_warm_start"
    )


@dataclass(frozen=True, kw_only=True)
class AutotuningOptions(AshaOptions, RandomOptions, GuidedOptions):
    """Options of ``tune`` and ``run``: the options of all methods; each method reads its own."""

    method: Annotated[
        str | None,
        Option(
            help="guided, asha, binary or random.",
            none=f"by autotuning.tuner_type of the config, else {DEFAULT_METHOD}",
            python_help="``guided``, ``asha``, ``binary`` or ``random``. None for ``autotuning.tuner_type`` of the "
            f"config, else ``{DEFAULT_METHOD}``.",
            choices=_methods,
            autotuning="tuner_type",
            metavar="NAME",
            first=True,
            panel=METHOD,
        ),
    ] = None


_OF_METHOD: Mapping[str, type[TuneOptions]] = {
    "random": RandomOptions,
    "binary": BinaryOptions,
    "asha": AshaOptions,
    "guided": GuidedOptions,
}


def methods_of(option: str) -> tuple[str, ...]:
    """Return the methods that read an option; empty if it is not an option of methods."""
    if any(one.name == option for one in fields(TuneOptions)):
        return ()
    return tuple(method for method, kind in _OF_METHOD.items() if any(one.name == option for one in fields(kind)))
