"""Replaces rendezvous settings of scripts by torchrun's.

Scripts that set ``os.environ["MASTER_PORT"] = "29500"`` or pass ``init_method="tcp://..."`` are written for launchers
without a store. Under torchrun, whose store listens elsewhere, they would wait forever.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.rank import Rank

__all__ = ["callbacks"]

_PLACE = ("MASTER_ADDR", "MASTER_PORT")


def callbacks(rank: Rank) -> dict[str, Callable[[ModuleType], None]]:
    """Return module name -> function to call with the imported module. Call this before the script runs.

    Args:
        rank: This rank.
    """
    place = {name: os.environ[name] for name in _PLACE if name in os.environ}
    return {"torch.distributed": functools.partial(_distributed_imported, rank, place)}


def _distributed_imported(rank: Rank, place: dict[str, str], distributed: ModuleType) -> None:
    original = getattr(distributed, "init_process_group", None)  # absent where torch is built without it
    if original is None or not place:
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if given.get("store") is None:
            _check_world(given.get("world_size", -1), rank.world_size)
            method = given.get("init_method")
            if method is None or str(method).startswith(("env://", "tcp://")):
                os.environ.update(place)
                given.pop("init_method", None)
        return original(*bound.args, **bound.kwargs)

    distributed.init_process_group = init_process_group  # type: ignore[attr-defined]


def _check_world(given: int, ranks: int) -> None:
    """Check that the script's world size is the launch's number of ranks.

    Raises:
        ValueError: If the sizes differ; the message contains the option to set the launch's.
    """
    wanted = given if given > 0 else int(os.environ.get("WORLD_SIZE") or ranks)
    if wanted != ranks:
        has = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise ValueError(
            f"the script sets the number of its ranks (WORLD_SIZE) to {wanted} itself, and this launch has {has}: tune "
            f"with --gpus-per-trial {wanted} (--cpu-ranks {wanted} on the CPU)"
        )
