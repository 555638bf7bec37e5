"""The stored form of a profile."""

from __future__ import annotations

from optuna_dsat.study.profile import Profiled
from optuna_dsat.study.stored import read_stored
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench


def test_a_profile_that_an_older_version_stored_is_read(bench: StudyBench) -> None:
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    profiled = read_stored(bench.store, "s").profiled
    assert profiled is not None
    record = profiled.to_json()
    assert Profiled.from_json(record) == profiled
    older = {("rung" if key == "measured_with" else key): value for key, value in record.items()}
    assert "rung" in older
    assert Profiled.from_json(older) == profiled
