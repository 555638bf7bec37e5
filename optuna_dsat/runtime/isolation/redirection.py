"""Redirects writes of Python code to a layer over the user's folders, in ranks that cannot mount an overlay.

Functions of ``os``, ``open`` and a few libraries that open files in C code look up each path in a common ``Layer``.
Other C code, and programs that the script starts, are not redirected.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.imports import ImportWatch, patch, replace_function
from optuna_dsat.runtime.isolation.layer import Layer, Location, native

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_READERS = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr")
_CHANGERS = ("chmod", "lchmod", "chown", "lchown", "utime", "setxattr", "removexattr")
_CREATORS = ("mkdir", "mkfifo", "mknod")
_LAST_LINK_STAYS = frozenset({"lstat", "readlink", "lchmod", "lchown"})
_SQLITE_FILES = ("-journal", "-wal")
"""Suffixes of SQLite's files with changes that are not yet in the database."""

_open = io.open
_open_code = io.open_code


def redirect_writes(upper: Path, *, folders: Sequence[str], passed: Sequence[str]) -> None:
    """Redirect this process's writes below folders to a layer; reads return the redirected data."""
    redirection = _Redirection(Layer(upper, folders=folders, passed=passed))
    supported = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids)
    for name, replacement in redirection.functions().items():
        original = getattr(os, name, None)
        if original is None:
            continue
        for functions in supported:
            if original in functions:
                functions.add(replacement)
        replace_function(os, name, replacement)
    replace_function(io, "open", redirection.open)
    replace_function(io, "open_code", redirection.open_code)
    replace_function(io, "FileIO", redirection.file_io(io.FileIO))
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    ImportWatch(
        {name: getattr(redirection, name) for name in ("sqlite3", "subprocess", "torch", "safetensors", "tokenizers")}
        | {"numpy.lib._datasource": redirection.numpy}
    ).install()


