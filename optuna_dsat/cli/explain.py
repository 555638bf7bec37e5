"""``explain``: why the winner of a study is fastest, its bottleneck, and what to change or buy next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from optuna_dsat.cli.parsing.parameters import DEFAULT_STORAGE, Json, LatestName, Storage
from optuna_dsat.cli.tables import print_table
from optuna_dsat.escape.terminal import say_prose

if TYPE_CHECKING:
    from optuna_dsat.report.explain.explanation import Explanation
    from optuna_dsat.report.explain.prediction_gap import PredictionGap


def explain(
    name: LatestName = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: Json = False,
) -> None:
    """Say why the winner wins, or your run is slow: knob by knob, against prediction; what to change or buy next."""
    from optuna_dsat.report.explain.explanation import explain_study
    from optuna_dsat.report.explain.prediction_gap import prediction_gap
    from optuna_dsat.report.view import read_view
    from optuna_dsat.store import Store
    from optuna_dsat.study.stored import latest_study

    with Store.open(storage, create=False) as store:
        name = name or latest_study(store)
        view = read_view(store, name)
    explanation, words = explain_study(view)
    gap = prediction_gap(view)
    if as_json:
        beside = {"prediction": None if gap is None else gap.to_json()}
        print(json.dumps({"study": name, "configuration": words, **explanation.to_json(), **beside}, indent=2))
    else:
        _show(explanation, words, gap=gap, alone=len(view.measured) == 1)


def _show(explanation: Explanation, words: str, *, gap: PredictionGap | None = None, alone: bool = False) -> None:
    """Print an explanation."""
    from optuna_dsat.report.explain.why import told_of
    from optuna_dsat.study.confirm.speeds import speed_of

    metric, device = explanation.metric, explanation.device
    value = speed_of(explanation.metrics, explanation.value, metric=metric, device=device).text
    say_prose(f"The result is trial {explanation.winner}, {value}, {explanation.how_known}: {words}.")
    say_prose("No other configuration was measured." if alone else _against_own(explanation))
    _print_factors(explanation)
    for text in told_of(explanation):
        say_prose(text)
    if gap is not None:
        say_prose(gap.verdict)
        for cause in gap.causes:
            say_prose(f"  {cause}")
    for text in explanation.proposals:
        say_prose(f"- {text}")


def _against_own(explanation: Explanation) -> str:
    """Return the sentence on the speed-up; a speed-up that its own factors contradict is not claimed."""
    from optuna_dsat.study.confirm.speeds import speed_of
    from optuna_dsat.words import times_in_words

    ratio, explained = explanation.speed_up, explanation.explained
    if explanation.user_value is None or ratio is None:
        return "Your config was not measured, so there is nothing to compare with."
    if explanation.is_own:
        return "It is your config: nothing was found that is surely better."
    metric, device = explanation.metric, explanation.device
    own = speed_of(explanation.user_metrics, explanation.user_value, metric=metric, device=device).text
    if not explanation.contradicted or explained is None or explanation.remainder is None:
        return f"Your config reaches {own}; the winner is {times_in_words(ratio)}x as fast."
    factors = (explained.factor, explained.low, explained.high, explanation.remainder.factor)
    ends = ["?" if factor is None else times_in_words(factor) for factor in factors]
    return (
        f"Your config was measured at {own}, a ratio of {times_in_words(ratio)}, but what differs between the two "
        f"accounts for {ends[0]} ({ends[1]} to {ends[2]}): {ends[3]} remains that nothing explains, such as a machine "
        "that was busier at one of the two. Do not rely on the ratio; measure both again."
    )


def _print_factors(explanation: Explanation) -> None:
    from optuna_dsat.report.explain.why import factor_rows

    rows = [(row.setting, row.own, row.best, row.factor, row.between, row.by) for row in factor_rows(explanation)]
    if rows:
        print_table(("setting", "yours", "winner's", "factor", "95% interval", "by"), rows)
