from __future__ import annotations

import pytest
from sqlalchemy import make_url

from optuna_dsat.cli.parsing.rewriting import without_password, without_secrets_of
from optuna_dsat.study.options.declaration import STORAGE_ENV

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


@pytest.mark.parametrize("password", ["a/b", "a#b", "a?b", "a:b"])
def test_a_password_is_found_as_sqlalchemy_splits_it(password: str) -> None:
    url = f"postgresql://me:{password}@host/db"
    assert make_url(url).password == password
    assert without_password([*PLAIN, "--storage", url]) == (list(PLAIN), url)


def test_secrets_of_the_script_leave_the_command_for_the_environment() -> None:
    words = [*PLAIN, "--env", "HF_TOKEN=abc1", "--storage", SECRET, "--", "--password", "geheim2"]
    command, variables = without_secrets_of(words)
    assert command[len(PLAIN) :] == [
        "--env", "HF_TOKEN=${OPTUNA_DSAT_SECRET_HF_TOKEN}", "--", "--password", "${OPTUNA_DSAT_SECRET_PASSWORD}"
    ]  # fmt: skip
    assert variables == {
        "OPTUNA_DSAT_SECRET_HF_TOKEN": "abc1", "OPTUNA_DSAT_SECRET_PASSWORD": "geheim2", STORAGE_ENV: SECRET
    }  # fmt: skip
    assert without_secrets_of(command) == (command, {})
