"""World of a launch: a private view of the file system, with all changes stored in the launch's folder.

torchrun's agent enters the world before it starts ranks (``enter_world``), so that it includes ranks, their
subprocesses and C++ libraries. Each covered folder becomes an overlay in a mount namespace. If that is not possible,
the folder is ``redirected``: ranks redirect writes of Python code (``runtime/isolation/redirection.py``). ``passed``
folders are shared with the rest of the machine: the launch's folder, caches, and the paths in ``--writable``.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import glob
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from optuna_dsat.runtime.files import mount_points, write_text_atomic
from optuna_dsat.runtime.imports import replace_function
from optuna_dsat.runtime.isolation import mounts
from optuna_dsat.runtime.isolation.prepared import restore
from optuna_dsat.runtime.isolation.redirection import redirect_writes

_SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "lost+found", "nix", "proc", "run", "sbin", "snap"}
    | {"sys", "usr", "var"}
)
"""System folders of ``/``."""
_SYSTEM_BELOW = {
    "/usr": frozenset({"games", "include", "libexec", "local", "share", *_SYSTEM}),
    "/var": frozenset({"backups", "cache", "local", "lock", "log", "mail", "spool", *_SYSTEM}),
}
"""System folder -> the system's folders in it (hier(7)); others, such as ``/usr/src`` in images of Docker, are covered.
Folders below ``/usr/local`` and ``/var`` are covered if the command uses them."""
_SHARED_MEMORY = "/dev/shm"
_NO_FILES = frozenset(
    {"autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"}
    | {"fuse.lxcfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "ramfs", "securityfs", "sysfs"}
    | {"tracefs"}
)
"""Types of file systems without user files (filesystems(5))."""
_CACHE_VARIABLES = (
    "CUDA_CACHE_PATH",
    "CUDA_MPS_PIPE_DIRECTORY",
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "MPLCONFIGDIR",
    "NLTK_DATA",
    "NUMBA_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TRANSFORMERS_CACHE",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)
NEW_CACHES = "caches"
"""Folder next to run directories for caches that did not exist before the search."""
_CACHES_AT_HOME = (".cache", ".nv", ".triton", "nltk_data")
_PIPES = ("/tmp/nvidia-mps",)
"""Folders with named pipes of services (CUDA's MPS), which do not work through an overlay."""
_MOST_ENTRIES = 1000
"""Maximum number of entries per folder checked for groups that a user namespace cannot represent."""


@dataclass(frozen=True)
class WorldPlan:
    """Settings of a launch's world, chosen by the launcher; part of the launch description."""

    isolation: str = "off"
    """``auto``, ``python`` (no mounts) or ``off``."""
    folder: str = ""
    """Folder for the launch's changes, within its run directory; empty if the launch has no world."""
    passed: tuple[str, ...] = ()
    """Shared paths, as specified by the user and the launcher."""
    prepared: str = ""
    """Folder of files that the user's command prepared (``prepared``); empty for none."""
    shows_layers: bool = False
    """Whether its upper layers can be read in the world: see ``World.layers``."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> WorldPlan:
        """Build from the plan's JSON."""
        return cls(**{**record, "passed": tuple(record.get("passed", ()))})

    @property
    def record(self) -> Path:
        """File that describes the created world."""
        return Path(f"{self.folder}.json")

    @property
    def redirected_files(self) -> Path:
        """Folder of redirected files."""
        return Path(self.folder) / "files"

    def protects(self, path: str | os.PathLike[str]) -> bool:
        """Return whether the created world keeps changes below a path from the rest of the machine."""
        world = World.load(self.record) if self.isolation != "off" else World()
        real = os.path.realpath(path)
        return _is_below(real, (*world.mounted, *world.redirected)) and not _is_below(real, world.passed)


@dataclass(frozen=True)
class World:
    """The world created for a launch on this machine."""

    mode: str = "off"
    """``mount``, ``python`` or ``off``."""
    mounted: tuple[str, ...] = ()
    """Folders under an overlay."""
    redirected: tuple[str, ...] = ()
    """Folders in which ranks redirect writes of Python code."""
    passed: tuple[str, ...] = ()
    """Paths that are shared with the rest of the machine."""
    reason: str = ""
    """Reason why folders used by the command are redirected; empty if none are."""
    unprivileged: bool = False
    """Whether the mounts are in a user namespace."""

    @property
    def covers_shared_memory(self) -> bool:
        """Whether the launch has a private ``/dev/shm``."""
        return _SHARED_MEMORY in self.mounted

    def layers(self, root: Path, plan: WorldPlan) -> list[tuple[str, Path]]:
        """Return each mounted folder and its upper layer, as seen from ``root`` of a world that shows its layers."""
        numbers = {path: str(number) for number, path in enumerate(sorted((*self.mounted, *self.redirected)))}
        above = root / plan.folder.lstrip("/")
        uppers = {path: [above / kind / numbers[path] / "upper" for kind in ("memory", "layers")] for path in numbers}
        return [(path, next(filter(Path.is_dir, uppers[path]), uppers[path][-1])) for path in self.mounted]

    @classmethod
    def load(cls, path: Path) -> World:
        """Read the record of a world; if it cannot be read, return a world with mode ``off``."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
            return cls(**fields)
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()


def enter_world(plan: WorldPlan, *, cwd: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Enter the world of a launch, which ``plan.record`` then describes.

    Call it in a single-threaded process, before starting other processes.
    """
    if plan.isolation == "off" or not plan.folder:
        return
    Path(plan.folder).mkdir(parents=True, exist_ok=True)
    points = mount_points()
    named = [*plan.passed, *_caches(environ), *filter(os.path.isdir, _PIPES)]
    passed = {os.path.realpath(path) for path in named if path}
    covered = [path for path in covered_folders(cwd, arguments, environ, points) if not _is_below(path, passed)]
    real_paths = sorted({*passed, *map(os.path.realpath, _sockets(covered))})
    world = World(mode="python", redirected=tuple(covered), passed=tuple(real_paths))
    if plan.isolation == "auto":
        try:
            unprivileged = mounts.enter_namespace()
        except OSError as error:
            world = replace(world, reason=f"no mount namespace can be made ({error.strerror})")
        else:
            used = [cwd, *named_folders(cwd, arguments, environ)]
            world = _mount_world(world, plan, points, used=used, unprivileged=unprivileged)
            os.chdir(cwd)
    write_text_atomic(plan.record, json.dumps(asdict(world)))
    if plan.prepared:
        _restore_apart(world, plan)
        os.chdir(cwd)


def _restore_apart(world: World, plan: WorldPlan) -> None:
    """Restore prepared files in another process, whose writers are redirected where the ranks' are."""
    if (child := os.fork()) == 0:
        try:
            if world.redirected:
                redirect_writes(plan.redirected_files, folders=world.redirected, passed=world.passed)
            restore(plan.prepared)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def plan_apart(folder: str) -> WorldPlan:
    """Return the plan of a command whose changes are kept below a folder, which is shared."""
    return WorldPlan(isolation="auto", folder=f"{folder}/apart/world", passed=(folder,), shows_layers=True)


def run_apart(folder: str, *words: str) -> NoReturn:
    """Replace this process by a command in the world of ``plan_apart``."""
    enter_world(plan_apart(folder), cwd=os.getcwd(), arguments=words, environ=os.environ)
    os.execvp(words[0], words)


def covered_folders(
    cwd: str, arguments: Sequence[str], environ: Mapping[str, str], points: Mapping[str, str]
) -> list[str]:
    """Return the folders in which a launch may change files, without subfolders that their overlays cover.

    These are the non-system folders of ``/``, ``/usr`` and ``/var``, mounts below them, temporary folders, shared
    memory, and the folders in the command, as far as this user may write to them. An overlay covers subfolders on the
    same file system; in a user namespace not below a folder of another user, which it cannot copy.
    """
    folders = [f"/{name}" for name in os.listdir("/") if name not in _SYSTEM]
    for top, names_of_system in _SYSTEM_BELOW.items():
        folders += [path for path in glob.glob(f"{top}/*") if os.path.basename(path) not in names_of_system]
    folders = [folder for folder in folders if os.path.isdir(folder) and not os.path.islink(folder)]
    temporary = {tempfile.gettempdir(), environ.get("TMPDIR", ""), "/tmp", "/var/tmp", _SHARED_MEMORY}
    folders += [cwd, environ.get("HOME", ""), *temporary, *named_folders(cwd, arguments, environ)]
    wanted = {os.path.realpath(folder) for folder in folders if folder and os.path.isdir(folder)} - {"/"}
    wanted |= {point for point, kind in points.items() if kind not in _NO_FILES and _is_below(point, wanted)}
    names: list[str] = []
    for folder in sorted(wanted):
        above, top = _mount_of(folder, names), folder
        if above in names and _mount_of(folder, points) == _mount_of(above, points):
            top = _top_of_overlay(folder, above)
        if top not in names and os.path.isdir(top) and os.access(top, os.W_OK | os.X_OK):
            names.append(top)
    return sorted(names)


def _top_of_overlay(folder: str, above: str) -> str:
    """Return ``above`` if an overlay there can copy a folder, else the highest folder below it from which one can."""
    top = path = folder
    while path != above and os.geteuid() != 0:
        if os.lstat(path).st_uid != os.geteuid():  # its top is not copied
            return path if os.access(path, os.W_OK | os.X_OK) else top
        top, path = path, os.path.dirname(path)
    return above


def named_folders(cwd: str, arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the folders in arguments and variables, or their nearest existing parents."""
    words = [word for argument in arguments for word in (argument, argument.partition("=")[2])]
    words = [word for word in words if word and (os.sep in word or os.path.lexists(os.path.join(cwd, word)))]
    words += [value for value in environ.values() if value.startswith("/") and os.pathsep not in value]
    names = set()
    for word in words:
        with contextlib.suppress(OSError, ValueError):  # not a valid path
            path = os.path.realpath(os.path.join(cwd, word))
            while not os.path.isdir(path):
                path = os.path.dirname(path)
            if not _is_of_system(path):
                names.add(path)
    return sorted(names)


def _is_of_system(path: str) -> bool:
    if _is_below(path, ["/usr/local", "/var", _SHARED_MEMORY]):
        return path in ("/usr/local", "/var")
    return path == "/" or path.split("/")[1] in _SYSTEM


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _mount_of(path: str, points: Collection[str]) -> str:
    return max((point for point in points if point == "/" or _is_below(path, [point])), key=len, default="/")


def _caches(environ: Mapping[str, str]) -> list[str]:
    """Return cache folders of downloads and compiled code, which all runs share."""
    names = [environ[name] for name in _CACHE_VARIABLES if environ.get(name, "").startswith("/")]
    if home := environ.get("HOME"):
        names += [os.path.join(home, name) for name in _CACHES_AT_HOME]
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        names.append(os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))
    return names


def _sockets(folders: Collection[str]) -> list[str]:
    """Return the server sockets in covered folders; connecting does not work through an overlay (unix(7))."""
    names = []
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            path = line.rstrip("\n").partition(" /")[2]
            if path and _is_below(f"/{path}", folders) and os.path.exists(f"/{path}"):
                names.append(f"/{path}")
    return names


class _Layers:
    """Upper layers of a launch's overlays: in its folder, or in memory if the folder does not support them."""

    def __init__(self, folder: Path, *, unprivileged: bool) -> None:
        for name in ("layers", "memory"):
            (folder / name).mkdir(exist_ok=True)
        self._folder = folder
        self._unprivileged = unprivileged
        self._disk = mounts.open_path(str(folder / "layers"))
        self._memory: int | None = None

    def mount(self, path: str, lower: int, name: str) -> None:
        """Mount an overlay on a folder."""
        if path != _SHARED_MEMORY:
            with contextlib.suppress(OSError):
                mounts.mount_overlay(path, lower=lower, layers=self._disk, name=name, unprivileged=self._unprivileged)
                return
        if self._memory is None:
            mounts.mount_tmpfs(str(self._folder / "memory"), like=_SHARED_MEMORY)
            self._memory = mounts.open_path(str(self._folder / "memory"))
        mounts.mount_overlay(path, lower=lower, layers=self._memory, name=name, unprivileged=self._unprivileged)

    def close(self, *, hides: bool) -> None:
        """Hide the layers, so that a script does not see its changes a second time."""
        for name in ("layers", "memory") if hides else ():
            mounts.mount_tmpfs(str(self._folder / name))
        for descriptor in filter(None, (self._disk, self._memory)):
            os.close(descriptor)


def _mount_world(
    world: World, plan: WorldPlan, points: Mapping[str, str], *, used: Sequence[str], unprivileged: bool
) -> World:
    """Mount overlays on the covered folders; folders that do not support overlays stay redirected."""
    covered = world.redirected
    shared = [path for path in world.passed if _is_below(path, covered)]
    below = [point for point in points if _is_below(point, covered) and point not in covered]
    through = {path: mounts.open_path(path) for path in sorted({*shared, *below}) if os.path.lexists(path)}
    caches = _new_caches([path for path in shared if path not in through], Path(plan.folder).parent.parent / NEW_CACHES)
    lowers = {path: mounts.open_path(path) for path in covered}
    layers = _Layers(Path(plan.folder), unprivileged=unprivileged)
    mounted: list[str] = []
    failed: dict[str, str] = {}
    for number, (path, lower) in enumerate(lowers.items()):
        try:
            layers.mount(path, lower, str(number))
            within = [folder for folder in used if _mount_of(folder, [*covered, *world.passed]) == path]
            if unprivileged and (name := _unmappable(path, within)):
                mounts.unmount(path)
                raise OSError(errno.EOVERFLOW, f"{name} belongs to another user, or not to this user's first group")
            mounted.append(path)
        except OSError as error:
            failed[path] = error.strerror or str(error)
            if _is_below(path, mounted):
                mounts.bind(lower, path)
    for path, descriptor in {**through, **caches}.items():
        if _is_below(path, mounted):
            # The path may be removed by its owner in the meantime; without a cache the launch uses a private cache.
            with contextlib.suppress(OSError):
                if path in caches:
                    os.makedirs(path, exist_ok=True)
                mounts.bind(descriptor, path)
    for descriptor in (*through.values(), *caches.values(), *lowers.values()):
        os.close(descriptor)
    layers.close(hides=not plan.shows_layers)
    return replace(
        world,
        mode="mount" if mounted else "python",
        mounted=tuple(mounted),
        redirected=tuple(failed),
        reason="; ".join(
            f"{path}: {why}" for path, why in failed.items() if any(_is_below(each, [path]) for each in used)
        ),
        unprivileged=unprivileged,
    )


def _unmappable(path: str, used: Iterable[str]) -> str:
    """Return a path of this user, or that it may write, with an owner or group that a user namespace cannot represent.

    Empty if not found. Only ``used`` folders are searched. Such a file cannot be changed in the namespace (EOVERFLOW).
    """
    no_group = int(Path("/proc/sys/kernel/overflowgid").read_text(encoding="ascii"))
    for folder in used:
        above = (each for each in map(str, Path(folder).parents) if each != path and _is_below(each, [path]))
        places = [folder, *above]
        names = os.listdir(folder)[:_MOST_ENTRIES] if os.access(folder, os.R_OK) else []
        for each in (*places, *(os.path.join(folder, name) for name in names)):
            with contextlib.suppress(OSError):  # gone
                status = os.lstat(each)
                unknown = status.st_gid == no_group != os.getegid()
                if status.st_uid != os.geteuid():  # in a folder such as /tmp, the script has no part in them
                    is_part = each not in places and not os.stat(folder).st_mode & stat.S_ISVTX
                    unknown = is_part and not os.path.islink(each) and os.access(each, os.W_OK)
                if unknown:
                    return each
    return ""


def _new_caches(paths: Iterable[str], folder: Path) -> dict[str, int]:
    """Create folders, shared by the launches of a study, for caches that do not exist yet.

    Returns:
        Path of the cache -> descriptor of its folder.
    """
    result = {}
    for path in paths:
        with contextlib.suppress(OSError):  # the launch then uses a private cache
            target = folder / path.lstrip("/").replace("/", "_")
            target.mkdir(parents=True, exist_ok=True)
            result[path] = mounts.open_path(str(target))
    return result


def rename_across_layers() -> None:
    """Make ``os.rename`` and ``os.replace`` copy a folder that an overlay in a user namespace cannot rename (EXDEV)."""

    def copying(original: Any) -> Any:
        def rename(src: Any, dst: Any, **named: Any) -> None:
            try:
                original(src, dst, **named)
            except OSError as error:
                if error.errno != errno.EXDEV or named or not os.path.isdir(src) or os.path.islink(src):
                    raise
                if os.path.isdir(dst):
                    os.rmdir(dst)
                shutil.copytree(src, dst, symlinks=True)
                shutil.rmtree(src)

        return rename

    for name in ("rename", "replace"):
        replace_function(os, name, copying(getattr(os, name)))
