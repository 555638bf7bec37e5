"""A full training run in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from optuna_dsat.launch.agent.command import prepare_launch, write_run_directory
from optuna_dsat.launch.follow import DEFAULT_LIMIT_S, SlotWait
from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.launch.machine.journal import LeftoverWatch, TunerNotes, remove_noted
from optuna_dsat.launch.machine.processes import kill_leftovers, new_mark
from optuna_dsat.launch.machine.slots import SlotLease, SlotPool
from optuna_dsat.launch.machine.tree import first_failure_code
from optuna_dsat.launch.protocol import LaunchRequest, SlotsBusyError
from optuna_dsat.signals import ENDING, KEYBOARD, handling, is_told_again

_WAIT_S = 0.5
"""Interval between attempts to take devices."""


def run_full(
    request: LaunchRequest,
    *,
    devices: Devices,
    output_dir: Path | str | None = None,
    max_slots: int | None = None,
    stdout: TextIO | None = None,
    wait_for_gpus_s: float = DEFAULT_LIMIT_S,
    on_notice: Callable[[str], None] = lambda _: None,
) -> int:
    """Run a launch of purpose ``full`` to its end in the foreground, on the user's terminal.

    Ctrl-C reaches torchrun, which ends the ranks; other ending signals (``ENDING``) are forwarded to it. A second
    signal kills everything at once (``is_told_again``). Without ``output_dir``, the run directory is temporary.
    ``max_slots`` ranks share the machine's cores; by default as many as devices.

    Returns:
        0, or the exit code of the rank that failed first (128 plus the number of a signal, as in shells).

    Raises:
        DeviceError: If others hold the devices for longer than ``wait_for_gpus_s``.
        OutputError: If the run directory cannot be written.
    """
    pool, mark = SlotPool(devices, max_slots=max_slots, on_notice=on_notice), new_mark()
    LeftoverWatch(os.environ, on_notice=on_notice).begin()
    wait = SlotWait(pool.holders, slots=request.slots, limit_s=wait_for_gpus_s, on_notice=on_notice)
    lease = _take(pool, request.slots, wait)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.give_back, lease)
        notes = TunerNotes(Path.cwd() if output_dir is None else Path(output_dir))
        stack.callback(notes.close)
        leavings = notes.begin()
        stack.callback(remove_noted, leavings)
        stack.callback(kill_leftovers, mark)
        # A temporary folder is inside the journal, which the next start removes if this process is killed.
        folder = leavings.with_suffix("") if output_dir is None else Path(output_dir)
        directory = write_run_directory(request, folder, leavings=leavings)
        prepared = prepare_launch(request, directory, lease, pool=pool, base_env=os.environ, mark=mark)
        agent = subprocess.Popen(
            prepared.argv(os.getpid()), cwd=request.command.cwd, env=prepared.environ, stdout=stdout
        )
        received = _wait_in_foreground(agent)
        code = first_failure_code(directory.agent_record)
    if received:
        return 128 + received[0]
    code = agent.returncode if code is None else code
    return 128 - code if code < 0 else code


def _take(pool: SlotPool, slots: int, wait: SlotWait) -> SlotLease:
    """Take slots; wait until they are free."""
    while True:
        try:
            return pool.take(slots)
        except SlotsBusyError:
            wait.check()
            time.sleep(_WAIT_S)


def _wait_in_foreground(agent: subprocess.Popen[bytes]) -> list[signal.Signals]:
    """Wait for a foreground process, forwarding ending signals to it; return the received signals.

    torchrun then ends its ranks. Signals from the keyboard have already reached it. Only the main thread can do this.
    """
    received: list[signal.Signals] = []

    def pass_on(number: int, _frame: object) -> None:
        if received and is_told_again(received[0], number):
            return
        received.append(signal.Signals(number))
        if len(received) > 1:
            agent.kill()
        elif number not in KEYBOARD or not _in_foreground():
            agent.terminate()

    with handling(ENDING, pass_on):
        agent.wait()
    return received


def _in_foreground() -> bool:
    """Return whether this process and its children receive signals from the keyboard."""
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
