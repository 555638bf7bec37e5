"""Options of a search that its study stores, each declared once: name, type, default, rule and meaning.

``StudySpec`` takes its fields from these classes, with the methods' options in ``methods``. So do the classes of
``tuning/options/tune_options.py``, from which the commands, the keywords of ``optuna_dsat.tune``, the keys of option
files and ``docs/reference/options.md`` are generated. Names and defaults follow the dsat guide where it has them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from optuna_dsat.config.knob_values import PERMISSIONS, check_permissions, resolve_fixed, resolve_names
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.metrics import METRICS
from optuna_dsat.study.options.declaration import (
    DEFAULT_OUTPUT_DIR,
    OUTPUT_DIR_ENV,
    limit,
    measured,
    running,
    what,
    where,
)
from optuna_dsat.study.options.methods import default_stages
from optuna_dsat.study.options.parse import share, split_fixed, split_names, split_stages

StrPath = str | os.PathLike[str]

SEQUENCE = AfterValidator(lambda given: () if given is None else tuple(given) if isinstance(given, list) else given)
"""In a spec: a tuple, empty for None."""
Texts = Annotated[Sequence[str] | None, SEQUENCE]
VALUES = AfterValidator(lambda given: {} if given is None else given)
"""In a spec: a dictionary, empty for None."""
NONE_AS_ZERO = AfterValidator(lambda given: 0 if given is None else given)
PATH = AfterValidator(lambda given: os.fspath(given) if isinstance(given, os.PathLike) else given)
"""In a spec: a string."""


def _stages(method: str) -> str:
    return ", ".join(map(str, default_stages(method)))


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Options of every method for the cluster whose nodes run the launches."""

    on: Annotated[
        Literal["here", "slurm", "ray"],
        where(
            help="Where launches run: on this machine, or on nodes of a SLURM or Ray cluster.",
            python_help="Where launches run: on this machine (``here``), or on nodes of a SLURM or Ray cluster.",
        ),
    ] = "here"
    nodes_per_trial: Annotated[
        int, where(help="Nodes of one launch, with --on slurm or --on ray.", metavar="N"), Field(ge=1)
    ] = 1
    gpus_per_node: Annotated[
        int | None,
        where(
            help="GPUs of each of these nodes; --cpu-ranks instead runs so many ranks on the CPU of each.",
            none="none",
            metavar="N",
        ),
        Field(ge=0),
        NONE_AS_ZERO,
    ] = None
    slurm_arg: Annotated[
        Texts,
        running(
            help="Option for srun, such as --slurm-arg=--partition=a100 (repeatable).",
            python_help="Options for srun, such as ``--partition=a100``.",
            metavar="OPTION",
            places=("slurm",),
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        running(
            help="Address of the Ray cluster, HOST:PORT.",
            none="the cluster that this machine belongs to",
            metavar="ADDRESS",
            places=("ray",),
        ),
    ] = None
    ray_node: Annotated[
        Texts,
        running(
            help="Node of the Ray cluster that may be used: its name, host name or address (repeatable).",
            python_help="Nodes of the Ray cluster that may be used: names, host names or addresses.",
            none="all",
            metavar="NODE",
            places=("ray",),
        ),
    ] = None
    agent_python: Annotated[
        str | None,
        running(
            help="Python on the nodes that has optuna-dsat; --python names the script's.",
            none="as on this machine; with Ray as its workers",
            metavar="PYTHON",
            places=("slurm", "ray"),
        ),
    ] = None
    queue_timeout: Annotated[
        float | None,
        running(
            help="Seconds to wait for the cluster to grant nodes.",
            none="as long as it takes",
            metavar="SECONDS",
            places=("slurm", "ray"),
        ),
        Field(gt=0, alias="queue_timeout_s"),
    ] = None
    idle_release: Annotated[
        float,
        running(
            help="Seconds without a launch after which nodes are given back to the cluster.",
            metavar="SECONDS",
            places=("slurm", "ray"),
        ),
        Field(ge=0, alias="idle_release_s"),
    ] = 300.0


@dataclass(frozen=True, kw_only=True)
class PlaceSettings:
    """Options of every method for devices, launches and files."""

    wait_for_gpus: Annotated[
        float,
        running(
            help="Seconds to wait for GPUs that others use, counted from the last change of these users; 0: no wait.",
            metavar="SECONDS",
        ),
        Field(ge=0, alias="wait_for_gpus_s"),
    ] = 600.0
    launcher: Annotated[
        Literal["warm", "torchrun"],
        running(
            help="How trials are launched: warm (forked from a process that has torch, DeepSpeed and what your script "
            "imports ready; plain torchrun where that is unsafe) or always torchrun."
        ),
    ] = "warm"
    train_launcher: Annotated[
        Literal["deepspeed", "torchrun"] | None,
        running(
            help="Launcher of the printed command that trains with the result.",
            none="the launcher of your command, else the one that the script's options require",
        ),
    ] = None
    continues: Annotated[
        bool,
        running(
            help="Measure several trials in a launch if they differ only in the micro-batch and in communication "
            "settings, which a running engine can change.",
            flags=("--continue/--no-continue",),
        ),
    ] = True
    python: Annotated[
        str | None,
        running(
            help="Python of your script: an interpreter with torch and DeepSpeed, or the folder of its environment.",
            none="the launcher's, else the first with both in: the active environment, that of this command, PATH",
            metavar="PYTHON",
        ),
    ] = None
    isolation: Annotated[
        Literal["auto", "python", "off"],
        running(
            help="How your files are protected from trials: auto (overlay mounts, else redirected writers of Python), "
            "python (redirected writers only) or off."
        ),
    ] = "auto"
    writable: Annotated[
        Sequence[StrPath] | None,
        running(
            help="File or folder that trials may change, such as a cache of your data (repeatable).",
            python_help="Files and folders that trials may change, such as a cache of the data.",
            metavar="PATH",
        ),
        SEQUENCE,
    ] = None
    prepared: Annotated[
        StrPath | None,
        running(
            help="Folder of files that trials see at their places: DIR/a/b as /a/b. The search keeps there the files "
            "that a shell script writes before its launch.",
            metavar="DIR",
            text_type=Path | None,
        ),
        PATH,
    ] = None
    output_dir: Annotated[
        StrPath,
        running(
            help="Directory for launches, logs and the best config.", env=OUTPUT_DIR_ENV, text_type=Path, first=True
        ),
        PATH,
    ] = DEFAULT_OUTPUT_DIR


@dataclass(frozen=True, kw_only=True)
class ResultSettings:
    """Options of every method for the selection of the result."""

    train_batch_size: Annotated[
        int | None,
        what(
            help="Keep this global batch: gradient accumulation makes up what a micro-batch lacks.",
            none="it follows the micro-batch",
            python_help="Global batch, in samples, that every trial keeps: gradient accumulation makes up what a "
            "micro-batch lacks. None to let it follow the micro-batch.",
        ),
        Field(ge=1),
    ] = None
    batch: Annotated[
        Literal["free", "keep", "both"],
        what(
            help="free: the global batch follows the micro-batch. keep: every launch has the global batch of your "
            "config. both: free, then keep for a fifth of the trials.",
            python_help="``free``: the global batch follows the micro-batch. ``keep``: every launch has the global "
            "batch of the user's config. ``both``: free, then keep for a fifth of the trials.",
            first=True,
        ),
    ] = "both"
    max_train_batch_size: Annotated[
        int | None,
        what(
            help="Largest global batch that is searched, in samples.",
            none="a tenth of the training data, but your config's at least",
            none_if="where their size is known",
        ),
        Field(ge=1),
    ] = None
    divisible_by: Annotated[int, what(help="Search multiples of this micro-batch only."), Field(ge=1)] = 1
    dataset_size: Annotated[
        int | None,
        what(
            help="Samples of the training data, for the largest global batch and the steps of an epoch.",
            none="reported by the script's data loader",
        ),
        Field(ge=1),
    ] = None
    confirm: Annotated[
        int,
        limit(help="Most finalists that are measured again, in rounds with your config; 0: none."),
        Field(ge=0),
    ] = 3
    confirm_time: Annotated[
        float | None,
        limit(
            help="Seconds that these rounds may take; they end sooner once the speed-up is known to 2%.",
            none="three rounds, then up to a quarter of the search's time",
            metavar="SECONDS",
        ),
        Field(ge=0, alias="confirm_time_s"),
    ] = None
    tie: Annotated[
        float,
        limit(
            help="Configs within this share of the best, such as 1%, count as equally fast: the smallest global batch "
            "wins, then the config nearest to yours.",
            python_help="Configs within this share of the best count as equally fast: the smallest global batch wins, "
            "then the config nearest to the user's.",
            metavar="SHARE",
            text_type=str,
            parse=share,
        ),
        Field(ge=0, lt=1),
    ] = 0.01


@dataclass(frozen=True, kw_only=True)
class SearchSettings(ResultSettings, PlaceSettings, ClusterSettings):
    """Options of every method: space, budget and measurement."""

    metric: Annotated[
        str,
        what(
            help="Metric to optimise: throughput, FLOPS_per_gpu, latency, forward, backward or step.",
            python_help="Metric to optimise: ``throughput`` (samples/s over all ranks), ``FLOPS_per_gpu`` (FLOP/s), or "
            "a time in seconds per step: ``latency``, ``forward``, ``backward``, ``step``.",
            choices=METRICS,
            autotuning="metric",
            metavar="NAME",
        ),
    ] = "throughput"
    zero_stages: Annotated[
        Sequence[int] | int | None,
        what(
            help="ZeRO stages to search: '1 2 3', '1,2,3' or the option repeated.",
            none=f"{_stages('random')}; guided: {_stages('guided')}",
            python_help=f"ZeRO stages to search, or the one. None for {_stages('random')}, with ``guided`` for "
            f"{_stages('guided')}.",
            metavar="STAGE,...",
            parse=split_stages,
            first=True,
        ),
        SEQUENCE,
    ] = None
    fix: Annotated[
        Mapping[str, Any] | None,
        what(
            help="Hold a knob at one value: KEY=VALUE (repeatable).",
            python_help="Knob -> the one value that it keeps.",
            parse=split_fixed,
            metavar="KEY=VALUE",
        ),
        VALUES,
        AfterValidator(resolve_fixed),
    ] = None
    no_tune: Annotated[
        Texts,
        what(
            help="Keep a knob as in your config (repeatable).",
            python_help="Knobs that stay as in the config.",
            metavar="KEY",
            choices=tuple(knob.name for knob in KNOBS),
        ),
        AfterValidator(partial(resolve_names, option="--no-tune")),
    ] = None
    only: Annotated[
        Texts,
        what(
            help="Tune only this: batch, stage, or a knob; the rest stays as in your config (repeatable, or separated "
            "by commas).",
            none="all knobs",
            python_help="Knobs to tune, while the rest stays as in the config: ``batch``, ``stage``, or names "
            "of knobs. None for all.",
            parse=split_names,
            metavar="KEY,...",
            choices=("batch", "stage", *(knob.name for knob in KNOBS)),
            first=True,
        ),
        AfterValidator(partial(resolve_names, option="--only")),
    ] = None
    allow: Annotated[
        Texts,
        what(
            help="Also search settings that need your consent: lossy (they change numbers: bf16 for fp32 or fp16, bf16 "
            "states, ZeRO++ quantisation, ZenFlow; a result with one needs equal losses) and compile (engine.compile, "
            "DeepCompile) (repeatable, or separated by commas).",
            none="neither",
            python_help="Settings to search that need consent: ``lossy`` (they change numbers: bf16 for fp32 or fp16, "
            "bf16 states, ZeRO++ quantisation, ZenFlow; a result with one needs equal losses) and ``compile`` "
            "(``engine.compile``, DeepCompile). None for neither.",
            parse=split_names,
            metavar="WHAT,...",
            choices=PERMISSIONS,
        ),
        AfterValidator(check_permissions),
    ] = None
    follow_batch: Annotated[
        bool,
        what(
            help="Find out what sets the script's batch size and ZeRO stage besides its DeepSpeed config, and set "
            "that, too.",
            flags=("--follow-batch/--no-follow",),
        ),
    ] = True
    nvme_path: Annotated[
        StrPath | None,
        what(help="Directory for NVMe offload; without it NVMe is not tried.", text_type=str | None, metavar="PATH"),
        PATH,
    ] = None
    enqueue_user_config: Annotated[
        bool, what(help="Measure your config first; speed-ups are relative to it.", budget=True)
    ] = True
    max_trials: Annotated[
        int,
        limit(
            help="Trials to measure.",
            python_help="Trials to measure; the profile launch and the launches of the finalists are not counted.",
            autotuning="tuner_num_trials",
            first=True,
        ),
        Field(ge=1),
    ] = 64
    max_concurrent_trials: Annotated[int, limit(help="Launches that run at the same time."), Field(ge=1)] = 16
    max_slots: Annotated[
        int | None,
        limit(help="GPUs (CPU ranks) in use at once.", python_help="GPUs (CPU ranks) in use at once. None for all."),
        Field(ge=1),
    ] = None
    timeout: Annotated[
        float | None,
        limit(
            help="Seconds after which the search ends.",
            python_help="Seconds after which the search ends. None for no limit.",
            metavar="SECONDS",
            first=True,
        ),
        Field(gt=0, alias="timeout_s"),
    ] = None
    trial_timeout: Annotated[
        float | None,
        limit(
            help="Time limit of one launch, in seconds.",
            python_help="Time limit of one launch, in seconds. None for no limit.",
            metavar="SECONDS",
        ),
        Field(gt=0, alias="trial_timeout_s"),
    ] = None
    stall_timeout: Annotated[
        float,
        limit(
            help="End a launch after this many seconds without an event or, before training, without work of its "
            "processes. Sooner where steps or starts are short: after 20 times the longest step, or 5 times the "
            "longest start so far, but not before 30 s.",
            metavar="SECONDS",
        ),
        Field(gt=0, alias="stall_timeout_s"),
    ] = 600.0
    max_retries: Annotated[
        int, limit(help="Further launches of a trial after a communication error or a time-out."), Field(ge=0)
    ] = 1
    start_profile_step: Annotated[
        int, measured(help="First step that counts (from 1).", autotuning="start_profile_step"), Field(ge=1)
    ] = 3
    end_profile_step: Annotated[
        int,
        measured(
            help="Last step that counts; a launch whose step time is known to 1% ends before it.",
            autotuning="end_profile_step",
        ),
        Field(ge=1),
    ] = 5
    random_seed: Annotated[int, measured(help="Seed of the search."), Field(ge=0, le=2**32 - 1)] = 42
