"""Collects what has to be carried to a machine with a GPU and without a network: ``make pack-gpu``.

    python -m benchmarks.prove_gpu.pack --into DIR [--python-version 3.12] [--arch x86_64] [--glibc 28]
        [--with-frameworks] [--without numpy] [--limit-mb 60]

Wheels of DeepSpeed, of optuna-dsat and of all that they need there, torch and what comes with it aside: that is on such
a machine already. On it, ``make prove-gpu WHEELS=DIR`` installs what it lacks into a folder of its own. Beside the
wheels, the checkout has to be carried.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["FRAMEWORKS", "NEEDS", "PackError", "download_command", "main", "platforms", "wheel_command"]

ROOT = Path(__file__).resolve().parents[2]
NEEDS = (
    "optuna", "sqlalchemy", "greenlet", "alembic", "mako", "markupsafe", "colorlog", "packaging", "pyyaml", "tqdm",
    "typing-extensions", "jinja2", "ninja", "numpy", "nvidia-ml-py", "plotly", "narwhals", "psutil", "pydantic",
    "pydantic-core", "annotated-types", "typing-inspection", "rich", "markdown-it-py", "mdurl", "pygments", "typer",
    "annotated-doc", "click", "shellingham", "einops", "hjson", "msgpack", "py-cpuinfo",
)  # fmt: skip
"""What optuna-dsat, Optuna and DeepSpeed need at run time, theirs included, torch aside."""
FRAMEWORKS = (
    "accelerate", "filelock", "fsspec", "h11", "hf-xet", "httpcore2", "httpx2", "huggingface-hub", "idna", "anyio",
    "lightning", "lightning-utilities", "pytorch-lightning", "regex", "safetensors", "tokenizers",
    "torchmetrics", "transformers", "truststore",
)  # fmt: skip
"""For the examples of Hugging Face's libraries and Lightning, where the machine does not have these."""
_OLDEST_GLIBC = 5
"""``manylinux_2_5`` is the oldest (PEP 600)."""
_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")


class PackError(RuntimeError):
    """Something cannot be packed."""


def platforms(*, arch: str, glibc: int) -> list[str]:
    """Return the platform tags that a machine takes, the newest first; pip takes each by its very name.

    Args:
        arch: ``x86_64`` or ``aarch64``.
        glibc: Minor version of the machine's glibc 2.
    """
    newer = [f"manylinux_2_{minor}_{arch}" for minor in range(glibc, _OLDEST_GLIBC - 1, -1)]
    return newer + [f"{legacy}_{arch}" for legacy in _LEGACY] + [f"linux_{arch}"]


def download_command(names: Sequence[str], *, into: Path, python_version: str, arch: str, glibc: int) -> list[str]:
    """Return the command that collects wheels for another Python and machine than this one."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python_version, "--dest", str(into)]
    command += ["--constraint", str(ROOT / "constraints.txt")]
    for platform in platforms(arch=arch, glibc=glibc):
        command += ["--platform", platform]
    return [*command, *names]


def wheel_command(source: str, *, into: Path) -> list[str]:
    """Return the command that builds a wheel of pure Python."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into)]
    return [*command, "--constraint", str(ROOT / "constraints.txt"), source]


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackError(f"{what} cannot be packed; pip exited with {done.returncode}:\n{done.stderr.strip()[-2000:]}")


def _build(into: Path) -> None:
    """Build the wheels that no index has: DeepSpeed's, and that of this checkout, from a copy that stays as it is."""
    with tempfile.TemporaryDirectory(prefix="prove-gpu-") as temporary:
        built, copy = Path(temporary, "built"), Path(temporary, "checkout")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=_not_shipped)
        for name, source in (("deepspeed", "deepspeed"), ("optuna-dsat", str(copy))):
            _run(wheel_command(source, into=built), name)
        for wheel in built.glob("*.whl"):
            if not wheel.name.endswith("-none-any.whl"):
                raise PackError(f"{wheel.name} is for this machine alone.")
            shutil.copy2(wheel, into)


def _not_shipped(folder: str, names: list[str]) -> set[str]:
    """Return what a wheel of the checkout is made without: at the top all but the package, in folders what is made."""
    if Path(folder) == ROOT:
        return set(names) - {"optuna_dsat", "samplers", "pruners", "alembic", "pyproject.toml", "README.md", "LICENSE"}
    return {name for name in names if name == "__pycache__"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect and say how large it is; return 1 where it is too large or something is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prove_gpu.pack", description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="folder that receives the wheels; is made, or emptied")
    parser.add_argument("--python-version", default="3.12", help="of the machine with the GPU (default 3.12)")
    parser.add_argument("--arch", default="x86_64", help="its processor (default x86_64)")
    parser.add_argument("--glibc", type=int, default=28, help="minor version of its glibc 2 (default 28)")
    parser.add_argument("--with-frameworks", action="store_true", help="transformers, accelerate and lightning, too")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave out what is there already")
    parser.add_argument("--limit-mb", type=float, default=60.0, help="most that may be carried (default 60)")
    args = parser.parse_args(arguments)
    names = [name for name in (*NEEDS, *(FRAMEWORKS if args.with_frameworks else ())) if name not in args.without]
    args.into.mkdir(parents=True, exist_ok=True)
    for old in args.into.glob("*.whl"):
        old.unlink()
    try:
        _build(args.into)
        into = {"into": args.into, "python_version": args.python_version, "arch": args.arch, "glibc": args.glibc}
        _run(download_command(names, **into), "What is needed")
    except PackError as error:
        sys.stderr.write(f"pack-gpu: {error}\n")
        return 1
    sizes = {wheel.name: wheel.stat().st_size for wheel in args.into.glob("*.whl")}
    total_mb = sum(sizes.values()) / 1e6
    for wheel, size in sorted(sizes.items(), key=lambda pair: -pair[1])[:6]:
        print(f"{size / 1e6:6.1f} MB  {wheel}")
    print(f"{len(sizes)} wheels, {total_mb:.1f} MB, for Python {args.python_version} on {args.arch}.")
    print(f"Carry this checkout and {args.into.name}; there: make prove-gpu WHEELS={args.into.name} PYTHON=python3")
    if total_mb > args.limit_mb:
        sys.stderr.write(
            f"pack-gpu: that is more than {args.limit_mb:g} MB; --without NAME leaves out what is there.\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
