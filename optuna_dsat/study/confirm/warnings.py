"""Limitations of a confirmation: drift, other load on the machine, values that differ from the search.

Each warning is a sentence with its figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from optuna_dsat.study.confirm.rounds import Noise, Rounds
from optuna_dsat.words import things_in_words

_DRIFT = 3.0
"""Allowed drift of the user's config between rounds, as a multiple of the noise between launches."""
_SINCE_SEARCH = 0.05
"""Relative difference between search and rounds that is always reported: the search counts few steps."""
_OTHERS_SHARE = 0.05
"""Share of the cores' time that other processes may take."""


def warnings_of(
    rounds: Rounds, *, searched: Mapping[int, float], baseline: int | None, noise: Noise | None, tie: float
) -> tuple[str, ...]:
    """Return the warnings on a confirmation."""
    values = rounds.values()
    least = max(tie, 0.0 if noise is None else _DRIFT * noise.relative_sd)
    names = [] if baseline is None else _drift(values.get(baseline, {}), least=least, noise=noise)
    for number in sorted(searched):
        name = "Your config" if number == baseline else f"Trial {number}"
        names += _since_search(name, values.get(number, {}), searched[number], least=max(least, _SINCE_SEARCH))
    return (*names, *_others(rounds), *_on_gpus(rounds))


def _drift(values: Mapping[int, float], *, least: float, noise: Noise | None) -> list[str]:
    if noise is None or len(values) < 2:
        return []
    mean = statistics.fmean(math.log(value) for value in values.values())
    strays = {number: math.log(value) - mean for number, value in values.items()}
    worst = max(strays, key=lambda number: abs(strays[number]))
    if abs(strays[worst]) <= least:
        return []
    return [
        f"The machine changed while it was measured: in round {worst} your config was {_percent(strays[worst])} "
        f"its mean over {things_in_words(len(values), 'round')}, and the noise of the rounds is "
        f"{noise.relative_sd:.1%}."
    ]


def _since_search(name: str, values: Mapping[int, float], searched: float, *, least: float) -> list[str]:
    if not values or searched <= 0:
        return []
    mean = statistics.fmean(math.log(value) for value in values.values())
    if abs(mean - math.log(searched)) <= least:
        return []
    return [
        f"{name} measured {_percent(mean - math.log(searched))} its value in the search over "
        f"{things_in_words(len(values), 'round')}: only the rounds count."
    ]


def _percent(log: float) -> str:
    return f"{abs(math.expm1(log)):.0%} {'above' if log > 0 else 'below'}"


def _others(rounds: Rounds) -> list[str]:
    shares = [launch.conditions.others_share for launch in rounds.launches]
    busy = [share for share in shares if share is not None and share > _OTHERS_SHARE]
    if not busy:
        return []
    cores = max(launch.conditions.cores or 0 for launch in rounds.launches)
    return [
        f"Other processes took up to {max(busy):.0%} of the time of {things_in_words(cores, 'core')} during "
        f"{len(busy)} of {things_in_words(len(rounds.launches), 'launch')} of the confirmation."
    ]


def _on_gpus(rounds: Rounds) -> list[str]:
    facts, total = [launch.conditions for launch in rounds.launches], len(rounds.launches)
    shared = [fact.gpu_processes for fact in facts if fact.gpu_processes]
    throttled = [fact.throttle_reasons for fact in facts if fact.throttle_reasons]
    names = []
    launches = things_in_words(total, "launch")
    if shared:
        names.append(f"Others used the GPUs during {len(shared)} of {launches}: {_listed(shared)}.")
    if throttled:
        reasons = _listed(throttled)
        names.append(f"The GPUs' clocks were held down during {len(throttled)} of {launches}: {reasons}.")
    return names


def _listed(groups: Sequence[Sequence[str]]) -> str:
    return ", ".join(dict.fromkeys(name for group in groups for name in group))
