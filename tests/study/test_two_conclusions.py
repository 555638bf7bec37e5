"""Of several tuners that come to the end of a study, one at a time launches its finalists."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import update

from optuna_dsat.store import Store
from optuna_dsat.store.tables import HeartbeatRow
from optuna_dsat.study import conclusion
from optuna_dsat.study.progress import FinalistStarted, Message, ProgressEvent
from optuna_dsat.study.stored import record_of
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench

pytestmark = pytest.mark.usefixtures("in_sqlite")


def confirmed(bench: StudyBench) -> int:
    record = record_of(bench.store, "s")
    return sum(launch.purpose == "confirm" for launch in bench.store.launches(record.uuid))


def launcher() -> SimulatedLauncher:
    return SimulatedLauncher(Hill(), total_slots=2)


def take_turn(store: Store) -> None:
    """Have another worker of this machine, which has ended since, take the turn of the frozen one."""
    with store._database.engine.begin() as connection:
        connection.execute(update(HeartbeatRow).values(pid=2**22 + 1, worker="another:1"))


def test_one_waits_while_another_confirms_the_finalists(bench: StudyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conclusion, "_WAIT_S", 0.01)
    text = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, Message) and "Another worker" in event.text:
            text.append(confirmed(bench))
            other.close()

    session = bench.session(bench.spec(max_trials=3, confirm=1), launcher(), observer=observe)
    with ExitStack() as stack:
        other, turn = stack.enter_context(ExitStack()), stack.enter_context(Store.open(bench.store.url))
        assert other.enter_context(turn.conclusion_turn(record_of(bench.store, "s").uuid))
        result = session.run()
    assert text == [0], "nothing was launched before it was said, and that once"
    assert result is not None
    assert confirmed(bench) > 0


def test_one_that_stood_still_overwrites_nothing_of_who_took_over(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conclusion, "_WAIT_S", 0.01)
    frozen: list[dict[str, Any]] = []
    words: list[str] = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, FinalistStarted) and not frozen:
            take_turn(bench.store)
            with Store.open(bench.store.url) as other:
                StudyBench(bench.folder, other).run(spec, Hill())
            frozen.append(bench.study().user_attrs[attributes.CONFIRMATION])
        elif isinstance(event, Message):
            words.append(event.text)

    spec = bench.spec(max_trials=3, confirm=1)
    bench.run_by(launcher(), spec, observer=observe)
    assert bench.study().user_attrs[attributes.CONFIRMATION] == frozen[0]
    assert any("took the confirmation over" in text for text in words)
    assert confirmed(bench) == len(frozen[0]["launches"])


def test_ctrl_c_ends_the_wait(bench: StudyBench) -> None:
    def observe(event: ProgressEvent) -> None:
        if isinstance(event, Message) and "Another worker" in event.text:
            raise KeyboardInterrupt

    session = bench.session(bench.spec(max_trials=3, confirm=1), launcher(), observer=observe)
    with Store.open(bench.store.url) as store, store.conclusion_turn(record_of(bench.store, "s").uuid):
        assert session.run() is not None, "what the search found"
    assert session.interrupted
    assert confirmed(bench) == 0
