"""The exported config: its differences to the user's, scaled steps, and what trainers take."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.ds_config import batch_overlay, flatten
from optuna_dsat.runtime.overlay import over_command
from optuna_dsat.script.batch_rule import BatchRule
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.config_changes import (
    Change,
    changes_in_words,
    config_changes,
    core_binding_in_words,
    model_change_in_words,
    ready_config,
)
from optuna_dsat.study.profile.script import follow_batch
from optuna_dsat.study.requests import full_request, launch_request
from optuna_dsat.study.result import learning_rate_advice
from optuna_dsat.study.spec import make_spec
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench

OWN: dict[str, Any] = {
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "sub_group_size": 7},
}
BEST: dict[str, Any] = {
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_param": None, "sub_group_size": 7},
}


def test_an_optimizer_on_the_host_may_gain_from_bound_cores() -> None:
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert "--only bind_cores" in core_binding_in_words(offloaded, ranks=2)
    bound = {**offloaded, "optuna_dsat": {"bind_cores": True}}
    assert core_binding_in_words(bound, ranks=2) == model_change_in_words(bound, bound) == ""
    assert "deepspeed --bind_cores_to_rank" in model_change_in_words(bound, offloaded)
    assert over_command({}, bound) == {"optuna_dsat": {"bind_cores": True}}
    assert over_command({"optuna_dsat": {"bind_cores": False}}, bound) == {"optuna_dsat": {"bind_cores": False}}
    assert core_binding_in_words(offloaded, ranks=1) == core_binding_in_words(BEST, ranks=2) == ""


def test_each_key_is_kept_changed_added_or_dropped() -> None:
    changes = config_changes(OWN, BEST)
    assert changes == (
        Change(key="zero_optimization.offload_param.device", own='"cpu"', best=""),
        Change(key="zero_optimization.overlap_comm", own="", best="true"),
        Change(key="zero_optimization.stage", own="3", best="1"),
    )
    assert changes_in_words(changes) == (
        "Changed from your config: zero_optimization.stage 3 -> 1. Added: zero_optimization.overlap_comm true. "
        'Dropped: zero_optimization.offload_param.device "cpu".'
    )
    assert changes_in_words(config_changes(OWN, OWN)) == ""
    without = config_changes({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, {**BEST})
    assert "offload_optimizer" in str(without), "every key is in the data"
    assert "offload_optimizer" not in changes_in_words(without)
    assert config_changes({}, {"zero_optimization": {"stage": 0}}) == ()  # the exported config names the stage


def test_a_result_accounts_for_every_key_of_the_users_config(bench: StudyBench) -> None:
    spec = bench.spec(max_trials=4, confirm=0, zero_stages=(1,))
    zero = {"stage": 2, "allgather_bucket_size": 300_000, "sub_group_size": 9, "offload_param": {"device": "none"}}
    config = {**spec.ds_config, "gradient_clipping": 0.5, "zero_optimization": zero}
    result = bench.run(spec.model_copy(update={"ds_config": config}), Hill())
    assert result.config["zero_optimization"]["allgather_bucket_size"] == 300_000
    assert result.config["gradient_clipping"] == 0.5
    changed = {change.key: (change.own, change.best) for change in result.changes}
    assert changed["zero_optimization.stage"] == ("2", "1")
    after = flatten(result.config)
    assert {key for key, value in flatten(config).items() if after.get(key) != value} <= changed.keys()
    written = {*after, "train_batch_size"}  # which both configs leave to DeepSpeed
    assert all(result_value == "" for key, (_, result_value) in changed.items() if key not in written)


TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
COMPLETE = {"zero_optimization": {"stage": 3}, TRAIN: 12, MICRO: 3, ACCUMULATION: 2}


@pytest.mark.parametrize(
    ("own", "left_out"),
    [
        ((), {TRAIN}),
        ((MICRO,), {TRAIN}),
        ((MICRO, ACCUMULATION), {TRAIN}),
        ((TRAIN,), {ACCUMULATION}),
        ((TRAIN, MICRO), {ACCUMULATION}),
        ((TRAIN, MICRO, ACCUMULATION), set()),
    ],
)
def test_two_batch_sizes_are_written_unless_the_users_config_has_all_three(
    own: tuple[str, ...], left_out: set[str]
) -> None:
    config = ready_config(COMPLETE, user=dict.fromkeys(own, 1), trainer=None)
    assert config == {key: value for key, value in COMPLETE.items() if key not in left_out}


def test_the_trainers_refusals_are_left_out_too() -> None:
    trainer = ScriptTrainer(framework="lightning", micro_batch=3, gradient_accumulation_steps=2, options={})
    config = ready_config(COMPLETE, user={MICRO: 1}, trainer=trainer)
    assert config.keys() & {TRAIN, MICRO, ACCUMULATION} == {MICRO}


def test_training_by_the_tuner_leaves_the_global_batch_to_deepspeed_as_its_launches_do() -> None:
    script: dict[str, Any] = {"script": "train.py", "args": (), "cwd": "/project", "config_path": ""}
    spec = make_spec(
        name="s", method="random", script=script, ds_config={}, device="cpu", slots_per_trial=2, output_dir="o"
    )
    request = full_request(spec, config=COMPLETE, overlay={})
    assert request.ds_config == {key: value for key, value in COMPLETE.items() if key != TRAIN}


def test_a_global_batch_that_the_script_may_read_from_its_file_stays_there() -> None:
    script: dict[str, Any] = {"script": "train.py", "args": (), "cwd": "/project", "config_path": "/project/ds.json"}
    spec = make_spec(
        name="s", method="random", script=script, ds_config={TRAIN: 8}, device="cpu", slots_per_trial=2, output_dir="o"
    )
    request = launch_request(spec, launch_id="l", purpose="trial", overlay=batch_overlay(3, 5))
    assert request.ds_config == {TRAIN: 30, MICRO: 3, ACCUMULATION: 5}
    assert request.overlay[TRAIN] is None, "DeepSpeed completes it"
    followed = follow_batch(spec, BatchRule(kind="loader", own=6), ranks=2)
    assert followed.ds_config == {TRAIN: 12, MICRO: 6, ACCUMULATION: 1}


def test_a_script_that_fills_in_auto_itself_finds_it_in_its_file_until_its_values_are_known() -> None:
    """It had a number of the launch in its place: a micro-batch of 1, stated as the user's, and no global batch."""
    script: dict[str, Any] = {"script": "train.py", "args": (), "cwd": "/project", "config_path": "/project/ds.json"}
    config = {TRAIN: "auto", MICRO: "auto", ACCUMULATION: 2}
    spec = make_spec(
        name="s", method="random", script=script, ds_config=config, device="cpu", slots_per_trial=2, output_dir="o"
    )
    profile, trial = (
        launch_request(spec, launch_id="l", purpose=purpose, overlay=batch_overlay(3, 5))
        for purpose in ("profile", "trial")
    )
    assert profile.ds_config == trial.ds_config == {MICRO: 3, ACCUMULATION: 5}
    assert ([*profile.in_file], [*trial.in_file]) == ([TRAIN, MICRO], [TRAIN])
    followed = follow_batch(spec, BatchRule(kind="option", own=6, option="--bs"), ranks=2)
    assert followed.ds_config == {TRAIN: "auto", MICRO: 6, ACCUMULATION: 2}
    assert full_request(followed, config=COMPLETE, overlay={}).in_file == {TRAIN: "auto"}


