"""Model definitions for Determined's ``DeepSpeedTrial``, tuned and trained on two ranks."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.runtime.events import EngineReady, StepMeasured
from tests.harness.entry_points import Run, run_here, searching_in
from tests.harness.ranks import Starter, WarmRanks, script

__all__ = ["run_here"]

pytestmark = pytest.mark.torchrun

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "deepspeed_trial"
SCRIPTS = ROOT / "tests" / "scripts"
TRAINED = ("--hparams", "hparams.yaml", "--report-period", "1batches", "--seed", "7", "--checkpoint-dir", "runs")
PERIODS = ("--max-length", "10batches", "--checkpoint-period", "4batches", "--validation-period", "5batches")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SCRIPTS / "interrupted.py", tmp_path)
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


TRAIN = """import os, runpy
os.environ.update({environ!r})
runpy.run_module("optuna_dsat.integrations.deepspeed_trial", run_name="__main__", alter_sys=True)
"""


def train(folder: Path, warm: WarmRanks, *more: str, code: int = 0, **environ: str) -> str:
    """Run what ``optuna-dsat train`` starts; return the first rank's output."""
    log = folder / "rank0.stdout.log"
    log.unlink(missing_ok=True)
    start = Starter(folder, json.loads((folder / "ds_config.json").read_text()))
    arguments = ("interrupted:ByHand", "--deepspeed_config", "ds_config.json", *TRAINED, *PERIODS, *more)
    text = script(start, TRAIN.format(environ=environ))
    launch = start.torchrun(text, *arguments, purpose="full", user_config_path="", warm=warm)
    assert launch.exit_code == code, launch.output + launch.log("stderr")
    return log.read_text(encoding="utf-8")


