"""Lock files that keep two tuners of a machine from taking the same GPU; each holds its owner's process number."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import Device
from optuna_dsat.launch.machine.nvml import GpuUse, Nvml, NvmlError
from optuna_dsat.launch.protocol import Conditions, Holder
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.files import read_regular, try_lock
from optuna_dsat.runtime.process_identity import process_space
from optuna_dsat.words import bytes_in_words

_TRY_S, _PAUSE_S = 0.012, 0.004
"""Time limit of an attempt, and pause within it: ``lock_owner`` of another tuner holds the lock for an instant."""
_FOLDERS = ("/dev/shm", "/tmp", "/var/tmp")
"""Folders for the locks, of which the first that can be written counts. They do not depend on the
user or on ``TMPDIR``; containers share the first if they share the IPC namespace (``docker run --ipc=host``)."""


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """Another process that holds a lock."""

    pid: int | None
    """Process number; None if the lock file does not name a living process that is visible here."""
    since: float
    """Unix time of the last write to the lock file."""


@dataclass(frozen=True)
class Lock:
    """A held lock."""

    path: Path
    descriptor: int


def lock_folder() -> Path:
    """Return the folder in which all tuners of this machine lock their GPUs."""
    shared = (folder for folder in _FOLDERS if os.access(folder, os.W_OK | os.X_OK))
    return Path(next(shared, tempfile.gettempdir()))


def lock_path(folder: Path, device_id: str) -> Path:
    """Return the lock file of a device."""
    return folder / f"optuna-dsat-gpu-{device_id.replace('/', '_')}.lock"


def lock(path: Path) -> Lock | None:
    """Return the lock at ``path``, held until released or until this process ends; None if another process holds it."""
    descriptor = _try_lock(path, make=True)
    if descriptor is None:
        return None
    with contextlib.suppress(OSError):  # a full disk: the owner is then not named
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {process_space()}\n".encode(), 0)
    return Lock(path, descriptor)


def unlock(locks: Collection[Lock]) -> None:
    """Release locks."""
    for held in locks:
        with contextlib.suppress(OSError):  # another user's file, left by a killed tuner, stays
            held.path.unlink()
        os.close(held.descriptor)


def lock_owner(path: Path) -> LockOwner | None:
    """Return the owner of the lock at ``path``; None if it is not held."""
    free = _try_lock(path, make=False)
    if free is not None:
        os.close(free)
        return None
    try:
        pid, _, space = read_regular(path).decode("ascii", errors="replace").strip().partition(" ")
        since = path.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError:
        pid, space, since = "", "", 0.0
    known = pid.isdigit() and space == process_space() and ProcessKey.of(int(pid)) is not None  # else it has ended
    return LockOwner(pid=int(pid) if known else None, since=since)


def _try_lock(path: Path, *, make: bool) -> int | None:
    if path.is_symlink():
        raise UsageError(f"{path} is a link, which no lock of a GPU is. Remove it.")
    until = time.monotonic() + _TRY_S
    while True:
        if make:
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # made or removed by another tuner
                path.touch(exist_ok=False)
                path.chmod(0o666)  # other users lock it, too, if it is left by a killed tuner
        descriptor = try_lock(path)
        if descriptor is not None or time.monotonic() > until or not (make or path.exists()):
            return descriptor
        time.sleep(_PAUSE_S)


UNNAMED = "a process that NVML does not name"

_FOREIGN_SHARE = 0.2
"""Share of a GPU's memory in use, without a launch of ours, above which it counts as held by others even if NVML lists
no compute process (as in containers). A desktop uses less."""

_MPS_SERVER = "nvidia-cuda-mps-server"
"""Server of NVIDIA's multi-process service: idle on every GPU; its clients are listed separately."""


def label(device: Device, *, kind: str) -> str:
    """Return the name of a slot for the user (``kind``: ``cuda`` or ``cpu``)."""
    return f"{'GPU' if kind == 'cuda' else 'CPU rank'} {device.index}"


def foreign_holders(device: Device, use: GpuUse, nvml: Nvml) -> list[Holder]:
    """Return the holders of a GPU that is not used by our launches; empty if it is free.

    If NVML lists no process, a large share of memory in use counts as an unnamed holder.
    """
    gpu = label(device, kind="cuda")
    holders = []
    for pid, used in (use.processes or {}).items():
        name, user = _name_and_user(pid, nvml)
        if name != _MPS_SERVER:
            about = ", ".join(filter(None, (name, f"user {user}" if user else "")))
            who = f"process {pid} ({about})" if about else f"process {pid}"
            holders.append(Holder(device=gpu, who=who, used_bytes=used or None))
    if not holders and use.used_bytes is not None and use.used_bytes > _FOREIGN_SHARE * device.memory_bytes:
        holders.append(Holder(device=gpu, who=UNNAMED, used_bytes=use.used_bytes))
    return holders


def another_tuner(device: Device, owner: LockOwner, use: GpuUse | None) -> Holder:
    """Return the tuner that has locked a GPU."""
    who = "another optuna-dsat" if owner.pid is None else f"another optuna-dsat (process {owner.pid})"
    used = None if use is None else use.used_bytes
    return Holder(device=label(device, kind="cuda"), who=who, used_bytes=used, since=owner.since)


