"""Ctrl-C between any two steps of a trial leaves none running, and loses no result."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_dsat.outcome import Outcome
from optuna_dsat.signals import handling
from optuna_dsat.store import Store
from optuna_dsat.store.leases import Heartbeat
from optuna_dsat.study.progress import uninterrupted
from optuna_dsat.study.search.recorder import TrialRecorder
from optuna_dsat.study.search.running import Flights
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedResult
from tests.harness.studies import StudyBench


@contextmanager
def ctrl_c_after(owner: Any, name: str, *, call: int = 2) -> Iterator[list[int]]:
    """Within the block, Ctrl-C is pressed at the end of the given call of a method; yield the list of its calls."""
    original = getattr(owner, name)
    calls: list[int] = []

    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(len(calls) + 1)
        if calls[-1] == call:
            signal.raise_signal(signal.SIGINT)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, method)
        yield calls


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (optuna.Study, "ask"),
        (Store, "claim"),
        (SimulatedLauncher, "start"),
        (Flights, "start"),
        (Flights, "land"),
        (TrialRecorder, "record_steps"),
        (optuna.Study, "tell"),
        (Heartbeat, "remove"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_no_trial_is_left_running(bench: StudyBench, owner: Any, name: str) -> None:
    session = bench.session(bench.spec(max_trials=3, confirm=0), SimulatedLauncher(Hill(), total_slots=2))
    with ctrl_c_after(owner, name) as calls:
        session.run()
    assert len(calls) >= 2
    assert session.interrupted
    trials = bench.study().get_trials(deepcopy=False)
    assert [trial.number for trial in trials if trial.state is TrialState.RUNNING] == []
    waiting = {trial.system_attrs["retry_history"][-1] for trial in trials if trial.state is TrialState.WAITING}
    lost = {trial.number for trial in trials if trial.state is TrialState.FAIL}
    assert waiting == lost, "what was returned waits to be run"


def test_a_launch_that_is_repeated_is_returned(bench: StudyBench) -> None:
    flaky = SimulatedResult(outcome=Outcome.COMMUNICATION_ERROR, startup_s=1, message="connection reset")
    hill = Hill(override=lambda _: flaky if len(hill.configs) == 2 else None)
    session = bench.session(bench.spec(max_trials=2, confirm=0), SimulatedLauncher(hill, total_slots=2))
    with ctrl_c_after(TrialRecorder, "record_steps", call=1):
        session.run()
    first, copy = bench.study().get_trials(deepcopy=False)[:2]
    assert (first.state, copy.state) == (TrialState.FAIL, TrialState.WAITING)


@pytest.mark.parametrize(
    ("came", "done"),
    [
        ([signal.SIGINT], True),
        ([signal.SIGINT, signal.SIGINT], False),
        ([signal.SIGTERM, signal.SIGTERM], True),
        ([signal.SIGQUIT, signal.SIGQUIT], False),
        ([signal.SIGTERM, signal.SIGINT], False),
    ],
)
def test_a_second_request_to_stop_waits_for_nothing(came: list[signal.Signals], done: bool) -> None:
    steps: list[str] = []

    def work() -> None:
        with handling(came, signal.default_int_handler), uninterrupted():
            for number in came:
                signal.raise_signal(number)
            steps.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert bool(steps) is done


def test_signals_that_are_ignored_stay_so() -> None:
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_of_a_block_are_put_back_whatever_ends_it() -> None:
    came: list[int] = []

    def at_once() -> None:
        with handling((signal.SIGTERM,), lambda number, _frame: came.append(number)):
            signal.raise_signal(signal.SIGTERM)
            raise OSError("in the block")

    def elsewhere() -> None:
        with handling((signal.SIGTERM,), print):  # which only the main thread may do: nothing is put in place
            came.append(0)

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        own = signal.getsignal(signal.SIGTERM)
        with pytest.raises(OSError, match="in the block"):
            at_once()
        assert signal.getsignal(signal.SIGTERM) is own
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM, 0]
