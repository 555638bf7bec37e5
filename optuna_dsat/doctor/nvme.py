"""Findings on a folder for NVMe offload: its drive and the measured speed."""

from __future__ import annotations

import os
from pathlib import Path

from optuna_dsat.doctor.finding import Finding, Status, finding_of
from optuna_dsat.launch.machine.nvme import SIZE_BYTES, file_system, measure

_SLOW_BYTES_PER_S = 10**9
"""Speed below which a drive is reported as slow: NVMe drives read 2 to 7 GB/s, SATA SSDs 0.5, hard disks 0.2."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs"})


def examine(folder: Path, *, size_bytes: int = SIZE_BYTES) -> Finding:
    """Return the finding on a folder for NVMe offload, including its measured speed."""
    data: dict[str, object] = {"path": str(folder)}
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} is not a folder that can be written to."
        remedy = "Give --nvme-path a folder on the drive that optimizer states and parameters shall be offloaded to."
        return finding_of("offload", "nvme drive", text, remedy, data=data)
    kind = file_system(folder)
    try:
        speed = measure(folder, size_bytes=size_bytes)
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
