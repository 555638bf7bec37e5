from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.ds_config import BatchTriangle
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.plan.from_script import plan_script
from optuna_dsat.study.profile.script import stated_batch, user_config
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudySpec, parse_bytes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench, spec_of


def spec(**changes: Any) -> StudySpec:
    return spec_of(Path("/w"), **changes)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 * 2**30),
        ("900 MiB", 900 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("4G", 2**32),
        ("900mib", 900 * 2**20),
        ("1048577", 2**20 + 1),
    ],
)
def test_sizes_are_read_with_their_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1GiB", "2 parsecs", "0", "2"])
def test_what_is_not_a_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "speed"}, "--metric is 'speed'; it must be one of FLOPS_per_gpu"),
        ({"method": "grid"}, "the method is 'grid'"),
        ({"zero_stages": (1, 7)}, "stages are 0, 1, 2 and 3"),
        ({"start_profile_step": 9}, "--end-profile-step is 5, before --start-profile-step 9"),
        ({"max_trials": 0}, "--max-trials is 0"),
        ({"max_slots": 1}, "--max-slots is 1, but one launch takes 2"),
        ({"options": {"divisor": 1}}, "--divisor is 1"),
        ({"name": "../escape"}, "--study is '../escape'"),
        ({"name": "-x"}, "--study is '-x'"),
        ({"name": ""}, "--study is ''; it names a folder"),
        ({"name": "あ" * 81}, "at most 240 bytes"),
    ],
)
def test_a_bad_value_is_one_line_with_rule_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_spec_survives_its_json() -> None:
    made = spec(options={"early_stopping": 3}, fix={"overlap_comm": True})
    assert StudySpec.model_validate_json(made.model_dump_json()) == made


def test_a_spec_is_stored_as_older_versions_read_it() -> None:
    several = ("zero_stages", "no_tune", "writable", "slurm_arg", "ray_node")
    empty = spec(**dict.fromkeys([*several, "fix", "gpus_per_node", "nvme_path"]))
    assert empty == spec()
    stored = empty.stored()
    assert {name: stored[name] for name in several} == {
        **{name: [] for name in several},
        "zero_stages": [1, 2, 3],
    }
    assert (stored["fix"], stored["gpus_per_node"], stored["nvme_path"]) == ({}, 0, None)
    assert {"timeout_s", "trial_timeout_s", "stall_timeout_s", "queue_timeout_s", "confirm_time_s"} < stored.keys()
    assert {"wait_for_gpus_s", "idle_release_s"} < stored.keys()
    assert StudySpec.model_validate(stored) == empty


def test_identity_ignores_budgets_and_keeps_what_makes_results_comparable() -> None:
    identity = spec().identity()
    assert identity == spec(max_trials=5, output_dir="/elsewhere").identity()
    assert identity == spec(stall_timeout_s=1800.0).identity()
    assert identity != spec(zero_stages=(1,)).identity()
    free, given = (spec(device_memory_bytes=2**30, free_memory=free).identity() for free in (True, False))
    assert free == spec(device_memory_bytes=2**31, free_memory=True).identity()
    assert {key: free[key] for key in free if free[key] != given[key]} == {"device_memory_bytes": "free"}


def test_the_metric_knows_its_direction() -> None:
    assert spec().direction == "maximize"
    assert spec(metric="latency").direction == "minimize"


class Noting(SimulatedLauncher):
    """Notes what it is asked to launch."""

    def __init__(self) -> None:
        super().__init__(Hill(), total_slots=2)
        self.asked: list[LaunchRequest] = []

    def start(self, request: LaunchRequest) -> None:
        self.asked.append(request)
        super().start(request)


def test_profile_trials_finalists_and_loss_check_have_the_limit_that_was_asked_for(bench: StudyBench) -> None:
    launcher = Noting()
    spec = bench.spec(max_trials=3, confirm=1, stall_timeout_s=77.0)
    bench.session(spec, launcher, check_loss=True).run()
    kinds = {request.launch_id.split("-")[0] for request in launcher.asked}
    assert kinds == {"profile", "trial", "confirm", "loss"}
    assert {request.stall_s for request in launcher.asked} == {77.0}


def test_the_launch_of_a_plan_has_the_limit_that_was_asked_for(bench: StudyBench) -> None:
    launcher = Noting()
    plan_script(
        bench.spec(stall_timeout_s=77.0),
        store=bench.store,
        device_names=("simulated",),
        launcher=lambda: nullcontext(launcher),
        on_attempt=lambda _: None,
        memory_margin=0.05,
    )
    assert [request.stall_s for request in launcher.asked] == [77.0] * 3


def test_the_batch_of_a_pipeline_is_no_contradiction_before_its_stages_are_known() -> None:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    pipeline = spec(ds_config=sizes, slots_per_trial=2)
    config, _ = user_config(pipeline)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (8, 2)
    assert space_of(pipeline, None).micro_batches[0] <= 8


def test_a_micro_batch_that_only_the_global_batch_gives_is_stated() -> None:
    assert stated_batch(spec(ds_config={"train_batch_size": 32}), ranks=2) == BatchTriangle(32, 16, 1)
    assert stated_batch(spec(ds_config={"train_micro_batch_size_per_gpu": "auto"}), ranks=2) is None


def test_a_global_batch_is_a_multiple_of_the_ranks_that_train_different_samples() -> None:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    assert spec(ds_config=sizes, slots_per_trial=2, max_train_batch_size=1).max_train_batch_size == 1
    with pytest.raises(UsageError, match="--train-batch-size 4 is above --max-train-batch-size 2"):
        spec(train_batch_size=4, max_train_batch_size=2)
    pipeline = spec(ds_config=sizes, slots_per_trial=2, train_batch_size=5)
    assert user_config(pipeline)[0]["train_micro_batch_size_per_gpu"] == 5
    with pytest.raises(UsageError, match=r"--train-batch-size is 5, no multiple of .* with different samples, 2"):
        spec(slots_per_trial=2, train_batch_size=5)
