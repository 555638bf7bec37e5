"""Mounts of a launch: a private mount namespace with overlays, created by direct system calls.

Imports only the standard library, since ``python mounts.py FOLDER`` is the probe of ``why_no_overlay``. Sources:
mount_namespaces(7), user_namespaces(7), Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import subprocess
import sys
import tempfile

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
"""``linux/sched.h``, ``linux/mount.h``, ``sys/mount.h``."""
_PROBE_S = 10.0


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    kind_bytes, data_bytes = kind and os.fsencode(kind), data and os.fsencode(data)
    _call("mount", os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), data_bytes)


def enter_namespace() -> bool:
    """Give this process a mount namespace; return whether this required a user namespace.

    In the user namespace, this user keeps its user and group IDs. All other users and groups appear as ``nobody``.

    Raises:
        OSError: If the system permits neither.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWNS)
        unprivileged = False
    except OSError:
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUSER)
        unprivileged = True
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    return unprivileged


def open_path(path: str) -> int:
    """Return a descriptor of the file currently at a path; later mounts on the path do not affect it."""
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _named(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def mount_overlay(target: str, *, lower: int, layers: int, name: str, unprivileged: bool) -> None:
    """Mount an overlay on ``target``, over the folder with the descriptor ``lower``.

    The folder with the descriptor ``layers`` receives ``NAME/upper`` and ``NAME/work``. ``unprivileged`` is whether
    this process is in a user namespace.

    Raises:
        OSError: If it cannot be mounted, e.g. if ``layers`` is on NFS or in an overlay.
    """
    upper, work = f"{_named(layers)}/{name}/upper", f"{_named(layers)}/{name}/work"
    for folder in (upper, work):
        os.makedirs(folder, exist_ok=True)
    status = os.fstat(lower)
    os.chmod(upper, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):  # another user's folder, in a user namespace
        os.chown(upper, status.st_uid, status.st_gid)
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))
    options = f"lowerdir={_named(lower)},upperdir={upper},workdir={work},"
    # Without redirect_dir a folder cannot be renamed (EXDEV); user namespaces do not have that option. A volatile
    # overlay is not synced to disk when it is unmounted, which is not needed: its files are removed anyway.
    options += "userxattr" if unprivileged else "redirect_dir=on"
    try:
        _mount("overlay", target, "overlay", 0, f"{options},volatile")
    except OSError:
        _mount("overlay", target, "overlay", 0, options)


def mount_tmpfs(target: str, *, like: str | None = None) -> None:
    """Mount an empty file system in memory, of the size of ``like`` or else of the kernel's default size."""
    options = None
    if like is not None:
        size = os.statvfs(like)
        options = f"size={size.f_blocks * size.f_frsize},mode=1777"
    _mount("tmpfs", target, "tmpfs", 0, options)


def bind(descriptor: int, target: str) -> None:
    """Mount a descriptor's file or folder, with all mounts below it, on a path."""
    _mount(_named(descriptor), target, None, _MS_BIND | _MS_REC)


def unmount(target: str) -> None:
    """Remove a mount, even if it is in use."""
    _call("umount2", os.fsencode(target), _MNT_DETACH)


def why_no_overlay(folder: str | os.PathLike[str]) -> str:
    """Return why launches with run directories in a folder get no overlays; empty if a process could mount one."""
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", __file__, os.fspath(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        "" if ended.returncode == 0 else (ended.stderr.strip().rpartition("\n")[2] or f"exit code {ended.returncode}")
    )


def _probe(parent: str) -> None:
    """Mount an overlay in a folder and change a file through it."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        lower = os.path.join(folder, "lower")
        os.mkdir(lower)
        with open(os.path.join(lower, "file"), "w", encoding="ascii") as file:
            file.write("below")
        if (child := os.fork()) == 0:
            number = 255
            try:
                unprivileged = enter_namespace()
                lower_path, layers = open_path(lower), open_path(folder)
                try:
                    mount_overlay(lower, lower=lower_path, layers=layers, name="0", unprivileged=unprivileged)
                except OSError:  # such as an overlay, or NFS: upper layers are then in memory
                    mount_tmpfs(folder)
                    layers = open_path(folder)
                    os.mkdir(lower)
                    mount_overlay(lower, lower=lower_path, layers=layers, name="0", unprivileged=unprivileged)
                with open(os.path.join(lower, "file"), "w", encoding="ascii") as file:
                    file.write("above")
                number = 0
            except OSError as error:
                number = error.errno or 255
            finally:
                os._exit(number)
        number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if number:
            raise OSError(number, os.strerror(number))
        for root, folders, _ in os.walk(folder):  # the kernel leaves a folder without permissions
            for name in folders:
                os.chmod(os.path.join(root, name), 0o700)
        with open(os.path.join(lower, "file"), encoding="ascii") as file:
            if file.read() != "below":
                raise OSError(0, "an overlay does not keep what is written from the files below it")


if __name__ == "__main__":
    try:
        _probe(sys.argv[1])
    except OSError as problem:
        sys.exit(problem.strerror)
