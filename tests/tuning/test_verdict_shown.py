"""What the command and the function say of a result that is not a faster config, and the options that decide it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.study.options.parse import share
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedResult

__all__ = ["bench", "run_here"]

OPTIONS = ("train.py", "ds.json", "--cpu-ranks", "2", "--metric", "throughput", "--quiet")


def own_is_best(config: Mapping[str, Any]) -> SimulatedResult:
    own = config["train_micro_batch_size_per_gpu"] == 2 and config["zero_optimization"]["stage"] == 2
    samples = config["train_micro_batch_size_per_gpu"] * config.get("gradient_accumulation_steps", 1)
    return SimulatedResult(
        startup_s=5, forward_s=0.02 * samples * (1.0 if own else 1.1), backward_s=0.0, step_s=0.0, peak_bytes=2**30
    )


def test_that_ones_own_config_is_best_is_a_result(bench: EntryPointBench, run_here: Run) -> None:
    bench.landscape = Hill(own_is_best)
    options = ("--max-trials", "4", "--confirm", "1", "--zero-stages", "1")
    done = run_here("random", *OPTIONS, *options)
    assert done.returncode == 0, done.stderr
    assert "Nothing was confirmed to be faster than your config: " in done.stdout
    assert "x as fast (95% CI" in done.stdout, "how far the best other is from it"
    again = json.loads(run_here("random", *OPTIONS, *options, "--json").stdout)
    assert (again["verdict"]["kind"], again["trial"], again["speed_up"]) == ("baseline_is_best", 0, 1.0)
    written = json.loads(Path(again["config_path"]).read_text())
    assert (written["train_micro_batch_size_per_gpu"], written["zero_optimization"]["stage"]) == (2, 2)


def test_options_of_the_confirmation_and_the_batch_reach_the_study(bench: EntryPointBench, run_here: Run) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    (bench.folder / "ds.json").write_text(json.dumps(config))
    options = ("--tie", "2%", "--batch", "keep", "--divisible-by", "2", "--dataset-size", "100")
    done = run_here("random", *OPTIONS, *options, "--confirm-time", "0", "--max-trials", "3", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["train_batch_size"], result["dataset_size"]) == (8, 100)
    assert result["config"]["train_micro_batch_size_per_gpu"] % 2 == 0
    assert result["verdict"]["kind"] == "unconfirmed", "no time for rounds"
    refused = run_here("random", *OPTIONS, "--tie", "little")
    assert refused.returncode == 2
    assert "--tie is 'little'; write a share such as 1% or 0.01." in refused.stderr


@pytest.mark.parametrize(
    ("text", "value"), [("1%", 0.01), (" 2.5 % ", 0.025), ("0.03", 0.03), (0.01, 0.01), ("0", 0.0)]
)
def test_a_share_is_a_percentage_or_a_number(text: str | float, value: float) -> None:
    assert share(text) == pytest.approx(value)
    with pytest.raises(UsageError):
        share("%")
