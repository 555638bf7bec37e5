"""A measured script ends as by ``sys.exit``: its exit handlers run for a few seconds and change no outcome."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.outcome import Outcome
from tests.harness.launches import request

pytestmark = pytest.mark.torchrun

TRAIN = """
import atexit, os, sys, threading, time
import deepspeed, torch
from optuna_dsat.runtime import process
process.EXIT_LIMIT_S = 1.0  # of the five seconds that handlers are given
deepspeed.init_distributed()
rank = torch.distributed.get_rank()
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

def train():
    for _ in range(1000):
        engine.backward(engine(torch.randn(4, 4)).sum())
        engine.step()

def mark(name):
    open(f"{name}-{rank}", "w").close()
"""

Launch = Callable[[str, Path], LaunchReport]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Return a function that launches a training with an ending in a folder, forked as most are."""
    folder, numbers = tmp_path_factory.mktemp("endings"), itertools.count()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = local_launcher(folder, devices=cpu_devices(2), base_env=environment, warm=True)

    def run(ending: str, cwd: Path) -> LaunchReport:
        script = cwd / "train.py"
        script.write_text(TRAIN + ending)
        (cwd / "user_config.json").write_text("{}")
        asked = request(cwd, launch_id=f"ending-{next(numbers)}", script=str(script), overlay={})
        _, report = follow(launcher, asked)
        return report

    yield run
    launcher.close()


def test_finally_with_and_atexit_run(launch: Launch, tmp_path: Path) -> None:
    report = launch(
        "atexit.register(mark, 'atexit')\ntry:\n    with torch.enable_grad():\n        train()\n"
        "finally:\n    mark('finally')\n",
        tmp_path,
    )
    assert report.outcome is Outcome.MEASURED, report.message
    assert {path.name for path in tmp_path.glob("*-[01]")} == {"atexit-0", "atexit-1", "finally-0", "finally-1"}


@pytest.mark.parametrize(
    "ending",
    [
        "while True:\n    try:\n        train()\n    except BaseException:\n        pass\n",
        "try:\n    train()\nfinally:\n    raise RuntimeError('workers are gone')\n",
        "try:\n    train()\nfinally:\n    os._exit(7)\n",
        "worker = threading.Thread(target=train)\nworker.start()\nworker.join()\ntime.sleep(600)\n",
    ],
    ids=["swallowed", "raises", "hard exit", "thread"],
)
def test_no_ending_changes_the_outcome_or_takes_long(launch: Launch, tmp_path: Path, ending: str) -> None:
    began = time.monotonic()
    report = launch(ending, tmp_path)
    assert report.outcome is Outcome.MEASURED, report.message
    assert report.exit_s < 12.0
    assert time.monotonic() - began < 120.0
