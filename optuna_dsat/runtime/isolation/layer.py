"""A writable layer over folders, like overlayfs, for machines that cannot mount overlays.

``files/a/b/f`` in the layer contains data written to ``/a/b/f``. There are three kinds of entries:

- A symbolic link whose name starts with ``MARK`` hides the entry, named by its target, in the folder below. If the
  layer also has a directory of that name, everything below the folder's directory is hidden.
- A symbolic link whose target starts with ``REFERENCE`` represents a file of a folder that was renamed or not yet
  copied. C code that opens the link reads that file.
- Every other entry was created by the script.

All state is on disk, so that ranks and their data loader workers see the same files. The operations that have to be
atomic for scripts (exclusive creation, renaming over a file, removal) are single operations of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

MARK = ".optuna-dsat-removed."
REFERENCE = "/.//"
"""Equivalent to ``/`` for the kernel; scripts do not create links in this form."""

_MOST_LINKS = 40
"""``MAXSYMLINKS`` of Linux."""
_MOST_KNOWN = 4096
_COPY_BYTES = 2**30
_DOTS = frozenset({"", ".", ".."})

native = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))})
"""Original functions of ``os``."""


class Location(NamedTuple):
    """Result of a path lookup."""

    path: str
    """Path without symbolic links (except the last part if it is not followed)."""
    real: str
    """Path of the actual file; for missing files, a path for which the system reports the right error."""
    state: os.stat_result | None
    """``lstat`` of ``real``; None if the entry does not exist."""
    visible: bool
    """Whether the folder's entry would be visible without an entry in the layer."""
    plain: bool
    """Whether the lookup passed no redirected folder."""

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.state is not None and stat.S_ISDIR(self.state.st_mode)


