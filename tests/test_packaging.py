from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = {"optuna_dsat": "optuna_dsat", "samplers": "optuna_dsat/samplers", "pruners": "optuna_dsat/pruners"}


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist from a copy of what git would commit, so that stray files cannot help, and a wheel from that."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in tracked("."):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        else:
            shutil.copy2(ROOT / name, target)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_installs_and_runs(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    install += ["--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    code = "import optuna_dsat, optuna_dsat.samplers, optuna_dsat.pruners; print(optuna_dsat.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for command in (["-c", code], ["-m", "optuna_dsat", "plan", "--help"]):
        words = [sys.executable, *command]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(str(target)) or "Usage: python -m optuna_dsat plan" in done.stdout


def test_the_wheel_holds_exactly_what_the_tree_holds(wheel: Path) -> None:
    wheel_names, expected = set(zipfile.ZipFile(wheel).namelist()), set()
    for folder, shipped in SHIPPED.items():
        for name in tracked(folder):
            if name.endswith((".py", "py.typed")) or "/templates/" in name:
                expected.add(shipped + name.removeprefix(folder))
    for name in tracked("alembic"):
        if name.endswith((".py", ".mako")):
            expected.add("optuna_dsat/migrations" + name.removeprefix("alembic"))
    code = {name for name in wheel_names if ".dist-info/" not in name}
    assert code == expected
    assert "optuna_dsat/migrations/env.py" in code
    assert "optuna_dsat/migrations/__init__.py" not in code, "the folder does not shadow alembic"
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
