"""``explain``: why a study's winner wins, what bounds it, and what to change or buy next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from optuna_dsat.cli.parameters import DEFAULT_STORAGE, Json, Name, Storage
from optuna_dsat.cli.tables import print_table
from optuna_dsat.escape.terminal import say_prose

if TYPE_CHECKING:
    from optuna_dsat.report.explanation import Contribution, Explanation
    from optuna_dsat.report.prediction_gap import PredictionGap

__all__ = ["explain"]


def explain(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    as_json: Json = False,
) -> None:
    """Say why the winner wins, or your run is slow: knob by knob, against prediction; what to change or buy next."""
    from optuna_dsat.report.explanation import explain_study
    from optuna_dsat.report.prediction_gap import prediction_gap
    from optuna_dsat.report.view import read_view
    from optuna_dsat.store import Store

    with Store.open(storage, create=False) as store:
        explanation, words = explain_study(store, name)
        view = read_view(store, name)
    gap = prediction_gap(view)
    if as_json:
        beside = {"prediction": None if gap is None else gap.to_json()}
        print(json.dumps({"study": name, "configuration": words, **explanation.to_json(), **beside}, indent=2))
    else:
        _show(explanation, words, gap=gap, alone=len(view.measured) == 1)


def _show(explanation: Explanation, words: str, *, gap: PredictionGap | None = None, alone: bool = False) -> None:
    """Print an explanation.

    Args:
        explanation: Why the winner wins.
        words: Its configuration.
        gap: Its step beside the predicted one; None if there is no prediction.
        alone: Whether no other configuration was measured.
    """
    from optuna_dsat.study.speeds import value_in_words
    from optuna_dsat.words import bytes_in_words

    metric, device = explanation.metric, explanation.device
    value = value_in_words(explanation.metrics, explanation.value, metric=metric, device=device)
    say_prose(f"The result is trial {explanation.winner}, {value}, {explanation.how_known}: {words}.")
    say_prose("No other configuration was measured." if alone else _against_own(explanation))
    _print_factors(explanation)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in _largest_first(explanation))
    say_prose(f"A step of the winner goes into: {shares} (fitted model). It is bound by: {explanation.bound}.")
    if explanation.peak_bytes is not None:
        room = bytes_in_words(explanation.device_bytes)
        say_prose(f"A rank takes {bytes_in_words(explanation.peak_bytes)} of the {room} that it may (measured).")
    if explanation.utilisation is not None:
        say_prose(f"It reaches {explanation.utilisation:.0%} of the GPU's peak FLOPS (measured).")
    if gap is not None:
        say_prose(gap.verdict)
        for cause in gap.causes:
            say_prose(f"  {cause}")
    for text in explanation.proposals:
        say_prose(f"- {text}")


def _largest_first(explanation: Explanation) -> list[tuple[str, float]]:
    return sorted(explanation.bounds.items(), key=lambda part: -part[1])


def _against_own(explanation: Explanation) -> str:
    """Return the sentence on the speed-up; one that its own factors contradict is not claimed."""
    from optuna_dsat.study.speeds import value_in_words

    ratio, explained = explanation.speed_up, explanation.explained
    if explanation.user_value is None or ratio is None:
        return "Your own config was not measured, so there is nothing to compare with."
    if explanation.is_own:
        return "It is your own config: nothing was found that is surely better."
    metric, device = explanation.metric, explanation.device
    own = value_in_words(explanation.user_metrics, explanation.user_value, metric=metric, device=device)
    if not explanation.contradicted or explained is None or explanation.remainder is None:
        return f"Your own config reaches {own}; the winner is {ratio:.2f} times as good."
    return (
        f"Your own config was measured at {own}, a ratio of {ratio:.2f}, but what differs between the two accounts for "
        f"{explained.factor:.2f} ({explained.low:.2f} to {explained.high:.2f}): {explanation.remainder.factor:.2f} "
        "remains that nothing explains, such as a machine that was busier at one of the two. Do not rely on the ratio; "
        "measure both again."
    )


def _print_factors(explanation: Explanation) -> None:
    if explanation.remainder is None:
        return
    rows = [_cells(one) for one in explanation.contributions]
    rows += [_cells(one) for one in (explanation.together, explanation.remainder) if one is not None]
    rows.append(("product", "", "", f"{explanation.speed_up:.3f}", "", "as measured"))
    print_table(("knob", "yours", "winner's", "factor", "95 % interval", "by"), rows)


def _cells(one: Contribution) -> tuple[str, ...]:
    factor = "" if one.factor is None else f"{one.factor:.3f}"
    spread = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
    by = f"{one.pairs} measured pair{'s' * (one.pairs > 1)}" if one.source == "measured" else "model"
    values = ("" if value is None else str(value) for value in (one.user, one.winner))
    return (one.knob, *values, factor, spread, one.note or by)
