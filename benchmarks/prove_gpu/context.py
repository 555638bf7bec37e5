"""What checks are given: launches and commands within the time that is left."""

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

from benchmarks.launch_overhead import Script, request
from benchmarks.prove_gpu.proof import ROOT, PartOverError
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.runtime.events import Event, RankStarted

_STOP_S = 30.0
"""Longest time for a search to come to a clean stop."""
_END_S = 5.0
"""Longest time for a command to end at once."""
_TELL_S = 5.0
"""Kept for writing things down at the end of a part."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that is over."""

    shown: str
    """As a user would type it."""
    exit_code: int
    stdout: str
    stderr: str

    @property
    def why(self) -> str:
        """Exit code and the last message on stderr: where ``optuna-dsat`` says why it ended, that."""
        text = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        reasons = [line.removeprefix("optuna-dsat: ") for line in text if line.startswith("optuna-dsat: ")]
        return f"It exited with {self.exit_code}: {(reasons or text or ['no message'])[-1]}"

    def result(self) -> dict[str, Any]:
        """Return the JSON object on stdout.

        Raises:
            ValueError: If there is none.
        """
        start = self.stdout.find("{")
        if start < 0:
            raise ValueError(f"no result. {self.why}")
        result: dict[str, Any] = json.loads(self.stdout[start:])
        return result


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch that is over."""

    record: LaunchRecord
    report: LaunchReport
    forked: bool

    def times(self) -> dict[str, float]:
        """Return start-up, step time and throughput; empty if no step was measured."""
        counted = self.record.counted
        seconds = sum(step.latency_s for step in counted)
        if not seconds:
            return {}
        return {
            "startup_s": self.report.startup_s,
            "step_s": seconds / len(counted),
            "samples_per_s": sum(step.samples for step in counted) / seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a check is given."""

    state: Path
    """Folder that is kept between parts."""
    machine: Mapping[str, Any]
    """Facts of ``machine.look``."""
    devices: Devices
    deadline: float
    """When this part is over, by ``time.monotonic``."""
    notices: list[str] = field(default_factory=list)
    """Messages of launchers."""

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
        """Continue only if so much time is left.

        Raises:
            PartOverError: If it is not.
        """
        if self.left_s < seconds + _TELL_S:
            raise PartOverError

    @contextlib.contextmanager
    def launcher(self, folder: Path, *, warm: bool = True) -> Iterator[TorchrunLauncher]:
        """Yield a launcher whose run directories are in ``folder``; its messages are kept."""
        launcher = local_launcher(folder, devices=self.devices, warm=warm, on_notice=self.notices.append)
        with contextlib.closing(launcher):
            yield launcher

    def request(
        self, script: Script, overlay: Mapping[str, Any], *, launch_id: str, steps: int, timeout_s: float
    ) -> LaunchRequest:
        """Return a launch of a script's config under an overlay, on all devices."""
        slots, window = len(self.devices.devices), (min(3, steps), steps)
        return request(
            script, overlay, launch_id=launch_id, slots=slots, cwd=str(ROOT), steps=window, timeout_s=timeout_s
        )

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
        """Run one launch to its end.

        Raises:
            PartOverError: If the part is too short for it to end; then it is stopped.
        """
        forked: list[bool] = []

        def look(event: Event) -> None:
            if isinstance(event, RankStarted):
                forked.append(event.forked)

        limit_s = min(most_s, self.left_s - _TELL_S)
        asked = self.request(script, overlay, launch_id=launch_id, steps=steps, timeout_s=max(limit_s, 1.0))
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
            shown: As a user would type it.
            log: Name of its log.
            clean_stop: Whether it can be resumed, and is to be interrupted as by Ctrl-C; else it is ended at once.
            most_s: Seconds after which it hangs.

        Raises:
            PartOverError: If the part is too short for it to end.
            TimeoutError: If it hangs.
        """
        limit_s = self.left_s - _TELL_S - (_STOP_S if clean_stop else 0.0)
        folder = self.folder("logs")
        with (folder / f"{log}.out").open("w+") as out, (folder / f"{log}.err").open("w+") as err:
            environ = os.environ | {"COLUMNS": "200"}
            process = subprocess.Popen(words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ)
            try:
                process.wait(max(0.1, min(limit_s, most_s)))
            except subprocess.TimeoutExpired:
                if most_s < limit_s:
                    raise TimeoutError(f"{shown.split(' ')[0]} did not end within {most_s:.0f} s") from None
                raise PartOverError(cut_off=not clean_stop) from None
            finally:
                _end(process, clean=clean_stop)
        texts = ((folder / f"{log}{suffix}").read_text(encoding="utf-8") for suffix in (".out", ".err"))
        stdout, stderr = texts
        return Command(shown=shown, exit_code=process.returncode, stdout=stdout, stderr=stderr)


def _end(process: subprocess.Popen[bytes], *, clean: bool) -> None:
    """End a command if it still runs: tuners end their launches on SIGINT and SIGTERM."""
    first = (signal.SIGINT, _STOP_S) if clean else (signal.SIGTERM, _END_S)
    for number, patience_s in (first, (signal.SIGKILL, _END_S)):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def dsat(*arguments: str) -> tuple[list[str], str]:
    """Return the ``optuna-dsat`` of this interpreter with arguments, and the same as a user would type it."""
    words = [sys.executable, "-c", "from optuna_dsat.cli import main; main()", *arguments]
    return words, shlex.join(["optuna-dsat", *arguments])
