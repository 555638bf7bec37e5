"""Machines drawn at random: what they must be to judge a search."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import numpy as np
import pytest

import benchmarks.random_machines
from benchmarks.optimum import optimum, search_space
from benchmarks.published import published_curves
from benchmarks.random_machines.draw import draw
from benchmarks.random_machines.forms import COMPUTE_FORMS, StepTimes
from benchmarks.random_machines.machine import machine_of
from benchmarks.random_machines.settings import Settings, structure_of
from benchmarks.rig import throughput
from benchmarks.search_efficiency import Result, main, read, seeds_of, table
from optuna_dsat.config import ds_config
from optuna_dsat.outcome import Outcome

SEEDS = range(200)


def test_nothing_of_the_tuners_cost_models_is_used() -> None:
    folder = Path(str(benchmarks.random_machines.__file__)).parent
    imported = {
        node.module
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert imported
    assert not [name for name in imported if name.startswith(("optuna_dsat.cost", "optuna_dsat.guided"))]


def test_effects_are_absent_or_strong_by_chance() -> None:
    drawn = [draw(seed) for seed in SEEDS]
    for present in (
        [item.load_s > 0 for item in drawn],
        [item.straggler > 1 for item in drawn],
        [not item.realistic for item in drawn],
        [bool(item.refused) for item in drawn],
        ["bucket" in item.sizes for item in drawn if not item.realistic],
        [item.hardware.kind == "cpu" for item in drawn],
    ):
        assert 0.03 < statistics.fmean(present) < 0.8
    assert min(item.noise for item in drawn) < 0.01 < 0.04 < max(item.noise for item in drawn)
    assert min(item.profiled_activations for item in drawn) < 0.85
    assert max(item.profiled_activations for item in drawn) > 1.15


def test_realistic_machines_have_published_curves_and_stress_tests_other_forms() -> None:
    published = {f"{curve.model} on {curve.gpu}": curve for curve in published_curves()}
    stress = [draw(seed) for seed in range(9, 1000, 10)]
    assert {item.compute.form for item in stress} == {*COMPUTE_FORMS}
    assert 0.2 < statistics.fmean(item.tiles is not None for item in stress) < 0.6
    assert 0.3 < statistics.fmean(item.pressure > 0 for item in stress) < 0.7
    realistic = [item for item in map(draw, SEEDS) if item.realistic]
    assert {item.compute.form for item in realistic} == {*published}
    for item in realistic:
        assert item.tiles is None
        assert not item.pressure
        assert isinstance(item.compute, StepTimes)
        costs, curve = item.compute.at(np.array(item.compute.sizes[1:])), published[item.compute.form]
        if item.compute.sizes[1] >= 1:
            assert list(costs) == pytest.approx(curve.costs)
        assert item.compute.at(np.array([1e9])) == pytest.approx(curve.costs[-1])
        assert item.compute.times[0] <= item.compute.times[1]
        assert 1 <= item.compute.sizes[-1] <= 4 * max(curve.step_s)


@pytest.mark.parametrize("seed", [0, 1, 1003])
def test_a_launch_and_the_enumeration_agree(seed: int) -> None:
    machine = machine_of(seed)
    own = machine.run(machine.user_config, machine.slots)
    assert own.outcome is Outcome.MEASURED
    best = optimum(machine)
    overlay = search_space(machine).overlay({**best.params, "train_micro_batch_size_per_gpu": best.micro_batch})
    config = ds_config.merge(machine.user_config, overlay)
    assert throughput(machine, config) == pytest.approx(best.throughput)
    sizes = np.array([best.micro_batch, 4.0 * machine.most])
    assert list(machine.fits(best.settings, sizes)) == [True, False]
    assert best.throughput >= throughput(machine, machine.user_config) * 0.999
    samples = 2 * machine.drawn.user_micro_batch
    same_batch = optimum(machine, samples=samples)
    steps = {"gradient_accumulation_steps": samples // same_batch.micro_batch}
    overlay = search_space(machine).overlay(
        same_batch.params | {"train_micro_batch_size_per_gpu": same_batch.micro_batch}
    )
    accumulated = ds_config.merge(machine.user_config, overlay) | steps
    assert throughput(machine, accumulated) == pytest.approx(same_batch.throughput)
    users = machine.user_config | {"gradient_accumulation_steps": 2}
    assert same_batch.throughput >= throughput(machine, users) * 0.999


def test_a_machine_is_the_same_for_its_seed() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_refused_structures_fail_for_a_reason_that_is_not_memory() -> None:
    seed = next(seed for seed in SEEDS if draw(seed).refused)
    machine = machine_of(seed)
    assert structure_of(Settings.of(machine.user_config)) not in machine.drawn.refused
    stage, optimizer, params = next(iter(machine.drawn.refused))
    zero: dict[str, object] = {"stage": stage}
    zero |= {"offload_optimizer": {"device": "cpu"}} if optimizer else {}
    zero |= {"offload_param": {"device": "cpu"}} if params else {}
    refused = {**machine.user_config, "zero_optimization": zero}
    assert machine.run(refused, machine.slots).outcome is Outcome.INVALID_CONFIG


def test_searches_are_kept_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    methods = ("binary", "optuna-random")
    arguments = ["--seeds", "12", "--methods", *methods, "--budget", "6", "--results", str(results)]
    main(arguments)
    assert set(read(results)) == {("machine-12", 12, "binary"), ("machine-12", 12, "optuna-random")}
    written = results.read_text()
    main(arguments)
    assert results.read_text() == written
    assert "| realistic, binary | 1 |" in capsys.readouterr().out


def test_realistic_machines_and_stress_tests_have_separate_rows() -> None:
    def ended(seed: int, left: float) -> Result:
        return Result(
            landscape="machine", method="guided", seed=seed, launches=9, seconds=1.0, launches_to_near=7,
            seconds_to_near=None, distance=0.01, outcomes={},
            statements=[(0.0, 1.0), (0.02, left)], trials=9, rounds=6, same_batch=left if seed < 9 else None,
        )  # fmt: skip

    searches = {
        (f"machine-{seed}", seed, "guided"): ended(seed, left) for seed, left in ((0, 0.01), (1, 0.03), (9, 0.02))
    }
    realistic, stress = table(searches, ["guided"]).splitlines()[2:4]
    assert realistic.startswith("| realistic, guided | 2 |")
    assert realistic.endswith("| 50% of 2 | 50%, 100% |")
    assert "| 9 | 3 |" in realistic, "nine launches, six of them rounds"
    assert stress.startswith("| stress, guided | 1 |")
    assert stress.endswith("| 100% of 1 |  |")


def test_seeds_are_a_number_or_a_range() -> None:
    assert (seeds_of("7"), seeds_of("2-4"), seeds_of("9-30:10")) == ([7], [2, 3, 4], [9, 19, 29])
