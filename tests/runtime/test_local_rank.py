from __future__ import annotations

import argparse

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
