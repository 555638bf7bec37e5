"""Measure the speed of a folder's drive, for NVMe offload."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from optuna_dsat.doctor.finding import Finding, Status, finding_of

_BLOCK_BYTES = 8 * 2**20
_THREADS = 4
"""Concurrent requests; an NVMe drive needs several to reach its speed."""
_SIZE_BYTES = 2**30
_SHARE = 0.1
"""Maximum fraction of the free space that is written."""
_SLOW_BYTES_PER_S = 10**9
"""Speed below which a drive is reported as slow: NVMe drives read 2 to 7 GB/s, SATA SSDs 0.5, hard disks 0.2."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs"})


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Sequential throughput of large blocks, with several requests in flight."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    size_bytes: int
    """Bytes written and read."""
    direct: bool
    """Whether the page cache was bypassed; otherwise reads may have come from memory."""


def _file_system(folder: Path) -> str:
    """Return the type of the file system that contains a folder; empty if unknown."""
    resolved = folder.resolve()
    best, result = -1, ""
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if resolved.is_relative_to(mount) and len(mount.parts) > best:
            best, result = len(mount.parts), partition.fstype
    return result


def measure(folder: Path, *, size_bytes: int = _SIZE_BYTES, threads: int = _THREADS) -> Speed:
    """Write a file into a folder and read it back; return the throughput.

    The file is unlinked before the first write, so it never outlives this process.

    Args:
        folder: Folder for offloaded states.
        size_bytes: Size of the file.
        threads: Concurrent requests.

    Raises:
        OSError: If the folder cannot be written to, or the disk is full.
    """
    blocks = max(threads, size_bytes // _BLOCK_BYTES)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".optuna-dsat-speed-")
    os.close(descriptor)
    try:
        file, direct = _open(name)
    finally:
        Path(name).unlink()
    try:
        write_s = _time(file, blocks, threads, write=True)
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s = _time(file, blocks, threads, write=False)
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


def _time(file: int, blocks: int, threads: int, *, write: bool) -> float:
    def work(first: int) -> None:
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer:  # page-aligned, as direct I/O requires
            if write:
                buffer.write(os.urandom(_BLOCK_BYTES))  # incompressible, since drives may compress
            for block in range(first, blocks, threads):
                done = 0
                while done < _BLOCK_BYTES:
                    with memoryview(buffer) as view, view[done:] as rest:
                        at = block * _BLOCK_BYTES + done
                        done += os.pwritev(file, [rest], at) if write else os.preadv(file, [rest], at)

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    if write:
        os.fsync(file)
    return max(1e-9, time.perf_counter() - begun)


def examine(folder: Path, *, size_bytes: int = _SIZE_BYTES) -> Finding:
    """Return the finding on a folder for NVMe offload, including its measured speed."""
    data: dict[str, object] = {"path": str(folder)}
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} is not a folder that can be written to."
        remedy = "Give --nvme a folder on the drive that optimizer states and parameters shall be offloaded to."
        return finding_of("offload", "nvme drive", text, remedy, data=data)
    kind = _file_system(folder)
    try:
        speed = measure(folder, size_bytes=int(min(size_bytes, _SHARE * shutil.disk_usage(folder).free)))
    except OSError as error:
        text = f"The speed of {folder} cannot be measured: {error.strerror}."
        remedy = "Make room there, or give another folder."
        return finding_of("offload", "nvme drive", text, remedy, data=data)
    data |= {"file_system": kind, **vars(speed)}
    text = (
        f"{folder} ({kind or 'file system not known'}) reads {speed.read_bytes_per_s / 1e9:.2f} GB/s and writes "
        f"{speed.write_bytes_per_s / 1e9:.2f} GB/s"
    )
    if not speed.direct:
        text += "; the page cache could not be bypassed, so the drive itself may be slower"
    remedy = ""
    if kind in _IN_MEMORY:
        remedy = "This folder lies in memory, not on a drive: offload to the CPU instead."
    elif kind in _REMOTE:
        remedy = "This folder lies on another machine: NVMe offload wants a drive of this one."
    elif speed.read_bytes_per_s < _SLOW_BYTES_PER_S:
        remedy = "Slower than an NVMe drive (2 to 7 GB/s): every step waits for it. Give a folder on a faster one."
    status = Status.PROBLEM if remedy else Status.FINE
    return finding_of("offload", "nvme drive", f"{text}.", remedy, data=data, status=status)
