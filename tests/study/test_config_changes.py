"""Differences between the exported config and the user's."""

from __future__ import annotations

from typing import Any

from optuna_dsat.config.ds_config import flatten
from optuna_dsat.study.config_changes import Change, changes_in_words, config_changes
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


def test_a_result_accounts_for_every_key_of_the_users_config(bench: StudyBench) -> None:
    spec = bench.spec(max_trials=4, confirm=0, zero_stages=(1,))
    zero = {"stage": 2, "allgather_bucket_size": 300_000, "sub_group_size": 9, "offload_param": {"device": "none"}}
    config = {**spec.ds_config, "gradient_clipping": 0.5, "zero_optimization": zero}
    result = bench.run(spec.model_copy(update={"ds_config": config}), Hill())
    assert result is not None
    assert result.config["zero_optimization"]["allgather_bucket_size"] == 300_000
    assert result.config["gradient_clipping"] == 0.5
    changed = {change.key: (change.own, change.best) for change in result.changes}
    assert changed["zero_optimization.stage"] == ("2", "1")
    after = flatten(result.config)
    assert {key for key, value in flatten(config).items() if after.get(key) != value} <= changed.keys()
    written = {*after, "train_batch_size"}  # which both configs leave to DeepSpeed
    assert all(result_value == "" for key, (_, result_value) in changed.items() if key not in written)
