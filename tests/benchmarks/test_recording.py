"""Recording a landscape: the rule for quiet, the plan, and the rounds on a simulated machine."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record_landscape
from benchmarks.record_landscape import configurations
from benchmarks.recorded import Recorded, key_of
from benchmarks.recording import plan
from benchmarks.recording.jobs import JOBS
from benchmarks.recording.quiet import QuietRule, Surroundings, Watch
from benchmarks.recording.rounds import ATTEMPTS, Recorder
from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.launch.conditions import Conditions
from optuna_dsat.launch.protocol import Finished, LaunchUpdate
from optuna_dsat.launch.simulated import SimulatedLauncher, SimulatedProfile, SimulatedResult
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.profiled import Profiled
from optuna_dsat.study.spec import StudySpec, make_spec

QUIET = Surroundings(before=0.0, others=0.02, stolen=0.0)


def test_a_launch_is_quiet_where_nothing_else_took_the_cores() -> None:
    rule = QuietRule(before=0.1, others=0.06, stolen=0.02)
    assert QUIET.breaches(rule) == ()
    noisy = Surroundings(before=0.2, others=0.07, stolen=0.03, on_gpus=("process 7 (python)",))
    assert noisy.breaches(rule) == ("before 20%", "others 7%", "stolen 3%", "process 7 (python)")
    assert Surroundings(before=0.0, others=None, stolen=0.0).breaches(rule) == ("others unknown",)
    assert noisy.to_json() == {"before": 0.2, "others": 0.07, "stolen": 0.03, "on_gpus": ["process 7 (python)"]}


class Machine:
    """Two cores of which others take a share that changes with time; the recorder itself takes a tenth of one."""

    def __init__(self, shares: Callable[[float], float], *, stolen: float = 0.0) -> None:
        self.now_s = self.busy_s = self.own_s = 0.0
        self.shares, self.stolen = shares, stolen

    def sleep(self, seconds: float) -> None:
        self.own_s += 0.4 * seconds  # processes that the recorder has started
        self.busy_s += 0.4 * seconds + 2 * seconds * self.shares(self.now_s)
        self.now_s += seconds

    def clock(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def watch(self, **options: Any) -> Watch:
        return Watch(
            rule=QuietRule(), cores=(0, 1), clock=self.clock, sleep=self.sleep, busy=lambda _: self.busy_s,
            stolen=lambda _: 2 * self.stolen * self.now_s, own=lambda: 0.1 * self.now_s, tree=lambda: self.own_s,
            **options,
        )  # fmt: skip


def test_the_watch_waits_for_a_quiet_moment_while_its_patience_lasts() -> None:
    said: list[str] = []
    machine = Machine(lambda now_s: 0.9 if now_s < 20 else 0.01, stolen=0.01)
    watch = machine.watch(patience_s=60.0, on_wait=said.append)
    watch.wait()
    assert 20 <= machine.now_s < 25
    assert said == ["the machine is not quiet: others take 90%; waiting ..."]
    machine.sleep(10.0)
    around = watch.surroundings(Conditions(window_s=5.0, others_cpu_s=1.0, cores=2))
    assert around.before == pytest.approx(0.01, rel=0.01)
    assert around.stolen == pytest.approx(0.01, rel=0.01)
    assert around.others == pytest.approx(0.1 - 0.05, rel=0.01)  # less the recorder's own
    never = Machine(lambda _: 0.9).watch(patience_s=5.0)
    never.wait()
    assert never.patience_s <= 0
    assert never.surroundings(Conditions()).breaches(QuietRule()) == ("before 90%", "others unknown")


def test_the_real_machine_can_be_watched() -> None:
    watch = Watch(patience_s=0.0)
    watch.wait()
    around = watch.surroundings(Conditions(window_s=1.0, others_cpu_s=0.0, cores=1))
    assert around.before is not None
    assert 0 <= around.before < 1.5
    assert around.stolen is not None
    assert around.others == 0.0


def test_sizes_go_to_the_longest_step_and_two_beyond() -> None:
    known = {1: 0.02, 4: 0.05, 16: 0.25, 64: 0.9, 128: 1.8}
    assert plan.sizes(known, 0, longest_step_s=1.0) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert plan.sizes(known, 1, longest_step_s=1.0) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert plan.sizes(known, 2, longest_step_s=1.0) == [1, 2, 4, 5, 8, 12, 16, 21, 24, 32, 48, 64, 96, 128]
    dense = plan.sizes(known, 3, longest_step_s=1.0)
    assert [size for size in dense if size % 2] == [1, 3, 5, 11, 21, 41]
    assert dense[-2:] == [96, 128]
    assert {24, 48, 96} <= set(dense)
    assert plan.sizes(known, 1, longest_step_s=1.0, most=16)[-1] == 16


def test_scouts_double_at_least_and_end_with_the_longest_step_or_the_first_failure() -> None:
    def walk(step_s: Callable[[int], float | None]) -> dict[int, float | None]:
        known: dict[int, float | None] = {}
        while (size := plan.next_scout(known, longest_step_s=1.0)) is not None:
            assert size not in known
            known[size] = step_s(size)
        return known

    assert list(walk(lambda size: 0.01 + 0.014 * size)) == [1, 4, 16, 64, 128]
    assert list(walk(lambda _: 3.0)) == [1]
    assert list(walk(lambda size: 0.01 if size < 10 else None)) == [1, 4, 16]


def test_a_step_between_two_scouts_follows_a_power_law() -> None:
    known = {4: 0.1, 16: 0.4}
    assert plan.predicted(known, 8) == pytest.approx(0.2)
    assert plan.predicted(known, 32) == pytest.approx(0.8)
    assert plan.predicted(known, 1) == pytest.approx(0.1)


def test_every_round_has_all_configurations_in_an_order_of_its_own() -> None:
    found = plan.order([[1, 2, 4], [1, 2]], rounds=3, seed=5)
    every = {(0, 1), (0, 2), (0, 4), (1, 1), (1, 2)}
    orders = [[(index, size) for one, index, size in found if one == number] for number in (1, 2, 3)]
    assert [number for number, _, _ in found] == sorted(number for number, _, _ in found)
    assert all(set(order) == every and len(order) == 5 for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert found == plan.order([[1, 2, 4], [1, 2]], rounds=3, seed=5)
    assert found != plan.order([[1, 2, 4], [1, 2]], rounds=3, seed=6)


class Slope:
    """Steps of 20 ms and 10 ms a sample; ZeRO 3 is slower; offload at ZeRO 3 fails; ZeRO 1 holds 20 samples."""

    def profile(self, slots: int) -> SimulatedProfile:
        raise NotImplementedError

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:  # noqa: ARG002 - the protocol's
        size, (stage, *offloads, _) = (
            ds_config["train_micro_batch_size_per_gpu"],
            key_of(ds_config["zero_optimization"]),
        )
        if stage == 3 and any(offloads):
            return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1.0, message="rank 0: no")
        if stage == 1 and size > 20:
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=1.0)
        factor = 1.5 if stage == 3 else 1.0
        return SimulatedResult(
            startup_s=1.0, forward_s=0.003 * size * factor, backward_s=0.007 * size * factor, step_s=0.02,
            peak_bytes=10**6 * size,
        )  # fmt: skip


class Watched(SimulatedLauncher):
    """A simulated launcher whose launches others disturb, each for as much as ``shares`` says."""

    def __init__(self, shares: Callable[[], float]) -> None:
        super().__init__(Slope(), total_slots=2, noise=0.01)
        self.shares, self.finished = shares, 0

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        return [self._disturbed(update) for update in super().poll(timeout_s)]

    def _disturbed(self, update: LaunchUpdate) -> LaunchUpdate:
        if not isinstance(update, Finished):
            return update
        self.finished += 1
        beside = Conditions(window_s=1.0, others_cpu_s=2 * self.shares(), cores=2)
        return dataclasses.replace(update, report=dataclasses.replace(update.report, conditions=beside))


def spec(folder: Path) -> StudySpec:
    return make_spec(
        name="small", method="guided", script={"script": "train.py", "cwd": "/", "config_path": "ds_config.json"},
        ds_config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}, device="cpu",
        slots_per_trial=2, output_dir=str(folder),
    )  # fmt: skip


def recorder(
    launcher: SimulatedLauncher, folder: Path, record: dict[str, Any], *, write: Callable[[], None] = lambda: None
) -> Recorder:
    return Recorder(
        spec=spec(folder), launcher=launcher, watch=Machine(lambda _: 0.0).watch(), record=record, write=write,
        structures=list(configurations([0, 1, 3], offload=True, buckets=[])), longest_step_s=0.3,
        most_steps=50,
    )  # fmt: skip


def test_a_record_holds_two_rounds_of_every_configuration_that_runs(tmp_path: Path) -> None:
    record: dict[str, Any] = {"seed": 3, "runs": []}
    recorder(Watched(lambda: 0.01), tmp_path, record).run()
    seen = [(key_of(run["zero"])[:3], run["micro_batch"]) for run in record["runs"]]
    rounds = [[one for one, run in zip(seen, record["runs"], strict=True) if run["round"] == n] for n in (1, 2)]
    assert sorted(rounds[0]) == sorted(rounds[1])
    assert rounds[0] != rounds[1]
    largest = {key: max(size for one, size in seen if one == key) for key in {key for key, _ in seen}}
    assert largest[0, False, False] == 48  # 28 samples take 0.3 s; 32 and 48 are beyond
    assert largest[1, False, False] == 16
    assert largest[3, False, False] == 32
    assert not any(key[0] == 3 and any(key[1:]) for key in largest)
    assert all(run["steps"] >= plan.LEAST_STEPS for run in record["runs"])
    assert record["summary"] | {"noise": 0} == {
        "configurations": len(seen) // 2, "launches": len(seen), "noise": 0, "not_quiet_share": 0.0,
        "repeated_share": 0.0, "configurations_never_quiet": 0,
    }  # fmt: skip
    assert 0.005 < record["summary"]["noise"] < 0.02


def test_a_launch_that_was_not_quiet_is_repeated_and_marked(tmp_path: Path) -> None:
    record: dict[str, Any] = {"seed": 3, "runs": []}
    shares = itertools.cycle([0.5, 0.01, 0.01])
    recorder(Watched(lambda: next(shares)), tmp_path, record).run()
    noisy = [run for run in record["runs"] if not run["quiet"]]
    assert noisy
    assert all(run["breaches"] == ["others 45%"] for run in noisy)  # less the recorder's own
    for run in noisy:
        again = [
            one for one in record["runs"]
            if (one["round"], one["micro_batch"], one["zero"]) == (run["round"], run["micro_batch"], run["zero"])
        ]  # fmt: skip
        assert [one["attempt"] for one in again] == list(range(1, len(again) + 1))
        assert again[-1]["quiet"]
    assert record["summary"]["repeated_share"] == pytest.approx(len(noisy) / len(record["runs"]), abs=0.001)
    never: dict[str, Any] = {"seed": 3, "runs": []}
    recorder(Watched(lambda: 0.5), tmp_path, never).run()
    first = [run for run in never["runs"] if run["attempt"] == 1]
    assert len(never["runs"]) == ATTEMPTS * len(first)
    assert never["summary"]["configurations_never_quiet"] == never["summary"]["configurations"]


def test_an_interrupted_record_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"seed": 3, "runs": []}
    recorder(Watched(lambda: 0.01), tmp_path, whole).run()
    kept: list[str] = []
    part: dict[str, Any] = {"seed": 3, "runs": []}

    def write() -> None:
        kept.append(json.dumps(part))
        if len(part["runs"]) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder(Watched(lambda: 0.01), tmp_path, part, write=write).run()
    again = json.loads(kept[-1])
    launcher = Watched(lambda: 0.01)
    recorder(launcher, tmp_path, again).run()
    assert launcher.finished == len(whole["runs"]) - 7
    assert [(run["zero"], run["micro_batch"]) for run in again["runs"]] == [
        (run["zero"], run["micro_batch"]) for run in whole["runs"]
    ]


def test_the_ladder_is_thinned_out_until_all_fits_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense: dict[str, Any] = {"seed": 3, "runs": []}
    recorder(Watched(lambda: 0.01), tmp_path, dense).run()
    thin: dict[str, Any] = {"seed": 3, "runs": []}
    short = recorder(Watched(lambda: 0.01), tmp_path, thin)
    short.within_s = 1.0
    short.run()
    assert len(thin["runs"]) < len(dense["runs"])
    assert thin["plan"][0] == [1, 2, 4, 8, 16, 32]
    told = capsys.readouterr().err
    assert "minutes on a quiet machine" in told
    assert "nothing is left to thin out" in told


def test_what_was_recorded_can_be_played_back(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "format": 2, "recorded": "2026-11-22", "hardware": {"device": "x86_64", "ranks": 2, "kind": "cpu"},
        "device_memory_bytes": 10**9, "user_config": dict(spec(tmp_path).ds_config), "profile": {"params": 10**6},
        "seed": 3, "runs": [],
    }  # fmt: skip
    recorder(Watched(lambda: 0.01), tmp_path, record).run()
    path = tmp_path / "slope.json"
    record_landscape._write(path, record)
    assert json.loads(path.read_text()) == record
    found = Recorded.load(path)
    assert found.stages == (0, 1, 3)
    assert found.refused == {(3, True, False, 500_000_000): Outcome.SCRIPT_ERROR} | {
        (3, optimizer, True, 500_000_000): Outcome.SCRIPT_ERROR for optimizer in (False, True)
    }
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 0}}
    assert found.run(config, 2).latency_s == pytest.approx(0.1, rel=0.05)
    assert found.run({**config, "train_micro_batch_size_per_gpu": 40}, 2).outcome is Outcome.MEASURED
    one = {"train_micro_batch_size_per_gpu": 40, "zero_optimization": {"stage": 1}}
    assert found.run(one, 2).outcome is Outcome.OUT_OF_MEMORY


def test_every_job_is_there() -> None:
    assert set(JOBS) == {"gpt", "cnn", "huggingface"}
    for job in JOBS.values():
        assert job.script.is_file()
        assert str(job.config) in job.args
        json.loads(job.config.read_text())


def test_what_is_recorded_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Name a job"):
        record_landscape.main([str(tmp_path / "x.json")])


def test_a_record_of_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    profile = ModelProfile(
        params=10**6, trainable_params=10**6, largest_layer_params=10**5, param_bytes=4,
        activation_bytes_per_sample=10**5, flops_per_sample=10**6, device_memory_bytes=10**9,
        host_memory_bytes=10**10, peak_bytes=10**7,
    )  # fmt: skip
    profiled = Profiled(profile=profile, measured_with="", pipeline=False, device="cpu")

    def begin() -> dict[str, Any]:
        return record_landscape._begin(tmp_path / "x.json", spec(tmp_path), profiled, command="", device="x86_64")

    record = begin()
    assert record["versions"].keys() == {"python", "torch", "deepspeed", "optuna", "optuna-dsat"}
    assert record["hardware"].keys() == {"device", "ranks", "kind", "cpu", "cores", "host_memory_bytes"}
    assert begin() == record
    record["versions"]["torch"] = "1.0"
    record_landscape._write(tmp_path / "x.json", record)
    with pytest.raises(ValueError, match="another machine or with other versions"):
        begin()


@pytest.mark.torchrun
def test_a_job_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cnn.json"
    short = ["--stages", "0", "--longest-step", "0.001", "--repeat", "1", "--patience", "0", "--cpu-ranks", "2"]
    record_landscape.main([str(path), "--job", "cnn", *short])
    assert "from launch to launch" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert [run["micro_batch"] for run in record["scouts"]] == [1]
    assert {run["micro_batch"] for run in record["runs"]} == {1, 2}
    assert {run["outcome"] for run in record["runs"]} == {"measured"}
    assert all(run["steps"] >= plan.LEAST_STEPS for run in record["runs"])
    assert all(run["surroundings"]["others"] is not None for run in record["runs"])
    landscape = Recorded.load(path)
    assert landscape.slots == 2
    assert landscape.user_config["train_micro_batch_size_per_gpu"] == 4
    assert landscape.best()[0] > 0
