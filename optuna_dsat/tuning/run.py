"""Runs a prepared study on this machine: opens the store, starts the launcher, cleans up behind both.

The commands and ``optuna_dsat.tune`` share it, so both search alike and differ only in how they show what came out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TextIO

import optuna

from optuna_dsat.launch.devices import Devices
from optuna_dsat.launch.full_run import run_full
from optuna_dsat.launch.processes import kill_leftovers
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.torchrun import TorchrunLauncher
from optuna_dsat.store import Store, display_url, parse_url
from optuna_dsat.study.profile import script_command
from optuna_dsat.study.progress import Message, Observer
from optuna_dsat.study.result import TuneResult
from optuna_dsat.study.session import Session
from optuna_dsat.study.spec import StudySpec

__all__ = ["StudyRun", "fill_dashboard", "run_study", "train_with_best"]


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """How a run of a study ended."""

    spec: StudySpec
    """The study as it was run: what the profile launch taught of the script is in it."""
    devices: Devices
    result: TuneResult | None
    """None where nothing was measured, or another worker concludes the study."""
    interrupted: bool
    """Whether Ctrl-C ended it."""
    storage: str
    """The storage's URL without a password; empty where the run was interrupted before the study was opened."""


def run_study(
    spec: StudySpec,
    devices: Devices,
    *,
    storage: str,
    observer: Observer,
    reuse_profile: bool = True,
    conclude: bool = True,
    relocated: bool = False,
    check_loss: bool = False,
) -> StudyRun:
    """Search, or go on searching, and return how it ended.

    Args:
        spec: What to tune.
        devices: Where.
        storage: URL of the study's database; an SQLite file that is not there is made.
        observer: Hears the news.
        reuse_profile: Whether a stored profile spares the profile launch.
        conclude: Whether to confirm and export the winner; a worker that joins leaves that to the study's owner.
        relocated: Whether the spec is the stored one with paths of this machine.
        check_loss: Whether to compare first losses at the end.

    Raises:
        DsatError: As ``Session.run``. An interruption raises nothing: see ``StudyRun.interrupted``.
    """
    kill_leftovers()  # launches whose tuner was killed, if any of their processes outlived it
    launcher = TorchrunLauncher(
        spec.study_dir,
        devices=devices,
        max_slots=spec.max_slots,
        warm=spec.launcher == "warm",
        on_notice=lambda text: observer(Message(text=text)),
    )
    shown, result, interrupted = "", None, False
    try:
        with _quiet_optuna(), Store.open(storage) as store:
            shown = store.url
            session = Session(
                spec,
                store=store,
                launcher=launcher,
                device_names=tuple(device.name for device in devices.devices),
                observer=observer,
                reuse_profile=reuse_profile,
                relocated=relocated,
                check_loss=check_loss,
            )
            result = session.run(conclude=conclude)
            if conclude:
                fill_dashboard(store, spec.name, observer)
            spec, interrupted = session.spec, session.interrupted
    except KeyboardInterrupt:
        interrupted = True
    finally:
        launcher.close()
    if result is not None:
        result = replace(result, storage=display_url(parse_url(storage)))
    return StudyRun(spec=spec, devices=devices, result=result, interrupted=interrupted, storage=shown)


def train_with_best(run: StudyRun, result: TuneResult, *, stdout: TextIO | None = None) -> int:
    """Train with the configuration that a run found, in the foreground; return the exit code of the training.

    Args:
        run: The run.
        result: What it found.
        stdout: Where the training's output goes; None for this process's own.
    """
    config = dict(result.config)
    request = LaunchRequest(
        launch_id="full",
        purpose="full",
        command=script_command(run.spec),
        ds_config=config,
        overlay=config,
        slots=run.spec.slots_per_trial,
    )
    return run_full(
        request,
        devices=run.devices,
        output_dir=run.spec.study_dir,
        max_slots=run.spec.max_slots,
        stdout=stdout,
        wait_for_gpus_s=run.spec.wait_for_gpus_s,
        on_notice=lambda text: print(text, file=sys.stderr),
    )


def fill_dashboard(store: Store, name: str, observer: Observer) -> None:
    """Leave notes and plots for optuna-dashboard if it is installed; logs are copied when it is started."""
    from optuna_dsat.report.publish import is_installed, refresh

    if not is_installed():
        return
    try:
        refresh(store, name, artifacts=False)
    except Exception as error:  # noqa: BLE001 - a note is no reason to lose a result that is there
        observer(Message(text=f"optuna-dashboard's notes and plots could not be written: {error}"))


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Silence Optuna's lines within the block: they would repeat ours."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