def holders_in_words(holders: Sequence[Holder]) -> str:
    """Describe all holders in a single phrase, grouped by device."""
    devices = dict.fromkeys(holder.device for holder in holders)
    return "; ".join(f"{name}: {users_in_words([h for h in holders if h.device == name])}" for name in devices)


def users_in_words(holders: Sequence[Holder]) -> str:
    """Describe the holders of a device and their memory in a single phrase."""
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


_TOLERANCE_BYTES = 64 * 2**20
"""Memory that may stay in use above the baseline: drivers keep a few MiB, a CUDA context uses 200 or more."""


class GpuMonitor:
    """Measures GPUs, and reports when a GPU stops responding or responds again."""

    def __init__(self, nvml: Nvml, *, on_notice: Callable[[str], None]) -> None:
        self._nvml = nvml
        self._on_notice = on_notice
        self._errors: dict[int, str] = {}
        """Index of each GPU that does not respond -> NVML's error."""
        self.indices_shifted = False
        """Whether a GPU was ever missing, after which CUDA may number the others differently."""

    def _use(self, device: Device) -> GpuUse | None:
        """Return a GPU's use; None if it does not respond."""
        name = label(device, kind="cuda")
        try:
            use = self._nvml.use(device.nvml_id)
        except NvmlError as error:
            if device.index not in self._errors:
                self._on_notice(f"{name} does not answer any more ({error}): launches leave it out.")
            self._errors[device.index] = str(error)
            self.indices_shifted = True
            return None
        if self._errors.pop(device.index, None) is not None:
            self._on_notice(f"{name} answers again.")
        return use

    def is_unavailable(self, device: Device) -> bool:
        """Return whether other processes compute on a GPU not used by our launches, or it does not respond."""
        use = self._use(device)
        return use is None or bool(foreign_holders(device, use, self._nvml))

    def holders(self, device: Device, owner: LockOwner | None) -> list[Holder]:
        """Return the holders of a GPU not used by our launches."""
        use = self._use(device)
        if owner is not None:
            return [another_tuner(device, owner, use)]
        if use is None:
            name = label(device, kind="cuda")
            return [Holder(device=name, who=f"it does not answer ({self._errors[device.index]})")]
        return foreign_holders(device, use, self._nvml)

    def baseline_bytes(self, device: Device) -> int:
        """Return the memory in use that is not attributed to a living process; 0 if unknown."""
        return _unattributed_bytes(self._use(device), ())

    def is_free_of(self, device: Device, pids: Collection[int], *, baseline_bytes: int) -> bool:
        """Return whether a GPU lists none of the PIDs in ``pids`` and its memory is back to the baseline.

        A GPU that does not respond counts as free; it is not taken until it responds.
        """
        use = self._use(device)
        if use is None:
            return True
        if set(pids) & (use.processes or {}).keys():
            return False
        return _unattributed_bytes(use, pids) - baseline_bytes <= _TOLERANCE_BYTES

    def sight(self, device: Device, pids: Collection[int]) -> Conditions:
        """Return the activity of others on a launch's GPU; not their processes if NVML lists none of the launch."""
        use, gpu = self._use(device), label(device, kind="cuda")
        if use is None:
            return Conditions()
        processes = use.processes or {}
        others = {pid: used for pid, used in processes.items() if pid not in pids} if set(pids) & set(processes) else {}
        holders = foreign_holders(device, GpuUse(used_bytes=None, processes=others), self._nvml)
        try:
            reasons = self._nvml.throttle_reasons(device.nvml_id)
        except NvmlError:
            reasons = ()
        return Conditions(
            gpu_processes=tuple(f"{holder.who} on {gpu}" for holder in holders),
            throttle_reasons=tuple(f"{reason} on {gpu}" for reason in reasons),
        )

    def energy_j(self, device: Device) -> float | None:
        """Return the energy that a GPU has used since the driver was loaded, in joules; None if unknown."""
        try:
            return self._nvml.energy_j(device.nvml_id)
        except NvmlError:
            return None

    def use_in_words(self, device: Device, *, baseline_bytes: int) -> str:
        """Describe memory and processes of a GPU."""
        use, name = self._use(device), label(device, kind="cuda")
        if use is None:
            return f"{name} does not answer"
        used = "memory in use not known" if use.used_bytes is None else f"{use.used_bytes / 2**30:.1f} GiB in use"
        return (
            f"{name}: {used}, {baseline_bytes / 2**30:.1f} GiB before the launch, "
            f"processes {sorted(use.processes or ()) or 'not listed'}"
        )


def _unattributed_bytes(use: GpuUse | None, pids: Collection[int]) -> int:
    """Return the memory in use that is not attributed to living processes of others; 0 if unknown."""
    if use is None or use.used_bytes is None:
        return 0
    others = sum(
        used for pid, used in (use.processes or {}).items() if pid not in pids and ProcessKey.of(pid) is not None
    )
    return max(0, use.used_bytes - others)
