"""Options of the search methods, under the names of the dsat guide, each declared once; each method reads its own."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from optuna_dsat.config.conditions import ZERO_STAGES
from optuna_dsat.study.options.declaration import of_method
from optuna_dsat.study.options.parse import share

METHODS = ("random", "binary", "asha", "guided")
MOST_RUNGS = 64
"""Most rungs, and most by which they start higher: the top one of 64 would take ``2**63`` launches."""


def default_stages(method: str) -> tuple[int, ...]:
    """Return the ZeRO stages that a method searches by default: Determined's methods keep the default of dsat."""
    return ZERO_STAGES if method == "guided" else (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class RandomSettings:
    """Options of ``random``."""

    trials_per_random_config: Annotated[
        int,
        of_method(help="Most launches of configurations that differ only in the micro-batch."),
        Field(ge=1),
    ] = 5
    early_stopping: Annotated[
        int | None,
        of_method(
            help="End the search after this many trials without a new best.",
            none="never",
            python_help="End the search after this many trials without a new best. None for no such end.",
            autotuning="tuner_early_stopping",
            budget=True,
        ),
        Field(ge=1),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BinarySettings:
    """Options of ``binary``."""

    search_range_factor: Annotated[
        float,
        of_method(help="Factor on the largest micro-batch that the memory model predicts.", metavar="FACTOR"),
        Field(gt=0),
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class AshaSettings(BinarySettings):
    """Options of ``asha``."""

    max_rungs: Annotated[int, of_method(help="Largest number of rungs."), Field(ge=1, le=MOST_RUNGS)] = 5
    min_binary_search_trials: Annotated[
        int,
        of_method(
            help="Launches of configurations that differ only in the micro-batch, until these complete the lowest rung."
        ),
        Field(ge=1),
    ] = 3
    divisor: Annotated[
        int, of_method(help="The best 1/DIVISOR of a rung is promoted (eta of arXiv:1810.05934)."), Field(ge=2)
    ] = 2
    asha_early_stopping: Annotated[
        int,
        of_method(
            help="s of arXiv:1810.05934: rungs start DIVISOR**s higher.",
            python_help="s of arXiv:1810.05934: rungs start ``divisor ** s`` higher.",
        ),
        Field(ge=0, le=MOST_RUNGS),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class GuidedSettings:
    """Options of ``guided``."""

    memory_margin: Annotated[
        float,
        of_method(
            help="Share of the device's memory to keep free.",
            metavar="SHARE",
            text_type=str,
            parse=partial(share, option="--memory-margin"),
        ),
        Field(ge=0, lt=1),
    ] = 0.0
    min_gain: Annotated[
        float,
        of_method(
            help="Stop when the next launch is expected to improve the best by less than this share, and the next 20 "
            "by less than 20 times it; 0 for never.",
            metavar="SHARE",
            text_type=str,
            parse=partial(share, option="--min-gain"),
            budget=True,
        ),
        Field(ge=0),
    ] = 0.0005
    warm_start: Annotated[
        str | None,
        of_method(
            help="Reuse the measurements of this study, of the same or a similar model on the same hardware.",
            none="studies of the same script, config and hardware",
            python_help="Study of the same storage, with the same or a similar model and the same hardware, whose "
            "measurements to start from. None for studies of the same script, config and hardware.",
            metavar="STUDY",
        ),
    ] = None
    no_warm_start: Annotated[bool, of_method(help="Ignore the measurements of earlier studies.")] = False
