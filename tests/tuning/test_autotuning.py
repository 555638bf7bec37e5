"""The ``autotuning`` section as DeepSpeed's own tuner reads it: options, single values, numbers of GPUs compared."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import optuna_dsat
from optuna_dsat.cli.show import show_by_gpus
from optuna_dsat.config import user_file
from optuna_dsat.config.autotuning_section import parse_autotuning
from optuna_dsat.errors import DsatError
from optuna_dsat.launch.machine.devices import Device, Devices
from optuna_dsat.store import Store
from optuna_dsat.study.options.methods import default_stages
from optuna_dsat.study.stored import record_of
from optuna_dsat.tuning import spec_builder
from optuna_dsat.tuning.options import autotuning
from optuna_dsat.tuning.options.autotuning import options_of
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import AutotuningOptions, RandomOptions
from optuna_dsat.tuning.prepare import prepare, prepare_each
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, Run, bench, run_here
from tests.harness.landscapes import GIB, Hill
from tests.harness.simulated import SimulatedResult

__all__ = ["bench", "run_here"]


def options(**section: Any) -> tuple[dict[str, Any], list[str]]:
    return options_of(parse_autotuning({"autotuning": section}))


def test_what_deepspeed_asks_for_becomes_our_options() -> None:
    result, notes = options(
        enabled=True, start_step=4, end_step=9, metric="FLOPS ", tuner_type=" random", tuner_num_trials=7,
        tuner_early_stopping=3, num_gpus=[1, 2], num_nodes=1, mp_size=1, fast=False,
        arg_mappings={"train_micro_batch_size_per_gpu": "--batch"}, max_train_batch_size=64,
    )  # fmt: skip
    assert result == {
        "start_profile_step": 4, "end_profile_step": 9, "metric": "FLOPS_per_gpu", "method": "random",
        "max_trials": 7, "early_stopping": 3, "gpus_per_trial": 2,
    }  # fmt: skip
    assert notes == []


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"results_dir": "r"}, "results_dir"),
        ({"model_info": {"profile": True}}, "model_info"),
        ({"num_tuning_micro_batch_sizes": 3}, "num_tuning_micro_batch_sizes"),
        ({"metric": "speed"}, "metric"),
        ({"tuner_type": "genetic"}, "tuner_type"),
        ({"tuner_type": "gridsearch"}, "tuner_type 'gridsearch' is not available: "),
        ({"num_nodes": 2}, "num_nodes"),
        ({"mp_size": 2}, "mp_size"),
        ({"enabled": False}, "enabled"),
        ({"turbo": 1}, "turbo"),
    ],
)
def test_what_cannot_be_honoured_is_named(section: dict[str, Any], named: str) -> None:
    _, notes = options(**section)
    assert len(notes) == 1
    assert named in notes[0]


def test_misspelt_keys_and_types_of_the_config_are_named(bench: EntryPointBench) -> None:
    misspelt = {"zero_optimisation": {"stage": 3}, "scheduler": {"type": "WarmpLR"}}
    (bench.folder / "ds.json").write_text(json.dumps({**DS_CONFIG, **misspelt}))
    given = Given(options=RandomOptions(script="train.py", ds_config="ds.json", cpu_ranks=2), origins={})
    assert prepare("random", given).notes[:2] == [
        "DeepSpeed has no key 'zero_optimisation'; 'zero_optimization' is probably meant.",
        "DeepSpeed has no scheduler 'WarmpLR'; 'WarmupLR' is probably meant.",
    ]


def test_variables_of_the_shell_that_the_script_reads_are_named(
    bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIZE", "big")
    monkeypatch.setenv("MODE", "fast")
    monkeypatch.setenv("SET", "by the script")
    monkeypatch.setenv("BIG", "a value, not a key")
    monkeypatch.setenv("HF_TOKEN", "hf_QkZrTnWvXyBcDfGhJkLmNpQrStVwXyZa")
    (bench.folder / "train.py").write_text(
        "import os\nos.environ['SIZE'], os.getenv('MODE'), os.environ['LOCAL_RANK'], os.environ['HF_TOKEN']\n"
        "os.environ['SET'] = '1'\nis_big = os.environ['SIZE'] == 'BIG'\n"
    )
    options = RandomOptions(script="train.py", ds_config="ds.json", cpu_ranks=2, env={"MODE": "slow"})
    (note,) = (note for note in prepare("random", Given(options=options, origins={})).notes if "environment" in note)
    assert note.startswith("The script reads SIZE from this shell's environment")
    assert "--env SIZE=VALUE" in note


@pytest.mark.usefixtures("bench")
def test_all_searches_of_a_start_read_the_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=user_file.read)
    monkeypatch.setattr(user_file, "read", read)
    given = Given(options=AutotuningOptions(script="train.py", ds_config="ds.json", cpu_ranks=(1, 2)))
    assert [item.request.spec.slots_per_trial for item in prepare_each(None, given)] == [1, 2]
    read.assert_called_once_with(Path("ds.json"))


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
    result = Devices(
        kind="cuda",
        devices=tuple(Device(index=at, visible_id=str(at), name="GPU", memory_bytes=24 * GIB) for at in range(2)),
        host_memory_bytes=64 * GIB,
    )
    monkeypatch.setattr(autotuning, "detect_devices", lambda: result)
    monkeypatch.setattr(spec_builder, "detect_devices", lambda: result)


def test_tune_keeps_what_the_config_gives_one_value_unless_an_option_says_another(bench: EntryPointBench) -> None:
    zero = {"stage": 0, "overlap_comm": True, "reduce_bucket_size": [5e7, 5e8], "offload_optimizer": {"device": "cpu"}}
    write(bench, section={"enabled": True}, zero=zero)
    result = prepare(None, given(cpu_ranks=2))
    assert result.request.spec.zero_stages == (0,)
    assert result.request.spec.no_tune == ("offload_optimizer", "overlap_comm")
    (note,) = [note for note in result.notes if "Kept as your config says" in note]
    assert "zero_stage 0" in note
    assert "reduce_bucket_size" not in note
    write(bench, section={"enabled": True}, zero={"stage": 2, "overlap_comm": True})
    spec = prepare(None, given(cpu_ranks=2, zero_stages=(1, 3), fix={"overlap_comm": False})).request.spec
    assert (spec.zero_stages, spec.no_tune) == ((1, 3), ())


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ({"max_train_batch_size": 1}, {"train_batch_size": 64}, "of 64, above autotuning.max_train_batch_size 1:"),
        ({"max_train_batch_size": 1}, {"batch": "keep"}, "above autotuning.max_train_batch_size 1:"),
        ({}, {"batch": "keep", "max_train_batch_size": 3}, "above --max-train-batch-size 3:"),
        ({}, {"batch": "keep", "divisible_by": 7}, "is a multiple of 7 (--divisible-by)"),
    ],
)
def test_a_batch_of_all_launches_beyond_what_is_allowed_is_refused_before_a_launch(
    bench: EntryPointBench, section: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    write(bench, section=section)
    with pytest.raises(DsatError, match=re.escape(message)):
        prepare("guided", given(cpu_ranks=2, **options))


@pytest.mark.parametrize(
    ("method", "section"), [("asha", {"enabled": True}), (None, {"max_train_micro_batch_size_per_gpu": 16})]
)
def test_a_named_method_and_a_config_for_no_other_tuner_search_all_stages(
    bench: EntryPointBench, method: str | None, section: dict[str, Any]
) -> None:
    write(bench, section=section)
    assert prepare(method, given(cpu_ranks=2)).request.spec.zero_stages == default_stages(method or "guided")


@pytest.mark.usefixtures("two_gpus")
def test_a_list_of_numbers_of_gpus_is_a_search_at_each(bench: EntryPointBench) -> None:
    write(bench, section={"num_gpus": [2, 1, 8]})
    studies = prepare_each(None, given())
    specs = [study.request.spec for study in studies]
    assert [(spec.name, spec.slots_per_trial) for spec in specs] == [("train-guided-1gpu", 1), ("train-guided-2gpu", 2)]
    assert "autotuning.num_gpus 8 is not used: this machine offers 2 GPUs." in studies[0].notes
    (only,) = prepare_each(None, given(gpus_per_trial=2))
    assert only.request.spec.name == "train-guided"


@pytest.mark.usefixtures("two_gpus")
def test_an_option_with_several_numbers_is_a_search_at_each(bench: EntryPointBench) -> None:
    write(bench, section={"num_gpus": [1, 2]})
    specs = [item.request.spec for item in prepare_each("random", given(gpus_per_trial=(2, 1), study="mine"))]
    assert [(spec.name, spec.slots_per_trial) for spec in specs] == [("mine-1gpu", 1), ("mine-2gpu", 2)]
    (only,) = prepare_each("random", given(gpus_per_trial=[2]))
    assert (only.request.spec.name, only.request.spec.slots_per_trial) == ("train-random", 2)
    ranks = [item.request.spec for item in prepare_each("random", given(cpu_ranks=[1, 2, 4]))]
    assert [(spec.name, spec.device) for spec in ranks] == [(f"train-random-{n}rank", "cpu") for n in (1, 2, 4)]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpus-per-trial", "1", "2", "4"), "--gpus-per-trial is 4, but this machine offers 2 GPUs"),
        (("--gpus-per-trial", "1,x"), "--gpus-per-trial is '1,x'; write a number such as 8, or several"),
        (("--gpus-per-trial", "1", "2", "--cpu-ranks", "2"), "exclude each other"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_its_first_search(
    bench: EntryPointBench, run_here: Run, options: tuple[str, ...], words: str
) -> None:
    done = run_here("random", "train.py", "ds.json", *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (bench.folder / "optuna-dsat.db").exists()


@pytest.mark.usefixtures("bench", "two_gpus")
def test_a_sweep_shows_how_samples_grow_and_repeats_nothing_when_typed_again(run_here: Run) -> None:
    sweep = "random train.py ds.json --gpus-per-trial 1 2 --max-trials 2 --metric throughput --confirm 0 --quiet"
    options = shlex.split(sweep)
    done = run_here(*options)
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if "train-random-" in line and "│" in line]
    assert [row[0].strip() for row in rows] == ["1", "2"]
    assert rows[0][3].strip() == "100%"
    share = float(rows[1][2]) / float(rows[0][2])
    assert rows[1][3].strip() == f"{share:.0%}"
    assert "Side by side: optuna-dsat report train-random-1gpu train-random-2gpu" in done.stdout
    again = json.loads(run_here(*options, "--json").stdout)
    assert sum(again["launches"].values()) <= 3  # the profile, and two trials: those of the first run
    assert [item["gpus"] for item in again["scaling"]] == [1, 2]
    assert again["scaling"][1]["share_of_linear"] == pytest.approx(share, rel=1e-3)
    quick: dict[str, Any] = {"metric": "throughput", "max_trials": 2, "confirm": 0, "quiet": True}
    result = optuna_dsat.tune("train.py", "ds.json", method="random", gpus_per_trial=[1, 2], **quick)
    assert (result.study, sum(result.launches.values())) == ("train-random-2gpu", sum(again["launches"].values()))
    assert {gpus: item.study for gpus, item in result.by_gpus.items()} == {
        count: f"train-random-{count}gpu" for count in (1, 2)
    }


@pytest.mark.parametrize(("most", "is_explained"), [(190.0, False), (8084.0, True)])
def test_scaling_far_above_linear_is_explained(
    most: float, is_explained: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {1: 0.0, 2: 100.0, 4: most}
    rows: Any = [
        Mock(gpus=gpus, samples_per_s=rate or None, samples_per_s_per_gpu=rate / gpus or None, run=None, result=None)
        for gpus, rate in rates.items()
    ]
    show_by_gpus(rows, best=Mock(study="best", command="train"))
    assert (
        "with 2 GPUs the search found no config that is as fast per GPU." in capsys.readouterr().out
    ) == is_explained


class Interrupted(Hill):
    """Ctrl-C at the second launch on two devices; what was run on how many is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        self.at.append(slots)
        if self.at.count(2) == 2 and len(self.at) == self.at.index(2) + 2:
            raise KeyboardInterrupt
        return super().run(ds_config, slots)


