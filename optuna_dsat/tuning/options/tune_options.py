"""The options of a search: the stored ones of ``study/options``, and those of a single run.

The commands (``cli/parsing/commands.py``), the keywords of ``optuna_dsat.tune`` (``keywords.py``), the keys of option
files and ``docs/reference/options.md`` are generated from these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from optuna_dsat.study.options.declaration import (
    DEFAULT_STORAGE,
    STORAGE_ENV,
    Option,
    of_method,
    of_output,
    what,
    where,
)
from optuna_dsat.study.options.methods import METHODS, AshaSettings, BinarySettings, GuidedSettings, RandomSettings
from optuna_dsat.study.options.parse import named_config, split_counts, split_pairs
from optuna_dsat.study.options.settings import SearchSettings, StrPath
from optuna_dsat.tuning.options.trackers import TRACKERS, split_trackers

DEFAULT_METHOD = "guided"
"""Method of a search for which neither an option nor the config names one."""


@dataclass(frozen=True)
class TuneOptions(SearchSettings):
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
        ),
    ] = None
    _: KW_ONLY

    check_loss: Annotated[
        bool,
        of_output(
            help="Compare the first losses under the best config and yours; before the search, those with and without "
            "ZeRO for an optimizer that DeepSpeed has not tested with it.",
            before="metric",
        ),
    ] = False
    module: Annotated[
        bool,
        what(
            help="SCRIPT is a module's name, run as python -m does.",
            python_help="``script`` is a module's name, run as ``python -m`` does.",
            flags=("-m", "--module"),
            before="metric",
        ),
    ] = False
    hparams: Annotated[
        StrPath | None,
        what(help="Hyperparameters of NAME:CLASS (YAML or JSON).", text_type=Path | None, before="metric"),
    ] = None
    gpus_per_trial: Annotated[
        int | Sequence[int] | None,
        where(
            help="GPUs of one launch. Several numbers, such as 1 2 4 8: a search for each, compared at the end.",
            none="all",
            python_help="GPUs of one launch. A list: a search for each number, compared at the end. None for all.",
            metavar="N,...",
            text_type=str | None,
            parse=partial(split_counts, option="--gpus-per-trial"),
            autotuning="num_gpus",
            first=True,
            before="wait_for_gpus",
        ),
    ] = None
    only_free_gpus: Annotated[
        bool, where(help="Tune only on GPUs that are free at the start.", before="wait_for_gpus")
    ] = False
    cpu_ranks: Annotated[
        int | Sequence[int] | None,
        where(
            help="Run on the CPU with this many ranks. Several numbers: a search for each.",
            none="2",
            none_if="without a GPU",
            python_help="Run on the CPU with this many ranks. A list: a search for each number. None for 2 without a "
            "GPU.",
            metavar="N,...",
            text_type=str | None,
            parse=partial(split_counts, option="--cpu-ranks"),
            before="launcher",
        ),
    ] = None
    device_memory: Annotated[
        str | int | None,
        where(
            help="Memory that one rank may allocate, such as 2GiB.",
            none="all; on the CPU three quarters of its share of the available memory",
            python_help="Memory that one rank may allocate: bytes, or text such as ``2GiB``. None for all; on the CPU "
            "for three quarters of its share of the available memory.",
            text_type=str | None,
            metavar="SIZE",
            before="launcher",
        ),
    ] = None
    storage: Annotated[
        str,
        where(
            help="Database of the study: SQLite or PostgreSQL.",
            python_help="Database of the study: ``sqlite:///FILE`` or ``postgresql://USER@HOST/DATABASE``.",
            env=STORAGE_ENV,
            metavar="URL",
            first=True,
            before="output_dir",
        ),
    ] = DEFAULT_STORAGE
    study: Annotated[
        str | None,
        where(help="Name of the study.", none="SCRIPT-METHOD", metavar="NAME", first=True, before="output_dir"),
    ] = None
    arg_mapping: Annotated[
        Mapping[str, str] | None,
        what(
            help="Set an option of the script to the value of a config key in each launch, such as "
            "train_micro_batch_size_per_gpu=--batch-size (repeatable).",
            python_help="Key of the DeepSpeed config -> option of the script that follows it, such as "
            '``{"train_micro_batch_size_per_gpu": "--batch-size"}``.',
            parse=partial(split_pairs, option="--arg-mapping", form="KEY=--OPTION"),
            metavar="KEY=--OPTION",
            before="follow_batch",
        ),
    ] = None
    env: Annotated[
        Mapping[str, str] | None,
        what(
            help="Set this environment variable for the script (repeatable); stored with the study unless secret.",
            python_help="Variables of the environment that the script is given; stored with the study unless secret.",
            parse=partial(split_pairs, option="--env", form="NAME=VALUE"),
            metavar="NAME=VALUE",
            before="nvme_path",
        ),
    ] = None
    profile_reuse: Annotated[
        bool,
        what(
            help="Reuse the profile of an earlier study of the same script, config and hardware.", before="max_trials"
        ),
    ] = True
    callbacks: Annotated[
        Sequence[Callable[[Any, Any], None]] | None,
        of_output(
            help="Log each trial to wandb, mlflow or tensorboard, which read their own environment variables; "
            "wandb=PROJECT, mlflow=URI, tensorboard=FOLDER name what they log to (repeatable).",
            python_help="Functions ``callback(study, trial)``, called after each trial as those of "
            "``optuna.Study.optimize``, such as the callbacks of ``optuna_integration``. An exception ends the search; "
            "the same call continues it.",
            flags=("--log",),
            metavar="TRACKER[=VALUE]",
            choices=TRACKERS,
            parse=split_trackers,
        ),
    ] = None
    run_full_experiment: Annotated[
        bool,
        of_output(
            help="Train with the best config when the search is done.",
            python_help="Train with the best config when the search is done, before returning.",
        ),
    ] = False
    quiet: Annotated[
        bool, of_output(help="Print only the result.", python_help="Print nothing; otherwise progress goes to stderr.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RandomOptions(RandomSettings, TuneOptions):
    """Options of ``random`` and of every method."""


@dataclass(frozen=True, kw_only=True)
class BinaryOptions(BinarySettings, TuneOptions):
    """Options of ``binary`` and of every method."""


@dataclass(frozen=True, kw_only=True)
class AshaOptions(AshaSettings, TuneOptions):
    """Options of ``asha`` and of every method."""


@dataclass(frozen=True, kw_only=True)
class GuidedOptions(GuidedSettings, TuneOptions):
    """Options of ``guided`` and of every method."""


@dataclass(frozen=True, kw_only=True)
class AutotuningOptions(AshaSettings, RandomSettings, GuidedSettings, TuneOptions):
    """Options of ``tune`` and ``run``: the options of all methods; each method reads its own."""

    method: Annotated[
        str | None,
        of_method(
            help="guided, asha, binary or random.",
            none=f"by autotuning.tuner_type of the config, else {DEFAULT_METHOD}",
            python_help="``guided``, ``asha``, ``binary`` or ``random``. None for ``autotuning.tuner_type`` of the "
            f"config, else ``{DEFAULT_METHOD}``.",
            choices=METHODS,
            autotuning="tuner_type",
            metavar="NAME",
            first=True,
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
    if any(field_.name == option for field_ in fields(TuneOptions)):
        return ()
    return tuple(method for method, kind in _OF_METHOD.items() if any(field_.name == option for field_ in fields(kind)))
