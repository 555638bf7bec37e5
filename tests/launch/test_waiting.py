from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from optuna_dsat.launch.follow import SlotWait
from optuna_dsat.launch.launch import WaitingLaunch
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine import owners
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.machine.owners import lock, lock_folder, lock_owner, lock_path, unlock
from optuna_dsat.launch.machine.slots import only_free
from optuna_dsat.launch.protocol import Finished, Holder
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.outcome import Outcome
from tests.harness import present
from tests.harness.launches import request
from tests.harness.nvml_machine import NOT_SUPPORTED, Machine, uuid

GIB = 2**30
SLEEPER = Holder(device="GPU 1", who="process 4711 (sleep, user anna)", used_bytes=5 * GIB)
TUNER = Holder(device="GPU 0", who="another optuna-dsat (process 812)", since=1.0)


class Wait:
    """A wait with a simulated clock."""

    def __init__(self, *holders: Holder, limit_s: float = 600.0, slots: int = 2, study: str = "") -> None:
        self.holders: Sequence[Holder] = holders
        self.now = 100.0
        self.notices: list[str] = []
        self.phases: list[str] = []
        self.wait = SlotWait(
            lambda: self.holders,
            slots=slots,
            limit_s=limit_s,
            study=study,
            on_notice=self.notices.append,
            on_phase=self.phases.append,
            clock=lambda: self.now,
        )

    def look(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.wait.check()


def test_a_wait_that_is_reported_is_a_phase_until_it_is_over() -> None:
    wait = Wait(SLEEPER)
    wait.look()
    wait.wait.reset()
    assert wait.phases == [], "too short to be reported"
    wait.look()
    wait.look(after_s=3.0)
    assert wait.phases == ["waiting for GPU 1"]
    wait.wait.reset()
    wait.wait.reset()
    assert wait.phases == ["waiting for GPU 1", ""]


@contextmanager
def process(name: str, folder: Path) -> Iterator[int]:
    """Run a sleeping process with this name until the end of the block."""
    program = folder / name
    program.symlink_to(sys.executable)
    child = subprocess.Popen(
        [str(program), "-c", "print(flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        present(child.stdout).readline()
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def test_two_seconds_of_waiting_are_told_once_with_who_holds_what() -> None:
    wait = Wait(TUNER, SLEEPER)
    wait.look()
    wait.look(1.9)
    assert wait.notices == []
    wait.look(0.1)
    wait.look(60.0)
    assert wait.notices == [
        "Waiting for 2 free slots, for 600 s at most while this does not change (--wait-for-gpus). Not free: GPU 0: "
        "another optuna-dsat (process 812); GPU 1: process 4711 (sleep, user anna), 5.00 GiB."
    ]


def test_who_holds_them_is_told_again_when_that_changes_not_when_their_memory_does() -> None:
    wait = Wait(SLEEPER)
    wait.look()
    wait.look(2.0)
    wait.holders = [Holder(device="GPU 1", who=SLEEPER.who, used_bytes=6 * GIB)]
    wait.look(1.0)
    assert len(wait.notices) == 1
    wait.holders = [TUNER]
    wait.look(1.0)
    assert "another optuna-dsat" in wait.notices[1]
    wait.holders = [Holder(device=TUNER.device, who=TUNER.who, since=2.0)]
    wait.look(1.0)
    assert len(wait.notices) == 2


def test_the_limit_counts_from_the_last_change_and_names_holders_and_remedies() -> None:
    wait = Wait(TUNER, SLEEPER, limit_s=10.0, study="llama")
    wait.look()
    wait.holders = [SLEEPER]
    wait.look(9.0)
    wait.look(9.9)
    with pytest.raises(DeviceError, match="there were too few in 10 s") as caught:
        wait.look(0.1)
    assert caught.value.exit_code == 1
    for part in (
        "GPU 1: process 4711 (sleep, user anna), 5.00 GiB",
        "--gpus-per-trial N",
        "CUDA_VISIBLE_DEVICES=",
        "--only-free-gpus",
        "optuna-dsat resume llama",
    ):
        assert part in str(caught.value)


def test_another_tuner_that_goes_on_launching_is_waited_for() -> None:
    wait = Wait(TUNER, limit_s=10.0)
    for launch in range(5):
        wait.holders = [Holder(device=TUNER.device, who=TUNER.who, since=float(launch))]
        wait.look(9.0)
    assert len(wait.notices) == 1


def test_a_limit_of_nothing_does_not_wait() -> None:
    with pytest.raises(DeviceError, match=r"there were too few\. Not free: GPU 1"):
        Wait(SLEEPER, limit_s=0.0).look()


def test_a_launch_of_the_same_search_that_ends_is_no_wait_for_others() -> None:
    wait = Wait(SLEEPER, Holder(device="GPU 0", who="a launch of this search", own=True), limit_s=0.0)
    wait.look()
    wait.look(9.0)
    assert wait.notices == []


def test_a_wait_that_is_over_begins_anew() -> None:
    wait = Wait(SLEEPER, limit_s=10.0, slots=1)
    wait.look()
    wait.look(5.0)
    wait.wait.reset()
    wait.look(9.0)
    wait.look(2.0)
    assert len(wait.notices) == 2
    assert "Waiting for a free slot," in wait.notices[1]


def test_processes_are_named_with_program_user_and_memory(machine: Machine, tmp_path: Path) -> None:
    pool = machine.pool()
    with process("train-llama", tmp_path) as pid:
        machine.gets(f"process 0 compute {pid} 5120", "process 1 compute 4194305 -")
        first, other = pool.holders()
    user = psutil.Process().username()
    assert first == Holder(device="GPU 0", who=f"process {pid} (train-llama, user {user})", used_bytes=5 * GIB)
    assert other == Holder(device="GPU 1", who="process 4194305 (far-4194305)")  # in another namespace: NVML names it
    machine.gets(f"refuse nvmlSystemGetProcessName {NOT_SUPPORTED}")
    assert pool.holders()[-1].who == "process 4194305"


def test_memory_in_use_without_a_process_has_an_unnamed_holder(machine: Machine) -> None:
    machine.has(f"gpu {uuid(0)} 81920 30720 NVIDIA H100 80GB HBM3")
    assert machine.pool().holders() == (
        Holder(device="GPU 0", who="a process that NVML does not name", used_bytes=30 * GIB),
    )


def test_the_server_of_the_multi_process_service_is_nobody_but_its_clients_are(
    machine: Machine, tmp_path: Path
) -> None:
    with process("nvidia-cuda-mps-server", tmp_path) as server:
        for gpu in (0, 1):
            machine.gets(f"process {gpu} compute {server} 30")
        pool = machine.pool()
        assert (pool.free, pool.holders()) == (2, ())
        machine.gets(f"process 1 compute {os.getpid()} 4000")
        assert pool.free == 1
        (holder,) = pool.holders()
        assert holder.who.startswith(f"process {os.getpid()} (")


def test_a_launch_of_this_search_and_another_tuner_are_told_apart(machine: Machine) -> None:
    first, other = machine.pool(), machine.pool(f"{uuid(0)},{uuid(1)}")
    lease = first.take(1)
    machine.gets(f"process 0 compute {os.getpid()} 4000")
    assert [(holder.device, holder.who) for holder in first.holders()] == [("GPU 0", "a launch of this search")]
    (holder,) = other.holders()
    assert (holder.device, holder.who) == ("GPU 0", f"another optuna-dsat (process {os.getpid()})")
    assert holder.since > 0
    first.give_back(lease)
    assert [holder.who.split()[0] for holder in other.holders()] == ["process"]


def test_one_gpu_has_one_lock_whichever_way_it_is_named(machine: Machine) -> None:
    first, other = machine.pool("0"), machine.pool(uuid(0)[:12])
    lease = first.take(1)
    with pytest.raises(RuntimeError, match="taken by another optuna-dsat"):
        other.take(1)
    first.give_back(lease)
    assert other.take(1).indices == (0,)


def test_a_lock_names_its_owner_while_that_lives(tmp_path: Path) -> None:
    path = lock_path(tmp_path, "MIG-GPU-aa/1/0")
    assert path.parent == tmp_path
    assert lock_owner(path) is None
    code = (
        "import sys, time; from pathlib import Path; from optuna_dsat.launch.machine.owners import lock\n"
        "held = lock(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        present(child.stdout).readline()
        owner = present(lock_owner(path))
        assert owner.pid == child.pid
        assert lock(path) is None
    finally:
        child.kill()
        child.communicate()
    assert lock_owner(path) is None
    held = present(lock(path))
    path.write_text(f"{2**22 + 1}\n")  # as of an ended process that could not overwrite it
    owner = present(lock_owner(path))
    assert owner.pid is None
    unlock([held])
    assert not path.exists()


def test_tuners_of_all_users_and_temporary_folders_lock_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lock_folder()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert lock_folder() == before != tmp_path
    monkeypatch.setattr(owners, "_FOLDERS", (str(tmp_path / "missing"),))
    assert lock_folder() == tmp_path
    path = lock_path(tmp_path, "GPU-1")
    before_umask = os.umask(0o077)
    held = present(lock(path))
    os.umask(before_umask)
    assert path.stat().st_mode & 0o777 == 0o666
    unlock([held])


def test_only_free_gpus_are_those_without_a_holder_and_the_others_are_named(machine: Machine) -> None:
    machine.gpus(4)
    machine.gets(f"process 1 compute {os.getpid()} 4000")
    other = machine.pool("2")
    lease = other.take(1)
    result = only_free(machine.detect(), nvml=machine.nvml(), lock_dir=machine.file.parent)
    assert (result.indices, result.per_launch) == ((0, 3), 2)
    (notice,) = result.notices
    assert notice.startswith("Tuning on GPU 0, 3 (--only-free-gpus). Not free: GPU 1: process ")
    assert "GPU 2: another optuna-dsat" in notice
    other.give_back(lease)
    machine.gets(*(f"process {gpu} compute {os.getpid()} 4000" for gpu in (0, 2, 3)))
    with pytest.raises(DeviceError, match="No GPU is free"):
        only_free(machine.detect(), nvml=machine.nvml(), lock_dir=machine.file.parent)


def test_all_gpus_are_taken_where_all_are_free(machine: Machine) -> None:
    result = machine.detect()
    assert only_free(result, nvml=machine.nvml(), lock_dir=machine.file.parent) is result


def test_a_launch_that_waits_since_its_ranks_died_can_be_stopped(tmp_path: Path) -> None:
    forking = Forking(tmp_path / "warm.log", enabled=False, on_notice=print)
    places: Any = SimpleNamespace(advance=lambda _: None, tend=lambda _: None)
    launcher = TorchrunLauncher(tmp_path, places, forking=forking, on_notice=print)
    launcher._waiting["trial-0000"] = WaitingLaunch(request=request(tmp_path))  # it was to continue another
    launcher.stop("trial-0000")
    [update] = launcher.poll(0.0)
    assert isinstance(update, Finished)
    assert update.report.outcome is Outcome.PRUNED
