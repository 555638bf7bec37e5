"""Fixtures: stores, and workers in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import optuna
import pytest

from optuna_dsat.store import Store
from tests.harness.workers import WaitingProcess


@pytest.fixture
def store(ready_url: str) -> Iterator[Store]:
    with Store.open(ready_url, heartbeat_interval_s=0.2, grace_s=1.0) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


class Actor(WaitingProcess):
    """A worker in a separate process; its result is the last line it prints."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("tests.store.actor", *arguments)

    def answer(self) -> str:
        return self.finish().strip().splitlines()[-1]


@pytest.fixture
def actor(forks: None) -> Iterator[Callable[..., Actor]]:  # noqa: ARG001 - they are forked from it
    started: list[Actor] = []

    def start(*arguments: str) -> Actor:
        started.append(Actor(*arguments))
        return started[-1]

    yield start
    for item in started:
        item.kill()
