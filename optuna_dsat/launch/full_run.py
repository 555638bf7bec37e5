"""A full training run in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from optuna_dsat.launch.agent_record import first_failure_code
from optuna_dsat.launch.devices import Devices, Nvml
from optuna_dsat.launch.processes import kill_leftovers, new_mark
from optuna_dsat.launch.protocol import LaunchRequest, SlotsBusyError
from optuna_dsat.launch.run_files import prepare_launch, write_run_directory
from optuna_dsat.launch.slots import SlotLease, SlotPool
from optuna_dsat.launch.waiting import DEFAULT_LIMIT_S, SlotWait

__all__ = ["run_full"]

_WAIT_S = 0.5
"""Pause between two attempts to take devices."""


def run_full(
    request: LaunchRequest,
    *,
    devices: Devices,
    output_dir: Path | str | None = None,
    nvml: Nvml | None = None,
    max_slots: int | None = None,
    stdout: TextIO | None = None,
    wait_for_gpus_s: float = DEFAULT_LIMIT_S,
    on_notice: Callable[[str], None] = lambda _: None,
) -> int:
    """Run a launch to its end in the foreground, on the user's terminal, and return its exit code.

    Ctrl-C reaches torchrun, which ends the ranks; a second one ends everything at once.

    Args:
        request: The launch; its purpose is ``full``.
        devices: The devices to use.
        output_dir: Folder of its run directory; None for a temporary one.
        nvml: NVML to ask about GPUs; None for the machine's.
        max_slots: Ranks that share the machine's cores; None for as many as there are devices.
        stdout: Stream for its output; None for that of this process.
        wait_for_gpus_s: Longest wait for devices that others hold, since the holders last changed; 0 for none.
        on_notice: Called with who holds them.

    Returns:
        0, or the exit code of the rank that failed first (128 plus the number of a signal, as shells do).

    Raises:
        ValueError: If the purpose is not ``full``.
        DeviceError: If others hold the devices for too long.
        OutputError: If the run directory cannot be written.
    """
    if request.purpose != "full":
        raise ValueError(f"Only a launch of purpose 'full' runs in the foreground; got {request.purpose!r}.")
    pool, mark = SlotPool(devices, max_slots=max_slots, nvml=nvml, on_notice=on_notice), new_mark()
    wait = SlotWait(pool.holders, slots=request.slots, limit_s=wait_for_gpus_s, on_notice=on_notice)
    lease = _take(pool, request.slots, wait)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.give_back, lease)
        if output_dir is None:
            output_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="optuna-dsat-"))
        stack.callback(kill_leftovers, mark)
        directory = write_run_directory(request, Path(output_dir))
        prepared = prepare_launch(request, directory, lease, pool=pool, base_env=os.environ, mark=mark)
        agent = subprocess.Popen(prepared.argv, cwd=request.command.cwd, env=prepared.environ, stdout=stdout)
        interrupted = _wait_in_foreground(agent)
        code = first_failure_code(directory.agent_record)
    if interrupted:
        return 128 + signal.SIGINT
    code = agent.returncode if code is None else code
    return 128 - code if code < 0 else code


def _take(pool: SlotPool, slots: int, wait: SlotWait) -> SlotLease:
    """Take slots; wait until they are free.

    Raises:
        DeviceError: If others hold them for too long.
    """
    while True:
        try:
            return pool.take(slots)
        except SlotsBusyError:
            wait.check()
            time.sleep(_WAIT_S)


def _wait_in_foreground(agent: subprocess.Popen[bytes]) -> bool:
    """Wait for a foreground process; return whether the user interrupted it."""
    try:
        agent.wait()
    except KeyboardInterrupt:
        try:
            agent.wait()
        except KeyboardInterrupt:
            agent.kill()
            agent.wait()
        return True
    return False
