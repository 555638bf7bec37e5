"""What a run measured, kept beside its files where the database cannot keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import write_json_atomic
from optuna_dsat.study.folder import set_others_aside
from optuna_dsat.study.progress import (
    FinalistMeasured,
    LaunchEnded,
    Observer,
    ProfileFinished,
    ProgressEvent,
    TrialFinished,
)

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
        self._ended: dict[str, LaunchEnded] = {}
        """Launches that are over and not known to be stored, by id."""

    def __call__(self, event: ProgressEvent) -> None:
        """Keep the result of a launch, then pass the event on."""
        if isinstance(event, LaunchEnded):
            self._ended[event.launch_id] = event
        elif isinstance(event, ProfileFinished):
            self._forget("profile", None)
        elif isinstance(event, TrialFinished):
            self._forget("trial", event.number)
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
            self._forget("confirm", event.number)
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

    def _forget(self, purpose: str, number: int | None) -> None:
        """Take out launches that are stored by now."""
        self._ended = {
            launch_id: event
            for launch_id, event in self._ended.items()
            if (event.purpose, event.number) != (purpose, number)
        }

    def write(self, folder: Path) -> Path | None:
        """Write what was measured to ``KEPT`` in a folder; return the file, None if there is nothing or it fails."""
        measured = [*self._measured, *map(_not_stored, self._ended.values())]
        if not measured:
            return None
        path = folder / KEPT
        try:
            folder.mkdir(parents=True, exist_ok=True)
            set_others_aside([path], {})
            write_json_atomic(path, {"measured": measured})
        except OSError:
            return None
        return path


def _not_stored(event: LaunchEnded) -> dict[str, Any]:
    """Return what is kept of a launch that ended when the database did not take it any more."""
    return {
        "trial": event.number,
        "launch": event.launch_id,
        "configuration": event.words,
        "outcome": event.outcome.value,
        "value": event.value,
        "message": event.message,
        "stored": False,
    }
