"""Checkpoints that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed

__all__ = ["Checkpoints", "newest_checkpoint"]

_PREFIX, _PARTIAL, _STATE = "batches-", ".partial", "state.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the most batches, None where there is none."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    complete = [path for path in found if (path / _STATE).is_file()]
    return max(complete, key=lambda path: int(path.name.removeprefix(_PREFIX)), default=None)


class Checkpoints:
    """The checkpoints of one training. A folder without the ending ``.partial`` is complete.

    Args:
        folder: Holds them; on a file system that all ranks share.
        rank: Global rank.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = folder
        self._rank = rank
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{_PREFIX}*{_PARTIAL}"):  # of a training that was killed
                shutil.rmtree(left)

    def save(self, batches: int, *, write: Callable[[Path], None], own: Any, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint; every rank calls this. One that is there already stays as it is.

        Args:
            batches: Whole batches that are over.
            write: Writes engines into a folder, on all ranks together.
            own: What this rank alone keeps.
            state: What is the same on all ranks.

        Returns:
            Its folder.
        """
        target = self.folder / f"{_PREFIX}{batches:08d}"
        if (target / _STATE).is_file():
            return target
        partial = target.with_name(target.name + _PARTIAL)
        if self._rank == 0:
            partial.mkdir()
        torch.distributed.barrier()
        write(partial)
        torch.save(own, partial / f"rank-{self._rank}.pt")
        torch.distributed.barrier()
        if self._rank == 0:
            with (partial / _STATE).open("w", encoding="utf-8") as file:
                json.dump({"batches": batches, **state}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(target)
        torch.distributed.barrier()
        return target

    def read_state(self, checkpoint: Path) -> dict[str, Any]:
        """Return what is the same on all ranks, ``batches`` included."""
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        return state

    def read_own(self, checkpoint: Path) -> Any:
        """Return what this rank alone kept."""
        return torch.load(checkpoint / f"rank-{self._rank}.pt", map_location="cpu", weights_only=False)
