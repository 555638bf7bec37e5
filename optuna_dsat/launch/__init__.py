"""Launchers: start the user's script for one trial, follow it, stop it, say what became of it."""

from optuna_dsat.launch.protocol import (
    Finished,
    Launcher,
    LaunchReport,
    LaunchRequest,
    LaunchUpdate,
    Observed,
    ScriptCommand,
)

__all__ = [
    "Finished",
    "LaunchReport",
    "LaunchRequest",
    "LaunchUpdate",
    "Launcher",
    "Observed",
    "ScriptCommand",
]
