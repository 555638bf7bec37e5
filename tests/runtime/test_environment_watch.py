from __future__ import annotations

import subprocess
import sys

CHANGES = """
import os
from optuna_dsat.runtime.imports import EnvironmentWatch
os.environ["KEPT"] = "1"
watch = EnvironmentWatch()
watch.install()
os.environb[b"IN_BYTES"] = b"1"
os.environ["IN_TEXT"] = "1"
os.environb[b"KEPT"] = b"1"
del os.environb[b"KEPT"]
print(watch.changed())
"""


def test_changes_in_bytes_are_changes() -> None:
    """``os.environb`` has the class of ``os.environ`` and shares its variables."""
    done = subprocess.run([sys.executable, "-c", CHANGES], capture_output=True, text=True, check=False)
    assert done.stdout == "['IN_BYTES', 'IN_TEXT', 'KEPT']\n", done.stderr
