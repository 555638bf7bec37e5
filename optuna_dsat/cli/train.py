"""``train``: full training of a study's script with its best config, or of a ``DeepSpeedTrial`` with any config."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from optuna_dsat.cli.parsing.commands import origins_of
from optuna_dsat.cli.parsing.parameters import Storage, complete_studies
from optuna_dsat.cli.resume import Approval, Python, Trust, Workdir, ask_for_secrets
from optuna_dsat.cli.tables import notify
from optuna_dsat.errors import UsageError
from optuna_dsat.script.trial_class import DEFAULT_LENGTH, Length, is_trial_class
from optuna_dsat.study.options.declaration import DEFAULT_STORAGE

_LENGTH = "LENGTH"
_OF_CLASS = (
    *("hparams", "max_length", "validation_period", "checkpoint_period", "report_period", "checkpoint_dir", "resume"),
    *("seed", "gpus", "cpu_ranks"),
)
"""Options that apply to a model definition only."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Arguments and options of ``train``."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|NAME:CLASS",
            help="A stored study, or a model definition such as model_def:MyTrial.",
            show_default=False,
            autocompletion=complete_studies,
        ),
    ]
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARG]...|DS_CONFIG",
            help="For a study, arguments appended to those of its script; for a model definition, the DeepSpeed "
            "config (JSON).",
            show_default=False,
        ),
    ] = None
    storage: Storage = DEFAULT_STORAGE
    trial: Annotated[
        int | None,
        typer.Option(help="Study: train with the config of this trial.  \\[default: the best config]", min=0),
    ] = None
    workdir: Workdir = None
    python: Python = None
    trust: Trust = False
    hparams: Annotated[Path | None, typer.Option(help="Hyperparameters (YAML or JSON).")] = None
    max_length: Annotated[str, typer.Option(metavar=_LENGTH, help="How long: 100batches, 3epochs or 5000records.")] = (
        DEFAULT_LENGTH
    )
    validation_period: Annotated[
        str | None, typer.Option(metavar=_LENGTH, help="Validate this often.  \\[default: at the end]")
    ] = None
    checkpoint_period: Annotated[
        str | None, typer.Option(metavar=_LENGTH, help="Keep a checkpoint this often.  \\[default: at the end]")
    ] = None
    report_period: Annotated[
        str, typer.Option(metavar=_LENGTH, help="Report training metrics, averaged, this often.")
    ] = "10batches"
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints and metrics.jsonl.  \\[default: none are written]")
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint, or start from the beginning.")
    ] = False
    seed: Annotated[int, typer.Option(help="Seed of initialisation and order.", min=0)] = 0
    gpus: Annotated[
        int | None, typer.Option("--gpus", "--gpus-per-trial", help="GPUs to train on.  \\[default: all]")
    ] = None
    cpu_ranks: Annotated[
        int | None, typer.Option(help="Train on the CPU with this many ranks.  \\[default without a GPU: 2]")
    ] = None


def train(context: typer.Context, options: TrainOptions) -> None:
    """Train to the end: a study's script with its best config, or a DeepSpeedTrial with a config."""
    if is_trial_class(options.target):
        _train_class(options)
    if Path(options.target).suffix == ".py":
        raise UsageError(
            "train takes a stored study, or a model definition such as model_def:MyTrial; "
            f"got {options.target!r}. torchrun trains a script."
        )
    for name, origin in origins_of(context, _OF_CLASS).items():
        if origin == "command line":
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is for a model definition (NAME:CLASS), not for a study.")

    from optuna_dsat.tuning.resume import train_study

    code = train_study(
        options.target,
        options.storage,
        trial=options.trial,
        args=options.words or (),
        workdir=options.workdir,
        python=options.python,
        on_notice=notify,
        approve=Approval(options.trust, quiet=True),
        ask_for_secrets=ask_for_secrets,
    )
    sys.exit(code)


def _train_class(options: TrainOptions) -> NoReturn:
    """Train a ``DeepSpeedTrial`` and exit with its exit code."""
    from optuna_dsat.config import ds_config, user_file
    from optuna_dsat.launch.full_run import run_full
    from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
    from optuna_dsat.secrecy.references import References, keep
    from optuna_dsat.tuning.spec_builder import choose_devices
    from optuna_dsat.tuning.target import trial_target

    if len(options.words or ()) != 1:
        raise UsageError(
            f"train {options.target} takes one DeepSpeed config: optuna-dsat train {options.target} DS_CONFIG."
        )
    config = Path((options.words or [""])[0])
    target = trial_target(options.target, config, options.hparams, _runner_arguments(options))
    settings = ds_config.merge(user_file.load(config).raw, target.overwrites)
    devices = choose_devices(options.gpus, options.cpu_ranks, option="--gpus")
    for notice in devices.notices:
        notify(notice)
    secrets = References()
    request = LaunchRequest(
        launch_id="train",
        purpose="full",
        command=ScriptCommand(
            script=target.script,
            args=target.args,
            is_module=True,
            cwd=str(Path.cwd()),
            config_path=str(config.resolve()),
        ),
        ds_config=secrets.data(settings),
        overlay={},
        slots=devices.per_launch if options.gpus is None else options.gpus,
    )
    keep(secrets.values)
    sys.exit(run_full(request, devices=devices, on_notice=notify))


def _runner_arguments(options: TrainOptions) -> tuple[str, ...]:
    """Return the runner's arguments after the model definition and its config."""
    lengths = {
        "--max-length": options.max_length,
        "--report-period": options.report_period,
        "--validation-period": options.validation_period,
        "--checkpoint-period": options.checkpoint_period,
    }
    arguments = []
    for option, text in lengths.items():
        if text is not None:
            try:
                Length.parse(text)
            except ValueError as error:
                raise UsageError(f"{option}: {error}") from None
            arguments += [option, text]
    folder = options.checkpoint_dir
    if folder is None and options.resume:
        raise UsageError("--resume needs the --checkpoint-dir to go on from.")
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--checkpoint-dir {folder} is not a folder.")
        if not options.resume and any(path.is_dir() for path in folder.glob("batches-*")):
            raise UsageError(
                f"{folder} holds checkpoints: give --resume to go on from them, or another --checkpoint-dir."
            )
        arguments += ["--checkpoint-dir", str(folder.absolute())]
    return (*arguments, *(["--resume"] if options.resume else []), "--seed", str(options.seed))
