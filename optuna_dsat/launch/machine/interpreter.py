"""Check that Python starts with the environment variables of launches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from optuna_dsat.runtime.files import shortened
from optuna_dsat.secrecy.shapes import hidden

__all__ = ["why_python_does_not_start"]

_START_S = 10.0
"""Time limit in seconds for Python to start, after which a problem is left for a launch to report."""
_FATAL = "Fatal Python error: "
_MOST_CHARS = 300


def why_python_does_not_start(variables: Mapping[str, str]) -> str | None:
    """Return why Python does not start with these variables, such as an invalid ``PYTHONHASHSEED``; None if it does.

    Args:
        variables: Variables added to the environment of this process.
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-c", ""],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # a launch will report it
    if ended.returncode == 0:
        return None
    messages = ended.stderr.decode("utf-8", errors="replace").splitlines()
    fatal = next((line for line in messages if line.startswith(_FATAL)), "".join(messages[-1:]))
    return shortened(hidden(fatal.removeprefix(_FATAL)), _MOST_CHARS) or f"it ends with code {ended.returncode}"
