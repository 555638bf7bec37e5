"""What stands for pdsh, which DeepSpeed's autotuner calls after every launch, on one machine that has none."""

from __future__ import annotations

from pathlib import Path

_PDSH = """#!/bin/bash
# Stands for pdsh on one machine: runs the command here. Killing by name would reach the processes of others.
command=()
while [ $# -gt 0 ]; do
  case "$1" in -S) shift;; -f|-w|-R) shift 2;; *) command+=("$1"); shift;; esac
done
case "${command[*]}" in *pkill*) exit 0;; esac
exec bash -c "${command[*]}"
"""


def write_pdsh(folder: Path) -> None:
    """Write it to a folder, for the path."""
    path = folder / "pdsh"
    path.write_text(_PDSH, encoding="utf-8")
    path.chmod(0o755)
