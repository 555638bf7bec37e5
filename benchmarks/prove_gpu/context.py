"""What a check is given, and what checks have in common: commands and launches within the time that is left."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.prove_gpu.machine import Machine
from benchmarks.prove_gpu.proof import ROOT, OverrunError, PartOverError, replace
from optuna_dsat.config import ds_config, user_file
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest, ScriptCommand
from optuna_dsat.runtime.events import Event, RankStarted

__all__ = ["Command", "Context", "Script", "batch_overlay", "dsat"]

_STOP_S = 30.0
"""What a search may take to come to a clean stop."""
_END_S = 5.0
"""What a command may take to end at once."""
_TELL_S = 5.0
"""Kept for writing things down at the end of a part."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script with a DeepSpeed config file and arguments."""

    script: Path
    config: Path
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that is over."""

    shown: str
    """As one would type it."""
    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_line(self) -> str:
        """The last thing it said on stderr, for people: where ``optuna-dsat`` says why it ended, that."""
        text = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        reasons = [line.removeprefix("optuna-dsat: ") for line in text if line.startswith("optuna-dsat: ")]
        return (reasons or text or ["it said nothing"])[-1]

    def result(self) -> dict[str, Any]:
        """Return the JSON object on stdout.

        Raises:
            ValueError: If there is none.
        """
        start = self.stdout.find("{")
        if start < 0:
            raise ValueError(f"{self.shown} exited with {self.exit_code} and no result: {self.last_line}")
        result: dict[str, Any] = json.loads(self.stdout[start:])
        return result


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch that is over."""

    record: LaunchRecord
    report: LaunchReport
    forked: bool


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a check is given."""

    state: Path
    """Folder that is kept between parts."""
    machine: Machine
    devices: Devices
    deadline: float
    """When this part is over, by ``time.monotonic``."""
    notices: list[str] = field(default_factory=list)
    """What launchers said."""

    @property
    def left_s(self) -> float:
        """Seconds left in this part."""
        return self.deadline - time.monotonic()

    def folder(self, name: str) -> Path:
        """Return the folder of a check, which is kept between parts and removed where the check is to begin anew."""
        folder = self.state / "work" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def require(self, seconds: float) -> None:
        """Go on only where so much time is left.

        Raises:
            PartOverError: If it is not.
        """
        if self.left_s < seconds + _TELL_S:
            raise PartOverError

    @contextlib.contextmanager
    def launcher(self, folder: Path, *, warm: bool = True) -> Iterator[TorchrunLauncher]:
        """Give a launcher whose launches lie in ``folder``; what it says is noted."""
        launcher = local_launcher(folder, devices=self.devices, warm=warm, on_notice=self.notices.append)
        with contextlib.closing(launcher):
            yield launcher

    def launch(
        self,
        launcher: TorchrunLauncher,
        script: Script,
        overlay: Mapping[str, Any],
        *,
        launch_id: str,
        steps: int = 5,
        most_s: float = 150.0,
    ) -> Launched:
        """Run one launch to its end: the script under its config with the overlay laid over it.

        Raises:
            PartOverError: If the part is too short for it to end; then it is stopped.
        """
        forked: list[bool] = []

        def look(event: Event) -> None:
            if isinstance(event, RankStarted):
                forked.append(event.forked)

        limit_s = min(most_s, self.left_s - _TELL_S)
        asked = request(self, script, overlay, launch_id=launch_id, steps=steps, timeout_s=max(limit_s, 1.0))
        record, report = follow(launcher, asked, look)
        if report.outcome.value == "timeout" and limit_s < most_s:
            raise PartOverError
        return Launched(record=record, report=report, forked=bool(forked) and all(forked))

    def run(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        shown: str,
        log: str,
        clean_stop: bool = False,
        most_s: float = math.inf,
    ) -> Command:
        """Run a command within the time that is left; its output is kept under the folder of the state.

        Args:
            words: The command.
            cwd: Its working directory.
            shown: As one would type it.
            log: Name of its log.
            clean_stop: Whether it can be gone on with, and is to be interrupted as by Ctrl-C; else it is ended at once.
            most_s: Seconds after which it hangs.

        Raises:
            PartOverError: If the part is too short for it to end; an ``OverrunError`` where it has to begin anew.
            TimeoutError: If it hangs.
        """
        limit_s = self.left_s - _TELL_S - (_STOP_S if clean_stop else 0.0)
        started = time.monotonic()
        process = subprocess.Popen(
            words,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "200"},
        )
        stdout, stderr, cut_off = _output(process, limit_s=max(0.1, min(limit_s, most_s)), clean_stop=clean_stop)
        folder = self.folder("logs")
        replace(folder / f"{log}.out", stdout)
        replace(folder / f"{log}.err", stderr)
        if cut_off and most_s < limit_s:
            raise TimeoutError(f"{shown.split(' ')[0]} did not end within {most_s:.0f} s")
        if cut_off:
            raise PartOverError if clean_stop else OverrunError
        return Command(
            shown=shown,
            exit_code=process.returncode,
            stdout=stdout,
            stderr=stderr,
            seconds=time.monotonic() - started,
        )


def _output(process: subprocess.Popen[str], *, limit_s: float, clean_stop: bool) -> tuple[str, str, bool]:
    """Wait for a command; return what it said on stdout and stderr, and whether it was ended because time was up."""
    try:
        return (*process.communicate(timeout=limit_s), False)
    except subprocess.TimeoutExpired:
        return (*_stop(process, clean=clean_stop), True)
    finally:
        if process.poll() is None:
            _stop(process, clean=False)


def _stop(process: subprocess.Popen[str], *, clean: bool) -> tuple[str, str]:
    """End a command, and what it started: tuners end their launches on SIGINT and SIGTERM; return what it had said."""
    first = (signal.SIGINT, _STOP_S) if clean else (signal.SIGTERM, _END_S)
    for number, patience_s in (first, (signal.SIGKILL, _END_S)):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=patience_s)
    return "", ""


def dsat(*arguments: str) -> tuple[list[str], str]:
    """Return the ``optuna-dsat`` of this interpreter with arguments, and the same as one would type it."""
    words = [sys.executable, "-c", "from optuna_dsat.cli import main; main()", *arguments]
    return words, shlex.join(["optuna-dsat", *arguments])


def batch_overlay(micro_batch: int, **sections: Any) -> dict[str, Any]:
    """Return an overlay with this micro-batch, no accumulation, and whatever sections are given."""
    return {**ds_config.batch_overlay(micro_batch), **sections}


def request(
    context: Context, script: Script, overlay: Mapping[str, Any], *, launch_id: str, steps: int, timeout_s: float
) -> LaunchRequest:
    """Return a launch of a script's config under an overlay, on all devices."""
    own = ds_config.effective(user_file.load(script.config).raw)
    return LaunchRequest(
        launch_id=launch_id,
        purpose="trial",
        command=ScriptCommand(
            script=str(script.script), args=script.args, cwd=str(ROOT), config_path=str(script.config)
        ),
        ds_config=ds_config.merge(own, overlay),
        overlay=overlay,
        slots=len(context.devices.devices),
        start_profile_step=min(3, steps),
        end_profile_step=steps,
        timeout_s=timeout_s,
    )
