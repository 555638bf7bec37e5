"""Entry point of a rank: ``python -m optuna_dsat.integrations.deepspeed_trial NAME:CLASS --deepspeed_config FILE``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed

from optuna_dsat.integrations.deepspeed_trial.checkpoints import seed_everything
from optuna_dsat.integrations.deepspeed_trial.context import DeepSpeedTrialContext
from optuna_dsat.integrations.deepspeed_trial.training import Periods, Training
from optuna_dsat.integrations.deepspeed_trial.trial import DeepSpeedTrial
from optuna_dsat.runtime.rank import GroupRank, current_plan, initializes_distributed_manually
from optuna_dsat.script.trial_class import DEFAULT_LENGTH, Hparams, Length, overwrites_of


def main(argv: Sequence[str]) -> None:
    """Build the model definition and train it; during a search, until the runtime ends the process.

    Raises:
        SystemExit: With code 2, if the arguments cannot be parsed.
        TypeError: If the named class is not a model definition.
        UsageError: If the hyperparameters are invalid.
    """
    arguments = _parse(argv)
    trial_class = _class(arguments.entry)
    plan = current_plan()
    measuring = plan is not None and plan.measures
    hparams = Hparams.load(arguments.hparams) if arguments.hparams else Hparams(hyperparameters={})
    # The config of a launch already contains the overwrites, below the launch's overlay.
    keep = plan is None and bool(overwrites_of(hparams, arguments.deepspeed_config, Path.cwd()))
    trackers = (plan and plan.trackers_dir) or arguments.checkpoint_dir
    if not initializes_distributed_manually():
        import deepspeed

        deepspeed.init_distributed()
    seed_everything(arguments.seed)
    context = DeepSpeedTrialContext(
        hparams.with_config(arguments.deepspeed_config, keep_overwrites=keep),
        experiment=hparams.experiment,
        tensorboard_dir=None if trackers is None else Path(trackers) / "tensorboard",
        group=GroupRank.from_environment(),
        seed=arguments.seed,
        measuring=measuring,
    )
    training = Training(trial_class(context), context)
    if measuring:
        training.measure()
    periods = Periods(
        max_length=arguments.max_length,
        report=arguments.report_period,
        validation=arguments.validation_period,
        checkpoint=arguments.checkpoint_period,
    )
    training.run(periods, folder=arguments.checkpoint_dir, resume=arguments.resume)
    torch.distributed.destroy_process_group()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m optuna_dsat.integrations.deepspeed_trial", allow_abbrev=False)
    parser.add_argument("entry", metavar="NAME:CLASS")
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--hparams")
    parser.add_argument("--max-length", type=_length, default=DEFAULT_LENGTH)
    parser.add_argument("--report-period", type=_length, default="10batches")
    parser.add_argument("--validation-period", type=_length)
    parser.add_argument("--checkpoint-period", type=_length)
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def _length(text: str) -> Length:
    try:
        return Length.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _class(entry: str) -> Any:
    module, _, name = entry.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # absent if the interpreter runs with -P
        sys.path.insert(0, here)
    result = getattr(importlib.import_module(module), name, None)
    if not (isinstance(result, type) and issubclass(result, DeepSpeedTrial)):
        raise TypeError(f"{entry} is not a class derived from optuna_dsat.integrations.deepspeed_trial.DeepSpeedTrial.")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
