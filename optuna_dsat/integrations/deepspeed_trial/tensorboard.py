"""The TensorBoard writer of a model definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["SilentWriter", "make_writer"]


class SilentWriter:
    """Has all methods of a ``SummaryWriter`` and writes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _write_nothing


def _write_nothing(*_args: Any, **_options: Any) -> None:
    pass


def make_writer(folder: Path, *, silent: bool) -> Any:
    """Return a ``torch.utils.tensorboard.SummaryWriter``.

    Args:
        folder: Folder of its files, created by the writer.
        silent: Whether to return a writer that writes nothing, which needs no TensorBoard.

    Raises:
        ImportError: If TensorBoard is not installed.
    """
    if silent:
        return SilentWriter()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "context.get_tensorboard_writer() needs TensorBoard in the script's environment: pip install tensorboard."
        ) from error
    return SummaryWriter(str(folder))
