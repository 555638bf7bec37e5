"""A training run to its end, in the foreground."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TextIO

from optuna_dsat.launch.devices import Devices, Nvml
from optuna_dsat.launch.prepare import prepare, write_run_directory
from optuna_dsat.launch.processes import kill_leftovers, new_mark
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.running import first_failure_code
from optuna_dsat.launch.slots import SlotPool

__all__ = ["run_full"]


def run_full(
    request: LaunchRequest,
    *,
    devices: Devices,
    output_dir: Path | str | None = None,
    nvml: Nvml | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Run a launch to its end in the foreground, on the user's terminal, and return its exit code.

    Ctrl-C reaches torchrun, which ends the ranks; a second one ends everything at once.

    Args:
        request: The launch; its purpose is ``full``.
        devices: The devices to use.
        output_dir: Where its run directory goes; None for a temporary one.
        nvml: NVML to ask about GPUs; None for the machine's.
        stdout: Where its output goes; None for our own.

    Returns:
        0, or the exit code of the rank that failed first (128 plus the number of a signal, as shells do).

    Raises:
        ValueError: If the purpose is another.
        SlotsBusyError: If fewer than ``request.slots`` slots are free.
        OutputError: If the run directory cannot be written.
    """
    if request.purpose != "full":
        raise ValueError(f"Only a launch of purpose 'full' runs in the foreground; got {request.purpose!r}.")
    if output_dir is None:
        with tempfile.TemporaryDirectory(prefix="optuna-dsat-") as temporary:
            return run_full(request, devices=devices, output_dir=temporary, nvml=nvml, stdout=stdout)
    pool, mark = SlotPool(devices, nvml=nvml), new_mark()
    lease = pool.take(request.slots)
    try:
        directory = write_run_directory(request, Path(output_dir))
        prepared = prepare(request, directory, lease, pool=pool, base_env=os.environ, mark=mark)
        agent = subprocess.Popen(prepared.argv, cwd=request.command.cwd, env=prepared.environ, stdout=stdout)
        interrupted = _wait_in_foreground(agent)
        code = first_failure_code(prepared.directory.agent_record)
    finally:
        kill_leftovers(mark)
        pool.give_back(lease)
    if interrupted:
        return 128 + signal.SIGINT
    code = agent.returncode if code is None else code
    return 128 - code if code < 0 else code


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
