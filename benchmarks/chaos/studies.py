"""One study under fire: tuners of a tiny script on the CPU, killed or stopped at random moments until it is over."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaos.checks import Ended, State, finished_of, given_up, violations
from optuna_dsat.launch.machine.processes import find_marked
from optuna_dsat.launch.machine.shared_memory import shared_memory_of
from optuna_dsat.runtime.agent import fork_server, torchrun

BUDGET = 4
NAME = "chaos"
RANKS = 2
LIMIT_S = 1200.0
"""How long a tuner that nothing befalls any more may take."""
PATIENCE_S = 15.0
"""How long processes and files may take to be gone."""
_PAUSES_S = (0.0, 2.0)
"""Shortest and longest time from the moment at which a role is there to the blow."""
ROLE_S = 120.0
"""How long a role is waited for."""

ROLES = ("tuner", "warm parent", "agent", "rank")

_SCRIPT = """
import sys
import time

import deepspeed
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2)))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
for _ in range(200):
    time.sleep(0.05)
    loss = engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 32)).mean()
    engine.backward(loss)
    engine.step()
"""
_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "autotuning": {"max_train_micro_batch_size_per_gpu": 2},
}


STOP_S = 7.0
"""How long a tuner is stopped: longer than its heartbeat's interval."""
STOPS = 0.15
"""Share of the blows that stop a tuner instead of killing something."""
RESTARTS = 0.15
"""Share of the blows that restart the database's server instead, where there is one."""


