"""What a whole search is said to have taken and found; the searches themselves take minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.whole_search import EARLY, Early, Search, early, ratios, table
from optuna_dsat.runtime.events import encode_event
from tests.harness.events import engine, step_of

BEGAN = 1_700_000_000.0


def launch(folder: Path, name: str, *, at_s: float, step_s: float, size: int, outcome: str = "measured") -> Path:
    """Leave what a launch of a search leaves: it ends three seconds after ``at_s``."""
    (folder / name / "events").mkdir(parents=True)
    report = {"outcome": outcome, "started_at": BEGAN + at_s, "startup_s": 1.0, "measured_s": 1.5, "exit_s": 0.5}
    (folder / name / "report.json").write_text(json.dumps(report))
    (folder / name / "ds_config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": size}))
    for rank in (0, 1):
        ready = engine(rank=rank)
        steps = [step_of(rank, step, latency_s=9.0 if step < 3 else step_s, samples=size) for step in range(1, 6)]
        lines = [encode_event(event) for event in (ready, *steps)]
        (folder / name / "events" / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / name


def test_the_first_launch_near_the_best_is_the_earliest_within_two_per_cent(tmp_path: Path) -> None:
    launches = [
        launch(tmp_path, "trial-0003", at_s=40.0, step_s=0.10, size=8),  # the best: 160 samples/s
        launch(tmp_path, "trial-0001", at_s=10.0, step_s=0.10, size=7),
        launch(tmp_path, "trial-0002", at_s=20.0, step_s=0.101, size=8),
        launch(tmp_path, "trial-0000", at_s=5.0, step_s=0.01, size=8, outcome="out_of_memory"),
    ]
    result = early(launches, began=BEGAN)
    assert result is not None
    assert result.after_s == pytest.approx(23.0)
    assert result.config == {"train_micro_batch_size_per_gpu": 8}
    assert early(launches[3:], began=BEGAN) is None


def search(wall_s: float, *, config: dict[str, Any] | None = None, near: Early | None = None) -> Search:
    return Search(wall_s=wall_s, launches=5, steps_s=wall_s / 2, config=config, early=near)


def test_searches_are_compared_by_wall_time_and_paired_throughput() -> None:
    searches = {
        "guided": search(30.0, config={}, near=Early(after_s=21.0, config={"a": 1})),
        "deepspeed": search(900.0),
        "deepspeed-bounded": search(140.0, config={}),
    }
    rates = {
        "guided": {0: 100.0, 1: 80.0},
        "deepspeed-bounded": {0: 101.0, 1: 80.8},
        EARLY: {0: 99.0, 1: 79.2},
    }
    result = ratios(searches, rates)
    assert result[0] == "guided takes at most 0.03 of the wall time of deepspeed"
    assert "0.21 of the wall time of deepspeed-bounded" in result[1]
    assert "0.990 (0.990 to 0.990)" in result[2]
    assert "after 21 s" in result[3]
    assert "0.980 (0.980 to 0.980) of the throughput of the fastest (deepspeed-bounded)" in result[3]
    rows = table(searches, rates)
    assert rows[2] == "| guided | 5 | 30 | 3.0 | 21 | 90.0 |"
    assert rows[3] == "| deepspeed | 5 | 900 | 90.0 |  | ended before it had a result |"
