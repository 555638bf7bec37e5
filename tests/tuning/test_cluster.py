"""Options on a cluster become a spec, and what they cannot mean is refused before the cluster is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.places.engine import ClusterError
from optuna_dsat.study.spec import StudySpec, make_spec
from optuna_dsat.tuning import cluster
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import RandomOptions
from optuna_dsat.tuning.prepare import prepare


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[StudySpec]:
    """Return the specs that the cluster was asked for; it grants everything."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass\n")
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    result: list[StudySpec] = []
    monkeypatch.setattr(cluster, "check_cluster", result.append)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return result


def spec_of(*, given: tuple[str, ...] = (), **options: Any) -> StudySpec:
    made = RandomOptions("train.py", "ds.json", **{"on": "slurm", **options})
    origins = dict.fromkeys([*options, *given], "command line")
    return prepare("random", Given(options=made, origins=origins)).request.spec


def test_nodes_and_gpus_make_the_ranks_of_a_trial(asked: list[StudySpec]) -> None:
    spec = spec_of(nodes_per_trial=2, gpus_per_node=8, slurm_arg=["--partition=a100"], queue_timeout=60.0)
    assert (spec.device, spec.slots_per_trial, spec.slots_per_node) == ("cuda", 16, 8)
    assert (spec.slurm_arg, spec.queue_timeout, spec.idle_release) == (("--partition=a100",), 60.0, 300.0)
    assert spec.device_memory_bytes is None
    assert asked == [spec]


def test_ranks_on_the_cpu_ask_for_no_gpu(asked: list[StudySpec]) -> None:
    spec = spec_of(nodes_per_trial=2, cpu_ranks=3)
    assert (spec.device, spec.slots_per_trial, spec.gpus_per_node) == ("cpu", 6, 0)
    assert len(asked) == 1


@pytest.mark.parametrize(("options", "most"), [({}, 1), ({"max_concurrent_trials": 4}, 4)])
def test_more_places_than_one_are_asked_for(asked: list[StudySpec], options: dict[str, Any], most: int) -> None:
    assert spec_of(cpu_ranks=1, **options).max_concurrent_trials == most
    assert asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of them"),
        ({"cpu_ranks": 1, "gpus_per_node": 1}, "not both"),
        ({"gpus_per_trial": 4}, "--gpus-per-trial is for this machine"),
        ({"gpus_per_node": 0}, "at least 1"),
        ({"on": "here", "nodes_per_trial": 2, "cpu_ranks": 2}, "say which by --on"),
    ],
)
def test_what_cannot_be_meant_is_refused_unasked(asked: list[StudySpec], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(**options)
    assert not asked


def test_a_stored_study_needs_no_options(asked: list[StudySpec]) -> None:
    spec = spec_of(nodes_per_trial=2, gpus_per_node=4)
    devices = cluster.devices_of(spec)
    assert (devices.kind, len(devices.devices)) == ("cuda", 8)
    assert {device.name for device in devices.devices} == {"slurm"}
    old = make_spec(**spec.model_dump(exclude={"on", "slurm_arg", "gpus_per_node", "nodes_per_trial"}))
    assert (old.on, old.nodes_per_trial) == ("here", 1)
    assert asked


def test_a_cluster_without_its_commands_is_an_input_error(
    monkeypatch: pytest.MonkeyPatch, asked: list[StudySpec]
) -> None:
    spec = spec_of(cpu_ranks=1)
    assert asked == [spec]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ClusterError, match="srun was not found"):
        cluster.check_cluster(spec)
    assert ClusterError.exit_code == 2
