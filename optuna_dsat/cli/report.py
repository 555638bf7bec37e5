"""``report`` writes the report of a study, or compares studies; ``explain`` and ``dashboard`` show one study.

``explain``: why the winner is fastest, and its bottleneck. ``dashboard``: a study in the browser, during the search.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.cli.parsing.parameters import (
    Json,
    LatestName,
    Storage,
    complete_studies,
    confirm_replacing,
    finite,
    opened,
    option,
    say_written,
)
from optuna_dsat.cli.tables import notify, print_table
from optuna_dsat.errors import UsageError
from optuna_dsat.escape.paths import page_address
from optuna_dsat.escape.terminal import say, say_prose
from optuna_dsat.study.options.declaration import DEFAULT_STORAGE

if TYPE_CHECKING:
    from optuna_dsat.report.explain.explanation import Explanation
    from optuna_dsat.report.explain.prediction_gap import PredictionGap
    from optuna_dsat.report.view import StudyView

_ELSEWHERE = re.compile(r"(?P<name>[^/]+)@(?P<url>[a-z][\w+]*://.*)", re.DOTALL)
"""A study in another database. Study names contain no slash."""


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STUDY]...",
            help="Name of the study; several are shown side by side. NAME@URL is one of another database.  "
            "\\[default: the latest study]",
            show_default=False,
            autocompletion=complete_studies,
        ),
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            help="HTML file to write.  \\[default: report.html among the study's files, else STUDY-report.html here; "
            "comparison.html here for several]",
        ),
    ] = None,
    dataset_size: Annotated[
        int | None, option(help="Samples of the training data, for the duration of a training.", min=1)
    ] = None,
    epochs: Annotated[
        float, typer.Option(help="Epochs of the training that is to follow.", min=0.001, callback=finite)
    ] = 1.0,
    price: Annotated[
        float | None, option(help="Price of a GPU hour, for the cost that a training saves.", min=0.0, callback=finite)
    ] = None,
) -> None:
    """Write a study's report: one HTML file with figures that opens in any browser, without a network.

    Several studies are shown side by side: models, machines, methods, before and after an upgrade.
    """
    from optuna_dsat.report.facts import Training
    from optuna_dsat.report.view import read_view
    from optuna_dsat.report.write import COMPARISON, default_path, is_report, write_comparison, write_report

    training = Training(epochs=epochs, price_per_gpu_hour=price, dataset_size=dataset_size)
    if names and len(names) > 1:
        confirm_replacing(output or Path(COMPARISON), is_ours=is_report)
        say_written(write_comparison([_read(name, storage) for name in names], output, training=training))
        return
    name, url = _parts(names[0], storage) if names else (None, storage)
    with opened(url, name) as (store, name):
        confirm_replacing(output or default_path(read_view(store, name)), is_ours=is_report)
        say_written(write_report(store, name, output, training=training))


def _read(name: str, storage: str) -> StudyView:
    from optuna_dsat.report.view import read_view

    study, url = _parts(name, storage)
    with opened(url, study) as (store, study):
        return read_view(store, study)


def _parts(name: str, storage: str) -> tuple[str, str]:
    """Return a study's name and its database."""
    from optuna_dsat.store import parse_url

    match = _ELSEWHERE.fullmatch(name)
    if match is None:
        return name, storage
    if parse_url(match["url"]).password:
        raise UsageError(
            f"The address of the database of {match['name']!r} holds a password, which every user of this machine "
            "could read: leave it out and use PGPASSFILE."
        )
    return match["name"], match["url"]


def explain(
    name: LatestName = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: Json = False,
) -> None:
    """Explain, setting by setting, why the winner is faster; compare with the prediction."""
    from optuna_dsat.report.explain.explanation import explain_study
    from optuna_dsat.report.explain.prediction_gap import prediction_gap
    from optuna_dsat.report.view import read_view

    with opened(storage, name) as (store, name):
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


def _against_own(explanation: Explanation) -> str:
    """Return the sentence on the speed-up; a speed-up that its own factors contradict is not claimed."""
    from optuna_dsat.study.confirm.speeds import speed_of
    from optuna_dsat.words import times_in_words

    ratio = explanation.speed_up
    if explanation.user_value is None or ratio is None:
        return "Your config was not measured, so there is nothing to compare with."
    if explanation.is_own:
        return "It is your config: nothing is significantly faster."
    metric, device = explanation.metric, explanation.device
    speed = speed_of(explanation.user_metrics, explanation.user_value, metric=metric, device=device).text
    if explanation.contradicted:
        return f"Your config reaches {speed}, a ratio of {times_in_words(ratio)}."
    return f"Your config reaches {speed}; the winner is {times_in_words(ratio)}x as fast."


def _print_factors(explanation: Explanation) -> None:
    from optuna_dsat.report.explain.why import factor_rows

    rows = [(row.setting, row.own, row.best, row.factor, row.between, row.by) for row in factor_rows(explanation)]
    if rows:
        print_table(("setting", "yours", "winner's", "factor", "95% interval", "by"), rows)


def dashboard(
    name: LatestName = None,
    storage: Storage = DEFAULT_STORAGE,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    optuna_dashboard: Annotated[
        bool, typer.Option("--optuna-dashboard", help="Serve optuna-dashboard as well (needs the extra: dashboard).")
    ] = False,
) -> None:
    """Show a study in the browser while it is searched: what runs now, and the report, kept up to date.

    Nothing can be changed there. With --optuna-dashboard that is served as well, with notes and plots.
    """
    from optuna_dsat.report.dashboard.live import LiveStudy
    from optuna_dsat.report.dashboard.live_app import beside, guarded, is_loopback, live_app, optuna_app, serve
    from optuna_dsat.report.dashboard.publish import publish, require_installed

    if optuna_dashboard:
        require_installed()
    with opened(storage, name) as (store, name):
        app = live_app(LiveStudy(store, name))
        study_id = publish(store, name) if optuna_dashboard else None
        if study_id is not None:
            app = beside(app, optuna_app(store))
        if not is_loopback(host):
            what = "read and delete studies: optuna-dashboard" if optuna_dashboard else "read this study: the page"
            notify(f"Whoever reaches {host} can {what} asks for no password.")

        def show_address(result: int) -> None:
            say(page_address(host, result))
            if study_id is not None:
                say(page_address(host, result, "dashboard", "studies", study_id))
                notify("The first page follows the study; start again to update its notes for optuna-dashboard.")
            notify("Press Ctrl-C to end.")

        try:
            serve(guarded(app, host=host), host=host, port=port, on_ready=show_address)
        except KeyboardInterrupt:
            notify("Ended.")
