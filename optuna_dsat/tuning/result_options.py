"""Options on the global batch and on the confirmation: what decides which config is handed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from optuna_dsat.tuning.declaration import BUDGET, OUTPUT_PANEL, WHAT, Option
from optuna_dsat.tuning.defaults import default
from optuna_dsat.tuning.parse import share

__all__ = ["ResultOptions"]


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Options of every method on what may be the result."""

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
