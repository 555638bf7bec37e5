"""A user's folder with a script that changes files as training scripts do, and the folder's state afterwards."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "harmful.py"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}
State = dict[str, tuple[int, int, bytes | str]]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a user's file in shared memory."""
    path = Path("/dev/shm") / f"users-{uuid.uuid4().hex}"
    path.write_text("data")
    yield path
    path.unlink()


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Return a user's folder with a script and the files it works on."""
    folder = tmp_path / "users"
    for step in (100, 200, 900):
        (folder / "ckpt" / f"step{step}").mkdir(parents=True)
        (folder / "ckpt" / f"step{step}" / "w.pt").write_text(str(step))
    for name in ("out/final.pt", "folder/below/file", "model.pt", "data.bin", "users.txt", "log.txt", "mode.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "mode.txt").chmod(0o640)
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    shutil.copy(SCRIPT, folder / "train.py")
    return folder


def state(folder: Path, shared: Path) -> State:
    """Return mode, time and content of everything below a folder, and of a file in shared memory."""
    result: State = {}
    for path in [*folder.rglob("*"), shared]:
        status = path.lstat()
        result[str(path)] = (status.st_mode, status.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
    return result