class _Redirection:
    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return name -> replacement for functions of ``os``."""
        names = ("open", "listdir", "scandir", "chdir", "getcwd", "getcwdb", "rename", "rmdir", "link", "symlink")
        record = {name: getattr(self, name) for name in (*names, "unlink", "truncate")}
        record |= {"open": self.os_open, "replace": self.rename, "remove": self.unlink}
        record |= {name: self._function(name) for name in _READERS}
        record |= {name: self._function(name, self._layer.changed) for name in _CHANGERS}
        return record | {name: self._function(name, self._layer.new, follows=False) for name in _CREATORS}

    def _find(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Location | None:
        """Return the location of a path; None outside of all folders, where no change is needed."""
        name = self._layer.absolute(path, dir_fd)
        if name is None or self._layer.is_outside(name, follow=follow):
            return None
        with _named(path):
            return self._layer.locate(name, follow=follow)

    def _real(self, path: Any, flags: int = 0) -> Any:
        """Return the file to open for a path, ready for writing if the flags ask for that."""
        at = self._find(path)
        if at is None:
            return path
        if flags & _WRITES and self._layer.covers(at.path):
            with _named(path):
                return self._layer.opened(at, flags)
        return at.real

    # Functions of ``os``: reading or changing entries in place, then creating entries, then the others

    def _function(
        self, name: str, change: Callable[[Location], str] | None = None, *, follows: bool = True
    ) -> Callable[..., Any]:
        """Return the replacement of a function of ``os`` for an entry.

        Args:
            name: Name of the function.
            change: Returns the layer's entry to change or create; None if the function only reads.
            follows: Whether the function follows a symbolic link in the last part of the path.
        """
        original: Any = getattr(native, name, None)
        follows = follows and name not in _LAST_LINK_STAYS

        def call(path: Any = ".", *args: Any, dir_fd: int | None = None, **named: Any) -> Any:
            at = self._find(path, dir_fd, follow=follows and named.get("follow_symlinks", True))
            if at is None:
                return original(path, *args, **({} if dir_fd is None else {"dir_fd": dir_fd}), **named)
            with _named(path):
                changes = change is not None and self._layer.covers(at.path)
                result = original(change(at) if changes and change is not None else at.real, *args, **named)
            return os.fsencode(result) if isinstance(result, str) and isinstance(path, bytes) else result

        return call

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        follow = not (flags & os.O_NOFOLLOW or (flags & os.O_CREAT and flags & os.O_EXCL))
        at = self._find(path, dir_fd, follow=follow)
        if at is None:
            return int(native.open(path, flags, mode, dir_fd=dir_fd))
        with _named(path):
            real = at.real
            if self._layer.covers(at.path):
                if flags & os.O_TMPFILE == os.O_TMPFILE:
                    real = self._layer.changed(at) if at.is_dir else at.real
                elif flags & _WRITES and not at.is_dir:
                    real = self._layer.opened(at, flags)
            return int(native.open(real, flags, mode))

    def listdir(self, path: Any = ".") -> list[Any]:
        at = self._find("." if path is None else path)
        if at is None or not at.is_dir:
            with _named(path):
                return list(native.listdir(path if at is None else at.real))
        with _named(path):
            names = self._layer.names(at)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        path = "." if path is None else path
        at = self._find(path)
        if at is None:
            return native.scandir(path)
        names = self.listdir(path)
        return _Entries([_Entry(name, os.path.join(os.fspath(path), name)) for name in names])

    def chdir(self, path: Any) -> None:
        at = self._find(path)
        if at is None:
            native.chdir(path)
            return
        with _named(path):
            native.chdir(self._entered(at))

    def _entered(self, at: Location) -> str:
        """Return the folder to enter for a folder, in which C code with a relative path sees the folder's own files."""
        return at.path if at.is_dir and at.visible and _is_own_dir(at.path) else at.real

    def subprocess(self, module: ModuleType) -> None:
        """Start processes in folders that exist in the layer only; their writes stay there."""

        @patch(module.Popen, "__init__")
        def start(original: Any, process: Any, *args: Any, **options: Any) -> None:
            if options.get("cwd") is not None and (at := self._find(options["cwd"])) is not None:
                options["cwd"] = self._entered(at)
            original(process, *args, **options)

    def getcwd(self) -> str:
        return self._layer.working_directory()

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def _remove(self, name: str, path: Any, dir_fd: int | None) -> None:
        at = self._find(path, dir_fd, follow=False)
        if at is None:
            getattr(native, name)(path, dir_fd=dir_fd)
            return
        with _named(path):
            if self._layer.covers(at.path) and not at.real.endswith("/"):
                getattr(self._layer, name)(at)
            else:
                getattr(native, name)(at.real)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self._two("rename", src, dst, src_dir_fd, dst_dir_fd)
        self._layer.forget_outside()

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,  # noqa: ARG002 - Linux does not follow
    ) -> None:
        self._two("link", src, dst, src_dir_fd, dst_dir_fd)

    def _two(self, name: str, src: Any, dst: Any, src_dir_fd: int | None, dst_dir_fd: int | None) -> None:
        source, target = self._find(src, src_dir_fd, follow=False), self._find(dst, dst_dir_fd, follow=False)
        covered = [at is not None and self._layer.covers(at.path) for at in (source, target)]
        with _named(src, dst):
            if source is not None and target is not None and all(covered):
                getattr(self._layer, name)(source, target)
            elif source is not None and covered[0] and source.state is not None:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))  # as between file systems
            elif covered[1]:
                native.lstat(src if source is None else source.real)
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            else:
                getattr(native, name)(
                    src if source is None else source.real,
                    dst if target is None else target.real,
                    src_dir_fd=src_dir_fd if source is None else None,
                    dst_dir_fd=dst_dir_fd if target is None else None,
                )

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:  # noqa: ARG002 - as in os
        at = self._find(dst, dir_fd, follow=False)
        with _named(src, dst):
            if at is None:
                native.symlink(src, dst, dir_fd=dir_fd)
            else:
                native.symlink(src, self._layer.new(at) if self._layer.covers(at.path) else at.real)
        self._layer.forget_outside()

    def truncate(self, path: Any, length: int) -> None:
        real = self._real(path, os.O_WRONLY)
        with _named(path):
            native.truncate(real, length)

    # Others

    def open(self, file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        opener = args[5] if len(args) > 5 else named.get("opener")
        if isinstance(file, int) or opener is not None:
            return _open(file, mode, *args, **named)
        # The file keeps the name that the script gave it
        return _open(file, mode, *args[:5], **{**named, "opener": lambda _, flags: self.os_open(file, flags, 0o666)})

    def open_code(self, path: str) -> Any:
        return _open_code(self._real(path))

    def file_io(self, base: Any) -> Any:
        """Return a class that redirects files opened by ``io.FileIO``; files of ``open`` are its instances as well."""
        open_file = self.os_open

        class Kind(type):
            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, base)

        class FileIO(base, metaclass=Kind):  # type: ignore[misc]
            def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
                if opener is None and not isinstance(file, int):
                    opener = lambda _, flags: open_file(file, flags, 0o666)  # noqa: E731
                super().__init__(file, mode, closefd, opener)

        return FileIO

    def numpy(self, module: Any) -> None:
        """Redirect files of ``savetxt`` and ``loadtxt``."""
        module._file_openers._file_openers[None] = self.open

    def sqlite3(self, module: ModuleType) -> None:
        """Redirect databases of ``sqlite3``."""
        original: Callable[..., Any] = module.connect

        def connect(database: Any, *args: Any, **named: Any) -> Any:
            return original(self._database(database, uri=bool(named.get("uri"))), *args, **named)

        replace_function(module, "connect", connect)

    def _database(self, name: Any, *, uri: bool) -> Any:
        text = os.fsdecode(name)
        if uri and text.startswith("file:"):
            path, mark, query = text.removeprefix("file:").partition("?")
            path = path.removeprefix("//localhost").removeprefix("//") if path.startswith("//") else path
            if not path or path == ":memory:" or "mode=memory" in query:
                return name
            real = self._database(urllib.parse.unquote(path), uri=False)
            return f"file:{urllib.parse.quote(real)}{mark}{query}"
        if text in ("", ":memory:"):
            return name
        for beside in _SQLITE_FILES:
            self._real(text + beside, os.O_RDWR)
        at = self._find(text)
        if at is None:
            return name
        try:
            return self._real(text, os.O_RDWR | os.O_CREAT)
        except OSError:  # SQLite reports why
            return at.real

    def torch(self, module: Any) -> None:
        """Redirect files that PyTorch opens by their names."""
        for name, flags in (("PyTorchFileWriter", os.O_CREAT | os.O_TRUNC), ("PyTorchFileReader", 0)):
            if base := getattr(module._C, name, None):
                setattr(module._C, name, self._opening_class(base, flags))
        parts = ((module._C, "ScriptModule"), (module._C, "ScriptFunction"))  # torch.jit.save
        for owner, kind in (*parts, (getattr(module._C, "_autograd", None), "_ProfilerResult")):  # traces of a profiler
            if base := getattr(owner, kind, None):
                base.save = self._second_argument(base.save)
        if hasattr(module._C, "import_ir_module"):  # torch.jit.load
            module._C.import_ir_module = self._second_argument(module._C.import_ir_module, flags=0)
        if hasattr(module, "from_file"):
            replace_function(module, "from_file", self._opening(module.from_file))
        if storage := getattr(module, "UntypedStorage", None):
            storage.from_file = staticmethod(self._opening(storage.from_file))

    def _opening_class(self, base: Any, flags: int) -> Any:
        redirection = self

        class Opening(base):  # type: ignore[misc]
            def __init__(self, file: Any, *args: Any, **named: Any) -> None:
                if isinstance(file, (str, bytes, os.PathLike)):
                    file = os.fspath(redirection._real(file, flags))
                super().__init__(file, *args, **named)

        return Opening

    def _second_argument(
        self, original: Callable[..., Any], *, flags: int = os.O_CREAT | os.O_TRUNC
    ) -> Callable[..., Any]:
        def call(first: Any, path: Any, *args: Any, **named: Any) -> Any:
            return original(first, os.fspath(self._real(path, flags)), *args, **named)

        return call

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def from_file(filename: Any, shared: Any = None, *args: Any, **named: Any) -> Any:
            real = self._real(filename, os.O_RDWR | os.O_CREAT if shared else 0)
            return original(os.fspath(real), bool(shared), *args, **named)

        return from_file

    def safetensors(self, module: Any) -> None:
        """Redirect files of ``safetensors``."""
        read = module.safe_open

        def safe_open(filename: Any, *args: Any, **named: Any) -> Any:
            return read(self._real(filename), *args, **named)

        replace_function(module, "serialize_file", self._second_argument(module.serialize_file))
        replace_function(module, "safe_open", safe_open)

    def tokenizers(self, module: Any) -> None:
        """Redirect files of ``tokenizers``."""
        tokenizer, model = module.Tokenizer, module.models.Model
        read, write_model = tokenizer.from_file, model.save

        def save_model(first: Any, folder: Any, *args: Any, **named: Any) -> Any:
            at, real = self._find(folder), folder
            if at is not None and at.is_dir and self._layer.covers(at.path):
                real = self._layer.changed(at)
            paths = write_model(first, real, *args, **named)
            return [os.path.join(folder, os.path.basename(path)) for path in paths]

        tokenizer.save, model.save = self._second_argument(tokenizer.save), save_model
        tokenizer.from_file = staticmethod(lambda path: read(os.fspath(self._real(path))))


class _Entry(os.PathLike[Any]):
    def __init__(self, name: Any, path: Any) -> None:
        self.name = name
        self.path = path

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())


class _Entries:
    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())


def _is_own_dir(path: str) -> bool:
    try:
        return stat.S_ISDIR(native.lstat(path).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _named(path: Any, other: Any = None) -> Iterator[None]:
    """Make errors contain the script's path instead of the redirected path."""
    try:
        yield
    except OSError as error:
        error.filename = path
        if other is not None:
            error.filename2 = other
        raise
