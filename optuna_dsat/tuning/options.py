"""Options of a search, declared once: names and defaults are those of the dsat guide where it has them.

The commands take their options from here (``cli/commands.py``), and so do the keywords of ``optuna_dsat.tune``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "AshaOptions",
    "AutotuningOptions",
    "BinaryOptions",
    "GuidedOptions",
    "RandomOptions",
    "TuneOptions",
]


def _metrics(incomplete: str) -> list[str]:
    from optuna_dsat.metrics import METRICS

    return [metric for metric in METRICS if metric.startswith(incomplete)]


def _methods(incomplete: str) -> list[str]:
    from optuna_dsat.study.spec import METHODS

    return [method for method in METHODS if method.startswith(incomplete)]


def _knobs(incomplete: str) -> list[str]:
    from optuna_dsat.config.knobs import KNOBS

    return [knob.name for knob in KNOBS if knob.name.startswith(incomplete)]


_WHAT = "What to tune"
_BUDGET = "Budget"
_MEASURE = "Measuring"
_WHERE = "Where"
_METHOD = "Method"
_SHOW = "Output"


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What every search method takes."""

    origins: Mapping[str, str] = field(default_factory=dict)
    """Field that was given -> where: the command line, a variable of the environment, a file. The rest are defaults."""

    script: Annotated[
        Path,
        typer.Argument(
            help="The training script, as it is; with -m a module; NAME:CLASS for a DeepSpeedTrial.",
            metavar="SCRIPT",
            show_default=False,
        ),
    ]
    ds_config: Annotated[
        Path,
        typer.Argument(help="The script's DeepSpeed config (JSON).", metavar="DS_CONFIG", show_default=False),
    ]
    script_args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script, after --.", metavar="[-- SCRIPT_ARGS]", show_default=False),
    ] = None

    module: Annotated[
        bool,
        typer.Option("-m", "--module", help="SCRIPT is a module's name, run as python -m does.", rich_help_panel=_WHAT),
    ] = False
    hparams: Annotated[
        Path | None,
        typer.Option(help="Hyperparameters of NAME:CLASS (YAML or JSON).", rich_help_panel=_WHAT),
    ] = None
    metric: Annotated[
        str,
        typer.Option(
            help="Metric to optimise: FLOPS_per_gpu, throughput, latency, forward, backward or step.",
            autocompletion=_metrics,
            rich_help_panel=_WHAT,
        ),
    ] = "FLOPS_per_gpu"
    zero_stages: Annotated[
        list[str] | None,
        typer.Option(
            help="ZeRO stages to search: '1 2 3', '1,2,3' or the option repeated.  \\[default: 1 2 3]",
            metavar="STAGES",
            rich_help_panel=_WHAT,
        ),
    ] = None
    fix: Annotated[
        list[str] | None,
        typer.Option(help="Hold a knob at one value: KEY=VALUE (repeatable).", rich_help_panel=_WHAT),
    ] = None
    no_tune: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave a knob as your config has it (repeatable).",
            metavar="KEY",
            autocompletion=_knobs,
            rich_help_panel=_WHAT,
        ),
    ] = None
    arg_mapping: Annotated[
        list[str] | None,
        typer.Option(
            help="Have an option of the script follow the config: KEY=--OPTION, such as "
            "train_micro_batch_size_per_gpu=--batch-size (repeatable).",
            rich_help_panel=_WHAT,
        ),
    ] = None
    train_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Keep this global batch: gradient accumulation makes up what a micro-batch lacks.  "
            "\\[default: it follows the micro-batch]",
            rich_help_panel=_WHAT,
        ),
    ] = None
    nvme_path: Annotated[
        str | None,
        typer.Option(help="Directory for NVMe offload; without it NVMe is not tried.", rich_help_panel=_WHAT),
    ] = None
    enqueue_user_config: Annotated[
        bool,
        typer.Option(help="Measure your present config first, to show speed-ups over it.", rich_help_panel=_WHAT),
    ] = True

    profile_reuse: Annotated[
        bool,
        typer.Option(
            help="Take the profile of an earlier study of the same script, config and hardware.",
            rich_help_panel=_WHAT,
        ),
    ] = True

    max_trials: Annotated[int, typer.Option(help="Launches of trials.", rich_help_panel=_BUDGET)] = 64
    max_concurrent_trials: Annotated[int, typer.Option(help="Launches in flight.", rich_help_panel=_BUDGET)] = 16
    max_slots: Annotated[int | None, typer.Option(help="GPUs (CPU ranks) in use at once.", rich_help_panel=_BUDGET)] = (
        None
    )
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which the search ends.", rich_help_panel=_BUDGET)
    ] = None
    trial_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which one launch is ended.", rich_help_panel=_BUDGET)
    ] = None
    stall_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life after which one launch is ended: an event of a rank or, until it "
            "trains, processes at work.",
            rich_help_panel=_BUDGET,
        ),
    ] = 600.0
    max_retries: Annotated[
        int,
        typer.Option(
            help="Further launches of a trial after a communication error, a stall or a time-out.",
            rich_help_panel=_BUDGET,
        ),
    ] = 1
    confirm: Annotated[int, typer.Option(help="Finalists measured again with more steps.", rich_help_panel=_BUDGET)] = 3

    start_profile_step: Annotated[
        int, typer.Option(help="First step that counts (from 1).", rich_help_panel=_MEASURE)
    ] = 3
    end_profile_step: Annotated[
        int,
        typer.Option(
            help="Last step that counts; a launch whose step time is known to 1 % ends before it.",
            rich_help_panel=_MEASURE,
        ),
    ] = 5
    adaptive_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps that a finalist may count while its step time is still uncertain.  "
            "\\[default: five times a trial's, at least 10]",
            rich_help_panel=_MEASURE,
        ),
    ] = None
    random_seed: Annotated[int, typer.Option(help="Seed of the search.", rich_help_panel=_MEASURE)] = 42

    gpus_per_trial: Annotated[
        int | None, typer.Option(help="GPUs of one launch.  \\[default: all]", rich_help_panel=_WHERE)
    ] = None
    only_free_gpus: Annotated[
        bool,
        typer.Option("--only-free-gpus", help="Tune on those GPUs that are free at the start.", rich_help_panel=_WHERE),
    ] = False
    wait_for_gpus: Annotated[
        float,
        typer.Option(
            help="Seconds to wait for GPUs that others hold, counted anew when the holders change; 0 for not at all.",
            rich_help_panel=_WHERE,
        ),
    ] = 600.0
    cpu_ranks: Annotated[
        int | None,
        typer.Option(help="Run on the CPU with this many ranks.  \\[default without a GPU: 2]", rich_help_panel=_WHERE),
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="What one rank may allocate, such as 2GiB.  \\[default: all there is]",
            rich_help_panel=_WHERE,
        ),
    ] = None
    launcher: Annotated[
        Literal["warm", "torchrun"],
        typer.Option(
            help="How trials are launched: warm (forked from a process that has torch, DeepSpeed and what your script "
            "imports ready; plain torchrun where that is unsafe) or always torchrun.",
            rich_help_panel=_WHERE,
        ),
    ] = "warm"
    preload: Annotated[
        list[str] | None,
        typer.Option(
            help="Import this module, too, before a warm launch (repeatable).",
            metavar="MODULE",
            rich_help_panel=_WHERE,
        ),
    ] = None
    no_preload: Annotated[
        list[str] | None,
        typer.Option(
            help="Have every warm launch import this package for itself (repeatable).",
            metavar="PACKAGE",
            rich_help_panel=_WHERE,
        ),
    ] = None
    storage: Annotated[
        str,
        typer.Option(
            help="Database of the study: SQLite or PostgreSQL.",
            envvar="OPTUNA_DSAT_STORAGE",
            rich_help_panel=_WHERE,
        ),
    ] = "sqlite:///optuna-dsat.db"
    study: Annotated[
        str | None,
        typer.Option(help="Name of the study.  \\[default: SCRIPT-METHOD]", rich_help_panel=_WHERE),
    ] = None
    output_dir: Annotated[
        Path,
        typer.Option(
            help="Directory for launches, logs and the best config.",
            envvar="OPTUNA_DSAT_OUTPUT_DIR",
            rich_help_panel=_WHERE,
        ),
    ] = Path("optuna-dsat-output")

    check_loss: Annotated[
        bool,
        typer.Option(
            "--check-loss",
            help="At the end, check that the first losses under the best config are those under yours.",
            rich_help_panel=_SHOW,
        ),
    ] = False
    run_full_experiment: Annotated[
        bool,
        typer.Option(
            "--run-full-experiment",
            help="Train with the best config when the search is done.",
            rich_help_panel=_SHOW,
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show the space, the profile launch and the first configs; launch nothing.",
            rich_help_panel=_SHOW,
        ),
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the result alone.", rich_help_panel=_SHOW)] = False
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_SHOW)] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class RandomOptions(TuneOptions):
    """What ``random`` takes beside."""

    trials_per_random_config: Annotated[
        int, typer.Option(help="Launches of one class of configurations at most.", rich_help_panel=_METHOD)
    ] = 5
    early_stopping: Annotated[
        int | None,
        typer.Option(
            help="End after this many launches without a new best.  \\[default: never]",
            rich_help_panel=_METHOD,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BinaryOptions(TuneOptions):
    """What ``binary`` takes beside."""

    search_range_factor: Annotated[
        float,
        typer.Option(help="Factor on the largest micro-batch that the memory model predicts.", rich_help_panel=_METHOD),
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class AshaOptions(BinaryOptions):
    """What ``asha`` takes beside."""

    max_rungs: Annotated[int, typer.Option(help="Rungs.", rich_help_panel=_METHOD)] = 5
    min_binary_search_trials: Annotated[
        int,
        typer.Option(
            help="Launches a class of configurations needs to complete the lowest rung.",
            rich_help_panel=_METHOD,
        ),
    ] = 3
    divisor: Annotated[
        int,
        typer.Option(help="The best 1/DIVISOR of a rung goes on (eta of arXiv:1810.05934).", rich_help_panel=_METHOD),
    ] = 2
    asha_early_stopping: Annotated[
        int,
        typer.Option(help="s of arXiv:1810.05934: rungs start DIVISOR**s higher.", rich_help_panel=_METHOD),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class GuidedOptions(TuneOptions):
    """What ``guided`` takes beside."""

    memory_margin: Annotated[
        float,
        typer.Option(
            help="Share of the device's memory that a launch is expected to leave free.", rich_help_panel=_METHOD
        ),
    ] = 0.05
    min_gain: Annotated[
        float,
        typer.Option(
            help="End when no configuration is expected to be better than the best by this share; 0 for never.",
            rich_help_panel=_METHOD,
        ),
    ] = 0.003
    warm_start: Annotated[
        str | None,
        typer.Option(
            help="Begin with what this study taught, of this or a similar model on the same hardware.  "
            "\\[default: studies of the same script, config and hardware]",
            metavar="STUDY",
            rich_help_panel=_METHOD,
        ),
    ] = None
    no_warm_start: Annotated[
        bool, typer.Option("--no-warm-start", help="Begin without any earlier study.", rich_help_panel=_METHOD)
    ] = False


@dataclass(frozen=True, kw_only=True)
class AutotuningOptions(AshaOptions, RandomOptions, GuidedOptions):
    """What ``tune`` and ``run`` take beside: the options of all methods, of which each reads its own."""

    method: Annotated[
        str | None,
        typer.Option(
            help="random, binary, asha or guided.  \\[default: by autotuning.tuner_type of the config, else asha]",
            autocompletion=_methods,
            rich_help_panel=_METHOD,
        ),
    ] = None
