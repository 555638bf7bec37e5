"""The ``autotuning`` section as DeepSpeed's own tuner reads it: single values are kept, numbers of GPUs compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

import optuna_dsat
from optuna_dsat.launch.devices import Device, Devices
from optuna_dsat.tuning import autotuning, devices
from optuna_dsat.tuning.given import Given
from optuna_dsat.tuning.options import AutotuningOptions
from optuna_dsat.tuning.prepare import prepare, prepare_each
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, Run, bench, run_here
from tests.harness.landscapes import GIB

__all__ = ["bench", "run_here"]


def write(bench: EntryPointBench, *, section: dict[str, Any], zero: dict[str, Any] | None = None) -> None:
    config = {**DS_CONFIG, "zero_optimization": zero or {"stage": 2}, "autotuning": section}
    (bench.folder / "ds.json").write_text(json.dumps(config))


def given(**values: Any) -> Given:
    return Given(
        options=AutotuningOptions(script="train.py", ds_config="ds.json", **values),
        origins=dict.fromkeys(values, "argument"),
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Devices(
        kind="cuda",
        devices=tuple(Device(index=at, visible_id=str(at), name="GPU", memory_bytes=24 * GIB) for at in range(2)),
        host_memory_bytes=64 * GIB,
    )
    monkeypatch.setattr(autotuning, "detect_devices", lambda: found)
    monkeypatch.setattr(devices, "detect_devices", lambda: found)


def test_tune_keeps_what_the_config_gives_one_value(bench: EntryPointBench) -> None:
    zero = {"stage": 0, "overlap_comm": True, "reduce_bucket_size": [5e7, 5e8], "offload_optimizer": {"device": "cpu"}}
    write(bench, section={"enabled": True}, zero=zero)
    found = prepare(None, given(cpu_ranks=2))
    assert found.request.spec.zero_stages == (0,)
    assert found.request.spec.no_tune == ("offload_optimizer", "overlap_comm")
    (note,) = [note for note in found.notes if "Kept as your config says" in note]
    assert "zero_stage 0" in note
    assert "reduce_bucket_size" not in note


def test_an_option_wins_over_a_single_value(bench: EntryPointBench) -> None:
    write(bench, section={"enabled": True}, zero={"stage": 2, "overlap_comm": True})
    spec = prepare(None, given(cpu_ranks=2, zero_stages=(1, 3), fix={"overlap_comm": False})).request.spec
    assert (spec.zero_stages, spec.no_tune) == ((1, 3), ())


@pytest.mark.parametrize(
    ("method", "section"), [("asha", {"enabled": True}), (None, {"max_train_micro_batch_size_per_gpu": 16})]
)
def test_a_named_method_and_a_config_for_no_other_tuner_search_all_stages(
    bench: EntryPointBench, method: str | None, section: dict[str, Any]
) -> None:
    write(bench, section=section)
    assert prepare(method, given(cpu_ranks=2)).request.spec.zero_stages == (1, 2, 3)


@pytest.mark.usefixtures("two_gpus")
def test_a_list_of_numbers_of_gpus_is_a_search_at_each(bench: EntryPointBench) -> None:
    write(bench, section={"num_gpus": [2, 1, 8]})
    studies = prepare_each(None, given())
    specs = [one.request.spec for one in studies]
    assert [(spec.name, spec.slots_per_trial) for spec in specs] == [("train-asha-1gpu", 1), ("train-asha-2gpu", 2)]
    assert "autotuning.num_gpus 8 is not used: this machine offers 2 GPUs." in studies[0].notes
    (only,) = prepare_each(None, given(gpus_per_trial=2))
    assert only.request.spec.name == "train-asha"


@pytest.mark.usefixtures("two_gpus")
def test_the_results_of_all_numbers_stand_in_one_table(bench: EntryPointBench, run_here: Run) -> None:
    write(bench, section={"num_gpus": [1, 2], "tuner_num_trials": 2})
    options = ("tune", "train.py", "ds.json", "--metric", "throughput", "--confirm", "0", "--quiet")
    done = run_here(*options)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("By number of GPUs") :]
    rows = [line for line in table.splitlines() if "train-asha-" in line and "│" in line]
    assert len(rows) == 2
    in_all, per_gpu = (float(rows[1].split("│")[column]) for column in (2, 3))
    assert in_all == pytest.approx(2 * per_gpu, rel=1e-3)
    assert "Most samples/s in all: train-asha-2gpu" in table
    again = json.loads(run_here(*options, "--json").stdout)
    assert again["study"] == "train-asha-2gpu"
    assert set(again["by_gpus"]) == {"1", "2"}


@pytest.mark.usefixtures("two_gpus")
def test_the_function_returns_the_best_with_all(bench: EntryPointBench) -> None:
    write(bench, section={"num_gpus": [1, 2]})
    result = optuna_dsat.tune("train.py", "ds.json", metric="throughput", max_trials=2, confirm=0, quiet=True)
    assert result.study == "train-asha-2gpu"
    assert {gpus: one.study for gpus, one in result.by_gpus.items()} == {1: "train-asha-1gpu", 2: "train-asha-2gpu"}
