from __future__ import annotations

import pytest

from optuna_dsat.cli.password import without_password

SECRET = "postgresql://me:geheim@host/db"
PLAIN = ("optuna-dsat", "random", "train.py", "ds.json")


@pytest.mark.parametrize("given", [("--storage", SECRET), (f"--storage={SECRET}",)])
def test_a_url_with_a_password_is_taken_off_the_command(given: tuple[str, ...]) -> None:
    assert without_password([*PLAIN, *given, "--quiet"]) == ([*PLAIN, "--quiet"], SECRET)


def test_a_password_in_the_query_is_found() -> None:
    url = "postgresql://host/db?user=me&password=geheim"
    assert without_password([*PLAIN, "--storage", url]) == (list(PLAIN), url)


@pytest.mark.parametrize(
    "given",
    [
        ("--storage", "sqlite:///study.db"),
        ("--storage=postgresql://me@host/db",),
        ("--storage",),
        ("--", "--storage", SECRET),
    ],
)
def test_everything_else_stays_as_it_is(given: tuple[str, ...]) -> None:
    assert without_password([*PLAIN, *given]) == ([*PLAIN, *given], None)
