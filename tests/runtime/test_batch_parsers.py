"""Recording of values parsed by other libraries than argparse, with the real packages."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from optuna_dsat.runtime.adapt.batch_sources import BatchSources
from optuna_dsat.runtime.adapt.config import with_option
from optuna_dsat.runtime.imports import ImportWatch
from optuna_dsat.script.batch_rule import guesses


@dataclass
class Training:
    """Training options."""

    batch_size: int = 4
    epochs: int = 3


PATCHED = {
    "fire.core": (None, ["_MakeParseFn"]),
    "yaml": (None, ["load", "safe_load", "full_load", "unsafe_load"]),
}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that watches a library; undo all patches at the end."""
    undo: list[tuple[Any, str, Any]] = [
        (argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    ]

    def watching(*names: str, arguments: list[str]) -> BatchSources:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        made = BatchSources(micro_batch=8, follow={}, fed=lambda: 0, repeat=True)
        made.install()
        for name in names:
            module: ModuleType = importlib.import_module(name)
            owner, members = PATCHED[name]
            holder: Any = module if owner is None else getattr(module, owner)
            undo.extend((holder, member, vars(holder)[member]) for member in members)
            made.callbacks()[name](module)
        return made

    yield watching
    for holder, member, value in reversed(undo):
        setattr(holder, member, value)


def first_guess(made: BatchSources, *, own: int) -> str:
    return guesses(made.event(rank=0), fed=own, ranks=1)[0].option


@pytest.mark.parametrize(("given", "option"), [("--batch_size", "--batch_size"), ("--batch-size", "--batch-size")])
def test_simple_parsing_in_the_users_spelling(watch: Any, given: str, option: str) -> None:
    simple_parsing = pytest.importorskip("simple_parsing")
    made = watch(arguments=[given, "6"])
    parser = simple_parsing.ArgumentParser(
        add_option_string_dash_variants=simple_parsing.DashVariant.UNDERSCORE_AND_DASH
    )
    parser.add_arguments(Training, dest="train")
    assert parser.parse_args().train == Training(batch_size=6)
    assert first_guess(made, own=6) == option


@pytest.mark.parametrize(
    ("arguments", "option", "own"),
    [
        ([], "--batch_size", 4),
        (["--batch_size", "6"], "--batch_size", 6),
        (["--batch-size=6"], "--batch-size", 6),
        (["run", "--batch_size=6", "--epochs", "2"], "--batch_size", 6),
    ],
)
def test_fire_with_what_is_given_and_what_is_not(watch: Any, arguments: list[str], option: str, own: int) -> None:
    fire = pytest.importorskip("fire")
    made = watch("fire.core", arguments=arguments)

    def run(batch_size: int = 4, epochs: int = 3) -> int:
        return batch_size + 100 * epochs

    assert fire.Fire({"run": run} if arguments[:1] == ["run"] else run, serialize=lambda _: None) % 100 == own
    assert first_guess(made, own=own) == option
    assert made.event(rank=0).defaults["--batch_size"] == 4


def test_what_fire_takes_by_its_place_cannot_follow(watch: Any) -> None:
    fire = pytest.importorskip("fire")
    made = watch("fire.core", arguments=["6"])

    def run(batch_size: int = 4) -> int:
        return batch_size

    assert fire.Fire(run, serialize=lambda _: None) == 6
    assert not guesses(made.event(rank=0), fed=6, ranks=1)


def test_pairs_of_a_key_and_a_value_override_settings_too(watch: Any) -> None:
    made = watch("yaml", arguments=["--cfg", "run.yaml", "TRAIN.BATCH_SIZE", "6", "TRAIN.EPOCHS", "6"])
    (rule,) = guesses(made.event(rank=0), fed=6, ranks=1)
    assert (rule.kind, rule.option) == ("option", "TRAIN.BATCH_SIZE")
    assert with_option(["TRAIN.BATCH_SIZE", "6"], rule.option, "8") == ["TRAIN.BATCH_SIZE", "8"]


def test_a_file_that_omegaconf_reads_is_a_settings_file(watch: Any, tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    (tmp_path / "run.yaml").write_text("train: {batch_size: 4}\n")
    made = watch("yaml", arguments=[])
    config = omegaconf.OmegaConf.load(tmp_path / "run.yaml")
    omegaconf.OmegaConf.merge(config, {"epochs": 2})
    (rule,) = guesses(made.event(rank=0), fed=4, ranks=1)
    assert (rule.kind, rule.key, rule.file) == ("setting", "train.batch_size", str(tmp_path / "run.yaml"))


def test_an_argument_that_overrides_a_settings_file_comes_before_it(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {batch_size: 6}\n")
    made = watch("yaml", arguments=["train.batch_size=6", "name=a", "steps=0", "--lr=1"])
    with (tmp_path / "run.yaml").open() as file:
        importlib.import_module("yaml").safe_load(file)
    assert made.event(rank=0).options == {"train.batch_size=": 6}
    first, second = guesses(made.event(rank=0), fed=6, ranks=1)
    assert (first.option, second.key) == ("train.batch_size=", "train.batch_size")


@pytest.mark.parametrize("imported", [False, True], ids=["as it is imported", "imported before"])
def test_hydra_writes_its_runs_below_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    pytest.importorskip("hydra")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "train.batch_size=6"])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "hydra"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "conf.yaml").write_text("train: {batch_size: 4}\n")
    if imported:  # as in a forked launch
        importlib.import_module("hydra._internal.hydra")
        importlib.import_module("hydra._internal.core_plugins.basic_launcher")
    outputs = tmp_path / "launch" / "hydra"
    made = BatchSources(micro_batch=8, follow={}, fed=lambda: 0, repeat=True, outputs=outputs)
    ImportWatch({name: made.callbacks()[name] for name in ("hydra.core.utils",)}).install()
    import hydra

    seen: list[int] = []

    @hydra.main(version_base=None, config_path=str(tmp_path), config_name="conf")
    def main(config: Any) -> None:
        seen.append(config.train.batch_size)

    main()
    assert seen == [6]
    assert first_guess(made, own=6) == "train.batch_size="
    assert not (tmp_path / "outputs").exists()
    assert (outputs / ".hydra" / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["data.batch_size=5", "epochs=3"], "data.batch_size="),
        (["+data.batch_size=5"], "data.batch_size="),
        (["--batch_size=5"], "--batch_size"),
        (["-b", "5", "run"], "-b"),
    ],
)
def test_a_batch_size_among_arguments_that_the_script_parses_itself_is_an_option(
    watch: Any, arguments: list[str], option: str
) -> None:
    assert first_guess(watch(arguments=arguments), own=5) == option
