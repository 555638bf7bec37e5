"""Support for scripts that use ``torch.multiprocessing.spawn``: each rank of a launch runs a single spawned rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from optuna_dsat.runtime.imports import ImportWatch
from optuna_dsat.runtime.rank import Rank

__all__ = ["callbacks"]

_REFUSAL = "the script starts {wanted} processes by torch.multiprocessing"


def callbacks(rank: Rank, *, on_spawn: Callable[[], None]) -> dict[str, Callable[[ModuleType], None]]:
    """Return module name -> function to call with the imported module.

    Args:
        rank: This rank.
        on_spawn: Called when the script spawns its ranks, before this rank's function runs.
    """
    return {"torch.multiprocessing": functools.partial(_multiprocessing_imported, rank, on_spawn)}


def _multiprocessing_imported(rank: Rank, on_spawn: Callable[[], None], multiprocessing: ModuleType) -> None:
    for name in ("spawn", "start_processes"):
        setattr(multiprocessing, name, _shared(getattr(multiprocessing, name), rank, on_spawn))


def _shared(original: Callable[..., Any], rank: Rank, on_spawn: Callable[[], None]) -> Callable[..., Any]:
    """Return a spawn function that runs only this rank's function, in this process, if ``nprocs`` is the rank count."""

    @functools.wraps(original)
    def start(fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, *rest: Any, **options: Any) -> Any:
        if nprocs == rank.local_world_size:
            on_spawn()
            fn(rank.local_rank, *args)
            return None
        guarded = functools.partial(_without_engine, fn, _refusal(nprocs, rank.local_world_size))
        try:
            return original(guarded, args, nprocs, *rest, **options)
        except Exception as error:
            refused = _REFUSAL.format(wanted=nprocs)
            if refused in str(error):
                raise ValueError(_refusal(nprocs, rank.local_world_size)) from None
            raise

    return start


def _refusal(wanted: int, ranks: int) -> str:
    """Return the error message for a wrong number of spawned processes, with the option to set it."""
    has = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"{_REFUSAL.format(wanted=wanted)}, and this launch has {has}: tune with --gpus-per-trial {wanted} "
        f"(--cpu-ranks {wanted} on the CPU)"
    )


def _without_engine(fn: Callable[..., Any], refusal: str, index: int, *args: Any) -> None:
    """Run a process spawned by the script; raise if it calls ``deepspeed.initialize``."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(refusal)

    def deepspeed_imported(deepspeed: ModuleType) -> None:
        deepspeed.initialize = refuse  # type: ignore[attr-defined]

    ImportWatch({"deepspeed": deepspeed_imported}).install()
    fn(index, *args)