@pytest.mark.usefixtures("two_gpus")
def test_an_interrupted_sweep_goes_on_and_runs_nothing_twice(bench: EntryPointBench, run_here: Run) -> None:
    bench.landscape = landscape = Interrupted()
    sweep = ("random", "train.py", "ds.json", "--gpus-per-trial", "1", "2", "--max-trials", "3", "--confirm", "0")
    done = run_here(*sweep)
    assert done.returncode == 130, done.stderr
    assert "Of this sweep train-random-2gpu are left: type the same command again." in done.stderr
    before = launched(bench, "train-random-1gpu")
    assert len([item for item in before if item.startswith("trial")]) == 3
    count = landscape.at.count(1)
    done = run_here(*sweep)
    assert done.returncode == 0, done.stderr
    assert launched(bench, "train-random-1gpu") == before
    assert landscape.at.count(1) == count, "nothing of the finished search is launched"
    after = [item for item in launched(bench, "train-random-2gpu") if item.startswith("trial")]
    assert len(after) == 3, "the one that was measured before, the one that was cut, and a third"


def launched(bench: EntryPointBench, study: str) -> list[str]:
    with Store.open(f"sqlite:///{bench.folder / 'optuna-dsat.db'}", create=False) as store:
        record = record_of(store, study)
        return sorted(row.report.launch_id for row in store.launches(record.uuid))


