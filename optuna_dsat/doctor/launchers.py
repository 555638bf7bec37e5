"""Determine the launcher of a search: the first usable of ``LAUNCHERS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from optuna_dsat.doctor.finding import Finding, Status
from optuna_dsat.doctor.libraries import Libraries
from optuna_dsat.launch.warm.server import can_fork

__all__ = ["LAUNCHERS", "finding"]


def _torchrun(libraries: Libraries) -> str | None:
    """Return the reason why torchrun cannot start launches, or None."""
    if "error" in libraries.torch:
        return "torch cannot be imported"
    return None if libraries.torch["torchrun"] else "this build of torch has no torch.distributed.run"


def _warm(libraries: Libraries) -> str | None:
    """Return the reason why launches cannot be forked, or None; the script's imports may still prevent it."""
    if why := _torchrun(libraries):
        return why
    return None if can_fork() else "it needs Linux 5.3 or newer"


LAUNCHERS: Mapping[str, tuple[str, Callable[[Libraries], str | None]]] = {
    "warm": (
        "each is forked from a process that has torch, DeepSpeed and what the script imports ready, or is a torchrun "
        "of its own where that turns out to be unsafe",
        _warm,
    ),
    "torchrun": ("every launch is a torchrun of its own on this machine", _torchrun),
}
"""Name -> (description, function that returns why it is unusable, or None if usable); in order of preference."""


def finding(libraries: Libraries) -> Finding:
    """Return the finding on the launcher that would be used."""
    why_not = {name: check(libraries) for name, (_, check) in LAUNCHERS.items()}
    usable = [name for name, why in why_not.items() if why is None]
    data = {"launcher": usable[0] if usable else None, "why_not": {k: v for k, v in why_not.items() if v is not None}}
    if not usable:
        reasons = "; ".join(f"{name}: {why}" for name, why in why_not.items())
        return Finding(
            area="launches",
            name="launcher",
            status=Status.FATAL,
            text=f"No launcher can work ({reasons}).",
            remedy="Install torch with distributed training into the environment of optuna-dsat.",
            data=data,
        )
    text = f"Launches go through {usable[0]}: {LAUNCHERS[usable[0]][0]}."
    return Finding(area="launches", name="launcher", status=Status.FINE, text=text, data=data)
