"""Helpers shared by tests of several folders; contains no tests.

Simulated studies:
    simulated: ``SimulatedLauncher``, a launcher that simulates launches from a landscape; also used by benchmarks.
    landscapes: ``Hill``, a small landscape for simulated launches.
    studies: ``StudyBench`` runs sessions in this process, in a single database.
    entry_points: ``EntryPointBench`` lets the command line and ``tune()`` search over a simulated landscape.
    reports: ``ReportedStudyBench``, studies with the logs of launches; the dashboard's command as a process.
    waits: waiting for a condition, and for the end of a process.
    worker, workers: a worker as a separate process; ``WorkerBench`` starts several on the same study, ``StoredStudy``
        reads the outcome.
    forks: ``ForkedProcess``, a process forked with its imports already loaded.
    small_model: a model and a machine with known memory and times, to drive samplers; its planner.

Launches and ranks:
    launches: launch requests and their updates, for every launcher.
    events: events and reports of launches, with every field filled in.
    ranks: ``Starter`` runs scripts under the runtime, alone or with torchrun.
    meter: ``MeterBench``, the runtime's meter on stub engines, with a manually advanced clock.
    commands: ``Command``, the real command in a separate process, with real launches.

Machines and programs:
    databases: SQLite files, and a PostgreSQL server that the suite starts.
    nvml_machine: GPUs for tests: the real ``pynvml`` on a fake NVML library built from ``nvml.c``.
    terminal, browser: a pseudo-terminal with a process in it; a headless browser.
"""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


def present(value: _T | None) -> _T:
    """Return a value that must not be None."""
    assert value is not None
    return value
