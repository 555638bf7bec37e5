"""Scripts that start their ranks by ``torch.multiprocessing.spawn``: each rank of a launch runs one of them itself."""

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
    """Return what is called with modules once the script has imported them.

    Args:
        rank: This rank.
        on_spawn: Called when the script starts the ranks, before one of them runs here.
    """
    return {"torch.multiprocessing": functools.partial(_multiprocessing_imported, rank, on_spawn)}


def _multiprocessing_imported(rank: Rank, on_spawn: Callable[[], None], multiprocessing: ModuleType) -> None:
    for name in ("spawn", "start_processes"):
        setattr(multiprocessing, name, _shared(getattr(multiprocessing, name), rank, on_spawn))


def _shared(original: Callable[..., Any], rank: Rank, on_spawn: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that runs this rank's process here where as many are asked for as the launch has ranks."""

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
    """Return why a process that the script starts cannot be measured, and the option with which it can."""
    has = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"{_REFUSAL.format(wanted=wanted)}, and this launch has {has}: tune with --gpus-per-trial {wanted} "
        f"(--cpu-ranks {wanted} on the CPU)"
    )


def _without_engine(fn: Callable[..., Any], refusal: str, index: int, *args: Any) -> None:
    """Run a process that the script started; one that trains with DeepSpeed is refused, others do as they like."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(refusal)

    def deepspeed_imported(deepspeed: ModuleType) -> None:
        deepspeed.initialize = refuse  # type: ignore[attr-defined]

    ImportWatch({"deepspeed": deepspeed_imported}).install()
    fn(index, *args)
