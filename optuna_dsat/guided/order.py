"""Order of the launches: structures that may win, the simplest first; then the settings of the best; and why.

A structure is a ZeRO stage with its offloads. Of two structures that were never measured and whose predicted metrics
differ by less than the uncertainty of their difference, the simpler is launched first: it has fewer settings that may
fail, and the launch of the other is often unnecessary afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optuna_dsat.config.conditions import NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.structures import Structure
from optuna_dsat.cost.numbers import Numbers, descending
from optuna_dsat.guided.acquisition import Acquisition
from optuna_dsat.guided.candidates import CandidateTable
from optuna_dsat.guided.posterior import Posterior
from optuna_dsat.guided.sizes import LEAST_GAIN, outgrown_size
from optuna_dsat.trials.lineage import STRUCTURE, ZERO_STAGE

_LIKELY = 0.5
"""Probability above which a structure is assumed to fit."""
_SAFE = 0.8
"""Least probability to fit of the micro-batch at which a launch starts that can climb."""
_CHANCE = 0.2
"""Least probability to exceed the incumbent of a structure that is launched before a simpler structure, and before a
measured structure is refined.
"""
DEFICIT = math.log1p(0.05)
"""Predicted deficit in log objective above which a configuration comes last."""
_LITTLE = 0.1
"""Share of the expected gain of configurations that come last, below which others do not precede them."""
_GAP, _WIDE, _FAR, _LEAST_SIZE = 1.25, 2.5, 1.6, 8
"""Ratio of neighbouring micro-batches above which a peak is looked for between them, the ratio above which it is below
the best although others close to it were measured, the ratio to the best at which it is looked for at most, and the
least best micro-batch below which it is.
"""
_MUCH_SLOWER = math.log1p(0.2)
"""Predicted deficit in log objective from which on a configuration is not measured as a last check."""
GAIN_OF_CHECK = 0.005
"""Assumed relative gain of a last check, which the posterior underestimates by definition."""
_WORTH = 0.005
"""Expected improvement of another configuration above which unlikely ones wait."""


def structure_of(params: Mapping[str, Any]) -> Structure:
    """Return the structure of a lineage."""
    devices = {name: str(params.get(name) or "none") for name in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)}
    result = Structure(stage=int(params[ZERO_STAGE]), **devices)
    return replace(result, offload_optimizer="nvme") if params.get(NVME) else result


def complexity(params: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the offloads to NVMe, all offloads, and the ZeRO stage: structures are simpler in this order."""
    structure = structure_of(params)
    return structure.nvme_count, structure.offload_count, structure.stage