@pytest.fixture
def any_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optuna_dsat.tuning.cluster.check_cluster", lambda _: None)


@pytest.mark.usefixtures("any_cluster")
def test_nodes_and_gpus_of_the_section_are_those_of_a_cluster(bench: EntryPointBench) -> None:
    write(bench, section={"num_nodes": 2, "num_gpus": 4})
    (only,) = prepare_each("random", given(on="slurm"))
    spec = only.request.spec
    assert (spec.nodes_per_trial, spec.slots_per_node, spec.slots_per_trial, spec.name) == (2, 4, 8, "train-random")
    assert not [note for note in only.notes if "num_nodes" in note or "num_gpus" in note]
    (own,) = prepare_each("random", given(on="ray", nodes_per_trial=3, gpus_per_node=1))
    assert (own.request.spec.nodes_per_trial, own.request.spec.slots_per_node) == (3, 1)
    (ranks,) = prepare_each("random", given(on="ray", cpu_ranks=2))
    assert (ranks.request.spec.nodes_per_trial, ranks.request.spec.slots_per_node) == (2, 2)


@pytest.mark.usefixtures("any_cluster")
@pytest.mark.parametrize(
    ("section", "studies"),
    [
        ({"num_nodes": 2, "num_gpus": [8, 4]}, [("train-random-2x4gpu", 2, 8), ("train-random-2x8gpu", 2, 16)]),
        ({"num_nodes": [4, 2], "num_gpus": 8}, [("train-random-2node", 2, 16), ("train-random-4node", 4, 32)]),
        ({"num_nodes": [1, 2], "num_gpus": [1, 2]}, [("train-random-2x1gpu", 2, 2), ("train-random-2x2gpu", 2, 4)]),
    ],
)
def test_lists_of_the_section_are_searches_at_each_on_a_cluster_too(
    bench: EntryPointBench, section: dict[str, Any], studies: list[tuple[str, int, int]]
) -> None:
    write(bench, section=section)
    result = prepare_each("random", given(on="slurm"))
    specs = [item.request.spec for item in result]
    assert [(spec.name, spec.nodes_per_trial, spec.slots_per_trial) for spec in specs] == studies
    unused = [note for note in result[0].notes if "num_nodes" in note]
    assert len(unused) == (section["num_nodes"] == [1, 2])
