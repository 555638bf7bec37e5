"""Leaves all that a launch can leave before its first step, and goes on for ever: ``leaves.py CONFIG FOLDER``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import deepspeed

deepspeed.init_distributed("gloo")  # DeepSpeed's operator for the CPU maps its buffers
tempfile.mkdtemp(prefix="leaves-")
orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(sys.argv[2], f"rank{os.environ['RANK']}").write_text(f"{os.getpid()} {orphan.pid}")
time.sleep(600)
