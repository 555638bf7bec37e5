"""Which structure is launched first: the simpler of two that are predicted to be equal.

A structure is a ZeRO stage with its offloads. Of two structures that were never measured and whose predicted metrics
differ by less than the uncertainty of their difference, the simpler is launched first: it has fewer settings that may
fail, and the launch of the other is often unnecessary afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optuna_dsat.config.knobs import NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.structures import Structure
from optuna_dsat.cost.memory_posterior import normal_cdf
from optuna_dsat.cost.numbers import Numbers, descending
from optuna_dsat.guided.acquisition import Acquisition
from optuna_dsat.guided.candidates import CandidateTable
from optuna_dsat.guided.posterior import Posterior
from optuna_dsat.trials.lineage import ZERO_STAGE

__all__ = ["complexity", "first_launched", "structure_of"]

_LIKELY = 0.5
"""Probability above which a structure is assumed to fit."""
_CHANCE = 0.2
"""Least probability to exceed the incumbent of a structure that is launched before a simpler structure."""


def structure_of(params: Mapping[str, Any]) -> Structure:
    """Return the structure of a lineage."""
    devices = {name: str(params.get(name) or "none") for name in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)}
    result = Structure(stage=int(params[ZERO_STAGE]), **devices)
    return result.on_nvme() if params.get(NVME) else result


def complexity(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of offloads and the ZeRO stage: structures are simpler in this order."""
    structure = structure_of(params)
    return structure.offload_count, structure.stage


def first_launched(
    table: CandidateTable, posterior: Posterior, rows: Numbers, sizes: Numbers, acquisition: Acquisition
) -> int:
    """Return the index of the configuration to launch: of the largest acquisition value whose structure need not wait.

    A structure that was never measured waits for a simpler structure that was never measured either, that probably
    fits, and has a configuration worth a launch, if

    - its predicted metric is not better by more than a standard deviation of the difference; or
    - its probability to exceed the incumbent is below ``_CHANCE``.

    Args:
        table: The candidates.
        posterior: The posterior.
        rows: Rows of the n configurations that are worth a launch.
        sizes: Their micro-batches.
        acquisition: Their acquisition function.
    """
    structure = table.structure[rows]
    likely = ~np.isin(structure, posterior.known_structures) & (acquisition.fits >= _LIKELY) & (acquisition.value > 0)
    order = descending(acquisition.log_objective)
    best = {int(structure[index]): int(index) for index in order[::-1] if likely[index]}
    value = acquisition.value
    if len(best) > 1:
        places = np.array(list(best.values()), dtype=np.int64)
        ranks = [complexity(table.lineages[int(row)]) for row in rows[places]]
        waits = _waiting(posterior, ranks, *posterior.joint(rows[places], sizes[places]))
        free = np.where(np.isin(structure, np.array(list(best))[waits]), 0.0, value)
        value = free if free.max() > 0 else value
    return int(descending(value)[0])


def _waiting(posterior: Posterior, ranks: Sequence[tuple[int, int]], means: Numbers, covariance: Numbers) -> Numbers:
    """Return a mask of structures that wait for a simpler one, given their best configurations' joint posterior."""
    variances = np.diag(covariance)
    result = np.zeros(len(ranks), dtype=bool)
    for one, rank in enumerate(ranks):
        simpler = [other for other in range(len(ranks)) if ranks[other] < rank]
        if not simpler:
            continue
        spread = np.sqrt(np.maximum(variances[one] + variances[simpler] - 2 * covariance[one, simpler], 0.0))
        result[one] = np.any(means[one] - means[simpler] < spread)
        if posterior.incumbent is not None:
            z = (means[one] - posterior.incumbent) / math.sqrt(max(float(variances[one]), 1e-12))
            result[one] |= bool(normal_cdf(np.array(z)) < _CHANCE)
    return result
