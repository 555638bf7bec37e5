"""Options on launches that run on nodes of a cluster instead of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from optuna_dsat.tuning.options.declaration import BUDGET, OUTPUT_PANEL, WHAT, WHERE, Option
from optuna_dsat.tuning.options.defaults import default
from optuna_dsat.tuning.options.locations import DEFAULT_OUTPUT_DIR, DEFAULT_STORAGE, OUTPUT_DIR_ENV, STORAGE_ENV
from optuna_dsat.tuning.options.parse import share, split_counts

__all__ = ["ClusterOptions", "PlaceOptions", "ResultOptions", "StrPath"]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of every method for the cluster whose nodes run the launches."""

    on: Annotated[
        Literal["here", "slurm", "ray"],
        Option(
            help="Where launches run: on this machine, or on nodes of a SLURM or Ray cluster.",
            python_help="Where launches run: on this machine (``here``), or on nodes of a SLURM or Ray cluster.",
            panel=WHERE,
        ),
    ] = default("on")
    nodes_per_trial: Annotated[
        int, Option(help="Nodes of one launch, with --on slurm or --on ray.", metavar="N", panel=WHERE)
    ] = default("nodes_per_trial")
    gpus_per_node: Annotated[
        int | None,
        Option(
            help="GPUs of each of these nodes; --cpu-ranks instead runs so many ranks on the CPU of each.",
            none="none",
            metavar="N",
            panel=WHERE,
        ),
    ] = None
    slurm_arg: Annotated[
        Sequence[str] | None,
        Option(
            help="Option for srun, such as --slurm-arg=--partition=a100 (repeatable).",
            python_help="Options for srun, such as ``--partition=a100``.",
            metavar="OPTION",
            text_type=list[str] | None,
            panel=WHERE,
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            help="Address of the Ray cluster, HOST:PORT.",
            none="the cluster that this machine belongs to",
            metavar="ADDRESS",
            panel=WHERE,
        ),
    ] = default("ray_address")
    ray_node: Annotated[
        Sequence[str] | None,
        Option(
            help="Node of the Ray cluster that may be used: its name, host name or address (repeatable).",
            python_help="Nodes of the Ray cluster that may be used: names, host names or addresses.",
            none="all",
            metavar="NODE",
            text_type=list[str] | None,
            panel=WHERE,
        ),
    ] = None
    queue_timeout: Annotated[
        float | None,
        Option(
            help="Seconds to wait for the cluster to grant nodes.",
            none="as long as it takes",
            metavar="SECONDS",
            panel=WHERE,
        ),
    ] = default("queue_timeout")
    idle_release: Annotated[
        float,
        Option(
            help="Seconds without a launch after which nodes are given back to the cluster.",
            metavar="SECONDS",
            panel=WHERE,
        ),
    ] = default("idle_release")


StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Options of every method for devices, launches, database and folders."""

    gpus_per_trial: Annotated[
        int | Sequence[int] | None,
        Option(
            help="GPUs of one launch; several numbers, such as 1 2 4 8, are a search at each, compared at the end.",
            none="all",
            python_help="GPUs of one launch; a list is a search at each number, compared at the end. None for all.",
            metavar="N,...",
            text_type=str | None,
            parse=partial(split_counts, option="--gpus-per-trial"),
            autotuning="num_gpus",
            first=True,
            panel=WHERE,
        ),
    ] = None
    only_free_gpus: Annotated[bool, Option(help="Tune on those GPUs that are free at the start.", panel=WHERE)] = False
    wait_for_gpus: Annotated[
        float,
        Option(
            help="Seconds to wait for GPUs that others hold, counted anew when the holders change; 0 for not at all.",
            metavar="SECONDS",
            panel=WHERE,
        ),
    ] = default("wait_for_gpus")
    cpu_ranks: Annotated[
        int | Sequence[int] | None,
        Option(
            help="Run on the CPU with this many ranks; several numbers are a search at each.",
            none="2",
            none_if="without a GPU",
            python_help="Run on the CPU with this many ranks; a list is a search at each number. None for 2 without a "
            "GPU.",
            metavar="N,...",
            text_type=str | None,
            parse=partial(split_counts, option="--cpu-ranks"),
            panel=WHERE,
        ),
    ] = None
    device_memory: Annotated[
        str | int | None,
        Option(
            help="What one rank may allocate, such as 2GiB.",
            none="all there is",
            python_help="What one rank may allocate: bytes, or text such as ``2GiB``. None for all there is.",
            text_type=str | None,
            metavar="SIZE",
            panel=WHERE,
        ),
    ] = None
    launcher: Annotated[
        Literal["warm", "torchrun"],
        Option(
            help="How trials are launched: warm (forked from a process that has torch, DeepSpeed and what your script "
            "imports ready; plain torchrun where that is unsafe) or always torchrun.",
            panel=WHERE,
        ),
    ] = default("launcher")
    preload: Annotated[
        Sequence[str] | None,
        Option(
            help="Import this module, too, before a warm launch (repeatable).",
            python_help="Modules to import, too, before a warm launch.",
            metavar="MODULE",
            text_type=list[str] | None,
            panel=WHERE,
        ),
    ] = None
    no_preload: Annotated[
        Sequence[str] | None,
        Option(
            help="Have every warm launch import this package for itself (repeatable).",
            python_help="Packages that every warm launch imports for itself.",
            metavar="PACKAGE",
            text_type=list[str] | None,
            panel=WHERE,
        ),
    ] = None
    isolation: Annotated[
        Literal["auto", "python", "off"],
        Option(
            help="How your files are protected from trials: auto (overlay mounts, else redirected writers of Python), "
            "python (the latter alone) or off.",
            panel=WHERE,
        ),
    ] = default("isolation")
    writable: Annotated[
        Sequence[StrPath] | None,
        Option(
            help="File or folder that trials may change, such as a cache of your data (repeatable).",
            python_help="Files and folders that trials may change, such as a cache of the data.",
            metavar="PATH",
            text_type=list[str] | None,
            panel=WHERE,
        ),
    ] = None
    storage: Annotated[
        str,
        Option(
            help="Database of the study: SQLite or PostgreSQL.",
            python_help="Database of the study: ``sqlite:///FILE`` or ``postgresql://USER@HOST/DATABASE``.",
            env=STORAGE_ENV,
            metavar="URL",
            first=True,
            panel=WHERE,
        ),
    ] = DEFAULT_STORAGE
    study: Annotated[
        str | None, Option(help="Name of the study.", none="SCRIPT-METHOD", metavar="NAME", first=True, panel=WHERE)
    ] = None
    output_dir: Annotated[
        StrPath,
        Option(
            help="Directory for launches, logs and the best config.",
            env=OUTPUT_DIR_ENV,
            text_type=Path,
            first=True,
            panel=WHERE,
        ),
    ] = DEFAULT_OUTPUT_DIR


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Options of every method for the selection of the result."""

    train_batch_size: Annotated[
        int | None,
        Option(
            help="Keep this global batch: gradient accumulation makes up what a micro-batch lacks.",
            none="it follows the micro-batch",
            python_help="Global batch, in samples, that every trial keeps: gradient accumulation makes up what a "
            "micro-batch lacks. None to let it follow the micro-batch.",
            first=True,
            panel=WHAT,
        ),
    ] = default("train_batch_size")
    batch: Annotated[
        Literal["free", "keep"],
        Option(
            help="keep: every trial has the global batch of your own config, as with --train-batch-size.",
            python_help="``keep``: every trial has the global batch of the user's own config, as with "
            "``train_batch_size``.",
            panel=WHAT,
        ),
    ] = default("batch")
    max_train_batch_size: Annotated[
        int | None,
        Option(
            help="Largest global batch that is searched, in samples.",
            none="a tenth of the training data, but your own config's at least",
            none_if="where their size is known",
            panel=WHAT,
        ),
    ] = default("max_train_batch_size")
    divisible_by: Annotated[int, Option(help="Search multiples of this micro-batch only.", panel=WHAT)] = default(
        "divisible_by"
    )
    dataset_size: Annotated[
        int | None,
        Option(
            help="Samples of the training data, for the largest global batch and the steps of an epoch.",
            none="what the script's data loader tells",
            panel=WHAT,
        ),
    ] = default("dataset_size")
    confirm: Annotated[
        int,
        Option(help="Most finalists measured again, in rounds with your own config; 0 for none.", panel=BUDGET),
    ] = default("confirm")
    confirm_time: Annotated[
        float | None,
        Option(
            help="Seconds that these rounds may take; they end sooner once the speed-up is known to 2%.",
            none="three rounds, then up to a quarter of the search's time",
            metavar="SECONDS",
            panel=BUDGET,
        ),
    ] = default("confirm_time")
    tie: Annotated[
        float,
        Option(
            help="What is within this share of the best counts as equal: the smallest global batch wins, then the "
            "config nearest to yours. Such as 1%.",
            python_help="What is within this share of the best counts as equal: the smallest global batch wins, then "
            "the config nearest to the user's own.",
            metavar="SHARE",
            text_type=str,
            parse=share,
            panel=BUDGET,
        ),
    ] = default("tie")
    check_loss: Annotated[
        bool,
        Option(
            help="At the end, check that the first losses under the best config are those under yours.",
            panel=OUTPUT_PANEL,
        ),
    ] = False
