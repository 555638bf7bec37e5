"""Options on where launches run and where a study is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from optuna_dsat.tuning.declaration import WHERE, Option
from optuna_dsat.tuning.defaults import default
from optuna_dsat.tuning.locations import DEFAULT_OUTPUT_DIR, DEFAULT_STORAGE, OUTPUT_DIR_ENV, STORAGE_ENV
from optuna_dsat.tuning.parse import split_counts

__all__ = ["PlaceOptions", "StrPath"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Options of every method on devices, launches, database and folders."""

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
