"""``explain``: why a study's winner wins, what bounds it, and what to change or buy next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from optuna_dsat.cli.parameters import DEFAULT_STORAGE, Json, Name, Storage
from optuna_dsat.cli.tables import print_table

if TYPE_CHECKING:
    from optuna_dsat.report.explanation import Contribution, Explanation

__all__ = ["explain"]


def explain(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    as_json: Json = False,
) -> None:
    """Say why the winner wins: against your config, knob by knob; what bounds it; what to change or buy next."""
    from optuna_dsat.report.explanation import explain_study
    from optuna_dsat.store import Store

    with Store.open(storage, create=False) as store:
        explanation, words = explain_study(store, name)
    if as_json:
        print(json.dumps({"study": name, "configuration": words, **explanation.to_json()}, indent=2))
    else:
        _show(explanation, words)


def _show(explanation: Explanation, words: str) -> None:
    from optuna_dsat.words import bytes_in_words, metric_in_words

    metric = explanation.metric
    print(f"Trial {explanation.winner} wins with {metric_in_words(metric, explanation.value)}: {words}.")
    if explanation.user_value is None or explanation.speed_up is None:
        print("Your own config was not measured, so there is nothing to compare with.")
    else:
        own = metric_in_words(metric, explanation.user_value)
        print(f"Your own config reaches {own}; the winner is {explanation.speed_up:.2f} times as good.")
    _print_contributions(explanation.contributions)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in _largest_first(explanation))
    print(f"A step of the winner goes into: {shares} (fitted model). It is bound by: {explanation.bound}.")
    if explanation.peak_bytes is not None:
        device = bytes_in_words(explanation.device_bytes)
        print(f"It takes {bytes_in_words(explanation.peak_bytes)} of {device} of device memory (measured).")
    if explanation.utilisation is not None:
        print(f"It reaches {explanation.utilisation:.0%} of the GPU's peak FLOPS (measured).")
    for text in explanation.proposals:
        print(f"- {text}")


def _largest_first(explanation: Explanation) -> list[tuple[str, float]]:
    return sorted(explanation.bounds.items(), key=lambda part: -part[1])


def _print_contributions(contributions: tuple[Contribution, ...]) -> None:
    if not contributions:
        return
    rows = []
    for one in contributions:
        factor = "" if one.factor is None else f"{one.factor:.3f}"
        spread = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        by = f"{one.pairs} measured pair{'s' * (one.pairs > 1)}" if one.source == "measured" else "model"
        rows.append((one.knob, str(one.user), str(one.winner), factor, spread, one.note or by))
    print_table(("knob", "yours", "winner's", "factor", "19 of 20", "by"), rows)
