"""``--log``: log trials to experiment trackers, through the callbacks of Optuna's own integrations."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optuna_dsat.errors import UsageError
from optuna_dsat.escape.shell import install_command
from optuna_dsat.escape.terminal import one_line, say_prose
from optuna_dsat.secrecy.shapes import hidden

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

_MODULES = {
    "wandb": ("optuna_integration", "wandb"),
    "mlflow": ("optuna_integration", "mlflow"),
    "tensorboard": ("optuna_integration", "tensorboard", "tensorflow"),
}
"""Tracker, also an extra of ``optuna-integration`` -> modules that its callback imports."""
TRACKERS = tuple(_MODULES)


class Tracker:
    """Callback of a search that logs each trial to a tracker; a failure is a warning, and the search continues.

    ``value`` is W&B's project, MLflow's tracking URI or TensorBoard's folder; empty for the tracker's default.
    """

    def __init__(self, name: str, value: str = "") -> None:
        self._name = name
        self._value = value
        self._callbacks: dict[str, Callable[[optuna.Study, FrozenTrial], None]] = {}
        """Callback by study: a sweep over numbers of GPUs has several."""
        self._warned = ""

    def __str__(self) -> str:
        """Return the tracker as ``--log`` takes it, without a password."""
        return hidden(f"{self._name}={self._value}" if self._value else self._name)

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Log a finished trial."""
        try:
            with _environment_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # these callbacks will leave optuna-integration 6
                if study.study_name not in self._callbacks:
                    self._callbacks[study.study_name] = _MAKERS[self._name](self._value, study)
                self._callbacks[study.study_name](study, trial)
        except Exception as error:  # noqa: BLE001 - a tracker that fails must not end the search
            reason = one_line(hidden(str(error) or type(error).__name__))
            if reason != self._warned:
                say_prose(f"--log {self}: trial {trial.number} was not logged: {reason}.", file=sys.stderr)
            self._warned = reason


def split_trackers(texts: Sequence[str] | None) -> tuple[Tracker, ...] | None:
    """Parse trackers as ``["wandb", "tensorboard=runs"]``; ``UsageError`` if unknown or a package is missing."""
    trackers = []
    for text in texts or ():
        name, _, value = text.partition("=")
        if name not in _MODULES:
            raise UsageError(f"--log is {text!r}; the trackers are {', '.join(TRACKERS)}.")
        # optuna_integration, once imported, has no spec.
        absent = (module for module in _MODULES[name] if sys.modules.get(module) is None)
        missing = [module for module in absent if importlib.util.find_spec(module) is None]
        if missing:
            install = install_command(f"optuna-integration[{name}]<6")
            raise UsageError(f"--log {name} needs {' and '.join(missing)}: {install}.")
        trackers.append(Tracker(name, value))
    return tuple(trackers) or None


def _wandb(project: str, study: optuna.Study) -> Any:
    from optuna_integration import WeightsAndBiasesCallback

    # The callback puts "trial/NUMBER/" before the name of a run.
    settings = {"name": study.study_name, "group": study.study_name, "settings": {"console": "off", "silent": True}}
    settings |= {"project": project} if project else {}
    # A run for each trial: in a single run W&B drops trials that finish after one with a larger number.
    return WeightsAndBiasesCallback(metric_name=_metric(study), wandb_kwargs=settings, as_multirun=True)


def _mlflow(uri: str, study: optuna.Study) -> Any:
    from optuna_integration import MLflowCallback

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return MLflowCallback(tracking_uri=uri or None, metric_name=_metric(study))


def _tensorboard(folder: str, study: optuna.Study) -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from optuna_integration import TensorBoardCallback

    return TensorBoardCallback(os.path.join(folder or "runs", study.study_name), metric_name=_metric(study))  # noqa: PTH118


_MAKERS: Mapping[str, Callable[[str, optuna.Study], Any]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
}


def _metric(study: optuna.Study) -> str:
    from optuna_dsat.trials import attributes

    return str(study.user_attrs.get(attributes.METRIC, "value"))


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo changes of environment variables: ``run`` would train into the study's MLflow experiment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
