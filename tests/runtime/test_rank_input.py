"""A rank's standard input: at its end, and pollable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, selectors, sys
from pathlib import Path
from optuna_dsat.runtime.process import redirect_output
{before}
redirect_output(Path(sys.argv[1]), 0)
keyboard = selectors.EpollSelector()
keyboard.register(sys.stdin, selectors.EVENT_READ)
print([key.fileobj.readline() for key, _ in keyboard.select(timeout=5)], flush=True)
"""


@pytest.mark.parametrize("before", ["", "sys.stdin.close()", "sys.stdin = None"])
def test_a_script_may_poll_its_input_which_is_at_its_end(tmp_path: Path, before: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(before=before), str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (tmp_path / "rank0.stderr.log").read_text()
    assert (tmp_path / "rank0.stdout.log").read_text() == "['']\n"
