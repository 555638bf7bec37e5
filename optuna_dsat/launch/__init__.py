"""Launchers: start the user's script for one trial, follow it, stop it, report its outcome.

Imports: outcome, errors, metrics, words, config, runtime, script. Called by: store, study, report, plan, doctor,
tuning, cli.
"""

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