class Layer:
    """Writable layer of a launch, the folder ``upper``, over read-only folders.

    Writes below ``folders`` are redirected, writes below ``passed`` are not; the longest matching path of both decides.
    """

    def __init__(self, upper: Path, *, folders: Sequence[str], passed: Sequence[str]) -> None:
        self._upper = os.path.realpath(upper)
        self._files = f"{self._upper}/files"
        native.makedirs(self._files, exist_ok=True)
        roots = {os.path.realpath(folder): True for folder in folders}
        roots |= {os.path.realpath(folder): False for folder in passed} | {self._upper: False}
        self._rules = [(root.rstrip("/") + "/", roots[root]) for root in sorted(roots, key=len, reverse=True)]
        self._parents = {os.path.dirname(root) for root, redirected in roots.items() if redirected}
        around = [root for root, redirected in self._rules if not redirected and f"{self._upper}/".startswith(root)]
        self._hidden = tuple(min(around, key=len).rstrip("/").rpartition("/")[::2])
        self._outside: set[str] = set()

    # Paths

    def absolute(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute path of a function's path argument; None for descriptors and invalid paths."""
        if isinstance(path, int):
            return None
        try:
            name = os.fsdecode(path)
            if not name or "\0" in name:
                return None
            if name[0] == "/":
                return name
            return f"{self.working_directory() if dir_fd is None else self.of_descriptor(dir_fd)}/{name}"
        except (OSError, TypeError):
            return None

    def working_directory(self) -> str:
        """Return the working directory as seen by the script."""
        return str(native.getcwd()).removeprefix(self._files) or "/"

    def of_descriptor(self, descriptor: int) -> str:
        """Return the path of an open directory as seen by the script."""
        return str(native.readlink(f"/proc/self/fd/{descriptor}")).removeprefix(self._files) or "/"

    @functools.lru_cache(_MOST_KNOWN)  # noqa: B019 - a process has one layer, which asks for each part of each path
    def covers(self, path: str) -> bool:
        """Return whether writes to a path without symbolic links are redirected."""
        path += "/"
        return next((redirected for root, redirected in self._rules if path.startswith(root)), False)

    def is_outside(self, path: str, *, follow: bool) -> bool:
        """Return whether an absolute path is outside of all folders; results for directories are cached."""
        head, _, name = path.rpartition("/")
        if head not in self._outside:
            if head.startswith("/proc/"):
                return True
            if self.covers(path):
                return False
            where = self.locate(head or "/")
            if not (where.plain and where.is_dir) or self.covers(where.path) or where.path in self._parents:
                return False
            if len(self._outside) >= _MOST_KNOWN:
                self._outside.clear()
            self._outside.add(head)
        if name in _DOTS:
            return False
        state = _lstat(path) if follow else None
        return state is None or not stat.S_ISLNK(state.st_mode)

    def forget_outside(self) -> None:
        """Clear the cache of outside directories, since a directory may have become a link."""
        self._outside.clear()

    def locate(self, path: str, *, follow: bool = True) -> Location:
        """Look up an absolute path in the folders and the layer over them, as the kernel does for an overlay."""
        follow = follow or path.endswith("/")
        at = ""  # a prefix of the path that needs no lookup
        if "/.." not in path:
            root = next((root for root, _ in self._rules if f"{path}/".startswith(root)), "/")
            at = root[:-1].rpartition("/")[0]
        todo = _parts(path[len(at) :])
        real, state, visible, inside, plain, links = at or "/", None, True, True, True, 0
        if not todo:
            state = _lstat(real)
        while todo:
            name = todo.pop()
            if name == "..":
                todo += _parts(at.rpartition("/")[0])
                at, visible, inside = "", True, True
                if not todo:
                    real, state = "/", _lstat("/")
                continue
            step = f"{at}/{name}"
            seen, within = visible, inside
            if self.covers(step):
                plain = False
                real, state, seen, within = self._entry(step, visible=visible, inside=inside)
            elif step == "/proc":
                whole = "/".join([step, *reversed(todo)])
                return Location(whole, whole, _lstat(whole), True, plain)
            else:
                real, state, seen, within = step, _lstat(step), True, True
            if state is not None and stat.S_ISLNK(state.st_mode) and (todo or follow):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                target = native.readlink(real)
                todo += _parts(target)
                if target.startswith("/"):
                    at, visible, inside = "", True, True
                continue
            if todo and (state is None or not stat.S_ISDIR(state.st_mode)):
                rest = "/".join(reversed(todo))
                return Location(f"{step}/{rest}", f"{real}/{rest}", None, False, plain)
            at, visible, inside = step, seen, within
        if path.endswith("/") and state is not None and not stat.S_ISDIR(state.st_mode):
            real += "/"  # the system then reports that it is not a directory
        return Location(at or "/", real, state, visible, plain)

    def _entry(self, step: str, *, visible: bool, inside: bool) -> tuple[str, os.stat_result | None, bool, bool]:
        """Look up an entry of a redirected directory.

        Returns:
            Actual path, state, whether the folder's entry may be visible, whether the layer has the directory.
        """
        if inside:
            upper = self._files + step
            state = _lstat(upper)
            if visible and _lstat(self._mark(step)) is not None:
                visible = False
            if state is not None:
                if stat.S_ISLNK(state.st_mode):
                    target = native.readlink(upper)
                    if target.startswith(REFERENCE):
                        return target[len(REFERENCE) - 1 :], _lstat(target), visible, False
                return upper, state, visible, True
        if not visible:
            return self._files + step, None, False, False
        return step, _lstat(step), True, False

    def _mark(self, path: str) -> str:
        head, _, name = path.rpartition("/")  # which may be as long as a name can be
        return f"{self._files}{head}/{MARK}{hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()}"

    # Reading

    def names(self, at: Location) -> list[str]:
        """Return the names in a directory, without the launch's folder."""
        names: list[str] = native.listdir(at.real)
        upper = self._files + at.path
        if at.real == upper or (at.path in self._parents and _lstat(upper) is not None):
            written = names if at.real == upper else native.listdir(upper)
            gone = {native.readlink(f"{upper}/{name}") for name in written if name.startswith(MARK)}
            names = [name for name in written if not name.startswith(MARK)]
            if at.visible:
                gone.update(names)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    names += [name for name in native.listdir(at.path) if name not in gone]
        if at.path == self._hidden[0] and self._hidden[1] in names and not at.plain:
            names.remove(self._hidden[1])
        return names

    # Writing: each method takes a covered location

    def new(self, at: Location) -> str:
        """Return the path at which to create an entry that must not exist."""
        if at.state is not None:
            raise _error(errno.EEXIST, at.path)
        return self._place(at.path)

    def opened(self, at: Location, flags: int) -> str:
        """Return the file to open for writing; it is copied to the layer if its content is kept."""
        if at.state is None:
            return self._place(at.path) if flags & os.O_CREAT else at.real
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, at.path)
        return self._copied(at, content=not flags & os.O_TRUNC)

    def changed(self, at: Location) -> str:
        """Return the layer's entry for a change of content, mode or times."""
        if at.is_dir:
            self._make_directory(at.path)
            return self._files + at.path
        if at.state is not None and stat.S_ISLNK(at.state.st_mode):
            return self._moved_up(at)
        return self._copied(at, content=True)

    def unlink(self, at: Location) -> None:
        """Remove a file."""
        if at.state is None:
            raise _missing(at)
        if at.is_dir:
            raise _error(errno.EISDIR, at.path)
        self._check_parent(at.path)
        self._hide(at)
        if _lstat(self._files + at.path) is not None:
            native.unlink(self._files + at.path)

    def rmdir(self, at: Location) -> None:
        """Remove an empty directory."""
        if not at.is_dir:
            raise _missing(at) if at.state is None else _error(errno.ENOTDIR, at.path)
        if self.names(at):
            raise _error(errno.ENOTEMPTY, at.path)
        self._check_parent(at.path)
        self._hide(at)
        self._clear(at)

    def rename(self, source: Location, target: Location) -> None:
        """Rename within the layer."""
        if source.state is None:
            raise _missing(source)
        if source.path == target.path:
            return
        if source.is_dir and f"{target.path}/".startswith(f"{source.path}/"):
            raise _error(errno.EINVAL, target.path)
        if target.state is not None:
            if f"{source.path}/".startswith(f"{target.path}/"):
                raise _error(errno.ENOTEMPTY, target.path)
            if source.is_dir != target.is_dir:
                raise _error(errno.ENOTDIR if source.is_dir else errno.EISDIR, target.path)
            if target.is_dir and self.names(target):
                raise _error(errno.ENOTEMPTY, target.path)
        self._check_parent(source.path)
        place = self._place(target.path)
        moved = self._moved_up(source)
        if target.is_dir:
            self._hide(target)
            self._clear(target)
        self._hide(source)
        native.rename(moved, place)

    def link(self, source: Location, target: Location) -> None:
        """Create a hard link within the layer."""
        if source.state is None or source.is_dir:
            raise _missing(source) if source.state is None else _error(errno.EPERM, source.path)
        place = self.new(target)
        native.link(self.changed(source), place, follow_symlinks=False)

    def _place(self, path: str) -> str:
        """Return the path at which to create an entry, after creating its directory if needed."""
        head = path.rpartition("/")[0] or "/"
        parent = self.locate(head)
        if not parent.is_dir:
            raise _missing(parent) if parent.state is None else _error(errno.ENOTDIR, path)
        self._check_parent(path)
        self._make_directory(head)
        return self._files + path

    def _check_parent(self, path: str) -> None:
        real = self.locate(path.rpartition("/")[0] or "/").real
        if not native.access(real, os.W_OK | os.X_OK):
            raise _error(errno.EACCES, path)

    def _make_directory(self, path: str) -> None:
        upper = self._files + path.rstrip("/")
        if _lstat(upper) is not None:
            return
        state = native.stat(path)
        self._make_directory(path.rpartition("/")[0])
        with contextlib.suppress(FileExistsError):
            native.mkdir(upper)
            native.chmod(upper, stat.S_IMODE(state.st_mode) | stat.S_IRWXU)
            native.utime(upper, ns=(state.st_atime_ns, state.st_mtime_ns))

    def _hide(self, at: Location) -> None:
        if not at.visible or _lstat(at.path) is None:
            return
        self._make_directory(at.path.rpartition("/")[0])
        try:
            native.symlink(at.path.rpartition("/")[2], self._mark(at.path))
        except FileExistsError:  # another process was faster
            if _lstat(self._files + at.path) is None:
                raise _error(errno.ENOENT, at.path) from None

    def _clear(self, at: Location) -> None:
        upper = self._files + at.path
        if _lstat(upper) is not None:
            for name in native.listdir(upper):
                if name.startswith(MARK):
                    native.unlink(f"{upper}/{name}")
            native.rmdir(upper)

    def _moved_up(self, at: Location) -> str:
        """Return the layer's entry for a rename; files become references instead of copies."""
        upper = self._files + at.path
        if at.is_dir:
            self._make_directory(at.path)
            for name in self.names(at):
                inner = self.locate(f"{at.path}/{name}", follow=False)
                if self.covers(inner.path) and inner.state is not None:
                    self._moved_up(inner)
        elif _lstat(upper) is None:
            self._make_directory(at.path.rpartition("/")[0])
            is_link = at.state is not None and stat.S_ISLNK(at.state.st_mode)
            target = native.readlink(at.real) if is_link else REFERENCE + at.real.lstrip("/")
            with contextlib.suppress(FileExistsError):
                native.symlink(target, upper)
        return upper

    def _copied(self, at: Location, *, content: bool) -> str:
        upper = self._files + at.path
        if at.state is None or not stat.S_ISREG(at.state.st_mode) or at.real == upper:
            return at.real
        if not native.access(at.real, os.W_OK):
            raise _error(errno.EACCES, at.path)
        self._make_directory(at.path.rpartition("/")[0])
        with self._locked():
            state = _lstat(upper)
            if state is None or stat.S_ISLNK(state.st_mode):
                temporary = f"{self._upper}/copy-{os.getpid()}-{threading.get_ident()}"
                _copy(at.real, at.state, temporary, content=content)
                native.rename(temporary, upper)
        return upper

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = native.open(f"{self._upper}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            native.close(descriptor)


def _parts(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _lstat(path: str) -> os.stat_result | None:
    try:
        state: os.stat_result = native.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return state


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _missing(at: Location) -> OSError:
    """Return the error for an entry that does not exist, or whose path contains a file as a directory."""
    try:
        native.lstat(at.real)
    except NotADirectoryError:
        return _error(errno.ENOTDIR, at.path)
    except OSError:
        pass
    return _error(errno.ENOENT, at.path)


def _copy(source: str, state: os.stat_result, target: str, *, content: bool) -> None:
    """Copy a file with mode, owner, times and extended attributes; its source keeps the access time if possible."""
    writer = native.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if content:
            try:
                reader = native.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME)
            except PermissionError:  # a file of another user
                reader = native.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _copy_content(reader, writer)
            finally:
                native.close(reader)
        with contextlib.suppress(OSError):
            native.fchown(writer, state.st_uid, state.st_gid)
        native.fchmod(writer, stat.S_IMODE(state.st_mode))
        with contextlib.suppress(OSError):  # not on this file system, or not by this user
            for name in native.listxattr(source):
                native.setxattr(writer, name, native.getxattr(source, name))
        native.utime(writer, ns=(state.st_atime_ns, state.st_mtime_ns))
    finally:
        native.close(writer)


def _copy_content(reader: int, writer: int) -> None:
    try:
        while native.copy_file_range(reader, writer, _COPY_BYTES):  # shares the blocks if the file system can
            pass
    except OSError:  # not between these file systems
        while native.sendfile(writer, reader, None, _COPY_BYTES):
            pass
