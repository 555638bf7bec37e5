"""Files of modules, and the options that a script's source declares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optuna_dsat.script.command.source import Source, module_file
from optuna_dsat.study.profile.fingerprint import fingerprint
from optuna_dsat.study.spec import make_spec
from optuna_dsat.tuning.options.tune_options import RandomOptions
from optuna_dsat.tuning.target import find_target
from tests.harness.studies import spec_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("top.py", "space/deep/train.py", "package/__init__.py", "package/__main__.py", "json/tool.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('imported')")
    return tmp_path


def test_the_working_directory_comes_first(folder: Path) -> None:
    there = {"top": "top.py", "space.deep.train": "space/deep/train.py", "package": "package/__main__.py"}
    for name, file in {**there, "json.tool": "json/tool.py"}.items():
        assert module_file(name, folder) == folder / file
    for name in ("space", "gone.train", "package.gone"):
        assert module_file(name, folder) is None


def test_installed_modules_are_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "installed"
    (installed / "trainers" / "big").mkdir(parents=True)
    for name in ("__init__", "big/__main__"):
        (installed / "trainers" / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(installed))
    assert module_file("trainers.big", tmp_path) == installed / "trainers" / "big" / "__main__.py"
    assert "trainers" not in sys.modules
    assert module_file("sys", tmp_path) is None


def test_a_profile_depends_on_the_code_of_the_module_and_its_settings(folder: Path) -> None:
    module = {"script": "space.deep.train", "is_module": True, "cwd": str(folder), "config_path": "ds.json"}
    spec = make_spec(
        name="study",
        method="random",
        script={**module, "args": ("--model=model.yaml", "--deepspeed", "ds.json")},
        ds_config={"train_micro_batch_size_per_gpu": 2},
        device="cpu",
        slots_per_trial=2,
        output_dir=str(folder / "out"),
    )
    unseen, seen_files = ("other/much/deeper.py", "ds.json"), ("top.py", "space/deep/train.py", "model.yaml")
    for changed, seen in [*((file, False) for file in unseen), *((file, True) for file in seen_files)]:
        before = fingerprint(spec, device_names=("cpu",))
        path = folder / changed
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('changed')")
        assert (fingerprint(spec, device_names=("cpu",)) != before) is seen


def test_a_linked_script_runs_by_its_link_and_imports_from_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``python LINK``: ``__file__`` is the link, ``sys.path[0]`` the real folder."""
    source, link = tmp_path / "shared" / "main.py", tmp_path / "exp" / "train.py"
    for folder in (source.parent, link.parent, tmp_path / "exp" / "deep"):
        folder.mkdir()
    source.write_text("import helper")
    (source.parent / "helper.py").write_text("answer = input()")
    link.symlink_to("../shared/main.py")
    monkeypatch.chdir(link.parent)
    for given in ("train.py", "deep/../train.py"):
        assert find_target(RandomOptions(script=given), python=None).script == str(link)
    assert Source(script=str(link), is_module=False, cwd=link.parent).reads_input()
    script = {"cwd": str(link.parent), "config_path": ""}
    linked, real = (spec_of(tmp_path, script={**script, "script": str(path)}) for path in (link, source))
    assert linked.script.folder == source.parent
    assert linked.script != real.script
    assert linked.identity() == real.identity()
    (tmp_path / "exp" / "code").symlink_to("../shared/sub")
    (tmp_path / "shared" / "sub").mkdir()
    target = find_target(RandomOptions(script="code/../main.py"), python=None)
    assert target.script == str(link.parent / "code" / ".." / "main.py")
    (source.parent / "__main__.py").write_text("import helper")
    target = find_target(RandomOptions(script="../shared"), python=None)
    assert (target.script, target.stem) == (str(source.parent / "__main__.py"), "shared")


@pytest.mark.parametrize(
    ("source", "declared"),
    [
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--seed', type=int)\n", True),
        ("import sys\nif '--seed' in sys.argv:\n    pass\n", True),
        ("import click\n@click.option('--seed')\ndef main(seed): ...\n", True),
        ("from transformers import HfArgumentParser\nclass Arguments:\n    seed: int = 0\n", True),
        ("import fire\ndef main(seed=0): ...\nfire.Fire(main)\n", True),
        ("import subprocess\nsubprocess.run(['tool', '--seed', '1'])\n", False),
        ("class State:\n    seed: int = 0\n", False),
        ("print('use --seed')\n", False),
    ],
)
def test_an_option_is_the_scripts_where_its_source_declares_it(tmp_path: Path, source: str, declared: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    result = Source(script="train.py", is_module=False, cwd=tmp_path).declared_options(["--seed"])
    assert (result == {"--seed"}) is declared


def test_a_script_that_reads_its_standard_input_is_detected(tmp_path: Path) -> None:
    for source, reads in (
        ("import sys\nfor line in sys.stdin: ...", True),
        ("import fileinput\nlines = list(fileinput.input())", True),
        ("answer = input()", True),
        ("open('/dev/stdin')", True),
        ("input = layer.input(3)\nmodel(input)", False),
    ):
        (tmp_path / "train.py").write_text(source)
        assert Source(script="train.py", is_module=False, cwd=tmp_path).reads_input() is reads
