"""Collects what has to be carried to a machine with a GPU and without a network: ``make pack-gpu``.

    python -m benchmarks.prove_gpu.pack --into DIR [--python-version 3.12] [--arch x86_64] [--glibc 28]
        [--with-frameworks] [--without numpy] [--limit-mb 60]

Wheels of DeepSpeed, of optuna-dsat and of their needs, as they are installed here, torch aside: that is on such a
machine already. On it, ``make prove-gpu WHEELS=DIR`` installs what it lacks. The checkout has to be carried as well.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
_BUILT = ("deepspeed", "optuna-dsat")
"""Packages whose wheels no index has."""
_FRAMEWORKS = ("accelerate", "lightning", "transformers")
"""For the examples of Hugging Face's libraries and Lightning, where the machine does not have these."""
_THERE = frozenset({"torch", "setuptools", *_BUILT})
_OLDEST_GLIBC = 5
"""``manylinux_2_5`` is the oldest (PEP 600)."""
_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")
_PIP = (sys.executable, "-m", "pip")
_OPTIONS = ("--quiet", "--no-deps", "--constraint", str(ROOT / "constraints.txt"))


def needs(packages: Iterable[str]) -> set[str]:
    """Return the packages that others need, as they are installed here, and theirs, and so on; torch aside."""
    result: set[str] = set()
    waiting = list(packages)
    while waiting:
        lines = importlib.metadata.requires(waiting.pop()) or ()
        found = (need for need in map(Requirement, lines) if need.marker is None or need.marker.evaluate())
        new = {canonicalize_name(need.name) for need in found} - result - _THERE
        result |= new
        waiting += new
    return result


def platforms(*, arch: str, glibc: int) -> list[str]:
    """Return the platform tags that a machine takes, the newest first; pip takes each by its very name.

    Args:
        arch: ``x86_64`` or ``aarch64``.
        glibc: Minor version of the machine's glibc 2.
    """
    newer = [f"manylinux_2_{minor}_{arch}" for minor in range(glibc, _OLDEST_GLIBC - 1, -1)]
    return newer + [f"{legacy}_{arch}" for legacy in _LEGACY] + [f"linux_{arch}"]


def download_command(names: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return the command that collects wheels for another Python and machine than this one."""
    command = [*_PIP, "download", *_OPTIONS, "--only-binary=:all:", "--dest", str(args.into)]
    command += ["--implementation", "cp", "--python-version", args.python_version]
    for platform in platforms(arch=args.arch, glibc=args.glibc):
        command += ["--platform", platform]
    return [*command, *names]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pack-gpu: pip exited with {done.returncode}:\n{done.stderr.strip()[-2000:]}")


def _build(into: Path) -> None:
    """Build the wheels that no index has, that of this checkout from a copy that stays as it is."""
    with tempfile.TemporaryDirectory(prefix="prove-gpu-") as temporary:
        built, copy = Path(temporary, "built"), Path(temporary, "checkout")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=_not_shipped)
        for source in ("deepspeed", str(copy)):
            _run([*_PIP, "wheel", *_OPTIONS, "--wheel-dir", str(built), source])
        for wheel in built.glob("*.whl"):
            if not wheel.name.endswith("-none-any.whl"):
                sys.exit(f"pack-gpu: {wheel.name} is for this machine alone.")
            shutil.copy2(wheel, into)


def _not_shipped(folder: str, names: list[str]) -> set[str]:
    """Return what a wheel of the checkout is made without: at the top all but the package, in folders what is made."""
    if Path(folder) == ROOT:
        return set(names) - {"optuna_dsat", "samplers", "pruners", "alembic", "pyproject.toml", "README.md", "LICENSE"}
    return {name for name in names if name == "__pycache__"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect and say how large it is; return 1 where it is too large."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prove_gpu.pack", description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="folder that receives the wheels; is made, or emptied")
    parser.add_argument("--python-version", default="3.12", help="of the machine with the GPU (default 3.12)")
    parser.add_argument("--arch", default="x86_64", help="its processor (default x86_64)")
    parser.add_argument("--glibc", type=int, default=28, help="minor version of its glibc 2 (default 28)")
    parser.add_argument("--with-frameworks", action="store_true", help="transformers, accelerate and lightning, too")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave out what is there already")
    parser.add_argument("--limit-mb", type=float, default=60.0, help="most that may be carried (default 60)")
    args = parser.parse_args(arguments)
    frameworks = set(_FRAMEWORKS) if args.with_frameworks else set()
    args.into.mkdir(parents=True, exist_ok=True)
    for old in args.into.glob("*.whl"):
        old.unlink()
    _build(args.into)
    _run(download_command(sorted((needs({*_BUILT, *frameworks}) | frameworks) - set(args.without)), args))
    sizes = {wheel.name: wheel.stat().st_size for wheel in args.into.glob("*.whl")}
    total_mb = sum(sizes.values()) / 1e6
    for wheel, size in sorted(sizes.items(), key=lambda pair: -pair[1])[:6]:
        print(f"{size / 1e6:6.1f} MB  {wheel}")
    print(f"{len(sizes)} wheels, {total_mb:.1f} MB, for Python {args.python_version} on {args.arch}.")
    print(f"There: make prove-gpu WHEELS={args.into.name}")
    if total_mb > args.limit_mb:
        sys.stderr.write(f"pack-gpu: that is more than {args.limit_mb:g} MB; --without NAME leaves out some.\n")
    return int(total_mb > args.limit_mb)


if __name__ == "__main__":
    sys.exit(main())
