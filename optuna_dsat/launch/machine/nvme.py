"""Folders on NVMe: where the ranks of a launch put their files, space and page-locked memory for them, and their speed.

DeepSpeed never removes the files of an offload. Each launch gets a new folder in the user's folder, which is in the
clean-up journal before it is made, so that it is removed however the launch ends. Files of the user are never touched.
"""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.run_directory import OutputError
from optuna_dsat.runtime.adapt.journal import note
from optuna_dsat.runtime.overlay import ZERO, merge
from optuna_dsat.words import bytes_in_words

_BLOCK_BYTES = 8 * 2**20
_THREADS = 4
"""Concurrent requests; an NVMe drive needs several to reach its speed."""
SIZE_BYTES = 2**30
"""Default size of the file by which a drive is measured."""
_SHARE = 0.1
"""Maximum fraction of the free space that is written."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Sequential throughput of large blocks, with several requests in flight."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    size_bytes: int
    """Bytes written and read."""
    direct: bool
    """Whether the page cache was bypassed; otherwise reads may have come from memory."""

    @property
    def bytes_per_s(self) -> float:
        """Mean speed of writing and reading the same bytes."""
        return 2 / (1 / self.write_bytes_per_s + 1 / self.read_bytes_per_s)


def measure(folder: Path, *, size_bytes: int = SIZE_BYTES) -> Speed:
    """Write a file into a folder and read it back; return the throughput.

    The file is unlinked before the first write, so it never outlives this process, and has at most a tenth of the free
    space. It bypasses the page cache, as the files of DeepSpeed's async_io do (``O_DIRECT``), where the file system
    allows it.

    Raises:
        OSError: If the folder cannot be written to, or the disk is full.
    """
    size_bytes = int(min(size_bytes, _SHARE * shutil.disk_usage(folder).free))
    blocks = max(_THREADS, size_bytes // _BLOCK_BYTES)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".optuna-dsat-speed-")
    os.close(descriptor)
    try:
        file, direct = _open(name)
    finally:
        Path(name).unlink()
    try:
        write_s = _time(file, blocks, write=True)
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s = _time(file, blocks, write=False)
    finally:
        os.close(file)
    total = blocks * _BLOCK_BYTES
    return Speed(write_bytes_per_s=total / write_s, read_bytes_per_s=total / read_s, size_bytes=total, direct=direct)


def _open(name: str) -> tuple[int, bool]:
    """Open a file, bypassing the page cache if possible; return the descriptor and whether the cache is bypassed."""
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError:
        return os.open(name, os.O_RDWR), False


def _time(file: int, blocks: int, *, write: bool) -> float:
    def work(first: int) -> None:
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer:  # page-aligned, as direct I/O requires
            if write:
                buffer.write(os.urandom(_BLOCK_BYTES))  # incompressible, since drives may compress
            for block in range(first, blocks, _THREADS):
                done = 0
                while done < _BLOCK_BYTES:
                    with memoryview(buffer) as view, view[done:] as rest:
                        at = block * _BLOCK_BYTES + done
                        done += os.pwritev(file, [rest], at) if write else os.preadv(file, [rest], at)

    begun = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(work, range(_THREADS)))
    if write:
        os.fsync(file)
    return max(1e-9, time.perf_counter() - begun)


_UNPRIVILEGED = "0 0 4294967295"
"""``/proc/self/uid_map`` of a process outside of user namespaces, in which capabilities do not count for mlock(2)."""
_CAP_IPC_LOCK = 14


def lockable_bytes() -> int | None:
    """Return the memory that each process may page-lock; None without a limit (mlock(2), ``RLIMIT_MEMLOCK``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or _may_lock_all():
        return None
    return limit


def _may_lock_all() -> bool:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        capabilities = int(status.partition("CapEff:")[2].split(maxsplit=1)[0], 16)
        is_whole = Path("/proc/self/uid_map").read_text(encoding="ascii").split() == _UNPRIVILEGED.split()
    except (OSError, ValueError, IndexError):
        return False
    return is_whole and bool(capabilities >> _CAP_IPC_LOCK & 1)


def check_room(folder: Path, *, swap_bytes: int, locked_bytes: int) -> None:
    """Check that a launch can offload to a folder, which need not exist yet.

    The ranks on this machine write ``swap_bytes`` there, and each page-locks ``locked_bytes``: DeepSpeed's buffers,
    without which it crashes.

    Raises:
        OutputError: If there is too little space, or the limit of page-locked memory is too low.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, lockable = shutil.disk_usage(there).free, lockable_bytes()
    if swap_bytes > free:
        raise OutputError(
            f"Offload to NVMe writes {bytes_in_words(swap_bytes)} to {folder}, which has {bytes_in_words(free)} free. "
            "Make room there, or give another folder (--nvme-path)."
        )
    if lockable is not None and locked_bytes > lockable:
        raise OutputError(
            f"Offload to NVMe page-locks {bytes_in_words(locked_bytes)} of memory in each rank, and {lockable} bytes "
            "are allowed (ulimit -l). Raise the limit to unlimited; for Docker: --ulimit memlock=-1."
        )


def in_own_folders(request: LaunchRequest, journal: Path) -> LaunchRequest:
    """Return a launch that offloads to new folders in the folders of its config, which are made here.

    Raises:
        OutputError: If a folder cannot be made, or has too little space.
    """
    made: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for section, path in swap_paths(request.ds_config):
        if path not in made:
            made[path] = str(_new_folder(Path(request.command.cwd, path), request, journal))
        changes[section] = {"nvme_path": made[path]}
    if not changes:
        return request
    zero = {ZERO: changes}
    return replace(request, ds_config=merge(request.ds_config, zero), overlay=_laid_over(request.overlay, changes))


def swap_paths(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield section and folder of each offload to NVMe."""
    zero = config.get(ZERO)
    for section in ("offload_optimizer", "offload_param"):
        offload = zero.get(section) if isinstance(zero, Mapping) else None
        if (
            isinstance(offload, Mapping)
            and offload.get("device") == "nvme"
            and isinstance(offload.get("nvme_path"), str)
        ):
            yield section, offload["nvme_path"]


def _new_folder(parent: Path, request: LaunchRequest, journal: Path) -> Path:
    check_room(parent, swap_bytes=request.swap_bytes, locked_bytes=request.locked_bytes)
    folder = parent / f".optuna-dsat-{request.launch_id}-{uuid.uuid4().hex[:12]}"
    for above in reversed([path for path in folder.parents if not path.exists()]):
        note(journal, {"folder_if_empty": str(above)})
    note(journal, str(folder))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(
            f"Offload to NVMe cannot write to {parent}: {error.strerror}. Give another folder (--nvme-path)."
        ) from error
    return folder


def _laid_over(overlay: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an overlay with further settings of the ZeRO section; its keys of None, which remove keys, are kept."""
    zero = overlay.get(ZERO)
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    for section, settings in changes.items():
        zero[section] = {**(zero.get(section) or {}), **settings}
    return {**overlay, ZERO: zero}
