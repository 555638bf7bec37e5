"""Structures at which no launch ran, each with its error."""

from __future__ import annotations

import re
from collections.abc import Sequence

from optuna.trial import FrozenTrial

from optuna_dsat.config.knobs import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import ZERO_STAGE, Feasibility, feasibility

__all__ = ["describe_structure_failures"]

_RANK = re.compile(r"^rank \d+: ")


def describe_structure_failures(trials: Sequence[FrozenTrial]) -> str:
    """Return a sentence per error with the structures that failed with it and never ran; empty without any."""
    ran = {_structure(trial) for trial in trials if feasibility(trial) is Feasibility.FITS}
    failed: dict[str, dict[str, None]] = {}
    for trial in trials:
        if feasibility(trial) is Feasibility.BROKEN and ZERO_STAGE in trial.params and _structure(trial) not in ran:
            message = _RANK.sub("", trial.user_attrs.get(attributes.MESSAGE, "")).rstrip(".")
            failed.setdefault(message, {})[_structure(trial)] = None
    return " ".join(
        f"No launch ran at {', '.join(sorted(structures))}: {message}." for message, structures in failed.items()
    )


def _structure(trial: FrozenTrial) -> str:
    offloads = [
        f"{name} offload"
        for name, knob in (("optimizer", OFFLOAD_OPTIMIZER), ("parameter", OFFLOAD_PARAM))
        if trial.params.get(knob) not in (None, "none")
    ]
    return " + ".join([f"ZeRO {trial.params.get(ZERO_STAGE)}", *offloads])
