from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from optuna_dsat.runtime.local_rank import default_local_rank


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
    found: list[None] = []
    default_local_rank(3, on_found=lambda: found.append(None))
    assert run([]) == {"local_rank": 3, "other": 0}
    assert found
    assert run([f"{option}=1", "--other=2"]) == {"local_rank": 1, "other": 2}