def first_launched(
    table: CandidateTable, posterior: Posterior, rows: Numbers, sizes: Numbers, acquisition: Acquisition
) -> int:
    """Return the index of the configuration to launch: the largest acquisition value of all that need not wait.

    Structures that were never measured are launched first, the simplest of them first, if they probably fit and are
    likely to win (``_structures``), unless another configuration is expected to gain more. A trial that continues a
    launch is so cheap that the search would otherwise refine the first structure before it knows whether another is
    faster. But a launch first climbs to the micro-batch that pays: the expected gain of its trials counts twice.

    These configurations wait while another one is expected to gain ``_WORTH``:

    - of structures that are unlikely to win;
    - if they probably do not fit: of structures that were never measured, and of others for an expected gain below
      ``LEAST_GAIN``.

    These come last, unless the others are expected to gain less than ``_LITTLE`` of their gain:

    - of measured structures, if they are predicted to be slower than the incumbent by more than ``DEFICIT``, and of
      others, if they are slower than the best of their structure by as much;
    - of measured structures, micro-batches that the search has climbed past (``outgrown_size``).

    Costs decide between continuing a launch and starting another. Among trials that continue it, costs below the cost
    of a start do not: the search climbs to the micro-batch that is expected to gain most, not to the cheapest.

    Args:
        table: The candidates.
        posterior: The posterior.
        rows: Rows of the n configurations that are worth a launch.
        sizes: Their micro-batches.
        acquisition: Their acquisition function.
    """
    structure, gain = table.structure[rows], acquisition.gain
    known = np.isin(structure, posterior.known_structures)
    waiting, unlikely, promising = _structures(table, posterior, rows, sizes, acquisition)
    measured, means = posterior.measured, posterior.residuals.posterior_means[: len(posterior.measured.row)]
    outgrown = outgrown_size(table.structure[measured.row], measured.micro_batch, means)
    best = np.full(int(structure.max()) + 1, -np.inf)
    np.maximum.at(best, structure, np.where(acquisition.fits >= _LIKELY, acquisition.log_objective, -np.inf))
    slower = acquisition.log_objective < np.where(known, acquisition.over, best[structure]) - DEFICIT
    last = np.isin(structure, waiting) | slower | (known & (sizes <= outgrown))
    late = (acquisition.fits < _LIKELY) & (~known | (gain < math.log1p(LEAST_GAIN))) | np.isin(structure, unlikely)
    if posterior.incumbent is None:  # the likeliest to run comes first
        last, late, promising = np.isin(structure, waiting), np.zeros(len(rows), dtype=bool), promising[:0]
    allowed = np.ones(len(rows), dtype=bool)
    for group, least in ((last, _LITTLE * gain[last].max(initial=0.0)), (late, _WORTH)):
        if gain[allowed & ~group].max(initial=0.0) > least:
            allowed &= ~group
    first = allowed & np.isin(structure, promising)
    if first.any() and gain[first].max() >= (gain * (1 + acquisition.continues))[allowed & ~first].max(initial=0.0):
        allowed = first
    cheapest = int(descending(np.where(allowed, acquisition.value, 0.0))[0])
    allowed &= acquisition.continues == acquisition.continues[cheapest]
    return int(descending(np.where(allowed, acquisition.value_of_starts, 0.0))[0])


def start_of_climb(rows: Numbers, sizes: Numbers, acquisition: Acquisition, chosen: int) -> int:
    """Return the index of the configuration at which a launch for the chosen one starts if it can climb.

    It is the largest micro-batch of the lineage that fits with a probability of at least ``_SAFE``, if that is at least
    half of the chosen one: the launch climbs from there at the cost of its steps, while an out-of-memory costs a start.
    """
    if acquisition.continues[chosen] or acquisition.fits[chosen] >= _SAFE:
        return chosen
    safe = (rows == rows[chosen]) & (acquisition.fits >= _SAFE) & (2 * sizes >= sizes[chosen])
    return int(np.argmax(np.where(safe, sizes, 0))) if safe.any() else chosen


def last_check(
    table: CandidateTable, posterior: Posterior, open_rows: Numbers
) -> tuple[Numbers, Numbers, Acquisition, str] | None:
    """Return row, micro-batch, acquisition and purpose of a configuration to measure before a search ends, or None.

    The posterior relies on smooth curves, and on settings with similar effects in all structures. Exceptions are looked
    for at the best configuration, unless they are predicted to be much slower or not to fit:

    - a flag's value (of large effect) that no measurement of the structure has;
    - a peak of the speed between its micro-batch and the next smaller or larger one measured in the structure.

    Args:
        table: The candidates.
        posterior: The posterior.
        open_rows: Rows that may be launched.
    """
    best, measured = posterior.best, posterior.measured
    if best is None:
        return None
    row, size = measured.row[best], float(measured.micro_batch[best])
    alike = table.structure[measured.row] == table.structure[row]
    near, others = table.neighbours(row), measured.micro_batch[alike]
    flags = near[table.never_measured(near, measured.row[alike])]
    checks = [(flags, size, f"untested with {structure_of(table.lineages[row]).words}")]
    smaller, larger = others[others < size / _GAP].max(initial=0.0), others[others > size].min(initial=np.inf)
    is_alone = not ((others >= size / _GAP) & (others < size)).any()
    if size >= _LEAST_SIZE and (is_alone or smaller < size / _WIDE):
        checks.append((np.array([row]), max(math.sqrt(smaller * size), size / _FAR), "checks for a peak below it"))
    if _GAP * size < larger < np.inf:
        checks.append((np.array([row]), min(math.sqrt(size * larger), size * _FAR), "checks for a peak above it"))
    for rows, wanted, words in checks:
        rows = np.intersect1d(rows, open_rows)
        rows, sizes = posterior.unused(rows, np.full((len(rows), 1), wanted))
        acquisition = posterior.acquisition(rows, sizes)
        fast = acquisition.log_objective > acquisition.over - _MUCH_SLOWER
        value = np.where(fast & (acquisition.fits >= _LIKELY), acquisition.value, -1.0)
        if value.max(initial=-1.0) >= 0:
            chosen = descending(value)[:1]
            return rows[chosen], sizes[chosen], acquisition.take(chosen), words
    return None


