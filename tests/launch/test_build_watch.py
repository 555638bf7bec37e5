from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.machine.operators import BuildWatch, compile_operators
from optuna_dsat.launch.places import here
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.runtime.agent.operators import _compile, is_built, operator_name
from optuna_dsat.runtime.agent.preload import Preload


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


@pytest.mark.parametrize("was_built", [False, True])
def test_a_build_of_a_launch_is_reported_as_long_as_it_lasts(tmp_path: Path, was_built: bool) -> None:
    words: list[str] = []
    watch = BuildWatch({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, on_phase=words.append, clock=Clock())
    watch.check()
    assert words == []
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    if was_built:  # by another environment that shares the folder
        (lock.parent / "cpu_adam.so").touch()
    if_needed = "rebuilding cpu_adam (if another environment or version built it last, "
    why = if_needed if was_built else "building cpu_adam (first use only, "
    with lock.open("w"):  # as opened by its builder
        watch.check()
        (lock.parent / "cpu_adam.so").touch()
        watch.check()
        assert words == [f"{why}may take minutes)"]
    lock.unlink()
    watch.check()
    watch.end()
    assert words[1:] == [""]


def test_a_lock_that_nobody_holds_is_no_build(tmp_path: Path) -> None:
    words: list[str] = []
    watch = BuildWatch({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, on_phase=words.append, clock=Clock())
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    watch.check()
    assert words == []


def test_a_build_that_fails_is_told_without_the_compilers_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "[1/3] c++ -MMD -DTORCH_EXTENSION_NAME=x -I/a -c x.cpp\ncc1plus: fatal error: Python.h: No such file"

    class Builder:
        NAME = "x"

        def load(self, **_: bool) -> None:
            raise RuntimeError(f"Error building extension 'x': {output}")

    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda _: Builder(), raising=False)
    assert _compile("x") == "Error building extension 'x': fatal error: Python.h: No such file"


@pytest.mark.parametrize("folder", ["cpu_adam", "py311_cu128/cpu_adam"])
def test_what_is_built_is_seen_without_torch(tmp_path: Path, folder: str) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    (tmp_path / folder).mkdir(parents=True)
    assert not is_built("CPUAdamBuilder", environ)
    (tmp_path / folder / "cpu_adam.so").touch()
    assert is_built("CPUAdamBuilder", environ)
    assert not is_built("FusedAdamBuilder", environ)
    assert operator_name("SomeBuilder") == "SomeBuilder"


def test_operators_are_built_with_the_first_launch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    def build(names: Sequence[str], _environ: Mapping[str, str], **_: object) -> dict[str, str]:
        order.append(tuple(names))
        return {}

    monkeypatch.setattr(here, "compile_operators", build)
    monkeypatch.setattr(TorchrunLauncher, "_begin", lambda _self, waiting: order.append(waiting.request.launch_id))
    launcher = local_launcher(tmp_path / "out", devices=cpu_devices(2))
    try:
        launcher.prepare(Preload(), operators=("CPUAdamBuilder",))
        assert order == []
        for name in ("first", "second"):
            launcher.start(_request(name, tmp_path))
        assert order == [("CPUAdamBuilder",), "first", "second"]
    finally:
        launcher.close()


def test_without_a_compiler_no_process_is_started_to_find_that_out(tmp_path: Path) -> None:
    result = compile_operators(["ShareMemCommBuilder"], {"PATH": str(tmp_path)}, python=str(tmp_path / "none"))
    assert result == {"ShareMemCommBuilder": "no C++ compiler (CXX) or no ninja is found"}


def _request(name: str, folder: Path) -> LaunchRequest:
    command = ScriptCommand(script=str(folder / "train.py"), args=(), cwd=str(folder), config_path="")
    return LaunchRequest(launch_id=name, purpose="trial", command=command, ds_config={}, overlay={}, slots=1)
