"""Errors that optuna-dsat raises for its users.

The tree, with the exit code of the command::

    DsatError                    base class: one clear line for the user, an exit code for the shell
    ├── UsageError               something the user gave cannot be used (exit 2)
    │   ├── ConfigError          a DeepSpeed config, or a knob in it
    │   ├── StudyConflictError   the study exists with another script, config or space
    │   └── StorageUrlError      the storage URL cannot be opened or is not supported
    ├── ClusterError             a cluster refuses what is asked of it (exit 2, ``cluster.engine``)
    ├── NothingRunnableError     no configuration runs on this hardware (exit 3)
    ├── OutputError              a run directory cannot be written, the disk is full (exit 5, ``launch.run_directory``)
    ├── DeviceError              the devices do not answer, or do not become free (exit 1, ``launch.nvml``)
    ├── ScriptFailedError        the user's script fails whatever the configuration (exit 4)
    ├── UnreadableStudyError     what is stored of a study is not what this version reads (exit 5)
    └── StorageError             the database failed while the study ran (exit 5)
        └── StudyDeletedError    the study was deleted while it was searched

Ctrl-C is no error: ``optuna_dsat.tune`` raises ``optuna_dsat.SearchInterrupted``, a ``KeyboardInterrupt`` (exit 130).
"""

from __future__ import annotations

import errno

__all__ = [
    "ConfigError",
    "DsatError",
    "NothingRunnableError",
    "ScriptFailedError",
    "StorageError",
    "StorageUrlError",
    "StudyConflictError",
    "StudyDeletedError",
    "UnreadableStudyError",
    "UsageError",
    "exit_code_of",
    "failed_file",
]

PATH_ERRORS = frozenset({errno.EACCES, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM})
"""Errors of the system that say what is wrong with a path that was given."""


class DsatError(Exception):
    """Base class of every error that optuna-dsat raises on purpose.

    ``str(error)`` is one line (or a short block) meant for the user; ``exit_code`` is what the command exits with.
    ``ranks`` is the number of ranks at which the search can run, if this number is all that is wrong.
    """

    ranks: int | None = None
    exit_code: int = 1


class UsageError(DsatError):
    """Invalid input of the user, refused before anything is launched or written."""

    exit_code = 2


class ConfigError(UsageError):
    """An invalid DeepSpeed config; the message names the file or key, the value and the rule.

    ``key`` is the dotted key whose value is invalid, if the message has yet to name the file.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class StudyConflictError(UsageError):
    """A study of this name exists for another script, config or search space."""


class StorageUrlError(UsageError):
    """The storage URL is invalid, unreachable or of an unsupported kind; the message never contains a password."""


class NothingRunnableError(DsatError):
    """No configuration of the space runs on this hardware; the message names the attempts."""

    exit_code = 3


class ScriptFailedError(DsatError):
    """The user's script fails for a reason that is independent of the configuration.

    Attributes:
        traceback_tail: Last lines of the script's traceback; empty if unknown.
        log_path: Path of the full log of the rank that failed first; empty if unknown.
    """

    exit_code = 4

    def __init__(self, message: str, *, traceback_tail: str = "", log_path: str = "") -> None:
        super().__init__(message)
        self.traceback_tail = traceback_tail
        self.log_path = log_path


class UnreadableStudyError(DsatError):
    """What is stored of a study is not what this version reads: mostly as a newer one wrote it.

    Attributes:
        name: The study.
        reason: What cannot be read, and the version that created the study if known.
    """

    exit_code = 5

    def __init__(self, name: str, reason: str) -> None:
        why = "A newer version may have written it, or it was altered."
        super().__init__(f"The study {name!r} cannot be read: {reason}. {why}")
        self.name, self.reason = name, reason


class StorageError(DsatError):
    """The database failed during the study and did not recover in time; the study can be resumed."""

    exit_code = 5


def failed_file(error: OSError) -> StorageError:
    """Return the error of a study for a system call that failed."""
    what = f"{error.filename}: " if error.filename is not None else ""
    intact = "What was stored before is intact; resume the study once this is repaired."
    return StorageError(f"{what}{error.strerror or error}. {intact}")


class StudyDeletedError(StorageError):
    """The study was deleted while it was searched."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with an error; 1 for errors without a code of their kind."""
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return UsageError.exit_code if error.errno in PATH_ERRORS else StorageError.exit_code
    return getattr(error, "exit_code", DsatError.exit_code)
