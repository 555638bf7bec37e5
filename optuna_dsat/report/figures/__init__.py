"""Plots of a study as plotly figures, similar to ``optuna.visualization``.

Every ``plot_`` function takes a study that optuna-dsat made, as Optuna loads it or as a ``StudyView``:

    import optuna
    from optuna_dsat.report import figures

    study = optuna.load_study(study_name="train-asha", storage="sqlite:///optuna-dsat.db")
    figures.plot_metric(study).show()
    figures.plot_memory(study).write_image("memory.svg")  # needs plotly's kaleido

``plot_metric`` and ``plot_progress`` need the trials only, and take any Optuna study that uses
``optuna_dsat.samplers``. ``optuna.visualization`` plots the importance of the knobs and a time line. A figure
without data contains a sentence with the reason, which ``missing`` returns. Values are plain lists, so figures become
readable JSON for any version of plotly.js. No page colour is set, so figures suit light and dark pages.
"""

from optuna_dsat.report.figures._comparison import comparison_figure, course_figure
from optuna_dsat.report.figures._finalists import plot_finalists
from optuna_dsat.report.figures._memory import PREDICTED_AS_MEASURED, plot_memory
from optuna_dsat.report.figures._metric import BEST, CONFIRMED, EDGE, USER, metric_figure, plot_metric
from optuna_dsat.report.figures._search import plot_progress
from optuna_dsat.report.figures._source import History, history_of, measure_of
from optuna_dsat.report.figures._style import INK, Measure, missing, note_of

__all__ = [
    "BEST",
    "CONFIRMED",
    "EDGE",
    "INK",
    "PREDICTED_AS_MEASURED",
    "USER",
    "History",
    "Measure",
    "comparison_figure",
    "course_figure",
    "history_of",
    "measure_of",
    "metric_figure",
    "missing",
    "note_of",
    "plot_finalists",
    "plot_memory",
    "plot_metric",
    "plot_progress",
]
