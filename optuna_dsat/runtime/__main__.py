"""Entry point that torchrun starts on each rank: ``python -m optuna_dsat.runtime SCRIPT ARGS...``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from optuna_dsat.runtime.adapt.config import parse_command
from optuna_dsat.runtime.process import FailedExit, exit_as_python, exit_code, run_rank, take_secrets, with_secrets
from optuna_dsat.runtime.rank import LaunchPlan, Rank, set_rank_variables
from optuna_dsat.secrecy.references import resolved


def main(argv: list[str], *, safe_path: bool, forked: bool = False) -> int:
    """Run the script as this rank; return its exit code (2 if the command or the launch description is invalid)."""
    take_secrets(os.environ)
    set_rank_variables(os.environ)
    try:
        command = parse_command(resolved(argv))
        rank = Rank.from_environment()
        plan = with_secrets(LaunchPlan.load(rank.launch_path))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return run_rank(plan, rank, command, safe_path=safe_path, forked=forked)


def run(argv: list[str], *, safe_path: bool, forked: bool = False) -> NoReturn:
    """Run ``SCRIPT ARGS...`` or ``--module PKG.MOD ARGS...`` as this rank and end the process.

    With ``safe_path``, the script's folder is not on ``sys.path`` (``python -P``). A ``forked`` process has the heavy
    modules imported.

    Raises:
        FailedExit: If the script of a full training run failed; the interpreter then shuts down normally.
    """
    try:
        code = main(argv, safe_path=safe_path, forked=forked)
    except FailedExit:
        raise
    except SystemExit as end:
        code = exit_code(end)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    exit_as_python(code)


if __name__ == "__main__":
    is_safe = getattr(sys.flags, "safe_path", False)
    if not is_safe:
        del sys.path[0]  # the working directory, until the script runs
    run(sys.argv[1:], safe_path=is_safe)
