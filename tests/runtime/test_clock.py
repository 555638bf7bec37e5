"""The step clock is independent of changes that a script makes to the module ``time``."""

from __future__ import annotations

import time

import pytest

from optuna_dsat.runtime.measure.clock import Clock


def test_a_script_that_stops_the_clock_is_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    clock = Clock()
    begun, start = clock.now(), clock.mark()
    sum(range(1000))
    assert clock.now() > begun
    assert clock.seconds(start, clock.mark()) > 0
