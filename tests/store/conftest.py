"""Fixtures: stores, and workers in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import optuna
import pytest

from optuna_dsat.store import Store
from tests.harness.forks import ForkedProcess


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, heartbeat_interval_s=0.2, grace_s=1.0) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


class Actor:
    """A worker in a separate process; its result is the last line it prints."""

    def __init__(self, *arguments: str) -> None:
        self.process = ForkedProcess("tests.store.actor", *arguments)

    def wait_ready(self) -> str:
        line = self.process.stdout.readline()
        assert line.startswith("ready"), self.process.communicate()[1]
        return line.strip()

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = 120.0) -> str:
        output, errors = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, errors
        return output.strip().splitlines()[-1]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def actor(forks: None) -> Iterator[Callable[..., Actor]]:  # noqa: ARG001 - they are forked from it
    started: list[Actor] = []

    def start(*arguments: str) -> Actor:
        started.append(Actor(*arguments))
        return started[-1]

    yield start
    for item in started:
        item.end()
