from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import search_efficiency
from benchmarks.named_landscapes import throughput
from benchmarks.record_landscape import configurations, edge_walk
from benchmarks.recorded import Recorded, key_of

EDGE = {(1, 500_000): 24, (1, 20_000_000): 20, (3, 500_000): 33}


def record() -> dict[str, Any]:
    """A machine with a fixed cost per step that ZeRO 3 doubles, and an edge per lineage."""
    runs = []
    for (stage, bucket), edge in EDGE.items():
        known: dict[int, bool] = {}
        while (size := edge_walk(known)) is not None:
            known[size] = size <= edge
            run: dict[str, Any] = {
                "zero": {"stage": stage, "reduce_bucket_size": bucket},
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


def config(size: int, *, stage: int = 1, bucket: int = 500_000) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
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
    found = list(configurations([0, 1, 3], offload=True, buckets=[5, 50]))
    assert len(found) == 1 + 2 * 2 + 4 * 2
    assert len({key_of(zero) for zero in found}) == len(found)


def test_records_are_played_back_and_filled_in_between(recorded: Recorded) -> None:
    assert throughput(recorded, config(16)) == pytest.approx(2 * 16 / 0.531)
    assert throughput(recorded, config(11)) == pytest.approx(2 * 11 / 0.381)
    assert throughput(recorded, config(40)) == 0.0
    assert throughput(recorded, config(4, bucket=7)) == 0.0
    rate, key, size = recorded.best()
    assert key == (1, False, False, 500_000)
    assert rate == pytest.approx(throughput(recorded, config(size)))


def test_a_recorded_landscape_is_searched(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "overlap_comm" in recorded.no_tune
    assert "reduce_bucket_size" not in recorded.no_tune
    path, out = tmp_path / "small.json", tmp_path / "results.json"
    search_efficiency.main(
        ["--recorded", str(path), "--methods", "guided", "random", "--seeds", "1", "--budget", "12", "--json", str(out)]
    )
    printed = capsys.readouterr().out
    assert "Recorded 2026-11-21 on 2 x x86_64" in printed
    results = {result["method"]: result for result in json.loads(out.read_text())}
    assert results["guided"]["distance"] < 0.03
    assert results["random"]["launches"] == 13
