"""Other activity on the machine while a launch's steps are measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.machine import host
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.machine.host import BesideWatch, busy_seconds
from optuna_dsat.launch.machine.processes import cpu_seconds, new_mark
from optuna_dsat.launch.machine.slots import SlotPool
from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.runtime.agent.processes import MARK_ENV, ProcessKey
from optuna_dsat.runtime.events import Event, EventWriter, RankStarted
from tests.harness import present
from tests.harness.events import engine, step_of
from tests.harness.launches import followed, processes_of
from tests.harness.nvml_machine import Machine, uuid
from tests.harness.waits import wait_until

AGENT, RANK, WORKER, LATE = (ProcessKey(pid, 1) for pid in (10, 11, 12, 13))


class Computer:
    """A machine of two cores with settable clock and CPU times; the ranks use the given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 100.0
        self.busy_s = 5000.0
        self.cpu_s: dict[ProcessKey, float] = {AGENT: 1.0, RANK: 40.0, WORKER: 7.0}
        self.searches = 0
        monkeypatch.setattr(host, "busy_seconds", lambda _: self.busy_s)
        monkeypatch.setattr(host, "cpu_seconds", self.cpu_s.get)

    def watch(self, **changes: object) -> BesideWatch:
        known: dict[str, object] = {
            "start_profile_step": 3,
            "end_profile_step": 400,
            "ranks": lambda: [RANK],
            "find": self._find,
        }
        return BesideWatch(**{**known, **changes}, cores={0, 1}, clock=lambda: self.time)  # type: ignore[arg-type]

    def _find(self) -> set[ProcessKey]:
        self.searches += 1
        return set(self.cpu_s)

    def passes(self, seconds: float, *, others_s: float, **own_s: float) -> None:
        """Let time pass in which others and the launch's processes compute."""
        self.time += seconds
        self.busy_s += others_s + sum(own_s.values())
        for name, spent in own_s.items():
            self.cpu_s[globals()[name]] = self.cpu_s.get(globals()[name], 0.0) + spent


@pytest.fixture
def computer(monkeypatch: pytest.MonkeyPatch) -> Computer:
    return Computer(monkeypatch)


def ends(number: int, *, skipped: bool = False) -> list[Event]:
    return [step_of(step=number, skipped=skipped)]


def test_what_the_launch_did_not_use_is_others(computer: Computer) -> None:
    watch = computer.watch()
    watch.update([engine(), *ends(1)])
    computer.passes(9.0, others_s=9.0, RANK=9.0)  # the warm-up
    watch.update(ends(2))
    for number in (3, 4, 5):
        computer.passes(1.0, others_s=0.25, RANK=0.9, WORKER=0.1)
        watch.update(ends(number))
    result = watch.conditions
    assert (result.window_s, result.cores) == (3.0, 2)
    assert result.others_cpu_s == pytest.approx(0.75)
    assert result.others_share == pytest.approx(0.75 / 6.0)


def test_a_first_step_that_counts_is_watched_from_the_engine_on(computer: Computer) -> None:
    watch = computer.watch(start_profile_step=1)
    watch.update([engine()])
    computer.passes(2.0, others_s=0.5, RANK=2.0)
    watch.update(ends(1))
    assert watch.conditions.others_cpu_s == pytest.approx(0.5)


def test_skipped_steps_do_not_begin_the_watch(computer: Computer) -> None:
    watch = computer.watch()
    for number in range(2, 9):
        watch.update([step_of(step=number, skipped=True, skipped_before=number - 2)])
        computer.passes(1.0, others_s=1.0)
    assert watch.conditions == Conditions()


def test_processes_that_come_and_go_are_the_launchs_own(computer: Computer) -> None:
    watch = computer.watch()
    watch.update(ends(2))
    computer.passes(1.0, others_s=0.0, WORKER=0.5, RANK=1.0, LATE=0.25)
    watch.update(ends(3))
    computer.cpu_s.pop(WORKER)
    computer.passes(1.0, others_s=0.0, RANK=1.0, LATE=0.75)
    watch.update(ends(4))
    assert watch.conditions.others_cpu_s == pytest.approx(0.0)
    assert watch.conditions.window_s == 2.0


def test_the_watch_ends_before_a_rank_is_gone(computer: Computer) -> None:
    watch = computer.watch()
    watch.update(ends(2))
    computer.passes(1.0, others_s=0.5, RANK=1.0)
    watch.update(ends(3))
    computer.passes(1.0, others_s=0.0, RANK=1.0)
    computer.cpu_s.pop(RANK)
    watch.update(ends(4))
    assert watch.conditions.window_s == 1.0
    assert watch.conditions.others_cpu_s == pytest.approx(0.5)


def test_steps_of_too_short_a_time_tell_nothing(computer: Computer) -> None:
    watch = computer.watch()
    for number in (2, 3, 4):
        watch.update(ends(number))
        computer.passes(0.2, others_s=0.2)
    assert watch.conditions.others_cpu_s is None


