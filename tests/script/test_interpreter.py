"""The interpreter of a script: named, found, examined, refused with a remedy."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.script.interpreter import (
    default_python,
    examined,
    interpreter_of,
    module_command,
    named_python,
    package_folders,
    script_python,
    usable,
    with_package,
)


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without torch and DeepSpeed."""
    folder = tmp_path_factory.mktemp("environments") / "empty"
    venv.create(folder, with_pip=False)
    return folder


def fake(
    folder: Path, *, version: str = "[3, 11, 4]", packages: str = '{"torch": "2.4", "deepspeed": "0.15.4"}'
) -> str:
    """Return an interpreter that gives these answers when it is examined."""
    text = f'{{"version": {version}, "prefix": "/env", "path": [], "versions": {packages}}}'
    folder.mkdir(parents=True, exist_ok=True)
    return str(executable(folder / "python", f"#!/bin/sh\necho '{text}'\n"))


def test_an_interpreter_is_examined_without_importing_its_packages() -> None:
    installation = examined(sys.executable)
    assert installation.version == sys.version_info[:3]
    assert installation.versions.keys() == {"torch", "deepspeed"}
    assert str(installation).startswith(f"{sys.executable}: Python 3.")
    assert "DeepSpeed " in str(installation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'encodings'\" >&2\nexit 1\n",
            "does not start: Module",
        ),
        ("#!/bin/sh\necho hello\n", "does not start: it is not Python"),
        ("\x7fELF of another machine", r"cannot be run here: Exec format error\. Name .* --python"),
    ],
)
def test_what_does_not_start_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    python = executable(tmp_path / "python", text)
    with pytest.raises(UsageError, match=message) as refused:
        usable(str(python))
    assert "\n" not in str(refused.value)


def test_a_conda_environment_that_needs_activation_says_so(tmp_path: Path) -> None:
    (tmp_path / "env" / "conda-meta").mkdir(parents=True)
    (tmp_path / "env" / "bin").mkdir()
    python = executable(
        tmp_path / "env" / "bin" / "python", "#!/bin/sh\necho 'libpython3.11.so: not found' >&2\nexit 127\n"
    )
    with pytest.raises(UsageError, match=rf"not found\. .* not active: conda activate {tmp_path}/env\."):
        usable(str(python))


def test_old_and_incomplete_environments_are_refused(tmp_path: Path, empty: Path) -> None:
    with pytest.raises(UsageError, match=r"is Python 3\.8\.1; launches need 3\.9 or newer"):
        usable(fake(tmp_path / "old", version="[3, 8, 1]"))
    with pytest.raises(UsageError, match=r"has no DeepSpeed\. Name"):
        usable(fake(tmp_path / "half", packages='{"torch": "2.4"}'))
    with pytest.raises(UsageError, match=r"has no torch and no DeepSpeed\. Name"):
        usable(str(empty / "bin" / "python"))


def test_an_interpreter_is_named_by_path_folder_or_program(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = str(empty / "bin" / "python")
    assert named_python(expected) == named_python(str(empty)) == expected
    monkeypatch.setenv("PATH", str(empty / "bin"))
    assert named_python("python") == expected
    monkeypatch.chdir(empty)
    assert named_python("bin/python") == expected
    with pytest.raises(UsageError, match="--python is gone: there is no such interpreter"):
        named_python("gone")


def test_the_first_environment_with_torch_and_deepspeed_is_taken(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    assert default_python() == sys.executable
    assert script_python(None) is None, "the interpreter of this process has no name in a study"
    monkeypatch.setenv("VIRTUAL_ENV", str(empty))
    assert default_python() == sys.executable
    active = fake(tmp_path / "active" / "bin")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "active"))
    assert default_python() == script_python(None) == active


def test_a_machine_without_any_names_what_each_lacks(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(empty / "bin" / "python"))
    monkeypatch.setenv("VIRTUAL_ENV", str(empty))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UsageError, match=rf"^No interp.*\. {empty}/bin/python has no torch and no DeepSpeed\. Name .* --python\.$"
    ):
        default_python()


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (f"#!{sys.executable}\n", sys.executable),
        (f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n", sys.executable),
        (f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n", sys.executable),
        ("#!/usr/bin/env python3\n", str(Path(sys.executable).with_name("python3"))),
        ("#!/bin/bash\n", None),
        ("#!/gone/bin/python\n", None),
        ("import torch\n", None),
    ],
)
def test_the_first_lines_of_a_program_name_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, expected: str | None
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert interpreter_of(executable(tmp_path / "tool", first)) == expected


def test_packages_are_found_in_the_interpreter_s_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_there").mkdir()
    (tmp_path / "only_there" / "__init__.py").write_text("raise ImportError('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = str(Path(sys.executable).with_name("python3"))
    assert package_folders("only_there", other) == (tmp_path,)
    assert package_folders("only_there", None) == ()
    assert package_folders("not a name", other) == package_folders("gone", other) == ()


def test_the_interpreter_imports_this_copy_of_the_package_and_not_its_libraries(empty: Path, tmp_path: Path) -> None:
    (tmp_path / "optuna_dsat").mkdir()  # a folder of this name in the working directory is not it
    code = "import optuna_dsat, importlib.util as u; print(optuna_dsat.__file__, u.find_spec('optuna'))"
    done = subprocess.run(
        [str(empty / "bin" / "python"), "-P", "-c", code],
        env={"PYTHONPATH": with_package(None)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    import optuna_dsat

    assert done.stdout.split() == [optuna_dsat.__file__, "None"]


def test_the_package_comes_first_and_once_on_the_path() -> None:
    own = with_package(None)
    assert with_package(f"/mine{os.pathsep}{own}{os.pathsep}") == f"{own}{os.pathsep}/mine{os.pathsep}"


def test_an_older_python_runs_a_module_without_the_option_that_it_lacks(tmp_path: Path) -> None:
    old = fake(tmp_path, version="[3, 9, 18]")
    assert module_command(old, "pkg.run") == [old, "-m", "pkg.run"]
    assert module_command(sys.executable, "pkg.run", "-u") == [sys.executable, "-P", "-u", "-m", "pkg.run"]
