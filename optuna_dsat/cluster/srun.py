"""SLURM's commands: what is asked for, whether it can ever be granted, and why it waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from optuna_dsat.cluster.engine import ClusterError
from optuna_dsat.launch.command import needs_python_path, package_dir
from optuna_dsat.words import things_in_words

__all__ = [
    "agent_environment",
    "cause_in",
    "check_request",
    "job_in",
    "place_arguments",
    "reason_command",
    "srun_command",
]

_ANSWER_S = 4.0
"""Longest wait for an answer of SLURM's controller before a search is refused."""
_JOB = re.compile(r"\bjob (\d+)", re.IGNORECASE)
_NOISE = re.compile(r"queued and waiting|has been allocated|Job step aborted|Force Terminated|forcing job termination")
"""Lines of srun that name no cause."""
_END = re.compile(r"task[s ].*: (Exited|Killed|Terminated|Segmentation|Aborted)")
_PREFIX = re.compile(r"^(srun: |slurmstepd(-\S+)?: )?((allocation )?(error|failure): )?")
_INSIDE = "SLURM_JOB_ID"


def place_arguments(*, nodes: int, slots: int, arguments: Sequence[str]) -> list[str]:
    """Return the options of srun for a place, with the user's own last, so that they take precedence."""
    gpus = [f"--gpus-per-node={slots}"] if slots else []
    return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *gpus, *arguments]


def srun_command(*, nodes: int, slots: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that holds a place: one agent a node, tied to this process."""
    tied = [sys.executable, "-P", "-m", "optuna_dsat.cluster.tied", str(os.getpid())]
    agent = [sys.executable, "-P", "-m", "optuna_dsat.cluster.agent"]
    own = ["--kill-on-bad-exit=1", "--export=ALL"]
    if not any(word.startswith(("--job-name", "-J")) for word in arguments):
        own.append("--job-name=optuna-dsat")
    return [*tied, "srun", *own, *place_arguments(nodes=nodes, slots=slots, arguments=arguments), *agent]


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun, which its tasks inherit."""
    own = dict(environ)
    if needs_python_path():
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(package_dir().parent), own.get("PYTHONPATH"))))
    return own


def check_request(*, nodes: int, slots: int, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Ask SLURM whether it could ever grant a place.

    Raises:
        ClusterError: If it could not, or gives no answer.
    """
    if environ.get(_INSIDE):
        _check_allocation(nodes, environ)
        return
    asked = place_arguments(nodes=nodes, slots=slots, arguments=arguments)
    try:
        answer = subprocess.run(
            ["srun", "--test-only", *asked, "true"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError("srun was not found: --on slurm needs SLURM's commands on this machine.") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"SLURM's controller gave no answer in {_ANSWER_S:g} s (srun --test-only).") from None
    if answer.returncode:
        cause = cause_in(answer.stderr.splitlines()) or f"exit code {answer.returncode}"
        raise ClusterError(f"SLURM cannot grant {' '.join(asked)}: {cause}.")


def _check_allocation(nodes: int, environ: Mapping[str, str]) -> None:
    have = environ.get("SLURM_JOB_NUM_NODES", "")
    if have.isdigit() and int(have) < nodes:
        raise ClusterError(
            f"--nodes-per-trial is {nodes}, but the SLURM job {environ[_INSIDE]} that this runs in has "
            f"{things_in_words(int(have), 'node')}."
        )


def cause_in(lines: Sequence[str]) -> str:
    """Return the first line of srun that names a cause, without its prefix; empty if none does.

    That a task ended is the cause only where nothing says why.
    """
    told = [line.strip() for line in lines if line.strip() and not _NOISE.search(line)]
    errors = [line for line in told if "error:" in line or "failure:" in line] or told
    errors.sort(key=lambda line: _END.search(line) is not None)
    return _PREFIX.sub("", errors[0]).rstrip(".") if errors else ""


def job_in(lines: Sequence[str]) -> str | None:
    """Return the number of the job that srun's messages name; None if they name none."""
    return next((found[1] for line in lines if (found := _JOB.search(line))), None)


def reason_command(job: str) -> list[str]:
    """Return the command that prints why a job waits."""
    return ["squeue", "--noheader", f"--jobs={job}", "--format=%r"]
