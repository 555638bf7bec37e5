"""The result of ``optuna_dsat.tune``: that of the study, with what a notebook shows and draws."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.rows import columns_of, flat_rows
from optuna_dsat.study.verdict_words import headline, user_value_in_words, value_in_words, verdict_in_words
from optuna_dsat.words import config_in_words, count_in_words, slot_name, things_in_words, times_in_words

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

__all__ = ["TuneResult"]


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(StudyResult):
    """Result of a study. Metrics are in samples/s, FLOP/s per GPU, or seconds, by their name."""

    @classmethod
    def of(cls, found: StudyResult) -> TuneResult:
        """Return the result of a study as this class, those by number of GPUs as well."""
        made = cls(**{one.name: getattr(found, one.name) for one in fields(found)})
        return replace(made, by_gpus={count: cls.of(one) for count, one in found.by_gpus.items()})

    def __repr__(self) -> str:
        """Return one line: study, configuration, metric and speed-up, where the config lies."""
        value = value_in_words(self.verdict, metric=self.metric, device=self.device)
        ratio = "" if self.speed_up is None else f", {times_in_words(self.speed_up)} times your own config"
        if self.verdict.handed_over == self.verdict.baseline:
            ratio = ", your own config"
        return (
            f"TuneResult({self.study!r}: trial {self.trial}, {config_in_words(self.config)}, {value}{ratio}, "
            f"config_path={self.config_path!r})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what came of the study, and where its result lies."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self._rows()
        )
        remarks = verdict_in_words(self.verdict, metric=self.metric, device=self.device)[1:]
        notes = "".join(f"<p>{html.escape(text)}</p>" for text in remarks)
        title = html.escape(headline(self.verdict, metric=self.metric, device=self.device))
        return f"<div><p><b>{title}</b></p><table>{rows}</table>{notes}</div>"

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield names and texts of the table in a notebook."""
        yield "Study", self.study
        yield "Configuration", config_in_words(self.config)
        for count, one in self.by_gpus.items():
            slots = things_in_words(count, slot_name(one.device))
            yield f"On {slots}", value_in_words(one.verdict, metric=one.metric, device=one.device)
        yield from self._speeds()
        batch = things_in_words(self.train_batch_size, "sample")
        yield "Global batch", f"{batch} (yours: {count_in_words(self.user_train_batch_size)})"
        yield "Launches", str(sum(self.launches.values()))
        yield "Search", self.reason
        yield "Config", self.config_path
        yield "Train with", self.command
        if self.advice:
            yield "Script", self.advice

    def _speeds(self) -> Iterator[tuple[str, str]]:
        yield "Measured", value_in_words(self.verdict, metric=self.metric, device=self.device)
        if self.user_value is not None:
            yield "Your own config", user_value_in_words(self.verdict, metric=self.metric, device=self.device)

    def to_dataframe(self, storage: str | None = None) -> pandas.DataFrame:
        """Return all trials as a table of pandas: a row per trial, as ``trials`` has them.

        Parameters and metrics have columns of their own, ``param:NAME`` and ``metric:NAME``, as ``optuna-dsat export
        --format csv`` names them. The configs are left out.

        Args:
            storage: As of ``optuna_study``.

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
        """Return a figure of the study by plotly, which a notebook shows.

        Args:
            kind: A figure of ``optuna_dsat.report.figures``, without ``plot_``: ``metric`` (over the micro-batch),
                ``progress``, ``memory``, ``finalists``, ``timeline``.
            storage: As of ``optuna_study``.

        Raises:
            ValueError: If there is no such figure.
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
