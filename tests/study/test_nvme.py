"""A search with ``--nvme-path`` measures the drive once, checks the room first, and returns the user's path."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.conditions import NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.structures import Structure
from optuna_dsat.errors import UsageError
from optuna_dsat.guided.order import complexity, structure_of
from optuna_dsat.launch.machine.nvme import Speed
from optuna_dsat.launch.run_directory import OutputError
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.profile.host import saving_in_words
from optuna_dsat.study.profile.profile import profile_attempts
from optuna_dsat.study.space import largest_micro_batches, micro_batch_cap
from optuna_dsat.study.spec import StudySpec
from tests.harness.landscapes import GIB, Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedProfile, SimulatedResult
from tests.harness.small_model import PROFILE, profiled_of
from tests.harness.studies import USER_CONFIG, StudyBench, spec_of

SPEED = Speed(write_bytes_per_s=1e9, read_bytes_per_s=3e9, size_bytes=1, direct=True)


@dataclass
class Drive(Hill):
    """A machine on which nothing but an optimizer on NVMe fits."""

    host_gib: int = 512

    def profile(self, slots: int) -> SimulatedProfile:
        return replace(super().profile(slots), host_memory_bytes=self.host_gib * GIB)

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        if ds_config["zero_optimization"].get("offload_optimizer", {}).get("device") != "nvme":
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=10, missing_bytes=GIB)
        return super().run(ds_config, slots)


@pytest.fixture(autouse=True)
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Measure no drive; return the folders of which the speed was asked."""
    folders: list[Path] = []

    def measured(folder: Path, **_: Any) -> Speed:
        folders.append(folder)
        return SPEED

    monkeypatch.setattr("optuna_dsat.study.profile.host.measure", measured)
    return folders


def spec(bench: StudyBench, **changes: Any) -> StudySpec:
    only_nvme = {"fix": {OFFLOAD_OPTIMIZER: "nvme"}, "zero_stages": (3,), "max_trials": 3, "confirm": 0}
    return bench.spec(**{**only_nvme, "method": "guided", "nvme_path": str(bench.folder), **changes})


def test_the_result_has_the_users_path_and_the_drive_is_measured_once(
    bench: StudyBench, measurements: list[Path]
) -> None:
    folder = str(bench.folder)
    for _ in range(2):
        result = bench.run(spec(bench), Drive())
    assert result is not None
    config = json.loads((spec(bench).study_dir / "best_ds_config.json").read_text(encoding="utf-8"))
    offload = config["zero_optimization"]["offload_optimizer"]
    assert (offload["device"], offload["nvme_path"]) == ("nvme", folder)
    assert measurements == [bench.folder]
    assert bench.messages.count(f"{folder} reads 3.00 GB/s and writes 1.00 GB/s.") == 1


def test_a_search_without_room_ends_before_its_trials(bench: StudyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(bench.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=15 * 10**9))
    drive = Drive()
    with pytest.raises(OutputError, match=r"writes 14\.90 GiB to .*, which has 13\.97 GiB free"):
        bench.run(spec(bench), drive)
    assert len(drive.configs) <= 1, "the profile launch alone"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=19 * 10**9))
    assert bench.run(spec(bench), drive) is not None
    small = SimulatedLauncher(Drive(host_gib=1), total_slots=2)
    session = bench.session(spec(bench, name="small"), small, reuse_profile=False)
    with pytest.raises(UsageError, match=r"page-locks .* GiB of host memory at least, and the host has 1\.00 GiB"):
        session.run()


def test_the_last_attempt_of_a_profile_has_the_optimizer_on_nvme(bench: StudyBench) -> None:
    *_, last = profile_attempts(spec(bench))
    offload = last.overlay()["zero_optimization"]["offload_optimizer"]
    assert offload == {"device": "nvme", "nvme_path": str(bench.folder)}
    assert not any("NVMe" in attempt.words for attempt in profile_attempts(bench.spec()))


def test_nvme_comes_after_the_cpu() -> None:
    third: dict[str, Any] = {"zero_stage": 3}
    cpu = {**third, OFFLOAD_OPTIMIZER: "cpu", OFFLOAD_PARAM: "cpu"}
    states, params = {**cpu, NVME: True}, {**third, OFFLOAD_OPTIMIZER: "none", OFFLOAD_PARAM: "nvme"}
    assert structure_of(states).words == "ZeRO 3 + parameter offload and optimizer offload to NVMe"
    assert structure_of(params).words == "ZeRO 3 + parameter offload to NVMe"
    order = [third, cpu, params, states, {**params, OFFLOAD_OPTIMIZER: "cpu", NVME: True}]
    assert sorted(order, key=complexity) == order


def test_a_search_warns_where_the_model_cannot_be_saved(bench: StudyBench) -> None:
    gathers = {**USER_CONFIG, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    profiled = profiled_of(profile=replace(PROFILE, host_memory_bytes=GIB))
    words = saving_in_words(bench.spec(ds_config=gathers, zero_stages=(3,)), profiled)
    assert words.startswith("To save the model at ZeRO 3 takes 1.86 GiB of host memory, and the host has 1.00 GiB")
    assert not saving_in_words(bench.spec(ds_config=gathers, zero_stages=(3,)), profiled_of())
    assert not saving_in_words(bench.spec(zero_stages=(3,)), profiled)
    assert not saving_in_words(bench.spec(ds_config=gathers, zero_stages=(1, 2)), profiled)


@pytest.mark.parametrize(("host_gib", "best"), [(90, ("cpu", "cpu")), (72, ("cpu", "none")), (60, ("none", "cpu"))])
def test_the_micro_batch_reaches_what_one_offload_allows_where_the_host_has_no_memory_for_both(
    host_gib: int, best: tuple[str, str]
) -> None:
    facts: dict[str, Any] = {
        "params": 4 * 10**9,
        "trainable_params": 4 * 10**9,
        "activation_bytes_per_sample": GIB // 4,
    }
    profiled = profiled_of(profile=replace(PROFILE, **facts, host_memory_bytes=host_gib * GIB), data_parallel_size=2)
    spec = spec_of(Path("/x"), ds_config={"bf16": {"enabled": True}})
    sizes = largest_micro_batches(spec, profiled)
    largest = max(sizes, key=lambda structure: sizes[structure])
    assert (largest.offload_optimizer, largest.offload_param) == best
    assert micro_batch_cap(spec, profiled) == 2 * sizes[largest] > 2 * sizes[Structure(stage=3)]
