"""Scripts that set ``MASTER_PORT``, ``WORLD_SIZE`` and similar use the launch's rendezvous."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest

from optuna_dsat.runtime.adapt import own_rendezvous
from optuna_dsat.runtime.rank import Rank

RANK = Rank(
    rank=0, local_rank=0, world_size=2, local_world_size=2, host="here", launch_path="launch.json", can_compile=False
)


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "4711", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    module: Any = ModuleType("torch.distributed")
    module.called = []

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
    ) -> None:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        module.called.append((backend, init_method, world_size, rank, store, place))

    module.init_process_group = init_process_group
    own_rendezvous.callbacks(RANK)["torch.distributed"](module)
    return module


@pytest.mark.parametrize("method", [None, "env://", "tcp://localhost:12355"])
def test_a_place_of_the_scripts_own_is_the_launchs(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, method: str | None
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9994")
    distributed.init_process_group("gloo", init_method=method, world_size=2, rank=1)
    assert distributed.called == [("gloo", None, 2, 1, None, "localhost:4711")]


def test_files_and_stores_are_left_alone(distributed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "9994")
    distributed.init_process_group("gloo", "file:///tmp/x", world_size=2, rank=1)
    distributed.init_process_group("gloo", store="own", world_size=7, rank=1)
    assert [(call[1], call[-1]) for call in distributed.called] == [
        ("file:///tmp/x", "localhost:9994"),
        (None, "localhost:9994"),
    ]


@pytest.mark.parametrize("given", [{"world_size": 1, "rank": 0}, {}])
def test_another_number_of_ranks_is_refused_with_the_option_for_it(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, int]
) -> None:
    if not given:
        monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(
        ValueError, match=r"\(WORLD_SIZE\) to 1 itself, .* launch has 2 ranks: tune with --gpus-per-trial 1"
    ):
        distributed.init_process_group("gloo", **given)
    assert not distributed.called
