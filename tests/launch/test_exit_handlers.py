"""A measured script ends as by ``sys.exit``: its exit handlers run for a few seconds and change no outcome."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
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

HANDLERS = """
atexit.register(mark, 'atexit')
try:
    with torch.enable_grad():
        train()
finally:
    mark('finally')
"""


class Endings:
    """Launches trainings with an ending, forked as most are; the first runs before the tests, which leave no process.

    Args:
        folder: Its run directories, and what the first training writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.launcher = local_launcher(folder, devices=cpu_devices(2), base_env=environment, warm=True)
        self._numbers = itertools.count()
        self.first = self.run(HANDLERS, folder)

    def run(self, ending: str, cwd: Path) -> LaunchReport:
        script = cwd / "train.py"
        script.write_text(TRAIN + ending)
        (cwd / "user_config.json").write_text("{}")
        asked = request(cwd, launch_id=f"ending-{next(self._numbers)}", script=str(script), overlay={})
        return follow(self.launcher, asked)[1]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endings]:
    made = Endings(tmp_path_factory.mktemp("endings"))
    yield made
    made.launcher.close()


def test_finally_with_and_atexit_run(endings: Endings) -> None:
    assert endings.first.outcome is Outcome.MEASURED, endings.first.message
    marks = sorted(path.name for path in endings.folder.glob("[af]*-[01]"))
    assert marks == ["atexit-0", "atexit-1", "finally-0", "finally-1"]


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
def test_no_ending_changes_the_outcome_or_takes_long(endings: Endings, tmp_path: Path, ending: str) -> None:
    began = time.monotonic()
    report = endings.run(ending, tmp_path)
    assert report.outcome is Outcome.MEASURED, report.message
    assert report.exit_s < 12.0
    assert time.monotonic() - began < 120.0
