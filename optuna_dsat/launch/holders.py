"""The holders of GPUs: processes of others, as named by NVML and ``/proc``."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from optuna_dsat.launch.devices import Device
from optuna_dsat.launch.nvml import GpuUse, Nvml
from optuna_dsat.launch.protocol import Holder
from optuna_dsat.launch.slot_locks import LockOwner
from optuna_dsat.words import bytes_in_words

__all__ = ["UNNAMED", "another_tuner", "foreign_holders", "holders_in_words", "label", "users_in_words"]

UNNAMED = "a process that NVML does not name"

_FOREIGN_SHARE = 0.2
"""Share of a GPU's memory in use, without a launch of ours, above which it counts as held by others even if NVML lists
no compute process (as in containers). A desktop takes less."""

_MPS_SERVER = "nvidia-cuda-mps-server"
"""Server of NVIDIA's multi-process service: idle on every GPU; its clients are listed separately."""


def label(device: Device, *, kind: str) -> str:
    """Return the name of a slot for the user (``kind``: ``cuda`` or ``cpu``)."""
    return f"{'GPU' if kind == 'cuda' else 'CPU rank'} {device.index}"


def foreign_holders(device: Device, use: GpuUse, nvml: Nvml) -> list[Holder]:
    """Return who computes on a GPU that no launch of ours holds; empty if it is free.

    If NVML lists no process, a large share of memory in use counts as an unnamed one.
    """
    gpu = label(device, kind="cuda")
    found = []
    for pid, used in (use.processes or {}).items():
        name, user = _name_and_user(pid, nvml)
        if name != _MPS_SERVER:
            about = ", ".join(filter(None, (name, f"user {user}" if user else "")))
            who = f"process {pid} ({about})" if about else f"process {pid}"
            found.append(Holder(device=gpu, who=who, used_bytes=used or None))
    if not found and use.used_bytes is not None and use.used_bytes > _FOREIGN_SHARE * device.memory_bytes:
        found.append(Holder(device=gpu, who=UNNAMED, used_bytes=use.used_bytes))
    return found


def another_tuner(device: Device, owner: LockOwner, use: GpuUse | None) -> Holder:
    """Return the tuner that has locked a GPU."""
    who = "another optuna-dsat" if owner.pid is None else f"another optuna-dsat (process {owner.pid})"
    used = None if use is None else use.used_bytes
    return Holder(device=label(device, kind="cuda"), who=who, used_bytes=used, since=owner.since)


def holders_in_words(holders: Sequence[Holder]) -> str:
    """Return one phrase: each device with who holds it."""
    devices = dict.fromkeys(holder.device for holder in holders)
    return "; ".join(f"{name}: {users_in_words([h for h in holders if h.device == name])}" for name in devices)


def users_in_words(holders: Sequence[Holder]) -> str:
    """Return one phrase: who holds a device, and how much of its memory."""
    return " and ".join(
        holder.who if holder.used_bytes is None else f"{holder.who}, {bytes_in_words(holder.used_bytes)}"
        for holder in holders
    )


def _name_and_user(pid: int, nvml: Nvml) -> tuple[str, str]:
    try:
        process = psutil.Process(pid)
        return process.name(), process.username()
    except (psutil.Error, OSError):
        return nvml.process_name(pid), ""
