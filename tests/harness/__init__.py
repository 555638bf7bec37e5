"""What tests of several folders share: nothing here is a test.

Simulated studies:
    simulated: ``SimulatedLauncher``, a launcher that simulates launches from a landscape; benchmarks use it, too.
    landscapes: ``Hill``, the small landscape that simulated launches meet.
    studies: ``StudyBench`` runs sessions in this process, in one database.
    entry_points: ``EntryPointBench`` lets the command line and ``tune()`` search over a simulated landscape.
    reports: ``ReportedStudyBench``, studies with the logs of launches; the dashboard's command as a process.
    worker, workers: a worker as a process of its own; ``WorkerBench`` starts several on one study, ``StoredStudy``
        reads what became of it.
    forks: ``ForkedProcess``, a process that finds its imports ready.
    small_model: a model and a machine with known memory and times, to drive samplers; its planner.

Launches and ranks:
    launches: requests of launches and their updates, for every launcher.
    ranks: ``Starter`` runs scripts under the runtime, alone or by torchrun.
    meter: ``MeterBench``, the runtime's meter on stub engines, with a clock that moves when told.
    commands: ``Command``, the real command in a process of its own, with real launches.

Machines and programs:
    databases: SQLite files, and a PostgreSQL server that the suite starts.
    nvml_machine: GPUs of a test: the real ``pynvml`` on the stand-in that is built from ``nvml.c``.
    terminal, browser: a pseudo-terminal with a process in it; a headless browser.
"""