def test_many_short_steps_cost_few_readings(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = computer.watch()
    readings: list[float] = []
    monkeypatch.setattr(host, "busy_seconds", lambda _: readings.append(computer.time) or 0.0)  # type: ignore[func-returns-value]
    for number in range(2, 302):
        watch.update(ends(number))
        computer.passes(0.01, others_s=0.0)
    assert 25 <= len(readings) <= 31
    assert computer.searches == 3


def test_what_gpus_show_at_any_time_is_kept_once(computer: Computer) -> None:
    sights = iter(
        [
            Conditions(throttle_reasons=("power limit on GPU 0",)),
            Conditions(gpu_processes=("process 9 on GPU 0",), throttle_reasons=("power limit on GPU 0",)),
            Conditions(),
        ]
    )
    watch = computer.watch(look=lambda own: next(sights) if 11 in own else Conditions())
    for number in (2, 3, 4):
        watch.update(ends(number))
        computer.passes(1.0, others_s=0.0)
    assert watch.conditions.gpu_processes == ("process 9 on GPU 0",)
    assert watch.conditions.throttle_reasons == ("power limit on GPU 0",)


def test_power_is_read_at_the_ends_of_the_counted_steps_and_each_second(computer: Computer) -> None:
    read: list[float] = []

    def counter_j() -> float:
        read.append(computer.time)
        return 1e6 + 300 * computer.time

    watch = computer.watch(energy_j=counter_j, end_profile_step=32)
    for number in range(1, 33):
        computer.passes(0.0625, others_s=0.0)
        watch.update([*ends(number), *ends(number)])  # of two ranks
    computer.passes(50.0, others_s=0.0)
    watch.update(ends(32))  # of a rank read late
    assert watch.conditions.power_w == pytest.approx(300.0)
    assert read == [100.125, 101.125, 102.0], "after the warm-up, a second later and at the end"


def test_power_is_unknown_without_counters_or_in_too_short_a_time(computer: Computer) -> None:
    for known in ({}, {"energy_j": lambda: 300 * computer.time}):
        watch = computer.watch(end_profile_step=3, **known)
        for number in (2, 3):
            watch.update(ends(number))
            computer.passes(0.4, others_s=0.0)
        assert watch.conditions.power_w is None


@pytest.fixture
def burner() -> Iterator[subprocess.Popen[bytes]]:
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process
    process.kill()
    process.wait()


def test_cpu_time_is_the_kernels_and_outlives_the_process(burner: subprocess.Popen[bytes]) -> None:
    cores = os.sched_getaffinity(0)
    before, key = busy_seconds(cores), ProcessKey.of(burner.pid)
    assert key is not None
    wait_until(lambda: not key.alive, what="it has ended")
    spent, after = cpu_seconds(key), busy_seconds(cores)
    assert 0.3 <= present(spent) < 3.0  # it was not waited for
    assert present(after) - present(before) >= 0.2
    assert cpu_seconds(ProcessKey(key.pid, key.start_ticks - 1)) is None


def test_others_on_a_launchs_gpu_and_low_clocks_are_named(machine: Machine) -> None:
    machine.gpus(2)
    pool = machine.pool()
    lease = pool.take(1)
    machine.gets(f"process 0 compute {os.getpid()} 900", "process 0 compute 4194301 500", "clocks 0 65")
    sight = pool.sight(lease, {os.getpid()})
    assert sight.gpu_processes == ("process 4194301 (far-4194301) on GPU 0",)
    assert sight.throttle_reasons == (
        "power limit on GPU 0",
        "temperature (driver) on GPU 0",
        "temperature (hardware) on GPU 0",
    )


def test_idle_clocks_and_a_users_own_are_no_throttling(machine: Machine) -> None:
    machine.gets("clocks 0 103")
    assert machine.nvml().throttle_reasons("0") == ()


def test_an_older_driver_tells_low_clocks_by_the_older_name(machine: Machine) -> None:
    machine.gets("clocks 0 80")
    assert machine.nvml(driver="old").throttle_reasons("0") == ("power brake",)


def test_where_the_launch_itself_is_not_listed_nobody_is_another(machine: Machine) -> None:
    machine.has(f"gpu {uuid(0)} 81559 4 NVIDIA H100")
    pool = machine.pool()
    lease = pool.take(1)
    machine.gets("process 0 compute 4194301 500", "refuse nvmlDeviceGetCurrentClocksEventReasons 15")
    assert pool.sight(lease, {os.getpid()}) == Conditions()


def test_the_energy_of_a_launch_is_that_of_all_its_gpus_or_unknown(machine: Machine) -> None:
    machine.gets("power 0 300")
    pool = machine.pool()
    both = pool.take(2)
    assert pool.energy_j(both) is None, "GPU 1 counts none"
    machine.gets("power 1 50")
    used_j = pool.energy_j(both)
    assert used_j == pytest.approx(350 * time.monotonic(), rel=0.01)
    machine.gets("refuse nvmlDeviceGetTotalEnergyConsumption 15 0")
    assert pool.energy_j(both) is None, "a lost GPU is no error"
    on_cpu = SlotPool(cpu_devices(2))
    assert on_cpu.energy_j(on_cpu.take(2)) is None


def test_a_launch_knows_what_went_on_beside_it(machine: Machine, tmp_path: Path) -> None:
    machine.gets("power 0 300", "power 1 50")
    began = time.monotonic()
    agent = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: (mark := new_mark())})
    launch = followed(tmp_path, agent, mark, pool=machine.pool(), end_profile_step=4)
    try:
        writer = EventWriter(launch.directory.events(0))
        writer.write(RankStarted(rank=0, time=1.0, local_rank=0, world_size=1, pid=agent.pid))
        for number in (1, 2, 3, 4):
            writer.write(step_of(step=number))
            launch.advance(time.monotonic())
            time.sleep(0.35)
    finally:
        processes_of(launch).close()
    seen = launch.conditions
    assert 0.7 <= present(seen.window_s) <= time.monotonic() - began
    assert seen.cores == len(os.sched_getaffinity(0))
    assert 0.0 <= present(seen.others_share) <= 1.05
    assert seen.power_w == pytest.approx(300.0, rel=0.01)
