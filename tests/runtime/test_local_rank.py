from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.runtime.adapt.ranks import default_local_rank, with_local_rank


@pytest.fixture(autouse=True)
def _own_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    # restored after the test
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_the_option_follows_the_rank_unless_it_is_given(option: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(option, type=int, default=0)
    parser.add_argument("--other", type=int, default=0)
    default_local_rank(3)
    assert parser.parse_args([]) == argparse.Namespace(local_rank=3, other=0)
    assert parser.parse_args([f"{option}=1"]).local_rank == 1


def test_parsers_without_the_option_get_none() -> None:
    default_local_rank(3)
    assert argparse.ArgumentParser().parse_args([]) == argparse.Namespace()


def click_command(option: str) -> Callable[[list[str]], Any]:
    click = pytest.importorskip("click")
    command = click.Command(
        "train",
        callback=lambda **values: values,
        params=[click.Option([option], type=int, required=True), click.Option(["--other"], type=int, default=0)],
    )
    return functools.partial(command.main, standalone_mode=False)


def typer_command(option: str) -> Callable[[list[str]], Any]:
    typer = pytest.importorskip("typer")
    application = typer.Typer()

    def train(local_rank: int = typer.Option(-1, option), other: int = 0) -> dict[str, int]:
        return {"local_rank": local_rank, "other": other}

    application.command()(train)
    return functools.partial(application, standalone_mode=False)


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
@pytest.mark.parametrize("command", [click_command, typer_command])
def test_the_option_of_other_parsers_follows_the_rank_too(
    option: str, command: Callable[[str], Callable[[list[str]], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = command(option)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("click.core", "typer._click.core"):
        if (module := sys.modules.get(name)) is not None:
            monkeypatch.setattr(module.Command, "parse_args", module.Command.parse_args)
    result: list[None] = []
    default_local_rank(3, on_found=lambda: result.append(None))
    assert run([]) == {"local_rank": 3, "other": 0}
    assert result
    assert run([f"{option}=1", "--other=2"]) == {"local_rank": 1, "other": 2}


def fire_command() -> Callable[..., Any]:
    fire = pytest.importorskip("fire")

    def train(other: int = 0, *, local_rank: int = -1) -> dict[str, int]:
        return {"local_rank": local_rank, "other": other}

    return functools.partial(fire.Fire, {"train": train}, name="train", serialize=lambda _: None)


def test_a_parameter_of_a_function_that_python_fire_calls_follows_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fire_command()
    core = sys.modules["fire.core"]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("click.core", "typer._click.core"):
        if (module := sys.modules.get(name)) is not None:
            monkeypatch.setattr(module.Command, "parse_args", module.Command.parse_args)
    monkeypatch.setattr(core, "_ParseKeywordArgs", vars(core)["_ParseKeywordArgs"])
    result: list[None] = []
    default_local_rank(3, on_found=lambda: result.append(None))
    assert run(command=["train"]) == {"local_rank": 3, "other": 0}
    assert result
    assert run(command=["train", "--local_rank=1", "--other=2"]) == {"local_rank": 1, "other": 2}


@pytest.mark.parametrize(
    ("source", "looks"),
    [
        ('rank = next(one.split("=")[1] for one in sys.argv if one.startswith("--local_rank="))', True),
        ('rank = re.search(r"--local_rank=(\\d+)", " ".join(sys.argv))', True),
        ('parser.add_argument("--local_rank", type=int)\nname = sys.argv[0]', False),
        ('@click.option("--local_rank")\ndef main(local_rank): print(sys.argv)', False),
        ('rank, config = os.environ["LOCAL_RANK"], sys.argv[1]', False),
        ('print("--local_rank is no option")', False),
        ("rank =", False),
    ],
)
def test_a_script_that_looks_for_the_option_by_itself_is_given_it(source: str, looks: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    first = ("--local_rank=3",) if looks else ()
    assert with_local_rank(("ds.json",), 3, script=script) == (*first, "ds.json")
    assert with_local_rank(("--local_rank=0",), 3, script=script) == ("--local_rank=0",), "given by the user"
    assert with_local_rank(("ds.json",), 3, script=None) == ("ds.json",)
