from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record_landscape, search_efficiency
from benchmarks.record_landscape import configurations, edge_walk
from benchmarks.recorded import Recorded, recorded_landscapes, structure_of, summary
from benchmarks.rig import throughput
from optuna_dsat.config.structures import Structure
from optuna_dsat.outcome import Outcome

EDGE = {1: 24, 3: 33}


def record() -> dict[str, Any]:
    """A machine with a fixed cost per step that ZeRO 3 doubles, and an edge per lineage."""
    runs = []
    for stage, edge in EDGE.items():
        known: dict[int, bool] = {}
        while (size := edge_walk(known)) is not None:
            known[size] = size <= edge
            run: dict[str, Any] = {
                "zero": {"stage": stage},
                "micro_batch": size,
                "outcome": "measured" if size <= edge else "out_of_memory",
                "startup_s": 8.0,
                "peak_bytes": 10**7 * size,
            }
            if size <= edge:
                fixed = 0.1 if stage == 3 else 0.05
                run |= {"forward_s": 0.01 * size, "backward_s": 0.02 * size, "step_s": fixed}
                run["latency_s"] = 0.03 * size + fixed + 0.001
            runs.append(run)
    return {
        "format": 1,
        "recorded": "2026-11-21",
        "hardware": {"device": "x86_64", "ranks": 2, "kind": "cpu"},
        "versions": {},
        "device_memory_bytes": 400_000_000,
        "user_config": {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}},
        "profile": {
            "params": 10**7, "trainable_params": 10**7, "largest_layer_params": 10**6, "param_bytes": 4,
            "activation_bytes_per_sample": 10**7, "flops_per_sample": 10**9, "device_memory_bytes": 400_000_000,
            "host_memory_bytes": 10**9, "peak_bytes": 2 * 10**8, "optimizer": "AdamW",
        },
        "runs": runs,
    }  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(record()))
    return Recorded.load(path)


def config(size: int, *, stage: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 7},
    }


@pytest.mark.parametrize("edge", [0, 1, 5, 24, 100])
def test_the_walk_finds_the_edge_to_a_sixteenth(edge: int) -> None:
    known: dict[int, bool] = {}
    while (size := edge_walk(known)) is not None:
        assert size not in known
        known[size] = size <= edge
    fits = max((size for size, ran in known.items() if ran), default=0)
    assert edge - max(1, edge // 16) < fits <= edge or fits == edge
    assert len(known) < 14


def test_configurations_are_those_that_a_stage_knows() -> None:
    result = configurations([0, 1, 3], offload=True)
    assert len(result) == 1 + 2 + 4
    assert len({structure_of(zero) for zero in result}) == len(result)


def test_records_are_played_back_and_filled_in_between(recorded: Recorded) -> None:
    assert throughput(recorded, config(16)) == pytest.approx(2 * 16 / 0.531)
    assert throughput(recorded, config(11)) == pytest.approx(2 * 11 / 0.381, rel=0.01)
    assert throughput(recorded, config(40)) == 0.0
    assert recorded.run(config(4, stage=2), 2).outcome is Outcome.INVALID_CONFIG
    rate, structure, size = recorded.best()
    assert structure == Structure(stage=1)
    assert rate == pytest.approx(throughput(recorded, config(size)))


def test_a_record_is_searched(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded.no_tune == ("offload_optimizer", "offload_param")
    path, out = tmp_path / "small.json", tmp_path / "results.jsonl"
    search_efficiency.main(
        ["--records", str(path), "--recorded", "1", "--methods", "guided", "random", "--budget", "12",
         "--results", str(out)]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert "Recorded 2026-11-21 on 2 x x86_64" in printed.err
    assert "| recorded, random | 1 |" in printed.out
    results = search_efficiency.read(out)
    assert results["small", 0, "guided"].distance < 0.15  # the user's own config: 0.6
    assert results["small", 0, "random"].trials == 13


def by_time() -> dict[str, Any]:
    """A machine without an edge of memory, where throughput rises to micro-batch 16 and falls beyond."""
    runs = []
    for zero in ({"stage": 0}, {"stage": 2}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}, {"stage": 3}):
        slow = 1.0 + 0.1 * zero["stage"] + 0.3 * ("offload_optimizer" in zero)  # type: ignore[operator]
        for size in (1, 2, 4, 8, 16, 32, 64):
            for sign in (-1, 1):
                latency = slow * (0.02 + 0.01 * size * (1.1 if size > 16 else 1.0)) * (1 + 0.01 * sign)
                runs.append(
                    {
                        "zero": zero, "micro_batch": size,
                        "outcome": "measured", "startup_s": 1.0 + latency, "peak_bytes": 10**7 * (5 + size),
                        "forward_s": 0.3 * latency, "backward_s": 0.5 * latency,
                        "step_s": 0.1 * latency, "latency_s": latency,
                    }
                )  # fmt: skip
    runs.append({"zero": {"stage": 1}, "micro_batch": 1, "outcome": "script_error", "startup_s": 1.0})
    result = record()
    result["user_config"] |= {"train_micro_batch_size_per_gpu": 2, "scheduler": {"params": {"total_num_steps": "auto"}}}
    result["user_config"]["zero_optimization"] = {"stage": 2}
    return {**result, "format": 2, "device_memory_bytes": 10**10, "runs": runs, "summary": summary(runs)}


@pytest.fixture
def timed(tmp_path: Path) -> Recorded:
    (tmp_path / "timed.json").write_text(json.dumps(by_time()))
    return Recorded.load(tmp_path / "timed.json")


def test_beyond_what_was_recorded_a_launch_costs_its_time_and_gains_nothing(timed: Recorded) -> None:
    def at(size: int) -> dict[str, Any]:
        return {"train_micro_batch_size_per_gpu": size, "zero_optimization": {"stage": 0}}

    best, structure, size = timed.best()
    assert (structure.stage, size) == (0, 16)
    assert throughput(timed, at(512)) == pytest.approx(throughput(timed, at(64)))
    assert throughput(timed, at(512)) < best
    assert timed.run(at(512), 2).latency_s == pytest.approx(8 * timed.run(at(64), 2).latency_s)
    assert timed.run(at(512), 2).peak_bytes == pytest.approx(10**7 * 517)
    assert timed.run(at(2048), 2).outcome is Outcome.OUT_OF_MEMORY  # 20 GB of 10
    assert timed.run({**at(4), "zero_optimization": {"stage": 1}}, 2).outcome is Outcome.SCRIPT_ERROR


def test_with_accumulation_all_but_the_optimizers_step_is_repeated(timed: Recorded) -> None:
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 0}}
    once, thrice = timed.run(config, 2), timed.run({**config, "gradient_accumulation_steps": 3}, 2)
    assert thrice.step_s == pytest.approx(once.step_s)
    assert thrice.latency_s - thrice.step_s == pytest.approx(3 * (once.latency_s - once.step_s))


