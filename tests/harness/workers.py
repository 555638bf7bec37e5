"""Workers on the same study, each a process with a simulated landscape, and the study's outcome."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.study.stored import record_of
from optuna_dsat.trials import attributes
from tests.harness.forks import ForkedProcess
from tests.harness.worker import STUDY, Launched, Options, launches_file


class WaitingProcess:
    """A module in a separate process, which says when it is ready and goes on when told to."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = ForkedProcess(module, *arguments)

    def wait_ready(self) -> str:
        line = self.process.stdout.readline()
        assert line.startswith("ready"), self.process.communicate()[1]
        return line.strip()

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self) -> str:
        output, errors = self.process.communicate()
        assert self.process.returncode == 0, errors
        return output

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class WorkerProcess(WaitingProcess):
    """A worker over a simulated landscape."""

    def __init__(self, options: Options) -> None:
        super().__init__("tests.harness.worker", json.dumps(asdict(options)))

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, kw_only=True)
class StoredStudy:
    """State of a study in its database, and its started launches."""

    trials: Sequence[FrozenTrial]
    measured: Sequence[str]
    """Canonical keys of the measured configurations, without the trial that simplifies the best, as in the budget."""
    recorded: int
    """Number of launches in the store's record, without lost trials."""

    @classmethod
    def read(cls, url: str, name: str = STUDY) -> StoredStudy:
        with Store.open(url) as store:
            trials = optuna.load_study(study_name=name, storage=store.storage).get_trials(deepcopy=False)
            record = record_of(store, name)
            launches = store.launches(record.uuid)
        done = [
            t
            for t in trials
            if t.user_attrs.get(attributes.OUTCOME, Outcome.LOST) != Outcome.LOST
            and attributes.SIMPLIFIES not in t.user_attrs
        ]
        numbers = {trial.number for trial in done}
        return cls(
            trials=trials,
            measured=[trial.user_attrs[attributes.CONFIG_KEY] for trial in done],
            recorded=sum(row.purpose == "trial" and row.trial_number in numbers for row in launches),
        )

    @property
    def lost(self) -> list[FrozenTrial]:
        return [trial for trial in self.trials if trial.user_attrs.get(attributes.OUTCOME) == Outcome.LOST]

    def check_whole(self, *, budget: int) -> None:
        """Check that exactly the budget was spent, on different configurations, without leftovers."""
        assert [t.number for t in self.trials if t.state in (TrialState.RUNNING, TrialState.WAITING)] == []
        assert [key for key, count in Counter(self.measured).items() if count > 1] == []
        assert len(self.measured) == budget
        assert self.recorded == budget


class WorkerBench:
    """Starts workers on a study, and reads its outcome; needs the fixture ``forks``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._drivers: list[WorkerProcess] = []

    def driver(self, url: str, **options: Any) -> WorkerProcess:
        driver = WorkerProcess(Options(url=url, folder=str(self.folder), **options))
        self._drivers.append(driver)
        return driver

    def run(self, drivers: Sequence[WorkerProcess]) -> None:
        """Start workers simultaneously."""
        for driver in drivers:
            driver.wait_ready()
        for driver in drivers:
            driver.go()

    def launched(self, purpose: str = "trial") -> list[Launched]:
        """Return the started launches, in order."""
        file = launches_file(self.folder)
        lines = file.read_text().splitlines() if file.exists() else []
        notes = [Launched(**json.loads(line)) for line in lines]
        return [note for note in notes if note.purpose == purpose]

    def by(self, driver: WorkerProcess) -> list[Launched]:
        return [note for note in self.launched() if note.pid == driver.pid]

    def end(self) -> None:
        for driver in self._drivers:
            driver.kill()