@pytest.mark.parametrize(("own", "keeps", "in_file"), [(8, True, {MICRO: 1}), (8, False, {}), (1, True, {})])
def test_a_micro_batch_that_a_script_has_in_its_file_but_does_not_feed_stays_there(
    own: int, keeps: bool, in_file: dict[str, int]
) -> None:
    """A script may require that it is 1, and take its batch size from elsewhere."""
    script: dict[str, Any] = {"script": "train.py", "args": (), "cwd": "/project", "config_path": "/project/ds.json"}
    spec = make_spec(
        name="s", method="random", script=script, ds_config={MICRO: 1}, device="cpu", slots_per_trial=2, output_dir="o"
    )
    rule = BatchRule(kind="setting", own=own, file="run.yaml", key="batch", keeps_file=keeps)
    followed = follow_batch(spec, rule, ranks=2)
    request = launch_request(followed, launch_id="l", purpose="trial", overlay=batch_overlay(16, 1))
    assert (request.in_file, request.ds_config[MICRO], request.overlay[MICRO]) == (in_file, 16, 16)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 500}}},
            ("params.warmup_num_steps from 5 to 1", "params.total_num_steps from 500 to 125"),
        ),
        ({"scheduler": {"params": {"cycle_first_step_size": 40}}}, ("cycle_first_step_size from 40 to 10",)),
        ({"scheduler": {"params": {"lr_range_test_step_size": 200}}}, ("lr_range_test_step_size from 200 to 50",)),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}}, ("freeze_step from 400 to 100",)),
        (  # the default of warm-up, and a float
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1e4}}},
            ("total_num_steps from 10,000 to 2,500, scheduler.params.warmup_num_steps from 1,000 to 250",),
        ),
        (  # what the Trainer computes is not scaled
            {"scheduler": {"params": {"total_num_steps": "auto"}}, "steps_per_print": 10},
            ("A learning-rate schedule that the script counts in steps covers 4 times as many samples.",),
        ),
    ],
)
def test_numbers_of_steps_are_scaled_with_the_batch(config: dict[str, Any], expected: tuple[str, ...]) -> None:
    advice = str(learning_rate_advice(config, batch=16, user_batch=4))
    assert all(text in advice for text in expected)
    assert ("are counted in steps" in advice) == (" from " in expected[0])


def test_numbers_of_steps_in_options_are_scaled_with_the_batch() -> None:
    args = ["--max_train_steps", "800", "--lr-warmup-iters=40", "--save_steps", "80", "--num_train_timesteps", "80"]
    args += ["--max_eval_steps", "80", "--gradient_accumulation_steps", "4", "--num_train_epochs", "8"]
    advice = str(learning_rate_advice({}, batch=16, user_batch=4, args=args))
    assert "change --max_train_steps from 800 to 200, --lr-warmup-iters from 40 to 10. Keep" in advice