def _structures(
    table: CandidateTable, posterior: Posterior, rows: Numbers, sizes: Numbers, acquisition: Acquisition
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the structures that wait, that are unlikely to win, and that are launched first.

    All were never measured, probably fit, and have a configuration worth a launch. A structure waits for a simpler one
    of them if it is unlikely to win, or if its predicted metric is not better by more than a standard deviation of the
    difference.

    It is unlikely to win if its probability to exceed the incumbent is below ``_CHANCE``; or if it has ZeRO 3 or an
    offload, and its micro-batch hardly exceeds a simpler measured structure's largest (``Posterior.seldom``).
    """
    structure = table.structure[rows]
    likely = ~np.isin(structure, posterior.known_structures) & (acquisition.fits >= _LIKELY) & (acquisition.gain > 0)
    order = descending(acquisition.log_objective)
    best = {int(structure[index]): int(index) for index in order[::-1] if likely[index]}
    places, groups = np.array(list(best.values()), dtype=np.int64), np.array(list(best), dtype=np.int64)
    unlikely = acquisition.chance[places] < _CHANCE
    unlikely |= posterior.seldom(rows[places], sizes[places]) < 1
    ranks = [complexity(table.lineages[int(row)]) for row in rows[places]]
    waits = _waiting(ranks, *posterior.joint(rows[places], sizes[places]), unlikely)
    return groups[waits], groups[unlikely], groups[~waits & ~unlikely]


def _waiting(ranks: Sequence[tuple[int, int, int]], means: Numbers, covariance: Numbers, unlikely: Numbers) -> Numbers:
    """Return a mask of structures that wait for a simpler one, given their best configurations' joint posterior."""
    variances = np.diag(covariance)
    result = np.zeros(len(ranks), dtype=bool)
    for index, rank in enumerate(ranks):
        simpler = [other for other in range(len(ranks)) if ranks[other] < rank]
        spread = np.sqrt(np.maximum(variances[index] + variances[simpler] - 2 * covariance[index, simpler], 0.0))
        result[index] = bool(simpler) and (unlikely[index] or np.any(means[index] - means[simpler] < spread))
    return result


_ALIKE = 0.005
"""Relative difference of a predicted metric below which it counts as equal."""
_MANY = 2
"""Number of knobs that are named."""
_EDGE = 0.9
"""Probability to run, or to fit, that is named below this value."""


def reason_of(
    table: CandidateTable,
    posterior: Posterior,
    row: int,
    size: int,
    *,
    log_objective: float,
    fits: float,
    climbs: bool = False,
    checks: str = "",
) -> str:
    """Return why a configuration is launched, such as ``larger micro-batch, predicted 4% faster than the best``.

    ``log_objective`` is its posterior mean, ``fits`` its probability to run; it ``climbs`` if meant for a larger
    micro-batch; ``checks`` is the purpose of a last check (``last_check``), else empty.
    """
    if posterior.incumbent is None:
        return f"most likely to run: {fits:.0%}"
    edge = ""
    if climbs:
        edge = "; climbs from here to the edge of memory"
    elif checks:
        edge = f"; {checks}"
    elif fits < _EDGE:
        in_memory = posterior.predict(np.array([row]), np.array([size]))[0].fits
        near = f"near the edge of memory, fits with {in_memory:.0%}"
        edge = f"; {near}" if in_memory < _EDGE else f"; {fits:.0%} likely to run, given earlier failures"
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
