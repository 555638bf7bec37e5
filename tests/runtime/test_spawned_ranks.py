"""Scripts that spawn their ranks with ``torch.multiprocessing.spawn``."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from optuna_dsat.runtime.adapt import spawned_ranks
from optuna_dsat.runtime.events import EngineReady, RankFinished, StepMeasured
from optuna_dsat.runtime.rank import Rank
from tests.harness.ranks import Starter, WarmRanks

RANK = Rank(
    rank=1, local_rank=1, world_size=2, local_world_size=2, host="here", launch_path="launch.json", can_compile=False
)


def multiprocessing(spawn: Callable[..., Any], *, on_spawn: Callable[[], None] = lambda: None) -> Any:
    module: Any = ModuleType("torch.multiprocessing")
    module.spawn = module.start_processes = spawn
    spawned_ranks.callbacks(RANK, on_spawn=on_spawn)["torch.multiprocessing"](module)
    return module


def test_as_many_processes_as_ranks_are_the_ranks() -> None:
    ran: list[Any] = []

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("started")

    module = multiprocessing(never, on_spawn=lambda: ran.append("told"))
    assert not ran
    module.spawn(lambda index, word: ran.append((index, word)), args=("a",), nprocs=2, join=True)
    assert ran == ["told", (1, "a")]


def test_other_processes_are_started_and_may_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed: Any = ModuleType("deepspeed")
    deepspeed.initialize = None
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    started: list[int] = []

    def spawn(fn: Callable[..., None], args: tuple[Any, ...], nprocs: int, **_: Any) -> None:
        for index in range(nprocs):
            try:
                fn(index, *args)
            except ValueError as error:  # as torch reports errors of spawned processes
                raise RuntimeError(f"-- Process {index} terminated with the following error:\n{error}") from error

    module = multiprocessing(spawn)
    module.start_processes(started.append, nprocs=3)
    assert started == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"^the script starts 4 processes by .* launch has 2 ranks: tune with --gpus-per"
    ):
        module.spawn(lambda _: deepspeed.initialize(), nprocs=4)
    with pytest.raises(RuntimeError, match="another"):
        module.spawn(_another_error, nprocs=1)


def _another_error(_: int) -> None:
    raise ValueError("another")


@pytest.mark.torchrun
def test_each_rank_runs_its_share(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    overlay = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    launch = Starter(tmp_path).torchrun("spawned.py", port, overlay=overlay, warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    for rank in (0, 1):
        engine = launch.of(EngineReady, rank)[0]
        assert (engine.train_micro_batch_size_per_gpu, engine.data_parallel_size) == (3, 2)
        assert engine.starts_ranks
        assert {step.observed_micro_batch for step in launch.of(StepMeasured, rank)} == {3}
        assert launch.of(RankFinished, rank)[0].reason == "profile_done"