def test_the_noise_is_that_of_repeated_launches(timed: Recorded) -> None:
    expected = math.log(1.01 / 0.99) / math.sqrt(2)
    assert timed.noise == pytest.approx(expected, rel=1e-6)
    runs = by_time()["runs"]
    assert summary(runs) == {"configurations": 28, "launches": len(runs), "noise": round(expected, 4)}


def test_only_complete_records_are_searched(tmp_path: Path) -> None:
    (tmp_path / "timed.json").write_text(json.dumps(by_time()))
    begun = {name: value for name, value in by_time().items() if name != "summary"}
    (tmp_path / "begun.json").write_text(json.dumps(begun))
    assert list(recorded_landscapes(tmp_path)) == ["timed"]


def test_the_users_config_is_played_back_as_it_was(timed: Recorded) -> None:
    assert timed.user_config["train_micro_batch_size_per_gpu"] == 2
    assert timed.user_config["zero_optimization"] == {"stage": 2}
    assert timed.user_config["scheduler"] == {"params": {}}


@pytest.mark.filterwarnings("ignore")  # of files that they leave open
def test_peers_search_records_too(timed: Recorded) -> None:
    method = "deepspeed-fast"
    if lacking := search_efficiency.missing(method):
        pytest.skip(f"{', '.join(lacking)} not installed: see benchmarks/README.md")
    best, _, _ = timed.best()
    result = search_efficiency.run_one(timed, method, best=best, budget=8, noise=0.01, seed=0)
    assert result.launches > 1
    assert -0.2 < result.distance < 0.9


@pytest.mark.torchrun
def test_a_script_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Path(record_landscape.__file__).parents[1] / "examples" / "gpt"
    path, script, ds_config = tmp_path / "gpt.json", str(job / "train.py"), str(job / "ds_config.json")
    command = [str(path), script, ds_config, "--stages", "0", "--cpu-ranks", "2", "--longest-step", "0.001",
               "--rounds", "2", "--", "--deepspeed_config", ds_config]  # fmt: skip
    record_landscape.main(command)
    assert "2 launches of 1 configurations" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert [(run["micro_batch"], run["outcome"]) for run in record["runs"]] == [(1, "measured")] * 2
    landscape = Recorded.load(path)
    assert landscape.slots == 2
    assert landscape.user_config["train_micro_batch_size_per_gpu"] >= 1
    assert landscape.best()[0] > 0