@dataclass
class StudyUnderFire:
    """A study in a folder of its own.

    Args:
        folder: Empty.
        rng: Draws moments and victims.
        two: Whether a second tuner works on it.
        database: URL of its database; None for an SQLite file in the folder.
        restart: Restarts the database's server at once; None where there is none.
    """

    folder: Path
    rng: random.Random
    two: bool
    database: str | None = None
    restart: Callable[[], None] | None = None
    blows: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    """Trials that were not launched again at its end, since each of their launches was killed."""
    _tuners: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _all: list[int] = field(default_factory=list)
    _seen: dict[int, State] = field(default_factory=dict)
    _memory: set[Path] = field(default_factory=set)
    """Files in shared memory that its launches were seen to use."""

    @property
    def url(self) -> str:
        """URL of its database."""
        return self.database or f"sqlite:///{self.folder}/study.db"

    def run(self, blows: int) -> list[str]:
        """Let up to ``blows`` blows befall the study, then let it end; return what does not hold then."""
        (self.folder / "train.py").write_text(_SCRIPT)
        (self.folder / "ds.json").write_text(json.dumps(_CONFIG))
        (self.folder / "tmp").mkdir()
        self._tuner(*self._search())
        for _ in range(blows):
            self._keep_going()
            self._strike()
            if all(tuner.poll() == 0 for tuner in self._tuners):
                break
        code = self._finish()
        self.given_up = given_up(self.url, NAME) if code == 0 else 0
        return violations(self._ended(code), url=self.url, name=NAME, budget=BUDGET, output=self._output)

    @property
    def _output(self) -> Path:
        return self.folder / "optuna-dsat-output"

    def _search(self) -> tuple[str, ...]:
        options = ("--cpu-ranks", str(RANKS), "--zero-stages", "1", "2", "--no-tune", "offload_optimizer")
        limits = ("--max-trials", str(BUDGET), "--confirm", "0", "--metric", "throughput", "--max-retries", "3")
        steps = ("--start-profile-step", "2", "--end-profile-step", "4", "--quiet")
        named = ("--study", NAME, "--storage", self.url)
        return ("random", "train.py", "ds.json", *named, *options, *limits, *steps, "--", "ds.json")

    def _tuner(self, *arguments: str) -> None:
        number = len(self._all)
        with (self.folder / f"tuner-{number}.stderr").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", "from optuna_dsat.cli import main; main()", *arguments],
                cwd=self.folder,
                env={**os.environ, "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self._tuners.append(process)
        self._all.append(process.pid)

    def _keep_going(self) -> None:
        """Start a tuner where none is left, and the second one once the study is there."""
        self._tuners = [tuner for tuner in self._tuners if tuner.poll() in (None, 0)]
        alive = [tuner for tuner in self._tuners if tuner.returncode is None]
        done = [tuner for tuner in self._tuners if tuner.returncode == 0]
        if not alive and not done:
            self._go_on()
        elif self.two and len(alive) == 1 and not done and finished_of(self.url, NAME):
            self._tuner("worker", NAME, "--storage", self.url, "--quiet")

    def _go_on(self) -> None:
        """Resume the study; where no trial has ended the same command is given again, as the study may not be there."""
        there = bool(finished_of(self.url, NAME))
        self._tuner(*(("resume", NAME, "--storage", self.url, "--quiet") if there else self._search()))

    def _wait(self, seconds: float) -> None:
        """Wait, and remember what was finished meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(tuner.poll() is None for tuner in self._tuners):
            self._memory |= shared_memory_of(marked_of(self._all))
            time.sleep(0.2)
        self._remember()

    def _remember(self) -> None:
        for number, was in finished_of(self.url, NAME).items():
            self._seen.setdefault(number, was)

    def _strike(self) -> None:
        """Kill a process of a role that is drawn first, at a random moment once there is one, or stop a tuner.

        Or restart the database's server at a random moment while tuners work.
        """
        if self.restart is not None and self.rng.random() < RESTARTS:
            self._wait(self.rng.uniform(*_PAUSES_S) + self.rng.uniform(*_PAUSES_S))
            if any(tuner.poll() is None for tuner in self._tuners):
                self.restart()
                self.blows["restarted server"] += 1
            return
        stop = self.rng.random() < STOPS
        role = "tuner" if stop else self.rng.choice(ROLES)
        deadline = time.monotonic() + ROLE_S
        while not self._of(role) and time.monotonic() < deadline:
            if all(tuner.poll() is not None for tuner in self._tuners):
                return
            self._wait(0.5)
        self._wait(self.rng.uniform(*_PAUSES_S))
        if not (result := self._of(role)):
            return
        victim = self.rng.choice(result)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if stop else signal.SIGKILL)
            self.blows["stopped tuner" if stop else role] += 1
            if stop:
                time.sleep(STOP_S)
                os.kill(victim, signal.SIGCONT)

    def _of(self, role: str) -> list[int]:
        """Return the living processes of a role."""
        alive = [tuner.pid for tuner in self._tuners if tuner.poll() is None]
        return roles_of(alive).get(role, [])

    def _finish(self) -> int | None:
        """Let the study end; return the exit code of the last tuner, None if it hung."""
        self._keep_going()
        deadline = time.monotonic() + LIMIT_S
        while any(tuner.poll() is None for tuner in self._tuners) and time.monotonic() < deadline:
            time.sleep(0.2)
        hung = [tuner for tuner in self._tuners if tuner.poll() is None]
        for tuner in hung:
            tuner.kill()
            tuner.wait()
        if hung:
            return None
        concluded = (self._output / NAME / "best_ds_config.json").exists()
        if not concluded or all(tuner.returncode for tuner in self._tuners):
            self._tuners.clear()  # only workers came to the end, or the last blow hit the last tuner
            self._go_on()
            return self._tuners[0].wait(LIMIT_S)
        return max(tuner.returncode for tuner in self._tuners)

    def _memory_left(self) -> set[Path]:
        """Return what its launches used in shared memory and no living process has open or mapped."""
        return {path for path in self._memory if path.exists()} - shared_memory_of(psutil.pids())

    def _ended(self, code: int | None) -> Ended:
        deadline = time.monotonic() + PATIENCE_S
        while (marked_of(self._all) or self._memory_left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        folder = self.folder / "tmp"
        return Ended(
            code=code,
            seen=self._seen,
            processes=tuple(marked_of(self._all)),
            shared_memory=tuple(sorted(map(str, self._memory_left()))),
            temporary=tuple(str(path.relative_to(folder)) for path in folder.rglob("*") if _is_left(path)),
            stderr="".join(
                path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.glob("*.stderr"))
            ),
        )


def _is_left(path: Path) -> bool:
    """Whether a file of the temporary folder is more than a folder or an empty lock that is kept for the next start."""
    return path.is_file() and path.stat().st_size > 0


def roles_of(tuners: Iterable[int]) -> dict[str, list[int]]:
    """Return the living processes of tuners, by their roles."""
    result: dict[str, list[int]] = {role: [] for role in ROLES}
    for tuner in tuners:
        try:
            result["tuner"].append(psutil.Process(tuner).pid)
            for role, pid in _below(psutil.Process(tuner)):
                result[role].append(pid)
        except psutil.Error:
            continue
    return {role: pids for role, pids in result.items() if pids}


def _below(tuner: psutil.Process) -> Iterator[tuple[str, int]]:
    """Yield the processes that a tuner started: a warm parent forks agents, an agent starts ranks."""
    for child in tuner.children():
        if fork_server.__name__ in child.cmdline():
            yield "warm parent", child.pid
            agents = child.children()
        else:
            agents = [child] if _is_agent(child) else []
        for agent in agents:
            yield "agent", agent.pid
            yield from (("rank", rank.pid) for rank in agent.children())


def _is_agent(process: psutil.Process) -> bool:
    return torchrun.__name__ in process.cmdline()


def marked_of(tuners: Iterable[int]) -> list[int]:
    """Return the living processes that carry the mark of one of these tuners."""
    numbers = {str(tuner) for tuner in tuners}
    return [item.key.pid for item in find_marked() if item.mark.split(":")[1] in numbers]
