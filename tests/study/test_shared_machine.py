"""A search on a machine whose slots others hold, and in a folder that is one study's at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from optuna.trial import TrialState

from optuna_dsat.errors import UsageError
from optuna_dsat.launch import follow
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.protocol import Holder, LaunchRequest, LaunchUpdate, SlotsBusyError
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.study import folder as study_folder
from optuna_dsat.study.folder import MARK, held_folder
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench

SLEEPER = Holder(device="GPU 1", who="process 4711 (sleep, user anna)")


class Shared(SimulatedLauncher):
    """A simulated machine of which somebody else takes every slot after so many launches, for so many looks."""

    def __init__(self, hill: Hill, *, after: int, looks: int = 10**9, shows: str = "at once") -> None:
        super().__init__(hill, total_slots=2)
        self._left = after
        self._looks = looks
        self._shows = shows
        """When it shows: ``at once``, at the ``start`` of a launch, or when one was ``taken`` that was to follow
        another."""
        self._taken: list[LaunchRequest] = []

    @property
    def _held(self) -> bool:
        return self._left <= 0 and self._looks > 0

    @property
    def free_slots(self) -> int:
        return 0 if self._held and self._shows == "at once" else super().free_slots

    @property
    def waiting(self) -> Sequence[str]:
        return [request.launch_id for request in self._taken]

    def holders(self) -> Sequence[Holder]:
        if not self._held:
            return ()
        self._looks -= 1
        return (SLEEPER,)

    def start(self, request: LaunchRequest) -> None:
        if self._held and self._shows == "taken":
            self._taken.append(request)
        elif self._held:
            raise SlotsBusyError("taken")
        else:
            super().start(request)
            self._left -= 1

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        if self._taken and not self._held:
            self.start(self._taken.pop())
        return super().poll(timeout_s)


def search(bench: StudyBench, spec: StudySpec, launcher: Shared) -> None:
    bench.session(spec, launcher).run()


def launched(bench: StudyBench) -> list[str]:
    """Return the configurations of the trials that were launched to an end of their own."""
    return [
        trial.user_attrs[attributes.CONFIG_KEY]
        for trial in bench.study().trials
        if trial.user_attrs.get(attributes.OUTCOME, Outcome.LOST) != Outcome.LOST
    ]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_RETRY_S", 0.0)
    monkeypatch.setattr(follow, "_QUIET_S", 0.0)
    monkeypatch.setattr(study_folder, "_PAUSE_S", 0.0)


def test_a_search_says_for_whom_it_waits_and_then_goes_on(bench: StudyBench) -> None:
    search(bench, bench.spec(max_trials=2, confirm=0), Shared(Hill(), after=0, looks=3))
    search(bench, bench.spec(max_trials=3, confirm=0), Shared(Hill(), after=0, looks=2, shows="taken"))
    search(bench, bench.spec(max_trials=4, confirm=0), Shared(Hill(), after=0, looks=1, shows="start"))
    words = [text for text in bench.messages if "Waiting for 2 free slots" in text]
    assert len(words) == 3
    assert all("Not free: GPU 1: process 4711 (sleep, user anna)." in text for text in words)
    assert attributes.launches_used(bench.study().trials) == 4


def test_a_profile_launch_waits_no_longer_than_it_may(bench: StudyBench) -> None:
    with pytest.raises(DeviceError, match=r"process 4711 .*`optuna-dsat resume s`"):
        search(bench, bench.spec(wait_for_gpus_s=0.0), Shared(Hill(), after=0))


@pytest.mark.parametrize("shows", ["at once", "start", "taken"])
def test_a_search_that_the_limit_ends_loses_nothing(bench: StudyBench, shows: str) -> None:
    spec = bench.spec(max_trials=4, confirm=0)
    with pytest.raises(DeviceError, match="process 4711"):
        search(bench, spec.model_copy(update={"wait_for_gpus": 0.0}), Shared(Hill(), after=3, shows=shows))
    trials = bench.study().trials
    assert TrialState.RUNNING not in {trial.state for trial in trials}
    assert len(launched(bench)) == 2
    more = Hill()
    assert bench.run(spec, more) is not None
    assert len(more.configs) == 2
    assert len(set(launched(bench))) == len(launched(bench)) == 4


@pytest.mark.parametrize("shows", ["at once", "taken"])
def test_finalists_wait_no_longer_either(bench: StudyBench, shows: str) -> None:
    spec = bench.spec(max_trials=2, confirm=1, wait_for_gpus_s=0.0)
    with pytest.raises(DeviceError, match="process 4711"):
        search(bench, spec, Shared(Hill(), after=3, shows=shows))
    assert len(launched(bench)) == 2


def owner(folder: Path) -> str:
    return str(json.loads((folder / MARK).read_text())["study_uuid"])


def test_tuners_of_one_study_share_its_folder_and_those_of_another_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "s"
    with held_folder(folder, "one"), held_folder(folder, "one"):
        with pytest.raises(UsageError, match="--output-dir"), held_folder(folder, "another"):
            pass
        assert owner(folder) == "one"
    with held_folder(folder, "another"), pytest.raises(UsageError), held_folder(folder, "one"):
        pass
    assert owner(folder) == "another"


def test_a_folder_that_cannot_be_made_is_left_to_whoever_writes_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with held_folder(tmp_path / "file" / "s", "one"):
        pass


def test_a_study_of_the_same_name_in_another_database_launches_nothing_there_meanwhile(
    bench: StudyBench, tmp_path: Path
) -> None:
    spec = bench.spec(max_trials=2, confirm=0)
    with ExitStack() as stack:
        other = StudyBench(bench.folder, stack.enter_context(Store.open(f"sqlite:///{tmp_path}/other.db")))
        stack.enter_context(held_folder(spec.study_dir, "that of the first"))
        with pytest.raises(UsageError, match="Another study writes to"):
            other.run(spec, Hill())
    launcher = SimulatedLauncher(Hill(), total_slots=2)
    assert bench.session(spec, launcher).run() is not None
