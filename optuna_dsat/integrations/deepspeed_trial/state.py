"""Seeding and saving of this process's random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_states", "restore_random_states", "seed_everything"]


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
