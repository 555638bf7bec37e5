"""What a run measured, kept beside its files where the database cannot keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import write_json_atomic
from optuna_dsat.study.progress import FinalistMeasured, Observer, ProgressEvent, TrialFinished

__all__ = ["KEPT", "KeptResults"]

KEPT = "kept_results.json"
"""File in the study's folder with what a run had measured when its database failed."""


class KeptResults:
    """Passes progress events on and keeps what they say was measured.

    Args:
        observer: Called with each event.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._measured: list[dict[str, Any]] = []

    def __call__(self, event: ProgressEvent) -> None:
        """Keep the result of a launch, then pass the event on."""
        if isinstance(event, TrialFinished):
            self._measured.append(
                {
                    "trial": event.number,
                    "configuration": event.words,
                    "outcome": event.outcome.value,
                    "value": event.value,
                    "message": event.message,
                }
            )
        elif isinstance(event, FinalistMeasured):
            self._measured.append(
                {
                    "trial": event.number,
                    "round": event.round,
                    "configuration": event.words,
                    "value": event.value,
                    "message": event.message,
                }
            )
        self._observer(event)

    def write(self, folder: Path) -> Path | None:
        """Write what was measured to ``KEPT`` in a folder; return the file, None if there is nothing or it fails."""
        if not self._measured:
            return None
        path = folder / KEPT
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json_atomic(path, {"measured": self._measured})
        except OSError:
            return None
        return path