def test_a_definition_is_tuned_up_to_the_command_that_trains_it(
    folder: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with searching_in(folder, monkeypatch):
        tuned = run_here(
            *("random", "model_def:MyTrial", "ds_config.json", "--hparams", "hparams.yaml", "--study", "sums"),
            *(
                "--json",
                "--cpu-ranks",
                "2",
                "--zero-stages",
                "2",
                "--no-tune",
                "offload_optimizer",
                "--max-trials",
                "1",
            ),
            *("--fix", "train_micro_batch_size_per_gpu=3", "--no-enqueue-user-config", "--confirm", "0"),
        )
    assert tuned.returncode == 0, tuned.stderr
    result = json.loads(tuned.stdout)
    config = json.loads(Path(result["config_path"]).read_text(encoding="utf-8"))
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (3, 2)
    assert config["zero_optimization"]["stage"] == 2
    assert config["optimizer"]["params"]["lr"] == 0.005, "the overwrites of the hyperparameters are not in the config"
    assert shlex.split(result["command"]) == [
        *("optuna-dsat", "train", "model_def:MyTrial", result["config_path"], "--hparams", "hparams.yaml"),
        *("--max-length", "1epochs", "--checkpoint-dir", str(Path(result["config_path"]).parent / "checkpoints")),
        *("--cpu-ranks", "2"),
    ]


def test_a_trial_of_a_definition_has_the_batch_sizes_that_it_reads(folder: Path, warm_ranks: WarmRanks) -> None:
    """From context and hyperparameters."""
    start = Starter(folder, json.loads((folder / "ds_config.json").read_text()))
    arguments = ("model_def:MyTrial", "--deepspeed_config", str(start.user_config), "--hparams", "hparams.yaml")
    overlay = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}
    launch = start.torchrun(script(start, TRAIN.format(environ={})), *arguments, overlay=overlay, warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    [engine] = launch.of(EngineReady)
    assert (engine.zero_stage, engine.config_differences) == (2, {})
    assert {(step.samples, step.observed_micro_batch) for step in launch.of(StepMeasured)} == {(6, 3)}


def test_training_goes_on_after_a_kill_with_the_same_losses(folder: Path, warm_ranks: WarmRanks) -> None:
    train(folder, warm_ranks, code=1, KILL_AT="6", DET_MANUAL_INIT_DISTRIBUTED="1")
    runs = folder / "runs"
    assert [path.name for path in sorted(runs.glob("batches-*"))] == ["batches-00000004"]
    killed = lines(runs / "metrics.jsonl")
    assert killed[0]["records"] == 16
    (runs / "batches-00000008.partial").mkdir()
    with (runs / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "trai')

    printed = train(folder, warm_ranks, "--resume", OPTUNA_DSAT_MANUAL_INIT_DISTRIBUTED="1")
    whole = lines(runs / "metrics.jsonl")
    steps = [(kind, step) for step in range(1, 11) for kind in ("training", "validation")[: 2 if step % 5 == 0 else 1]]
    assert [(line["kind"], line["steps_completed"]) for line in whole] == steps
    assert whole[: len(killed)] == killed, "batches after the checkpoint have the losses of the first time"
    shown = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert shown == [line for line in whole if line["steps_completed"] > 4]
    assert [path.name for path in sorted(runs.glob("batches-*"))] == [
        *("batches-00000004", "batches-00000008", "batches-00000010"),
    ]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory, warm_ranks: WarmRanks) -> Path:
    """Run ``scenarios.py`` once; return the folder with its results."""
    folder = tmp_path_factory.mktemp("scenarios")
    launch = Starter(folder).torchrun("scenarios.py", str(folder), purpose="full", warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    return folder


@pytest.fixture(scope="module")
def found(scenarios: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((scenarios / "found.json").read_text(encoding="utf-8"))
    return record


def metrics(scenarios: Path, name: str, kind: str = "training") -> list[dict[str, Any]]:
    return [line["metrics"] for line in lines(scenarios / name / "metrics.jsonl") if line["kind"] == kind]


MICRO_BATCH_BY_MICRO_BATCH = [[0, batch] for batch in range(4) for _ in range(3)]


def test_a_batch_is_as_many_calls_as_micro_batches(found: dict[str, Any]) -> None:
    for rank in found["Plain"]:
        assert (rank["calls"], rank["steps"]) == (MICRO_BATCH_BY_MICRO_BATCH, [4])
    first, second = (set(rank["rows"]) for rank in found["Plain"])
    assert (len(first), len(second), first & second) == (24, 24, set())


def test_validation_averages_over_samples(scenarios: Path) -> None:
    # 15 samples on two ranks: batches of unequal sizes.
    [validation] = metrics(scenarios, "Plain", "validation")
    assert validation["mean"] == pytest.approx(7 / 15, rel=1e-6)


def test_the_first_of_several_engines_counts(scenarios: Path, found: dict[str, Any]) -> None:
    assert [rank["calls"] for rank in found["TwoEngines"]] == [MICRO_BATCH_BY_MICRO_BATCH] * 2
    assert [rank["steps"] for rank in found["TwoEngines"]] == [[4, 12], [4, 12]]
    assert [line["records"] for line in lines(scenarios / "TwoEngines" / "metrics.jsonl")] == [12, 24, 36, 48, 48]
    assert {*metrics(scenarios, "TwoEngines")[0]} == {"first", "second"}
    assert {path.name for path in (scenarios / "TwoEngines" / "batches-00000004").glob("engine-*")} == {
        *("engine-0", "engine-1"),
    }


def test_a_definition_that_accumulates_by_itself_is_called_once_a_batch(scenarios: Path, found: dict[str, Any]) -> None:
    assert found["ByItself"] == found["Plain"]  # the same micro-batches, in its own loop
    own, plain = metrics(scenarios, "ByItself"), metrics(scenarios, "Plain")
    assert [line["loss"] for line in own] == pytest.approx([line["loss"] for line in plain])


def test_the_loader_of_deepspeed_is_taken_once_checks_are_off(found: dict[str, Any]) -> None:
    first, second = (set(rank["rows"]) for rank in found["DeepSpeedLoader"])
    assert (len(first), len(second), first & second) == (24, 24, set())
    assert (
        "got DeepSpeedDataLoader. Call context.disable_dataset_reproducibility_checks()"
        in (found["refused"]["Checked"])
    )


@pytest.mark.parametrize("name", ["DeepSpeedLoader", "TorchLoader", "Pipeline"])
def test_any_loader_and_a_pipeline_resume_to_the_same_losses(scenarios: Path, name: str) -> None:
    whole, resumed = metrics(scenarios, name), metrics(scenarios, f"{name}-resumed")
    assert len(whole) == 4
    assert resumed == whole


def test_reducers_see_all_ranks(scenarios: Path) -> None:
    assert metrics(scenarios, "Reducing") == [
        {"values": 6, "smallest": float(batch), "largest": 10.0 + batch} for batch in range(4)
    ]
    [validation] = metrics(scenarios, "Reducing", "validation")
    assert (validation["smallest"], validation["largest"]) == (100.0, 101.0)
    assert "values" not in validation


def test_a_model_parallel_unit_says_who_reads_and_who_reports(scenarios: Path, found: dict[str, Any]) -> None:
    reader, other = found["OneCopy"]
    assert (reader["iterators"], other["iterators"]) == ([True], [False])
    assert reader["rows"] == other["rows"]
    # A single shard of the data: both ranks' rows of the data-parallel run, interleaved.
    plain = [rank["rows"] for rank in found["Plain"]]
    assert reader["rows"] == [row for pair in zip(*plain, strict=True) for row in pair][:24]
    [validation] = metrics(scenarios, "OneCopy", "validation")
    assert validation["mean"] == pytest.approx(7 / 15, rel=1e-6)


def test_a_pipeline_trains_whole_batches_and_takes_its_data_by_itself(scenarios: Path, found: dict[str, Any]) -> None:
    for rank in found["Pipeline"]:
        assert rank["calls"] == [[0, 0], [0, 1], [0, 2], [0, 3], [-1, 0], [-1, 1]]
        assert rank["steps"] == [4]
    assert [line["records"] for line in lines(scenarios / "Pipeline" / "metrics.jsonl")] == [6, 12, 18, 24, 24]
    assert {*metrics(scenarios, "Pipeline", "validation")[0]} == {"loss"}


def test_callbacks_are_called_and_one_rank_ends_the_training(scenarios: Path, found: dict[str, Any]) -> None:
    for rank in found["Watched"]:
        first, second = rank["called"]
        assert first == [
            ["startup", 0, None], ["workload", ["loss"], 3], ["workload", ["loss"], 3],
            ["written", "batches-00000002"], ["shutdown"],
        ]  # fmt: skip
        assert second == [
            ["startup", 2, "batches-00000002"], ["workload", ["loss"], 3], ["workload", ["loss"], 3],
            ["outputs", True], ["written", "batches-00000004"], ["shutdown"],
        ]  # fmt: skip
        assert rank["restored"] == [[], ["state"]]
    [validation] = metrics(scenarios, "Watched", "validation")
    assert validation["added"] == 1.0


def test_ranks_exchange_objects(found: dict[str, Any]) -> None:
    first, second = found["Watched"]
    assert (first["gather"], second["gather"]) == ([[0, 1], [0, 1]], [None, None])
    assert first["allgather"] == second["allgather"] == [[0, 1], [0, 1]]
    assert first["broadcast"] == second["broadcast"] == [0, 0]


def test_a_batch_that_ends_within_an_accumulation_is_refused(found: dict[str, Any]) -> None:
    assert "has trained on 1 micro-batches after 1 batches of 3" in found["refused"]["Halves"]
    assert "after disable_auto_grad_accumulation()" in found["refused"]["Halves"]


def test_what_cannot_train_is_refused_with_the_reason(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "has 2 batches on a rank, and a pipeline takes 3 of them at once" in refused["ShortPipeline"]
    assert "share one model parallelism" in refused["TwoTopologies"]
    assert "call context.wrap_model_engine" in refused["NoEngine"]
    assert "offload_param is for ZeRO 3, not 1: only there are parameters partitioned" in refused["Plain"]
