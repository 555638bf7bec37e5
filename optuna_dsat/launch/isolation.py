"""Protection of the user's files from launches: the probe, and descriptions of its result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.runtime.isolation import mounts

__all__ = ["describe_isolation", "weakest_isolation", "why_no_overlay"]

_PROBE_S = 10.0
_STRENGTH = ("off", "python", "mount")


def why_no_overlay(folder: Path) -> str:
    """Return why launches with run directories in a folder get no overlays; empty if they do.

    Tries it in a separate process, which takes about 30 ms.
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", mounts.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        "" if ended.returncode == 0 else (ended.stderr.strip().rpartition("\n")[2] or f"exit code {ended.returncode}")
    )


def weakest_isolation(launches: Iterable[Conditions]) -> Conditions:
    """Return the conditions of the launch with the weakest protection of the user's files."""
    known = [each for each in launches if each.isolation in _STRENGTH]
    return min(known, key=lambda each: (_STRENGTH.index(each.isolation), not each.isolation_note), default=Conditions())


def describe_isolation(conditions: Conditions) -> str:
    """Describe in a sentence how the user's files were protected; empty if unknown."""
    if not conditions.isolation:
        return ""
    if conditions.isolation == "off":
        return "Trials run on your files as they are (--isolation off): what the script writes, they write."
    if conditions.isolation == "mount" and not conditions.isolation_note:
        return "Trials write to overlays: your files stay as they are."
    writers = "what Python writes is redirected, and what other programs write is not"
    if conditions.isolation == "mount":
        return f"Trials write to overlays: your files stay as they are. Without an overlay, {writers}: " + (
            f"{conditions.isolation_note}."
        )
    why = f" ({conditions.isolation_note})" if conditions.isolation_note else ""
    return f"Trials run without overlays{why}: {writers}."
