"""Why a configuration is launched, in a phrase, by the posterior and the acquisition function that chose it."""

from __future__ import annotations

import math

from optuna_dsat.config.knobs import NVME
from optuna_dsat.cost.numbers import descending
from optuna_dsat.guided.candidates import CandidateTable
from optuna_dsat.guided.order import structure_of
from optuna_dsat.guided.posterior import Posterior
from optuna_dsat.trials.lineage import STRUCTURE

_ALIKE = 0.005
"""Relative difference of a predicted metric below which it counts as equal."""
_MANY = 2
"""Number of knobs that are named."""
_EDGE = 0.9
"""Probability to fit below which a configuration is near the edge of memory."""


def reason_of(
    table: CandidateTable,
    posterior: Posterior,
    row: int,
    size: int,
    *,
    log_objective: float,
    fits: float,
    climbs: bool = False,
) -> str:
    """Return why a configuration is launched, such as ``larger micro-batch, predicted 4% faster than the best``.

    Args:
        table: The candidates.
        posterior: The posterior by which it was chosen.
        row: Row of its lineage.
        size: Its micro-batch.
        log_objective: Its posterior mean.
        fits: Its probability to run.
        climbs: Whether its launch is meant for a larger micro-batch.
    """
    if posterior.incumbent is None:
        return f"most likely to run: {fits:.0%}"
    edge = ""
    if climbs:
        edge = "; climbs from here to the edge of memory"
    elif fits < _EDGE:
        edge = f"; near the edge of memory, fits with {fits:.0%}"
    return f"{_difference(table, posterior, row, size)}, {_predicted(log_objective - posterior.incumbent)}{edge}"


def _difference(table: CandidateTable, posterior: Posterior, row: int, size: int) -> str:
    """Return how a configuration differs from the measured configuration that is most like it."""
    measured, means = posterior.measured, posterior.residuals.posterior_means
    params, rivals = table.lineages[row], posterior.rivals[posterior.rivals < len(measured.row)]
    alike = rivals[table.structure[measured.row[rivals]] == table.structure[row]]
    if not len(alike):
        return f"{structure_of(params).words} was not measured"
    differing = (table.knobs[measured.row[alike]] != table.knobs[row]).sum(axis=1)
    nearest = alike[differing == differing.min()]
    best = nearest[int(descending(means[nearest])[0])]
    other = table.lineages[int(measured.row[best])]
    names = [name for name in params if name not in (*STRUCTURE, NVME) and params[name] != other.get(name)]
    if names:
        more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
        larger = "larger micro-batch, " if size > measured.micro_batch[alike].max() else ""
        return f"{larger}tests {', '.join(names[:_MANY])}{more}"
    sizes = measured.micro_batch[nearest]
    if size > sizes.max():
        return "larger micro-batch"
    return "smaller micro-batch" if size < sizes.min() else "micro-batch between measured ones"


def _predicted(gain: float) -> str:
    ratio = math.expm1(gain)
    if abs(ratio) < _ALIKE:
        return "predicted as fast as the best"
    if ratio >= 1:
        return f"predicted {1 + ratio:.1f} times as fast as the best"
    return f"predicted {abs(ratio):.0%} {'faster' if ratio > 0 else 'slower'} than the best"
