"""Atomic checkpoints, written to a temporary folder that is then renamed, and states of random number generators."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

STEPS_COMPLETED = "steps_completed"
"""Key of the completed global batches in records and checkpoints, as Determined names and counts them."""

_PREFIX, _PARTIAL, _STATE = "batches-", ".partial", "state.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the most batches, or None."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    complete = [path for path in paths if (path / _STATE).is_file()]
    return max(complete, key=lambda path: int(path.name.removeprefix(_PREFIX)), default=None)


class Checkpoints:
    """Checkpoints of a training run. A folder without the suffix ``.partial`` is complete."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = folder
        self._rank = rank
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{_PREFIX}*{_PARTIAL}"):  # incomplete checkpoints of a killed run
                shutil.rmtree(left)

    def save(
        self, batches: int, *, write: Callable[[Path], None], rank_state: Any, shared_state: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint; collective, every rank calls it.

        Returns:
            The checkpoint's folder.
        """
        target = self.folder / f"{_PREFIX}{batches:08d}"
        partial = target.with_name(target.name + _PARTIAL)
        if self._rank == 0:
            partial.mkdir()
        torch.distributed.barrier()
        write(partial)
        torch.save(rank_state, partial / f"rank-{self._rank}.pt")
        torch.distributed.barrier()
        if self._rank == 0:
            with (partial / _STATE).open("w", encoding="utf-8") as file:
                json.dump({STEPS_COMPLETED: batches, **shared_state}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(target)
        torch.distributed.barrier()
        return target

    def read_shared_state(self, checkpoint: Path) -> dict[str, Any]:
        """Return the state that is equal on all ranks, including ``STEPS_COMPLETED``."""
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        return state

    def read_rank_state(self, checkpoint: Path) -> Any:
        """Return the state of this rank only."""
        return torch.load(checkpoint / f"rank-{self._rank}.pt", map_location="cpu", weights_only=False)


def seed_everything(seed: int) -> None:
    """Seed ``random``, NumPy and torch (all devices); use the same seed on all ranks so that their models are equal."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of the generators of ``random``, NumPy, torch and the accelerator."""
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": _accelerator().get_rng_state(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore states returned by ``random_states``."""
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    _accelerator().set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
