"""``optuna_dsat.tune``: the search as a function, with every option of the command as a keyword."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from optuna_dsat.errors import NothingRunnableError, ScriptFailedError
from optuna_dsat.escape.terminal import say
from optuna_dsat.study.confirm.words import value_in_words, verdict_in_words
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.stored import columns_of, flat_rows
from optuna_dsat.tuning.options.given import Given, write_config
from optuna_dsat.tuning.options.keywords import with_keywords
from optuna_dsat.tuning.options.tune_options import AutotuningOptions
from optuna_dsat.tuning.prepare import Prepared, prepare_each
from optuna_dsat.words import config_in_words, count_in_words, slot_name, things_in_words, times_in_words

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

    from optuna_dsat.tuning.run import StudyRun


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(StudyResult):
    """Result of a study. Metrics are in samples/s, FLOP/s per GPU, or seconds, depending on their name."""

    @classmethod
    def of(cls, study_result: StudyResult) -> TuneResult:
        """Convert the result of a study to this class, including the results by number of GPUs."""
        made = cls(**{field_.name: getattr(study_result, field_.name) for field_ in fields(study_result)})
        return replace(made, by_gpus={count: cls.of(result) for count, result in study_result.by_gpus.items()})

    def __repr__(self) -> str:
        """Return one line: study, configuration, metric, speed-up and the path of the config."""
        value = value_in_words(self.verdict, metric=self.metric, device=self.device)
        ratio = "" if self.speed_up is None else f", {times_in_words(self.speed_up)}x as fast as your config"
        if self.verdict.is_baseline:
            ratio = ", your config"
        return (
            f"TuneResult({self.study!r}: trial {self.trial}, {config_in_words(self.config)}, {value}{ratio}, "
            f"config_path={self.config_path!r})"
        )

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the outcome of the study and the path of its result."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self._rows()
        )
        title, *others = verdict_in_words(self.verdict, metric=self.metric, device=self.device)
        notes = "".join(f"<p>{html.escape(text)}</p>" for text in others)
        return f"<div><p><b>{html.escape(title)}</b></p><table>{rows}</table>{notes}</div>"

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows (name, text) of the notebook table."""
        yield "Study", self.study
        yield "Configuration", config_in_words(self.config)
        for count, result in self.by_gpus.items():
            slots = things_in_words(count, slot_name(result.device))
            yield f"On {slots}", value_in_words(result.verdict, metric=result.metric, device=result.device)
        yield from self._speeds()
        batch = things_in_words(self.train_batch_size, "sample")
        yield "Global batch", f"{batch} (yours: {count_in_words(self.user_train_batch_size)})"
        yield "Trials", str(sum(self.launches.values()))
        yield "Search", self.reason
        yield "Config", self.config_path
        yield "Train with", self.command
        if self.advice:
            yield "Script", self.advice

    def _speeds(self) -> Iterator[tuple[str, str]]:
        yield "Measured", value_in_words(self.verdict, metric=self.metric, device=self.device)
        if self.verdict.baseline is not None:
            yield "Your config", self.verdict.baseline.speed(metric=self.metric, device=self.device).text

    def to_dataframe(self, storage: str | None = None) -> pandas.DataFrame:
        """Return all trials as a pandas DataFrame: one row per trial, with the columns of ``trials``.

        Parameters and metrics have separate columns, ``param:NAME`` and ``metric:NAME``, as in ``optuna-dsat export
        --format csv``. The configs are left out.

        Args:
            storage: As in ``optuna_study``.

        Raises:
            ImportError: If pandas is not installed.
            StorageUrlError: As ``optuna_study``.
            StorageError: As ``optuna_study``.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe() needs pandas, which is not installed: pip install pandas") from None
        rows = flat_rows(self.trials(storage))
        return pandas.DataFrame(rows, columns=list(columns_of(rows)))

    def plot(self, kind: str = "metric", storage: str | None = None) -> go.Figure:
        """Return a plotly figure of the study, for display in a notebook.

        Args:
            kind: A figure of ``optuna_dsat.report.figures``, without ``plot_``: ``metric`` (over the micro-batch),
                ``progress``, ``memory``, ``finalists``.
            storage: As in ``optuna_study``.

        Raises:
            ValueError: If the figure does not exist.
            StorageUrlError: As ``optuna_study``.
            StorageError: As ``optuna_study``.
        """
        from optuna_dsat.report import figures

        known = [name.removeprefix("plot_") for name in figures.__all__ if name.startswith("plot_")]
        if kind not in known:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(known)}.")
        draw: Any = getattr(figures, f"plot_{kind}")
        figure: go.Figure = draw(self.optuna_study(storage))
        return figure


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C interrupted ``optuna_dsat.tune``. The study is stored: the same call continues it.

    Attributes:
        result: The unconfirmed result so far; None if nothing was measured.
        study: Name of the study.
    """

    def __init__(self, result: TuneResult | None, *, study: str) -> None:
        super().__init__(f"The search of study {study!r} was interrupted; call again to continue it.")
        self.result = result
        self.study = study


@with_keywords(AutotuningOptions)
def tune(given: Given) -> TuneResult:
    """Find the DeepSpeed configuration that trains a script fastest; the command ``optuna-dsat tune`` as a function.

    The script is not imported; it runs in separate processes, a few steps at a time. An existing study of the same name
    is continued. The environment and option files are not read. Arguments that are not given are taken from the
    config's ``autotuning`` section. None means an argument's default.

    Args:
        given: {options}

    Returns:
        The best configuration with its metrics, and the paths of all files.

    Raises:
        TypeError: If an argument is unknown or has the wrong type; nothing was launched or written.
        UsageError: If an argument is invalid; nothing was launched or written.
        NothingRunnableError: If no configuration could be measured on this hardware.
        ScriptFailedError: If the script fails with every configuration, or the training at the end fails.
        StorageError: If the database failed while the study ran; the same call continues it.
        SearchInterrupted: A ``KeyboardInterrupt`` with the result so far; the same call continues the study.
    """
    studies = prepare_each(None, given)
    options = studies[0].given.options

    from optuna_dsat.tuning.run import best_of, search_at_ranks, search_each, train_with_best

    def notice(text: str) -> None:
        if not options.quiet:
            say(text, file=sys.stderr)

    for study in studies:
        for note in study.notes:
            notice(note)
    write_config(options)
    if len(studies) == 1:
        ended = search_at_ranks(studies[0], _search, on_notice=notice)
        assert ended.result is not None
        best = ended.result
    else:
        ended, best = best_of(list(search_each(studies, _search, on_notice=notice)))
    result = TuneResult.of(best)
    if options.run_full_experiment and (code := train_with_best(ended, result)):
        raise ScriptFailedError(f"Training with {result.config_path} ended with exit code {code}.")
    return result


def _search(prepared: Prepared) -> StudyRun:
    """Run one study and return its outcome, which has a result."""
    from optuna_dsat.display.live import make_observer
    from optuna_dsat.display.stopping import Stopping
    from optuna_dsat.tuning.run import run_study

    study = prepared.request.spec.name
    with make_observer(quiet=prepared.given.options.quiet, stopping=Stopping()) as observer:
        ended = run_study(prepared.request, observer=observer)
    if ended.interrupted:
        raise SearchInterrupted(None if ended.result is None else TuneResult.of(ended.result), study=study)
    if ended.result is None:
        raise NothingRunnableError(f"The study {study!r} has measured nothing yet.")
    return ended
